"""The environment of a walk: the packages that it needs, and the properties of the machine that can change bytes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import KtconvertError, OutputError
from ktconvert.native_quant.runtime import transformers_version

WALK = ("torch", "transformers", "accelerate", "datasets")
NEEDS = (*WALK, "llmcompressor", "compressed_tensors")
# Packages whose versions can change bytes: of statistics, and of GPTQ.
WALK_PACKAGES = ("torch", "transformers")
PACKAGES = (*WALK_PACKAGES, "llmcompressor", "compressed-tensors")
GROUP_BYTES = 1 << 30  # of experts with their Hessians and working copies that are in memory at a time, on a CPU
GPU_SHARE = 4  # such a group takes this fraction (1/4) of a GPU's memory


def require(what: str = "--quant-method GPTQ", needs: Sequence[str] = NEEDS) -> None:
    """Raise KtconvertError, which names what to install, where a package that `what` needs is missing or too old."""
    from ktconvert.pipeline.models.loading import require_packages, share_cores

    require_packages(what, needs, "gpu")
    if (why := transformers_version.refusal()) is not None:
        raise KtconvertError(why)
    share_cores()
    for package in ("LLM_COMPRESSOR", "COMPRESSED_TENSORS"):
        os.environ.setdefault(f"{package}_LOG_LEVEL", "ERROR")


def this_machine(
    threads: int, force_cpu: bool, max_gpu_memory: int | None, packages: Sequence[str] = PACKAGES
) -> dict[str, Any]:
    """The properties of this machine that can change bytes, sorted by name: other machines add in another order."""
    if force_cpu:  # before torch is imported
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    import torch

    facts: dict[str, Any] = {"threads": threads, **{name: importlib.metadata.version(name) for name in packages}}
    if not force_cpu and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        group = min(total, max_gpu_memory or total) // GPU_SHARE
        facts |= {"device_type": "cuda", "device": torch.cuda.get_device_name(0), "group_bytes": group}
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        facts |= {"device_type": "cpu", "device": f"CPU with {capability}", "group_bytes": GROUP_BYTES}
    return dict(sorted(facts.items()))


def require_same(begun: Mapping[str, Any], now: Mapping[str, Any], output: Path, allowed: bool) -> None:
    """Raise OutputError where a conversion was begun on another machine than this one, unless that is allowed."""
    other = [
        f"{key} was {begun.get(key)}, is {now.get(key)}"
        for key in sorted({*begun, *now})
        if begun.get(key) != now.get(key)
    ]
    if other and not allowed:
        raise OutputError(
            f"{output} was begun on another machine ({'; '.join(other)}), where sums are rounded in another order. "
            "Finish it there or with those values, or give --allow-machine-change to keep what is finished and make "
            "the rest here, or --overwrite."
        )
