"""Instruction sets: put to use for a while, and which one is chosen where none is asked for."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ktconvert.native_quant import kernels


@contextlib.contextmanager
def using(isa: str) -> Iterator[None]:
    """Whatever happens within, the one before is put back."""
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        yield
    finally:
        kernels.set_isa(before)


def each() -> Iterator[str]:
    """Those of this machine, each in use when it is its turn."""
    for isa in kernels.available_isas():
        with using(isa):
            yield isa


def chosen() -> str:
    """The best one, but not avx512bf16 where vdpbf16ps is slow: on Intel's processors."""
    names = kernels.available_isas()
    is_slow = names[-1] == "avx512bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return names[-2] if is_slow else names[-1]
