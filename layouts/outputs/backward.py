"""AMXBF16: the transposed matrices that kt-kernel writes for fine-tuning experts in BF16 (FORMAT.md, section
"Backward"). Loose files are their only form, and there are none of the experts themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs import loose, strip_card
from ktconvert.layouts.outputs.amx import LOOSE_WORDS, METHODS
from ktconvert.layouts.outputs.bf16 import BF16, bad_code
from ktconvert.layouts.outputs.form import Rows, Tensor
from ktconvert.layouts.outputs.merged import KtNames
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.parts import Part
from ktconvert.layouts.outputs.strip_form import no_defect
from ktconvert.native_quant import kernels_strips
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import strips
from ktconvert.quantizers.reference import bf16_to_f32

COMMAND = "cpu --save-backward-weights"
PREFIX = "BF16"


def tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """The numbers, and a file of scales, which kt-kernel wants to be there and empty."""
    return Tensor("weight", "I8", (2 * n * k,), 2 * n * k), Tensor("scale", "F32", (0,), 0)


def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """Each number as BF16: FP16 and float32 are rounded once. Raises kernels.NonFinite."""
    kernels_strips.pack_bf16(matrix, out[0].view(np.uint16))


def unpack(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], exact, or some rows of it."""
    return bf16_to_f32(strips.unlay_blocks(stored[0].view(np.uint16), n, k)[rows])


def naming(facts: Mapping[str, Any]) -> KtNames:
    """kt-kernel's own, which only messages use."""
    return KtNames()


def path(part: Part, tensor: Tensor) -> str:
    """A name that carries the exact size."""
    return loose.path_in_layer(PREFIX, part, tensor.nbytes, LOOSE_WORDS[tensor.suffix])


AMXBF16 = replace(
    BF16,
    name=METHODS[PREFIX],
    lay_out=tensors,
    write=quantize,
    read=unpack,
    defects=(bad_code, no_defect),
    naming=naming,
    describe=strip_card.backward_card,
    command=COMMAND,
    forward=False,
    backward=True,
    loose=path,
    notes=(
        "only the backward matrices are written; kt-kernel takes the BF16 experts themselves from the checkpoint, and "
        "0.7.2 does not load a folder of these files alone",
    ),
)
