"""KTMoEWrapper: routed experts of one layer for torch, with the interface of kt_kernel 0.7.2's class of that name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime import gpu_buffers, methods, weights
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.layer_forwards import (
    CpuForward,
    ModelMember,
    StreamForward,
    WrappedLayer,
    split_immediate,
)
from ktconvert.native_quant.runtime.methods import METHODS, Swiglu
from ktconvert.native_quant.runtime.pool import Job, Pool, get_shared_pool, parse_nodes
from ktconvert.native_quant.runtime.sft import SftMoEWrapper
from ktconvert.native_quant.runtime.streams import BufferCache

_LEFT_OUT: Any = object()  # these have no default in kt-kernel; only gpu_experts_mask may be left out


class KTMoEWrapper:
    """The routed experts of one layer on the CPU. Arguments, methods and their meaning are those of kt-kernel 0.7.2.

    gpu_experts_mask   bool [num_experts]: experts that the GPU computes and we skip. None: none; left out: the first
                       num_gpu_experts, as in kt-kernel before 0.6
    cpuinfer_threads   threads; wrappers with the same number and nodes share them
    threadpool_count   NUMA slices to pack, or to cut a checkpoint into; nodes to spread threads over: numa_nodes, or
                       the first with CPUs of this process. Converted files have their own number of slices
    weight_path        converted weights, or a checkpoint that the method reads; with cpu_save the one to write to
    cpu_save           load_weights_from_tensors also writes kt-kernel's loose .kt files
    max_deferred_experts_per_token   see layer_forwards.py
    method             a row of methods.METHODS; those without an encoding are read from checkpoints only
    swiglu_limit, swiglu_alpha   Experts explains them; kt-kernel ignores an alpha where we refuse it
    mode "sft" gives an SftMoEWrapper (sft.py); otherwise chunked_prefill_size and the arguments for training are
    accepted and ignored.

    Class attributes that kt-kernel does not have: `exact` = True rounds where kt-kernel rounds, bit for bit; `strict` =
    True refuses files of another threadpool_count; `memory` is Experts.load's.

    Raises ValueError for an invalid mode, method or size, NotImplementedError for a method of kt-kernel that we do not
    compute.
    """

    exact: ClassVar[bool] = False
    strict: ClassVar[bool] = False
    memory: ClassVar[str] = "auto"

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        """As kt-kernel's: of another class with mode="sft", which then has no __init__ of this one."""
        if not arguments and not named:  # by copy and pickle, which say themselves what they cannot do
            return super().__new__(cls)
        given = inspect.signature(cls.__init__).bind(None, *arguments, **named)
        given.apply_defaults()
        wrapper = super().__new__(cls)
        return wrapper if given.arguments["mode"] != "sft" else _training(cls, given.arguments)

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | None = _LEFT_OUT,
        cpuinfer_threads: int = _LEFT_OUT,
        threadpool_count: int = _LEFT_OUT,
        weight_path: str = _LEFT_OUT,
        chunked_prefill_size: int = _LEFT_OUT,
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
    ) -> None:
        _check(locals())
        self.layer_idx, self.num_experts, self.num_experts_per_tok = layer_idx, num_experts, num_experts_per_tok
        self.hidden_size, self.moe_intermediate_size, self.method = hidden_size, moe_intermediate_size, method
        self.threadpool_count, self.weight_path, self.cpu_save = threadpool_count, str(weight_path), cpu_save
        self.chunked_prefill_size = chunked_prefill_size
        self._max_deferred = int(max_deferred_experts_per_token or 0)
        self.swiglu_limit, self.swiglu_alpha = float(swiglu_limit), float(swiglu_alpha)
        self._mask = _mask(gpu_experts_mask, num_experts, num_gpu_experts)
        self._pool = _pool(cpuinfer_threads, threadpool_count, numa_nodes)
        self.moe: Experts | None = None  # kt-kernel's name for the object that computes
        self._layer: WrappedLayer | None = None
        self._cpu: CpuForward | None = None
        self._stream: StreamForward | None = None
        self._member = ModelMember(self.weight_path, layer_idx)
        self._written: list[Job] = []

    @property
    def gpu_experts_mask(self) -> torch.Tensor:
        """Experts that are skipped, bool [num_experts] on the CPU. It may be written to, and assigned."""
        return self._mask

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask: torch.Tensor | None) -> None:
        self._mask.copy_(_mask(mask, self.num_experts, 0))

    @property
    def num_gpu_experts(self) -> int:
        return int(self._mask.sum())

    @property
    def max_deferred_experts_per_token(self) -> int:
        """Experts of a token that may be left to the next layer."""
        return self._max_deferred

    @max_deferred_experts_per_token.setter
    def max_deferred_experts_per_token(self, number: int | None) -> None:
        self._max_deferred = int(number or 0)
        if self._layer is not None:
            self._layer.max_deferred = self._max_deferred

    def load_weights(self, physical_to_logical_map_cpu: torch.Tensor | None = None) -> None:
        """Load this layer from weight_path. Expert p computes with the file's expert map[p] (None: p). Raises
        ktconvert.layouts.errors.* (a message with file and remedy) where the files do not match the arguments.
        """
        if self.cpu_save:
            remedy = "to load, leave it out, and to convert a checkpoint run `ktconvert cpu`"
            raise ValueError(f"cpu_save=True writes what load_weights_from_tensors packs; {remedy}")
        experts = Experts.load(
            self.weight_path,
            self.layer_idx,
            method=self.method,
            num_experts=self.num_experts,
            hidden=self.hidden_size,
            intermediate=self.moe_intermediate_size,
            parts=self.threadpool_count,
            strict=self.strict,
            memory=self.memory,
            **self._computed(physical_to_logical_map_cpu),
        )
        self._install(experts)

    def load_weights_from_tensors(
        self,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        physical_to_logical_map_cpu: torch.Tensor | None = None,
    ) -> None:
        """Pack gate, up [E, I, H] and down [E, H, I] (rounded to BF16) into threadpool_count parts; save if cpu_save.

        Expert p computes with expert map[p] of the tensors, which files hold in their order (kt-kernel 0.7.2 fills its
        buffers by map[p]). NotImplementedError for a method whose numbers only checkpoints have, as in kt-kernel.
        """
        if METHODS[self.method].encoding is None:
            remedy = "call load_weights, or pack the tensors with method='FP8' or another"
            raise NotImplementedError(f"method={self.method!r} is read from checkpoints only: {remedy}")
        shapes = weights.shapes_of(self.num_experts, self.hidden_size, self.moe_intermediate_size)
        experts = Experts.from_bf16(
            *weights.bits_of(shapes, gate_proj, up_proj, down_proj),
            method=self.method,
            parts=self.threadpool_count,
            layer=self.layer_idx,
            **self._computed(physical_to_logical_map_cpu),
        )
        if self.cpu_save:
            experts.save(self.weight_path)
        self._install(experts)

    def _computed(self, order: torch.Tensor | None) -> dict[str, Any]:
        of_file = None if order is None else np.asarray(order.cpu(), np.int64)
        swiglu = {"swiglu_limit": self.swiglu_limit, "swiglu_alpha": self.swiglu_alpha}
        return {"pool": self._pool, "exact": self.exact, "order": of_file, **swiglu}

    def _install(self, experts: Experts) -> None:
        layer = WrappedLayer(experts, self._member, self._mask, self.num_experts_per_tok, self._max_deferred)
        self._layer, self._cpu, self._stream, self.moe = layer, CpuForward(layer), StreamForward(layer), experts

    def _loaded(self) -> Experts:
        """The experts. Raises RuntimeError before weights are loaded."""
        if self.moe is None:
            raise RuntimeError(f"layer {self.layer_idx} has no weights: call load_weights or load_weights_from_tensors")
        return self.moe

    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, cuda_stream: Any = None
    ) -> torch.Tensor:
        """The weighted sum of each token's experts: a new tensor of hidden_states' shape, dtype and device.

        hidden_states [..., hidden_size]; topk_ids, topk_weights [..., k]. Ids below 0, not below num_experts or in
        gpu_experts_mask add nothing. cuda_stream (its number, a torch stream, or None: torch's current one) orders the
        work where hidden_states is on a GPU.
        """
        if self._cpu is None or hidden_states.is_cuda:
            self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
            return self.sync_forward(hidden_states, cuda_stream)
        return self._cpu.forward(hidden_states, topk_ids, topk_weights)

    def submit_forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, cuda_stream: Any = None
    ) -> None:
        """Start a forward and return. The arguments are copied first (on the stream), so they may be written to."""
        self._loaded()
        assert self._cpu is not None and self._stream is not None
        if hidden_states.is_cuda:
            self._stream.submit(hidden_states, topk_ids, topk_weights, cuda_stream)
        else:
            self._cpu.submit(hidden_states, topk_ids, topk_weights)

    def sync_forward(self, hidden_states: torch.Tensor, cuda_stream: Any = None) -> torch.Tensor:
        """The result of the last submit_forward; hidden_states: the tensor that was passed to it, or one like it. On a
        CPU it waits for the result, on a stream it makes the stream wait. Deferred experts may still be computing.
        """
        if self._cpu is None or self._stream is None:
            raise RuntimeError(f"layer {self.layer_idx}: sync_forward without a submit_forward before it")
        return self._stream.sync(hidden_states, cuda_stream) if hidden_states.is_cuda else self._cpu.sync(hidden_states)

    def select_deferred_experts(
        self, expert_ids: torch.Tensor, expert_scores: torch.Tensor, protected_k: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """expert_ids as (immediate, deferred), with -1 where an expert is in the other one (layer_forwards.py)."""
        return split_immediate(expert_ids, expert_scores, int(protected_k), self.num_experts)

    @staticmethod
    def set_capture_batch_sizes(capture_bs: list[int]) -> None:
        """Numbers of tokens for which CUDA graphs will be captured: their pinned buffers are kept."""
        BufferCache.captured_sizes = capture_bs

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """The numbers of tokens that were passed to set_capture_batch_sizes."""
        return BufferCache.captured_sizes

    @staticmethod
    def clear_buffer_cache() -> None:
        """Free all pinned buffers. CUDA graphs captured before must not be replayed any more."""
        ModelMember.clear()

    @staticmethod
    def clear_sft_buffer_cache() -> None:
        """Nothing to clear: buffers of training end with their step."""

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """For SGLang's prefill on GPUs: start to write what an expert computes with, cut for gpu_tp_count ranks, and
        return. Pointers: an address for each rank, of memory that stays until it was waited for (gpu_buffers.py).

        Raises gpu_buffers.write's errors, RuntimeError before weights are loaded.
        """
        experts = self._loaded()
        given = (w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs)
        addresses = [list(map(int, of_ranks)) for of_ranks in given]
        self._written.append(gpu_buffers.write(experts, int(expert_id), int(gpu_tp_count), addresses))

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Wait until all that was submitted is written. Raises InputError where a mapped file could not be read."""
        written, self._written = self._written, []
        for job in written:
            job.wait()


# That of __init__, not of __new__.
_of_init = inspect.signature(KTMoEWrapper.__init__)
KTMoEWrapper.__signature__ = _of_init.replace(parameters=list(_of_init.parameters.values())[1:])  # type: ignore[attr-defined]


def _check(given: Mapping[str, Any]) -> None:
    """The arguments of either mode. Raises TypeError, ValueError, NotImplementedError."""
    names = ("cpuinfer_threads", "threadpool_count", "weight_path", "chunked_prefill_size")
    if missing := [name for name in names if given[name] is _LEFT_OUT]:
        raise TypeError(f"KTMoEWrapper needs {', '.join(missing)} as well")
    methods.check(given["mode"], given["method"], Swiglu(given["swiglu_limit"], given["swiglu_alpha"]))
    positive = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size", *names[:2])
    sizes = [given[name] for name in positive]
    if min(sizes) < 1 or given["num_experts_per_tok"] > given["num_experts"]:
        numbers = f"{', '.join(positive[:-1])} and {positive[-1]}"
        needed = "must be positive and num_experts_per_tok at most num_experts"
        raise ValueError(f"{numbers} {needed}, not {', '.join(map(str, sizes))}")


def _training(cls: type[KTMoEWrapper], given: Mapping[str, Any]) -> Any:
    _check(given)
    shared = set(inspect.signature(SftMoEWrapper.__init__).parameters) & set(given) - {"self"}
    on_gpu = given["gpu_experts_mask"], given["num_experts"], given["num_gpu_experts"]
    mask = _mask(_LEFT_OUT if on_gpu[0] is None else on_gpu[0], *on_gpu[1:])
    pool = _pool(given["cpuinfer_threads"], given["threadpool_count"], given["numa_nodes"])
    return SftMoEWrapper(pool, mask, **{name: given[name] for name in shared})


def _mask(mask: torch.Tensor | None, experts: int, on_gpu: int) -> torch.Tensor:
    """A copy of the mask, bool [experts] on the CPU, which C reads at each forward and callers may write to."""
    own = torch.zeros(experts, dtype=torch.bool, device="cpu", pin_memory=torch.cuda.is_available())
    if mask is _LEFT_OUT:
        own[:on_gpu] = True
    elif mask is not None:
        if tuple(mask.shape) != (experts,):
            raise ValueError(f"gpu_experts_mask must have shape ({experts},), not {tuple(mask.shape)}")
        own.copy_(mask)
    return own


def _pool(threads: int, count: int, numa_nodes: Sequence[int] | None) -> Pool:
    nodes = machine.numa_nodes()[:count] if numa_nodes is None else parse_nodes(numa_nodes)
    if numa_nodes is not None and len(nodes) != count:
        raise ValueError(f"numa_nodes must name {count} nodes (threadpool_count), not {len(nodes)}")
    return get_shared_pool(threads, nodes)
