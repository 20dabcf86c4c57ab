"""Choice of the C kernels' instruction set: those available, the one in use, and the environment variables."""

from __future__ import annotations

import os
import sys
import threading
from itertools import count, takewhile
from typing import Any

from ktconvert.native_quant._ktq import ffi, lib


def _text(pointer: Any) -> str:
    text: bytes = ffi.string(pointer)
    return text.decode()


ISAS: tuple[str, ...] = tuple(_text(lib.ktq_isa_name(i)) for i in range(lib.ktq_isa_count()))
KERNELS: tuple[tuple[str, str], ...] = tuple(
    (_text(lib.ktq_kernel_family(row)), ISAS[lib.ktq_kernel_isa(row)])
    for row in takewhile(lambda row: lib.ktq_kernel_isa(row) >= 0, count())
)

COMPILER: str = _text(lib.ktq_compiler())  # compiler of the extension, such as "gcc 12.2.0"

_environment_read = False
_environment_lock = threading.Lock()


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that the CPU and the operating system support, slowest first."""
    return tuple(name for i, name in enumerate(ISAS) if lib.ktq_isa_available(i))


def isa() -> str:
    """Return the instruction set in use: from set_isa, KTCONVERT_ISA or KT_KERNEL_CPU_VARIANT, else the best one."""
    read_environment()
    return ISAS[lib.ktq_isa()]


def set_isa(name: str | None) -> None:
    """Use an instruction set and those that it contains.

    None: the best available one. Raises ValueError if it is unavailable.
    """
    global _environment_read
    with _environment_lock:
        _environment_read = True
    _set_isa(name, "")


def _set_isa(name: str | None, where: str) -> None:
    choice = f"choose one of {', '.join(available_isas())}"
    if name is not None and name not in ISAS:
        raise ValueError(f"{where}'{name}' is not a known instruction set: {choice}")
    if lib.ktq_set_isa(-1 if name is None else ISAS.index(name)) != lib.KTQ_OK:
        raise ValueError(f"{where}this machine does not support '{name}': {choice}")


# kt-kernel's names of our instruction sets, in KT_KERNEL_CPU_VARIANT and __cpu_variant__. Like kt-kernel, we ignore
# other values of the variable. It has no name for "scalar".
VARIANTS = {
    "amx": "amx",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512": "avx512_base",
    "avxvnni": "avx2",
    "avx2": "avx2",
}
_BY_VARIANT = {variant: name for name, variant in VARIANTS.items()} | {"avx512_vbmi": "avx512vnni"}


def read_environment() -> None:
    """Apply KTCONVERT_ISA, else KT_KERNEL_CPU_VARIANT, at the first call. Raises ValueError for a wrong value."""
    global _environment_read
    if _environment_read:
        return
    with _environment_lock:
        if not _environment_read:
            name = os.environ.get("KTCONVERT_ISA", "").strip().lower()
            variant = _BY_VARIANT.get(os.environ.get("KT_KERNEL_CPU_VARIANT", "").strip().lower())
            if name:
                _set_isa(name, "KTCONVERT_ISA: ")
            elif variant:
                _set_isa(variant, "KT_KERNEL_CPU_VARIANT: ")
            _environment_read = True
            if os.environ.get("KTCONVERT_DEBUG") == "1":
                source = "KTCONVERT_ISA" if name else "KT_KERNEL_CPU_VARIANT" if variant else "the best available"
                in_use = ISAS[lib.ktq_isa()]
                available = ", ".join(available_isas())
                print(f"ktconvert: computes with {in_use} ({source}) of {available}", file=sys.stderr)


def raise_error(error: int) -> None:
    """Raise ValueError, MemoryError or RuntimeError (KTQ_EFORK) with C's message for any error code but KTQ_OK."""
    if error != lib.KTQ_OK:
        kinds: dict[int, type[Exception]] = {lib.KTQ_ENOMEM: MemoryError, lib.KTQ_EFORK: RuntimeError}
        raise kinds.get(error, ValueError)(_text(lib.ktq_strerror(error)))
