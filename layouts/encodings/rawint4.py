"""RAWINT4: pack_quantized.py's integers of 4 bits in groups of 32 columns, with scales of either sign, as kt-kernel's
method of this name reads them; what is stored so already keeps codes and scales (bytes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import Bytes, Read, SourceExperts
from ktconvert.layouts.encodings.pack_quantized import all_zeros, bad_shape, pack_quantized, typed
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import SIGNED_GRIDS, differences, groups
from ktconvert.quantizers.reference import f32_to_bf16

GRID = SIGNED_GRIDS["rawint4"]
_PACKED = pack_quantized(GRID, "signed")


def is_exact(model: SourceExperts) -> bool:
    """Symmetric INT4 in groups of 32 columns with BF16 scales, in the order of the columns, keeps codes and scales."""
    return all(
        weight.encoding.name == "INT4"
        and weight.fit(moe.input_major) == (GRID.bits, GRID.group)
        and weight.tensors["scale"].dtype == "BF16"
        and not moe.input_major
        and not getattr(moe.style, "interleaved", False)
        for moe in model.moe_layers.values()
        for weight in moe.weights.values()
    )


def _quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
    if not groups.is_kept(matrix):
        _PACKED.quantize(matrix, out)
        return
    assert matrix.scales is not None and GRID.group is not None
    (n, k), (row, column) = matrix.shape, matrix.origin
    words, shape, scales = typed(GRID, out, n, k)
    words.view(np.uint8)[:] = matrix.values[:, : k // 2]
    shape[:] = n, k
    scales[:] = f32_to_bf16(
        np.ascontiguousarray(matrix.scales[row : row + n, column // GRID.group :][:, : k // GRID.group])
    )


def _error_sums(matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
    """Against the source's own numbers where its codes are kept: BF16 would round them."""
    return differences.error_sums(
        matrix, lambda rows: _PACKED.decode(stored, *matrix.shape, rows), groups.source_values
    )


def _bad_scale(read: Read, n: int, k: int) -> str:
    """Scales of either sign, and those of 0 that a source had, are numbers."""
    bad = (read(2).view("<u2") & 0x7FFF) >= 0x7F80
    return f"scale {int(np.argmax(bad))} is infinite or not a number" if bad.any() else ""


RAWINT4 = replace(
    _PACKED,
    name="RAWINT4",
    quantize=_quantize,
    is_exact=is_exact,
    error_sums=_error_sums,
    defects=(all_zeros(GRID.bits), bad_shape, _bad_scale),
)
