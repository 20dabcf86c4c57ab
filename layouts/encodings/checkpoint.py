"""What a way is in which checkpoints store a weight: its tensors' names, and how they become a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import InputError, damaged_tensor
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, Array
from ktconvert.native_quant.matrix import DECODED_COLUMNS, Kind, Matrix
from ktconvert.quantizers.reference import e8m0

Tensors = Mapping[str, TensorInfo]  # the tensors that one weight is stored in, by role, in the order of the row
FLOATS = ("F32", "BF16", "F16")
E8M0 = ("F8_E8M0", "U8")  # as which E8M0 scales are stored
STACK_SCALE = "{s}_weight_scale"  # modelopt's, of a stack of experts, whose name has no ".weight"
GATE_UP = "gate_up"  # in the name of a stack that holds gate, then up


@dataclass(frozen=True)
class CheckpointEncoding:
    """How a linear's weight is stored.

    A weight is a linear [n, k], or a stack of E of them: then each of its tensors has E as its first axis. Functions
    get the tensors by role and the quantization of config.json; input_major: the weight is stored as [k, n].

    name         in facts and messages: the dtype of the values, if that determines the encoding
    title        its usual name, for messages
    tensors      role -> the names that its tensor may have: {t} is the weight's name in BF16 ("....gate_proj.weight"),
                 {s} that without ".weight". The first role holds the values. A name has the same role in all rows
    dtypes       of the values
    kind         of the values: its decoder
    matrix       one linear as stored. InputError where a tensor's content is wrong
    shape        logical shape, [n, k] or [E, n, k]: that of the values by default. InputError, UnsupportedError
    fit          checks the tensors against each other: InputError, UnsupportedError; returns for fingerprints what does
                 not follow from names, dtypes and shapes (FP8: the rows and columns of a block)
    claims       whether tensors are of this row, where rows share roles and dtypes
    optional     roles whose tensors may be missing
    item_bytes   of roles that need more than 4 bytes of memory for each item while a weight is read, or whose values
                 are copied: how many
    quantized    whether a GPU output stores such a weight, outside the routed experts, in BF16
    transposed   whether a BF16 release holds such a weight as [k, n], or [E, k, n]
    input_types  its names in --input-type
    """

    name: str
    title: str
    tensors: Mapping[str, tuple[str, ...]]
    dtypes: tuple[str, ...]
    kind: Kind
    matrix: Callable[[TensorSource, Tensors, Quantization, bool], Matrix]
    shape: Callable[[Tensors, Quantization], tuple[int, ...]] = lambda tensors, _: next(iter(tensors.values())).shape
    fit: Callable[[Tensors, Quantization, bool | None], Any] = lambda tensors, quantization, input_major: ()
    claims: Callable[[Tensors, Quantization], bool] = lambda tensors, quantization: True
    optional: frozenset[str] = frozenset()
    item_bytes: Mapping[str, int] = field(default_factory=dict)
    quantized: bool = True
    transposed: bool = False
    input_types: tuple[str, ...] = ()

    @property
    def values(self) -> str:
        """The role of the tensor that holds the values."""
        return next(iter(self.tensors))

    def holds(self, tensors: Tensors, quantization: Quantization) -> bool:
        """Whether these tensors, of any roles, are a weight of this row, complete or not."""
        values = tensors.get(self.values)
        return values is not None and values.dtype in self.dtypes and self.claims(tensors, quantization)


@dataclass(frozen=True)
class Weight:
    """A stored weight: its row, its tensors in the order of the row, and its logical shape, [n, k] or [E, n, k]."""

    encoding: CheckpointEncoding
    tensors: Tensors
    shape: tuple[int, ...]
    quantization: Quantization

    @property
    def values(self) -> TensorInfo:
        """The tensor that holds the values; messages name it."""
        return self.tensors[self.encoding.values]

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def released_shape(self) -> tuple[int, ...]:
        *stack, n, k = self.shape
        return (*stack, k, n) if self.encoding.transposed else self.shape

    def one(self, expert: int) -> Tensors:
        """The tensors of one linear: of a stack, the expert's part of each; what all share stays whole."""
        if len(self.shape) == 2:
            return self.tensors

        def part(info: TensorInfo) -> TensorInfo:
            if info.shape[:1] != self.shape[:1]:
                return info
            each = info.nbytes // info.shape[0]
            return replace(info, shape=info.shape[1:], start=info.start + expert * each, nbytes=each)

        return {role: part(info) for role, info in self.tensors.items()}

    def fit(self, input_major: bool | None = None) -> Any:
        """As CheckpointEncoding.fit; None where nothing tells how the weight is stored. Raises InputError or
        UnsupportedError where the tensors do not fit each other.
        """
        return self.encoding.fit(self.tensors, self.quantization, input_major)

    def reading_bytes(self, turned: bool) -> int:
        """Memory that reading a linear takes: scales, and BF16 first where needed. turned: for its transpose."""
        kind, stack = self.encoding.kind, self.shape[0] if len(self.shape) == 3 else 1
        items, each = {role: math.prod(t.shape) for role, t in self.tensors.items()}, self.encoding.item_bytes
        scales = sum(count * each.get(role, 4 * (role != self.encoding.values)) for role, count in items.items())
        whole = kind.number is None or (turned and not kind.can_transpose)
        columns = math.prod(self.shape)
        return (scales + 2 * columns * whole) // stack + 10 * DECODED_COLUMNS * (kind.number is None)

    def matrix(self, source: TensorSource, expert: int, input_major: bool = False) -> Matrix:
        """One linear as it is stored: [k, n] if it is input-major. Raises InputError for wrong contents."""
        return self.encoding.matrix(source, self.one(expert), self.quantization, input_major)


def aligned(source: TensorSource, info: TensorInfo) -> Array:
    """A tensor as it is stored: a view where the file is aligned, else a copy."""
    values = source.view(info)
    return values if values.flags.aligned else values.copy()


def read_scales(source: TensorSource, scale: TensorInfo, shape: tuple[int, int]) -> F32:
    """The scales as float32 [shape]. Raises InputError, naming the place, where one is not finite."""
    raw = source.view(scale)
    if scale.dtype in E8M0:
        values = e8m0(raw)
    elif scale.dtype == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif scale.dtype == "F16":
        values = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    else:
        values = raw.astype(np.float32)
    return finite(source, scale, values.reshape(shape))


def finite(source: TensorSource, scale: TensorInfo, values: F32) -> F32:
    """The scales. Raises InputError, naming the place, where one is not finite."""
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        what = f": scale [{row}, {column}] is {values[row, column]}"
        raise damaged_tensor(scale.name, what, path=source.path(scale))
    return values


def count_whole_scales(values: TensorInfo, scale: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return how many scales for whole matrices each linear of a weight, [n, k] or [E, n, k], has: 1, or 2 where it is
    gate, then up; 0 where the scales do not fit. A stack may share one.
    """
    *stack, n, _ = shape
    of_each = scale.shape[: len(stack)] == tuple(stack)
    count = math.prod(scale.shape[len(stack) :] if of_each else scale.shape)
    halves = of_each and GATE_UP in values.name and n % 2 == 0
    return count if count == 1 or (count == 2 and halves) else 0


def missing(codes: TensorInfo, what: str, name: str) -> InputError:
    """The error that the config says that these codes have zero points or an order, whose tensor is not there."""
    return damaged_tensor(codes.name, f"has {what} by its config, but {name} is missing")
