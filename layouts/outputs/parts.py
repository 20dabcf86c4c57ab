"""The parts that one expert is cut into, in the order in which they lie in a shard (bytes.md, section "The split").

Every part is quantized and packed on its own, so T, their number, is baked into the bytes of down_proj's scales. What
has no NUMA parts has T = 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.archs import MOST_EXPERTS, MOST_LAYERS
from ktconvert.layouts.encodings.encoding import Bytes, Encoding
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.quantizers import Matrix

Scalar = TypeVar("Scalar", bound=np.generic)

MOST_PARTS = 1 << 10  # the NUMA nodes that Linux knows


class Place(NamedTuple):
    """Which matrix of the model: one projection of one expert on one NUMA node; backward: its transpose."""

    layer: int
    expert: int
    projection: str
    backward: bool
    numa: int

    @property
    def is_possible(self) -> bool:
        """Return whether a model and a machine may have it: a damaged name may hold any number."""
        return self.layer < MOST_LAYERS and self.expert < MOST_EXPERTS and self.numa < MOST_PARTS


class Names(Protocol):
    """The names of an output's tensors. Two namings that give the same names compare equal.

    key       the name of a tensor
    find      (place, suffix) of a tensor; None if it is no part of a routed expert
    stray     why a tensor that is no part of a routed expert does not belong here; None where it may
    describe  which tensor of which expert, for messages
    """

    def key(self, place: Place, suffix: str) -> str: ...
    def find(self, name: str) -> tuple[Place, str] | None: ...
    def stray(self, name: str) -> str | None: ...
    def describe(self, place: Place, suffix: str) -> str: ...


@dataclass(frozen=True)
class Part:
    """One packed matrix [n, k]: a projection of an expert on a NUMA node; backward: its transpose, for fine-tuning.
    first: of the intermediate size's columns the first that it has.
    """

    layer: int
    expert: int
    projection: str
    numa: int
    n: int
    k: int
    backward: bool = False
    first: int = 0

    @property
    def place(self) -> Place:
        return Place(self.layer, self.expert, self.projection, self.backward, self.numa)

    def of(self, linear: Matrix) -> Matrix:
        """This part of the whole linear; a view."""
        n, k = (self.k, self.n) if self.backward else (self.n, self.k)
        down = self.projection == "down"
        part = linear.columns(self.first, self.first + k) if down else linear.rows(self.first, self.first + n)
        return part.T if self.backward else part

    def of_columns(self, whole: npt.NDArray[Scalar] | None) -> npt.NDArray[Scalar] | None:
        """This part of an array with a number for each column of the linear, or two; a view. None of a transpose."""
        if whole is None or self.backward:
            return None
        own = slice(self.first, self.first + self.k)
        return whole[(own,) * whole.ndim] if self.projection == "down" else whole


def part_shape(projection: str, hidden: int, intermediate: int, parts: int) -> tuple[int, int]:
    """(n, k) of one part: gate and up are split by rows, down by columns."""
    width = intermediate // parts
    return (hidden, width) if projection == "down" else (width, hidden)


def join_parts(projection: str, arrays: Sequence[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
    """Arrays of all parts of a linear, codes or scales [n, ...], in order, as one of the whole linear."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1 if projection == "down" else 0)


def cut_parts(projection: str, whole: npt.NDArray[Scalar], parts: int) -> list[npt.NDArray[Scalar]]:
    """An array of a whole linear, codes or scales [n, ...], in as many parts; views."""
    return np.split(whole, parts, axis=1 if projection == "down" else 0)


@dataclass(frozen=True)
class ExpertGrid:
    """What one layer's experts are cut into: sizes H and I, T parts; forward, backward or both matrices. unit: parts
    are whole units of so many columns of I, the first parts one more where T does not divide them; 0: parts are equal.
    """

    layer: int
    hidden: int
    intermediate: int
    numa: int = 1
    backward: bool = False
    forward: bool = True
    unit: int = 0

    @cached_property
    def widths(self) -> tuple[int, ...]:
        if not self.unit:
            return (self.intermediate // self.numa,) * self.numa
        each, more = divmod(self.intermediate // self.unit, self.numa)
        return tuple((each + (part < more)) * self.unit for part in range(self.numa))

    def parts(self, expert: int, projection: str) -> tuple[Part, ...]:
        """The parts of one projection of one expert, in file order: forward, then backward, by NUMA node."""
        forward, backward, first = [], [], 0
        for numa, width in enumerate(self.widths):
            n, k = part_shape(projection, self.hidden, width, 1)
            forward.append(Part(self.layer, expert, projection, numa, n, k, first=first))
            backward.append(Part(self.layer, expert, projection, numa, k, n, True, first))
            first += width
        return (*(forward if self.forward else ()), *(backward if self.backward else ()))

    def is_measured(self, part: Part) -> bool:
        """Whether the error of this part counts: that of the backward matrices only where there are no others."""
        return part.backward != self.forward

    def all_parts(self, experts: Iterable[int]) -> Iterator[Part]:
        """All parts of these experts, in file order: by expert, then gate, up, down."""
        for expert in experts:
            for projection in PROJECTIONS:
                yield from self.parts(expert, projection)


Item = tuple[int, str]  # expert, projection
Packed = list[Bytes]  # the tensors of one part, in the encoding's order
Parts = list[tuple[Part, Packed]]


def empty_parts(encoding: Encoding, parts: Iterable[Part], place: Bytes | None = None) -> Parts:
    """Memory for the tensors of parts; the first ones lie in `place`, one after another, if that is not None."""
    made, at = [], 0
    for part in parts:
        first, *others = (tensor.nbytes for tensor in encoding.tensors(part.n, part.k))
        own = np.empty(first, np.uint8) if place is None else place[at : at + first]
        made.append((part, [own, *(np.empty(nbytes, np.uint8) for nbytes in others)]))
        at += first
    return made
