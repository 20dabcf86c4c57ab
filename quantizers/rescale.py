"""Codes of several scales brought to one, where columns that were quantized apart come to share a scale (numerics.md,
section 8).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktconvert.quantizers.reference import F32, I8


def to_one_scale(codes: Sequence[I8], scales: Sequence[F32]) -> tuple[I8, F32]:
    """Side by side: codes int8 [n, k_0], [n, k_1], ..., each with a scale per row, float32 [n], finite, none negative.

    Returns codes int8 [n, k_0 + k_1 + ...] and scales float32 [n]. The largest scale stays; the codes of smaller ones
    are rounded again. A row whose scales are equal, or 0, stays as it is.
    """
    if len(codes) == 1:
        return codes[0], scales[0]
    largest = np.maximum.reduce(list(scales))
    out = np.empty((len(largest), sum(c.shape[1] for c in codes)), np.int8)
    at = 0
    for own, scale in zip(codes, scales, strict=True):
        ratio = np.divide(scale, largest, out=np.zeros_like(scale), where=largest != 0)
        out[:, at : at + own.shape[1]] = np.rint(own * ratio[:, None])
        at += own.shape[1]
    return out, largest
