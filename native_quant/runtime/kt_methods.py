"""The modes and methods of kt-kernel 0.7.2 by name: those we compute, and those not implemented yet."""

from __future__ import annotations

from typing import Any, NamedTuple

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.errors import InputError
from ktconvert.native_quant._ktq import lib

NOT_YET = (
    *("RAWINT4", "GPTQ_INT4", "SYCL_GPTQ_INT4", "LLAMAFILE"),
    *("MOE_INT4", "MOE_INT8"),
)
_SKIP_LORA = ("AMXBF16", "AMXINT8", "AMXINT4", "AMXINT4_1", "AMXINT4_KGroup", "AMXINT4_1KGroup")
TRAINING = (
    *(
        "AMXBF16_SFT",
        "AMXFP8_SFT",
        "MXFP4_SFT",
        "INT8_SFT",
        "AMXINT8_SFT",
        "AMXINT4_SFT",
        "AMXINT4_1_SFT",
        "RAWINT4_SFT",
    ),
    *("AMXINT4_KGroup_SFT", "AMXINT4_1KGroup_SFT"),
    *(f"{name}_SFT_SkipLoRA" for name in _SKIP_LORA),
)
# The forms that our kernels compute with: their numbers in ktq.h.
FORMATS: dict[str, int] = {
    "AMXINT4": lib.KTQ_FORMAT_AMXINT4,
    "AMXINT8": lib.KTQ_FORMAT_AMXINT8,
    "MXFP4": lib.KTQ_FORMAT_MXFP4,
    "FP8": lib.KTQ_FORMAT_FP8,
    "BF16": lib.KTQ_FORMAT_BF16,
    "FP8_PERCHANNEL": lib.KTQ_FORMAT_FP8_PERCHANNEL,
    "MXFP8": lib.KTQ_FORMAT_MXFP8,
    "NVFP4": lib.KTQ_FORMAT_NVFP4,
}
LIMITED = ("FP8", "MXFP4", "MXFP8")  # may have a swiglu_limit
WITH_ALPHA = ("MXFP8",)  # may have a swiglu_alpha
# Read from checkpoints only: nothing packs BF16 numbers into them.
CHECKPOINTS_ONLY = ("FP8_PERCHANNEL", "MXFP8", "NVFP4")
INT8 = ("AMXINT4", "AMXINT8")  # computed with int8 activations (NUMERICS.md, section 5), the others with BF16 (5b)


class Swiglu(NamedTuple):
    """The settings swiglu_limit and swiglu_alpha, which Experts explains; 0: not limited, silu."""

    limit: float = 0.0
    alpha: float = 0.0


PLAIN = Swiglu()
OAI = Swiglu(7.0, 1.702)  # of families with "swiglu_oai", where config.json does not say


def check(mode: str, method: str, swiglu_limit: float, swiglu_alpha: float) -> None:
    """Raise ValueError for what kt-kernel does not know either, NotImplementedError for what only we lack."""
    if mode not in ("inference", "sft"):
        raise ValueError(f"Unknown mode: {mode!r}. There are 'inference' and 'sft' (ktconvert computes 'inference').")
    known = (*FORMATS, *NOT_YET) if mode == "inference" else TRAINING
    if method not in known:
        raise ValueError(f"Unknown method {method!r} for mode {mode!r}. There are {', '.join(sorted(known))}.")
    if mode == "sft":
        raise NotImplementedError(
            f"ktconvert does not train: mode='sft' with method={method!r} needs kt-kernel itself."
        )
    if method not in FORMATS:
        raise NotImplementedError(
            f"method={method!r} is not implemented yet; ktconvert's runtime computes {', '.join(FORMATS)}. "
            "Convert with `ktconvert cpu --quant-method int4` or another."
        )
    check_swiglu(method, swiglu_limit, swiglu_alpha)


def check_swiglu(method: str, limit: float, alpha: float) -> None:
    """Raise ValueError for settings of the activation that the method does not have."""
    for name, value, methods in (("swiglu_limit", limit, LIMITED), ("swiglu_alpha", alpha, WITH_ALPHA)):
        if value != 0.0 and method not in methods:
            raise ValueError(
                f"{name}={value} must be 0 for method={method!r}: only {', '.join(methods)} can have it "
                f"in place of silu(gate) * up."
            )
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number from 0 on, not {value}")


def activation(swiglu: Swiglu) -> str:
    """What ACTIVATIONS of the table of architectures calls the activation with these settings."""
    return "swiglu_oai" if swiglu.alpha else "swiglu_limit" if swiglu.limit else "silu"


def settings(swiglu: Swiglu) -> str:
    """For messages."""
    alpha = f" and swiglu_alpha={swiglu.alpha:g}" if swiglu.alpha else ""
    return f"swiglu_limit={swiglu.limit:g}{alpha}"


def stated(config: dict[str, Any], activation: str, layer: int) -> Swiglu | None:
    """The settings of a layer by config.json, which may list a limit per layer; None where it does not say.

    activation  of the model, by the table of architectures. Raises InputError for what is no number from 0 on.
    """
    limit = _setting(config, ("swiglu_limit", "swiglu_limits"), layer)
    if activation == "swiglu_oai":
        alpha = _setting(config, ("swiglu_alpha",), layer)
        return Swiglu(OAI.limit if limit is None else limit, OAI.alpha if alpha is None else alpha)
    return None if limit is None else Swiglu(limit)


def swiglu_of(config: dict[str, Any], activation: str, layer: int, method: str) -> Swiglu:
    """The same as far as the method has such settings, for which the experts are then loaded or refused."""
    limit, alpha = stated(config, activation, layer) or PLAIN
    return Swiglu(limit if method in LIMITED else 0.0, alpha if method in WITH_ALPHA else 0.0)


def _setting(config: dict[str, Any], keys: tuple[str, ...], layer: int) -> float | None:
    found = cfg.find(config, keys)
    if found is None:
        return None
    key, value = found
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else 0
    value = 0 if value is None else value
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise InputError(f"config.json: {key} must be a number from 0 on for layer {layer}, not {value!r}")
    return float(value)
