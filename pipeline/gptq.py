"""What a plan with GPTQ has beyond one that rounds: calibration, the machine that computes, memory and disk, what must be installed."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.compressed import Compressed
from ktconvert.layouts.errors import KtconvertError, OutputError, UnsupportedError
from ktconvert.pipeline import gpu_needs
from ktconvert.pipeline.calibration import Calibration, local_files
from ktconvert.pipeline.generate import share_cores
from ktconvert.pipeline.stages.gptq_layers import Settings

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
    """What of this machine decides about bytes: sums are made in another order elsewhere."""
    if force_cpu:
        hide_gpus()
    import torch

    found: dict[str, Any] = {"threads": threads, **{name: importlib.metadata.version(name) for name in PACKAGES}}
    if not force_cpu and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        group = min(total, max_gpu_memory or total) // GPU_SHARE
        return {**found, "device_type": "cuda", "device": torch.cuda.get_device_name(0), "group_bytes": group}
    capability = torch.backends.cpu.get_cpu_capability()
    return {**found, "device_type": "cpu", "device": f"CPU with {capability}", "group_bytes": GROUP_BYTES}


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


def settings_of(model: MoeModel, form: Compressed, given: Mapping[str, Any]) -> Settings:
    """What the stage takes, from the settings of a request."""
    machine = given["machine"]
    routed = given["calibrate"] == "routed"
    return Settings(
        calibration=Calibration(
            dataset=given["dataset"],
            split=given["dataset_split"],
            samples=given["num_calibration_samples"],
            max_length=given["max_sequence_length"],
            seed=given["random_seed"],
        ),
        dampening=given["dampening_frac"],
        rounding=given["rounding"],
        routed=routed,
        floor=given["min_expert_tokens"],
        group=group_size(model, int(machine["group_bytes"]), routed),
        engine=given["engine"],
        trust_remote_code=given["trust_remote_code"],
        machine=machine,
    )


def group_size(model: MoeModel, budget: int, routed: bool) -> int:
    """How many experts of the widest layer, with Hessians and working copies, fit into so many bytes; at least one."""
    experts, hidden, width = max((model.shape(layer) for layer in model.layers), key=lambda shape: shape[1] * shape[2])
    weights = 2 * 3 * hidden * width * 2  # as they are, and rounded
    hessians = 4 * width * width + (4 * hidden * hidden if routed else 0)
    working = 0 if routed else gpu_needs.working_bytes(2 * width, hidden) - gpu_needs.working_bytes(0, hidden)
    return max(1, min(experts, budget // (weights + hessians + working)))


def facts(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest and the model card say of the calibration."""
    local = Path(given["dataset"]).is_absolute()  # as the command line stores a local one
    return {
        "calibration": {
            "dataset": Path(given["dataset"]).name if local else given["dataset"],
            "split": given["dataset_split"],
            "samples": given["num_calibration_samples"],
            "max_length": given["max_sequence_length"],
            "seed": given["random_seed"],
            "dampening": given["dampening_frac"],
            "calibrate": given["calibrate"],
            "engine": given["engine"],
        }
    }


def check_model(model: MoeModel) -> None:
    """Raise UnsupportedError for experts that GPTQ would calibrate wrongly."""
    if model.activation != "silu" or model.weights_on != "output":
        raise UnsupportedError(
            f"{model.source.root}: its experts compute something else than silu(gate) * up with routing weights on the output, "
            "which GPTQ cannot calibrate yet; use --quant-method RTN."
        )


def check_dataset(dataset: str) -> None:
    """Raise InputError for a local data set that is not there or is of no known kind."""
    local_files(dataset)


def needs(model: MoeModel, settings: Settings, given: Mapping[str, Any]) -> gpu_needs.Shape:
    """The shape from which memory and disk follow."""
    return gpu_needs.shape_of(model, given, group=settings.group, on_gpu=settings.machine["device_type"] != "cpu")
