"""What GPTQ runs on: which packages must be there, and what of the machine decides about bytes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import KtconvertError, OutputError
from ktconvert.pipeline.models.generate import share_cores

NEEDS = ("torch", "transformers", "accelerate", "datasets", "llmcompressor", "compressed_tensors")
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")  # their versions can change bytes
GROUP_BYTES = 1 << 30  # of experts with their Hessians and working copies that are in memory at a time, on a CPU
GPU_SHARE = 4  # of a GPU's memory, one part in so many is for such a group


def require() -> None:
    """Raise KtconvertError, which names what to install, where a package is missing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise KtconvertError(
            f"--quant-method GPTQ needs {', '.join(missing)}, not installed here: pip install 'ktconvert[gpu]'"
        )
    share_cores()
    quiet()


def quiet() -> None:
    """Have llmcompressor and compressed-tensors say only what is an error; what the user has set stays."""
    for package in ("LLM_COMPRESSOR", "COMPRESSED_TENSORS"):
        os.environ.setdefault(f"{package}_LOG_LEVEL", "ERROR")


def hide_gpus() -> None:
    """Have torch see no GPU, whatever the machine has; to be called before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HIP_VISIBLE_DEVICES"] = ""


def this_machine(threads: int, force_cpu: bool, max_gpu_memory: int | None) -> dict[str, Any]:
    """What of this machine decides about bytes, in the order of names: sums are made in another order elsewhere."""
    if force_cpu:
        hide_gpus()
    import torch

    facts: dict[str, Any] = {"threads": threads, **{name: importlib.metadata.version(name) for name in PACKAGES}}
    if not force_cpu and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        group = min(total, max_gpu_memory or total) // GPU_SHARE
        facts |= {"device_type": "cuda", "device": torch.cuda.get_device_name(0), "group_bytes": group}
        return dict(sorted(facts.items()))
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
            f"{output} was begun on another machine ({'; '.join(other)}), where sums are rounded in another order. Finish it there or "
            "with those values, or give --allow-machine-change to keep what is finished and make the rest here, or --overwrite."
        )
