"""Encodings of weights in checkpoints: the names of a weight's tensors, and how they become a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import InputError, bad_tensor
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, Array
from ktconvert.native_quant.matrix import DECODED_COLUMNS, Kind, Matrix
from ktconvert.quantizers.reference import e8m0

Tensors = Mapping[str, TensorInfo]  # role -> tensor, for all tensors of a weight, in the order of the row
FLOATS = ("F32", "BF16", "F16")
E8M0 = ("F8_E8M0", "U8")  # dtypes of E8M0 scales
STACK_SCALE = "{s}_weight_scale"  # modelopt's scale of a stack of experts; the stack's name has no ".weight"
GATE_UP = "gate_up"  # in the name of a stack of gate and up


@dataclass(frozen=True)
class CheckpointEncoding:
    """One encoding of a weight in checkpoints: a row of CHECKPOINT_ENCODINGS.

    A weight is a linear [n, k], or a stack of E of them; then each of its tensors has E as its first axis. The
    functions get the tensors by role and the quantization of config.json; input_major: the weight is stored as [k, n].

    name         in facts and messages: the dtype of the values, if that determines the encoding
    title        its usual name, for messages
    tensors      role -> possible names of its tensor: {t} is the weight's name in BF16 ("....gate_proj.weight"), {s}
                 that without ".weight". The first role holds the values. A name has the same role in all rows
    dtypes       dtypes of the values
    kind         decoder of the values
    matrix       reads one linear as stored; raises InputError for wrong contents of a tensor
    shape        logical shape, [n, k] or [E, n, k], by default that of the values; raises InputError, UnsupportedError
    fit          checks the tensors against each other, raises InputError or UnsupportedError; returns for fingerprints
                 what does not follow from names, dtypes and shapes (FP8: rows and columns of a block)
    claims       whether tensors belong to this row, for rows that share roles and dtypes
    optional     roles whose tensors may be missing
    item_bytes   bytes of memory per item while a weight is read, for roles that need more than 4, or whose values
                 are copied
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
        """Role of the tensor that holds the values."""
        return next(iter(self.tensors))

    def holds(self, tensors: Tensors, quantization: Quantization) -> bool:
        """Return whether these tensors, of any roles, are a weight of this row, complete or not."""
        values = tensors.get(self.values)
        return values is not None and values.dtype in self.dtypes and self.claims(tensors, quantization)


@dataclass(frozen=True)
class Weight:
    """A stored weight: its row, its tensors in the row's order, and its logical shape, [n, k] or [E, n, k]."""

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

    def linear_tensors(self, expert: int) -> Tensors:
        """Return the tensors of one linear; of a stack, the expert's share of each, while shared tensors stay whole."""
        if len(self.shape) == 2:
            return self.tensors

        def share(info: TensorInfo) -> TensorInfo:
            if info.shape[:1] != self.shape[:1]:
                return info
            each = info.nbytes // info.shape[0]
            return replace(info, shape=info.shape[1:], start=info.start + expert * each, nbytes=each)

        return {role: share(info) for role, info in self.tensors.items()}

    def fit(self, input_major: bool | None = None) -> Any:
        """Check the tensors against each other, as CheckpointEncoding.fit does.

        input_major  None: nothing tells how the weight is stored

        Raises InputError or UnsupportedError if they do not fit.
        """
        return self.encoding.fit(self.tensors, self.quantization, input_major)

    def memory_for_reading(self, turned: bool) -> int:
        """Return the memory for reading a linear: scales, and BF16 first if needed.

        turned  whether its transpose is read
        """
        kind, stack = self.encoding.kind, self.shape[0] if len(self.shape) == 3 else 1
        items, each = {role: math.prod(t.shape) for role, t in self.tensors.items()}, self.encoding.item_bytes
        scales = sum(count * each.get(role, 4 * (role != self.encoding.values)) for role, count in items.items())
        whole = kind.number is None or (turned and not kind.can_transpose)
        columns = math.prod(self.shape)
        return (scales + 2 * columns * whole) // stack + 10 * DECODED_COLUMNS * (kind.number is None)

    def matrix(self, source: TensorSource, expert: int, input_major: bool = False) -> Matrix:
        """Return one linear as it is stored: [k, n] if it is input-major. Raise InputError for wrong contents."""
        return self.encoding.matrix(source, self.linear_tensors(expert), self.quantization, input_major)


def read_aligned(source: TensorSource, info: TensorInfo) -> Array:
    """Return a tensor as it is stored: a view if the file is aligned, else a copy."""
    values = source.view(info)
    return values if values.flags.aligned else values.copy()


def read_scales(source: TensorSource, scale: TensorInfo, shape: tuple[int, int]) -> F32:
    """Return scales as float32 of this shape. Raise InputError, naming the place, for one that is not finite."""
    raw = source.view(scale)
    if scale.dtype in E8M0:
        values = e8m0(raw)
    elif scale.dtype == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif scale.dtype == "F16":
        values = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    else:
        values = raw.astype(np.float32)
    return require_finite_scales(source, scale, values.reshape(shape))


def require_finite_scales(source: TensorSource, scale: TensorInfo, values: F32) -> F32:
    """Return the scales. Raise InputError, naming the place, for one that is not finite."""
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        what = f": scale [{row}, {column}] is {values[row, column]}"
        raise bad_tensor(scale.name, what, path=source.path(scale))
    return values


def count_whole_scales(values: TensorInfo, scale: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return how many scales for whole matrices each linear of a weight, [n, k] or [E, n, k], has.

    The result is 1, or 2 for gate and up in one matrix; 0 if the scales do not fit. A stack may share one.
    """
    *stack, n, _ = shape
    of_each = scale.shape[: len(stack)] == tuple(stack)
    count = math.prod(scale.shape[len(stack) :] if of_each else scale.shape)
    halves = of_each and GATE_UP in values.name and n % 2 == 0
    return count if count == 1 or (count == 2 and halves) else 0


def absent_tensor(codes: TensorInfo, what: str, name: str) -> InputError:
    """Return the error for a zero-point or order tensor that the config requires and the file lacks."""
    return bad_tensor(codes.name, f"has {what} according to its config, but {name} is missing")
