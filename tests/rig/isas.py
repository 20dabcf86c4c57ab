"""Which instruction set is chosen where none is asked for."""

from pathlib import Path

from ktconvert.native_quant import kernels


def chosen() -> str:
    """The best one, but not avx512bf16 where vdpbf16ps is slow: on Intel's processors."""
    names = kernels.available_isas()
    is_slow = names[-1] == "avx512bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return names[-2] if is_slow else names[-1]
