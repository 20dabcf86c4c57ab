"""Threads are as many as the cores of the nodes that the process may use, and stay on their node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from numa.see import parse_list, seen_by
from numa.variants import Variant

# Torch reads these when it is imported, and its OpenMP then pins the thread that imported it to the first place.
PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
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


def test_a_default_pool_has_a_thread_per_core_each_on_its_node(variant: Variant) -> None:
    seen = seen_by(POOL.format(pool="default_pool()"))
    assert seen["threads"] == sum(variant.workers.values())
    assert seen["nodes"] == list(variant.workers)
    if len(variant.workers) > 1:
        assert per_node(variant, seen) == variant.workers
        assert len({tuple(cpus) for cpus in seen["workers"]}) == len(seen["workers"]), seen  # a CPU each


@pytest.mark.on("two", "four", "asym")
@pytest.mark.parametrize("pool", ["default_pool()", "Pool(4)"])
def test_a_pinned_caller_does_not_narrow_the_pool(pool: str, variant: Variant) -> None:
    code = f"import torch; alone = len(os.sched_getaffinity(0)) == 1{POOL}".replace("say(", "say(alone=alone, ")
    seen = seen_by(code.format(pool=pool), env=PINNED)
    assert seen["alone"], "importing torch did not pin the caller: the check shows nothing"
    assert seen["threads"] == 4
    assert per_node(variant, seen) == variant.workers


@pytest.mark.on("two", "asym")
@pytest.mark.parametrize("env", [{}, PINNED], ids=["plain", "pinned by OpenMP"])
def test_taskset_is_honoured(env: dict[str, str], variant: Variant) -> None:
    for node, cores in variant.workers.items():
        code = POOL.format(pool="default_pool()")
        seen = seen_by(f"import torch\n{code}" if env else code, cpus=variant.cpus(node), env=env)
        assert (seen["threads"], seen["nodes"]) == (cores, [node])
        assert all(set(cpus) <= set(variant.cpus(node)) for cpus in seen["workers"]), seen


@pytest.mark.on("asym")
def test_threads_follow_the_cores_of_unequal_nodes(variant: Variant) -> None:
    for pool in ("Pool(4)", "Pool(4, numa_nodes=[0, 1])", "Pool(4, numa_nodes=[1, 0])"):
        seen = seen_by(POOL.format(pool=pool))
        assert per_node(variant, seen) == {0: 3, 1: 1}
    assert per_node(variant, seen_by(POOL.format(pool="Pool(2)"))) == {0: 1, 1: 1}


@pytest.mark.on("two", "four", "asym")
def test_more_threads_than_cpus_stay_on_their_node(variant: Variant) -> None:
    seen = seen_by(POOL.format(pool="Pool(9)"))
    assert seen["threads"] == 9
    count = per_node(variant, seen)
    assert sum(count.values()) == 9 and set(count) == set(variant.workers)


@pytest.mark.on("two", "asym")
def test_a_group_takes_over_the_work_of_one_that_gets_no_time(variant: Variant) -> None:
    """Node 1's CPUs are taken by others for good: node 0's threads do everything, and the result is the same."""
    code = """
    experts = pack(2)
    expected = experts.forward(*call(experts))
    with hogs([{cpus}]):
        got = experts.forward(*call(experts))
    say(equal=bool((got == expected).all()))
    """
    assert seen_by(code.format(cpus=", ".join(map(str, variant.cpus(1)))))["equal"]


@pytest.mark.on("two", "asym")
def test_every_thread_that_computes_is_on_its_node(variant: Variant) -> None:
    """The caller's work too: while a forward runs, either the caller is on the first group's node or it only waits."""
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
        for _ in range(20):
            experts.forward(*call(experts, 64))
        done = True
        watcher.join()
        me = os.getpid()
        say(caller=[list(cpus) for cpus in sorted({tuple(each[me]) for each in at_work})], after=threads()[me],
            workers=[cpus for thread, cpus in threads().items() if thread not in new.before], threads=4)
        """
    )
    assert seen["after"] == sorted(parse_list("0-3")), "the caller's own mask must come back"
    if len(seen["workers"]) < seen["threads"]:
        assert any(node_of(variant, cpus) == 0 for cpus in seen["caller"]), seen


@pytest.mark.on("two", "asym")
@pytest.mark.parametrize("disturb", ["taskset", "offline"])
def test_pinning_comes_back(disturb: str, variant: Variant) -> None:
    """After `taskset -ap`, and after a CPU went off and on, threads are where they were by the next forwards."""
    seen = seen_by(
        f"""
        new = New()
        pool = Pool(4)
        experts = pack(2, pool)
        experts.forward(*call(experts))
        before = new.cpus()
        if {disturb == "taskset"}:
            for thread in threads():
                os.sched_setaffinity(thread, range(4))
        else:
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
