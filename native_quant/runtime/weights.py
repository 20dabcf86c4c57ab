"""The packed weights of one layer where C can read them, packed on the spot or by loaders, and what these share."""

from __future__ import annotations

import functools
import itertools
import mmap
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs import FORMATS, Format
from ktconvert.layouts.outputs.format import require_legal
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import machine, placement, sigbus
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.arrays import F32, U16, Bytes
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.native_quant.runtime.methods import PLAIN, Method, Swiglu
from ktconvert.native_quant.runtime.pool import Pool

Status = tuple[str, int, int, int]
Item = TypeVar("Item")


@dataclass(frozen=True)
class LayerWeights:
    """A layer's experts, packed: E experts of sizes H and I in T parts.

    rows    projection -> the row of its method; all have the same name
    arrays  part of a matrix -> its tensors: codes, and scales if it has any; they own their memory or keep it alive.
            Of the transposes, too, where a backward is to multiply by them
    """

    rows: Mapping[str, Method]
    slicing: Slicing
    experts: int
    arrays: dict[NumaSlice, tuple[Bytes, ...]]

    @property
    def method(self) -> str:
        return self.rows["gate"].name

    @property
    def description(self) -> str:
        """The types of codes and scales, for reports."""
        return "; ".join(dict.fromkeys(row.weights for row in self.rows.values()))

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for stored in self.arrays.values() for data in stored)

    def linears(self, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        """Yield gate, up and down of each NUMA slice of an expert, decoded; the method has an encoding."""
        encoding = self.rows["gate"].encoding
        assert encoding is not None
        slicing = replace(self.slicing, backward=False)
        for parts in zip(*(slicing.slices(expert, projection) for projection in PROJECTIONS), strict=True):
            gate, up, down = (encoding.decode(self.arrays[part], part.n, part.k, slice(None)) for part in parts)
            yield gate, up, down

    def check_reads(self) -> None:
        """Raises InputError where bytes of a mapped file could not be read: what was computed with them is wrong."""
        each = (data for stored in self.arrays.values() for data in stored)
        if file := sigbus.find_unreadable_file((data.__array_interface__["data"][0], data.nbytes) for data in each):
            what = f"became shorter or could not be read after layer {self.slicing.layer} was loaded"
            raise InputError(f"{file}: {what}; put the file back or check the disk, then load the model again.")


Shape = tuple[int, ...]


def shapes_of(experts: int, hidden: int, intermediate: int) -> list[Shape]:
    """Those of a layer's gate and up [E, I, H] and down [E, H, I]."""
    rows = experts, intermediate, hidden
    return [rows, rows, (experts, hidden, intermediate)]


def bits_of(shapes: Iterable[Shape], *tensors: Any) -> list[U16]:
    """BF16 bits of torch's gate, up and down, which are rounded. Raises ValueError for other shapes."""
    import torch

    for name, shape, tensor in zip(PROJECTIONS, shapes, tensors, strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}_proj must have shape {shape}, not {tuple(tensor.shape)}")
    return [x.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy() for x in tensors]


def pack(
    gate: U16, up: U16, down: U16, method: Method, layer: int, parts: int, pool: Pool, transposed: bool = False
) -> LayerWeights:
    """Experts quantized on the spot from BF16 bits, by the pool's number of threads and in the memory of its nodes:
    gate and up [E, I, H], down [E, H, I]; their transposes, too, if `transposed`.

    Raises kernels.NonFinite where a weight is infinite or NaN, ValueError for shapes and types that do not fit, and for
    a method that only checkpoints hold.
    """
    encoding = method.encoding
    if encoding is None:
        raise ValueError(f"nothing packs BF16 numbers into {method.name}: load a checkpoint that holds it")
    for name, array in (("gate", gate), ("up", up), ("down", down)):
        if array.dtype != np.uint16 or array.ndim != 3:
            actual = f"{array.dtype} {array.shape}"
            raise ValueError(f"{name} must be uint16 (BF16 bits) with three dimensions, not {actual}")
    experts, i, h = gate.shape
    if up.shape != (experts, i, h) or down.shape != (experts, h, i) or not experts:
        shapes = f"{gate.shape}, {up.shape} and {down.shape}"
        raise ValueError(f"gate and up must be [E, I, H] and down [E, H, I], not {shapes}")
    linears = {
        name: [Matrix(one, BF16) for one in array] for name, array in zip(PROJECTIONS, (gate, up, down), strict=True)
    }
    return fill_with(method, Slicing(layer, h, i, parts, transposed), linears, encoding.quantize, pool)


def fill(
    rows: Mapping[str, Method],
    slicing: Slicing,
    experts: int,
    writer: Callable[[int, str], Callable[[NumaSlice, Sequence[Bytes]], None]],
    pool: Pool,
) -> LayerWeights:
    """Weights in the memory of the pool's nodes, written by its number of threads. writer: of an expert's projection
    what writes the tensors of each of its parts. Raises UnsupportedError for sizes that do not fit.
    """
    check_limits(rows["gate"].name, slicing)

    def one(item: tuple[int, str]) -> None:
        write = writer(*item)
        for part in slicing.slices(*item):
            write(part, arrays[part])

    parts = [(part, rows[part.projection].tensors(part.n, part.k)) for part in slicing.all_slices(range(experts))]
    sizes = {(part, tensor.name): tensor.nbytes for part, tensors in parts for tensor in tensors}
    with blocks(sizes, slicing.numa, pool.nodes) as views:
        arrays = {part: tuple(views[part, tensor.name] for tensor in tensors) for part, tensors in parts}
        in_parallel(one, itertools.product(range(experts), PROJECTIONS), pool.threads)
    return LayerWeights(rows, slicing, experts, arrays)


def fill_with(
    method: Method,
    slicing: Slicing,
    linears: Mapping[str, Sequence[Matrix]],
    put: Callable[[Matrix, Sequence[Bytes]], None],
    pool: Pool,
) -> LayerWeights:
    """The same of whole linears, one of each expert by projection, of which `put` writes the tensors of a part."""
    require_legal(FORMATS[method.name], slicing.hidden, slicing.intermediate, slicing.numa)

    def writer(expert: int, projection: str) -> Callable[[NumaSlice, Sequence[Bytes]], None]:
        return lambda part, out: put(part.cut(linears[projection][expert]), out)

    return fill(dict.fromkeys(PROJECTIONS, method), slicing, len(linears["gate"]), writer, pool)


def write_loose(folder: Path, fmt: Format, part: NumaSlice, stored: Iterable[Bytes]) -> None:
    """Write the tensors of a part as kt-kernel's .kt files into a layer's folder; not synced."""
    for tensor, data in zip(fmt.encoding.tensors(part.n, part.k), stored, strict=True):
        path = folder / str(fmt.loose_path(part, tensor))
        path.parent.mkdir(parents=True, exist_ok=True)
        publish.write_file(path, data.data, sync=False)


def check_limits(method: str, slicing: Slicing) -> None:
    """Raises UnsupportedError for more columns than a sum can have, and for more NUMA slices than a forward adds up."""
    if slicing.numa > lib.KTQ_MOST_PARTS:
        numa, most = slicing.numa, lib.KTQ_MOST_PARTS
        why = f"layer {slicing.layer} has {numa} NUMA slices, and this runtime adds up {most} at most"
        raise UnsupportedError(f"{why}; make fewer (`ktconvert resplit`).")
    if max(slicing.hidden, *slicing.widths) > lib.KTQ_MOST_COLUMNS:
        why = f"a hidden or intermediate size above {lib.KTQ_MOST_COLUMNS} overflows the sums of {method}"
        raise UnsupportedError(f"{why}; this runtime cannot compute it.")


@dataclass(frozen=True)
class Requirements:
    """What a caller expects of a layer's experts, as Experts.load explains it. None: whatever the files have.
    transposed: whether it multiplies by the transposes that `cpu --save-backward-weights` wrote.
    """

    method: str | None = None
    num_experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    parts: int | None = None
    memory: str = "auto"
    swiglu: Swiglu = PLAIN
    transposed: bool | None = False

    def require(self, path: Path, layer: int, by: str, shape: tuple[int, int, int], method: str | None = None) -> None:
        """Raises UnsupportedError where the files' method or sizes (E, H, I) are others. by: how these are known."""
        names = ("method", "num_experts", "hidden_size", "moe_intermediate_size")
        required = (method and self.method, self.num_experts, self.hidden, self.intermediate)
        for name, value, actual in zip(names, required, (method, *shape), strict=True):
            if value is not None and value != actual:
                has = f"layer {layer} has {name} {actual} by its {by}, not {value}"
                raise UnsupportedError(f"{path}: {has}; give this model's directory, or {name}={actual}.")


def contents(path: Path) -> frozenset[Status]:
    """What changes with a directory, or that of a file: name, bytes, time (ns), inode of weights, JSON, folders."""
    folder = path if path.is_dir() else path.parent
    return frozenset(filter(None, (_status(entry) for entry in folder.iterdir() if not entry.name.startswith("."))))


def _status(path: Path) -> Status | None:
    try:
        status = path.stat()
    except OSError:  # a link to nothing
        return path.name, 0, 0, 0
    if path.suffix not in (".safetensors", ".gguf", ".json") and not stat.S_ISDIR(status.st_mode):
        return None
    return path.name, status.st_size, status.st_mtime_ns, status.st_ino


def in_parallel(work: Callable[[Item], None], items: Iterable[Item], threads: int) -> None:
    """Runs work(item) for all items in threads, in their order; begins none after an exception, and raises the first
    item's. Each thread takes the next item itself: a future for each would cost a tenth of packing a layer.
    """
    left = deque(enumerate(items))
    failures: list[tuple[int, Exception]] = []

    def take() -> None:
        while left:
            try:
                number, item = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                work(item)
            except Exception as error:
                failures.append((number, error))
                left.clear()

    with ThreadPoolExecutor(threads, initializer=unbind_thread) as executor:
        takers = [executor.submit(take) for _ in range(min(threads, len(left)))]
        try:
            for taker in takers:
                taker.result()
        finally:
            left.clear()  # after an interrupt
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]


# --- memory --------------------------------------------------------------------------------------

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # a cache line, at which the kernels read fastest


def memory_available() -> int:
    """The memory that this process can fill now (bytes): that of some nodes only where a policy or a cpuset says so."""
    by_node, total = machine.node_memory_available(), machine.memory_available()
    nodes = by_node.keys() & machine.memory_nodes()
    with suppress(OSError):
        policy = placement.read_policy()
        if policy.mode == "bind":
            nodes &= policy.nodes
    return total if nodes == by_node.keys() else min(total, sum(by_node[node] for node in nodes))


def binds_memory() -> bool:
    """Whether blocks are placed: several nodes, no policy of the user, and the kernel permits it (or a warning)."""
    if len(machine.memory_nodes()) < 2:
        return False
    if refusal := placement.explain_denial():
        _warn_once(refusal)
    return not refusal and placement.read_policy().mode == "default"


def warn_of_shortages(where: str, part_bytes: Sequence[int], nodes: Sequence[int], left: Mapping[int, int]) -> None:
    """A warning, once, if blocks will be placed and the pool's nodes have less left than their parts will take."""
    if (shortages := placement.describe_shortages(part_bytes, nodes, left)) and binds_memory():
        _warn_once(
            f"{where}: not all of it fits the NUMA nodes of its threads ({shortages}): the rest lies on other nodes "
            "and is read more slowly. Free memory there, or convert with another --threadpool-count."
        )


@contextmanager
def blocks(
    sizes: Mapping[tuple[NumaSlice, str], int], parts: int, nodes: Sequence[int]
) -> Iterator[dict[tuple[NumaSlice, str], Bytes]]:
    """Memory for tensors of these sizes (bytes), to be filled inside the context. nodes: those of the pool that will
    compute; if memory is placed, each part's block ends on the nodes of its threads, as far as these have space.
    """
    is_placed, views = binds_memory(), dict[tuple[NumaSlice, str], Bytes]()
    on_one_node: list[tuple[Bytes, int]] = []
    for part in range(parts):
        mine = {key: size for key, size in sizes.items() if key[0].node == part}
        block = _huge_pages(sum(map(_aligned, mine.values())))
        if is_placed:
            homes = placement.slice_nodes(part, parts, nodes)
            placement.place(block, homes)
            if len(homes) == 1:
                on_one_node.append((block, homes[0]))
        start = 0
        for key, size in mine.items():
            views[key] = block[start : start + size]
            start += _aligned(size)
    yield views
    for block, node in on_one_node:
        if machine.node_memory_available().get(node, 0) > block.nbytes:
            with suppress(OSError):  # some pages cannot be moved
                placement.gather(block, node)


def _huge_pages(size: int) -> Bytes:
    """`size` bytes that begin on the boundary of a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
