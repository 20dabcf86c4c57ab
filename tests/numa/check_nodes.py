"""Which nodes and cores count: for pools, and the same for doctor, plan and inspect; and a conversion on tmpfs."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from numa.see import run, seen_by
from numa.variants import Variant, parse_list

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/qwen3-moe-small"
SHM = Path("/dev/shm")


def doctor(**how: Any) -> dict[str, Any]:
    done = run("ktconvert", "doctor", "--json", "--disk", SHM, **how)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
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
    assert "pass --threadpool-count 1" in plan.stdout + plan.stderr
    inspected = run("ktconvert", "inspect", EXAMPLE, cpus=cpus).stdout
    assert "--threadpool-count 1" in inspected, inspected


def per_node(variant: Variant, seen: dict[str, Any]) -> dict[int, int]:
    """Node -> workers bound to it, the caller among them where it is one."""
    count: Counter[int] = Counter()
    for cpus in seen["workers"]:
        homes = [node for node, (own, _) in variant.nodes.items() if set(cpus) <= parse_list(own)]
        assert len(homes) == 1, f"not bound to a node: {seen}"
        count[homes[0]] += 1
    count[seen["nodes"][0]] += seen["threads"] - len(seen["workers"])
    return dict(sorted(count.items()))


def test_a_default_pool_has_a_thread_per_core_each_on_its_node(variant):
    seen = seen_by(
        """
        new = New()
        pool = get_shared_pool()
        say(threads=pool.threads, nodes=pool.nodes, workers=new.cpus())
        """
    )
    assert seen["threads"] == sum(variant.workers.values())
    assert seen["nodes"] == list(variant.workers)
    if len(variant.workers) > 1:
        assert per_node(variant, seen) == variant.workers
        assert len({tuple(cpus) for cpus in seen["workers"]}) == len(seen["workers"]), seen  # a CPU each


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


@pytest.mark.on("one", "two")
def test_a_conversion_on_tmpfs():
    """Which refuses O_DIRECT before Linux 6.6."""
    probe = SHM / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT))
    except OSError:
        pass
    else:
        pytest.skip(f"tmpfs of Linux {os.uname().release} takes O_DIRECT")
    finally:
        assert probe.exists()  # also where open failed: what was to be survived
        probe.unlink()
    done = run("ktconvert", "cpu", "-i", EXAMPLE, "-o", SHM / "out", "--quant-method", "int4", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("ktconvert", "verify", SHM / "out", "--against", EXAMPLE, "--full", "-q")
    assert done.returncode == 0, done.stderr
