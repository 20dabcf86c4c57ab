"""Weights are on the nodes of the threads that compute with them, except if the user or the size of a node decides."""

from __future__ import annotations

import pytest

from numa.processes import run, run_program

# Two NUMA slices from a file and two that are packed here, with the default pool.
LOAD_AND_PACK = """
both = [KTExperts.load({model!r}, 0, memory="copy"), pack(2)]
report(pages=[count_pages_of_slices(experts) for experts in both], nodes=both[0]._pool.nodes)
"""


def require_nodes(pages: list[dict[str, int]], nodes: list[int]) -> None:
    """Require that each NUMA slice has pages, all on its own one of these nodes."""
    assert [list(slice_pages) for slice_pages in pages] == [[str(node)] for node in nodes], pages


def test_each_slice_is_on_the_nodes_of_its_groups(variant, model):
    """A slice is on one node, or alternates between several if there are fewer slices than groups.

    Of several nodes, a full one may be skipped.
    """
    nodes = list(variant.workers)
    numbers = [1, 2, len(nodes)]
    report = run_program(
        f"""
        all = [KTExperts.load({str(model)!r}, 0, memory="copy"), *(pack(parts) for parts in {numbers})]
        report(pages=[count_pages_of_slices(experts) for experts in all], nodes=all[0]._pool.nodes)
        """
    )
    assert report["nodes"] == nodes
    for parts, pages in zip([2, *numbers], report["pages"], strict=True):
        groups = min(parts, len(nodes))
        homes = [{variant.memory_of(node) for node in nodes[part % groups :: groups]} for part in range(parts)]
        actual = [set(map(int, part)) for part in pages]
        may_skip = [len(home) > 1 and any(variant.is_small(node) for node in home) for home in homes]
        assert all(
            used and used <= home if skipping else used == home
            for used, home, skipping in zip(actual, homes, may_skip, strict=True)
        ), pages


@pytest.mark.on("two", "asym", "hole", "cpuless", "small")
def test_taskset_moves_threads_and_memory(variant, model):
    last = max(variant.workers)
    report = run_program(LOAD_AND_PACK.format(model=str(model)), cpus=variant.cpus(last))
    assert report["nodes"] == [last]
    for pages in report["pages"]:
        require_nodes(pages, [last, last])


@pytest.mark.on("two", "asym")
@pytest.mark.parametrize("node", [0, 1])
def test_the_memory_policy_of_the_user_applies(node, model):
    """numactl --membind applies even if the pool has threads on both nodes."""
    for pages in run_program(LOAD_AND_PACK.format(model=str(model)), membind=[node])["pages"]:
        require_nodes(pages, [node, node])


@pytest.mark.on("small")
def test_weights_that_exceed_a_node_use_another(model):
    report = run_program(
        f"""
        results = []
        for memory in ("copy", "map"):
            layers = [KTExperts.load({str(model)!r}, layer, memory=memory) for layer in range(24)]
            results.append(np.stack([layer.forward(*call(layer)) for layer in layers]))
            if memory == "copy":
                pages = [count_pages_of_slices(layer) for layer in layers]
        report(equal=bool((results[0] == results[1]).all()), pages=pages)
        """
    )
    assert report["equal"]
    assert any("0" in layer[1] for layer in report["pages"]), (
        "node 1 had room for all of slice 1, so that the check proves nothing"
    )
    killed = [line for line in run("dmesg").stdout.splitlines() if "CONSTRAINT_MEMORY_POLICY" in line]
    assert not killed, killed


@pytest.mark.on("two")
def test_pages_return_to_a_node_filled_by_the_page_cache(variant, model, hole):
    """If files fill a node, the kernel puts pages on other nodes; they move back after each layer."""
    report = run_program(
        f"""
        os.sched_setaffinity(0, {variant.cpus(1)})
        occupied = np.ones(200 << 17)
        for path in ({str(hole)!r}, {str(model / "model-00001-of-00001.safetensors")!r}):
            with open(path, "rb") as file:
                while file.read(4 << 20):
                    pass
        os.sched_setaffinity(0, {variant.cpus(0, 1)})
        meminfo = open("/sys/devices/system/node/node1/meminfo").read()
        free = int(meminfo.split("MemFree:")[1].split()[0])
        layers = [KTExperts.load({str(model)!r}, layer, memory="copy") for layer in range(24)]
        report(free=free, pages=[count_pages_of_slices(layer) for layer in layers])
        """
    )
    assert report["free"] < 100 << 10, "KiB: node 1 has room for slice 1 anyway, so that the check proves nothing"
    for pages in report["pages"]:
        require_nodes(pages, [0, 1])


@pytest.mark.on("small")
@pytest.mark.parametrize("node", [0, 1])
def test_auto_counts_the_nodes_that_memory_is_bound_to(node, model):
    """The model fits node 0 but not node 1. Bound to node 1, it is mapped, and no process is killed."""
    report = run_program(
        f"""
        layers = [KTExperts.load({str(model)!r}, layer) for layer in range(24)]
        [layer.forward(*call(layer)) for layer in layers]
        maps = open("/proc/self/maps").read()
        report(is_mapped={str(model)!r} in maps)
        """,
        membind=[node],
    )
    assert report["is_mapped"] == (node == 1)
