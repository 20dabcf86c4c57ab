"""The fast part of ktconvert: C kernels that convert weights, and the runtime that computes with converted experts.

KTMoEWrapper replaces kt_kernel's class of that name, KTConvertConfig is passed to transformers' from_pretrained, and
both are built on KTExperts. Names are imported on first use: KTExperts needs only NumPy, KTMoEWrapper needs torch,
KTConvertConfig transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ktconvert.native_quant import machine  # noqa: F401  looks at the CPUs before torch binds the thread

if TYPE_CHECKING:
    from ktconvert.native_quant.runtime.experts import KTExperts as KTExperts
    from ktconvert.native_quant.runtime.hf import KTConvertConfig as KTConvertConfig
    from ktconvert.native_quant.runtime.install import generate_gpu_experts_masks as generate_gpu_experts_masks
    from ktconvert.native_quant.runtime.install import install_as_kt_kernel as install_as_kt_kernel
    from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper as KTMoEWrapper

    __version__: str
    __cpu_variant__: str

_MODULES = {
    "KTExperts": "experts",
    "KTConvertConfig": "hf",
    "KTMoEWrapper": "wrapper",
    "generate_gpu_experts_masks": "install",
    "install_as_kt_kernel": "install",
}
_FUNCTIONS = {"__version__": "package_version", "__cpu_variant__": "cpu_variant"}  # of install, as kt_kernel has them
__all__ = [*_MODULES, *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        from ktconvert.native_quant.runtime import install

        return getattr(install, _FUNCTIONS[name])()
    if name in _MODULES:
        from ktconvert.native_quant.runtime.required_packages import require_packages_of
        from ktconvert.native_quant.runtime.warn import warn_user

        require_packages_of(name, warn_user)
        return getattr(importlib.import_module(f"ktconvert.native_quant.runtime.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
