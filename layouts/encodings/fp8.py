"""FP8 E4M3 with scales, and compressed-tensors' int-quantized weights (W8A8) with such scales.

Checkpoints have a scale per block, per row, or for the whole weight. MXFP8 is FP8 with scales that are powers of two,
stored as E8M0. W8A8 has a signed byte per code. ktconvert writes FP8 with a float32 scale per block of 128 x 128
(bytes.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ktconvert.layouts.encodings.checkpoint import (
    E8M0,
    FLOATS,
    GATE_UP,
    STACK_SCALE,
    CheckpointEncoding,
    Tensors,
    absent_tensor,
    read_scales,
)
from ktconvert.layouts.encodings.encoding import (
    DefectCheck,
    Encoding,
    RowSelection,
    TensorReader,
    has_encoding,
    select_rows,
)
from ktconvert.layouts.errors import InputError, UnsupportedError, bad_tensor
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, F64, Bytes
from ktconvert.native_quant.matrix import FP8_E4M3, INT8_SIGNED, Kind, Matrix
from ktconvert.quantizers import FLOAT_GRIDS, differences, panels
from ktconvert.quantizers.reference import E4M3, f32_to_bf16

# --- in checkpoints -------------------------------------------------------------------------------

DEFAULT_BLOCK = (128, 128)  # block size if the config names none; correct for every block-scaled release so far
MX_BLOCK = (1, 32)  # OCP Microscaling Formats 1.0

Shape = tuple[int, int]


def find_scale_grid(
    weight: TensorInfo, scale: TensorInfo, blocks: Sequence[Shape], input_major: bool | None
) -> tuple[Shape, Shape]:
    """Return (shape of the grid of scales, rows and columns of a block) of a 2-D weight, or of each in a stack of them.

    The weights of a stack may share a scale.

    blocks       block sizes that the config names. Without any, scales may be per channel, per tensor or per block of
                 128x128, whichever fits. E8M0 scales may also have blocks of 1x32, even if the config names others, or
                 any blocks that divide the weight
    input_major  whether the weight is stored as [k, n], so that its channels are columns; None if unknown

    Raises InputError if no interpretation fits both shapes, UnsupportedError if input_major must be known.
    """
    if scale.dtype not in (*FLOATS, *E8M0):
        raise bad_tensor(scale.name, f"is {scale.dtype}; scales must be F32, BF16, F16 or E8M0")
    shape = scale.shape
    weight_shape = weight.shape
    if len(weight_shape) == 3 and (shape[:1] == weight_shape[:1] or math.prod(shape) == 1):
        shape = shape[1:] if shape[:1] == weight_shape[:1] else ()
        weight_shape = weight_shape[1:]
    if len(weight_shape) != 2:
        raise _make_misfit_error(weight, scale, blocks)
    rows, columns = weight_shape
    channels = (1, columns) if input_major else (rows, 1)
    if shape == (2,) != channels[:1] and GATE_UP in weight.name:
        if input_major is None:
            problem = f"has 2 scales for each {weight.name!r}; whether gate and up are rows or columns is unknown"
            raise UnsupportedError.from_tensor(scale.name, problem, "use the model's BF16 release")
        halves = (1, 2) if input_major else (2, 1)
        if rows % halves[0] == columns % halves[1] == 0:
            return halves, (rows // halves[0], columns // halves[1])
    if len(shape) <= 1:
        count = math.prod(shape)
        shape = (0, 0)
        if count == 1:
            shape = (1, 1)
        elif count == max(channels):
            shape = channels
    if len(shape) != 2:
        raise _make_misfit_error(weight, scale, blocks)
    has_powers = scale.dtype in E8M0
    sizes = list(blocks) or [DEFAULT_BLOCK]
    if has_powers:
        sizes.append(MX_BLOCK[::-1] if input_major else MX_BLOCK)
    candidates = [(block, (-(-rows // block[0]), -(-columns // block[1]))) for block in sizes]
    # A name that ends in _inv means blocks: if the config names the block size, only that may fit.
    if not (blocks and scale.name.endswith("_inv")):
        candidates += [((rows, columns), (1, 1)), ((1, columns), (rows, 1)), ((rows, 1), (1, columns))]
    for block, grid in candidates:
        if shape == grid:
            return grid, block
    if has_powers and all(shape) and rows % shape[0] == columns % shape[1] == 0:
        return (shape[0], shape[1]), (rows // shape[0], columns // shape[1])
    raise _make_misfit_error(weight, scale, blocks)


def _make_misfit_error(weight: TensorInfo, scale: TensorInfo, blocks: Sequence[tuple[int, int]]) -> InputError:
    sizes = " or ".join(f"{rows}x{columns}" for rows, columns in blocks) or "128x128, the default"
    problem = (
        f"of shape {list(scale.shape)} does not fit {weight.name!r} of shape {list(weight.shape)} in blocks of {sizes}"
    )
    return bad_tensor(scale.name, problem, "check weight_block_size in config.json, or use another release")


def _make_reader(kind: Kind) -> Callable[[TensorSource, Tensors, Quantization, bool], Matrix]:
    def make_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        weight = tensors["weight"]
        scale = tensors["scale"]
        shape, block = find_scale_grid(weight, scale, quantization.blocks, input_major)
        zeros = None
        if (zero_tensor := tensors.get("zero_point")) is not None:
            zeros = (source.view(zero_tensor) ^ 0x80).astype(np.float32).reshape(shape)
        return Matrix(source.view(weight), kind, read_scales(source, scale, shape), block, zeros=zeros)

    return make_matrix


def _resolve_scheme(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[int, int]:
    return find_scale_grid(tensors["weight"], tensors["scale"], quantization.blocks, input_major)[1]


def _make_row(name: str, title: str, has_powers: bool, *input_types: str) -> CheckpointEncoding:
    """Return a row for E4M3.

    has_powers  whether its scales are E8M0
    """

    def accepts(tensors: Tensors, quantization: Quantization) -> bool:
        scale = tensors.get("scale")
        return (scale is not None and scale.dtype in E8M0) == has_powers

    names = {"weight": ("{t}",), "scale": ("{t}_scale_inv", "{t}_scale", "{s}.scale", "{s}.qscale_weight", STACK_SCALE)}
    return CheckpointEncoding(
        name,
        title,
        names,
        ("F8_E4M3",),
        FP8_E4M3,
        _make_reader(FP8_E4M3),
        resolve_scheme=_resolve_scheme,
        accepts=accepts,
        input_types=input_types,
    )


def _read_without_scales(
    source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool
) -> Matrix:
    values = source.view(tensors["weight"])
    n, k = values.shape
    return Matrix(values, FP8_E4M3, np.ones((1, 1), np.float32), (n, k))


# FP8 tensors of MTP layers, which may lack scales. It is not a row of the table: elsewhere a missing scale is an error.
UNSCALED = CheckpointEncoding(
    "F8_E4M3 without scales", "FP8 without scales", {"weight": ("{t}",)}, ("F8_E4M3",), FP8_E4M3, _read_without_scales
)


def _accepts_w8a8(tensors: Tensors, quantization: Quantization) -> bool:
    """Return whether scales are floats; scales of other types belong to 4-bit floats, two in a byte."""
    return "scale" in tensors and tensors["scale"].dtype in FLOATS


def _resolve_w8a8_scheme(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[object, ...]:
    block = _resolve_scheme(tensors, quantization, input_major)
    scale = tensors["scale"]
    zeros = tensors.get("zero_point")
    if zeros is None:
        if quantization.symmetric == (False,):
            raise absent_tensor(tensors["weight"], "zero points", f"{tensors['weight'].name}_zero_point")
        return block
    if zeros.dtype != "I8" or zeros.shape != scale.shape:
        needed = f"zero points must be I8 of shape {list(scale.shape)}, as {scale.name!r}"
        raise bad_tensor(zeros.name, f"is {zeros.dtype} of shape {list(zeros.shape)}; {needed}")
    return *block, "zero points"


W8A8 = CheckpointEncoding(
    "W8A8",
    "INT8 (W8A8)",
    {"weight": ("{t}",), "scale": ("{t}_scale", "{t}_scale_inv"), "zero_point": ("{t}_zero_point",)},
    ("I8",),
    INT8_SIGNED,
    _make_reader(INT8_SIGNED),
    resolve_scheme=_resolve_w8a8_scheme,
    accepts=_accepts_w8a8,
    optional=frozenset({"zero_point"}),
    input_types=("int8",),
)
IN_CHECKPOINTS = (_make_row("F8_E4M3", "FP8", False, "fp8"), _make_row("MXFP8", "MXFP8", True, "mxfp8", "fp8"))


# --- as we write it -------------------------------------------------------------------------------

BLOCK = 128
LARGE_SCALE = np.float32(7e35)  # 448 times a scale slightly above it is infinite
NAN = 0x7F  # code of NaN, without its sign
SOURCES = ("F8_E4M3", "MXFP8")  # encodings in checkpoints that may have such blocks


def decode_codes(codes: Bytes, scales: F32) -> F32:
    """Return the numbers of codes [n, k] with the scales [n, k/128] of their rows: float32, rounded once."""
    with np.errstate(all="ignore"):  # a damaged output may overflow
        numbers: F32 = E4M3[codes] * scales.repeat(BLOCK, axis=1)
    return numbers


def keeps_codes(matrix: Matrix) -> bool:
    """Return whether codes and scales of a linear, or of some rows of one, are kept: FP8 in blocks of 128 x 128."""
    return matrix.kind == FP8_E4M3 and matrix.block == (BLOCK, BLOCK)


def move_signs_to_codes(matrix: Matrix) -> Matrix:
    """Return the same numbers with positive scales, for a linear whose codes are kept.

    Signs of scales go to the codes; codes with the scale 0 become zeros with the scale 1.
    """
    assert matrix.scales is not None
    codes = matrix.values.copy()
    first_row, first_column = (index // BLOCK for index in matrix.origin)
    for row in range(0, codes.shape[0], BLOCK):
        for column in range(0, codes.shape[1], BLOCK):
            scale = matrix.scales[first_row + row // BLOCK, first_column + column // BLOCK]
            block = codes[row : row + BLOCK, column : column + BLOCK]
            if scale == 0:
                block[(block & 0x7F) != NAN] &= 0x80
            if np.signbit(scale):
                block ^= 0x80
    return replace(matrix, values=codes, scales=np.where(matrix.scales == 0, np.float32(1), np.abs(matrix.scales)))


def source_values(matrix: Matrix) -> F32:
    """Return a linear as float32 [n, k]: rounded to BF16, unless its codes are kept."""
    if not keeps_codes(matrix):
        return differences.source_values(matrix)
    with np.errstate(all="ignore"):
        numbers: F32 = E4M3[matrix.values] * matrix.element_scales()
    return numbers


def _make_encoding(row_group: int, codes_suffix: str, scales_suffix: str) -> Encoding:
    """Return an encoding of FP8.

    row_group  number of a matrix's rows in each row of the codes: 1, or the rows of a panel
    """

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        blocks = (n // BLOCK, k // BLOCK)
        codes = TensorInfo(codes_suffix, "F8_E4M3", (n // row_group, row_group * k), n * k)
        return codes, TensorInfo(scales_suffix, "F32", blocks, 4 * blocks[0] * blocks[1])

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        n, k = matrix.shape
        _pack(matrix, out[0].reshape(n // row_group, row_group * k), view_scales(out[1], n, k))

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
        """Return the products of codes and scales, rounded once."""
        codes = select_rows(stored[0].reshape(n // row_group, row_group * k), n, rows, panels.from_panels)
        return decode_codes(codes, view_scales(stored[1], n, k)[np.arange(n)[rows] // BLOCK])

    def error_sums(matrix: Matrix, stored: Sequence[Bytes]) -> F64:
        """Return error sums; if codes are kept, compare with the source's own numbers, which BF16 would round."""
        return differences.error_sums(matrix, lambda rows: decode(stored, *matrix.shape, rows), source_values)

    return Encoding(
        "FP8",
        version=1,
        grid=FLOAT_GRIDS["fp8"],
        multiple=kernels.FP8_MULTIPLE,
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        is_exact=lambda model: has_encoding(model, SOURCES, (BLOCK, BLOCK)),
        defect_checks=(find_bad_code, _make_scale_check(row_group)),
        unpack_scales=view_scales,
        error_sums=error_sums,
    )


def view_scales(scale_bytes: Bytes, n: int, k: int) -> F32:
    """Return the scales as a view, float32 [n / 128, k / 128]."""
    return scale_bytes.view(np.float32).reshape(n // BLOCK, k // BLOCK)


def _pack(matrix: Matrix, codes: Bytes, scales: F32) -> None:
    """Store as kernels.pack_fp8 does, also if a source whose codes are kept has negative, zero or large scales.

    Raises kernels.NonFinite.
    """
    kept_scales = matrix.scales if keeps_codes(matrix) else None
    if kept_scales is None or ((kept_scales > 0) & (kept_scales <= LARGE_SCALE)).all():
        kernels.pack_fp8(matrix, codes, scales)
        return
    n, _ = matrix.shape
    block_codes = codes.reshape(n // BLOCK, -1, codes.shape[1])
    for block in range(n // BLOCK):
        rows = matrix.rows(block * BLOCK, (block + 1) * BLOCK)
        try:
            require_finite(rows)
            kernels.pack_fp8(move_signs_to_codes(rows), block_codes[block], scales[block : block + 1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(block * BLOCK + bad.row, bad.column) from None


def require_finite(matrix: Matrix) -> None:
    """Raise kernels.NonFinite if the product of a code and a large scale is infinite in BF16."""
    if matrix.scales is not None and (np.abs(matrix.scales) > LARGE_SCALE).any():
        differences.decode_finite(matrix)


def find_bad_code(read: TensorReader, n: int, k: int) -> str:
    is_nan = (read(0) & 0x7F) == NAN
    return f"code {int(np.argmax(is_nan))} is not a number" if is_nan.any() else ""


def _make_scale_check(row_group: int) -> DefectCheck:
    """Return a check of the scales of blocks; the codes of `row_group` rows are stored together."""

    def find_bad_scale(read: TensorReader, n: int, k: int) -> str:
        """Check that every scale is finite and positive, and its products with the codes are finite in BF16."""
        scales = read(1).view("<f4")
        is_bad = ~(np.isfinite(scales) & (scales > 0))
        if is_bad.any():
            return f"scale {int(np.argmax(is_bad))} is {scales[is_bad][0]}"
        width = max(k, BLOCK)  # the shape may be damaged
        for index in map(int, np.flatnonzero(scales > LARGE_SCALE)):
            row, column = (BLOCK * number for number in divmod(index, width // BLOCK))
            starts = range(row * width + column * row_group, (row + BLOCK) * width, row_group * width)
            codes = np.concatenate([read(0, start, start + BLOCK * row_group) for start in starts])
            with np.errstate(over="ignore"):
                largest = E4M3[codes & 0x7F].max(initial=0) * scales[index]
            if f32_to_bf16(largest) >= 0x7F80:  # infinity
                return f"scale {index}, {scales[index]!s}, makes a number infinite"
        return ""

    return find_bad_scale


PANELS = _make_encoding(panels.ROWS, "codes", "scales")
ROWS = _make_encoding(1, "weight", "weight_scale_inv")
