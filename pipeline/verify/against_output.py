"""An output against another, merged or loose, ours or kt-kernel's: which tensors differ, which are on one side only."""

from __future__ import annotations

from collections import Counter

from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.measuring import measure as measure_of
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify.checks import CHUNK, Check, CheckItems, first_difference, item_problems
from ktconvert.pipeline.verify.structure import sizes_of


def compare_outputs(
    output: Output, measure: Measure, other: Output, check_items: CheckItems, reporter: Reporter
) -> Check:
    """Require the same expert tensors with the same bytes on both sides; other tensors count where both have them."""
    problems = [
        f"{name} is {value} here, {there} in {other.root}"
        for (name, value), there in zip(sizes_of(measure).items(), sizes_of(measure_of(other)).values(), strict=True)
        if value != there and not (0 in (value, there) and name in ("hidden", "intermediate"))  # 0: not known
    ]
    problems += [*_one_sided(output, other), *_one_sided(other, output)]
    found = pairs(output, other)
    sizes = [stored.nbytes for stored, _ in found.values()]
    problems += item_problems(check_items, "equal tensors", list(found), sizes, reporter)
    lone = len(output.others.keys() ^ other.others.keys())
    notes = (f"{lone} tensors that are no routed experts are on one side only",) if lone else ()
    result = f"{len(found)} tensors, the same bytes in {other.root}"
    return Check(result, tuple(problems), notes, "convert the wrong one again")


def pairs(output: Output, other: Output) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    both = {
        output.names.key(place, what): (stored, other.tensors[place, what])
        for (place, what), stored in sorted(output.tensors.items())
        if (place, what) in other.tensors
    }
    shared = output.others.keys() & other.others.keys()
    return both | {name: (output.others[name], other.others[name]) for name in sorted(shared)}


def _one_sided(output: Output, other: Output) -> list[str]:
    """What `other` lacks; a layer that it lacks altogether counts as one."""
    lone = sorted(output.tensors.keys() - other.tensors.keys())
    layers = {place.layer for place, _ in other.tensors}
    whole = Counter(place.layer for place, _ in lone if place.layer not in layers)
    problems = [f"layer {layer} ({count} tensors) is missing in {other.root}" for layer, count in whole.items()]
    return problems + [
        f"{output.names.key(place, what)} is missing in {other.root} ({output.names.describe(place, what)})"
        for place, what in lone
        if place.layer in layers
    ]


def tensor_difference(output: Output, other: Output, name: str, a: TensorInfo, b: TensorInfo) -> str | None:
    """How a tensor differs; None where both are the same."""
    if a.nbytes != b.nbytes:
        return f"{name} has {a.nbytes} bytes, {b.nbytes} in {other.root}"
    for start in range(0, a.nbytes, CHUNK):
        stop = min(start + CHUNK, a.nbytes)
        difference = first_difference(output.read(a, start, stop), other.read(b, start, stop))
        if difference is not None:
            at, mine, theirs, _ = difference
            return f"{name} differs: byte {start + at} is {mine:#04x}, {theirs:#04x} in {other.root}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{name} is {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)} in {other.root}"
    return None
