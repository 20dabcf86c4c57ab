"""Measures one layer's experts: how many, how wide, and which way round they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.archs import Arch, Fused, Separate, Stacked, Style
from ktconvert.layouts.checkpoints.match import StoredLayer, name_of, no_input, of_values
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import CheckpointEncoding, Weight
from ktconvert.layouts.errors import INCOMPLETE, InputError, UnsupportedError, damaged_tensor
from ktconvert.layouts.tensors import TensorInfo

Recorded = tuple[str, int] | None  # a config key and its value, if the config has it
Weights = Mapping[tuple[str, int], Weight]  # by part of the style and expert, -1 where one holds all experts


@dataclass(frozen=True)
class MoeLayer:
    """One layer whose experts can be converted, of E, H and I.

    weights      of all experts, in the order in which the checkpoint names them
    aside        names of tensors that belong to the experts and are not needed
    input_major  every stored matrix is [k, n], the transpose of a linear's weight
    """

    style: Style
    prefix: str
    weights: Weights
    aside: tuple[str, ...]
    num_experts: int
    hidden: int
    width: int
    input_major: bool


def measure(source: TensorSource, arch: Arch, stored: StoredLayer, prefix: str, n: int, most: int) -> MoeLayer:
    """Layer n's shape; `most` is the number of experts if the config does not record it. InputError where a tensor
    is missing, too many, misshapen or the config disagrees, UnsupportedError for a weight that no row reads.
    """
    style = stored.style
    weights = _weights(source, stored, prefix, n)
    experts, hidden, width = (cfg.number(source.config, keys, n) for keys in (arch.experts, arch.hidden, arch.width))
    separate = isinstance(style, Separate)
    count = _count(weights, experts, most) if separate else 0
    for part in style.parts:
        for expert in range(count) if separate else (-1,):
            if (part, expert) not in weights:
                rows = (weight.encoding for weight in weights.values())
                pattern = next((row.tensors[row.values][0] for row in rows), "{t}")  # or unused tensors alone
                name = encodings.spelled(pattern, name_of(style, prefix, part, n, expert))
                what = f"is missing, though layer {n} has other expert tensors"
                raise damaged_tensor(name, what, INCOMPLETE)
    first = weights[style.parts[0], 0 if separate else -1]
    count = count if separate else first.shape[0] if first.shape else 0
    if isinstance(style, Separate):
        h, i, turned = _separate(weights, count)
    else:
        h, i, turned = _fused(weights) if isinstance(style, Fused) else _stacked(weights, style, hidden, width)
    for recorded, value, what in ((experts, count, "experts"), (hidden, h, "hidden size"), (width, i, "expert width")):
        if recorded is not None and recorded[1] != value:
            by_tensors = f"of shape {list(first.shape)}: by the tensors the {what} of layer {n} must be {value}"
            says = f"config.json says {recorded[0]} = {recorded[1]}"
            raise InputError.of_tensor(first.name, f"{by_tensors}, {says}", "they are not of one model")
    fitting: set[tuple[object, ...]] = set()
    for weight in weights.values():
        shapes = tuple((role, t.shape, t.dtype, t.name.endswith("_inv")) for role, t in weight.tensors.items())
        if (alike := (weight.encoding.name, shapes)) not in fitting:
            weight.fit(turned)
            _refuse_alternating_halves(weight, style)
            fitting.add(alike)
    _refuse_uneven(weights, style, prefix, n)
    return MoeLayer(style, prefix, weights, tuple(stored.aside), count, h, i, turned)


def _weights(source: TensorSource, stored: StoredLayer, prefix: str, n: int) -> dict[tuple[str, int], Weight]:
    weights: dict[tuple[str, int], Weight] = {}
    # Tensors of the same roles, dtypes and shapes are of one row.
    rows: dict[tuple[object, ...], CheckpointEncoding | None] = {}
    for (part, expert), tensors in stored.tensors.items():
        quantization = encodings.narrow_to_weight(source, tensors, source.quantization)
        alike = quantization.bits, *((role, info.dtype, info.shape) for role, info in tensors.items())
        if alike not in rows:
            rows[alike] = encodings.of_tensors(tensors, quantization)
        row = rows[alike]
        name = name_of(stored.style, prefix, part, n, expert)
        if row is None:
            raise _unread(name, tensors)
        weights[part, expert] = encodings.weight(row, name, tensors, quantization)
    return weights


def _refuse_alternating_halves(weight: Weight, style: Style) -> None:
    """Raise UnsupportedError for two scales for each expert, of gate and of up, where these are not halves."""
    for info in weight.tensors.values():
        if isinstance(style, Fused) and style.interleaved and info.shape[1:] == (2,) != weight.values.shape[1:2]:
            what = f"has 2 scales for each expert, and gate and up alternate in {weight.name!r}; use the BF16 release"
            raise UnsupportedError.of_tensor(info.name, what)


def _refuse_uneven(weights: Weights, style: Style, prefix: str, n: int) -> None:
    """Where one expert has zero points or an order of columns, all must have them. Raises InputError."""
    full: dict[tuple[str, ...], Weight] = {}
    for (part, _), weight in weights.items():
        key = part, weight.encoding.name, *weight.encoding.tensors
        if key not in full or len(weight.tensors) > len(full[key].tensors):
            full[key] = weight
    for (part, expert), weight in weights.items():
        other = full[part, weight.encoding.name, *weight.encoding.tensors]
        for role in other.tensors.keys() - weight.tensors.keys():
            lost = encodings.spelled(weight.encoding.tensors[role][0], name_of(style, prefix, part, n, expert))
            what = f": {lost} is missing, and {other.tensors[role].name!r} is there"
            raise damaged_tensor(weight.name, what, INCOMPLETE)


def _unread(name: str, tensors: encodings.Tensors) -> Exception:
    """No row reads these tensors: they are of a foreign format, or scales or the tensor with the values are missing."""
    held = [(row, info) for row in encodings.CHECKPOINT_ENCODINGS if (info := tensors.get(row.values)) is not None]
    unscaled = [row for row, info in held if info.dtype in row.dtypes and "scale" in row.tensors]
    if unscaled and "scale" not in tensors:
        info, scale = held[0][1], encodings.spelled(unscaled[0].tensors["scale"][0], name)
        return damaged_tensor(info.name, f"is {info.dtype}, and its scales ({scale}) are missing", INCOMPLETE)
    if held:
        return no_input(held[0][1].name, of_values(held[0][1], tensors.get("scale")))
    role, info = next(iter(tensors.items()))
    rows = [row for row in reversed(encodings.CHECKPOINT_ENCODINGS) if role in row.tensors]
    row = next((row for row in rows if all(_is_of(row, other, name, t) for other, t in tensors.items())), rows[0])
    values = encodings.spelled(row.tensors[row.values][0], name)
    return damaged_tensor(info.name, f"is a scale whose weight {values!r} is missing", INCOMPLETE)


def _is_of(row: CheckpointEncoding, role: str, name: str, info: TensorInfo) -> bool:
    return info.name in (encodings.spelled(pattern, name) for pattern in row.tensors.get(role, ()))


def _count(weights: Weights, recorded: Recorded, most: int) -> int:
    """The number of experts by the config, else the most of any layer. InputError for one too many."""
    last = max((expert for _, expert in weights), default=0)
    count = max(1, recorded[1] if recorded is not None else most)
    if last >= count and recorded is not None:
        name = next(weight.name for (_, expert), weight in weights.items() if expert == last)
        raise InputError.of_tensor(name, f"is one expert too many: config.json says {recorded[0]} = {recorded[1]}")
    return count


def _separate(weights: Weights, count: int) -> tuple[int, int, bool]:
    gate = weights["gate", 0]
    if len(gate.shape) != 2 or 0 in gate.shape:
        raise _misshapen(gate, "a matrix [I, H]")
    width, hidden = gate.shape
    for part, want in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        for expert in range(count):
            info = weights[part, expert]
            if info.shape != want:
                raise _misshapen(info, f"{list(want)}, since {gate.name!r} is {list(gate.shape)}")
    return hidden, width, False


def _fused(weights: Weights) -> tuple[int, int, bool]:
    """Both tensors together always decide: [E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H]."""
    gate_up, down = weights["gate_up", -1], weights["down", -1]
    if len(gate_up.shape) == len(down.shape) == 3 and gate_up.shape[0] == down.shape[0] and 0 not in down.shape:
        _, a, b = gate_up.shape
        _, c, d = down.shape
        if (a, b) == (2 * d, c):
            return c, d, False
        if (a, b) == (d, 2 * c):
            return d, c, True
    two = f"{gate_up.name!r} of shape {list(gate_up.shape)} and {down.name!r} of shape {list(down.shape)}"
    what = f"tensors {two} are neither [E, 2I, H] with [E, H, I] nor [E, H, 2I] with [E, I, H]"
    raise InputError(what, INCOMPLETE, tensor=gate_up.name)


def _stacked(weights: Weights, style: Stacked, hidden: Recorded, width: Recorded) -> tuple[int, int, bool]:
    """Both orientations fit any shapes here: the config decides, and if I = H the row of the table."""
    gate, up, down = (weights[p, -1] for p in style.parts)
    if len(gate.shape) != 3 or 0 in gate.shape:
        raise _misshapen(gate, "three-dimensional, [E, I, H]")
    e, a, b = gate.shape
    for info, want in ((up, (e, a, b)), (down, (e, b, a))):
        if info.shape != want:
            raise _misshapen(info, f"{list(want)}, since {gate.name!r} is {list(gate.shape)}")
    as_rows = all(recorded is None or recorded[1] == value for recorded, value in ((width, a), (hidden, b)))
    as_columns = all(recorded is None or recorded[1] == value for recorded, value in ((hidden, a), (width, b)))
    output_major = style.output_major if style.fixed or as_rows == as_columns else as_rows
    return (b, a, False) if output_major else (a, b, True)


def _misshapen(info: Weight, want: str) -> InputError:
    return damaged_tensor(info.name, f"has shape {list(info.shape)}, but must be {want}")
