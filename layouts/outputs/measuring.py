"""Measurement of an output by its bytes: its format, number of NUMA slices, and the sizes of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.encodings.encoding import infer_sizes, suffixes
from ktconvert.layouts.outputs import FORMATS, LOOSE_METHODS, OPAQUE, Format, mixed
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import slice_shape

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Measure:
    """The format and sizes of an output, by its bytes.

    method  "AMXINT4", ..., "MIXED", or "unknown" if the sizes fit no format
    fmt     None if the bytes have no known meaning
    shapes  layer -> (E, H, I); H and I are 0 if they cannot be determined
    """

    method: str
    fmt: Format | None
    numa: int
    backward: bool
    shapes: dict[int, Shape]

    def method_of(self, layer: int) -> str:
        return self.method if self.fmt is None else self.fmt.layer_format(layer).name


class TensorKind(NamedTuple):
    layer: int
    projection: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def measure(output: Output, hidden: int = 0) -> Measure:
    """Determine format, T, E, H and I by the majority of the tensors.

    hidden  hidden size of the source, if tensors do not show it
    """
    numa, backward, formats = 1, False, formats_by_names(output)
    experts: dict[int, int] = {}
    kinds: dict[int, Counter[TensorKind]] = {}  # by layer
    for (slice_id, suffix), s in output.tensors.items():
        numa, backward = max(numa, slice_id.node + 1), backward or slice_id.backward
        experts[slice_id.layer] = max(experts.get(slice_id.layer, 0), slice_id.expert + 1)
        if slice_id.backward != formats[0].forward:
            kind = TensorKind(slice_id.layer, slice_id.projection, suffix, s.dtype, s.shape, s.nbytes)
            kinds.setdefault(slice_id.layer, Counter())[kind] += 1
    claimed = claims.sizes(output.config, min(experts, default=0))["hidden size"]
    recorded = output.facts.get("hidden", claimed[1] if claimed else 0) or hidden
    sizes: dict[int, tuple[int, int]] = {}
    by_layer: dict[int, Format] = {}
    known = True
    of_layers = mixed.find_declared_formats(output)
    for layers in [[layer] for layer in sorted(experts)] if of_layers and experts else [sorted(experts)]:
        here = {kind: count for layer in layers for kind, count in kinds.get(layer, {}).items()}
        best, fits, found = _choose_format(of_layers or formats, here, layers, recorded)
        sizes |= found
        known = known and fits
        by_layer |= dict.fromkeys(layers, best)
    fmt = mixed.combine_formats(by_layer) if of_layers and by_layer else best
    unsized = not fmt.forward and not any(hidden for hidden, _ in sizes.values())
    method = fmt.name if known or unsized else "unknown"
    foreign = {LOOSE_METHODS.get(p, p) for p in output.prefixes}
    foreign |= {metadata.get("method", "") for metadata in output.metadata.values()}
    if fmt.name not in OPAQUE and (opaque := sorted(foreign & OPAQUE)):
        method, known = opaque[0], False
    shapes = {layer: (experts[layer], hidden, width * numa) for layer, (hidden, width) in sorted(sizes.items())}
    return Measure(method, fmt if known else None, numa, backward, shapes)


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
        agreeing = sum(n for kind, n in kinds.items() if (kind.suffix, kind.dtype) == (weight.name, weight.dtype))
        candidates.append((_count_fitting(fmt, kinds, sizes), agreeing, fmt, sizes))
    fitting, _, best, sizes = max(candidates, key=lambda candidate: candidate[:2])
    weights = sum(count for kind, count in kinds.items() if kind.suffix == suffixes(best.encoding)[0])
    return best, 2 * fitting > weights, sizes


def formats_by_names(output: Output) -> tuple[Format, ...]:
    """Return the formats, at least one, that the names of tensors and loose files allow.

    Only names of files identify formats of backward matrices.
    """
    named = tuple(FORMATS[method].apply_settings(output.facts) for method in output.methods)
    called = {LOOSE_METHODS.get(prefix) for prefix in output.prefixes}
    backward_only = tuple(fmt for fmt in named if not fmt.forward and called == {fmt.name})
    return backward_only or tuple(fmt for fmt in named if fmt.forward)


def _sizes_by_majority(fmt: Format, kinds: Mapping[TensorKind, int], layers: list[int]) -> dict[int, tuple[int, int]]:
    """Return layer -> (hidden size, width of a slice) by the majority of the layer's tensors, else of all tensors."""
    votes: dict[tuple[int | None, str], Counter[int]] = {}
    for kind, count in kinds.items():
        n, k = infer_sizes(fmt.encoding, kind.suffix, kind.shape, kind.nbytes)
        hidden, width = (n, k) if kind.projection == "down" else (k, n)
        for name, size in (("hidden", hidden), ("width", width)):
            if size is not None:
                votes.setdefault((kind.layer, name), Counter())[size] += count
                votes.setdefault((None, name), Counter())[size] += count

    def usual(layer: int, name: str) -> int:
        counted = votes.get((layer, name)) or votes.get((None, name))
        return counted.most_common(1)[0][0] if counted else 0

    return {layer: (usual(layer, "hidden"), usual(layer, "width")) for layer in layers}


def _sizes_from_products(
    fmt: Format, kinds: Mapping[TensorKind, int], layers: Iterable[int], hidden: object
) -> dict[int, tuple[int, int]]:
    """Return the same for tensors that show only the product, by the hidden size of all layers; 0 if unknown."""
    if type(hidden) is not int or hidden < 1:
        return dict.fromkeys(layers, (0, 0))
    weight = fmt.encoding.tensors(hidden, 1)[0]
    widths: dict[int, Counter[int]] = {layer: Counter() for layer in layers}
    for kind, count in kinds.items():
        if kind.suffix == weight.name:
            widths[kind.layer][kind.nbytes // weight.nbytes] += count
    return {layer: (hidden, max(votes, key=votes.__getitem__, default=0)) for layer, votes in widths.items()}


def _count_fitting(fmt: Format, kinds: Mapping[TensorKind, int], sizes: Mapping[int, tuple[int, int]]) -> int:

    def fits(kind: TensorKind) -> bool:
        weight = fmt.encoding.tensors(*slice_shape(kind.projection, *sizes[kind.layer], 1))[0]
        return kind.suffix == weight.name and kind.nbytes == weight.nbytes > 0

    return sum(number for kind, number in kinds.items() if fits(kind))
