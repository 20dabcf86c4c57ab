"""How long one conversion takes on 1 to 64 hosts that share one file system: a formula, fed with measured unit times.

Units are of one size (a layer's experts), and every host makes one at a time, so that hosts work in rounds: `hosts`
units at once, as long as there are so many. A round lasts as long as the slowest of three things, which overlap:

    computing             seconds of one unit on one host, measured
    the file system       bytes read and written by all hosts of the round / its bandwidth, shared equally
    a host's own link     bytes read and written by one host / its bandwidth

and then the coordinator publishes and records one unit after another: the measured time between two units, times their
number. Before the first round the plan is made twice: by the coordinator, then by all workers at once.

It leaves out: rounds that drift apart, which helps a little; hosts of different speeds; metadata of the file system;
caches of files that were read before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HOSTS = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 128  # rows and columns that share one scale, in FP8
NUMA = 2


@dataclass(frozen=True)
class Model:
    """What a conversion reads and writes follows from five numbers of config.json.

    layers  with experts: num_hidden_layers less first_k_dense_replace; the MTP layer is not converted
    """

    name: str
    hidden: int
    width: int
    experts: int
    layers: int

    @property
    def weights(self) -> int:
        """Of the experts of one layer: gate, up and down."""
        return 3 * self.experts * self.hidden * self.width

    @property
    def bytes_in(self) -> int:
        """Of one layer in FP8: a byte for a weight, and a float32 for each block."""
        return self.weights + 4 * 3 * self.experts * (self.hidden // BLOCK) * (self.width // BLOCK)

    def bytes_out(self, bits: int) -> int:
        """As AMXINT4 or AMXINT8: codes, and a float32 for each row, of down for each row and NUMA slice."""
        return self.weights * bits // 8 + 4 * self.experts * (2 * self.width + NUMA * self.hidden)


MODELS = (
    # hidden_size, moe_intermediate_size, n_routed_experts, num_hidden_layers - first_k_dense_replace
    Model("DeepSeek-V3.1", 7168, 2048, 256, 61 - 3),
    Model("Kimi-K2", 7168, 2048, 384, 61 - 1),
)


@dataclass(frozen=True)
class Host:
    """What makes units.

    rates    bits of the output -> bytes of FP8 input per second, one unit at a time, with nothing to wait for
    link     bytes per second between it and the file system
    between  seconds between the end of a unit and the start of the next: publishing, recording, dispatch
    plan     seconds to read the headers
    """

    rates: Mapping[int, float]
    link: float
    between: float
    plan: float

    def seconds(self, model: Model, bits: int) -> float:
        """Of one unit, where the file system is no limit."""
        return model.bytes_in / self.rates[bits]


def wall(model: Model, bits: int, hosts: int, host: Host, shared: float) -> float:
    """Seconds of a whole conversion; shared: bytes per second of the file system, read and written, for all hosts."""
    moved = model.bytes_in + model.bytes_out(bits)
    total, left = 2 * host.plan, model.layers
    while left:
        now = min(hosts, left)
        total += max(host.seconds(model, bits), moved / host.link, now * moved / shared) + now * host.between
        left -= now
    return total


def limit(model: Model, bits: int, host: Host, shared: float) -> float:
    """The number of hosts from which on the file system is the limit."""
    moved = model.bytes_in + model.bytes_out(bits)
    return shared * max(host.seconds(model, bits), moved / host.link) / moved


def curve(model: Model, bits: int, host: Host, shared: float, hosts: Iterable[int] = range(1, 65)) -> list[float]:
    """Minutes over numbers of hosts."""
    return [wall(model, bits, count, host, shared) / 60 for count in hosts]
