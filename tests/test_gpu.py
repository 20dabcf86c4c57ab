"""`ktconvert gpu`: every packed tensor is the definition's, every other one the source's, and what
cannot be loaded is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ktconvert.quantizers import groups, reference
from rig.safetensors import Tensor, edit_file, read_folder

Bits = npt.NDArray[Any]
Tensors = dict[str, tuple[str, Bits]]
E, H, I = 3, 256, 128  # noqa: E741
BITS = {"W4A16": 4, "W8A16": 8}
LINEARS = {
    f"model.layers.1.mlp.experts.{e}.{p}_proj": (H, I) if p == "down" else (I, H)
    for e in range(E)
    for p in ("gate", "up", "down")
}


def read(folder: Path) -> Tensors:
    """All tensors of a folder's safetensors files by name: dtype and raw bits."""
    return {name: (tensor.dtype, tensor.bits) for name, tensor in read_folder(folder).items()}


def bf16(rng: np.random.Generator, *shape: int) -> Bits:
    return reference.f32_to_bf16((rng.standard_normal(shape) * 0.05).astype(np.float32))


def fp8(rng: np.random.Generator, *shape: int) -> Bits:
    """Finite E4M3 codes."""
    return (rng.integers(0, 0x7E, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)


def decoded(codes: Bits, scales: Bits, block: int = 128) -> Bits:
    """FP8 times its block's scale, as BF16."""
    rows, columns = codes.shape
    grid = np.repeat(np.repeat(scales, block, axis=0)[:rows], block, axis=1)[:, :columns]
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return reference.f32_to_bf16((sign * value).astype(np.float32) * grid)


@pytest.fixture
def save(tmp_path: Path, write_safetensors: Any) -> Callable[..., Path]:
    """A checkpoint from its tensors: save(tensors, model_type=..., ...)."""

    def make(tensors: Tensors, **config: Any) -> Path:
        folder = tmp_path / "source"
        folder.mkdir()
        document = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": H, "hidden_act": "silu"}
        (folder / "config.json").write_text(json.dumps(document | config))
        (folder / "tokenizer.json").write_text("{}")
        write_safetensors(folder / "model.safetensors", tensors)
        return folder

    return make


def others(rng: np.random.Generator, router: str) -> Tensors:
    """A dense layer 0, and what stands beside the experts of layer 1."""
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


def check(
    source: Tensors, output: Tensors, linears: dict[str, Bits], kind: str, rounding: str = "library", group: int = 128
) -> None:
    """Every linear (its BF16 bits) is packed as the definition says; all others are the source's."""
    left = dict(output)
    for name, weight in linears.items():
        codes, scale = groups.quantize_groups(BITS[kind], group, weight, rounding)
        for suffix, dtype, expected in (
            ("weight_packed", "I32", groups.pack_words(BITS[kind], codes)),
            ("weight_scale", "BF16", scale),
            ("weight_shape", "I64", np.array(weight.shape)),
        ):
            tensor = left.pop(f"{name}.{suffix}")
            assert tensor[0] == dtype, (name, suffix)
            np.testing.assert_array_equal(tensor[1], expected, f"{name}.{suffix}")
    assert left.keys() == source.keys()
    for name, (dtype, bits) in source.items():
        assert left[name][0] == dtype, name
        assert left[name][1].shape == bits.shape, name
        assert left[name][1].tobytes() == bits.tobytes(), name


def config_of(output: Path) -> Any:
    return json.loads((output / "config.json").read_text())


@pytest.fixture
def gpu(cli: Any, tmp_path: Path) -> Any:
    """Round a model to nearest, to `out` unless another name is given: gpu(model, option, ...)."""

    def convert(model: Path, *options: object, to: str = "out", **more: Any) -> Any:
        return cli("gpu", "-i", model, "-o", tmp_path / to, "--quant-method", "RTN", *options, **more)

    return convert


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["library", "float32"])
@pytest.mark.parametrize("kind", BITS)
def test_the_bundled_model(kind: str, rounding: str, tmp_path: Path, cli: Any, gpu: Any, example: Path) -> None:
    out = tmp_path / "out"
    ignored = ["vision", "re:.*eh_proj$"]
    gpu(example, "--quant_type", kind, "--rounding", rounding, "--ignore_patterns", *ignored)
    source = read(example)
    experts = {name: source.pop(name)[1] for name in list(source) if ".experts." in name}
    linears = {name.removesuffix(".weight"): bits for name, bits in experts.items()}
    check(source, read(out), linears, kind, rounding)
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
    assert cli("resume", out).returncode == 0


@pytest.mark.parametrize(("kind", "group"), [("W4A16", 32), ("W4A16", 64), ("W8A16", 32)])
def test_groups_of_another_size(kind: str, group: int, tmp_path: Path, cli: Any, gpu: Any, example: Path) -> None:
    """Of 4 bits in groups of 32, kt-kernel's RAWINT4 is told to read the same files, and our runtime does."""
    out = tmp_path / "out"
    said = gpu(example, "--quant-type", kind, "--group-size", group).stderr
    source = read(example)
    experts = {name: source.pop(name)[1] for name in list(source) if ".experts." in name}
    linears = {name.removesuffix(".weight"): bits for name, bits in experts.items()}
    check(source, read(out), linears, kind, group=group)
    assert config_of(out)["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == group
    about, card = json.loads((out / "manifest.json").read_text()), (out / "README.md").read_text()
    assert about["settings"]["group_size"] == about["model"]["group_size"] == group
    assert f"one BF16 scale per {group} columns" in card
    cli("verify", out, "--against", example, "--full", "--no-load")
    command = f"--model {out} --kt-weight-path {out} --kt-method RAWINT4"
    if (kind, group) == ("W4A16", 32):
        assert command in said and "by kt-kernel's RAWINT4, as the experts on the CPU" in card
        cli("verify", out, "--run", "--no-load")
    else:
        assert "RAWINT4" not in said + card
        assert kind in cli("verify", out, "--run", "--no-load", code=3).stderr
    assert f"--group-size was {group}, is 128" in gpu(example, "--quant-type", kind, code=7).stderr


def test_groups_that_fit_are_named(tmp_path: Path, gpu: Any, save: Any) -> None:
    """64 columns do not make a group of 128; kt-kernel's RAWINT4 does not know the names of Mixtral."""
    rng = np.random.default_rng(8)
    tensors = others(rng, "block_sparse_moe.gate")
    for e in range(E):
        for name, shape in (("w1", (64, H)), ("w2", (H, 64)), ("w3", (64, H))):
            tensors[f"model.layers.1.block_sparse_moe.experts.{e}.{name}.weight"] = ("BF16", bf16(rng, *shape))
    folder = save(tensors, model_type="mixtral", num_local_experts=E, intermediate_size=64)
    said = gpu(folder, "--quant-type", "W4A16", code=3).stderr
    assert "do not divide the expert width 64 of this model; give --group-size 64, convert it with" in said
    said = gpu(folder, "--quant-type", "W4A16", "--group-size", 32).stderr
    assert "kt-kernel's RAWINT4 cannot compute these experts on the CPU: it looks for model.layers." in said
    assert "kt-method RAWINT4" not in said + (tmp_path / "out" / "README.md").read_text()


def test_names_of_mixtral_stay(tmp_path: Path, cli: Any, gpu: Any, save: Any) -> None:
    rng = np.random.default_rng(1)
    source = others(rng, "block_sparse_moe.gate")
    experts = {
        f"model.layers.1.block_sparse_moe.experts.{e}.{w}": bf16(rng, *((H, I) if w == "w2" else (I, H)))
        for e in range(E)
        for w in ("w1", "w2", "w3")
    }
    tensors = source | {f"{name}.weight": ("BF16", bits) for name, bits in experts.items()}
    folder = save(tensors, model_type="mixtral", num_local_experts=E, intermediate_size=I)
    gpu(folder, "--quant-type", "W4A16")
    check(source, read(tmp_path / "out"), experts, "W4A16")
    cli("verify", tmp_path / "out", "--against", folder, "--no-load")
    assert any("block_sparse_moe" in p for p in config_of(tmp_path / "out")["quantization_config"]["ignore"])


@pytest.mark.parametrize("turned", [False, True], ids=["output-major", "input-major"])
def test_fused_experts_are_split(turned: bool, tmp_path: Path, cli: Any, gpu: Any, save: Any) -> None:
    rng = np.random.default_rng(2)
    source = others(rng, "mlp.gate")
    gate_up, down = bf16(rng, E, 2 * I, H), bf16(rng, E, H, I)
    stored = {"gate_up_proj": gate_up, "down_proj": down}
    base = "model.layers.1.mlp.experts"
    tensors = source | {
        f"{base}.{name}": ("BF16", np.ascontiguousarray(x.swapaxes(1, 2)) if turned else x)
        for name, x in stored.items()
    }
    folder = save(tensors, model_type="qwen3_moe", num_experts=E, moe_intermediate_size=I)
    gpu(folder)
    linears = {f"{base}.{e}.gate_proj": gate_up[e, :I] for e in range(E)}
    linears |= {f"{base}.{e}.up_proj": gate_up[e, I:] for e in range(E)}
    linears |= {f"{base}.{e}.down_proj": down[e] for e in range(E)}
    check(source, read(tmp_path / "out"), linears, "W8A16")
    cli("verify", tmp_path / "out", "--against", folder, "--no-load")


def test_fp8_becomes_integers_in_the_experts_and_bf16_elsewhere(tmp_path: Path, cli: Any, gpu: Any, save: Any) -> None:
    """MTP experts too; no scale of the source and no word of its quantization is left."""
    rng = np.random.default_rng(3)
    plain = others(rng, "mlp.gate")
    tensors, linears, expected = dict(plain), {}, dict(plain)

    def add(name: str, *shape: int) -> Bits:
        codes = fp8(rng, *shape)
        scales = rng.uniform(1e-3, 1e-2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
        tensors[f"{name}.weight"] = ("F8_E4M3", codes)
        tensors[f"{name}.weight_scale_inv"] = ("F32", scales)
        return decoded(codes, scales)

    for layer in (1, 2):  # 2 is MTP
        for expert in range(E):
            for part, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
                weights = add(name, *shape)
                if layer == 1:
                    linears[name] = weights
                else:
                    expected[f"{name}.weight"] = ("BF16", weights)
    for name, shape in (
        ("model.layers.1.self_attn.o_proj", (H, H)),
        ("model.layers.1.mlp.shared_experts.up_proj", (8400, H)),
    ):
        expected[f"{name}.weight"] = ("BF16", add(name, *shape))
    stacked = fp8(rng, 2, 128, H)
    stacked_scales = rng.uniform(1e-3, 1e-2, (2, 1, 2)).astype(np.float32)
    tensors["mtp.layers.0.mlp.experts.up_proj"] = ("F8_E4M3", stacked)
    tensors["mtp.layers.0.mlp.experts.up_proj_scale_inv"] = ("F32", stacked_scales)
    expected["mtp.layers.0.mlp.experts.up_proj"] = (
        "BF16",
        np.stack([decoded(c, s) for c, s in zip(stacked, stacked_scales, strict=True)]),
    )
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = save(
        tensors, model_type="deepseek_v3", n_routed_experts=E, moe_intermediate_size=I, quantization_config=quant
    )
    (folder / "hf_quant_config.json").write_text("{}")
    out = tmp_path / "out"
    done = gpu(folder, "--quant-type", "W4A16")
    assert "MTP part (layer 2) are not quantized" in done.stderr
    assert "FP8 tensors outside the routed experts are written as BF16" in done.stderr
    check(expected, read(out), linears, "W4A16")
    assert not (out / "hf_quant_config.json").exists()
    assert "fp8" not in (out / "config.json").read_text()
    assert any("layers" in p and "2" in p for p in config_of(out)["quantization_config"]["ignore"])
    cli("verify", out, "--against", folder, "--no-load")


def test_no_quantization_of_the_source_survives_in_a_nested_config(
    tmp_path: Path, gpu: Any, write_qwen: Any, random_experts: Any
) -> None:
    folder = write_qwen(tmp_path / "source", {0: random_experts(2, H, I)})
    config = config_of(folder)
    nested = {k: config.pop(k) for k in ("num_experts", "moe_intermediate_size")}
    config["text_config"] = nested | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    gpu(folder)
    assert config_of(tmp_path / "out")["text_config"] == nested


def test_bytes_do_not_depend_on_threads_or_instruction_set(
    tmp_path: Path, gpu: Any, example: Path, read_tree: Any
) -> None:
    trees = []
    for n, (threads, isa) in enumerate((("1", "scalar"), ("2", ""))):
        out = tmp_path / str(n)
        gpu(example, "--cpuinfer-threads", threads, env={"KTCONVERT_ISA": isa}, to=str(n))
        trees.append(read_tree(out))
    assert trees[0] == trees[1]


def test_shards_are_cut_between_experts(tmp_path: Path, gpu: Any, write_qwen: Any, random_experts: Any) -> None:
    """As small as they come: every shard holds one expert."""
    layers = {n: random_experts(E, 128, 384, seed=n) for n in (0, 1)}
    folder = write_qwen(tmp_path / "source", layers)
    gpu(folder, "--quant-type", "W4A16", "--max-shard-size", "80KB")
    source = read(folder)
    linears = {n.removesuffix(".weight"): source.pop(n)[1] for n in list(source) if ".experts." in n}
    check(source, read(tmp_path / "out"), linears, "W4A16")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2 * E + 1


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_floats_are_rounded_from_bf16(dtype: str, tmp_path: Path, gpu: Any, save: Any) -> None:
    rng = np.random.default_rng(7)
    source = others(rng, "mlp.gate")
    norm = rng.standard_normal(H)
    source["model.norm.weight"] = (
        dtype,
        norm.astype("f4").view("u4") if dtype == "F32" else norm.astype("f2").view("u2"),
    )
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in LINEARS.items()}
    if dtype == "F16":
        values = {name: x.astype(np.float16).astype(np.float32) for name, x in values.items()}
    stored = {f"{n}.weight": (dtype, x if dtype == "F32" else x.astype(np.float16)) for n, x in values.items()}
    folder = save(source | stored, model_type="qwen3_moe", num_experts=E, moe_intermediate_size=I)
    gpu(folder)
    check(source, read(tmp_path / "out"), {name: reference.f32_to_bf16(x) for name, x in values.items()}, "W8A16")


def test_an_expert_of_zeros_is_reported(
    tmp_path: Path, cli: Any, gpu: Any, write_qwen: Any, random_experts: Any
) -> None:
    experts = random_experts(2, 128, 128)
    experts["up"][1] = 0x8000  # negative zeros
    folder = write_qwen(tmp_path / "source", {0: experts})
    done = gpu(folder)
    assert "warning: model.layers.0.mlp.experts.1.up_proj is all zeros in the source" in done.stderr
    cli("verify", tmp_path / "out", "--no-load")  # the scales say that its source was


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "code", "words"),
    [
        ((192, 128), (), 3, "hidden size 192"),
        ((128, 96), (), 3, "expert width 96"),
        ((128, 256), ("--tp-size", "4"), 3, "4 tensor-parallel ranks"),
        ((128, 128), ("--ignore-patterns", "lm_head", "re:.*experts.*"), 2, "would leave out the routed expert"),
        ((128, 128), ("--ignore_patterns", "re:("), 2, "is no regular expression"),
        ((128, 128), ("--torch-dtype", "float16"), 3, "BF16"),
    ],
)
def test_refused_before_any_work(
    shape: tuple[int, int],
    options: tuple[str, ...],
    code: int,
    words: str,
    tmp_path: Path,
    gpu: Any,
    write_qwen: Any,
    random_experts: Any,
) -> None:
    folder = write_qwen(tmp_path / "source", {0: random_experts(2, *shape)})
    done = gpu(folder, *options, code=code)
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_value_that_is_not_finite_is_named(tmp_path: Path, gpu: Any, write_qwen: Any, random_experts: Any) -> None:
    experts = random_experts(2, 128, 256)
    experts["down"][1, 7, 130] = 0x7F80
    folder = write_qwen(tmp_path / "source", {0: experts})
    done = gpu(folder, code=5)
    assert "model.layers.0.mlp.experts.1.down_proj.weight" in done.stderr
    assert "row 7, column 130" in done.stderr


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "code", "words"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "F8_E4M3", (H, H), 5, "weight_scale_inv is missing"),
        ("model.layers.0.self_attn.q_proj.weight_packed", "I32", (H, 32), 5, "weight_scale is missing"),
        ("model.layers.0.self_attn.q_proj.qweight", "I32", (32, H), 5, "q_proj.scales is missing"),
        ("model.layers.0.self_attn.q_proj.qzeros", "I32", (2, 32), 3, "GPTQ or AWQ"),
    ],
)
def test_others_that_are_packed_are_refused(
    name: str, dtype: str, shape: tuple[int, ...], code: int, words: str, tmp_path: Path, gpu: Any, save: Any
) -> None:
    rng = np.random.default_rng(5)
    tensors: Tensors = {f"{linear}.weight": ("BF16", bf16(rng, *shape)) for linear, shape in LINEARS.items()}
    tensors[name] = (dtype, np.zeros(shape, np.int32 if dtype == "I32" else np.uint8))
    folder = save(tensors, model_type="qwen3_moe", num_experts=E, moe_intermediate_size=I)
    done = gpu(folder, code=code)
    assert name in done.stderr and words in done.stderr


def test_without_a_config_nothing_could_load_it(tmp_path: Path, gpu: Any, write_qwen: Any, random_experts: Any) -> None:
    folder = write_qwen(tmp_path / "source", {0: random_experts(2, 128, 128)})
    (folder / "config.json").unlink()
    assert "config.json" in gpu(folder, code=5).stderr


# ---- verify and inspect ----------------------------------------------------------------------------------------------


@pytest.fixture
def converted(tmp_path: Path, gpu: Any, example: Path) -> Path:
    out = tmp_path / "made"
    gpu(example, "--quant-type", "W4A16", "-q", to="made")
    return out


NAME = "model.layers.0.mlp.experts.2.up_proj"
Change = Callable[[dict[str, Tensor]], None]


def _drop(tensors: dict[str, Tensor]) -> None:
    for suffix in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{NAME}.{suffix}"]


def _zero(tensors: dict[str, Tensor]) -> None:
    packed = tensors[f"{NAME}.weight_packed"]
    tensors[f"{NAME}.weight_packed"] = packed._replace(data=b"\x88" * len(packed.data))


def _nan(tensors: dict[str, Tensor]) -> None:
    scale = tensors[f"{NAME}.weight_scale"]
    tensors[f"{NAME}.weight_scale"] = scale._replace(data=scale.data[:-2] + b"\xc0\x7f")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop, (f"{NAME}.weight_packed is missing", "47 linears are quantized, the plan had 48")),
        (_zero, (f"{NAME}.weight_packed", "is all zeros")),
        (_nan, (f"{NAME}.weight_scale", "is not a positive number")),
    ],
    ids=["an expert is gone", "all zeros", "scale NaN"],
)
def test_verify_sees_damage(change: Change, words: tuple[str, ...], converted: Path, cli: Any) -> None:
    """Where the manifest was made to fit, as another program's would."""
    shard = converted / "model-00001-of-00003.safetensors"
    edit_file(shard, change)
    manifest = json.loads((converted / "manifest.json").read_text())
    next(f for f in manifest["files"] if f["name"] == shard.name)["size"] = shard.stat().st_size
    (converted / "manifest.json").write_text(json.dumps(manifest))
    report = json.loads(cli("verify", converted, "--json", code=6).stdout)
    problems = "\n".join(p for c in report["checks"] for p in c["problems"])
    for word in words:
        assert word in problems
    assert f"{shard.name} is not what was written" in problems


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("ignore",), ["lm_head", "re:.*experts.*"], "which is quantized"),
        (("ignore",), ["lm_head"], "not named in the ignore list"),
        (("config_groups", "group_0", "weights", "actorder"), "static", "config_groups"),
        (("config_groups", "group_0", "targets"), ["re:.*experts.*"], "config_groups"),
    ],
)
def test_verify_sees_a_config_that_loaders_misread(
    path: tuple[str, ...], value: Any, words: str, converted: Path, cli: Any
) -> None:
    config = config_of(converted)
    inner = config["quantization_config"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (converted / "config.json").write_text(json.dumps(config))
    report = json.loads(cli("verify", converted, "--json", code=6).stdout)
    quantization = next(c for c in report["checks"] if c["name"] == "quantization")
    assert any(words in problem for problem in quantization["problems"])


def test_verify_against_another_source_and_another_output(
    converted: Path, tmp_path: Path, cli: Any, gpu: Any, example: Path
) -> None:
    other = tmp_path / "w8"
    gpu(example, to="w8")
    assert "method is W4A16 here" in cli("verify", converted, "--against", other, code=6).stderr
    cli("verify", converted, "--against", converted)
    rounded = tmp_path / "float32"
    gpu(example, "--quant-type", "W4A16", "--rounding", "float32", to="float32")
    assert "weight_packed differs" in cli("verify", converted, "--against", rounded, code=6).stdout


def test_inspect_says_what_it_is(converted: Path, cli: Any) -> None:
    report = json.loads(cli("inspect", converted, "--json").stdout)
    assert report["kind"] == "output" and report["complete"] and report["command"] == "gpu"
    assert (report["arrangement"], report["method"], report["experts"], report["tensors"]) == (
        "pack-quantized",
        "W4A16",
        8,
        144,
    )
    assert "NUMA" not in cli("inspect", converted).stdout


def test_it_is_no_weights_for_the_cpu(converted: Path, cli: Any) -> None:
    for command in (("bench", converted), ("verify", converted, "--run")):
        assert "W4A16" in cli(*command, code=3).stderr


# ---- the command line ------------------------------------------------------------------------------------------------


def test_dry_run_and_json(tmp_path: Path, gpu: Any, example: Path) -> None:
    plan = json.loads(gpu(example, "--json", "--dry-run").stdout.splitlines()[-1])
    assert [s["name"] for s in plan["stages"]] == ["experts", "carry_over", "assemble"]
    assert plan["model"]["packed_linears"] == 48
    assert not (tmp_path / "out").exists()
    events = [json.loads(line) for line in gpu(example, "--json").stdout.splitlines()]
    written = sum(e["bytes"] for e in events if e["event"] == "done")
    assert written == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert abs(written - plan["bytes_out"]) < 100_000  # headers
    assert events[-1]["event"] == "finished"


def test_another_option_is_refused_with_both_values(tmp_path: Path, cli: Any, gpu: Any, example: Path) -> None:
    gpu(example)
    assert "nothing to do" in gpu(example, "--cpuinfer-threads", "1", "--tp-size", "2").stderr
    assert "--quant-type was W8A16, is W4A16" in gpu(example, "--quant-type", "W4A16", code=7).stderr
    gpu(example, "--quant-type", "W4A16", "--overwrite")
    assert "command was gpu, is cpu" in cli("cpu", "-i", example, "-o", tmp_path / "out", code=7).stderr
