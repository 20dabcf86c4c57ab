"""`ktconvert cpu` on real files: the output has the same bytes with every instruction set and number of threads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ktconvert.layouts.files.shards import index_json
from ktconvert.native_quant import kernels
from ktconvert.quantizers import reference
from rig.safetensors import Tensors, data_start, read_file, read_folder

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(p.name.removesuffix(".safetensors") for p in GOLDEN.glob("*_t?.safetensors") if "backward" not in p.name)


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_golden_files(case: str, tmp_path: Path, cli: Any, write_qwen: Any) -> None:
    golden, source, options = read_golden_case(case, tmp_path, write_qwen)
    cli("cpu", "-i", source, "-o", tmp_path / "out", *options)
    assert read_folder(tmp_path / "out") == {k: v for k, v in golden.items() if k.startswith("blk.")}


def read_golden_case(case: str, folder: Path, write_qwen: Any) -> tuple[Tensors, Path, list[str]]:
    """Return the tensors of a golden file, its source, and the options of its conversion."""
    golden = read_file(GOLDEN / f"{case}.safetensors")
    source = write_qwen(folder / "in", {0: {p: golden[f"in.{p}"].bits for p in ("gate", "up", "down")}})
    return golden, source, ["--quant-method", "int4" if "int4" in case else "int8", "--threadpool-count", case[-1]]


@pytest.mark.parametrize("case", ["amx_int4.v1.backward_t2", "amx_int8.v1.backward_t1"])
def test_loose_and_backward_outputs_equal_golden_files(case: str, tmp_path: Path, cli: Any, write_qwen: Any) -> None:
    golden, source, options = read_golden_case(case, tmp_path, write_qwen)
    options.append("--save-backward-weights")
    cli("cpu", "-i", source, "-o", tmp_path / "loose", "--no-merge-safetensor", *options)
    ours = {str(p.relative_to(tmp_path / "loose")): p.read_bytes() for p in (tmp_path / "loose").rglob("*.kt")}
    theirs = {k.removeprefix("file:"): v.data for k, v in golden.items() if k.startswith("file:")}
    backward = {name: data for name, data in ours.items() if "_bwd_" in name}
    assert theirs
    assert {name: ours[name] for name in theirs} == theirs
    assert backward.keys() == {name for name in theirs if "_bwd_" in name}

    cli("cpu", "-i", source, "-o", tmp_path / "direct", *options)
    cli("merge", "-i", tmp_path / "loose", "-o", tmp_path / "merged", "--max-tensors", 7)
    assert read_folder(tmp_path / "merged") == read_folder(tmp_path / "direct")
    assert any("_bwd_exps" in name for name in read_folder(tmp_path / "direct"))


def test_output_does_not_depend_on_threads_kernels_or_paths(
    tmp_path: Path, cli: Any, example: Path, read_tree: Any
) -> None:
    """The kernels, the number of threads, their batch size, the folders and the time do not matter."""
    copy = shutil.copytree(example, tmp_path / "elsewhere" / "copy")
    cli("cpu", "-i", example, "-o", tmp_path / "a")
    expected = read_tree(tmp_path / "a")
    assert not any(str(tmp_path).encode() in data for data in expected.values())
    for isa in kernels.available_isas():
        how = ("--cpuinfer-threads", 1 + (isa == kernels.isa()), "--max-memory", "500MiB")
        cli("cpu", "-i", copy, "-o", tmp_path / "deep" / isa, *how, env={"KTCONVERT_ISA": isa})
        assert read_tree(tmp_path / "deep" / isa) == expected, isa
    program = "from ktconvert.pipeline import cli; from ktconvert.pipeline.stages import expert_files; "
    program += "expert_files.BATCH = 1; cli.main()"
    subprocess.run([sys.executable, "-c", program, "cpu", "-i", example, "-o", tmp_path / "small"], check=True)
    assert read_tree(tmp_path / "small") == expected
    assert "--max-memory" in cli("cpu", "-i", example, "-o", tmp_path / "no", "--max-memory", "10MB", code=4).stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"num_experts_per_tok": 99}, "warning: config.json: num_experts_per_tok is 99, but a layer has"),
        ({"num_hidden_layers": 1}, "warning: The experts of the MTP layers (layer 1) are left out: "),
    ],
)
def test_warns_of_numbers_in_the_config(
    changed: dict[str, int], warning: str, tmp_path: Path, cli: Any, example: Path
) -> None:
    copy = shutil.copytree(example, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changed}))
    messages = " ".join(cli("cpu", "-i", copy, "-o", tmp_path / "out", "--dry-run", "-q").stderr.split())
    assert messages.count(warning) == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=5), st.lists(st.text(max_size=5)), st.integers(0, 1 << 50)), max_size=3))
def test_index_equals_the_json_of_python(shards: list[tuple[str, list[str], int]]) -> None:
    shard_of = {key: name for name, keys, _ in shards for key in keys}
    total = {"total_size": sum(nbytes for *_, nbytes in shards)}
    document = {"metadata": total, "weight_map": dict(sorted(shard_of.items()))}
    assert index_json(shards) == (json.dumps(document, indent=2) + "\n").encode()


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_floats_are_rounded_to_bf16_first(dtype: str, tmp_path: Path, cli: Any, write_qwen: Any) -> None:
    rng = np.random.default_rng(5)
    kind = np.float16 if dtype == "F16" else np.float32
    wide = {p: rng.standard_normal((2, 128, 128)).astype(kind) for p in ("gate", "up", "down")}
    rounded = {p: reference.f32_to_bf16(x.astype(np.float32)) for p, x in wide.items()}
    stored = {p: x.view(np.uint16) if dtype == "F16" else x for p, x in wide.items()}
    cli("cpu", "-i", write_qwen(tmp_path / "a", {0: stored}, dtype), "-o", tmp_path / "oa", "--threadpool-count", 1)
    cli("cpu", "-i", write_qwen(tmp_path / "b", {0: rounded}), "-o", tmp_path / "ob", "--threadpool-count", 1)
    assert read_folder(tmp_path / "oa") == read_folder(tmp_path / "ob")


def test_shards_index_and_manifest_agree(tmp_path: Path, cli: Any, example: Path) -> None:
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--max-shard-size", "300KB", "--non-experts", "copy")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    manifest = json.loads((out / "manifest.json").read_text())
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 4
    total, keys = 0, {}
    for shard in shards:
        with safe_open(out / shard, "np") as file:
            assert file.metadata().items() >= {"format": "pt", "method": "AMXINT4", "numa": "2"}.items()
            keys |= dict.fromkeys(file.keys(), shard)
        start = data_start(out / shard)
        assert start % 4096 == 0
        total += (out / shard).stat().st_size - start
    assert index["weight_map"] == dict(sorted(keys.items()))
    assert index["metadata"]["total_size"] == total
    sizes = {p.name: p.stat().st_size for p in out.iterdir() if p.name != "manifest.json"}
    assert {f["name"]: f["size"] for f in manifest["files"]} == sizes
    source = read_file(example / "model.safetensors")
    assert {k: v for k, v in read_folder(out).items() if "_exps" not in k} == {
        n.replace("model.layers.", "blk.").replace("model.", ""): v for n, v in source.items() if ".experts." not in n
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (example / name).read_bytes()
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in out.iterdir())


def test_some_layers_keep_their_numbers(tmp_path: Path, cli: Any, example: Path) -> None:
    cli("cpu", "-i", example, "-o", tmp_path / "all")
    cli("cpu", "-i", example, "-o", tmp_path / "one", "--layers", "1")
    all_layers = read_folder(tmp_path / "all")
    assert read_folder(tmp_path / "one") == {k: v for k, v in all_layers.items() if k.startswith("blk.1.")}
    for layers, code, message in (("3-7", 3, "3-7"), ("1-0", 2, "1-0 is reversed; write 0-1")):
        assert message in cli("cpu", "-i", example, "-o", tmp_path / "x", "--layers", layers, code=code).stderr


@pytest.mark.parametrize(
    ("projection", "expert", "row", "column", "bits"), [("gate", 1, 200, 3, 0x7F80), ("down", 0, 5, 255, 0xFF80)]
)
def test_non_finite_weights_are_refused_by_name_and_place(
    projection: str, expert: int, row: int, column: int, bits: int,
    tmp_path: Path, cli: Any, write_qwen: Any, random_experts: Any,
) -> None:  # fmt: skip
    experts = random_experts(2, 256, 256)
    experts[projection][expert, row, column] = bits
    result = cli("cpu", "-i", write_qwen(tmp_path / "in", {0: experts}), "-o", tmp_path / "out", code=5)
    assert f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight" in result.stderr
    assert f"row {row}, column {column}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_error_for_an_illegal_numa_count_names_the_legal_ones(
    tmp_path: Path, cli: Any, write_qwen: Any, random_experts: Any
) -> None:
    source = write_qwen(tmp_path / "in", {0: random_experts(2, 256, 384)})
    result = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "int4", "--numa", 2, code=3)
    for message in ("384/2 = 192", "use int4 or fp8 with --numa 1, 3; or int8 or mxfp4 with --numa 1, 2, 3, 6; "):
        assert message in result.stderr
    assert not (tmp_path / "out.work").exists()
    cli("cpu", "-i", source, "-o", tmp_path / "out", "--threadpool-count", 3)


def test_a_source_that_is_truncated_during_conversion_gives_one_sentence(
    tmp_path: Path, write_qwen: Any, random_experts: Any, example: Path
) -> None:
    source = write_qwen(tmp_path / "in", {n: random_experts(4, 512, 512, seed=n) for n in range(3)})
    shard = source / "model.safetensors"
    program = f"""
import os, sys
from ktconvert.pipeline.stages import quantize_experts as experts
quantize = experts.quantize_slice
def truncate_source(*arguments):
    os.truncate({str(shard)!r}, 100_000)
    return quantize(*arguments)
experts.quantize_slice = truncate_source
from ktconvert.pipeline.cli import main
sys.argv = ['ktconvert', 'cpu', '-i', {str(source)!r}, '-o', {str(tmp_path / "out")!r}]
main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 5, result.stderr
    assert str(shard) in result.stderr
    assert "became shorter" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_source_with_only_experts_is_converted(
    tmp_path: Path, cli: Any, example: Path, write_safetensors: Any
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    shutil.copy(example / "config.json", source)
    tensors = {n: t for n, t in read_file(example / "model.safetensors").items() if ".mlp.experts." in n}
    write_safetensors(source / "model.safetensors", tensors)
    cli("cpu", "-i", source, "-o", tmp_path / "skip")
    cli("cpu", "-i", source, "-o", tmp_path / "copy", "--non-experts", "copy")
    assert read_folder(tmp_path / "copy") == read_folder(tmp_path / "skip")
    cli("gpu", "-i", source, "-o", tmp_path / "gpu", "--quant-method", "RTN")
    cli("gpu", "-i", example, "-o", tmp_path / "complete", "--quant-method", "RTN")
    complete = read_folder(tmp_path / "complete")
    assert read_folder(tmp_path / "gpu") == {n: t for n, t in complete.items() if ".mlp.experts." in n}
    for folder in ("copy", "gpu"):
        cli("verify", tmp_path / folder, "--against", source, "--no-load")
