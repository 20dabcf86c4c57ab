"""A few tokens in a transformers model on the CPU: linears that read the memory at its speed, in BF16 or int8."""

from __future__ import annotations

from typing import Any

import torch

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
from ktconvert.native_quant.runtime.pool import Pool, check_error

MOST_TOKENS: int = lib.KTQ_ROW_TOKENS
GROUP: int = lib.KTQ_ROW_MULTIPLE  # columns that share a scale
LARGEST_CODE = 127


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
        bias = ffi.NULL if self.bias is None else address_of(self.bias)
        check_error(self._multiply(self.pool.pointer, *sizes, bias, address_of(x), address_of(out)))
        return out

    def _multiply(self, pool: Any, tokens: int, rows: int, columns: int, *bias_x_out: Any) -> int:
        weight = address_of(self.weight)
        return int(lib.ktq_multiply_rows(pool, tokens, rows, columns, weight, *bias_x_out))

    def _numbers(self) -> torch.Tensor:
        """Return the BF16 tensor whose numbers the kernel reads."""
        return self.weight

    def _is_for_kernel(self, x: torch.Tensor) -> bool:
        numbers = self._numbers()
        return (
            0 < x.numel() <= MOST_TOKENS * self.in_features
            and type(x) is torch.Tensor
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and all(is_bf16_in_memory(tensor) for tensor in (x, numbers, self.bias) if tensor is not None)
            and numbers.is_contiguous()
        )


class Int8Linear(FewTokensLinear):
    """A linear whose weight is int8, with a BF16 scale for each group of GROUP columns: numerics.md, section 5e.

    codes   int8 [rows, columns]
    scales  BF16 [rows, columns / GROUP]
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight in BF16, for more tokens, gradients, and modules that read it."""
        groups = self.codes.view(*self.scales.shape, GROUP).to(torch.bfloat16)
        return groups.mul_(self.scales.unsqueeze(-1)).view(self.codes.shape)

    def _numbers(self) -> torch.Tensor:
        return self.scales

    def _multiply(self, pool: Any, tokens: int, rows: int, columns: int, *bias_x_out: Any) -> int:
        stored = ffi.cast("int8_t *", self.codes.data_ptr()), address_of(self.scales)
        return int(lib.ktq_multiply_int8_rows(pool, tokens, rows, columns, *stored, *bias_x_out))


def is_bf16_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are BF16 in the memory of this machine."""
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu


def address_of(tensor: torch.Tensor) -> Any:
    """Return the address of a tensor's numbers for the C library."""
    return ffi.cast("uint16_t *", tensor.data_ptr())


def accelerate_linears(model: torch.nn.Module, pool: Pool) -> None:
    """Let every linear of the model multiply few tokens with the runtime's kernels, with the threads of a pool."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.in_features % GROUP == 0:
            linear: Any = module
            linear.__class__, linear.pool = FewTokensLinear, pool


def quantize_linears(model: torch.nn.Module) -> None:
    """Store the weights of accelerated linears as int8, except for routers, which are beside the routed experts."""
    blocks = [module for module in model.modules() if any(isinstance(c, RoutedExperts) for c in module.children())]
    routers = {child for block in blocks for child in block.children()}
    for module in model.modules():
        if type(module) is FewTokensLinear and module not in routers and is_bf16_in_memory(module.weight):
            linear: Any = module
            codes, scales = quantize_groups(module.weight.detach())
            del linear.weight
            linear.__class__ = Int8Linear
            linear.register_buffer("codes", codes)
            linear.register_buffer("scales", scales)


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a BF16 weight [rows, columns]: numerics.md, section 5e."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1).float() / LARGEST_CODE).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1, scales.float()).unsqueeze(-1)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for rows in range(0, len(weight), 256):  # float32 copies of a few rows at a time
        part = slice(rows, rows + 256)
        codes[part] = (groups[part] / divisors[part]).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).view_as(codes[part])
    return codes, scales
