"""The results of `plan` and `verify`: what they return of the plans and reports of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconvert.layouts.reprs import write_repr
from ktconvert.pipeline.report.text import plural, size

if TYPE_CHECKING:
    from ktconvert.pipeline.engine.plan import Plan
    from ktconvert.pipeline.verify.verify import Report

SHOWN_FACTS = ("architecture", "method", "numa")  # in the repr of a plan


@dataclass(frozen=True)
class KTUnit:
    """A file of weights in a plan.

    name       name in the messages and events of a run
    final      path below the output
    bytes_in   bytes of the checkpoint that are read
    bytes_out  size of the file in bytes
    """

    name: str
    final: str
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, repr=False)
class KTPlan:
    """The plan of one output, which `ktconvert.plan` returns.

    output   path of the output
    facts    properties of the output, as in `model` of its `manifest.json`: `architecture`, `method`, `bits`, `numa`,
             `layers`, `experts`, `hidden`, `intermediate` ...
    notes    remarks, such as options that have no effect
    serving  sentence with the command that serves the output; empty if no server loads it
    units    the files of weights
    """

    output: Path
    facts: Mapping[str, Any]
    notes: list[str]
    serving: str
    units: list[KTUnit]

    def __repr__(self) -> str:
        """Return output, model, method, the number and size of the files, and notes."""
        facts = {name: self.facts[name] for name in SHOWN_FACTS if name in self.facts}
        units = f"{plural(len(self.units), 'file')}, {size(sum(unit.bytes_out for unit in self.units))}"
        return write_repr(self, output=str(self.output), **facts, units=units, notes=self.notes)


@dataclass(frozen=True, repr=False)
class KTCheck:
    """A check of a report.

    name      name of the check: `files`, `tensors`, `hashes`, `source` ...
    state     `ok`, `failed`, or `skipped` if the check could not be made: the notes say why
    result    sentence about the check, if it found no problem
    problems  problems, one sentence each
    notes     remarks
    remedy    advice about the problems
    """

    name: str
    state: str
    result: str
    problems: list[str]
    notes: list[str]
    remedy: str

    def __repr__(self) -> str:
        """Return the name, the state, and the result, the problems or the notes."""
        shown = {"failed": "problems", "skipped": "notes"}.get(self.state, "result")
        return write_repr(self, name=self.name, state=self.state, **{shown: getattr(self, shown)})


@dataclass(frozen=True)
class KTProjectionError:
    """The measured error of a projection in a layer. The names are those of `ktconvert verify --json`.

    layer           number of the layer
    projection      `gate`, `up` or `down`
    experts         number of measured experts
    relative_error  relative L2 error over these experts
    cosine          cosine over these experts
    worst_expert    the expert with the largest error
    worst_relative_error
                    its relative L2 error
    """

    layer: int
    projection: str
    experts: int
    relative_error: float
    cosine: float
    worst_expert: int
    worst_relative_error: float


@dataclass(frozen=True, repr=False)
class KTReport:
    """The report of a verification, which `ktconvert.verify` returns. It is true if no check failed.

    output    path of the output
    ok        whether no check failed; `bool(report)` is the same
    sentence  the first problem, the number of others and the remedy; `None` without problems
    problems  all problems
    notes     all remarks
    against   path or hub id of the checkpoint or output that was compared; `None` without one
    checks    the checks, in the order in which they ran
    errors    measured errors of each projection in each layer; empty unless `against` is a checkpoint
    """

    output: Path
    ok: bool
    sentence: str | None
    problems: list[str]
    notes: list[str]
    against: str | None
    checks: list[KTCheck]
    errors: list[KTProjectionError]

    def __repr__(self) -> str:
        """Return output, source, the result of each check, and the first problem."""
        checks = [
            f"{each.name}: {plural(len(each.problems), 'problem') if each.problems else each.state}"
            for each in self.checks
        ]
        failure: dict[str, Any] = {} if self.ok else {"sentence": self.sentence}
        return write_repr(self, output=str(self.output), ok=self.ok, against=self.against, checks=checks, **failure)

    def __bool__(self) -> bool:
        return self.ok


def describe_plan(plan: Plan, rename: Callable[[str], str]) -> KTPlan:
    """Return the result for a plan.

    rename  writes a message for callers in Python
    """
    units = [KTUnit(each.name, each.final, each.bytes_in, each.bytes_out) for each in plan.units]
    return KTPlan(plan.options.output, dict(plan.facts), list(map(rename, plan.notes)), plan.serving, units)


def describe_report(report: Report, rename: Callable[[str], str]) -> KTReport:
    """Return the result for a report.

    rename  writes a message for callers in Python
    """

    def rename_all(texts: Sequence[str]) -> list[str]:
        return list(map(rename, texts))

    return KTReport(
        output=report.output.root,
        ok=report.ok,
        sentence=None if report.sentence is None else rename(report.sentence),
        problems=rename_all(report.problems),
        notes=rename_all(report.notes),
        against=report.against,
        checks=[
            KTCheck(
                name=each.name,
                state=each.state,
                result=each.result,
                problems=rename_all(each.problems),
                notes=rename_all(each.notes),
                remedy=rename(each.remedy),
            )
            for each in report.checks
        ],
        errors=[KTProjectionError(**each.document()) for each in report.errors],
    )
