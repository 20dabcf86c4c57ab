"""The activation of experts, which only some methods can change: SwiGLU and its settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.errors import InputError
from ktconvert.native_quant.arrays import F32

LIMIT, ALPHA = "swiglu_limit", "swiglu_alpha"


class Swiglu(NamedTuple):
    """The settings swiglu_limit and swiglu_alpha of an activation; 0: no limit, silu. `Experts` defines them."""

    limit: float = 0.0
    alpha: float = 0.0

    def __str__(self) -> str:
        alpha = f" and swiglu_alpha={self.alpha:g}" if self.alpha else ""
        return f"swiglu_limit={self.limit:g}{alpha}"

    @property
    def activation(self) -> str:
        """The name in ACTIVATIONS of the table of architectures."""
        return "swiglu_oai" if self.alpha else "swiglu_limit" if self.limit else "silu"

    def compute(self, gate: F32, up: F32) -> F32:
        """Compute the activation by its definition, with which kernels and models of transformers are compared."""
        limit, alpha = self
        if limit:
            gate, up = np.clip(gate, -limit if alpha else None, limit), np.clip(up, -limit, limit)
        out: F32 = gate / (1 + np.exp(-alpha * gate)) * (up + 1) if alpha else gate / (1 + np.exp(-gate)) * up
        return out


PLAIN = Swiglu()
OAI = Swiglu(7.0, 1.702)  # default of families with "swiglu_oai"


def read_swiglu(config: dict[str, Any], activation: str, layer: int) -> Swiglu | None:
    """Return the settings of a layer in config.json, which may list a limit per layer; None if it has none.

    activation: a name in the table of architectures. Raises InputError for anything but numbers from 0 on.
    """
    limit = _read_setting(config, ("swiglu_limit", "swiglu_limits"), layer)
    if activation == "swiglu_oai":
        alpha = _read_setting(config, ("swiglu_alpha",), layer)
        return Swiglu(OAI.limit if limit is None else limit, OAI.alpha if alpha is None else alpha)
    return None if limit is None else Swiglu(limit)


def _read_setting(config: dict[str, Any], keys: tuple[str, ...], layer: int) -> float | None:
    if (found := cfg.find(config, keys)) is None:
        return None
    key, value = found
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else 0
    value = 0 if value is None else value
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise InputError(f"config.json: {key} must be a number from 0 on for layer {layer}, not {value!r}")
    return float(value)
