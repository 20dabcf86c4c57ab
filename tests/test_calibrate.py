"""`ktconvert calibrate`: sums and counts equal those of hooks on the whole model, and llama.cpp's importance matrix."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.statistics.folder import Statistics, read_statistics
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES, open_imatrix
from ktconvert.native_quant.runtime import hot_experts
from ktconvert.pipeline.calibration.gather_statistics import LayerStatistics
from rig import calibrated, conversion, hooks
from rig.golden import FOLDER
from rig.model_server import model_server

UNITS = ("samples", "layer-000", "layer-001", "layer-002", "imatrix", "counts", "statistics")


@pytest.fixture(scope="module")
def servers() -> Any:
    return model_server()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models of the GPTQ tests, and one with an MTP block."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models")
    sources = calibrated.write_sources(folder)
    sources["MTP"] = Path(shutil.copytree(sources["deepseek_v3"], folder / "MTP"))
    tensors = load_file(sources["MTP"] / "model.safetensors")
    mtp_tensors = {
        name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if "layers.1." in name
    }
    save_file(tensors | mtp_tensors, sources["MTP"] / "model.safetensors", metadata={"format": "pt"})
    return sources


def shapes_of(model: Path) -> dict[int, tuple[int, int, int]]:
    """Return the shapes of a model's layers with experts."""
    with open_checkpoint(model) as source:
        moe = recognize(source)
        return {layer: moe.shape(layer) for layer in moe.layers}


def calibrate(servers: Any, model: Path, output: Path, dataset: Path, *more: str) -> Statistics:
    """Run calibrate and return its statistics."""
    result = servers.run(calibrated.calibrate_arguments(model, output, dataset, *more), output.with_suffix(".log"))
    assert result.returncode == 0, result.stderr
    return read_statistics(output)


def assert_equals_hooks(statistics: Statistics, model: Path, expected: dict[int, hooks.ExpertInputs]) -> None:
    """Require that the importance matrix equals the hooks' sums within float32, and the counts the router's choices.

    Sensitivities equal those of the hooks: the sums of expert outputs are rounded in a different order.
    """
    shapes = shapes_of(model)
    assert shapes.keys() == expected.keys()
    imatrix = statistics.open_imatrix("the model", shapes)
    for layer, layer_inputs in expected.items():
        chosen = np.bincount(np.concatenate(layer_inputs.chosen).reshape(-1), minlength=shapes[layer][0])
        assert statistics.counts[layer].tolist() == chosen.tolist()
        for projection in WEIGHT_NAMES:
            assert imatrix.sums[layer, projection].counts.tolist() == chosen.tolist()
            sums = layer_inputs.middle if projection == "down" else layer_inputs.inputs
            np.testing.assert_allclose(imatrix.read(layer, projection), sums, rtol=2e-7, atol=0)
    sensitivity = [expected[layer].routing / expected[layer].outputs for layer in shapes]
    np.testing.assert_allclose(statistics.document.sensitivity, sensitivity, rtol=1e-3)
    others = [layer for layer in range(len(statistics.counts)) if layer not in shapes]
    assert not statistics.counts[others].any()


@pytest.mark.parametrize(
    ("name", "hooked", "layers", "first"),
    [
        ("qwen3_moe", "qwen3_moe", 3, 0),
        ("qwen3_moe fused", "qwen3_moe fused", 3, 0),
        ("mixtral", "mixtral", 2, 0),
        ("deepseek_v3", "deepseek_v3", 2, 1),
        ("qwen3_moe FP8", "qwen3_moe decoded", 3, 0),
    ],
)
def test_sums_and_counts_equal_those_of_hooks(
    name: str, hooked: str, layers: int, first: int, models: dict[str, Path], servers: Any, tmp_path: Path
) -> None:
    """The models have names w1, w3, w2; 3-D tensors; FP8; a dense first layer; shared experts, which are excluded."""
    dataset, samples = calibrated.write_dataset(tmp_path, "texts", (300, 60, 25))
    statistics = calibrate(servers, models[name], tmp_path / "out", dataset)
    assert_equals_hooks(statistics, models[name], hooks.measure_expert_inputs(models[hooked], samples))
    data = statistics.document.data
    assert (data.samples, data.tokens) == (len(samples), sum(map(len, samples)))
    assert data.dataset == "texts.jsonl"  # no path
    assert (len(statistics.counts), min(shapes_of(models[name]))) == (layers, first)


def test_experts_without_tokens_have_no_importance(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, samples = calibrated.write_dataset(tmp_path, "few", (9,))
    statistics = calibrate(servers, models["qwen3_moe"], tmp_path / "out", dataset)
    assert_equals_hooks(statistics, models["qwen3_moe"], hooks.measure_expert_inputs(models["qwen3_moe"], samples))
    assert {0, 1} <= set(statistics.counts.flat)
    imatrix = statistics.open_imatrix("the model", shapes_of(models["qwen3_moe"]))
    for layer, expert in np.argwhere(statistics.counts == 0).tolist():
        assert imatrix.read_importance(layer, expert, "down") is None
        assert not imatrix.read(layer, "down")[expert].any()


def test_mtp_layers_are_excluded(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", (60,))
    statistics = [calibrate(servers, models[name], tmp_path / name, dataset) for name in ("deepseek_v3", "MTP")]
    assert "note: the MTP layers (layer 2) are skipped" in (tmp_path / "MTP.log").read_text()
    for name in ("imatrix.gguf", "counts.safetensors"):
        first, second = ((each.folder / name).read_bytes() for each in statistics)
        assert first[4096:] == second[4096:] and len(first) == len(second)  # the headers contain the checkpoint's hash


def test_error_for_infinite_sums_names_the_expert(tmp_path: Path) -> None:
    statistics = LayerStatistics(7)
    statistics.counter.token_counts[7] = np.ones(3, np.int64)
    statistics.importance.inputs, statistics.importance.middle = np.ones((3, 4)), np.ones((3, 2))
    statistics.importance.middle[1, 0] = 1e39  # beyond float32
    with pytest.raises(VerificationError, match=r"layer 7, expert 1: .* different --dataset"):
        statistics.write(tmp_path / "layer")
    assert not (tmp_path / "layer").exists()


def test_output_describes_model_and_data(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", (60, 25))
    output = tmp_path / "out"
    statistics = calibrate(servers, models["qwen3_moe"], output, dataset, "--json")
    events = [json.loads(line) for line in (tmp_path / "out.log").read_text().splitlines() if line.startswith("{")]
    result = [event for event in events if event["event"] == "done"]
    assert [event["unit"].removeprefix("calibrate.") for event in result] == list(UNITS)
    tokens = statistics.counts[0]
    assert result[1]["stats"]["routed_tokens"]["most"] == tokens.max()
    metadata = read_header(output / "counts.safetensors").metadata
    assert metadata["architecture"] == statistics.document.model.architecture
    assert metadata["source"] == statistics.document.model.source
    files = ["README.md", "counts.safetensors", "imatrix.gguf", "manifest.json", "statistics.json"]
    assert conversion.names(output) == files
    assert f"| 0 | {tokens.min()} |" in (output / "README.md").read_text()
    command = calibrated.calibrate_arguments(models["qwen3_moe"], output, dataset)
    again = servers.run(command, tmp_path / "again")
    assert again.returncode == 0 and "nothing to do" in again.stderr
    other = servers.run([*command, "--seed", "1"], tmp_path / "other")
    assert other.returncode == 7 and "--seed was 42, is 1" in other.stderr


def test_dry_run_reports_sizes(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    """`calibrate --dry-run` reports files, disk space during the run, and memory, and writes nothing."""
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", (60,))
    command = calibrated.calibrate_arguments(models["mixtral"], tmp_path / "out", dataset, "--dry-run", "--json")
    result = servers.run(command, tmp_path / "log")
    assert result.returncode == 0, result.stderr
    plan = json.loads(next(line for line in result.stderr.splitlines() if line.startswith("{")))
    units = {unit["unit"].removeprefix("calibrate."): unit for unit in plan["units"]}
    assert units["imatrix"]["bytes_out"] == 2 * 4 * 8 * (3 * 128 + 3)
    assert units["counts"]["bytes_out"] == 2 * 8 * 8
    assert plan["disk"]["of files that exist only meanwhile"] == 4 * 2 * 128 * 128 * calibrated.MAX_LENGTH
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("command", [("calibrate",), ("cpu", "--scale", "gptq"), ("gpu",)])
def test_samples_are_cut_at_the_context(command: tuple[str, ...], servers: Any, tmp_path: Path, example: Path) -> None:
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", (60,))
    name, *options = command
    words = [name, example, tmp_path / "out", *options, "--dataset", dataset, "--sequence-length", 99999, "--force-cpu"]
    result = servers.run([*words, "--dry-run", "-v"], tmp_path / "log")
    assert result.returncode == 0, result.stderr
    note = "samples are cut at 1024 tokens, the context of the model (max_position_embeddings), not at 99999"
    assert note in result.stderr


def test_a_data_set_with_hardly_any_text_gives_a_warning(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    for kind, rows in (("warning", 2), ("note", 80)):
        dataset = tmp_path / f"{kind}.jsonl"
        dataset.write_text((json.dumps({"text": "import os" * 9}) + "\n") * rows)
        words = ["calibrate", models["qwen3_moe"], tmp_path / kind, "--dataset", dataset, "--force-cpu"]
        result = servers.run(words, tmp_path / "log")
        assert f"{kind}: {dataset}: {rows} samples, fewer than the requested 128" in result.stderr
        assert (" tokens in all; calibrate with longer texts" in result.stderr) == (kind == "warning")


@pytest.mark.long  # sums are those of hooks in each run; this adds that llama.cpp means the same by them
def test_importance_agrees_with_llama_cpp(servers: Any, tmp_path: Path, example: Path) -> None:
    """Both read the same text in the same chunks of 512 tokens; llama.cpp drops a partial last chunk.

    llama.cpp computes attention and residuals in float32 and caches keys and values in FP16; transformers uses BF16.
    A few tokens near a tie therefore go to a different expert, and single tokens contribute a sixth of some columns
    of down's inputs. One in 25 of these columns differs by more than 2 %, the sums of each expert by less than 1 %.
    """
    chunks = ("--sequence-length", "512", "--num-calibration-samples", "63")
    ours = calibrate(servers, example, tmp_path / "out", FOLDER / "llama_cpp.imatrix.txt", *chunks)
    shapes = shapes_of(example)
    actual = ours.open_imatrix("small", shapes)
    expected = open_imatrix(FOLDER / "llama_cpp.imatrix.gguf", "small", shapes)
    for layer in shapes:
        counts = expected.sums[layer, "gate"].counts
        assert counts.sum() == ours.counts[layer].sum() == 2 * 63 * 512 and counts.min() >= 500
        np.testing.assert_allclose(ours.counts[layer], counts, rtol=0.01)
        for projection, share in (("gate", 0.99), ("up", 0.99), ("down", 0.95)):
            have, want = (each.read(layer, projection).astype(np.float64) for each in (actual, expected))
            assert (np.abs(have - want).sum(1) < 0.02 * want.sum(1)).all()
            assert (np.abs(have - want) < 0.02 * want).mean() > share


def test_dataset_inside_the_output_is_refused(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    dataset, _ = calibrated.write_dataset(output, "texts", calibrated.FEW)
    before = conversion.identity(tmp_path)
    command = calibrated.calibrate_arguments(models["qwen3_moe"], output, dataset, "--overwrite", "--delete-others")
    result = servers.run(command, tmp_path / "log")
    conversion.check_refusal(result, 2, f"{dataset} is an input inside {output}", "which this run would write to")
    (tmp_path / "log").unlink()
    assert conversion.identity(output) == {k: v for k, v in before.items() if k.startswith(str(output))}


def test_calibrate_runs_after_a_refused_attempt(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    """A calibration that found no tokens does not block the next one."""
    output, empty = tmp_path / "out", tmp_path / "empty.txt"
    empty.write_text("")
    result = servers.run(calibrated.calibrate_arguments(models["qwen3_moe"], output, empty), tmp_path / "log")
    conversion.check_refusal(result, 5, "has no tokens")
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", calibrated.FEW)
    calibrate(servers, models["qwen3_moe"], output, dataset)
    result = servers.run(["cpu", output, tmp_path / "int4"], tmp_path / "log")
    conversion.check_refusal(result, 5, f"{output}: contains statistics of a model's experts, not a model; give the")


@pytest.mark.parametrize("options", [("--quant-method", "RTN"), ("--engine", "oneshot")])
def test_only_calibration_runs_have_statistics(
    options: tuple[str, str], servers: Any, tmp_path: Path, example: Path
) -> None:
    command = ("gpu", "-i", str(example), "-o", str(tmp_path / "o"), "--save-statistics", str(tmp_path / "s"), *options)
    result = servers.run(command, tmp_path / "log")
    assert result.returncode == 2 and "ktconvert calibrate" in result.stderr


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated.write_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def gathered_statistics(small_model: Path, servers: Any) -> Path:
    dataset, _ = calibrated.write_dataset(small_model.parent, "texts", (60, 25, 12))
    return calibrate(servers, small_model, small_model.parent / "out", dataset).folder


@pytest.fixture
def statistics_folder(gathered_statistics: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gathered_statistics, tmp_path / "statistics"))


def test_error_for_a_different_model_names_both(statistics_folder: Path, small_model: Path) -> None:
    statistics, shapes = read_statistics(statistics_folder), shapes_of(small_model)
    statistics.require_model("ours", shapes, 3)
    for other, description in (
        ({n: shapes[n] for n in (0, 1)}, "layers 0-1 with 4 experts of 128 x 128"),
        (dict.fromkeys(shapes, (8, 128, 128)), "layers 0-2 with 8 experts"),
        (dict.fromkeys(shapes, (4, 128, 256)), "4 experts of 128 x 256"),
    ):
        with pytest.raises(InputError, match=r"layers 0-2 with 4 experts of 128 x 128, but other has .*") as error:
            statistics.open_imatrix("other", other)
        assert description in str(error.value)
    with pytest.raises(InputError, match=r"3 decoder layers, .* but other has 4 decoder layers"):
        statistics.require_model("other", shapes, 4)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "imatrix.gguf truncated": lambda data: data[:-32],
    "imatrix.gguf flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "counts.safetensors truncated": lambda data: data[:-8],
    "counts.safetensors flipped": lambda data: data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
    "statistics.json newer": lambda data: data.replace(b'"version": 1\n', b'"version": 2\n'),
    "statistics.json garbage": lambda data: b'{"format": [' * 5000,
}


def damage(statistics_folder: Path, case: str) -> None:
    path = statistics_folder / case.split()[0]
    path.write_bytes(DAMAGE[case](path.read_bytes()))


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_statistics_are_refused(case: str, statistics_folder: Path, small_model: Path) -> None:
    shapes = shapes_of(small_model)
    read_statistics(statistics_folder).open_imatrix("it", shapes)
    damage(statistics_folder, case)
    with pytest.raises(InputError, match=str(statistics_folder)):
        read_statistics(statistics_folder).open_imatrix("it", shapes)
    with pytest.raises(InputError, match="cannot be read"):
        read_statistics(statistics_folder.parent)


def test_commands_read_or_refuse_the_folder(
    statistics_folder: Path, small_model: Path, servers: Any, tmp_path: Path, example: Path
) -> None:
    """`cpu --scale imatrix` and `experts` read the folder; of a different model, or damaged, it is refused."""

    def run(*arguments: object) -> Any:
        return servers.run([str(word) for word in arguments], tmp_path / "log")

    def convert(model: Path, name: str) -> Any:
        scale = ("--scale", "imatrix", "--statistics", statistics_folder, "--threadpool-count", 1)
        return run("cpu", "-i", model, "-o", tmp_path / name, "--quant-method", "int4", *scale)

    result = convert(small_model, "int4")
    assert result.returncode == 0, result.stderr
    result = run("verify", tmp_path / "int4", "--against", small_model, "--statistics", statistics_folder)
    assert result.returncode == 0, result.stderr
    settings = json.loads((tmp_path / "int4" / "manifest.json").read_text())["model"]
    assert settings["imatrix"] == publish.sha256_file(statistics_folder / "imatrix.gguf")
    messages = ("layers 0-2 with 4 experts of 128 x 128", "layers 0-1 with 8 experts")
    conversion.check_refusal(convert(example, "other"), 5, *messages)
    choose_experts = ("experts", statistics_folder, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert run(*choose_experts).returncode == 0
    hot = hot_experts.read_mask(tmp_path / "mask.safetensors")
    assert [list(np.flatnonzero(row)) for row in hot] == [
        [np.argmax(row)] for row in read_statistics(statistics_folder).counts
    ]
    for command in ("verify", "inspect"):
        conversion.check_refusal(run(command, statistics_folder), 5, "statistics of a model's experts, but no weights")
    damage(statistics_folder, "imatrix.gguf flipped")
    conversion.check_refusal(convert(small_model, "flipped"), 5, "imatrix.gguf")
    damage(statistics_folder, "counts.safetensors truncated")
    conversion.check_refusal(run(*choose_experts), 5, "counts.safetensors")
