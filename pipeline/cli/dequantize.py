"""ktconvert dequantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert dequantize /models/DeepSeek-V3.1 /models/DeepSeek-V3.1-BF16
  ktconvert dequantize moonshotai/Kimi-K2-Thinking Kimi-K2-Thinking-BF16 --dry-run

The same command again, or `ktconvert resume OUT`, finishes what was cut off.
"""


@click.command("dequantize", epilog=EPILOG)
@click.argument("src", required=False, type=options.PathOrHubId())
@click.argument("out", required=False, type=options.FilePath())
@click.option(
    "-i",
    "--input-path",
    "--model-dir",
    "--input-fp8-hf-path",
    "input_path",
    default=None,
    type=options.PathOrHubId(),
    help="SRC, as kt-kernel's scripts spell it.",
)
@click.option(
    "-o",
    "--output",
    "--output-dir",
    "--output-bf16-hf-path",
    "output",
    default=None,
    type=options.FilePath(),
    help="OUT, as kt-kernel's scripts spell it.",
)
@click.option(
    "--config-path", type=options.Text(), default=None, help="Accepted and ignored: config.json is read from SRC."
)
@options.executor
@options.cpuinfer_threads
@click.option("--dry-run", is_flag=True, help="Print the plan; read headers only, write nothing.")
@click.option("--max-shard-size", type=options.Size(), default=None, help="Cut shards at this size. [default: 5GB]")
@options.input_files
@options.overwrite
@options.left_behind
@options.max_memory
@options.reporting
def dequantize(src: str | None, out: Path | None, **params: Any) -> None:
    """Write a quantized checkpoint as a BF16 release: a whole model for any loader.

    SRC is a directory, a .safetensors file, or a hub id (org/name); OUT is the output directory. Every quantized weight
    becomes BF16, all other tensors stay as they are, and config.json no longer says that the model is quantized. Memory
    is bounded by some MiB, whatever the model's size.
    """
    from ktconvert.pipeline.cli.execution import carry_out
    from ktconvert.pipeline.engine.plan import Request
    from ktconvert.pipeline.plans.dequantize import plan_dequantize

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    source, output = one_of("SRC", src, params["input_path"]), one_of("OUT", out, params["output"])
    if params["config_path"] is not None:
        reporter.note("--config-path is accepted for kt-kernel's sake and changes nothing here: SRC has the config")
    options.check_kernels()
    request = Request(
        command="dequantize",
        input=options.stored_input(source),
        output=output.expanduser().absolute(),
        settings={"max_shard_size": params["max_shard_size"]},
        tuning={
            "cpuinfer_threads": options.threads(params["cpuinfer_threads"], reporter),
            "max_memory": params["max_memory"],
            "verify_inputs": params["verify_inputs"],
            "revision": params["revision"],
        },
    )
    plan = plan_dequantize(request, None if params["dry_run"] else reporter.hashed)
    carry_out(plan, reporter, params)


def one_of(name: str, argument: Any, option: Any) -> Any:
    """The value that was given, as an argument or as an option. Raises UsageError for both and for neither."""
    if (argument is None) == (option is None):
        what = "is missing" if argument is None else "is given twice"
        raise UsageError(f"{name} {what}; write `ktconvert dequantize SRC OUT`.")
    return option if argument is None else argument
