"""Whether disk and memory hold what a plan needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.units import Unit
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import size

SLACK = 16 << 20  # bytes of disk for headers, index, manifest, card, journal and directory entries
CUTTING = ("max_shard_size", "max_tensors")  # settings that cut an output into smaller files


ToMake = tuple[Plan, Paths, Collection[Unit[Any]]]  # what is left of one output


@dataclass
class FileSystem:
    """What one has to hold. outputs: those on it; roots: their work directories; needed: what for -> bytes."""

    outputs: list[Path] = field(default_factory=list)
    roots: list[Path] = field(default_factory=list)
    needed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{disk_sentence(self.needed)}, {size(self.free)} free"

    @property
    def free(self) -> int:
        return machine.disk_free(self.roots[0])


def file_systems(to_make: Iterable[ToMake]) -> list[FileSystem]:
    """What the file systems have to hold, where these units of several outputs, and the end of each, are made."""
    found: dict[int, FileSystem] = {}
    for plan, paths, units in to_make:
        system = found.setdefault(machine.nearest_existing(paths.root).stat().st_dev, FileSystem())
        system.outputs.append(paths.output)
        system.roots.append(paths.root)
        system.needed.update(disk_needed(plan, units))
    return [*found.values()]


def require_disk(to_make: Sequence[ToMake]) -> None:
    """Raise ResourceError where a disk cannot hold these units and the end, or files may not be as large."""
    for system in file_systems(to_make):
        if sum(system.needed.values()) > system.free:
            roots = ", ".join(map(str, system.roots))
            raise ResourceError(f"{roots}: {system}; free some space or choose another --output.")
    limit = machine.file_size_limit()
    for plan, paths, units in to_make:
        if limit is not None:
            _require_below(limit, plan, units, paths)


def _require_below(limit: int, plan: Plan, todo: Iterable[Unit[Any]], paths: Paths) -> None:
    """Raise ResourceError where a shard or a companion would be larger than files may be (bytes)."""
    if limit < SLACK:
        raise ResourceError(
            f"{paths.root}: the file size limit of {size(limit)} (ulimit -f) is below {size(SLACK)}, which headers, "
            "index and manifest may take; raise it."
        )
    largest = max((unit.bytes_out for unit in todo if not unit.folder), default=0)
    if largest + SLACK > limit:
        cuts = next((name for name in CUTTING if name in plan.request.options.settings), None)
        smaller = "" if cuts is None else f" or set --{cuts.replace('_', '-')} lower"
        raise ResourceError(
            f"{paths.root}: a file of {size(largest)}, with {size(SLACK)} to spare for its header, is over the file "
            f"size limit of {size(limit)} (ulimit -f); raise it{smaller}."
        )
    for _, path in plan.companions:
        if path.stat().st_size > limit:
            raise ResourceError(
                f"{path}: {size(path.stat().st_size)} are over the file size limit of {size(limit)} (ulimit -f), and "
                "it is copied beside the weights; raise the limit."
            )


def disk_needed(plan: Plan, todo: Iterable[Unit[Any]]) -> dict[str, int]:
    """What making these units and the end takes of the disk, at most at any time: what for -> bytes."""
    todo = list(todo)
    chained = any(unit.stage == stage.name for stage in plan.stages if stage.chain for unit in todo)
    return {
        "of finished files": sum(unit.bytes_out + unit.side for unit in todo),
        "of files that exist only meanwhile": plan.scratch_bytes if chained else 0,
        "of companion files": plan.extra_bytes,
        "of files for another folder": sum(unit.bytes_out for unit in plan.side_units),
        "to spare for headers, index, manifest and journal": SLACK,
    }


def disk_sentence(needed: Mapping[str, int]) -> str:
    parts = [f"{size(nbytes)} {what}" for what, nbytes in needed.items() if nbytes]
    return f"{size(sum(needed.values()))} needed" + (f" ({', '.join(parts)})" if parts else "")


def fit_threads(plans: Sequence[Plan], reporter: Reporter | None = None) -> int:
    """As many threads as asked for, or fewer that fit into memory. Raises ResourceError when one is too many."""

    def peak(count: int) -> int:  # outputs made together take no more units at a time than one
        return max(plan.peak_memory(count) for plan in plans)

    execution = plans[0].request.options.execution
    given = threads = execution.threads
    budget = execution.max_memory or machine.memory_available()
    while threads > 1 and peak(threads) > budget:
        threads -= 1
    if peak(threads) > budget:
        limit = "--max-memory" if execution.max_memory else "free memory"
        raise ResourceError(f"one thread needs {size(peak(1))}, {limit} is {size(budget)}. {plans[0].remedies}")
    if threads < given and reporter is not None:
        reporter.note(f"{threads} of {given} threads, so that memory stays below {size(budget)}")
    return threads
