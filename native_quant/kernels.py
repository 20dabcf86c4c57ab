"""The C kernels for NumPy arrays: checks what C must not have to doubt, calls, raises.

All calls release the GIL and may run in many threads at once. Wrong arguments raise ValueError before C sees them. The
numbers are defined in quantizers/NUMERICS.md and are the same, bit for bit, whatever instruction set is in use.
"""

from __future__ import annotations

import os
import sys
import threading
from itertools import count, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib

Array = npt.NDArray[Any]

# Encodings by name: the number that C knows, and the NumPy type that holds the bits.
KINDS: dict[str, tuple[int, np.dtype[Any]]] = {
    "bf16": (lib.KTQ_BF16, np.dtype(np.uint16)),
    "fp16": (lib.KTQ_FP16, np.dtype(np.uint16)),
    "f32": (lib.KTQ_F32, np.dtype(np.float32)),
    "fp8_e4m3": (lib.KTQ_FP8_E4M3, np.dtype(np.uint8)),
}
SCALED_KINDS = frozenset({"fp8_e4m3"})

# How groups round a quotient before it becomes a code: to BF16, as llmcompressor does, or to float32.
ROUNDINGS: dict[str, int] = {"library": lib.KTQ_LIBRARY, "float32": lib.KTQ_FLOAT32}

# n and k are multiples of this, by bits: the row block and the columns of a tile of kt-kernel's layout.
MULTIPLE = {8: 64, 4: 128}


def _text(pointer: Any) -> str:
    text: bytes = ffi.string(pointer)
    return text.decode()


ISAS: tuple[str, ...] = tuple(_text(lib.ktq_isa_name(i)) for i in range(lib.ktq_isa_count()))
KERNELS: tuple[tuple[str, str], ...] = tuple(
    (_text(lib.ktq_kernel_family(row)), ISAS[lib.ktq_kernel_isa(row)])
    for row in takewhile(lambda row: lib.ktq_kernel_isa(row) >= 0, count())
)


class NonFinite(ValueError):
    """A weight is infinite or not a number; `row` and `column` say which, counted in the array that was given."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"the value at row {row}, column {column} is infinite or not a number")
        self.row = row
        self.column = column


# --- the instruction set --------------------------------------------------------------------------

_environment_read = False
_environment_lock = threading.Lock()


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this CPU and this kernel let us use, worst first."""
    return tuple(name for i, name in enumerate(ISAS) if lib.ktq_isa_available(i))


def isa() -> str:
    """The instruction set in use: what KTCONVERT_ISA, KT_KERNEL_CPU_VARIANT or set_isa says, else the best there is."""
    _read_environment()
    return ISAS[lib.ktq_isa()]


def set_isa(name: str | None) -> None:
    """Uses this instruction set and nothing above it; None: the best there is. ValueError if it is not available."""
    global _environment_read
    with _environment_lock:
        _environment_read = True
    _set_isa(name, "")


def _set_isa(name: str | None, where: str) -> None:
    number = -1 if name is None else ISAS.index(name) if name in ISAS else len(ISAS)
    if number == len(ISAS):
        raise ValueError(f"{where}'{name}' is no instruction set we know: choose one of {', '.join(available_isas())}")
    if lib.ktq_set_isa(number) != lib.KTQ_OK:
        raise ValueError(f"{where}this machine does not offer '{name}': choose one of {', '.join(available_isas())}")


# What kt-kernel's KT_KERNEL_CPU_VARIANT asks for, by our names; like kt-kernel we pass over values that it does not know.
_KT_VARIANTS = {
    "amx": "amx",
    "avx512_bf16": "avx512vnni",
    "avx512_vbmi": "avx512vnni",
    "avx512_vnni": "avx512vnni",
    "avx512_base": "avx512",
    "avx2": "avx2",
}


def _read_environment() -> None:
    """KTCONVERT_ISA, else KT_KERNEL_CPU_VARIANT, once, at first use; a wrong value is wrong at every use."""
    global _environment_read
    if _environment_read:
        return
    with _environment_lock:
        if not _environment_read:
            name = os.environ.get("KTCONVERT_ISA", "").strip().lower()
            variant = _KT_VARIANTS.get(os.environ.get("KT_KERNEL_CPU_VARIANT", "").strip().lower())
            if name:
                _set_isa(name, "KTCONVERT_ISA: ")
            elif variant:
                _set_isa(variant, "KT_KERNEL_CPU_VARIANT: ")
            _environment_read = True
            if os.environ.get("KTCONVERT_DEBUG") == "1":
                source = "KTCONVERT_ISA" if name else "KT_KERNEL_CPU_VARIANT" if variant else "the best there is"
                offered = ", ".join(available_isas())
                print(f"ktconvert: computes with {ISAS[lib.ktq_isa()]} ({source}) of {offered}", file=sys.stderr)


# --- checks ---------------------------------------------------------------------------------------


# These checks run for every expert, so types are looked up here, once.
_VOID, _SOURCE, _BYTES, _FLOATS, _WORDS = (
    ffi.typeof(t) for t in ("void *", "ktq_source *", "uint8_t[]", "float[]", "uint16_t[]")
)
_UINT8, _INT32, _UINT16, _FLOAT32 = (np.dtype(t) for t in (np.uint8, np.int32, np.uint16, np.float32))


def _address(array: Array) -> Any:
    """Where the first element lies, whatever the strides (ffi.from_buffer takes contiguous arrays only)."""
    return ffi.cast(_VOID, array.__array_interface__["data"][0])


def _source(
    values: Array, kind: str, scales: npt.NDArray[np.float32] | None, block: tuple[int, int], origin: tuple[int, int]
) -> tuple[Any, Any]:
    """The C struct for one linear, and the array that must stay alive besides `values` while it is used."""
    if kind not in KINDS:
        raise ValueError(f"kind '{kind}' is not one of {', '.join(KINDS)}")
    number, dtype = KINDS[kind]
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"values must have two dimensions, neither of them 0, not shape {values.shape}")
    if values.dtype != dtype:
        raise ValueError(f"{kind} values must be {dtype} in this machine's byte order, not {values.dtype!r}")
    (n, k), (row_stride, column_stride), item = values.shape, values.strides, dtype.itemsize
    # NumPy may give any stride to an axis of length 1.
    row_stride = row_stride if n > 1 else item
    column_stride = column_stride if k > 1 else item
    if item not in (row_stride, column_stride):
        raise ValueError(f"one axis of values must be contiguous, not strides {values.strides}")
    if row_stride < 0 or column_stride < 0:
        raise ValueError(f"values must not run backwards, as strides {values.strides} do")

    source = (number, _address(values), row_stride, column_stride)
    if kind not in SCALED_KINDS:
        if scales is not None:
            raise ValueError(f"{kind} values have no scales")
        return ffi.new(_SOURCE, source), None
    grid = _check_scales(kind, (n, k), scales, block, origin)
    return ffi.new(_SOURCE, (*source, _address(grid), grid.shape[1], *block, *origin)), grid


def _check_scales(
    kind: str,
    shape: tuple[int, int],
    scales: npt.NDArray[np.float32] | None,
    block: tuple[int, int],
    origin: tuple[int, int],
) -> npt.NDArray[np.float32]:
    if scales is None or scales.ndim != 2 or scales.dtype != np.float32:
        raise ValueError(f"{kind} values need float32 scales with two dimensions")
    if min(block) < 1 or min(origin) < 0 or max(*block, *origin) >= 2**31:
        raise ValueError(f"block {block} and origin {origin} make no sense")
    for size, start, step, have in zip(shape, origin, block, scales.shape, strict=True):
        if (start + size - 1) // step >= have:
            raise ValueError(f"scales of shape {scales.shape} do not cover {shape} at {origin} in blocks of {block}")
    return np.require(scales, requirements=["C", "A"])


def _check_bits(bits: int, n: int, k: int) -> None:
    if bits not in MULTIPLE:
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if n < 1 or k < 1 or n % MULTIPLE[bits] or k % MULTIPLE[bits]:
        raise ValueError(f"{bits}-bit weights need rows and columns in multiples of {MULTIPLE[bits]}, not {n} x {k}")


def _check_packed(bits: int, n: int, k: int, weight: Array, scale: Array, writable: bool) -> tuple[Any, Any]:
    """Pointers to packed weights and scales."""
    _check_bits(bits, n, k)
    _check_array("weight", weight, _UINT8, (n * k * bits // 8,), writable)
    _check_array("scale", scale, _FLOAT32, (n,), writable)
    return ffi.from_buffer(_BYTES, weight), ffi.from_buffer(_FLOATS, scale)


def _check_array(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, not {array.dtype} of shape {array.shape}")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        raise ValueError(f"{name} must be contiguous and aligned")
    if writable and not flags.writeable:
        raise ValueError(f"{name} must be writable")


class _Scratch(threading.local):
    """A buffer per thread that is kept between calls: faulting fresh pages in would cost a tenth of the work."""

    def __init__(self) -> None:
        self.columns = 0
        self.buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.pointer: Any = ffi.NULL

    def get(self, k: int) -> Any:
        """32 * k uint16 (ktq.h), on a cache line of its own."""
        if self.columns < k:
            self.buffer = np.empty(32 * k * 2 + 64, np.uint8)
            self.pointer = ffi.cast("uint16_t *", (self.buffer.ctypes.data + 63) & ~63)
            self.columns = k
        return self.pointer


_scratch = _Scratch()


def _raise(error: int) -> None:
    if error != lib.KTQ_OK:
        raise ValueError(_text(lib.ktq_strerror(error)))


# --- the kernels ----------------------------------------------------------------------------------


def quantize_pack(
    bits: int,
    values: Array,
    kind: str,
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    *,
    scales: npt.NDArray[np.float32] | None = None,
    block: tuple[int, int] = (1, 1),
    origin: tuple[int, int] = (0, 0),
) -> None:
    """Quantizes a linear to 4 or 8 bits, one scale per row, in kt-kernel's AMXINT4 or AMXINT8 order.

    values, kind, scales, block, origin: as in quantizers.spec.Matrix. weight: uint8 [n*k*bits/8] and scale: float32 [n]
    are written. NonFinite: a value is infinite or NaN; weight and scale are then partly written.
    """
    source, keep = _source(values, kind, scales, block, origin)
    n, k = values.shape
    packed = _check_packed(bits, n, k, weight, scale, writable=True)
    _read_environment()
    bad_row = ffi.new("int64_t *")
    error = lib.ktq_quantize_pack(bits, n, k, source, _scratch.get(k), *packed, bad_row)
    if error == lib.KTQ_ENONFINITE:
        raise _non_finite(bad_row[0], values, kind, scales, block, origin)
    del keep
    _raise(error)


def quantize_groups(
    bits: int,
    values: Array,
    kind: str,
    packed: npt.NDArray[np.int32],
    scale: npt.NDArray[np.uint16],
    *,
    group: int = 128,
    rounding: str = "library",
    scales: npt.NDArray[np.float32] | None = None,
    block: tuple[int, int] = (1, 1),
    origin: tuple[int, int] = (0, 0),
) -> None:
    """Quantizes a linear to 4 or 8 bits, one BF16 scale per group of columns, in compressed-tensors' packed order.

    values, kind, scales, block, origin: as in quantizers.spec.Matrix; any n, and k a multiple of the group, which is one
    of 32. rounding: a row of ROUNDINGS. packed: int32 [n, k*bits/32] and scale: uint16 [n, k/group] are written.
    NonFinite: a value is infinite or NaN; packed and scale are then partly written. Equations: NUMERICS.md, section 6.
    """
    source, keep = _source(values, kind, scales, block, origin)
    n, k = values.shape
    if bits not in MULTIPLE:
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding '{rounding}' is not one of {', '.join(ROUNDINGS)}")
    if group < 32 or group % 32 or k % group:
        raise ValueError(f"a group must be a multiple of 32 that divides the columns: {group} does not fit {k} columns")
    _check_array("packed", packed, _INT32, (n, k * bits // 32), writable=True)
    _check_array("scale", scale, _UINT16, (n, k // group), writable=True)
    _read_environment()
    bad_row = ffi.new("int64_t *")
    out = ffi.from_buffer(_BYTES, packed), ffi.from_buffer(_WORDS, scale)
    error = lib.ktq_quantize_groups(bits, group, ROUNDINGS[rounding], n, k, source, _scratch.get(k), *out, bad_row)
    if error == lib.KTQ_ENONFINITE:
        raise _non_finite(bad_row[0], values, kind, scales, block, origin)
    del keep
    _raise(error)


def _non_finite(
    row: int,
    values: Array,
    kind: str,
    scales: npt.NDArray[np.float32] | None,
    block: tuple[int, int],
    origin: tuple[int, int],
) -> NonFinite:
    decoded = decode(values[row : row + 1], kind, scales=scales, block=block, origin=(origin[0] + row, origin[1]))
    return NonFinite(row, int(np.argmax((decoded[0] & 0x7FFF) >= 0x7F80)))


def decode(
    values: Array,
    kind: str,
    *,
    scales: npt.NDArray[np.float32] | None = None,
    block: tuple[int, int] = (1, 1),
    origin: tuple[int, int] = (0, 0),
) -> npt.NDArray[np.uint16]:
    """A linear as BF16 bits: uint16 [n, k], rounded to nearest even. Any n and k."""
    source, keep = _source(values, kind, scales, block, origin)
    _read_environment()
    n, k = values.shape
    out = np.empty((n, k), np.uint16)
    error = lib.ktq_decode(n, k, source, ffi.from_buffer("uint16_t[]", out))
    del keep
    _raise(error)
    return out


def dequantize(
    bits: int, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], n: int, k: int
) -> npt.NDArray[np.float32]:
    """The numbers that packed weights stand for: float32 [n, k]; a code times its scale (INT4: 16 times the code)."""
    packed = _check_packed(bits, n, k, weight, scale, writable=False)
    out = np.empty((n, k), np.float32)
    _raise(lib.ktq_dequantize(bits, n, k, *packed, ffi.from_buffer(_FLOATS, out)))
    return out


def error_sums(
    bits: int,
    values: Array,
    kind: str,
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    *,
    scales: npt.NDArray[np.float32] | None = None,
    block: tuple[int, int] = (1, 1),
    origin: tuple[int, int] = (0, 0),
) -> tuple[float, float, float, float]:
    """How far packed weights are from their source: sums of x*x, y*y, x*y and (x-y)*(x-y), in float64.

    x is the source as BF16, y the dequantized weight. From them: relative error sqrt(dd/xx), cosine xy/sqrt(xx*yy).
    The order of the additions is fixed, so the sums are the same with every instruction set.
    """
    source, keep = _source(values, kind, scales, block, origin)
    n, k = values.shape
    packed = _check_packed(bits, n, k, weight, scale, writable=False)
    _read_environment()
    sums = ffi.new("double[4]")
    error = lib.ktq_error_sums(bits, n, k, source, _scratch.get(k), *packed, sums)
    del keep
    _raise(error)
    return sums[0], sums[1], sums[2], sums[3]


def gemm(bits: int, activations: npt.NDArray[np.int8], weight: npt.NDArray[np.uint8], n: int) -> npt.NDArray[np.int32]:
    """Dot products of int8 [m, k] (-127..127) with the codes of a packed weight [n, k]: int32 [m, n].

    One of the runtime's kernels alone, for tests and benchmarks.
    """
    if activations.ndim != 2 or activations.dtype != np.int8 or 0 in activations.shape:
        raise ValueError(f"activations must be int8 [m, k], not {activations.dtype} of shape {activations.shape}")
    m, k = activations.shape
    _check_bits(bits, n, k)
    if weight.dtype != _UINT8 or weight.shape != (n * k * bits // 8,) or not weight.flags.c_contiguous:
        raise ValueError(f"weight must be contiguous uint8 of shape ({n * k * bits // 8},)")
    _read_environment()
    out = np.empty((m, n), np.int32)
    rows = ffi.from_buffer("int8_t[]", np.ascontiguousarray(activations))
    _raise(lib.ktq_gemm(bits, m, n, k, rows, ffi.from_buffer(_BYTES, weight), ffi.from_buffer("int32_t[]", out)))
    return out
