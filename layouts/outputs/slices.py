"""NUMA slices of experts, in the order of their tensors in a shard (bytes.md, section "The split").

Each slice is quantized and packed separately, so the number of slices T is baked into the bytes of down_proj's scales.
Formats that are not split over NUMA nodes have T = 1.
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
from ktconvert.layouts.tensors import list_projections
from ktconvert.quantizers import Matrix

Scalar = TypeVar("Scalar", bound=np.generic)

MOST_NUMA_NODES = 1 << 10  # limit of Linux


class SliceId(NamedTuple):
    """Identity of one packed matrix: a projection of an expert on a NUMA node.

    backward  whether it is the transposed matrix
    """

    layer: int
    expert: int
    projection: str
    backward: bool
    node: int

    @property
    def is_possible(self) -> bool:
        """Return whether a model and a machine can have this slice; a damaged name may contain any number."""
        return self.layer < MOST_LAYERS and self.expert < MOST_EXPERTS and self.node < MOST_NUMA_NODES


class TensorNames(Protocol):
    """Naming scheme for an output's tensors. Two schemes that give the same names compare equal.

    tensor_name    returns the name of a slice's tensor with this suffix
    parse          returns the slice and the suffix that a name stands for; None if it is not of a routed expert
    explain_stray  returns why a tensor that is not of a routed expert does not belong in the output; None if it may
    describe       returns layer, expert, projection, node and suffix, for messages
    """

    def tensor_name(self, slice_id: SliceId, suffix: str) -> str: ...
    def parse(self, name: str) -> tuple[SliceId, str] | None: ...
    def explain_stray(self, name: str) -> str | None: ...
    def describe(self, slice_id: SliceId, suffix: str) -> str: ...


def explain_name(names: TensorNames, name: str) -> str:
    """Return " (layer, expert, projection, ...)" for the name of an expert's tensor, for messages; "" for others."""
    parsed = names.parse(name)
    return "" if parsed is None else f" ({names.describe(*parsed)})"


@dataclass(frozen=True)
class NumaSlice:
    """One packed matrix [n, k]: a projection of an expert on a NUMA node.

    backward  whether it is the transposed matrix, for fine-tuning
    start     first index of the slice along the expert's intermediate size
    """

    layer: int
    expert: int
    projection: str
    node: int
    n: int
    k: int
    backward: bool = False
    start: int = 0

    @property
    def id(self) -> SliceId:
        return SliceId(self.layer, self.expert, self.projection, self.backward, self.node)

    def cut_linear(self, linear: Matrix) -> Matrix:
        """Return this slice of a whole linear, as a view."""
        n, k = (self.k, self.n) if self.backward else (self.n, self.k)
        if self.projection == "down":
            part = linear.columns(self.start, self.start + k)
        else:
            part = linear.rows(self.start, self.start + n)
        return part.T if self.backward else part

    def cut_columns(self, array: npt.NDArray[Scalar] | None) -> npt.NDArray[Scalar] | None:
        """Return this slice of an array indexed by the linear's columns, along all its axes, as a view.

        Returns None for a transposed slice.
        """
        if array is None or self.backward:
            return None
        columns = slice(self.start, self.start + self.k)
        return array[(columns,) * array.ndim] if self.projection == "down" else array

    def cut_bias(self, bias: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Return this slice's bias, for each of its rows.

        The outputs of down's slices are added: the first has the whole bias, the others have zeros, so that the
        tensors of all slices are alike.
        """
        if self.projection == "down":
            return np.zeros_like(bias) if self.node else bias
        return bias[self.start : self.start + self.n]


def slice_shape(projection: str, hidden: int, intermediate: int, numa: int) -> tuple[int, int]:
    """Return (n, k) of one of `numa` equal slices: gate and up are split by rows, down by columns."""
    width = intermediate // numa
    return (hidden, width) if projection == "down" else (width, hidden)


def join_slices(projection: str, arrays: Sequence[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
    """Join arrays [n, ...] of all slices of a linear (codes or scales), in order, into one of the whole linear."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1 if projection == "down" else 0)


def cut_slices(projection: str, array: npt.NDArray[Scalar], numa: int) -> list[npt.NDArray[Scalar]]:
    """Cut an array [n, ...] of a whole linear (codes or scales) into the arrays of its slices, as views."""
    return np.split(array, numa, axis=1 if projection == "down" else 0)


@dataclass(frozen=True)
class Slicing:
    """Division of one layer's experts into NUMA slices.

    hidden        hidden size H
    intermediate  intermediate size I of the experts
    numa          number of slices T
    backward      whether there are slices of the transposed matrices
    forward       whether there are slices of the matrices themselves
    gated         whether experts have a gate
    multiple      number of which the width of each slice is a multiple; if the multiples in I do not divide evenly by
                  T, the first slices are wider. 0: all slices have the same width
    """

    layer: int
    hidden: int
    intermediate: int
    numa: int = 1
    backward: bool = False
    forward: bool = True
    multiple: int = 0
    gated: bool = True

    @property
    def projections(self) -> tuple[str, ...]:
        return list_projections(self.gated)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        if not self.multiple:
            return (self.intermediate // self.numa,) * self.numa
        least, remainder = divmod(self.intermediate // self.multiple, self.numa)
        return tuple((least + (node < remainder)) * self.multiple for node in range(self.numa))

    def slices(self, expert: int, projection: str) -> tuple[NumaSlice, ...]:
        """Return the slices of one projection of one expert in file order: forward, then backward, by NUMA node."""
        forward = []
        backward = []
        start = 0
        for node, width in enumerate(self.widths):
            n, k = slice_shape(projection, self.hidden, width, 1)
            forward.append(NumaSlice(self.layer, expert, projection, node, n, k, start=start))
            backward.append(NumaSlice(self.layer, expert, projection, node, k, n, True, start))
            start += width
        return (*(forward if self.forward else ()), *(backward if self.backward else ()))

    def is_measured(self, numa_slice: NumaSlice) -> bool:
        """Return whether the error of this slice counts; backward slices count only if there are no others."""
        return numa_slice.backward != self.forward

    def all_slices(self, experts: Iterable[int]) -> Iterator[NumaSlice]:
        """Yield all slices of these experts in file order: by expert, then gate, up, down."""
        for expert in experts:
            for projection in self.projections:
                yield from self.slices(expert, projection)


LinearId = tuple[int, str]  # (expert, projection)
SliceTensors = list[Bytes]  # the tensors of one slice, in the encoding's order
PackedSlices = list[tuple[NumaSlice, SliceTensors]]


def allocate_slices(encoding: Encoding, slices: Iterable[NumaSlice], buffer: Bytes | None = None) -> PackedSlices:
    """Return memory for the tensors of slices.

    buffer  memory for the first tensor of each slice, one after another; None: allocate it as well
    """
    allocated = []
    start = 0
    for numa_slice in slices:
        codes_bytes, *other_sizes = (tensor.nbytes for tensor in encoding.tensors(numa_slice.n, numa_slice.k))
        codes = np.empty(codes_bytes, np.uint8) if buffer is None else buffer[start : start + codes_bytes]
        allocated.append((numa_slice, [codes, *(np.empty(nbytes, np.uint8) for nbytes in other_sizes)]))
        start += codes_bytes
    return allocated
