"""C kernels for NumPy arrays: each function checks its arguments, calls C and raises its errors.

All calls release the GIL. Wrong arguments raise ValueError before C sees them. NonFinite, a ValueError, names the first
value of a linear that is infinite or NaN; results are then partly written. The results (numerics.md) are identical, bit
for bit, for all instruction sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32, I8, I32, U8, U16, Array
from ktconvert.native_quant.instruction_sets import (
    ISAS,
    KERNELS,
    available_isas,
    isa,
    raise_error,
    read_environment,
    set_isa,
)
from ktconvert.native_quant.matrix import KINDS, Matrix, c_source, decode, to_c_readable

__all__ = ["ISAS", "KERNELS", "KINDS", "Matrix", "available_isas", "decode", "isa", "set_isa"]  # re-exported


# Rounding of a quotient in a group before it becomes a code: to BF16, as in llmcompressor, or to float32.
ROUNDINGS: dict[str, int] = {"library": lib.KTQ_LIBRARY, "float32": lib.KTQ_FLOAT32}
# Only for 4-bit codes: scales of either sign, rounded to float32.
GROUP_RULES = {**ROUNDINGS, "signed": lib.KTQ_SIGNED}


class Geometry(NamedTuple):
    """Numbers of which the rows and columns of a packed weight must be multiples."""

    block_rows: int
    tile_columns: int


# Bits of a code -> Geometry: the table of csrc/geometry.h.
_SIZES = ((bits, Geometry(lib.ktq_block_rows(bits), lib.ktq_tile_columns(bits))) for bits in range(1, 9))
GEOMETRIES: dict[int, Geometry] = {bits: geometry for bits, geometry in _SIZES if geometry.block_rows}


class NonFinite(ValueError):
    """An infinite or NaN weight, at `row` and `column` of the caller's array."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"the value at row {row}, column {column} is infinite or not a number")
        self.row, self.column = row, column


# (NumPy dtype, C type), looked up once because the checks run for every expert.
UINT8, INT8, INT32, UINT16, FLOAT32 = (
    (np.dtype(numpy), ffi.typeof(f"{c}[]"))
    for numpy, c in (("u1", "uint8_t"), ("i1", "int8_t"), ("i4", "uint8_t"), ("u2", "uint16_t"), ("f4", "float"))
)


def require_bits(bits: int) -> None:
    """Raise ValueError unless packed weights can have codes of this number of bits."""
    if bits not in GEOMETRIES:
        raise ValueError(f"bits must be {' or '.join(map(str, GEOMETRIES))}, not {bits}")


def _check_size(bits: int, n: int, k: int) -> None:
    require_bits(bits)
    rows, columns = GEOMETRIES[bits]
    if n < 1 or k < 1 or n % rows or k % columns:
        multiples = str(rows) if rows == columns else f"{rows} and {columns}"
        raise ValueError(f"{bits}-bit weights need rows and columns in multiples of {multiples}, not {n} x {k}")


def _check_packed(bits: int, n: int, k: int, weight: Array, scale: Array, writable: bool) -> tuple[Any, Any]:
    _check_size(bits, n, k)
    weights = pointer_to("weight", weight, UINT8, (n * k * bits // 8,), writable)
    return weights, pointer_to("scale", scale, FLOAT32, (n,), writable)


def pointer_to(
    name: str, array: Array, types: tuple[np.dtype[Any], Any], shape: tuple[int, ...], writable: bool = True
) -> Any:
    """Return a C pointer to an array. types: UINT8 etc. Raises ValueError for a different dtype or shape."""
    dtype, in_c = types
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, not {array.dtype} of shape {array.shape}")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name} must be contiguous and aligned")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} must be writable")
    return ffi.from_buffer(in_c, array)


# A buffer per thread that lives between calls: page faults of fresh memory would cost a tenth of the time.
_scratch = threading.local()


def scratch_buffer(k: int) -> Any:
    """Return a pointer to 32 * k uint16 (ktq.h), aligned to a cache line; the memory belongs to the calling thread."""
    if getattr(_scratch, "columns", 0) < k:
        _scratch.buffer = np.empty(32 * k * 2 + 64, np.uint8)
        _scratch.pointer = ffi.cast("uint16_t *", (_scratch.buffer.ctypes.data + 63) & ~63)
        _scratch.columns = k
    return _scratch.pointer


def convert(matrix: Matrix, kernel: Callable[[int, int, Any, Any], int]) -> None:
    """Call kernel(n, k, source, bad_row) for a linear, decoded to BF16 if C cannot read it, and raise its errors."""
    matrix = to_c_readable(matrix)
    source, keep = c_source(matrix)
    call_kernel(
        lambda bad_row: kernel(*matrix.shape, source, bad_row), lambda row: decode(matrix.rows(row, row + 1))[0]
    )
    del keep


def call_kernel(kernel: Callable[[Any], int], bf16_row: Callable[[int], Array]) -> None:
    """Call kernel(bad_row) and raise its errors. bf16_row: returns the BF16 bits of a row, to find the bad value."""
    read_environment()
    bad_row = ffi.new("int64_t *")
    error = kernel(bad_row)
    if error == lib.KTQ_ENONFINITE:
        row = int(bad_row[0])
        raise NonFinite(row, int(np.argmax((bf16_row(row) & 0x7FFF) >= 0x7F80)))
    raise_error(error)


def quantize_pack(
    bits: int, matrix: Matrix, weight: U8, scale: F32, *, kernel: Callable[..., int] = lib.ktq_quantize_pack
) -> None:
    """Quantize a linear to 4 or 8 bits, one scale per row, in kt-kernel's AMXINT4 or AMXINT8 order.

    Writes weight, uint8 [n*k*bits/8], and scale, float32 [n]. Raises NonFinite.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        packed = _check_packed(bits, n, k, weight, scale, writable=True)
        return kernel(bits, n, k, source, scratch_buffer(k), *packed, bad_row)

    convert(matrix, call)


def quantize_plain(bits: int, matrix: Matrix, weight: U8, scale: F32) -> None:
    """Quantize as quantize_pack, in the plain order of kt-kernel's MOE_INT4 and MOE_INT8; numerics.md, section 2c."""
    quantize_pack(bits, matrix, weight, scale, kernel=lib.ktq_quantize_plain)


def pack_codes(bits: int, codes: I8, weight: U8) -> None:
    """Pack the codes of another quantizer in the order of quantize_pack.

    codes: int8 [n, k] (-7..7 or -127..127), each row contiguous. Raises ValueError with the first code that is out of
    range; weight is then partly written.
    """
    if codes.ndim != 2 or codes.dtype != np.int8:
        raise ValueError(f"codes must be int8 [n, k], not {codes.dtype} of shape {codes.shape}")
    (n, k), (row_stride, column_stride) = codes.shape, codes.strides
    _check_size(bits, n, k)
    if column_stride != 1 or row_stride < 0:
        raise ValueError(f"each row of codes must be contiguous, in ascending order, not strides {codes.strides}")
    packed = pointer_to("weight", weight, UINT8, (n * k * bits // 8,))
    if np.may_share_memory(codes, weight):
        raise ValueError("codes and weight must not share memory")
    read_environment()
    bad_row = ffi.new("int64_t *")
    first = ffi.cast("int8_t *", codes.__array_interface__["data"][0])
    error = lib.ktq_pack_codes(bits, n, k, first, row_stride, packed, bad_row)
    if error == lib.KTQ_ERANGE:
        row = codes[bad_row[0]].astype(np.int16)
        largest = 2 ** (bits - 1) - 1
        column = int(np.argmax(np.abs(row) > largest))
        position = f"row {bad_row[0]}, column {column}"
        raise ValueError(f"the code at {position} is {row[column]}, not in -{largest}..{largest}")
    raise_error(error)


def quantize_groups(
    bits: int, matrix: Matrix, packed: I32, scale: U16, *, group: int = 128, rounding: str = "library"
) -> None:
    """Quantize a linear to 4 or 8 bits, one BF16 scale per group of columns, in compressed-tensors' packed order.

    n is arbitrary; k is a multiple of the group, and the group of 32. rounding: a key of GROUP_RULES ("signed": only 4
    bits). Writes packed int32 [n, k*bits/32] and scale uint16 [n, k/group]. Raises NonFinite. Equations: numerics.md,
    section 6.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
        rules = GROUP_RULES if bits == 4 else ROUNDINGS
        if rounding not in rules:
            raise ValueError(f"rounding '{rounding}' is not one of {', '.join(rules)}")
        if group < 32 or group % 32 or k % group:
            raise ValueError(f"a group must be a multiple of 32 that divides the columns: {group} does not fit {k}")
        codes = pointer_to("packed", packed, INT32, (n, k * bits // 32))
        out = codes, pointer_to("scale", scale, UINT16, (n, k // group))
        return lib.ktq_quantize_groups(bits, group, rules[rounding], n, k, source, scratch_buffer(k), *out, bad_row)

    convert(matrix, call)


def dequantize(bits: int, weight: U8, scale: F32, n: int, k: int) -> F32:
    """Return the values of packed weights: float32 [n, k]; a code times its scale (INT4: 16 times the code)."""
    packed = _check_packed(bits, n, k, weight, scale, writable=False)
    out = np.empty((n, k), np.float32)
    raise_error(lib.ktq_dequantize(bits, n, k, *packed, ffi.from_buffer(FLOAT32[1], out)))
    return out


def error_sums(bits: int, matrix: Matrix, weight: U8, scale: F32) -> tuple[float, float, float, float]:
    """Return the sums of x*x, y*y, x*y and (x-y)*(x-y) in float64, for a source x and packed weights y.

    x is the source as BF16, y the dequantized weight. They give the relative error sqrt(dd/xx) and the cosine
    xy/sqrt(xx*yy). The order of the additions is fixed, so all instruction sets give the same sums.
    """
    sums = ffi.new("double[4]")

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        packed = _check_packed(bits, n, k, weight, scale, writable=False)
        return lib.ktq_error_sums(bits, n, k, source, scratch_buffer(k), *packed, sums)

    convert(matrix, call)
    return sums[0], sums[1], sums[2], sums[3]


# --- panels of 32 rows (bytes.md, Panels) --------------------------------------------------------

PANEL_ROWS = 32
BF16_MULTIPLE: int = lib.KTQ_BF16_MULTIPLE  # n and k are multiples of it
MXFP4_MULTIPLE: int = lib.KTQ_MXFP4_MULTIPLE
FP8_MULTIPLE: int = lib.KTQ_FP8_MULTIPLE


def require_multiples(multiple: int, n: int, k: int) -> None:
    """Raise ValueError unless n and k are multiples of `multiple`."""
    if n < 1 or k < 1 or n % multiple or k % multiple:
        raise ValueError(f"rows and columns must be multiples of {multiple}, not {n} x {k}")


def _panels_or_rows(codes: Array, types: tuple[np.dtype[Any], Any], n: int, k: int) -> tuple[int, Any]:
    """Return C's number of the order that the shape of codes implies, and the pointer. Raises ValueError."""
    is_in_rows = codes.shape == (n, k)
    order, shape = (lib.KTQ_ROWS, (n, k)) if is_in_rows else (lib.KTQ_PANELS, (n // PANEL_ROWS, PANEL_ROWS * k))
    return order, pointer_to("codes", codes, types, shape)


def pack_bf16(matrix: Matrix, codes: U16) -> None:
    """Write a linear as BF16 to codes uint16 [n/32, 32*k] (panels), [n, k] (rows) or [n*k] (kt-kernel's blocks).

    n and k are multiples of BF16_MULTIPLE. Raises NonFinite.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        require_multiples(BF16_MULTIPLE, n, k)
        if codes.ndim == 1:
            order = int(lib.KTQ_BLOCKS)
            out = pointer_to("codes", codes, UINT16, (n * k,))
        else:
            order, out = _panels_or_rows(codes, UINT16, n, k)
        return lib.ktq_pack_bf16(order, n, k, source, scratch_buffer(k), out, bad_row)

    convert(matrix, call)


def pack_mxfp4(matrix: Matrix, codes: U8, exponents: U8) -> None:
    """Write a linear as MXFP4 in panels: codes uint8 [n/32, 16*k] and exponents uint8 [n/32, k].

    n and k are multiples of 32 (for the runtime: of MXFP4_MULTIPLE). A linear that already has E2M1 codes and an E8M0
    scale for each 32 columns keeps them. Raises NonFinite. Equations: numerics.md, section 9.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        require_multiples(PANEL_ROWS, n, k)
        packed = pointer_to("codes", codes, UINT8, (n // PANEL_ROWS, PANEL_ROWS * k // 2))
        scales = pointer_to("exponents", exponents, UINT8, (n // PANEL_ROWS, k))
        return lib.ktq_pack_mxfp4(n, k, source, scratch_buffer(k), packed, scales, bad_row)

    convert(matrix, call)


def unpack_mxfp4_rows(codes: U8, exponents: U8, rows: U8, row_exponents: U8) -> None:
    """Copy MXFP4 in panels, as pack_mxfp4 writes it, into the order of rows.

    Writes rows, uint8 [n, k/2], the even column in the lower half of a byte, and row_exponents, uint8 [n, k/32].
    """
    n = rows.shape[0]
    k = 2 * rows.shape[1]
    require_multiples(PANEL_ROWS, n, k)
    inputs = (codes, (n // PANEL_ROWS, PANEL_ROWS * k // 2)), (exponents, (n // PANEL_ROWS, k))
    outputs = (rows, (n, k // 2)), (row_exponents, (n, k // PANEL_ROWS))
    input_pointers = (pointer_to("each array", array, UINT8, shape, writable=False) for array, shape in inputs)
    output_pointers = (pointer_to("each array", array, UINT8, shape) for array, shape in outputs)
    raise_error(lib.ktq_mxfp4_rows(n, k, *input_pointers, *output_pointers))


def pack_fp8(matrix: Matrix, codes: U8, scales: F32) -> None:
    """Write a linear as FP8 E4M3: codes uint8 [n/32, 32*k] (panels) or [n, k], scales float32 [n/128, k/128] per block.

    n and k are multiples of FP8_MULTIPLE. A linear that is already FP8 in such blocks keeps both. Raises NonFinite.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        require_multiples(FP8_MULTIPLE, n, k)
        order, packed = _panels_or_rows(codes, UINT8, n, k)
        block_scales = pointer_to("scales", scales, FLOAT32, (n // FP8_MULTIPLE, k // FP8_MULTIPLE))
        scratch = scratch_buffer(FP8_MULTIPLE // PANEL_ROWS * k)
        return lib.ktq_pack_fp8(order, n, k, source, scratch, packed, block_scales, bad_row)

    convert(matrix, call)


def reorder_fp8(values: U8, codes: U8) -> None:
    """Copy FP8 E4M3 codes from rows, uint8 [n, k], each contiguous, into panels, uint8 [n/32, 32*k].

    n and k are multiples of 32. Raises NonFinite for a NaN code; nothing is written then.
    """
    n, k = values.shape
    require_multiples(PANEL_ROWS, n, k)
    if values.dtype != np.uint8 or values.strides[1] != 1 or values.strides[0] < k:
        raise ValueError(f"codes must be uint8 with contiguous rows, not {values.dtype} with strides {values.strides}")
    out = pointer_to("codes", codes, UINT8, (n // PANEL_ROWS, PANEL_ROWS * k))
    read_environment()
    bad_row = ffi.new("int64_t *")
    rows = ffi.cast("uint8_t *", values.__array_interface__["data"][0])
    error = lib.ktq_reorder_fp8(n, k, rows, values.strides[0], out, bad_row)
    if error == lib.KTQ_ENONFINITE:
        raise NonFinite(bad_row[0], int(np.argmax(values[bad_row[0]] & 0x7F == 0x7F)))
    raise_error(error)


def reorder_ggml(matrix: Matrix, codes: U8, scales: U8) -> None:
    """Copy blocks of ggml into panels, in the order that ktq.h defines for the format; no number changes.

    n is a multiple of 32; k and the skipped columns are multiples of 32, for K types of 128. Writes codes and scales,
    both flat. Raises NonFinite for an infinite or NaN scale.
    """
    number = BLOCK_FORMATS.get(matrix.kind.name.upper())
    if number is None:
        raise ValueError(f"no kernel computes with blocks of {matrix.kind.name}")
    sizes = weight_bytes(number, *matrix.shape)
    out = [pointer_to("codes", codes, UINT8, sizes[:1]), pointer_to("scales", scales, UINT8, sizes[1:])]

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        rows = ffi.cast("uint8_t *", source.values)
        return lib.ktq_reorder_ggml(source.kind, n, k, source.skip, rows, source.row_stride, out[0], out[1], bad_row)

    convert(matrix, call)


# ggml types that are formats of the runtime, by name.
BLOCK_FORMATS: dict[str, int] = {
    name: getattr(lib, f"KTQ_FORMAT_{name}") for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
}


def weight_bytes(number: int, n: int, k: int) -> tuple[int, int]:
    """Return the bytes of codes and of scales of a weight [n, k] in a KTQ_FORMAT_*. Raises ValueError for bad sizes."""
    codes, scales = ffi.new("int64_t *"), ffi.new("int64_t *")
    raise_error(lib.ktq_weight_bytes(number, n, k, codes, scales))
    return int(codes[0]), int(scales[0])
