"""Events of --json, one object per line: their names and the meaning of their fields.

`python tests/test_docs.py` writes docs/reference/json.md and docs/reference/events.schema.json from these types.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args

from msgspec import Meta, Struct

Output = Annotated[str, Meta(description="path of the output")]
Nbytes = Annotated[int, Meta(ge=0)]


class BaseEvent(Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base class of events, each of which is one line of JSON. Fields that are None are omitted."""


class NoteEvent(BaseEvent, tag="note"):
    """Information that needs no action."""

    text: Annotated[str, Meta(description="one sentence")]


class WarningEvent(NoteEvent, tag="warning"):
    """A problem that needs attention; the command continues."""


class HashedEvent(BaseEvent, tag="hashed"):
    """A file was hashed before work begins: an input file (`--verify-inputs`), or a file of an earlier run."""

    bytes: Annotated[Nbytes, Meta(description="size of the file")]


class BeginEvent(BaseEvent, tag="begin"):
    """Work starts: on the units, and before it, with `--method-map auto`, on measuring a sample of the weights."""

    total_bytes: Annotated[Nbytes, Meta(description="bytes of input")]
    done_bytes: Annotated[Nbytes, Meta(description="bytes of input that belong to finished units")]


class BaseUnitEvent(BaseEvent, kw_only=True):
    """Something happened to a unit."""

    output: Output
    unit: Annotated[str, Meta(description="name of the unit, usually a layer: `stage.unit`")]


class StartEvent(BaseUnitEvent, tag="start", kw_only=True):
    """Work on a unit starts."""

    host: Annotated[str | None, Meta(description="with `--executor` or `--part`: host of the worker")] = None
    pid: Annotated[int | None, Meta(description="with `--executor` or `--part`: process ID of the worker")] = None
    attempt: Annotated[str | None, Meta(description="with `--executor` or `--part`: name of the attempt")] = None


class DoneEvent(StartEvent, tag="done", kw_only=True):
    """A unit is finished and durable; or, with `--executor`, a layer has accepted a finished portion."""

    seconds: Annotated[float, Meta(description="duration")]
    bytes: Annotated[Nbytes, Meta(description="size of the unit's files")]
    stats: Annotated[dict[str, Any], Meta(description="[statistics](#stats) of the unit")]


class AttemptEvent(BaseUnitEvent, kw_only=True):
    """Something happened to a worker's attempt at a unit."""

    host: Annotated[str, Meta(description="host of the worker")]
    pid: Annotated[int, Meta(description="process ID of the worker")]
    attempt: Annotated[str, Meta(description="name of the attempt")]


class FailedEvent(AttemptEvent, tag="failed", kw_only=True):
    """A worker failed to finish a unit (only with `--executor`)."""

    why: Annotated[str, Meta(description="the reason, in one sentence")]


class LostEvent(AttemptEvent, tag="lost"):
    """A worker died or does not answer (only with `--executor`); another worker finished its unit, or nobody can."""


class ProgressEvent(BaseEvent, tag="progress"):
    """Progress, about every ten seconds."""

    done_bytes: Annotated[Nbytes, Meta(description="bytes of input that are done, including earlier runs")]
    total_bytes: Annotated[Nbytes, Meta(description="bytes of input")]
    bytes_per_second: Annotated[int, Meta(description="average speed of this run, in bytes of input")]
    eta_seconds: Annotated[int | None, Meta(description="remaining time at this speed; null before it is known")]
    unit: Annotated[str, Meta(description="the unit that started last")]
    units_done: Annotated[int, Meta(description="number of finished units")]
    units: Annotated[int, Meta(description="number of units")]
    rss: Annotated[Nbytes, Meta(description="resident memory of this process")]
    downloaded_bytes: Annotated[int | None, Meta(description="with `--stream`: bytes that were fetched")] = None
    held_bytes: Annotated[int | None, Meta(description="with `--stream`: bytes of the input on the disk")] = None


class PartEvent(BaseEvent, tag="part"):
    """The job share of this process is finished (only with `--part`)."""

    part: Annotated[str, Meta(description="R/N")]
    made: Annotated[int, Meta(description="number of units that this process converted")]
    there: Annotated[int, Meta(description="number of finished units of all job shares")]
    units: Annotated[int, Meta(description="number of units of all job shares")]


class MemoryEvent(BaseEvent, tag="memory"):
    """An estimate of the memory that `train` needs; `--dry-run` prints it, too."""

    bytes: Annotated[
        dict[str, int], Meta(description="bytes by use, and their sum as `together`; without the converted experts")
    ]


class StepEvent(BaseEvent, tag="step"):
    """An optimizer step of `train`, or the loss on --eval-dataset after it."""

    step: Annotated[int, Meta(description="number of the step, from 1")]
    steps: Annotated[int, Meta(description="number of steps")]
    loss: Annotated[float | None, Meta(description="loss on the step's tokens")] = None
    eval_loss: Annotated[float | None, Meta(description="loss on `--eval-dataset` after the step")] = None
    learning_rate: Annotated[float | None, Meta(description="learning rate of the step")] = None
    tokens_per_second: Annotated[float | None, Meta(description="average speed of this run")] = None
    eta_seconds: Annotated[int | None, Meta(description="remaining time at this speed")] = None


class FinishedEvent(BaseEvent, tag="finished"):
    """The output is complete."""

    output: Output
    bytes: Annotated[int | None, Meta(description="size of the weights; absent with `nothing_to_do`")] = None
    seconds: Annotated[float | None, Meta(description="duration of this run; absent with `nothing_to_do`")] = None
    peak_rss: Annotated[int | None, Meta(description="peak memory of this process; absent with `nothing_to_do`")] = None
    nothing_to_do: Annotated[bool, Meta(description="true if the output was complete before; otherwise absent")] = False


class ErrorEvent(BaseEvent, tag="error"):
    """The command fails; this is the last line."""

    message: Annotated[str, Meta(description="the message that stderr shows")]
    exit_code: Annotated[int, Meta(description="see [Exit codes](exit-codes.md)")]


Event: TypeAlias = (
    NoteEvent
    | WarningEvent
    | HashedEvent
    | BeginEvent
    | StartEvent
    | DoneEvent
    | FailedEvent
    | LostEvent
    | ProgressEvent
    | PartEvent
    | MemoryEvent
    | StepEvent
    | FinishedEvent
    | ErrorEvent
)
EVENTS: dict[str, type[Event]] = {str(event.__struct_config__.tag): event for event in get_args(Event)}
