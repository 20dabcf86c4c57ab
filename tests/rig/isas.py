"""Use of instruction sets in tests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ktconvert.native_quant import kernels


@contextlib.contextmanager
def use(isa: str) -> Iterator[None]:
    """Use an instruction set within the block, then restore the previous one."""
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        yield
    finally:
        kernels.set_isa(before)


def each() -> Iterator[str]:
    """Yield the instruction sets of this machine; each is in use during its iteration."""
    for isa in kernels.available_isas():
        with use(isa):
            yield isa


def default_isa() -> str:
    """Return the default instruction set: the best one, but not avx512bf16 on Intel, where vdpbf16ps is slow."""
    names = kernels.available_isas()
    is_slow = names[-1] == "avx512bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return names[-2] if is_slow else names[-1]
