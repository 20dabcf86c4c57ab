"""GPTQ behind plain functions: torch tensors in, torch tensors out; the arithmetic is llmcompressor's and compressed-tensors' own.

GPTQ (Frantar et al., 2022, arXiv 2210.17323) rounds a linear column by column and corrects the columns that are left, by the inverse of
H = 2 X X^T over the inputs X of calibration. Rows are independent of each other: linears that read the same inputs share one H, and are
quantized as one tall matrix with one factorization, to the same bits. Columns are taken in order of falling diag(H) ("static" activation
order), which leaves the stored format as it is. llmcompressor is imported only when something here is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ktconvert.native_quant import kernels_gptq

if TYPE_CHECKING:
    import torch

VERSION = 1
BLOCK = 128  # columns between two corrections of all that is left, llmcompressor's default


class NotFinite(ValueError):
    """A Hessian or a loss that is NaN or infinite; says which."""


@dataclass
class Hessian:
    """Sum of 2 x x^T over calibration inputs, float32 [k, k], and how many batches went in."""

    sum: torch.Tensor
    batches: torch.Tensor

    @classmethod
    def empty(cls, width: int, device: Any = "cpu") -> Hessian:
        """Nothing seen yet, for linears of k = width inputs."""
        import torch
        from llmcompressor.modifiers.gptq.helpers import make_empty_hessian

        return cls(make_empty_hessian(_reader(width), device=torch.device(device)), torch.zeros((), device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Count a batch of inputs [T, k] in."""
        from llmcompressor.modifiers.gptq.helpers import accumulate_hessian

        accumulate_hessian(inputs, _reader(inputs.shape[-1]), self.sum, self.batches)

    def skip(self) -> None:
        """Count a batch in that held no input, as llmcompressor does."""
        self.batches += 1


@dataclass(frozen=True)
class Quantized:
    """What became of a linear [n, k].

    weight     BF16 [n, k], the values that its codes and scales stand for, as llmcompressor rounds them
    packed     int32 [n, k * bits / 32], compressed-tensors' weight_packed
    loss       the sum of squared corrections, over all rows
    fell_back  whether H could not be factorized, and the linear was rounded to nearest
    """

    weight: torch.Tensor
    packed: torch.Tensor
    loss: float
    fell_back: bool


def quantize(
    bits: int,
    group: int,
    weight: torch.Tensor,
    scale: torch.Tensor,
    hessian: Hessian,
    dampening: float,
    rounding: str = "library",
) -> Quantized:
    """Quantize a linear, BF16 [n, k], with its scales, BF16 [n, k / group], for the inputs that the Hessian has seen.

    dampening  the fraction of mean(diag(H)) that is added to the diagonal
    rounding   "library": codes are found again from the BF16 weight by a division in BF16, as compressed-tensors does, which moves one
               8-bit code in 400 by one; "float32": the codes that GPTQ chose
    Raises NotFinite for a Hessian or loss that is not finite.
    """
    import torch
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    _offer_kernel()
    mean = hessian.sum / hessian.batches
    if not bool(torch.isfinite(torch.diagonal(mean)).all()):
        raise NotFinite("the Hessian of its calibration inputs is not finite")
    made, losses, fell_back = quantize_weight(  # type: ignore[misc]  # it says two
        weights=weight.to(torch.float32)[None],
        hessians=mean[None],
        scale=scale[None],
        zero_point=torch.zeros_like(scale)[None],
        global_scale=None,
        quant_args=_arguments(bits, group),
        blocksize=BLOCK,
        percdamp=dampening,
    )
    loss = float(losses[0])
    if loss != loss or loss in (float("inf"), float("-inf")):
        raise NotFinite(f"the loss of GPTQ is {loss}")
    rounded = made[0].to(weight.dtype)
    exact = rounding == "float32"
    packed = pack(bits, group, made[0] if exact else rounded, scale.float() if exact else scale)
    return Quantized(rounded, packed, loss, bool(fell_back[0]))


@cache
def _offer_kernel() -> None:
    """Give the library our kernel for its inner loop, which it then takes for what the kernel can do: the same bits, sooner."""
    import torch
    from compressed_tensors.utils.impl_backend import ImplBackend
    from llmcompressor.modifiers.gptq.helpers import column_scale_window

    kinds = {torch.bfloat16: "bf16", torch.float32: "f32"}

    def is_for_it(
        W1: Any, Hinv1: Any, Q1: Any, Err1: Any, losses1: Any, *, scale: Any, quant_args: Any, **_: Any
    ) -> bool:
        plain = all(
            x.dim() == 3 and x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
            for x in (W1, Q1, Err1, losses1)
        )
        fits = W1.shape[-1] <= kernels_gptq.MAX_COLUMNS and Hinv1.dtype == torch.float32 and scale.dtype in kinds
        a = quant_args
        return plain and fits and (a.type, a.strategy, a.symmetric) == ("int", "group", True) and a.num_bits in (4, 8)

    def gptq_block_update_ktconvert(
        W1: Any, Hinv1: Any, Q1: Any, Err1: Any, losses1: Any, *, scale: Any, quant_args: Any, i1: int, **others: Any
    ) -> None:
        rows, width = W1.shape[-2:]
        window = others["zero_point"], others["global_scale"], others["g_idx"], quant_args, rows, i1, i1 + width
        each, _ = column_scale_window(scale, *window)
        kind, threads = kinds[each.dtype], torch.get_num_threads()
        for inverse, *block in zip(Hinv1.contiguous(), each.float(), W1, Q1, Err1, strict=True):
            arrays = [x.detach().numpy() for x in (inverse, *block)]
            kernels_gptq.gptq_block(quant_args.num_bits, kind, *arrays, threads=threads)
        torch.square(Err1, out=losses1)

    ImplBackend.register("gptq_block_update", is_for_it, 1)(gptq_block_update_ktconvert)


def pack(bits: int, group: int, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight_packed, int32 [n, k * bits / 32], of a linear [n, k] that was quantized with these scales; divides in their dtype."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import quantize as to_codes

    codes = to_codes(x=weight, scale=scale, zero_point=None, args=_arguments(bits, group), dtype=torch.int8)
    words: torch.Tensor = pack_to_int32(codes, bits)
    return words


def dequantize(bits: int, group: int, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What codes, int32 [n, k * bits / 32], and scales, BF16 [n, k / group], stand for: BF16 [n, k]."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize as to_values

    shape = torch.Size((packed.shape[0], packed.shape[1] * 32 // bits))
    codes = unpack_from_int32(packed, bits, shape)
    values: torch.Tensor = to_values(x_q=codes, scale=scale, zero_point=None, args=_arguments(bits, group))
    return values


def _arguments(bits: int, group: int) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group, actorder="static"
    )


def _reader(width: int) -> Any:
    """What llmcompressor's Hessians ask a linear for: that it is one, and its number of inputs."""
    import torch

    return torch.nn.Linear(width, 1, bias=False, device="meta")
