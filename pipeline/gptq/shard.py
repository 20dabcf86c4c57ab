"""A layer's quantized experts on disk: one shard, its checks, and the figures that are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs import Form
from ktconvert.layouts.outputs.linear_names import linear_name
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Written
from ktconvert.pipeline.gptq.compensate import Compensate, Nearest, Stored
from ktconvert.pipeline.gptq.oneshot import Quantized
from ktconvert.pipeline.gptq.settings import Settings
from ktconvert.pipeline.stages import expert_files, experts
from ktconvert.pipeline.stages.expert_stream import error_figures, sampled_error, taken
from ktconvert.pipeline.tell.report import Reporter
from ktconvert.pipeline.walk.consumers import Tokens
from ktconvert.pipeline.walk.layered import LayeredModel
from ktconvert.quantizers.choice import ABSMAX, Choice
from ktconvert.quantizers.reference import F32

STRIP = 32  # rows that are unpacked at a time to find a value that is not zero


@dataclass(frozen=True)
class LayerWork:
    """One layer with experts, and the layers without any that lie before it.

    grid    the parts of its experts
    choice  how scales are chosen
    """

    model: MoeModel
    form: Form
    settings: Settings
    grid: ExpertGrid
    choice: Choice
    before: tuple[int, ...]
    metadata: Mapping[str, str]
    skeleton: Callable[[], LayeredModel]
    oneshot: Callable[[Path], Quantized]

    @property
    def layer(self) -> int:
        """Its number."""
        return self.grid.layer


def nearest(work: LayerWork) -> Nearest:
    """A function that rounds a linear of the layer to nearest, with scales as the work's choice has them."""
    count = work.model.shape(work.layer)[0]
    rtn = experts.ExpertsWork(work.model, work.form, ABSMAX, work.grid, 0, count, work.metadata)

    def quantize(expert: int, projection: str, importance: F32 | None) -> Stored:
        return rtn.make((expert, projection))

    return quantize


class ShardWriter:
    """The shard of a layer, into which linears are written in file order: all first tensors, then all second ones, and
    so on.
    """

    def __init__(self, work: LayerWork, partial: Path, reporter: Reporter) -> None:
        self.work, self.reporter = work, reporter
        parts = work.grid.all_parts(range(work.model.shape(work.layer)[0]))
        self.plan = expert_files.plan_parts(work.form, work.form.names(work.model), parts, work.metadata)
        self._others: list[list[Bytes]] = []
        self._file = publish.DirectFile(partial, self.plan.size)

    def __enter__(self) -> ShardWriter:
        self._file.__enter__()
        self._file.append(self.plan.header)
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def write(self, expert: int, projection: str, stored: Stored) -> None:
        """Write a linear. Raises VerificationError if all codes are zero and the source is not: such an expert computes
        nothing.
        """
        work = self.work
        name = linear_name(work.model, work.layer, expert, projection)
        if all(work.form.is_zero(tensors) for _, tensors in stored):
            self.reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")
        elif not self._has_values(stored):
            raise VerificationError(
                f"{name}: all its codes became zero; use --quant-method RTN, and tell us the model."
            )
        for _, (first, *others) in stored:
            self._file.append(first)
            self._others.append(others)
        taken(work.model, work.layer, (expert, projection), self.reporter)

    def _has_values(self, stored: Stored) -> bool:
        return any(
            self.work.form.unpack(tensors, part.n, part.k, slice(first, first + STRIP)).any()
            for part, tensors in stored
            for first in range(0, part.n, STRIP)
        )

    def finish(self) -> tuple[Written, int]:
        """Write the tensors that follow all first ones; returns the file and its number of tensors."""
        expert_files.append_others(self._file, self._others)
        return Written("", self.plan.size, self._file.close()), len(self.plan.entries)


def error_of_sample(work: LayerWork, shard: Path) -> dict[str, Any]:
    """How far one expert of the shard is from the source: the quality figure of the report."""
    entries = {e.name: e for e in read_header(shard).entries}
    names = work.form.names(work.model)

    def error(expert: int, projection: str) -> dict[str, float]:
        linear = work.model.linear(work.layer, expert, projection)
        sums = np.zeros(4)
        for part in work.grid.parts(expert, projection):
            wanted = (entries[names.key(part.place, t.suffix)] for t in work.form.tensors(part.n, part.k))
            stored = [np.fromfile(shard, np.uint8, entry.nbytes, offset=entry.start) for entry in wanted]
            sums += work.form.error_sums(part.of(linear, work.grid.numa), stored)
        return error_figures(sums)

    return sampled_error(work.model, work.layer, 0, work.model.shape(work.layer)[0], error)


def report(work: LayerWork, tokens: Tokens, done: Compensate, reporter: Reporter) -> dict[str, Any]:
    """Report what happened to the layer's experts; returns the figures for the journal and the model card."""
    if done.too_few:
        reporter.note(
            f"layer {work.layer}: {len(done.too_few)} of {len(tokens)} experts rounded to nearest, for fewer than "
            f"{work.settings.floor} tokens were routed to them: {', '.join(map(str, done.too_few[:16]))}"
            f"{', ...' if len(done.too_few) > 16 else ''}"
        )
    fell_back = [linear_name(work.model, work.layer, *item) for item in done.fell_back]
    if fell_back:
        reporter.warn(
            f"layer {work.layer}: {len(fell_back)} of {3 * len(tokens)} linears rounded to nearest, for their Hessian "
            f"could not be factorized, such as {fell_back[0]}; a larger --dampening-frac or more samples may help"
        )
    return {
        "layer": work.layer,
        "routed_tokens": {
            "least": int(tokens.min()),
            "median": int(np.median(tokens)),
            "most": int(tokens.max()),
            "none": int((tokens == 0).sum()),
        },
        "rounded_experts": done.too_few,
        "rounded_linears": fell_back,
    }
