"""The routed experts of one layer, ready to compute. Depends on NumPy only; torch and transformers build on it. The
numbers: docs/explanation/numerics.md, section 5. BF16 values are uint16 arrays of their bits.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs import FORMATS, loose
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32, I64, U8, U16, Array, Bool
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.converted import MEMORY
from ktconvert.native_quant.runtime.from_checkpoint import open_experts
from ktconvert.native_quant.runtime.methods import METHODS, PLAIN, Swiglu, check_swiglu
from ktconvert.native_quant.runtime.pool import Job, Pool, check_error, get_shared_pool

Skip = Bool | U8 | None

_warned: set[tuple[str, int, int]] = set()


class Experts:
    """out[t] = sum over j of weights[t, j] * down(silu(gate x) * up x) of expert ids[t, j], x = hidden[t].

    swiglu_limit L > 0 (a method that has it): gate = min(gate, L), up between -L and L before that;
    swiglu_alpha > 0: gate * sigmoid(alpha * gate) * (up + 1) instead of silu(gate) * up, both between -L and L.

    Created by load() or from_bf16(). Safe to use from many threads; forwards on one pool run one after the other.
    """

    def __init__(
        self,
        packed: weights.LayerWeights,
        *,
        pool: Pool | None = None,
        exact: bool = False,
        order: I64 | None = None,
        swiglu: Swiglu = PLAIN,
    ) -> None:
        kernels.isa()  # a wrong KTCONVERT_ISA is reported here
        check_swiglu(packed.method, swiglu)
        slicing = packed.slicing
        self.method, self.layer = packed.method, slicing.layer
        self.num_experts, self.hidden, self.intermediate = packed.experts, slicing.hidden, slicing.intermediate
        self.parts, self.nbytes = slicing.numa, packed.nbytes
        self.pool, self.exact = pool or get_shared_pool(), exact
        self.source: Path | None = None  # the directory that it was loaded from
        self.order = _checked_order(order, packed.experts)  # the file's expert of each
        table = _table(packed, self.order)
        transposed = _table(packed, self.order, transposed=True) if slicing.backward else ffi.NULL
        formats = {f"{projection}_format": row.number for projection, row in packed.rows.items()}
        sizes = {"experts": self.num_experts, "parts": self.parts, "hidden": self.hidden, "width": slicing.widths}
        settings = {"swiglu_limit": swiglu.limit, "swiglu_alpha": swiglu.alpha}
        moe = ffi.new("ktq_moe *", {**formats, **sizes, "expert": table, "transposed": transposed, **settings})
        # What a forward reads: ktq_moe, the arrays that its tables point to, and the tables.
        self._in_use: tuple[Any, weights.LayerWeights, Any] | None = moe, packed, (table, transposed)

    @classmethod
    def load(
        cls,
        path: Path | str,
        layer: int,
        *,
        method: str | None = None,
        num_experts: int | None = None,
        hidden: int | None = None,
        intermediate: int | None = None,
        parts: int | None = None,
        strict: bool = False,
        memory: str = "auto",
        pool: Pool | None = None,
        exact: bool = False,
        order: I64 | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        transposed: bool | None = False,
    ) -> Experts:
        """One layer of a converted directory, ours or kt-kernel's, or of a checkpoint as a native method reads it.

        method .. intermediate  what the caller expects; an error where the file differs
        parts   how many NUMA slices the caller expects; a converted directory has its own number. Another one costs
                speed: a warning, once, or an error if `strict`. A checkpoint is cut into this many (None: one for each
                of the pool's NUMA nodes, where that is possible)
        memory  "copy": a copy on huge pages, each part on the NUMA node of the pool's threads that compute with it;
                "map": the files' pages, shared between processes, 8 to 12 % slower, on whatever node they lie; "auto":
                copy if the whole directory fits into the available memory, else map. A checkpoint is always copied
        order   int64 [E]: expert p computes with the file's expert order[p]
        transposed  whether gradients are computed with the files of `cpu --save-backward-weights`; None: if any. A
                checkpoint has none: its own numbers are used
        Raises UnsupportedError, InputError or VerificationError with a message that names the file and the remedy.
        """
        if memory not in MEMORY:
            raise ValueError(f"memory is one of {', '.join(MEMORY)}, not '{memory}'")
        swiglu, pool, path = Swiglu(swiglu_limit, swiglu_alpha), pool or get_shared_pool(), Path(path)
        required = weights.Requirements(method, num_experts, hidden, intermediate, parts, memory, swiglu, transposed)
        packed = open_experts(path).load(layer, pool, required)
        if parts is not None and parts != packed.slicing.numa:
            _report_parts(str(path), packed.slicing.numa, parts, strict)
        loaded = cls(packed, pool=pool, exact=exact, order=order, swiglu=swiglu)
        loaded.source = path.absolute()
        return loaded

    @classmethod
    def from_bf16(
        cls,
        gate: U16,
        up: U16,
        down: U16,
        *,
        method: str = "AMXINT4",
        parts: int = 1,
        layer: int = 0,
        pool: Pool | None = None,
        exact: bool = False,
        order: I64 | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
    ) -> Experts:
        """Experts quantized on the spot: gate and up [E, I, H], down [E, H, I], BF16 bits.

        Raises KeyError for an unknown method, ValueError for arrays that do not fit, NonFinite for Inf or NaN,
        UnsupportedError for sizes that the method cannot hold.
        """
        pool = pool or get_shared_pool()
        packed = weights.pack(gate, up, down, METHODS[method], layer, parts, pool)
        return cls(packed, pool=pool, exact=exact, order=order, swiglu=Swiglu(swiglu_limit, swiglu_alpha))

    def forward(
        self,
        hidden: U16,
        ids: I64,
        weights: F32,
        *,
        skip: Skip = None,
        out: U16 | None = None,
        strict_ids: bool = False,
    ) -> U16:
        """hidden [T, H] BF16 bits, ids [T, k], weights [T, k] -> out [T, H] BF16 bits.

        By definition an id outside 0 .. E-1 adds nothing, nor does one that is marked in skip [E]; a token without any
        other id gives zeros. strict_ids: ids outside are errors instead.
        Raises ValueError for arrays that do not fit, for the first such id, and after close(), MemoryError,
        ResourceError where a forked process cannot start threads, InputError where a mapped file cannot be read.
        """
        out = np.empty(hidden.shape, np.uint16) if out is None else out
        self.forward_call(self._call(hidden, ids, weights, skip, out, strict_ids))
        return out

    def submit(
        self, hidden: U16, ids: I64, weights: F32, *, skip: Skip = None, out: U16, strict_ids: bool = False
    ) -> Job:
        """The same in the background, after all earlier jobs of the same pool."""
        job = self.make_job(self._call(hidden, ids, weights, skip, out, strict_ids), (hidden, ids, weights, skip, out))
        job.submit()
        return job

    def make_job(self, call: Any, keep: tuple[object, ...] = ()) -> Job:
        """A job that can be submitted many times; call: as returned by make_call(). Each run reads its arrays again."""
        moe, packed, _ = used = self._open()
        job = ffi.new("ktq_job **")
        check_error(lib.ktq_job_new(self.pool.pointer, moe, call, job))
        return Job(job[0], packed.check_reads, (self.pool, used, *keep))

    def make_call(self, tokens: int, topk: int, hidden: int, ids: int, weights: int, skip: int, out: int) -> Any:
        """A call by addresses (skip: 0 for none) of checked arrays. ValueError: too many experts per token."""
        if topk > lib.KTQ_MOST_TOPK:
            raise ValueError(f"{topk} experts per token are more than a forward takes, {lib.KTQ_MOST_TOPK}")
        cast = ffi.cast
        inputs = cast("uint16_t *", hidden), cast("int64_t *", ids), cast("float *", weights), cast("uint8_t *", skip)
        return ffi.new("ktq_call *", (self.exact, tokens, topk, *inputs, cast("uint16_t *", out)))

    def forward_call(self, call: Any) -> None:
        """forward() for a call of make_call()."""
        self._run(lib.ktq_forward, call)

    @property
    def trainable(self) -> bool:
        """Whether train_call computes gradients through them."""
        return bool(lib.ktq_trainable(self._open()[0]))

    def train_call(self, call: Any, lora: Any, kept: Any, gradients: Any = None) -> None:
        """ktq_train_forward, or with gradients ktq_train_backward, for a call of make_call() (training.py)."""
        if gradients is None:
            self._run(lib.ktq_train_forward, call, lora, kept)
        else:
            self._run(lib.ktq_train_backward, call, lora, kept, gradients)

    def save(self, folder: Path | str) -> None:
        """Write kt-kernel's loose .kt files to folder/_layer_N, atomically. UnsupportedError: a method without such."""
        packed, root = self.packed, Path(folder)
        fmt = FORMATS.get(packed.method)
        if fmt is None or fmt.loose is None or METHODS[packed.method].arrange is not None:
            raise UnsupportedError(
                f"{packed.method} has no loose files of memory's order; convert with `ktconvert cpu`."
            )
        publish.make_folder(root)
        final = root / loose.layer_folder(self.layer)
        partial = root / f".{final.name}.partial-{os.getpid()}"
        publish.remove_tree(partial)
        for part, stored in packed.arrays.items():
            weights.write_loose(partial, fmt, part, stored)
        packed.check_reads()
        publish.sync_tree(partial)
        if final.exists():
            publish.exchange(partial, final, aside=partial.with_suffix(".old"))
            publish.remove_tree(partial)
        else:
            publish.publish(partial, final)

    @property
    def packed(self) -> weights.LayerWeights:
        """The weights. Raises ValueError after close()."""
        return self._open()[1]

    def close(self) -> None:
        """Release the weights: no new forward can start. They are freed with the last job that uses them."""
        self._in_use = None

    def __copy__(self) -> Experts:
        """The same read-only weights and threads, closed on its own."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the experts of layer {self.layer} of {self.source or 'a model in memory'} cannot be pickled (pickle, "
            "torch.save, spawned processes): their weights are memory of this process; save the path of their "
            "directory, and load them from it again with Experts.load, or the model with from_pretrained"
        )

    def __enter__(self) -> Experts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> tuple[Any, weights.LayerWeights, Any]:
        if (used := self._in_use) is None:
            raise ValueError(f"the experts of layer {self.layer} were closed; load them again")
        return used

    def _run(self, function: Callable[..., int], *arguments: Any) -> None:
        moe, packed, _ = used = self._open()  # another thread may call close() meanwhile
        check_error(function(self.pool.pointer, moe, *arguments))
        packed.check_reads()
        del used

    def _call(self, hidden: U16, ids: I64, weights: F32, skip: Skip, out: U16, strict_ids: bool) -> Any:
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden:
            raise ValueError(f"hidden must have shape (tokens, {self.hidden}), not {hidden.shape}")
        tokens = len(hidden)
        if ids.ndim != 2 or len(ids) != tokens or not ids.shape[1]:
            raise ValueError(f"ids must have shape ({tokens}, experts per token), not {ids.shape}")
        if weights.shape != ids.shape:
            raise ValueError(f"weights must have the shape of ids, {ids.shape}, not {weights.shape}")
        if out.shape != hidden.shape:
            raise ValueError(f"out must have the shape of hidden, {hidden.shape}, not {out.shape}")
        if skip is not None and skip.shape != (self.num_experts,):
            raise ValueError(f"skip must have shape ({self.num_experts},), not {skip.shape}")
        addresses = (
            _address("hidden", hidden, np.uint16),
            _address("ids", ids, np.int64),
            _address("weights", weights, np.float32),
            0 if skip is None else _address("skip", skip.view(np.uint8), np.uint8),
            _address("out", out, np.uint16, writable=True),
        )
        if strict_ids and (outside := np.argwhere((ids < 0) | (ids >= self.num_experts))).size:
            token, place = outside[0].tolist()
            what = f"is {ids[token, place]}, and layer {self.layer} has experts 0 to {self.num_experts - 1}"
            raise ValueError(f"ids[{token}, {place}] {what}; without strict_ids it adds nothing to token {token}")
        return self.make_call(tokens, ids.shape[1], *addresses)


def _table(packed: weights.LayerWeights, order: list[int], transposed: bool = False) -> Any:
    """ktq_expert [parts][E]: where each matrix or transpose lies. Raises ValueError where C would read past one."""
    rows = ffi.new("ktq_expert[]", packed.slicing.numa * packed.experts)
    at: dict[int, list[int]] = {expert: [] for expert in range(packed.experts)}
    for place, expert in enumerate(order):
        at[expert].append(place)
    for part, stored in packed.arrays.items():
        if part.backward != transposed:
            continue
        number = packed.rows[part.projection].number
        if (actual := sum(data.nbytes for data in stored)) != (needed := sum(_weight_bytes(number, part.n, part.k))):
            raise ValueError(f"a part [{part.n}, {part.k}] of {packed.method} has {needed} bytes, not {actual}")
        addresses = [ffi.cast("void *", data.__array_interface__["data"][0]) for data in stored]
        for place in at[part.expert]:
            row = rows[part.node * packed.experts + place]
            for name, address in zip((part.projection, f"{part.projection}_scale"), addresses, strict=False):
                setattr(row, name, address)  # a format without scales has one tensor
    return rows


def _checked_order(order: I64 | None, experts: int) -> list[int]:
    """The file's expert for each place; None: the file's order. Raises ValueError for what is no such list."""
    if order is None:
        return list(range(experts))
    numbers = [int(number) for number in order]
    if len(numbers) != experts or min(numbers) < 0 or max(numbers) >= experts:
        raise ValueError(f"order must name one of {experts} experts for each of {experts} numbers")
    return numbers


_weight_bytes = functools.cache(kernels.weight_bytes)


def _report_parts(path: str, have: int, required: int, strict: bool) -> None:
    message = (
        f"{path}: made for {have} NUMA slices, run with {required}: the result is right, but memory may be read across "
        f"nodes; `ktconvert resplit --threadpool-count {required}` rewrites it for full speed."
    )
    if strict:
        raise UnsupportedError(message)
    if (path, have, required) not in _warned:
        _warned.add((path, have, required))
        warnings.warn(message, stacklevel=3)


def _address(name: str, array: Array, dtype: type[np.generic], writable: bool = False) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.aligned:
        actual = f"{array.dtype} with strides {array.strides}"
        raise ValueError(f"{name} must be a contiguous array of {np.dtype(dtype)}, not {actual}")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} must be writable")
    return int(array.__array_interface__["data"][0])
