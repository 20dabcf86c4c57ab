"""The kernel's files in /proc and /sys: text, tables, lists, mounts and cgroups, with a default where one is absent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# cgroup v1 spells "no limit" as the largest page-aligned int64; no real limit reaches an exbibyte.
UNLIMITED = 1 << 60


def read_text(path: Path) -> str | None:
    """A file's text, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_table(path: Path) -> dict[str, int]:
    """The lines `name[:] number [unit]` of a file as a dict; lines of another shape are left out."""
    table = {}
    for line in (read_text(path) or "").splitlines():
        words = line.replace(":", " ", 1).split()
        if len(words) > 1 and words[1].isdecimal():
            table[words[0]] = int(words[1])
    return table


def parse_list(text: str) -> frozenset[int]:
    """The kernel's list format, `0-3,8`, as numbers."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(n for first, last in ranges for n in range(int(first), int(last or first) + 1))


def read_cpuinfo(key: str, root: Path) -> str | None:
    """A line of /proc/cpuinfo, of the first processor that has it."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None


def mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """(root inside the mounted file system, mount point, type, options of the file system) of every mount; proc(5)."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if dash and len(left) >= 5 and len(right) >= 3:
            inside, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), name) for name in left[3:5])
            yield inside, point, right[0], right[2].split(",")


def cgroups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups, its own first and then upwards: v1's of `controller`, then v2's.

    A container may see only the top of its own hierarchy, or nothing: then the folders are fewer or do not exist.
    """
    ours: dict[str, str] = {}  # controller -> path; the unified hierarchy has the empty name
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        ours.update(dict.fromkeys(names.split(","), path))
    for name, kind in ((controller, "cgroup"), ("", "cgroup2")):
        hierarchies = [m for m in mounts(root) if m[2] == kind and (kind == "cgroup2" or name in m[3])]
        if name not in ours or not hierarchies:
            continue
        inside, point, _, _ = hierarchies[0]
        own = PurePosixPath(ours[name])
        # A bind-mounted hierarchy starts at `inside`; what is above it or outside the namespace (/..) is hidden.
        relative = own.relative_to(inside) if own.is_relative_to(inside) else PurePosixPath()
        parts = () if ".." in relative.parts else tuple(p for p in relative.parts if p != "/")
        top = root / point.lstrip("/")
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def first_number(group: Path, *names: str) -> int | None:
    """The number in the first of these files of a cgroup that holds one."""
    for name in names:
        text = (read_text(group / name) or "").strip()
        if text.isdecimal():
            return int(text)
    return None


def limit_of(group: Path) -> int | None:
    """The memory limit of a cgroup in bytes, or None where it sets none."""
    limit = first_number(group, "memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < UNLIMITED else None


def quota_of(group: Path) -> float | None:
    """How many CPUs' worth of time a cgroup allows, or None where it does not limit it."""
    words = (read_text(group / "cpu.max") or "").split()  # v2: "max 100000" or "150000 100000"
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = (first_number(group, f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # v1: quota -1 is none
    return quota / period if quota and period else None
