"""ktconvert resume."""

from __future__ import annotations

from dataclasses import replace

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import manifest
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command, given
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.rewriting import ResumeOptions

EPILOG = """\b
Examples:
  ktconvert resume /models/Qwen3-30B-A3B-INT8 --dry-run    what is done, what is left, and why
  ktconvert resume /models/Qwen3-30B-A3B-INT8
"""


@command("resume", ResumeOptions, EPILOG)
def resume(options: ResumeOptions) -> None:
    """Finish a conversion that was cut off. Its options need not be repeated: the plan is stored beside the output."""
    from ktconvert.pipeline.cli.conversion import check, make, take_lock_away
    from ktconvert.pipeline.engine.execute import tidy
    from ktconvert.pipeline.engine.existing import saved_plan
    from ktconvert.pipeline.engine.part import require_all_parts
    from ktconvert.pipeline.engine.paths import locate
    from ktconvert.pipeline.plans.commands import plan_request, saved_request
    from ktconvert.pipeline.ui import dry_run

    reporter = options.reporting.reporter
    paths = locate(options.output)
    if options.leftovers.force_unlock and not options.dry_run:
        take_lock_away(paths, reporter)
    old = saved_plan(paths)
    if old is None:
        if options.output.is_dir() and manifest.read(options.output) is not None:
            if not options.dry_run:
                tidy(paths)
            reporter.event("finished", output=str(options.output), nothing_to_do=True)
            reporter.say(f"{options.output} is finished: nothing to do")
            return
        raise OutputError(
            f"{options.output}: no conversion into it was begun; start one with `ktconvert cpu`, `gpu`, `calibrate`, "
            "`dequantize`, `merge` or `resplit`."
        )
    preconditions.check_kernels()
    request = saved_request(options.output, old)
    execution = options.execution
    before = request.options.execution.cpuinfer_threads
    tuning = {
        "cpuinfer_threads": preconditions.threads(execution.cpuinfer_threads or before, reporter),
        **({"max_memory": execution.max_memory} if execution.max_memory else {}),
        **({"verify_inputs": True} if options.verify_inputs else {}),
        **({"allow_machine_change": True} if options.allow_machine_change else {}),
        # What parts have not made, is made now by the executor that is named.
        **({"part": None} if any(leaf.name == "executor" for leaf in given(ResumeOptions)) else {}),
    }
    request = replace(request, options=with_values(request.options, **tuning))
    plan = plan_request(request, None if options.dry_run else reporter.hashed)
    if options.dry_run:
        check([plan], options.workers)
        dry_run.show_plans([plan], as_json=options.reporting.json_events)
        return
    require_all_parts(plan, paths)
    make([plan], reporter, options.workers, execution.cpuinfer_threads, trust_store=options.leftovers.trust_store)
