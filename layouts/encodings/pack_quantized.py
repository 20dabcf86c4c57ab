"""compressed-tensors' pack-quantized integers: codes in words, one scale for a group of columns of a row, perhaps zero
points, and perhaps an order of columns (actorder).

What llmcompressor and `ktconvert gpu` write, and Kimi-K2's INT4; SGLang and vLLM load it. The value of a code q is (q -
z) * s (numerics.md, section 1); q and z are stored as unsigned numbers, z packed along the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.config import QUANT_METHOD, Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import (
    FLOATS,
    CheckpointEncoding,
    Tensors,
    columns_per_scale,
    missing,
    order_of_columns,
    read_scales,
    require_matrix,
    require_shape,
)
from ktconvert.layouts.encodings.encoding import F32, Bytes, Defect, Encoding, Read, Rows, never_exact
from ktconvert.layouts.errors import damaged_tensor
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import INT4, INT8, Kind, Matrix
from ktconvert.quantizers import GROUP_GRIDS, GROUP_SIZES, Grid, groups, packed

# --- in checkpoints -------------------------------------------------------------------------------

METHOD, FORMAT = "compressed-tensors", "pack-quantized"  # what config.json calls them
WORD_BITS = {"I32": 32, "U8": 8}  # of an item of weight_packed, by its dtype


def _row(bits: int, kind: Kind) -> CheckpointEncoding:
    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """The width of the codes is the config's; of several, the one that fits its groups; else 4."""
        if quantization.method not in ("", METHOD, QUANT_METHOD):
            return False
        if tensors["packed"].dtype == "U8" and ("scale" not in tensors or tensors["scale"].dtype not in FLOATS):
            return False  # four-bit floats
        named = quantization.bits or (4,)
        if len(named) > 1:
            named = tuple(b for b in named if _fits_a_group(b, tensors, quantization))
        return named == (bits,)

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors["packed"]
        require_matrix(codes)
        return codes.shape[0], codes.shape[1] * WORD_BITS[codes.dtype] // bits

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[object, ...]:
        n, k = shape(tensors, quantization)
        group = _group(tensors, n, k, quantization)
        codes, zeros, order = tensors["packed"], tensors.get("zero_point"), tensors.get("g_idx")
        stem = codes.name.removesuffix("packed")
        if zeros is None and quantization.symmetric == (False,):
            raise missing(codes, "zero points", f"{stem}zero_point")
        if order is None and quantization.ordered == (True,) and group < k:
            raise missing(codes, "an order of its columns (actorder)", f"{stem}g_idx")
        require_shape(codes, zeros, "I32", (-(-n * bits // 32), k // group))
        require_shape(codes, order, "I32", (k,))
        return (bits, group, *(role for role in ("zero_point", "g_idx") if role in tensors))

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        group = _group(tensors, n, k, quantization)
        _check_shape(source, tensors, n, k)
        codes = source.view(replace(tensors["packed"], dtype="U8", shape=(n, k * bits // 8)))
        scales = read_scales(source, tensors["scale"], (n, k // group))
        zeros = _zeros(source, tensors.get("zero_point"), bits, n)
        order = order_of_columns(source, tensors.get("g_idx"), group)
        return Matrix(codes, kind, scales, (1, group), zeros=zeros, group_of=order)

    return CheckpointEncoding(
        kind.name.upper(),
        kind.name.upper(),
        {
            "packed": ("{t}_packed",),
            "scale": ("{t}_scale",),
            "zero_point": ("{t}_zero_point",),
            "g_idx": ("{t}_g_idx",),
            "shape": ("{t}_shape",),
        },
        tuple(WORD_BITS),
        kind,
        matrix,
        shape=shape,
        fit=fit,
        claims=claims,
        optional=frozenset({"zero_point", "g_idx"}),
        item_bytes={"zero_point": 48, "g_idx": 20},  # 8 codes of a word as bytes, twice, and as float32
        input_types=(kind.name,),
    )


def _fits_a_group(bits: int, tensors: Tensors, quantization: Quantization) -> bool:
    """Whether the codes, with this width, are as many columns as the scales' groups of some size in the config."""
    codes, scale = tensors["packed"], tensors.get("scale")
    if scale is None or len(scale.shape) != 2 or len(codes.shape) != 2:
        return False
    columns = codes.shape[1] * WORD_BITS.get(codes.dtype, 0) // bits
    return any(scale.shape[1] * size == columns for size in quantization.groups)


def _group(tensors: Tensors, n: int, k: int, quantization: Quantization) -> int:
    """Columns that share a scale. Raises as columns_per_scale."""
    codes, scale, about = tensors["packed"], tensors["scale"], tensors["shape"]
    if about.dtype not in ("I64", "I32") or about.shape != (2,):
        raise damaged_tensor(about.name, f"is {about.dtype} of shape {list(about.shape)}; must be two I64")
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == n else 0
    return columns_per_scale(codes, scale, (n, k), groups, quantization)


def _zeros(source: TensorSource, zeros: TensorInfo | None, bits: int, n: int) -> npt.NDArray[np.float32] | None:
    """Zero points, as codes: float32 [n, groups]; None where there are none."""
    if zeros is None:
        return None
    return np.ascontiguousarray(packed.fields(bits, source.view(zeros).T).T[:n], np.float32)


def _check_shape(source: TensorSource, tensors: Tensors, n: int, k: int) -> None:
    """Raises InputError unless weight_shape is the shape of the codes."""
    about = tensors["shape"]
    recorded = np.array(source.view(about)).tolist()
    if recorded != [n, k]:
        raise damaged_tensor(
            about.name, f"says {recorded}, its codes are for {[n, k]}", "download it again", source.path(about)
        )


IN_CHECKPOINTS = (_row(4, INT4), _row(8, INT8))


# --- as we write it: W4A16 and W8A16 (bytes.md) --------------------------------------------------

SUFFIXES = ("weight_packed", "weight_shape", "weight_scale")  # in the order in which they lie in a shard
CHUNK = 1 << 14  # bytes of codes that are read at a time


def _tensors(grid: Grid, n: int, k: int) -> tuple[TensorInfo, ...]:
    packed, shape, scale = SUFFIXES
    assert grid.group is not None
    groups = k // grid.group
    return (
        TensorInfo(packed, "I32", (n, k * grid.bits // 32), n * k * grid.bits // 8),
        TensorInfo(shape, "I64", (2,), 16),
        TensorInfo(scale, "BF16", (n, groups), 2 * n * groups),
    )


def typed(grid: Grid, stored: Sequence[Bytes], n: int, k: int) -> list[npt.NDArray[Any]]:
    """Words, shape, bits of BF16 scales of a matrix [n, k]; views."""
    described = zip(stored, ("<i4", "<i8", "<u2"), _tensors(grid, n, k), strict=True)
    return [data.view(dtype).reshape(tensor.shape) for data, dtype, tensor in described]


def pack_quantized(grid: Grid, rounding: str) -> Encoding:
    """The encoding with this grid. rounding: how scales are chosen and quotients rounded, a row of
    kernels.GROUP_RULES.
    """
    bits, group = grid.bits, grid.group
    assert group is not None

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        words, shape, scale = typed(grid, out, *matrix.shape)
        shape[:] = matrix.shape
        kernels.quantize_groups(bits, matrix, words, scale, group=group, rounding=rounding)

    def pack(codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        words, shape, scale = typed(grid, out, *codes.shape)
        words[:] = groups.pack_words(bits, codes)
        shape[:] = codes.shape
        scale[:] = scales

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
        words, _, scale = typed(grid, stored, n, k)
        return groups.dequantize_groups(bits, words[rows], scale[rows])

    return Encoding(
        grid.name,
        version=1,
        grid=grid,
        multiple=group,
        tensors=partial(_tensors, grid),
        quantize=quantize,
        decode=decode,
        is_exact=never_exact,
        defects=(all_zeros(bits), bad_shape, _bad_scale),
        pack=pack,
        scales=lambda last, n, k: last.view("<u2").reshape(n, -1),
    )


def all_zeros(bits: int) -> Defect:
    """The defect of codes that would compute nothing."""
    zero = 0x88 if bits == 4 else 0x80  # a byte of codes 0

    def defect(read: Read, n: int, k: int) -> str:
        """No codes are all zeros, unless the scales say that the source was; of others only the beginning is read."""
        starts = range(0, n * k * bits // 8, CHUNK)
        if any((read(0, start, start + CHUNK) != zero).any() for start in starts):
            return ""
        if (read(2).view("<u2") == groups.EMPTY_SCALE).all():
            return ""
        return "it is all zeros: its expert would compute nothing"

    return defect


def bad_shape(read: Read, n: int, k: int) -> str:
    """weight_shape is the shape."""
    stored = read(1).view("<i8").tolist()
    return "" if stored == [n, k] else f"weight_shape says {' x '.join(map(str, stored))}"


def _bad_scale(read: Read, n: int, k: int) -> str:
    scales = read(2).view("<u2")
    bad = (scales >= 0x7F80) | (scales == 0)
    return f"scale {int(np.argmax(bad))} is not a positive number" if bad.any() else ""


SETTINGS = ("rounding", "group_size")


def _variants(grid: Grid) -> dict[tuple[Any, ...], Encoding]:
    """By the values of SETTINGS; the first is the default."""
    return {
        (rounding, group): pack_quantized(replace(grid, group=group), rounding)
        for rounding in kernels.ROUNDINGS
        for group in GROUP_SIZES
    }


W4A16, W8A16 = _variants(GROUP_GRIDS["W4A16"]), _variants(GROUP_GRIDS["W8A16"])
