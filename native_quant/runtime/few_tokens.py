"""A few tokens in a transformers model on the CPU: linears that read the memory at its speed."""

from __future__ import annotations

from typing import Any

import torch

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.pool import Pool, check_error

MOST_TOKENS: int = lib.KTQ_ROW_TOKENS


class FewTokensLinear(torch.nn.Linear):
    """A linear that multiplies few tokens with the runtime's kernels if no gradients are needed; else as its base.

    pool: threads that compute
    """

    pool: Any  # torch's modules declare other attributes as tensors or modules

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input [..., columns] times the transposed weight, plus the bias: numerics.md, section 5e."""
        if not self._is_for_kernel(input):
            return super().forward(input)
        x = input.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.bfloat16)
        sizes = (x.numel() // self.in_features, self.out_features, self.in_features)
        matrices = (address_of(self.weight), ffi.NULL if self.bias is None else address_of(self.bias))
        check_error(lib.ktq_multiply_rows(self.pool.pointer, *sizes, *matrices, address_of(x), address_of(out)))
        return out

    def _is_for_kernel(self, x: torch.Tensor) -> bool:
        return (
            0 < x.numel() <= MOST_TOKENS * self.in_features
            and type(x) is torch.Tensor
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and all(is_bf16_in_memory(tensor) for tensor in (x, self.weight, self.bias) if tensor is not None)
            and self.weight.is_contiguous()
        )


def is_bf16_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are BF16 in the memory of this machine."""
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu


def address_of(tensor: torch.Tensor) -> Any:
    """Return the address of a tensor's BF16 numbers for the C library."""
    return ffi.cast("uint16_t *", tensor.data_ptr())


def accelerate_linears(model: torch.nn.Module, pool: Pool) -> None:
    """Let every linear of the model multiply few tokens with the runtime's kernels, with the threads of a pool."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.in_features % lib.KTQ_ROW_MULTIPLE == 0:
            linear: Any = module
            linear.__class__, linear.pool = FewTokensLinear, pool
