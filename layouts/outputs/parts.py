"""The packed matrices that one expert becomes, in the order in which they lie in a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ktconvert.layouts.outputs.layout import PROJECTIONS, Layout
from ktconvert.layouts.outputs.numa import part_shape, take_part
from ktconvert.quantizers import Matrix


@dataclass(frozen=True)
class Part:
    """One packed matrix [n, k]: one projection of one expert on one NUMA node; backward: its transpose, for fine-tuning."""

    layer: int
    expert: int
    projection: str
    numa: int
    n: int
    k: int
    backward: bool = False

    def of(self, linear: Matrix, parts: int) -> Matrix:
        """This part of the whole linear; a view."""
        piece = take_part(linear, self.projection, self.numa, parts)
        return piece.T if self.backward else piece


@dataclass(frozen=True)
class ExpertGrid:
    """What one layer's experts are cut into: sizes H and I, T parts, with or without the backward matrices."""

    layer: int
    hidden: int
    intermediate: int
    numa: int
    backward: bool = False

    def parts(self, expert: int, projection: str) -> tuple[Part, ...]:
        """The parts of one projection of one expert, in file order: forward, then backward, by NUMA node."""
        n, k = part_shape(projection, self.hidden, self.intermediate, self.numa)
        forward = tuple(Part(self.layer, expert, projection, t, n, k) for t in range(self.numa))
        if not self.backward:
            return forward
        return forward + tuple(Part(self.layer, expert, projection, t, k, n, True) for t in range(self.numa))

    def all_parts(self, experts: Iterable[int]) -> Iterator[Part]:
        """All parts of these experts, in file order: by expert, then gate, up, down."""
        for expert in experts:
            for projection in PROJECTIONS:
                yield from self.parts(expert, projection)

    def expert_bytes(self, layout: Layout) -> int:
        """Bytes of weights and scales of one expert."""
        return sum(layout.weight_bytes(p.n, p.k) + layout.scale_bytes(p.n) for p in self.all_parts([0]))
