"""The routed experts of one layer, ready to compute. Needs only NumPy.

BF16 values are uint16 arrays of their bits. Equations: docs/explanation/numerics.md, section 5.
"""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.errors import ArgumentError, InputError, StateError, UnsupportedError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs import FORMATS, loose
from ktconvert.layouts.outputs.format import explain_illegal_count
from ktconvert.layouts.outputs.opening import refuse_adapter
from ktconvert.layouts.reprs import write_repr
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32, I64, U16
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.arguments import (
    FLOAT32,
    INT64,
    MARKS,
    UINT16,
    AnySize,
    check_calls,
    describe,
    require_array,
    require_integer,
    require_one_of,
    require_path,
)
from ktconvert.native_quant.runtime.checkpoint_experts import is_checkpoint, open_checkpoint_experts
from ktconvert.native_quant.runtime.converted_experts import MEMORY, Memory, open_converted
from ktconvert.native_quant.runtime.expert_source import CONSTANTS, ExpertSource, Requirements, Skip, resolve_order
from ktconvert.native_quant.runtime.methods import METHODS, Method
from ktconvert.native_quant.runtime.moe_fields import MissingExperts, make_address_table, make_function_fields
from ktconvert.native_quant.runtime.pool import Job, Pool, check_error, get_shared_pool
from ktconvert.native_quant.runtime.warn import warn_once

TOKENS, TOPK = AnySize("tokens"), AnySize("experts per token")
BF16_BITS = "the bits of BF16 numbers"
Activations = Literal["auto", "bf16", "int8"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
AUTO, BF16, INT8 = ACTIVATIONS
CREATE = "use KTExperts.load(path, layer), or KTExperts.from_bf16(gate, up, down)"
READ_ONLY = {"method", "layer", "num_experts", "hidden", "intermediate", "parts"}  # attributes of KTExperts


class KTExperts:
    """The routed experts of a layer, which compute the weighted sum of each token's experts with NumPy arrays.

    For x = hidden[t], out[t] = sum over j of weights[t, j] * down(f(gate x, up x)), with the matrices gate, up and down
    of expert ids[t, j]. In most models, f(g, u) = silu(g) * u.

    >>> experts = KTExperts.load("model-int8", layer=0)
    >>> out = experts.forward(hidden, ids, weights)

    Create experts with load() or from_bf16(). `with KTExperts.load(...) as experts:` closes them at its end. They can
    be used from many threads; forwards on one pool of threads run one after the other. In shapes, E is the number of
    experts, H the hidden size, I the intermediate size of an expert, T the number of tokens, and k the number of
    experts per token. BF16 numbers are uint16 arrays of their bits; for a BF16 tensor of torch, these are
    tensor.view(torch.uint16).numpy().

    method        method of the weights, such as "AMXINT8"
    layer         number of the layer
    num_experts, hidden, intermediate
                  E, H and I
    parts         number of NUMA slices
    source        absolute path of the weights; None if they are not from files
    nbytes        bytes of the loaded weights
    """

    # The package's other classes also use the attributes with a leading underscore.

    @check_calls(own=("packed", "pool", "exact", "activations", "order", "function"), remedy=CREATE)
    def __init__(
        self,
        packed: weights.LayerWeights,
        *,
        pool: Pool | None = None,
        exact: bool = False,
        activations: Activations = AUTO,
        order: I64 | None = None,
        function: ExpertFunction = PLAIN,
    ) -> None:
        """Raise ArgumentError: load and from_bf16 create experts."""
        if not isinstance(packed, weights.LayerWeights):  # only our own classes have them
            raise ArgumentError(CREATE)
        require_one_of("exact", exact, (False, True))
        require_one_of("activations", activations, ACTIVATIONS)
        kernels.isa()  # raises ValueError for a wrong KTCONVERT_ISA
        slicing = packed.slicing
        self.method: Final = packed.method
        self.layer: Final = slicing.layer
        self.num_experts: Final = packed.experts
        self.hidden: Final = slicing.hidden
        self.intermediate: Final = slicing.intermediate
        self.parts: Final = slicing.numa
        self._function = function
        self._pool = pool or get_shared_pool()
        self._exact = exact
        self._int8_formats = _choose_int8_formats(activations, packed.methods.values())
        self.source: Path | None = None  # directory or file of the weights
        self._order = resolve_order(order, packed.experts)  # expert -> expert in the file
        missing = MissingExperts(packed, self._order)
        table = make_address_table(packed, self._order)
        transposed = make_address_table(packed, self._order, transposed=True) if slicing.backward else ffi.NULL
        if (function.biases, function.gated) != (bool(packed.biases), slicing.gated):
            raise ArgumentError(f"the weights of layer {slicing.layer} have other biases or gates than {function}")
        first, up, down = (packed.methods[name].number for name in (slicing.projections[0], "up", "down"))
        formats = {"gate_format": first, "up_format": up, "down_format": down}
        sizes = {"experts": self.num_experts, "slices": self.parts, "hidden": self.hidden, "width": slicing.widths}
        tables = {"expert": table, "transposed": transposed, **missing.make_fields()}
        computation = {"function": make_function_fields(function), "read_ahead": packed.read_ahead}
        moe = ffi.new("ktq_moe *", {**formats, **sizes, **tables, **computation})
        # The memory that a forward reads: ktq_moe, the arrays that its tables point to, and the tables.
        self._memory: tuple[Any, weights.LayerWeights, Any] | None = moe, packed, tables
        self._missing: MissingExperts | None = missing

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse changes of what C reads. Raises AttributeError."""
        if name in READ_ONLY and name in vars(self):
            raise AttributeError(f"{name} of KTExperts cannot be changed; load the experts again")
        super().__setattr__(name, value)

    @classmethod
    @check_calls(own=("pool",))
    def load(
        cls,
        path: str | os.PathLike[str],
        layer: int,
        *,
        method: str | None = None,
        num_experts: int | None = None,
        hidden: int | None = None,
        intermediate: int | None = None,
        parts: int | None = None,
        strict: bool = False,
        memory: Memory = "auto",
        threads: int | None = None,
        pool: Pool | None = None,
        exact: bool = False,
        activations: Activations = AUTO,
        order: NDArray[np.int64] | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        situ_beta: float = 0.0,
        situ_linear_beta: float = 0.0,
        transposed: bool | None = False,
        skip: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
    ) -> KTExperts:
        """Load one layer of a converted directory, ours or kt-kernel's, or of a checkpoint in a native format.

        path        the directory, or a GGUF file
        layer       number of the layer, from 0
        method, num_experts, hidden, intermediate
                    expected values; it is an error if the files differ
        parts       number of NUMA slices. A converted directory has a fixed number; a different one costs speed, which
                    causes a warning, once, or an error if `strict`. A checkpoint is divided into this number of slices;
                    None: one for each of the pool's NUMA nodes, if possible
        memory      "copy": a copy on huge pages, each slice on the NUMA node of the threads that compute with it
                    "map": the files' pages, shared between processes, on arbitrary nodes, 8 to 12 % slower
                    "auto": copy if all layers, without skipped experts, fit into the available memory, else map
                    A checkpoint is always copied
        threads     number of threads that compute; None: the physical cores that this process may use. Layers with the
                    same number share them
        exact       whether to round as kt-kernel, bit for bit
        activations
                    "int8": activations that multiply integers of 4 to 6 bits (MXFP4, INT4 with groups, GGUF) are
                    rounded to 8 bits in blocks of 32, which is faster; "bf16": they are not; "auto": only those that
                    multiply Q4_0 and Q4_K of GGUF, whose own rounding errors are at least six times as large
        order       int64 [E]: expert p computes with the file's expert order[p]
        swiglu_limit, swiglu_alpha, situ_beta, situ_linear_beta
                    constants of kt-kernel for files that do not record what the experts compute; if they
                    record it, each constant must agree or be 0
        transposed  whether gradients use the files of `cpu --save-backward-weights`; None: only if they exist. A
                    checkpoint has no such files, and gradients use its weights
        skip        bool [E]: experts that are not loaded, as something else computes them. Each is loaded when a
                    forward first needs it, and then stays loaded
        Raises ArgumentError for an invalid argument; UnsupportedError, InputError or VerificationError with a message
        that names the file and the remedy.
        """
        path = Path(require_path("path", path))
        if method is not None:
            require_one_of("method", method, METHODS)
        require_one_of("memory", memory, MEMORY)
        require_one_of("strict", strict, (False, True))
        layer = require_integer("layer", layer, 0)
        for name, size in (
            ("num_experts", num_experts),
            ("hidden", hidden),
            ("intermediate", intermediate),
            ("parts", parts),
        ):
            if size is not None:
                require_integer(name, size, 1)
        pool = _choose_pool(pool, threads)
        function = make_function(swiglu_limit, swiglu_alpha, situ_beta, situ_linear_beta)
        sizes = method, num_experts, hidden, intermediate, parts
        required = Requirements(*sizes, memory, function, transposed, skip, order)
        source = open_experts(path)
        packed = source.load(layer, pool, required)
        if parts is not None and parts != packed.slicing.numa:
            _report_slice_count(str(path), packed, parts, strict)
        computed = required.choose_function(path, layer, source.function(layer))
        for name, has, must in (
            ("biases", bool(packed.biases), computed.biases),
            ("a gate", packed.slicing.gated, computed.gated),
        ):
            if has != must:
                problem = (
                    f"the experts of layer {layer} {'have' if has else 'lack'} {name}, but must compute {computed}"
                )
                raise InputError(f"{path}: {problem}; convert the model again.")
        loaded = cls(packed, pool=pool, exact=exact, activations=activations, order=order, function=computed)
        loaded.source = path.absolute()
        return loaded

    @classmethod
    @check_calls(own=("pool", "function"))
    def from_bf16(
        cls,
        gate: NDArray[np.uint16] | None,
        up: NDArray[np.uint16],
        down: NDArray[np.uint16],
        *,
        biases: Mapping[str, NDArray[np.float32]] | None = None,
        method: str = "AMXINT4",
        parts: int = 1,
        layer: int = 0,
        threads: int | None = None,
        pool: Pool | None = None,
        exact: bool = False,
        activations: Activations = AUTO,
        order: NDArray[np.int64] | None = None,
        function: ExpertFunction = PLAIN,
    ) -> KTExperts:
        """Quantize experts in memory.

        gate, up  uint16 [E, I, H], BF16 bits; gate is None only for our own classes, which describe such experts
        down      uint16 [E, H, I], BF16 bits
        biases    "gate", "up" and "down" -> float32 [E, I], for down [E, H], only for our own classes; None: no biases
        method    method of the weights, such as "AMXINT8"
        parts     number of NUMA slices
        layer     number of the layer, for messages
        threads, exact, activations, order
                  as for load

        Raises ArgumentError for invalid arguments, also for Inf or NaN, and UnsupportedError for sizes that the method
        does not support.
        """
        require_one_of("method", method, METHODS)
        parts, layer = require_integer("parts", parts, 1), require_integer("layer", layer, 0)
        pool = _choose_pool(pool, threads)
        packed = weights.pack(gate, up, down, METHODS[method], layer, parts, pool, biases=biases)
        return cls(packed, pool=pool, exact=exact, activations=activations, order=order, function=function)

    @property
    def nbytes(self) -> int:
        """Bytes of the loaded experts. Raises StateError after close()."""
        return self._packed.nbytes

    def _list_activations(self) -> list[str]:
        """Return how activations are rounded: "BF16", "int8" or both. Gate and up share them (ktq_call)."""
        inputs = dict(self._packed.methods)
        names = set()
        for rows in ([inputs.pop("down")], inputs.values()):
            rounds = all(self._int8_formats >> row.number & 1 for row in rows)
            names |= {INT8 if rounds else row.activations for row in rows}
        return sorted(names)

    def _load_missing(self, skip: Skip = None) -> None:
        """Load the experts that are not loaded yet, except those that are marked in skip [E].

        A forward does so for its experts, but without this call, a job whose arrays have changed or a CUDA graph
        reports an error only when it has ended. Raises InputError if the files have changed or cannot be read.
        """
        if self._missing is not None:
            self._missing.load_unskipped(skip)

    @check_calls()
    def forward(
        self,
        hidden: NDArray[np.uint16],
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
        *,
        skip: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
        out: NDArray[np.uint16] | None = None,
        strict_ids: bool = False,
        norm: tuple[NDArray[np.float32], float] | None = None,
    ) -> NDArray[np.uint16]:
        """Return the weighted sum of each token's experts, uint16 [T, H], BF16 bits.

        hidden      uint16 [T, H], BF16 bits
        ids         int64 [T, k]: the experts of each token. Ids outside 0 .. E-1 add nothing; a token with only such
                    ids gives zeros
        weights     float32 [T, k]: the factor of each expert
        skip        bool or uint8 [E]: marked experts add nothing
        out         uint16 [T, H]: array for the result; None: a new one
        strict_ids  whether ids outside 0 .. E-1 are errors
        norm        factors, float32 [H], and epsilon, above 0, for experts with a norm of their output, which is then
                    y * factors / sqrt(mean((y * factors)^2) + epsilon)
        All arrays must be contiguous. Raises ArgumentError for any other array, for the first wrong id if strict_ids,
        and for a missing norm; StateError after close(); MemoryError; ResourceError if a forked process cannot start
        threads; InputError if a mapped file cannot be read.
        """
        call, out = self._check_call(hidden, ids, weights, skip, out, strict_ids)
        if norm is not None:
            if not isinstance(norm, tuple) or len(norm) != 2:
                raise ArgumentError(f"norm must be a tuple of an array and a number, not {describe(norm)}")
            factors, epsilon = norm
            require_array("norm[0]", factors, (FLOAT32,), (self.hidden,))
            if not isinstance(epsilon, numbers.Real) or not 0 < epsilon < float("inf"):
                raise ArgumentError(f"norm[1] must be a number above 0, not {describe(epsilon)}")
            call.norm = ffi.from_buffer("float[]", factors)
            call.norm_epsilon = epsilon
        self._forward_call(call)
        return out

    def _submit(
        self, hidden: U16, ids: I64, weights: F32, *, skip: Skip = None, out: U16, strict_ids: bool = False
    ) -> Job:
        """Start a forward in the background, after all earlier jobs of the same pool."""
        arrays = hidden, ids, weights, skip, out
        call, _ = self._check_call(*arrays, strict_ids)
        job = self._make_job(call, arrays)
        job.submit()
        return job

    def _make_job(self, call: Any, keep: tuple[object, ...] = ()) -> Job:
        """Return a job for a call of _make_call(). It can be submitted many times; each run reads its arrays again."""
        moe, packed, _ = memory = self._require_open()
        if self._function.output_norm:
            raise UnsupportedError(f"{self.source}: jobs cannot compute experts with a norm of their output.")
        job = ffi.new("ktq_job **")
        check_error(lib.ktq_job_new(self._pool.pointer, moe, call, job))
        return Job(job[0], packed.check_reads, (self._pool, memory, *keep))

    def _make_call(self, tokens: int, topk: int, hidden: int, ids: int, weights: int, skip: int, out: int) -> Any:
        """Return a call for the addresses (skip: 0 for none) of checked arrays.

        Raises ArgumentError for no expert per token, and for too many.
        """
        cast = ffi.cast
        inputs = cast("uint16_t *", hidden), cast("int64_t *", ids), cast("float *", weights), cast("uint8_t *", skip)
        return self._make_pointer_call(tokens, topk, *inputs, cast("uint16_t *", out))

    def _make_pointer_call(self, tokens: int, topk: int, *pointers: Any) -> Any:
        """Return a call as _make_call does, for pointers of C to hidden, ids, weights, skip and out."""
        if not 1 <= topk <= lib.KTQ_MAX_TOPK:  # each forward compares it: all checks of a number would take longer
            require_integer("the number of experts per token", topk, 1, lib.KTQ_MAX_TOPK)
        return ffi.new("ktq_call *", (self._exact, self._int8_formats, tokens, topk, *pointers))

    def _forward_call(self, call: Any) -> None:
        """Run a forward for a call of _make_call(). Raises ArgumentError for a missing norm."""
        if self._function.output_norm and call.norm == ffi.NULL:
            raise ArgumentError(f"the experts of layer {self.layer} compute {self._function}; give forward the norm")
        self._run(lib.ktq_forward, call)

    @property
    def _trainable(self) -> bool:
        """True if _train_call can compute gradients of these experts."""
        return not self._function.output_norm and bool(lib.ktq_trainable(self._require_open()[0]))

    def _train_call(self, call: Any, lora: Any, saved: Any, gradients: Any = None) -> None:
        """Run ktq_train_forward, or with gradients ktq_train_backward, for a call of _make_call() (training.py)."""
        if gradients is None:
            self._run(lib.ktq_train_forward, call, lora, saved)
        else:
            self._run(lib.ktq_train_backward, call, lora, saved, gradients)

    def _save(self, folder: Path | str) -> None:
        """Write kt-kernel's loose .kt files to folder/_layer_N, atomically.

        Raises UnsupportedError for a method that has no loose files.
        """
        self._load_missing()
        packed = self._packed
        root = Path(folder)
        fmt = FORMATS.get(packed.method)
        if fmt is None or fmt.loose is None or METHODS[packed.method].rearrange is not None:
            raise UnsupportedError(
                f"{packed.method} has no loose files in the order of its memory; convert with `ktconvert cpu`."
            )
        publish.make_folder(root)
        final = root / loose.layer_folder(self.layer)
        partial = root / f".{final.name}.partial-{os.getpid()}"
        publish.remove_tree(partial)
        fmt = fmt.with_biases() if packed.biases else fmt
        for numa_slice, stored in packed.arrays.items():
            biases = [packed.biases[numa_slice].view(np.uint8)] if packed.biases else []
            weights.write_loose(partial, fmt, numa_slice, (*stored, *biases))
        packed.check_reads()
        publish.sync_tree(partial)
        if final.exists():
            publish.exchange_paths(partial, final, aside=partial.with_suffix(".old"))
            publish.remove_tree(partial)
        else:
            publish.publish_path(partial, final)

    @property
    def _packed(self) -> weights.LayerWeights:
        """The weights. Raises StateError after close()."""
        return self._require_open()[1]

    def close(self) -> None:
        """Release the weights: later forwards raise StateError. The last job that uses them frees them."""
        self._memory = self._missing = None

    def __repr__(self) -> str:
        """Return path, method and sizes."""
        names = ("layer", "method", "num_experts", "hidden", "intermediate", "parts")
        values = {"path": self.source and str(self.source), **{name: getattr(self, name) for name in names}}
        return write_repr(self, "" if self._memory else "closed", **values)

    def __copy__(self) -> KTExperts:
        """Return experts that share the read-only weights and threads, and are closed separately."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> KTExperts:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the experts of layer {self.layer} of {self.source or 'a model in memory'} cannot be pickled (pickle, "
            "torch.save, spawned processes): their weights are memory of this process; save the path of their "
            "directory, and load them with KTExperts.load, or the model with from_pretrained"
        )

    def __enter__(self) -> KTExperts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> tuple[Any, weights.LayerWeights, Any]:
        if (memory := self._memory) is None:
            raise StateError(f"the experts of layer {self.layer} were closed; load them again")
        return memory

    def _run(self, function: Callable[..., int], *arguments: Any) -> None:
        moe, packed, _ = memory = self._require_open()  # another thread may call close() during the call
        if error := function(self._pool.pointer, moe, *arguments):
            check_error(error)
        packed.check_reads()
        del memory

    def _check_call(
        self, hidden: U16, ids: I64, weights: F32, skip: Skip, out: U16 | None, strict_ids: bool
    ) -> tuple[Any, U16]:
        """Check the arrays of a forward; return a call and its output, by default a new array. Raises ArgumentError."""
        packed = self._packed  # first: closed experts have no other problem
        require_array("hidden", hidden, (UINT16,), (TOKENS, self.hidden), BF16_BITS)
        tokens = len(hidden)
        require_array("ids", ids, (INT64,), (tokens, TOPK))
        require_array("weights", weights, (FLOAT32,), ids.shape, "the shape of ids")
        if skip is not None:
            require_array("skip", skip, MARKS, (self.num_experts,))
        if out is None:
            out = np.empty_like(hidden)
        else:
            require_array("out", out, (UINT16,), hidden.shape, "the shape of hidden")
            if not out.flags.writeable:
                raise ArgumentError("out must be writable")
        if strict_ids and (invalid := np.argwhere((ids < 0) | (ids >= self.num_experts))).size:
            token, column = invalid[0].tolist()
            problem = f"is {ids[token, column]}, but layer {self.layer} has experts 0 to {self.num_experts - 1}"
            raise ArgumentError(
                f"ids[{token}, {column}] {problem}; without strict_ids it adds nothing to token {token}"
            )
        if packed.missing:
            unused = np.ones(self.num_experts, np.bool_)
            unused[ids[(ids >= 0) & (ids < self.num_experts)]] = False
            self._load_missing(unused if skip is None else unused | (skip != 0))
        point = ffi.from_buffer
        inputs = point("uint16_t[]", hidden), point("int64_t[]", ids), point("float[]", weights)
        marks = ffi.NULL if skip is None else point("uint8_t[]", skip)
        return self._make_pointer_call(tokens, ids.shape[1], *inputs, marks, point("uint16_t[]", out)), out


KTExperts.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # help() then shows no call of the class


def _choose_int8_formats(activations: Activations, methods: Iterable[Method]) -> int:
    """Return int8_formats of ktq_call: bit f is set if activations are rounded to 8 bits for weights in format f."""
    chosen = [method for method in methods if activations == INT8 or (activations == AUTO and method.rounds_to_int8)]
    return sum({1 << method.number for method in chosen})


def _choose_pool(pool: Pool | None, threads: int | None) -> Pool:
    """Return the pool, or by default the shared one with this number of threads. Raises ArgumentError."""
    if threads is not None:
        require_integer("threads", threads, 1, lib.KTQ_POOL_THREADS)
    return pool or get_shared_pool(threads)


def make_function(
    swiglu_limit: float, swiglu_alpha: float, situ_beta: float = 0.0, situ_linear_beta: float = 0.0
) -> ExpertFunction | None:
    """Return the function that kt-kernel computes with these constants; None if all are 0.

    situ_beta and situ_linear_beta are those of the public kt-kernel for Kimi-K3. Raises ValueError for anything but
    finite numbers of at least 0, and for constants of different activations.
    """
    constants = dict(zip(CONSTANTS, (swiglu_limit, swiglu_alpha, situ_beta, situ_linear_beta), strict=True))
    for name, value in constants.items():
        if not isinstance(value, numbers.Real) or not 0 <= value < float("inf"):
            raise ArgumentError(f"{name} must be a finite number of at least 0, not {describe(value)}")
    if (situ_linear_beta and not situ_beta) or (situ_beta and (swiglu_limit or swiglu_alpha)):
        given = ", ".join(f"{name}={value:g}" for name, value in constants.items() if value)
        rule = "give situ_beta with or without situ_linear_beta, or swiglu_limit with or without swiglu_alpha"
        raise ArgumentError(f"{given} belong to no activation; {rule}")
    if situ_beta:
        return ExpertFunction("softcap", alpha=situ_beta, beta=situ_linear_beta)
    if not swiglu_limit and not swiglu_alpha:
        return None
    return ExpertFunction("swiglu_oai" if swiglu_alpha else "silu", swiglu_limit, swiglu_alpha)


def open_experts(path: Path) -> ExpertSource:
    """Open a directory of experts, or a GGUF file.

    Raises InputError for damaged files and an adapter, UnsupportedError if there are no experts.
    """
    refuse_adapter(path, "experts of a model", "give the model that it was trained for, or its converted experts")
    return open_checkpoint_experts(path) if is_checkpoint(path) else open_converted(path)


def _report_slice_count(path: str, packed: weights.LayerWeights, required: int, strict: bool) -> None:
    """Warn that a layer has a different number of NUMA slices than required. Raises UnsupportedError if `strict`."""
    have, sizes = packed.slicing.numa, (packed.slicing.hidden, packed.slicing.intermediate)
    fmt = FORMATS.get(packed.method)
    can_resplit = fmt is not None and explain_illegal_count(fmt, [sizes], required) is None
    remedy = f"; `ktconvert resplit --numa {required}` rewrites it for full speed" if can_resplit else ""
    message = (
        f"{path}: made for {have} NUMA slice{'s' * (have > 1)}, run with {required}: the result is right, but memory "
        f"may be read across nodes{remedy}."
    )
    if strict:
        raise UnsupportedError(message)
    warn_once(message)
