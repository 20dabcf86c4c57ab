"""Measurement of an output by its bytes: its format, number of NUMA slices, and the sizes of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.encodings.encoding import BIAS, infer_sizes, tensor_suffixes
from ktconvert.layouts.outputs import FORMATS, LOOSE_METHODS, OPAQUE, Format, mixed
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import slice_shape

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Measure:
    """The format and sizes of an output, by its bytes.

    method    "AMXINT4", ..., "MIXED", or "unknown" if the sizes fit no format
    fmt       the format; None if the bytes have no known meaning
    numa      number of NUMA slices
    backward  whether there are transposed matrices
    gated     whether experts have a gate
    shapes    layer -> (E, H, I); H and I are 0 if they cannot be determined
    """

    method: str
    fmt: Format | None
    numa: int
    backward: bool
    shapes: dict[int, Shape]
    gated: bool = True

    def layer_method(self, layer: int) -> str:
        return self.method if self.fmt is None else self.fmt.layer_format(layer).name


class TensorKind(NamedTuple):
    layer: int
    projection: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def measure_output(output: Output, hidden: int = 0) -> Measure:
    """Determine format, T, E, H and I by the majority of the tensors.

    hidden  hidden size of the source, if tensors do not show it
    """
    formats = formats_by_names(output)
    numa = 1
    backward = False
    experts: dict[int, int] = {}
    kinds: dict[int, Counter[TensorKind]] = {}  # layer -> kinds of its tensors
    for (slice_id, suffix), stored in output.tensors.items():
        numa = max(numa, slice_id.node + 1)
        backward = backward or slice_id.backward
        experts[slice_id.layer] = max(experts.get(slice_id.layer, 0), slice_id.expert + 1)
        if slice_id.backward != formats[0].forward:
            kind = TensorKind(slice_id.layer, slice_id.projection, suffix, stored.dtype, stored.shape, stored.nbytes)
            kinds.setdefault(slice_id.layer, Counter())[kind] += 1
    claimed = claims.find_sizes(output.config, min(experts, default=0))["hidden size"]
    recorded = output.facts.get("hidden", claimed[1] if claimed else 0) or hidden
    sizes: dict[int, tuple[int, int]] = {}
    by_layer: dict[int, Format] = {}
    is_known = True
    layer_formats = mixed.find_declared_formats(output)
    separate = bool(layer_formats and experts)  # whether layers may have different formats
    for layers in [[layer] for layer in sorted(experts)] if separate else [sorted(experts)]:
        layer_kinds = {kind: count for layer in layers for kind, count in kinds.get(layer, {}).items()}
        best, most_fit, layer_sizes = _choose_format(layer_formats or formats, layer_kinds, layers, recorded)
        sizes |= layer_sizes
        is_known = is_known and most_fit
        by_layer |= dict.fromkeys(layers, best)
    fmt = mixed.combine_formats(by_layer) if layer_formats and by_layer else best
    has_no_sizes = not fmt.forward and not any(hidden for hidden, _ in sizes.values())
    method = fmt.name if is_known or has_no_sizes else "unknown"
    declared = {LOOSE_METHODS.get(prefix, prefix) for prefix in output.prefixes}
    declared |= {metadata.get("method", "") for metadata in output.metadata.values()}
    if fmt.name not in OPAQUE and (opaque := sorted(declared & OPAQUE)):
        method = opaque[0]
        is_known = False
    shapes = {layer: (experts[layer], hidden, width * numa) for layer, (hidden, width) in sorted(sizes.items())}
    if any(suffix == BIAS for _, suffix in output.tensors):
        fmt = fmt.with_biases()
    gated = not output.tensors or any(slice_id.projection == "gate" for slice_id, _ in output.tensors)
    return Measure(method, fmt if is_known else None, numa, backward, shapes, gated)


def _choose_format(
    formats: Iterable[Format], kinds: Mapping[TensorKind, int], layers: list[int], hidden: object
) -> tuple[Format, bool, dict[int, tuple[int, int]]]:
    """Return the format that most tensors of these layers fit, whether most of them fit it, and the layers' sizes."""
    candidates = []
    for fmt in formats:
        weight = fmt.encoding.tensors(0, 0)[0]
        sizes = (
            _sizes_by_majority(fmt, kinds, layers) if fmt.forward else _sizes_from_products(fmt, kinds, layers, hidden)
        )
        # Formats with the same names may fit with different sizes: then the dtype decides.
        agreeing = sum(
            count for kind, count in kinds.items() if (kind.suffix, kind.dtype) == (weight.name, weight.dtype)
        )
        candidates.append((_count_fitting(fmt, kinds, sizes), agreeing, fmt, sizes))
    fitting, _, best, sizes = max(candidates, key=lambda candidate: candidate[:2])
    weights = sum(count for kind, count in kinds.items() if kind.suffix == tensor_suffixes(best.encoding)[0])
    return best, 2 * fitting > weights, sizes


def formats_by_names(output: Output) -> tuple[Format, ...]:
    """Return the formats, at least one, that the names of tensors and loose files allow.

    Only names of files identify formats of backward matrices.
    """
    named = tuple(FORMATS[method].apply_settings(output.facts) for method in output.methods)
    loose_methods = {LOOSE_METHODS.get(prefix) for prefix in output.prefixes}
    backward_only = tuple(fmt for fmt in named if not fmt.forward and loose_methods == {fmt.name})
    return backward_only or tuple(fmt for fmt in named if fmt.forward)


def _sizes_by_majority(fmt: Format, kinds: Mapping[TensorKind, int], layers: list[int]) -> dict[int, tuple[int, int]]:
    """Return layer -> (hidden size, width of a slice), by the majority of the layer's tensors, else of all tensors."""
    votes: dict[tuple[int | None, str], Counter[int]] = {}
    for kind, count in kinds.items():
        n, k = infer_sizes(fmt.encoding, kind.suffix, kind.shape, kind.nbytes)
        hidden, width = (n, k) if kind.projection == "down" else (k, n)
        for name, size in (("hidden", hidden), ("width", width)):
            if size is not None:
                votes.setdefault((kind.layer, name), Counter())[size] += count
                votes.setdefault((None, name), Counter())[size] += count

    def find_majority(layer: int, name: str) -> int:
        counts = votes.get((layer, name)) or votes.get((None, name))
        return counts.most_common(1)[0][0] if counts else 0

    return {layer: (find_majority(layer, "hidden"), find_majority(layer, "width")) for layer in layers}


def _sizes_from_products(
    fmt: Format, kinds: Mapping[TensorKind, int], layers: Iterable[int], hidden: object
) -> dict[int, tuple[int, int]]:
    """Return layer -> (hidden size, width of a slice) for tensors whose sizes show only the product of both.

    hidden  hidden size of all layers; if it is unknown, the sizes are 0
    """
    if type(hidden) is not int or hidden < 1:
        return dict.fromkeys(layers, (0, 0))
    weight = fmt.encoding.tensors(hidden, 1)[0]
    widths: dict[int, Counter[int]] = {layer: Counter() for layer in layers}
    for kind, count in kinds.items():
        if kind.suffix == weight.name:
            widths[kind.layer][kind.nbytes // weight.nbytes] += count
    return {layer: (hidden, max(votes, key=votes.__getitem__, default=0)) for layer, votes in widths.items()}


def _count_fitting(fmt: Format, kinds: Mapping[TensorKind, int], sizes: Mapping[int, tuple[int, int]]) -> int:
    """Return how many tensors have the name and the size that the format's encoding gives them."""

    def is_fitting(kind: TensorKind) -> bool:
        weight = fmt.encoding.tensors(*slice_shape(kind.projection, *sizes[kind.layer], 1))[0]
        return kind.suffix == weight.name and kind.nbytes == weight.nbytes > 0

    return sum(count for kind, count in kinds.items() if is_fitting(kind))
