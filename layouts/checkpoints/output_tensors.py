"""The bytes of a checkpoint's tensors as an output stores them: copied, decoded to BF16, or changed by an adapter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.adapter import Delta
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import STAGING_BYTES
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import differences
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16

COPIED = 16 << 20  # bytes of a copied tensor that are prefetched and released together

Bytes = npt.NDArray[np.uint8]
Read = Callable[[int, int], Bytes]  # (start, stop) -> the bytes from start to stop - 1


@dataclass(frozen=True)
class Added:
    """What an adapter adds to the rows of a BF16 tensor [rows, columns]: (first row, delta) of each block. The sum is
    rounded once. identity: in the fingerprints of units.
    """

    columns: int
    blocks: tuple[tuple[int, Delta], ...]
    identity: str

    def to(self, data: Bytes, start: int) -> Bytes:
        """data: bytes of the tensor from `start` on. Raises InputError for sums that are not finite."""
        bits = data.view(np.uint16)
        first, last = start // 2, start // 2 + bits.size
        out = bits.copy()
        for row, delta in self.blocks:
            rows, columns = delta.shape
            begin, end = max(first, row * columns), min(last, (row + rows) * columns)
            if begin >= end:
                continue
            a, b = delta.matrices()
            top, bottom = begin // columns - row, -(-end // columns) - row
            added = (b[top:bottom] @ a).reshape(-1)[begin - (row + top) * columns :][: end - begin]
            with np.errstate(over="ignore", invalid="ignore"):
                total = bf16_to_f32(bits[begin - first : end - first]) + added
            if not np.isfinite(total).all():
                raise InputError(f"{delta.a.name}: with it a weight is not finite; train again")
            out[begin - first : end - first] = f32_to_bf16(total)
        return out.view(np.uint8)


@dataclass(frozen=True)
class OtherTensor:
    """One tensor of the output: its name there, and the stored one, or the weight that is to be decoded to BF16."""

    key: str
    stored: TensorInfo | Weight
    added: Added | None = None

    @property
    def entry(self) -> TensorInfo:
        if isinstance(self.stored, Weight):
            return TensorInfo(self.key, "BF16", self.stored.released_shape, 2 * math.prod(self.stored.shape))
        return TensorInfo(self.key, self.stored.dtype, self.stored.shape, self.stored.nbytes)

    @property
    def reads(self) -> tuple[TensorInfo, ...]:
        return tuple(self.stored.tensors.values()) if isinstance(self.stored, Weight) else (self.stored,)


@dataclass(frozen=True)
class Span:
    """A run of bytes of an output tensor: of a weight one linear, of a copied tensor some MiB.

    reads   what of the source it comes from
    stored  () -> a function that gives its bytes start..stop-1 before `added` is: scales are read, values are not
    at      where it begins in the tensor, for `added`
    """

    nbytes: int
    reads: tuple[TensorInfo, ...]
    stored: Callable[[], Read]
    added: Added | None
    at: int = 0

    def opened(self) -> Read:
        """A function that gives its bytes start..stop-1."""
        read, added = self.stored(), self.added
        return read if added is None else lambda start, stop: added.to(read(start, stop), self.at + start)


def spans_of(source: TensorSource, tensor: OtherTensor) -> Iterator[Span]:
    stored = tensor.stored
    if isinstance(stored, Weight):
        for expert in range(stored.shape[0] if len(stored.shape) == 3 else 1):
            reads = tuple(stored.one(expert).values())
            opened = functools.partial(_opened, source, stored, expert)
            yield Span(2 * math.prod(stored.shape[-2:]), reads, opened, tensor.added)
        return
    for start in range(0, stored.nbytes, COPIED):
        nbytes = min(COPIED, stored.nbytes - start)
        part = replace(stored, dtype="U8", shape=(nbytes,), start=stored.start + start, nbytes=nbytes)
        yield Span(nbytes, (part,), functools.partial(_mapped, source, part), tensor.added, start)


def _mapped(source: TensorSource, part: TensorInfo) -> Read:
    data = source.view(part)
    return lambda start, stop: data[start:stop]


def _opened(source: TensorSource, weight: Weight, expert: int) -> Read:
    matrix, transposed = weight.matrix(source, expert), weight.encoding.transposed

    def read(start: int, stop: int) -> Bytes:
        try:
            return _decode(matrix, transposed, start, stop)
        except kernels.NonFinite as error:
            of_expert = f" of expert {expert}" if len(weight.shape) == 3 else ""
            what = f"holds a value that is not finite at row {error.row}, column {error.column}{of_expert}"
            info = weight.values
            remedy = "download the file again or ask its publisher"
            raise InputError.of_tensor(info.name, what, remedy, source.path(info)) from error

    return read


def _decode(linear: Matrix, transposed: bool, start: int, stop: int) -> Bytes:
    """Return bytes start..stop-1 of a linear in BF16, or of its transpose. Raise kernels.NonFinite, with the place in
    the stored linear.
    """
    row = 2 * linear.shape[0 if transposed else 1]
    first, last = start // row, -(-stop // row)
    rows = linear.columns(first, last) if transposed else linear.rows(first, last)
    try:
        decoded = differences.decode_finite(rows)
    except kernels.NonFinite as error:
        raise kernels.NonFinite(rows.origin[0] + error.row, rows.origin[1] + error.column) from error
    bits = np.ascontiguousarray(decoded.T) if transposed else decoded
    return bits.reshape(-1).view(np.uint8)[start - first * row : stop - first * row]


def bytes_of(source: TensorSource, tensor: OtherTensor) -> Iterator[Bytes]:
    """The bytes of an output tensor, a few MiB at a time."""
    for span in spans_of(source, tensor):
        read = span.opened()
        for start in range(0, span.nbytes, STAGING_BYTES):
            yield np.ascontiguousarray(read(start, min(start + STAGING_BYTES, span.nbytes)))


def decoded_others(rest: OtherTensors) -> tuple[OtherTensor, ...]:
    """Everything but routed experts, under its own name; quantized weights are decoded."""
    return tuple(OtherTensor(name, stored) for name, stored in rest.tensors.items())
