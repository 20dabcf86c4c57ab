"""Detection of rotations at run time: SpinQuant, QuaRot, QuIP and similar methods.

Such weights are stored rotated, and the model rotates inputs or outputs of their linears while it computes, by a
Hadamard or other matrix. The weights by themselves are those of a different model, so these checkpoints are refused. A
model whose rotations are folded into the weights of both sides computes the same as stored, and is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.sources.config import QUANTIZATIONS, iterate_scopes
from ktconvert.layouts.tensors import TensorInfo

# Keys, and names of methods: GPTQModel and Quark (rotation), AutoRound (rotation_config, spinquant_config), FP-Quant
# and HIGGS (hadamard_size), compressed-tensors (transform_config), QuIP#.
ROTATION = re.compile("rotat|hadamard|spinquant|quarot|quip|^transform_config$", re.IGNORECASE)
ROTATION_METHODS = ("qtip", "exl3", "higgs", "fp_quant")
METHOD_KEYS = ("quant_method", "name", "algorithm")  # keys whose value names a method
CONFIG_KEYS = (
    *QUANTIZATIONS,
    "quip_params",
    "transform_config",
    "rotation_config",
    "spinquant_config",
)  # of config.json
# Keys of SpinQuant in AutoRound and Quark: R1 and R2 are folded into the weights, unless R1 is online.
FOLDED_KEY = "online_r1_rotation"
ONLINE_KEYS = ("online_r1_rotation", "r3", "r4")
OFFLINE = ("weight_input", "weight_output")  # locations of compressed-tensors' transforms that change only weights

# Suffixes of the names of rotations' own tensors
ROTATION_SUFFIXES = (
    *("_input.weight", "_output.weight"),  # compressed-tensors, below a linear
    *(".SU", ".SV", ".suh", ".svh"),  # QuIP#, QTIP, EXL3
    *("hadamard_matrix", ".had_K", ".had_matrix", ".input_rotation"),
    *(".spinquant_r1_type", ".spinquant_r4_type"),
)
LINEARS = (".weight", ".weight_packed", ".qweight")  # of a linear


class RotatedError(UnsupportedError, exit_code=UnsupportedError.exit_code):
    """A model that rotates inputs or outputs of its linears while it computes."""

    def __init__(self, evidence: str, **where: Any) -> None:
        problem = (
            f"{evidence}, inputs or outputs of linears are rotated while the model computes, which is not supported"
        )
        super().__init__(problem, "use a release of the model without such rotations", **where)


def refuse_config(path: Path | str, config: dict[str, Any]) -> None:
    """Raise RotatedError if a config states that the model rotates while it computes."""
    for scope in iterate_scopes(config):
        settings = {key: scope[key] for key in CONFIG_KEYS if key in scope}
        if (key := next(_find_rotations(settings), None)) is not None:
            raise RotatedError(f"by its {key}", path=path)


def refuse_tensors(root: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise RotatedError if a tensor of a checkpoint belongs to a rotation."""
    for name, info in tensors.items():
        if name.endswith(ROTATION_SUFFIXES) and _is_rotation(name, tensors):
            raise RotatedError(f"by tensor {name!r}", tensor=name, path=root / info.file)


def _is_rotation(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor with one of ROTATION_SUFFIXES belongs to a rotation.

    Those of compressed-tensors are below a linear.
    """
    linear = name.removesuffix(".weight").rpartition(".")[0]
    return not name.endswith(".weight") or any(f"{linear}{suffix}" in names for suffix in LINEARS)


def _find_rotations(settings: Any) -> Iterator[str]:
    if isinstance(settings, list):
        for each in settings:
            yield from _find_rotations(each)
    if not isinstance(settings, dict) or (FOLDED_KEY in settings and not any(settings.get(key) for key in ONLINE_KEYS)):
        return
    for key, value in settings.items():
        method = value.lower() if key in METHOD_KEYS and isinstance(value, str) else ""
        if method and (ROTATION.search(method) or method in ROTATION_METHODS):
            yield f"{key} {value!r}"
        elif value and "." not in key and ROTATION.search(key):
            if _is_online(value):
                yield key
        else:
            yield from _find_rotations(value)


def _is_online(value: Any) -> bool:
    """Return whether a rotation's config value may mean that inputs or outputs are rotated; unknown values may."""
    if not isinstance(value, dict):
        return True
    if FOLDED_KEY in value:
        return any(value.get(key) for key in ONLINE_KEYS)
    try:
        locations = [args["location"] for scheme in value["config_groups"].values() for args in scheme["apply"]]
    except (KeyError, TypeError, AttributeError):
        return True
    return any(location not in OFFLINE for location in locations)
