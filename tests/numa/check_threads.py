"""Threads are as many as the cores of the nodes that the process may use, and stay on their node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from numa.see import parse_list, seen_by
from numa.variants import Variant

# With these set, torch's OpenMP pins the thread that loads it, with torch or alone, to the first place.
PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
LOAD_OPENMP = """
import ctypes, importlib.util
ctypes.CDLL(Path(importlib.util.find_spec("torch").origin).parent / "lib/libgomp.so.1")
"""
POOL = """
new = New()
pool = {pool}
say(threads=pool.threads, nodes=pool.nodes, workers=new.cpus())
"""


def node_of(variant: Variant, cpus: list[int]) -> int | None:
    """The one node that holds all these CPUs."""
    nodes = [node for node, (own, _) in variant.nodes.items() if set(cpus) <= parse_list(own)]
    return nodes[0] if nodes else None


def per_node(variant: Variant, seen: dict[str, Any]) -> dict[int, int]:
    """Node -> workers bound to it, the caller among them where it is one."""
    count = Counter(node_of(variant, cpus) for cpus in seen["workers"])
    assert None not in count, f"not bound to a node: {seen}"
    if len(seen["workers"]) < seen["threads"]:
        count[seen["nodes"][0]] += 1
    return dict(sorted(count.items()))


def test_a_default_pool_has_a_thread_per_core_each_on_its_node(variant):
    seen = seen_by(POOL.format(pool="shared_pool()"))
    assert seen["threads"] == sum(variant.workers.values())
    assert seen["nodes"] == list(variant.workers)
    if len(variant.workers) > 1:
        assert per_node(variant, seen) == variant.workers
        assert len({tuple(cpus) for cpus in seen["workers"]}) == len(seen["workers"]), seen  # a CPU each


@pytest.mark.on("two", "four", "asym")
def test_a_pinned_caller_does_not_narrow_the_pool(variant):
    seen = seen_by(
        LOAD_OPENMP
        + """
me = sorted(os.sched_getaffinity(0))
pools = []
for make in shared_pool, lambda: Pool(4):
    new = New()
    pool = make()
    pools.append({"threads": pool.threads, "nodes": pool.nodes, "workers": new.cpus()})
say(me=me, pools=pools)
""",
        env=PINNED,
    )
    assert len(seen["me"]) == 1, "OpenMP did not pin the caller: the check shows nothing"
    for pool in seen["pools"]:
        assert pool["threads"] == 4
        assert per_node(variant, pool) == variant.workers


@pytest.mark.on("two", "asym", "hole")
def test_taskset_is_honoured(variant):
    node = max(variant.workers)
    seen = seen_by(POOL.format(pool="shared_pool()"), cpus=variant.cpus(node))
    assert (seen["threads"], seen["nodes"]) == (variant.workers[node], [node])
    assert all(set(cpus) <= set(variant.cpus(node)) for cpus in seen["workers"]), seen


@pytest.mark.on("two", "asym")
def test_every_thread_that_computes_is_on_its_node(variant):
    """The caller too, which is the first thread of the first group, until the forward is over."""
    seen = seen_by(
        """
        new = New()
        experts = pack(2, Pool(4), width=2048)
        at_work = []
        def watch():
            while not done:
                at_work.append(threads())
        done = False
        import threading
        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(10):
            for cpus in [3], range(4):  # it starts on node 1
                os.sched_setaffinity(0, cpus)
            experts.forward(*call(experts, 64))
        done = True
        watcher.join()
        me = os.getpid()
        caller = [list(cpus) for cpus in sorted({tuple(each[me]) for each in at_work})]
        say(threads=4, nodes=[0, 1], workers=new.cpus(), caller=caller, after=threads()[me])
        """
    )
    assert per_node(variant, seen) == variant.workers
    assert any(node_of(variant, cpus) == 0 for cpus in seen["caller"]), seen
    assert seen["after"] == [0, 1, 2, 3], "the caller's own affinity must come back"


@pytest.mark.on("two", "asym")
def test_pinning_comes_back(variant):
    """After a CPU went off and on, threads are where they were by the next forwards."""
    seen = seen_by(
        """
        new = New()
        pool = Pool(4)
        experts = pack(2, pool)
        experts.forward(*call(experts))
        before = new.cpus()
        cpu3 = Path("/sys/devices/system/cpu/cpu3/online")
        cpu3.write_text("0")
        experts.forward(*call(experts))
        cpu3.write_text("1")
        for _ in range(3):
            experts.forward(*call(experts))
        say(before=before, after=new.cpus())
        """
    )
    assert seen["after"] == seen["before"]
