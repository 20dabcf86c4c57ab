"""Experts of an output, rearranged for a different number of NUMA slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import Bytes, Encoding, tensor_suffixes
from ktconvert.layouts.errors import InputError, VerificationError
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.outputs import loose, rearrange
from ktconvert.layouts.outputs.format import Format, expert_bytes
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import (
    LinearId,
    NumaSlice,
    PackedSlices,
    SliceTensors,
    Slicing,
    TensorNames,
    allocate_slices,
)
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.pipeline.engine.units import Stage, Unit
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.stages import expert_files
from ktconvert.pipeline.stages.expert_files import ExpertsToWrite
from ktconvert.pipeline.stages.quantize_experts import error_figures, layer_metadata

NAME = "resplit"
VERSION = 1
SCRATCH = 32  # bytes for each code of a row block: codes, float32 and float64 of both sides


@dataclass(frozen=True)
class ResplitWork(ExpertsToWrite):
    """The work of a unit: experts that are rearranged, from the slices of `old` to those of `slicing`."""

    output: Output
    old: Slicing

    @property
    def names(self) -> TensorNames:
        return self.output.names

    def make(self, item: LinearId, buffer: Bytes | None = None) -> PackedSlices:
        """Rearrange a linear. Raise InputError, which names the tensor, for a scale or code of no finite weight."""
        return self._rearrange(self.read_linear(item), item, buffer)

    def change_sums(self, item: LinearId) -> npt.NDArray[np.float64]:
        """Return sums of x*x, y*y, x*y, (x-y)^2 for old numbers x and new ones y, if slices are columns."""
        old = self.read_linear(item)
        new = self._rearrange(old, item)
        sums = np.zeros(4)
        for before, after in zip(_linears(old), _linears(new), strict=True):
            if self.fmt.encoding.grid.has_row_scales and not rearrange.is_cut_by_rows(before[0][0]):
                sums += rearrange.change_sums(self.fmt.encoding, before, after)
        return sums

    def read_linear(self, item: LinearId) -> PackedSlices:
        return [(numa_slice, self._read(numa_slice)) for numa_slice in self.old.slices(*item)]

    def finish_item(self, item: LinearId, reporter: Reporter) -> None:
        reporter.advance(self.read_bytes(item))

    def read_bytes(self, item: LinearId) -> int:
        return sum(
            tensor.nbytes
            for numa_slice in self.old.slices(*item)
            for tensor in self.fmt.encoding.tensors(numa_slice.n, numa_slice.k)
        )

    def scratch_bytes(self) -> tuple[int, int]:
        old = max(self.read_bytes((0, projection)) for projection in PROJECTIONS)
        rounding = SCRATCH * self.fmt.encoding.multiple * max(self.slicing.hidden, self.slicing.intermediate)
        return 2 * old + rounding, 2 * old

    def measure(self) -> dict[str, object]:
        """Return how much one expert's down projection changed; {} if all numbers stay equal."""
        if not rearrange.requires_rounding(self.fmt.encoding, self.old.numa, self.slicing.numa):
            return {}
        expert = self.sampled_expert
        return {"sampled_expert": expert, "down_change": error_figures(self.change_sums((expert, "down")))}

    @property
    def column_projections(self) -> tuple[str, ...]:
        """Return the projections whose slices, or whose transposes' slices, are columns; others never change."""
        return PROJECTIONS if self.slicing.backward else ("down",)

    def _rearrange(self, old: PackedSlices, item: LinearId, buffer: Bytes | None = None) -> PackedSlices:
        try:
            return resplit(self.fmt.encoding, old, self.slicing, item, buffer)
        except ValueError as error:
            key, high = (
                self.names.tensor_name(old[0][0].id, tensor_suffixes(self.fmt.encoding)[0]),
                self.fmt.encoding.grid.high,
            )
            what = f"{key} or a different NUMA slice of this linear has a code outside -{high}..{high}"
            raise InputError(f"{self.output.root}: {what}; convert it again.") from error

    def _read(self, numa_slice: NumaSlice) -> SliceTensors:
        stored = []
        for tensor in self.fmt.encoding.tensors(numa_slice.n, numa_slice.k):
            here = self.output.tensors[numa_slice.id, tensor.name]
            try:
                stored.append(self.output.read(here))
            except VerificationError as error:
                raise InputError(str(error)) from error
        read = self.output.make_reader(numa_slice.id, tensor_suffixes(self.fmt.encoding))
        for defect in self.fmt.encoding.defect_checks[1:]:
            if defect is not None and (what := defect(read, numa_slice.n, numa_slice.k)):
                raise InputError(f"{self.output.root}: {here.name} in {here.file}: {what}; convert it again.")
        return stored


def resplit(
    encoding: Encoding, old: PackedSlices, slicing: Slicing, item: LinearId, buffer: Bytes | None = None
) -> PackedSlices:
    """Rearrange a linear into the slices of `slicing`. Raise ValueError for a code that the encoding does not have."""
    new = allocate_slices(encoding, slicing.slices(*item), buffer)
    for before, after in zip(_linears(old), _linears(new), strict=True):
        rearrange.rearrange_linear(encoding, before, after)
    return new


def _linears(slices: PackedSlices) -> list[PackedSlices]:
    """Return the slices of the linear, and those of its transpose, if present."""
    both = ([numa_slice for numa_slice in slices if numa_slice[0].backward == backward] for backward in (False, True))
    return [linear for linear in both if linear]


def stage(
    output: Output,
    fmt: Format,
    slicings: Sequence[tuple[Slicing, int]],
    numa: int,
    files: Mapping[str, SourceFile],
    *,
    max_shard_size: int | None,
    metadata: Mapping[str, str],
) -> Stage[ResplitWork]:
    """Return the stage that rearranges layers.

    slicings  (old slicing, number of experts) of each layer
    files  the output's weight files, by name
    """
    units = []
    for old, experts in slicings:
        own, slicing = fmt.layer_format(old.layer), replace(old, numa=numa)
        about = layer_metadata(own, old.layer, (experts, old.hidden, old.intermediate), metadata)
        for key, start, stop, nbytes in expert_files.split_layer(
            own, slicing, experts, None if output.loose else max_shard_size
        ):
            work = ResplitWork(own, slicing, start, stop, about, output, old)
            units.append(
                Unit(
                    stage=NAME,
                    key=key,
                    versions=(VERSION, own.encoding.version),
                    params=(
                        ("layout", own.name),
                        ("metadata", tuple(sorted(about.items()))),
                        ("numa", (old.numa, numa)),
                        ("backward", old.backward),
                        ("experts", (start, stop)),
                        ("merged", not output.loose),
                    ),
                    inputs=(inputs := tuple(_input_identities(work, files))),
                    files=frozenset(content[0] for *_, content in inputs),
                    final=loose.layer_folder(old.layer) if output.loose else "",
                    bytes_in=expert_bytes(own.encoding, old) * (stop - start),
                    bytes_out=nbytes,
                    folder=output.loose,
                    work=work,
                )
            )
    title = f"rearrange {fmt.name} experts for {plural(numa, 'NUMA slice')}"
    write = expert_files.write_experts_folder if output.loose else expert_files.write_experts_shard
    return Stage(NAME, title, tuple(units), write)


def _input_identities(work: ResplitWork, files: Mapping[str, SourceFile]) -> Iterator[tuple[Any, ...]]:
    for numa_slice in work.old.all_slices(range(work.start, work.stop)):
        for tensor in work.fmt.encoding.tensors(numa_slice.n, numa_slice.k):
            here = work.output.tensors[numa_slice.id, tensor.name]
            file = files[here.file]
            yield here.name, here.dtype, here.shape, (file.name, file.header_sha256, file.size)
