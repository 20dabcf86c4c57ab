"""ktconvert gpu."""

from __future__ import annotations

from typing import Any

import click

from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.outputs import formats_of
from ktconvert.pipeline.cli import calibration, normal, options

EPILOG = """\b
Examples:
  ktconvert gpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-W4A16 --quant-type W4A16       GPTQ, on ultrachat_200k
  ktconvert gpu -i /models/Qwen3-30B-A3B -o OUT --dataset texts.jsonl --num-calibration-samples 128
  ktconvert gpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-W8A16 --quant-method RTN           no calibration
  ktconvert gpu -i MODEL -o OUT --dry-run                     what would be done, and what it takes

The same command again, or `ktconvert resume OUT`, finishes what was cut off.
"""

# Options that one method does not use, and why: a note says so to users who give them.
FOR_GPTQ = "is for GPTQ only and changes nothing here"
CALIBRATION = (*calibration.GPTQ, "engine")
UNUSED_BY_RTN = {
    **dict.fromkeys((*CALIBRATION, "allow_machine_change"), FOR_GPTQ),
    "trust_remote_code": "changes nothing here: rounding to nearest runs no code of a model",
    "force_cpu": "changes nothing here: rounding to nearest never touches a GPU",
    "max_gpu_memory": "changes nothing here: rounding to nearest never touches a GPU",
    "max_cpu_memory": "changes nothing here: memory is bounded by a few experts; --max-memory sets a limit",
}
UNUSED_BY_GPTQ = {
    "max_cpu_memory": "changes nothing here: memory is bounded by one layer and some experts; --max-memory limits it",
    "max_shard_size": "cuts only what is copied: a layer's experts are one shard",
}


class SeveralValues(click.Command):
    """A command whose --ignore-patterns takes several values after one flag, as argparse's nargs="*" does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write the flag before each of its values."""
        spread: list[str] = []
        several = False
        for word in args:
            if word.startswith("-"):
                several = normal(word) == "--ignore-patterns"
                spread += [] if several else [word]
            elif several:
                spread += ["--ignore-patterns", word]
            else:
                spread.append(word)
        return super().parse_args(ctx, spread)


@click.command("gpu", cls=SeveralValues, epilog=EPILOG)
@click.option(
    "-i",
    "--model-id",
    "--input-path",
    "model_id",
    required=True,
    type=options.PathOrHubId(),
    help="Checkpoint: a directory, a .safetensors file, or a hub id (org/name).",
)
@click.option(
    "-o",
    "--output-dir",
    "--output",
    "output_dir",
    required=True,
    type=options.FilePath(),
    help="Output directory.",
)
@click.option(
    "--quant-method",
    type=click.Choice(["GPTQ", "RTN"], case_sensitive=False),
    default="GPTQ",
    show_default=True,
    help="Calibrated on a data set, or rounded to nearest, which takes seconds per GB and no data.",
)
@click.option(
    "--quant-type",
    type=click.Choice(tuple(formats_of("gpu")), case_sensitive=False),
    default="W8A16",
    show_default=True,
    help="Output format: 4 or 8 bits in groups of 128.",
)
@click.option(
    "--rounding",
    type=click.Choice(["library", "float32"], case_sensitive=False),
    default="library",
    show_default=True,
    help="The bits of llmcompressor, or one rounding less.",
)
@click.option(
    "--ignore-patterns",
    type=options.Text(),
    multiple=True,
    help="More modules to name in the ignore list, e.g. re:.*mlp.*; several, or repeated.",
)
@calibration.data(samples=512)
@calibration.random_seed
@calibration.of_gptq("all")
@click.option(
    "--engine",
    type=click.Choice(["stream", "oneshot"], case_sensitive=False),
    default="stream",
    show_default=True,
    help="Layer by layer, or llmcompressor's own oneshot with the whole model in memory, for comparison.",
)
@calibration.save_statistics
@click.option(
    "--torch-dtype",
    type=click.Choice(["bfloat16", "float16", "float32"], case_sensitive=False),
    default="bfloat16",
    show_default=True,
    help="What experts are rounded from: bfloat16.",
)
@calibration.machine
@click.option(
    "--max-cpu-memory",
    type=options.Size(),
    default=None,
    help="Accepted and ignored: memory is bounded by some experts. [default: 1000GiB with --max-gpu-memory]",
)
@options.executor
@options.part
@options.cpuinfer_threads
@click.option(
    "--tp-size",
    type=options.Number(min=1),
    multiple=True,
    default=(1,),
    show_default=True,
    help="Tensor parallelism to be loaded with; refused where experts cannot be cut so. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan; read headers only, write nothing.")
@click.option("--max-shard-size", type=options.Size(), default=None, help="Cut shards between experts. [default: 5GB]")
@options.checkpoint
@options.overwrite
@options.left_behind
@options.max_memory
@options.reporting
def gpu(**params: Any) -> None:
    """Quantize a checkpoint's routed experts to W4A16 or W8A16, for the GPU: SGLang, vLLM and transformers load the
    output.

    What `cpu` reads is read here too; memory is bounded by a few experts (RTN) or by one layer (GPTQ),
    whatever the model's size. All other tensors are copied as they are.
    """
    from ktconvert.pipeline.cli.execution import carry_out
    from ktconvert.pipeline.engine.plan import Request
    from ktconvert.pipeline.plans.gpu import plan_gpu, require_available

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    require_available(params["quant_method"], params["torch_dtype"])
    if params["save_statistics"] is not None and (params["quant_method"], params["engine"]) != ("GPTQ", "stream"):
        raise UsageError(
            "--save-statistics needs GPTQ's engine stream, which goes through the model; give it to that, or use "
            "`ktconvert calibrate`."
        )
    statistics, folder = calibration.statistics_settings(params)
    calibration.note_unused(reporter, UNUSED_BY_GPTQ if params["quant_method"] == "GPTQ" else UNUSED_BY_RTN)
    options.check_kernels()
    output = params["output_dir"].expanduser().absolute()
    threads = options.threads(params["cpuinfer_threads"], reporter)
    gptq = params["quant_method"] == "GPTQ"
    chosen = calibration.gptq_settings(params, CALIBRATION, output, threads, reporter) if gptq else {}
    request = Request(
        command="gpu",
        input=options.stored_input(params["model_id"]),
        output=output,
        settings={
            "quant_method": params["quant_method"],
            "quant_type": params["quant_type"],
            "rounding": params["rounding"],
            "ignore_patterns": list(params["ignore_patterns"]),
            "torch_dtype": params["torch_dtype"],
            "max_shard_size": params["max_shard_size"],
            "arch_file": options.text_of("--arch-file", params["arch_file"]),
            **chosen,
            **statistics,
        },
        tuning={
            "cpuinfer_threads": threads,
            "max_memory": params["max_memory"],
            "verify_inputs": params["verify_inputs"],
            "revision": params["revision"],
            "arch_file": options.absolute(params["arch_file"]),
            "tp_size": sorted(set(params["tp_size"])),
            **{name: params[name] for name in ("force_cpu", "max_gpu_memory", "allow_machine_change")},
            **folder,
        },
    )
    plan = plan_gpu(request, None if params["dry_run"] else reporter.hashed)
    carry_out(plan, reporter, params)
