"""Dtypes that transformers gives to the weights of routers: those in which the checkpoint stores them, where it can.

Families publish a router's correction bias in float32 beside BF16 weights, with values so close to each other that BF16
merges them: other experts are then chosen. transformers keeps it in some families and rounds it in others (MiniMax-M2,
Kimi-Linear, LFM2).
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from transformers import modeling_utils

# Names of the biases, as transformers has them in its modules.
BIASES = ("e_score_correction_bias", "expert_bias")
ROUTER = re.compile(r"(gate|router)$")
# In the code of a router that takes its matrix in any dtype: it casts what it reads to that, or the matrix to float32.
CASTS = re.compile(r"\.to\(self\.weight\.dtype\)|self\.weight\.(type\(torch\.float32\)|float\(\))")

_loading: Any = modeling_utils
_get_dtype_plan = _loading.PreTrainedModel._get_dtype_plan


def keep_routers() -> None:
    """Have every model of transformers that is loaded from now on keep them."""
    _loading.PreTrainedModel._get_dtype_plan = get_dtype_plan


def get_dtype_plan(self: Any, dtype: Any) -> dict[str, Any]:
    """Return transformers' plan (part of a name: dtype), with None, the stored dtype, for biases and such routers."""
    plan: dict[str, Any] = _get_dtype_plan(self, dtype)
    routers = {name: type(module) for name, module in self.named_modules() if ROUTER.search(name)}
    casting = {kind for kind in {*routers.values()} if _casts(kind)}
    names = {re.sub(r"\d+", "*", f"{name}.weight") for name, kind in routers.items() if kind in casting}
    names = {name for name in names if not any(part in name for part in plan)}
    return {**dict.fromkeys((*BIASES, *sorted(names))), **plan}


def _casts(kind: type) -> bool:
    """Return whether a class of routers computes with a matrix of any dtype."""
    try:
        return CASTS.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):  # there is no source
        return False
