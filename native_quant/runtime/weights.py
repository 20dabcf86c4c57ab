"""The packed weights of one layer where C can read them: mapped files, a copy on huge pages, or packed on the spot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files.mapped import MappedFiles
from ktconvert.layouts.outputs import FORMATS, PROJECTIONS, Format
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.legal import require_legal
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.layouts.outputs.output import AGAIN, Output
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import machine, sigbus
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.native_quant.runtime import scales
from ktconvert.native_quant.runtime.blocks import Bytes, blocks, memory_available, warn_of_shortages
from ktconvert.native_quant.runtime.contents import Status, contents
from ktconvert.native_quant.runtime.metadata_checks import require_as_in_manifest, require_as_in_metadata
from ktconvert.native_quant.runtime.methods import METHODS, Method
from ktconvert.native_quant.runtime.parallel import in_parallel
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.requirements import Requirements
from ktconvert.native_quant.runtime.swiglu import PLAIN, Swiglu

F32 = npt.NDArray[np.float32]

MEMORY = ("auto", "map", "copy")
ROOMY = 0.8  # share of the available memory that copies may take


@dataclass(frozen=True)
class LayerWeights:
    """A layer's experts, packed: E experts of sizes H and I in T parts.

    method  of the runtime
    arrays  part of a matrix -> its tensors: codes, and scales if it has any; they own their memory or keep it alive
    """

    method: str
    grid: ExpertGrid
    experts: int
    arrays: dict[Part, tuple[Bytes, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return sum(data.nbytes for stored in self.arrays.values() for data in stored)

    def require_whole(self) -> None:
        """Raises InputError where bytes of a mapped file could not be read: what was computed with them is wrong."""
        each = (data for stored in self.arrays.values() for data in stored)
        if file := sigbus.lost((data.__array_interface__["data"][0], data.nbytes) for data in each):
            raise InputError(
                f"{file}: became shorter or could not be read after layer {self.grid.layer} was loaded; "
                "put the file back or check the disk, then load the model again."
            )


def layers_of(path: Path) -> list[int]:
    """The layers whose experts a converted directory holds."""
    return sorted(opened_output(path).measured.shapes)


def require_computable(path: Path) -> None:
    """Raises UnsupportedError for a directory of another kind, or of a method that the kernels do not compute."""
    measured = opened_output(path).measured
    if measured.fmt is None or measured.method not in METHODS:
        raise UnsupportedError(
            f"{path}: its method is {measured.method}, which this runtime cannot compute; "
            "convert the model with `ktconvert cpu`."
        )


def config_of(path: Path) -> dict[str, Any]:
    """config.json of a converted directory; {} where there is none."""
    return opened_output(path).output.config


def swiglu_of(path: Path, layer: int) -> Swiglu:
    """What a layer's experts compute by config.json, as far as their method can."""
    found = opened_output(path)
    recorded = (metadata.get("activation") for metadata in found.output.metadata.values())
    activation, method = next(filter(None, recorded), "silu"), METHODS.get(found.measured.method)
    return method.swiglu_of(found.output.config, activation, layer) if method else PLAIN


def linears(path: Path, packed: LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
    """Gate, up and down of each NUMA part of an expert, decoded; one part in memory at a time."""
    encoding = METHODS[packed.method].encoding
    assert encoding is not None
    by_part = zip(*(packed.grid.parts(expert, projection) for projection in PROJECTIONS), strict=True)
    for parts in by_part:
        gate, up, down = (encoding.decode(packed.arrays[part], part.n, part.k, slice(None)) for part in parts)
        yield gate, up, down


def shape_of(path: Path, layer: int) -> tuple[int, int, int]:
    """E, H and I of a layer that has experts."""
    return opened_output(path).measured.shapes[layer]


def damage_of(path: Path) -> list[str]:
    """The files of a converted directory that are damaged or missing, one text each."""
    return _unreadable(opened_output(path).output)


def require_readable(path: Path, layer: int) -> None:
    """Raise InputError where a missing layer may be in a file that is damaged or missing."""
    if because := "; ".join(damage_of(path)[:3]):
        raise InputError(f"{path}: layer {layer} cannot be read ({because}); {AGAIN}.")


def _unreadable(output: Output) -> list[str]:
    """The damaged files of an output, and the shards of its index that are missing, one text each."""
    named = set((output.weight_map or {}).values())
    return [*output.damaged.values(), *(f"{shard} is missing" for shard in sorted(named.difference(output.shards)))]


def load(path: Path, layer: int, pool: Pool, required: Requirements) -> LayerWeights:
    """One layer of a converted directory, merged or loose, ours or kt-kernel's, in the memory of the pool's nodes.

    Raises UnsupportedError where the files are not as wanted or where the directory is of another kind, InputError
    where the layer is damaged or incomplete.
    """
    found = opened_output(path)
    output, measured = found.output, found.measured
    require_computable(path)
    assert measured.fmt is not None
    if layer not in measured.shapes:
        require_readable(path, layer)
        raise UnsupportedError(
            f"{path}: holds no layer {layer}; it has layers {ranges(list(measured.shapes)) or 'none'}. "
            "Give one of these, or convert again with it."
        )
    count, h, i = measured.shapes[layer]
    required.require_method(path, layer, measured.method, "byte counts")
    required.require_sizes(path, layer, (count, h, i), "byte counts")
    require_as_in_metadata(output, layer, measured, required.swiglu)
    require_as_in_manifest(output, measured)
    grid = ExpertGrid(layer, h, i, measured.numa)
    check_sizes(measured.fmt, grid)
    stored = dict(_stored(output, measured.fmt, grid, count))
    memory = required.memory
    if memory == "auto":
        memory = "copy" if found.is_roomy or output.loose else "map"
    if memory == "map" and not output.loose:
        views = {key: _view(output, found.files, one) for key, one in stored.items()}
    else:  # one mapping per loose file would exceed the kernel's limit
        warn_of_shortages(str(path), found.part_bytes, pool.nodes, found.left)
        views = _copy(output, stored, measured.numa, pool.nodes)
    packed = LayerWeights(measured.method, grid, count, arrays_of(measured.fmt.encoding.tensors, views))
    check = functools.partial(scales.require_numbers, output, measured.fmt.encoding)
    in_parallel(lambda item: check(*item), packed.arrays.items(), machine.physical_cores())
    packed.require_whole()
    return packed


def pack(
    gate: npt.NDArray[np.uint16],
    up: npt.NDArray[np.uint16],
    down: npt.NDArray[np.uint16],
    method: Method,
    layer: int,
    parts: int,
    pool: Pool,
) -> LayerWeights:
    """Experts quantized on the spot from BF16 bits, by the pool's number of threads and in the memory of its nodes:
    gate and up [E, I, H], down [E, H, I].

    Raises kernels.NonFinite where a weight is infinite or NaN, ValueError for shapes and types that do not fit, and for
    a method that only checkpoints hold.
    """
    encoding = method.encoding
    if encoding is None:
        raise ValueError(f"nothing packs BF16 numbers into {method.name}: load a checkpoint that holds it")
    for name, array in (("gate", gate), ("up", up), ("down", down)):
        if array.dtype != np.uint16 or array.ndim != 3:
            raise ValueError(
                f"{name} must be uint16 (BF16 bits) with three dimensions, not {array.dtype} {array.shape}"
            )
    experts, i, h = gate.shape
    if up.shape != (experts, i, h) or down.shape != (experts, h, i) or not experts:
        raise ValueError(
            f"gate and up must be [E, I, H] and down [E, H, I], not {gate.shape}, {up.shape} and {down.shape}"
        )
    grid = ExpertGrid(layer, h, i, parts)
    check_sizes(FORMATS[method.name], grid)
    linears = dict(zip(PROJECTIONS, (gate, up, down), strict=True))
    sizes = {
        (part, tensor.name): tensor.nbytes
        for part in grid.all_parts(range(experts))
        for tensor in method.tensors(part.n, part.k)
    }

    def one(item: tuple[Part, tuple[Bytes, ...]]) -> None:
        part, out = item
        encoding.quantize(part.of(Matrix(linears[part.projection][part.expert], BF16), parts), out)

    with blocks(sizes, parts, pool.nodes) as views:
        arrays = arrays_of(method.tensors, views)
        in_parallel(one, arrays.items(), pool.threads)
    return LayerWeights(method.name, grid, experts, arrays)


def check_sizes(fmt: Format, grid: ExpertGrid) -> None:
    """Raises UnsupportedError where the kernels cannot compute a layer of this size."""
    require_legal(fmt, grid.hidden, grid.intermediate, grid.numa)
    check_limits(fmt.name, grid)


def check_limits(method: str, grid: ExpertGrid) -> None:
    """Raises UnsupportedError for more columns than a sum can have, and for more NUMA parts than a forward adds up."""
    if grid.numa > lib.KTQ_MOST_PARTS:
        raise UnsupportedError(
            f"layer {grid.layer} has {grid.numa} NUMA parts, and this runtime adds up {lib.KTQ_MOST_PARTS} at most; "
            "make fewer (`ktconvert resplit`)."
        )
    if max(grid.hidden, grid.intermediate // grid.numa) > lib.KTQ_MOST_COLUMNS:
        raise UnsupportedError(
            f"a hidden or intermediate size above {lib.KTQ_MOST_COLUMNS} overflows the sums of {method}; "
            "this runtime cannot compute it."
        )


@dataclass(frozen=True)
class Opened:
    """An output, its sizes and mappings, the bytes of each NUMA part, and what memory was like before the first layer:
    whether it holds all of them, and what each NUMA node had left (bytes).
    """

    output: Output
    measured: Measure
    files: MappedFiles
    part_bytes: tuple[int, ...]
    is_roomy: bool
    left: Mapping[int, int]


@functools.lru_cache(maxsize=8)
def _opened_at(path: Path, as_it_is: frozenset[Status]) -> Opened:
    output = open_output(path)
    parts = [0] * (1 + max((place.numa for place, _ in output.tensors), default=0))
    for (place, _), stored in output.tensors.items():
        parts[place.numa] += stored.nbytes
    is_roomy = sum(parts) < ROOMY * memory_available()
    return Opened(
        output, measure(output), MappedFiles(may_lose=True), tuple(parts), is_roomy, machine.node_memory_available()
    )


def opened_output(path: Path) -> Opened:
    """An output, read again only if a file of it changes."""
    if path.suffix == ".gguf" or (path.is_dir() and not is_output(path) and any(path.glob("*.gguf"))):
        raise UnsupportedError(
            f"{path}: holds experts as GGUF (kt-kernel's method LLAMAFILE), which no method of this runtime computes; "
            "convert the model with `ktconvert cpu`."
        )
    if not path.is_dir():
        raise UnsupportedError(f"{path}: is no directory; give one that `ktconvert cpu` or kt-kernel wrote.")
    return _opened_at(path.resolve(), contents(path))


def _stored(
    output: Output, fmt: Format, grid: ExpertGrid, experts: int
) -> Iterator[tuple[tuple[Part, str], TensorInfo]]:
    """Every tensor that the layer must have, with its exact size."""
    for part in grid.all_parts(range(experts)):
        for tensor in fmt.encoding.tensors(part.n, part.k):
            what, size = tensor.name, tensor.nbytes
            described = output.names.describe(part.place, what)
            stored = output.tensors.get((part.place, what))
            if stored is None:
                because = "; ".join(_unreadable(output)[:3])
                raise InputError(f"{output.root}: {described} is missing{f' ({because})' if because else ''}; {AGAIN}.")
            if stored.nbytes != size or stored.file in output.damaged:
                why = output.damaged.get(stored.file) or f"holds {stored.nbytes} bytes, not {size}"
                raise InputError(f"{output.root / stored.file}: {described}: {why}; {AGAIN}.")
            # kt-kernel's scripts give flat tensors of AMXINT4 and AMXINT8 other dtypes, and do not look at them.
            if len(tensor.shape) > 1 and (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                here, required = (f"{t.dtype} {list(t.shape)}" for t in (stored, tensor))
                raise InputError(f"{output.root / stored.file}: {described} is {here}, must be {required}; {AGAIN}.")
            yield (part, what), stored


def _view(output: Output, files: MappedFiles, stored: TensorInfo) -> Bytes:
    path = output.root / stored.file
    mapped = files.map(path, path.stat().st_size)
    if stored.start + stored.nbytes > len(mapped):
        raise InputError(f"{path}: became shorter since it was opened; {AGAIN}.")
    if stored.dtype == "F32" and stored.start % 4:
        raise InputError(f"{path}: {stored.name} does not begin at a multiple of 4 bytes; {AGAIN}.")
    return np.ndarray((stored.nbytes,), np.uint8, buffer=mapped, offset=stored.start)


def _copy(
    output: Output, stored: dict[tuple[Part, str], TensorInfo], parts: int, nodes: Sequence[int]
) -> dict[tuple[Part, str], Bytes]:
    def one(key: tuple[Part, str]) -> None:
        output.read(stored[key], out=views[key])

    with blocks({key: one.nbytes for key, one in stored.items()}, parts, nodes) as views:
        in_parallel(one, views, machine.physical_cores())
    return views


def arrays_of(
    tensors: Callable[[int, int], tuple[TensorInfo, ...]], views: dict[tuple[Part, str], Bytes]
) -> dict[Part, tuple[Bytes, ...]]:
    """The tensors of each part. tensors: (n, k) -> what a part has, in order."""
    parts = dict.fromkeys(part for part, _ in views)
    return {part: tuple(views[part, tensor.name] for tensor in tensors(part.n, part.k)) for part in parts}
