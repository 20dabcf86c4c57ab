"""Blocks of ggml that C decodes: every kernel equals the definition and gguf-py, however the linear is sliced."""

from __future__ import annotations

from typing import Any

import gguf as library
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.checkpoints.containers.gguf import GGML_TYPES
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, GGML, Matrix
from ktconvert.quantizers import reference
from rig.gguf import SCALES, blocks

FP16 = [0, -0.0, 1, -1, 6e-8, -6e-8, 6e-5, 65504, -65504, np.inf, -np.inf, np.nan]


def by_gguf_py(name: str, stored: Any) -> Any:
    """BF16; gguf-py takes the MXFP4 scale 255 for a number, and it stands for NaN."""
    with np.errstate(all="ignore"):
        values = library.quants.dequantize(stored, library.GGMLQuantizationType[name])
    if name == "MXFP4":
        values = np.where(np.repeat(stored.reshape(len(stored), -1, 17)[..., 0] == 255, 32, axis=1), np.nan, values)
    return reference.f32_to_bf16(values.astype(np.float32))


def ugly(name: str, rows: int, columns: int, seed: int = 0) -> Any:
    """Random blocks, every third of them with scales of all sizes, some of which are no numbers."""
    kind = GGML[name]
    stored = blocks(name, rows, columns, seed).reshape(-1, kind.items)
    rng = np.random.default_rng(seed)
    for at in SCALES.get(name, ()):
        values = rng.choice(np.array(FP16, np.float16), len(stored[::3]))
        stored[::3, at : at + 2] = values[:, None].view(np.uint8)
    if name == "MXFP4":
        stored[::3, 0] = rng.choice([0, 1, 2, 127, 253, 254, 255], len(stored[::3]))
    return stored.reshape(rows, -1)


def test_sizes_are_those_of_the_table() -> None:
    sizes = {of.name: (of.columns, of.nbytes) for of in GGML_TYPES.values()}
    assert {name: (kind.columns, kind.items) for name, kind in GGML.items()} == {name: sizes[name] for name in GGML}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", GGML)
def test_kernels_are_the_definition_and_gguf_py(name: str) -> None:
    for rows, columns in ((1, 256), (3, 512), (40, 1280)):
        stored = ugly(name, rows, columns, rows)
        wanted = by_gguf_py(name, stored)
        linear = Matrix(stored, GGML[name])
        assert linear.shape == wanted.shape
        assert (kernels.decode(linear) == wanted).all()
        assert (reference.decode(linear) == wanted).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", GGML)
def test_every_code_and_every_scale(name: str) -> None:
    """All bytes, so that every code of 4, 5, 6 or 8 bits meets every packed scale of a K-quant."""
    kind = GGML[name]
    stored = np.random.default_rng(3).integers(0, 256, (64, 16 * kind.items)).astype(np.uint8)
    assert (kernels.decode(Matrix(stored, kind)) == by_gguf_py(name, stored)).all()


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(tuple(GGML)), n=st.integers(1, 40), wide=st.integers(1, 4), data=st.data())
def test_any_slice_keeps_its_columns(name: str, n: int, wide: int, data: st.DataObject) -> None:
    k = 256 * wide
    whole = Matrix(blocks(name, n, k, seed=n), GGML[name])
    wanted = reference.decode(whole)
    first, top = data.draw(st.integers(0, k - 1)), data.draw(st.integers(0, n - 1))
    stop, bottom = data.draw(st.integers(first + 1, k)), data.draw(st.integers(top + 1, n))
    inner = data.draw(st.integers(0, stop - first - 1))
    before = kernels.isa()
    for isa in kernels.available_isas():
        kernels.set_isa(isa)
        part = whole.columns(first, stop).rows(top, bottom)
        assert (kernels.decode(part) == wanted[top:bottom, first:stop]).all()
        assert (reference.decode(part) == wanted[top:bottom, first:stop]).all()
        assert (kernels.decode(part.T) == wanted[top:bottom, first:stop].T).all()
        assert part.T.kind is BF16
        again = part.columns(inner, stop - first)
        assert (kernels.decode(again) == wanted[top:bottom, first + inner : stop]).all()
        assert (kernels.decode(whole.every_other(n > 1)) == wanted[n > 1 :: 2]).all()
    kernels.set_isa(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_as_their_values_are(name: str, bits: int) -> None:
    """In one pass, also of a part that begins inside a block; groups, too."""
    part = Matrix(blocks(name, 256, 512), GGML[name]).columns(64, 448).rows(128, 256)
    bf16 = reference.decode(part)
    n, k = part.shape
    weight, scale = np.empty(n * k * bits // 8, np.uint8), np.empty(n, np.float32)
    kernels.quantize_pack(bits, part, weight, scale)
    wanted = reference.quantize_pack(bits, bf16)
    assert (weight == wanted[0]).all() and (scale == wanted[1]).all()
    assert kernels.error_sums(bits, part, weight, scale) == kernels.error_sums(bits, Matrix(bf16, BF16), weight, scale)


@pytest.mark.parametrize("name", GGML)
def test_a_scale_that_is_no_number_is_refused_with_its_place(name: str) -> None:
    kind = GGML[name]
    stored = blocks(name, 128, 512)
    block = stored[40].reshape(-1, kind.items)[256 // kind.columns]
    if name == "MXFP4":
        block[0] = 255
    else:
        at = SCALES[name][0]
        block[at : at + 2] = 0, 0x7E
    with pytest.raises(kernels.NonFinite) as caught:
        kernels.quantize_pack(4, Matrix(stored, kind), np.empty(128 * 256, np.uint8), np.empty(128, np.float32))
    assert (caught.value.row, caught.value.column) == (40, 256)


def test_what_makes_no_sense_is_refused() -> None:
    whole = Matrix(blocks("Q4_K", 4, 512), GGML["Q4_K"])
    for matrix in (
        Matrix(whole.values[:, :-1], whole.kind),
        Matrix(whole.values, whole.kind, skip=1, width=512),
        Matrix(whole.values, whole.kind, skip=-1, width=8),
        Matrix(whole.values, whole.kind, np.ones((4, 1), np.float32)),
        Matrix(whole.values.view(np.int8), whole.kind),
        Matrix(np.asfortranarray(whole.values), whole.kind),
    ):
        with pytest.raises(ValueError):
            kernels.decode(matrix)
