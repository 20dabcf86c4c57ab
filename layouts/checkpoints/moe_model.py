"""Gate, up and down of each expert, independent of how the checkpoint stores them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.archs import Arch, Fused, Separate, Style
from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.checkpoints.match import expand_template
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import bad_tensor
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo, list_projections
from ktconvert.native_quant.arrays import F32
from ktconvert.native_quant.matrix import BF16, Matrix, decode
from ktconvert.quantizers import equalizing
from ktconvert.quantizers.equalizing import Exponents
from ktconvert.quantizers.reference import bf16_to_f32

EXPONENTS = 1024  # experts whose exponents are kept, of width bytes each


class Place(NamedTuple):
    """Place of an expert's linear [n, k] in a tensor [rows, columns], or in [E, rows, columns] as [E * rows, columns].

    transposed  whether it is stored as [k, n]
    """

    tensor: str
    rows: range
    columns: range
    transposed: bool


@dataclass(frozen=True)
class MoeModel:
    """A checkpoint with recognized experts.

    layers       numbers of the layers to convert, as in outputs; moe_layers describes each of them
    mtp_layers   layers at or beyond num_hidden_layers, not converted
    mtp_tensors  expert tensors of these layers and of blocks called mtp
    dtypes       names of the encodings that expert weights are stored in, sorted
    functions    layer -> what its experts compute
    notes        sentences for the plan of an output for the CPU
    common_notes  those of them that hold for any output
    warnings     further ones, on what may be wrong in the files
    refusal      why no output can hold these experts; None if one can
    stacks       name of a stack -> its layers, as in "1, 3"; {} if the family has only one stack
    equalized    layers whose experts are read equalized (see `equalize`)
    exponents    (layer, expert) -> exponents of an equalized expert, int8 [I]; None for any other
    """

    arch: Arch
    source: TensorSource
    layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    mtp_tensors: frozenset[str]
    dtypes: tuple[str, ...]
    has_shared_experts: bool
    functions: Mapping[int, ExpertFunction]
    notes: tuple[str, ...]
    common_notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    quantization: Quantization = field(default_factory=Quantization)
    refusal: str | None = None
    moe_layers: dict[int, MoeLayer] = field(default_factory=dict, repr=False)
    stacks: Mapping[str, str] = field(default_factory=dict)
    equalized: frozenset[int] = frozenset()
    exponents: Callable[[int, int], Exponents | None] = field(default=lambda layer, expert: None, repr=False)

    @property
    def is_plain(self) -> bool:
        """True if the experts compute what kt-kernel's AMXINT4 and AMXINT8 compute."""
        return set(self.functions.values()) == {PLAIN}

    @property
    def has_biases(self) -> bool:
        return any(function.biases for function in self.functions.values())

    @property
    def is_gated(self) -> bool:
        return all(moe.style.gated for moe in self.moe_layers.values())

    @property
    def projections(self) -> tuple[str, ...]:
        """The linears of an expert."""
        return list_projections(self.is_gated)

    @property
    def decoder_layers(self) -> int:
        """The number of decoder layers, with and without experts; MTP layers do not count."""
        layer_count = claims.find_layer_count(self.source.config, self.arch)
        return layer_count[1] if layer_count else self.layers[-1] + 1

    @property
    def function_names(self) -> str:
        """The functions of the experts, for messages."""
        return "; ".join(dict.fromkeys(map(str, self.functions.values())))

    @property
    def bits(self) -> float:
        """Bits of a stored weight, including interleaved scales; the minimum over all weights."""
        weights = {w.encoding.name: w for m in self.moe_layers.values() for w in m.weights.values()}
        return min(8 * weight.values_tensor.nbytes / math.prod(weight.shape) for weight in weights.values())

    def shape(self, layer: int) -> tuple[int, int, int]:
        """Return (E, H, I): experts, hidden size, expert width."""
        moe = self.moe_layers[layer]
        return moe.num_experts, moe.hidden, moe.width

    def storage_identity(self, layer: int) -> tuple[object, ...]:
        """Return how this layer's tensors are read beyond their names, dtypes and shapes, for fingerprints."""
        moe = self.moe_layers[layer]
        encodings = {w.encoding.name for w in moe.weights.values() if w.encoding.name != w.values_tensor.dtype}
        formats = (self.quantization.format,) if self.quantization.format else ()
        equalized = (("equalized", equalizing.VERSION),) if layer in self.equalized else ()
        return repr(moe.style), moe.input_major, self.quantization.blocks, *sorted(encodings), *formats, *equalized

    def linear(self, layer: int, expert: int, projection: str, *, equalized: bool = True) -> Matrix:
        """Return one of an expert's linears: "gate" and "up" are [I, H], "down" is [H, I].

        It is a view of the checkpoint, unless the expert is equalized: then it is decoded and scaled.

        equalized  False: as the checkpoint has it, in any case
        """
        moe = self.moe_layers[layer]
        input_major = moe.is_input_major(projection)
        stored = self.weight(layer, expert, projection).read_linear(self.source, expert, input_major)
        linear = stored.T if input_major else stored
        rows = self._find_rows(layer, projection)
        linear = linear.rows(rows.start, rows.stop) if rows.step == 1 else linear.alternate_rows(rows.start)
        exponents = self.exponents(layer, expert) if equalized and projection != "gate" else None
        if exponents is None:
            return linear
        bits = decode(linear)
        equalizing.multiply_by_powers(bits, exponents[:, None] if projection == "up" else -exponents)
        return Matrix(bits, BF16, origin=linear.origin)

    def place(self, layer: int, expert: int, projection: str) -> Place:
        """Return where a linear lies in its tensor, as a BF16 release stores that."""
        moe = self.moe_layers[layer]
        inputs, outputs = range(moe.width if projection == "down" else moe.hidden), self._find_rows(layer, projection)
        transposed = moe.is_input_major(projection) != self.weight(layer, expert, projection).encoding.transposed
        rows, columns = (inputs, outputs) if transposed else (outputs, inputs)
        height = len(rows) * (2 if not transposed and isinstance(moe.style, Fused) and projection != "down" else 1)
        first = 0 if isinstance(moe.style, Separate) else expert * height
        rows = range(first + rows.start, first + rows.stop, rows.step)
        return Place(self.weight_name(layer, expert, projection), rows, columns, transposed)

    def _find_rows(self, layer: int, projection: str) -> range:
        """Return the rows of a linear in the matrix that holds it: half of them if it holds gate and up."""
        moe = self.moe_layers[layer]
        rows = moe.hidden if projection == "down" else moe.width
        if not isinstance(moe.style, Fused) or projection == "down":
            return range(rows)
        second = int(projection == "up")
        return range(second, 2 * rows, 2) if moe.style.interleaved else range(second * rows, (second + 1) * rows)

    def bias(self, layer: int, expert: int, projection: str) -> F32 | None:
        """Return the bias of a linear, float32 [n]; None if it has none. Raises InputError for a value not finite."""
        moe = self.moe_layers[layer]
        info = moe.biases.get(self._matrix(layer, expert, projection))
        if info is None:
            return None
        stored = self.source.view(_select_expert(info, moe.style, expert))
        values = {"BF16": bf16_to_f32, "F16": lambda bits: bits.view(np.float16)}.get(info.dtype, np.asarray)(stored)
        rows = self._find_rows(layer, projection)
        bias = np.ascontiguousarray(values[rows.start : rows.stop : rows.step], np.float32)
        if not np.isfinite(bias).all():
            problem = f"contains a value that is not finite, in the bias of expert {expert}"
            raise bad_tensor(info.name, problem, path=self.source.path(info))
        return bias

    def weight(self, layer: int, expert: int, projection: str) -> Weight:
        return self.moe_layers[layer].weights[self._matrix(layer, expert, projection)]

    def _matrix(self, layer: int, expert: int, projection: str) -> tuple[str, int]:
        """Return the key of a linear in MoeLayer.weights and biases."""
        style = self.moe_layers[layer].style
        return matrix_name(style, projection), expert if isinstance(style, Separate) else -1

    def weight_name(self, layer: int, expert: int, projection: str) -> str:
        moe = self.moe_layers[layer]
        return expand_template(
            moe.style, moe.prefix, matrix_name(moe.style, projection), moe.number, moe.first_expert + expert
        )

    def memory_for_reading(self, layer: int, backward: bool = False) -> int:
        """Return the memory, beside the maps, that reading one of a layer's linears may take.

        backward  whether its transpose is needed, too
        """
        moe = self.moe_layers[layer]
        firsts = (weight for (_, expert), weight in moe.weights.items() if expert < 1)
        # Of an equalized one: up, down and its sizes, in BF16.
        scaling = 6 * moe.hidden * moe.width if layer in self.equalized else 0
        # A copy of gate or up, of at most 4 bytes for each number (Matrix.alternate_rows).
        copying = 4 * moe.hidden * moe.width if moe.input_major and getattr(moe.style, "interleaved", False) else 0
        return scaling + copying + max(weight.memory_for_reading(backward or moe.input_major) for weight in firsts)

    def expert_tensors(self, layer: int, expert: int) -> tuple[TensorInfo, ...]:
        """Return the tensors with one expert's weights; of tensors that hold all experts, only this expert's share."""
        moe = self.moe_layers[layer]
        own = expert if isinstance(moe.style, Separate) else -1
        weights = (
            info for matrix in moe.style.matrices for info in moe.weights[matrix, own].linear_tensors(expert).values()
        )
        biases = (info for matrix in moe.style.matrices if (info := moe.biases.get((matrix, own))) is not None)
        return *weights, *(_select_expert(info, moe.style, expert) for info in biases)

    def layer_tensors(self, layer: int) -> tuple[TensorInfo, ...]:
        """Return all tensors of a layer's expert weights, whole, sorted by name."""
        return tuple(sorted(self._iterate_tensors(layer), key=attrgetter("name")))

    def _iterate_tensors(self, layer: int) -> Iterator[TensorInfo]:
        moe = self.moe_layers[layer]
        for weight in moe.weights.values():
            yield from weight.tensors.values()
        yield from moe.biases.values()

    def expert_tensor_names(self) -> set[str]:
        """Return all routed-expert tensors of the converted layers, including unused scales, without MTP layers."""
        names = {info.name for layer in self.moe_layers for info in self._iterate_tensors(layer)}
        return names.union(*(moe.unused for moe in self.moe_layers.values()))


def equalize(model: MoeModel, layers: Iterable[int]) -> MoeModel:
    """Return the model with experts of these layers equalized (numerics.md, section 10).

    Scaling up must scale what the experts compute (can_scale_up).
    """
    chosen = frozenset(layers)

    @functools.lru_cache(EXPONENTS)
    def exponents(layer: int, expert: int) -> Exponents | None:
        if layer not in chosen:
            return None
        return equalizing.choose_exponents(
            *(decode(model.linear(layer, expert, name, equalized=False)) for name in ("up", "down"))
        )

    return replace(model, equalized=chosen, exponents=exponents)


def _select_expert(info: TensorInfo, style: Style, expert: int) -> TensorInfo:
    """Return the share of an expert in a tensor of biases."""
    if isinstance(style, Separate):
        return info
    size = info.nbytes // info.shape[0]
    return msgspec.structs.replace(info, shape=info.shape[1:], nbytes=size, start=info.start + expert * size)


def matrix_name(style: Style, projection: str) -> str:
    return "gate_up" if isinstance(style, Fused) and projection != "down" else projection
