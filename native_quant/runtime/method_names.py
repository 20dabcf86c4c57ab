"""The methods that kt-kernel 0.7.2 has by name, of which some are ours, and what it and we refuse."""

from __future__ import annotations

from ktconvert.native_quant.runtime.methods import METHODS, check_swiglu
from ktconvert.native_quant.runtime.swiglu import Swiglu

NOT_YET = ("SYCL_GPTQ_INT4",)
_INTEGERS = ("AMXINT8", "AMXINT4", "AMXINT4_1", "AMXINT4_KGroup", "AMXINT4_1KGroup")
TRAINING = (
    *(f"{name}_SFT" for name in ("AMXBF16", "AMXFP8", "MXFP4", "INT8", "RAWINT4", *_INTEGERS)),
    *(f"{name}_SFT_SkipLoRA" for name in ("AMXBF16", *_INTEGERS)),
)
SKIP_LORA = "_SFT_SkipLoRA"  # how names of methods without LoRA end
# Of those, the ones that train, and the method that holds their weights.
TRAINED = {
    "AMXBF16_SFT": "BF16",
    "AMXINT8_SFT": "AMXINT8",
    "INT8_SFT": "AMXINT8",
    "AMXINT4_SFT": "AMXINT4",
    "AMXINT4_KGroup_SFT": "RAWINT4",
    "RAWINT4_SFT": "RAWINT4",
    "AMXFP8_SFT": "FP8",
    "MXFP4_SFT": "MXFP4",
    f"AMXBF16{SKIP_LORA}": "BF16",
    f"AMXINT8{SKIP_LORA}": "AMXINT8",
    f"AMXINT4{SKIP_LORA}": "AMXINT4",
}


def check(mode: str, method: str, swiglu: Swiglu) -> None:
    """Raise ValueError for what kt-kernel does not know either, NotImplementedError for what only we lack."""
    if mode not in ("inference", "sft"):
        raise ValueError(f"Unknown mode: {mode!r}. There are 'inference' and 'sft'.")
    known = (*METHODS, *NOT_YET) if mode == "inference" else TRAINING
    if method not in known:
        raise ValueError(f"Unknown method {method!r} for mode {mode!r}. There are {', '.join(sorted(known))}.")
    if mode == "sft":
        if method not in TRAINED:
            what = f"method={method!r} is a name that kt-kernel lists and cannot construct"
            raise NotImplementedError(f"{what}: ktconvert trains {', '.join(TRAINED)}.")
        if any(swiglu):
            raise NotImplementedError(
                f"method={method!r} trains silu(gate) * up alone: leave swiglu_limit and _alpha 0."
            )
        return
    if method not in METHODS:
        what = f"method={method!r} is not implemented yet; ktconvert's runtime computes {', '.join(METHODS)}"
        raise NotImplementedError(f"{what}. Convert with `ktconvert cpu --quant-method int4` or another.")
    check_swiglu(method, swiglu)
