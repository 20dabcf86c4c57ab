"""The gradients of LoRA as kt-kernel's optimizer sees them: buffers that several backwards add to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktconvert.native_quant.runtime.training import Lora


@dataclass
class GradientWindow:
    """The gradients of LoRA that an optimizer sees: written by the first backward after it was closed, added to by
    later ones. It is open while each parameter's .grad is its buffer. Tensors that are no parameters: never open.
    """

    layer: int
    tensors: Lora
    buffers: Lora

    @property
    def parameters(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        pairs = zip(self.tensors, self.buffers, strict=True)
        return [(tensor, buffer) for tensor, buffer in pairs if isinstance(tensor, torch.nn.Parameter)]

    @property
    def is_open(self) -> bool:
        given = [(parameter.grad, buffer) for parameter, buffer in self.parameters]
        open_ones = [gradient is buffer for gradient, buffer in given]
        if any(gradient is not None and gradient is not buffer for gradient, buffer in given):
            raise RuntimeError(
                f"layer {self.layer}: another tensor is in .grad of a parameter of LoRA, whose gradients are in the "
                "buffers of init_lora_weights; set .grad to None after the optimizer's step (zero_grad)"
            )
        if len(set(open_ones)) > 1:
            raise RuntimeError(f"layer {self.layer}: .grad is None for some parameters of LoRA: clear all, or none")
        return bool(open_ones) and open_ones[0]

    def publish(self, gradients: Lora) -> None:
        """Gradients other than the buffers themselves are added to these."""
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            if gradient is not buffer:
                buffer.copy_(buffer.float() + gradient)
        for parameter, buffer in self.parameters:
            parameter.grad = buffer

    def close(self) -> None:
        for parameter, _ in self.parameters:
            parameter.grad = None
