"""Non-expert tensors, streamed and copied bit for bit, or decoded to BF16 if they are quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import Bytes, OutputTensor, Read, Span, split_into_spans
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import STAGING_BYTES, DirectFile, allocate_aligned
from ktconvert.layouts.files.shards import ALIGNMENT, group_by_limit, plan_shard
from ktconvert.layouts.outputs import numa
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.pipeline.engine.threads import UNITS_AT_ONCE, run_in_order
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.stages.expert_files import read_ahead

NAME = "carry_over"
TITLE = "copy non-expert tensors"
VERSION = 1
DEFAULT_SHARD = 5 * 10**9  # bytes; the default of transformers
WINDOW = STAGING_BYTES  # bytes of a shard that a thread makes at once
WINDOWS = 4  # windows of a unit in progress: being made, or waiting to be hashed


@dataclass(frozen=True)
class CopyWork:
    """The work of a unit: tensors of a shard.

    metadata  metadata of the shard
    """

    source: TensorSource
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]


# The names of non-expert tensors in an output, by --non-experts.
RENAMES: Mapping[str, Callable[[str], str]] = {"copy": numa.rename_non_expert, "keep": lambda name: name}


def select_non_experts(model: MoeModel, choice: str) -> tuple[OutputTensor, ...]:
    """Return the non-expert tensors with their names for a choice of --non-experts; none for "skip".

    Raises InputError if two tensors would get the same name.
    """
    if choice not in RENAMES:
        return ()
    source = model.source
    experts = model.expert_tensor_names() | model.mtp_tensors
    by_key: dict[str, OutputTensor] = {}
    for name, info in source.tensors.items():
        if name in experts:
            continue
        key = RENAMES[choice](name)
        if key in by_key:
            problem = f"tensors {by_key[key].reads[0].name} and {name} would both be named {key}"
            raise InputError(f"{source.root}: {problem}; use --non-experts keep.")
        by_key[key] = OutputTensor(key, info)
    return tuple(by_key.values())


def infer_choice(others: Collection[str]) -> str:
    """Return the value of --non-experts that gave an output's non-expert tensors these names."""
    if not others:
        return "skip"
    return "copy" if all(numa.rename_non_expert(name) == name for name in others) else "keep"


def make_stage(
    source: TensorSource,
    tensors: Collection[OutputTensor],
    max_shard_size: int | None,
    metadata: Mapping[str, str],
    *,
    name: str = NAME,
    title: str = TITLE,
) -> Stage[CopyWork]:
    """Return the stage that writes these tensors into shards."""
    tensors = tuple(tensors)
    units = []
    groups = group_by_limit([tensor.entry.nbytes for tensor in tensors], max_shard_size or DEFAULT_SHARD)
    for number, (start, stop) in enumerate(groups):
        group = tensors[start:stop]
        params: list[tuple[str, object]] = [
            ("metadata", tuple(sorted(metadata.items()))),
            ("names", tuple(t.key for t in group)),
        ]
        decoded = tuple((t.key, t.stored.resolve_scheme()) for t in group if isinstance(t.stored, Weight))
        params += [("decoded", decoded)] if decoded else []
        changed = tuple((t.key, t.deltas.identity) for t in group if t.deltas is not None)
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


def peak_memory(tensors: Iterable[OutputTensor]) -> int:
    """Return the bytes for the windows of the units in flight, for decoding one, and for the largest scales."""
    stored = (tensor.stored for tensor in tensors)
    weights = {(weight.encoding.name, weight.shape): weight for weight in stored if isinstance(weight, Weight)}.values()
    scales_bytes = max((weight.memory_for_reading(False) for weight in weights), default=0)
    row_bytes = max((2 * weight.released_shape[-1] for weight in weights), default=0)
    decoding_bytes = 2 * (WINDOW + 2 * row_bytes) if weights else 0
    return UNITS_AT_ONCE * (WINDOWS * (WINDOW + decoding_bytes) + 2 * scales_bytes)


@dataclass
class Window:
    """WINDOW bytes of a shard, or fewer at its end.

    runs   (position, read function, start, stop) of the bytes that fill it
    ended  the spans that end in it
    """

    runs: list[tuple[int, Read, int, int]] = field(default_factory=list)
    nbytes: int = 0
    ended: list[Span] = field(default_factory=list)

    def read_into(self, buffer: Bytes) -> None:
        """Read the bytes of the window into a buffer."""
        for position, read, start, stop in self.runs:
            buffer[position : position + stop - start] = read(start, stop)


def write_shard(unit: Unit[CopyWork], partial: Path, context: Context) -> Result:
    """Write one shard: many threads make and write windows, which are hashed in order."""
    work = unit.work
    plan = plan_shard([t.entry for t in work.tensors], work.metadata)
    buffers = [allocate_aligned(min(WINDOW, plan.data_bytes)) for _ in range(min(WINDOWS, context.window))]
    spans = (span for tensor in work.tensors for span in split_into_spans(work.source, tensor))
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)

        def write_window(item: tuple[int, Window], buffer: Bytes) -> None:
            number, window = item
            window.read_into(buffer)
            if window.nbytes % ALIGNMENT == 0:
                file.write_at(len(plan.header) + number * WINDOW, buffer[: window.nbytes])

        numbered = enumerate(split_into_windows(read_ahead(work.source, spans, lambda span: span.reads)))
        for (_, window), buffer, _ in run_in_order(context.pool, numbered, buffers, write_window):
            if window.nbytes % ALIGNMENT:
                file.append(buffer[: window.nbytes])
            else:  # written by the thread, but not hashed yet
                file.skip(buffer[: window.nbytes])
            for span in window.ended:
                for info in span.reads:
                    work.source.release(info)
                context.reporter.advance(sum(info.nbytes for info in span.reads))
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries))


def split_into_windows(spans: Iterable[Span]) -> Iterator[Window]:
    """Yield the windows of a shard whose tensors consist of these spans."""
    window = Window()
    for span in spans:
        read = span.open()
        start = 0
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
