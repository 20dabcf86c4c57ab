"""Reads one row of the architecture table from a small TOML file, so that a new model needs no new release.

name = "My-MoE"
matches = ["my_moe"]              # model_type or architectures; left out: any checkpoint
activation = "silu"               # whatever config.json calls it; optional, as are limit, alpha, beta, weights_on,
                                  # layers, experts, width and hidden

[[stored]]
style = "separate"                # or "fused" (gate_up, down) or "stacked" (gate, up, down in 3-D)
gate = "{prefix}layers.{layer}.mlp.experts.{expert}.gate_proj.weight"  # false: experts have no gate
up   = "{prefix}layers.{layer}.mlp.experts.{expert}.up_proj.weight"
down = "{prefix}layers.{layer}.mlp.experts.{expert}.down_proj.weight"
"""

from __future__ import annotations

import string
import tomllib
from dataclasses import fields, replace
from typing import Any

from ktconvert.layouts.checkpoints.archs import ARCHS, Arch, Fused, Separate, Stacked, Style
from ktconvert.layouts.checkpoints.expert_function import ACTIVATIONS, ExpertFunction
from ktconvert.layouts.errors import InputError

STYLES: dict[str, type[Separate | Fused | Stacked]] = {"separate": Separate, "fused": Fused, "stacked": Stacked}
REMEDY = "correct it, as docs/reference/architectures.md shows"
LISTS = ("matches", "layers", "experts", "width", "hidden")
# Fields of a row that are not in files.
NO_KEYS = ("refusal", "shares", "decides", "router_scale", "router", "after", "function", "stack", "more")
CONSTANTS = ("limit", "alpha", "beta")
CHOICES = {"activation": tuple(ACTIVATIONS), "weights_on": ("output", "input")}


def list_archs(text: str | None) -> tuple[Arch, ...]:
    """Return the table of architectures, preceded by the row in this text of an --arch-file if there is one."""
    return (parse_arch(text), *ARCHS) if text else ARCHS


def parse_arch(text: str) -> Arch:
    """Return the row that a TOML text describes; it precedes ARCHS. Raises InputError naming a wrong key."""
    try:
        return _parse(text)
    except InputError as error:
        raise error.with_path("--arch-file").with_remedy(error.remedy or REMEDY) from None


def _parse(text: str) -> Arch:
    """Return the row that a TOML text describes; raise InputError for unknown keys and wrong values."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else e
        raise InputError(f"not valid TOML ({reason})") from None
    known = [*(f.name for f in fields(Arch) if f.name not in NO_KEYS), *CHOICES, *CONSTANTS]
    _require_known_keys(tree, known, "")
    name, stored = tree.pop("name", None), tree.pop("stored", None)
    if not isinstance(name, str) or not name or not isinstance(stored, list) or not stored:
        raise InputError("needs a name (a string), and a [[stored]] table with the names of the experts' tensors")
    row: dict[str, Any] = {"matches": (), "decides": "activation" in tree}
    function = ExpertFunction()
    for key, value in tree.items():
        if key in LISTS:
            if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
                raise InputError(f"{key} must be a list of strings")
            row[key] = tuple(value)
        elif key in CONSTANTS:
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise InputError(f"{key} must be a finite number of at least 0")
            function = function.with_constants({key: float(value)})
        elif value not in CHOICES[key]:
            raise InputError(f"{key} must be one of {', '.join(CHOICES[key])}")
        else:
            function = replace(function, **{key: value})
    return Arch(name=name, stored=tuple(_style(table) for table in stored), function=function, **row)


def _style(table: Any) -> Style:
    style = table.get("style") if isinstance(table, dict) else None
    kind = STYLES.get(style) if isinstance(style, str) else None
    if kind is None:
        raise InputError(f"stored.style must be one of {', '.join(STYLES)}")
    flags = [field.name for field in fields(kind) if field.type == "bool"]
    matrices = [field.name for field in fields(kind) if field.type != "bool"]
    _require_known_keys(table, ["style", *matrices, *flags], "stored.")
    values: dict[str, Any] = {
        matrix: None
        if matrix == "gate" and table.get(matrix) is False
        else _template(matrix, table.get(matrix), kind is Separate)
        for matrix in matrices
    }
    for flag in flags:
        if flag in table:
            if not isinstance(table[flag], bool):
                raise InputError(f"stored.{flag} must be true or false")
            values[flag] = table[flag]
    return kind(**values)


def _template(matrix: str, value: Any, with_expert: bool) -> str:
    """Check a template: {layer} once and, for one tensor per expert, {expert} once after it, each between two dots."""
    want = ["layer", "expert"] if with_expert else ["layer"]
    shown = " and ".join(f"{{{w}}}" for w in want)
    try:
        slots = [field for _, field, spec, conv in string.Formatter().parse(value) if field is not None]
        good = [s for s in slots if s != "prefix"] == want and slots.count("prefix") <= 1
        good = good and all(f".{{{w}}}." in f".{value}" for w in want)
    except (ValueError, TypeError):
        good = False
    if not good or ("{prefix}" in value and not value.startswith("{prefix}")):
        want_name = f"a tensor name with {shown} between dots; {{prefix}} may only be in front"
        raise InputError(f"stored.{matrix} must be {want_name}")
    return str(value)


def _require_known_keys(table: dict[str, Any], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise InputError(f"unknown key {where}{key}", f"use only {', '.join(known)}")
