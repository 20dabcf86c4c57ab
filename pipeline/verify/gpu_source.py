"""An output of `ktconvert gpu` against its source: what was rounded is rounded again, what was calibrated is held against rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.beside import beside
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.compressed import SUFFIXES, Compressed
from ktconvert.layouts.outputs.output import Measure, Output, Place, Stored
from ktconvert.native_quant import kernels
from ktconvert.pipeline.stages import carry_over, gpu_linears
from ktconvert.pipeline.stages.expert_stream import error_figures
from ktconvert.pipeline.tell.report import Reporter
from ktconvert.pipeline.verify.found import Check, Found, LayerError, first_difference, gather, sample
from ktconvert.pipeline.verify.gpu import form_of
from ktconvert.quantizers import reference

# GPTQ's error in the weights against that of rounding them: 1.0 to 1.3 times at the usual dampening, 1.8 at a thousandth of it.
# Another expert's codes are 13 (W4A16) to 200 (W8A16) times as far away.
WORST_RATIO = 3.0
ROWS = 64  # of a linear whose error is not measured as a whole: enough to tell a wrong one
MOST_UNUSED = 0.5  # share of columns that calibration may never have seen
CHUNK = 64  # rows in memory as float64 at a time


class Calibrated(NamedTuple):
    """What was found of a linear that GPTQ made.

    ratio    its error over that of rounding to nearest
    rounded  whether its codes are those of rounding
    unused   whether it has columns that are all zeros: calibration never saw their inputs
    """

    ratio: float
    rounded: bool
    unused: bool


def compare_gpu_source(
    output: Output, measure: Measure, model: MoeModel, *, full: bool, threads: int, reporter: Reporter
) -> tuple[Check, list[LayerError]]:
    """Every expert against the source, all other tensors for equal bytes; the error of some experts is measured, or of all.

    RTN is rounded again and must give equal bytes. GPTQ must have the same scales, and an error that is plausible beside rounding's.
    Raises UnsupportedError for codes that we cannot judge, InputError for a source that holds NaN or Inf.
    """
    assert output.manifest is not None
    facts, form = output.manifest["model"], form_of(output)
    if form is None or facts.get("quant_method") not in ("RTN", "GPTQ"):
        raise UnsupportedError(
            f"{output.root}: {facts.get('quant_method')} weights cannot be held against a source here."
        )
    calibrated: list[Calibrated] | None = [] if facts["quant_method"] == "GPTQ" else None
    problems = [
        f"layer {layer} is {measure.shapes.get(layer, 'missing')} here, {model.shape(layer)} in {model.source.root}"
        for layer in model.layers
        if measure.shapes.get(layer) != model.shape(layer)
    ]
    layers = [layer for layer in model.layers if measure.shapes.get(layer) == model.shape(layer)]
    rounding = "library" if calibrated is not None else facts["rounding"]

    def one(layer: int, expert: int) -> Found:
        measured = full or expert in sample(model.shape(layer)[0])
        job = gpu_linears.Job(model, form, rounding, layer, expert, expert + 1, {})
        found = _compare_expert(output, job, measured, calibrated)
        for info in model.expert_tensors(layer, expert):
            model.source.release(info)
        return found

    differing, equal, errors = gather(model, layers, one, threads, reporter)
    problems += differing
    rest = beside(model.source, model.expert_tensor_names(), model.quantization)
    carried = carry_over.carried(rest)
    for tensor in carried:
        problems += _compare_carried(output, model, tensor)
    more = sorted(output.others.keys() - {tensor.key for tensor in carried})
    problems += [f"{name} is not in {model.source.root}" for name in more]
    same = f"{len(carried)} other tensors are the source's"
    if calibrated is not None:
        return Check("source", f"{_told(calibrated)}; {same}", tuple(problems), _notes(calibrated)), errors
    return Check("source", f"{equal} tensors made again: the same bytes; {same}", tuple(problems)), errors


def _compare_expert(output: Output, job: gpu_linears.Job, measured: bool, calibrated: list[Calibrated] | None) -> Found:
    """Three linears, each rounded again. Codes may differ where they were calibrated (and are judged), shapes and scales never."""
    found, expert = Found(), job.start
    for projection in PROJECTIONS:
        n, k = job.shape(projection)
        buffer = np.empty(job.form.entries("", n, k)[0].nbytes, np.uint8)
        packed, scale = gpu_linears.quantize(job, expert, projection, buffer)
        wanted = (buffer, np.array([n, k], "<i8").view(np.uint8), scale.reshape(-1).view(np.uint8))
        stored = [output.tensors.get((Place(job.layer, expert, projection, False, 0), suffix)) for suffix in SUFFIXES]
        problems = []
        for suffix, there, data in zip(SUFFIXES, stored, wanted, strict=True):
            problem = f"layer {job.layer}, expert {expert}, {projection}_proj: {suffix} is missing"
            if there is not None and (suffix != "weight_packed" or calibrated is None or there.nbytes != data.size):
                problem = _difference(output, there, data)
            elif there is not None:
                problem = ""
            problems += [problem] if problem else []
            found.equal += not problem
        found.problems += problems
        if problems or stored[0] is None:
            continue
        linear = job.model.linear(job.layer, expert, projection)
        if calibrated is not None:
            bf16 = kernels.decode(linear)
            ours = output.read(stored[0]).view(np.int32).reshape(packed.shape)
            sums, linear_found, problem = _judge(job.form, bf16, ours, packed, scale, measured)
            calibrated.append(linear_found)
            found.problems += [f"{stored[0].name} in {stored[0].file} {problem}"] if problem else []
        elif measured:
            sums = job.form.error_sums(linear, packed, scale)
        if measured:
            found.sums[projection] = sums
    return found


def _judge(
    form: Compressed,
    bf16: npt.NDArray[np.uint16],
    packed: npt.NDArray[np.int32],
    rounded: npt.NDArray[np.int32],
    scale: npt.NDArray[np.uint16],
    whole: bool,
) -> tuple[npt.NDArray[np.float64], Calibrated, str]:
    """Sums as of error_sums over a linear (or some of its rows), what is told of it, and what is wrong with its codes ("": nothing).

    Columns that are zero throughout, though rounding has codes there, were never seen in calibration: they are left out.
    """
    rows = slice(None) if whole else np.unique(np.linspace(0, len(bf16) - 1, ROWS).astype(int))
    bf16, packed, rounded, scale = bf16[rows], packed[rows], rounded[rows], scale[rows]
    ours, theirs = (np.asarray(form.codes(codes).any(axis=0)) for codes in (packed, rounded))
    unused = theirs & ~ours
    if unused.mean() > MOST_UNUSED:
        problem = f"has zeros in {int(unused.sum())} of {unused.size} columns: calibration saw hardly any input of it"
        return np.zeros(4), Calibrated(np.inf, False, True), problem
    made, rounding = (_sums(form, bf16, codes, scale, np.flatnonzero(~unused)) for codes in (packed, rounded))
    error, usual = (error_figures(sums)["relative_error"] for sums in (made, rounding))
    ratio = error / usual if usual else 1.0 if error == 0 else np.inf
    found = Calibrated(ratio, bool(np.array_equal(packed, rounded)), bool(unused.any()))
    if ratio <= WORST_RATIO:
        return made, found, ""
    problem = (
        f"is {error:.4f} away from its source, {ratio:.1f} times as far as rounding to nearest ({usual:.4f}); "
        f"at most {WORST_RATIO:g} times is plausible"
    )
    return made, found, problem


def _told(linears: Sequence[Calibrated]) -> str:
    worst = max((linear.ratio for linear in linears), default=0.0)
    rounded = sum(linear.rounded for linear in linears)
    told = f"{len(linears)} linears have the scales of rounding to nearest, and errors of at most {worst:.2f} times its own"
    return told + (f"; {rounded} of them are rounded to nearest" if rounded else "")


def _notes(linears: Sequence[Calibrated]) -> tuple[str, ...]:
    unused = sum(linear.unused for linear in linears)
    return (f"{unused} linears have columns that are all zeros: calibration never saw their inputs",) if unused else ()


def _sums(
    form: Compressed,
    bf16: npt.NDArray[np.uint16],
    packed: npt.NDArray[np.int32],
    scale: npt.NDArray[np.uint16],
    columns: npt.NDArray[np.intp],
) -> npt.NDArray[np.float64]:
    """Sums of x*x, y*y, x*y and (x-y)^2 over these columns, x the source and y what is stored."""
    sums = np.zeros(4)
    for first in range(0, len(bf16), CHUNK):
        part = slice(first, first + CHUNK)
        x = reference.bf16_to_f32(bf16[part]).astype(np.float64)[:, columns]
        y = form.unpack(packed[part], scale[part]).astype(np.float64)[:, columns]
        sums += [np.square(x).sum(), np.square(y).sum(), (x * y).sum(), np.square(x - y).sum()]
    return sums


def _difference(output: Output, stored: Stored, wanted: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
    if stored.nbytes != wanted.size:
        return f"{stored.name} in {stored.file} has {stored.nbytes} bytes, rounding the source gives {wanted.size}"
    difference = first_difference(output.read(stored), wanted)
    if difference is None:
        return ""
    at, is_, should, count = difference
    return f"{stored.name} in {stored.file}: byte {at} is {is_:#04x}, rounding the source gives {should:#04x} ({count} bytes differ)"


def _compare_carried(output: Output, model: MoeModel, tensor: carry_over.Carried) -> Iterator[str]:
    stored, entry = output.others.get(tensor.key), tensor.entry
    if stored is None:
        yield f"{tensor.key} is missing"
        return
    if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
        yield f"{tensor.key} in {stored.file} is {stored.dtype} {list(stored.shape)}, must be {entry.dtype} {list(entry.shape)}"
        return
    at = 0
    for piece in carry_over.pieces(model.source, tensor):
        difference = first_difference(output.read(stored, at, at + piece.size), piece)
        if difference is not None:
            yield f"{tensor.key} in {stored.file} differs from the source's at byte {at + difference[0]}"
            break
        at += piece.size
    for info in tensor.reads:
        model.source.release(info)
