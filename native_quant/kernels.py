"""The C kernels for NumPy arrays: checks what C must not have to doubt, calls, raises.

All calls release the GIL and may run in many threads at once. Wrong arguments raise ValueError before C sees them. The
numbers are defined in quantizers/NUMERICS.md and are the same, bit for bit, whatever instruction set is in use.
"""

from __future__ import annotations

import os
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
    """The instruction set in use: what KTCONVERT_ISA or set_isa says, else the best there is."""
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


def _read_environment() -> None:
    """KTCONVERT_ISA, once, at first use; a wrong value is wrong at every use."""
    global _environment_read
    if _environment_read:
        return
    with _environment_lock:
        if not _environment_read:
            name = os.environ.get("KTCONVERT_ISA", "").strip().lower()
            if name:
                _set_isa(name, "KTCONVERT_ISA: ")
            _environment_read = True


# --- checks ---------------------------------------------------------------------------------------


# These checks run for every expert, so types are looked up here, once.
_VOID, _SOURCE, _BYTES, _FLOATS = (ffi.typeof(t) for t in ("void *", "ktq_source *", "uint8_t[]", "float[]"))
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


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
    for name, array, dtype, size in (("weight", weight, _UINT8, n * k * bits // 8), ("scale", scale, _FLOAT32, n)):
        if array.dtype != dtype or array.shape != (size,):
            raise ValueError(f"{name} must be {dtype} of shape ({size},), not {array.dtype} of shape {array.shape}")
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            raise ValueError(f"{name} must be contiguous and aligned")
        if writable and not flags.writeable:
            raise ValueError(f"{name} must be writable")
    return ffi.from_buffer(_BYTES, weight), ffi.from_buffer(_FLOATS, scale)


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
        row = bad_row[0]
        decoded = decode(values[row : row + 1], kind, scales=scales, block=block, origin=(origin[0] + row, origin[1]))
        raise NonFinite(row, int(np.argmax((decoded[0] & 0x7FFF) >= 0x7F80)))
    del keep
    _raise(error)


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


# --- mapped files that cannot be read -------------------------------------------------------------


def guard_sigbus(message: str, exit_code: int = 5) -> None:
    """From now on a page of a registered file that cannot be read ends the process with this sentence on stderr.

    message: at most 500 bytes with one %s, which becomes the name of the file.
    """
    text = message if message.endswith("\n") else message + "\n"
    if text.count("%s") != 1:
        raise ValueError("the message must hold %s once, for the name of the file")
    _raise(lib.ktq_guard_sigbus(text.encode(), exit_code))


def register_mapping(address: int, length: int, name: str) -> None:
    """Names the file that is mapped at this address, for guard_sigbus."""
    _raise(lib.ktq_register_mapping(ffi.cast("void *", address), length, name.encode(errors="surrogateescape")))


def unregister_mapping(address: int) -> None:
    """Forgets what register_mapping was told; call it before the file is unmapped."""
    _raise(lib.ktq_unregister_mapping(ffi.cast("void *", address)))
