"""Nodes and cores count alike for pools, doctor, plan and inspect. Also a conversion on tmpfs."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from numa.processes import run, run_program
from numa.variants import Variant, parse_list

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/qwen3-moe-small"
SHM = Path("/dev/shm")


def doctor(**restrictions: Any) -> dict[str, Any]:
    result = run("ktconvert", "doctor", "--json", "--disk", SHM, **restrictions)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_doctor_counts_cores_and_nodes(variant):
    document = doctor()
    flags = {"--kt-cpuinfer": sum(variant.workers.values()), "--kt-threadpool-count": len(variant.workers)}
    assert document["kt_flags"] == flags
    assert not [sentence for sentence in document["warnings"] if "mbind" in sentence]


@pytest.mark.on("two", "four")
def test_doctor_plan_and_inspect_report_the_same_nodes(variant):
    cpus = variant.cpus(1)
    assert doctor(cpus=cpus)["kt_flags"]["--kt-threadpool-count"] == 1
    options = ("-i", EXAMPLE, "-o", SHM / "out", "--quant-method", "int8", "--threadpool-count", 2, "--dry-run")
    plan = run("ktconvert", "cpu", *options, cpus=cpus)
    assert plan.returncode == 0, plan.stderr
    assert "pass --numa 1" in plan.stdout + plan.stderr
    inspected = run("ktconvert", "inspect", EXAMPLE, cpus=cpus).stdout
    assert "--numa 1" in inspected, inspected


def count_workers(variant: Variant, report: dict[str, Any]) -> dict[int, int]:
    """Return node -> number of threads bound to it, including the caller if it is one."""
    count: Counter[int] = Counter()
    for cpus in report["workers"]:
        homes = [node for node, (node_cpus, _) in variant.nodes.items() if set(cpus) <= parse_list(node_cpus)]
        assert len(homes) == 1, f"not bound to a node: {report}"
        count[homes[0]] += 1
    count[report["nodes"][0]] += report["threads"] - len(report["workers"])
    return dict(sorted(count.items()))


def test_a_default_pool_has_a_thread_for_each_core_on_its_node(variant):
    report = run_program(
        """
        new = NewThreads()
        pool = get_shared_pool()
        report(threads=pool.threads, nodes=pool.nodes, workers=new.cpus())
        """
    )
    assert report["threads"] == sum(variant.workers.values())
    assert report["nodes"] == list(variant.workers)
    if len(variant.workers) > 1:
        assert count_workers(variant, report) == variant.workers
        # Each worker has a CPU of its own.
        assert len({tuple(cpus) for cpus in report["workers"]}) == len(report["workers"]), report


@pytest.mark.on("two", "asym")
def test_threads_return_to_a_cpu_that_comes_online(variant):
    """After a CPU went offline and online, the next forwards move threads back to their CPUs."""
    report = run_program(
        """
        new = NewThreads()
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
        report(before=before, after=new.cpus())
        """
    )
    assert report["after"] == report["before"]


@pytest.mark.on("one", "two")
def test_a_conversion_on_tmpfs_works_without_direct_io():
    """Before Linux 6.6, tmpfs refuses O_DIRECT."""
    probe = SHM / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT))
    except OSError:
        pass
    else:
        pytest.skip(f"tmpfs of Linux {os.uname().release} accepts O_DIRECT")
    finally:
        assert probe.exists()  # open creates the file even if it then fails
        probe.unlink()
    result = run("ktconvert", "cpu", "-i", EXAMPLE, "-o", SHM / "out", "--quant-method", "int4", "-q")
    assert (result.returncode, result.stderr) == (0, "")
    result = run("ktconvert", "verify", SHM / "out", "--against", EXAMPLE, "--full", "-q")
    assert result.returncode == 0, result.stderr
