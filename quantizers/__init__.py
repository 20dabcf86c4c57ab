"""How numbers become fewer bits and come back: arrays in, arrays out. The CLI, the tests and the docs check read these tables."""

from __future__ import annotations

from dataclasses import dataclass

from ktconvert.native_quant.matrix import Matrix

__all__ = ["GROUP_QUANTIZERS", "QUANTIZERS", "GroupQuantizer", "Matrix", "Quantizer"]


@dataclass(frozen=True)
class Quantizer:
    """Round to nearest, symmetric, one scale per output row (equations: NUMERICS.md).

    version is part of every unit's fingerprint: whoever changes a byte that comes out raises it.
    """

    name: str
    bits: int
    version: int


QUANTIZERS = {q.name: q for q in (Quantizer("int4", bits=4, version=1), Quantizer("int8", bits=8, version=1))}


@dataclass(frozen=True)
class GroupQuantizer:
    """Symmetric, one BF16 scale per group of columns of a row, for weights on a GPU (NUMERICS.md, section 6).

    name as in kt-kernel's --quant-type. version: as above.
    """

    name: str
    bits: int
    group: int
    version: int


GROUP_QUANTIZERS = {
    q.name: q
    for q in (
        GroupQuantizer("W4A16", bits=4, group=128, version=1),
        GroupQuantizer("W8A16", bits=8, group=128, version=1),
    )
}
