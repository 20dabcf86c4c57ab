"""Weights lie on the nodes of the threads that compute with them, unless the user or the size of a node says otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from numa.see import MBIND, NO_NUMA_CALLS, run, seen_by
from numa.variants import Variant

LOAD = "experts = Experts.load({model!r}, 0, memory='copy')"
SAY = "say(pages=parts_of(experts), nodes=experts.pool.nodes)"


def only_on(pages: list[dict[str, int]], nodes: list[int]) -> None:
    """Each part has pages, all on its own one of these nodes."""
    assert [list(part) for part in pages] == [[str(node)] for node in nodes], pages


def test_each_part_is_on_the_node_of_its_group(variant: Variant, model: Path) -> None:
    groups = list(variant.workers)
    for parts in {1, 2, len(groups)}:
        seen = seen_by(f"experts = pack({parts}); {SAY}")
        assert seen["nodes"] == groups
        only_on(seen["pages"], [variant.memory_of(groups[part % len(groups)]) for part in range(parts)])
    seen = seen_by(f"{LOAD.format(model=str(model))}; {SAY}")
    only_on(seen["pages"], [variant.memory_of(groups[part % len(groups)]) for part in range(2)])


@pytest.mark.on("two", "asym", "hole", "cpuless", "small")
def test_taskset_moves_threads_and_memory(variant: Variant, model: Path) -> None:
    last = max(variant.workers)
    for code in (LOAD.format(model=str(model)), "experts = pack(2)"):
        seen = seen_by(f"{code}; {SAY}", cpus=variant.cpus(last))
        assert seen["nodes"] == [last]
        only_on(seen["pages"], [last, last])


@pytest.mark.on("two", "asym", "four")
@pytest.mark.parametrize("nodes", [[1], [0], [1, 0], [0, 1]], ids=str)
@pytest.mark.parametrize("source", ["load", "pack"])
def test_a_wrapper_has_its_weights_on_the_nodes_it_names(nodes: list[int], source: str, model: Path) -> None:
    seen = seen_by(
        f"""
        import torch
        from ktconvert.native_quant import KTMoEWrapper
        KTMoEWrapper.memory = "copy"
        warnings.simplefilter("ignore")
        moe = KTMoEWrapper(0, 4, 2, 1024, 1024, None, 4, {len(nodes)}, {str(model)!r}, 512,
                           method="AMXINT8", numa_nodes={nodes})
        if {source == "load"}:
            moe.load_weights()
        else:
            moe.load_weights_from_tensors(*(torch.randn(4, 1024, 1024) / 32 for _ in range(3)))
        say(pages=parts_of(moe.moe), nodes=moe.moe.pool.nodes)
        """
    )
    assert seen["nodes"] == nodes
    only_on(seen["pages"], [nodes[part % len(nodes)] for part in range(len(seen["pages"]))])


@pytest.mark.on("two", "asym")
@pytest.mark.parametrize("node", [0, 1])
def test_a_policy_that_the_user_set_stays(node: int, model: Path) -> None:
    """numactl --membind: also where the pool has threads on both nodes."""
    for code in (LOAD.format(model=str(model)), "experts = pack(2)"):
        only_on(seen_by(f"{code}; {SAY}", membind=[node])["pages"], [node, node])


@pytest.mark.on("small")
def test_a_part_that_does_not_fit_its_node_goes_on_on_another(model: Path) -> None:
    seen = seen_by(
        f"""
        results = []
        for memory in ("copy", "map"):
            layers = [Experts.load({str(model)!r}, layer, memory=memory) for layer in range(24)]
            results.append(np.stack([layer.forward(*call(layer)) for layer in layers]))
            if memory == "copy":
                pages = [parts_of(layer) for layer in layers]
        say(equal=bool((results[0] == results[1]).all()), pages=pages)
        """
    )
    assert seen["equal"]
    assert any("0" in layer[1] for layer in seen["pages"]), "node 1 had room for all of part 1: the check shows nothing"
    killed = [line for line in run("dmesg").stdout.splitlines() if "CONSTRAINT_MEMORY_POLICY" in line]
    assert not killed, killed


@pytest.mark.on("small")
def test_auto_counts_per_node_and_says_so(model: Path) -> None:
    seen = seen_by(f"experts = Experts.load({str(model)!r}, 0); again = Experts.load({str(model)!r}, 1); say()")
    said = [line for line in seen["stderr"].splitlines() if re.search(r"node 1\b", line)]
    assert len(said) == 1, seen["stderr"]


@pytest.mark.on("small", "two")
def test_the_plan_counts_per_node(source: Path, variant: Variant) -> None:
    """308 MB for two nodes do not fit node 1 of `small`, and do fit the nodes of `two`."""
    done = run("ktconvert", "cpu", "-i", source, "-o", "/dev/shm/out", "--quant-method", "int8", "--dry-run",
               *("--threadpool-count", 2))  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"node 1\b", line)]
    assert len(said) == (variant.nodes[1][1] < 200), done.stdout + done.stderr


@pytest.mark.on("two", "small")
@pytest.mark.parametrize("calls", [(MBIND,), NO_NUMA_CALLS], ids=["mbind", "as in Docker"])
def test_a_denied_mbind_is_told_once(calls: tuple[int, ...], model: Path) -> None:
    code = f"layers = [Experts.load({str(model)!r}, n, memory='copy') for n in range(3)]; packed = pack(2); say()"
    said = [line for line in seen_by(code, without=calls)["stderr"].splitlines() if "Warning: " in line]
    assert len(said) == 1 and "mbind" in said[0], said
    assert "SYS_NICE" in said[0] or "seccomp" in said[0], said  # the remedy
    doctor = run("ktconvert", "doctor", without=calls)
    assert doctor.returncode == 0
    assert len(re.findall(r"^warning: .*mbind", doctor.stdout, re.M)) == 1, doctor.stdout
    assert "mbind" not in run("ktconvert", "doctor").stdout


@pytest.mark.on("memoryless", "memoryless0", "cpuless", "hole", "four")
def test_results_are_those_of_one_thread_on_one_node(variant: Variant, model: Path) -> None:
    nodes = list(variant.workers)
    seen = seen_by(
        f"""
        pools = [Pool(1, numa_nodes=[{nodes[0]}]), Pool(), Pool({2 * len(nodes)}, numa_nodes={nodes[::-1]})]
        results = []
        for pool in pools:
            for memory in ("copy", "map"):
                experts = Experts.load({str(model)!r}, 3, memory=memory, pool=pool)
                results.append(experts.forward(*call(experts)))
        say(equal=[bool((result == results[0]).all()) for result in results])
        """
    )
    assert all(seen["equal"])
