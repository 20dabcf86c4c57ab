"""Functions of kt_kernel besides KTMoEWrapper, and a module of its name for programs that import it, such as SGLang."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ktconvert.native_quant import instruction_sets, kernels
from ktconvert.native_quant.runtime import kt_sft

if TYPE_CHECKING:
    import torch

EXTENSION = "kt_kernel.kt_kernel_ext"


def generate_gpu_experts_masks(activation_freq: torch.Tensor, num_gpu_experts: int) -> torch.Tensor:
    """Return a mask of the `num_gpu_experts` most used experts of all layers (below 0: none; above the total: all).

    activation_freq: [layers, experts]. The result is bool [layers, experts] on the CPU.
    """
    import torch

    masks = torch.zeros(activation_freq.shape, dtype=torch.bool, device="cpu")
    count = max(0, min(num_gpu_experts, masks.numel()))
    if count:
        frequent = torch.topk(activation_freq.reshape(-1).cpu(), count, sorted=False).indices
        masks.view(-1)[frequent] = True
    return masks


def package_version() -> str:
    """Return ktconvert's version, not kt-kernel's."""
    return metadata.version("ktconvert")


def cpu_variant() -> str:
    """Return kt-kernel's name of the instruction set that the kernels use."""
    return instruction_sets.VARIANTS.get(instruction_sets.isa(), instruction_sets.isa())


def _import_wrapper() -> type:
    from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper

    return KTMoEWrapper


def _return(value: Any) -> Callable[[], Any]:
    return lambda: value


# Modules that ktconvert provides: functions that return their names' values, and the message for any other name.
PROVIDED: dict[str, tuple[dict[str, Callable[[], Any]], str]] = {
    "kt_kernel": (
        {
            "KTMoEWrapper": _import_wrapper,
            "generate_gpu_experts_masks": _return(generate_gpu_experts_masks),
            "__version__": package_version,
            "__cpu_variant__": cpu_variant,
        },
        "kt_kernel is provided by ktconvert and has no {!r} (docs/how-to/replace-kt-kernel.md lists its names)",
    ),
    EXTENSION: (
        {"__cpu_variant__": cpu_variant},
        "kt_kernel is provided by ktconvert, without a C++ extension with {!r}; use KTMoEWrapper",
    ),
    "kt_kernel.sft": (
        {name: _return(value) for name, value in kt_sft.NAMES.items()},
        "kt_kernel.sft is provided by ktconvert and has no {!r}; install kt-kernel for its training",
    ),
}


class _Provided(ModuleType):
    """A module with the names of PROVIDED.

    real  the specification of the real module whose other names to add at the first use of one; None: no such module,
          or its names have been added
    """

    ktconvert = True
    real: ModuleSpec | None = None

    def __getattr__(self, name: str) -> Any:
        values, refusal = PROVIDED[self.__name__]
        if name in values:
            return values[name]()
        if f"{self.__name__}.{name}" == EXTENSION and self.__path__:
            return _load_real_extension(self)
        if self.real is not None and not name.startswith("__"):  # inspect asks all modules for such names
            self._add_real_names()
            return getattr(self, name)
        raise AttributeError(refusal.format(name))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *PROVIDED[self.__name__][0]]

    def _add_real_names(self) -> None:
        """Run the real module's code in this one. Our names replace its own."""
        assert self.real is not None and self.real.loader is not None
        loader, self.real = self.real.loader, None
        loader.exec_module(self)
        for name in PROVIDED[self.__name__][0]:
            vars(self).pop(name, None)


def install_as_kt_kernel() -> None:
    """Make `import kt_kernel` import ktconvert's KTMoEWrapper. Raises RuntimeError if the real one is imported already.

    Submodules (kt_kernel.cli, .utils ...), the C++ extension and the names of kt_kernel.sft that kt_sft.py lacks remain
    those of the real package, if installed.
    """
    loaded = sys.modules.get("kt_kernel")
    if isinstance(loaded, _Provided):
        return
    if loaded is not None:
        remedy = "call install_as_kt_kernel() before anything imports kt_kernel"
        raise RuntimeError(f"the real kt_kernel is imported already; {remedy}")
    kernels.isa()  # raises ValueError for a wrong KTCONVERT_ISA, as kt_kernel does when it is imported
    real = importlib.util.find_spec("kt_kernel")
    module, extension, training = (_Provided(name, __doc__) for name in PROVIDED)
    for provided in (module, extension, training):
        provided.__spec__ = ModuleSpec(provided.__name__, None, origin="ktconvert", is_package=True)
        provided.__path__ = []
        provided.__file__ = __file__  # `kt quant` runs ../scripts/convert_cpu_weights.py
    module.__dict__["sft"] = training
    sys.modules |= {"kt_kernel": module, training.__name__: training}
    if real is not None and real.origin is not None:  # None if any folder has that name
        module.__path__ = real.submodule_search_locations or []
        training.real = PathFinder.find_spec(training.__name__, module.__path__)
        training.__path__ = (training.real and training.real.submodule_search_locations) or []
    else:
        _add_extension(module, extension)


def _load_real_extension(module: ModuleType) -> ModuleType:
    """Load the real package's extension, which needs AVX2. Raises its ImportError."""
    extension: ModuleType = importlib.import_module("kt_kernel._cpu_detect").initialize()[0]
    _add_extension(module, extension)
    return extension


def _add_extension(module: ModuleType, extension: ModuleType) -> None:
    module.__dict__["kt_kernel_ext"] = extension
    sys.modules |= dict.fromkeys((EXTENSION, "kt_kernel_ext"), extension)
