"""`ktconvert calibrate`: sums and counts equal those of hooks on the whole model and llama.cpp's importance matrix."""

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.statistics.folder import Statistics, read_statistics
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES, open_imatrix
from ktconvert.native_quant.runtime import hot_experts
from ktconvert.pipeline.calibration.gather_statistics import LayerStatistics
from rig import calibrated, conversion, forks, hooks, killpoint
from rig.golden import FOLDER

UNITS = ("samples", "layer-000", "layer-001", "layer-002", "imatrix", "counts", "statistics")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with forks.Forks([shim], conversion.CORES, modules=calibrated.MODULES) as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models of the GPTQ tests, and one with an MTP block."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models")
    made = calibrated.write_sources(folder)
    made["MTP"] = Path(shutil.copytree(made["deepseek_v3"], folder / "MTP"))
    tensors = load_file(made["MTP"] / "model.safetensors")
    beyond = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if "layers.1." in name}
    save_file(tensors | beyond, made["MTP"] / "model.safetensors", metadata={"format": "pt"})
    return made


def shapes_of(model: Path) -> dict[int, tuple[int, int, int]]:
    with open_checkpoint(model) as source:
        known = recognise(source)
        return {layer: known.shape(layer) for layer in known.layers}


def calibrate(servers: Any, model: Path, output: Path, dataset: Path, *more: str) -> Statistics:
    done = servers.run(calibrated.calibrate_arguments(model, output, dataset, *more), output.with_suffix(".said"))
    assert done.returncode == 0, done.stderr
    return read_statistics(output)


def assert_equals_hooks(statistics: Statistics, model: Path, seen: dict[int, hooks.ExpertInputs]) -> None:
    """Require that the importance matrix equals the hooks' within float32, and counts the router's choices."""
    shapes = shapes_of(model)
    assert shapes.keys() == seen.keys()
    imatrix = statistics.open_imatrix("the model", shapes)
    for layer, read in seen.items():
        chosen = np.bincount(np.concatenate(read.chosen).reshape(-1), minlength=shapes[layer][0])
        assert statistics.counts[layer].tolist() == chosen.tolist()
        for projection in WEIGHT_NAMES:
            assert imatrix.sums[layer, projection].counts.tolist() == chosen.tolist()
            want = read.middle if projection == "down" else read.inputs
            np.testing.assert_allclose(imatrix.read(layer, projection), want, rtol=2e-7, atol=0)
    others = [layer for layer in range(len(statistics.counts)) if layer not in shapes]
    assert not statistics.counts[others].any()


@pytest.mark.parametrize(
    ("name", "computed", "layers", "first"),
    [
        ("qwen3_moe", "qwen3_moe", 3, 0),
        ("qwen3_moe fused", "qwen3_moe fused", 3, 0),
        ("mixtral", "mixtral", 2, 0),
        ("deepseek_v3", "deepseek_v3", 2, 1),
        ("qwen3_moe FP8", "qwen3_moe decoded", 3, 0),
    ],
)
def test_sums_and_counts_equal_those_of_hooks(
    name: str, computed: str, layers: int, first: int, models: dict[str, Path], servers: Any, tmp_path: Path
) -> None:
    """With names w1, w3, w2; 3-D tensors; FP8; a dense first layer, and shared experts, which are excluded."""
    dataset, samples = calibrated.write_dataset(tmp_path, "texts", (300, 60, 25))
    statistics = calibrate(servers, models[name], tmp_path / "out", dataset)
    assert_equals_hooks(statistics, models[name], hooks.measure_expert_inputs(models[computed], samples))
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
        assert imatrix.importance(layer, expert, "down") is None
        assert not imatrix.read(layer, "down")[expert].any()


def test_mtp_layers_are_excluded(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", (60,))
    made = [calibrate(servers, models[name], tmp_path / name, dataset) for name in ("deepseek_v3", "MTP")]
    assert "note: the MTP layers (layer 2) are left out" in (tmp_path / "MTP.said").read_text()
    for name in ("imatrix.gguf", "counts.safetensors"):
        first, second = ((each.folder / name).read_bytes() for each in made)
        assert first[4096:] == second[4096:] and len(first) == len(second)  # a header names the checkpoint's hash


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
    events = [json.loads(line) for line in (tmp_path / "out.said").read_text().splitlines() if line.startswith("{")]
    done = [event for event in events if event["event"] == "done"]
    assert [event["unit"].removeprefix("calibrate.") for event in done] == list(UNITS)
    tokens = statistics.counts[0]
    assert done[1]["stats"]["routed_tokens"]["most"] == tokens.max()
    metadata = read_header(output / "counts.safetensors").metadata
    assert metadata["architecture"] == statistics.document.model.architecture
    assert metadata["source"] == statistics.document.model.source
    files = ["README.md", "counts.safetensors", "imatrix.gguf", "manifest.json", "statistics.json"]
    assert conversion.names(output) == files
    assert f"| 0 | {tokens.min()} |" in (output / "README.md").read_text()
    words = calibrated.calibrate_arguments(models["qwen3_moe"], output, dataset)
    again = servers.run(words, tmp_path / "again")
    assert again.returncode == 0 and "nothing to do" in again.stderr
    other = servers.run([*words, "--random-seed", "1"], tmp_path / "other")
    assert other.returncode == 7 and "--random-seed was 42, is 1" in other.stderr


def test_dry_run_reports_sizes(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    """Files, disk space during the run, and memory; it writes nothing."""
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", (60,))
    words = calibrated.calibrate_arguments(models["mixtral"], tmp_path / "out", dataset, "--dry-run", "--json")
    done = servers.run(words, tmp_path / "said")
    assert done.returncode == 0, done.stderr
    plan = json.loads(next(line for line in done.stderr.splitlines() if line.startswith("{")))
    units = {unit["unit"].removeprefix("calibrate."): unit for unit in plan["units"]}
    assert units["imatrix"]["bytes_out"] == 2 * 4 * 8 * (3 * 128 + 3)
    assert units["counts"]["bytes_out"] == 2 * 8 * 8
    assert plan["disk"]["of files that exist only meanwhile"] == 4 * 2 * 128 * 128 * calibrated.MAX_LENGTH
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


@pytest.mark.slow
def test_importance_agrees_with_llama_cpp(servers: Any, tmp_path: Path, example: Path) -> None:
    """On the same text in the same chunks of 512 tokens, of which llama.cpp leaves out a last one that is not full.

    llama.cpp computes attention and residuals in float32 and caches keys and values in FP16, where transformers has
    BF16: a few tokens that are close to a tie go to another expert, and single tokens are a sixth of some columns of
    what down reads. Of these columns one in 25 differs by more than 2 %, the sums of each expert by less than 1 %.
    """
    chunks = ("--max-sequence-length", "512", "--num-calibration-samples", "63")
    ours = calibrate(servers, example, tmp_path / "out", FOLDER / "llama_cpp.imatrix.txt", *chunks)
    shapes = shapes_of(example)
    mine, theirs = ours.open_imatrix("small", shapes), open_imatrix(FOLDER / "llama_cpp.imatrix.gguf", "small", shapes)
    for layer in shapes:
        counts = theirs.sums[layer, "gate"].counts
        assert counts.sum() == ours.counts[layer].sum() == 2 * 63 * 512 and counts.min() >= 500
        np.testing.assert_allclose(ours.counts[layer], counts, rtol=0.01)
        for projection, near in (("gate", 0.99), ("up", 0.99), ("down", 0.95)):
            have, want = (each.read(layer, projection).astype(np.float64) for each in (mine, theirs))
            assert (np.abs(have - want).sum(1) < 0.02 * want.sum(1)).all()
            assert (np.abs(have - want) < 0.02 * want).mean() > near


def test_data_set_inside_the_output_is_refused(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    dataset, _ = calibrated.write_dataset(output, "texts", calibrated.FEW)
    before = conversion.identity(tmp_path)
    words = calibrated.calibrate_arguments(models["qwen3_moe"], output, dataset, "--overwrite", "--delete-others")
    done = servers.run(words, tmp_path / "said")
    conversion.check_refusal(done, 2, f"{dataset} is read", "the input is never written to")
    (tmp_path / "said").unlink()
    assert conversion.identity(output) == {k: v for k, v in before.items() if k.startswith(str(output))}


def test_corrected_command_runs_after_a_refusal(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    """A calibration that found no tokens does not block the next one."""
    output, empty = tmp_path / "out", tmp_path / "empty.txt"
    empty.write_text("")
    done = servers.run(calibrated.calibrate_arguments(models["qwen3_moe"], output, empty), tmp_path / "said")
    conversion.check_refusal(done, 5, "holds no token")
    dataset, _ = calibrated.write_dataset(tmp_path, "texts", calibrated.FEW)
    calibrate(servers, models["qwen3_moe"], output, dataset)


@pytest.mark.parametrize("which", [("--quant-method", "RTN"), ("--engine", "oneshot")])
def test_only_calibration_runs_have_statistics(
    which: tuple[str, str], servers: Any, tmp_path: Path, example: Path
) -> None:
    words = ("gpu", "-i", str(example), "-o", str(tmp_path / "o"), "--save-statistics", str(tmp_path / "s"), *which)
    done = servers.run(words, tmp_path / "said")
    assert done.returncode == 2 and "ktconvert calibrate" in done.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated.write_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def gathered(small: Path, servers: Any) -> Path:
    dataset, _ = calibrated.write_dataset(small.parent, "texts", (60, 25, 12))
    return calibrate(servers, small, small.parent / "out", dataset).folder


@pytest.fixture
def made(gathered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gathered, tmp_path / "statistics"))


def test_error_for_a_different_model_names_both(made: Path, small: Path) -> None:
    statistics, shapes = read_statistics(made), shapes_of(small)
    statistics.require_model("ours", shapes, 3)
    for other, has in (
        ({n: shapes[n] for n in (0, 1)}, "layers 0-1 with 4 experts of 128 x 128"),
        (dict.fromkeys(shapes, (8, 128, 128)), "layers 0-2 with 8 experts"),
        (dict.fromkeys(shapes, (4, 128, 256)), "4 experts of 128 x 256"),
    ):
        with pytest.raises(InputError, match=r"layers 0-2 with 4 experts of 128 x 128, but other has .*") as error:
            statistics.open_imatrix("other", other)
        assert has in str(error.value)
    with pytest.raises(InputError, match=r"3 decoder layers, .* but other has 4 decoder layers"):
        statistics.require_model("other", shapes, 4)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "imatrix.gguf cut": lambda data: data[:-32],
    "imatrix.gguf flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "counts.safetensors cut": lambda data: data[:-8],
    "counts.safetensors flipped": lambda data: data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
    "statistics.json newer": lambda data: data.replace(b'"version": 1\n', b'"version": 2\n'),
    "statistics.json garbage": lambda data: b'{"format": [' * 5000,
}


def damage(made: Path, what: str) -> None:
    path = made / what.split()[0]
    path.write_bytes(DAMAGE[what](path.read_bytes()))


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_statistics_are_refused(what: str, made: Path, small: Path) -> None:
    shapes = shapes_of(small)
    read_statistics(made).open_imatrix("it", shapes)
    damage(made, what)
    with pytest.raises(InputError, match=str(made)):
        read_statistics(made).open_imatrix("it", shapes)
    with pytest.raises(InputError, match="cannot be read"):
        read_statistics(made.parent)


def test_commands_read_or_refuse_the_folder(
    made: Path, small: Path, servers: Any, tmp_path: Path, example: Path
) -> None:
    """`cpu --scale imatrix` and `experts` take it; of another model, or damaged, it is one error; it is no weights."""

    def run(*words: object) -> Any:
        return servers.run([str(word) for word in words], tmp_path / "said")

    def convert(model: Path, name: str) -> Any:
        scale = ("--scale", "imatrix", "--statistics", made, "--threadpool-count", 1)
        return run("cpu", "-i", model, "-o", tmp_path / name, "--quant-method", "int4", *scale)

    done = convert(small, "int4")
    assert done.returncode == 0, done.stderr
    done = run("verify", tmp_path / "int4", "--against", small, "--statistics", made)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "int4" / "manifest.json").read_text())["model"]
    assert settings["imatrix"] == publish.sha256_file(made / "imatrix.gguf")
    words = ("layers 0-2 with 4 experts of 128 x 128", "layers 0-1 with 8 experts")
    conversion.check_refusal(convert(example, "other"), 5, *words)
    chosen = ("experts", made, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert run(*chosen).returncode == 0
    hot = hot_experts.read_mask(tmp_path / "mask.safetensors")
    assert [list(np.flatnonzero(row)) for row in hot] == [[np.argmax(row)] for row in read_statistics(made).counts]
    for command in ("verify", "inspect"):
        conversion.check_refusal(run(command, made), 3, "statistics of a model's experts, and no weights")
    damage(made, "imatrix.gguf flipped")
    conversion.check_refusal(convert(small, "flipped"), 5, "imatrix.gguf")
    damage(made, "counts.safetensors cut")
    conversion.check_refusal(run(*chosen), 5, "counts.safetensors")
