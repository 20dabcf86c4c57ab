"""The table of commands that make an output: name -> how its plan is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ktconvert.layouts.errors import OutputError
from ktconvert.pipeline.engine.plan import Plan, Request
from ktconvert.pipeline.plans.cpu import plan_cpu
from ktconvert.pipeline.plans.gpu import plan_gpu
from ktconvert.pipeline.plans.merge import plan_merge

PLANNERS: Mapping[str, Callable[[Request, Callable[[int], None] | None], Plan]] = {
    "cpu": plan_cpu,
    "gpu": plan_gpu,
    "merge": plan_merge,
}


def plan_request(request: Request, hashed: Callable[[int], None] | None = None) -> Plan:
    """The plan of any request. Raises OutputError for a command that only another ktconvert has."""
    if request.command not in PLANNERS:
        raise OutputError(
            f"{request.output}: was begun by `ktconvert {request.command}`, which this one does not have."
        )
    return PLANNERS[request.command](request, hashed)
