"""What a plan with a walk through the model takes: GPTQ's stage, and the machine on which the walk was begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors
from ktconvert.layouts.checkpoints.output_tensors import decoded_others
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.layouts.outputs import Format
from ktconvert.pipeline.calibration import chain, requirements
from ktconvert.pipeline.engine.plan import Plan, Request
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.models.text_datasets import describe_dataset, local_files
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.quantization import CalibrateOptions, CpuOptions, QuantizationOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.stages import gptq_layers
from ktconvert.quantizers.choice import ABSMAX, Quantizer

ONESHOT = (
    "--engine oneshot holds the whole model in memory, cannot resume within it, and takes the library's own mask, "
    "which is not causal for some models; it is for comparison"
)
NO_GPU = "--max-gpu-memory changes nothing here: no GPU is used"
SIZES = ("layers", "experts", "hidden", "intermediate")
MOMENTS = (
    "- `second-moments-NNN.safetensors`: of layer NNN, the sums of x xT of what gate and up read, over all tokens, and "
    "of what down of each expert reads, over its tokens; `ktconvert cpu --scale mse --statistics` reads them."
)
# Paths, and what stands in `data`, changes nothing here, or is recorded with the plan only.
ELSEWHERE = ("dataset", "arch_row", "max_shard_size", "with_statistics")
W = TypeVar("W", bound=QuantizationOptions | CalibrateOptions)


def gptq_stage(
    request: Request[QuantizationOptions],
    model: MoeModel,
    fmt: Format,
    rest: OtherTensors,
    metadata: Mapping[str, str],
    *,
    choice: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
) -> Stage[Any]:
    """rest: the tensors beside the routed experts. UnsupportedError where the model cannot be calibrated."""
    options = request.options
    chain.require_calibratable(model, gptq_layers.ALTERNATIVE)
    return gptq_layers.stage(
        model,
        fmt,
        options,
        {tensor.key: tensor for tensor in decoded_others(rest)},
        _gptq_shape(model, fmt, options).experts_at_once,
        metadata,
        choice=choice,
        numa=numa,
        loose_files=loose_files,
        document=describe(model, request) if options.gptq.save_statistics is not None else None,
    )


def _gptq_shape(model: MoeModel, fmt: Format, options: QuantizationOptions) -> requirements.CalibrationShape:
    own = options.gptq
    shape = replace(
        requirements.read_shape(model, options.samples),
        calibrate=own.calibrate,
        statistics=own.save_statistics is not None,
        bits=max(each.encoding.grid.bits for each in fmt.formats),
        fisher=own.gptq_steps == "full",
    )
    return with_group(shape, options)


def with_group(
    shape: requirements.CalibrationShape, options: QuantizationOptions | CalibrateOptions
) -> requirements.CalibrationShape:
    """The shape of a walk where it was begun, with as many experts at a time as that machine takes."""
    machine = options.machine.machine
    assert machine is not None  # on_one_machine has recorded it
    group = requirements.max_experts_at_once(shape, int(machine["group_bytes"]))
    return replace(shape, experts_at_once=group, on_gpu=machine["device_type"] != "cpu")


def with_gptq(plan: Plan, request: Request[QuantizationOptions], model: MoeModel, fmt: Format) -> Plan:
    """The plan of gptq_stage with what its walk takes."""
    walked = with_walk(plan, request, _gptq_shape(model, fmt, request.options), requirements.GPTQ_REMEDIES)
    if request.options.engine == "stream":
        return walked
    whole = sum(info.nbytes for info in model.source.tensors.values())
    return replace(
        walked,
        peak_memory=lambda threads: whole + walked.peak_memory(threads),
        scratch_bytes=0,
        portion_bytes=0,
        notes=(*walked.notes, ONESHOT),
        advice=(),
    )


def with_walk(
    plan: Plan,
    request: Request[QuantizationOptions] | Request[CalibrateOptions],
    shape: requirements.CalibrationShape,
    remedies: str,
    packages: Sequence[str] = requirements.GPTQ_PACKAGES,
) -> Plan:
    """The plan with what a walk of this shape takes, and what it says of this machine."""
    limits = request.options.machine
    needed = requirements.estimate_footprint(shape)
    unused = () if shape.on_gpu or limits.max_gpu_memory is None else (NO_GPU,)
    return replace(
        plan,
        peak_memory=lambda threads: max(needed.host, plan.peak_memory(threads)),
        scratch_bytes=needed.disk,
        portion_bytes=needed.portions,
        notes=(*plan.notes, *unused),
        advice=tuple(requirements.describe_footprint(shape)),
        remedies=remedies,
        require_ready=lambda: _require_same_machine(request, packages),
    )


def _require_same_machine(
    request: Request[QuantizationOptions] | Request[CalibrateOptions], packages: Sequence[str]
) -> None:
    """Raise OutputError where the walk was begun on another machine than this one, unless the user allows that."""
    limits = request.options.machine
    begun = limits.machine or {}
    now = requirements.machine_properties(limits, request.options.execution.threads, packages)
    other = [
        f"{key} was {begun.get(key)}, is {now.get(key)}"
        for key in sorted({*begun, *now})
        if begun.get(key) != now.get(key)
    ]
    if other and not limits.allow_machine_change:
        raise OutputError(
            f"{request.output} was begun on another machine ({'; '.join(other)}), where sums are rounded in another "
            "order. Finish it there or with those values, or give --allow-machine-change to keep what is finished and "
            "make the rest here, or --overwrite."
        )


def on_one_machine(
    request: Request[W], packages: Sequence[str] = requirements.GPTQ_PACKAGES, **found: Any
) -> Request[W]:
    """The request with the machine where its walk began, else this one, and what else is found before the first run."""
    options = request.options
    if options.machine.machine is not None:
        return request
    local_files(options.samples.dataset)
    afresh = options.existing.overwrite and not options.machine.allow_machine_change
    begun = None if afresh else (checkpoint.begun_values(request, "machine") or {}).get("machine")
    machine = begun or requirements.machine_properties(options.machine, options.execution.threads, packages)
    return replace(request, options=with_values(options, machine=machine, **found))


def require_whole_walk(source: TensorSource, options: CpuOptions, whole: bool) -> None:
    """UsageError, InputError or UnsupportedError where a walk is impossible, or does not do what options ask."""
    given = f"--scale {options.scale}"
    checkpoint.require_complete(source, given, "which tells how the model computes")
    if not whole:
        raise UsageError(f"{given} goes through the whole model: leave out --layers and --resume-layer.")
    if options.save_backward_weights:
        raise UsageError(f"{given} has no matrices for fine-tuning; leave out --save-backward-weights.")
    if options.max_shard_size:
        raise UsageError(f"{given} makes one shard of a layer; leave out --max-shard-size.")


def describe(model: MoeModel, request: Request[QuantizationOptions] | Request[CalibrateOptions]) -> dict[str, Any]:
    """Entries of layouts.statistics.folder.STATISTICS, but for files and what the data really held."""
    number = cfg.number(dict(model.source.config), model.arch.layers)
    facts = checkpoint.shape_facts(model, model.layers)
    settings = {key: value for key, value in request.options.settings.items() if key not in ELSEWHERE}
    return {
        "command": request.command,
        "model": {
            "architecture": model.arch.name,
            "name": checkpoint.base_model(model.source),
            "source": checkpoint.source_identity(model.source),
            "decoder_layers": number[1] if number else model.layers[-1] + 1,
            **{key: facts[key] for key in SIZES},
        },
        "data": describe_dataset(request.options.samples),
        "settings": dict(sorted(settings.items())),
    }


def card(about: Mapping[str, Any], stats: list[Mapping[str, Any]], version: str) -> bytes:
    """README.md of a folder of statistics."""
    model, data = about["model"], about["data"]
    name = model["name"] or model["architecture"]
    counted: Mapping[str, Any] = next((s for s in stats if "calibration_tokens" in s), {})
    lines = [
        "---",
        *([f"base_model: {model['name']}"] if model["name"] else []),
        "tags:",
        "- ktconvert",
        "- imatrix",
        "---",
        "",
        f"# Statistics of the experts of {name}",
        "",
        f"{counted.get('samples', data['samples'])} samples of {data['dataset']}, at most {data['max_length']} tokens "
        f"each (seed {data['seed']}), {counted.get('calibration_tokens', 'unknown')} tokens in all, went through the "
        "model.",
        "",
        "- `imatrix.gguf`: for each column of what an expert's linears read, the sum of its squares over the tokens "
        "that were routed to the expert, and their number; llama.cpp's format. Routed experts only.",
        "- `counts.safetensors`: `counts`, int64 [decoder layers, experts], how often each expert was chosen.",
        *([MOMENTS] if about["settings"].get("second_moments") else []),
        "- `statistics.json`: of which model and data, and the hashes of these files.",
        "",
        "| layer | tokens routed to an expert: least | median | most | experts without any |",
        "|---|---|---|---|---|",
    ]
    for s in stats:
        if t := s.get("routed_tokens"):
            lines.append(f"| {s['layer']} | {t['least']} | {t['median']} | {t['most']} | {t['none']} |")
    return ("\n".join([*lines, "", f"Made by ktconvert {version}."]) + "\n").encode()
