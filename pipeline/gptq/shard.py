"""A layer's quantized experts on disk: one shard or loose files, their checks, and the figures that are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.encodings.encoding import Bytes, is_zero
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import ShardPlan
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.linear_names import linear_name
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Written
from ktconvert.pipeline.gptq.compensate import Compensate, Nearest, Stored
from ktconvert.pipeline.gptq.oneshot import Quantized
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.stages import expert_files, quantize_experts
from ktconvert.pipeline.stages import expert_stream as equalized
from ktconvert.pipeline.stages.chain import LayerWork
from ktconvert.pipeline.stages.expert_stream import taken
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.walk.consumers import Tokens, spread
from ktconvert.quantizers.choice import Quantizer
from ktconvert.quantizers.differences import source_values
from ktconvert.quantizers.reference import F32

Shard = tuple[DirectFile, ShardPlan]
ROWS = 32  # that are decoded at a time to find a value that is not zero


@dataclass(frozen=True)
class GptqWork(LayerWork):
    """grid: the parts of the layer's experts; choice: how scales are chosen; loose: whether it becomes a folder."""

    fmt: Format
    grid: ExpertGrid
    choice: Quantizer
    metadata: Mapping[str, str]
    oneshot: Callable[[Path], Quantized]
    loose: bool = False

    @property
    def options(self) -> QuantizationOptions:
        options = self.chain.options
        assert isinstance(options, QuantizationOptions)
        return options


def nearest(work: GptqWork) -> Nearest:
    """A function that rounds a linear of the layer to nearest, with scales as the work's choice has them."""
    count = work.model.shape(work.layer)[0]
    rtn = quantize_experts.ExpertsWork(work.fmt, work.grid, 0, count, work.metadata, work.model, work.choice)

    def quantize(expert: int, projection: str, importance: F32 | None) -> Stored:
        return replace(rtn, importance=lambda *_: importance).make((expert, projection))

    return quantize


class LayerWriter:
    """Writes a layer's linears, in file order: to a shard (all first tensors, then all second ones, and so on), or to a
    folder with a file for each tensor, synced together. figures: how far one expert is from the source.
    """

    def __init__(self, work: GptqWork, partial: Path, reporter: Reporter, shard: Shard | None = None) -> None:
        self.work, self.partial, self.reporter, self._shard = work, partial, reporter, shard
        experts = work.model.shape(work.layer)[0]
        self.figures: dict[str, Any] = {"sampled_expert": work.layer % experts}
        self._written: list[Written] = []
        self._others: list[list[Bytes]] = []

    def write(self, expert: int, projection: str, stored: Stored) -> None:
        """Write a linear. Raises VerificationError if all codes are zero and the source is not."""
        _require_values(self.work, expert, projection, stored, self.reporter)
        if expert == self.figures["sampled_expert"]:
            self.figures[projection] = equalized.error_of(self.work.model, self.work.fmt.encoding, stored)
        for part, tensors in stored:
            if self._shard is None:
                self._written += expert_files.write_loose(self.work.fmt, part, tensors, self.partial)
            else:
                self._shard[0].append(tensors[0])
                self._others.append(tensors[1:])
        taken(self.work.model, self.work.layer, (expert, projection), self.reporter)

    def finish(self) -> tuple[tuple[Written, ...], int]:
        """Complete them; returns the files and the number of tensors."""
        if self._shard is None:
            publish.sync_tree(self.partial)
            return tuple(self._written), len(self._written)
        file, plan = self._shard
        expert_files.append_others(file, self._others)
        return (Written("", plan.size, file.close()),), len(plan.entries)


@contextmanager
def writer(work: GptqWork, partial: Path, reporter: Reporter) -> Iterator[LayerWriter]:
    """What the layer is written with."""
    if work.loose:
        expert_files.make_folders(partial, work.grid.numa)
        yield LayerWriter(work, partial, reporter)
        return
    parts = work.grid.all_parts(range(work.model.shape(work.layer)[0]))
    plan = expert_files.plan_parts(work.fmt, work.fmt.names_in(work.model), parts, work.metadata)
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        yield LayerWriter(work, partial, reporter, (file, plan))


def _require_values(work: GptqWork, expert: int, projection: str, stored: Stored, reporter: Reporter) -> None:
    """Raise VerificationError if all codes of a linear are zero, and the source is not: it would compute nothing."""
    if not all(is_zero(work.fmt.encoding, tensors, part.n, part.k) for part, tensors in stored):
        return
    name = linear_name(work.model, work.layer, expert, projection)
    source = work.model.linear(work.layer, expert, projection)
    n = source.shape[0]
    if any(source_values(source.rows(first, min(first + ROWS, n))).any() for first in range(0, n, ROWS)):
        remedy = "quantize without calibration (--quant-method RTN, or --scale mse), and tell us the model"
        raise VerificationError(f"{name}: all its codes became zero; {remedy}.")
    reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")


def report(work: GptqWork, tokens: Tokens, done: Compensate, reporter: Reporter) -> dict[str, Any]:
    """Report what happened to the layer's experts; returns the figures for the journal and the model card."""
    if done.too_few:
        how = "rounded to nearest" if work.choice.choose is None else "not compensated"
        where = " in down" if done.evidence.shared else ""  # of gate and up all tokens of the layer are known
        which = ", ".join(map(str, done.too_few[:16])) + (", ..." if len(done.too_few) > 16 else "")
        reporter.note(
            f"layer {work.layer}: {len(done.too_few)} of {len(tokens)} experts {how}{where}, for fewer than "
            f"{done.floor} tokens were routed to them: {which}"
        )
    fell_back = [linear_name(work.model, work.layer, *item) for item in done.fell_back]
    if fell_back:
        reporter.warn(
            f"layer {work.layer}: {len(fell_back)} of {3 * len(tokens)} linears rounded to nearest, for their Hessian "
            f"could not be factorized, such as {fell_back[0]}; a larger --dampening-frac or more samples may help"
        )
    return {
        "layer": work.layer,
        "routed_tokens": spread(tokens),
        "rounded_experts": done.too_few,
        "rounded_linears": fell_back,
        **equalized.figures(work.model, work.layer, 0, len(tokens)),
    }
