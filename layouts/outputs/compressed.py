"""Pack-quantized: experts for the GPU, as compressed-tensors stores them and SGLang and vLLM load them (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.archs import Separate
from ktconvert.layouts.checkpoints.experts import MoeModel, part_of
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files.shards import Entry, ShardPlan, plan_shard
from ktconvert.layouts.outputs.layout import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.quantizers import GROUP_QUANTIZERS, GroupQuantizer, Matrix, groups, reference

# What `version` in quantization_config says: the compressed-tensors release whose contract this is.
CONTRACT = "0.19.0"
SUFFIXES = ("weight_packed", "weight_shape", "weight_scale")  # in the order in which they lie in a shard
# For the names of experts that the source stores together and no per-expert form of its family is known.
USUAL = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True)
class Compressed:
    """W4A16 or W8A16: how a linear [n, k] becomes three tensors, and comes back.

    version   raised whenever the bytes on disk change; part of every unit's fingerprint.
    """

    name: str
    version: int
    quantizer: GroupQuantizer

    def entries(self, name: str, n: int, k: int) -> tuple[Entry, Entry, Entry]:
        """The tensors of the linear called `name`, in the order of SUFFIXES."""
        bits, group = self.quantizer.bits, self.quantizer.group
        return (
            Entry(f"{name}.weight_packed", "I32", (n, k * bits // 32), n * k * bits // 8),
            Entry(f"{name}.weight_shape", "I64", (2,), 16),
            Entry(f"{name}.weight_scale", "BF16", (n, k // group), 2 * n * (k // group)),
        )

    def linear_bytes(self, n: int, k: int) -> int:
        """Bytes of all three tensors of one linear."""
        return sum(entry.nbytes for entry in self.entries("", n, k))

    def expert_bytes(self, hidden: int, width: int) -> int:
        """Bytes of one expert: gate and up [width, hidden], down [hidden, width]."""
        return 2 * self.linear_bytes(width, hidden) + self.linear_bytes(hidden, width)

    def pack(
        self,
        linear: Matrix,
        packed: npt.NDArray[np.int32],
        scale: npt.NDArray[np.uint16],
        rounding: str = "library",
    ) -> None:
        """Round a linear [n, k] to nearest, into packed (int32 [n, k*bits/32]) and scale (BF16 bits [n, k/group]).

        Raises kernels.NonFinite where the linear holds NaN or Inf.
        """
        kernels.quantize_groups(
            self.quantizer.bits,
            linear,
            packed,
            scale,
            group=self.quantizer.group,
            rounding=rounding,
        )

    def codes(self, packed: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        """The signed codes of weight_packed: int8 [n, k]."""
        return groups.unpack_words(self.quantizer.bits, packed)

    def unpack(self, packed: npt.NDArray[np.int32], scale: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
        """The numbers that packed codes and BF16 scales stand for: float32 [n, k], exact."""
        return groups.dequantize_groups(self.quantizer.bits, packed, scale)

    def error_sums(
        self, linear: Matrix, packed: npt.NDArray[np.int32], scale: npt.NDArray[np.uint16]
    ) -> npt.NDArray[np.float64]:
        """Sums of x*x, y*y, x*y and (x-y)^2 over a linear, x the source in BF16 and y what was stored; float64 [4]."""
        bf16 = kernels.decode(linear)
        sums = np.zeros(4)
        for first in range(0, len(bf16), 64):  # rows at a time, so that memory stays small
            rows = slice(first, first + 64)
            x = reference.bf16_to_f32(bf16[rows]).astype(np.float64)
            y = self.unpack(packed[rows], scale[rows]).astype(np.float64)
            sums += [np.square(x).sum(), np.square(y).sum(), (x * y).sum(), np.square(x - y).sum()]
        return sums

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """What config.json says of it: compressed-tensors' own document; `actorder` null, since loaders misread "static"."""
        weights = {
            "num_bits": self.quantizer.bits,
            "type": "int",
            "symmetric": True,
            "group_size": self.quantizer.group,
            "strategy": "group",
            "block_structure": None,
            "dynamic": False,
            "actorder": None,
            "scale_dtype": None,
            "zp_dtype": None,
            "observer": None,
            "observer_kwargs": {},
        }
        scheme = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        return {
            "config_groups": {"group_0": scheme},
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": None,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": list(ignore),
            "version": CONTRACT,
        }


COMPRESSED = {name: Compressed(name, version=1, quantizer=quantizer) for name, quantizer in GROUP_QUANTIZERS.items()}


# --- names ----------------------------------------------------------------------------------------


def linear_name(model: MoeModel, layer: int, expert: int, projection: str) -> str:
    """What an expert's linear is called in the output, without ".weight": the source's own name, where each has one.

    Of experts that are stored together, the name that their family gives single ones, in whatever block they lie (transformers
    looks for w1, w3, w2 of Mixtral in any), else gate_proj, up_proj, down_proj.
    """
    moe = model.found[layer]
    if isinstance(moe.style, Separate):
        return model.weight_name(layer, expert, projection).removesuffix(".weight")
    container = _container(getattr(moe.style, part_of(moe.style, projection)))
    base = container.replace("{prefix}", moe.prefix).format(layer=layer)
    return f"{base}{expert}.{words_of(model)[projection]}"


def words_of(model: MoeModel) -> dict[str, str]:
    """What the model's family calls the three linears of an expert."""
    single = next((style for style in model.arch.stored if isinstance(style, Separate)), None)
    if single is None:
        return USUAL
    return {p: getattr(single, p).removesuffix(".weight").rpartition(".")[2] for p in PROJECTIONS}


def _container(template: str) -> str:
    """The template up to and with "experts.", which is added where the experts of a layer have no such block."""
    before, found, _ = template.removesuffix(".weight").rpartition("experts.")
    return f"{before}experts." if found else f"{template.removesuffix('.weight').rpartition('.')[0]}.experts."


def linears(
    model: MoeModel, layer: int, experts: Iterable[int] | None = None
) -> Iterator[tuple[int, str, str, int, int]]:
    """(expert, projection, name, n, k) of a layer's linears, in file order: by expert, then gate, up, down."""
    count, hidden, width = model.shape(layer)
    for expert in range(count) if experts is None else experts:
        for projection in PROJECTIONS:
            n, k = (hidden, width) if projection == "down" else (width, hidden)
            yield expert, projection, linear_name(model, layer, expert, projection), n, k


def plan_experts(
    model: MoeModel, layer: int, experts: Iterable[int], form: Compressed, metadata: Mapping[str, str]
) -> ShardPlan:
    """A shard of experts: all codes, then all shapes, then all scales, so that each tensor is aligned to its items."""
    three = [form.entries(name, n, k) for _, _, name, n, k in linears(model, layer, experts)]
    return plan_shard([entry for kind in zip(*three, strict=True) for entry in kind], metadata)


# --- what can be represented and loaded -----------------------------------------------------------


def check_shapes(model: MoeModel, form: Compressed, tp: Iterable[int] = (1,)) -> tuple[str, ...]:
    """Notes on how the output can be loaded. Raises UnsupportedError where a group would not fit, alone or at a TP size asked."""
    group = form.quantizer.group
    notes: dict[str, None] = {}
    for hidden, width in dict.fromkeys(model.shape(layer)[1:] for layer in model.layers):
        for what, size in (("hidden size", hidden), ("expert width", width)):
            if size % group:
                raise UnsupportedError(
                    f"{form.name} has groups of {group} columns, which do not divide the {what} {size} of this model; "
                    "convert it with `ktconvert cpu`, or serve its experts in BF16"
                )
        fits = [t for t in (1, 2, 4, 8, 16) if width % (t * group) == 0]
        for ranks in tp:
            if ranks < 1 or width % (ranks * group):
                raise UnsupportedError(
                    f"the expert width {width} cannot be cut into {ranks} tensor-parallel ranks of whole groups of "
                    f"{group}; choose one of {', '.join(map(str, fits))}"
                )
            if hidden % 128 or width // ranks % max(64, group):
                notes[
                    f"Marlin, the fast kernel of vLLM and SGLang, needs a hidden size in multiples of 128 and an expert width "
                    f"per rank in multiples of {max(64, group)}: {hidden} and {width // ranks} take a slower one."
                ] = None
        notes[
            f"Experts {width} wide in groups of {group} can be loaded with tensor parallelism {', '.join(map(str, fits))}."
        ] = None
    if model.activation != "silu" or model.weights_on != "output":
        notes[
            "Marlin computes silu(gate) * up with routing weights on the output only; these experts need another kernel."
        ] = None
    return tuple(notes)
