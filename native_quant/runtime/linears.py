"""Linears of a transformers model with BF16 weights on the CPU: a few tokens are multiplied at the memory's speed."""

from __future__ import annotations

import torch

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.pool import Pool, check_error

MOST_TOKENS: int = lib.KTQ_ROW_TOKENS


class FewTokensLinear(torch.nn.Linear):
    """A linear that multiplies few tokens with the runtime's kernels if no gradients are needed; else as its base.

    pool: threads that compute
    """

    pool: Pool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input [..., columns] times the transposed weight, plus the bias: numerics.md, section 5e."""
        if not self._is_for_kernel(input):
            return super().forward(input)
        x = input.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.bfloat16)
        matrices = (_address(self.weight), ffi.NULL if self.bias is None else _address(self.bias))
        sizes = (x.numel() // self.in_features, self.out_features, self.in_features)
        check_error(lib.ktq_multiply_rows(self.pool.pointer, *sizes, *matrices, _address(x), _address(out)))
        return out

    def _is_for_kernel(self, x: torch.Tensor) -> bool:
        return (
            0 < x.numel() <= MOST_TOKENS * self.in_features
            and type(x) is torch.Tensor
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()  # type: ignore[no-untyped-call]
            and all(_is_bf16_in_memory(tensor) for tensor in (x, self.weight, self.bias) if tensor is not None)
            and self.weight.is_contiguous()
        )


def _is_bf16_in_memory(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def _address(tensor: torch.Tensor) -> object:
    return ffi.cast("uint16_t *", tensor.data_ptr())


def speed_up_linears(model: torch.nn.Module, pool: Pool) -> None:
    """Let every linear of the model multiply few tokens with the runtime's kernels, with the threads of a pool."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.in_features % lib.KTQ_ROW_MULTIPLE == 0:
            module.__class__ = FewTokensLinear
            module.pool = pool
