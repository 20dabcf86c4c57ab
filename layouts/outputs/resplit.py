"""The parts of a linear in AMXINT4, AMXINT8 or strips, rearranged for another number of NUMA parts (FORMAT.md, section
"Another number of parts").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs import LAYOUTS, Form
from ktconvert.layouts.outputs.amx import Amx
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.parts import Part
from ktconvert.layouts.outputs.strip_form import StripForm
from ktconvert.native_quant import kernels
from ktconvert.quantizers.errors import sums_of
from ktconvert.quantizers.rescale import to_one_scale

Parted = Amx | StripForm  # the forms whose parts can be rearranged
Stored = tuple[Part, Sequence[Bytes]]  # a part with its tensors


def is_parted(form: Form | None) -> TypeGuard[Parted]:
    """Whether outputs of a form are in NUMA parts that can be rearranged."""
    return isinstance(form, Parted) and form.command == LAYOUTS["numa"]


def is_cut_by_rows(part: Part) -> bool:
    """Whether the parts of this linear are rows of it; else they are columns, and a row has a scale in each part."""
    return (part.projection == "down") == part.backward


def rounds_again(form: Parted, old: int, new: int) -> bool:
    """Whether going from `old` parts to `new` ones makes columns share a scale that had several."""
    return isinstance(form, Amx) and new % old != 0


def rearrange(form: Parted, old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """Fill the parts `new` of a linear, or of its transpose, from its parts `old`; both in order, and all of them.

    Raises ValueError for a code that is not one of the form's.
    """
    if isinstance(form, StripForm):
        _rearrange_strips(form, old, new)
        return
    if is_cut_by_rows(new[0][0]):
        _rearrange_rows(old, new)
        return
    width = old[0][0].k
    for rows in _row_blocks(form, new[0][0].n):
        pieces = [_codes_and_scales(form, part, stored, rows) for part, stored in old]
        for number, (part, stored) in enumerate(new):
            start, stop = number * part.k, (number + 1) * part.k  # columns of the whole linear
            shared = range(start // width, -(-stop // width))
            codes = [pieces[t][0][:, max(start - t * width, 0) : stop - t * width] for t in shared]
            one, scales = to_one_scale(codes, [pieces[t][1] for t in shared])
            form.pack(one, scales, _of_rows(form, part, stored, rows))


def change_sums(form: Amx, old: Sequence[Stored], new: Sequence[Stored]) -> npt.NDArray[np.float64]:
    """What rearranging by columns changed: sums of x*x, y*y, x*y and (x-y)^2, x the old numbers and y the new ones."""
    sums = np.zeros(4)
    for rows in _row_blocks(form, new[0][0].n):
        x, y = (np.concatenate([_numbers(form, *part, rows) for part in side], axis=1) for side in (old, new))
        sums += sums_of(x, y)
    return sums


def _row_blocks(form: Amx, n: int) -> Iterator[slice]:
    """The row blocks of a part of n rows: each is packed as a part of its own would be."""
    step = kernels.GEOMETRIES[form.grid.bits].block_rows
    return (slice(first, first + step) for first in range(0, n, step))


def _of_rows(form: Amx, part: Part, stored: Sequence[Bytes], rows: slice) -> tuple[Bytes, Bytes]:
    """Weight and scale of some row blocks of a part; views."""
    weight, scale = stored
    row_bytes = part.k * form.grid.bits // 8
    return weight[rows.start * row_bytes : rows.stop * row_bytes], scale[4 * rows.start : 4 * rows.stop]


def _rearrange_rows(old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """Parts hold whole row blocks, so that all of them, one after the other, are the same bytes in either split."""
    for weights_or_scales in range(2):
        whole = np.concatenate([stored[weights_or_scales] for _, stored in old])
        at = 0
        for _, stored in new:
            out = stored[weights_or_scales]
            out[:] = whole[at : at + out.size]
            at += out.size


def _rearrange_strips(form: StripForm, old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """Each tensor of a part is a matrix of strips or blocks, whole ones, in their places: cut as the linear is."""
    axis = 0 if is_cut_by_rows(new[0][0]) else 1
    for number, tensor in enumerate(form.tensors(old[0][0].n, old[0][0].k)):
        rows = tensor.shape[0]
        whole = np.concatenate([stored[number].reshape(rows, -1) for _, stored in old], axis)
        for (_, stored), piece in zip(new, np.split(whole, len(new), axis), strict=True):
            stored[number].reshape(piece.shape)[:] = piece


def _codes_and_scales(
    form: Amx, part: Part, stored: Sequence[Bytes], rows: slice
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Of some row blocks: codes int8 [rows, k], and scales float32 [rows]."""
    weight, scale = _of_rows(form, part, stored, rows)
    ones = np.full(rows.stop - rows.start, 1 / form.grid.step, np.float32)
    codes = form.unpack([weight, ones.view(np.uint8)], len(ones), part.k)
    return codes.astype(np.int8), scale.view(np.float32)


def _numbers(form: Amx, part: Part, stored: Sequence[Bytes], rows: slice) -> npt.NDArray[np.float32]:
    """Some row blocks dequantized: float32 [rows, k]."""
    return form.unpack(_of_rows(form, part, stored, rows), rows.stop - rows.start, part.k)
