"""What this machine offers: CPUs, NUMA nodes, memory, disk; read from /proc, /sys and the process itself.

Nothing here starts a process or needs a privilege, and every function returns a documented default where a file
is absent (containers, kernels without NUMA, other vendors). Sizes are bytes. `root` is the folder that holds /proc and
/sys; tests pass a synthetic tree.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Collection
from pathlib import Path

from ktconvert.native_quant import own_cpus
from ktconvert.native_quant.kernel_files import (
    cgroups,
    first_number,
    limit_of,
    mounts,
    parse_list,
    quota_of,
    read_cpuinfo,
    read_table,
    read_text,
)

ROOT = Path("/")
NODES = "sys/devices/system/node"


# ---- CPUs -----------------------------------------------------------------------------------------------------------


def affinity(root: Path = ROOT) -> frozenset[int]:
    """The numbers of the CPUs that this process may use (own_cpus.py) and that are not switched off."""
    own, online = own_cpus.own_cpus(), parse_list(read_text(root / "sys/devices/system/cpu/online") or "")
    return own & online or own


def logical_cpus() -> int:
    """How many CPUs this process may use, hyperthreads counted, CPU time quotas not."""
    return len(affinity())


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' worth of time the cgroups allow (the tightest counts), or None where they do not limit it."""
    quotas = [quota for group in cgroups("cpu", root) if (quota := quota_of(group)) is not None]
    return min(quotas, default=None)


def allowed_cpus(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """How many threads this process can keep busy: its CPUs, or its CPU quota rounded up if that is less; at least 1.

    `cpus` are the CPU numbers to count, this process's affinity by default.
    """
    count = len(affinity(root) if cpus is None else cpus)
    quota = cpu_quota(root)
    if quota is not None:
        count = min(count, -int(-quota // 1))
    return max(1, count)


def physical_cores(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """How many physical cores this process can use: hyperthreads count once; never more than `allowed_cpus`."""
    cpus = affinity(root) if cpus is None else cpus
    cores = {_core_of(cpu, root) for cpu in cpus}
    return max(1, min(len(cores), allowed_cpus(root, cpus)))


def cores_with_hyperthreads(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """How many of the usable cores appear twice or more among the usable CPUs."""
    cpus = affinity(root) if cpus is None else cpus
    cores = [_core_of(cpu, root) for cpu in cpus]
    return sum(cores.count(core) > 1 for core in set(cores))


def numa_nodes(root: Path = ROOT, cpus: Collection[int] | None = None) -> tuple[int, ...]:
    """The memory nodes with CPUs that this process may use, in order; (0,) where the kernel shows none."""
    return tuple(node_cpus(root, cpus))


def machine_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """The memory nodes that have CPUs, whether this process may use these or not; (0,) where the kernel shows none."""
    return tuple(_nodes(root)) or (0,)


def node_cpus(root: Path = ROOT, cpus: Collection[int] | None = None) -> dict[int, tuple[int, ...]]:
    """The numbers of the CPUs that this process may use, by memory node, in order."""
    cpus = frozenset(affinity(root) if cpus is None else cpus)
    nodes = {node: tuple(sorted(members & cpus)) for node, members in _nodes(root).items() if members & cpus}
    return nodes or {0: tuple(sorted(cpus))}


def core_cpus(root: Path = ROOT, cpus: Collection[int] | None = None) -> dict[int, tuple[int, ...]]:
    """One CPU number per physical core of this process, by memory node; hyperthreads of a core count once."""
    nodes: dict[int, tuple[int, ...]] = {}
    for node, members in node_cpus(root, cpus).items():
        first = {_core_of(cpu, root): cpu for cpu in reversed(members)}
        nodes[node] = tuple(sorted(first.values()))
    return nodes


def pool_count(root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """How many pools of threads suit this process, and so NUMA parts: one per node, but each has a core at least."""
    return min(len(numa_nodes(root, cpus)), physical_cores(root, cpus))


def cpu_name(root: Path = ROOT) -> str:
    """The processor's name as in /proc/cpuinfo, or the machine type where that has none."""
    return read_cpuinfo("model name", root) or os.uname().machine


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """The CPU features enabled by processor and kernel, by their names in /proc/cpuinfo ("avx2", "amx_tile", ...).

    The kernel drops a flag whose register state it does not save, so a flag here implies the XCR0 bits as well.
    """
    return frozenset((read_cpuinfo("flags", root) or "").split())


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """The CPUs of each memory node that has any."""
    folders = (root / NODES).glob("node[0-9]*")
    lists = {int(folder.name.removeprefix("node")): read_text(folder / "cpulist") or "" for folder in folders}
    return {node: cpus for node, text in sorted(lists.items()) if (cpus := parse_list(text))}


def _core_of(cpu: int, root: Path) -> object:
    """A value that is equal for the hyperthreads of one core and differs between cores."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    # core_id alone repeats in every package, and on some machines in every die.
    ids = tuple((read_text(topology / name) or "").strip() for name in ("physical_package_id", "die_id", "core_id"))
    return ids if ids[2] else cpu


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_total(root: Path = ROOT) -> int:
    """The machine's memory, regardless of container limits."""
    meminfo = read_table(root / "proc/meminfo")
    return meminfo.get("MemTotal", 0) * 1024 or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_available(root: Path = ROOT) -> int:
    """How much memory can be used before the kernel must swap or kill, on the machine and within the cgroups.

    Page cache counts as available in both, as in the kernel's MemAvailable: a cgroup is charged for every file read.
    """
    meminfo = read_table(root / "proc/meminfo")
    free = meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0)) * 1024
    left = [free or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in cgroups("memory", root):
        limit = limit_of(group)
        usage = first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            stat = read_table(group / "memory.stat")
            # v1 counts the whole subtree under total_*; v2's plain names already do.
            cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            left.append(max(0, limit - max(0, usage - cache)))
    return min(left)


def memory_limit(root: Path = ROOT) -> int | None:
    """The tightest cgroup memory limit that this process is under, or None without one."""
    return min((limit for group in cgroups("memory", root) if (limit := limit_of(group)) is not None), default=None)


def oom_kills(root: Path = ROOT) -> int | None:
    """How often the kernel killed a process for lack of memory, or None if it keeps no count.

    Counted in this process's cgroup, else on the whole machine. Compare it with an earlier
    value; it restarts from 0 with the cgroup or the machine.
    """
    for group in cgroups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if (count := read_table(group / name).get("oom_kill")) is not None:
                return count
    return read_table(root / "proc/vmstat").get("oom_kill")


def rss(root: Path = ROOT) -> int:
    """This process's resident memory now, mapped files included."""
    fields = (read_text(root / "proc/self/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else peak_rss(root)


def peak_rss(root: Path = ROOT) -> int:
    """The most resident memory that this process ever had, mapped files included."""
    # Not getrusage first: its ru_maxrss starts at the parent's size at the time of the exec.
    peak = read_table(root / "proc/self/status").get("VmHWM")
    return (peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def memory_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """The NUMA nodes whose memory this process may use (all but those that its cpuset forbids), in order; (0,) where
    the kernel shows none.
    """
    nodes = parse_list(read_text(root / f"{NODES}/has_memory") or "")
    status = re.search(r"^Mems_allowed_list:(.*)$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    allowed = nodes.intersection(parse_list(status[1])) if status else nodes
    return tuple(sorted(allowed or nodes)) or (0,)


def nearest_memory(node: int, root: Path = ROOT) -> int:
    """The node itself if this process may use its memory, else the one of memory_nodes() that is closest to it."""
    candidates = memory_nodes(root)
    if node in candidates:
        return node
    online = sorted(parse_list(read_text(root / f"{NODES}/online") or ""))
    distances = map(int, (read_text(root / f"{NODES}/node{node}/distance") or "").split())
    far = dict(zip(online, distances, strict=False))
    return min(candidates, key=lambda other: (far.get(other, max(far.values(), default=0)), other))


def node_memory_available(root: Path = ROOT) -> dict[int, int]:
    """How much memory each NUMA node has free or in the page cache; {} where the kernel shows no nodes."""
    available = {}
    for node in sorted(parse_list(read_text(root / f"{NODES}/has_memory") or "")):
        text = read_text(root / f"{NODES}/node{node}/meminfo") or ""
        sizes = re.findall(r"^Node \d+ (?:MemFree|(?:Active|Inactive)\(file\)):\s*(\d+)", text, re.MULTILINE)
        available[node] = sum(map(int, sizes)) * 1024
    return available


# ---- names and processes --------------------------------------------------------------------------------------------


def host() -> str:
    """The name of this machine in locks and records; KTCONVERT_HOST replaces it. Without white space, never empty."""
    return "-".join((os.environ.get("KTCONVERT_HOST") or os.uname().nodename).split())[:64] or "localhost"


def boot_id(root: Path = ROOT) -> str:
    """What tells this start of the machine from every other; `unknown` where the kernel does not say."""
    return (read_text(root / "proc/sys/kernel/random/boot_id") or "").strip() or "unknown"


def pid_namespace() -> str:
    """Within which process numbers mean the same, as containers have their own; `unknown` where /proc is absent."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def process_start(pid: int, root: Path = ROOT) -> int:
    """When a process started, in clock ticks since boot; 0 where that cannot be seen."""
    state = _process_state(pid, root)
    return int(state[19]) if len(state) > 19 else 0


def process_alive(pid: int, start: int = 0, root: Path = ROOT) -> bool:
    """Whether a process of this machine runs: not ended, nor waiting for its parent to notice.

    start  its `process_start`, 0 if not known: a process that started at another time only has its number
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    state = _process_state(pid, root)
    return not state or (state[0] not in "ZX" and start in (0, process_start(pid, root)))


def _process_state(pid: int, root: Path) -> list[str]:
    """/proc/PID/stat from its third field on, the state; the second, the name, may hold anything."""
    return (read_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()


# ---- disk -----------------------------------------------------------------------------------------------------------


def disk_free(path: Path) -> int:
    """How much an unprivileged user may still write where `path` is or will be."""
    stat = os.statvfs(nearest_existing(path))
    return stat.f_bavail * stat.f_frsize


def nearest_existing(path: Path) -> Path:
    """`path` itself, or the closest folder above it that exists."""
    path = Path(os.path.realpath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def file_size_limit() -> int | None:
    """The largest file that this process may write (ulimit -f), or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def is_mount_point(path: Path, root: Path = ROOT) -> bool:
    """Whether something is mounted at `path`, bind mounts from the same file system too: it cannot be renamed."""
    real = os.path.realpath(path)
    return any(point == real for _, point, _, _ in mounts(root)) or os.path.ismount(real)
