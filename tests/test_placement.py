"""Placement of the runtime's weights: the requested NUMA nodes, and those that the kernel reports (numa_maps).

The kernel's reports are real. A second node is simulated, and never requested.
"""

import json
import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import machine, placement
from ktconvert.native_quant.runtime import weights
from rig import shims
from rig.conversion import run_in_process
from rig.programs import python_output, run_python

needs_mbind = pytest.mark.skipif(placement.explain_denial() is not None, reason="this process may not place memory")

# A container's seccomp profile denies these calls; `numactl --membind=0` sets the policy that children inherit.
BEFORE_MAIN = """
    #include <errno.h>
    #include <linux/filter.h>
    #include <linux/seccomp.h>
    #include <stddef.h>
    #include <stdlib.h>
    #include <sys/prctl.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    __attribute__((constructor)) static void begin(void) {
        unsigned long node_0 = 1;
        if (getenv("MEMBIND") && syscall(SYS_set_mempolicy, atoi(getenv("MEMBIND")), &node_0, 64)) abort();
        if (!getenv("DENY")) return;
        struct sock_filter steps[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, atoi(getenv("DENY")) ? SYS_get_mempolicy : SYS_mbind, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) abort();
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) abort();
    }
"""
MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE = "1", "2", "3"

# Loads two layers and packs one, with a simulated node 1, and prints the policy of each block of weights.
PROGRAM = """
import json, sys, warnings
import numpy as np
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool
machine.memory_nodes = lambda root=None: (0, 1)
path, pool = sys.argv[1], Pool(2, numa_nodes=[machine.numa_nodes()[0]])
bits = [np.full(shape, 0x3C80, np.uint16) for shape in ((2, 128, 128), (2, 128, 128), (2, 128, 128))]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    layers = [KTExperts.load(path, 0, memory="copy", pool=pool), KTExperts.load(path, 1, memory="copy", pool=pool)]
    layers.append(KTExperts.from_bf16(*bits, method="AMXINT8", parts=2, pool=pool))
policies = {int(line.split()[0], 16): line.split()[1] for line in open("/proc/self/numa_maps")}
used = []
for layer in layers:
    weights = [weight for part, (weight, _) in layer._packed.arrays.items() if part.node == 0]
    used.append(policies[max(start for start in policies if start <= weights[0].ctypes.data)])
x = np.full((3, layers[0].hidden), 0x3F80, np.uint16)
out = layers[0].forward(x, np.tile(np.arange(8), (3, 1)), np.ones((3, 8), np.float32))
print(json.dumps([used, [str(each.message) for each in caught], out.tolist()]))
"""


@pytest.fixture(scope="module")
def output(packed_example: Any) -> Path:
    """Convert the bundled model."""
    path: Path = packed_example("int8", 2)
    return path


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the shim."""
    return shims.build(tmp_path_factory.mktemp("shim"), "before_main", BEFORE_MAIN)


def run_program(shim: Path, output: Path, **env: str) -> tuple[list[str], list[str], Any]:
    """Return the policies of the blocks, the warnings and the result of PROGRAM."""
    result = run_python(PROGRAM, output, preload=shim, **env)
    if result.returncode < 0:
        pytest.skip("this system lets no process set a memory policy or a seccomp filter")
    assert result.returncode == 0, result.stderr
    policies, reported, out = json.loads(result.stdout)
    return policies, reported, out


@pytest.fixture(scope="module")
def unrestricted(shim: Path, output: Path) -> tuple[list[str], list[str], Any]:
    """Run PROGRAM without restrictions."""
    return run_program(shim, output)


@needs_mbind
def test_weights_prefer_the_node_of_the_pool(unrestricted):
    assert unrestricted[:2] == (["prefer:0"] * 3, [])


@needs_mbind
@pytest.mark.parametrize(
    ("mode", "policy"), [(MPOL_PREFERRED, "prefer:0"), (MPOL_BIND, "bind:0"), (MPOL_INTERLEAVE, "interleave:0")]
)
def test_a_policy_of_the_user_is_kept(mode, policy, shim, output, unrestricted):
    assert run_program(shim, output, MEMBIND=mode) == ([policy] * 3, [], unrestricted[2])


@pytest.mark.parametrize(("deny", "call"), [("0", "mbind"), ("1", "get_mempolicy")])
def test_denied_placement_is_reported_once(deny, call, shim, output, unrestricted):
    policies, [reported], out = run_program(shim, output, DENY=deny)
    assert (policies, out) == (["default"] * 3, unrestricted[2])
    assert "(mbind: Operation not permitted;" in reported and "--cap-add SYS_NICE" in reported


def test_doctor_reports_denied_placement(shim, cli):
    code = (
        "from ktconvert.native_quant import machine; machine.memory_nodes = lambda root=None: (0, 1)\n"
        "from ktconvert.pipeline.cli.doctor import doctor; doctor()"
    )
    stdout = run_python(code, preload=shim, DENY="0").stdout
    assert stdout.count("warning: This process may not choose the NUMA nodes of its memory (mbind:") == 1
    assert "mbind" not in cli("doctor").stdout  # with one node, or without a refusal


@needs_mbind
@pytest.mark.parametrize(("mode", "is_bound"), [(MPOL_PREFERRED, False), (MPOL_BIND, True)])
def test_bound_memory_counts_only_its_node(mode, is_bound, shim):
    code = """
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime import weights
machine.memory_nodes = lambda root=None: (0, 1)
machine.node_memory_available = lambda: {0: 1 << 20, 1: 1 << 50}
print(weights.memory_available() == 1 << 20)
"""
    assert python_output(code, preload=shim, MEMBIND=mode) == f"{is_bound}\n"


@pytest.mark.parametrize(
    ("parts", "nodes", "homes"),
    [
        (2, (0,), [(0,), (0,)]),
        (2, (1, 0), [(1,), (0,)]),
        (4, (0, 1), [(0,), (1,), (0,), (1,)]),
        (1, (0, 1), [(0, 1)]),  # both groups read it: pages alternate
        (2, (0, 1, 2, 3), [(0, 2), (1, 3)]),
        (3, (0, 1), [(0,), (1,), (0,)]),
    ],
)
def test_slices_belong_to_the_nodes_of_their_threads(parts, nodes, homes, monkeypatch):
    monkeypatch.setattr(machine, "memory_nodes", lambda root=None: tuple(range(4)))
    assert [placement.slice_nodes(part, parts, nodes) for part in range(parts)] == homes


def test_shortages_are_counted_by_node(monkeypatch):
    monkeypatch.setattr(machine, "memory_nodes", lambda root=None: (0, 1))
    gib = 1 << 30
    available = {0: 12 * gib, 1: 8 * gib}
    assert placement.describe_shortages([8 * gib, 8 * gib], [0, 1], available) == ""
    assert (
        placement.describe_shortages([9 * gib, 9 * gib], [0, 1], available) == "node 1 has 8.00 GiB left for 9.00 GiB"
    )
    assert placement.describe_shortages([9 * gib, 9 * gib], [0], available) == "node 0 has 12.00 GiB left for 18.00 GiB"
    assert placement.describe_shortages([17 * gib], [0, 1], available) == "node 1 has 8.00 GiB left for 8.50 GiB"
    assert placement.describe_shortages([17 * gib], [0], {0: gib}) == ""  # with only one node, nothing can be elsewhere


@pytest.mark.parametrize(("available", "is_short"), [(1 << 30, False), (1 << 20, True)])
def test_a_plan_counts_memory_by_node(available, is_short, example, tmp_path, monkeypatch):
    for name in ("numa_nodes", "memory_nodes"):
        monkeypatch.setattr(machine, name, lambda *_: (0, 1))
    monkeypatch.setattr(machine, "node_memory_available", lambda: {0: 1 << 40, 1: available})
    options = ("--quant-method", "int8", "--threadpool-count", 2, "--dry-run")
    result = run_in_process("cpu", "-i", example, "-o", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("does not fit this machine's NUMA nodes (node 1 has 0.00 GiB left") == is_short, (
        result.stderr
    )


@needs_mbind
def test_a_shortage_is_reported_once(monkeypatch):
    monkeypatch.setattr(machine, "memory_nodes", lambda root=None: (0, 1))
    with pytest.warns(UserWarning, match=r"out: .*\(node 1 has 0.00 GiB left for 2.00 GiB\); the rest is on other"):
        weights.warn_of_shortages("out", [1 << 31] * 2, [0, 1], {0: 1 << 40, 1: 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights.warn_of_shortages("out", [1 << 31] * 2, [0, 1], {0: 1 << 40, 1: 0})


@needs_mbind
def test_pages_are_placed_and_gathered():
    node = machine.memory_nodes()[0]
    block = np.frombuffer(mmap.mmap(-1, 1 << 21), np.uint8)
    block[:] = numbers = np.arange(len(block), dtype=np.uint64).astype(np.uint8)
    placement.place(block, [node])
    placement.gather(block, node)
    assert np.array_equal(block, numbers)
    with pytest.raises(OSError):
        placement.place(block, [1000])  # no such node
    for wrong in ([-1], []):
        with pytest.raises(ValueError):
            placement.place(block, wrong)
