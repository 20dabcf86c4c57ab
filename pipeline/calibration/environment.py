"""The environment of a walk: the packages that it needs, and the properties of the machine that can change bytes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Any

from ktconvert.layouts.errors import KtconvertError
from ktconvert.native_quant.runtime import transformers_version
from ktconvert.pipeline.options.option_groups import Machine

WALK = ("torch", "transformers", "accelerate", "datasets")
NEEDS = (*WALK, "llmcompressor", "compressed_tensors")
# Packages whose versions can change bytes: of statistics, and of GPTQ.
WALK_PACKAGES = ("torch", "transformers")
PACKAGES = (*WALK_PACKAGES, "llmcompressor", "compressed-tensors")
GROUP_BYTES = 1 << 30  # of experts with their Hessians and working copies that are in memory at a time, on a CPU
GPU_SHARE = 4  # such a group takes this fraction (1/4) of a GPU's memory


def require(what: str = "--quant-method GPTQ", needs: Sequence[str] = NEEDS) -> None:
    """Raise KtconvertError, which names what to install, where a package that `what` needs is missing or too old."""
    from ktconvert.pipeline.models.loading import require_packages, set_environment

    require_packages(what, needs, "gpu")
    if (why := transformers_version.refusal()) is not None:
        raise KtconvertError(why)
    set_environment()
    for package in ("LLM_COMPRESSOR", "COMPRESSED_TENSORS"):
        os.environ.setdefault(f"{package}_LOG_LEVEL", "ERROR")


def this_machine(limits: Machine, threads: int, packages: Sequence[str]) -> dict[str, Any]:
    """The properties of this machine that can change bytes, sorted by name: other machines add in another order."""
    if limits.force_cpu:  # before torch is imported
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    import torch

    facts: dict[str, Any] = {"threads": threads, **{name: importlib.metadata.version(name) for name in packages}}
    if not limits.force_cpu and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        group = min(total, limits.max_gpu_memory or total) // GPU_SHARE
        facts |= {"device_type": "cuda", "device": torch.cuda.get_device_name(0), "group_bytes": group}
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        facts |= {"device_type": "cpu", "device": f"CPU with {capability}", "group_bytes": GROUP_BYTES}
    return dict(sorted(facts.items()))
