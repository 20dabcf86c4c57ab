"""Checkpoints of libraries with more than one encoding: several widths, AutoRound's configs, modelopt's stacks.

Values equal those of the formula, through `cpu` and `dequantize`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool
from rig import encodings, floats
from rig.conversion import run_in_process
from rig.encodings import E4M3, ENCODINGS, SHAPES, E, H, I, Stored, checkpoint, fp4, integers, round_to_bf16
from rig.safetensors import read_folder

EXPERTS, Q = "model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"
COMMANDS = (("cpu", "--quant-method", "int8", "--threadpool-count", 1), ("dequantize",))
Values = dict[tuple[int, str], Any]


def read_values(folder: Path) -> tuple[Values, dict[str, Any]]:
    """Return the experts as `cpu` reads them, and every weight as `dequantize` does, by name."""
    with open_checkpoint(folder) as source:
        model = recognize(source)
        experts = {(e, p): kernels.decode(model.linear(0, e, p)).copy() for e in range(E) for p in SHAPES}
        others = find_non_expert_tensors(source, (), source.quantization).tensors
        weights = {name: stored for name, stored in others.items() if isinstance(stored, Weight)}
        for weight in weights.values():
            weight.resolve_scheme()
        count = {name: weight.shape[0] if len(weight.shape) == 3 else 1 for name, weight in weights.items()}
        return experts, {
            name: np.stack([kernels.decode(weight.read_linear(source, e)) for e in range(count[name])])
            for name, weight in weights.items()
        }


def assert_equal(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    """Assert that two dictionaries have equal values."""
    assert one.keys() == other.keys()
    assert all((values.reshape(other[key].shape) == other[key]).all() for key, values in one.items())


def convert_both_ways(folder: Path, values: Values, tmp_path: Path) -> dict[str, Any]:
    """Return the tensors that `dequantize` writes, after checking that `cpu` converts the folder like these values."""
    plain = encodings.write_plain(tmp_path / "plain", values)
    for source, out in ((folder, "ours"), (plain, "theirs")):
        assert (error := run_in_process(*COMMANDS[0], "-i", source, "-o", tmp_path / out).exception) is None, error
    assert read_folder(tmp_path / "ours") == read_folder(tmp_path / "theirs")
    assert (error := run_in_process("dequantize", "-i", folder, "-o", tmp_path / "bf16").exception) is None, error
    return {name: tensor.bits for name, tensor in read_folder(tmp_path / "bf16").items()}


# --- several widths and sizes of groups in one model ---------------------------------------------------------------

Scheme = tuple[int, int | None]  # bits, columns of a group (None: of a row)


def write_mixed(folder: Path, schemes: dict[str, Scheme], change: Any = None) -> tuple[Path, Values, Any]:
    """Write a compressed-tensors checkpoint with a scheme for each projection, and for attention's q_proj."""
    rng = np.random.default_rng(0)
    tensors: Stored = {"model.layers.0.mlp.gate.weight": ("BF16", np.zeros((E, H), np.uint16))}
    values: dict[Any, Any] = {}
    names = {(e, p): (f"{EXPERTS}.{e}.{p}_proj", SHAPES[p]) for e in range(E) for p in SHAPES}
    for key, (name, shape) in {**names, (-1, "q"): (Q, (128, H))}.items():
        make = integers(*schemes[key[1]], encodings.compressed("BF16"), zeros=False)
        stored, values[key] = make(rng, *shape)
        tensors |= {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}
    config = encodings.scheme(4, 32)
    config["config_groups"] = {
        f"group_{n}": {"targets": [f"re:.*{p}_proj"], **encodings.scheme(*s)["config_groups"]["group_0"]}
        for n, (p, s) in enumerate(schemes.items())
    }
    if change is not None:
        change(tensors, config)
    attention = values.pop((-1, "q"))
    return checkpoint(folder, tensors, config), values, attention


def make_schemes(experts: Scheme, q: Scheme, down: Scheme | None = None) -> dict[str, Scheme]:
    """Return a scheme for each projection."""
    return {"gate": experts, "up": experts, "down": down or experts, "q": q}


# In the second mix, shapes fit both 4 and 8 bits.
MIXES = [
    make_schemes((4, None), (8, 128)),
    make_schemes((4, 128), (8, 64)),
    make_schemes((4, 128), (8, None)),
    make_schemes((8, None), (4, None)),
    make_schemes((4, 32), (8, None), down=(8, 128)),
]


@pytest.mark.parametrize("schemes", MIXES)
def test_weight_shape_determines_the_bits_of_each_weight(schemes: dict[str, Scheme], tmp_path: Path) -> None:
    folder, values, attention = write_mixed(tmp_path / "model", schemes)
    experts, weights = read_values(folder)
    assert_equal(experts, values)
    named = {f"{EXPERTS}.{e}.{p}_proj.weight": bits for (e, p), bits in values.items()}
    assert_equal(weights, named | {f"{Q}.weight": attention})


def test_a_model_of_several_widths_converts_like_its_values(tmp_path: Path) -> None:
    folder, values, attention = write_mixed(tmp_path / "model", MIXES[-1])
    assert (convert_both_ways(folder, values, tmp_path)[f"{Q}.weight"] == attention).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (I, H - 8),
            r"weight_shape' is for 248 columns, but .* of shape \[384, 32\] with 4 or 8 bits is not; check num",
        ),
        ((I, 0), "is for 0 columns"),
        ((I, -H), "is for -256 columns"),
        ((I + 1, H), r"is \[385, 256\], but the codes are for \[384, 256\]"),
    ],
)
def test_a_weight_shape_that_contradicts_the_words_is_refused(shape: Any, message: str, tmp_path: Path) -> None:
    def change(tensors: Stored, config: Any) -> None:
        tensors[f"{EXPERTS}.1.gate_proj.weight_shape"] = ("I64", np.array(shape))

    folder, *_ = write_mixed(tmp_path / "model", MIXES[1], change)
    for command in COMMANDS:
        error = run_in_process(*command, "-i", folder, "-o", tmp_path / "out").exception
        assert isinstance(error, InputError) and not (tmp_path / "out").exists()
        assert str(error).startswith(f"{folder / 'model.safetensors'}: tensor '{EXPERTS}.1.gate_proj.weight_shape' is")
    with pytest.raises(InputError, match=message):
        read_values(folder)


# --- AutoRound -----------------------------------------------------------------------------------------------------


def auto_round(packing: str | None, q_bits: int = 4, **more: Any) -> Callable[[Stored, dict[str, Any]], None]:
    """Return a change to the config of AutoRound for tensors of GPTQ or AWQ, with lm_head not quantized.

    q_bits: bits of q_proj.
    """

    def change(tensors: Stored, config: dict[str, Any]) -> None:
        kept = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
        config.clear()
        config |= {"quant_method": "auto-round", **kept, "data_type": "int", "autoround_version": "0.15.1", **more}
        config |= {} if packing is None else {"packing_format": packing}
        config["extra_config"] = {"lm_head": {"bits": 16, "data_type": "float"}, Q: {"bits": q_bits, "group_size": 64}}

    return change


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        *((name, "auto_round:auto_gptq") for name in ("gptq 4", "gptq 4 v1", "gptq 8 v1")),
        *(("gptq 4 v2", packing) for packing in ("auto_round", "auto_round:gptqmodel")),
        *((name, "auto_round:auto_awq") for name in ("awq", "awq 128")),
        ("gptq 4 v1", None),
        ("gptq 4 v1", "auto_round:gptq:exllamav2"),
        ("gptq 4", "auto_round:exllamav2"),
    ],
)
def test_autoround_stores_the_tensors_of_gptq_and_awq(name: str, packing: str | None, tmp_path: Path) -> None:
    folder, values = encodings.write(name, tmp_path, auto_round(packing))
    experts, weights = read_values(folder)
    assert_equal(experts, values)
    assert_equal(weights, {f"{EXPERTS}.{e}.{p}_proj.weight": bits for (e, p), bits in values.items()})


def test_autoround_weights_may_have_different_bits(tmp_path: Path) -> None:
    stored, bits = ENCODINGS["gptq 8 v1"].make(np.random.default_rng(9), 128, H)
    set_auto_round = auto_round("auto_round:auto_gptq", q_bits=8)

    def change(tensors: Stored, config: dict[str, Any]) -> None:
        set_auto_round(tensors, config)
        tensors |= {f"{Q}{suffix}": tensor for suffix, tensor in stored.items()}

    folder, values = encodings.write("gptq 4 v1", tmp_path / "model", change)
    assert (convert_both_ways(folder, values, tmp_path)[f"{Q}.weight"] == bits).all()


@pytest.mark.parametrize(
    ("name", "packing", "more", "message"),
    [
        ("gptq 4", "auto_round:llm_compressor", {}, r"qweight': packed or integer \(I32\) is not an input yet"),
        ("gptq 4 v1", "auto_round:exllamav2", {}, "no config states whether its zero points are stored minus one"),
        (
            "ct MXFP4",
            "auto_round:llm_compressor",
            {"data_type": "mx_int"},
            r"declares integers with E8M0 scales \(MXINT4\), which are unsupported",
        ),
        (
            "ct MXFP4",
            "auto_round:llm_compressor_nvfp4_e5m3",
            {"data_type": "nvfp4_v2"},
            r"declares FP4 with E5M3 scales \(NVFP4_E5M3\), which are unsupported",
        ),
    ],
)
def test_other_packings_of_autoround_are_refused(
    name: str, packing: str, more: Any, message: str, tmp_path: Path
) -> None:
    """MXINT4 and NVFP4_E5M3 have the tensors of MXFP4, but different values."""
    folder, _ = encodings.write(name, tmp_path, auto_round(packing, **more))
    with pytest.raises(KTConvertError, match=message):
        read_values(folder)


# --- modelopt's stacks of experts ----------------------------------------------------------------------------------

STACKED = {"gate_up": ("gate", "up"), "down": ("down",)}


def make_nvfp4_stack(rng: Any, name_part: str, scale_shape: str, transposed: bool) -> tuple[Stored, list[Any]]:
    """Draw a stack and its values [n, k], expert by expert. scale_shape: the shape of the float32 scales."""
    rows, k = sum(SHAPES[p][0] for p in STACKED[name_part]), SHAPES[STACKED[name_part][0]][1]
    drawn = [fp4(rng, rows, k) for _ in range(E)]
    codes, steps = np.stack([c for c, _ in drawn]), rng.integers(1, 127, (E, rows, k // 16)).astype(np.uint8)
    halves = len(STACKED[name_part]) if scale_shape == "E2" else 1
    global_scales = rng.uniform(1e-4, 2e-4, (1 if scale_shape in ("", "1") else E, halves)).astype(np.float32)
    row_scales = np.broadcast_to(global_scales.repeat(rows // halves, axis=1)[:, :, None], (E, rows, 1))
    x = np.stack([x for _, x in drawn]).astype(np.float32)
    values = round_to_bf16(x * np.repeat(E4M3[steps].astype(np.float32) * row_scales, 16, axis=2))
    shape = {"": (), "1": (1,), "E": (E,), "E1": (E, 1), "E2": (E, 2) if halves == 2 else (E,)}[scale_shape]
    if transposed:
        codes, steps = codes.transpose(0, 2, 1), steps.transpose(0, 2, 1)
    name = f"{EXPERTS}.{name_part}_proj"
    stored = {
        "": ("U8", codes),
        "_weight_scale": ("F8_E4M3", steps),
        "_weight_scale_2": ("F32", global_scales.reshape(shape)),
    }
    stored["_input_scale"] = ("F32", np.ones((), np.float32))
    return {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}, [*values]


def make_fp8_stack(rng: Any, name_part: str, scale_shape: str, transposed: bool) -> tuple[Stored, list[Any]]:
    """Draw a stack in FP8, and its values."""
    rows, k = sum(SHAPES[p][0] for p in STACKED[name_part]), SHAPES[STACKED[name_part][0]][1]
    codes = rng.integers(0, 127, (E, rows, k)).astype(np.uint8)
    halves = len(STACKED[name_part]) if scale_shape == "E2" else 1
    scales = rng.uniform(1e-4, 1e-2, (1 if scale_shape in ("", "1") else E, halves)).astype(np.float32)
    row_scales = np.broadcast_to(scales.repeat(rows // halves, axis=1)[:, :, None], (E, rows, 1))
    values = round_to_bf16(E4M3[codes].astype(np.float32) * row_scales)
    shape = {"": (), "1": (1,), "E": (E,), "E1": (E, 1), "E2": (E, 2) if halves == 2 else (E,)}[scale_shape]
    name = f"{EXPERTS}.{name_part}_proj"
    stored = codes.transpose(0, 2, 1) if transposed else codes
    return {name: ("F8_E4M3", stored), f"{name}_weight_scale": ("F32", scales.reshape(shape))}, [*values]


def write_stacks(
    folder: Path, make: Any, scale_shape: str, transposed: bool, change: Any = None
) -> tuple[Path, Values, dict[str, Any]]:
    """Write a checkpoint of stacks; return it, the values of its linears, and those of its stacks in a BF16 release."""
    rng = np.random.default_rng(0)
    tensors: Stored = {"model.layers.0.mlp.gate.weight": ("BF16", np.zeros((E, H), np.uint16))}
    values: Values = {}
    released = {}
    for name_part, projections in STACKED.items():
        stored, each = make(rng, name_part, scale_shape, transposed)
        tensors |= stored
        values |= {
            (e, p): np.split(bits, len(projections))[n]
            for e, bits in enumerate(each)
            for n, p in enumerate(projections)
        }
        released[f"{EXPERTS}.{name_part}_proj"] = np.stack(each).transpose(0, 2, 1) if transposed else np.stack(each)
    if change is not None:
        change(tensors)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return checkpoint(folder, tensors, quantization, model_type="qwen3_5_moe_text"), values, released


STACKS = [
    *((make_nvfp4_stack, scale_shape, False) for scale_shape in ("", "1", "E", "E1", "E2")),
    *((make_nvfp4_stack, scale_shape, True) for scale_shape in ("", "E2")),  # Llama-4's
    *(
        (make_fp8_stack, scale_shape, transposed)
        for scale_shape in ("", "1", "E", "E1")
        for transposed in (False, True)
    ),
]


@pytest.mark.parametrize(("make", "scale_shape", "transposed"), STACKS)
def test_stacks_of_modelopt_have_the_values_of_the_formula(
    make: Any, scale_shape: str, transposed: bool, tmp_path: Path
) -> None:
    folder, values, released = write_stacks(tmp_path, make, scale_shape, transposed)
    experts, weights = read_values(folder)
    assert_equal(experts, values)
    if make is make_nvfp4_stack and transposed:  # decoded as linears, written in the orientation of the release
        released = {name: bits.transpose(0, 2, 1) for name, bits in released.items()}
    assert_equal(weights, released)


@pytest.mark.parametrize(("scale_shape", "transposed"), [("E2", False), ("E", True)])
def test_a_stack_of_modelopt_converts_like_its_values(scale_shape: str, transposed: bool, tmp_path: Path) -> None:
    """The dequantized stack has the orientation of the family's release."""
    folder, values, released = write_stacks(tmp_path / "model", make_nvfp4_stack, scale_shape, transposed)
    assert_equal({n: bits for n, bits in convert_both_ways(folder, values, tmp_path).items() if EXPERTS in n}, released)


@pytest.mark.parametrize("transposed", [False, True])
def test_two_fp8_scales_per_expert_need_a_known_axis(transposed: bool, tmp_path: Path) -> None:
    """`cpu` knows the axis from the matrices of down; `dequantize` looks at one tensor."""
    folder, values, _ = write_stacks(tmp_path, make_fp8_stack, "E2", transposed)
    model = recognize(open_checkpoint(folder))
    assert_equal({(e, p): kernels.decode(model.linear(0, e, p)) for e in range(E) for p in SHAPES}, values)
    with pytest.raises(
        UnsupportedError, match=r"_proj_weight_scale' has 2 scales for each .* rows or columns is unknown; use"
    ):
        read_values(folder)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_runtime_computes_stacks_as_single_weights(transposed: bool, tmp_path: Path) -> None:
    """The scale of a half applies to its own panels."""
    folder, values, _ = write_stacks(tmp_path, make_nvfp4_stack, "E2", transposed)
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(E) for _ in range(3)]).astype(np.int64)
    inputs = floats.activations(3, H), ids, rng.random((3, E)).astype(np.float32)
    with KTExperts.load(folder, 0, method="NVFP4", parts=1, pool=Pool(1)) as experts:
        out = floats.from_bits(experts.forward(*inputs))
    truth = floats.forward(lambda e, p: floats.from_bits(values[e, p]), *inputs, 0, 0)
    assert np.linalg.norm(out - truth) < 4e-3 * np.linalg.norm(truth)


def replace_scales(suffix: str, *shape: int) -> Callable[[Stored], None]:
    """Return a change that replaces scales."""

    def change(tensors: Stored) -> None:
        tensors[f"{EXPERTS}.{suffix}"] = ("F32", np.full(shape, 1e-4, np.float32))

    return change


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (make_nvfp4_stack, replace_scales("gate_up_proj_weight_scale_2", E + 1), "must be one F32 for each weight of"),
        (make_nvfp4_stack, replace_scales("gate_up_proj_weight_scale_2", E, 3), "must be one F32 for each weight of"),
        (make_nvfp4_stack, replace_scales("down_proj_weight_scale_2", E, 2), "must be one F32 for each weight of"),
        (make_nvfp4_stack, replace_scales("down_proj_weight_scale_2", E, H), "must be one F32 for each weight of"),
        (make_fp8_stack, replace_scales("gate_up_proj_weight_scale", E + 1), "does not fit"),
        (make_fp8_stack, replace_scales("gate_up_proj_weight_scale", E, 3), "does not fit"),
        (make_fp8_stack, replace_scales("down_proj_weight_scale", E, 2), "does not fit"),
        (
            make_nvfp4_stack,
            lambda t: t.pop(f"{EXPERTS}.down_proj_weight_scale_2"),
            "down_proj' is NVFP4 but .*_scale_2 is missing",
        ),
        (make_nvfp4_stack, lambda t: t.pop(f"{EXPERTS}.down_proj"), "is a scale whose weight .*down_proj' is missing"),
    ],
)
def test_scales_of_wrong_length_are_refused(make: Any, change: Any, message: str, tmp_path: Path) -> None:
    folder, *_ = write_stacks(tmp_path / "model", make, "E", False, change)
    for command in COMMANDS:
        error = run_in_process(*command, "-i", folder, "-o", tmp_path / "out").exception
        assert isinstance(error, InputError) and EXPERTS in str(error) and not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=message):
        read_values(folder)


def test_two_scales_per_expert_require_separate_halves(tmp_path: Path) -> None:
    """If gate and up alternate, two scales per expert have no defined meaning."""
    folder, *_ = write_stacks(tmp_path, make_nvfp4_stack, "E2", False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    with pytest.raises(UnsupportedError, match="has 2 scales for each expert, and gate and up alternate"):
        recognize(open_checkpoint(folder), to_read=True)


def test_a_layer_may_mix_both_conventions_of_nvfp4(tmp_path: Path) -> None:
    def change(tensors: Stored, _: Any) -> None:
        for name in [n for n in tensors if ".1." in n and n.endswith("_global_scale")]:
            dtype, one = tensors.pop(name)
            tensors[name.replace("global_scale", "scale_2")] = (dtype, 1 / one)

    folder, values = encodings.write("ct NVFP4", tmp_path, change)
    model = recognize(open_checkpoint(folder))
    for (e, p), bits in values.items():
        read = floats.from_bits(kernels.decode(model.linear(0, e, p)))
        assert np.allclose(read, floats.from_bits(bits), rtol=0 if e == 0 else 0.01)
