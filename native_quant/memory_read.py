"""Reading memory for NumPy arrays: as fast as this machine can, to compare with. A call like those of kernels.py."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error

# Parts of an array that one thread can read side by side. More are no faster; which is fastest depends on the machine.
STREAMS = (1, 2, 4)


def read_memory(block: npt.NDArray[Any], streams: int) -> int:
    """Read each cache line of a contiguous array once, in one of STREAMS parts of equal length side by side.

    Returns the exclusive or of the first 8 bytes of each 64 (fewer where the array ends), as a number: it depends on
    every line. ValueError: another number of streams, or an array that is not contiguous.
    """
    if streams not in STREAMS:
        raise ValueError(f"streams must be {', '.join(map(str, STREAMS[:-1]))} or {STREAMS[-1]}, not {streams}")
    if not block.flags.c_contiguous:
        raise ValueError("the array must be contiguous")
    total = ffi.new("uint64_t *")
    raise_error(lib.ktq_read(streams, block.nbytes, ffi.from_buffer(block), total))
    return int(total[0])
