"""Tensors outside the routed experts: streamed and copied bit for bit, or decoded to BF16 where they are quantized."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.adapter import Delta
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import STAGING_BYTES, DirectFile, aligned_buffer
from ktconvert.layouts.files.shards import ALIGNMENT, group_by_limit, plan_shard
from ktconvert.layouts.outputs import numa
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix
from ktconvert.pipeline.engine.threads import UNITS_AT_ONCE, in_order
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.stages.expert_stream import read_ahead
from ktconvert.quantizers import differences
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16

NAME = "carry_over"
TITLE = "copy tensors that are no routed experts"
VERSION = 1
DEFAULT_SHARD = 5 * 10**9  # bytes; what transformers writes
WINDOW = STAGING_BYTES  # bytes of a shard that a thread makes at a time
WINDOWS = 4  # of a unit that are being made or wait to be hashed
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
class CopyWork:
    source: TensorSource
    tensors: tuple[OtherTensor, ...]
    metadata: Mapping[str, str]


# How everything but routed experts is called in an output, by --non-experts.
CALLED: Mapping[str, Callable[[str], str]] = {"copy": numa.rename_non_expert, "keep": lambda name: name}


def not_experts(model: MoeModel, choice: str) -> tuple[OtherTensor, ...]:
    """Everything but routed experts, named by a row of CALLED. Raises InputError where two get one name."""
    if choice not in CALLED:
        return ()
    source = model.source
    taken = model.expert_tensor_names() | model.mtp_tensors
    by_key: dict[str, OtherTensor] = {}
    for name, info in source.tensors.items():
        if name in taken:
            continue
        key = CALLED[choice](name)
        if key in by_key:
            what = f"tensors {by_key[key].reads[0].name} and {name} would both be called {key}"
            remedy = "use --non-experts keep"
            raise InputError(f"{source.root}: {what}; {remedy}.")
        by_key[key] = OtherTensor(key, info)
    return tuple(by_key.values())


def choice_of(others: Collection[str]) -> str:
    """What --non-experts was, by the names of an output's tensors that are no routed experts."""
    if not others:
        return "skip"
    return "copy" if all(numa.rename_non_expert(name) == name for name in others) else "keep"


def decoded_others(rest: OtherTensors) -> tuple[OtherTensor, ...]:
    """Everything but routed experts, under its own name; quantized weights are decoded."""
    return tuple(OtherTensor(name, stored) for name, stored in rest.tensors.items())


def stage(
    source: TensorSource,
    tensors: Collection[OtherTensor],
    max_shard_size: int | None,
    metadata: Mapping[str, str],
    *,
    name: str = NAME,
    title: str = TITLE,
) -> Stage[CopyWork]:
    tensors = tuple(tensors)
    units = []
    for number, (start, stop) in enumerate(
        group_by_limit([t.entry.nbytes for t in tensors], max_shard_size or DEFAULT_SHARD)
    ):
        group = tensors[start:stop]
        params: list[tuple[str, object]] = [
            ("metadata", tuple(sorted(metadata.items()))),
            ("names", tuple(t.key for t in group)),
        ]
        decoded = tuple((t.key, t.stored.fit()) for t in group if isinstance(t.stored, Weight))
        params += [("decoded", decoded)] if decoded else []
        changed = tuple((t.key, t.added.identity) for t in group if t.added is not None)
        params += [("changed", changed)] if changed else []
        units.append(
            Unit(
                stage=name,
                key=f"{number:03d}",
                versions=(VERSION,),
                params=tuple(params),
                inputs=tuple(source.identity(info) for t in group for info in t.reads),
                bytes_in=sum(i.nbytes for t in group for i in t.reads),
                bytes_out=sum(t.entry.nbytes for t in group),
                work=CopyWork(source, group, metadata),
            )
        )
    return Stage(name, title, tuple(units), write_shard)


def peak_memory(tensors: Iterable[OtherTensor]) -> int:
    """Bytes for the windows of the units in flight, for decoding one, and for the largest scales."""
    stored = (tensor.stored for tensor in tensors)
    weights = {(w.encoding.name, w.shape): w for w in stored if isinstance(w, Weight)}.values()
    reading = max((weight.reading_bytes(False) for weight in weights), default=0)
    row = max((2 * weight.released_shape[-1] for weight in weights), default=0)
    return UNITS_AT_ONCE * WINDOWS * (WINDOW + (2 * (WINDOW + 2 * row) if weights else 0)) + 2 * UNITS_AT_ONCE * reading


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


@dataclass
class Window:
    """WINDOW bytes of a shard, or fewer at its end: what fills them, by their position, and the spans that end here."""

    runs: list[tuple[int, Read, int, int]] = field(default_factory=list)
    nbytes: int = 0
    ended: list[Span] = field(default_factory=list)

    def fill(self, buffer: Bytes) -> None:
        for at, read, start, stop in self.runs:
            buffer[at : at + stop - start] = read(start, stop)


def write_shard(unit: Unit[CopyWork], partial: Path, context: Context) -> Result:
    """One shard: windows are made and written by many threads, and hashed in order."""
    work = unit.work
    plan = plan_shard([t.entry for t in work.tensors], work.metadata)
    buffers = [aligned_buffer(min(WINDOW, plan.data_bytes)) for _ in range(min(WINDOWS, context.window))]
    spans = (span for tensor in work.tensors for span in spans_of(work.source, tensor))
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)

        def make(item: tuple[int, Window], buffer: Bytes) -> None:
            number, window = item
            window.fill(buffer)
            if window.nbytes % ALIGNMENT == 0:
                file.write_at(len(plan.header) + number * WINDOW, buffer[: window.nbytes])

        todo = enumerate(windows(read_ahead(work.source, spans, lambda span: span.reads)))
        for (_, window), buffer, _ in in_order(context.pool, todo, buffers, make):
            (file.append if window.nbytes % ALIGNMENT else file.skip)(buffer[: window.nbytes])
            for span in window.ended:
                for info in span.reads:
                    work.source.release(info)
                context.reporter.advance(sum(info.nbytes for info in span.reads))
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries))


def windows(spans: Iterable[Span]) -> Iterator[Window]:
    window = Window()
    for span in spans:
        read, start = span.opened(), 0
        while start < span.nbytes:
            stop = min(span.nbytes, start + WINDOW - window.nbytes)
            window.runs.append((window.nbytes, read, start, stop))
            window.nbytes += stop - start
            start = stop
            if window.nbytes == WINDOW and start < span.nbytes:
                yield window
                window = Window()
        window.ended.append(span)
        if window.nbytes == WINDOW:
            yield window
            window = Window()
    if window.ended:
        yield window


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
        for start in range(0, span.nbytes, WINDOW):
            yield np.ascontiguousarray(read(start, min(start + WINDOW, span.nbytes)))
