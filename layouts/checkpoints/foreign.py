"""Encodings that are recognised but not supported, by the names of their tensors and by dtypes that no row reads."""

from __future__ import annotations

from ktconvert.layouts.tensors import TensorInfo

# Scales of activations, which nothing here needs.
ASIDE = (
    "{s}.input_scale",
    "{s}_input_scale",
    "{s}.qscale_act",
    "{s}.activation_scale",
    "{s}.input_global_scale",
    "{s}_activation_scale",
)
BIASES = ("{s}.bias", "{s}_bias")
# Patterns as in the table of encodings -> the format that they belong to. Names that a row of that table reads take
# precedence.
FOREIGN = {
    "{s}.SCB": "bitsandbytes",
    "{t}.absmax": "bitsandbytes",
    "{s}.B": "marlin",
    "{s}.W_q": "HQQ",
}
# Values that no row reads: by their own dtype, else by that of the scale beside them.
BY_VALUES = {"F8_E5M2": "FP8 E5M2", "F64": "float64", "NVFP4": "NVFP4 with a scale for the whole tensor"}
BY_SCALE = {"U8": "MXFP4", "F8_E8M0": "MXFP4", "F8_E4M3": "NVFP4"}
# Outside the experts: suffixes of names, and dtypes of weights.
SUFFIXES = {
    ".weight_packed": "packed by compressed-tensors",
    ".weight_zero_point": "packed by compressed-tensors",
    ".weight_scale_2": "NVFP4",
    ".weight_global_scale": "NVFP4",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".pre_quant_scale": "a scale of inputs (modelopt's AWQ), without which the weight beside it is another",
}
DTYPES = {
    "U8": "packed",
    "I8": "INT8",
    "I32": "packed",
    "F4": "FP4",
    "F6_E2M3": "FP6 E2M3",
    "F6_E3M2": "FP6 E3M2",
    "F8_E5M2": "FP8 E5M2",
    "F8_E8M0": "FP8 E8M0",
    "F8_E4M3FNUZ": "FP8 E4M3FNUZ",
    "F8_E5M2FNUZ": "FP8 E5M2FNUZ",
}


def of_values(values: TensorInfo, scale: TensorInfo | None) -> str:
    """The format of an expert's weight that no row reads."""
    what = BY_SCALE.get(scale.dtype if scale else "", "packed or integer")
    return f"{BY_VALUES.get(values.dtype, what)} ({values.dtype})"


def beside_experts(info: TensorInfo) -> str | None:
    """The format of a tensor outside the experts, if no loader of a BF16 output would understand it; else None."""
    by_name = next((kind for suffix, kind in SUFFIXES.items() if info.name.endswith(suffix)), None)
    if by_name is None and (info.name.endswith(".weight") or len(info.shape) == 3):
        return DTYPES.get(info.dtype)
    return by_name
