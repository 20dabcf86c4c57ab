"""Properties of the machine, read from invented /proc and /sys trees: both cgroup versions, two sockets, nothing."""

import os
import subprocess
from pathlib import Path

import pytest

from ktconvert.native_quant import machine

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {inside} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def two_sockets(root: Path) -> Path:
    """Write 2 sockets of 4 cores with 2 threads each; node 2 has only memory (as HBM or CXL has)."""
    files = {}
    for cpu in range(16):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu % 8},{cpu % 8 + 8}\n"
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15", "")):
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpus + "\n"
    return write_tree(root, files)


def test_hyperthreads_and_nodes_without_cpus_do_not_count(tmp_path):
    """Each core counts once, each node counts if it has CPUs, and each node with a thread has a pool."""
    root = two_sockets(tmp_path)
    assert machine.physical_cores(root, range(16)) == 8 and machine.physical_cores(root, [0, 8, 1]) == 2
    assert machine.cores_with_hyperthreads(root, range(16)) == 8
    assert machine.cores_with_hyperthreads(root, range(8)) == 0
    assert machine.usable_cpus(root, range(16)) == 16
    assert machine.machine_nodes(root) == machine.numa_nodes(root, range(16)) == (0, 1)
    assert machine.numa_nodes(root, cpus=[5]) == (1,)
    assert machine.node_cpus(root, (9, 1, 12, 0)) == {0: (0, 1, 9), 1: (12,)}
    assert machine.core_cpus(root, (9, 1, 12, 0)) == {0: (0, 1), 1: (12,)}
    assert machine.pool_count(root, range(16)) == 2 and machine.pool_count(root, range(4)) == 1
    quota = "sys/fs/cgroup/cpu.max"
    write_tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, quota: "100000 100000\n"})
    assert (machine.physical_cores(root, range(16)), machine.pool_count(root, range(16))) == (1, 1)
    (root / quota).write_text("150000 100000\n")
    assert (machine.physical_cores(root, range(16)), machine.pool_count(root, range(16))) == (2, 2)


def four_nodes(root: Path, allowed: str = "0-3") -> Path:
    """Write four nodes: node 1 has no memory, and node 2 is closest to it."""
    files = {
        "proc/self/status": f"Name:\tpython\nMems_allowed:\tf\nMems_allowed_list:\t{allowed}\n",
        "sys/devices/system/node/online": "0-3\n",
        "sys/devices/system/node/has_memory": "0,2-3\n",
        "sys/devices/system/node/node1/distance": "21 10 12 21\n",
    }
    for node in (0, 2, 3):
        lines = {"MemTotal": 8 << 20, "MemFree": node << 20, "Active(file)": 5, "Inactive(file)": 6, "Active(anon)": 7}
        text = "".join(f"Node {node} {name}:  {number:8} kB\n" for name, number in lines.items())
        files[f"sys/devices/system/node/node{node}/meminfo"] = text + f"Node {node} HugePages_Total:     0\n"
    return write_tree(root, files)


def test_memory_of_nodes_is_read(tmp_path):
    root = four_nodes(tmp_path)
    assert machine.memory_nodes(root) == (0, 2, 3)
    assert machine.node_memory_available(root) == {node: (node << 30) + (11 << 10) for node in (0, 2, 3)}
    assert [machine.nearest_memory(node, root) for node in range(4)] == [0, 2, 2, 3]
    root = four_nodes(tmp_path, allowed="0,3")  # a cpuset forbids the others
    assert machine.memory_nodes(root) == (0, 3)
    assert [machine.nearest_memory(node, root) for node in range(4)] == [0, 0, 0, 3]


BROKEN = {
    "proc/self/cgroup": "nonsense\n0::/a\n",
    "proc/self/mountinfo": "short line\n" + V2,
    "proc/meminfo": "MemAvailable: many kB\n",
    "proc/self/statm": "1\n",
    "sys/fs/cgroup/a/memory.max": "\n",
    "sys/fs/cgroup/a/cpu.max": "100000 0\n",
    "sys/fs/cgroup/a/memory.events": "oom_kill\n",
}


@pytest.mark.parametrize("files", [{}, BROKEN], ids=["empty", "broken files"])
def test_missing_files_give_defaults(tmp_path, files):
    write_tree(tmp_path, files)
    assert machine.usable_cpus(tmp_path, [0, 1, 2]) == machine.physical_cores(tmp_path, [0, 1, 2]) == 3
    assert machine.usable_cpus(tmp_path, []) == 1
    assert machine.numa_nodes(tmp_path) == machine.machine_nodes(tmp_path) == machine.memory_nodes(tmp_path) == (0,)
    assert machine.nearest_memory(0, tmp_path) == machine.nearest_memory(5, tmp_path) == 0
    assert machine.node_memory_available(tmp_path) == {}
    for unknown in (machine.cpu_quota, machine.memory_limit, machine.oom_kills):
        assert unknown(tmp_path) is None
    for known in (machine.memory_available, machine.memory_total, machine.rss, machine.peak_rss):
        assert known(tmp_path) > 0
    assert machine.cpu_name(tmp_path) == os.uname().machine
    assert machine.cpu_flags(tmp_path) == frozenset()


def test_the_tightest_cgroup_v2_level_counts(tmp_path):
    group = {
        "user.slice/cpu.max": "150000 100000\n",
        "user.slice/job/cpu.max": "max 100000\n",
        "user.slice/memory.max": f"{8 * GIB}\n",
        "user.slice/memory.current": f"{7 * GIB}\n",
        "user.slice/memory.stat": f"anon {GIB}\ninactive_file {3 * GIB}\nactive_file {2 * GIB}\n",
        "user.slice/job/memory.max": "max\n",
        "user.slice/job/memory.current": f"{GIB}\n",
        "user.slice/job/memory.events": "low 0\noom 2\noom_kill 1\n",
        "user.slice/memory.events": "oom_kill 9\n",
    }
    files = {"proc/self/cgroup": "0::/user.slice/job\n", "proc/self/mountinfo": V2}
    files["proc/meminfo"] = f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"
    root = write_tree(tmp_path, files | {f"sys/fs/cgroup/{name}": text for name, text in group.items()})
    assert machine.cpu_quota(root) == 1.5
    assert machine.usable_cpus(root, range(16)) == machine.physical_cores(root, range(16)) == 2
    assert (machine.memory_limit(root), machine.memory_total(root)) == (8 * GIB, 64 * GIB)
    assert machine.memory_available(root) == 6 * GIB  # 8 - (7 used - 5 page cache)
    assert machine.oom_kills(root) == 1


@pytest.mark.parametrize("inside", ["/", "/docker/abc"], ids=["host view", "mounted from the container's own group"])
def test_cgroup_v1_limits_are_read(tmp_path, inside):
    own = "/docker/abc".removeprefix(inside.rstrip("/")).strip("/")
    memory, cpu = (f"sys/fs/cgroup/{name}/{own}".rstrip("/") for name in ("memory", "cpu"))
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/self/mountinfo": "".join(V1.format(inside=inside, name=name) for name in ("cpu", "memory")) + V2,
            "proc/meminfo": f"MemAvailable: {60 << 20} kB\n",
            "proc/vmstat": "oom_kill 77\n",
            f"{memory}/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{memory}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{memory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
            f"{memory}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            f"{cpu}/cpu.cfs_quota_us": "350000\n",
            f"{cpu}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.memory_limit(root) == 4 * GIB and machine.memory_available(root) == 2 * GIB
    assert machine.usable_cpus(root, range(16)) == 4 and machine.oom_kills(root) == 3


def test_unlimited_cgroup_v1_and_hidden_paths_have_no_limit(tmp_path):
    files = {"proc/self/cgroup": "5:memory:/../other\n4:cpu:/\n", "proc/vmstat": "oom_kill 77\n"}
    files["proc/self/mountinfo"] = "".join(V1.format(inside="/", name=name) for name in ("cpu", "memory"))
    group = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"}
    group |= {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    root = write_tree(tmp_path, files | {f"sys/fs/cgroup/{name}": text for name, text in group.items()})
    assert machine.memory_limit(root) is None and machine.cpu_quota(root) is None
    assert machine.oom_kills(root) == 77  # the machine's counter, since the cgroup has none


def test_cpu_name_and_flags_are_read(tmp_path):
    text = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\n"
    root = write_tree(tmp_path, {"proc/cpuinfo": text})
    assert machine.cpu_name(root) == "AMD EPYC"
    assert machine.cpu_flags(root) == {"fpu", "avx2", "avx512f"}


def test_mount_points_are_found(tmp_path):
    target = tmp_path / "with space"
    target.mkdir()
    escaped = str(target).replace(" ", r"\040")
    # A bind mount from the same file system: same device, so that os.path.ismount does not see it.
    root = write_tree(
        tmp_path, {"proc/self/mountinfo": f"40 23 254:0 /data {escaped} rw shared:1 - ext4 /dev/vda rw\n"}
    )
    link = tmp_path / "link"
    link.symlink_to(target)
    assert machine.is_mount_point(target, root) and machine.is_mount_point(link, root)
    assert not machine.is_mount_point(tmp_path, root)
    assert not machine.is_mount_point(tmp_path / "absent", root) and machine.is_mount_point(Path("/"))
    assert machine.is_mount_point(Path("/proc"))


def test_this_machine_has_plausible_values():
    assert 1 <= machine.physical_cores() <= machine.usable_cpus() <= len(os.sched_getaffinity(0))
    assert 0 < machine.memory_available() <= machine.memory_total()
    assert 0 < machine.rss() <= machine.peak_rss() + (1 << 20) and machine.cpu_name()


def test_the_peak_of_memory_can_be_measured_again():
    """`up` does so between the measurement of the bandwidth and its conversion."""
    before = bytearray(1 << 28)
    before[:: 1 << 12] = b"x" * (1 << 16)
    peak = machine.peak_rss()
    del before
    machine.reset_peak_rss()
    assert machine.peak_rss() < peak - (1 << 27) or not os.access("/proc/self/clear_refs", os.W_OK)


def test_host_name_and_boot_id_are_read(tmp_path, monkeypatch):
    assert machine.host() == os.uname().nodename
    monkeypatch.setenv("KTCONVERT_HOST", " rack 3\tnode\n7 ")
    assert machine.host() == "rack-3-node-7"
    monkeypatch.setenv("KTCONVERT_HOST", "")
    assert machine.host() == os.uname().nodename
    root = write_tree(tmp_path, {"proc/sys/kernel/random/boot_id": "5f3c-9\n"})
    assert (machine.boot_id(root), machine.boot_id(tmp_path / "none")) == ("5f3c-9", "unknown")


def test_live_and_dead_processes_are_distinguished():
    own = os.getpid()
    start = machine.process_start(own)
    assert start > 0 and machine.process_alive(own)
    assert machine.process_alive(own, start)
    assert not machine.process_alive(own, start - 1)  # the id belonged to an earlier process
    assert machine.process_alive(1)
    assert not machine.process_alive(1 << 40) and not machine.process_alive(0)  # numbers from damaged files
    with subprocess.Popen(["sleep", "100"]) as child:
        assert machine.process_alive(child.pid, machine.process_start(child.pid))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not machine.process_alive(child.pid)  # a zombie
    assert not machine.process_alive(child.pid) and machine.process_start(child.pid) == 0
