"""`ktconvert verify` on outputs of ktconvert and kt-kernel: correct outputs pass, and messages name damage.

--run and workers are covered, too.
"""

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ktconvert.layouts.errors import InputError, KTConvertError, OutputError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import formats_by_option
from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.native_quant.runtime import smoke
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import get_shared_pool
from ktconvert.pipeline.cli.conversion import cpu
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify import file_checks, item_checks
from ktconvert.pipeline.verify.inputs import open_inputs
from ktconvert.pipeline.verify.verify import report_document, verify
from ktconvert.quantizers import ROW_GRIDS
from rig import conversion
from rig.conversion import flip_bit
from rig.files import edit_json, rewrite
from rig.safetensors import Tensors, data_start, edit_file, edit_header, read_file
from rig.verifying import (
    example_outputs,
    failed_checks,
    find_check,
    invoke,
    problems,
    require_accepted,
    require_refused,
    run_verify,
)

GOLDEN = Path(__file__).parent / "golden"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
Copy = Callable[[str], Path]
SHAPES = ("int4-merged", "int8-merged", "int4-loose", "int8-loose")


def convert(source: Path, output: Path, *options: object) -> Path:
    invoke(cpu, "-i", source, "-o", output, *options)
    return output


@pytest.fixture(scope="module")
def conversions(packed_example: Callable[..., Path]) -> dict[str, Path]:
    """Convert the bundled model to INT4 and INT8, merged and loose, for two NUMA nodes."""
    return example_outputs(packed_example, SHAPES)


@pytest.fixture
def copy(conversions: dict[str, Path], tmp_path: Path) -> Copy:
    """Return a function that copies a conversion, to damage it."""
    return lambda name: Path(shutil.copytree(conversions[name], tmp_path / name))


def without_manifest(output: Path) -> Path:
    """Remove the manifest: outputs of kt-kernel have none."""
    (output / manifest.NAME).unlink()
    return output


def weight_file(output: Path, pattern: str = "*_quant_.kt") -> Path:
    """Return a loose file of layer 1."""
    return next(iter(sorted((output / "_layer_1" / "_numa_1").glob(pattern))))


@pytest.mark.parametrize("name", SHAPES)
def test_conversion_matches_its_source(name, conversions, example):
    report = require_accepted(
        conversions[name], "--against", example, "--full", "--numa", 2, "--quant-method", name[:4]
    )
    assert (report["experts"], report["hidden"], report["intermediate"], report["numa"]) == (8, 256, 256, 2)
    assert report["layers"] == [0, 1]
    assert report["tensors"] == 2 * 8 * 3 * 2 * 2
    assert report["method"] == formats_by_option("cpu")[name[:4]].name
    assert report["arrangement"] == name[5:]
    errors = {(e["layer"], e["projection"]): e for e in report["errors"]}
    assert set(errors) == {(layer, p) for layer in (0, 1) for p in ("gate", "up", "down")}
    low, high = {"int4": (0.05, 0.2), "int8": (0.002, 0.015)}[name[:4]]
    for error in errors.values():
        assert error["experts"] == 8
        assert low < error["relative_error"] <= error["worst_relative_error"] < high
        assert error["cosine"] == pytest.approx(1 - error["relative_error"] ** 2 / 2, abs=2e-3)
    assert report["worst"][0]["relative_error"] == max(e["worst_relative_error"] for e in errors.values())


def test_json_report_is_one_object_and_damage_gives_exit_code_6(conversions, copy, example, cli):
    said = cli("verify", conversions["int4-merged"], "--against", example).stdout
    assert "verified" in said
    assert "quantized again, same bytes" in said
    assert "worst experts" in said
    assert cli("verify", conversions["int4-merged"], "-q").stdout == ""
    output = copy("int4-merged")
    flip_bit(output / FIRST, -1)
    result = cli("verify", output, "--json", code=6)
    assert (
        json.loads(result.stdout)["ok"] is False and FIRST in result.stderr
    )  # one object: loads() refuses a second line
    result = cli("verify", output, code=6)
    assert "NOT verified" in result.stdout
    assert FIRST in result.stderr


@pytest.mark.parametrize("options", [["--save-backward-weights"], ["--max-shard-size", "100KB", "--non-experts", "copy"], ["--layers", "1"],
                                     ["--threadpool-count", 1], ["--no-merge-safetensor", "--save-backward-weights"]])  # fmt: skip
def test_every_conversion_option_verifies(options, tmp_path, example):
    output = convert(example, tmp_path / "out", *options)
    report = require_accepted(output, "--against", example)
    assert report["backward"] == ("--save-backward-weights" in options)
    assert bool(report["other_tensors"]) == ("copy" in options)


@pytest.mark.parametrize(("name", "at", "what"), [("int4-merged", 70_000, "weight"), ("int8-merged", -100, "scale")])
def test_flipped_byte_in_a_shard_is_found(name, at, what, copy, example, conversions):
    output = copy(name)
    at += data_start(output / FIRST) if at > 0 else 0
    flip_bit(output / FIRST, at)
    report = run_verify(output)
    assert FIRST in report["message"]
    assert failed_checks(report) == ["hashes"]
    (problem,) = problems(run_verify(output, "--against", example), "source")
    where = f"NUMA slice {0 if at > 0 else 1}, {what}: byte "
    assert where in problem
    assert "1 byte differs" in problem
    assert FIRST in problem
    (problem,) = problems(run_verify(output, "--against", conversions[name]), "other")
    assert problem.startswith("blk.0.ffn_")
    assert "differs: byte " in problem
    require_refused(conversions[name], "--against", output)
    require_accepted(without_manifest(output))  # by structure alone it cannot be seen
    require_refused(output, "--against", example)


MISNAMED = "blk.0.ffn_gate_exps.3.numa.1.weight"
OTHER_NAME = MISNAMED.replace(".3.", ".03.")
REMOVED_TENSOR = "blk.0.ffn_down_exps.7.numa.1.scale"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _remove_tensor(output: Path) -> None:
    """Remove a matrix from a shard and the index: kt-kernel's loader would crash."""
    edit_file(output / FIRST, lambda tensors: tensors.pop(REMOVED_TENSOR))
    edit_json(
        output / INDEX, lambda index: (index["weight_map"].pop(REMOVED_TENSOR), index["metadata"].update(total_size=0))
    )


def _rename_all(output: Path, pattern: str, old: str, new: str) -> None:
    for path in output.rglob(pattern):
        path.rename(path.with_name(path.name.replace(old, new)))


def _scale(output: Path, value: float) -> None:
    path = weight_file(output, "INT8_down_2_*_scale_.kt")
    scales = np.fromfile(path, np.float32)
    scales[5] = value
    scales.tofile(path)


def _header(output: Path, name: str, **change: Any) -> None:
    edit_header(output / FIRST, lambda header: header[name].update(change))


def _map(output: Path, **change: Any) -> None:
    edit_json(output / INDEX, lambda index: index["weight_map"].update(change))


# Damage -> the output, a function that damages it, and words of the message if there is no manifest.
IN_LAYER_1 = "blk.1.ffn_up_exps.2.numa.0.weight"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a loose file cut off": ("int8-loose", lambda o: _truncate(weight_file(o)), "but its name states"),
    "a shard cut off": ("int8-merged", lambda o: rewrite(o / FIRST, (o / FIRST).read_bytes()[:400_000]), FIRST),
    "a shard cut off in its header": ("int8-merged", lambda o: rewrite(o / FIRST, b"short"), FIRST),
    "another name": ("int4-merged", lambda o: ((o / INDEX).unlink(), edit_header(o / FIRST, lambda h: h.update({OTHER_NAME: h.pop(MISNAMED)}))), "kt-kernel does not read this name"),
    "no shard": ("int4-merged", lambda o: (o / FIRST).unlink(), f"{INDEX} names {FIRST}, which is missing"),
    "no loose file": ("int4-loose", lambda o: weight_file(o, "INT4_gate_7_*_scale_.kt").unlink(), "layer 1, expert 7, gate_proj, NUMA slice 1, scale"),
    "an empty layer": ("int4-loose", lambda o: [p.unlink() for p in o.glob("_layer_1/*/*")], "_layer_1 has no .kt files"),
    "no tensor": ("int4-merged", _remove_tensor, f"{REMOVED_TENSOR} is missing (layer 0, expert 7, down_proj, NUMA slice 1, scale)"),
    # kt-kernel's merge script writes F32 if "scale" is in its path
    "another dtype": ("int4-merged", lambda o: _header(o, MISNAMED, dtype="F32", shape=[128 * 256 // 8]), f"{MISNAMED} in {FIRST} is F32"),
    "another type of bytes": ("int4-merged", lambda o: _header(o, MISNAMED, dtype="U8", shape=[128 * 256 // 2]), f"{MISNAMED} in {FIRST} is U8"),
    "int8 under int4's name": ("int8-loose", lambda o: _rename_all(o, "*.kt", "INT8_", "INT4_"), "the files are named INT4, but have the sizes of AMXINT8"),
    "metadata that lies": ("int4-merged", lambda o: _header(o, "__metadata__", numa="1"), f"{FIRST}: its metadata has numa 1, but its tensors have 2"),
    "codes of -8": ("int4-loose", lambda o: rewrite(weight_file(o), b"\x88" + weight_file(o).read_bytes()[1:]), "has 2 codes of -8, which kt-kernel misreads"),
    "NaN": ("int8-loose", lambda o: _scale(o, np.nan), "scale of row 5 is nan (layer 1, expert 2, down_proj"),
    "infinity": ("int8-loose", lambda o: _scale(o, np.inf), "scale of row 5 is inf (layer 1, expert 2, down_proj"),
    "a negative scale": ("int8-loose", lambda o: _scale(o, -1.0), "scale of row 5 is -1.0 (layer 1, expert 2, down_proj"),
    "another total": ("int4-merged", lambda o: edit_json(o / INDEX, lambda index: index["metadata"].update(total_size=1)), "total_size 1, but the shards have"),
    "another shard": ("int4-merged", lambda o: _map(o, **{IN_LAYER_1: FIRST}), f"names {IN_LAYER_1} in {FIRST}, but"),
    "too much in the index": ("int4-merged", lambda o: _map(o, x=FIRST), f"names x in {FIRST}, which does not contain it"),
    "too little in the index": ("int4-merged", lambda o: edit_json(o / INDEX, lambda index: index["weight_map"].pop(IN_LAYER_1)), f"{IN_LAYER_1}, which {INDEX} does not name"),
    "a shard outside": ("int4-merged", lambda o: _map(o, **{IN_LAYER_1: "../x.safetensors"}), "outside this directory"),
    # what convert_cpu_weights.py leaves when it is interrupted: shards of an unknown total and no index
    "an interrupted run": ("int4-merged", lambda o: ((o / INDEX).unlink(), _rename_all(o, "*.safetensors", "of-00002", "of-PLACEHOLDER")), "PLACEHOLDER"),
}  # fmt: skip


@pytest.mark.parametrize("which", DAMAGE)
def test_damage_is_named(which, copy):
    name, damage, words = DAMAGE[which]
    output = copy(name)
    damage(output)
    require_refused(output)  # by its manifest, whatever else is wrong
    assert words in require_refused(without_manifest(output))


def test_the_index_of_a_missing_shard_is_a_problem(copy):
    output = copy("int4-merged")
    (output / FIRST).unlink()
    report = run_verify(output)
    assert failed_checks(report) == ["files", "index"]
    assert problems(report, "index") == [f"{INDEX} names {FIRST}, which is missing"]


def test_inspect_reports_the_same_codes_as_verify(copy, cli):
    name, damage, words = DAMAGE["codes of -8"]
    output = copy(name)
    assert json.loads(cli("inspect", output, "--json").stdout)["codes"] is None  # the manifest vouches for them
    assert "all from -7 to 7" in cli("inspect", without_manifest(output)).stdout
    damage(output)
    found = json.loads(cli("inspect", output, "--json").stdout)
    assert found["complete"]
    assert found["codes"] == problems(run_verify(output), "codes")
    assert words in cli("inspect", output).stdout


@pytest.mark.parametrize("name", ["int4-merged", "int8-loose"])
def test_wrong_numa_or_method_is_refused(name, conversions):
    output, ours = conversions[name], formats_by_option("cpu")[name[:4]].name
    sentence = require_refused(output, "--numa", 1)
    assert "the weights are for 2 NUMA slices, not for --numa 1" in sentence
    assert "--kt-threadpool-count 2" in sentence
    sentence = require_refused(output, "--quant-method", {"int4": "int8", "int8": "AMXINT4"}[name[:4]])
    assert f"the weights have the sizes of {ours}" in sentence
    assert f"--kt-method {ours}" in sentence


def test_changed_config_is_found(copy):
    output = copy("int4-merged")
    path = output / "config.json"
    before = path.read_text()
    path.write_text(before.replace('"qwen3_moe"', '"olmoe"').replace('"Qwen3MoeForCausalLM"', '"OlmoeForCausalLM"'))
    other = "config.json belongs to OLMoE, but the experts to Qwen3-MoE, Qwen3-Coder according to the manifest"
    assert other in problems(run_verify(output), "config")
    path.write_text(before.replace('"hidden_size": 256', '"hidden_size": 512'))
    report = run_verify(output)
    assert "config.json has hidden_size = 512, but layer 0 has hidden size 256" in report["message"]
    assert any("config.json" in problem for problem in problems(report, "hashes"))
    path.write_text("{")
    assert "config.json" in require_refused(output)
    path.unlink()
    assert "config.json is missing" in require_refused(output)


LIES = [{"numa": 1}, {"method": "AMXINT8"}, {"experts": 9}, {"layers": [0, 1, 2]}, {"hidden": 128}]


@pytest.mark.parametrize("change", [*LIES, {"layers": ["0"]}, {"scale": 5}, {"tool": {"version": 1}}])
def test_manifest_that_contradicts_the_tensors_is_refused(change, copy, example):
    """No damage causes a traceback."""
    output = copy("int4-merged")
    edit_json(output / manifest.NAME, lambda whole: (whole if "tool" in change else whole["model"]).update(change))
    report = run_verify(output, "--against", example)
    assert report["message"]
    assert change not in LIES or problems(report, "tensors")


def test_changed_manifest_is_found(copy):
    """The contents of the manifest have a hash, too; white space does not matter."""
    output = copy("int4-merged")
    edit_json(output / manifest.NAME, lambda document: None)
    require_accepted(output)
    edit_json(output / manifest.NAME, lambda document: document.update(command="merge"))
    [problem] = problems(run_verify(output), "hashes")
    assert problem.startswith("manifest.json was changed")


def test_both_readers_must_read_the_same(copy):
    """Our parser reads the offset -0 as 0; the safetensors package refuses it."""
    output = without_manifest(copy("int4-merged"))
    raw = (output / FIRST).read_bytes()
    stop = data_start(output / FIRST)
    header = raw[8:stop].replace(b'"data_offsets":[0,', b'"data_offsets":[-0,')
    if len(header) > stop - 8:
        header = header.rstrip(b" ")
    rewrite(output / FIRST, len(header).to_bytes(8, "little") + header + raw[stop:])
    [problem] = problems(run_verify(output), "safetensors")
    assert problem.startswith(f"{FIRST}: the safetensors package cannot read it (")
    assert FIRST in require_refused(output)

    output = open_output(copy("int8-merged"))
    header = output.headers[FIRST]
    first, *rest = header.entries
    misread = replace(header, entries=(msgspec.structs.replace(first, shape=(*first.shape, 1)), *rest[1:]))
    check = file_checks.check_safetensors(
        replace(output, headers={**output.headers, FIRST: misread}), measure_output(output)
    )
    shape = list(first.shape)
    assert check is not None
    assert sorted(check.problems) == sorted([
        f"{FIRST}: the safetensors package reads {first.name} as {first.dtype} {shape}, "
        f"but ktconvert as {first.dtype} {[*shape, 1]}",
        f"{FIRST}: the safetensors package finds {rest[0].name}, but ktconvert does not",
    ])  # fmt: skip


def test_foreign_files_are_reported(copy, write_safetensors):
    output = copy("int4-merged")
    (output / "notes.txt").write_text("mine")
    document = require_accepted(output)
    assert document["notes"] == ["not in the manifest: notes.txt"]
    assert "1 extra file" in json.dumps(document) and "no extra files" not in json.dumps(document)
    (output / "original").mkdir()
    write_safetensors(output / "original" / FIRST, {"x": ("F32", np.zeros(1, np.float32))})
    message = require_refused(output)
    assert f"original/{FIRST} does not belong to the output" in message
    assert message.endswith("; move it elsewhere.")
    output = copy("int8-loose")
    stray = weight_file(output).with_name("INT8_gate_8_64Byte_scale_.kt")
    stray.write_bytes(bytes(64))
    assert f"{stray.name} does not belong to the output" in require_refused(output)
    (output / "model.safetensors").touch()
    assert "model.safetensors does not belong to the output" in require_refused(output)


def test_flipped_byte_in_a_copied_tensor_is_found(tmp_path, example):
    output = without_manifest(convert(example, tmp_path / "out", "--non-experts", "copy"))
    require_accepted(output, "--against", example)
    shard = output / "model-00003-of-00003.safetensors"
    flip_bit(shard, data_start(shard) + 1)
    (problem,) = problems(run_verify(output, "--against", example), "source")
    assert shard.name in problem
    assert "differs from" in problem
    assert "at byte 1" in problem


def test_wrong_source_is_reported(conversions, tmp_path, write_qwen, random_experts):
    def write(name: str, experts: int, width: int, layers: int) -> Path:
        return write_qwen(tmp_path / name, {n: random_experts(experts, 256, width, n) for n in range(layers)})

    output, same_shape = conversions["int8-merged"], write("same shape", 8, 256, 2)
    report = run_verify(output, "--against", same_shape)
    assert report["message"] == (
        f"{output}: its experts have nothing in common with those of {same_shape}, which is a different model; give "
        "the model that was converted, whose files are in manifest.json."
    )
    assert any("differ from the source in the manifest" in note for note in report["notes"])
    report = run_verify(output, "--against", write("other shape", 4, 512, 2))
    assert "layer 0 has 8 experts of 256 x 256, but 4 of 256 x 512 in" in report["message"]
    assert "which is a different model; give" in report["message"] and len(problems(report, "source")) == 1
    longer = write("more layers", 8, 256, 3)
    report = run_verify(convert(same_shape, tmp_path / "out"), "--against", longer)
    assert problems(report, "source") == [f"{longer} has 1 more layer: 2"]


def test_damaged_source_is_bad_input(conversions, tmp_path, example):
    source = Path(shutil.copytree(example, tmp_path / "source"))
    path, name = source / "model.safetensors", "model.layers.1.mlp.experts.3.down_proj.weight"

    def spoil(tensors: Tensors) -> None:
        bits = tensors[name].bits.copy()
        bits[7, 200] = 0x7FC0
        tensors[name] = tensors[name]._replace(data=bits.tobytes())

    edit_file(path, spoil)
    report = run_verify(conversions["int4-merged"], "--against", source)
    assert report["code"] == 5
    assert name in report["message"]
    assert "row 7, column 200" in report["message"]
    path.write_bytes(path.read_bytes()[:-100])
    report = run_verify(conversions["int4-merged"], "--against", source)
    assert report["code"] == 5
    assert path.name in report["message"]


def test_an_adapter_is_no_source(conversions, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    report = run_verify(conversions["int8-merged"], "--against", tmp_path)
    assert report["code"] == 5
    assert report["message"] == f"{tmp_path}: is a LoRA adapter, not a model; give the model that it was trained for."


def test_differences_from_a_second_output_are_named(conversions, copy, tmp_path, example):
    message = require_refused(conversions["int8-merged"], "--against", conversions["int4-loose"])
    assert "is not the same conversion as" in message and "it has method AMXINT8, not AMXINT4; compare" in message
    searched = convert(example, tmp_path / "searched", "--scale", "mse")
    message = require_refused(conversions["int4-merged"], "--against", searched)
    assert f"was not made like {searched}: --scale absmax, not mse; compare outputs of the same model" in message
    one = convert(example, tmp_path / "one", "--layers", 0)
    report = run_verify(conversions["int4-merged"], "--against", one)
    assert problems(report, "other") == [f"layer 1 (96 tensors) is missing in {one}"]
    damaged = copy("int4-merged")
    (damaged / FIRST).write_bytes(b"")
    report = run_verify(conversions["int4-merged"], "--against", damaged)
    assert report["code"] == 5
    assert FIRST in report["message"]


def test_directory_without_an_output_is_refused(tmp_path, example):
    for path in (example, tmp_path, example / "config.json", tmp_path / "nothing"):
        report = run_verify(path)
        assert report["code"] == 5
        assert str(path) in report["message"]


def test_a_file_of_an_output_is_refused_with_its_directory(conversions, example):
    output = conversions["int4-merged"]
    assert f"{FIRST}: is a file, not an output; give the directory {output}." in run_verify(output / FIRST)["message"]
    other = run_verify(example / "model.safetensors")
    assert other["code"] == 5
    assert "is a file, not an output; give the directory that `ktconvert cpu`" in other["message"]


def test_unfinished_output_is_refused(tmp_path):
    for work in (tmp_path / "out.work", tmp_path / "mounted" / ".ktconvert"):
        work.mkdir(parents=True)
        (work / "plan.json").write_text("{}")
    for path, finished in (("out", "out"), ("out.work", "out"), ("mounted", "mounted")):
        assert f"ktconvert resume {tmp_path / finished}" in require_refused(tmp_path / path)


@pytest.mark.parametrize(("method", "case"), [("int4", "small_t2"), ("int8", "small_t2"), ("int8", "nodd2_t1")])
def test_outputs_of_kt_kernel_verify(method, case, tmp_path, write_safetensors, write_qwen):
    """The golden files, arranged as convert_cpu_weights.py and merge_cpu_weights.py write them, and loose."""
    name = f"amx_{method}.v{ROW_GRIDS[method].version}.{case}.safetensors"
    tensors = read_file(GOLDEN / name)
    source = write_qwen(tmp_path / "source", {0: {p: tensors[f"in.{p}"].bits for p in ("gate", "up", "down")}})
    experts = {key: value for key, value in tensors.items() if key.startswith("blk.")}
    merged, converted, loose = (tmp_path / n for n in ("merged", "converted", "loose"))
    for folder in (merged, converted):
        folder.mkdir()
    write_safetensors(merged / "model-00001.safetensors", experts)
    other = {"embed_tokens.weight": read_file(source / "model.safetensors")["model.embed_tokens.weight"]}
    shards = {"model-00001-of-00002.safetensors": experts, "model-00002-of-00002.safetensors": other}
    for shard, held in shards.items():
        write_safetensors(converted / shard, held)
    index = {"metadata": {"total_size": 0}, "weight_map": {key: s for s, held in shards.items() for key in held}}
    (converted / INDEX).write_text(json.dumps(index, indent=2))
    shutil.copy(source / "config.json", converted / "config.json")
    for key, tensor in experts.items():
        _, layer, kind, expert, _, numa, what = key.split(".")
        name = f"{method.upper()}_{kind.split('_')[1]}_{expert}_{len(tensor.data)}Byte"
        file = loose / f"_layer_{layer}" / f"_numa_{numa}" / f"{name}_{'quant' if what == 'weight' else 'scale'}_.kt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tensor.data)
    for output in (merged, converted, loose):
        report = require_accepted(output, "--against", source, "--quant-method", method, "--numa", case[-1])
        assert any("no manifest" in note for note in report["notes"])
        require_accepted(output, "--against", merged)
    assert require_accepted(converted)["other_tensors"] == 1
    ours = convert(source, tmp_path / "ours", "--quant-method", method, "--threadpool-count", case[-1])
    require_accepted(ours, "--against", loose)


@pytest.mark.parametrize("name", SHAPES[:2])
def test_run_computes_a_conversion(name, conversions):
    check = find_check(require_accepted(conversions[name], "--run"), "run")
    assert "layer 0, 8 experts, 24 tokens: finite" in check["result"]
    assert all(words in check["result"] for words in ("(exact)", "(default)", f"at most {smoke.BOUND}"))


HUGE = [("int8-loose", "down", 3e38, "not finite"), ("int4-merged", "down", 1e9, "times the other experts'")]


@pytest.mark.parametrize(("name", "projection", "scale", "words"), HUGE)
def test_huge_scale_is_found(name, projection, scale, words, copy):
    output = without_manifest(copy(name))
    tensor = open_output(output).tensors[SliceId(0, 5, projection, False, 1), "scale"]
    with (output / tensor.file).open("r+b") as file:
        file.seek(tensor.start + 4 * 7)
        file.write(np.array([scale], "<f4").tobytes())
    report = run_verify(output, "--run")
    assert report["code"] == 6 and failed_checks(report) == ["run"], "nothing else finds it"
    assert words in find_check(report, "run")["problems"][0]
    assert "expert 5" in find_check(report, "run")["problems"][0]
    assert "convert it again" in report["message"]


def test_run_refuses_methods_that_only_kt_kernel_computes(copy, cli):
    output = without_manifest(copy("int8-loose"))
    for path in output.rglob("*.kt"):
        path.rename(path.with_name(path.name.replace("INT8", "MOE_INT8")))
    assert "without --run" in cli("verify", output, "--run", code=3).stderr


@pytest.mark.parametrize("wrong", ["expert", "panel", "token", "nan"])
def test_wrong_runtime_is_found(wrong, conversions, monkeypatch):
    forward = KTExperts.forward

    def broken(self: KTExperts, hidden: Any, ids: Any, weights: Any, **rest: Any) -> Any:
        if wrong == "expert":
            ids = np.where(ids == 4, 1, ids)
        out = forward(self, hidden, np.ascontiguousarray(ids), weights, **rest)
        if wrong == "panel":
            out[:, 64:96] = 0
        elif wrong == "token" and ids.shape[1] > 1:
            out[2] = out[0]
        elif wrong == "nan":
            out[1, 1] = 0x7FC0
        return out

    monkeypatch.setattr(KTExperts, "forward", broken)
    problems = smoke.smoke(conversions["int8-merged"], 0, 3, get_shared_pool(1)).problems
    words = {"expert": "expert 4", "panel": "panel 2 of 32", "token": "token 2, 3 experts", "nan": "not finite"}[wrong]
    assert any(words in problem for problem in problems), problems
    assert any("exact" in problem for problem in problems)
    assert any("default" in problem for problem in problems)


OUTPUTS = {
    "merged": ("cpu",),
    "loose": ("cpu", "--no-merge-safetensor"),
    "mxfp4, all else kept": ("cpu", "--quant-method", "mxfp4", "--non-experts", "keep"),
    "for the GPU": ("gpu", "--quant-method", "RTN"),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "model", layers=2)


def reported(chosen: VerifyOptions, workers: Executor | None) -> str:
    return json.dumps(report_document(verify(chosen, Reporter(verbosity=-1), workers, 1)), sort_keys=True)


@pytest.mark.parametrize("which", OUTPUTS)
def test_workers_give_the_same_report(source, workers, tmp_path, cli, which):
    output = tmp_path / "out"
    command, *options = OUTPUTS[which]
    cli(command, "-i", source, "-o", output, *options)
    chosen = VerifyOptions(output=output, against=str(source), load=False, full=True)
    assert '"ok": true' in reported(chosen, None)
    assert reported(chosen, workers) == reported(chosen, None)
    file = max(output.rglob("*.safetensors" if which != "loose" else "*.kt"), key=lambda path: path.stat().st_size)
    flip_bit(file, -100)
    assert '"ok": false' in reported(chosen, None)
    assert reported(chosen, workers) == reported(chosen, None)
    assert reported(replace(chosen, against=None), workers) == reported(replace(chosen, against=None), None)


def test_workers_compare_outputs_and_dequantized_checkpoints(source, workers, tmp_path, cli):
    merged, loose, whole = tmp_path / "merged", tmp_path / "loose", tmp_path / "whole"
    cli("cpu", "-i", source, "-o", merged)
    cli("cpu", "-i", source, "-o", loose, "--no-merge-safetensor")
    cli("dequantize", source, whole)
    for chosen in (VerifyOptions(output=merged, against=str(loose)), VerifyOptions(output=whole, against=str(source))):
        assert '"ok": true' in reported(chosen, None)
        assert reported(chosen, workers) == reported(chosen, None)


def test_worker_with_different_files_is_refused(source, workers, tmp_path, cli):
    output, mine = tmp_path / "out", tmp_path / "mine"
    shutil.copytree(source, mine)
    cli("cpu", "-i", mine, "-o", output)
    opened = open_inputs(VerifyOptions(output=output, against=str(mine)))
    order = item_checks.WorkerTask(opened.options, "run", "0.0.0", opened.identity, 1)
    failure = workers.submit(item_checks.check_as_worker, order, "hashes", []).result()
    assert isinstance(failure, OutputError)
    assert f"host {os.uname().nodename}: ktconvert " in str(failure)
    assert "0.0.0" in str(failure)
    (mine / "model-00001-of-00003.safetensors").unlink()
    order = replace(order, version=item_checks.tool_version())
    check = lambda _: None  # noqa: E731  # not a function of a module: it cannot travel
    with pytest.raises(KTConvertError, match="lost by the executor"):
        list(item_checks.check_on_workers(workers, check, "hashes", [1], [1]))
    failure = workers.submit(item_checks.check_as_worker, order, "hashes", []).result()
    assert isinstance(failure, InputError)
    assert f"host {os.uname().nodename}: {mine}" in str(failure)
    opened.close()


def test_worker_reads_replaced_files(tmp_path, cli):
    output, mine = tmp_path / "out", conversion.checkpoint(tmp_path / "mine", layers=1)
    cli("cpu", "-i", mine, "-o", output)
    chosen = VerifyOptions(output=output, against=str(mine), load=False)
    with ThreadPoolExecutor(1) as worker:
        assert '"ok": true' in reported(chosen, worker)
        shard = mine / "model-00001-of-00002.safetensors"
        other = Path(shutil.copy(shard, shard.with_name("other")))
        flip_bit(other)
        other.rename(shard)
        assert '"ok": false' in reported(chosen, None)
        assert reported(chosen, worker) == reported(chosen, None)


def test_executor_option_gives_the_same_json(source, tmp_path, cli):
    output = tmp_path / "out"
    cli("cpu", "-i", source, "-o", output)
    line = ("verify", output, "--against", source, "--json")
    assert cli(*line, "--executor", "dask:local:1").stdout == cli(*line).stdout
