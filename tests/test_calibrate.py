"""`ktconvert calibrate`, and GPTQ with --save-statistics: the sums and counts that hooks on the whole model see,
llama.cpp's own importance matrix, runs that are cut off, and statistics of something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
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
from ktconvert.layouts.statistics.imatrix import PARTS, open_imatrix
from ktconvert.native_quant.runtime import hot_mask
from ktconvert.pipeline.stages.gather_statistics import Gathering
from rig import calibrated, conversion, families, forks, hooks, killpoint
from rig.attempts import Attempts
from rig.golden import FOLDER
from rig.safetensors import differing, read_folder

SMALL = {"qwen3_moe": {}, "mixtral": {}, "deepseek_v3": {"num_hidden_layers": 3}}  # experts one by one
UNITS = ("samples", "layer-000", "layer-001", "layer-002", "imatrix", "counts", "statistics")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with forks.Forks([shim], conversion.CORES, modules=calibrated.MODULES) as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models with the bundled tokenizer: families with other names, one whose first layer is dense, and one model
    as 3-D tensors and in FP8."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models")
    made = {
        name: families.make(name, False, folder / name, vocab_size=calibrated.VOCABULARY, **differs)
        for name, differs in SMALL.items()
    }
    made["fused"] = families.make("qwen3_moe", True, folder / "fused", vocab_size=calibrated.VOCABULARY)
    for name in ("FP8", "decoded"):
        made[name] = Path(shutil.copytree(made["qwen3_moe"], folder / name))
        path = made[name] / "model.safetensors"
        tensors = calibrated.to_fp8(load_file(path))
        save_file(tensors if name == "FP8" else calibrated.from_fp8(tensors), path, metadata={"format": "pt"})
    config = made["FP8"] / "config.json"
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": blocks}))
    for model in made.values():
        for name in calibrated.TOKENIZER:
            shutil.copy(calibrated.EXAMPLE / name, model)
    made["MTP"] = Path(shutil.copytree(made["deepseek_v3"], folder / "MTP"))
    tensors = load_file(made["MTP"] / "model.safetensors")
    beyond = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if "layers.2." in name}
    save_file(tensors | beyond, made["MTP"] / "model.safetensors", metadata={"format": "pt"})
    return made


def words(model: Path, output: Path, dataset: Path, *more: str) -> list[str]:
    fixed = ("--max-sequence-length", str(calibrated.MAX_LENGTH), "--cpuinfer-threads", "1", "--force-cpu")
    return ["calibrate", str(model), "--output", str(output), "--dataset", str(dataset), *fixed, *more]


def shapes_of(model: Path) -> dict[int, tuple[int, int, int]]:
    with open_checkpoint(model) as source:
        known = recognise(source)
        return {layer: known.shape(layer) for layer in known.layers}


def calibrate(servers: Any, model: Path, output: Path, dataset: Path, *more: str) -> Statistics:
    done = servers.run(words(model, output, dataset, *more), output.with_suffix(".said"))
    assert done.returncode == 0, done.stderr
    return read_statistics(output)


def assert_seen(statistics: Statistics, model: Path, seen: dict[int, hooks.Read]) -> None:
    """The imatrix is what hooks saw, within float32, and the counts are the router's choices."""
    shapes = shapes_of(model)
    assert shapes.keys() == seen.keys()
    imatrix = statistics.imatrix("the model", shapes)
    for layer, read in seen.items():
        chosen = np.bincount(np.concatenate(read.chosen).reshape(-1), minlength=shapes[layer][0])
        assert statistics.counts[layer].tolist() == chosen.tolist()
        for projection in PARTS:
            assert imatrix.sums[layer, projection].counts.tolist() == chosen.tolist()
            want = read.middle if projection == "down" else read.inputs
            np.testing.assert_allclose(imatrix.read(layer, projection), want, rtol=2e-7, atol=0)
    others = [layer for layer in range(len(statistics.counts)) if layer not in shapes]
    assert not statistics.counts[others].any()


# ---- what a whole model's experts read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "computed"),
    [("qwen3_moe", "qwen3_moe"), ("fused", "fused"), ("mixtral", "mixtral"), ("deepseek_v3",) * 2, ("FP8", "decoded")],
)
def test_sums_and_counts_are_those_of_hooks(
    name: str, computed: str, models: dict[str, Path], servers: Any, tmp_path: Path
) -> None:
    """Names w1, w3, w2; 3-D tensors; FP8; a dense first layer, and shared experts, which are left out."""
    dataset, samples = calibrated.data(tmp_path, "texts", (300, 60, 25))
    statistics = calibrate(servers, models[name], tmp_path / "out", dataset)
    assert_seen(statistics, models[name], hooks.read_by_experts(models[computed], samples))
    data = statistics.document["data"]
    assert (data["samples"], data["tokens"]) == (len(samples), sum(map(len, samples)))
    assert data["dataset"] == "texts.jsonl"  # no path
    assert (len(statistics.counts), min(shapes_of(models[name]))) == ((3, 1) if name == "deepseek_v3" else (2, 0))


def test_experts_without_tokens_and_with_one(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, samples = calibrated.data(tmp_path, "few", (9,))
    statistics = calibrate(servers, models["qwen3_moe"], tmp_path / "out", dataset)
    assert_seen(statistics, models["qwen3_moe"], hooks.read_by_experts(models["qwen3_moe"], samples))
    assert {0, 1} <= set(statistics.counts.flat)
    imatrix = statistics.imatrix("the model", shapes_of(models["qwen3_moe"]))
    for layer, expert in np.argwhere(statistics.counts == 0).tolist():
        assert imatrix.importance(layer, expert, "down") is None
        assert not imatrix.read(layer, "down")[expert].any()


def test_mtp_layers_are_left_out(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, _ = calibrated.data(tmp_path, "texts", (60,))
    made = [calibrate(servers, models[name], tmp_path / name, dataset) for name in ("deepseek_v3", "MTP")]
    assert "note: the MTP part (layer 3) is left out" in (tmp_path / "MTP.said").read_text()
    for name in ("imatrix.gguf", "counts.safetensors"):
        first, second = ((each.folder / name).read_bytes() for each in made)
        assert first[4096:] == second[4096:] and len(first) == len(second)  # a header names the checkpoint's hash


def test_sums_that_are_not_finite_name_the_expert(tmp_path: Path) -> None:
    gathering = Gathering(7)
    gathering.counts.tokens[7] = np.ones(3, np.int64)
    gathering.importance.inputs, gathering.importance.middle = np.ones((3, 4)), np.ones((3, 2))
    gathering.importance.middle[1, 0] = 1e39  # beyond float32
    with pytest.raises(VerificationError, match=r"layer 7, expert 1: .* another --dataset"):
        gathering.write(tmp_path / "layer")
    assert not (tmp_path / "layer").exists()


def test_the_output_says_what_it_is(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    dataset, _ = calibrated.data(tmp_path, "texts", (60, 25))
    output = tmp_path / "out"
    statistics = calibrate(servers, models["qwen3_moe"], output, dataset, "--json")
    events = [json.loads(line) for line in (tmp_path / "out.said").read_text().splitlines() if line.startswith("{")]
    done = [event for event in events if event["event"] == "done"]
    assert [event["unit"].removeprefix("calibrate.") for event in done] == [u for u in UNITS if u != "layer-002"]
    tokens = statistics.counts[0]
    assert done[1]["stats"]["routed_tokens"]["most"] == tokens.max()
    metadata = read_header(output / "counts.safetensors").metadata
    assert metadata["architecture"] == statistics.document["model"]["architecture"]
    assert metadata["source"] == statistics.document["model"]["source"]
    assert conversion.names(output) == [
        "README.md",
        "counts.safetensors",
        "imatrix.gguf",
        "manifest.json",
        "statistics.json",
    ]
    assert f"| 0 | {tokens.min()} |" in (output / "README.md").read_text()
    again = servers.run(words(models["qwen3_moe"], output, dataset), tmp_path / "again")
    assert again.returncode == 0 and "nothing to do" in again.stderr
    other = servers.run(words(models["qwen3_moe"], output, dataset, "--random-seed", "1"), tmp_path / "other")
    assert other.returncode == 7 and "--random-seed was 42, is 1" in other.stderr


def test_a_plan_has_the_sizes(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    """Of a dry run: what is written, what is on disk meanwhile, and the memory; nothing is written."""
    dataset, _ = calibrated.data(tmp_path, "texts", (60,))
    done = servers.run(words(models["mixtral"], tmp_path / "out", dataset, "--dry-run", "--json"), tmp_path / "said")
    assert done.returncode == 0, done.stderr
    plan = json.loads(next(line for line in done.stderr.splitlines() if line.startswith("{")))
    units = {unit["unit"].removeprefix("calibrate."): unit for unit in plan["units"]}
    assert units["imatrix"]["bytes_out"] == 2 * 4 * 8 * (3 * 128 + 3)
    assert units["counts"]["bytes_out"] == 2 * 8 * 8
    assert plan["disk"]["of files that exist only meanwhile"] == 4 * 2 * 128 * 128 * calibrated.MAX_LENGTH
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


# ---- llama.cpp's -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_agrees_with_llama_cpp(servers: Any, tmp_path: Path, example: Path) -> None:
    """On the same text in the same chunks of 512 tokens, of which llama.cpp leaves out a last one that is not full.

    llama.cpp computes attention and residuals in float32 and caches keys and values in FP16, where transformers has
    BF16. A few tokens that are close to a tie therefore go to another expert, and single tokens are a sixth of some
    columns of what down reads: of these columns one in 25 differs by more than 2 %, the sums of every expert taken
    together by less than 1 %.
    """
    chunks = ("--max-sequence-length", "512", "--num-calibration-samples", "63")
    ours = calibrate(servers, example, tmp_path / "out", FOLDER / "llama_cpp.imatrix.txt", *chunks)
    shapes = shapes_of(example)
    mine, theirs = ours.imatrix("small", shapes), open_imatrix(FOLDER / "llama_cpp.imatrix.gguf", "small", shapes)
    for layer in shapes:
        counts = theirs.sums[layer, "gate"].counts
        assert counts.sum() == ours.counts[layer].sum() == 2 * 63 * 512 and counts.min() >= 500
        np.testing.assert_allclose(ours.counts[layer], counts, rtol=0.01)
        for projection, near in (("gate", 0.99), ("up", 0.99), ("down", 0.95)):
            have, want = (each.read(layer, projection).astype(np.float64) for each in (mine, theirs))
            assert (np.abs(have - want).sum(1) < 0.02 * want.sum(1)).all()
            assert (np.abs(have - want) < 0.02 * want).mean() > near
    taken_by_others(tmp_path / "out", example, tmp_path)


def taken_by_others(statistics: Path, model: Path, scratch: Path) -> None:
    """`experts` and `cpu --scale imatrix` take the folder."""
    mask = scratch / "mask.safetensors"
    for words in (
        ("experts", statistics, "--output", mask, "--num-gpu-experts", 3),
        ("cpu", "-i", model, "-o", scratch / "int4", "--scale", "imatrix", "--statistics", statistics),
        ("verify", scratch / "int4", "--against", model, "--statistics", statistics),
    ):
        done = conversion.ktconvert(*map(str, words))
        assert done.returncode == 0, done.stderr
    counts = read_statistics(statistics).counts
    assert [set(np.flatnonzero(row)) for row in hot_mask.read(mask)] == [set(np.argsort(-row)[:3]) for row in counts]


# ---- cut off ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attempts(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    with conversion.in_memory(tmp_path_factory.mktemp("attempts")) as base:
        yield Attempts(base, servers, words, "calibrate", UNITS)


def test_killed_between_layers_and_within(attempts: Attempts) -> None:
    """Right after some units' records, and at some moment of the making of a layer and of the imatrix."""
    chance = conversion.chance()
    boundaries = [attempts.recorded_at(unit) + 1 for unit in ("samples", "layer-001", "imatrix", "statistics")]
    inside = [chance.choice(attempts.within(unit)) for unit in ("layer-001", "imatrix")]
    conversion.in_parallel(attempts.killed, sorted({*boundaries, *inside}))
    assert conversion.identity(attempts.model) == attempts.before


@pytest.mark.skipif(conversion.CORES < 2, reason="needs two cores, to compute with another number of threads")
def test_another_machine(attempts: Attempts) -> None:
    output = attempts.output("machine")
    assert attempts.run(output, kill=attempts.recorded_at("layer-000") + 1).returncode == killpoint.KILLED
    done = attempts.run(output, "resume", str(output), "--cpuinfer-threads", "2")
    conversion.refused(done, 7, "threads was 1, is 2", "--allow-machine-change")
    attempts.finish(output, "on the first machine again", "resume", str(output), "--cpuinfer-threads", "1")


@pytest.mark.long
def test_killed_before_every_call(attempts: Attempts) -> None:
    print(f"{len(attempts.calls)} kill points")
    conversion.in_parallel(attempts.killed, range(1, len(attempts.calls) + 1))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_data_set_in_the_output(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    dataset, _ = calibrated.data(output, "texts", calibrated.FEW)
    before = conversion.identity(tmp_path)
    done = servers.run(words(models["qwen3_moe"], output, dataset, "--overwrite", "--delete-others"), tmp_path / "said")
    conversion.refused(done, 2, f"{dataset} is read", "the input is never written to")
    (tmp_path / "said").unlink()
    assert conversion.identity(output) == {k: v for k, v in before.items() if k.startswith(str(output))}


def test_a_corrected_command_after_a_refusal(models: dict[str, Path], servers: Any, tmp_path: Path) -> None:
    """A calibration that found no token to begin with does not stand in the way of the next one."""
    output, empty = tmp_path / "out", tmp_path / "empty.txt"
    empty.write_text("")
    done = servers.run(words(models["qwen3_moe"], output, empty), tmp_path / "said")
    conversion.refused(done, 5, "holds no token")
    dataset, _ = calibrated.data(tmp_path, "texts", calibrated.FEW)
    calibrate(servers, models["qwen3_moe"], output, dataset)


# ---- beside GPTQ -----------------------------------------------------------------------------------------------------


def with_statistics(model: Path, output: Path, dataset: Path) -> list[str]:
    folder = str(output.with_name("out.statistics"))
    return calibrated.arguments(model, output, "W4A16", dataset, "--save-statistics", folder)


@pytest.fixture(scope="module")
def beside_gptq(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    with conversion.in_memory(tmp_path_factory.mktemp("beside")) as base:
        yield Attempts(base, servers, with_statistics, "gptq", UNITS)


def test_gptq_leaves_statistics_and_the_same_weights(beside_gptq: Attempts, servers: Any, tmp_path: Path) -> None:
    """The first layer reads what it reads without GPTQ; later ones read what quantized experts lead to."""
    made, alone = beside_gptq.base / "whole", tmp_path / "alone"
    plain = calibrated.arguments(beside_gptq.model, alone, "W4A16", beside_gptq.dataset)
    assert servers.run(plain, tmp_path / "said").returncode == 0
    assert not differing(read_folder(made / "out"), read_folder(alone))
    own = read_statistics(made / "out.statistics")
    source = calibrate(servers, beside_gptq.model, tmp_path / "source", beside_gptq.dataset)
    shapes = shapes_of(beside_gptq.model)
    for projection in PARTS:
        ours, theirs = (each.imatrix("it", shapes).read(0, projection) for each in (own, source))
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(*(each.imatrix("it", shapes).read(2, "gate") for each in (own, source)))
    np.testing.assert_array_equal(own.counts.sum(1), source.counts.sum(1))
    assert own.document["settings"]["quant_type"] == "W4A16"
    assert conversion.names(made / "out.statistics") == ["counts.safetensors", "imatrix.gguf", "statistics.json"]


def test_gptq_with_statistics_is_cut_off(beside_gptq: Attempts) -> None:
    """While the statistics of a layer are written, and before and after their folder appears."""
    side = next(n for n, c in enumerate(beside_gptq.calls, 1) if c.path.endswith(".side") and "layer-001" in c.path)
    appears = next(n for n, c in enumerate(beside_gptq.calls, 1) if c.second == "out.statistics")
    conversion.in_parallel(beside_gptq.killed, [side + 1, appears, appears + 1])


def test_a_bit_that_flipped_in_what_a_chain_needs(beside_gptq: Attempts) -> None:
    """Of the samples, of a layer's statistics, and of what the last finished layer left to the next one."""
    first = beside_gptq.output("flipped")
    assert beside_gptq.run(first, kill=beside_gptq.recorded_at("layer-001") + 1).returncode == killpoint.KILLED
    found = [("gptq.samples.", ".safetensors"), ("gptq.layer-000.", ".side"), ("gptq.layer-001.", ".handed_on")]

    def resumed(n: int) -> None:
        output = beside_gptq.output(f"flipped{n}")
        work = shutil.copytree(first.with_name("out.work"), output.with_name("out.work"))
        plan = (work / "plan.json").read_text()
        (work / "plan.json").write_text(plan.replace(str(first.parent), str(output.parent)))
        begin, end = found[n]
        (victim,) = (work / "store").glob(f"{begin}*{end}")
        conversion.edit(victim, -2 if end == ".handed_on" else 200, keep_time=True)
        done = beside_gptq.run(output, "resume", str(output))
        assert f"is made again: {victim} is not what was written" in done.stderr
        assert conversion.differing(conversion.tree(output.parent), beside_gptq.wanted) == []

    conversion.in_parallel(resumed, range(len(found)))


@pytest.mark.long
def test_gptq_with_statistics_killed_before_every_call(beside_gptq: Attempts) -> None:
    print(f"{len(beside_gptq.calls)} kill points")
    conversion.in_parallel(beside_gptq.killed, range(1, len(beside_gptq.calls) + 1))


def test_the_folder_of_statistics_is_not_overwritten(beside_gptq: Attempts) -> None:
    output = beside_gptq.output("taken")
    taken = output.with_name("out.statistics")
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    whole = with_statistics(beside_gptq.model, output, beside_gptq.dataset)
    for more in ((), ("--dry-run",)):
        conversion.refused(beside_gptq.run(output, *whole, *more), 7, "out.statistics exists already")
    for more in ((), ("--dry-run",)):
        done = beside_gptq.run(output, *whole, "--overwrite", *more)
        conversion.refused(done, 7, f"{taken}: --overwrite would delete 1 file", "thesis.txt", "--delete-others")
    shutil.copy(beside_gptq.dataset, taken)
    inside = with_statistics(beside_gptq.model, output, taken / beside_gptq.dataset.name)
    done = beside_gptq.run(output, *inside, "--overwrite", "--delete-others")
    conversion.refused(done, 2, str(taken / beside_gptq.dataset.name), "is read")
    (taken / beside_gptq.dataset.name).unlink()
    assert conversion.names(taken) == ["thesis.txt"]
    inside = calibrated.arguments(beside_gptq.model, output, "W4A16", beside_gptq.dataset)
    done = beside_gptq.run(output, *inside, "--save-statistics", str(beside_gptq.model / "statistics"))
    assert done.returncode == 2 and "choose another folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_finished_without_its_folder(beside_gptq: Attempts) -> None:
    output = beside_gptq.output("gone")
    shutil.copytree(beside_gptq.base / "whole" / "out", output)
    done = beside_gptq.run(output)
    assert done.returncode == 7 and "does not have what was gathered with it" in done.stderr


@pytest.mark.parametrize("which", [("--quant-method", "RTN"), ("--engine", "oneshot")])
def test_only_a_walk_has_statistics(which: tuple[str, str], servers: Any, tmp_path: Path, example: Path) -> None:
    words = ("gpu", "-i", str(example), "-o", str(tmp_path / "o"), "--save-statistics", str(tmp_path / "s"), *which)
    done = servers.run(words, tmp_path / "said")
    assert done.returncode == 2 and "ktconvert calibrate" in done.stderr


# ---- statistics of something else ------------------------------------------------------------------------------------


@pytest.fixture
def made(attempts: Attempts, tmp_path: Path) -> Path:
    return Path(shutil.copytree(attempts.base / "whole" / "out", tmp_path / "statistics"))


def test_another_model_is_one_error_that_names_both(made: Path, attempts: Attempts) -> None:
    statistics, shapes = read_statistics(made), shapes_of(attempts.model)
    statistics.require_model("ours", shapes, 3)
    for other, has in (
        ({n: shapes[n] for n in (0, 1)}, "layers 0-1 with 4 experts of 128 x 128"),
        (dict.fromkeys(shapes, (8, 128, 128)), "layers 0-2 with 8 experts"),
        (dict.fromkeys(shapes, (4, 128, 256)), "4 experts of 128 x 256"),
    ):
        with pytest.raises(InputError, match=r"layers 0-2 with 4 experts of 128 x 128, and other has .*") as error:
            statistics.imatrix("other", other)
        assert has in str(error.value)
    with pytest.raises(InputError, match=r"3 decoder layers, .* and other has 4 decoder layers"):
        statistics.require_model("other", shapes, 4)


def _cut(made: Path) -> None:
    data = (made / "imatrix.gguf").read_bytes()
    (made / "imatrix.gguf").write_bytes(data[:-32])


def _flip(made: Path) -> None:
    conversion.edit(made / "imatrix.gguf", -40)


def _cut_counts(made: Path) -> None:
    data = (made / "counts.safetensors").read_bytes()
    (made / "counts.safetensors").write_bytes(data[:-8])


def _flip_counts(made: Path) -> None:
    conversion.edit(made / "counts.safetensors", -8)


def _newer(made: Path) -> None:
    path = made / "statistics.json"
    path.write_text(path.read_text().replace('"version": 1\n', '"version": 2\n'))


def _garbage(made: Path) -> None:
    (made / "statistics.json").write_bytes(b'{"format": [' * 5000)


@pytest.mark.parametrize("damage", [_cut, _flip, _cut_counts, _flip_counts, _newer, _garbage])
def test_damaged_statistics_are_refused(damage: Any, made: Path, attempts: Attempts) -> None:
    shapes = shapes_of(attempts.model)
    read_statistics(made).imatrix("it", shapes)
    damage(made)
    with pytest.raises(InputError, match=str(made)):
        read_statistics(made).imatrix("it", shapes)


def test_commands_that_read_it(made: Path, attempts: Attempts, servers: Any, tmp_path: Path, example: Path) -> None:
    """`cpu --scale imatrix` and `experts` take it; of another model, or damaged, it is one error; it is no weights."""

    def run(*words: object) -> Any:
        return servers.run([str(word) for word in words], tmp_path / "said")

    def convert(model: Path, name: str) -> Any:
        scale = ("--scale", "imatrix", "--statistics", made, "--threadpool-count", 1)
        return run("cpu", "-i", model, "-o", tmp_path / name, "--quant-method", "int4", *scale)

    done = convert(attempts.model, "int4")
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "int4" / "manifest.json").read_text())["model"]
    assert settings["imatrix"] == publish.sha256_file(made / "imatrix.gguf")
    conversion.refused(
        convert(example, "other"), 5, "layers 0-2 with 4 experts of 128 x 128", "layers 0-1 with 8 experts"
    )
    chosen = ("experts", made, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert run(*chosen).returncode == 0
    for command in ("verify", "inspect"):
        conversion.refused(run(command, made), 3, "statistics of a model's experts, and no weights")
    _flip(made)
    conversion.refused(convert(attempts.model, "flipped"), 5, "imatrix.gguf")
    _cut_counts(made)
    conversion.refused(run(*chosen), 5, "counts.safetensors")


def test_a_folder_without_statistics(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_statistics(tmp_path)
