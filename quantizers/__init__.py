"""Quantization and its inverse: arrays in, arrays out; the tables of grids for the CLI, the tests and the docs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktconvert.native_quant.compensation import CodeRange
from ktconvert.native_quant.matrix import Matrix as Matrix


@dataclass(frozen=True)
class Grid:
    """Integers as codes: the value of a code is step * code * scale.

    low, high    the least and the largest code
    precision    maximum number of significant bits of a code, as in floating-point numbers; 0: all integers are codes
    group        number of columns of a row that share a scale; None: all of them
    scale_dtype  safetensors dtype of the scales; "" if there are none
    version      version of rounding to nearest with scales by the largest value, in fingerprints; raised with any
                 change of bytes
    """

    name: str
    bits: int
    low: int
    high: int
    group: int | None
    scale_dtype: str
    version: int
    step: float = 1
    precision: int = 0

    @property
    def code_range(self) -> CodeRange:
        return CodeRange(self.low, self.high, self.precision)

    @property
    def has_row_scales(self) -> bool:
        return self.group is None and bool(self.scale_dtype)


def _table(*grids: Grid) -> dict[str, Grid]:
    return {grid.name: grid for grid in grids}


# Scales for rows (numerics.md, section 2), for kt-kernel's CPU formats.
ROW_GRIDS = _table(
    Grid("int4", bits=4, low=-7, high=7, group=None, scale_dtype="F32", version=1, step=16),
    Grid("int8", bits=8, low=-127, high=127, group=None, scale_dtype="F32", version=1),
)

# The same ranges, rounded differently (numerics.md, section 2c), for kt-kernel's MOE_INT4 and MOE_INT8.
MOE_GRIDS = _table(*(replace(grid, name=f"moe_{grid.name}", version=1) for grid in ROW_GRIDS.values()))

# Scales for groups of columns (numerics.md, section 6), for weights on a GPU; named as in kt-kernel's --quant-type.
GROUP_GRIDS = _table(
    Grid("W4A16", bits=4, low=-8, high=7, group=128, scale_dtype="BF16", version=1),
    Grid("W8A16", bits=8, low=-128, high=127, group=128, scale_dtype="BF16", version=1),
)
GROUP_SIZES = (128, 64, 32)  # numbers of columns that may share a scale; the grids above have the first one

# Scales of either sign for groups of columns (numerics.md, section 6b), for kt-kernel's RAWINT4 on a CPU.
SIGNED_GRIDS = _table(Grid("rawint4", bits=4, low=-8, high=7, group=32, scale_dtype="BF16", version=1))

# Floating-point numbers (numerics.md, section 9), for the CPU runtime. The numbers of E2M1 are 0.5 times the integers
# -12..12 with at most two significant bits. For fp8, low and high are the least and the largest number.
FLOAT_GRIDS = _table(
    Grid("mxfp4", bits=4, low=-12, high=12, group=32, scale_dtype="U8", version=1, step=0.5, precision=2),
    Grid("fp8", bits=8, low=-448, high=448, group=128, scale_dtype="F32", version=1),
    Grid("bf16", bits=16, low=0, high=0, group=None, scale_dtype="", version=1),
)
MXFP4_EXPONENTS = (1, 252)  # range of the exponents to choose; the largest number, 6 * 2^(252 - 127), is finite
