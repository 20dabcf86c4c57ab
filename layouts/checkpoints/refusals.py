"""What a checkpoint must not have, and must not lack, before anything of it is converted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ktconvert.layouts.checkpoints.archs import Style
from ktconvert.layouts.checkpoints.match import BIAS, Layer, Scan, name_of
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant.matrix import BF16, F32, FP8_E4M3, FP16

# safetensors dtype of a weight -> Matrix.kind
KINDS = {"BF16": BF16, "F16": FP16, "F32": F32, "F8_E4M3": FP8_E4M3}
# What a weight of another dtype is: by itself, else by the dtype of the scale beside it.
BY_WEIGHT = {"F8_E5M2": "FP8 E5M2", "F64": "float64"}
BY_SCALE = {"U8": "MXFP4", "F8_E8M0": "MXFP4", "F8_E4M3": "NVFP4"}


def refuse_formats(foreign: Iterable[tuple[str, str]]) -> None:
    """Tensors (kind, name) whose names already say that they are no input. Raises UnsupportedError."""
    for kind, name in foreign:
        if kind == BIAS:
            raise UnsupportedError(f"tensor {name!r}: kt-kernel's AMX formats have no place for biases of experts")
        raise _no_input(name, kind)


def refuse_dtypes(layers: Iterable[Layer]) -> None:
    """Weights that are neither BF16, FP16, F32 nor FP8 E4M3. Raises UnsupportedError."""
    for layer in layers:
        for key, weight in layer.weights.items():
            if weight.dtype not in KINDS:
                scale = layer.scales.get(key)
                what = BY_SCALE.get(scale.dtype if scale else "", "packed or integer")
                raise _no_input(weight.name, f"{BY_WEIGHT.get(weight.dtype, what)} ({weight.dtype})")


def refuse_strays(seen: Scan, prefix: str, mtp: Iterable[int]) -> None:
    """Names among the experts of a converted layer that are none of their parts. Raises InputError."""
    left_out = tuple(f"{prefix}layers.{n}." for n in mtp)
    for name in seen.strays:
        if name.startswith(prefix) and not (left_out and name.startswith(left_out)):
            raise InputError(
                f"tensor {name!r} stands among the experts but is none of their parts; "
                "remove it, or describe this model with --arch-file"
            )


def refuse_gaps(seen: Scan, style: Style, prefix: str, layers: Collection[int], count: int) -> None:
    """Of `count` layers, one that has a router but no experts, or that is not there at all, was lost: InputError."""
    if "{prefix}" not in getattr(style, style.parts[0]):
        return  # where such a row's other tensors are is not known
    for n in range(count):
        if n in layers:
            continue
        name = name_of(style, prefix, style.parts[0], n, 0)
        if (prefix, n) in seen.routers:
            raise InputError(f"layer {n} has a router but no experts ({name!r} is missing); download the model again")
        if n > min(layers) and (prefix, n) not in seen.present:
            raise InputError(f"layer {n} is missing ({name!r} and all else); download the model again")


def _no_input(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"tensor {name!r}: {what} is not an input yet; use the model's BF16 or FP8 (E4M3) release")
