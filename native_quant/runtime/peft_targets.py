"""Modules that an adapter's settings target in a model with RoutedExperts, which PEFT does not know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ktconvert.layouts import patterns
from ktconvert.layouts.checkpoints.adapter import CONFIG, DOWN, GATE_UP, NamePatterns, is_named
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime.adapters import DEFAULT_NAMES
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

EXPERTS = "experts"
STACKED = (GATE_UP, DOWN)  # transformers' parameters, which are PEFT's targets in an unconverted model
NO_MATCH = "target_modules {!r} matches no module of this model; use the name of one of its modules"


class Targets(NamedTuple):
    """Settings that PEFT must not convert to transformers' parameters of stacked experts, which are absent here.

    modules   names of linears and Projections that PEFT might confuse with these parameters
    patterns  rank_pattern and alpha_pattern with the names of this model's modules
    """

    modules: set[str]
    patterns: dict[str, dict[str, Any]]


def separate_targets(config: Any, model: Any, experts: Mapping[str, RoutedExperts]) -> Targets:
    """Remove the names of experts from target_modules and target_parameters, and return them as Targets.

    Replaces regular expressions, whose run time has no limit in PEFT, by the names of the matching modules. Raises
    UnsupportedError for expressions that match nothing.
    """
    gate, up, down = projections = next(iter(experts.values())).projections
    inside = tuple(f"{at}." for at in experts)
    names = [name for name, _ in model.named_modules() if name and not name.startswith(inside)]
    requested, modules = config.target_modules, set[str]()
    if isinstance(requested, str) and requested.lower() == "all-linear":
        modules.update(f"{EXPERTS}.{name}" for name in projections)
    elif isinstance(requested, str):
        found = _match_names(requested, names, experts)
        if not found:
            raise UnsupportedError(NO_MATCH.format(requested))
        modules = {name for name in found if name.split(".")[-1] in projections}
        config.target_modules = found - modules
    elif requested is not None:
        special = {name for name in requested if name.split(".")[-1] in (EXPERTS, *projections)}
        config.target_modules = set(requested) - special
        for name in special:
            whole = re.sub(r"\bexperts\.\d+\.(\w+)$", rf"{EXPERTS}.\1", name)
            modules.update([f"{name}.{each}" for each in projections] if name.split(".")[-1] == EXPERTS else [whole])
    if isinstance(config.exclude_modules, str):
        config.exclude_modules = _match_names(config.exclude_modules, names, experts)
    stacked = {name for name in config.target_parameters or () if name.split(".")[-1] in STACKED}
    parameters: dict[str, str] = {}  # name of a projection -> the targeted parameter
    for parameter, parts in ((GATE_UP, (gate, up)), (DOWN, (down,))):
        layers = [at for at in experts if is_named(f"{at}.{parameter}", stacked)]
        parameters.update({f"{at}.{part}": f"{at}.{parameter}" for at in layers for part in parts})
        # layers_to_transform does not apply to parameters.
        everywhere = len(layers) == len(experts) and not config.layers_to_transform
        modules.update(f"{at}.{part}" for at in ([EXPERTS] if everywhere else layers) for part in parts)
    if stacked:
        config.target_parameters = set(config.target_parameters) - stacked or None
        config.target_modules = config.target_modules or set()  # with None, PEFT would choose
    every = {f"{at}.{name}": (at, name) for at in experts for name in projections}
    names += every
    targeted = {own: parts for own, parts in every.items() if is_named(own, modules)}
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
    old_names = {
        f"{at}.{name}" for at in stacks for name in (*DEFAULT_NAMES, "w1", "w2", "w3")
    }  # names of transformers 4
    if isinstance(config.target_modules, str) and config.target_modules.lower() != "all-linear":
        found = _match_names(config.target_modules, {*names, *old_names}, {})
        if not found:
            raise UnsupportedError(NO_MATCH.format(config.target_modules))
        config.target_modules = found - old_names | {name.split(".")[-1] for name in found & old_names}
    if isinstance(config.exclude_modules, str):
        config.exclude_modules = _match_names(config.exclude_modules, names, {})
    for setting in ("rank_pattern", "alpha_pattern"):
        setattr(config, setting, _resolve_patterns(setting, getattr(config, setting), names, {}, {}, {}, None))


def _match_names(pattern: str, names: Iterable[str], experts: Mapping[str, RoutedExperts]) -> set[str]:
    """Return the names of modules that a regular expression matches, also by the names of single experts."""
    match = patterns.compile(pattern, CONFIG).fullmatch
    found = {name for name in names if name not in experts and match(name)}
    for at, module in experts.items():
        for name in module.projections:
            if any(map(match, (at, f"{at}.{name}", *_expert_names(at, module, name)))):
                found.add(f"{at}.{name}")
    return found


def _expert_names(at: str, module: RoutedExperts, name: str) -> list[str]:
    """Return the names of a projection of each expert in transformers 4."""
    return [f"{at}.{expert}.{name}" for expert in range(module.num_experts)]


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
    found = NamePatterns(values, CONFIG)
    exact: dict[str, Any] = {}
    for own, (at, name) in targeted.items() if values else ():
        if own in parameters:
            value = found.find([parameters[own]], default)
        else:
            each = {found.find((one, own), default) for one in _expert_names(at, experts[at], name)}
            if len(each) > 1:
                raise UnsupportedError(
                    f"its {setting} differs between the experts of {at}; train with the same value for all"
                )
            (value,) = each
        if value != found.find([own], default):
            exact[own] = value
    plain = all(re.fullmatch(r"[\w.^$\\]+", pattern) for pattern in values)
    if not plain:
        exact = {name: value for name in names if (value := found.find([name], None)) is not None} | exact
    by_value: dict[Any, list[str]] = {}
    for name, value in exact.items():
        by_value.setdefault(value, []).append(re.escape(name))
    return {"|".join(literal): value for value, literal in by_value.items()} | (dict(values) if plain else {})
