"""Packed integers of compressed-tensors as an input: the library's own values, whatever is made of
them, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.experts import PROJECTIONS, MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError
from ktconvert.native_quant import kernels
from ktconvert.quantizers import groups, reference
from rig import killpoint
from rig.conversion import KTCONVERT, tree
from rig.integers import E, H, I, checkpoint, scheme
from rig.safetensors import Tensors, edit_file, metadata_of, read_file, read_folder

LIBRARY = Path(__file__).parent / "golden" / "ct_pack_int4_g32_sym.safetensors"
BASE = "model.layers.0.mlp.experts.{}.{}_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's file with a config."""
    stored = {name: t for name, t in read_file(LIBRARY).items() if not name.endswith(".expected")}
    quantization = json.loads(metadata_of(LIBRARY)["quantization_config"])
    return checkpoint(tmp_path_factory.mktemp("library") / "model", stored, quantization)


@pytest.fixture(scope="module")
def plain(packed: Path) -> Path:
    """The same experts in BF16, as we decode them."""
    with open_checkpoint(packed) as source:
        model = recognise(source)
        tensors = {
            f"{BASE.format(e, p)}.weight": ("BF16", kernels.decode(model.linear(0, e, p)))
            for e in range(E)
            for p in PROJECTIONS
        }
    return checkpoint(packed.with_name("plain"), tensors, None)


def model_of(folder: Path) -> MoeModel:
    return recognise(open_checkpoint(folder))


# ---- values ---------------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_library(packed: Path) -> None:
    """All linears by the hash of the library's own values (its -0 as +0), one by its values."""
    model = model_of(packed)
    hashes = json.loads(metadata_of(LIBRARY)["expected_sha256"])
    assert len(hashes) == 3 * E and model.dtypes == ("INT4",)
    for name, about in hashes.items():
        *_, expert, projection = name.split(".")
        bits = kernels.decode(model.linear(0, int(expert), projection.removesuffix("_proj")))
        assert list(bits.shape) == about["shape"]
        assert hashlib.sha256(np.where(bits == 0x8000, 0, bits).astype("<u2").tobytes()).hexdigest() == about["sha256"]
    expected = read_file(LIBRARY)[f"{BASE.format(1, 'down')}.expected"].bits
    assert (kernels.decode(model.linear(0, 1, "down")) == expected).all()


DTYPES = {"BF16": reference.f32_to_bf16, "F16": lambda x: x.astype(np.float16).view(np.uint16), "F32": np.asarray}


def pack_all(bits: int, group: int, dtype: str, shape_dtype: str = "I64") -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of random experts, and the BF16 value of each linear by the equation."""
    rng = np.random.default_rng(bits * group)
    tensors: dict[str, Any] = {}
    values = {}
    for expert in range(E):
        for projection in PROJECTIONS:
            n, k = (H, I) if projection == "down" else (I, H)
            half = 1 << (bits - 1)
            codes = rng.integers(-half, half, (n, k)).astype(np.int8)
            scales = DTYPES[dtype](rng.uniform(1e-3, 1e-2, (n, k // min(group, k))).astype(np.float32))
            base = BASE.format(expert, projection)
            tensors[f"{base}.weight_packed"] = ("I32", groups.pack_words(bits, codes))
            tensors[f"{base}.weight_scale"] = (dtype, scales)
            tensors[f"{base}.weight_shape"] = (shape_dtype, np.array([n, k], {"I64": "<i8", "I32": "<i4"}[shape_dtype]))
            read = {"BF16": reference.bf16_to_f32, "F16": lambda x: x.view(np.float16).astype(np.float32)}
            s = read[dtype](scales) if dtype in read else scales
            values[base] = reference.f32_to_bf16(codes.astype(np.float32) * np.repeat(s, k // s.shape[1], axis=1))
    return tensors, values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64), (4, 10**6), (8, 10**6)])
def test_any_width_group_and_type_of_scales(bits: int, group: int, dtype: str, tmp_path: Path) -> None:
    tensors, values = pack_all(bits, group, dtype, "I32" if bits == 4 else "I64")
    size = None if group > H else group
    model = model_of(checkpoint(tmp_path, tensors, scheme(bits, size)))
    assert model.dtypes == (f"INT{bits}",) and model.shape(0) == (E, H, I)
    for expert in range(E):
        for projection in PROJECTIONS:
            linear = model.linear(0, expert, projection)
            assert (kernels.decode(linear) == values[BASE.format(expert, projection)]).all()


@pytest.mark.parametrize("preset", ["W4A16", "W8A16"])
def test_values_are_what_compressed_tensors_unpacks(preset: str) -> None:
    """The installed library's own decompression of what its compressor made, for the definition behind our kernels."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("llmcompressor", reason="llmcompressor is not installed (pip install 'ktconvert[gpu]')")
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.entrypoints.model_free.lifecycle import calibrate_weight, initialize_quantized_linear

    rng = np.random.default_rng(5)
    bf16 = torch.from_numpy(rng.standard_normal((64, 256)).astype(np.float32)).to(torch.bfloat16)
    module = initialize_quantized_linear(bf16, preset_name_to_scheme(preset, ["Linear"]), "cpu")
    calibrate_weight(module)
    compress_module(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    decompress_module(module)
    theirs = module.weight.detach().view(torch.uint16).numpy()
    bits = int(preset[1])
    scales = reference.bf16_to_f32(state["weight_scale"].view(torch.uint16).numpy())
    kind = kernels.KINDS[f"int{bits}"]
    ours = kernels.decode(kernels.Matrix(state["weight_packed"].numpy().view(np.uint8), kind, scales, (1, 128)))
    assert (np.where(ours == 0x8000, 0, ours) == np.where(theirs == 0x8000, 0, theirs)).all()


# ---- conversions ----------------------------------------------------------------------------------------------------


def same_experts(ours: Path, theirs: Path) -> None:
    """The same tensors; headers differ in what they were made from."""
    assert read_folder(ours) == read_folder(theirs)


@pytest.mark.parametrize("options", [(1,), (3,), (1, "--save-backward-weights")], ids=str)
def test_cpu_makes_of_them_what_it_makes_of_their_values(
    options: tuple[Any, ...], packed: Path, plain: Path, cli: Callable[..., Any], tmp_path: Path
) -> None:
    """AMXINT4; three NUMA parts of down_proj begin at columns 128 and 256, and backward matrices are transposed."""
    for source, out in ((packed, tmp_path / "packed"), (plain, tmp_path / "plain")):
        cli("cpu", "-i", source, "-o", out, "--threadpool-count", *options)
    same_experts(tmp_path / "packed", tmp_path / "plain")
    cli("verify", tmp_path / "packed", "--against", packed, "--full")


def test_cpu_in_parts_that_begin_inside_a_group(cli: Callable[..., Any], tmp_path: Path) -> None:
    """AMXINT8 in six parts: slices of down_proj begin at every 64th column, groups have 128."""
    tensors, values = pack_all(8, 128, "BF16")
    packed = checkpoint(tmp_path / "p", tensors, scheme(8, 128))
    plain = checkpoint(tmp_path / "b", {f"{name}.weight": ("BF16", bits) for name, bits in values.items()}, None)
    for source, out in ((packed, tmp_path / "packed"), (plain, tmp_path / "plain")):
        cli("cpu", "-i", source, "-o", out, "--quant-method", "int8", "--threadpool-count", 6)
    same_experts(tmp_path / "packed", tmp_path / "plain")


def test_what_gpu_wrote_goes_to_cpu(example: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    """`ktconvert gpu` and then `cpu`: claimed by --input-type, inspected, converted, verified."""
    cli("gpu", "-i", example, "-o", tmp_path / "w4", "--quant-method", "RTN", "--quant-type", "W4A16")
    model, stored = model_of(tmp_path / "w4"), read_folder(tmp_path / "w4")
    for projection in PROJECTIONS:
        base = f"model.layers.1.mlp.experts.5.{projection}_proj"
        exact = groups.dequantize_groups(4, stored[f"{base}.weight_packed"].bits, stored[f"{base}.weight_scale"].bits)
        assert (kernels.decode(model.linear(1, 5, projection)) == reference.f32_to_bf16(exact)).all()
    cli("cpu", "-i", tmp_path / "w4", "-o", tmp_path / "int8", "--quant-method", "int8", "--input-type", "int4")
    cli("verify", tmp_path / "int8", "--against", tmp_path / "w4")
    cli("cpu", "-i", tmp_path / "w4", "-o", tmp_path / "no", "--input-type", "int8", code=5)


def test_killed_and_resumed_to_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    shim, out = killpoint.build(tmp_path), tmp_path / "out"
    command = [*KTCONVERT, "cpu", "-i", str(packed), "-o", str(out), "--threadpool-count", "1", "-q"]
    log = tmp_path / "log"
    assert killpoint.run(command, out, 0, shim, log).returncode == 0
    wanted, calls = tree(out), killpoint.count(log)
    again = tmp_path / "again"
    command[command.index(str(out))] = str(again)
    for n in (calls // 3, 2 * calls // 3):
        assert killpoint.run(command, again, n, shim).returncode == killpoint.KILLED
    assert killpoint.run(command, again, 0, shim).returncode == 0
    assert tree(again) == wanted


def test_inspect_says_what_they_are(packed: Path, cli: Callable[..., Any]) -> None:
    seen = json.loads(cli("inspect", packed, "--json").stdout)
    assert seen["expert_dtypes"] == ["INT4"] and seen["convert"]


def test_gpu_decodes_those_beside_the_experts(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A checkpoint whose attention is packed, too: the output has it in BF16, without its scales and shape."""
    tensors, values = pack_all(4, 32, "BF16")
    stem = "model.layers.0.self_attn.q_proj"
    source = BASE.format(0, "gate")
    tensors |= {f"{stem}.{s}": tensors[f"{source}.{s}"] for s in ("weight_packed", "weight_scale", "weight_shape")}
    folder = checkpoint(tmp_path / "model", tensors, scheme(4, 32))
    model = model_of(folder)
    rest = other_tensors(model.source, model.expert_tensor_names(), model.quantization)
    assert list(rest.tensors) == [f"{stem}.weight"]
    assert rest.dropped == (f"{stem}.weight_scale", f"{stem}.weight_shape")
    cli("gpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "RTN", "--quant-type", "W8A16")
    result = read_folder(tmp_path / "out")
    assert (result[f"{stem}.weight"].bits == values[source]).all()
    assert not [name for name in result if name.startswith(f"{stem}.weight_")]
    cli("verify", tmp_path / "out", "--against", folder)


# ---- refusals -------------------------------------------------------------------------------------------------------

GATE = BASE.format(1, "gate")


def without(suffix: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{GATE}.{suffix}")


def changed(suffix: str, dtype: str, bits: Any) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[f"{GATE}.{suffix}"] = type(tensors[f"{GATE}.{suffix}"])(dtype, bits.shape, bits.tobytes())

    return change


def added(suffix: str, dtype: str, bits: Any, linear: str = GATE) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        first = next(iter(tensors.values()))
        tensors[f"{linear}.{suffix}"] = type(first)(dtype, bits.shape, bits.tobytes())

    return change


REFUSED: dict[str, tuple[Callable[[Tensors], Any], type[KtconvertError], str]] = {
    "no codes": (without("weight_packed"), InputError, "is a scale whose weight .*weight_packed' is missing"),
    "no scales": (without("weight_scale"), InputError, "weight_packed' is INT4 but .*weight_scale is missing"),
    "no shape": (without("weight_shape"), InputError, "weight_packed' is INT4 but .*weight_shape is missing"),
    "scales of another size": (
        changed("weight_scale", "BF16", np.zeros((I, 4), np.uint16)),
        InputError,
        "does not fit .*384 x 256 in groups of 32",
    ),
    "groups that do not divide": (
        changed("weight_scale", "BF16", np.zeros((I, 3), np.uint16)),
        UnsupportedError,
        "do not divide the 256 columns",
    ),
    "scales for other rows": (
        changed("weight_scale", "BF16", np.zeros((I // 2, 8), np.uint16)),
        InputError,
        "does not fit",
    ),
    "scales of another type": (
        changed("weight_scale", "U8", np.zeros((I, 8), np.uint8)),
        InputError,
        "scales must be F32, BF16 or F16",
    ),
    "a shape of another type": (changed("weight_shape", "F32", np.zeros(2, np.float32)), InputError, "must be two I64"),
    "codes of another type": (
        changed("weight_packed", "I64", np.zeros((I, 16), np.int64)),
        UnsupportedError,
        "is not an input yet",
    ),
    "bytes of another width": (changed("weight_packed", "U8", np.zeros((I, 64), np.uint8)), InputError, "has shape"),
    "zero points of another size": (
        added("weight_zero_point", "I32", np.zeros((47, 8), np.int32)),
        InputError,
        r"must be I32 of shape \[48, 8\]",
    ),
    "zero points of another type": (
        added("weight_zero_point", "I8", np.zeros((I, 8), np.int8)),
        InputError,
        r"must be I32 of shape \[48, 8\]",
    ),
    "an order of other columns": (
        added("weight_g_idx", "I32", np.zeros(H // 2, np.int32)),
        InputError,
        r"must be I32 of shape \[256\]",
    ),
    "another width": (changed("weight_packed", "I32", np.zeros((I, 64), np.int32)), InputError, "must be|has shape"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused(what: str, packed: Path, tmp_path: Path) -> None:
    change, kind, words = REFUSED[what]
    folder = checkpoint(tmp_path, read_file(packed / "model.safetensors"), scheme(4, 32))
    edit_file(folder / "model.safetensors", change)
    with pytest.raises(kind, match=words):
        model_of(folder)


def test_a_shape_that_contradicts_the_codes(packed: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    folder = checkpoint(tmp_path / "model", read_file(packed / "model.safetensors"), scheme(4, 32))
    edit_file(folder / "model.safetensors", changed("weight_shape", "I64", np.array([I, H - 1], "<i8")))
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--threadpool-count", 1, code=5)
    assert f"tensor '{GATE}.weight_shape' says [384, 255], its codes are for [384, 256]" in done.stderr


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "awq"}, {"quant_method": "gptq"}, {"config_groups": {"a": {}}}], ids=str
)
def test_a_config_of_another_method(quantization: dict[str, Any], packed: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, read_file(packed / "model.safetensors"), quantization)
    if "config_groups" in quantization and "quant_method" not in quantization:
        assert model_of(folder).dtypes == ("INT4",)  # it says nothing
        return
    with pytest.raises(UnsupportedError, match="is not an input yet"):
        model_of(folder)


def test_zero_points_that_the_config_names_and_no_tensor_holds(packed: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, read_file(packed / "model.safetensors"), scheme(4, 32, symmetric=False))
    with pytest.raises(InputError, match=r"weight_packed' has zero points by its config, but .*zero_point is missing"):
        model_of(folder)


def test_an_order_that_leaves_a_group_out(packed: Path, tmp_path: Path) -> None:
    """Found when the weight is read: the header says nothing of it. An order of which nothing is set is none."""
    folder = checkpoint(tmp_path, read_file(packed / "model.safetensors"), scheme(4, 32))
    for expert in range(E):
        order = added("weight_g_idx", "I32", np.full(H, -1, np.int32), BASE.format(expert, "gate"))
        edit_file(folder / "model.safetensors", order)
    assert model_of(folder).linear(0, 1, "gate").group_of is None
    edit_file(folder / "model.safetensors", added("weight_g_idx", "I32", np.zeros(H, np.int32)))
    with pytest.raises(InputError, match="weight_g_idx' must name each of 8 groups for 32 columns"):
        model_of(folder).linear(0, 1, "gate")


def test_widths_that_only_the_groups_tell(tmp_path: Path) -> None:
    """A config with schemes of 4 and of 8 bits, of groups of their own sizes; one of no bits is none."""
    both = scheme(4, 32)
    both["config_groups"]["group_1"] = scheme(8, 128)["config_groups"]["group_0"]
    both["config_groups"]["group_2"] = scheme(0, 32)["config_groups"]["group_0"]
    for bits, group in ((4, 32), (8, 128)):
        tensors, values = pack_all(bits, group, "BF16")
        model = model_of(checkpoint(tmp_path / str(bits), tensors, both))
        assert model.dtypes == (f"INT{bits}",)
        assert (kernels.decode(model.linear(0, 1, "down")) == values[BASE.format(1, "down")]).all()
