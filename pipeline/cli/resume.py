"""ktconvert resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import manifest
from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert resume /models/Qwen3-30B-A3B-INT8 --dry-run    what is done, what is left, and why
  ktconvert resume /models/Qwen3-30B-A3B-INT8
"""


@click.command("resume", epilog=EPILOG)
@click.argument("output", type=options.FilePath())
@click.option("--dry-run", is_flag=True, help="Print what is done, what is left, and why; write nothing.")
@click.option("--verify-inputs", is_flag=True, help="Convert again what came from input files that were touched since.")
@click.option(
    "--allow-machine-change", is_flag=True, help="Go on with a calibration that was begun on another machine."
)
@options.left_behind
@options.executor
@options.cpuinfer_threads
@options.max_memory
@options.reporting
def resume(output: Path, **params: Any) -> None:
    """Finish a conversion that was cut off. Its options need not be repeated: the plan is stored beside the output."""
    from ktconvert.pipeline.cli.execution import check, make, take_lock_away
    from ktconvert.pipeline.engine.execute import tidy
    from ktconvert.pipeline.engine.existing import saved_plan
    from ktconvert.pipeline.engine.part import require_all_parts
    from ktconvert.pipeline.engine.paths import locate
    from ktconvert.pipeline.plans.commands import plan_request, saved_request
    from ktconvert.pipeline.ui import dry_run

    reporter = options.reporter(params["json_events"], params["quiet"], params["verbose"])
    output = output.expanduser().absolute()
    paths = locate(output)
    if params["force_unlock"] and not params["dry_run"]:
        take_lock_away(paths, reporter)
    old = saved_plan(paths)
    if old is None:
        if output.is_dir() and manifest.read(output) is not None:
            if not params["dry_run"]:
                tidy(paths)
            reporter.event("finished", output=str(output), nothing_to_do=True)
            reporter.say(f"{output} is finished: nothing to do")
            return
        raise OutputError(
            f"{output}: no conversion into it was begun; start one with `ktconvert cpu`, `gpu`, `calibrate`, "
            "`dequantize`, `merge` or `resplit`."
        )
    options.check_kernels()
    request = saved_request(output, old)
    tuning = dict(request.tuning)
    tuning["cpuinfer_threads"] = options.threads(params["cpuinfer_threads"] or tuning["cpuinfer_threads"], reporter)
    tuning["max_memory"] = params["max_memory"] or tuning.get("max_memory")
    tuning["verify_inputs"] = params["verify_inputs"] or tuning.get("verify_inputs")
    tuning["resume_layer"] = 0
    tuning["allow_machine_change"] = params["allow_machine_change"] or tuning.get("allow_machine_change", False)
    given = click.get_current_context().get_parameter_source("executor")
    if given is not ParameterSource.DEFAULT:
        tuning.pop("part", None)  # what parts have not made, is made now
    plan = plan_request(replace(request, tuning=tuning), None if params["dry_run"] else reporter.hashed)
    if params["dry_run"]:
        check(plan, params)
        dry_run.show_plan(plan, as_json=params["json_events"])
        return
    require_all_parts(plan, paths)
    make(plan, reporter, params)
