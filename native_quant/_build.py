"""Builds ktconvert.native_quant._ktq: the C files of csrc/ and what cffi makes of the marked part of csrc/ktq.h.

One file for every CPython from 3.11 on (abi3) and for every x86-64 CPU: no -march; each function that needs an
instruction set says so itself (csrc/arch/x86/isa.h). setup.py names `ffibuilder`; it runs in the repository's root.
KTCONVERT_CFLAGS adds flags (`make asan`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

CSRC = Path("native_quant/csrc")
HEADER = CSRC / "ktq.h"

COMPILE = [
    "-std=c11",
    "-O3",
    "-Wall",
    "-Wextra",
    "-Werror=incompatible-pointer-types",
    "-fvisibility=hidden",
    # Bit-equal results: no fused multiply-add, no reordering. (-ffast-math and its like are never used.)
    "-ffp-contract=off",
    "-fno-math-errno",
    # The scalar kernels stay scalar; the others are written in intrinsics.
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
]


def declarations() -> str:
    """What stands between the two markers of ktq.h."""
    match = re.search(r"/\* cdef begin \*/(.*)/\* cdef end \*/", HEADER.read_text(), re.DOTALL)
    if match is None:
        raise SystemExit(f"{HEADER}: the markers 'cdef begin' and 'cdef end' are missing")
    return match.group(1)


def paths(*patterns: str) -> list[str]:
    """Files of csrc/ and its folders, sorted, so that builds do not depend on the file system."""
    return sorted(str(path) for pattern in patterns for path in CSRC.rglob(pattern))


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "ktconvert.native_quant._ktq",
    '#include "ktq.h"',
    sources=paths("*.c"),
    depends=paths("*.h", "*.def"),
    include_dirs=[str(CSRC), str(CSRC / "arch/x86")],
    extra_compile_args=COMPILE + os.environ.get("KTCONVERT_CFLAGS", "").split(),
    extra_link_args=os.environ.get("KTCONVERT_CFLAGS", "").split(),
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
)
