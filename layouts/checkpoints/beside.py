"""What a checkpoint holds beside its routed experts, and how the quantized part of it becomes BF16."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ktconvert.layouts.checkpoints import scales
from ktconvert.layouts.checkpoints.match import ASIDE, COMPANIONS, SCALE
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant.matrix import FP8_E4M3, Matrix

DECODED = "F8_E4M3"  # safetensors dtype of the weights that are written as BF16
# What a tensor's name says that no loader of an output would understand, and weights of such dtypes.
PACKED_NAMES = {
    ".weight_packed": "packed by compressed-tensors",
    ".weight_zero_point": "packed by compressed-tensors",
    ".weight_scale_2": "NVFP4",
    ".weight_global_scale": "NVFP4",
    ".qweight": "GPTQ or AWQ 4-bit",
    ".qzeros": "GPTQ or AWQ 4-bit",
}
PACKED_DTYPES = {"U8": "packed", "I8": "INT8", "I32": "packed", "F8_E5M2": "FP8 E5M2", "F8_E8M0": "FP8 E8M0"}


@dataclass(frozen=True)
class Scaled:
    """An FP8 weight outside the routed experts, 2-D or a stack of such, with its scales.

    shape, block  of the scales of one 2-D weight: how many there are, and the rows and columns that each covers.
    """

    weight: TensorInfo
    scale: TensorInfo
    shape: tuple[int, int]
    block: tuple[int, int]

    def linears(self, source: TensorSource) -> Iterator[Matrix]:
        """The weight as linears, one after the other; views, but for the scales."""
        stack = self.weight.shape[0] if len(self.weight.shape) == 3 else 1
        each, scale_bytes = self.weight.nbytes // stack, self.scale.nbytes // stack
        for n in range(stack):
            shape = self.weight.shape[-2:]
            weight = replace(self.weight, shape=shape, start=self.weight.start + n * each, nbytes=each)
            start = self.scale.start + n * scale_bytes
            scale = replace(self.scale, shape=self.shape, start=start, nbytes=scale_bytes)
            yield Matrix(source.view(weight), FP8_E4M3, scales.read(source, scale, self.shape), self.block)


@dataclass(frozen=True)
class Beside:
    """Everything but routed experts, by the names of the checkpoint, which stay.

    tensors  those to be copied as they are (None), or decoded.
    dropped  scales that nothing needs any more.
    """

    tensors: Mapping[str, Scaled | None]
    dropped: tuple[str, ...]


def beside(source: TensorSource, taken: Collection[str], blocks: Sequence[tuple[int, int]]) -> Beside:
    """Sorts all tensors but `taken`: what is FP8 is to be decoded, its scales are dropped, the rest stays as it is.

    Raises UnsupportedError for a tensor that is quantized in another way, InputError for an FP8 weight without scales.
    """
    names = [name for name in source.tensors if name not in taken]
    scaled: dict[str, Scaled] = {}
    dropped: set[str] = set()
    for name in names:
        info = source.tensors[name]
        _refuse(source, info)
        if info.dtype != DECODED:
            continue
        found = _companions(source, name)
        dropped.update(found[ASIDE])
        if len(found[SCALE]) != 1:
            what = "no scale" if not found[SCALE] else f"{len(found[SCALE])} tensors of scales"
            raise InputError(
                f"{source.shards[info.shard].path}: tensor {name!r} is FP8 and has {what}; download the model again, "
                "or convert its BF16 release."
            )
        scale = source.tensors[found[SCALE][0]]
        dropped.add(scale.name)
        try:
            shape, block = scales.grid(info, scale, blocks, False)
        except (InputError, UnsupportedError) as error:
            raise type(error)(f"{source.shards[info.shard].path}: {error}") from None
        scaled[name] = Scaled(info, scale, shape, block)
    kept = {name: scaled.get(name) for name in names if name not in dropped}
    return Beside(kept, tuple(sorted(dropped)))


def _companions(source: TensorSource, name: str) -> dict[str, list[str]]:
    """The scales of a weight and of its input that are there."""
    stem = name.removesuffix(".weight")
    found: dict[str, list[str]] = {SCALE: [], ASIDE: []}
    for pattern, role in COMPANIONS.items():
        made = pattern.replace("{t}", name).replace("{s}", stem)
        if role in found and made != name and made in source.tensors:
            found[role].append(made)
    return found


def _refuse(source: TensorSource, info: TensorInfo) -> None:
    """Raise UnsupportedError for what no loader of the output would understand."""
    what = PACKED_DTYPES.get(info.dtype) if info.name.endswith(".weight") or len(info.shape) == 3 else None
    what = next((kind for suffix, kind in PACKED_NAMES.items() if info.name.endswith(suffix)), what)
    if what is not None:
        raise UnsupportedError(
            f"{source.shards[info.shard].path}: tensor {info.name!r} is {what}, and stands outside the routed experts; "
            "that is not an input yet: use the model's BF16 or FP8 (E4M3) release."
        )
