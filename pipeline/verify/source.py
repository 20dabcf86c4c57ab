"""An output against its source: every expert quantized again, bytes compared, errors measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.source import TensorInfo
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import PROJECTIONS, Layout, merged
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.numa import illegal_reason
from ktconvert.layouts.outputs.output import Measure, Output, Place, Stored, place_of
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.native_quant import kernels
from ktconvert.pipeline.tell.report import Reporter
from ktconvert.pipeline.verify.found import Check, Found, LayerError, first_difference, gather, sample

PIECE = 4 << 20  # bytes of a copied tensor compared at a time


def source_bytes(output: Output, measure: Measure, model: MoeModel) -> int:
    """How many bytes of the source compare_source will read."""
    return sum(t.nbytes for n in measure.shapes if n in model.found for t in model.layer_tensors(n))


def compare_source(
    output: Output, measure: Measure, model: MoeModel, *, full: bool, threads: int, reporter: Reporter
) -> tuple[Check, list[LayerError]]:
    """Quantize every expert again and require equal bytes; measure the error of some experts of each layer, or of all.

    Raises UnsupportedError where we cannot make these bytes, InputError for a source that holds NaN or Inf or cannot be read.
    """
    layout = measure.layout
    if layout is None:
        raise UnsupportedError(
            f"{output.root}: {measure.method} weights cannot be made again here; verify them without --against SOURCE."
        )
    problems, notes = _same_shapes(output, measure, model)
    layers = [n for n, (_, h, i) in measure.shapes.items() if n in model.found and (h, i) == model.shape(n)[1:]]
    layers = [n for n in layers if illegal_reason(layout, *measure.shapes[n][1:], measure.numa) is None]

    def one(layer: int, expert: int) -> Found:
        count, hidden, intermediate = model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, measure.numa, measure.backward)
        measured = full or expert in sample(count)
        return _compare_expert(output, model, layout, grid, expert, measured)

    differing, equal, errors = gather(model, layers, one, threads, reporter)
    problems += differing
    copied, differing = _compare_copied(output, model)
    problems += differing
    told = f"{equal} tensors quantized again: the same bytes" + (f"; {copied} copied tensors too" if copied else "")
    return Check("source", told, tuple(problems), tuple(notes)), errors


def _same_shapes(output: Output, measure: Measure, model: MoeModel) -> tuple[list[str], list[str]]:
    problems: list[str] = []
    for layer, shape in measure.shapes.items():
        if layer not in model.found:
            problems.append(f"layer {layer} is here, but has no experts in {model.source.root}")
        elif shape != model.shape(layer):
            e, h, i = model.shape(layer)
            problems.append(
                f"layer {layer} has {shape[0]} experts of {shape[1]} x {shape[2]}, {model.source.root} has {e} of {h} x {i}"
            )
    absent = [n for n in model.layers if n not in measure.shapes]
    if not absent:
        return problems, []
    asked = output.manifest is not None and output.manifest["settings"].get("layers", "all") != "all"
    if asked:
        return problems, [f"layers {ranges(absent)} of the source were left out, as asked"]
    return [*problems, f"layers {ranges(absent)} of {model.source.root} are missing here"], []


def _compare_expert(
    output: Output, model: MoeModel, layout: Layout, grid: ExpertGrid, expert: int, measured: bool
) -> Found:
    found = Found()
    for projection in PROJECTIONS:
        linear = model.linear(grid.layer, expert, projection)
        for part in grid.parts(expert, projection):
            piece = part.of(linear, grid.numa)
            weight, scale = np.empty(layout.weight_bytes(part.n, part.k), np.uint8), np.empty(part.n, np.float32)
            try:
                layout.pack(piece, weight, scale)
            except kernels.NonFinite as error:
                raise InputError(_non_finite(model, part, error, piece.origin)) from error
            stored = {}
            for what, wanted in (("weight", weight), ("scale", scale.view(np.uint8))):
                there = output.tensors.get((place_of(part), what))
                if there is None or there.nbytes != wanted.size:
                    found.problems.append(_absent(place_of(part), what, there, wanted.size))
                    continue
                stored[what] = output.read(there)
                difference = first_difference(stored[what], wanted)
                if difference is None:
                    found.equal += 1
                else:
                    found.problems.append(_differs(place_of(part), what, there, difference))
            if measured and not part.backward and len(stored) == 2:
                sums = layout.error_sums(piece, stored["weight"], stored["scale"].view(np.float32))
                found.sums[projection] = found.sums.get(projection, np.zeros(4)) + sums
    for info in model.expert_tensors(grid.layer, expert):
        model.source.release(info)
    return found


def _differs(place: Place, what: str, stored: Stored, difference: tuple[int, int, int, int]) -> str:
    at, is_, should, count = difference
    return (
        f"{place.told(what)}: byte {at} is {is_:#04x}, quantizing the source gives {should:#04x} "
        f"({count} byte{'s' if count != 1 else ''} differ{'s' if count == 1 else ''}; {stored.name} in {stored.file})"
    )


def _absent(place: Place, what: str, stored: Stored | None, wanted: int) -> str:
    if stored is None:
        return f"{place.told(what)} is missing ({place.key(what)})"
    return f"{place.told(what)} has {stored.nbytes} bytes, quantizing the source gives {wanted} ({stored.name} in {stored.file})"


def _non_finite(model: MoeModel, part: Part, error: kernels.NonFinite, origin: tuple[int, int]) -> str:
    info = model.weight(part.layer, part.expert, part.projection).values
    row, column = origin[0] + error.row, origin[1] + error.column
    if part.backward:
        row, column = column, row
    return (
        f"{model.source.shards[info.shard].path}: tensor {info.name} (layer {part.layer}, expert {part.expert}, "
        f"{part.projection}_proj) holds a value that is not finite at row {row}, column {column}; download the file again."
    )


def _compare_copied(output: Output, model: MoeModel) -> tuple[int, list[str]]:
    """Tensors that are no routed experts, copied under kt-kernel's names: the same dtype, shape and bytes."""
    if not output.others:
        return 0, []
    by_name = {merged.rename_non_expert(name): info for name, info in model.source.tensors.items()}
    problems, count = [], 0
    for name, stored in output.others.items():
        info = by_name.get(name)
        if info is None:
            problems.append(f"{name} in {stored.file} is not in {model.source.root}")
        elif (info.dtype, info.shape) != (stored.dtype, stored.shape):
            here, there = f"{stored.dtype} {list(stored.shape)}", f"{info.dtype} {list(info.shape)}"
            problems.append(f"{name} in {stored.file} is {here}, {info.name} is {there}")
        else:
            count += 1
            problems += _copied_bytes(output, model, stored, info)
            model.source.release(info)
    return count, problems


def _copied_bytes(output: Output, model: MoeModel, stored: Stored, info: TensorInfo) -> Iterator[str]:
    raw = model.source.view(replace(info, dtype="U8", shape=(info.nbytes,)))
    for start in range(0, info.nbytes, PIECE):
        stop = min(start + PIECE, info.nbytes)
        difference = first_difference(output.read(stored, start, stop), raw[start:stop])
        if difference is not None:
            yield f"{stored.name} in {stored.file} differs from {info.name} at byte {start + difference[0]}"
            return
