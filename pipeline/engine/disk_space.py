"""Whether disk and memory hold what a plan needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.units import Unit
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.ui.text import size

SLACK = 16 << 20  # bytes of disk for headers, index, manifest, card, journal and directory entries
CUTTING = ("max_shard_size", "max_tensors")  # settings that cut an output into smaller files


def require_disk(plan: Plan, paths: Paths, todo: Collection[Unit[Any]]) -> None:
    """Raise ResourceError where the disk cannot hold these units and the end, or files may not be as large."""
    needed = disk_needed(plan, todo)
    free = machine.disk_free(paths.root)
    if sum(needed.values()) > free:
        raise ResourceError(
            f"{paths.root}: {disk_sentence(needed)}, {size(free)} free; free some space or choose another --output."
        )
    limit = machine.file_size_limit()
    if limit is not None:
        _require_below(limit, plan, todo, paths)


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
    for _, path in plan.assembly.companions:
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
    """The sum, and what it consists of."""
    parts = [f"{size(nbytes)} {what}" for what, nbytes in needed.items() if nbytes]
    return f"{size(sum(needed.values()))} needed" + (f" ({', '.join(parts)})" if parts else "")


def fit_threads(plan: Plan, reporter: Reporter | None = None) -> int:
    """As many threads as asked for, or fewer that fit into memory. Raises ResourceError when one is too many."""
    given = plan.request.options.execution.threads
    budget = plan.request.options.execution.max_memory or machine.memory_available()
    threads = given
    while threads > 1 and plan.conversion.peak_memory(threads) > budget:
        threads -= 1
    if plan.conversion.peak_memory(threads) > budget:
        limit = "--max-memory" if plan.request.options.execution.max_memory else "free memory"
        raise ResourceError(
            f"one thread needs {size(plan.conversion.peak_memory(1))}, {limit} is {size(budget)}. {plan.remedies}"
        )
    if threads < given and reporter is not None:
        reporter.note(f"{threads} of {given} threads, so that memory stays below {size(budget)}")
    return threads
