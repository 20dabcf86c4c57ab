"""GPTQ as plain functions over torch tensors: the Hessian, its factor with the order of columns, and compensation.

GPTQ (Frantar et al., 2022, arXiv 2210.17323) rounds a linear column by column and corrects the remaining columns by the
inverse of H = 2 X X^T over the inputs X of calibration. Rows are independent of each other: linears that read the same
inputs share one H and one factor, and are quantized as one tall matrix, to the same bits. Columns are rounded in the
order of falling diag(H) ("static" activation order), which does not change the stored format. The three steps together
compute the same bits as llmcompressor's quantize_weight. The caller provides codes, range and scales, so that the steps
support any symmetric format with one scale per group of columns, or per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ktconvert.native_quant import compensation
from ktconvert.native_quant.compensation import CodeRange

if TYPE_CHECKING:
    import torch

VERSION = 1
BLOCK = 128  # columns between two corrections of all remaining columns; llmcompressor's default


class NotFinite(ValueError):
    """A Hessian or a loss that is NaN or infinite; the message names it."""


# --- the Hessian ----------------------------------------------------------------------------------


@dataclass
class Hessian:
    """Sum of 2 x x^T over calibration inputs, float32 [k, k], and the number of batches."""

    sum: torch.Tensor
    batches: int = 0

    @classmethod
    def empty(cls, width: int, device: Any = "cpu") -> Hessian:
        """Return a Hessian without inputs, for linears of k = width inputs."""
        import torch

        return cls(torch.zeros((width, width), dtype=torch.float32, device=device))

    def add(self, inputs: torch.Tensor, shares: torch.Tensor | None = None) -> None:
        """Add a batch of inputs [T, k]; T may be 0, which counts as a batch too, as in llmcompressor.

        shares  [T], factors of the inputs; a token's errors are weighted by the square of its share
        """
        import torch

        self.batches += 1
        if len(inputs):
            # Multiply by the root before the product, as the library does, for the same bits.
            x = math.sqrt(2) * inputs.t().to(self.sum.device, torch.float32)
            if shares is not None:
                x *= shares.to(x)
            self.sum += x.matmul(x.t())


# --- the factor and the order of columns ----------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """The factor of a Hessian, for compensation.

    order      int64 [k], the columns in the order in which they are quantized
    upper      float32 [k, k], in that order: the upper Cholesky factor of the inverse of the dampened Hessian
    dead       bool [k], whether all inputs of a column were 0, so that its weights count as 0
    fell_back  whether the Hessian has no factor; then `upper` is the identity, which rounds to nearest
    """

    order: torch.Tensor
    upper: torch.Tensor
    dead: torch.Tensor
    fell_back: bool


def factorize_hessian(hessian: Hessian, dampening: float, *, by_activation: bool = True) -> Factor:
    """Return the factor of the mean of 2 x x^T.

    dampening      fraction of mean(diag(H)) that is added to the diagonal
    by_activation  whether columns are rounded in the order of falling diag(H); else from left to right

    Raises NotFinite for a Hessian that is not finite.
    """
    import torch

    h = hessian.sum / torch.full((), hessian.batches, dtype=torch.float32, device=hessian.sum.device)
    diagonal = torch.diagonal(h)
    if not bool(torch.isfinite(diagonal).all()):
        raise NotFinite("the Hessian of its calibration inputs is not finite")
    dead = diagonal == 0
    order = torch.arange(len(h), device=h.device)
    if by_activation:
        order = torch.argsort(diagonal, descending=True)
        h = h.index_select(0, order).index_select(1, order)
    torch.diagonal(h).masked_fill_(dead[order], 1.0)
    torch.diagonal(h).add_(dampening * torch.mean(torch.diag(h)))
    info = torch.empty((), dtype=torch.int32, device=h.device)
    torch.linalg.cholesky_ex(h, check_errors=False, out=(h, info))
    if not info.item():
        torch.cholesky_inverse(h, out=h)
        # The inverse of an almost singular Hessian may have no factor either; the library ends with an error.
        torch.linalg.cholesky_ex(h, upper=True, check_errors=False, out=(h, info))
    fell_back = bool(info.item())
    if fell_back:
        h.copy_(torch.eye(len(h), device=h.device))
    return Factor(order, h, dead, fell_back)


# --- compensation ---------------------------------------------------------------------------------


def round_columns(weight: torch.Tensor, factor: Factor, scale: torch.Tensor, code_range: CodeRange) -> torch.Tensor:
    """Round a linear [n, k] to codes of this range column by column, compensating each error in the remaining columns.

    Returns the values, float32 [n, k]: code * scale, rounded to the dtype of the scales.

    scale  BF16 or float32 [n, g], for g groups of k / g columns each; g = 1 is one scale per row. If a scale is 0, the
           codes of its group are 0

    Raises NotFinite for a loss that is not finite.
    """
    import torch

    n, k = weight.shape
    scale = _replace_zeros(scale, k)
    column_groups = factor.order // (k // scale.shape[1])
    columns = weight.index_select(1, factor.order).to(torch.float32).masked_fill_(factor.dead[factor.order], 0)
    losses = torch.zeros(n, device=weight.device)
    for first in range(0, k, BLOCK):
        block = slice(first, first + BLOCK)
        later = slice(first + BLOCK, k)
        weights = columns[:, block].contiguous()
        values = torch.empty_like(weights)
        errors = torch.empty_like(weights)
        inverse = factor.upper[block, block].contiguous()
        column_scales = scale.index_select(1, column_groups[block])
        _round_block(Block(weights, inverse, column_scales, values, errors), code_range)
        columns[:, block] = values
        losses += errors.square().sum(1) / 2
        # A batch of one: for a plain product, the matrix library may use a different method with different bits.
        columns[:, later] -= torch.bmm(errors[None], factor.upper[None, block, later])[0]
    loss = float(losses.sum())
    if not math.isfinite(loss):
        raise NotFinite(f"the loss of GPTQ is {loss}")
    return columns.index_select(1, torch.argsort(factor.order))


def find_codes(values: torch.Tensor, scale: torch.Tensor, code_range: CodeRange) -> torch.Tensor:
    """Return the codes, int8 [n, k], of values [n, k] with these scales [n, g].

    The division rounds to the common dtype of values and scales. In float32 the results are the codes that GPTQ chose.
    In BF16, which compressed-tensors uses, one 8-bit code in 400 is a neighbour of the chosen one.
    """
    import torch

    n, k = values.shape
    scale = _replace_zeros(scale, k)
    quotient = values.reshape(n, scale.shape[1], -1) / scale[:, :, None]
    return _round_to_codes(quotient, code_range).to(torch.int8).reshape(n, k)


def _round_to_codes(quotient: torch.Tensor, code_range: CodeRange) -> torch.Tensor:
    """Return the codes nearest to quotients, in their dtype; ties go to even significant bits."""
    import torch

    quotient = torch.clamp(quotient, code_range.least, code_range.most)
    if not code_range.precision:
        return torch.round(quotient)
    power = torch.frexp(quotient).exponent - code_range.precision
    step = torch.ldexp(torch.ones_like(quotient), power.clamp(min=0))
    return torch.round(quotient / step) * step


def _replace_zeros(scale: torch.Tensor, k: int) -> torch.Tensor:
    """Return the scales with 1 in place of 0: such a group has only zeros and subnormal values, whose codes are 0."""
    import torch

    if not scale.shape[1] or k % scale.shape[1]:
        raise ValueError(f"{k} columns do not fall into {scale.shape[1]} groups of equal size")
    return torch.where(scale == 0, 1, scale)


DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "f32"}  # dtype of the scales -> its name in the kernel
LIBRARY_BITS = {CodeRange(-8, 7): 4, CodeRange(-128, 127): 8}  # ranges with a name in compressed-tensors


class Block(NamedTuple):
    """A block of b columns to round.

    weights  float32 [n, b], the corrected weights; overwritten
    inverse  float32 [b, b], the block of Factor.upper
    scales   BF16 or float32 [n, b], the scale of each column
    values   float32 [n, b], result: the rounded weights
    errors   float32 [n, b], result: the errors to pass to later columns
    """

    weights: torch.Tensor
    inverse: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor
    errors: torch.Tensor


def _round_block(block: Block, code_range: CodeRange) -> None:
    """Use our kernel on a CPU, elsewhere the library's if it knows the range (numerics.md, section 7)."""
    import torch

    weights, inverse, scales, values, errors = block
    if str(scales.dtype) not in DTYPES:
        raise ValueError(f"scales must be bfloat16 or float32, not {scales.dtype}")
    if weights.device.type == "cpu":
        arrays = [x.detach().numpy() for x in (inverse, scales.float(), weights, values, errors)]
        compensation.gptq_block(code_range, DTYPES[str(scales.dtype)], *arrays, threads=torch.get_num_threads())
    elif code_range in LIBRARY_BITS:
        _round_block_by_library(block, code_range)
    else:
        _round_block_by_torch(block, code_range)


def _round_block_by_library(block: Block, code_range: CodeRange) -> None:
    """Run llmcompressor's own inner loop: Triton's if available, else its eager one."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import gptq_block_update

    width = block.weights.shape[1]
    bits = LIBRARY_BITS[code_range]
    gptq_block_update(
        *(x[None] for x in (block.weights, block.inverse, block.values, block.errors)),
        torch.empty_like(block.weights)[None],  # squared errors
        scale=block.scales[None],
        zero_point=None,
        global_scale=None,
        g_idx=torch.arange(width, device=block.weights.device)[None],  # groups of one column, as each has a scale
        quant_args=QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=width),
        i1=0,
    )


def _round_block_by_torch(block: Block, code_range: CodeRange) -> None:
    """Follow the definition, a column at a time."""

    weights, inverse, scales, values, errors = block
    for i in range(weights.shape[1]):
        code = _round_to_codes(weights[:, i] / scales[:, i], code_range)
        values[:, i] = (code * scales[:, i].float()).to(scales.dtype)
        errors[:, i] = (weights[:, i] - values[:, i]) / inverse[i, i]
        weights[:, i:] -= errors[:, i, None] * inverse[i, i:]
