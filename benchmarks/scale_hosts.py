"""Duration of one conversion on 1 to 64 hosts that share a file system: a formula with measured times of units.

Units have one size (a layer's experts), and every host makes one at a time. Hosts therefore work in rounds of `hosts`
units, and the last round may have fewer. A round lasts as long as the slowest of three things, which overlap:

    computing             seconds of one unit on one host, measured
    the file system       bytes read and written by all hosts of the round / its bandwidth, shared equally
    the link of a host    bytes read and written by one host / its bandwidth

Then the coordinator publishes and records one unit after the other, which takes the measured time between two units for
each. Before the first round, the plan is made twice: by the coordinator, and then by all workers at once.

The formula ignores rounds that drift apart (which helps a little), hosts of different speeds, metadata of the file
system, and caches of files that were read before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HOSTS = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 128  # rows and columns that share one scale, in FP8
NUMA = 2


@dataclass(frozen=True)
class Model:
    """A model: five numbers of config.json determine the bytes that a conversion reads and writes.

    layers  with experts: num_hidden_layers less first_k_dense_replace; the MTP layer is not converted
    """

    name: str
    hidden: int
    width: int
    experts: int
    layers: int

    @property
    def weights(self) -> int:
        """Number of weights of the experts of one layer: gate, up and down."""
        return 3 * self.experts * self.hidden * self.width

    @property
    def bytes_in(self) -> int:
        """Bytes of one layer in FP8: one for each weight, and a float32 for each block."""
        return self.weights + 4 * 3 * self.experts * (self.hidden // BLOCK) * (self.width // BLOCK)

    def bytes_out(self, bits: int) -> int:
        """Return the bytes as AMXINT4 or AMXINT8: codes, and a float32 per row (of down: per row and NUMA slice)."""
        return self.weights * bits // 8 + 4 * self.experts * (2 * self.width + NUMA * self.hidden)


MODELS = (
    # hidden_size, moe_intermediate_size, n_routed_experts, num_hidden_layers - first_k_dense_replace
    Model("DeepSeek-V3.1", 7168, 2048, 256, 61 - 3),
    Model("Kimi-K2", 7168, 2048, 384, 61 - 1),
)


@dataclass(frozen=True)
class Host:
    """A host that makes units.

    rates    bits of the output -> bytes of FP8 input per second, one unit at a time, without waiting
    link     bytes per second between the host and the file system
    between  seconds between the end of a unit and the start of the next: publishing, recording, dispatch
    plan     seconds to read the headers
    """

    rates: Mapping[int, float]
    link: float
    between: float
    plan: float

    def seconds(self, model: Model, bits: int) -> float:
        """Return the seconds of one unit if the file system is no limit."""
        return model.bytes_in / self.rates[bits]


def wall(model: Model, bits: int, hosts: int, host: Host, shared: float) -> float:
    """Return the seconds of a conversion; shared: bytes per second of the file system for all hosts."""
    bytes_moved = model.bytes_in + model.bytes_out(bits)
    total, remaining = 2 * host.plan, model.layers
    while remaining:
        active = min(hosts, remaining)
        total += (
            max(host.seconds(model, bits), bytes_moved / host.link, active * bytes_moved / shared)
            + active * host.between
        )
        remaining -= active
    return total


def limit(model: Model, bits: int, host: Host, shared: float) -> float:
    """Return the number of hosts from which the file system is the limit."""
    bytes_moved = model.bytes_in + model.bytes_out(bits)
    return shared * max(host.seconds(model, bits), bytes_moved / host.link) / bytes_moved


def curve(model: Model, bits: int, host: Host, shared: float, hosts: Iterable[int] = range(1, 65)) -> list[float]:
    """Return the minutes for each number of hosts."""
    return [wall(model, bits, count, host, shared) / 60 for count in hosts]
