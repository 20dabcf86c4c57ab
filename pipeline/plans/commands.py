"""The table of commands that write an output: name -> the function that makes its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.encodings import input_types
from ktconvert.layouts.errors import InputError, OutputError
from ktconvert.layouts.files.documents import COUNT, NUMBER, SIZE, mismatch
from ktconvert.layouts.outputs import formats_of
from ktconvert.pipeline.engine.execute import execute
from ktconvert.pipeline.engine.existing import saved_plan
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan, Request, SavedPlan, changed_files
from ktconvert.pipeline.plans.calibrate import plan_calibrate
from ktconvert.pipeline.plans.cpu import plan_cpu
from ktconvert.pipeline.plans.dequantize import plan_dequantize
from ktconvert.pipeline.plans.gpu import QUANTIZING, plan_gpu
from ktconvert.pipeline.plans.merge import plan_merge
from ktconvert.pipeline.plans.resplit import plan_resplit
from ktconvert.pipeline.stages.copy_tensors import CALLED
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.quantizers.choice import QUANTIZERS

PLANNERS: Mapping[str, Callable[[Request, Callable[[int], None] | None], Plan]] = {
    "cpu": plan_cpu,
    "gpu": plan_gpu,
    "calibrate": plan_calibrate,
    "dequantize": plan_dequantize,
    "merge": plan_merge,
    "resplit": plan_resplit,
}


# What the settings and tuning of a saved plan must be, by command (documents.mismatch); settings of GPTQ only where
# it is the method, or chooses scales.
COMMON = {"max_shard_size": (SIZE, None), "arch_file": (str, None)}
CALIBRATION = {
    "dataset": str,
    "dataset_split": str,
    "num_calibration_samples": COUNT,
    "max_sequence_length": COUNT,
    "random_seed": NUMBER,
    "trust_remote_code": bool,
    "machine": {"threads": COUNT, "group_bytes": SIZE, "device_type": str, "device": str},
}
GPTQ = {
    **CALIBRATION,
    "dampening_frac": (float, int),
    "calibrate": ("all", "routed", "mixed"),
    "min_expert_tokens": COUNT,
    "engine": ("stream", "oneshot"),
    "rounding": ("library", "float32"),
    "save_statistics?": (True,),
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "quant_method": tuple(formats_of("cpu")),
        "threadpool_count": COUNT,
        "layers": str,
        "kept_layers": (str, None),
        "no_merge_safetensor": bool,
        "save_backward_weights": bool,
        "non_experts": ("skip", *CALLED),
        "layout?": ("kt",),
        "scale?": tuple(QUANTIZERS),
        "imatrix?": str,
        "config?": str,
        **COMMON,
    },
    "gpu": {
        "quant_method": tuple(QUANTIZING),
        "quant_type": tuple(formats_of("gpu")),
        "rounding": ("library", "float32"),
        "ignore_patterns": [str],
        "torch_dtype": str,
        **COMMON,
    },
    "calibrate": {"arch_file": COMMON["arch_file"], **CALIBRATION},
    "dequantize": {"max_shard_size": COMMON["max_shard_size"]},
    "merge": {"max_tensors": COUNT, "companions": bool, "layers?": (str, None)},
    "resplit": {
        "threadpool_count": COUNT,
        "max_shard_size": (SIZE, None),
        "no_merge_safetensor": bool,
        "layers?": str,
        "arch_file?": str,
    },
}
TUNING = {
    "cpuinfer_threads": COUNT,
    "max_memory?": (SIZE, None),
    "verify_inputs?": (bool, None),
    "revision?": (str, None),
    "resume_layer?": NUMBER,
    "input_type?": (*input_types(), None),
    "tp_size?": [COUNT],
    "force_cpu?": bool,
    "max_gpu_memory?": (SIZE, None),
    "allow_machine_change?": bool,
    "original_path?": (str, None),
    "imatrix?": (str, None),
    "arch_file?": (str, None),
    "delete_others?": bool,
    "save_statistics?": (str, None),
    "part?": str,
}


def saved_request(output: Path, saved: SavedPlan) -> Request:
    """The request of plan.json. Raises OutputError for a command that only another ktconvert has, and for damaged
    settings.
    """
    if saved.command not in PLANNERS:
        raise OutputError(f"{output}: was begun by `ktconvert {saved.command}`, which this one does not have.")
    settings: Mapping[str, Any] = SETTINGS[saved.command]
    if saved.settings.get("quant_method") == "GPTQ" or saved.settings.get("scale") == "gptq":
        settings = {**settings, **GPTQ}
    wrong = mismatch(saved.settings, settings, "settings") or mismatch(saved.tuning, TUNING, "tuning")
    if wrong is not None:
        raise OutputError(f"{output}: its plan cannot be understood ({wrong}); start over with --overwrite.")
    return Request(saved.command, saved.input, output, saved.settings, saved.tuning)


def plan_request(request: Request, hashed: Callable[[int], None] | None = None) -> Plan:
    """The plan of any request."""
    return PLANNERS[request.command](request, hashed)


def reopened(output: Path, tuning: Mapping[str, Any]) -> Plan:
    """The plan that was saved for an output, made again on another host or later, with some of its tuning changed.

    Raises OutputError where there is none, InputError where its input is not what it was.
    """
    saved = saved_plan(locate(output))
    if saved is None:
        raise OutputError(f"{output}: no conversion into it was begun.")
    request = saved_request(output, saved)
    plan = plan_request(replace(request, tuning={**request.tuning, **tuning}))
    other, touched = changed_files(saved.source, plan)
    if other or touched:
        wrong = other or [f"{name} was modified" for name in touched]
        raise InputError(f"{request.input} is not the input that {output} was begun with: {'; '.join(wrong[:5])}.")
    return plan


def run(
    plan: Plan, executor: Executor | None = None, reporter: Reporter | None = None, *, overwrite: bool = False
) -> bool:
    """Make what a plan says, from wherever it stands: with threads of this process, or with the workers of any
    concurrent.futures.Executor, which see its input and output under the same paths and have this ktconvert.

    overwrite  as --overwrite; `delete_others` of the request's tuning is --delete-others
    Returns False when there was nothing to do. Raises KtconvertError.
    """
    return execute(plan, reporter or Reporter(), overwrite=overwrite, executor=executor, reopen=reopened)
