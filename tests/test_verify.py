"""`ktconvert verify`: a sound output passes, every kind of damage is reported by name, in our
outputs and in kt-kernel's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import formats_of
from ktconvert.layouts.outputs.measuring import measure
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.pipeline.cli.cpu import cpu
from ktconvert.pipeline.cli.verify import verify
from ktconvert.quantizers import ROW_GRIDS
from rig.safetensors import data_start, edit_header, header_of, read_file

GOLDEN = Path(__file__).parent / "golden"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SHAPES = ("int4-merged", "int8-merged", "int4-loose", "int8-loose")


def convert(source: Path, output: Path, *options: object) -> Path:
    """Run the command in this process."""
    done = CliRunner().invoke(cpu, ["-i", str(source), "-o", str(output), "-q", *map(str, options)])
    assert done.exception is None, done.output
    return output


def run(output: Path, *options: object) -> tuple[Result, dict[str, Any], str]:
    """Verify in this process: the result, the JSON report ({} where it ended before one), and the
    sentence of a failure."""
    done = CliRunner().invoke(verify, [str(output), "--json", *map(str, options)])
    report = json.loads(done.stdout) if done.stdout else {}
    if isinstance(done.exception, Exception) and not hasattr(done.exception, "exit_code"):
        raise done.exception  # what a user would see as a traceback
    return done, report, str(report.get("message") or done.exception or "")


def accepted(output: Path, *options: object) -> dict[str, Any]:
    """Verify and expect success."""
    done, report, sentence = run(output, *options)
    assert done.exit_code == 0 and report["ok"] and not sentence, sentence
    return report


def refused(output: Path, *options: object) -> tuple[dict[str, Any], str]:
    """Verify and expect exit code 6; the report, and the first problem with the remedy."""
    done, report, sentence = run(output, *options)
    assert getattr(done.exception, "exit_code", done.exit_code) == 6, done.output
    assert sentence.startswith(str(output)) and sentence.endswith("."), sentence
    if report:
        assert done.exit_code == 6 and sentence in done.stderr
    return report, sentence


def problems(report: dict[str, Any], check: str) -> list[str]:
    """The problems of one check."""
    return [problem for row in report["checks"] if row["name"] == check for problem in row["problems"]]


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Path]:
    """The bundled model in both methods, merged and loose, for two NUMA nodes."""
    root = tmp_path_factory.mktemp("converted")
    paths = {}
    for name in SHAPES:
        method, form = name.split("-")
        paths[name] = convert(
            example, root / name, "--quant-method", method, *(["--no-merge-safetensor"] if form == "loose" else [])
        )
    return paths


@pytest.fixture
def copy(conversions: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of them that may be damaged."""

    def one(name: str) -> Path:
        return Path(shutil.copytree(conversions[name], tmp_path / name))

    return one


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def without_manifest(output: Path) -> Path:
    """As kt-kernel's own outputs are."""
    (output / manifest.NAME).unlink()
    return output


def weight_file(output: Path, pattern: str = "*_quant_.kt") -> Path:
    """Some loose file of layer 1."""
    return next(iter(sorted((output / "_layer_1" / "_numa_1").glob(pattern))))


# ---- what is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversion_is_what_its_source_gives(name: str, conversions: dict[str, Path], example: Path) -> None:
    report = accepted(conversions[name], "--against", example, "--full", "--numa", 2, "--quant-method", name[:4])
    assert (report["experts"], report["hidden"], report["intermediate"], report["numa"]) == (8, 256, 256, 2)
    assert report["layers"] == [0, 1] and report["tensors"] == 2 * 8 * 3 * 2 * 2
    assert report["method"] == formats_of("cpu")[name[:4]].name and report["arrangement"] == name[5:]
    errors = {(e["layer"], e["projection"]): e for e in report["errors"]}
    assert set(errors) == {(layer, p) for layer in (0, 1) for p in ("gate", "up", "down")}
    low, high = {"int4": (0.05, 0.2), "int8": (0.002, 0.015)}[name[:4]]
    for error in errors.values():
        assert error["experts"] == 8 and low < error["relative_error"] <= error["worst_relative_error"] < high
        assert error["cosine"] == pytest.approx(1 - error["relative_error"] ** 2 / 2, abs=2e-3)
    assert report["worst"][0]["relative_error"] == max(e["worst_relative_error"] for e in errors.values())


def test_the_report_for_people(conversions: dict[str, Path], example: Path, cli: Any) -> None:
    output = cli("verify", conversions["int4-merged"], "--against", example).stdout
    assert "verified" in output and "quantized again: the same bytes" in output and "worst experts" in output
    assert cli("verify", conversions["int4-merged"], "-q").stdout == ""


def test_one_json_object_and_an_exit_code(copy: Callable[[str], Path], cli: Any) -> None:
    output = copy("int4-merged")
    flip(output / FIRST, -1)
    done = cli("verify", output, "--json", code=6)
    assert json.loads(done.stdout)["ok"] is False  # one object: loads() refuses a second line
    assert FIRST in done.stderr
    done = cli("verify", output, code=6)
    assert "NOT verified" in done.stdout and FIRST in done.stderr


def test_forms_of_one_conversion_are_equal(conversions: dict[str, Path]) -> None:
    report = accepted(conversions["int8-merged"], "--against", conversions["int8-loose"])
    assert report["checks"][-1]["name"] == "other"
    accepted(conversions["int4-loose"], "--against", conversions["int4-merged"])


@pytest.mark.parametrize("options", [["--save-backward-weights"], ["--max-shard-size", "100KB", "--non-experts", "copy"], ["--layers", "1"],
                                     ["--threadpool-count", 1], ["--no-merge-safetensor", "--save-backward-weights"]])  # fmt: skip
def test_every_way_to_convert(options: list[object], tmp_path: Path, example: Path) -> None:
    output = convert(example, tmp_path / "out", *options)
    report = accepted(output, "--against", example)
    assert report["backward"] == ("--save-backward-weights" in options)
    assert bool(report["other_tensors"]) == ("copy" in options)


def test_a_merged_folder(conversions: dict[str, Path], example: Path, tmp_path: Path, cli: Any) -> None:
    cli("merge", "-i", conversions["int4-loose"], "-o", tmp_path / "out", "--max-tensors", 50, "-r", example)
    accepted(tmp_path / "out", "--against", example)
    accepted(tmp_path / "out", "--against", conversions["int4-merged"])


def test_fp8(tmp_path: Path, write_qwen: Any) -> None:
    rng = np.random.default_rng(3)
    layer: dict[str, Any] = {}
    for projection in ("gate", "up", "down"):
        layer[projection] = rng.integers(0, 0x7F, (2, 256, 256), dtype=np.uint8)
        layer[f"{projection}.weight_scale_inv"] = rng.uniform(1e-3, 1e-2, (2, 2, 2)).astype(np.float32)
    source = write_qwen(tmp_path / "fp8", {0: layer}, "F8_E4M3", quantization_config={"weight_block_size": [128, 128]})
    accepted(convert(source, tmp_path / "out", "--save-backward-weights"), "--against", source)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4-merged", "int8-merged"])
@pytest.mark.parametrize(("at", "what"), [(70_000, "weight"), (-100, "scale")])
def test_a_flipped_byte_in_a_shard(
    name: str, at: int, what: str, copy: Callable[[str], Path], example: Path, conversions: dict[str, Path]
) -> None:
    output = copy(name)
    at += data_start(output / FIRST) if at > 0 else 0
    flip(output / FIRST, at)
    report, sentence = refused(output)
    assert FIRST in sentence and problems(report, "hashes") and not problems(report, "tensors")
    report, _ = refused(output, "--against", example)
    (problem,) = problems(report, "source")
    assert (
        f"NUMA part {0 if at > 0 else 1}, {what}: byte " in problem and "1 byte differs" in problem and FIRST in problem
    )
    (problem,) = problems(refused(output, "--against", conversions[name])[0], "other")
    assert problem.startswith("blk.0.ffn_") and "differs: byte " in problem
    refused(conversions[name], "--against", output)
    accepted(without_manifest(output))  # by structure alone it cannot be seen
    refused(output, "--against", example)


@pytest.mark.parametrize("pattern", ["INT4_up_3_*_quant_.kt", "INT4_down_5_*_scale_.kt"])
def test_a_flipped_byte_in_a_loose_file(pattern: str, copy: Callable[[str], Path], example: Path) -> None:
    output = copy("int4-loose")
    path = weight_file(output, pattern)
    flip(path, 200)
    report, sentence = refused(output, "--against", example)
    assert path.name in sentence
    (problem,) = problems(report, "source")
    assert problem.startswith(f"layer 1, expert {path.name.split('_')[2]}, ") and "byte 200 is 0x" in problem


@pytest.mark.parametrize("keep", [0, 5, 1000, 400_000])
def test_a_truncated_shard(keep: int, copy: Callable[[str], Path], example: Path) -> None:
    output = copy("int8-merged")
    path = output / FIRST
    path.write_bytes(path.read_bytes()[:keep])
    report, sentence = refused(output, "--against", example)
    assert FIRST in sentence and f"has {keep} bytes" in sentence and len(problems(report, "files")) == 1
    _, sentence = refused(without_manifest(output))
    assert FIRST in sentence


def test_a_truncated_loose_file(copy: Callable[[str], Path]) -> None:
    output = copy("int8-loose")
    path = weight_file(output)
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in refused(output)[1]
    _, sentence = refused(without_manifest(output))
    assert path.name in sentence and "where its name says" in sentence


def test_a_missing_shard(copy: Callable[[str], Path]) -> None:
    output = copy("int4-merged")
    (output / FIRST).unlink()
    assert f"{FIRST} is missing" in refused(output)[1]
    _, sentence = refused(without_manifest(output))
    assert f"{INDEX} names {FIRST}, which is missing" in sentence


def test_a_missing_loose_file_and_folder(copy: Callable[[str], Path]) -> None:
    output = copy("int4-loose")
    path = weight_file(output, "INT4_gate_7_*_scale_.kt")
    path.unlink()
    assert f"{path.name} is missing" in refused(output)[1]
    _, sentence = refused(without_manifest(output))
    assert "layer 1, expert 7, gate_proj, NUMA part 1, scale" in sentence
    shutil.rmtree(output / "_layer_1")
    (output / "_layer_1").mkdir()
    assert "_layer_1 holds no .kt files" in refused(output)[1]


def test_a_missing_expert_tensor(copy: Callable[[str], Path], write_safetensors: Any) -> None:
    """A shard that is whole, listed and hashed, but lacks a matrix: as kt-kernel's loader would crash on."""
    output = copy("int4-merged")
    lost = "blk.0.ffn_down_exps.7.numa.1.scale"
    tensors = read_file(output / FIRST)
    del tensors[lost]
    write_safetensors(output / FIRST, tensors)
    index = json.loads((output / INDEX).read_bytes())
    del index["weight_map"][lost]
    index["metadata"]["total_size"] = 0
    (output / INDEX).write_text(json.dumps(index))
    _, sentence = refused(without_manifest(output))
    assert f"{lost} is missing (layer 0, expert 7, down_proj, NUMA part 1, scale)" in sentence


def test_a_tensor_too_many_and_one_misnamed(copy: Callable[[str], Path]) -> None:
    output = without_manifest(copy("int4-merged"))
    key = "blk.0.ffn_gate_exps.3.numa.1.weight"
    edit_header(output / FIRST, lambda header: header.update({"blk.0.ffn_gate_exps.03.numa.1.weight": header.pop(key)}))
    report, _ = refused(output)
    assert any(key in problem for problem in problems(report, "index"))
    assert any("not a name that kt-kernel reads" in problem for problem in problems(report, "tensors"))


def test_a_wrong_dtype_and_a_wrong_size(copy: Callable[[str], Path]) -> None:
    output = without_manifest(copy("int4-merged"))
    key = "blk.0.ffn_gate_exps.3.numa.1.weight"  # kt-kernel's merge script writes F32 if "scale" is in its path

    def as_floats(header: dict[str, Any]) -> None:
        header[key] |= {"dtype": "F32", "shape": [header[key]["shape"][0] // 4]}

    edit_header(output / FIRST, as_floats)
    assert f"{key} in {FIRST} is F32" in refused(output)[1]
    edit_header(output / FIRST, lambda header: header[key].update(dtype="U8", shape=[128 * 256 // 2]))
    assert f"{key} in {FIRST} is U8" in refused(output)[1]


def test_wrong_numa_and_wrong_method(conversions: dict[str, Path]) -> None:
    for name, output in conversions.items():
        other = {"int4": "int8", "int8": "AMXINT4"}[name[:4]]
        _, sentence = refused(output, "--numa", 1)
        assert (
            "--numa 1 was given, the weights are for 2 NUMA parts" in sentence and "--kt-threadpool-count 2" in sentence
        )
        _, sentence = refused(output, "--quant-method", other)
        assert f"the weights have the sizes of {formats_of('cpu')[name[:4]].name}" in sentence
        assert f"--kt-method {formats_of('cpu')[name[:4]].name}" in sentence


def test_int8_bytes_under_int4_names(copy: Callable[[str], Path]) -> None:
    output = without_manifest(copy("int8-loose"))
    for path in output.rglob("*.kt"):
        path.rename(path.with_name(path.name.replace("INT8_", "INT4_")))
    assert "the files are called INT4, their sizes are those of AMXINT8" in refused(output)[1]


def test_a_changed_config(copy: Callable[[str], Path]) -> None:
    output = copy("int4-merged")
    path = output / "config.json"
    before = path.read_text()
    path.write_text(before.replace('"qwen3_moe"', '"olmoe"').replace('"Qwen3MoeForCausalLM"', '"OlmoeForCausalLM"'))
    other = "config.json is of OLMoE, and the manifest says that the experts are of Qwen3-MoE, Qwen3-Coder"
    assert other in problems(refused(output)[0], "config")
    path.write_text(before.replace('"hidden_size": 256', '"hidden_size": 512'))
    report, sentence = refused(output)
    assert "config.json says hidden_size = 512, layer 0 has hidden size 256" in sentence
    assert any("config.json" in problem for problem in problems(report, "hashes"))
    path.write_text("{")
    assert "config.json" in refused(output)[1]
    path.unlink()
    assert "config.json is missing" in refused(output)[1]


@pytest.mark.parametrize(
    "change", [{"numa": 1}, {"method": "AMXINT8"}, {"experts": 9}, {"layers": [0, 1, 2]}, {"hidden": 128}]
)
def test_a_manifest_that_says_otherwise(change: dict[str, Any], copy: Callable[[str], Path]) -> None:
    output = copy("int4-merged")
    path = output / manifest.NAME
    document = json.loads(path.read_bytes())
    document["model"] |= change
    path.write_text(json.dumps(document))
    assert problems(refused(output)[0], "tensors")


@pytest.mark.parametrize("change", [{"command": "merge"}, {"settings": {}}, {"source": []}, {"sha256": "0" * 64}])
def test_a_manifest_that_was_changed(change: dict[str, Any], copy: Callable[[str], Path]) -> None:
    """What it says has a hash, too; white space does not matter."""
    output = copy("int4-merged")
    path = output / manifest.NAME
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document))
    accepted(output)
    path.write_text(json.dumps(document | change))
    [problem] = problems(refused(output)[0], "hashes")
    assert problem.startswith("manifest.json is not what was written")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": {"name": "ktconvert-manifest", "version": 1}}'])
def test_a_damaged_manifest(text: str, copy: Callable[[str], Path]) -> None:
    output = copy("int4-merged")
    path = output / manifest.NAME
    unknown = json.dumps(json.loads(path.read_bytes()) | {"more": 1})
    for damaged in (text, unknown):
        path.write_text(damaged)
        assert "manifest" in refused(output)[1]


def test_types_of_a_manifest_are_not_trusted(copy: Callable[[str], Path], example: Path) -> None:
    output = copy("int4-merged")
    path = output / manifest.NAME
    good = json.loads(path.read_bytes())
    for part, name, value in [
        ("model", "numa", "2"),
        ("model", "layers", ["0"]),
        ("model", "experts", None),
        ("model", "scale", ["mse"]),
        ("model", "scale", 5),
        ("model", "quant_method", ["RTN"]),
        ("tool", "version", 1),
    ]:
        document = json.loads(path.read_bytes()) | {part: good[part] | {name: value}}
        path.write_text(json.dumps(document))
        run(output, "--against", example)  # whatever the damage, no traceback
        path.write_text(json.dumps(good))


def test_a_changed_index(copy: Callable[[str], Path]) -> None:
    output = without_manifest(copy("int4-merged"))
    good = json.loads((output / INDEX).read_bytes())
    name = "blk.1.ffn_up_exps.2.numa.0.weight"
    for change, words in (
        ({"metadata": {"total_size": 1}}, "total_size 1, the shards hold"),
        ({"weight_map": good["weight_map"] | {name: FIRST}}, f"names {name} in {FIRST}, but"),
        ({"weight_map": good["weight_map"] | {"x": FIRST}}, f"names x in {FIRST}, which does not hold it"),
        (
            {"weight_map": {k: v for k, v in good["weight_map"].items() if k != name}},
            f"{name}, which {INDEX} does not name",
        ),
        ({"weight_map": {name: "../x.safetensors"}}, "outside this directory"),
    ):
        (output / INDEX).write_text(json.dumps(good | change))
        assert words in refused(output)[1]
    (output / INDEX).unlink()
    assert any("no index" in note for note in accepted(output)["notes"])


def test_a_foreign_file(copy: Callable[[str], Path], write_safetensors: Any) -> None:
    output = copy("int4-merged")
    (output / "notes.txt").write_text("mine")
    assert accepted(output)["notes"] == ["not of the manifest: notes.txt"]
    (output / "original").mkdir()
    write_safetensors(output / "original" / FIRST, {"x": ("F32", np.zeros(1, np.float32))})
    assert f"original/{FIRST} does not belong here" in refused(output)[1]
    output = copy("int8-loose")
    stray = weight_file(output).with_name("INT8_gate_8_64Byte_scale_.kt")
    stray.write_bytes(bytes(64))
    assert f"{stray.name} does not belong here" in refused(output)[1]


def test_metadata_that_lies(copy: Callable[[str], Path]) -> None:
    output = without_manifest(copy("int4-merged"))
    edit_header(output / FIRST, lambda header: header["__metadata__"].update(numa="1"))
    assert f"{FIRST}: its metadata says numa 1, its tensors have 2" in refused(output)[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_scale_that_no_weight_can_have(value: float, copy: Callable[[str], Path]) -> None:
    output = without_manifest(copy("int8-loose"))
    path = weight_file(output, "INT8_down_2_*_scale_.kt")
    scales = np.fromfile(path, np.float32)
    scales[5] = value
    scales.tofile(path)
    assert f"scale of row 5 is {value} (layer 1, expert 2, down_proj" in refused(output)[1]


def test_a_flipped_byte_in_a_copied_tensor(tmp_path: Path, example: Path) -> None:
    output = without_manifest(convert(example, tmp_path / "out", "--non-experts", "copy"))
    accepted(output, "--against", example)
    shard = output / "model-00003-of-00003.safetensors"
    flip(shard, data_start(shard) + 1)
    (problem,) = problems(refused(output, "--against", example)[0], "source")
    assert shard.name in problem and "differs from" in problem and "at byte 1" in problem


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_never_ends_in_a_traceback(seed: int, copy: Callable[[str], Path]) -> None:
    """Headers, indexes and manifests with a few bytes replaced: reported or harmless, but never a crash."""
    rng = np.random.default_rng(seed)
    output = copy("int4-merged")
    name = (FIRST, INDEX, manifest.NAME, "config.json")[seed % 4]
    path = output / name
    data = bytearray(path.read_bytes())
    for at in rng.integers(0, min(len(data), 8000), 3):
        data[at] = rng.integers(32, 127)
    path.write_bytes(data)
    done, _, sentence = run(output)
    assert getattr(done.exception, "exit_code", done.exit_code) in (0, 6) if name == manifest.NAME else sentence
    run(without_manifest(output) if name != manifest.NAME else output)


# ---- against what it is not ------------------------------------------------------------------------------------------


def test_another_source(
    conversions: dict[str, Path], tmp_path: Path, example: Path, write_qwen: Any, random_experts: Any
) -> None:
    same_shape = write_qwen(tmp_path / "same", {n: random_experts(8, 256, 256, n) for n in (0, 1)})
    report, sentence = refused(conversions["int8-merged"], "--against", same_shape)
    assert "layer 0, expert 0, gate_proj, NUMA part 0, weight: byte 0 is" in sentence and "(and 191 more)" in sentence
    assert any("not those that the manifest says" in note for note in report["notes"])
    assert report["errors"][0]["relative_error"] > 0.5
    other_shape = write_qwen(tmp_path / "other", {n: random_experts(4, 256, 512, n) for n in (0, 1)})
    report, sentence = refused(conversions["int8-merged"], "--against", other_shape)
    assert "layer 0 has 8 experts of 256 x 256" in sentence and "has 4 of 256 x 512" in sentence
    more_layers = write_qwen(tmp_path / "more", {n: random_experts(8, 256, 256, n) for n in range(3)})
    assert any(
        "layers 2 of" in problem
        for problem in problems(refused(conversions["int8-merged"], "--against", more_layers)[0], "source")
    )


def test_a_damaged_source_is_bad_input(conversions: dict[str, Path], tmp_path: Path, example: Path) -> None:
    source = Path(shutil.copytree(example, tmp_path / "source"))
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-100])
    done, _, sentence = run(conversions["int4-merged"], "--against", source)
    assert getattr(done.exception, "exit_code", None) == 5 and path.name in sentence
    header = header_of(example / path.name)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    at = data_start(example / path.name) + header[name]["data_offsets"][0] + 2 * (256 * 7 + 200)
    data[at : at + 2] = (0x7FC0).to_bytes(2, "little")
    path.write_bytes(data)
    done, _, sentence = run(conversions["int4-merged"], "--against", source)
    assert getattr(done.exception, "exit_code", None) == 5
    assert name in sentence and "row 7, column 200" in sentence


def test_other_outputs(
    conversions: dict[str, Path], copy: Callable[[str], Path], tmp_path: Path, example: Path
) -> None:
    _, sentence = refused(conversions["int8-merged"], "--against", conversions["int4-loose"])
    assert "method is AMXINT8 here, AMXINT4 in" in sentence
    one = convert(example, tmp_path / "one", "--layers", 0)
    report, _ = refused(conversions["int4-merged"], "--against", one)
    assert problems(report, "other") == [f"layer 1 (96 tensors) is missing in {one}"]
    damaged = copy("int4-merged")
    (damaged / FIRST).write_bytes(b"")
    done, _, sentence = run(conversions["int4-merged"], "--against", damaged)
    assert getattr(done.exception, "exit_code", None) == 5 and FIRST in sentence


def test_what_is_no_output(tmp_path: Path, example: Path) -> None:
    for path, code in ((example, 3), (tmp_path, 3), (example / "config.json", 3), (tmp_path / "nothing", 5)):
        done, _, sentence = run(path)
        assert getattr(done.exception, "exit_code", None) == code and str(path) in sentence


def test_an_unfinished_output(tmp_path: Path) -> None:
    work = tmp_path / "out.work"
    work.mkdir()
    (work / "plan.json").write_text("{}")
    inside = tmp_path / "mounted" / ".ktconvert"
    inside.mkdir(parents=True)
    (inside / "plan.json").write_text("{}")
    assert f"ktconvert resume {tmp_path / 'out'}" in refused(tmp_path / "out")[1]
    assert f"ktconvert resume {tmp_path / 'out'}" in refused(work)[1]
    assert f"ktconvert resume {tmp_path / 'mounted'}" in refused(tmp_path / "mounted")[1]


# ---- kt-kernel's own outputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "case"), [("int4", "small_t2"), ("int8", "small_t2"), ("int8", "nodd2_t1")])
def test_kt_kernels_own_bytes(method: str, case: str, tmp_path: Path, write_safetensors: Any, write_qwen: Any) -> None:
    """The golden files, laid out as convert_cpu_weights.py and as merge_cpu_weights.py write them, and loose."""
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
        folder = loose / f"_layer_{layer}" / f"_numa_{numa}"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "quant" if what == "weight" else "scale"
        start = f"{method.upper()}_{kind.split('_')[1]}_{expert}_{len(tensor.data)}Byte_{suffix}_.kt"
        (folder / start).write_bytes(tensor.data)
    for output in (merged, converted, loose):
        report = accepted(output, "--against", source, "--quant-method", method, "--numa", case[-1])
        assert any("no manifest" in note for note in report["notes"])
        accepted(output, "--against", merged)
    assert accepted(converted)["other_tensors"] == 1
    accepted(
        convert(source, tmp_path / "ours", "--quant-method", method, "--threadpool-count", case[-1]), "--against", loose
    )


def test_opening(conversions: dict[str, Path], example: Path, tmp_path: Path) -> None:
    assert not is_output(example) and not is_output(tmp_path) and not is_output(tmp_path / "nothing")
    for name, path in conversions.items():
        output = open_output(path)
        opened = measure(output)
        assert is_output(path) and output.loose == name.endswith("loose")
        assert opened.fmt == formats_of("cpu")[name[:4]] and opened.shapes == {0: (8, 256, 256), 1: (8, 256, 256)}
        (place, what), stored = next(iter(output.tensors.items()))
        assert output.read(stored).nbytes == stored.nbytes and output.names.key(place, what).startswith("blk.0.ffn_")


def test_unfinished_run_of_kt_kernel(copy: Callable[[str], Path]) -> None:
    """What convert_cpu_weights.py leaves when it is interrupted: shards of an unknown total and no index."""
    output = without_manifest(copy("int4-merged"))
    (output / INDEX).unlink()
    for shard in sorted(output.glob("*.safetensors")):
        shard.rename(shard.with_name(shard.name.replace("of-00002", "of-PLACEHOLDER")))
    assert "PLACEHOLDER" in refused(output)[1]
