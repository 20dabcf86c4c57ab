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
    explain_name,
)
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
    """The work of a unit: experts that are rearranged for a different number of slices.

    output       the output to read
    old_slicing  how the experts are cut there
    """

    output: Output
    old_slicing: Slicing

    @property
    def names(self) -> TensorNames:
        return self.output.names

    def make_linear(self, item: LinearId, buffer: Bytes | None = None) -> PackedSlices:
        """Rearrange a linear. Raise InputError, which names the tensor, for a scale or code of no finite weight."""
        return self._rearrange(self.read_linear(item), item, buffer)

    def measure_change(self, item: LinearId) -> npt.NDArray[np.float64]:
        """Return sums of x*x, y*y, x*y, (x-y)^2 for old numbers x and new ones y, if slices are columns."""
        old = self.read_linear(item)
        new = self._rearrange(old, item)
        sums = np.zeros(4)
        for old_matrix, new_matrix in zip(_split_by_direction(old), _split_by_direction(new), strict=True):
            if self.fmt.encoding.grid.has_row_scales and not rearrange.is_cut_by_rows(old_matrix[0][0]):
                sums += rearrange.change_sums(self.fmt.encoding, old_matrix, new_matrix)
        return sums

    def read_linear(self, item: LinearId) -> PackedSlices:
        """Read the slices of a linear from the output."""
        return [(numa_slice, self._read_slice(numa_slice)) for numa_slice in self.old_slicing.slices(*item)]

    def finish_item(self, item: LinearId, reporter: Reporter) -> None:
        reporter.advance(self.input_bytes(item))

    def input_bytes(self, item: LinearId) -> int:
        """Return the bytes of a linear in the output that is read."""
        return sum(
            tensor.nbytes
            for numa_slice in self.old_slicing.slices(*item)
            for tensor in self.fmt.encoding.tensors(numa_slice.n, numa_slice.k)
        )

    def scratch_bytes(self) -> tuple[int, int]:
        linear_bytes = max(self.input_bytes((0, projection)) for projection in self.old_slicing.projections)
        rounding_bytes = SCRATCH * self.fmt.encoding.multiple * max(self.slicing.hidden, self.slicing.intermediate)
        return 2 * linear_bytes + rounding_bytes, 2 * linear_bytes

    def measure_errors(self) -> dict[str, object]:
        """Return how much one expert's down projection changed; {} if all numbers stay equal."""
        if not rearrange.requires_rounding(self.fmt.encoding, self.old_slicing.numa, self.slicing.numa):
            return {}
        expert = self.sampled_expert
        return {"sampled_expert": expert, "down_change": error_figures(self.measure_change((expert, "down")))}

    @property
    def column_projections(self) -> tuple[str, ...]:
        """Return the projections whose slices, or whose transposes' slices, are columns; others never change."""
        return self.slicing.projections if self.slicing.backward else ("down",)

    def _rearrange(self, old: PackedSlices, item: LinearId, buffer: Bytes | None = None) -> PackedSlices:
        try:
            return resplit_linear(self.fmt.encoding, old, self.slicing, item, buffer)
        except ValueError as error:
            name = self.names.tensor_name(old[0][0].id, tensor_suffixes(self.fmt.encoding)[0])
            high = self.fmt.encoding.grid.high
            name += explain_name(self.names, name)
            problem = f"{name} or a different NUMA slice of this linear has a code outside -{high}..{high}"
            raise InputError(f"{self.output.root}: {problem}; convert it again.") from error

    def _read_slice(self, numa_slice: NumaSlice) -> SliceTensors:
        """Read the tensors of a slice. Raise InputError if they cannot be read, or have numbers of no finite weight."""
        arrays = []
        for tensor in self.fmt.encoding.tensors(numa_slice.n, numa_slice.k):
            info = self.output.tensors[numa_slice.id, tensor.name]
            try:
                arrays.append(self.output.read(info))
            except VerificationError as error:
                raise InputError(str(error)) from error
        read = self.output.make_reader(numa_slice.id, tensor_suffixes(self.fmt.encoding))
        for find_defect in self.fmt.encoding.defect_checks[1:]:
            if find_defect is not None and (defect := find_defect(read, numa_slice.n, numa_slice.k)):
                where = explain_name(self.output.names, info.name)
                raise InputError(f"{self.output.root}: {info.name} in {info.file}{where}: {defect}; convert it again.")
        return arrays


def resplit_linear(
    encoding: Encoding, old: PackedSlices, slicing: Slicing, item: LinearId, buffer: Bytes | None = None
) -> PackedSlices:
    """Rearrange a linear into the slices of `slicing`. Raise ValueError for a code that the encoding does not have."""
    new = allocate_slices(encoding, slicing.slices(*item), buffer)
    for old_matrix, new_matrix in zip(_split_by_direction(old), _split_by_direction(new), strict=True):
        rearrange.rearrange_linear(encoding, old_matrix, new_matrix)
    return new


def _split_by_direction(slices: PackedSlices) -> list[PackedSlices]:
    """Return the slices of the linear, and those of its transpose, if present."""
    forward = [packed for packed in slices if not packed[0].backward]
    backward = [packed for packed in slices if packed[0].backward]
    return [matrix for matrix in (forward, backward) if matrix]


def make_stage(
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

    slicings        (old slicing, number of experts) of each layer
    numa            new number of NUMA slices
    files           the output's weight files, by name
    max_shard_size  limit of a shard in bytes; None for none
    metadata        metadata of all shards
    """
    units = []
    limit = None if output.loose else max_shard_size
    for old, experts in slicings:
        layer_fmt = fmt.layer_format(old.layer)
        slicing = replace(old, numa=numa)
        shard_metadata = layer_metadata(layer_fmt, old.layer, (experts, old.hidden, old.intermediate), metadata)
        for key, start, stop, nbytes in expert_files.split_layer(layer_fmt, slicing, experts, limit):
            work = ResplitWork(layer_fmt, slicing, start, stop, shard_metadata, output, old)
            inputs = tuple(_find_inputs(work, files))
            units.append(
                Unit(
                    stage=NAME,
                    key=key,
                    versions=(VERSION, layer_fmt.encoding.version),
                    params=(
                        ("layout", layer_fmt.name),
                        ("metadata", tuple(sorted(shard_metadata.items()))),
                        ("numa", (old.numa, numa)),
                        ("backward", old.backward),
                        ("experts", (start, stop)),
                        ("merged", not output.loose),
                    ),
                    inputs=inputs,
                    files=frozenset(content[0] for *_, content in inputs),
                    final=loose.layer_folder(old.layer) if output.loose else "",
                    bytes_in=expert_bytes(layer_fmt.encoding, old) * (stop - start),
                    bytes_out=nbytes,
                    folder=output.loose,
                    work=work,
                )
            )
    title = f"rearrange {fmt.name} experts for {plural(numa, 'NUMA slice')}"
    write = expert_files.write_experts_folder if output.loose else expert_files.write_experts_shard
    return Stage(NAME, title, tuple(units), write)


def _find_inputs(work: ResplitWork, files: Mapping[str, SourceFile]) -> Iterator[tuple[Any, ...]]:
    """Yield (name, dtype, shape, content id) of the tensors that a unit reads, as in Unit.inputs."""
    for numa_slice in work.old_slicing.all_slices(range(work.start, work.stop)):
        for tensor in work.fmt.encoding.tensors(numa_slice.n, numa_slice.k):
            info = work.output.tensors[numa_slice.id, tensor.name]
            file = files[info.file]
            yield info.name, info.dtype, info.shape, (file.name, file.header_sha256, file.size)
