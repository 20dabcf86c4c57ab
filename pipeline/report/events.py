"""The events that work reports with --json, one object per line: what each is called, and what its fields mean.

docs/reference/json.md and docs/reference/events.schema.json are made of these types (`python tests/test_docs.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Union

from msgspec import Meta, Struct

Output = Annotated[str, Meta(description="the output's path")]
Nbytes = Annotated[int, Meta(ge=0)]


class AnyEvent(Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """One line. A field that is None is left out."""


class NoteEvent(AnyEvent, tag="note"):
    """Information that needs no action."""

    text: Annotated[str, Meta(description="one sentence")]


class WarningEvent(NoteEvent, tag="warning"):
    """A problem that needs attention; the work goes on."""


class HashedEvent(AnyEvent, tag="hashed"):
    """A file was hashed before work begins: of the input (`--verify-inputs`), or of what an earlier run finished."""

    bytes: Annotated[Nbytes, Meta(description="its size")]


class BeginEvent(AnyEvent, tag="begin"):
    """Work starts."""

    total_bytes: Annotated[Nbytes, Meta(description="bytes of input, in all")]
    done_bytes: Annotated[Nbytes, Meta(description="of these, what finished units account for")]


class StartEvent(AnyEvent, tag="start", kw_only=True):
    """A unit is begun."""

    output: Output
    unit: Annotated[str, Meta(description="what is made, usually a layer: `stage.unit`")]
    host: Annotated[str | None, Meta(description="with `--executor` or `--part`: the host that makes it")] = None
    pid: Annotated[int | None, Meta(description="likewise: its process number there")] = None
    attempt: Annotated[str | None, Meta(description="likewise: the name of the attempt")] = None


class DoneEvent(StartEvent, tag="done", kw_only=True):
    """A unit is finished and durable; or, with `--executor`, a layer has taken over a portion."""

    seconds: Annotated[float, Meta(description="how long it took")]
    bytes: Annotated[Nbytes, Meta(description="of its files")]
    stats: Annotated[dict[str, Any], Meta(description="what was measured on the way: [below](#stats)")]


class FailedEvent(StartEvent, tag="failed", kw_only=True):
    """With `--executor`: a worker could not make a unit."""

    why: Annotated[str, Meta(description="the reason, in a sentence")]


class LostEvent(StartEvent, tag="lost"):
    """With `--executor`: a worker died or stopped answering, and another one finished its unit; or it is given up."""


class ProgressEvent(AnyEvent, tag="progress"):
    """About every ten seconds."""

    done_bytes: Annotated[Nbytes, Meta(description="bytes of input that are done, those of earlier runs included")]
    total_bytes: Annotated[Nbytes, Meta(description="bytes of input, in all")]
    bytes_per_second: Annotated[int, Meta(description="of input, on average in this run")]
    eta_seconds: Annotated[int, Meta(description="time that is left at this rate")]
    unit: Annotated[str, Meta(description="the unit that was begun last")]
    units_done: Annotated[int, Meta(description="units that are finished")]
    units: Annotated[int, Meta(description="units, in all")]
    rss: Annotated[Nbytes, Meta(description="resident memory of this process")]


class PartEvent(AnyEvent, tag="part"):
    """With `--part`, at the end."""

    part: Annotated[str, Meta(description="R/N")]
    made: Annotated[int, Meta(description="units that this process has made")]
    there: Annotated[int, Meta(description="units of all parts that are there")]
    units: Annotated[int, Meta(description="units of all parts")]


class MemoryEvent(AnyEvent, tag="memory"):
    """Of `train`, before the first step, and of its `--dry-run`: an estimate."""

    bytes: Annotated[dict[str, int], Meta(description="beside the converted experts, by use, and `together`")]


class StepEvent(AnyEvent, tag="step"):
    """Of `train`: a step of the optimizer, or the loss of --eval-dataset after it."""

    step: Annotated[int, Meta(description="its number, from 1")]
    steps: Annotated[int, Meta(description="steps, in all")]
    loss: Annotated[float | None, Meta(description="of the step's tokens")] = None
    eval_loss: Annotated[float | None, Meta(description="of `--eval-dataset`, after the step")] = None
    learning_rate: Annotated[float | None, Meta(description="of the step")] = None
    tokens_per_second: Annotated[float | None, Meta(description="on average in this run")] = None
    eta_seconds: Annotated[int | None, Meta(description="time that is left at this rate")] = None


class FinishedEvent(AnyEvent, tag="finished"):
    """The output is complete."""

    output: Output
    bytes: Annotated[int | None, Meta(description="of the weights")] = None
    seconds: Annotated[float | None, Meta(description="of this run")] = None
    peak_rss: Annotated[int | None, Meta(description="the most resident memory of this process")] = None
    nothing_to_do: Annotated[bool, Meta(description="true, instead of the others, if it was complete before")] = False


class ErrorEvent(AnyEvent, tag="error"):
    """The last line of a failure."""

    message: Annotated[str, Meta(description="the sentence that stderr has")]
    exit_code: Annotated[int, Meta(description="see [Exit codes](exit-codes.md)")]


# All of the above, by what they are called.
KINDS: dict[str, type[AnyEvent]] = {
    str(kind.__struct_config__.tag): kind
    for kind in [*vars().values()]
    if isinstance(kind, type) and issubclass(kind, AnyEvent) and kind is not AnyEvent
}
Line: Any = Union[tuple(KINDS.values())]  # noqa: UP007  # a type for msgspec
