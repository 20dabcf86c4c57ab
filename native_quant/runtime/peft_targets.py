"""Modules that an adapter's settings target in a model with RoutedExperts, which PEFT does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ktconvert.layouts import patterns
from ktconvert.layouts.checkpoints.adapter import CONFIG, GATE_UP, NamePatterns, is_named
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime.adapters import DEFAULT_NAMES
from ktconvert.native_quant.runtime.hf_modules import GATED, UNGATED, RoutedExperts

EXPERTS = "experts"
NO_MATCH = "target_modules {!r} matches no module of this model; use the name of one of its modules"


class Targets(NamedTuple):
    """Settings that PEFT must not convert to transformers' parameters of stacked experts, which are absent here.

    modules   names of linears and Projections that PEFT might confuse with these parameters
    patterns  rank_pattern and alpha_pattern with the names of this model's modules
    """

    modules: set[str]
    patterns: dict[str, dict[str, Any]]


def list_stacked_parameters(experts: Mapping[str, RoutedExperts]) -> tuple[str, str]:
    """Return transformers' parameters of stacked experts, which are PEFT's targets in an unconverted model."""
    return GATED if len(next(iter(experts.values())).projections) == len(DEFAULT_NAMES) else UNGATED


def separate_targets(config: Any, model: Any, experts: Mapping[str, RoutedExperts]) -> Targets:
    """Remove the names of experts from target_modules and target_parameters, and return them as Targets.

    Replaces regular expressions, whose run time has no limit in PEFT, by the names of the matching modules. Raises
    UnsupportedError for expressions that match nothing.
    """
    *inner, down = projections = next(iter(experts.values())).projections
    prefixes = tuple(f"{path}." for path in experts)
    names = [name for name, _ in model.named_modules() if name and not name.startswith(prefixes)]
    requested = config.target_modules
    modules = set[str]()
    if isinstance(requested, str) and requested.lower() == "all-linear":
        modules.update(f"{EXPERTS}.{name}" for name in projections)
    elif isinstance(requested, str):
        matches = _match_names(requested, names, experts)
        if not matches:
            raise UnsupportedError(NO_MATCH.format(requested))
        modules = {name for name in matches if name.split(".")[-1] in projections}
        config.target_modules = matches - modules
    elif requested is not None:
        expert_names = {name for name in requested if name.split(".")[-1] in (EXPERTS, *projections)}
        config.target_modules = set(requested) - expert_names
        for name in expert_names:
            joined_name = re.sub(r"\bexperts\.\d+\.(\w+)$", rf"{EXPERTS}.\1", name)
            modules.update(
                [f"{name}.{projection}" for projection in projections]
                if name.split(".")[-1] == EXPERTS
                else [joined_name]
            )
    if isinstance(config.exclude_modules, str):
        config.exclude_modules = _match_names(config.exclude_modules, names, experts)
    first, last = list_stacked_parameters(experts)
    stacked = {name for name in config.target_parameters or () if name.split(".")[-1] in (first, last)}
    parameters: dict[str, str] = {}  # name of a projection -> the targeted parameter
    for parameter, targets in ((first, inner), (last, [down])):
        layers = [path for path in experts if is_named(f"{path}.{parameter}", stacked)]
        parameters.update({f"{path}.{projection}": f"{path}.{parameter}" for path in layers for projection in targets})
        # layers_to_transform does not apply to parameters.
        is_in_all_layers = len(layers) == len(experts) and not config.layers_to_transform
        modules.update(
            f"{path}.{projection}" for path in ([EXPERTS] if is_in_all_layers else layers) for projection in targets
        )
    if stacked:
        config.target_parameters = set(config.target_parameters) - stacked or None
        config.target_modules = config.target_modules or set()  # with None, PEFT would choose
    projection_names = {f"{path}.{name}": (path, name) for path in experts for name in projections}
    names += projection_names
    targeted = {full_name: place for full_name, place in projection_names.items() if is_named(full_name, modules)}
    resolved = {
        name: _resolve_patterns(name, getattr(config, name) or {}, names, experts, targeted, parameters, default)
        for name, default in (("rank_pattern", config.r), ("alpha_pattern", config.lora_alpha))
    }
    return Targets(modules, resolved)


def resolve_patterns(config: Any, model: Any) -> None:
    """Replace a config's regular expressions by the matching names, for a model without RoutedExperts.

    PEFT would match the expressions without a time limit. Raises UnsupportedError for target_modules that match
    nothing.
    """
    parameters = [name for name, _ in model.named_parameters()]
    names = [name for name, _ in model.named_modules() if name] + parameters
    stacks = {name.rpartition(".")[0] for name in parameters if name.split(".")[-1] == GATE_UP}
    # Names of transformers 4
    old_names = {f"{path}.{name}" for path in stacks for name in (*DEFAULT_NAMES, "w1", "w2", "w3")}
    if isinstance(config.target_modules, str) and config.target_modules.lower() != "all-linear":
        matches = _match_names(config.target_modules, {*names, *old_names}, {})
        if not matches:
            raise UnsupportedError(NO_MATCH.format(config.target_modules))
        config.target_modules = matches - old_names | {name.split(".")[-1] for name in matches & old_names}
    if isinstance(config.exclude_modules, str):
        config.exclude_modules = _match_names(config.exclude_modules, names, {})
    for setting in ("rank_pattern", "alpha_pattern"):
        setattr(config, setting, _resolve_patterns(setting, getattr(config, setting), names, {}, {}, {}, None))


def _match_names(pattern: str, names: Iterable[str], experts: Mapping[str, RoutedExperts]) -> set[str]:
    """Return the names of modules that a regular expression matches, also by the names of single experts."""
    match = patterns.compile(pattern, CONFIG).fullmatch
    matches = {name for name in names if name not in experts and match(name)}
    for path, module in experts.items():
        for name in module.projections:
            if any(map(match, (path, f"{path}.{name}", *_expert_names(path, module, name)))):
                matches.add(f"{path}.{name}")
    return matches


def _expert_names(path: str, module: RoutedExperts, name: str) -> list[str]:
    """Return the names of a projection of each expert in transformers 4."""
    return [f"{path}.{expert}.{name}" for expert in range(module.num_experts)]


def _resolve_patterns(
    setting: str,
    values: Mapping[str, Any],
    names: Iterable[str],
    experts: Mapping[str, RoutedExperts],
    targeted: Mapping[str, tuple[str, str]],
    parameters: Mapping[str, str],
    default: Any,
) -> dict[str, Any]:
    """Return rank_pattern or alpha_pattern with entries for the projections for which PEFT would find other values.

    Regular expressions with repeats are replaced by literal names. Raises UnsupportedError if experts of one layer
    have different values.
    """
    values_by_name = NamePatterns(values, CONFIG)
    literal_values: dict[str, Any] = {}
    for full_name, (path, name) in targeted.items() if values else ():
        if full_name in parameters:
            value = values_by_name.find([parameters[full_name]], default)
        else:
            expert_values = {
                values_by_name.find((expert_name, full_name), default)
                for expert_name in _expert_names(path, experts[path], name)
            }
            if len(expert_values) > 1:
                raise UnsupportedError(
                    f"its {setting} differs between the experts of {path}; train with the same value for all"
                )
            (value,) = expert_values
        if value != values_by_name.find([full_name], default):
            literal_values[full_name] = value
    has_only_literals = all(re.fullmatch(r"[\w.^$\\]+", pattern) for pattern in values)
    if not has_only_literals:
        literal_values = {
            name: value for name in names if (value := values_by_name.find([name], None)) is not None
        } | literal_values
    by_value: dict[Any, list[str]] = {}
    for name, value in literal_values.items():
        by_value.setdefault(value, []).append(re.escape(name))
    return {"|".join(escaped_names): value for value, escaped_names in by_value.items()} | (
        dict(values) if has_only_literals else {}
    )
