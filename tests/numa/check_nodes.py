"""Which nodes: what a count means, what a list may hold, and that doctor, plan and inspect count the same ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from numa.see import run, seen_by
from numa.variants import Variant


@pytest.mark.on("four")
@pytest.mark.parametrize(("cpus", "count", "groups"), [([2, 3], 2, [2, 3]), ([1, 2], 2, [1, 2]), ([1, 2], 1, None)])
def test_a_count_without_nodes_takes_nodes_that_the_process_may_use(
    cpus: list[int], count: int, groups: list[int] | None
) -> None:
    seen = seen_by(
        f"""
        import torch
        from ktconvert.native_quant import KTMoEWrapper
        moe = KTMoEWrapper(0, 4, 2, 1024, 1024, None, 2, {count}, "", 512, method="AMXINT8")
        moe.load_weights_from_tensors(*(torch.randn(4, 1024, 1024) / 32 for _ in range(3)))
        say(nodes=moe.moe.pool.nodes)
        """,
        cpus=cpus,
    )
    assert len(seen["nodes"]) == count and set(seen["nodes"]) <= set(cpus)
    assert groups in (None, seen["nodes"])


def doctor(**how: Any) -> dict[str, Any]:
    done = run("ktconvert", "doctor", "--json", "--disk", "/dev/shm", **how)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_doctor_counts_cores_and_nodes(variant: Variant) -> None:
    flags = {"--kt-cpuinfer": sum(variant.workers.values()), "--kt-threadpool-count": len(variant.workers)}
    assert doctor()["kt_flags"] == flags


@pytest.mark.on("two", "four")
def test_doctor_under_a_quota_of_one_cpu(variant: Variant) -> None:
    group = Path("/sys/fs/cgroup/quota")
    group.mkdir()
    try:
        (group.parent / "cgroup.subtree_control").write_text("+cpu")
        (group / "cpu.max").write_text("100000 100000")
        assert doctor(cgroup=group)["kt_flags"] == {"--kt-cpuinfer": 1, "--kt-threadpool-count": 1}
    finally:
        group.rmdir()


@pytest.mark.on("two", "four")
def test_doctor_plan_and_inspect_count_the_same_nodes(source: Path, variant: Variant) -> None:
    for nodes in ([1], [0, 1]):
        cpus, count = variant.cpus(*nodes), len(nodes)
        assert doctor(cpus=cpus)["kt_flags"]["--kt-threadpool-count"] == count
        command = ("ktconvert", "cpu", "-i", source, "-o", "/dev/shm/out", "--quant-method", "int8", "--dry-run")
        for parts in (1, 2):
            plan = run(*command, "--threadpool-count", parts, cpus=cpus)
            assert plan.returncode == 0, plan.stderr
            told = re.search(r"pass --threadpool-count (\d)", plan.stdout + plan.stderr)
            assert (told and int(told[1])) == (None if parts == count else count), plan.stdout + plan.stderr
        inspected = run("ktconvert", "inspect", source, cpus=cpus).stdout
        assert f"--threadpool-count {count}" in inspected, inspected


@pytest.mark.on("two")
@pytest.mark.parametrize("nodes", [[7], [-1], [0, 0], [0, 7], "01", ["0", "1"]], ids=repr)
def test_a_pool_of_nodes_that_are_not_there_is_refused(nodes: Any) -> None:
    refused(f"Pool(4, numa_nodes={nodes!r})")


@pytest.mark.on("two")
@pytest.mark.parametrize("nodes", [[5, 6], [0, 7], [1, 1], "01", ["0", "1"]], ids=repr)
def test_a_wrapper_of_nodes_that_are_not_there_is_refused(nodes: Any) -> None:
    call = f'KTMoEWrapper(0, 4, 2, 1024, 1024, None, 4, 2, "", 512, method="AMXINT8", numa_nodes={nodes!r})'
    refused(f"(__import__('ktconvert.native_quant').native_quant.{call})")


def refused(call: str) -> None:
    """A call raises a ValueError that lists the nodes of this machine (0 and 1)."""
    seen = seen_by(
        f"""
        try:
            {call}
        except ValueError as error:
            say(told=str(error))
        else:
            say(told=None)
        """
    )
    assert seen["told"] and re.search(r"\b0\b.*\b1\b", seen["told"]), seen
