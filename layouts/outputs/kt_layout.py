"""The layout that kt-kernel's native methods read (FORMAT.md, section "Native"): whole linears, row after row, under
the names of a checkpoint.

A form here is one of strips with other tensors, names and card. To add one, write its functions and its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs import strip_card
from ktconvert.layouts.outputs.bf16 import BF16
from ktconvert.layouts.outputs.form import Rows, Tensor
from ktconvert.layouts.outputs.fp8 import FP8, bad_code, bad_scale, pack
from ktconvert.layouts.outputs.linear_names import LinearNames
from ktconvert.layouts.outputs.mxfp4 import MXFP4, first_bad
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.parts import PROJECTIONS
from ktconvert.layouts.outputs.strip_form import StripForm, no_defect
from ktconvert.native_quant import kernels, kernels_strips
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import fp8, mxfp4
from ktconvert.quantizers.packed import fields
from ktconvert.quantizers.reference import bf16_to_f32
from ktconvert.quantizers.scales import e8m0

COMMAND = "cpu --layout kt"
MXFP4_ROWS = 128  # that are in strips at a time
WORDS = {"gate": "w1", "up": "w3", "down": "w2"}
DEEPSEEK_V4 = tuple((p, f"layers.{{layer}}.ffn.experts.{{expert}}.{WORDS[p]}") for p in PROJECTIONS)
DEEPSEEK = tuple((p, f"model.layers.{{layer}}.mlp.experts.{{expert}}.{p}_proj") for p in PROJECTIONS)


@dataclass(frozen=True)
class NativeNames(LinearNames):
    """Names that a checkpoint may have, too: only a manifest tells them apart."""

    def stray(self, name: str) -> None:
        """Other tensors may have any name."""


def kt_form(
    base: StripForm,
    templates: tuple[tuple[str, str], ...],
    lay_out: Callable[[int, int], tuple[Tensor, ...]],
    columns: Callable[[int], int],
    write: Callable[[Matrix, Sequence[Bytes]], None],
    read: Callable[[Sequence[Bytes], int, int, Rows], npt.NDArray[np.float32]],
) -> StripForm:
    """The form with the numbers of `base` for kt-kernel's method of that name.

    templates  LinearNames.templates
    lay_out, columns, write, read  as in StripForm
    """
    name, suffixes = f"KT_{base.name}", tuple(tensor.suffix for tensor in lay_out(0, 0))

    def naming(facts: Mapping[str, Any]) -> NativeNames:
        return NativeNames(suffixes, templates if facts.get("method") == name else ())

    return replace(
        base,
        name=name,
        lay_out=lay_out,
        columns=columns,
        write=write,
        read=read,
        rows=1,
        naming=naming,
        describe=partial(strip_card.kt_card, base.name),
        command=COMMAND,
    )


def bf16_tensors(n: int, k: int) -> tuple[Tensor]:
    """The linear as a BF16 release has it."""
    return (Tensor("weight", "BF16", (n, k), 2 * n * k),)


def write_bf16(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """FP16 and float32 are rounded once. Raises kernels.NonFinite."""
    kernels_strips.pack_bf16(matrix, out[0].view(np.uint16).reshape(matrix.shape))


def read_bf16(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], exact, or some rows of it."""
    return bf16_to_f32(stored[0].view(np.uint16).reshape(n, k)[rows])


def fp8_tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """The linear as an FP8 release with blocks of 128 x 128 has it."""
    blocks = (n // fp8.BLOCK, k // fp8.BLOCK)
    scales = Tensor("weight_scale_inv", "F32", blocks, 4 * blocks[0] * blocks[1])
    return Tensor("weight", "F8_E4M3", (n, k), n * k), scales


def write_fp8(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """As FP8 in strips. Raises kernels.NonFinite."""
    n, k = matrix.shape
    scales = out[1].view(np.float32).reshape(n // fp8.BLOCK, k // fp8.BLOCK)
    pack(matrix, out[0].reshape(n, k), scales)


def read_fp8(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], rounded once, or some rows of it."""
    scales = stored[1].view(np.float32).reshape(n // fp8.BLOCK, k // fp8.BLOCK)
    return fp8.values(stored[0].reshape(n, k)[rows], scales[np.arange(n)[rows] // fp8.BLOCK])


def mxfp4_tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """The linear as DeepSeek-V4 has it."""
    groups = k // mxfp4.GROUP
    return Tensor("weight", "I8", (n, k // 2), n * k // 2), Tensor("scale", "F8_E8M0", (n, groups), n * groups)


def write_mxfp4(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """As MXFP4 in strips, some of which exist at a time. Raises kernels.NonFinite."""
    n, k = matrix.shape
    codes, scales = out[0].reshape(n, k // 2), out[1].reshape(n, -1)
    for first in range(0, n, MXFP4_ROWS):
        rows = slice(first, min(n, first + MXFP4_ROWS))
        in_strips = [np.empty(tensor.shape, np.uint8) for tensor in MXFP4.tensors(rows.stop - first, k)]
        try:
            kernels_strips.pack_mxfp4(matrix.rows(first, rows.stop), in_strips[0], in_strips[1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(first + bad.row, bad.column) from None
        kernels_strips.mxfp4_rows(in_strips[0], in_strips[1], codes[rows], scales[rows])


def read_mxfp4(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], exact, or some rows of it."""
    return mxfp4.dequantize(fields(4, stored[0].reshape(n, k // 2)[rows]), stored[1].reshape(n, -1)[rows])


def mxfp4_scale_values(stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
    """One for each 32 columns: float32 [n, k / 32]."""
    return e8m0(stored.reshape(n, -1))


def bad_mxfp4_scale(stored: Sequence[Bytes], k: int) -> str:
    """Every scale is a number, and so are its products with the codes."""
    groups = stored[0].reshape(-1, mxfp4.GROUP // 2)
    return first_bad(stored[1], lambda scale: fields(4, groups[scale : scale + 1]))


KT_MXFP4 = replace(
    kt_form(MXFP4, DEEPSEEK_V4, mxfp4_tensors, lambda items: 2 * items, write_mxfp4, read_mxfp4),
    multiple=mxfp4.GROUP,
    decoded_rows=MXFP4_ROWS,  # with the strips: less than half as many decoded rows, and half a byte for each code
    defects=(no_defect, bad_mxfp4_scale),
    scaled=mxfp4_scale_values,
)
KT_FP8 = replace(
    kt_form(FP8, DEEPSEEK, fp8_tensors, int, write_fp8, read_fp8), defects=(bad_code, partial(bad_scale, 1))
)
KT_BF16 = kt_form(BF16, DEEPSEEK, bf16_tensors, int, write_bf16, read_bf16)
