"""`ktconvert resplit`: an output for a different number of NUMA slices. Tensors that keep their values equal those
of a fresh conversion; others are rounded again as numerics.md defines, and the plan reports by how much."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.encodings.amx import AMXINT4, AMXINT8
from ktconvert.layouts.files import manifest, publish
from ktconvert.layouts.outputs import rearrange
from ktconvert.layouts.outputs.slices import PackedSlices, Slicing, allocate_slices
from rig import conversion, killpoint, reference
from rig.safetensors import read_folder

HIDDEN, WIDTH = 128, 768  # AMXINT4 allows 1, 2, 3 and 6 NUMA slices, AMXINT8 also 4
PAIRS = [("int4", 1, 2), ("int8", 2, 1), ("int4", 2, 3), ("int8", 2, 4), ("int4", 6, 2)]
PANELS = [("mxfp4", 2, 3), ("fp8", 3, 2), ("bf16", 4, 6)]


@pytest.fixture(scope="module")
def cli(cli: Any) -> Any:
    """Return cli(*arguments, code=0), which runs the real command line and returns its output."""

    def run(*arguments: object, code: int = 0) -> str:
        result = cli(*arguments, code=code)
        return str(result.stdout + result.stderr)

    return run


def json_lines(output: str) -> list[dict[str, Any]]:
    """Return the objects printed with --json."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of 2 layers with one expert, which is the one that the plan measures."""
    folder = tmp_path_factory.mktemp("resplit") / "model"
    return conversion.checkpoint(folder, layers=2, experts=1, hidden=HIDDEN, width=WIDTH)


@pytest.fixture(scope="module")
def converted(source: Path, cli: Any) -> Any:
    """Return a function that converts it: converted("int8", 2, "--no-merge-safetensor")."""
    made: dict[tuple[object, ...], Path] = {}

    def convert(method: str, numa: int, *options: str) -> Path:
        key = (method, numa, *options)
        if key not in made:
            made[key] = source.with_name(f"out{len(made)}")
            words = ("--quant-method", method, "--threadpool-count", numa, *options)
            cli("cpu", "-q", "-i", source, "-o", made[key], *words)
        return made[key]

    return convert


def same_tensors(a: Mapping[str, Any], b: Mapping[str, Any], *words: str) -> bool:
    """Return whether both have the same tensors, of those whose names contain all words."""
    mine, other = ({n: tensor for n, tensor in side.items() if all(word in n for word in words)} for side in (a, b))
    return bool(mine) and mine == other


def only_record_differs(folder: Path, before: Path) -> bool:
    """Return whether only the record of how it was made differs."""
    return {*conversion.find_differences(conversion.tree(folder), conversion.tree(before))} == {
        "README.md",
        "manifest.json",
    }


@pytest.mark.parametrize(("method", "old", "new"), PAIRS + PANELS)
def test_tensors_that_keep_their_values_equal_a_fresh_conversion(method, old, new, tmp_path, cli, converted, source):
    """Blocks of columns of panels stay whole, so nothing is rounded: every shard equals that of a fresh conversion."""
    before, fresh = converted(method, old), converted(method, new)
    output = cli("resplit", before, tmp_path / "new", "--threadpool-count", new)
    ours, theirs = read_folder(tmp_path / "new"), read_folder(fresh)
    if (method, old, new) in PANELS:
        assert "weights and scales do not change" in output and only_record_differs(tmp_path / "new", fresh)
        plan = ("resplit", before, tmp_path / "x", "--threadpool-count", new, "--against", source, "--dry-run")
        assert "resplit is as good" in cli(*plan)
        assert "rewrite it with `ktconvert resplit`" in cli("verify", before, "--numa", new, code=6)
    else:
        assert (
            ours.keys() == theirs.keys()
            and same_tensors(ours, theirs, "ffn_gate")
            and same_tensors(ours, theirs, "ffn_up")
        )
        if old % new == 0:  # whole parts are put together: the largest scale is that of all columns
            assert same_tensors(ours, theirs, "ffn_down", ".scale") and "are rounded again" in output
        elif new % old == 0:
            assert "all weights keep their values" in output
    assert f"| resplit from | {old} NUMA slice" in (tmp_path / "new" / "README.md").read_text()
    (report,) = json_lines(cli("verify", tmp_path / "new", "--against", source, "--numa", new, "--json"))
    checks = {check["name"]: check["result"] for check in report["checks"]}
    assert checks["source"] == f"{len(ours)} tensors quantized again (T = {old}) and resplit, same bytes"


@pytest.mark.parametrize("options", [(), ("--no-merge-safetensor", "--save-backward-weights")], ids=["merged", "loose"])
def test_there_and_back_changes_no_weight(options, tmp_path, cli, converted):
    """Slices that were split share their scales, so joining them again loses nothing. The same number of slices changes
    nothing either."""
    before, three, back = converted("int4", 1, *options), tmp_path / "three", tmp_path / "back"
    cli("resplit", before, three, "--threadpool-count", 3)
    cli("resplit", three, back, "--threadpool-count", 1)
    assert only_record_differs(back, before)
    assert "| resplit from | 1, then 3 NUMA slices |" in (back / "README.md").read_text()
    assert "no tensor changes" in cli("resplit", three, tmp_path / "same", "--threadpool-count", 3)
    assert only_record_differs(tmp_path / "same", three)


def test_loose_files_keep_backward_matrices(tmp_path, cli, converted, source):
    """In transposes, the slices of gate and up are columns. A merge keeps the record."""
    before = converted("int8", 4, "--no-merge-safetensor", "--save-backward-weights")
    cli("resplit", before, tmp_path / "new", "--threadpool-count", 2)
    cli("verify", tmp_path / "new", "--against", source)
    cli("merge", "-i", tmp_path / "new", "-o", tmp_path / "merged")
    cli("verify", tmp_path / "merged", "--against", source)
    ours, fresh = read_folder(tmp_path / "merged"), read_folder(converted("int8", 2, "--save-backward-weights"))
    for words in (("gate_exps",), ("up_exps",), ("down_bwd",), (".scale",)):
        assert same_tensors(ours, fresh, *words)
    for words in (("gate_bwd", "weight"), ("up_bwd", "weight"), ("down_exps", "weight")):
        assert not same_tensors(ours, fresh, *words)


@pytest.mark.parametrize("non_experts", ["copy", "keep"])
def test_other_files_are_copied(tmp_path, cli, source, non_experts):
    options = ("--non-experts", non_experts, "--quant-method", "int8", "--layers", "1")
    (tmp_path / "in").mkdir()
    shutil.copytree(source, tmp_path / "in" / "model")
    (tmp_path / "in" / "model" / "README.md").write_text("card of the model")
    cli("cpu", "-i", tmp_path / "in" / "model", "-o", tmp_path / "old", *options)
    cli("resplit", tmp_path / "old", tmp_path / "new", "--threadpool-count", 6, "--max-shard-size", "300KB")
    old, new = conversion.tree(tmp_path / "old"), conversion.tree(tmp_path / "new")
    for name in ("README.source.md", "tokenizer.json", "extra/chat_template.jinja"):
        assert new[name] == old[name], name
    assert "README.source.source.md" not in new and "manifest.source.json" not in new
    config, before = (json.loads(files["config.json"] or b"") for files in (new, old))
    assert config["quantization_config"].pop("num_numa_nodes") == 6
    before["quantization_config"].pop("num_numa_nodes")
    assert config == before and same_tensors(read_folder(tmp_path / "new"), read_folder(tmp_path / "old"), "embed")
    cli("verify", tmp_path / "new", "--against", source, "--numa", 6, "--run")


def test_output_of_kt_kernel_is_resplit(tmp_path, cli, converted):
    """Without manifest, metadata and index: the format follows from the bytes."""
    from safetensors.numpy import load_file, save_file

    (tmp_path / "old").mkdir()
    for shard in converted("int4", 2).glob("*.safetensors"):
        save_file(load_file(shard), tmp_path / "old" / shard.name)
    cli("resplit", tmp_path / "old", tmp_path / "new", "--threadpool-count", 6)
    cli("resplit", converted("int4", 2), tmp_path / "ours", "--threadpool-count", 6)
    assert same_tensors(read_folder(tmp_path / "new"), read_folder(tmp_path / "ours"))
    cli("verify", tmp_path / "new")


def test_panels_that_cannot_be_cut_are_refused(tmp_path, cli, converted):
    whole = converted("fp8", 1, "--layout", "kt")
    assert "KT_FP8 weights have no NUMA slices" in cli(
        "resplit", whole, tmp_path / "x", "--threadpool-count", 2, code=3
    )
    thirds = converted("fp8", 3)
    assert "is not a multiple of 128" in cli("resplit", thirds, tmp_path / "x", "--threadpool-count", 12, code=3)
    shutil.copytree(thirds, tmp_path / "damaged")
    shard = min((tmp_path / "damaged").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\xc0\x7f")  # the last scale
    (tmp_path / "damaged" / "manifest.json").unlink()  # with it, another hash would be refused first
    output = cli("resplit", tmp_path / "damaged", tmp_path / "x", "--threadpool-count", 2, code=5)
    assert ".scales in model-00001" in output and "is nan" in output


def down_error(cli: Any, output: Path, source: Path) -> float:
    """Return the error over all experts that verify measures; resplit measures the same if a layer has one expert."""
    (report,) = json_lines(cli("verify", output, "--against", source, "--full", "--json"))
    return float(next(e["relative_error"] for e in report["errors"] if e["projection"] == "down"))


def test_plan_advises_to_convert_again_if_that_is_better(tmp_path, cli):
    source = conversion.checkpoint(tmp_path / "model", layers=1, experts=1)
    outputs = {1: tmp_path / "one", 2: tmp_path / "two"}
    for numa, output in outputs.items():
        cli("cpu", "-q", "-i", source, "-o", output, "--threadpool-count", numa)
    arguments = ("resplit", outputs[2], tmp_path / "new", "--threadpool-count", 1)
    *_, plan = json_lines(cli(*arguments, "--against", source, "--dry-run", "--json"))
    first, last = plan["notes"][0], plan["notes"][-1]
    assert not (tmp_path / "new").exists()
    events = json_lines(cli(*arguments, "--against", source, "--json"))
    assert set(plan["notes"]) <= {event["text"] for event in events if event["event"] == "note"}
    before, after, again = (down_error(cli, folder, source) for folder in (outputs[2], tmp_path / "new", outputs[1]))
    assert before < again < after
    reported = (
        f"has a relative error of {before:.4f} to {source}, {after:.4f} after resplit, and {again:.4f} if converted"
    )
    assert reported in last and "--scale" not in last
    assert f"converting again is better: ktconvert cpu -i {source} -o {tmp_path / 'new'} " in last
    result = next(event for event in events if event["event"] == "done")
    moved = result["stats"]["down_change"]["relative_error"]
    assert f"this changes them by {moved:.4f} (relative, measured on 1 expert)" in first
    assert first in (tmp_path / "new" / "README.md").read_text()


def test_advised_command_chooses_scales_in_the_same_way(source, tmp_path, cli):
    cli("cpu", "-q", "-i", source, "-o", tmp_path / "mse", "--scale", "mse")
    arguments = ("resplit", tmp_path / "mse", tmp_path / "new", "--threadpool-count", 1, "--against", source)
    *_, plan = json_lines(cli(*arguments, "--dry-run", "--json"))
    assert " --quant-method int4 --numa 1 --scale mse" in plan["notes"][-1]


def test_no_advice_if_resplit_is_as_good(tmp_path, cli, converted, source):
    arguments = ("resplit", converted("int8", 2), tmp_path / "new", "--threadpool-count", 2, "--dry-run")
    assert "resplit is as good" in cli(*arguments, "--against", source)
    other = conversion.checkpoint(tmp_path / "other", layers=2, experts=1, hidden=HIDDEN, width=WIDTH, seed=1)
    assert "from that of" in cli(*arguments, "--against", other, code=5)
    assert "from that of" in cli(*arguments, "--against", conversion.checkpoint(tmp_path / "small"), code=5)


def resplit_by_definition(
    bits: int, old: PackedSlices, count: int
) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]]:
    """Resplit column slices by the NumPy definitions of numerics.md, section 8."""
    codes = np.hstack([reference.unpack(bits, stored[0], part.n, part.k) for part, stored in old])
    scales = np.hstack([np.repeat(s[1].view(np.float32)[:, None], part.k, axis=1) for part, s in old])
    new = []
    for q, d in zip(np.hsplit(codes, count), np.hsplit(scales, count), strict=True):
        largest = d.max(axis=1, keepdims=True)
        ratio = np.where(largest > 0, d / np.where(largest > 0, largest, 1), 0).astype(np.float32)
        new.append((reference.pack(bits, np.rint(q * ratio).astype(np.int8)), largest[:, 0]))
    return new


@pytest.mark.parametrize("form", [AMXINT4, AMXINT8], ids=lambda form: form.name)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rearranging_equals_the_definition(form, data):
    legal = [1, 2, 3, 6] if form.grid.bits == 4 else [1, 2, 3, 4, 6]
    old_count, new_count = data.draw(st.sampled_from(legal)), data.draw(st.sampled_from(legal))
    projection, backward = data.draw(st.sampled_from(["gate", "down"])), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    old, new = (
        allocate_slices(form, Slicing(0, HIDDEN, WIDTH, count, True).slices(0, projection))
        for count in (old_count, new_count)
    )
    old, new = ([part for part in parts if part[0].backward == backward] for parts in (old, new))
    for part, stored in old:
        codes = rng.integers(form.grid.low, form.grid.high, (part.n, part.k), np.int8, endpoint=True)
        scales = np.float32(2.0) ** rng.integers(-126, 3, part.n) * rng.uniform(1, 2, part.n).astype(np.float32)
        scales[rng.random(part.n) < 0.1] = 0  # a row of zeros
        codes[scales == 0] = 0
        form.pack(codes, scales, stored)
    rearrange.rearrange_linear(form, old, new)
    if rearrange.is_cut_by_rows(old[0][0]):
        axis = 0
        for which in range(2):
            assert np.array_equal(*(np.concatenate([stored[which] for _, stored in side]) for side in (old, new)))
    else:
        axis = 1
        for (_, stored), expected in zip(new, resplit_by_definition(form.grid.bits, old, new_count), strict=True):
            assert np.array_equal(stored[0], expected[0]) and np.array_equal(stored[1].view(np.float32), expected[1])
    before, after = (np.concatenate([form.decode(s, p.n, p.k) for p, s in side], axis) for side in (old, new))
    if axis == 0 or not rearrange.requires_rounding(form, old_count, new_count):
        assert np.array_equal(before, after)
    else:
        half = np.hstack([np.repeat(s[1].view(np.float32)[:, None], part.k, axis=1) for part, s in new])
        bound = half.astype(np.float64) * form.grid.step / 2
        assert (np.abs(before.astype(np.float64) - after) <= bound * (1 + 1e-6) + 2.0**-149).all()


def rewrite_manifest(folder: Path) -> None:
    """Make the manifest list the current files, as after a conversion of a different model."""
    document = json.loads((folder / manifest.NAME).read_text())
    for file in document["files"]:
        file["sha256"] = publish.sha256_file(folder / file["name"])
    (folder / manifest.NAME).write_text(json.dumps({**document, "sha256": manifest.compute_digest(document)}))


def test_edited_input_is_detected(bench):
    old = bench.base / "old"
    assert bench.cpu(output=old).returncode == 0
    arguments = ("resplit", old, bench.output, "--threadpool-count", "1", "--cpuinfer-threads", "1")
    assert bench.run(*arguments).returncode == 0
    points = len(bench.calls())
    shutil.rmtree(bench.output)
    assert bench.run(*arguments, kill=points // 2).returncode == killpoint.KILLED
    conversion.flip_bit(old / "model-00001-of-00003.safetensors", -50000)  # a code of a gate projection
    rewrite_manifest(old)
    for again in (bench.run(*arguments), bench.run("resume", bench.output)):
        conversion.check_refusal(again, 5, "model-00001-of-00003.safetensors", "--verify-inputs")
    assert bench.run("resume", bench.output, "--verify-inputs").returncode == 0
    before = conversion.tree(bench.output)
    shutil.rmtree(bench.output)
    assert bench.run(*arguments).returncode == 0
    bench.check_output(before)
    conversion.check_refusal(bench.run(*arguments[:3], "--threadpool-count", "2"), 7, "--numa was 1, is 2")


def test_unsupported_outputs_are_refused(tmp_path, cli, converted, source):
    new = tmp_path / "new"

    def check_refusal(old: Path, code: int, *messages: str, numa: int = 2, options: tuple[str, ...] = ()) -> None:
        output = cli("resplit", old, new, "--threadpool-count", numa, *options, code=code)
        assert all(message in output for message in messages), output
        assert not new.exists()

    check_refusal(converted("int4", 2), 3, "; use --numa 1, 2, 3, 6.", numa=4)
    check_refusal(source, 5, "is a checkpoint, not an output")
    check_refusal(tmp_path / "absent", 5, "does not exist")
    check_refusal(converted("int4", 1, "--no-merge-safetensor"), 2, "loose", options=("--max-shard-size", "5GB"))
    cli("gpu", "-i", source, "-o", tmp_path / "gpu", "--quant-method", "RTN")
    check_refusal(tmp_path / "gpu", 3, "W8A16 weights have no NUMA slices")
    loose = converted("int4", 1, "--no-merge-safetensor")
    shutil.copytree(loose, tmp_path / "moe", ignore=shutil.ignore_patterns("*.json", "*.md"))
    for file in (tmp_path / "moe").rglob("INT4_*.kt"):
        file.rename(file.with_name(f"MOE_{file.name}"))
    check_refusal(tmp_path / "moe", 3, "MOE_INT4 weights cannot be rearranged")
    shutil.copytree(loose, tmp_path / "gone")
    next((tmp_path / "gone").rglob("INT4_down_0_*quant_.kt")).unlink()
    check_refusal(tmp_path / "gone", 5, "INT4_down_0", "convert it again")
    cli("resplit", converted("int4", 1), converted("int4", 1), "--threadpool-count", 2, "--overwrite", code=2)
    cli("resplit", loose, source, "--threadpool-count", 2, "--against", source, "--overwrite", code=2)
    cli("resplit", loose, new, "--threadpool-count", 2, "--max-memory", "1MB", code=4)


def test_impossible_numbers_are_refused(tmp_path, cli, converted):
    """A scale that is not finite, and a code below the smallest, if they would be rounded."""
    for kind, data, message in (
        ("scale", np.float32("nan").tobytes(), "the scale of row 0 is nan"),
        ("quant", b"\x80", "has a code outside -127..127"),
    ):
        damaged = tmp_path / kind
        shutil.copytree(converted("int8", 2, "--no-merge-safetensor"), damaged)
        file = next((damaged / "_layer_1" / "_numa_0").glob(f"INT8_down_0_*_{kind}_.kt"))
        file.write_bytes(data + file.read_bytes()[len(data) :])
        output = cli("resplit", damaged, tmp_path / "new", "--threadpool-count", 1, code=5)
        assert message in output and (file.name in output or "blk.1.ffn_down_exps.0" in output), output
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["resplit", "merge"])
def test_flipped_bit_of_the_input_is_refused(command: str, converted: Any, cli: Any, tmp_path: Path) -> None:
    """The hashes of the input's manifest detect it; otherwise the output would seem correct."""
    loose = ("--no-merge-safetensor",) if command == "merge" else ()
    damaged = shutil.copytree(converted("int8", 2, *loose), tmp_path / "in")
    # A code
    conversion.flip_bit(
        sorted(damaged.rglob("*quant_.kt" if loose else "*.safetensors"))[0], -1000 if loose else -50000
    )
    out = tmp_path / "out"
    arguments = ("-i", damaged, "-o", out) if command == "merge" else (damaged, out, "--threadpool-count", 1)
    output = cli(command, *arguments, code=5)
    assert "was changed: its sha256 is" in output and not out.exists()
