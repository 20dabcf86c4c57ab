"""Packed weights of one layer in memory that C reads: packing on the spot, loading, and placement on NUMA nodes."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ktconvert.layouts.errors import ArgumentError, InputError, UnsupportedError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs import FORMATS, Format
from ktconvert.layouts.outputs.format import require_legal
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo
from ktconvert.native_quant import kernels, machine, placement, sigbus
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.arrays import F32, I64, U16, Array, Bytes
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.native_quant.runtime.arguments import FLOAT32, INTEGERS, UINT16, advise, describe, require_array
from ktconvert.native_quant.runtime.methods import Method
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.warn import warn_once

Item = TypeVar("Item")
WriteSlice = Callable[[NumaSlice, Sequence[Bytes]], None]  # writes the tensors of a slice
SliceTensors = Mapping[NumaSlice, tuple[Bytes, ...]]  # the tensors of slices, without biases

HUGE_PAGE = 2 << 20
ORDER_DTYPES = {f"torch.{name}" for name in INTEGERS}
ALIGNMENT = 64  # a cache line; the kernels read aligned tensors fastest


@dataclass(frozen=True)
class LayerWeights:
    """Packed experts of a layer: E experts of sizes H and I in T NUMA slices.

    methods  projection -> the row of METHODS that computes it; all have the same name
    arrays   NUMA slice -> its tensors: codes, and scales if there are any. They own their memory or keep it alive.
             Includes the transposes if a backward multiplies by them
    biases   NUMA slice -> a bias for each of its rows; {} if experts have none
    missing  experts (numbers in the file) that are not loaded: their arrays are addresses without memory
    fill     function that reads the tensors of slices from the files; needed only if experts may be missing
    mapped   whether arrays are mapped files
    read_ahead
             whether these files exceed the memory, so that a forward requests its experts' pages before it computes
    """

    methods: Mapping[str, Method]
    slicing: Slicing
    experts: int
    arrays: dict[NumaSlice, tuple[Bytes, ...]]
    biases: Mapping[NumaSlice, F32] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    fill: Callable[[SliceTensors], None] | None = None
    mapped: bool = False
    read_ahead: bool = False
    _failures: list[BaseException] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def method(self) -> str:
        return self.methods["up"].name

    @property
    def description(self) -> str:
        """The types of codes and scales, for reports."""
        return "; ".join(dict.fromkeys(row.description for row in self.methods.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the loaded experts, and of all biases."""
        return sum(data.nbytes for data in self._tensors())

    def _tensors(self) -> Iterator[Array]:
        loaded = (stored for numa_slice, stored in self.arrays.items() if numa_slice.expert not in self.missing)
        yield from (data for stored in loaded for data in stored)
        yield from self.biases.values()

    def load(self, experts: Iterable[int]) -> None:
        """Load those of these experts (numbers in the file) that are missing. They stay loaded.

        Raises InputError if the files have changed or cannot be read.
        """
        with self._lock:
            if needed := self.missing.intersection(experts):
                assert self.fill is not None
                self.fill(select_experts(self.arrays, needed))
                self.missing.difference_update(needed)

    def record_failure(self, error: BaseException) -> None:
        """Keep the error of a load() that C started: results computed since then are wrong, and check_reads raises."""
        self._failures.append(error)

    def read_expert(self, expert: int) -> SliceTensors:
        """Return the tensors of an expert. If it is missing, they are in temporary memory. Raises errors of load."""
        if self.mapped:
            self.load([expert])
        arrays = select_experts(self.arrays, [expert])
        if expert in self.missing:
            assert self.fill is not None
            arrays = {numa_slice: tuple(map(np.empty_like, stored)) for numa_slice, stored in arrays.items()}
            self.fill(arrays)
        return arrays

    def linears(self, expert: int) -> Iterator[tuple[F32, ...]]:
        """Yield the linears of each NUMA slice of an expert, decoded; the method has an encoding."""
        encoding = self.methods["up"].encoding
        assert encoding is not None
        arrays = self.read_expert(expert)
        slicing = replace(self.slicing, backward=False)
        for slices in zip(*(slicing.slices(expert, projection) for projection in slicing.projections), strict=True):
            yield tuple(
                encoding.decode(arrays[numa_slice], numa_slice.n, numa_slice.k, slice(None)) for numa_slice in slices
            )

    def check_reads(self) -> None:
        """Raise InputError if bytes of a file could not be read: results computed with them are wrong."""
        if self._failures:
            raise self._failures[0]
        if not sigbus.has_unreadable_file():
            return
        addresses = ((data.__array_interface__["data"][0], data.nbytes) for data in self._tensors())
        if file := sigbus.find_unreadable_file(addresses):
            problem = f"became shorter or could not be read after layer {self.slicing.layer} was loaded"
            raise InputError(f"{file}: {problem}; restore the file or check the disk, then load the model again.")


Shape = tuple[int, ...]


def projection_shapes(experts: int, hidden: int, intermediate: int) -> list[Shape]:
    """Return the shapes of a layer's gate and up, [E, I, H], and down, [E, H, I]."""
    rows = experts, intermediate, hidden
    return [rows, rows, (experts, hidden, intermediate)]


def to_bf16_bits(shapes: Iterable[Shape], *tensors: Any) -> list[Any]:
    """Round torch tensors gate (None stays None), up and down to BF16 and return their bits.

    Raises ArgumentError for other shapes.
    """
    import torch

    bits: list[Any] = []
    for name, shape, tensor in zip(PROJECTIONS, shapes, tensors, strict=True):
        is_given = tensor is not None or name != "gate"
        if is_given and not (isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape):
            raise ArgumentError(f"{name}_proj must be a tensor {list(shape)}, not {describe(tensor)}")
        rounded = None if tensor is None else tensor.detach().to("cpu", torch.bfloat16).contiguous()
        bits.append(None if rounded is None else rounded.view(torch.uint16).numpy())
    return bits


def to_order(physical_to_logical_map_cpu: Any, experts: int) -> I64 | None:
    """Return the map of a torch program, integers [E] or None, as a NumPy array. Raises ArgumentError."""
    import torch

    value = physical_to_logical_map_cpu
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or str(value.dtype) not in ORDER_DTYPES or tuple(value.shape) != (experts,):
        needed = f"a tensor of integers [{experts}], or None"
        raise ArgumentError(f"physical_to_logical_map_cpu must be {needed}, not {describe(value)}")
    return value.to("cpu", torch.int64).numpy()


def pack(
    gate: U16 | None,
    up: U16,
    down: U16,
    method: Method,
    layer: int,
    numa: int,
    pool: Pool,
    *,
    transposed: bool = False,
    biases: Mapping[str, F32] | None = None,
) -> LayerWeights:
    """Quantize experts from BF16 bits, with the pool's number of threads and in the memory of its nodes.

    gate        [E, I, H]; None if experts have no gate
    up, down    [E, I, H] and [E, H, I]
    transposed  whether to pack their transposes, too
    biases      projection -> [E, I] or, for down, [E, H]; None if experts have none

    Raises ArgumentError for an infinite or NaN weight, for wrong shapes and types, and for a method whose weights exist
    only in checkpoints.
    """
    encoding = method.encoding
    if encoding is None:
        raise ArgumentError(f"BF16 numbers cannot be packed into {method.name}; load a checkpoint of this method")
    arrays = dict[str, Any](zip(PROJECTIONS, (gate, up, down), strict=True))
    if gate is None:
        del arrays["gate"]
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.uint16 or array.ndim != 3:
            needed = "a NumPy array of uint16 (the bits of BF16 numbers) with three dimensions"
            raise ArgumentError(f"{name} must be {needed}, not {describe(array)}{advise(name, array, (UINT16,))}")
    experts, i, h = up.shape
    shapes = dict(zip(PROJECTIONS, projection_shapes(experts, h, i), strict=True))
    if not experts or any(array.shape != shapes[name] for name, array in arrays.items()):
        given = " and ".join(str(list(array.shape)) for array in arrays.values())
        raise ArgumentError(f"gate and up must be [E, I, H] and down [E, H, I], not {given}")
    linears = {name: [Matrix(expert, BF16) for expert in array] for name, array in arrays.items()}
    slicing = Slicing(layer, h, i, numa, transposed, gated=gate is not None)
    packed = pack_linears(method, slicing, linears, encoding.quantize, pool)
    if not biases:
        return packed
    _require_biases(biases, {name: array.shape for name, array in arrays.items()})
    return replace(packed, biases=cut_biases(slicing, experts, lambda expert, name: biases[name][expert]))


def _require_biases(biases: Mapping[str, F32], shapes: Mapping[str, Shape]) -> None:
    """Raise ArgumentError unless each linear, [E, n, k], has a bias, finite float32 [E, n], and there are no others."""
    if not isinstance(biases, Mapping):
        raise ArgumentError(f"biases must be a dictionary with {', '.join(shapes)}, not {describe(biases)}")
    if biases.keys() != shapes.keys():
        raise ArgumentError(f"biases must be those of {', '.join(shapes)}, not of {', '.join(biases)}")
    for name, bias in biases.items():
        require_array(f"the bias of {name}", bias, (FLOAT32,), shapes[name][:2])
        if not np.isfinite(bias).all():
            raise ArgumentError(f"the bias of {name} must be finite, and has a number that is not")


def cut_biases(slicing: Slicing, experts: int, read_bias: Callable[[int, str], F32 | None]) -> dict[NumaSlice, F32]:
    """Return the biases of the rows of each slice; {} if experts have none.

    read_bias  (expert, projection) -> the bias of the whole linear, [n], or None
    """
    biases = dict[NumaSlice, F32]()
    for item in itertools.product(range(experts), slicing.projections):
        if (bias := read_bias(*item)) is None:
            return {}
        biases |= {s: np.ascontiguousarray(s.cut_bias(bias)) for s in slicing.slices(*item)}
    return biases


def fill_layer(
    rows: Mapping[str, Method],
    slicing: Slicing,
    experts: int,
    make_writer: Callable[[int, str], WriteSlice],
    pool: Pool,
    missing: Collection[int] = (),
    open_files: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> LayerWeights:
    """Allocate a layer's weights in the memory of the pool's nodes and fill them with its number of threads.

    make_writer  (expert, projection) -> function that writes the tensors of each of its slices
    missing      experts that are not filled now
    open_files   context in which writers run
    Raises UnsupportedError for unsupported sizes.
    """
    check_limits(rows["up"].name, slicing)

    def fill(arrays: SliceTensors) -> None:
        def fill_linear(item: tuple[int, str]) -> None:
            write = make_writer(*item)
            for numa_slice in slicing.slices(*item):
                write(numa_slice, arrays[numa_slice])

        with open_files():
            run_parallel(fill_linear, dict.fromkeys((s.expert, s.projection) for s in arrays), pool.threads)

    tensors = {s: rows[s.projection].tensors(s.n, s.k) for s in slicing.all_slices(range(experts))}
    with allocate_blocks(tensors, slicing.numa, pool.nodes, missing) as arrays:
        fill(select_experts(arrays, set(range(experts)).difference(missing)))
    return LayerWeights(rows, slicing, experts, arrays, missing=set(missing), fill=fill if missing else None)


def select_experts(arrays: SliceTensors, experts: Collection[int]) -> SliceTensors:
    """Return the tensors of these experts."""
    return {numa_slice: stored for numa_slice, stored in arrays.items() if numa_slice.expert in experts}


def pack_linears(
    method: Method,
    slicing: Slicing,
    linears: Mapping[str, Sequence[Matrix]],
    write: Callable[[Matrix, Sequence[Bytes]], None],
    pool: Pool,
) -> LayerWeights:
    """Pack whole linears: projection -> one for each expert. write(linear, tensors): writes the tensors of a slice.

    Raises ArgumentError for an infinite or NaN weight.
    """
    sizes = slicing.hidden, slicing.intermediate, slicing.numa
    require_legal(FORMATS[method.name], *sizes, option="parts (threadpool_count)")

    def make_writer(expert: int, projection: str) -> WriteSlice:
        def write_slice(numa_slice: NumaSlice, out: Sequence[Bytes]) -> None:
            matrix = numa_slice.cut_linear(linears[projection][expert])
            try:
                write(matrix, out)
            except kernels.NonFinite as error:
                position = matrix.origin[0] + error.row, matrix.origin[1] + error.column
                row, column = reversed(position) if numa_slice.backward else position
                where = f"row {row}, column {column} of expert {expert}"
                raise ArgumentError(f"{projection} must be finite, but {where} is infinite or not a number") from None

        return write_slice

    return fill_layer(dict.fromkeys(PROJECTIONS, method), slicing, len(linears["up"]), make_writer, pool)


def write_loose(folder: Path, fmt: Format, numa_slice: NumaSlice, stored: Iterable[Bytes]) -> None:
    """Write the tensors of a slice as kt-kernel's .kt files into a layer's folder; not synced."""
    for tensor, data in zip(fmt.encoding.tensors(numa_slice.n, numa_slice.k), stored, strict=True):
        path = folder / str(fmt.loose_path(numa_slice, tensor))
        path.parent.mkdir(parents=True, exist_ok=True)
        publish.write_file(path, data.data, sync=False)


def check_limits(method: str, slicing: Slicing) -> None:
    """Raise UnsupportedError for more columns than a sum can have, and for more NUMA slices than a forward adds up."""
    if slicing.numa > lib.KTQ_MAX_SLICES:
        numa = slicing.numa
        limit = lib.KTQ_MAX_SLICES
        problem = f"layer {slicing.layer} has {numa} NUMA slices, and this runtime adds up {limit} at most"
        raise UnsupportedError(f"{problem}; make fewer (`ktconvert resplit`).")
    if max(slicing.hidden, *slicing.widths) > lib.KTQ_MAX_COLUMNS:
        problem = f"a hidden or intermediate size above {lib.KTQ_MAX_COLUMNS} overflows the sums of {method}"
        raise UnsupportedError(f"{problem}; this runtime cannot compute it.")


def run_parallel(work: Callable[[Item], None], items: Iterable[Item], threads: int) -> None:
    """Run work(item) for all items in threads, in their order.

    Starts no item after an exception, and raises that of the first item. Each thread takes the next item itself: a
    future for each item would cost a tenth of the time to pack a layer.
    """
    remaining = deque(enumerate(items))
    failures: list[tuple[int, Exception]] = []

    def run_items() -> None:
        while remaining:
            try:
                number, item = remaining.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                work(item)
            except Exception as error:
                failures.append((number, error))
                remaining.clear()

    with ThreadPoolExecutor(threads, initializer=unbind_thread) as executor:
        futures = [executor.submit(run_items) for _ in range(min(threads, len(remaining)))]
        try:
            for future in futures:
                future.result()
        finally:
            remaining.clear()  # no thread starts further items, also after an interrupt
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]


# --- memory: huge pages, a block for each NUMA slice on the node whose threads compute with it --------


def memory_available() -> int:
    """Return the memory that this process can fill now, in bytes, on the nodes that its policy and cpuset allow."""
    by_node = machine.node_memory_available()
    total = machine.memory_available()
    nodes = by_node.keys() & machine.memory_nodes()
    with suppress(OSError):
        policy = placement.read_policy()
        if policy.mode == "bind":
            nodes &= policy.nodes
    return total if nodes == by_node.keys() else min(total, sum(by_node[node] for node in nodes))


def binds_memory() -> bool:
    """Return whether blocks are placed on nodes: if there are several and the user has set no memory policy.

    Warns once if the kernel does not permit it.
    """
    if len(machine.memory_nodes()) < 2:
        return False
    if denial := placement.explain_denial():
        warn_once(denial)
    return not denial and placement.read_policy().mode == "default"


def warn_of_shortages(
    path: str, slice_bytes: Sequence[int], nodes: Sequence[int], available: Mapping[int, int]
) -> None:
    """Warn once if blocks will be placed on nodes of the pool that have too little memory for their slices."""
    if (shortages := placement.describe_shortages(slice_bytes, nodes, available)) and binds_memory():
        warn_once(
            f"{path}: too large for the NUMA nodes of its threads ({shortages}); the rest is on other nodes, "
            "and slower to read. Free memory there, or convert with a different --numa."
        )


@contextmanager
def allocate_blocks(
    tensors: Mapping[NumaSlice, Sequence[TensorInfo]], numa: int, nodes: Sequence[int], missing: Collection[int] = ()
) -> Iterator[dict[NumaSlice, tuple[Bytes, ...]]]:
    """Allocate memory for the tensors of slices, to be filled inside the context.

    nodes    the nodes of the pool that will compute. If memory is placed, the block of each NUMA slice is moved to the
             nodes of its threads, if they have space
    missing  experts that are filled later, if at all: until then they have addresses, but take no memory
    """
    is_placed = binds_memory()
    arrays = dict[NumaSlice, tuple[Bytes, ...]]()
    on_one_node: list[tuple[Bytes, int]] = []
    for index in range(numa):
        own = [numa_slice for numa_slice in tensors if numa_slice.node == index]
        loaded = [numa_slice for numa_slice in own if numa_slice.expert not in missing]
        later = [numa_slice for numa_slice in own if numa_slice.expert in missing]
        loaded_size, later_size = (
            sum(_round_up(tensor.nbytes) for numa_slice in slices for tensor in tensors[numa_slice])
            for slices in (loaded, later)
        )
        block = _allocate_pages(loaded_size, later_size)
        if is_placed:
            owners = placement.slice_nodes(index, numa, nodes)
            placement.place(block, owners)
            if len(owners) == 1 and loaded_size:
                on_one_node.append((block[:loaded_size], owners[0]))
        start = 0
        for numa_slice in (*loaded, *later):
            views = []
            for tensor in tensors[numa_slice]:
                views.append(block[start : start + tensor.nbytes])
                start += _round_up(tensor.nbytes)
            arrays[numa_slice] = tuple(views)
    yield {numa_slice: arrays[numa_slice] for numa_slice in tensors}
    for block, node in on_one_node:
        if machine.node_memory_available().get(node, 0) > block.nbytes:
            with suppress(OSError):  # some pages cannot be moved
                placement.gather(block, node)


def _allocate_pages(huge: int, small: int) -> Bytes:
    """Allocate `huge` bytes on huge pages, which begin at the boundary of one, and after them `small` bytes.

    The others are on small pages, because an expert on huge pages would take up to two pages more than its bytes.
    """
    memory = mmap.mmap(-1, huge + small + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = np.frombuffer(memory, np.uint8)
    start = -block.ctypes.data % HUGE_PAGE
    end = start + huge
    memory.madvise(mmap.MADV_HUGEPAGE, 0, end if small else len(memory))
    if small:
        memory.madvise(mmap.MADV_NOHUGEPAGE, end - end % mmap.PAGESIZE)
    return block[start : end + small]


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
