"""KTMoEWrapper(mode="sft"): LoRA training of the routed experts of one layer, with the interface of kt_kernel 0.7.2."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ktconvert.layouts.checkpoints.expert_function import PLAIN
from ktconvert.layouts.errors import StateError
from ktconvert.layouts.outputs import FORMATS, Format
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.reprs import write_repr
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant.arrays import Bytes
from ktconvert.native_quant.matrix import BF16, INT4, Matrix
from ktconvert.native_quant.runtime import streams, weights
from ktconvert.native_quant.runtime.experts import KTExperts, make_function
from ktconvert.native_quant.runtime.kt_sft import LayerReference
from ktconvert.native_quant.runtime.layer_forwards import require_submitted, require_tensors
from ktconvert.native_quant.runtime.methods import METHODS, SFT_WEIGHTS, SKIP_LORA
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.stored_slices import StoredSlice
from ktconvert.native_quant.runtime.training import CPU, Gradients, Lora, SavedForward, TrainingPass

Result = TypeVar("Result")

GROUP = 32  # columns of a scale of RAWINT4
BACKWARD_FORMATS = {"BF16": "AMXBF16"}  # method -> format of its transposes, if that has a different name


class RAWINT4ExpertWeights(NamedTuple):
    """4-bit weights of a layer in groups of 32 columns.

    Codes are uint8 [E, N, K / 2], value + 8, the even column in the lower half of a byte; scales BF16 [E, N, K / 32].
    """

    gate_proj: torch.Tensor
    gate_scale: torch.Tensor
    up_proj: torch.Tensor
    up_scale: torch.Tensor
    down_proj: torch.Tensor
    down_scale: torch.Tensor
    group_size: int = GROUP


@dataclass
class GradientWindow:
    """The gradients of LoRA for kt-kernel's optimizer: buffers to which several backwards can add.

    The first backward after close() overwrites the buffers, later ones add to them. The window is open while the .grad
    of each parameter is its buffer. It is never open for tensors that are not parameters.
    """

    layer: int
    lora: Lora
    buffers: Lora

    @property
    def parameters(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        pairs = zip(self.lora.tensors, self.buffers.tensors, strict=True)
        return [(tensor, buffer) for tensor, buffer in pairs if isinstance(tensor, torch.nn.Parameter)]

    @property
    def is_open(self) -> bool:
        gradients = [(parameter.grad, buffer) for parameter, buffer in self.parameters]
        are_buffers = [gradient is buffer for gradient, buffer in gradients]
        if any(gradient is not None and gradient is not buffer for gradient, buffer in gradients):
            raise RuntimeError(
                f"layer {self.layer}: .grad of a LoRA parameter is not the buffer that init_lora_weights got for its "
                "gradient; set .grad to None after the optimizer's step (zero_grad)"
            )
        if len(set(are_buffers)) > 1:
            raise RuntimeError(
                f"layer {self.layer}: .grad is None for some LoRA parameters; clear all of them, or none"
            )
        return bool(are_buffers) and are_buffers[0]

    def publish(self, gradients: Lora) -> None:
        """Add gradients to the buffers, unless they are the buffers, and set each parameter's .grad."""
        for buffer, gradient in zip(self.buffers.tensors, gradients.tensors, strict=True):
            if gradient is not buffer:
                buffer.copy_(buffer.float() + gradient)
        for parameter, buffer in self.parameters:
            parameter.grad = buffer

    def close(self) -> None:
        for parameter, _ in self.parameters:
            parameter.grad = None


class SftMoEWrapper:
    """Forward and backward of one layer, with the arguments and methods of kt-kernel 0.7.2.

    Differences:

    - For all methods, gradients of LoRA are written to the buffers of init_lora_weights, which become the .grad of the
      parameters (GradientWindow). kt-kernel calls them authoritative, and has them only for some methods. Experts
      without tokens get zeros.
    - By default (share_backward_bb True), backward multiplies by the codes of the forward, in BF16. False, set before
      the weights are loaded: it multiplies by transposes that were quantized separately, in kt-kernel's arithmetic.
      They are packed from the tensors, or read from files, which must exist, and need additional memory. None: it uses
      transposes only if their files exist.
    - Each call reads the parameters of LoRA; update_lora_weights does nothing.
    - Dropout is elementwise, and only applies if save_for_backward is set.
    - The gradient of hidden states is summed in float32.

    Usage: construct, load, init_lora_weights; then forward(save_for_backward=True), backward, optimizer step. Calls in
    a different order raise StateError, a RuntimeError.
    """

    def __init__(
        self,
        pool: Pool,
        mask: torch.Tensor,
        *,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        threadpool_count: int,
        weight_path: str | PathLike[str],
        chunked_prefill_size: int,
        method: str,
        lora_rank: int,
        lora_alpha: float,
        lora_dropout: float,
        full_weight_grad: bool,
        swiglu_limit: float,
        swiglu_alpha: float,
    ) -> None:
        self.is_skip_lora = method.endswith(SKIP_LORA)
        if full_weight_grad:
            raise NotImplementedError(f"method={method!r} trains only LoRA: base weights are frozen (full_weight_grad)")
        if not self.is_skip_lora and (lora_rank < 1 or not lora_alpha > 0 or not 0 <= lora_dropout < 1):
            numbers = f"{lora_rank}, {lora_alpha} and {lora_dropout}"
            raise ValueError(
                f"lora_rank and lora_alpha must be positive, lora_dropout from 0 to below 1, not {numbers}"
            )
        self.layer_idx = layer_idx
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        self.method = method
        self.threadpool_count = threadpool_count
        self.weight_path = str(weight_path)
        self.chunked_prefill_size = int(chunked_prefill_size)
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha
        self.lora_dropout = lora_dropout
        self.lora_scaling = lora_alpha / lora_rank if lora_rank else 0.0
        self.swiglu_limit, self.swiglu_alpha = float(swiglu_limit), float(swiglu_alpha)
        self.share_backward_bb: bool | None = None
        self.share_cache_pool = True  # an attribute of kt-kernel; it has no effect here
        self.moe: KTExperts | None = None
        self._pool = pool
        self._mask = mask
        self._weights_method = METHODS[SFT_WEIGHTS[method]]
        self._window: GradientWindow | None = None
        self._saved: tuple[TrainingPass, SavedForward] | None = None
        self._reusable: SavedForward | None = None  # memory for the next forward
        self._forward: Future[tuple[torch.Tensor, tuple[TrainingPass, SavedForward] | None]] | None = None
        self._backward: Future[Gradients] | None = None
        self._inference: torch.Tensor | None = None  # hidden states of submit_forward_inference

    def __repr__(self) -> str:
        """Return path, method and sizes."""
        sizes = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size", "lora_rank")
        names = ("layer_idx", "method", "weight_path", *sizes)
        state = "" if self.moe else "no weights loaded"
        return write_repr(self, state, **{name: getattr(self, name) for name in names})

    # --- weights ---

    def load_weights(self, physical_to_logical_map_cpu: torch.Tensor | None = None) -> None:
        """Load this layer from weight_path: converted weights, or a checkpoint that the method can read."""
        self._load(LayerReference(Path(self.weight_path), self.layer_idx), physical_to_logical_map_cpu)

    def _load(self, stored: LayerReference, physical_to_logical_map_cpu: torch.Tensor | None) -> None:
        experts = KTExperts.load(
            *stored,
            method=self._weights_method.name,
            num_experts=self.num_experts,
            hidden=self.hidden_size,
            intermediate=self.moe_intermediate_size,
            parts=self.threadpool_count,
            pool=self._pool,
            order=weights.to_order(physical_to_logical_map_cpu, self.num_experts),
            transposed=self._transposed,
            skip=self._mask.numpy(),
            swiglu_limit=self.swiglu_limit,
            swiglu_alpha=self.swiglu_alpha,
        )
        self._install(experts)

    def load_weights_from_tensors(
        self,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        physical_to_logical_map_cpu: torch.Tensor | None = None,
    ) -> None:
        """Pack gate, up [E, I, H] and down [E, H, I] into threadpool_count NUMA slices; slot p has expert map[p]."""
        if self._weights_method.name == "RAWINT4":
            raise ValueError(f"method={self.method!r} requires packed weights; call load_rawint4_weights")
        gate, up, down = weights.to_bf16_bits(self._shapes, gate_proj, up_proj, down_proj)
        options = self._weights_method, self.layer_idx, self.threadpool_count, self._pool
        packed = weights.pack(gate, up, down, *options, transposed=bool(self._transposed))
        self._install_packed(packed, physical_to_logical_map_cpu)

    def load_block_fp8_weights(
        self, weights_: LayerReference, physical_to_logical_map_cpu: torch.Tensor | None = None
    ) -> None:
        """Load the layer that load_block_fp8_experts_from_checkpoint_files of kt_sft.py returned."""
        self._require_method("FP8", "load_block_fp8_weights")
        if not isinstance(weights_, LayerReference):
            remedy = "call load_weights, which reads the checkpoint in weight_path"
            raise TypeError(f"load_block_fp8_weights needs a layer of install_as_kt_kernel's kt_kernel.sft; {remedy}")
        self._load(weights_, physical_to_logical_map_cpu)

    def load_rawint4_weights(self, weights_: Any, physical_to_logical_map_cpu: torch.Tensor | None = None) -> None:
        """Load packed integers: a RAWINT4ExpertWeights, kt-kernel's object of that name, or a layer of kt_sft.py."""
        self._require_method("RAWINT4", "load_rawint4_weights")
        if isinstance(weights_, LayerReference):
            return self._load(weights_, physical_to_logical_map_cpu)
        if weights_.group_size != GROUP:
            raise ValueError(f"RAWINT4 has a scale for each {GROUP} columns, not {weights_.group_size}")
        linears = {}
        for name, (experts, n, k) in zip(PROJECTIONS, self._shapes, strict=True):
            codes, scales = getattr(weights_, f"{name}_proj"), getattr(weights_, f"{name}_scale")
            for tensor, dtype, columns in ((codes, torch.uint8, k // 2), (scales, torch.bfloat16, k // GROUP)):
                if tuple(tensor.shape) != (shape := (experts, n, columns)) or tensor.dtype != dtype:
                    raise ValueError(f"{name} must be {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
            pairs = zip(codes.numpy(), scales.float().numpy(), strict=True)
            linears[name] = [Matrix(values, INT4, scale, (1, GROUP)) for values, scale in pairs]
        slicing = Slicing(self.layer_idx, self.hidden_size, self.moe_intermediate_size, self.threadpool_count)
        no_source: Any = None  # StoredSlice needs it only for messages on zero points and column orders

        def write(linear: Matrix, out: Sequence[Bytes]) -> None:
            self._weights_method.write_slice(StoredSlice(linear, no_source, {}), out)

        packed = weights.pack_linears(self._weights_method, slicing, linears, write, self._pool)
        self._install_packed(packed, physical_to_logical_map_cpu)

    def save_backward_weights_from_tensors(
        self,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        physical_to_logical_map: torch.Tensor | None,
        output_path: str,
    ) -> None:
        """Write kt-kernel's transposed matrices as .kt files to output_path/_layer_N/_numa_P, in the tensors' order."""
        fmt = self._format
        if not fmt.backward:
            raise ValueError(f"method={self.method!r} has no transposed matrices in files")
        bits = weights.to_bf16_bits(self._shapes, gate_proj, up_proj, down_proj)
        linears = dict(zip(PROJECTIONS, bits, strict=True))
        slicing = Slicing(
            self.layer_idx, self.hidden_size, self.moe_intermediate_size, self.threadpool_count, True, forward=False
        )
        folder = Path(output_path) / f"_layer_{self.layer_idx}"
        for numa_slice in slicing.all_slices(range(self.num_experts)):
            arrays = [np.empty(tensor.nbytes, np.uint8) for tensor in fmt.encoding.tensors(numa_slice.n, numa_slice.k)]
            fmt.encoding.quantize(
                numa_slice.cut_linear(Matrix(linears[numa_slice.projection][numa_slice.expert], BF16)), arrays
            )
            weights.write_loose(folder, fmt, numa_slice, arrays)

    # --- LoRA ---

    def init_lora_weights(self, *tensors: torch.Tensor) -> None:
        """Set the six tensors of LoRA (gate_a, gate_b, up_a, up_b, down_a, down_b) and the six of their gradients.

        All are BF16, contiguous, on the CPU, and are used in place. The .grad of nn.Parameters becomes the buffer of
        the gradient. For experts without a gate, which kt-kernel does not train, the gate's tensors are left out.
        """
        if self.is_skip_lora:
            raise RuntimeError(f"method={self.method!r} applies no LoRA")
        if len(tensors) not in (12, 8):
            numbers = f"six tensors and six gradients, or without a gate four and four, not {len(tensors)} tensors"
            raise TypeError(f"init_lora_weights takes {numbers}")
        e = self.num_experts
        r = self.lora_rank
        h = self.hidden_size
        i = self.moe_intermediate_size
        shapes = ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r))
        count = len(tensors) // 2
        names = [*Lora._fields[-count:], *(f"grad_{name}" for name in Lora._fields[-count:])]
        for name, tensor, shape in zip(names, tensors, shapes[-count:] * 2, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")
            if tensor.dtype != torch.bfloat16 or tensor.device != CPU or not tensor.is_contiguous():
                raise ValueError(f"{name} must be a contiguous BF16 tensor on the CPU")
        lora, buffers = Lora.from_tensors(tensors[:count]), Lora.from_tensors(tensors[count:])
        self._window = GradientWindow(self.layer_idx, lora, buffers)
        self._window.close()

    def update_lora_weights(self) -> None:
        """Do nothing but raise RuntimeError before init_lora_weights; kt-kernel needs it after an optimizer's step."""
        self._require_lora()

    def release_authoritative_optimizer_grads(self) -> None:
        """Close the gradients' window: the next backward overwrites them."""
        if self._window is not None:
            self._window.close()

    # --- forward and backward ---

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        save_for_backward: bool = True,
        output_device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return the result, BF16 [T, H], as a new tensor. hidden_states [T, H], expert_ids and weights [T, k]."""
        self.submit_forward(hidden_states, expert_ids, weights, save_for_backward)
        return self.sync_forward(output_device)

    def submit_forward(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        save_for_backward: bool = True,
    ) -> None:
        """Start a forward, with copies of the arguments."""
        require_tensors(hidden_states=hidden_states, expert_ids=expert_ids, weights=weights)
        if len(hidden_states) > self.chunked_prefill_size:
            limit = f"chunked_prefill_size={self.chunked_prefill_size}"
            raise ValueError(f"layer {self.layer_idx}: {len(hidden_states)} tokens are more than {limit}")
        if expert_ids.shape[-1] != self.num_experts_per_tok:
            raise ValueError(f"expert_ids must be [tokens, {self.num_experts_per_tok}], not {tuple(expert_ids.shape)}")
        self._start(hidden_states, expert_ids, weights, save_for_backward)

    def _start(
        self, hidden_states: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, save_for_backward: bool
    ) -> None:
        if self.moe is None:
            raise StateError(f"layer {self.layer_idx} has no weights: call load_weights or load_weights_from_tensors")
        lora = self._require_lora()
        if self._forward is not None:
            raise StateError(f"layer {self.layer_idx}: submit_forward again without sync_forward")
        x, ids, routing_weights = (
            tensor.detach().to(CPU, copy=True) for tensor in (hidden_states, expert_ids, weights)
        )
        dropout = self.lora_dropout if save_for_backward and lora is not None else 0.0
        step = TrainingPass.create(self.moe, x, ids, routing_weights, lora, self.lora_scaling, dropout, self._mask)

        reusable = self._reusable
        self._reusable = None

        def compute() -> tuple[torch.Tensor, tuple[TrainingPass, SavedForward] | None]:
            out, saved = step.forward(reusable)
            return out, (step, saved) if save_for_backward else None

        self._forward = _start_thread(compute)

    def sync_forward(self, output_device: torch.device | None = None) -> torch.Tensor:
        """Wait for the last submit_forward; return its output [T, H] in BF16, on output_device (None: the input's)."""
        future = require_submitted(self._forward, self.layer_idx)
        self._forward = None
        out, saved = future.result()
        self._saved = saved or self._saved
        return out if output_device is None else out.to(output_device)

    def submit_forward_inference(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        cuda_stream: Any = None,
    ) -> None:
        """Start a forward without a backward, of any number of tokens, with copies of the arguments.

        Tensors on a GPU are copied on cuda_stream (its number, a torch stream, or None: torch's current one), for which
        this call waits. It cannot be captured in a CUDA graph.
        """
        require_tensors(hidden_states=hidden_states, expert_ids=expert_ids, weights=weights)
        with _use_stream(hidden_states, cuda_stream):
            hidden, ids, scores = (x.reshape(-1, x.shape[-1]) for x in (hidden_states, expert_ids, weights))
            self._start(hidden, ids, scores, save_for_backward=False)
        self._inference = hidden_states

    def sync_forward_inference(self, cuda_stream: Any = None) -> torch.Tensor:
        """Return the result of the last submit_forward_inference, with its input's shape, dtype and device."""
        like = require_submitted(self._inference, self.layer_idx, "sync_forward_inference", "submit_forward_inference")
        self._inference = None
        out = self.sync_forward()
        with _use_stream(like, cuda_stream):
            return out.view(like.shape).to(like)

    def backward(
        self,
        grad_output: torch.Tensor,
        output_device: torch.device | None = None,
        optimizer_grad_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of hidden_states, BF16 [T, H], and weights, float32 [T, k], for the last saved forward.

        The gradients of LoRA, times optimizer_grad_scale, go to their buffers.
        """
        self.submit_backward_async(grad_output, output_device, optimizer_grad_scale)
        return self.sync_backward()

    def submit_backward_async(
        self,
        grad_output: torch.Tensor,
        output_device: torch.device | None = None,
        optimizer_grad_scale: float = 1.0,
    ) -> None:
        """Start a backward, with a copy of grad_output."""
        require_tensors(grad_output=grad_output)
        if self._backward is not None:
            raise StateError(f"layer {self.layer_idx}: submit_backward_async again without sync_backward")
        if self._saved is None:
            raise StateError(
                f"layer {self.layer_idx}: backward without forward(save_for_backward=True) before it; call that first"
            )
        scale = float(optimizer_grad_scale)
        if not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"optimizer_grad_scale must be finite and positive, not {optimizer_grad_scale}")
        if grad_output.shape != self._saved[0].hidden.shape:
            shapes = f"{tuple(self._saved[0].hidden.shape)}, not {tuple(grad_output.shape)}"
            raise ValueError(f"layer {self.layer_idx}: grad_output must have the shape of the last forward, {shapes}")
        add = self._window is not None and self._window.is_open
        (step, saved), self._saved = self._saved, None
        if add and step.lora is not None:  # sum in float32, then round
            floats = Lora.from_tensors(tensor.float() for tensor in step.lora.tensors)
            step = TrainingPass(**{**vars(step), "lora": floats})
        gradient = grad_output.detach().to(CPU, torch.bfloat16, copy=True)
        buffers = None if self._window is None or add else self._window.buffers

        def compute() -> Gradients:
            gradients = step.backward(saved, gradient, scale, buffers)
            self._reusable = saved
            return gradients

        self._device = output_device
        self._backward = _start_thread(compute)

    def sync_backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the last submit_backward_async; return the gradients of its input and of the routing weights."""
        future = require_submitted(self._backward, self.layer_idx, "sync_backward", "submit_backward_async")
        self._backward = None
        gradients = future.result()
        if self._window is not None and gradients.lora is not None:
            self._window.publish(gradients.lora)
        device = self._device or CPU
        return gradients.hidden.to(device), gradients.weights.to(device)

    # --- helpers ---

    @property
    def _transposed(self) -> bool | None:
        if self.share_backward_bb is None or not self._format.backward:
            return None
        return not self.share_backward_bb

    @property
    def _format(self) -> Format:
        name = self._weights_method.name
        return FORMATS[BACKWARD_FORMATS.get(name, name)]

    def _require_method(self, name: str, function: str) -> None:
        if self._weights_method.name != name:
            methods = [method for method, of_weights in SFT_WEIGHTS.items() if of_weights == name]
            raise ValueError(f"{function} needs method={methods[-1]!r}, not {self.method!r}")

    def _require_lora(self) -> Lora | None:
        if self.is_skip_lora:
            return None
        if self._window is None:
            raise StateError(f"layer {self.layer_idx} has no LoRA: call init_lora_weights first")
        return self._window.lora

    def _install_packed(self, packed: weights.LayerWeights, physical_to_logical_map: torch.Tensor | None) -> None:
        function = make_function(self.swiglu_limit, self.swiglu_alpha) or PLAIN
        order = weights.to_order(physical_to_logical_map, self.num_experts)
        self._install(KTExperts(packed, pool=self._pool, order=order, function=function))

    def _install(self, experts: KTExperts) -> None:
        self.moe = experts
        self._saved = None

    @property
    def _shapes(self) -> list[weights.Shape]:
        return weights.projection_shapes(self.num_experts, self.hidden_size, self.moe_intermediate_size)


class KTMoEFunction(torch.autograd.Function):
    """A submitted forward of a layer, differentiable in hidden states [b, s, H] and routing weights.

    The gradients of LoRA go to the wrapper's buffers. The arguments are kt-kernel's; only the first four are used, and
    lora_ref, a tensor that requires a gradient if nothing else does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        wrapper: SftMoEWrapper,
        lora_ref: torch.Tensor,
        *settings: Any,
    ) -> torch.Tensor:
        ctx.wrapper = wrapper
        ctx.settings = len(settings)
        ctx.weights = topk_weights.shape, topk_weights.dtype, topk_weights.device
        # Reading a saved tensor makes activation checkpointing compute the forward again before backward needs it.
        ctx.save_for_backward(hidden_states.new_empty(()))
        out = wrapper.sync_forward(hidden_states.device)
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        hidden, weights = ctx.wrapper.backward(flat, gradient.device)
        shape, dtype, device = ctx.weights
        hidden, weights = hidden.view(gradient.shape).to(gradient.dtype), weights.view(shape).to(device, dtype)
        return hidden, None, weights, None, None, *[None] * ctx.settings


def _start_thread(compute: Callable[[], Result]) -> Future[Result]:
    """Compute in a new thread; an executor would lose its threads in a fork."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _use_stream(tensor: torch.Tensor, cuda_stream: Any) -> contextlib.AbstractContextManager[Any]:
    return streams.use_stream(tensor.device, cuda_stream) if tensor.is_cuda else contextlib.nullcontext()
