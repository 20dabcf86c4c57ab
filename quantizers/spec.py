"""What a quantizer takes: one linear as a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Matrix:
    """One linear [n out_features, k in_features] in its stored encoding; a view, nothing is copied.

    values  2-D view, shape (n, k): uint16 (bits of BF16 or FP16), float32, or uint8 (bits of FP8 E4M3). Either axis may be the
            contiguous one: a transposed checkpoint tensor is a view with strides, not a copy.
    kind    the row of quantizers.DECODERS that says what the bits mean: "bf16", "fp16", "f32", "fp8_e4m3".
    scales  float32 [ceil(N / block[0]), ceil(K / block[1])] over the *whole* stored linear; None where the kind has none.
    block   rows and columns that share one scale.
    origin  where values[0, 0] lies in the whole linear, so that a slice still finds its scales.
    """

    values: npt.NDArray[np.generic]
    kind: str
    scales: npt.NDArray[np.float32] | None = None
    block: tuple[int, int] = (1, 1)
    origin: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): out_features, in_features."""
        n, k = self.values.shape
        return n, k

    def rows(self, start: int, stop: int) -> Matrix:
        """The linear's rows start..stop-1."""
        return replace(self, values=self.values[start:stop], origin=(self.origin[0] + start, self.origin[1]))

    def columns(self, start: int, stop: int) -> Matrix:
        """The linear's columns start..stop-1."""
        return replace(self, values=self.values[:, start:stop], origin=(self.origin[0], self.origin[1] + start))

    @property
    def T(self) -> Matrix:
        """The transposed linear."""
        scales = None if self.scales is None else np.ascontiguousarray(self.scales.T)
        return Matrix(self.values.T, self.kind, scales, self.block[::-1], self.origin[::-1])
