"""What an expert-weight output is made of, whatever its number format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant import kernels
from ktconvert.quantizers import Matrix, Quantizer

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Layout:
    """One of kt-kernel's expert formats: how a part of a linear becomes packed bytes and scales (FORMAT.md).

    name         kt-kernel's name of the method ("AMXINT4")
    version      raised whenever the bytes on disk change; part of every unit's fingerprint
    quantizer    the numerics
    file_prefix  how its loose .kt files start ("INT4")
    multiple     hidden size and intermediate size per NUMA part must be multiples of it (the tile's columns)
    """

    name: str
    version: int
    quantizer: Quantizer
    file_prefix: str
    multiple: int

    def weight_bytes(self, n: int, k: int) -> int:
        """Bytes of the packed weight of one [n, k] part."""
        return n * k * self.quantizer.bits // 8

    @staticmethod
    def scale_bytes(n: int) -> int:
        """Bytes of its scales: one float32 per output row."""
        return 4 * n

    def pack(self, part: Matrix, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32]) -> None:
        """Quantize one part [n, k] into weight (uint8 [weight_bytes]) and scale (float32 [n]).

        Raises kernels.NonFinite where the part holds NaN or Inf.
        """
        kernels.quantize_pack(self.quantizer.bits, part, weight, scale)

    def unpack(
        self, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], n: int, k: int
    ) -> npt.NDArray[np.float32]:
        """The dequantized part, float32 [n, k]."""
        return kernels.dequantize(self.quantizer.bits, weight, scale, n, k)

    def error_sums(
        self, part: Matrix, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float64]:
        """Sums of x*x, y*y, x*y and (x-y)^2 over a part, x the source in BF16 and y what was stored; float64 [4], the same on every CPU."""
        return np.array(kernels.error_sums(self.quantizer.bits, part, weight, scale), dtype=np.float64)
