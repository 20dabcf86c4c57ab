"""Which nodes: what a count means, what a list may hold, and that doctor, plan and inspect count the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from numa.see import run


def doctor(**how: Any) -> dict[str, Any]:
    done = run("ktconvert", "doctor", "--json", "--disk", "/dev/shm", **how)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_doctor_counts_cores_and_nodes(variant):
    document = doctor()
    flags = {"--kt-cpuinfer": sum(variant.workers.values()), "--kt-threadpool-count": len(variant.workers)}
    assert document["kt_flags"] == flags
    assert not [sentence for sentence in document["warnings"] if "mbind" in sentence]


@pytest.mark.on("two")
def test_doctor_under_a_quota_of_one_cpu():
    group = Path("/sys/fs/cgroup/quota")
    (group.parent / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    try:
        (group / "cpu.max").write_text("100000 100000")
        assert doctor(cgroup=group)["kt_flags"] == {"--kt-cpuinfer": 1, "--kt-threadpool-count": 1}
    finally:
        group.rmdir()


@pytest.mark.on("two", "four")
def test_doctor_plan_and_inspect_count_the_same_nodes(source, variant):
    cpus = variant.cpus(1)
    assert doctor(cpus=cpus)["kt_flags"]["--kt-threadpool-count"] == 1
    options = ("-i", source, "-o", "/dev/shm/out", "--quant-method", "int8", "--threadpool-count", 2, "--dry-run")
    plan = run("ktconvert", "cpu", *options, cpus=cpus)
    assert plan.returncode == 0, plan.stderr
    assert "pass --threadpool-count 1" in plan.stdout + plan.stderr
    inspected = run("ktconvert", "inspect", source, cpus=cpus).stdout
    assert "--threadpool-count 1" in inspected, inspected
