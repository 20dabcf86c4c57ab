"""A layer's quantized experts on disk: one shard, its guards, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs.compressed import Compressed
from ktconvert.layouts.outputs.linear_names import linear_name
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Context
from ktconvert.pipeline.gptq import oneshot
from ktconvert.pipeline.gptq.settings import Settings
from ktconvert.pipeline.stages import experts
from ktconvert.pipeline.stages.expert_stream import error_figures, sampled_error, taken
from ktconvert.pipeline.walk import layer as layerwise
from ktconvert.pipeline.walk.layered import LayeredModel
from ktconvert.quantizers import groups
from ktconvert.quantizers.choice import ABSMAX

Linear = tuple[int, str, layerwise.Packed, layerwise.Scales]


@dataclass(frozen=True)
class Job:
    """One layer with experts, and the layers without any that lie before it."""

    model: MoeModel
    form: Compressed
    settings: Settings
    layer: int
    before: tuple[int, ...]
    metadata: Mapping[str, str]
    skeleton: Callable[[], LayeredModel]
    oneshot: Callable[[Path], oneshot.Made]

    @property
    def grid(self) -> ExpertGrid:
        """The layer's sizes."""
        _, hidden, intermediate = self.model.shape(self.layer)
        return ExpertGrid(self.layer, hidden, intermediate)


def rounded(job: Job, context: Context) -> layerwise.Rounded:
    """Round a linear to nearest, as `--quant-method RTN` does."""
    count = job.model.shape(job.layer)[0]
    nearest = experts.Job(job.model, job.form, ABSMAX, job.grid, 0, count, job.metadata)

    def rounded(expert: int, projection: str) -> tuple[layerwise.Packed, layerwise.Scales]:
        ((part, stored),) = nearest.quantize((expert, projection))
        packed, _, scale = job.form.typed(stored, part.n, part.k)
        return packed, scale

    return rounded


def write_shard(job: Job, partial: Path, context: Context, made: Iterator[Linear]) -> tuple[int, str, int]:
    """Write the linears, which come in file order, as a shard: its size in bytes, sha256 and number of tensors.

    Raises VerificationError for a linear that became all zeros and was not: an expert that computes nothing.
    """
    parts = job.grid.all_parts(range(job.model.shape(job.layer)[0]))
    plan = experts.plan_parts(job.form, job.form.names(job.model), parts, job.metadata)
    others: list[experts.Packed] = []
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        for expert, projection, packed, scale in made:
            if not job.form.codes(packed).any():
                name = linear_name(job.model, job.layer, expert, projection)
                if not (scale == groups.EMPTY_SCALE).all():
                    raise VerificationError(
                        f"{name}: all its codes became zero; use --quant-method RTN, and tell us the model."
                    )
                context.reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")
            first, *rest = job.form.stored(packed, scale)
            file.append(first)
            others.append(rest)
            taken(job.model, job.layer, (expert, projection), context.reporter)
        experts.append_others(file, others)
        return plan.size, file.close(), len(plan.entries)


def figures(job: Job, shard: Path) -> dict[str, Any]:
    """How far one expert of the shard lies from the source: the quality figure of the report."""
    entries = {e.name: e for e in read_header(shard).entries}
    names = job.form.names(job.model)

    def error(expert: int, projection: str) -> dict[str, float]:
        (part,) = job.grid.parts(expert, projection)
        wanted = (entries[names.key(part.place, t.suffix)] for t in job.form.tensors(part.n, part.k))
        stored = [np.fromfile(shard, np.uint8, entry.nbytes, offset=entry.start) for entry in wanted]
        return error_figures(job.form.error_sums(job.model.linear(job.layer, expert, projection), stored))

    return sampled_error(job.model, job.layer, 0, job.model.shape(job.layer)[0], error)


def tell(job: Job, told: layerwise.Told, context: Context) -> dict[str, Any]:
    """What happened to the layer's experts, for the journal, the model card and people."""
    tokens = told.tokens
    unseen = int((tokens == 0).sum())
    figures: dict[str, Any] = {
        "layer": job.layer,
        "routed_tokens": {
            "least": int(tokens.min()),
            "median": int(np.median(tokens)),
            "most": int(tokens.max()),
            "none": unseen,
        },
        "rounded_experts": told.rounded,
        "rounded_linears": told.fell_back,
    }
    if told.rounded:
        context.reporter.note(
            f"layer {job.layer}: {len(told.rounded)} of {len(tokens)} experts rounded to nearest, for fewer than "
            f"{job.settings.floor} tokens were routed to them: {', '.join(map(str, told.rounded[:16]))}"
            f"{', ...' if len(told.rounded) > 16 else ''}"
        )
    if told.fell_back:
        context.reporter.warn(
            f"layer {job.layer}: {len(told.fell_back)} of {3 * len(tokens)} linears rounded to nearest, for their Hessian could not be "
            f"factorized, such as {told.fell_back[0]}; a larger --dampening-frac or more samples may help"
        )
    return figures
