"""ktconvert calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktconvert.pipeline.cli import calibration, options

EPILOG = """\b
Examples:
  ktconvert calibrate /models/Qwen3-30B-A3B --output /models/Qwen3-30B-A3B-statistics       on ultrachat_200k
  ktconvert calibrate /models/Qwen3-30B-A3B --output DIR --dataset book.txt --max-sequence-length 512
  ktconvert calibrate deepseek-ai/DeepSeek-V3.1 --output DIR --dry-run                      what it takes

The same command again, or `ktconvert resume DIR`, finishes what was cut off.
"""


@click.command("calibrate", epilog=EPILOG)
@click.argument("model", type=options.PathOrHubId())
@click.option("-o", "--output", required=True, type=options.FilePath(), help="Folder for the three files.")
@calibration.data(samples=128)
@calibration.random_seed
@calibration.machine
@click.option("--dry-run", is_flag=True, help="Print the plan; read headers only, write nothing.")
@options.checkpoint
@options.overwrite
@options.left_behind
@options.cpuinfer_threads
@options.max_memory
@options.reporting
def calibrate(model: str, output: Path, **params: Any) -> None:
    """Measure what a model's routed experts read: how often each is chosen, and how important each input is.

    MODEL is a directory, a .safetensors file, or a hub id (org/name). Its samples go through the model with one layer
    in memory, as for `gpu`'s GPTQ, and nothing is quantized. The folder gets imatrix.gguf, counts.safetensors and
    statistics.json.
    """
    from ktconvert.pipeline.cli.execution import carry_out
    from ktconvert.pipeline.engine.plan import Request
    from ktconvert.pipeline.plans.calibrate import plan_calibrate, require_available, this_machine

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    require_available()
    options.check_kernels()
    output = output.expanduser().absolute()
    tuning = {
        "cpuinfer_threads": options.threads(params["cpuinfer_threads"], reporter),
        **{name: params[name] for name in ("max_memory", "verify_inputs", "revision")},
        "arch_file": options.absolute(params["arch_file"]),
        **{name: params[name] for name in ("force_cpu", "max_gpu_memory", "allow_machine_change")},
    }
    request = Request(
        command="calibrate",
        input=options.stored_input(model),
        output=output,
        settings={
            "arch_file": options.text_of("--arch-file", params["arch_file"]),
            **calibration.settings(params, calibration.DATA, output, reporter, lambda: this_machine(tuning)),
        },
        tuning=tuning,
    )
    plan = plan_calibrate(request, None if params["dry_run"] else reporter.hashed)
    carry_out(plan, reporter, params)
