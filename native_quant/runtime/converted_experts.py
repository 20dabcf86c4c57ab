"""Converted experts, ours or kt-kernel's, checked and loaded layer by layer, as mapped files or copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ktconvert.layouts.checkpoints.expert_function import ExpertFunction, read_functions
from ktconvert.layouts.checkpoints.recognition import function_by_config
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError, absent_path, bad_file
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.mapped import MappedFiles
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.format import require_legal
from ktconvert.layouts.outputs.measuring import Measure, measure_output
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.output import CONVERT_AGAIN, Output
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo, format_ranges
from ktconvert.native_quant import machine
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.expert_source import (
    ExpertSource,
    FileStatus,
    LoadedFiles,
    Requirements,
    directory_state,
)
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import Pool

Memory = Literal["auto", "map", "copy"]
MEMORY: tuple[Memory, ...] = get_args(Memory)
MAX_COPIED = 0.8  # fraction of the available memory that copies may take


@dataclass(frozen=True)
class ConvertedExperts(ExpertSource):
    """A converted directory.

    slice_bytes     bytes of each NUMA slice, in all layers
    available       bytes of memory that were available when the directory was opened
    node_available  the same for each NUMA node
    """

    path: Path
    output: Output
    measured: Measure
    files: MappedFiles
    slice_bytes: tuple[int, ...]
    available: int
    node_available: Mapping[int, int]

    @property
    def layers(self) -> list[int]:
        return sorted(self.measured.shapes)

    @property
    def config(self) -> dict[str, Any]:
        return self.output.config

    @property
    def damage(self) -> list[str]:
        missing = set((self.output.weight_map or {}).values()).difference(self.output.shards)
        return [*self.output.damaged.values(), *(f"{shard} is missing" for shard in sorted(missing))]

    def shape(self, layer: int) -> tuple[int, int, int]:
        return self.measured.shapes[layer]

    def function(self, layer: int) -> ExpertFunction | None:
        try:
            return self._functions.get(layer) or function_by_config(self.config, layer)
        except KTConvertError as error:
            raise error.with_path(self.output.root) from None

    @functools.cached_property
    def _functions(self) -> dict[int, ExpertFunction]:
        """The recorded functions of the layers: metadata of shards, or for loose files the manifest."""
        records = (shard["functions"] for shard in self.output.metadata.values() if "functions" in shard)
        return read_functions(next(records, self.output.facts.get("functions", {})))

    def require_computable(self) -> None:
        fmt = self.measured.fmt
        if fmt is None or any(layer_format.name not in METHODS for layer_format in fmt.layer_formats):
            problem = f"its method is {self.measured.method}, which this runtime cannot compute"
            raise UnsupportedError(f"{self.path}: {problem}; convert the model with `ktconvert cpu`.")

    def require_readable(self, layer: int) -> None:
        if reasons := "; ".join(self.damage[:3]):
            raise InputError(f"{self.path}: layer {layer} cannot be read ({reasons}); {CONVERT_AGAIN}.")

    def linears(self, packed: weights.LayerWeights, expert: int) -> Iterator[tuple[F32, ...]]:
        return packed.linears(expert)

    def load(self, layer: int, pool: Pool, required: Requirements) -> weights.LayerWeights:
        output, measured = self.output, self.measured
        self.require_computable()
        assert measured.fmt is not None
        if layer not in measured.shapes:
            self.require_readable(layer)
            contents = f"has no layer {layer}, but layers {format_ranges(list(measured.shapes)) or 'none'}"
            raise UnsupportedError(f"{self.path}: {contents}; use one of these, or convert again with this layer.")
        count, h, i = measured.shapes[layer]
        fmt = measured.fmt.layer_format(layer)
        try:
            required.check(self.path, layer, "byte counts", (count, h, i), fmt.name)
        except (InputError, UnsupportedError):  # a missing shard may have the other experts
            self.require_readable(layer)
            raise
        self.require_metadata(layer)
        self.require_manifest()
        transposed = required.transposed
        if transposed is None:
            transposed = any(place.backward and place.layer == layer for place, _ in output.tensors)
        slicing = Slicing(layer, h, i, measured.numa, transposed, gated=measured.gated)
        require_legal(fmt, h, i, measured.numa)
        weights.check_limits(fmt.name, slicing)
        missing = required.find_missing(count)
        needed = set(range(count)) - missing
        tensors = dict(self._find_tensors(fmt, slicing, count))
        biases: dict[NumaSlice, F32] = {}
        if fmt.encoding.without_bias is not None:
            biases = {s: output.read(stored[-1]).view(np.float32) for s, stored in tensors.items()}
            tensors = {s: stored[:-1] for s, stored in tensors.items()}
        slice_bytes = [nbytes * len(needed) // count for nbytes in self.slice_bytes]
        memory = required.memory
        if memory == "auto":
            memory = "copy" if sum(slice_bytes) < MAX_COPIED * self.available or output.loose else "map"
        # One mapping per loose file would exceed the kernel's limit.
        mapped = memory == "map" and not output.loose and METHODS[fmt.name].rearrange is None
        names = {tensor.file for stored in tensors.values() for tensor in stored} if missing else set()
        files = LoadedFiles(layer, (output.root / name for name in names))

        def fill(arrays: weights.SliceTensors) -> None:
            def fill_slice(item: tuple[NumaSlice, Sequence[Bytes]]) -> None:
                numa_slice, views = item
                if not mapped:
                    for tensor, view in zip(tensors[numa_slice], views, strict=True):
                        output.read(tensor, out=view)
                self._arrange_slice(fmt, numa_slice, views, biases.get(numa_slice))

            files.require_unchanged()
            weights.run_parallel(fill_slice, arrays.items(), machine.physical_cores())

        if mapped:
            arrays = {s: tuple(map(self._map_tensor, stored)) for s, stored in tensors.items()}
            fill(weights.select_experts(arrays, needed))
        else:
            weights.warn_of_shortages(str(self.path), slice_bytes, pool.nodes, self.node_available)
            with weights.allocate_blocks(tensors, measured.numa, pool.nodes, missing) as arrays:
                fill(weights.select_experts(arrays, needed))
        rows = dict.fromkeys(PROJECTIONS, METHODS[fmt.name])
        read_ahead = mapped and sum(slice_bytes) > self.available
        later = fill if missing else None
        packed = weights.LayerWeights(rows, slicing, count, arrays, biases, missing, later, mapped, read_ahead)
        packed.check_reads()
        return packed

    def require_manifest(self) -> None:
        """Raise UnsupportedError if the manifest's method or number of NUMA slices contradict the byte counts."""
        for name, actual in (("method", self.measured.method), ("numa", self.measured.numa)):
            if (recorded := self.output.facts.get(name, actual)) != actual:
                problem = f"has {name} {recorded}, but the weights beside it have {actual}"
                raise UnsupportedError(f"{self.output.root / manifest.NAME}: {problem}; {CONVERT_AGAIN}.")

    def require_metadata(self, layer: int) -> None:
        """Raise UnsupportedError if metadata in our shards contradict their byte counts."""
        output, measured = self.output, self.measured
        names = ("num_experts", "hidden_size", "moe_intermediate_size")
        sizes = dict(zip(names, map(str, measured.shapes[layer]), strict=True))
        actual = {"method": measured.layer_method(layer), "numa": str(measured.numa), **sizes}
        for shard, metadata in output.metadata.items():
            if metadata.get("layer") != str(layer):
                continue
            for name, value in actual.items():
                if (recorded := metadata.get(name, value)) != value:
                    problem = f"its header has {name} {recorded}, but according to its bytes it is {value}"
                    raise UnsupportedError(problem, f"{CONVERT_AGAIN}.", path=output.root / shard)

    def _find_tensors(
        self, fmt: Format, slicing: Slicing, experts: int
    ) -> Iterator[tuple[NumaSlice, tuple[TensorInfo, ...]]]:
        """Yield every slice that the layer must have, with its tensors in the files, in the order of the encoding.

        Raises InputError for missing tensors and for wrong sizes.
        """
        output = self.output
        for numa_slice in slicing.all_slices(range(experts)):
            found = []
            for tensor in fmt.encoding.tensors(numa_slice.n, numa_slice.k):
                role, size = tensor.name, tensor.nbytes
                described = output.names.describe(numa_slice.id, role)
                stored = output.tensors.get((numa_slice.id, role))
                if stored is None:
                    reasons = f" ({'; '.join(self.damage[:3])})" if self.damage else ""
                    raise InputError(f"{output.root}: {described} is missing{reasons}; {CONVERT_AGAIN}.")
                location = f"{output.root / stored.file}: {described}"
                if stored.nbytes != size or stored.file in output.damaged:
                    problem = output.damaged.get(stored.file) or f"contains {stored.nbytes} bytes, not {size}"
                    raise InputError(f"{location}: {problem}; {CONVERT_AGAIN}.")
                # kt-kernel's scripts write flat tensors of AMXINT4 and AMXINT8 with different dtypes, and do not check
                # them.
                if len(tensor.shape) > 1 and (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                    actual, required = (f"{t.dtype} {list(t.shape)}" for t in (stored, tensor))
                    raise InputError(f"{location} is {actual}, must be {required}; {CONVERT_AGAIN}.")
                found.append(stored)
            yield numa_slice, tuple(found)

    def _map_tensor(self, stored: TensorInfo) -> Bytes:
        path = self.output.root / stored.file
        mapped = self.files.map(path, path.stat().st_size)
        if stored.start + stored.nbytes > len(mapped):
            raise InputError(f"{path}: became shorter since it was opened; {CONVERT_AGAIN}.")
        if stored.dtype == "F32" and stored.start % 4:
            raise InputError(f"{path}: {stored.name} does not begin at a multiple of 4 bytes; {CONVERT_AGAIN}.")
        return np.ndarray((stored.nbytes,), np.uint8, buffer=mapped, offset=stored.start)

    def _arrange_slice(self, fmt: Format, numa_slice: NumaSlice, stored: Sequence[Bytes], bias: F32 | None) -> None:
        """Rearrange a slice to the order in memory. Raises InputError for invalid scales, codes and biases."""
        complete = stored if bias is None else (*stored, bias.view(np.uint8))

        def read(tensor: int, start: int = 0, stop: int | None = None) -> Bytes:
            return complete[tensor][start:stop]

        encoding = fmt.encoding
        rearrange = METHODS[fmt.name].rearrange
        checks = list(zip(encoding.tensors(numa_slice.n, numa_slice.k), encoding.defect_checks, strict=True))[1:]
        defects = [
            (tensor.name, find_defect(read, numa_slice.n, numa_slice.k))
            for tensor, find_defect in checks
            if find_defect is not None
        ]
        try:
            if rearrange is not None:
                rearrange(stored, numa_slice.n, numa_slice.k)
        except ValueError as error:
            defects.append(("weight", str(error)))
        for name, problem in defects:
            if problem:
                path = self.output.root / self.output.tensors[numa_slice.id, name].file
                described = self.output.names.describe(numa_slice.id, name)
                raise InputError(f"{path}: {described}: {problem}; {CONVERT_AGAIN}.")


@functools.lru_cache(maxsize=8)
def _open(path: Path, state: frozenset[FileStatus]) -> ConvertedExperts:
    output = open_output(path)
    nbytes = [0] * (1 + max((slice_id.node for slice_id, _ in output.tensors), default=0))
    for (slice_id, _), stored in output.tensors.items():
        nbytes[slice_id.node] += stored.nbytes
    available = weights.memory_available(), machine.node_memory_available()
    return ConvertedExperts(path, output, measure_output(output), MappedFiles(may_lose=True), tuple(nbytes), *available)


def open_converted(path: Path) -> ConvertedExperts:
    """Open a converted directory. Reads it again only if a file has changed."""
    remedy = "give an output of `ktconvert cpu` or kt-kernel, or a GGUF file"
    if not path.exists():
        raise absent_path(path, remedy)
    if not path.is_dir():
        raise bad_file(path, "not a directory", remedy)
    source = _open(path.resolve(), directory_state(path))
    return source if source.path == path else replace(source, path=path)
