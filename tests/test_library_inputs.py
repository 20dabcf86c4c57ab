"""Checkpoints as libraries write them beyond one encoding for all weights: several widths in one model, AutoRound's own
configs, modelopt's stacks of experts. Values are those of the formula, through `cpu` and `dequantize`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError
from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.pool import Pool
from rig import encodings, floats
from rig.conversion import run_in_process
from rig.encodings import E4M3, ENCODINGS, SHAPES, E, H, I, Stored, checkpoint, fp4, integers, round_to_bf16
from rig.safetensors import read_folder

EXPERTS, Q = "model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"
COMMANDS = (("cpu", "--quant-method", "int8", "--threadpool-count", 1), ("dequantize",))
Values = dict[tuple[int, str], Any]


def decoded(folder: Path) -> tuple[Values, dict[str, Any]]:
    """The experts as `cpu` reads them, and every weight as `dequantize` does, by name."""
    with open_checkpoint(folder) as source:
        model = recognise(source)
        experts = {(e, p): kernels.decode(model.linear(0, e, p)).copy() for e in range(E) for p in SHAPES}
        others = find_non_expert_tensors(source, (), source.quantization).tensors
        weights = {name: stored for name, stored in others.items() if isinstance(stored, Weight)}
        for weight in weights.values():
            weight.fit()
        count = {name: weight.shape[0] if len(weight.shape) == 3 else 1 for name, weight in weights.items()}
        return experts, {
            name: np.stack([kernels.decode(weight.matrix(source, e)) for e in range(count[name])])
            for name, weight in weights.items()
        }


def same(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    assert one.keys() == other.keys()
    assert all((values.reshape(other[key].shape) == other[key]).all() for key, values in one.items())


def converted(folder: Path, values: Values, tmp_path: Path) -> dict[str, Any]:
    """What `dequantize` writes, after `cpu` has made of the folder what it makes of these values."""
    plain = encodings.write_plain(tmp_path / "plain", values)
    for source, out in ((folder, "ours"), (plain, "theirs")):
        assert (error := run_in_process(*COMMANDS[0], "-i", source, "-o", tmp_path / out).exception) is None, error
    assert read_folder(tmp_path / "ours") == read_folder(tmp_path / "theirs")
    assert (error := run_in_process("dequantize", "-i", folder, "-o", tmp_path / "bf16").exception) is None, error
    return {name: tensor.bits for name, tensor in read_folder(tmp_path / "bf16").items()}


# --- several widths and sizes of groups in one model ---------------------------------------------------------------

Scheme = tuple[int, int | None]  # bits, columns of a group (None: of a row)


def mixed(folder: Path, schemes: dict[str, Scheme], change: Any = None) -> tuple[Path, Values, Any]:
    """compressed-tensors with a scheme for each projection, and for attention's q_proj."""
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


def schemes(experts: Scheme, q: Scheme, down: Scheme | None = None) -> dict[str, Scheme]:
    return {"gate": experts, "up": experts, "down": down or experts, "q": q}


# With the widths' groups that follow, shapes alone fit 4 and 8 bits in the second.
MIXES = [
    schemes((4, None), (8, 128)),
    schemes((4, 128), (8, 64)),
    schemes((4, 128), (8, None)),
    schemes((8, None), (4, None)),
    schemes((4, 32), (8, None), down=(8, 128)),
]


@pytest.mark.parametrize("of", MIXES)
def test_weight_shape_tells_the_width_of_each_weight(of: dict[str, Scheme], tmp_path: Path) -> None:
    folder, values, attention = mixed(tmp_path / "model", of)
    experts, weights = decoded(folder)
    same(experts, values)
    named = {f"{EXPERTS}.{e}.{p}_proj.weight": bits for (e, p), bits in values.items()}
    same(weights, named | {f"{Q}.weight": attention})


def test_a_model_of_several_widths_is_converted_as_its_values(tmp_path: Path) -> None:
    folder, values, attention = mixed(tmp_path / "model", MIXES[-1])
    assert (converted(folder, values, tmp_path)[f"{Q}.weight"] == attention).all()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            (I, H - 8),
            r"weight_shape' says 248 columns, and .* of shape \[384, 32\] has others with 4 or 8 bits; check num",
        ),
        ((I, 0), "says 0 columns"),
        ((I, -H), "says -256 columns"),
        ((I + 1, H), r"says \[385, 256\], its codes are for \[384, 256\]"),
    ],
)
def test_a_weight_shape_that_contradicts_the_words_is_refused(shape: Any, words: str, tmp_path: Path) -> None:
    def change(tensors: Stored, config: Any) -> None:
        tensors[f"{EXPERTS}.1.gate_proj.weight_shape"] = ("I64", np.array(shape))

    folder, *_ = mixed(tmp_path / "model", MIXES[1], change)
    for command in COMMANDS:
        error = run_in_process(*command, "-i", folder, "-o", tmp_path / "out").exception
        assert isinstance(error, InputError) and not (tmp_path / "out").exists()
        assert str(error).startswith(
            f"{folder / 'model.safetensors'}: tensor '{EXPERTS}.1.gate_proj.weight_shape' says"
        )
    with pytest.raises(InputError, match=words):
        decoded(folder)


# --- AutoRound -----------------------------------------------------------------------------------------------------


def auto_round(packing: str | None, of_q: int = 4, **more: Any) -> Callable[[Stored, dict[str, Any]], None]:
    """The config of AutoRound for tensors of GPTQ or AWQ; lm_head is not quantized; of_q: bits of q_proj."""

    def change(tensors: Stored, config: dict[str, Any]) -> None:
        kept = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
        config.clear()
        config |= {"quant_method": "auto-round", **kept, "data_type": "int", "autoround_version": "0.15.1", **more}
        config |= {} if packing is None else {"packing_format": packing}
        config["extra_config"] = {"lm_head": {"bits": 16, "data_type": "float"}, Q: {"bits": of_q, "group_size": 64}}

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
    experts, weights = decoded(folder)
    same(experts, values)
    same(weights, {f"{EXPERTS}.{e}.{p}_proj.weight": bits for (e, p), bits in values.items()})


def test_autoround_may_have_other_bits_for_some_weights(tmp_path: Path) -> None:
    stored, bits = ENCODINGS["gptq 8 v1"].make(np.random.default_rng(9), 128, H)
    said = auto_round("auto_round:auto_gptq", of_q=8)

    def change(tensors: Stored, config: dict[str, Any]) -> None:
        said(tensors, config)
        tensors |= {f"{Q}{suffix}": tensor for suffix, tensor in stored.items()}

    folder, values = encodings.write("gptq 4 v1", tmp_path / "model", change)
    assert (converted(folder, values, tmp_path)[f"{Q}.weight"] == bits).all()


@pytest.mark.parametrize(
    ("name", "packing", "more", "words"),
    [
        ("gptq 4", "auto_round:llm_compressor", {}, r"qweight': packed or integer \(I32\) is not an input yet"),
        ("gptq 4 v1", "auto_round:exllamav2", {}, "no config says whether it holds zero points less one"),
        ("ct MXFP4", "auto_round:llm_compressor", {"data_type": "mx_int"}, r"are integers \(MXINT4\), which are not"),
    ],
)
def test_other_packings_of_autoround_are_refused(
    name: str, packing: str, more: Any, words: str, tmp_path: Path
) -> None:
    """MXINT4 has the tensors of MXFP4, and other numbers."""
    folder, _ = encodings.write(name, tmp_path, auto_round(packing, **more))
    with pytest.raises(KtconvertError, match=words):
        decoded(folder)


# --- modelopt's stacks of experts ----------------------------------------------------------------------------------

PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def nvfp4_stack(rng: Any, part: str, whole: str, turned: bool) -> tuple[Stored, list[Any]]:
    """A stack and its values [n, k], expert by expert. whole: the shape of the float32 scales."""
    rows, k = sum(SHAPES[p][0] for p in PARTS[part]), SHAPES[PARTS[part][0]][1]
    made = [fp4(rng, rows, k) for _ in range(E)]
    codes, steps = np.stack([c for c, _ in made]), rng.integers(1, 127, (E, rows, k // 16)).astype(np.uint8)
    halves = len(PARTS[part]) if whole == "E2" else 1
    ones = rng.uniform(1e-4, 2e-4, (1 if whole in ("", "1") else E, halves)).astype(np.float32)
    each = np.broadcast_to(ones.repeat(rows // halves, axis=1)[:, :, None], (E, rows, 1))
    x = np.stack([x for _, x in made]).astype(np.float32)
    values = round_to_bf16(x * np.repeat(E4M3[steps].astype(np.float32) * each, 16, axis=2))
    shape = {"": (), "1": (1,), "E": (E,), "E1": (E, 1), "E2": (E, 2) if halves == 2 else (E,)}[whole]
    if turned:
        codes, steps = codes.transpose(0, 2, 1), steps.transpose(0, 2, 1)
    name = f"{EXPERTS}.{part}_proj"
    stored = {"": ("U8", codes), "_weight_scale": ("F8_E4M3", steps), "_weight_scale_2": ("F32", ones.reshape(shape))}
    stored["_input_scale"] = ("F32", np.ones((), np.float32))
    return {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}, [*values]


def fp8_stack(rng: Any, part: str, whole: str, turned: bool) -> tuple[Stored, list[Any]]:
    rows, k = sum(SHAPES[p][0] for p in PARTS[part]), SHAPES[PARTS[part][0]][1]
    codes = rng.integers(0, 127, (E, rows, k)).astype(np.uint8)
    halves = len(PARTS[part]) if whole == "E2" else 1
    scales = rng.uniform(1e-4, 1e-2, (1 if whole in ("", "1") else E, halves)).astype(np.float32)
    each = np.broadcast_to(scales.repeat(rows // halves, axis=1)[:, :, None], (E, rows, 1))
    values = round_to_bf16(E4M3[codes].astype(np.float32) * each)
    shape = {"": (), "1": (1,), "E": (E,), "E1": (E, 1), "E2": (E, 2) if halves == 2 else (E,)}[whole]
    name = f"{EXPERTS}.{part}_proj"
    held = codes.transpose(0, 2, 1) if turned else codes
    return {name: ("F8_E4M3", held), f"{name}_weight_scale": ("F32", scales.reshape(shape))}, [*values]


def stacks(
    folder: Path, make: Any, whole: str, turned: bool, change: Any = None
) -> tuple[Path, Values, dict[str, Any]]:
    """A checkpoint of stacks, the values of its linears, and those of its stacks in a BF16 release."""
    rng = np.random.default_rng(0)
    tensors: Stored = {"model.layers.0.mlp.gate.weight": ("BF16", np.zeros((E, H), np.uint16))}
    values: Values = {}
    released = {}
    for part, projections in PARTS.items():
        stored, each = make(rng, part, whole, turned)
        tensors |= stored
        values |= {
            (e, p): np.split(bits, len(projections))[n]
            for e, bits in enumerate(each)
            for n, p in enumerate(projections)
        }
        released[f"{EXPERTS}.{part}_proj"] = np.stack(each).transpose(0, 2, 1) if turned else np.stack(each)
    if change is not None:
        change(tensors)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return checkpoint(folder, tensors, quantization, model_type="qwen3_5_moe_text"), values, released


STACKS = [
    *((nvfp4_stack, whole, False) for whole in ("", "1", "E", "E1", "E2")),
    *((nvfp4_stack, whole, True) for whole in ("", "E2")),  # Llama-4's
    *((fp8_stack, whole, turned) for whole in ("", "1", "E", "E1") for turned in (False, True)),
]


@pytest.mark.parametrize(("make", "whole", "turned"), STACKS)
def test_stacks_of_modelopt_have_the_values_of_the_formula(make: Any, whole: str, turned: bool, tmp_path: Path) -> None:
    folder, values, released = stacks(tmp_path, make, whole, turned)
    experts, weights = decoded(folder)
    same(experts, values)
    if make is nvfp4_stack and turned:  # decoded as linears, to be written as they are released
        released = {name: bits.transpose(0, 2, 1) for name, bits in released.items()}
    same(weights, released)


@pytest.mark.parametrize(("whole", "turned"), [("E2", False), ("E", True)])
def test_a_stack_of_modelopt_is_converted_as_its_values(whole: str, turned: bool, tmp_path: Path) -> None:
    """Dequantized, it has the orientation in which the family is released."""
    folder, values, released = stacks(tmp_path / "model", nvfp4_stack, whole, turned)
    same({n: bits for n, bits in converted(folder, values, tmp_path).items() if EXPERTS in n}, released)


@pytest.mark.parametrize("turned", [False, True])
def test_fp8_scales_of_gate_and_up_need_to_know_which_axis_is_theirs(turned: bool, tmp_path: Path) -> None:
    """`cpu` knows it by the matrices of down; `dequantize` looks at one tensor."""
    folder, values, _ = stacks(tmp_path, fp8_stack, "E2", turned)
    model = recognise(open_checkpoint(folder))
    same({(e, p): kernels.decode(model.linear(0, e, p)) for e in range(E) for p in SHAPES}, values)
    with pytest.raises(UnsupportedError, match=r"_proj_weight_scale' has 2 scales for each .* rows or columns; use"):
        decoded(folder)


@pytest.mark.parametrize("turned", [False, True])
def test_the_runtime_computes_stacks_as_single_weights(turned: bool, tmp_path: Path) -> None:
    """The scale of a half is that of its own panels."""
    folder, values, _ = stacks(tmp_path, nvfp4_stack, "E2", turned)
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(E) for _ in range(3)]).astype(np.int64)
    inputs = floats.activations(3, H), ids, rng.random((3, E)).astype(np.float32)
    with Experts.load(folder, 0, method="NVFP4", parts=1, pool=Pool(1)) as experts:
        out = floats.from_bits(experts.forward(*inputs))
    truth = floats.forward(lambda e, p: floats.from_bits(values[e, p]), *inputs, 0, 0)
    assert np.linalg.norm(out - truth) < 4e-3 * np.linalg.norm(truth)


def scales(suffix: str, *shape: int) -> Callable[[Stored], None]:
    def change(tensors: Stored) -> None:
        tensors[f"{EXPERTS}.{suffix}"] = ("F32", np.full(shape, 1e-4, np.float32))

    return change


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (nvfp4_stack, scales("gate_up_proj_weight_scale_2", E + 1), "must be one F32 for each weight of"),
        (nvfp4_stack, scales("gate_up_proj_weight_scale_2", E, 3), "must be one F32 for each weight of"),
        (nvfp4_stack, scales("down_proj_weight_scale_2", E, 2), "must be one F32 for each weight of"),
        (nvfp4_stack, scales("down_proj_weight_scale_2", E, H), "must be one F32 for each weight of"),
        (fp8_stack, scales("gate_up_proj_weight_scale", E + 1), "does not fit"),
        (fp8_stack, scales("gate_up_proj_weight_scale", E, 3), "does not fit"),
        (fp8_stack, scales("down_proj_weight_scale", E, 2), "does not fit"),
        (
            nvfp4_stack,
            lambda t: t.pop(f"{EXPERTS}.down_proj_weight_scale_2"),
            "down_proj' is NVFP4 but .*_scale_2 is missing",
        ),
        (nvfp4_stack, lambda t: t.pop(f"{EXPERTS}.down_proj"), "is a scale whose weight .*down_proj' is missing"),
    ],
)
def test_scales_of_another_length_are_refused(make: Any, change: Any, words: str, tmp_path: Path) -> None:
    folder, *_ = stacks(tmp_path / "model", make, "E", False, change)
    for command in COMMANDS:
        error = run_in_process(*command, "-i", folder, "-o", tmp_path / "out").exception
        assert isinstance(error, InputError) and EXPERTS in str(error) and not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=words):
        decoded(folder)


def test_halves_need_gate_and_up_in_halves(tmp_path: Path) -> None:
    """Where gate and up alternate, two scales for each expert are of nothing that is defined."""
    folder, *_ = stacks(tmp_path, nvfp4_stack, "E2", False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    with pytest.raises(UnsupportedError, match="has 2 scales for each expert, and gate and up alternate"):
        recognise(open_checkpoint(folder), to_read=True)


def test_experts_of_one_layer_may_have_both_conventions_of_nvfp4(tmp_path: Path) -> None:
    def change(tensors: Stored, _: Any) -> None:
        for name in [n for n in tensors if ".1." in n and n.endswith("_global_scale")]:
            dtype, one = tensors.pop(name)
            tensors[name.replace("global_scale", "scale_2")] = (dtype, 1 / one)

    folder, values = encodings.write("ct NVFP4", tmp_path, change)
    model = recognise(open_checkpoint(folder))
    for (e, p), bits in values.items():
        read = floats.from_bits(kernels.decode(model.linear(0, e, p)))
        assert np.allclose(read, floats.from_bits(bits), rtol=0 if e == 0 else 0.01)
