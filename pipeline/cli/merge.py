"""ktconvert merge."""

from __future__ import annotations

from typing import Any

import click

from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert merge -i /models/loose -o /models/merged
  ktconvert merge -i /models/loose -o /models/merged -r /models/Qwen3-30B-A3B    with config and tokenizer
"""


@click.command("merge", epilog=EPILOG)
@click.option(
    "-i",
    "--input-path",
    required=True,
    type=options.FilePath(),
    help="Directory with _layer_N folders of .kt files.",
)
@click.option("-o", "--output", required=True, type=options.FilePath(), help="Output directory.")
@click.option(
    "-r",
    "--original-path",
    type=options.FilePath(),
    default=None,
    help="Original checkpoint: config, tokenizer and the like are copied.",
)
@click.option("--max-tensors", type=options.Number(min=1), default=3000, show_default=True, help="Tensors per shard.")
@click.option(
    "--layers",
    type=options.Spelled("all"),
    default=None,
    help="Merge these layers, e.g. 3-60,62, though others are missing. [default: all]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option("--verify-inputs", is_flag=True, help="Merge again what came from files that were touched since.")
@options.overwrite
@options.left_behind
@options.executor
@options.cpuinfer_threads
@options.max_memory
@options.reporting
def merge(**params: Any) -> None:
    """Turn loose per-layer folders of .kt files, ours or kt-kernel's, into safetensors with an
    index. Can be resumed.
    """
    from ktconvert.pipeline.cli.execution import carry_out
    from ktconvert.pipeline.engine.plan import Request
    from ktconvert.pipeline.plans.merge import plan_merge

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    original = params["original_path"]
    chosen = {} if params["layers"] in (None, "all") else {"layers": params["layers"]}
    request = Request(
        command="merge",
        input=str(params["input_path"].expanduser().absolute()),
        output=params["output"].expanduser().absolute(),
        settings={"max_tensors": params["max_tensors"], "companions": original is not None, **chosen},
        tuning={
            "cpuinfer_threads": options.threads(params["cpuinfer_threads"], reporter),
            "max_memory": params["max_memory"],
            "verify_inputs": params["verify_inputs"],
            "original_path": options.absolute(original),
        },
    )
    plan = plan_merge(request)
    carry_out(plan, reporter, params)
