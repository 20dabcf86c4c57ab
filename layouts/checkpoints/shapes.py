"""Measurement of one layer's experts: their number, width and orientation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.archs import ARCHS, Arch, Fused, Separate, Stacked, Style
from ktconvert.layouts.checkpoints.match import (
    BIAS_PATTERNS,
    StoredLayer,
    describe_values,
    expand_template,
    unread_format_error,
)
from ktconvert.layouts.encodings import CheckpointEncoding, Weight
from ktconvert.layouts.errors import INCOMPLETE, InputError, UnsupportedError, bad_tensor
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo

Recorded = tuple[str, int] | None  # a config key and its value, if the config has it
Weights = Mapping[tuple[str, int], Weight]  # by part of the style and expert, -1 where one holds all experts
Biases = Mapping[tuple[str, int], TensorInfo]
BIAS_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class MoeLayer:
    """One layer whose experts can be converted, with E, H and I.

    number       its number in the names of its tensors
    first_expert  what these names add to the numbers of its experts
    weights      of all experts, in the checkpoint's order
    kinds        the first weight of each matrix with the same roles, dtypes and shapes of tensors; rarely more than one
    biases       of all experts, as weights; {} if they have none
    unused       names of tensors that belong to the experts and are not needed
    input_major  whether every stored matrix is [k, n], the transpose of a linear's weight; in flat stacks only down is
    """

    style: Style
    prefix: str
    number: int
    weights: Weights
    kinds: Mapping[tuple[str, object], Weight]
    unused: tuple[str, ...]
    num_experts: int
    hidden: int
    width: int
    input_major: bool
    biases: Biases = field(default_factory=dict)
    first_expert: int = 0

    def is_input_major(self, projection: str) -> bool:
        is_output_major = isinstance(self.style, Stacked) and self.style.flat and projection != "down"
        return self.input_major and not is_output_major


def measure_layer(
    source: TensorSource, arch: Arch, stored: StoredLayer, prefix: str, n: int, most: int, partial: bool
) -> MoeLayer:
    """Measure layer n.

    most     number of experts if the config does not record it
    partial  whether experts may be missing

    Raises InputError for a tensor that is missing, superfluous, misshapen or contradicts the config, UnsupportedError
    for a weight that no encoding reads.
    """
    style = stored.style
    experts, hidden, width = (
        cfg.find_valid_number(source.config, keys, n) for keys in (arch.experts, arch.hidden, arch.width)
    )
    if isinstance(style, Stacked) and style.flat:
        stored = _divide_stacks(stored, experts)
    weights, kinds = _make_weights(source, stored, prefix, n)
    separate = isinstance(style, Separate)
    count = _count_experts(weights, experts, most) if separate else 0
    found = sorted({expert for _, expert in weights})
    required: Sequence[int] = found if partial and found else range(count) if separate else (-1,)
    for matrix in style.matrices:
        for expert in required:
            if (matrix, expert) not in weights:
                rows = (weight.encoding for weight in weights.values())
                pattern = next((row.tensor_names[row.values_role][0] for row in rows), "{t}")  # or unused tensors alone
                number = stored.first_expert + expert
                name = encodings.expand_pattern(pattern, expand_template(style, prefix, matrix, n, number))
                problem = f"is missing, though layer {n} has other expert tensors"
                raise bad_tensor(name, problem, INCOMPLETE)
    first = weights[style.matrices[0], required[0]]
    count = count if separate else first.shape[0] if first.shape else 0
    if isinstance(style, Separate):
        h, i, input_major = _measure_separate(weights, first, count)
    elif isinstance(style, Stacked) and style.flat:
        h, i, input_major = _measure_flat(weights, style)
    else:
        h, i, input_major = (
            _measure_fused(weights) if isinstance(style, Fused) else _measure_stacked(weights, style, hidden, width)
        )
    for recorded, value, name in (
        (experts, count, "experts"),
        (hidden, h, "hidden size"),
        (width, i, "expert width"),
    ):
        if recorded is not None and recorded[1] != value:
            by_tensors = f"of shape {list(first.shape)}: by the tensors the {name} of layer {n} must be {value}"
            says = f"config.json says {recorded[0]} = {recorded[1]}"
            raise InputError.from_tensor(first.name, f"{by_tensors}, {says}", "they are not of one model")
    for weight in kinds.values():
        weight.resolve_scheme(input_major)
        _refuse_alternating_halves(weight, style)
    if len(kinds) > len(style.matrices):
        _refuse_uneven(weights, stored, prefix, n)
    _check_biases(stored, weights, arch, count, h, i)
    unused = tuple(stored.unused)
    return MoeLayer(
        style, prefix, n, weights, kinds, unused, count, h, i, input_major, stored.biases, stored.first_expert
    )


def _check_biases(stored: StoredLayer, weights: Weights, arch: Arch, experts: int, hidden: int, width: int) -> None:
    """Raise InputError unless all linears of the layer have a bias of their size, or none has one.

    A row of the table says which of both, and UnsupportedError is raised for unexpected biases; for any other family,
    the tensors decide.
    """
    biases, is_known = stored.biases, any(arch in row.stacks for row in ARCHS)
    if biases and is_known and not arch.function.biases:
        name = next(iter(biases.values())).name
        remedy = "use another release, or describe the model with --arch-file"
        raise UnsupportedError.from_tensor(name, f"is a bias, and experts of {arch.name} have none", remedy)
    if not biases and not (is_known and arch.function.biases):
        return
    rows = {"gate": width, "up": width, "gate_up": 2 * width, "down": hidden}
    for (matrix, expert), weight in weights.items():
        info = biases.get((matrix, expert))
        if info is None:
            missing = encodings.expand_pattern(BIAS_PATTERNS[not weight.name.endswith(".weight")], weight.name)
            raise bad_tensor(missing, "is missing, but the experts have biases", INCOMPLETE)
        shape = (rows[matrix],) if expert >= 0 else (experts, rows[matrix])
        if info.dtype not in BIAS_DTYPES or info.shape != shape:
            problem = f"is {info.dtype} of shape {list(info.shape)}, but a bias of {weight.name!r} must be"
            raise bad_tensor(info.name, f"{problem} {' or '.join(BIAS_DTYPES)} of shape {list(shape)}")


def _divide_stacks(stored: StoredLayer, experts: Recorded) -> StoredLayer:
    """Return the layer with its 2-D stacks [E * I, H] as 3-D ones, [E, I, H].

    Raises UnsupportedError for stacks with scales, InputError without a number of experts that divides their rows.
    """
    if experts is None or experts[1] < 1:
        name = stored.names[0]
        raise InputError.from_tensor(name, "has all experts in one matrix, but config.json has no number of experts")

    def divide(info: TensorInfo) -> TensorInfo:
        if len(info.shape) != 2 or info.shape[0] % experts[1]:
            problem = f"has shape {list(info.shape)}, but must be [{experts[1]} * I, H] by config.json: {experts[0]}"
            raise InputError.from_tensor(info.name, problem)
        return msgspec.structs.replace(info, shape=(experts[1], info.shape[0] // experts[1], info.shape[1]))

    for tensors in stored.tensors.values():
        if (scale := next((info for role, info in tensors.items() if role != "weight"), None)) is not None:
            problem = "belongs to a quantized matrix of all experts, which is not an input yet; use the BF16 release"
            raise UnsupportedError.from_tensor(scale.name, problem)
    divided = {key: {role: divide(info) for role, info in each.items()} for key, each in stored.tensors.items()}
    return replace(stored, tensors=divided)


def _make_weights(
    source: TensorSource, stored: StoredLayer, prefix: str, n: int
) -> tuple[dict[tuple[str, int], Weight], dict[tuple[str, object], Weight]]:
    """Return the weights and the kinds of a MoeLayer. The weights of a kind have the same encoding and shape."""
    weights: dict[tuple[str, int], Weight] = {}
    kinds: dict[tuple[str, object], Weight] = {}
    for (matrix, expert), tensors in stored.tensors.items():
        quantization = encodings.narrow_to_weight(source, tensors, source.quantization)
        # A scale with the suffix _inv has other rules. The order of the tensors is that of their files.
        forms = {(role, info.dtype, info.shape, info.name.endswith("_inv")) for role, info in tensors.items()}
        kind = matrix, (quantization.bits, frozenset(forms))
        if kind not in kinds:
            name = expand_template(stored.style, prefix, matrix, n, stored.first_expert + expert)
            row = encodings.find_encoding(tensors, quantization)
            if row is None:
                raise _make_unread_error(name, tensors)
            kinds[kind] = encodings.make_weight(row, name, tensors, quantization)
        same = kinds[kind]
        ordered = tensors if [*tensors] == [*same.tensors] else {role: tensors[role] for role in same.tensors}
        weights[matrix, expert] = Weight(same.encoding, ordered, same.shape, quantization)
    return weights, kinds


def _refuse_alternating_halves(weight: Weight, style: Style) -> None:
    """Raise UnsupportedError for two scales per expert, of gate and of up, if gate and up alternate."""
    for info in weight.tensors.values():
        if isinstance(style, Fused) and style.interleaved and info.shape[1:] == (2,) != weight.values_tensor.shape[1:2]:
            problem = (
                f"has 2 scales for each expert, and gate and up alternate in {weight.name!r}; use the BF16 release"
            )
            raise UnsupportedError.from_tensor(info.name, problem)


def _refuse_uneven(weights: Weights, stored: StoredLayer, prefix: str, n: int) -> None:
    """Raise InputError if only some experts have zero points or an order of columns."""
    most_complete: dict[tuple[str, ...], Weight] = {}
    for (matrix, _), weight in weights.items():
        key = matrix, weight.encoding.name, *weight.encoding.tensor_names
        if key not in most_complete or len(weight.tensors) > len(most_complete[key].tensors):
            most_complete[key] = weight
    for (matrix, expert), weight in weights.items():
        other = most_complete[matrix, weight.encoding.name, *weight.encoding.tensor_names]
        for role in other.tensors.keys() - weight.tensors.keys():
            missing_name = encodings.expand_pattern(
                weight.encoding.tensor_names[role][0],
                expand_template(stored.style, prefix, matrix, n, stored.first_expert + expert),
            )
            problem = f": {missing_name} is missing, and {other.tensors[role].name!r} is there"
            raise bad_tensor(weight.name, problem, INCOMPLETE)


def _make_unread_error(name: str, tensors: encodings.Tensors) -> Exception:
    """Return the error for tensors that no encoding reads.

    They have an unsupported format, or their scales or the tensor with the values are missing.
    """
    candidates = [
        (row, info) for row in encodings.CHECKPOINT_ENCODINGS if (info := tensors.get(row.values_role)) is not None
    ]
    unscaled = [row for row, info in candidates if info.dtype in row.dtypes and "scale" in row.tensor_names]
    if unscaled and "scale" not in tensors:
        info, scale = candidates[0][1], encodings.expand_pattern(unscaled[0].tensor_names["scale"][0], name)
        return bad_tensor(info.name, f"is {info.dtype}, and its scales ({scale}) are missing", INCOMPLETE)
    if candidates:
        return unread_format_error(candidates[0][1].name, describe_values(candidates[0][1], tensors.get("scale")))
    role, info = next(iter(tensors.items()))
    rows = [row for row in reversed(encodings.CHECKPOINT_ENCODINGS) if role in row.tensor_names]
    row = next((row for row in rows if all(_has_role(row, other, name, t) for other, t in tensors.items())), rows[0])
    values = encodings.expand_pattern(row.tensor_names[row.values_role][0], name)
    return bad_tensor(info.name, f"is a scale whose weight {values!r} is missing", INCOMPLETE)


def _has_role(row: CheckpointEncoding, role: str, name: str, info: TensorInfo) -> bool:
    return info.name in (encodings.expand_pattern(pattern, name) for pattern in row.tensor_names.get(role, ()))


def _count_experts(weights: Weights, recorded: Recorded, most: int) -> int:
    """Return the number of experts by the config, else the maximum of all layers. Raise InputError for one too many."""
    last = max((expert for _, expert in weights), default=0)
    count = max(1, recorded[1] if recorded is not None else most)
    if last >= count and recorded is not None:
        name = next(weight.name for (_, expert), weight in weights.items() if expert == last)
        raise InputError.from_tensor(name, f"is one expert too many: config.json says {recorded[0]} = {recorded[1]}")
    return count


def _measure_separate(weights: Weights, first: Weight, count: int) -> tuple[int, int, bool]:
    if len(first.shape) != 2 or 0 in first.shape:
        raise _misshapen(first, "a matrix [I, H]")
    width, hidden = first.shape
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    for (matrix, expert), info in weights.items():
        if expert < count and info.shape != shapes[matrix]:
            raise _misshapen(info, f"{list(shapes[matrix])}, since {first.name!r} is {list(first.shape)}")
    return hidden, width, False


def _measure_fused(weights: Weights) -> tuple[int, int, bool]:
    """Return H, I and the orientation: [E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H] (input-major)."""
    gate_up, down = weights["gate_up", -1], weights["down", -1]
    if len(gate_up.shape) == len(down.shape) == 3 and gate_up.shape[0] == down.shape[0] and 0 not in down.shape:
        _, a, b = gate_up.shape
        _, c, d = down.shape
        if (a, b) == (2 * d, c):
            return c, d, False
        if (a, b) == (d, 2 * c):
            return d, c, True
    two = f"{gate_up.name!r} of shape {list(gate_up.shape)} and {down.name!r} of shape {list(down.shape)}"
    problem = f"tensors {two} are neither [E, 2I, H] with [E, H, I] nor [E, H, 2I] with [E, I, H]"
    raise InputError(problem, INCOMPLETE, tensor=gate_up.name)


def _measure_stacked(weights: Weights, style: Stacked, hidden: Recorded, width: Recorded) -> tuple[int, int, bool]:
    """Return H, I and the orientation by the config, since both fit any shapes; if I = H, by the row of the table."""
    *others, down = (weights[p, -1] for p in style.matrices)
    first = others[0]
    if len(first.shape) != 3 or 0 in first.shape:
        raise _misshapen(first, "three-dimensional, [E, I, H]")
    e, a, b = first.shape
    for info, want in (*((other, (e, a, b)) for other in others), (down, (e, b, a))):
        if info.shape != want:
            raise _misshapen(info, f"{list(want)}, since {first.name!r} is {list(first.shape)}")
    as_rows = all(recorded is None or recorded[1] == value for recorded, value in ((width, a), (hidden, b)))
    as_columns = all(recorded is None or recorded[1] == value for recorded, value in ((hidden, a), (width, b)))
    output_major = style.output_major if style.fixed or as_rows == as_columns else as_rows
    return (b, a, False) if output_major else (a, b, True)


def _measure_flat(weights: Weights, style: Stacked) -> tuple[int, int, bool]:
    gate = weights["gate", -1]
    for matrix in style.matrices:
        if (info := weights[matrix, -1]).shape != gate.shape:
            raise _misshapen(info, f"{list(gate.shape)}, as {gate.name!r}")
    return gate.shape[2], gate.shape[1], True


def _misshapen(info: Weight, want: str) -> InputError:
    return bad_tensor(info.name, f"has shape {list(info.shape)}, but must be {want}")
