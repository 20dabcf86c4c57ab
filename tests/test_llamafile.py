"""LLAMAFILE: computing with the experts of a GGUF as they are stored, in any ggml types of gate, up and down."""

import json
from pathlib import Path
from typing import Any

import gguf as gguf_py
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import GGML, Matrix
from ktconvert.native_quant.runtime.experts import ACTIVATIONS, AUTO, BF16, INT8, KTExperts
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from ktconvert.pipeline.cli.eval import eval as evaluate
from ktconvert.pipeline.cli.run import run
from rig import floats, gguf, native
from rig.gemm import gemm_bf16
from rig.native import GOLDEN, Native, distance
from rig.safetensors import read_file, write_file

TYPES = [row.weight_type for row in METHODS["LLAMAFILE"].all_rows]
BLOCKS = list(kernels.BLOCK_FORMATS)
NEAR_FLOAT64 = 4e-3  # relative L2 of a layer's output: h and the output are BF16
NEAR_FLOAT64_F16 = 1.8e-3  # for F16 experts, where only the output is BF16
HALVES = ("F16", "F16", "F16")
E, H, I = 2, 256, 768  # noqa: E741
MIXES = [("Q4_K", "Q5_K", "Q6_K"), ("Q5_K", "Q8_0", "Q4_0"), ("MXFP4", "Q6_K", "Q8_0"), ("BF16", "F16", "Q4_K"), HALVES]


@pytest.fixture(scope="module")
def pool() -> Pool:
    """Start a pool of two threads."""
    return Pool(2)


def decode_blocks(kind: str, stored: Any) -> Any:
    """Return the values of blocks by gguf-py, in float64."""
    return gguf_py.quants.dequantize(stored, gguf_py.GGMLQuantizationType[kind]).astype(np.float64)


def make_layer(tensors: dict[str, tuple[str, Any]], limit: float = 0.0) -> Native:
    """Draw an input for layer 0 of these tensors; return it with its output in float64."""
    linears = {part: decode_blocks(*tensors[f"blk.0.ffn_{part}_exps.weight"]) for part in ("gate", "up", "down")}
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(E) for _ in range(7)]).astype(np.int64)
    weights, hidden = rng.random((7, 2)).astype(np.float32), floats.activations(7, H)
    truth = floats.forward(lambda expert, part: linears[part][expert], hidden, ids, weights, limit, 0.0)
    return Native("LLAMAFILE", {}, hidden, ids, weights, truth, np.empty(0, np.uint16))


def make_metadata() -> dict[str, Any]:
    """Return the metadata of a one-layer model."""
    return gguf.model_metadata(1, embedding_length=H, expert_count=E, expert_feed_forward_length=I)


def write_model(path: Path, types: tuple[str, ...], **changed: Any) -> dict[str, tuple[str, Any]]:
    """Write a file of one layer with experts of these types. changed: replaced tensors by name."""
    tensors = gguf.model([types], experts=E, hidden=H, width=I) | changed
    gguf.write(path, tensors, make_metadata())
    return tensors


def forward(experts: KTExperts, layer: Native) -> Any:
    """Run the forward on a layer's input."""
    return experts.forward(layer.hidden, layer.ids, layer.weights)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("types", MIXES, ids="-".join)
def test_results_are_close_to_float64(types, pool, tmp_path):
    layer = make_layer(write_model(tmp_path / "m.gguf", types))
    in_one_slice, in_two_slices = (
        KTExperts.load(tmp_path / "m.gguf", 0, parts=parts, pool=pool, activations=BF16) for parts in (1, 2)
    )
    assert in_one_slice.method == "LLAMAFILE" and in_two_slices.parts == 2
    tolerance = NEAR_FLOAT64_F16 if types == HALVES else NEAR_FLOAT64
    assert max(distance(forward(experts, layer), layer.truth) for experts in (in_one_slice, in_two_slices)) < tolerance


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_results_are_closer_to_float64_than_kt_kernel(kind, pool):
    stored = read_file(GOLDEN / f"gguf_{kind}.safetensors")
    inputs = [stored[f"in.{what}"].bits for what in ("hidden", "topk_ids", "topk_weights")]
    truth, theirs = (stored[f"out.{what}"].bits for what in ("float64_reference", "kt_t1"))
    out = KTExperts.load(GOLDEN / f"gguf_{kind}.gguf", 0, pool=pool, activations=BF16).forward(*inputs)
    assert distance(out, truth) < distance(theirs, truth) / 4


def multiply_blocks(kind: str, blocks: Any, activations: Any, int8: bool) -> Any:
    """Return the sums of the products of activations [m, k] with blocks of a type, float32 [m, n]."""
    n, k = len(blocks), activations.shape[1]
    codes, scales = (np.empty(size, np.uint8) for size in kernels.weight_bytes(kernels.BLOCK_FORMATS[kind], n, k))
    kernels.reorder_ggml(Matrix(blocks, GGML[kind]), codes, scales)
    return gemm_bf16(kind, activations, codes, scales, n, int8)


def compare_sums(isa: str, kind: str, blocks: Any, activations: Any, int8: bool) -> None:
    """Compare the sums of some tokens with float64 and, except for AMX in BF16, with those of the scalar kernel."""
    exact = floats.from_bits(activations) @ decode_blocks(kind, blocks).T
    int8 = int8 and kind not in ("F16", "Q8_0")
    in_bf16 = isa == "amx" and kind == "F16"
    tolerance = 1e-2 if int8 else 1e-6 if kind == "F16" else 3e-5  # if activations are rounded
    for m in (1, 2, 3, 5, 7, 9, 13, 20, 40, 70):
        out = multiply_blocks(kind, blocks, activations[:m], int8)
        assert np.linalg.norm(out - exact[:m]) <= tolerance * np.linalg.norm(exact[:m])
        if not in_bf16:
            before = kernels.isa()
            kernels.set_isa("scalar")
            expected = multiply_blocks(kind, blocks, activations[:m], int8)
            kernels.set_isa(before)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("int8", [False, True], ids=["14bits", "8bits"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_instruction_sets_give_the_same_sums(isa, kind, int8):
    compare_sums(isa, kind, gguf.blocks(kind, 64, 768), np.resize(floats.activations(40, 768), (70, 768)), int8)


@pytest.mark.parametrize("zero", ["gate", "down"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_least_values_multiply_activations_of_8_bits_too(isa, kind, zero, pool, tmp_path):
    """Weights of 1 * 1 * 8 - 8 * 1 are 0, and so are the outputs of experts, although activations are rounded."""
    halves, ones = np.array([1, 8], np.float16).view(np.uint8), np.repeat(np.array([1, 0x11], np.uint8), [8, 4])
    block = np.concatenate([halves, ones, np.zeros(GGML[kind].items - 144, np.uint8), np.full(128, 0x88, np.uint8)])
    name = f"blk.0.ffn_{zero}_exps.weight"
    tensors = gguf.model([(kind, kind, kind)], experts=E, hidden=H, width=I)
    zeros = np.resize(block, tensors[name][1].shape)
    outputs = []
    for changed in ({}, {name: (kind, zeros)}):
        layer = make_layer(write_model(tmp_path / "m.gguf", (kind, kind, kind), **changed))
        outputs.append(forward(KTExperts.load(tmp_path / "m.gguf", 0, pool=pool, activations=INT8), layer))
    before, after = map(floats.from_bits, outputs)
    assert np.abs(after).max() < 1e-4 * np.abs(before).max()


@pytest.mark.parametrize("int8", [False, True], ids=["14bits", "8bits"])
@pytest.mark.parametrize("activation", [0x3FFF, 0xBFFF], ids=["positive", "negative"])
@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF], ids=hex)
@pytest.mark.parametrize("kind", BLOCKS)
def test_largest_products_do_not_overflow(isa, kind, fill, activation, int8):
    blocks = gguf.blocks(kind, 32, 256).reshape(32, -1, gguf_py.GGML_QUANT_SIZES[gguf_py.GGMLQuantizationType[kind]][1])
    filled = np.full_like(blocks, fill)
    for at in gguf.SCALES[kind]:
        filled[..., at : at + 2] = [0x00, 0x10] if at != 2 else 0  # 2^-11; no least values, which would cancel
    if kind == "Q6_K":
        filled[..., 192:208] = 0x80  # the largest factors
    compare_sums(isa, kind, filled.reshape(32, -1), np.full((70, 256), activation, np.uint16), int8)


@pytest.mark.parametrize("names", ["separate experts", "fused gate and up"])
def test_other_tensor_names_give_the_same_results(names, pool, tmp_path):
    types = ("Q4_K", "Q4_K", "Q6_K")
    tensors = write_model(tmp_path / "m.gguf", types)
    expected = forward(KTExperts.load(tmp_path / "m.gguf", 0, pool=pool), layer := make_layer(tensors))
    parts = {part: tensors.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down")}
    if names == "separate experts":
        for part, (kind, stacked) in parts.items():
            tensors |= {f"blk.0.ffn_{part}.{expert}.weight": (kind, stacked[expert]) for expert in range(E)}
    else:
        both = np.concatenate([parts["gate"][1], parts["up"][1]], axis=1)
        tensors |= {"blk.0.ffn_gate_up_exps.weight": ("Q4_K", both), "blk.0.ffn_down_exps.weight": parts["down"]}
    path = gguf.write(tmp_path / "other" / "m.gguf", tensors, make_metadata())
    for place in (path, path.parent):  # or its folder, as kt-kernel accepts it
        np.testing.assert_array_equal(forward(KTExperts.load(place, 0, pool=pool), layer), expected)


def test_memory_is_close_to_the_size_of_the_file(tmp_path):
    for kind in TYPES:
        tensors = write_model(tmp_path / f"{kind}.gguf", (kind,) * 3)
        stored = sum(x.nbytes for name, (_, x) in tensors.items() if "_exps" in name)
        assert stored <= KTExperts.load(tmp_path / f"{kind}.gguf", 0).nbytes <= 1.06 * stored


@pytest.mark.parametrize("kind", ["IQ4_XS", "Q3_K", "Q5_0", "F32"])
def test_other_types_are_rejected_by_name(kind, tmp_path):
    write_model(tmp_path / "m.gguf", ("Q4_K", "Q4_K", kind))
    message = f"m.gguf: the experts of layer 0 are Q4_K and {kind}, which no method of this runtime computes; convert"
    with pytest.raises(UnsupportedError, match=message):
        KTExperts.load(tmp_path / "m.gguf", 0)


@pytest.mark.parametrize(("width", "unit"), [(768, 256), (384, 128)])
def test_slices_are_multiples_of_the_unit(width, unit, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "I", width)
    write_model(tmp_path / "m.gguf", ("Q4_0",) * 3)
    assert KTExperts.load(tmp_path / "m.gguf", 0, parts=2)._packed.slicing.widths == (2 * unit, unit)
    message = rf"size {width} has 3 units of {unit} columns\. Legal values .*: 1, 2, 3\."
    with pytest.raises(UnsupportedError, match=message):
        KTExperts.load(tmp_path / "m.gguf", 0, parts=4)


@pytest.mark.parametrize("kind", [*BLOCKS, "MXFP4", "BF16", "F16"])
def test_non_finite_scales_are_rejected(kind, tmp_path):
    types = ("Q8_0", "Q8_0", kind)
    stored = gguf.model([types], experts=E, hidden=H, width=I)["blk.0.ffn_down_exps.weight"][1].copy()
    bad = {"MXFP4": [255, 0x11], "BF16": [0x80, 0x7F]}.get(kind, [0, 0x7C])
    at = 208 if kind == "Q6_K" else 0
    stored.reshape(E, H, -1)[1, 5, at : at + 2] = bad
    write_model(tmp_path / "m.gguf", types, **{"blk.0.ffn_down_exps.weight": (kind, stored)})
    message = "m.gguf: tensor 'blk.0.ffn_down_exps.weight': row 5 of NUMA slice 0 of expert 1 contains a number"
    with pytest.raises(InputError, match=message):
        KTExperts.load(tmp_path / "m.gguf", 0)


def test_run_and_eval_compute_gguf_experts(example, tmp_path):
    """The bundled model's experts, in types that differ by tensor and layer."""
    weights = str(gguf.write(tmp_path / "m.gguf", *gguf.quantize_example(example)))
    arguments = [str(example), "--cpu-weights", weights]
    result = CliRunner().invoke(run, [*arguments, "--prompt", "import os", "--max-new-tokens", "4"])
    assert result.exit_code == 0 and result.stdout.startswith("import os"), result.output
    text = str(example.parent / "heldout.txt")
    errors = {}
    for activations in ACTIVATIONS:
        options = [
            "--text",
            text,
            "--sequence-length",
            "128",
            "--max-sequences",
            "2",
            "--activations",
            activations,
            "--json",
        ]
        document = json.loads(CliRunner().invoke(evaluate, [*arguments, *options]).stdout.splitlines()[-1])
        assert document["method"] == "LLAMAFILE" and 0 < document["kl"]["mean"] < 0.005
        errors[activations] = [layer["relative_error"] for layer in document["layers"]]
    first, second = errors[BF16]
    assert first < 0.01 < 0.02 < second < 0.1
    assert errors[INT8][0] == first and second < errors[INT8][1] < 0.1  # Q8_0 has activations of 14 bits anyway
    assert errors[AUTO] == errors[INT8]  # of Q4_0


def test_the_wrapper_takes_activations_of_8_bits(monkeypatch):
    stored = read_file(GOLDEN / "gguf_Q4_0.safetensors")
    inputs = [stored[f"in.{what}"].bits for what in ("hidden", "topk_ids", "topk_weights")]
    fine, coarse = (KTExperts.load(GOLDEN / "gguf_Q4_0.gguf", 0, activations=each) for each in (BF16, INT8))
    assert 1e-3 < distance(coarse.forward(*inputs), floats.from_bits(fine.forward(*inputs))) < 2e-2
    monkeypatch.setattr(KTMoEWrapper, "activations", INT8)
    sizes = coarse.num_experts, inputs[1].shape[1], coarse.hidden, coarse.intermediate
    wrapper: Any = KTMoEWrapper(0, *sizes, None, 2, 1, str(GOLDEN / "gguf_Q4_0.gguf"), 512, method="LLAMAFILE")
    wrapper.load_weights()
    hidden, ids, weights = (torch.from_numpy(array.copy()) for array in inputs)
    out = wrapper.forward(hidden.view(torch.bfloat16), ids, weights)
    np.testing.assert_array_equal(out.view(torch.uint16).numpy(), coarse.forward(*inputs))


MIXED = ("Q4_0", "Q4_K", "Q6_K"), ("Q4_K", "Q5_K", "Q4_K")


@pytest.mark.parametrize("types", [*((kind,) * 3 for kind in TYPES), *MIXED], ids="-".join)
def test_activations_of_some_weights_have_8_bits_by_default(types, pool, tmp_path):
    """Gate and up share activations."""
    layer = make_layer(write_model(tmp_path / "m.gguf", types))
    default, fine, coarse = (
        KTExperts.load(tmp_path / "m.gguf", 0, pool=pool, activations=each) for each in (AUTO, BF16, INT8)
    )
    rounds = [{*part} <= {"Q4_0", "Q4_K"} for part in (types[:2], types[2:])]
    outputs = [forward(experts, layer) for experts in (default, fine, coarse)]
    assert default._list_activations() == sorted({INT8 if rounded else "BF16" for rounded in rounds})
    assert np.array_equal(outputs[0], outputs[1]) == (not any(rounds))
    if all(rounds):
        np.testing.assert_array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("parts", [1, 2])
def test_results_are_at_least_as_close_as_kt_kernel(parts, tmp_path, peer_python):
    """kt-kernel's BF16 needs AVX512-BF16."""
    runs, cases = {}, {}
    able = [kind for kind in TYPES if kind != "BF16" or "avx512bf16" in kernels.available_isas()]
    mixes = [*((kind,) * 3 for kind in able), ("Q4_K", "Q5_K", "Q6_K")]
    for types, limit in [*((types, 0.0) for types in mixes), (("Q4_K",) * 3, 0.25)]:
        key = f"{'-'.join(types)}.{limit}"
        path = tmp_path / f"{key}.gguf"
        layer = make_layer(write_model(path, types), limit)
        tensors = {"hidden": ("BF16", layer.hidden), "ids": ("I64", layer.ids), "weights": ("F32", layer.weights)}
        inputs = write_file(tmp_path / f"{key}.safetensors", tensors)
        sizes = {"experts": E, "topk": 2, "hidden": H, "width": I, "parts": parts, "inputs": str(inputs)}
        runs[key] = {"path": str(path), "method": "LLAMAFILE", "limit": limit} | sizes
        cases[key] = (
            layer.truth,
            forward(KTExperts.load(path, 0, parts=parts, swiglu_limit=limit, activations=BF16), layer),
        )
    theirs = native.run_kt_kernel(peer_python, runs, tmp_path)
    for key, (truth, ours) in cases.items():
        assert distance(ours, truth) <= distance(theirs[key].bits, truth) < 2.0**-4, key
