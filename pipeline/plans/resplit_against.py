"""`ktconvert resplit --against SOURCE`: the error of the experts before, after, and if they were converted again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings.encoding import error_sums
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.parts import Part
from ktconvert.pipeline.engine.plan import Plan, Request
from ktconvert.pipeline.options.rewriting import ResplitOptions
from ktconvert.pipeline.plans.checkpoint import rows_for
from ktconvert.pipeline.plans.resplit import plan_resplit, sample
from ktconvert.pipeline.stages import copy_tensors
from ktconvert.pipeline.stages.equalized import FACT, equalized, undone
from ktconvert.pipeline.stages.expert_files import Packed
from ktconvert.pipeline.stages.expert_stream import error_figures
from ktconvert.pipeline.stages.quantize_experts import ExpertsWork
from ktconvert.pipeline.stages.resplit_experts import ResplitWork
from ktconvert.pipeline.ui.text import plural
from ktconvert.quantizers.choice import ABSMAX, QUANTIZERS

BETTER = 0.99  # times the error of resplit: below this, converting again is advised


@dataclass
class Errors:
    """Sums of x*x, y*y, x*y and (x-y)^2, x the source, y the old output, the new one, and a fresh conversion."""

    before: npt.NDArray[np.float64]
    after: npt.NDArray[np.float64]
    again: npt.NDArray[np.float64]


def plan_resplit_with_advice(request: Request[ResplitOptions], hashed: Callable[[int], None] | None = None) -> Plan:
    """As plan_resplit; with --against a note on what is better."""
    plan = plan_resplit(request, hashed)
    options = request.options
    return plan if options.against is None else _advised(plan, options.against, options.revision)


def _advised(plan: Plan, against: str, revision: str | None) -> Plan:
    """The plan with a note on what is better, from the errors of the down projections of a few experts, and with the
    files that were read for it.

    Raises InputError for a checkpoint that the output was not made from, and what opening one raises.
    """
    works = sample(plan.stages[0].units)
    scale = plan.facts.get("scale", ABSMAX.name)
    if scale not in QUANTIZERS:
        raise UnsupportedError(f"{plan.request.input}: {scale} weights cannot be converted again here.")
    if QUANTIZERS[scale].importance or QUANTIZERS[scale].calibrated:
        needs = "a walk through the model" if QUANTIZERS[scale].calibrated else "its statistics"
        raise UnsupportedError(
            f"{plan.request.input}: was made with --scale {scale}, which needs {needs}; leave out --against."
        )
    errors = Errors(np.zeros(4), np.zeros(4), np.zeros(4))
    with open_checkpoint(against, revision) as source:
        reads = (*plan.reads, *source.paths())
        model = recognise(source, rows_for(plan.request.options.settings.get("arch_row")))
        for work in works:
            _require_source_of(work, model, against)
            grid = work.grid
            choice = QUANTIZERS[scale].where_it_serves(work.fmt.encoding.grid)
            read = equalized(model, work.fmt) if FACT in plan.facts else model
            again = ExpertsWork(read, work.fmt, choice, grid, work.sampled, work.sampled + 1, {})
            if not _equal(work.make((work.sampled, "gate")), again.make((work.sampled, "gate"))):
                raise _not_its_source(work, against)
            _measure(errors, work, again)
    before, after, fresh = (error_figures(s)["relative_error"] for s in (errors.before, errors.after, errors.again))
    comparison = (
        f"down_proj of {plural(len(works), 'expert')} is {before:.4f} away from {against} (relative error), "
        f"{after:.4f} after resplit, {fresh:.4f} if converted again"
    )
    advice = f"converting again is better: {_command(plan, works[0], against)}"
    better = "resplit is as good" if fresh >= BETTER * after else advice
    return replace(plan, reads=reads, notes=(*plan.notes, f"{comparison}: {better}"))


def _require_source_of(work: ResplitWork, model: MoeModel, against: str) -> None:
    layer = work.grid.layer
    sizes = work.grid.hidden, work.grid.intermediate
    if layer not in model.moe_layers or model.shape(layer)[1:] != sizes or work.sampled >= model.shape(layer)[0]:
        raise _not_its_source(work, against)


def _not_its_source(work: ResplitWork, against: str) -> InputError:
    return InputError(
        f"{against}: expert {work.sampled} of layer {work.grid.layer} is not that of {work.output.root}; give the "
        "checkpoint that it was made from with --against."
    )


def _equal(ours: Iterable[tuple[Part, Packed]], theirs: Iterable[tuple[Part, Packed]]) -> bool:
    """Whether the forward parts are the same bytes."""
    return all(
        np.array_equal(mine, other)
        for (part, a), (_, b) in zip(ours, theirs, strict=True)
        if not part.backward
        for mine, other in zip(a, b, strict=True)
    )


def _measure(errors: Errors, work: ResplitWork, again: ExpertsWork) -> None:
    item = work.sampled, "down"
    sides = (
        (errors.before, work.stored(item)),
        (errors.after, work.make(item)),
        (errors.again, again.make(item)),
    )
    for sums, parts in sides:
        for part, packed in parts:
            if not part.backward:
                sums += error_sums(*undone(again.model, work.fmt.encoding, part), packed)


def _command(plan: Plan, work: ResplitWork, against: str) -> str:
    """The command that converts again what the output holds."""
    settings, facts = plan.request.options.settings, plan.facts
    words = ["ktconvert", "cpu", "-i", against, "-o", str(plan.request.output)]
    words += ["--quant-method", work.fmt.option, "--threadpool-count", str(facts["numa"])]
    for method, layers in facts.get("methods", {}).items():
        words += ["--method-map", f"{layers}={FORMATS[method].option}".replace(" ", "")]
    words += ["--scale", facts["scale"]] if "scale" in facts else []
    words += ["--equalize"] if FACT in facts else []
    words += ["--layers", settings["layers"]] if "layers" in settings else []
    words += ["--no-merge-safetensor"] if settings["no_merge_safetensor"] else []
    words += ["--save-backward-weights"] if facts["backward"] else []
    words += ["--non-experts", copy_tensors.choice_of(work.output.others)] if len(plan.stages) > 1 else []
    return shlex.join(words)
