"""Encodings of weights in checkpoints: the names of a weight's tensors, and how they become a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ktconvert.layouts.errors import InputError, bad_tensor
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, Array
from ktconvert.native_quant.matrix import DECODED_COLUMNS, Kind, Matrix
from ktconvert.quantizers.reference import e8m0_to_f32

Tensors = Mapping[str, TensorInfo]  # role -> tensor, for all tensors of a weight, in the order of its row
FLOATS = ("F32", "BF16", "F16")
E8M0 = ("F8_E8M0", "U8")  # dtypes of E8M0 scales
# Name of modelopt's scale of a stack of experts, whose own name has no ".weight".
STACK_SCALE = "{s}_weight_scale"
GATE_UP = "gate_up"  # contained in the names of stacks of gate and up


@dataclass(frozen=True)
class CheckpointEncoding:
    """One encoding of a weight in checkpoints: a row of CHECKPOINT_ENCODINGS.

    A weight is a linear [n, k], or a stack of E linears; each tensor of a stack has E as its first axis. The functions
    get the tensors by role, the quantization of config.json, and some of them input_major.

    input_major     whether the weight is stored as [k, n]; None if unknown
    name            name in facts and messages: the dtype of the values, if that determines the encoding
    title           usual name, for messages
    tensor_names    role -> possible names of its tensor. {t} is the weight's name in BF16 ("....gate_proj.weight"); {s}
                    is that name without ".weight". The first role holds the values. A name has the same role in all
                    rows
    dtypes          dtypes of the values
    kind            decoder of the values
    make_matrix     returns one linear as stored; raises InputError for wrong contents of a tensor
    infer_shape     returns the logical shape, [n, k] or [E, n, k]; by default that of the values. Raises InputError or
                    UnsupportedError
    resolve_scheme  checks that the tensors fit each other and the config, and returns the scheme: the parameters, for
                    fingerprints, that do not follow from names, dtypes and shapes (FP8: rows and columns of a block).
                    Raises InputError or UnsupportedError
    accepts         whether tensors belong to this row, for rows that share roles and dtypes
    optional        roles whose tensors may be missing
    item_bytes      bytes of memory per item while a weight is read, for roles that need more than 4, or whose values
                    are copied
    quantized       whether a GPU output stores such a weight, outside the routed experts, in BF16
    transposed      whether a BF16 release holds such a weight as [k, n], or [E, k, n]
    input_types     values of --input-type that select this encoding
    """

    name: str
    title: str
    tensor_names: Mapping[str, tuple[str, ...]]
    dtypes: tuple[str, ...]
    kind: Kind
    make_matrix: Callable[[TensorSource, Tensors, Quantization, bool], Matrix]
    infer_shape: Callable[[Tensors, Quantization], tuple[int, ...]] = lambda tensors, quantization: (
        next(iter(tensors.values())).shape
    )
    resolve_scheme: Callable[[Tensors, Quantization, bool | None], Any] = lambda tensors, quantization, input_major: ()
    accepts: Callable[[Tensors, Quantization], bool] = lambda tensors, quantization: True
    optional: frozenset[str] = frozenset()
    item_bytes: Mapping[str, int] = field(default_factory=dict)
    quantized: bool = True
    transposed: bool = False
    input_types: tuple[str, ...] = ()

    @property
    def values_role(self) -> str:
        """Role of the tensor that holds the values."""
        return next(iter(self.tensor_names))

    def matches(self, tensors: Tensors, quantization: Quantization) -> bool:
        """Return whether these tensors, of any roles, are a weight of this row, complete or not."""
        values = tensors.get(self.values_role)
        return values is not None and values.dtype in self.dtypes and self.accepts(tensors, quantization)


@dataclass(frozen=True, slots=True)
class Weight:
    """A stored weight: its row, its tensors in the row's order, and its logical shape, [n, k] or [E, n, k]."""

    encoding: CheckpointEncoding
    tensors: Tensors
    shape: tuple[int, ...]
    quantization: Quantization

    @property
    def values_tensor(self) -> TensorInfo:
        """The tensor that holds the values; messages name it."""
        return self.tensors[self.encoding.values_role]

    @property
    def name(self) -> str:
        return self.values_tensor.name

    @property
    def released_shape(self) -> tuple[int, ...]:
        *stack, n, k = self.shape
        return (*stack, k, n) if self.encoding.transposed else self.shape

    def linear_tensors(self, expert: int) -> Tensors:
        """Return the tensors of one linear.

        If the weight is a stack, return the expert's share of each tensor; tensors that all experts share stay whole.
        """
        if len(self.shape) == 2:
            return self.tensors

        def select_expert(info: TensorInfo) -> TensorInfo:
            if info.shape[:1] != self.shape[:1]:
                return info
            expert_bytes = info.nbytes // info.shape[0]
            start = info.start + expert * expert_bytes
            return msgspec.structs.replace(info, shape=info.shape[1:], start=start, nbytes=expert_bytes)

        return {role: select_expert(info) for role, info in self.tensors.items()}

    def resolve_scheme(self, input_major: bool | None = None) -> Any:
        """Check the tensors against each other, and return the scheme as CheckpointEncoding.resolve_scheme does.

        input_major  whether the weight is stored as [k, n]; None if unknown

        Raises InputError or UnsupportedError if the tensors do not fit.
        """
        return self.encoding.resolve_scheme(self.tensors, self.quantization, input_major)

    def memory_for_reading(self, transposed: bool) -> int:
        """Return the memory in bytes for reading a linear: its scales, and all its numbers in BF16 if needed.

        transposed  whether its transpose is read
        """
        kind = self.encoding.kind
        item_bytes = self.encoding.item_bytes
        scale_bytes = 0
        for role, info in self.tensors.items():
            default = 0 if role == self.encoding.values_role else 4
            scale_bytes += math.prod(info.shape) * item_bytes.get(role, default)
        decodes_all = kind.number is None or (transposed and not kind.can_transpose)
        bf16_bytes = 2 * math.prod(self.shape) if decodes_all else 0
        experts = self.shape[0] if len(self.shape) == 3 else 1
        return (scale_bytes + bf16_bytes) // experts + 10 * DECODED_COLUMNS * (kind.number is None)

    def read_linear(self, source: TensorSource, expert: int, input_major: bool = False) -> Matrix:
        """Return one linear as it is stored: [k, n] if it is input-major. Raises InputError for wrong contents."""
        return self.encoding.make_matrix(source, self.linear_tensors(expert), self.quantization, input_major)


def read_aligned(source: TensorSource, info: TensorInfo) -> Array:
    """Return a tensor as it is stored: a view if the file is aligned, else a copy."""
    values = source.view(info)
    return values if values.flags.aligned else values.copy()


def read_scales(source: TensorSource, scale: TensorInfo, shape: tuple[int, int]) -> F32:
    """Return scales as float32 of this shape. Raises InputError, naming the place, for one that is not finite."""
    raw = source.view(scale)
    if scale.dtype in E8M0:
        values = e8m0_to_f32(raw)
    elif scale.dtype == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif scale.dtype == "F16":
        values = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    else:
        values = raw.astype(np.float32)
    return require_finite_scales(source, scale, values.reshape(shape))


def require_finite_scales(source: TensorSource, scale: TensorInfo, values: F32) -> F32:
    """Return the scales. Raises InputError, naming the place, for one that is not finite."""
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        problem = f": scale [{row}, {column}] is {values[row, column]}"
        raise bad_tensor(scale.name, problem, path=source.path(scale))
    return values


def count_whole_scales(values: TensorInfo, scale: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return how many scales for a whole matrix each linear of a weight, [n, k] or [E, n, k], has.

    The result is 1, or 2 for gate and up in one matrix; 0 if the scales do not fit. A stack may share one scale.
    """
    *stack, n, _ = shape
    is_per_expert = scale.shape[: len(stack)] == tuple(stack)
    count = math.prod(scale.shape[len(stack) :] if is_per_expert else scale.shape)
    may_have_two = is_per_expert and GATE_UP in values.name and n % 2 == 0
    return count if count == 1 or (count == 2 and may_have_two) else 0


def absent_tensor(codes: TensorInfo, problem: str, name: str) -> InputError:
    """Return the error for a zero-point or order tensor that the config requires and the file lacks."""
    return bad_tensor(codes.name, f"has {problem} according to its config, but {name} is missing")
