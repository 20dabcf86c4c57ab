"""The disk space that plans need, and refusals if it does not suffice."""

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
from ktconvert.pipeline.report.text import size

SLACK = 16 << 20  # bytes for headers, index, manifest, card, journal and directory entries

# The remaining units of one output.
OutputUnits = tuple[Plan, Paths, Collection[Unit[Any]]]


@dataclass
class FileSystem:
    """The needs of the outputs on one file system.

    outputs  the outputs
    roots    work directories of the outputs
    needed   purpose -> bytes
    """

    outputs: list[Path] = field(default_factory=list)
    roots: list[Path] = field(default_factory=list)
    needed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{disk_sentence(self.needed)}, {size(self.free)} free"

    @property
    def free(self) -> int:
        return machine.disk_free(self.roots[0])


def find_file_systems(remaining: Iterable[OutputUnits], *, with_workers: bool = False) -> list[FileSystem]:
    """Return the file systems of several outputs with their needs.

    with_workers  whether workers make portions of units
    """
    by_device: dict[int, FileSystem] = {}
    for plan, paths, units in remaining:
        device = machine.nearest_existing(paths.root).stat().st_dev
        system = by_device.setdefault(device, FileSystem())
        system.outputs.append(paths.output)
        system.roots.append(paths.root)
        system.needed.update(disk_needed(plan, units, with_workers=with_workers))
    return [*by_device.values()]


def require_disk(remaining: Sequence[OutputUnits], *, with_workers: bool = False) -> None:
    """Raise ResourceError if a disk is too small for the remaining units, or the limit on file sizes is too low."""
    for system in find_file_systems(remaining, with_workers=with_workers):
        if sum(system.needed.values()) > system.free:
            roots = ", ".join(map(str, system.roots))
            raise ResourceError(f"{roots}: {system}; free some space or choose a different --output.")
    limit = machine.file_size_limit()
    for plan, paths, units in remaining:
        if limit is not None:
            _require_file_sizes_below(limit, plan, units, paths)


def _require_file_sizes_below(limit: int, plan: Plan, units: Iterable[Unit[Any]], paths: Paths) -> None:
    """Raise ResourceError if a shard or a companion file would be larger than the limit on file sizes (bytes)."""
    if limit < SLACK:
        raise ResourceError(
            f"{paths.root}: the file size limit of {size(limit)} (ulimit -f) is below the {size(SLACK)} for headers, "
            "index and manifest; raise it."
        )
    largest = max((unit.bytes_out for unit in units if not unit.folder), default=0)
    if largest + SLACK > limit:
        flag = plan.options.shard_limit_flag
        second_remedy = "" if flag is None else f" or set {flag} lower"
        raise ResourceError(
            f"{paths.root}: a file of {size(largest)}, with {size(SLACK)} for its header, exceeds the file size "
            f"limit of {size(limit)} (ulimit -f); raise it{second_remedy}."
        )
    for _, path in plan.companions:
        if path.stat().st_size > limit:
            raise ResourceError(
                f"{path}: {size(path.stat().st_size)} to copy exceed the file size limit of {size(limit)} (ulimit "
                "-f); raise it."
            )


def disk_needed(plan: Plan, units: Iterable[Unit[Any]], *, with_workers: bool = False) -> dict[str, int]:
    """Return the most disk space that making these units and the output needs at any time: purpose -> bytes."""
    units = list(units)
    has_chain = any(unit.stage == stage.name for stage in plan.stages if stage.chain for unit in units)
    scratch = plan.needs.scratch_bytes + (plan.needs.portion_bytes if with_workers else 0)
    return {
        "of finished files": sum(unit.bytes_out + unit.side_bytes for unit in units),
        "of files that exist only meanwhile": scratch if has_chain else 0,
        "of fetched files": 0 if plan.download is None else plan.download.forecast(units).peak_bytes,
        "of companion files": plan.companion_bytes,
        "of files for another folder": sum(unit.bytes_out for unit in plan.side_units),
        "to spare for headers, index, manifest and journal": SLACK,
    }


def disk_sentence(needed: Mapping[str, int]) -> str:
    parts = [f"{size(nbytes)} {purpose}" for purpose, nbytes in needed.items() if nbytes]
    return f"{size(sum(needed.values()))} needed" + (f" ({', '.join(parts)})" if parts else "")
