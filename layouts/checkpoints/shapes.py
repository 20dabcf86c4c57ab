"""Measures one layer's experts: how many, how wide, and which way round they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints import scales
from ktconvert.layouts.checkpoints.archs import Arch, Fused, Separate, Stacked, Style
from ktconvert.layouts.checkpoints.match import Layer, name_of
from ktconvert.layouts.checkpoints.source import TensorInfo
from ktconvert.layouts.errors import InputError

Said = tuple[str, int] | None  # a config key and its value


@dataclass(frozen=True)
class MoeLayer:
    """One layer whose experts can be converted.

    num_experts, hidden, width   E, H, I.
    input_major   every stored matrix is [k, n], the transpose of a linear's weight.
    """

    stored: Layer
    num_experts: int
    hidden: int
    width: int
    input_major: bool


def measure(
    config: dict[str, Any],
    arch: Arch,
    stored: Layer,
    prefix: str,
    n: int,
    blocks: Sequence[tuple[int, int]],
    most: int,
) -> MoeLayer:
    """Layer n's shape; `most` is the number of experts where the config names none.

    Raises InputError where a tensor is missing, too many or misshapen, or the config disagrees.
    """
    style = stored.style
    experts = cfg.number(config, arch.experts, n)
    hidden = cfg.number(config, arch.hidden, n)
    width = cfg.number(config, arch.width, n)
    if isinstance(style, Separate):
        count = _count(stored, style, prefix, n, experts, most)
        h, i, turned = _separate(stored, count)
        first = stored.weights["gate", 0]
    else:
        for part in style.parts:
            if (part, -1) not in stored.weights:
                raise _missing(style, prefix, part, n, -1)
        first = stored.weights[style.parts[0], -1]
        count = first.shape[0] if first.shape else 0
        h, i, turned = _fused(stored) if isinstance(style, Fused) else _stacked(stored, style, hidden, width)
    for said, value, what in ((experts, count, "experts"), (hidden, h, "hidden size"), (width, i, "expert width")):
        if said is not None and said[1] != value:
            raise InputError(
                f"tensor {first.name!r} of shape {list(first.shape)}: by the tensors the {what} of layer {n} must be "
                f"{value}, config.json says {said[0]} = {said[1]}; they are not of one model"
            )
    _check_scales(stored, style, prefix, n, blocks, turned)
    return MoeLayer(stored, count, h, i, turned)


def _count(stored: Layer, style: Separate, prefix: str, n: int, said: Said, most: int) -> int:
    """How many experts: as many as the config says, else as many as any layer has; each with all its parts."""
    seen = {expert for _, expert in stored.weights} | {expert for _, expert in stored.scales}
    last = max(seen, default=0)
    count = max(1, said[1] if said is not None else most)
    if last >= count and said is not None:
        part = next(p for p, e in (*stored.weights, *stored.scales) if e == last)
        name = name_of(style, prefix, part, n, last)
        raise InputError(f"tensor {name!r} is one expert too many: config.json says {said[0]} = {said[1]}")
    for part in style.parts:
        for expert in range(count):
            if (part, expert) not in stored.weights:
                raise _missing(style, prefix, part, n, expert)
    return count


def _separate(stored: Layer, count: int) -> tuple[int, int, bool]:
    gate = stored.weights["gate", 0]
    if len(gate.shape) != 2 or 0 in gate.shape:
        raise _misshapen(gate, "a matrix [I, H]")
    width, hidden = gate.shape
    for part, want in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        for expert in range(count):
            info = stored.weights[part, expert]
            if info.shape != want:
                raise _misshapen(info, f"{list(want)}, since {gate.name!r} is {list(gate.shape)}")
    return hidden, width, False


def _fused(stored: Layer) -> tuple[int, int, bool]:
    """Both tensors together always decide: [E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H]."""
    gate_up, down = stored.weights["gate_up", -1], stored.weights["down", -1]
    if len(gate_up.shape) == len(down.shape) == 3 and gate_up.shape[0] == down.shape[0] and 0 not in down.shape:
        _, a, b = gate_up.shape
        _, c, d = down.shape
        if (a, b) == (2 * d, c):
            return c, d, False
        if (a, b) == (d, 2 * c):
            return d, c, True
    raise InputError(
        f"tensors {gate_up.name!r} of shape {list(gate_up.shape)} and {down.name!r} of shape {list(down.shape)} are "
        "neither [E, 2I, H] with [E, H, I] nor [E, H, 2I] with [E, I, H]; download the model again"
    )


def _stacked(stored: Layer, style: Stacked, hidden: Said, width: Said) -> tuple[int, int, bool]:
    """Here both ways round fit any shapes: the config decides, and where I = H the row of the table."""
    gate, up, down = (stored.weights[p, -1] for p in style.parts)
    if len(gate.shape) != 3 or 0 in gate.shape:
        raise _misshapen(gate, "three-dimensional, [E, I, H]")
    e, a, b = gate.shape
    for info, want in ((up, (e, a, b)), (down, (e, b, a))):
        if info.shape != want:
            raise _misshapen(info, f"{list(want)}, since {gate.name!r} is {list(gate.shape)}")
    as_rows = all(said is None or said[1] == value for said, value in ((width, a), (hidden, b)))
    as_columns = all(said is None or said[1] == value for said, value in ((hidden, a), (width, b)))
    output_major = style.output_major if as_rows == as_columns else as_rows
    return (b, a, False) if output_major else (a, b, True)


def _check_scales(
    stored: Layer, style: Style, prefix: str, n: int, blocks: Sequence[tuple[int, int]], turned: bool
) -> None:
    """Every FP8 weight has one scale tensor that fits it, and nothing else has one."""
    fitting: set[tuple[object, ...]] = set()
    for key, weight in stored.weights.items():
        scale = stored.scales.get(key)
        if weight.dtype != "F8_E4M3":
            if scale is not None:
                raise InputError(
                    f"tensor {scale.name!r} scales {weight.name!r}, which is {weight.dtype} and needs none"
                )
            continue
        if scale is None:
            raise InputError(f"tensor {weight.name!r} is FP8 but {weight.name}_scale_inv is missing; download again")
        shapes = (weight.shape, scale.shape, scale.dtype, scale.name.endswith("_inv"))
        if shapes not in fitting:
            scales.grid(weight, scale, blocks, turned)
            fitting.add(shapes)
    for key, scale in stored.scales.items():
        if key not in stored.weights:
            name = name_of(style, prefix, key[0], n, key[1])
            raise InputError(f"tensor {scale.name!r} is a scale whose weight {name!r} is missing; download it again")


def _missing(style: Style, prefix: str, part: str, n: int, expert: int) -> InputError:
    name = name_of(style, prefix, part, n, expert)
    return InputError(
        f"tensor {name!r} is missing, though layer {n} has other expert tensors; download the model again"
    )


def _misshapen(info: TensorInfo, want: str) -> InputError:
    return InputError(f"tensor {info.name!r} has shape {list(info.shape)}, but must be {want}; download it again")
