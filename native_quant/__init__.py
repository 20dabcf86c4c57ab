"""The fast part of ktconvert: C kernels for weights and experts, and the runtime that computes with what was converted.

KTMoEWrapper stands where kt_kernel's stands, KTConvertConfig goes into transformers' from_pretrained, Experts is what both are made of.
Names are imported when they are used: NumPy is enough for Experts, KTMoEWrapper needs torch, KTConvertConfig transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktconvert.native_quant.runtime.experts import Experts
    from ktconvert.native_quant.runtime.hf import KTConvertConfig
    from ktconvert.native_quant.runtime.install import generate_gpu_experts_masks, install_as_kt_kernel
    from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper

    __version__: str
    __cpu_variant__: str

_HOMES = {
    "Experts": "experts",
    "KTConvertConfig": "hf",
    "KTMoEWrapper": "wrapper",
    "generate_gpu_experts_masks": "install",
    "install_as_kt_kernel": "install",
}

__all__ = [
    "Experts",
    "KTConvertConfig",
    "KTMoEWrapper",
    "__cpu_variant__",
    "__version__",
    "generate_gpu_experts_masks",
    "install_as_kt_kernel",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ktconvert.native_quant.runtime.{_HOMES[name]}"), name)
    if name in ("__version__", "__cpu_variant__"):
        install = importlib.import_module("ktconvert.native_quant.runtime.install")
        return install.version() if name == "__version__" else install.cpu_variant()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
