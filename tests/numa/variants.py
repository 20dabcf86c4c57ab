"""The machines that tests/numa/guest.py boots, and the expected behaviour of ktconvert on each."""

from __future__ import annotations

from dataclasses import dataclass, field

from ktconvert.native_quant.machine import parse_list


@dataclass(frozen=True)
class Variant:
    """A guest, node by node.

    nodes    node -> (its CPUs as the kernel writes a list, its memory in MiB); "" and 0 mean none
    smp      topology for QEMU: packages, cores per package, hyperthreads per core
    workers  node -> number of threads of a pool with default settings
    home     node without memory -> node whose memory its threads use; every other node uses its own
    off      node -> its CPUs, which are switched off before the command (a node that QEMU describes without CPUs would
             come last, because Linux numbers nodes in the order of their CPUs)
    """

    nodes: dict[int, tuple[str, int]]
    smp: str
    workers: dict[int, int]
    home: dict[int, int] = field(default_factory=dict)
    off: dict[int, str] = field(default_factory=dict)
    cpu: str = "max"

    @property
    def mib(self) -> int:
        """Memory of all nodes."""
        return sum(mib for _, mib in self.nodes.values())

    def cpus(self, *nodes: int) -> list[int]:
        """Return the CPUs of these nodes."""
        return sorted(parse_list(",".join(self.nodes[node][0] for node in nodes)))

    @property
    def offline(self) -> list[int]:
        """CPUs that are switched off."""
        return sorted(parse_list(",".join(self.off.values())))

    def is_small(self, node: int) -> bool:
        """Return whether other contents, such as the page cache, may fill the node's memory."""
        return self.nodes[node][1] < 256

    def memory_of(self, node: int) -> int:
        """Return the node from which the kernel gives memory to a thread on this one."""
        return self.home.get(node, node)


VARIANTS = {
    "one": Variant({0: ("0-3", 2048)}, "4,sockets=1,cores=4", {0: 4}),
    "two": Variant({0: ("0-1", 1024), 1: ("2-3", 1024)}, "4,sockets=2,cores=2", {0: 2, 1: 2}),
    "four": Variant(
        {0: ("0", 512), 1: ("1", 512), 2: ("2", 512), 3: ("3", 512)}, "4,sockets=4,cores=1", {0: 1, 1: 1, 2: 1, 3: 1}
    ),
    "asym": Variant({0: ("0-2", 1024), 1: ("3", 1024)}, "4,sockets=4,cores=1", {0: 3, 1: 1}),
    "hyperthreads": Variant(
        {0: ("0-3", 1024), 1: ("4-7", 1024)},
        "8,sockets=2,cores=2,threads=2",
        {0: 2, 1: 2},
        cpu="max,vendor=GenuineIntel",
    ),
    "memoryless": Variant({0: ("0-1", 2048), 1: ("2-3", 0)}, "4,sockets=2,cores=2", {0: 2, 1: 2}, home={1: 0}),
    "memoryless0": Variant({0: ("0-1", 0), 1: ("2-3", 2048)}, "4,sockets=2,cores=2", {0: 2, 1: 2}, home={0: 1}),
    "cpuless": Variant({0: ("0-1", 512), 1: ("2-3", 512), 2: ("", 1024)}, "4,sockets=2,cores=2", {0: 2, 1: 2}),
    "hole": Variant(
        {0: ("0-1", 512), 1: ("", 1024), 2: ("4-5", 512)}, "6,sockets=3,cores=2", {0: 2, 2: 2}, off={1: "2-3"}
    ),
    "small": Variant({0: ("0-1", 1888), 1: ("2-3", 160)}, "4,sockets=2,cores=2", {0: 2, 1: 2}),
}
