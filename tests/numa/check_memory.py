"""Weights are on the nodes of the threads that compute with them, unless the user or the size of a node says otherwise."""

from __future__ import annotations

import pytest

from numa.see import run, seen_by

# Two parts from a file and two that are packed here, with the default pool.
BOTH = """
both = [Experts.load({model!r}, 0, memory="copy"), pack(2)]
say(pages=[parts_of(experts) for experts in both], nodes=both[0].pool.nodes)
"""


def only_on(pages: list[dict[str, int]], nodes: list[int]) -> None:
    """Each part has pages, all on its own one of these nodes."""
    assert [list(part) for part in pages] == [[str(node)] for node in nodes], pages


def test_each_part_is_on_the_nodes_of_its_groups(variant, model):
    """One node, or in turns on several where there are fewer parts than groups; of these, one that is full is passed
    over.
    """
    nodes = list(variant.workers)
    numbers = [1, 2, len(nodes)]
    seen = seen_by(
        f"""
        all = [Experts.load({str(model)!r}, 0, memory="copy"), *(pack(parts) for parts in {numbers})]
        say(pages=[parts_of(experts) for experts in all], nodes=all[0].pool.nodes)
        """
    )
    assert seen["nodes"] == nodes
    for parts, pages in zip([2, *numbers], seen["pages"], strict=True):
        groups = min(parts, len(nodes))
        homes = [{variant.memory_of(node) for node in nodes[part % groups :: groups]} for part in range(parts)]
        found = [set(map(int, part)) for part in pages]
        several = [len(home) > 1 and any(variant.is_small(node) for node in home) for home in homes]
        assert all(
            on and on <= home if passing else on == home
            for on, home, passing in zip(found, homes, several, strict=True)
        ), pages


@pytest.mark.on("two", "asym", "hole", "cpuless", "small")
def test_taskset_moves_threads_and_memory(variant, model):
    last = max(variant.workers)
    seen = seen_by(BOTH.format(model=str(model)), cpus=variant.cpus(last))
    assert seen["nodes"] == [last]
    for pages in seen["pages"]:
        only_on(pages, [last, last])


@pytest.mark.on("two", "asym")
@pytest.mark.parametrize("node", [0, 1])
def test_a_policy_that_the_user_set_stays(node, model):
    """numactl --membind: also where the pool has threads on both nodes."""
    for pages in seen_by(BOTH.format(model=str(model)), membind=[node])["pages"]:
        only_on(pages, [node, node])


@pytest.mark.on("small")
def test_what_does_not_fit_a_node_goes_to_another(model):
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


@pytest.mark.on("two")
def test_the_page_cache_gives_way(variant, model, hole):
    """Pages for which the kernel leaves their node, because files fill it, come back after each layer."""
    seen = seen_by(
        f"""
        os.sched_setaffinity(0, {variant.cpus(1)})
        taken = np.ones(200 << 17)
        for path in ({str(hole)!r}, {str(model / "model-00001-of-00001.safetensors")!r}):
            with open(path, "rb") as file:
                while file.read(4 << 20):
                    pass
        os.sched_setaffinity(0, {variant.cpus(0, 1)})
        meminfo = open("/sys/devices/system/node/node1/meminfo").read()
        free = int(meminfo.split("MemFree:")[1].split()[0])
        layers = [Experts.load({str(model)!r}, layer, memory="copy") for layer in range(24)]
        say(free=free, pages=[parts_of(layer) for layer in layers])
        """
    )
    assert seen["free"] < 100 << 10, "KiB: node 1 has room for part 1 as it is: the check shows nothing"
    for pages in seen["pages"]:
        only_on(pages, [0, 1])


@pytest.mark.on("small")
@pytest.mark.parametrize("node", [0, 1])
def test_auto_counts_the_nodes_that_memory_is_bound_to(node, model):
    """The model fits node 0 and not node 1: there it is mapped, and nothing is killed."""
    seen = seen_by(
        f"""
        layers = [Experts.load({str(model)!r}, layer) for layer in range(24)]
        [layer.forward(*call(layer)) for layer in layers]
        maps = open("/proc/self/maps").read()
        say(is_mapped={str(model)!r} in maps)
        """,
        membind=[node],
    )
    assert seen["is_mapped"] == (node == 1)
