"""ktconvert resplit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert resplit /models/Qwen3-30B-A3B-INT8 /models/Qwen3-30B-A3B-INT8-4 --threadpool-count 4
  ktconvert resplit OUT NEW --threadpool-count 1 --against MODEL --dry-run      or is converting again better?
"""


@click.command("resplit", epilog=EPILOG)
@click.argument("output", type=options.FilePath())
@click.argument("new", type=options.FilePath())
@click.option(
    "--threadpool-count", type=options.Number(min=1), required=True, help="NUMA parts that the new output is to have."
)
@click.option(
    "--against",
    type=options.PathOrHubId(),
    default=None,
    help="The checkpoint that OUTPUT was made from: say whether converting it again is better.",
)
@click.option(
    "--revision", type=options.Text(), default=None, help="Branch, tag or commit, where --against is a hub id."
)
@click.option(
    "--max-shard-size",
    type=options.Size(),
    default=None,
    help="Cut shards between experts, e.g. 5GB. [default: one shard per layer]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option("--verify-inputs", is_flag=True, help="Make again what came from files that were touched since.")
@options.overwrite
@options.left_behind
@options.executor
@options.cpuinfer_threads
@options.max_memory
@options.reporting
def resplit(output: Path, new: Path, **params: Any) -> None:
    """Rewrite OUTPUT, experts of `cpu` or `merge` or kt-kernel, as NEW, for another number of NUMA nodes.

    MXFP4, FP8 and BF16 keep every value, and so do gate and up projections of AMXINT4 and AMXINT8. So does their down
    projection where the new number is a multiple of the old one; else its columns are rounded once more where parts
    are put together, and the plan says by how much. Can be resumed.
    """
    from ktconvert.pipeline.cli.execution import carry_out
    from ktconvert.pipeline.engine.plan import Request
    from ktconvert.pipeline.plans.numa_notes import numa_notes
    from ktconvert.pipeline.plans.resplit import plan_resplit

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    options.check_kernels()
    against = None if params["against"] is None else options.stored_input(params["against"])
    request = Request(
        command="resplit",
        input=str(output.expanduser().absolute()),
        output=new.expanduser().absolute(),
        settings={"threadpool_count": params["threadpool_count"], "max_shard_size": params["max_shard_size"]},
        tuning={
            "cpuinfer_threads": options.threads(params["cpuinfer_threads"], reporter),
            "max_memory": params["max_memory"],
            "verify_inputs": params["verify_inputs"],
            "original_path": against,
            "revision": params["revision"],
        },
    )
    plan = plan_resplit(request)
    if against is not None:
        from ktconvert.pipeline.plans.resplit_against import advised

        plan = advised(plan, against, params["revision"])
        if not params["dry_run"]:
            reporter.note(plan.advice[0])
    for note in numa_notes(plan):
        reporter.note(note)
    carry_out(plan, reporter, params)
