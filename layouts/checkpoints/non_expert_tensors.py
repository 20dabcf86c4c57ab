"""Tensors outside the routed experts: which of them become BF16, and the bytes that an output stores of each.

A tensor is copied, decoded to BF16 where it is quantized, or changed by an adapter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.adapter import Delta
from ktconvert.layouts.checkpoints.match import UNUSED_PATTERNS, find_unread_formats, is_mtp_tensor
from ktconvert.layouts.encodings import Weight, fp8
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.layouts.files.direct_file import STAGING_BYTES
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import differences
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16

SPAN_BYTES = 16 << 20  # bytes of a copied tensor that are prefetched and released together

Bytes = npt.NDArray[np.uint8]
Read = Callable[[int, int], Bytes]  # (start, stop) -> the bytes from start to stop - 1


# --- which tensors ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class NonExpertTensors:
    """All tensors of a checkpoint, or those outside its routed experts.

    tensors  tensors to copy, and quantized weights to decode to BF16, by their names in a BF16 release
    dropped  names of the scales of these weights
    notes    sentences on weights that need one
    """

    tensors: Mapping[str, TensorInfo | Weight]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def output_tensors(self) -> tuple[OutputTensor, ...]:
        """Return every tensor under its own name, as an output stores it."""
        return tuple(OutputTensor(name, stored) for name, stored in self.tensors.items())


def find_non_expert_tensors(
    source: TensorSource, expert_names: Collection[str], quantization: Quantization
) -> NonExpertTensors:
    """Find all tensors but those of the routed experts; quantized weights are decoded and their scales dropped.

    Raises UnsupportedError for a tensor that cannot be read, InputError for a weight without scales.
    """
    names = [name for name in source.tensors if name not in expert_names]
    decoded: dict[str, tuple[str, Weight]] = {}  # by the name of the tensor that holds the values
    dropped: set[str] = set()
    dtypes = {dtype for row in encodings.CHECKPOINT_ENCODINGS if row.quantized for dtype in row.dtypes}
    roles = encodings.tensor_roles()
    failed: dict[str, KTConvertError] = {}  # a scale may look like values without scales until its weight is seen
    for name in names:
        info = source.tensors[name]
        try:
            weight = _find_weight(source, info, quantization, roles) if info.dtype in dtypes else None
        except (InputError, UnsupportedError) as error:
            failed[name] = error.with_path(source.path(info))
            continue
        if weight is not None:
            decoded[name] = weight
            unused = (encodings.expand_pattern(pattern, weight[0]) for pattern in UNUSED_PATTERNS)
            dropped |= {t.name for t in weight[1].tensors.values()} | {n for n in unused if n in source.tensors}
    for name, failure in failed.items():
        if name not in dropped:
            raise failure
    for info, description in find_unread_formats(source.tensors, (name for name in names if name not in dropped)):
        where = ", and stands outside the routed experts" if expert_names else ""
        path, remedy = source.path(info), "use the model's BF16 or FP8 (E4M3) release."
        raise UnsupportedError(
            f"{path}: tensor {info.name!r} is {description}{where}; that is not an input yet: {remedy}"
        )
    tensors: dict[str, TensorInfo | Weight] = {}
    for name in names:
        if name not in dropped or name in decoded:
            key, stored = decoded.get(name, (name, source.tensors[name]))
            if key in tensors:
                problem = f"is stored twice, also as {name!r}"
                raise InputError.from_tensor(key, problem, "use a release that stores it once", source.root)
            tensors[key] = stored
    notes = [
        f"{name} is FP8 of an MTP layer and has no scale: its values are copied without scaling"
        for name, (_, weight) in decoded.items()
        if weight.encoding == fp8.UNSCALED
    ]
    return NonExpertTensors(tensors, tuple(sorted(dropped - decoded.keys())), tuple(notes))


def _find_weight(
    source: TensorSource, info: TensorInfo, declared: Quantization, roles: Mapping[str, str]
) -> tuple[str, Weight] | None:
    """Return the quantized weight whose values a tensor holds, with its name in BF16; None for any other tensor."""
    for template, candidates in encodings.find_weight_candidates(info, source.tensors, roles):
        tensors = {role: infos[0] for role, infos in candidates.items()}
        quantization = encodings.narrow_to_weight(source, tensors, declared)
        row = encodings.find_encoding(tensors, quantization)
        if row is None or not row.quantized or tensors[row.values_role] is not info:
            continue
        if tensors.keys() == {row.values_role} and info.dtype in fp8.UNSCALED.dtypes and len(info.shape) == 2:
            limit = claims.find_layer_count(source.config)
            # Loaders of MTP layers copy such a weight into one of BF16.
            row = fp8.UNSCALED if is_mtp_tensor(info.name, limit and limit[1]) else row
        for role in row.tensor_names:
            several = candidates.get(role, [])
            if len(several) > 1:
                two = f"{several[0].name!r} and {several[1].name!r}"
                raise InputError(f"tensors {two} both claim to be the {role} of one weight")
        own = {role: tensor for role, tensor in tensors.items() if role in row.tensor_names}
        weight = encodings.make_weight(row, template, own, quantization)
        weight.resolve_scheme()
        return template, weight
    return None


# --- their bytes -----------------------------------------------------------------------------------


class Addition(NamedTuple):
    """An adapter changes these rows and columns of a matrix by this."""

    rows: range
    columns: range
    delta: Delta


@dataclass(frozen=True)
class TensorDeltas:
    """Additions of an adapter to parts of a BF16 tensor [rows, columns]; each sum is rounded once.

    identity  their identity in fingerprints of units
    """

    columns: int
    additions: tuple[Addition, ...]
    identity: str

    def add_to(self, data: Bytes, start: int) -> Bytes:
        """Return bytes of the tensor from byte `start` on with the additions.

        Raises InputError for sums that are not finite.
        """
        bits = data.view(np.uint16)
        top, skipped = divmod(start // 2, self.columns)
        out = np.zeros((-(-(skipped + bits.size) // self.columns), self.columns), np.uint16)
        given = out.reshape(-1)[skipped : skipped + bits.size]
        given[:] = bits
        for rows, columns, delta in self.additions:
            begin, end = (min(max(-(-(row - rows.start) // rows.step), 0), len(rows)) for row in (top, top + len(out)))
            if begin == end:
                continue
            a, b = delta.matrices()
            part = out[rows.start + begin * rows.step - top :: rows.step][: end - begin, _as_slice(columns)]
            with np.errstate(over="ignore", invalid="ignore"):
                total = bf16_to_f32(part) + b[begin:end] @ a
            if not np.isfinite(total).all():
                raise InputError(f"{delta.a.name}: with it a weight is not finite; train again")
            part[:] = f32_to_bf16(total)
        return given.view(np.uint8)


def _as_slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output: its name there, and the stored tensor, or the weight that is decoded to BF16."""

    key: str
    stored: TensorInfo | Weight
    deltas: TensorDeltas | None = None

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
    """A run of bytes of an output tensor: one linear of a weight, some MiB of a copied tensor.

    reads        the source's tensors, or parts of them, that it comes from
    open_stored  () -> a function that returns bytes start..stop-1 without `deltas`; reads scales, but no values
    start        its first byte in the tensor
    """

    nbytes: int
    reads: tuple[TensorInfo, ...]
    open_stored: Callable[[], Read]
    deltas: TensorDeltas | None
    start: int = 0

    def open(self) -> Read:
        """Return a function that returns bytes start..stop-1 of the span."""
        read, deltas = self.open_stored(), self.deltas
        return read if deltas is None else lambda start, stop: deltas.add_to(read(start, stop), self.start + start)


def split_into_spans(source: TensorSource, tensor: OutputTensor) -> Iterator[Span]:
    stored = tensor.stored
    if isinstance(stored, Weight):
        for expert in range(stored.shape[0] if len(stored.shape) == 3 else 1):
            reads = tuple(stored.linear_tensors(expert).values())
            open_stored = functools.partial(_open_decoded, source, stored, expert)
            nbytes = 2 * math.prod(stored.shape[-2:])
            yield Span(nbytes, reads, open_stored, tensor.deltas, expert * nbytes)
        return
    for start in range(0, stored.nbytes, SPAN_BYTES):
        nbytes = min(SPAN_BYTES, stored.nbytes - start)
        info = msgspec.structs.replace(stored, dtype="U8", shape=(nbytes,), start=stored.start + start, nbytes=nbytes)
        yield Span(nbytes, (info,), functools.partial(_open_mapped, source, info), tensor.deltas, start)


def _open_mapped(source: TensorSource, info: TensorInfo) -> Read:
    data = source.view(info)
    return lambda start, stop: data[start:stop]


def _open_decoded(source: TensorSource, weight: Weight, expert: int) -> Read:
    matrix, transposed = weight.read_linear(source, expert), weight.encoding.transposed

    def read(start: int, stop: int) -> Bytes:
        try:
            return _decode(matrix, transposed, start, stop)
        except kernels.NonFinite as error:
            of_expert = f" of expert {expert}" if len(weight.shape) == 3 else ""
            problem = f"contains a value that is not finite at row {error.row}, column {error.column}{of_expert}"
            info = weight.values_tensor
            remedy = "download the file again or ask its publisher"
            raise InputError.from_tensor(info.name, problem, remedy, source.path(info)) from error

    return read


def _decode(linear: Matrix, transposed: bool, start: int, stop: int) -> Bytes:
    """Return bytes start..stop-1 of a linear in BF16, or of its transpose.

    Raises kernels.NonFinite with the place in the stored linear.
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


def read_chunks(source: TensorSource, tensor: OutputTensor) -> Iterator[Bytes]:
    """Yield the bytes of an output tensor, a few MiB at a time."""
    for span in split_into_spans(source, tensor):
        read = span.open()
        for start in range(0, span.nbytes, STAGING_BYTES):
            yield np.ascontiguousarray(read(start, min(start + STAGING_BYTES, span.nbytes)))
