"""What to say of a plan of AMX weights where this machine's NUMA nodes are not those that it is for."""

from __future__ import annotations

from ktconvert.native_quant import machine, placement
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.ui.text import plural


def numa_notes(plan: Plan) -> list[str]:
    """Sentences, none where the output suits the NUMA nodes and the memory that this process may use, or is for any."""
    if "threadpool_count" not in plan.request.options.settings:
        return []
    return [note for note in (_of_pools(plan), _of_memory(plan)) if note is not None]


def _of_memory(plan: Plan) -> str | None:
    """Where a NUMA part of the plan does not fit its node of this machine."""
    parts = plan.facts["numa"]
    size = sum(unit.bytes_out for unit in plan.units if unit.stage == plan.stages[0].name) // parts
    shortages = placement.shortages([size] * parts, machine.numa_nodes(), machine.node_memory_available())
    if not shortages:
        return None
    return f"run here, the output does not fit its NUMA nodes ({shortages}): some is read from another node, slowly"


def _of_pools(plan: Plan) -> str | None:
    """Where the pools of threads that suit this process are not those of the plan."""
    pools, parts = machine.pool_count(), plan.facts["numa"]
    if pools == parts:
        return None
    nodes, present = len(machine.numa_nodes()), len(machine.machine_nodes())
    if pools < nodes:
        here = f"this process has CPU time for {plural(pools, 'thread')} (cgroup quota)"
    elif nodes < present:
        here = f"this process may use {nodes} of this machine's {present} nodes"
    else:
        here = f"this machine has {plural(nodes, 'node')}"
    return f"the output is for {plural(parts, 'NUMA part')}; {here}: to run it here, pass --threadpool-count {pools}"
