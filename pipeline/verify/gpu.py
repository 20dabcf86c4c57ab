"""Outputs of `ktconvert gpu` by themselves: every expert there and of one form, what loaders read in config.json, and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ktconvert.layouts.errors import UsageError, VerificationError
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.compressed import COMPRESSED, SUFFIXES, USUAL, Compressed
from ktconvert.layouts.outputs.gpu_card import CONFIG_KEYS
from ktconvert.layouts.outputs.gpu_output import DTYPES
from ktconvert.layouts.outputs.ignore import is_match
from ktconvert.layouts.outputs.output import Measure, Output, Place, Stored
from ktconvert.pipeline.verify.found import Check
from ktconvert.quantizers import groups

PIECE = 1 << 14  # bytes of codes looked at before more is read


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
    try:
        problems += list(_ignored_wrongly(output, ignore))
    except UsageError:
        problems.append("the ignore list holds an expression that cannot be read")
    problems += [
        f"{name} in {stored.file} is FP8 as in the source: loaders would take it without its scales"
        for name, stored in output.others.items()
        if stored.dtype.startswith("F8") or name.endswith("_scale_inv")
    ]
    return Check("quantization", f"{form.name} for {len(ignore)} exceptions, as loaders want it", tuple(problems))


def _ignored_wrongly(output: Output, ignore: Sequence[str]) -> Iterator[str]:
    names = _loader_names(output)
    hit = next(((name, pattern) for name in names for pattern in ignore if is_match(name, pattern)), None)
    if hit is not None:
        yield f"the ignore list's {hit[1]!r} hits {hit[0]}, which is quantized"
    for name, stored in output.others.items():
        module, _, last = name.rpartition(".")
        if last == "weight" and len(stored.shape) == 2 and not any(is_match(module, pattern) for pattern in ignore):
            yield f"{module} is not quantized, and not named in the ignore list"


def _loader_names(output: Output) -> Iterator[str]:
    """What loaders call the routed experts: each linear by its own name and by the usual one, and their container."""
    assert output.names is not None
    containers: dict[str, None] = {}
    for place, what in output.tensors:
        if what == "weight_packed":
            name = output.names.name(place.layer, place.expert, place.projection)
            base = name.rpartition(".")[0]
            yield from dict.fromkeys((name, f"{base}.{USUAL[place.projection]}"))
            containers[base.rpartition(".")[0]] = None
    yield from containers


def check_numbers(output: Output) -> Check:
    """Scales are finite and positive, shapes those of the codes, and no linear is all zeros unless its source was."""
    form = form_of(output)
    notes: list[str] = []

    def wrong() -> Iterator[str]:
        assert form is not None
        zero = 0x88 if form.quantizer.bits == 4 else 0x80  # a byte of codes 0
        for (place, what), stored in output.tensors.items():
            if what != "weight_packed":
                continue
            _, about, scaled = three = [output.tensors.get((place, suffix)) for suffix in SUFFIXES]
            types = [part.dtype if part else None for part in three]
            if about is None or scaled is None or types != list(DTYPES.values()) or about.nbytes != 16:
                continue  # told by check_packed
            n, k = (int(size) for size in output.read(about).view("<i8"))
            scales = output.read(scaled).view("<u2")
            if (n, k // form.quantizer.group) != scaled.shape:
                yield f"{stored.name} in {stored.file}: weight_shape says {n} x {k}"
            bad = (scales >= 0x7F80) | (scales == 0)
            if bad.any():
                yield f"{stored.name} in {stored.file}: scale {int(np.argmax(bad))} is not a positive number"
            if _all(output, stored, zero):
                if (scales == groups.EMPTY_SCALE).all():
                    notes.append(f"{stored.name} is all zeros, as the scales say its source was")
                else:
                    yield f"{stored.name} in {stored.file} is all zeros: its expert would compute nothing"

    try:
        problems = tuple(wrong()) if form is not None else ()
    except VerificationError as error:
        problems = (str(error),)
    return Check("numbers", "scales finite and positive, no expert all zeros", problems, tuple(notes[:5]))


def _all(output: Output, stored: Stored, byte: int) -> bool:
    """Whether a tensor is this byte throughout; of any other, only the beginning is read."""
    return all(
        (output.read(stored, at, min(at + PIECE, stored.nbytes)) == byte).all() for at in range(0, stored.nbytes, PIECE)
    )
