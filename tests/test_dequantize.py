"""`ktconvert dequantize` decodes every encoding to BF16 and copies all other tensors bit for bit."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.plans.commands import make_options, make_plan, run
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify.verify import verify
from rig import encodings, killpoint
from rig.conversion import KTCONVERT, flip_bit, tree
from rig.safetensors import Tensor, Tensors, edit_header, header_of, read_file, read_folder, write_file, write_shards

H, I = 192, 320  # neither is a multiple of an FP8 block  # noqa: E741


Cli = Callable[..., Any]
Model = tuple[Path, Tensors]  # a checkpoint and its expected output
FP8: Any = encodings.fp8_config((128, 128))
AWQ_SCALE = "model.layers.0.self_attn.o_proj.pre_quant_scale"
blocks_of_fp8 = encodings.ENCODINGS["FP8 in blocks"].make


def quantized_names(layers: int = 2, experts: int = 3) -> dict[str, tuple[int, int]]:
    """Return the names, without suffix, of the quantized linears and their shapes (n, k), including those of MTP."""
    stems = {}
    for base in (f"model.layers.{layer}." for layer in range(layers + 1)):  # the last layer is an MTP layer
        stems[f"{base}self_attn.q_proj"] = (H, H)
        for expert, (part, shape) in itertools.product(
            range(experts), (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))
        ):
            stems[f"{base}mlp.experts.{expert}.{part}_proj"] = shape
    return stems


def other_tensors(rng: np.random.Generator) -> dict[str, tuple[str, Any]]:
    """Return tensors to be copied: all types, odd sizes, subnormal numbers, infinities and NaN."""
    return {
        "model.embed_tokens.weight": ("BF16", rng.integers(0, 1 << 16, (33, H), np.uint16)),
        "model.layers.0.input_layernorm.weight": ("BF16", rng.integers(0, 1 << 16, 7, np.uint16)),
        "model.layers.0.mlp.gate.weight": ("F32", rng.standard_normal((3, H)).astype(np.float32)),
        "model.layers.0.mlp.gate.e_score_correction_bias": ("F32", np.array([1e-40, np.nan, np.inf], np.float32)),
        "model.layers.0.mlp.experts.0.gate_proj.bias": ("BF16", rng.integers(0, 1 << 16, I, np.uint16)),
        "model.layers.2.eh_proj.weight": ("F16", rng.integers(0, 1 << 16, (H, 2 * H), np.uint16)),
        "visual.patch_embed.proj.weight": ("F32", rng.standard_normal((5, 3, 2, 7)).astype(np.float32)),
        "visual.position_ids": ("I64", np.arange(11)),
        "visual.mask": ("BOOL", np.array([True, False, True])),
    }


CONFIG: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "float16"}
CONFIG |= {"num_hidden_layers": 2, "num_experts": 3, "hidden_size": H, "moe_intermediate_size": I}


def write_model(folder: Path, tensors: Any, config: dict[str, Any]) -> Path:
    folder.mkdir()
    write_file(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def checkpoint(folder: Path, kind: str, **config: Any) -> Model:
    """Write a checkpoint in two shards that separate weights from scales; return it with its expected output."""
    folder.mkdir(parents=True)
    encoding = encodings.ENCODINGS[kind]
    rng = np.random.default_rng(len(kind))
    stored, release = other_tensors(rng), {}
    release |= stored
    for stem, (n, k) in quantized_names().items():
        tensors, bits = encoding.make(rng, n, k)
        stored |= {f"{stem}{end}": tensor for end, tensor in tensors.items()}
        stored[f"{stem}.input_scale"] = ("F32", np.ones((), np.float32))
        release[f"{stem}.weight"] = ("BF16", bits)
    write_shards(folder, [dict([*stored.items()][half::2]) for half in range(2)])
    document = {**CONFIG, "quantization_config": encoding.config or {"quant_method": "fp8"}, **config}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    write_file(folder.with_suffix(".expected"), release)
    return folder, read_file(folder.with_suffix(".expected"))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return checkpoint(tmp_path_factory.mktemp("blocks") / "model", "FP8 in blocks")


def dequantize(source: Path, out: Path) -> Tensors:
    """Dequantize in this process and verify the output, also against its source; return its tensors."""
    run(make_plan(make_options("dequantize", input=source, output=out, threads=2)))
    report = verify(VerifyOptions(output=out, against=str(source), threads=2), Reporter(verbosity=-1))
    assert report.sentence is None, report.sentence
    return read_folder(out)


@pytest.mark.parametrize("kind", ["FP8 in blocks", "ct 4"])
def test_whole_model_becomes_its_bf16_release(kind: str, tmp_path: Path) -> None:
    """The config declares quantization in different places. The vision config's dtype stays, as its tensors do."""
    nested = {"model_type": "qwen3_moe", "dtype": "float16"}
    vision = {"dtype": "float32", "depth": 2, "compression_config": {"quant_method": "x"}}
    config_changes = {
        "text_config": nested | {"quantization_config": FP8},
        "vision_config": vision,
        "quantization_config": None,
    }
    source, release = checkpoint(tmp_path / "model", kind, **config_changes if kind == "FP8 in blocks" else {})
    out = tmp_path / "out"
    assert dequantize(source, out) == release
    config = json.loads((out / "config.json").read_text())
    expected = {**CONFIG, "torch_dtype": "bfloat16"}
    if kind == "FP8 in blocks":
        expected |= {"text_config": nested | {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32", "depth": 2}}
    assert config == expected
    assert not (out / "hf_quant_config.json").exists() and (out / "tokenizer.json").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in release.values())
    assert index["weight_map"].keys() == release.keys()


@pytest.mark.parametrize("name", encodings.ENCODINGS)
def test_every_encoding_becomes_bf16(name: str, tmp_path: Path) -> None:
    """Tensors keep their names; stacked blocks are transposed, as in transformers' gpt-oss."""
    encoding = encodings.ENCODINGS[name]
    head: Any = {"lm_head.weight": ("F16", np.ones((3, 5), np.uint16))}
    source, values = encodings.write(name, tmp_path / "model", lambda tensors, _: tensors.update(head))
    (source / "quantize_config.json").write_text("{}")
    ours = {key: tensor.bits for key, tensor in dequantize(source, tmp_path / "out").items()}
    assert (ours.pop("lm_head.weight") == 1).all() and not ours.pop("model.layers.0.mlp.gate.weight").any()
    for (expert, projection), bits in values.items():
        if not encoding.stacked:
            assert (ours.pop(f"{encoding.base(expert, projection)}.weight") == bits).all()
            continue
        matrix = ours[f"model.layers.0.mlp.experts.{'down' if projection == 'down' else 'gate_up'}_proj"][expert]
        columns = {"gate": slice(0, len(bits)), "up": slice(len(bits), None), "down": slice(None)}[projection]
        assert (matrix[:, columns] == bits.T).all()
    assert len(ours) == 2 * encoding.stacked
    assert not (tmp_path / "out" / "quantize_config.json").exists()


def test_tensors_can_end_anywhere_in_a_window(cli: Cli, tmp_path: Path) -> None:
    """Tensors exceed the 4 MiB window of a thread, have odd sizes, or are empty; with one and with two threads."""
    rng = np.random.default_rng(0)
    wide, bits = blocks_of_fp8(rng, 2999, 1001)
    tensors = {
        "odd": ("U8", rng.integers(0, 256, (5 << 20) + 1, np.uint8)),
        "none": ("BF16", np.zeros((0, 8), np.uint16)),
        **{f"wide{end}": tensor for end, tensor in wide.items()},
        "one": ("U8", np.ones(1, np.uint8)),
        "a window": ("U8", rng.integers(0, 256, 4 << 20, np.uint8)),
    }
    source = write_model(tmp_path / "model", tensors, {"model_type": "llama", "quantization_config": FP8})
    cli("cpu", "-i", source, "-o", tmp_path / "no", code=3)  # a dense model
    expected = dict(tensors) | {"wide.weight": ("BF16", bits)}
    del expected["wide.weight_scale_inv"]
    cli("dequantize", source, tmp_path / "out1", "--cpuinfer-threads", 1)
    actual = dequantize(source, tmp_path / "out2")
    assert actual.keys() == expected.keys()
    for name, (dtype, values) in expected.items():
        assert actual[name].dtype == dtype and actual[name].data == np.ascontiguousarray(values).tobytes(), name
    assert tree(tmp_path / "out1") == tree(tmp_path / "out2")


def test_memory_does_not_grow_with_the_model(cli: Cli, tmp_path: Path) -> None:
    """Peak memory is at most the plan's estimate, and less than the size of the output."""
    tensors: dict[str, Any] = {}
    for n in range(16):
        tensors[f"{n}.weight"] = ("F8_E4M3", np.full((2048, 4096), 0x38 + n, np.uint8))
        tensors[f"{n}.weight_scale_inv"] = ("F32", np.ones((16, 32), np.float32))
    source = write_model(tmp_path / "model", tensors, {"quantization_config": FP8})
    command = "dequantize", source, tmp_path / "out", "--cpuinfer-threads", 2, "--json"
    plan = json.loads(cli(*command, "--dry-run").stdout.splitlines()[-1])
    finished = json.loads(cli(*command).stdout.splitlines()[-1])
    assert finished["bytes"] == plan["bytes_out"] == 16 * 2 * 2048 * 4096 and plan["model"]["decoded"] == {"FP8": 16}
    assert finished["peak_rss"] < plan["peak_memory"] < finished["bytes"]


def test_unquantized_model_is_copied(example: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli("dequantize", example, tmp_path / "out")
    assert "the source is not quantized; the output is a copy" in result.stderr
    assert read_folder(tmp_path / "out") == read_folder(example)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((example / "config.json").read_text())


def test_output_of_gpu_is_dequantized(example: Path, cli: Cli, tmp_path: Path) -> None:
    """Every other command accepts the output as a checkpoint."""
    packed, out = tmp_path / "w8", tmp_path / "bf16"
    cli("gpu", "-i", example, "-o", packed, "--quant-method", "RTN", "--quant-type", "W8A16")
    cli("dequantize", packed, out)
    original, ours = read_folder(example), read_folder(out)
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in original.items()}
    assert {t.dtype for t in ours.values()} == {"BF16"}
    assert json.loads(cli("inspect", out, "--json").stdout)["kind"] == "checkpoint"
    cli("cpu", "-i", out, "-o", tmp_path / "int8", "--quant-method", "int8", "--threadpool-count", 1)
    cli("cpu", "-i", packed, "-o", tmp_path / "same", "--quant-method", "int8", "--threadpool-count", 1)
    assert read_folder(tmp_path / "int8") == read_folder(tmp_path / "same")
    cli("verify", tmp_path / "int8", "--against", out)
    cli("verify", tmp_path / "int8", "--against", packed)

    flip_bit(min(packed.glob("*.safetensors")))  # of layer 0
    for command in ("dequantize", "cpu"):
        arguments = ("-i", packed, "-o", tmp_path / f"damaged-{command}")
        assert "was changed: its sha256 is" in cli(command, *arguments, code=5).stderr
        assert not (tmp_path / f"damaged-{command}").exists()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_decoded_weights_that_are_not_finite_are_refused(code: int, tmp_path: Path) -> None:
    """`cpu` and `gpu` refuse them, too. Copied tensors may have NaN and infinities (test_whole_model...)."""
    rng, name = np.random.default_rng(0), "model.layers.0.mlp.experts.1.up_proj"
    tensors = {f"{name}{end}": tensor for end, tensor in blocks_of_fp8(rng, I, H)[0].items()}
    dtype, values = tensors[f"{name}.weight"]
    values = np.array(values)
    values.view(np.uint8)[200, 100] = code
    tensors[f"{name}.weight"] = dtype, values
    source = write_model(tmp_path / "model", tensors, {**CONFIG, "quantization_config": FP8})
    message = (
        rf"model\.safetensors: tensor '{name}\.weight' contains a value that is not finite at row 200, column 100; "
    )
    with pytest.raises(InputError, match=message):
        run(make_plan(make_options("dequantize", input=source, output=tmp_path / "out", threads=1)))
    assert not (tmp_path / "out").exists()


def run_verify(cli: Cli, *arguments: object, code: int = 6) -> dict[str, Any]:
    """Run verify and return its JSON report, with the problems of all checks."""
    document: dict[str, Any] = json.loads(cli("verify", *arguments, "--json", code=code).stdout)
    document["problems"] = [problem for check in document["checks"] for problem in check["problems"]]
    return document


def test_verify_finds_a_flipped_bit(blocks: Model, cli: Cli, tmp_path: Path) -> None:
    """The bit is in a decoded weight or in a copied tensor."""
    source, release = blocks
    out = tmp_path / "out"
    cli("dequantize", source, out, "--max-shard-size", "300KB")
    good = run_verify(cli, out, "--against", source, code=0)
    assert good["ok"] and good["method"] == "BF16" and good["other_tensors"] == len(release) and good["shards"] > 3
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for name in ("model.layers.1.mlp.experts.2.down_proj.weight", "visual.position_ids"):
        file = out / weight_map[name]
        original, start = file.read_bytes(), int.from_bytes(file.read_bytes()[:8], "little") + 8
        file.chmod(0o644)
        flip_bit(file, start + header_of(file)[name]["data_offsets"][1] - 1)
        bad = run_verify(cli, out, "--against", source)
        assert any("sha256" in problem for problem in bad["problems"])
        assert any(problem.startswith(f"{name} in {file.name} differs from") for problem in bad["problems"])
        file.write_bytes(original)
    other, _ = checkpoint(tmp_path / "other", "ct 4")
    bad = run_verify(cli, out, "--against", other)
    assert any(problem.startswith("model.layers.0.self_attn.q_proj.weight in") for problem in bad["problems"])
    assert "give the model that was converted, whose files are in manifest.json." in bad["message"]
    cli("verify", out, "--numa", 1, code=2)
    assert "is a bias, and experts of" in cli("verify", out, "--run", code=3).stderr
    (out / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    assert "config.json still declares a quantized model" in run_verify(cli, out)["problems"]
    (out / weight_map[name]).unlink()
    bad = run_verify(cli, out, "--against", source)
    assert f"{weight_map[name]} is missing" in bad["problems"]


def test_resume_after_a_kill_writes_the_same_bytes(blocks: Model, cli: Cli, tmp_path: Path) -> None:
    convert = (*KTCONVERT, "dequantize", blocks[0], "--max-shard-size", "1MB", "-q", "--output-dir")
    killpoint.check_resume(lambda out: [*convert, out], lambda out: cli("resume", out), tmp_path, 1 / 4, 1 / 3, 1 / 2)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 3


def test_options_of_kt_kernel_are_accepted(blocks: Model, cli: Cli, tmp_path: Path) -> None:
    source, release = blocks
    cli("dequantize", source, source / "inside", code=2)
    kt = ("--model-dir", source, "--output-dir", tmp_path / "a", "--config-path", "config.json")
    assert "--config-path is accepted for compatibility with kt-kernel" in cli("dequantize", *kt).stderr
    cli("dequantize", "--input-fp8-hf-path", source, "--output-bf16-hf-path", tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b") and read_folder(tmp_path / "a") == release
    assert "MODEL is missing" in cli("dequantize", "--output-dir", tmp_path / "c", code=2).stderr
    assert "OUT is given twice" in cli("dequantize", source, tmp_path / "c", "-o", tmp_path / "c", code=2).stderr


def test_inspect_prints_the_dequantize_command(blocks: Model, cli: Cli, tmp_path: Path) -> None:
    """inspect prints the command even if no other command supports the model, as here; not for a BF16 model."""
    source, release = blocks
    printed = cli("inspect", source)
    nbytes = sum(len(tensor.data) for tensor in release.values())
    document = json.loads(cli("inspect", source, "--json").stdout)
    assert document["dequantized_bytes"] == nbytes and "is a bias" in document["refused"]
    assert document["dequantize"] == [f"ktconvert dequantize {source} model-dequantized"]
    assert document["dequantize"][0] in printed.stdout
    assert re.search("^BF16 +the whole model, ", printed.stdout, re.MULTILINE)
    assert re.search(f"^cpu, gpu +not possible: {re.escape(document['refused'])}$", printed.stdout, re.MULTILINE)
    cli("dequantize", source, tmp_path / "out")
    assert "dequantize" not in json.loads(cli("inspect", tmp_path / "out", "--json", code=3).stdout)
    report = json.loads(cli("inspect", encodings.write("awq", tmp_path / "awq")[0], "--json").stdout)
    commands = [line.split() for line in (*report["convert"], *report["convert_gpu"], *report["dequantize"])]
    folders = [command[command.index("-o") + 1] if "-o" in command else command[-1] for command in commands]
    assert len(folders) > 5 and len({*folders}) == len(folders)  # each command has a folder of its own


def test_unsupported_checkpoints_are_refused(blocks: Model, cli: Cli, tmp_path: Path) -> None:
    """One sentence names the tensor, before any work."""
    stem = "model.layers.1.mlp.experts.2.down_proj"
    codes = np.zeros((4, 4), np.int8)
    complete: dict[str, Any] = dict(read_folder(blocks[0]))
    no_scale = {name: tensor for name, tensor in complete.items() if name != f"{stem}.weight_scale_inv"}
    cases: tuple[tuple[dict[str, Any], int, str], ...] = (
        (no_scale, 5, f"{stem}.weight_scale_inv is missing"),
        (complete | {"lm_head.weight": ("I8", codes)}, 3, "'lm_head.weight' is INT8; that is not"),
        (complete | {"lm_head.weight": Tensor("F4", (4, 8), bytes(16))}, 3, "'lm_head.weight' is FP4; that is not"),
        (complete | {"lm_head.weight": ("F8_E4M3FNUZ", codes)}, 3, "'lm_head.weight' is FP8 E4M3FNUZ; that is not"),
        ({"a.W_q": ("U8", codes.view(np.uint8))}, 3, "declares a quantized model (fp8)"),
        # modelopt's AWQ divides the weight by this scale, so that the decoded weight would be wrong without it
        (complete | {AWQ_SCALE: ("F16", np.ones(8, np.uint16))}, 3, f"tensor '{AWQ_SCALE}' is a scale of inputs"),
    )
    for number, (tensors, code, message) in enumerate(cases):
        source = write_model(tmp_path / f"{number}", tensors, {**CONFIG, "quantization_config": FP8})
        result = cli("dequantize", source, tmp_path / "out", code=code)
        assert message in result.stderr and "routed experts" not in result.stderr, result.stderr
    both: dict[str, Any] = {"a.weight": ("F64", np.zeros((4, 8), np.float64))}
    pack = encodings.integers(4, 8, encodings.compressed("BF16"), zeros=False)
    both |= {f"a{end}": tensor for end, tensor in pack(np.random.default_rng(0), 4, 8)[0].items()}
    packed = np.zeros((32, 192), np.int32)
    for name, tensors, code, message in (
        ("both", both, 5, "'a.weight' is stored twice"),
        ("packed", {"a.weight_packed": ("I32", packed)}, 5, "a.weight_scale is missing"),
        ("words", {"a.qweight": ("I32", packed)}, 5, "a.scales is missing"),
        ("zeros", {"a.qzeros": ("I32", packed)}, 3, "GPTQ or AWQ"),
    ):
        source = write_model(tmp_path / name, tensors, {})
        assert message in cli("dequantize", source, tmp_path / "out", code=code).stderr
    (source / "config.json").unlink()
    assert "has no config.json" in cli("dequantize", source, tmp_path / "out", code=5).stderr


MLX = {"quantization": {"group_size": 64, "bits": 4}}  # releases before 2025 declare nothing else
HALVES = ("F16", np.ones((4, 1), np.uint16))
PLAIN = ("BF16", np.ones((4, 4), np.uint16))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"a.weight": ("U32", np.ones((4, 4), np.uint32)), "a.scales": HALVES, "a.biases": HALVES}, MLX, "is packed;"),
        ({"a.codes": ("I16", np.ones((2, 2, 16), np.int16)), "a.scale": HALVES}, {}, "'a.codes' is packed;"),
        (
            {"a.W_q": ("U8", np.ones((4, 4), np.uint8)), "a.scale": HALVES},
            {},
            "is a matrix of integers (U8) beside its",
        ),
        ({"a.weight": PLAIN}, MLX, "config.json declares a quantized model (unnamed method), but no tensor"),
    ],
    ids=["MLX", "a stack", "HQQ", "only by config.json"],
)
def test_unknown_integer_weights_are_never_copied(tensors, config, message, tmp_path):
    source = write_model(tmp_path / "model", tensors, {"model_type": "qwen3", **config})
    with pytest.raises(UnsupportedError) as error:
        make_plan(make_options("dequantize", input=source, output=tmp_path / "out"))
    assert message in str(error.value) and "use the model's BF16" in str(error.value)


@pytest.mark.parametrize("name", ["mtp.0.e_proj.weight", "model.layers.2.eh_proj.weight"])
def test_fp8_of_an_mtp_block_without_scales_is_copied(name, tmp_path):
    """DeepSeek-V4-Flash-FP8 has such weights; elsewhere a missing scale is an error."""
    codes = np.arange(256, dtype=np.uint8)[np.arange(256) & 0x7F != 0x7F][None]
    stored: dict[str, Any] = {"model.norm.weight": PLAIN, name: ("F8_E4M3", codes)}
    sign, exponent, fraction = codes >> 7, (codes >> 3 & 15).astype(int), codes & 7
    size = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    bits = (np.where(sign, -size, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    source = write_model(tmp_path / "model", stored, {**CONFIG, "quantization_config": FP8})
    plan = make_plan(make_options("dequantize", input=source, output=tmp_path / "out"))
    assert plan.notes[0] == f"{name} is FP8 of an MTP layer and has no scale: its values are copied without scaling"
    assert (dequantize(source, tmp_path / "out")[name].bits == bits).all()
    without_scale = {"model.layers.1.self_attn.q_proj.weight": stored[name]}
    source = write_model(tmp_path / "without_scale", without_scale, {**CONFIG, "quantization_config": FP8})
    with pytest.raises(InputError, match=r"weight_scale_inv is missing; check that the download is complete, or use"):
        make_plan(make_options("dequantize", input=source, output=tmp_path / "no"))


def test_tables_of_integers_are_copied(tmp_path: Path) -> None:
    """Tables are not weights. verify reports weights that an earlier version copied as tables."""
    table = ("I64", np.arange(16).reshape(4, 4))
    tensors: dict[str, Any] = {"gate.weight": PLAIN, "gate.tid2eid": table, "vision.position_ids": table}
    tensors |= {"vision.relative_position_index": table, "vision.relative_position_bias_table": PLAIN}
    source = write_model(tmp_path / "model", tensors, {"model_type": "qwen3"})
    out = tmp_path / "out"
    assert dequantize(source, out) == read_file(source / "model.safetensors")
    (shard,) = out.glob("*.safetensors")
    edit_header(shard, lambda header: header["gate.weight"].update(dtype="U32", shape=[4, 2]))
    report = verify(VerifyOptions(output=out), Reporter(verbosity=-1))
    assert f"gate.weight in {shard.name} is packed, but was not decoded" in report.problems
