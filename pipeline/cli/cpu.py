"""ktconvert cpu."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from ktconvert.layouts.encodings import input_types
from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.outputs import LAYOUTS, formats_of
from ktconvert.pipeline.cli import calibration, options
from ktconvert.quantizers.choice import ABSMAX, QUANTIZERS

LATER = {  # what kt-kernel's script takes and we do not
    "awq": "nothing loads kt-kernel's AWQ layout; an AWQ checkpoint is an input of the others",
    "moe_int4": "MOE_INT4 exists on aarch64 only",
    "moe_int8": "MOE_INT8 bytes depend on the AOCL-BLIS version",
}

WALK = (*calibration.GPTQ, "engine", "rounding")  # settings of --scale gptq
MACHINE = ("force_cpu", "max_gpu_memory", "allow_machine_change")
UNUSED_WITHOUT_GPTQ = dict.fromkeys(
    (*calibration.GPTQ, *MACHINE, "trust_remote_code", "save_statistics"),
    "is for --scale gptq only and changes nothing here",
)

EPILOG = """\b
Examples:
  ktconvert cpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-INT4
  ktconvert cpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-INT8 --quant-method int8 --threadpool-count 2
  ktconvert cpu -i Qwen3-30B-A3B-Q8_0.gguf --config Qwen/Qwen3-30B-A3B -o OUT --quant-method int8
  ktconvert cpu -i MODEL -o OUT --scale mse          INT4 of the same size with less error
  ktconvert cpu -i MODEL -o OUT --scale gptq --dataset texts.jsonl                  with the least
  ktconvert cpu -i MODEL -o OUT --dry-run            what would be done, from headers only
  ktconvert cpu -i MODEL -o OUT --layers 3-10        some layers only

The same command again, or `ktconvert resume OUT`, finishes what was cut off.
"""


@click.command("cpu", epilog=EPILOG)
@click.option(
    "-i",
    "--input-path",
    required=True,
    type=options.PathOrHubId(),
    help="Checkpoint: a directory, a .safetensors or .gguf file, or a hub id (org/name, org/name:FILE.gguf).",
)
@click.option("-o", "--output", required=True, type=options.FilePath(), help="Output directory.")
@click.option(
    "--input-type",
    type=click.Choice(input_types(), case_sensitive=False),
    default=None,
    help="What the weights are; read from the headers when left out.",
)
@click.option(
    "--quant-method",
    type=click.Choice([*formats_of("cpu"), *LATER], case_sensitive=False),
    default="int4",
    show_default=True,
    help="Output format.",
)
@click.option(
    "--config",
    type=options.PathOrHubId(),
    default=None,
    help="Of a GGUF: the Hugging Face model (directory or hub id) whose config.json and tokenizer the output gets.",
)
@click.option(
    "--scale",
    type=click.Choice(tuple(QUANTIZERS), case_sensitive=False),
    default=ABSMAX.name,
    show_default=True,
    help="How int4 and int8 choose scales: absmax gives kt-kernel's bytes, mse the least squared error, imatrix the "
    "same weighted by the inputs; gptq compensates errors, and runs the model.",
)
@options.importance
@calibration.data(samples=512)
@calibration.random_seed
@calibration.of_gptq("mixed")
@calibration.save_statistics
@calibration.machine
@options.executor
@options.part
@options.cpuinfer_threads
@click.option(
    "--threadpool-count",
    type=options.Number(min=1),
    default=2,
    show_default=True,
    help="NUMA parts to split every expert into.",
)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS, case_sensitive=False),
    default="numa",
    show_default=True,
    help="numa: for the runtimes, in NUMA parts. kt: mxfp4, fp8 and bf16 as kt-kernel's methods read them.",
)
@click.option("--gpu", is_flag=True, help="Accepted and ignored: no GPU is needed.")
@click.option("--no-merge-safetensor", is_flag=True, help="Keep loose per-layer folders of .kt files.")
@click.option(
    "--resume-layer", type=options.Number(min=0), default=0, help="kt-kernel's resume by hand; ours needs no number."
)
@click.option(
    "--save-backward-weights",
    is_flag=True,
    help="Also write the transposed matrices that fine-tuning needs; of bf16 only these, in loose files.",
)
@click.option(
    "--fp8-expert-batch", type=int, default=None, help="Accepted and ignored: memory is bounded by one expert."
)
@click.option("--profile", is_flag=True, help="Accepted and ignored: --json gives the time of every layer.")
@click.option("--dry-run", is_flag=True, help="Print the plan; read headers only, write nothing.")
@click.option(
    "--layers",
    type=options.Spelled("all"),
    default="all",
    show_default=True,
    help="MoE layers to convert, e.g. 3-60,62.",
)
@click.option(
    "--non-experts",
    type=click.Choice(["skip", "copy", "keep"], case_sensitive=False),
    default="skip",
    show_default=True,
    help="All other tensors: leave out, copy under kt-kernel's names, or keep as they are: then it is a whole model.",
)
@click.option(
    "--max-shard-size",
    type=options.Size(),
    default=None,
    help="Cut shards between experts, e.g. 5GB. [default: one shard per layer]",
)
@options.checkpoint
@options.overwrite
@options.left_behind
@options.max_memory
@options.reporting
def cpu(**params: Any) -> None:
    """Convert a checkpoint's routed experts to kt-kernel's AMX INT4/INT8 weights, or to MXFP4, FP8 or BF16.

    Safetensors in BF16, FP16, F32, FP8, MXFP8, MXFP4, NVFP4, packed INT4 or INT8, GPTQ, AWQ, and GGUF are read; no
    GPU is needed. Memory is bounded by a few experts (--scale gptq: by one layer), whatever the model's size.
    """
    from ktconvert.pipeline.cli.execution import carry_out
    from ktconvert.pipeline.engine.plan import Request
    from ktconvert.pipeline.plans import cpu as convert
    from ktconvert.pipeline.plans.numa_notes import numa_notes
    from ktconvert.pipeline.walk.environment import require

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    method = params["quant_method"]
    if method in LATER:
        can = " and ".join(f"{name} ({fmt.name})" for name, fmt in formats_of("cpu").items())
        raise UnsupportedError(f"--quant-method {method}: {LATER[method]}; {can} can be made.")
    for flag, text in (("gpu", "--gpu"), ("fp8_expert_batch", "--fp8-expert-batch"), ("profile", "--profile")):
        if params[flag]:
            reporter.note(f"{text} is accepted for kt-kernel's sake and changes nothing here")
    if params["no_merge_safetensor"] and params["non_experts"] != "skip":
        raise UsageError(f"--non-experts {params['non_experts']} needs safetensors; leave out --no-merge-safetensor.")
    if params["no_merge_safetensor"] and params["max_shard_size"]:
        raise UsageError("--max-shard-size cuts safetensors; leave it out with --no-merge-safetensor.")
    native = params["layout"] == "kt"
    if native and params["non_experts"] != "skip":
        raise UsageError(f"--non-experts {params['non_experts']}: --layout kt holds experts alone; leave it out.")
    given = click.get_current_context().get_parameter_source("threadpool_count")
    if native and given is not ParameterSource.DEFAULT:
        reporter.note("--threadpool-count changes nothing with --layout kt: kt-kernel splits these experts itself")
    calibrated = QUANTIZERS[params["scale"]].calibrated
    if calibrated:
        require(f"--scale {params['scale']}")
    else:
        calibration.note_unused(reporter, UNUSED_WITHOUT_GPTQ)
    options.check_kernels()
    output = params["output"].expanduser().absolute()
    threads = options.threads(params["cpuinfer_threads"], reporter)
    statistics, folder = calibration.statistics_settings(params) if calibrated else ({}, {})
    walk = {**params, "engine": "stream", "rounding": "float32"}
    request = Request(
        command="cpu",
        input=options.stored_input(params["input_path"]),
        output=output,
        settings={
            "quant_method": method,
            "threadpool_count": 1 if native else params["threadpool_count"],
            "layers": params["layers"],
            "kept_layers": None,
            "no_merge_safetensor": params["no_merge_safetensor"],
            "save_backward_weights": params["save_backward_weights"],
            "non_experts": params["non_experts"],
            "max_shard_size": params["max_shard_size"],
            "arch_file": options.text_of("--arch-file", params["arch_file"]),
            **({} if params["config"] is None else {"config": options.stored_input(params["config"])}),
            **({"layout": "kt"} if native else {}),
            **({} if params["scale"] == ABSMAX.name else {"scale": params["scale"]}),  # the default came first
            **(calibration.gptq_settings(walk, WALK, output, threads, reporter) if calibrated else {}),
            **statistics,
        },
        tuning={
            "cpuinfer_threads": threads,
            "max_memory": params["max_memory"],
            "verify_inputs": params["verify_inputs"],
            "revision": params["revision"],
            "arch_file": options.absolute(params["arch_file"]),
            "resume_layer": params["resume_layer"],
            "input_type": params["input_type"],
            **({} if (imatrix := options.imatrix_of(params)) is None else {"imatrix": str(imatrix)}),
            **({name: params[name] for name in MACHINE} if calibrated else {}),
            **folder,
        },
    )
    plan = convert.plan_cpu(request, None if params["dry_run"] else reporter.hashed)
    for note in () if native else numa_notes(plan):
        reporter.note(note)
    carry_out(plan, reporter, params)
