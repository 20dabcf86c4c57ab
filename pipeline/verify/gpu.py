"""Outputs of `ktconvert gpu`: every expert there and of one form, what loaders read in config.json, numbers, and the source again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ktconvert.layouts import PROJECTIONS
from ktconvert.layouts.checkpoints.beside import beside
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.compressed import COMPRESSED, SUFFIXES, Compressed
from ktconvert.layouts.errors import UnsupportedError, VerificationError
from ktconvert.layouts.gpu_card import CONFIG_KEYS
from ktconvert.layouts.ignore import is_match
from ktconvert.layouts.output import Measure, Output, Place, Stored
from ktconvert.pipeline.report import Reporter
from ktconvert.pipeline.stages import carry_over, gpu_linears
from ktconvert.pipeline.verify.found import Check, Found, LayerError, first_difference, gather, sample
from ktconvert.quantizers import groups


def form_of(output: Output) -> Compressed | None:
    """The form that the manifest names, if it is one of ours."""
    assert output.manifest is not None
    return COMPRESSED.get(output.manifest["model"]["method"])


def check_packed(output: Output, measure: Measure) -> Check:
    """Every linear of every routed expert exactly once, with the tensors of one form; as many as the plan had."""
    assert output.manifest is not None
    assert output.names is not None
    facts, form = output.manifest["model"], form_of(output)
    if form is None:
        return Check("tensors", "", (f"the manifest says {facts['method']}, which is none of {', '.join(COMPRESSED)}",))
    problems = [f"{name} is in {first} and in {second}" for name, first, second in output.doubles]
    used: set[tuple[Place, str]] = set()
    for layer in sorted({*measure.shapes, *facts["layers"]}):
        experts, hidden, width = measure.shapes.get(layer, (0, 0, 0))
        experts = max(experts, facts["experts"]) if isinstance(facts["experts"], int) else experts
        if layer not in measure.shapes:
            problems.append(f"layer {layer} is missing")
            continue
        for expert in range(experts):
            for projection in PROJECTIONS:
                n, k = (hidden, width) if projection == "down" else (width, hidden)
                name = output.names.name(layer, expert, projection)
                for suffix, entry in zip(SUFFIXES, form.entries(name, n, k), strict=True):
                    key = Place(layer, expert, projection, False, 0), suffix
                    used.add(key)
                    stored = output.tensors.get(key)
                    if stored is None:
                        problems.append(f"{entry.key} is missing")
                    elif (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                        here = f"{stored.dtype} {list(stored.shape)}"
                        problems.append(
                            f"{entry.key} in {stored.file} is {here}, must be {entry.dtype} {list(entry.shape)}"
                        )
    problems += [f"{s.name} in {s.file} is one too many" for key, s in output.tensors.items() if key not in used]
    problems += [
        f"{name} is quantized, but no routed expert's" for name in output.others if name.endswith(".weight_packed")
    ]
    count = sum(what == "weight_packed" for _, what in output.tensors)
    if count != facts["packed_linears"]:
        problems.append(f"{count} linears are quantized, the plan had {facts['packed_linears']}")
    return Check("tensors", f"{count} quantized linears of {len(measure.shapes)} layers, as planned", tuple(problems))


def check_quantization(output: Output) -> Check:
    """What config.json says of the quantization is what the contract wants, and its ignore list parts experts from all else."""
    assert output.names is not None
    form = form_of(output)
    told = output.config.get("quantization_config")
    if form is None or not isinstance(told, dict) or not isinstance(told.get("ignore"), list):
        return Check("quantization", "", ("config.json has no quantization_config with an ignore list",))
    ignore = [str(pattern) for pattern in told["ignore"]]
    wanted = form.quantization_config(ignore)
    problems = [
        f"quantization_config: {key} is {told.get(key)}, must be {wanted.get(key)}"
        for key in sorted(wanted.keys() | told.keys())
        if told.get(key) != wanted.get(key)
    ]
    problems += [
        f"config.json holds a {key} in {scope}"
        for scope, inner in output.config.items()
        if isinstance(inner, dict)
        for key in CONFIG_KEYS
        if key in inner
    ]
    names = (output.names.name(p.layer, p.expert, p.projection) for p, what in output.tensors if what == "weight_shape")
    hit = next(((name, pattern) for name in names for pattern in ignore if is_match(name, pattern)), None)
    if hit is not None:
        problems.append(f"the ignore list's {hit[1]!r} hits {hit[0]}, which is quantized")
    for name, stored in output.others.items():
        module, _, last = name.rpartition(".")
        if last == "weight" and len(stored.shape) == 2 and not any(is_match(module, pattern) for pattern in ignore):
            problems.append(f"{module} is not quantized, and not named in the ignore list")
    return Check("quantization", f"{form.name} for {len(ignore)} exceptions, as loaders want it", tuple(problems))


def check_numbers(output: Output) -> Check:
    """Scales are finite and positive, shapes those of the codes, and no linear is all zeros unless its source was."""
    form = form_of(output)
    notes: list[str] = []

    def wrong() -> Iterator[str]:
        assert form is not None
        zero = 0x88 if form.quantizer.bits == 4 else 0x80  # a byte of codes 0
        for (place, what), stored in output.tensors.items():
            three = [output.tensors.get((place, suffix)) for suffix in SUFFIXES]
            if what != "weight_packed" or None in three:
                continue
            codes, shape, scale = (output.read(part) for part in three if part is not None)
            n, k = (int(size) for size in shape.view("<i8"))
            scales = scale.view("<u2")
            if (n, k // form.quantizer.group) != (three[2].shape if three[2] is not None else ()):
                yield f"{stored.name} in {stored.file}: weight_shape says {n} x {k}"
            bad = (scales >= 0x7F80) | (scales == 0)
            if bad.any():
                yield f"{stored.name} in {stored.file}: scale {int(np.argmax(bad))} is not a positive number"
            if (codes == zero).all():
                if (scales == groups.EMPTY_SCALE).all():
                    notes.append(f"{stored.name} is all zeros, as the scales say its source was")
                else:
                    yield f"{stored.name} in {stored.file} is all zeros: its expert would compute nothing"

    try:
        problems = tuple(wrong()) if form is not None else ()
    except VerificationError as error:
        problems = (str(error),)
    return Check("numbers", "scales finite and positive, no expert all zeros", problems, tuple(notes[:5]))


def compare_gpu_source(
    output: Output, measure: Measure, model: MoeModel, *, full: bool, threads: int, reporter: Reporter
) -> tuple[Check, list[LayerError]]:
    """Round every expert again and require equal bytes, of all other tensors too; measure the error of some experts, or of all.

    Raises UnsupportedError for codes that we cannot make again, InputError for a source that holds NaN or Inf.
    """
    assert output.manifest is not None
    facts, form = output.manifest["model"], form_of(output)
    if form is None or facts.get("quant_method") != "RTN":
        raise UnsupportedError(f"{output.root}: {facts.get('quant_method')} weights cannot be made again here.")
    problems = [
        f"layer {layer} is {measure.shapes.get(layer, 'missing')} here, {model.shape(layer)} in {model.source.root}"
        for layer in model.layers
        if measure.shapes.get(layer) != model.shape(layer)
    ]
    layers = [layer for layer in model.layers if measure.shapes.get(layer) == model.shape(layer)]

    def one(layer: int, expert: int) -> Found:
        count = model.shape(layer)[0]
        job = gpu_linears.Job(model, form, facts["rounding"], layer, expert, expert + 1, {})
        return _compare_expert(output, job, measured=full or expert in sample(count))

    differing, equal, errors = gather(model, layers, one, threads, reporter)
    problems += differing
    rest = beside(model.source, model.expert_tensor_names(), model.blocks)
    carried = carry_over.carried(rest, model.source)
    for tensor in carried:
        problems += _compare_carried(output, model, tensor)
    more = sorted(output.others.keys() - {tensor.key for tensor in carried})
    problems += [f"{name} is not in {model.source.root}" for name in more]
    told = f"{equal} tensors made again: the same bytes; {len(carried)} other tensors too"
    return Check("source", told, tuple(problems)), errors


def _compare_expert(output: Output, job: gpu_linears.Job, measured: bool) -> Found:
    found, expert = Found(), job.start
    for projection in PROJECTIONS:
        n, k = job.shape(projection)
        buffer = np.empty(job.form.entries("", n, k)[0].nbytes, np.uint8)
        packed, scale = gpu_linears.quantize(job, expert, projection, buffer)
        wanted = (buffer, np.array([n, k], "<i8").view(np.uint8), scale.reshape(-1).view(np.uint8))
        same = True
        for suffix, data in zip(SUFFIXES, wanted, strict=True):
            stored = output.tensors.get((Place(job.layer, expert, projection, False, 0), suffix))
            problem = f"layer {job.layer}, expert {expert}, {projection}_proj: {suffix} is missing"
            if stored is not None:
                problem = _difference(output, stored, data)
            if problem:
                found.problems.append(problem)
            else:
                found.equal += 1
            same = same and not problem
        if measured and same:
            linear = job.model.linear(job.layer, expert, projection)
            found.sums[projection] = job.form.error_sums(linear, packed, scale)
    for info in job.model.expert_tensors(job.layer, expert):
        job.model.source.release(info)
    return found


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
