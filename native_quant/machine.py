"""Resources of this machine: CPUs, NUMA nodes, memory and disk, read from /proc, /sys and the process itself.

Nothing here starts a process or needs a privilege. If a file is absent (containers, kernels without NUMA), functions
return a documented default. Sizes are in bytes. `root` is the folder of /proc and /sys; `cpus` are the CPU numbers to
count, by default those of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
NODES = "sys/devices/system/node"
# cgroup v1 spells "no limit" as the largest page-aligned int64; no real limit reaches an exbibyte.
UNLIMITED = 1 << 60


# ---- CPUs -----------------------------------------------------------------------------------------------------------

# The CPUs of the first thread when ktconvert is imported, as set for the process by taskset, numactl or a cpuset.
_CPUS_AT_IMPORT = frozenset(os.sched_getaffinity(os.getpid()))
# If one of these is set, GNU OpenMP (which torch uses) binds the thread that loads it to its first place.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def process_cpus() -> frozenset[int]:
    """Return the CPUs that this process may use, even if its threads are bound to some of them now.

    They are the CPUs of the first thread at import and, if OpenMP had bound it before, those of OpenMP's places.
    """
    return _CPUS_AT_IMPORT | (_openmp_cpus() if any(map(os.environ.get, _BINDING)) else frozenset())


def unbind_thread() -> None:
    """Let the calling thread run on all of `process_cpus`; a new thread inherits the CPUs of its creator."""
    with contextlib.suppress(OSError):  # best effort: a container may forbid it
        os.sched_setaffinity(0, process_cpus())


def _openmp_cpus() -> frozenset[int]:
    """Return the CPUs of the places of each loaded GNU OpenMP library."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    cpus: set[int] = set()
    for path in {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):
            gomp = ctypes.CDLL(path, os.RTLD_NOLOAD)
            for place in range(gomp.omp_get_num_places()):
                numbers = (ctypes.c_int * gomp.omp_get_place_num_procs(place))()
                gomp.omp_get_place_proc_ids(place, numbers)
                cpus.update(numbers)
    return frozenset(cpus)


def affinity(root: Path = ROOT) -> frozenset[int]:
    """Return the numbers of the CPUs that this process may use and that are online."""
    process = process_cpus()
    online = parse_list(read_text(root / "sys/devices/system/cpu/online") or "")
    return process & online or process


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU time that the cgroups allow, as a number of CPUs: the tightest limit, or None without one."""
    quotas = [quota for group in cgroups("cpu", root) if (quota := group_cpu_quota(group)) is not None]
    return min(quotas, default=None)


def usable_cpus(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """Return the number of threads that this process can keep busy, at least 1: its CPUs, capped by its quota."""
    count = len(affinity(root) if cpus is None else cpus)
    quota = cpu_quota(root)
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def limit_threads(requested: int | None) -> int:
    """Return a number of threads of this process, at most and by default (None) usable_cpus()."""
    usable = usable_cpus()
    return min(requested or usable, usable)


def physical_cores(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """Return the number of physical cores that this process can use; hyperthreads count once. At most `usable_cpus`."""
    cpus = affinity(root) if cpus is None else cpus
    cores = {_core_of(cpu, root) for cpu in cpus}
    return max(1, min(len(cores), usable_cpus(root, cpus)))


def cores_with_hyperthreads(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """Return the number of cores of which this process can use two or more hyperthreads."""
    cores = Counter(_core_of(cpu, root) for cpu in (affinity(root) if cpus is None else cpus))
    return sum(count > 1 for count in cores.values())


def numa_nodes(root: Path = ROOT, cpus: Collection[int] | None = None) -> tuple[int, ...]:
    """Return the NUMA nodes with CPUs that this process may use, in order; (0,) if the kernel shows none."""
    return tuple(node_cpus(root, cpus))


def machine_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """Return the NUMA nodes with CPUs, whether this process may use them or not; (0,) if the kernel shows none."""
    return tuple(_nodes(root)) or (0,)


def node_cpus(root: Path = ROOT, cpus: Collection[int] | None = None) -> dict[int, tuple[int, ...]]:
    """Return the numbers of the CPUs that this process may use, by NUMA node, in order."""
    cpus = frozenset(affinity(root) if cpus is None else cpus)
    nodes = {node: tuple(sorted(members & cpus)) for node, members in _nodes(root).items() if members & cpus}
    return nodes or {0: tuple(sorted(cpus))}


def core_cpus(root: Path = ROOT, cpus: Collection[int] | None = None) -> dict[int, tuple[int, ...]]:
    """Return one CPU number for each physical core of this process, by NUMA node."""
    by_node = node_cpus(root, cpus).items()
    first_cpus = {node: {_core_of(cpu, root): cpu for cpu in reversed(members)} for node, members in by_node}
    return {node: tuple(sorted(cores.values())) for node, cores in first_cpus.items()}


def pool_count(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """Return the number of thread pools, and so of NUMA slices, for this process: one per node, each with a core."""
    return min(len(numa_nodes(root, cpus)), physical_cores(root, cpus))


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name from /proc/cpuinfo, or the machine type if that has none."""
    return read_cpuinfo("model name", root) or os.uname().machine


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Return the enabled CPU features by their names in /proc/cpuinfo ("avx2", "amx_tile", ...)."""
    return frozenset((read_cpuinfo("flags", root) or "").split())


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    folders = (root / NODES).glob("node[0-9]*")
    lists = {int(folder.name.removeprefix("node")): read_text(folder / "cpulist") or "" for folder in folders}
    return {node: cpus for node, text in sorted(lists.items()) if (cpus := parse_list(text))}


def _core_of(cpu: int, root: Path) -> object:
    """Return a value that is the same for all hyperthreads of one core and differs between cores."""
    siblings = read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return cpu if siblings is None else siblings


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_total(root: Path = ROOT) -> int:
    """Return the machine's memory, regardless of container limits."""
    meminfo = read_table(root / "proc/meminfo")
    return meminfo.get("MemTotal", 0) * 1024 or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_available(root: Path = ROOT) -> int:
    """Return the memory that can be used before the kernel must swap or kill, on the machine and within the cgroups.

    Page cache counts as available in both, as in the kernel's MemAvailable: a cgroup is charged for every file read.
    """
    meminfo = read_table(root / "proc/meminfo")
    free = meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0)) * 1024
    available = [free or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in cgroups("memory", root):
        limit = group_memory_limit(group)
        usage = first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            stat = read_table(group / "memory.stat")
            # v1 counts the whole subtree under total_*; v2's plain names already do.
            cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            available.append(max(0, limit - max(0, usage - cache)))
    return min(available)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the tightest cgroup memory limit of this process, or None without one."""
    return min(
        (limit for group in cgroups("memory", root) if (limit := group_memory_limit(group)) is not None), default=None
    )


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how often the kernel killed a process of this cgroup (else of this machine) for lack of memory.

    None if that is unknown.
    """
    groups = cgroups("memory", root)
    files = (group / name for group in groups for name in ("memory.events", "memory.oom_control"))
    counts = (read_table(path).get("oom_kill") for path in (*files, root / "proc/vmstat"))
    return next((count for count in counts if count is not None), None)


def rss(root: Path = ROOT) -> int:
    """Return the current resident memory of this process, mapped files included."""
    fields = (read_text(root / "proc/self/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else peak_rss(root)


def peak_rss(root: Path = ROOT) -> int:
    """Return the largest resident memory that this process ever had, mapped files included."""
    # Not getrusage first: its ru_maxrss starts at the parent's size at the time of the exec.
    peak = read_table(root / "proc/self/status").get("VmHWM")
    return (peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def reset_peak_rss() -> None:
    """Let peak_rss count from now on, where the kernel supports that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """Return the NUMA nodes whose memory this process may use (cpusets), in order; (0,) if the kernel shows none."""
    nodes = parse_list(read_text(root / f"{NODES}/has_memory") or "")
    status = re.search(r"^Mems_allowed_list:(.*)$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    allowed = nodes.intersection(parse_list(status[1])) if status else nodes
    return tuple(sorted(allowed or nodes)) or (0,)


def nearest_memory(node: int, root: Path = ROOT) -> int:
    """Return the node itself if this process may use its memory, else the closest one of memory_nodes()."""
    candidates = memory_nodes(root)
    if node in candidates:
        return node
    online = sorted(parse_list(read_text(root / f"{NODES}/online") or ""))
    distances = map(int, (read_text(root / f"{NODES}/node{node}/distance") or "").split())
    far = dict(zip(online, distances, strict=False))
    return min(candidates, key=lambda other: (far.get(other, max(far.values(), default=0)), other))


def node_memory_available(root: Path = ROOT) -> dict[int, int]:
    """Return the memory that each NUMA node has free or in the page cache; {} if the kernel shows no nodes."""
    size = re.compile(r"^Node \d+ (?:MemFree|(?:Active|Inactive)\(file\)):\s*(\d+)", re.MULTILINE)
    nodes = sorted(parse_list(read_text(root / f"{NODES}/has_memory") or ""))
    texts = {node: read_text(root / f"{NODES}/node{node}/meminfo") or "" for node in nodes}
    return {node: sum(map(int, size.findall(text))) * 1024 for node, text in texts.items()}


# ---- names and processes --------------------------------------------------------------------------------------------


def host() -> str:
    """Return the name of this machine in locks and records: KTCONVERT_HOST if set; no white space, never empty."""
    return "-".join((os.environ.get("KTCONVERT_HOST") or os.uname().nodename).split())[:64] or "localhost"


def boot_id(root: Path = ROOT) -> str:
    """Return an identifier of the machine's current boot; `unknown` if the kernel does not tell."""
    return (read_text(root / "proc/sys/kernel/random/boot_id") or "").strip() or "unknown"


def pid_namespace() -> str:
    """Return an identifier of the namespace of this process's number; `unknown` if /proc is absent.

    Containers have namespaces of their own: process numbers can be compared only within one.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def process_start(pid: int, root: Path = ROOT) -> int:
    """Return the time when a process started, in clock ticks since boot; 0 if unknown."""
    state = _process_state(pid, root)
    return int(state[19]) if len(state) > 19 else 0


def process_alive(pid: int, start: int = 0, root: Path = ROOT) -> bool:
    """Return whether a process of this machine runs; zombies do not.

    start: its `process_start`, or 0 if unknown. A process with a different start time only reuses its number.
    """
    if not 0 < pid < 1 << 31:  # not a valid process number; it may come from a damaged file
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of a different user
        pass
    state = _process_state(pid, root)
    return not state or (state[0] not in "ZX" and start in (0, process_start(pid, root)))


def _process_state(pid: int, root: Path) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one (the state); the second, the name, may hold anything."""
    return (read_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()


# ---- disk -----------------------------------------------------------------------------------------------------------


def disk_free(path: Path) -> int:
    """Return the disk space that an unprivileged user may still fill at `path`, which need not exist."""
    stat = os.statvfs(nearest_existing(path))
    return stat.f_bavail * stat.f_frsize


def nearest_existing(path: Path) -> Path:
    """Return `path` itself, or the closest folder above it that exists."""
    path = Path(os.path.realpath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def file_size_limit() -> int | None:
    """Return the size of the largest file that this process may write (ulimit -f), or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def is_mount_point(path: Path, root: Path = ROOT) -> bool:
    """Return whether `path` is a mount point and so cannot be renamed; bind mounts count, too."""
    real = os.path.realpath(path)
    return any(point == real for _, point, _, _ in mounts(root)) or os.path.ismount(real)


# ---- the kernel's files in /proc and /sys ---------------------------------------------------------------------------


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_table(path: Path) -> dict[str, int]:
    """Return the lines `name[:] number [unit]` of a file as a dict; other lines are skipped."""
    lines = (line.replace(":", " ", 1).split() for line in (read_text(path) or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def parse_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format, such as `0-3,8`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(n for first, last in ranges for n in range(int(first), int(last or first) + 1))


def read_cpuinfo(key: str, root: Path) -> str | None:
    """Return the value of a key of /proc/cpuinfo, of the first processor that has it."""
    found = re.search(rf"^{key}[ \t]*:(.*)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return found[1].strip() if found else None


def mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (root inside the file system, mount point, type, options of the file system) for every mount; proc(5)."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount_text, separator, type_text = line.partition(" - ")
        mount_fields, type_fields = mount_text.split(" "), type_text.split(" ")
        if separator and len(mount_fields) >= 5 and len(type_fields) >= 3:
            root_path, mount_point = (
                re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), name) for name in mount_fields[3:5]
            )
            yield root_path, mount_point, type_fields[0], type_fields[2].split(",")


def cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups, its own first and then upwards: v1's of `controller`, then v2's.

    A container may see only the top of its own hierarchy, or nothing: then there are fewer folders, or missing ones.
    """
    paths: dict[str, str] = {}  # controller -> path; the unified hierarchy has the empty name
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, remainder = line.partition(":")
        names, _, path = remainder.partition(":")
        paths.update(dict.fromkeys(names.split(","), path))
    for name, kind in ((controller, "cgroup"), ("", "cgroup2")):
        hierarchies = [m for m in mounts(root) if m[2] == kind and (kind == "cgroup2" or name in m[3])]
        if name not in paths or not hierarchies:
            continue
        root_path, mount_point, _, _ = hierarchies[0]
        group_path = PurePosixPath(paths[name])
        # A bind-mounted hierarchy starts at `inside`; what is above it or outside the namespace (/..) is hidden.
        relative = group_path.relative_to(root_path) if group_path.is_relative_to(root_path) else PurePosixPath()
        parts = () if ".." in relative.parts else tuple(p for p in relative.parts if p != "/")
        top = root / mount_point.lstrip("/")
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def first_number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files of a cgroup that holds one, or None."""
    texts = ((read_text(group / name) or "").strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def group_memory_limit(group: Path) -> int | None:
    """Return the memory limit of a cgroup, or None if it sets none."""
    limit = first_number(group, "memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < UNLIMITED else None


def group_cpu_quota(group: Path) -> float | None:
    """Return the CPU time that a cgroup allows, as a number of CPUs, or None if it sets no limit."""
    words = (read_text(group / "cpu.max") or "").split()  # v2: "max 100000" or "150000 100000"
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = (first_number(group, f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # v1: quota -1 is none
    return quota / period if quota and period else None
