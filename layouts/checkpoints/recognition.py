"""Recognition of a checkpoint's experts from headers.

The tensors decide; the config is compared with them, and a checkpoint whose config contradicts them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.archs import (
    ALL,
    ARCHS,
    GGUF_STYLES,
    MOST_EXPERTS,
    MOST_LAYERS,
    MTP_LAYERS,
    Arch,
    Fused,
    Separate,
    Style,
    gguf_styles,
)
from ktconvert.layouts.checkpoints.expert_function import (
    CHOOSE_ACTIVATION,
    PLAIN,
    ExpertFunction,
    find_function,
    names_activation,
    states_constants,
)
from ktconvert.layouts.checkpoints.match import (
    NUMBER,
    SHARED,
    NameScan,
    StoredLayer,
    describe_stray,
    expand_template,
    scan_names,
    unread_format_error,
)
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.shapes import MoeLayer, measure_layer
from ktconvert.layouts.errors import INCOMPLETE, InputError, KTConvertError, UnsupportedError, UsageError
from ktconvert.layouts.files.manifest import is_written_by
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import format_ranges

Found = TypeVar("Found")

FETCH = "fetch"  # command whose outputs lack experts
WITHOUT_EXPERTS = (
    "a model from `ktconvert fetch` has none: give the complete model; `run` and `serve` take converted experts, too, "
    "as --cpu-weights"
)
MOST_NAMES = 4  # of different tensors in one sentence
OUTPUT_NORM = re.compile(r"\.experts\.\w*norm\.weight$")


def recognize(
    source: TensorSource,
    archs: Sequence[Arch] = ARCHS,
    *,
    to_read: bool = False,
    experts: str = ALL,
    partial: bool = False,
) -> MoeModel:
    """Recognise the experts of a checkpoint by reading only headers.

    to_read  also accept a model that no output can hold, if it can be read; `refusal` then holds the reason
    experts  the stack to convert, by its name in the table of architectures, or ALL
    partial  also accept a model that lacks experts, as `ktconvert fetch` writes it

    Raises UnsupportedError for a model that cannot be represented, InputError for one that is incomplete or contradicts
    its config; both name the file and the tensor. Raises UsageError for a stack that the model does not have.
    """
    try:
        return _recognize(source, archs, to_read, experts, partial)
    except (InputError, UnsupportedError) as error:
        if error.remedy == INCOMPLETE and is_written_by(source.root, FETCH):
            error = error.with_remedy("`ktconvert fetch` left out experts; give the complete model")
        info = source.tensors.get(error.tensor)
        file = source.shards[0].path if source.is_single_file else source.root
        raise error.with_path(source.path(info) if info else file) from None


def _recognize(source: TensorSource, archs: Sequence[Arch], to_read: bool, experts: str, partial: bool) -> MoeModel:
    arch = _find_arch(source, archs)
    notes = list(source.notes)
    refusal = None if arch is None or arch.refusal is None else f"{arch.name}: {arch.refusal}"
    if arch is not None and refusal is not None and not (to_read and arch.stored):
        raise UnsupportedError(refusal)
    scan = scan_names(source.tensors, (*arch.stored, *gguf_styles(arch.function.gated)) if arch else ())
    if not scan.layers and not scan.foreign:
        arch, scan = _find_style(source, archs, arch, notes)
    assert arch is not None
    if source.has_config and (why := claims.find_contradiction(source.config, source.header_config, arch)) is not None:
        raise InputError(f"{why}; they are not of one model")
    _require_stack(source, arch, experts)
    scans = [scan]
    for row in arch.more:
        if row.after:
            scans[-1:] = _divide_experts(scans[-1], row, source.config)
        else:
            scans.append(scan_names(source.tensors, row.stored))
    first = 0
    stacks: dict[str, _Stack] = {}
    for row, stack_scan in zip(arch.stacks, scans, strict=True):
        limit = cfg.find_valid_number(source.config, row.layers)
        if limit is None and arch.more:
            raise InputError(f"config.json has no number of layers ({row.layers[0]}); use the config.json of the model")
        if experts in (ALL, row.stack):
            stacks[row.stack] = _read_stack(source, row, stack_scan, first, limit, partial)
        first += limit[1] if limit else 0
    moe_layers = {layer: moe for stack in stacks.values() for layer, moe in stack.layers.items()}
    mtp = sorted({layer for stack in stacks.values() for layer in stack.mtp_layers})
    mtp_names = frozenset(name for stack in stacks.values() for name in stack.mtp_tensors)
    if others := [name for name in scan.others if all(name in scan.others for scan in scans)]:
        notes.append(f"{len(others)} tensors of other experts, such as {others[0]}, are not converted.")
    layers_by_stack = {name: format_ranges(stack.layers) for name, stack in stacks.items() if len(stacks) > 1}
    if experts != ALL:
        notes.append(f"Only the {experts} stack is converted; other experts stay among the non-expert weights.")
    if layers_by_stack:
        parts = ", ".join(f"{layers} ({name})" for name, layers in layers_by_stack.items())
        notes.append(f"The output numbers the layers of all stacks one after the other: {parts}.")
    of_cpu: list[str] = []
    warnings: list[str] = []
    if mtp_names:
        mtp_text = f"layer {', '.join(map(str, mtp))}" if mtp else "blocks called mtp"
        text = f"The experts of the MTP layers ({mtp_text}) are left out: kt-kernel does not load them."
        if mtp and not source.container.experts_only and not cfg.find_number(source.config, MTP_LAYERS):
            warnings.append(f"{text} If the model has no such layers, correct the number of layers in config.json.")
        else:
            of_cpu.append(text)
    return MoeModel(
        arch=arch,
        source=source,
        layers=tuple(moe_layers),
        mtp_layers=tuple(mtp),
        mtp_tensors=mtp_names,
        dtypes=tuple(sorted({w.encoding.name for m in moe_layers.values() for w in m.weights.values()})),
        has_shared_experts=scan.shared,
        functions={layer: function for stack in stacks.values() for layer, function in stack.functions.items()},
        notes=(*notes, *of_cpu),
        common_notes=tuple(notes),
        warnings=tuple(warnings),
        quantization=source.quantization,
        refusal=refusal,
        moe_layers=moe_layers,
        stacks=layers_by_stack,
    )


def _require_stack(source: TensorSource, arch: Arch, experts: str) -> None:
    """Raise UsageError for a name that no stack of the row has."""
    names = [row.stack for row in arch.stacks if row.stack]
    if experts != ALL and experts not in names:
        remedy = f"choose {ALL}, {', '.join(names)}" if names else "leave it out"
        raise UsageError(f"--experts {experts}: {source.root} has no such stack of experts; {remedy}.")


class _Stack(NamedTuple):
    """The experts of a stack by the numbers of their layers in outputs, and its MTP layers and their expert tensors."""

    layers: dict[int, MoeLayer]
    functions: dict[int, ExpertFunction]
    mtp_layers: list[int]
    mtp_tensors: set[str]


def _read_stack(
    source: TensorSource, arch: Arch, scan: NameScan, first: int, limit: tuple[str, int] | None, partial: bool
) -> _Stack:
    """Return the experts of a stack.

    arch     the row of the stack
    first    the number of its layer 0 in outputs
    limit    the config key of its number of layers, and the number
    partial  whether experts may be missing
    """
    for (kind, n), name in scan.foreign.items():
        if limit is None or n < limit[1]:
            raise unread_format_error(name, kind)
    if not scan.layers:
        raise InputError(f"has no {arch.stack} of {arch.name} with experts", INCOMPLETE)
    prefix, layers, mtp = _select_layers(scan, limit)
    if arch.router_scale:
        _drop_router_scales(scan)
    stored = {n: scan.layers[prefix, n] for n in layers}
    if arch.function.output_norm:
        scan.strays = [name for name in scan.strays if not OUTPUT_NORM.search(name)]
    _refuse_strays(scan, prefix, mtp)
    # If there are only experts, a layer may be dense.
    if not partial and (scan.routers or len(scan.present) > len(scan.layers)):
        _refuse_gaps(scan, stored[layers[0]].style, prefix, layers, limit[1] if limit else 0)
    most = 1 + max((expert for layer in stored.values() for _, expert in layer.tensors), default=0)
    moe_layers = {n: measure_layer(source, arch, layer, prefix, n, most, partial) for n, layer in stored.items()}
    return _Stack(
        layers={first + n: moe for n, moe in moe_layers.items()},
        functions={first + n: _find_function(arch, source.config, n, moe) for n, moe in moe_layers.items()},
        mtp_layers=mtp,
        mtp_tensors={*scan.mtp, *(name for n in mtp for name in scan.layers[prefix, n].names)},
    )


def _find_arch(source: TensorSource, archs: Sequence[Arch]) -> Arch | None:
    """Return the first row that the config names; a row without names applies to any checkpoint and precedes others."""
    unconditional = (arch for arch in archs if not arch.matches)
    named = (arch for name in cfg.list_families(source.config) for arch in archs if name in arch.matches)
    return next(unconditional, None) or next(named, None)


def function_by_config(config: dict[str, Any], layer: int) -> ExpertFunction | None:
    """Return what a layer's experts compute by config.json alone; None if it does not describe it.

    Raises the errors of find_function.
    """
    row = next(
        (row for name in cfg.list_families(config) for row in ARCHS if name in row.matches), Arch("this model", ())
    )
    function = find_function(row.function, config, layer, row.name)
    return None if function == PLAIN and not states_constants(config) else function


def _find_function(arch: Arch, config: dict[str, Any], layer: int, moe: MoeLayer) -> ExpertFunction:
    """Return what a layer's experts compute; the tensors decide whether they have a gate and biases."""
    function = find_function(arch.function, config, layer, arch.name, decides=arch.decides)
    return replace(function, gated=moe.style.gated, biases=bool(moe.biases))


def _find_style(
    source: TensorSource, archs: Sequence[Arch], known: Arch | None, notes: list[str]
) -> tuple[Arch, NameScan]:
    """Return a row for an unknown family, if its experts are stored in exactly one way that some row knows."""
    gated = known is None or known.function.gated  # a known family decides: names of up and down are often the same
    styles: dict[Style, str] = {}
    for arch in archs:
        for style in arch.stored if arch.refusal is None and not arch.more else ():
            if isinstance(style, Separate) and not gated:
                style = replace(style, gate=None)
            if not (isinstance(style, Fused) and style.interleaved):  # which no shape tells from gate, then up
                styles.setdefault(style, f"those of {arch.name}")
    styles |= dict.fromkeys(gguf_styles(gated), "in any GGUF")
    scan = scan_names(source.tensors, styles)
    hits = list(dict.fromkeys(layer.style for layer in scan.layers.values()))
    family_names = ", ".join(cfg.list_families(source.config)) or "a model without a config"
    if len(hits) > 1:
        ways = "; ".join(" + ".join(getattr(style, p) for p in style.matrices) for style in hits)
        raise UnsupportedError(f"{family_names}: experts of several forms ({ways})", "choose with --arch-file")
    if not hits and not scan.foreign:
        raise _make_unrecognized_error(family_names, source, archs)
    if known is not None or not hits:
        return known or Arch(family_names, ()), scan
    if not names_activation(source.config):
        if not source.config:
            is_empty = (source.companion_root / "config.json").is_file()
            missing = "has a config.json without a model type" if is_empty else "has no config.json"
            problem = f"{missing}, which names the activation of the experts"
            raise InputError(problem, "copy it from the model's release")
        problem = f"{family_names} is not in the table of architectures, and no configuration names its activation"
        raise UnsupportedError(problem, CHOOSE_ACTIVATION)
    notes.append(
        f"{family_names} is not in the table of architectures; its experts are stored as {styles[hits[0]]}, and are "
        "taken to compute what the configuration says, with routing weights on the output."
    )
    return Arch(family_names, (), (hits[0],)), scan


def _select_layers(scan: NameScan, limit: tuple[str, int] | None) -> tuple[str, list[int], list[int]]:
    """Return the prefix of the language model, the layers to convert, and the MTP layers."""
    prefixes = sorted({prefix for prefix, _ in scan.layers})
    if len(prefixes) != 1:
        examples_text = ", ".join(map(repr, prefixes))
        raise UnsupportedError(f"has experts under several prefixes ({examples_text})", "choose one with --arch-file")
    numbers = sorted(n for _, n in scan.layers)
    if numbers[-1] >= MOST_LAYERS:
        name = scan.layers[prefixes[0], numbers[-1]].names[0]
        raise InputError.from_tensor(
            name, f"is of layer {numbers[-1]}, and no model has more than {MOST_LAYERS} layers"
        )
    if limit is None:
        return prefixes[0], numbers, []
    layers = [n for n in numbers if n < limit[1]]
    if not layers:
        first = scan.layers[prefixes[0], numbers[0]].names[0]
        problem = f": config.json says {limit[0]} = {limit[1]}, yet no layer below it has experts"
        raise InputError.from_tensor(first, problem)
    return prefixes[0], layers, [n for n in numbers if n >= limit[1]]


def _divide_experts(scan: NameScan, row: Arch, config: dict[str, Any]) -> tuple[NameScan, NameScan]:
    """Return the experts of two stacks that a checkpoint numbers together; row is that of the second.

    config.json has the number of those in the first: a count of tensors would be wrong if one was lost. Raises
    InputError if it has none.
    """
    count = cfg.find_number(config, row.after)
    if count is None or count[1] < 1:
        raise InputError("config.json has no number of experts for text; use the config.json of the model's release")
    parts: tuple[dict[tuple[str, int], StoredLayer], ...] = {}, {}
    for key, layer in scan.layers.items():
        for part, numbers in zip(parts, (range(count[1]), range(count[1], MOST_EXPERTS)), strict=True):
            tensors, biases = _select_experts(layer.tensors, numbers), _select_experts(layer.biases, numbers)
            unused = [] if numbers.start else layer.unused
            if tensors or biases or unused:
                part[key] = StoredLayer(layer.style, tensors, biases, unused, numbers.start)
    first, second = parts
    return replace(scan, layers=first), replace(scan, layers=second)


def _select_experts(named: dict[tuple[str, int], Found], numbers: range) -> dict[tuple[str, int], Found]:
    """Return what belongs to experts with these numbers, which are then counted from 0."""
    return {(matrix, expert - numbers.start): found for (matrix, expert), found in named.items() if expert in numbers}


def _drop_router_scales(scan: NameScan) -> None:
    """Remove the scale of the down matrices from layers of a GGUF in which no other matrix has one.

    llama.cpp's ffn_down_exps.scale is Gemma-4's router.per_expert_scale; a scale of weights comes with those of gate
    and up.
    """
    for layer in scan.layers.values():
        scaled = [matrix for (matrix, _), tensors in layer.tensors.items() if "scale" in tensors]
        if layer.style in GGUF_STYLES and scaled == ["down"]:
            del layer.tensors["down", -1]["scale"]


# --- what is refused ------------------------------------------------------------------------------


def _make_unrecognized_error(family_names: str, source: TensorSource, archs: Sequence[Arch]) -> KTConvertError:
    """Return the error for a checkpoint in which no row finds experts.

    It shows tensors that may be experts: those called so, or those of three dimensions with one matrix for each expert.
    """
    recorded_count = cfg.find_number(source.config, tuple(dict.fromkeys(key for arch in archs for key in arch.experts)))
    experts = recorded_count[1] if recorded_count else 0
    candidates = [name for name in source.tensors if "expert" in name and not SHARED.search(name)] or [
        name for name, info in source.tensors.items() if len(info.shape) == 3 and info.shape[0] == experts > 1
    ]
    if experts < 2 and not candidates:
        return UnsupportedError(f"{family_names}: a dense model, it has no experts to convert")
    if not candidates:
        key = recorded_count[0] if recorded_count else ""
        problem = f"{family_names}: config.json says {key} = {experts}, but no tensor looks like theirs"
        if any(name in arch.matches for name in cfg.list_families(source.config) for arch in archs):
            return InputError(problem, WITHOUT_EXPERTS)
        return UnsupportedError(problem, f"if they have other names, describe them with --arch-file; {WITHOUT_EXPERTS}")
    examples = list({NUMBER.sub("#", name): name for name in reversed(candidates)}.values())[::-1]
    examples_text = ", ".join(map(repr, examples[:MOST_NAMES])) + (" and others" if len(examples) > MOST_NAMES else "")
    rows = ", ".join(arch.name for arch in archs if arch.refusal is None)
    return UnsupportedError(
        f"{family_names}: its experts are not stored as any known family's (tensors {examples_text})",
        f"if they are gate, up and down matrices, describe them with --arch-file. Known are: {rows}",
        tensor=examples[0],
    )


def _refuse_strays(scan: NameScan, prefix: str, mtp: Iterable[int]) -> None:
    """Raise UnsupportedError for a tensor among the experts of a converted layer that is not one of their weights."""
    left_out = tuple(f"{prefix}layers.{n}." for n in mtp)
    for name in scan.strays:
        if name.startswith(prefix) and not (left_out and name.startswith(left_out)):
            kind = describe_stray(name)
            problem = f"is among the experts but is not one of their weights{kind and f': it is {kind}'}"
            raise UnsupportedError.from_tensor(name, problem, "it cannot be read: use another release of the model")


def _refuse_gaps(scan: NameScan, style: Style, prefix: str, layers: Collection[int], count: int) -> None:
    """Raise InputError if one of `count` layers was lost: it has a router but no experts, or no tensors at all."""
    if not getattr(style, style.matrices[0]).startswith(("{prefix}", "blk.")):
        return  # where such a row's other tensors are is not known
    for n in range(count):
        if n in layers:
            continue
        name = expand_template(style, prefix, style.matrices[0], n, 0)
        if (prefix, n) in scan.routers:
            raise InputError(f"layer {n} has a router but no experts ({name!r} is missing)", INCOMPLETE)
        if n > min(layers) and (prefix, n) not in scan.present:
            raise InputError(f"layer {n} is missing ({name!r} and all else)", INCOMPLETE)
