"""Build of ktconvert.native_quant._ktq: the C files of csrc/ and the cffi module for the marked part of csrc/ktq.h.

The extension serves every CPython from 3.11 on (abi3) and every CPU of its architecture: there is no -march, and each
function that needs an instruction set declares it (csrc/arch/x86/isa.h). An architecture without a folder in csrc/arch/
gets only the scalar kernels (csrc/arch/generic/). setup.py refers to `ffibuilder`; it runs in the repository's root.
KTCONVERT_CFLAGS adds flags (`make asan`); KTCONVERT_ARCH selects a different folder of csrc/arch/.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from cffi import FFI

CSRC = Path("native_quant/csrc")
HEADER = CSRC / "ktq.h"
# Python functions that C calls (runtime/experts.py)
CALLBACKS = 'extern "Python" void ktq_load_experts(void *context, int64_t count, const int64_t *experts);'
ARCHITECTURES = {"x86_64": "x86"}  # platform.machine() -> folder of csrc/arch/
ARCH = CSRC / "arch" / (os.environ.get("KTCONVERT_ARCH") or ARCHITECTURES.get(platform.machine(), "generic"))

COMPILE = [
    "-std=c11",
    "-O3",
    "-Wall",
    "-Wextra",
    "-Werror=incompatible-pointer-types",
    "-fvisibility=hidden",
    # For bit-equal results: no fused multiply-add, no reordering. Never use -ffast-math or similar flags.
    "-ffp-contract=off",
    "-fno-math-errno",
    # The scalar kernels stay scalar; the others use intrinsics.
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
]


def explain_unsupported() -> str | None:
    """Return why ktconvert cannot be built or run here, in one sentence, or None.

    pip shows it where no wheel fits and the package has to be built.
    """
    if sys.platform != "linux":
        return (
            f"ktconvert runs only on Linux, and this is {sys.platform}: use a Linux machine or container, or on "
            "Windows WSL 2."
        )
    if sys.implementation.name != "cpython":
        return f"ktconvert runs only on CPython, and this is {sys.implementation.name}: use CPython 3.11 or later."
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return (
            "ktconvert needs a Python with the GIL, and this one is free-threaded, which has no stable ABI for it: use "
            "the ordinary build of the same version."
        )
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"ktconvert contains C code, and {compiler} is missing: install a C compiler (Debian: apt install gcc)."
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h is missing: install the Python headers (Debian: apt install python3-dev)."
    return None


def read_declarations() -> str:
    """Return the text between the two markers of ktq.h."""
    match = re.search(r"/\* cdef begin \*/(.*)/\* cdef end \*/", HEADER.read_text(), re.DOTALL)
    if match is None:
        raise SystemExit(f"{HEADER}: the markers 'cdef begin' and 'cdef end' are missing")
    return match.group(1)


def read_isas(arch: Path) -> set[str]:
    """Return the instruction sets of an architecture: X(name, contains) in its isa.h."""
    return set(re.findall(r"X\((\w+), \w+\)", (arch / "isa.h").read_text()))


def list_sources() -> list[str]:
    """Return the C files to compile for ARCH, sorted, so that builds are reproducible.

    NAME_ISA.c is among them only if ARCH has that instruction set.
    """
    foreign = set[str]().union(*map(read_isas, CSRC.glob("arch/*"))) - read_isas(ARCH)
    files = [path for path in CSRC.rglob("*.c") if path.stem.rpartition("_")[2] not in foreign]
    return sorted(str(path) for path in files if CSRC / "arch" not in path.parents or ARCH in path.parents)


def list_other_files() -> list[str]:
    """Return the headers and the C files of other architectures, which an sdist needs as well."""
    return sorted({str(path) for path in CSRC.rglob("*.*") if path.is_file()} - set(list_sources()))


if (reason := explain_unsupported()) is not None:
    raise SystemExit(reason)
ffibuilder = FFI()
ffibuilder.cdef(read_declarations())
ffibuilder.cdef(CALLBACKS)
ffibuilder.set_source(
    "ktconvert.native_quant._ktq",
    '#include "ktq.h"',
    sources=list_sources(),
    depends=list_other_files(),
    include_dirs=[str(CSRC), str(ARCH)],
    extra_compile_args=COMPILE + os.environ.get("KTCONVERT_CFLAGS", "").split(),
    extra_link_args=os.environ.get("KTCONVERT_CFLAGS", "").split(),
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
)
