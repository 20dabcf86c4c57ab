"""Threads of the runtime use all CPUs of the process, each on its NUMA node, even if the caller is bound to one CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.pool import assign_cpus

CPUS = sorted(os.sched_getaffinity(0))
TWO_CPUS = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
FIRST, SECOND = CPUS[0], CPUS[-1]

# Each script binds threads of its own process, and therefore runs in a new one. `new_threads` calls a function and
# returns the threads that it started; `print_cpus` prints the CPUs of threads.
PRELUDE = """
import json, os, subprocess, sys, threading, time
from pathlib import Path

def cpus_of(thread):
    return sorted(os.sched_getaffinity(int(thread)))

def new_threads(work):
    before = set(os.listdir("/proc/self/task"))
    global pool
    pool = work()
    return sorted(set(os.listdir("/proc/self/task")) - before, key=int)

def print_cpus(threads, *more):
    print(json.dumps([[cpus_of(thread) for thread in threads], *more]))
"""
# Divides the machine's CPUs between two invented NUMA nodes, and defines a layer to compute.
TWO_NODES = """
import numpy as np
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool
for function in (machine.numa_nodes, machine.node_cpus, machine.core_cpus):
    function.__defaults__ = (Path(sys.argv[1]), None)
rng = np.random.default_rng(0)
bf16 = lambda *shape: (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
layer = bf16(8, 256, 256), bf16(8, 256, 256), bf16(8, 256, 256)
call = bf16(16, 256), rng.integers(0, 8, (16, 4)), rng.random((16, 4), np.float32)
expected = KTExperts.from_bf16(*layer, parts=2, pool=Pool(1)).forward(*call)
"""


def run(script: str, *arguments: object, prefix: tuple[object, ...] = (), **env: str) -> Any:
    """Run a script in a new process and return what it prints as JSON."""
    command = [*map(str, prefix), sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **env}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return json.loads(result.stdout)


def write_nodes(root: Path, *lists: str) -> Path:
    """Write the files in which Linux lists the CPUs of each NUMA node."""
    for number, cpus in enumerate(lists):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return root


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A machine whose node 1 has this machine's first CPU, and node 0 the last."""
    return write_nodes(tmp_path, str(SECOND), str(FIRST))


WORKERS = """
from ktconvert.native_quant.runtime.pool import Pool, get_shared_pool
threads = get_shared_pool().threads
print_cpus(new_threads(lambda: Pool(4)), threads)
"""
OPENMP = """
import ctypes
ctypes.CDLL(sys.argv[1]).omp_get_max_threads()
"""
OURS_FIRST = "import ktconvert.native_quant\n"


@pytest.fixture(scope="module")
def unbound() -> Any:
    """CPUs and number of threads that WORKERS prints in a process whose threads are not bound."""
    workers, threads = run(WORKERS)
    assert threads == machine.physical_cores()
    return [workers, threads]


@pytest.fixture(scope="module")
def openmp() -> Path:
    """torch's OpenMP library, which binds the thread that loads it, as `import torch` does."""
    torch = importlib.util.find_spec("torch")
    libraries = sorted(Path(torch.origin).parent.glob("lib/libgomp*")) if torch and torch.origin else []
    if not libraries:
        pytest.skip("torch comes without GNU OpenMP here")
    return libraries[0]


@TWO_CPUS
@pytest.mark.parametrize(("first", "bind"), [("", {"OMP_PROC_BIND": "true"}), (OURS_FIRST, {})])
def test_threads_use_all_cpus_if_openmp_bound_the_caller(
    first: str, bind: dict[str, str], openmp: Path, unbound: Any
) -> None:
    env = {"OMP_PLACES": "threads", **bind}
    bound = "assert len(cpus_of(0)) == 1, cpus_of(0)\n"
    assert run(first + OPENMP + bound + WORKERS, openmp, **env) == unbound
    narrow = ("taskset", "-c", FIRST)
    workers, threads = run(first + OPENMP + bound + WORKERS, openmp, prefix=narrow, **env)
    assert (workers, threads) == ([[FIRST]] * 3, 1)


@TWO_CPUS
def test_threads_use_all_cpus_if_the_caller_bound_itself(unbound: Any) -> None:
    assert run(WORKERS, prefix=("taskset", "-c", SECOND)) == [[[SECOND]] * 3, 1]  # the process has only this CPU
    bind = f"os.sched_setaffinity(0, [{FIRST}])\n"
    assert run(OURS_FIRST + bind + WORKERS) == unbound
    thread = f"""
def work():
    os.sched_setaffinity(0, [{FIRST}])
    exec(sys.argv[1], globals())
one = threading.Thread(target=work)
one.start()
one.join()
"""
    assert run(thread, WORKERS) == unbound


def assign(root: Path, cpus: Iterable[int], threads: int | list[int], node_numbers: tuple[int, ...] = (0, 1)) -> Any:
    """Return the CPUs of each thread, by NUMA node."""
    allowed = list(cpus)
    groups = assign_cpus(threads, node_numbers, machine.node_cpus(root, allowed), machine.core_cpus(root, allowed))
    return [[sorted(place) for place in group] for group in groups]


def test_threads_are_divided_by_cores(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, "0-2", "3")
    for number, expected in enumerate(([[[0]]], [[[0]], [[3]]], [[[0], [1]], [[3]]], [[[0], [1], [2]], [[3]]]), 1):
        assert assign(root, range(4), number) == expected
    assert [len(group) for group in assign(root, range(4), 8)] == [6, 2]
    assert assign(root, range(4), [1, 3], (1, 0)) == [[[3]], [[0], [1], [2]]]
    with pytest.raises(ValueError, match="3 counts of threads for 2 NUMA nodes"):
        assign(root, range(4), [1, 1, 1])
    for wrong in (0, -1, [0, 2], [4000, 4000], 10**12):
        with pytest.raises(ValueError):
            assign(root, range(4), wrong)


def test_more_threads_than_cores_stay_on_their_node(tmp_path: Path) -> None:
    root = write_nodes(tmp_path, "0-1", "2-3")
    assert assign(root, range(4), 5) == [[[0, 1]] * 3, [[2], [3]]]
    assert assign(root, range(4), 6, (1,)) == [[[2, 3]] * 6]
    # Only CPUs that the process may use count. On a single node, threads are not bound to cores.
    assert assign(root, (0, 2), 6) == [[[0]] * 3, [[2]] * 3]
    assert assign(root, (2, 3), 2, (1,)) == [[[2, 3]] * 2]


@TWO_CPUS
def test_caller_runs_on_its_node_during_a_forward(two_nodes: Path) -> None:
    """The caller gets its own CPUs back afterwards. If it is bound to a CPU of a different node, it stays there."""
    script = f"""
experts = KTExperts.from_bf16(*layer, parts=2, pool=Pool(2))
seen, going, looks = set(), True, 0
def watch():
    global looks
    while going:
        seen.add(tuple(cpus_of(os.getpid())))
        looks += 1
watcher = threading.Thread(target=watch)
watcher.start()
large_call = tuple(np.tile(array, (200, 1)) for array in call)
for _ in range(200):
    os.sched_setaffinity(0, [{FIRST}])
    os.sched_setaffinity(0, [{FIRST}, {SECOND}])
    seen.clear()
    experts.forward(*large_call)
    seen_unbound = set(seen)
    assert cpus_of(0) == [{FIRST}, {SECOND}]
    if ({SECOND},) in seen_unbound:
        break
os.sched_setaffinity(0, [{FIRST}])
count = looks
while looks < count + 2:  # until the watcher has seen the new CPUs
    time.sleep(0.001)
seen.clear()
experts.forward(*large_call)
seen_bound = set(seen)
going = False
watcher.join()
print(json.dumps([({SECOND},) in seen_unbound, sorted(seen_bound), cpus_of(0)]))
"""
    assert run(TWO_NODES + script, two_nodes) == [True, [[FIRST]], [FIRST]]


@TWO_CPUS
def test_moved_threads_return_between_forwards(two_nodes: Path) -> None:
    script = f"""
workers = new_threads(lambda: Pool([1, 2]))
experts = KTExperts.from_bf16(*layer, parts=2, pool=pool)
begin = [cpus_of(thread) for thread in workers]
shown = [begin]
for allowed in ("{FIRST},{SECOND}", "{SECOND}", "{FIRST},{SECOND}"):
    subprocess.run(["taskset", "-apc", allowed, str(os.getpid())], check=True, capture_output=True)
    shown.append([cpus_of(thread) for thread in workers])
    for _ in range(200):
        assert np.array_equal(experts.forward(*call), expected)
    shown.append([cpus_of(thread) for thread in workers])
print(json.dumps(shown))
"""
    one, two, both = [FIRST], [SECOND], [FIRST, SECOND]
    begin, moved, back, narrowed, obeyed, widened, again = run(TWO_NODES + script, two_nodes)
    assert begin == back == again == [one, one]
    assert moved == widened == [both, both]
    assert narrowed == obeyed == [two, two]


@TWO_CPUS
def test_a_group_takes_over_the_work_of_a_stopped_thread(two_nodes: Path) -> None:
    """The only thread of node 1 waits in a signal handler; the threads of node 0 do its work, with equal results."""
    script = """
import ctypes, signal
libc = ctypes.CDLL(None)
libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
worker = int(new_threads(lambda: Pool([2, 1]))[-1])
experts = KTExperts.from_bf16(*layer, parts=2, pool=pool)
def caught():
    text = Path(f"/proc/self/task/{worker}/status").read_text()
    blocked = next(line.split()[1] for line in text.splitlines() if line.startswith("SigBlk"))
    return bool(int(blocked, 16) >> (signal.SIGTRAP - 1) & 1)
libc.signal(signal.SIGTRAP, ctypes.cast(libc.pause, ctypes.c_void_p))
libc.signal(signal.SIGFPE, ctypes.cast(libc.abs, ctypes.c_void_p))
def send(number, arrived):
    assert libc.tgkill(os.getpid(), worker, number) == 0
    while caught() != arrived:
        time.sleep(0.001)
while Path(f"/proc/self/task/{worker}/stat").read_text().rpartition(")")[2].split()[0] != "S":
    time.sleep(0.001)  # until the thread sleeps: before, it may still hold work of an earlier job
send(signal.SIGTRAP, True)
equal = [np.array_equal(experts.forward(*call), expected) for _ in range(3)]
stood = caught()
send(signal.SIGFPE, False)
print(json.dumps([equal, stood, np.array_equal(experts.forward(*call), expected)]))
"""
    assert run(TWO_NODES + script, two_nodes) == [[True] * 3, True, True]


@TWO_CPUS
def test_a_conversion_uses_the_cpus_of_the_process(tmp_path: Path, example: Path) -> None:
    """Importing torch binds the caller if OMP_PROC_BIND is set; the conversion does not inherit that."""
    script = """
from ktconvert.pipeline.cli import main
from ktconvert.pipeline.stages import quantize_experts
quantize, seen = quantize_experts.quantize_slice, set()
def watched(*arguments):
    seen.add(tuple(cpus_of(threading.get_native_id())))
    return quantize(*arguments)
quantize_experts.quantize_slice = watched
bound, out, source = sys.argv[1:]
os.sched_setaffinity(threading.get_native_id(), {int(bound)})
sys.argv[1:] = ["cpu", "-i", source, "-o", out, "-q"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
print_cpus([], sorted(seen))
"""
    assert run(script, FIRST, tmp_path / "out", example)[1] == [CPUS]
