"""Converted experts, ours or kt-kernel's: checked and loaded layer by layer, as mapped files or copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.mapped import MappedFiles
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.card import format_ranges
from ktconvert.layouts.outputs.format import require_legal
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.output import AGAIN, Output
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo
from ktconvert.native_quant import machine
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.methods import LIMIT, METHODS, PLAIN, Swiglu, in_config
from ktconvert.native_quant.runtime.pool import Pool

MEMORY = ("auto", "map", "copy")
ROOMY = 0.8  # share of the available memory that copies may take


@dataclass(frozen=True)
class Converted:
    """A converted directory. part_bytes: of each NUMA slice, in all layers; is_roomy, left: whether memory held all
    layers before the first was loaded, and what each NUMA node had left (bytes).
    """

    path: Path
    output: Output
    measured: Measure
    files: MappedFiles
    part_bytes: tuple[int, ...]
    is_roomy: bool
    left: Mapping[int, int]

    @property
    def layers(self) -> list[int]:
        return sorted(self.measured.shapes)

    @property
    def config(self) -> dict[str, Any]:
        return self.output.config

    @property
    def damage(self) -> list[str]:
        """The damaged files, and the shards of the index that are missing, one text each."""
        missing = set((self.output.weight_map or {}).values()).difference(self.output.shards)
        return [*self.output.damaged.values(), *(f"{shard} is missing" for shard in sorted(missing))]

    def shape_of(self, layer: int) -> tuple[int, int, int]:
        return self.measured.shapes[layer]

    def swiglu_of(self, layer: int) -> Swiglu:
        """What a layer's experts compute by config.json, as far as their method can."""
        recorded = (metadata.get("activation") for metadata in self.output.metadata.values())
        activation, method = next(filter(None, recorded), "silu"), METHODS.get(self.measured.method_of(layer))
        return method.swiglu_of(self.config, activation, layer) if method else PLAIN

    def require_computable(self) -> None:
        """Raises UnsupportedError for a directory of another kind, or of a method that the kernels do not compute."""
        fmt = self.measured.fmt
        if fmt is None or any(own.name not in METHODS for own in fmt.formats):
            why = f"its method is {self.measured.method}, which this runtime cannot compute"
            raise UnsupportedError(f"{self.path}: {why}; convert the model with `ktconvert cpu`.")

    def require_readable(self, layer: int) -> None:
        """Raises InputError where a missing layer may be in a file that is damaged or missing."""
        if because := "; ".join(self.damage[:3]):
            raise InputError(f"{self.path}: layer {layer} cannot be read ({because}); {AGAIN}.")

    def linears(self, packed: weights.LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        return packed.linears(expert)

    def load(self, layer: int, pool: Pool, required: weights.Requirements) -> weights.LayerWeights:
        """One layer in the memory of the pool's nodes. UnsupportedError: not as required; InputError: damaged."""
        output, measured = self.output, self.measured
        self.require_computable()
        assert measured.fmt is not None
        if layer not in measured.shapes:
            self.require_readable(layer)
            has = f"holds no layer {layer}; it has layers {format_ranges(list(measured.shapes)) or 'none'}"
            raise UnsupportedError(f"{self.path}: {has}. Give one of these, or convert again with it.")
        count, h, i = measured.shapes[layer]
        fmt = measured.fmt.layer_format(layer)
        required.require(self.path, layer, "byte counts", (count, h, i), fmt.name)
        self.require_metadata(layer, required.swiglu)
        self.require_manifest()
        transposed = required.transposed
        if transposed is None:
            transposed = any(place.backward and place.layer == layer for place, _ in output.tensors)
        slicing = Slicing(layer, h, i, measured.numa, transposed)
        require_legal(fmt, h, i, measured.numa)
        weights.check_limits(fmt.name, slicing)
        stored = dict(self._stored(fmt, slicing, count))
        memory = required.memory
        if memory == "auto":
            memory = "copy" if self.is_roomy or output.loose else "map"
        if memory == "map" and not output.loose and METHODS[fmt.name].arrange is None:
            views = {key: self._view(one) for key, one in stored.items()}
        else:  # one mapping per loose file would exceed the kernel's limit
            weights.warn_of_shortages(str(self.path), self.part_bytes, pool.nodes, self.left)
            views = self._copy(stored, pool.nodes)
        rows = dict.fromkeys(PROJECTIONS, METHODS[fmt.name])
        tensors = {part: fmt.encoding.tensors(part.n, part.k) for part, _ in views}  # a mixed output's have other names
        arrays = {part: tuple(views[part, tensor.name] for tensor in found) for part, found in tensors.items()}
        packed = weights.LayerWeights(rows, slicing, count, arrays)
        weights.in_parallel(lambda item: self._prepare(fmt, *item), packed.arrays.items(), machine.physical_cores())
        packed.check_reads()
        return packed

    def require_manifest(self) -> None:
        """Raises UnsupportedError where its method or number of NUMA slices are not those of the bytes."""
        for name, actual in (("method", self.measured.method), ("numa", self.measured.numa)):
            if (recorded := self.output.facts.get(name, actual)) != actual:
                what = f"says {name} {recorded}, the weights beside it have {actual}"
                raise UnsupportedError(f"{self.output.root / manifest.NAME}: {what}; {AGAIN}.")

    def require_metadata(self, layer: int, swiglu: Swiglu) -> None:
        """Raises UnsupportedError where the metadata in our own shards are not what their byte counts say, and what the
        layer is to compute. Loose files have none: the manifest says what their experts compute.
        """
        output, measured = self.output, self.measured
        names = ("num_experts", "hidden_size", "moe_intermediate_size")
        sizes = dict(zip(names, map(str, measured.shapes[layer]), strict=True))
        actual = {"method": measured.method_of(layer), "numa": str(measured.numa), **sizes}
        actual |= {"weights_on": "output", "activation": swiglu.activation}
        of_layer = {shard: about for shard, about in output.metadata.items() if about.get("layer") == str(layer)}
        if output.loose:
            of_layer = {manifest.NAME: {n: output.facts[n] for n in ("activation", "weights_on") if n in output.facts}}
        for shard, metadata in of_layer.items():
            if "activation" in metadata and self._is_in_config(layer, metadata["activation"], swiglu):
                actual["activation"] = metadata["activation"]
            wrong = next((name for name in actual if metadata.get(name, actual[name]) != actual[name]), None)
            if wrong is not None:
                settings = wrong == "activation" and _may_be_limited(measured.method_of(layer))
                give = "give swiglu_limit and swiglu_alpha as config.json of the model has them."
                said = f"its {'model' if output.loose else 'header'} says {wrong} {metadata[wrong]}"
                what = f"{said}, its bytes and this runtime say {actual[wrong]}"
                raise UnsupportedError(what, give if settings else f"{AGAIN}.", path=output.root / shard)

    def _is_in_config(self, layer: int, activation: str, swiglu: Swiglu) -> bool:
        """Whether config.json has these settings for the layer. Raises UnsupportedError where it has others."""
        configured = in_config(self.output.config, activation, layer)
        if configured in (None, swiglu) or not _may_be_limited(self.measured.method_of(layer)):
            return configured == swiglu
        what = f"the experts of layer {layer} have {configured} by config.json, not {swiglu}"
        raise UnsupportedError(f"{self.output.root}: {what}; give what config.json says.")

    def _stored(
        self, fmt: Format, slicing: Slicing, experts: int
    ) -> Iterator[tuple[tuple[NumaSlice, str], TensorInfo]]:
        """Every tensor that the layer must have, with its exact size."""
        output = self.output
        for part in slicing.all_slices(range(experts)):
            for tensor in fmt.encoding.tensors(part.n, part.k):
                what, size = tensor.name, tensor.nbytes
                described = output.names.describe(part.id, what)
                stored = output.tensors.get((part.id, what))
                if stored is None:
                    because = f" ({'; '.join(self.damage[:3])})" if self.damage else ""
                    raise InputError(f"{output.root}: {described} is missing{because}; {AGAIN}.")
                where = f"{output.root / stored.file}: {described}"
                if stored.nbytes != size or stored.file in output.damaged:
                    why = output.damaged.get(stored.file) or f"holds {stored.nbytes} bytes, not {size}"
                    raise InputError(f"{where}: {why}; {AGAIN}.")
                # kt-kernel's scripts give flat tensors of AMXINT4 and AMXINT8 other dtypes, and do not look at them.
                if len(tensor.shape) > 1 and (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                    here, required = (f"{t.dtype} {list(t.shape)}" for t in (stored, tensor))
                    raise InputError(f"{where} is {here}, must be {required}; {AGAIN}.")
                yield (part, what), stored

    def _view(self, stored: TensorInfo) -> Bytes:
        path = self.output.root / stored.file
        mapped = self.files.map(path, path.stat().st_size)
        if stored.start + stored.nbytes > len(mapped):
            raise InputError(f"{path}: became shorter since it was opened; {AGAIN}.")
        if stored.dtype == "F32" and stored.start % 4:
            raise InputError(f"{path}: {stored.name} does not begin at a multiple of 4 bytes; {AGAIN}.")
        return np.ndarray((stored.nbytes,), np.uint8, buffer=mapped, offset=stored.start)

    def _copy(
        self, stored: dict[tuple[NumaSlice, str], TensorInfo], nodes: Sequence[int]
    ) -> dict[tuple[NumaSlice, str], Bytes]:
        def one(key: tuple[NumaSlice, str]) -> None:
            self.output.read(stored[key], out=views[key])

        with weights.blocks({key: one.nbytes for key, one in stored.items()}, self.measured.numa, nodes) as views:
            weights.in_parallel(one, views, machine.physical_cores())
        return views

    def _prepare(self, fmt: Format, part: NumaSlice, stored: Sequence[Bytes]) -> None:
        """Puts a part into the order of memory. Raises InputError for a scale or a code that the encoding has not."""

        def read(tensor: int, start: int = 0, stop: int | None = None) -> Bytes:
            return stored[tensor][start:stop]

        encoding, arrange = fmt.encoding, METHODS[fmt.name].arrange
        of_tensors = list(zip(encoding.tensors(part.n, part.k), encoding.defects, strict=True))[1:]
        found = [(tensor.name, defect(read, part.n, part.k)) for tensor, defect in of_tensors if defect is not None]
        try:
            if arrange is not None:
                arrange(stored, part.n, part.k)
        except ValueError as error:
            found.append(("weight", str(error)))
        for name, what in found:
            if what:
                path = self.output.root / self.output.tensors[part.id, name].file
                raise InputError(f"{path}: {self.output.names.describe(part.id, name)}: {what}; {AGAIN}.")


def _may_be_limited(method: str) -> bool:
    return method in METHODS and LIMIT in METHODS[method].swiglu


@functools.lru_cache(maxsize=8)
def _opened(path: Path, as_it_is: frozenset[weights.Status]) -> Converted:
    output = open_output(path)
    parts = [0] * (1 + max((place.node for place, _ in output.tensors), default=0))
    for (place, _), stored in output.tensors.items():
        parts[place.node] += stored.nbytes
    memory = sum(parts) < ROOMY * weights.memory_available(), machine.node_memory_available()
    return Converted(path, output, measure(output), MappedFiles(may_lose=True), tuple(parts), *memory)


def open_converted(path: Path) -> Converted:
    """A converted directory, read again only if a file of it changes."""
    if not path.is_dir():
        raise UnsupportedError(f"{path}: is no directory; give one of `ktconvert cpu` or kt-kernel, or a GGUF file.")
    opened = _opened(path.resolve(), weights.contents(path))
    return opened if opened.path == path else replace(opened, path=path)
