"""`ktconvert gpu` packs experts as the definition does, copies other tensors, and refuses what cannot be loaded."""

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ktconvert.quantizers import packed
from rig import conversion, encodings, reference
from rig.files import edit_json
from rig.safetensors import Tensor, edit_file, read_folder, write_file

Bits = npt.NDArray[Any]
Tensors = dict[str, tuple[str, Bits]]
E, H, I = 3, 256, 128  # noqa: E741
BITS = {"W4A16": 4, "W8A16": 8}


def read(folder: Path) -> Tensors:
    """Return (dtype, raw bits) of all tensors of a folder by name."""
    return {name: (tensor.dtype, tensor.bits) for name, tensor in read_folder(folder).items()}


def bf16(rng: np.random.Generator, *shape: int) -> Bits:
    return reference.f32_to_bf16((rng.standard_normal(shape) * 0.05).astype(np.float32))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a checkpoint: save(tensors, model_type=..., ...)."""

    def make(tensors: Tensors, **config: Any) -> Path:
        document = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": H, "hidden_act": "silu"}
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "config.json").write_text(json.dumps(document | config))
        write_file(tmp_path / "source" / "model.safetensors", tensors)
        return tmp_path / "source"

    return make


def other_tensors(rng: np.random.Generator, router: str) -> Tensors:
    """Return a dense layer 0 and the tensors beside the experts of layer 1."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", bf16(rng, 32, H)),
        "lm_head.weight": ("BF16", bf16(rng, 32, H)),
    }
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = ("BF16", bf16(rng, H, H))
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ("F32", rng.standard_normal(H).astype(np.float32))
    tensors["model.layers.0.mlp.gate_proj.weight"] = ("BF16", bf16(rng, I, H))
    tensors[f"model.layers.1.{router}.weight"] = ("BF16", bf16(rng, E, H))
    return tensors


def split_experts(folder: Path) -> tuple[Tensors, dict[str, Bits]]:
    """Return the other tensors of a checkpoint, and the BF16 bits of its routed experts by name."""
    source = read(folder)
    experts = {name: source.pop(name)[1] for name in list(source) if ".experts." in name}
    return source, {name.removesuffix(".weight"): bits for name, bits in experts.items()}


def check(
    source: Tensors, linears: dict[str, Bits], output: Tensors, kind: str, rounding: str = "library", group: int = 128
) -> None:
    """Require that every linear (BF16 bits) is packed as the definition says, and that all other tensors are copied."""
    remaining = dict(output)
    for name, weight in linears.items():
        codes, scale = reference.quantize_groups(BITS[kind], group, weight, rounding)
        for suffix, dtype, expected in (
            ("weight_packed", "I32", packed.pack_words(BITS[kind], codes)),
            ("weight_scale", "BF16", scale),
            ("weight_shape", "I64", np.array(weight.shape)),
        ):
            tensor = remaining.pop(f"{name}.{suffix}")
            assert tensor[0] == dtype, (name, suffix)
            np.testing.assert_array_equal(tensor[1], expected, f"{name}.{suffix}")
    assert remaining.keys() == source.keys()
    for name, (dtype, bits) in source.items():
        actual = remaining[name]
        assert (actual[0], actual[1].shape, actual[1].tobytes()) == (dtype, bits.shape, bits.tobytes()), name


def config_of(output: Path) -> Any:
    return json.loads((output / "config.json").read_text())


@pytest.fixture
def gpu(cli: Any, tmp_path: Path) -> Any:
    """Return a function that rounds a model to nearest: gpu(model, option, ..., to="out")."""

    def convert(model: Path, *options: object, to: str = "out", **environment: Any) -> Any:
        return cli("gpu", "-i", model, "-o", tmp_path / to, "--quant-method", "RTN", *options, **environment)

    return convert


@pytest.mark.parametrize("rounding", ["library", "float32"])
@pytest.mark.parametrize("kind", BITS)
def test_gpu_output_of_the_bundled_model_is_complete(
    kind: str, rounding: str, tmp_path: Path, cli: Any, gpu: Any, example: Path
) -> None:
    out = tmp_path / "out"
    ignored = ["vision", "re:.*eh_proj$"]
    gpu(example, "--quant_type", kind, "--rounding", rounding, "--ignore_patterns", *ignored)
    check(*split_experts(example), read(out), kind, rounding)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read(out).keys()
    assert index["metadata"]["total_size"] == sum(bits.nbytes for _, bits in read(out).values())
    assert (out / "tokenizer.json").read_bytes() == (example / "tokenizer.json").read_bytes()
    quant = config_of(out)["quantization_config"]
    assert {*ignored, "lm_head", r"re:.*\.mlp\.gate$"} <= set(quant["ignore"])
    assert quant["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert quant["config_groups"]["group_0"]["weights"]["num_bits"] == BITS[kind]
    assert quant["config_groups"]["group_0"]["weights"]["actorder"] is None
    assert {k: v for k, v in config_of(out).items() if k != "quantization_config"} == config_of(example)
    output = cli("verify", out, "--against", example, "--full", "--json", "--no-load").stdout
    report = json.loads(output)
    assert report["ok"] and report["arrangement"] == "pack-quantized" and report["method"] == kind
    assert max(e["relative_error"] for e in report["errors"]) < {"W4A16": 0.12, "W8A16": 0.01}[kind]
    cli("resume", out)
    plan = json.loads(gpu(example, "--quant-type", kind, "--json", "--dry-run", to="plan").stdout.splitlines()[-1])
    assert [s["name"] for s in plan["stages"]] == ["experts", "carry_over", "assemble"]
    assert plan["model"]["packed_linears"] == 48
    assert abs(sum(p.stat().st_size for p in out.glob("*.safetensors")) - plan["bytes_out"]) < 100_000  # headers
    options = ("--quant-type", kind, "--rounding", rounding, "--cpuinfer-threads", "1", "--ignore-patterns", *ignored)
    gpu(example, *options, env={"KTCONVERT_ISA": "scalar"}, to="scalar")
    assert conversion.find_differences(conversion.tree(tmp_path / "scalar"), conversion.tree(out)) == []


@pytest.mark.parametrize(("kind", "group"), [("W4A16", 32), ("W4A16", 64), ("W8A16", 32)])
def test_group_size_can_be_chosen(kind: str, group: int, tmp_path: Path, cli: Any, gpu: Any, example: Path) -> None:
    """kt-kernel's RAWINT4 and our runtime read the same files if they have 4 bits in groups of 32."""
    out = tmp_path / "out"
    stderr = gpu(example, "--quant-type", kind, "--group-size", group).stderr
    check(*split_experts(example), read(out), kind, group=group)
    assert config_of(out)["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == group
    manifest, card = json.loads((out / "manifest.json").read_text()), (out / "README.md").read_text()
    assert manifest["settings"]["group_size"] == manifest["model"]["group_size"] == group
    assert f"one BF16 scale per {group} columns" in card
    cli("verify", out, "--against", example, "--full", "--no-load")
    command = f"--model {out} --kt-weight-path {out} --kt-method RAWINT4"
    if (kind, group) == ("W4A16", 32):
        assert command in stderr and "with kt-kernel's RAWINT4, as the experts on the CPU" in card
        cli("verify", out, "--run", "--no-load")
    else:
        assert "RAWINT4" not in stderr + card
        assert kind in cli("verify", out, "--run", "--no-load", code=3).stderr
    assert f"--group-size was {group}, is 128" in gpu(example, "--quant-type", kind, code=7).stderr


def test_error_for_unsuitable_groups_names_a_size_that_fits(tmp_path: Path, gpu: Any, save: Any) -> None:
    """64 columns are no group of 128. Mixtral's names stay, although kt-kernel's RAWINT4 does not know them."""
    rng = np.random.default_rng(8)
    source, linears = other_tensors(rng, "block_sparse_moe.gate"), {}
    for e in range(E):
        for name, shape in (("w1", (64, H)), ("w2", (H, 64)), ("w3", (64, H))):
            linears[f"model.layers.1.block_sparse_moe.experts.{e}.{name}"] = bf16(rng, *shape)
    stored = {f"{name}.weight": ("BF16", bits) for name, bits in linears.items()}
    folder = save(source | stored, model_type="mixtral", num_local_experts=E, intermediate_size=64)
    stderr = gpu(folder, "--quant-type", "W4A16", code=3).stderr
    assert "but the expert width 64 of this model is not a multiple; give --group-size 64, convert it with" in stderr
    stderr = gpu(folder, "--quant-type", "W4A16", "--group-size", 32).stderr
    assert "kt-kernel's RAWINT4 cannot compute these experts on the CPU: it looks for model.layers." in stderr
    assert "kt-method RAWINT4" not in stderr + (tmp_path / "out" / "README.md").read_text()
    check(source, linears, read(tmp_path / "out"), "W4A16", group=32)
    assert any("block_sparse_moe" in p for p in config_of(tmp_path / "out")["quantization_config"]["ignore"])


@pytest.mark.parametrize("transposed", [False, True], ids=["output-major", "input-major"])
def test_fused_experts_are_split(transposed: bool, tmp_path: Path, cli: Any, gpu: Any, save: Any) -> None:
    rng = np.random.default_rng(2)
    source = other_tensors(rng, "mlp.gate")
    gate_up, down = bf16(rng, E, 2 * I, H), bf16(rng, E, H, I)
    stored = {"gate_up_proj": gate_up, "down_proj": down}
    base = "model.layers.1.mlp.experts"
    tensors = {f"{base}.{name}": ("BF16", x.swapaxes(1, 2) if transposed else x) for name, x in stored.items()}
    text = {"num_experts": E, "moe_intermediate_size": I}
    folder = save(source | tensors, model_type="qwen3_moe", text_config={**text, "quantization_config": {"a": "fp8"}})
    gpu(folder)
    assert config_of(tmp_path / "out")["text_config"] == text  # no quantization of the source survives
    linears = {f"{base}.{e}.gate_proj": gate_up[e, :I] for e in range(E)}
    linears |= {f"{base}.{e}.up_proj": gate_up[e, I:] for e in range(E)}
    linears |= {f"{base}.{e}.down_proj": down[e] for e in range(E)}
    check(source, linears, read(tmp_path / "out"), "W8A16")
    cli("verify", tmp_path / "out", "--against", folder, "--no-load")


def test_experts_of_mtp_become_bf16(tmp_path: Path, cli: Any, gpu: Any, save: Any) -> None:
    """All tensors outside the routed experts become BF16, including stacks; config.json declares no FP8."""
    rng, make = np.random.default_rng(3), encodings.ENCODINGS["FP8 in blocks"].make
    tensors, linears = other_tensors(rng, "mlp.gate"), {}
    expected, shapes = dict(tensors), {"gate": (I, H), "up": (I, H), "down": (H, I)}
    for layer, expert, projection in itertools.product((1, 2), range(E), shapes):  # layer 2 is MTP
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        stored, bits = make(rng, *shapes[projection])
        tensors |= {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}
        linears |= {name: bits} if layer == 1 else {}
        expected |= {f"{name}.weight": ("BF16", bits)} if layer == 2 else {}
    stacked = [make(rng, 128, H) for _ in range(2)]
    for suffix in ("", "_scale_inv"):
        parts = [stored[f".weight{suffix}"] for stored, _ in stacked]
        tensors[f"mtp.layers.0.mlp.experts.up_proj{suffix}"] = (parts[0][0], np.stack([bits for _, bits in parts]))
    expected["mtp.layers.0.mlp.experts.up_proj"] = ("BF16", np.stack([bits for _, bits in stacked]))
    sizes = {"n_routed_experts": E, "moe_intermediate_size": I}
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder, out = save(tensors, model_type="deepseek_v3", **sizes, quantization_config=quant), tmp_path / "out"
    (folder / "hf_quant_config.json").write_text("{}")
    result = gpu(folder, "--quant-type", "W4A16")
    assert "MTP layers (layer 2) are not quantized" in result.stderr
    assert "FP8 non-expert tensors are written as BF16" in result.stderr
    check(expected, linears, read(out), "W4A16")
    assert not (out / "hf_quant_config.json").exists() and "fp8" not in (out / "config.json").read_text()
    assert any("layers" in p and "2" in p for p in config_of(out)["quantization_config"]["ignore"])
    cli("verify", out, "--against", folder, "--no-load")


def test_shards_end_between_experts(tmp_path: Path, gpu: Any, write_qwen: Any, random_experts: Any) -> None:
    """With a small shard size, every shard has one expert."""
    layers = {n: random_experts(E, 128, 384, seed=n) for n in (0, 1)}
    folder = write_qwen(tmp_path / "source", layers)
    gpu(folder, "--quant-type", "W4A16", "--max-shard-size", "80KB")
    check(*split_experts(folder), read(tmp_path / "out"), "W4A16")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2 * E + 1


def test_zero_experts_are_reported_and_infinite_values_refused(
    tmp_path: Path, cli: Any, gpu: Any, write_qwen: Any, random_experts: Any
) -> None:
    experts = random_experts(2, 128, 256)
    experts["up"][1] = 0x8000  # negative zeros
    result = gpu(write_qwen(tmp_path / "source", {0: experts}))
    expected = "layer 0, expert 1, up_proj (model.layers.0.mlp.experts.1.up_proj) is all zeros in the source"
    assert f"warning: {expected}" in result.stderr
    cli("verify", tmp_path / "out", "--no-load")  # the scales show that the source was zero
    both = {"gate": experts["up"], "up": experts["up"], "down": experts["down"]}
    result = gpu(write_qwen(tmp_path / "two", {0: both}), to="two-out")
    expected = expected.replace("up_proj", "gate_proj").removesuffix(" is all zeros in the source")
    assert f"warning: 2 linears are all zeros in the source, such as {expected}: their" in result.stderr
    experts["down"][1, 7, 130] = 0x7F80
    result = gpu(write_qwen(tmp_path / "infinite", {0: experts}), to="no", code=5)
    assert "model.layers.0.mlp.experts.1.down_proj.weight" in result.stderr and "row 7, column 130" in result.stderr


@pytest.mark.parametrize(
    ("shape", "options", "code", "message"),
    [
        ((192, 128), (), 3, "hidden size 192"),
        ((128, 96), (), 3, "expert width 96"),
        ((128, 768), ("--tp-size", "4"), 3, "768 cannot be split into 4 tensor-parallel ranks"),
        ((128, 128), ("--ignore-patterns", "lm_head", "re:.*experts.*"), 2, "would exclude the routed expert"),
        ((128, 128), ("--ignore_patterns", "re:("), 2, "is not a regular expression"),
        ((128, 128), ("--torch-dtype", "float16"), 3, "BF16"),
        ((128, 128), (), 5, "config.json"),  # no loader can read the output without it
    ],
)
def test_unsupported_shapes_and_options_are_refused_before_any_work(
    shape: Any, options: Any, code: int, message: str, tmp_path: Path, gpu: Any, write_qwen: Any, random_experts: Any
) -> None:
    folder = write_qwen(tmp_path / "source", {0: random_experts(2, *shape)})
    if code == 5:
        (folder / "config.json").unlink()
    assert message in gpu(folder, *options, code=code).stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def gpu_output(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path) -> Path:
    out = tmp_path_factory.mktemp("gpu") / "out"
    cli("gpu", "-i", example, "-o", out, "--quant-method", "RTN", "--quant-type", "W4A16", "-q")
    return out


@pytest.fixture
def converted(gpu_output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gpu_output, tmp_path / "made"))


NAME = "model.layers.0.mlp.experts.2.up_proj"
SCALE = f"{NAME}.weight_scale"
Change = Callable[[dict[str, Tensor]], object]


def add_nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors[SCALE] = tensors[SCALE]._replace(data=tensors[SCALE].data[:-2] + b"\xc0\x7f")


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda tensors: tensors.pop(f"{NAME}.weight_packed"), (f"{NAME}.weight_packed is missing",)),
        (add_nan_scale, (SCALE, "is not a positive number")),
    ],
)
def test_verify_detects_damaged_tensors(change: Change, messages: tuple[str, ...], converted: Path, cli: Any) -> None:
    """The manifest has the new size, as that of another program would."""
    shard = converted / "model-00001-of-00003.safetensors"
    edit_file(shard, change)

    def update_size(document: Any) -> None:
        next(f for f in document["files"] if f["name"] == shard.name)["size"] = shard.stat().st_size

    edit_json(converted / "manifest.json", update_size)
    report = json.loads(cli("verify", converted, "--json", code=6).stdout)
    problems = "\n".join(p for c in report["checks"] for p in c["problems"])
    assert [message for message in (*messages, f"{shard.name} was changed") if message not in problems] == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("ignore",), ["lm_head"], "missing from the ignore list"),
        (("config_groups", "group_0", "weights", "actorder"), "static", "config_groups"),
        (("config_groups", "group_0", "targets"), ["re:.*experts.*"], "config_groups"),
    ],
)
def test_verify_detects_a_config_that_loaders_misread(
    path: tuple[str, ...], value: Any, message: str, converted: Path, cli: Any
) -> None:

    def change(config: Any) -> None:
        functools.reduce(dict.__getitem__, path[:-1], config["quantization_config"])[path[-1]] = value

    edit_json(converted / "config.json", change)
    report = json.loads(cli("verify", converted, "--json", code=6).stdout)
    quantization = next(c for c in report["checks"] if c["name"] == "quantization")
    assert any(message in problem for problem in quantization["problems"])


def test_inspect_describes_an_output_for_the_gpu(converted: Path, cli: Any) -> None:
    report = json.loads(cli("inspect", converted, "--json").stdout)
    assert report["kind"] == "output" and report["complete"] and report["command"] == "gpu"
    assert (report["arrangement"], report["method"]) == ("pack-quantized", "W4A16")
    assert (report["experts"], report["tensors"]) == (8, 144) and "NUMA" not in cli("inspect", converted).stdout
    for command in (("bench", converted), ("verify", converted, "--run")):  # the output has no weights for the CPU
        assert "W4A16" in cli(*command, code=3).stderr
