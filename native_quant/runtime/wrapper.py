"""KTMoEWrapper: routed experts of one layer for torch, with the interface of kt_kernel 0.7.2's class of this name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch

from ktconvert.layouts.checkpoints.expert_function import ExpertFunction
from ktconvert.layouts.checkpoints.recognition import function_by_config
from ktconvert.layouts.errors import ArgumentError, KTConvertError, StateError
from ktconvert.layouts.reprs import write_repr
from ktconvert.layouts.sources.source import read_config
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime import gpu_buffers, methods, weights
from ktconvert.native_quant.runtime.arguments import (
    F,
    check_calls,
    describe,
    require_integer,
    require_names,
    require_one_of,
    require_path,
)
from ktconvert.native_quant.runtime.converted_experts import Memory
from ktconvert.native_quant.runtime.expert_source import CONSTANTS, Requirements
from ktconvert.native_quant.runtime.experts import AUTO, Activations, KTExperts, make_function, open_experts
from ktconvert.native_quant.runtime.layer_forwards import (
    CpuForward,
    ModelMember,
    StreamForward,
    WrappedLayer,
    is_on_gpu,
    require_submitted,
    split_immediate,
)
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import Job, Pool, get_shared_pool, parse_nodes
from ktconvert.native_quant.runtime.sft import SftMoEWrapper
from ktconvert.native_quant.runtime.streams import BufferCache

_OMITTED: Any = object()  # the value of a mask that is left out


def _allow_omitted_mask(init: F) -> F:
    """Return an __init__ that accepts a call without the mask. Type checkers require the mask, as kt-kernel does."""

    @functools.wraps(init)
    def call(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, **_bind_arguments(arguments, named))

    return cast(F, call)


def _bind_arguments(arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of the class by name, also those that are left out. Raises CallError."""
    require_names("KTMoEWrapper", _SIGNATURE, (None, *arguments), named, optional=("gpu_experts_mask",))
    bound = _SIGNATURE.bind_partial(None, *arguments, **named)
    bound.apply_defaults()
    return {"gpu_experts_mask": _OMITTED} | {name: value for name, value in bound.arguments.items() if name != "self"}


class KTMoEWrapper:
    """The routed experts of one layer on the CPU. Arguments, methods and their meaning are those of kt-kernel 0.7.2.

    >>> experts = KTMoEWrapper(
    ...     layer_idx=0, num_experts=8, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=256,
    ...     gpu_experts_mask=None, cpuinfer_threads=4, threadpool_count=1, weight_path="model-int8",
    ...     chunked_prefill_size=512, method="AMXINT8",
    ... )
    >>> experts.load_weights()
    >>> out = experts.forward(hidden_states, topk_ids, topk_weights)

    All arguments without a default are required, except gpu_experts_mask.

    layer_idx         number of the layer, from 0
    num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size
                      sizes of the layer: experts, experts per token, columns of the hidden states, rows of gate and up
    gpu_experts_mask  bool [num_experts]: experts that the GPU computes, and this class skips. None: skip no expert.
                      Omitted, which type checkers reject: skip the first num_gpu_experts, as in kt-kernel before 0.6
    cpuinfer_threads  number of threads; wrappers with the same number and nodes share them
    threadpool_count  number of NUMA slices to pack, or to divide a checkpoint into (converted files have a fixed
                      number), and of nodes for the threads
    numa_nodes        the nodes for the threads. None: the first ones with CPUs of this process
    weight_path       converted weights, or a checkpoint that the method reads; with cpu_save the directory to write
    cpu_save          whether load_weights_from_tensors also writes kt-kernel's loose .kt files
    max_deferred_experts_per_token
                      number of experts per token whose result the next layer adds; None: 0
    method            a method of docs/reference/methods.md, such as "AMXINT8"
    swiglu_limit, swiglu_alpha, situ_beta, situ_linear_beta
                      constants of the activation, as for KTExperts.load. 0: what weight_path records, as sglang-kt also
                      passes 0 for a model with a limit
    mode              "inference", or "sft" for the class that trains
    Inference accepts and ignores chunked_prefill_size, the arguments for training, and cold_only_cpu_experts, by which
    forks ask not to load the experts of the GPU, as load_weights never does.

    Class attributes that kt-kernel does not have: `exact` = True rounds as kt-kernel, bit for bit; `strict` = True
    rejects files with a different threadpool_count; `activations` and `memory` are those of KTExperts.load.

    Raises ArgumentError for invalid arguments, NotImplementedError for an unsupported method of kt-kernel, and
    InputError if weight_path has different sizes. Only load_weights reports a path without weights, since
    load_weights_from_tensors needs none, except for methods of checkpoints only.
    """

    exact: ClassVar[bool] = False
    activations: ClassVar[Activations] = AUTO
    strict: ClassVar[bool] = False
    memory: ClassVar[Memory] = "auto"

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Return an SftMoEWrapper for mode="sft", as kt-kernel does; Python then skips __init__."""
        mode = arguments[_MODE] if len(arguments) > _MODE else named.get("mode")
        if mode != "sft":
            return super().__new__(cls)
        return _make_sft_wrapper(_bind_arguments(arguments, named))  # type: ignore[return-value]  # not for type checkers

    @_allow_omitted_mask
    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | None,
        cpuinfer_threads: int,
        threadpool_count: int,
        weight_path: str | PathLike[str],
        chunked_prefill_size: int,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "AMXINT4",
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int = 0,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        situ_beta: float = 0.0,
        situ_linear_beta: float = 0.0,
        cold_only_cpu_experts: bool = False,
    ) -> None:
        _check_arguments(locals())
        self.layer_idx = layer_idx
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        self.method = method
        self.threadpool_count = threadpool_count
        self.weight_path = str(weight_path)
        self.cpu_save = cpu_save
        self.chunked_prefill_size = chunked_prefill_size
        # Number of experts of a token that may be deferred to the next layer; it may be changed at any time.
        self.max_deferred_experts_per_token = int(max_deferred_experts_per_token or 0)
        self.swiglu_limit, self.swiglu_alpha = float(swiglu_limit), float(swiglu_alpha)
        self.situ_beta, self.situ_linear_beta = float(situ_beta), float(situ_linear_beta)
        self._mask = _copy_mask(gpu_experts_mask, num_experts, num_gpu_experts)
        self._pool = _get_pool(cpuinfer_threads, threadpool_count, numa_nodes)
        self.moe: KTExperts | None = None  # kt-kernel's name for the object that computes
        self._cpu: CpuForward | None = None
        self._stream: StreamForward | None = None
        self._member = ModelMember(self.weight_path, layer_idx)
        self._writes: list[Job] = []

    def __repr__(self) -> str:
        """Return path, method and sizes."""
        sizes = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size", "threadpool_count")
        names = ("layer_idx", "method", "weight_path", *sizes)
        state = "" if self.moe else "no weights loaded"
        return write_repr(self, state, **{name: getattr(self, name) for name in names})

    @property
    def gpu_experts_mask(self) -> torch.Tensor:
        """The skipped experts, bool [num_experts] on the CPU. It may be modified and assigned."""
        return self._mask

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask: torch.Tensor | None) -> None:
        self._mask.copy_(_copy_mask(mask, self.num_experts, 0))

    @property
    def num_gpu_experts(self) -> int:
        return int(self._mask.sum())

    @check_calls()
    def load_weights(self, physical_to_logical_map_cpu: torch.Tensor | None = None) -> None:
        """Load this layer from weight_path. Expert p computes with the file's expert map[p] (None: p).

        physical_to_logical_map_cpu  integers [num_experts]; None: each expert has its own number

        Raises KTConvertError, with file and remedy, if the files do not match the arguments.
        """
        if self.cpu_save:
            remedy = "leave it out to load weights, or run `ktconvert cpu` to convert a checkpoint"
            raise ArgumentError(f"cpu_save=True is only for load_weights_from_tensors; {remedy}")
        experts = KTExperts.load(
            self.weight_path,
            self.layer_idx,
            method=self.method,
            num_experts=self.num_experts,
            hidden=self.hidden_size,
            intermediate=self.moe_intermediate_size,
            parts=self.threadpool_count,
            strict=self.strict,
            memory=self.memory,
            skip=self._mask.numpy(),
            **self._constants(),
            **self._load_options(physical_to_logical_map_cpu),
        )
        self._install(experts)

    @check_calls()
    def load_weights_from_tensors(
        self,
        gate_proj: torch.Tensor | None,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        physical_to_logical_map_cpu: torch.Tensor | None = None,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Pack gate, up [E, I, H] and down [E, H, I] (rounded to BF16) into threadpool_count slices; save if cpu_save.

        Expert p computes with expert map[p] of the tensors; files have the tensors' order (kt-kernel 0.7.2 fills its
        buffers by map[p]). A config.json in weight_path tells what the experts compute. Raises NotImplementedError for
        a method whose weights exist only in checkpoints, as kt-kernel does, ArgumentError for wrong shapes, and
        UnsupportedError if config.json contradicts the arguments.

        kt-kernel has no biases, [E, I], for down [E, H], and no experts without a gate: gate_proj None.
        """
        if METHODS[self.method].encoding is None:
            remedy = "call load_weights, or pack the tensors with a different method, such as 'FP8'"
            raise NotImplementedError(f"method={self.method!r} is read from checkpoints only: {remedy}")
        shapes = weights.projection_shapes(self.num_experts, self.hidden_size, self.moe_intermediate_size)
        biases = {
            name: bias.detach().to("cpu", torch.float32).numpy()
            for name, bias in zip(PROJECTIONS, (gate_bias, up_bias, down_bias), strict=True)
            if bias is not None
        }
        experts = KTExperts.from_bf16(
            *weights.to_bf16_bits(shapes, gate_proj, up_proj, down_proj),
            biases=biases,
            method=self.method,
            parts=self.threadpool_count,
            layer=self.layer_idx,
            **self._load_options(physical_to_logical_map_cpu),
            function=self._choose_function(bool(biases)),
        )
        if self.cpu_save:
            experts._save(self.weight_path)
        self._install(experts)

    def _load_options(self, physical_to_logical_map: torch.Tensor | None) -> dict[str, Any]:
        order = weights.to_order(physical_to_logical_map, self.num_experts)
        return {"pool": self._pool, "exact": self.exact, "activations": self.activations, "order": order}

    def _install(self, experts: KTExperts) -> None:
        layer = WrappedLayer(experts, self._member, self._mask)
        self._cpu = CpuForward(layer)
        self._stream = StreamForward(layer)
        self.moe = experts

    def _constants(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CONSTANTS}

    def _choose_function(self, has_biases: bool) -> ExpertFunction:
        """Return what experts from tensors compute: by the arguments, or by config.json in weight_path."""
        path = Path(self.weight_path)
        recorded = function_by_config(read_config(path), self.layer_idx) if self.weight_path else None
        required = Requirements(function=make_function(**self._constants()))
        function = required.choose_function(path, self.layer_idx, recorded)
        return function if recorded else replace(function, biases=has_biases)

    def _split(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split ids [T, k], int64, into those to compute now and those to defer to the next layer (None: none).

        Raises ArgumentError if select_deferred_experts returns tensors of a different shape.
        """
        deferred = self.max_deferred_experts_per_token or 0
        if deferred < 1:
            return ids, None
        parts = self.select_deferred_experts(ids, weights, self.num_experts_per_tok - deferred)
        for part in parts:
            if part is not None and part.shape != ids.shape:
                rule = f"must return two tensors of the shape of expert_ids, {tuple(ids.shape)}"
                raise ArgumentError(f"select_deferred_experts {rule}, not {tuple(part.shape)}")
        # Deferred ids are read later, when the caller may have changed its own.
        now, later = (None if part is None else part.to(ids, copy=part is ids).contiguous() for part in parts)
        assert now is not None
        return now, later

    def _require_loaded(self) -> KTExperts:
        """Return the experts. Raises StateError before weights are loaded."""
        if self.moe is None:
            raise StateError(f"layer {self.layer_idx} has no weights: call load_weights or load_weights_from_tensors")
        return self.moe

    @check_calls()
    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, cuda_stream: Any = None
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts: a new tensor of hidden_states' shape, dtype and device.

        hidden_states  floating-point [..., hidden_size], on the CPU or a GPU; rounded to BF16
        topk_ids       integers [..., k]: the experts of each token. Ids outside 0 .. num_experts-1 or in
                       gpu_experts_mask add nothing
        topk_weights   floating-point [..., k]: the factor of each expert
        cuda_stream    number of the stream that orders the work, or a torch stream, if hidden_states is on a GPU;
                       None: torch's current one
        Raises ArgumentError for other tensors, and StateError, a RuntimeError, before weights are loaded.
        """
        if self._cpu is None or is_on_gpu(hidden_states):
            self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
            return self.sync_forward(hidden_states, cuda_stream)
        return self._cpu.forward(hidden_states, topk_ids, topk_weights, self._split)

    def submit_forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, cuda_stream: Any = None
    ) -> None:
        """Start a forward and return. The arguments are copied first (on the stream), so they may be modified."""
        self._require_loaded()
        assert self._cpu is not None and self._stream is not None
        if is_on_gpu(hidden_states):
            self._stream.submit(hidden_states, topk_ids, topk_weights, self._split, cuda_stream)
        else:
            self._cpu.submit(hidden_states, topk_ids, topk_weights, self._split)

    def sync_forward(self, hidden_states: torch.Tensor, cuda_stream: Any = None) -> torch.Tensor:
        """Return the result of the last submit_forward; hidden_states: the tensor passed to it, or a similar one.

        On a CPU it waits for the result; on a stream it makes the stream wait. Deferred experts may still be running.
        """
        if is_on_gpu(hidden_states):
            return require_submitted(self._stream, self.layer_idx).sync(hidden_states, cuda_stream)
        return require_submitted(self._cpu, self.layer_idx).sync(hidden_states)

    def select_deferred_experts(
        self, expert_ids: torch.Tensor, expert_scores: torch.Tensor, protected_k: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split expert_ids into (immediate, deferred), each with -1 for experts of the other.

        A program may assign a function with the same arguments and results to a wrapper.
        """
        return split_immediate(expert_ids, expert_scores, int(protected_k), self._mask)

    @staticmethod
    @check_calls()
    def set_capture_batch_sizes(capture_bs: list[int]) -> None:
        """Set the numbers of tokens for which CUDA graphs will be captured, so that their pinned buffers are kept."""
        if not isinstance(capture_bs, list | tuple):
            raise ArgumentError(f"capture_bs must be a list of int, not {describe(capture_bs)}")
        sizes = [require_integer(f"capture_bs[{index}]", size, 1) for index, size in enumerate(capture_bs)]
        BufferCache.captured_sizes = sizes

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """Return the numbers of tokens that were passed to set_capture_batch_sizes."""
        return BufferCache.captured_sizes

    @staticmethod
    def clear_buffer_cache() -> None:
        """Free all pinned buffers. CUDA graphs captured before must not be replayed any more."""
        ModelMember.clear()

    @staticmethod
    def clear_sft_buffer_cache() -> None:
        """Do nothing: buffers of training are freed with their step."""

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """Start to write an expert's weights, cut for gpu_tp_count ranks, for SGLang's prefill on GPUs, and return.

        Pointers: an address for each rank, of memory that must live until sync_write_weight_scale_to_buffer has
        returned. Raises ValueError for invalid arguments, and StateError before weights are loaded.
        """
        experts = self._require_loaded()
        buffers = (w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs)
        addresses = [list(map(int, pointers)) for pointers in buffers]
        self._writes.append(gpu_buffers.write(experts, int(expert_id), int(gpu_tp_count), addresses))

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Wait until all submitted writes are done. Raises InputError if a mapped file could not be read."""
        writes = self._writes
        self._writes = []
        for job in writes:
            job.wait()


_SIGNATURE = inspect.signature(KTMoEWrapper.__init__)
_MODE = [*_SIGNATURE.parameters].index("mode") - 1  # position of the argument, without self
# Programs look for parameters in the signature of __new__, as kt-kernel's class has no __init__.
_class: Any = KTMoEWrapper
_class.__new__.__signature__ = _SIGNATURE
_class.__signature__ = _SIGNATURE.replace(parameters=[*_SIGNATURE.parameters.values()][1:])


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of either mode. Raises ArgumentError, NotImplementedError."""
    methods.check_method(arguments["mode"], arguments["method"])
    make_function(**{name: arguments[name] for name in CONSTANTS})
    sizes = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    positive = (*sizes, "cpuinfer_threads", "threadpool_count")
    require_integer("layer_idx", arguments["layer_idx"], 0)
    for name in positive:
        require_integer(name, arguments[name], 1)
    require_integer("num_experts_per_tok", arguments["num_experts_per_tok"], 1, arguments["num_experts"])
    require_integer("max_deferred_experts_per_token", arguments["max_deferred_experts_per_token"] or 0, 0)
    require_one_of("cpu_save", arguments["cpu_save"], (False, True))
    if arguments["weight_path"] != "":  # load_weights_from_tensors reads none
        require_path("weight_path", arguments["weight_path"])
        if not arguments["cpu_save"]:
            _check_sizes(**{name: arguments[name] for name in inspect.signature(_check_sizes).parameters})


def _check_sizes(
    mode: str,
    method: str,
    weight_path: str | PathLike[str],
    layer_idx: int,
    num_experts: int,
    hidden_size: int,
    moe_intermediate_size: int,
) -> None:
    """Raise InputError if the weights have different sizes, by reading only headers.

    load_weights_from_tensors and the loaders of packed weights read no files, so that these need not exist, except for
    methods of checkpoints only without training, for which a KTConvertError is raised if the files cannot be read.
    """
    path = Path(weight_path)
    try:
        source = open_experts(path)
        shape = source.shape(layer_idx) if layer_idx in source.layers else None
    except KTConvertError:
        if mode == "inference" and METHODS[method].encoding is None:
            raise
        return
    if shape is not None:
        Requirements(None, num_experts, hidden_size, moe_intermediate_size).check(path, layer_idx, "headers", shape)


def _make_sft_wrapper(arguments: Mapping[str, Any]) -> SftMoEWrapper:
    _check_arguments(arguments)
    shared = set(inspect.signature(SftMoEWrapper.__init__).parameters) & set(arguments) - {"self"}
    mask = _OMITTED if arguments["gpu_experts_mask"] is None else arguments["gpu_experts_mask"]
    skipped = _copy_mask(mask, arguments["num_experts"], arguments["num_gpu_experts"])
    pool = _get_pool(arguments["cpuinfer_threads"], arguments["threadpool_count"], arguments["numa_nodes"])
    return SftMoEWrapper(pool, skipped, **{name: arguments[name] for name in shared})


def _copy_mask(mask: torch.Tensor | None, experts: int, num_gpu_experts: int) -> torch.Tensor:
    """Return a copy of the mask, bool [experts] on the CPU, which C reads at each forward and callers may modify."""
    copy = torch.zeros(experts, dtype=torch.bool, device="cpu", pin_memory=torch.cuda.is_available())
    if mask is _OMITTED:
        copy[: require_integer("num_gpu_experts", num_gpu_experts, 0, experts)] = True
    elif mask is not None:
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (experts,) or mask.dtype.is_floating_point:
            remedy = "; pass torch.tensor(gpu_experts_mask)" if isinstance(mask, list) else ""
            raise ArgumentError(f"gpu_experts_mask must be a bool tensor [{experts}], not {describe(mask)}{remedy}")
        copy.copy_(mask)
    return copy


def _get_pool(threads: int, count: int, numa_nodes: Sequence[int] | None) -> Pool:
    nodes = machine.numa_nodes()[:count] if numa_nodes is None else parse_nodes(numa_nodes)
    if numa_nodes is not None and len(nodes) != count:
        raise ArgumentError(f"numa_nodes must name {count} nodes (threadpool_count), not {len(nodes)}")
    return get_shared_pool(threads, nodes)
