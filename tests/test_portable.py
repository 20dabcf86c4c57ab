"""Portability: outside csrc/arch/x86 and the files of its instruction sets, C files need only standard C."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rig import conversion

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "native_quant" / "csrc"
X86 = CSRC / "arch" / "x86"
X86_HEADERS = ("immintrin.h", "x86intrin.h", "xmmintrin.h", "emmintrin.h", "cpuid.h")
X86_ISAS = set(re.findall(r"X\((\w+), \w+\)", (X86 / "isa.h").read_text())) - {"scalar"}


def portable_files() -> list[Path]:
    """Return the files that every architecture compiles."""
    files = [path for path in CSRC.rglob("*.[ch]") if X86 not in path.parents]
    return [path for path in files if not X86_ISAS & set(path.stem.split("_"))]


def test_only_files_of_x86_use_x86():
    assert len(portable_files()) > 30
    x86 = r"\w*intrin\.h|cpuid|__builtin_ia32_\w+|__asm__|\basm\b|\b_mm\d*_\w+|arch/x86|KT_TARGET_\w+"
    for path in portable_files():
        match = re.search(x86, re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL))
        assert match is None, f"{path.relative_to(ROOT)}: {match[0]}"


@pytest.mark.parametrize("arch", ["x86", "generic"])
def test_an_sdist_holds_the_files_of_every_architecture(arch, monkeypatch):
    """Setuptools puts an extension's sources and dependencies into an sdist."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("KTCONVERT_ARCH", arch)
    build = runpy.run_path("native_quant/_build.py")
    files = {str(path.relative_to(ROOT)) for path in CSRC.rglob("*.*") if path.is_file()}
    assert sorted(build["list_sources"]() + build["list_other_files"]()) == sorted(files)
    assert (f"native_quant/csrc/arch/{arch}/cpu.c") in build["list_sources"]()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sys.platform = 'darwin'", "ktconvert runs only on Linux, and this is darwin: use a Linux machine"),
        ("sys.platform = 'win32'", "this is win32: use a Linux machine or container, or on Windows WSL 2."),
        ("sys.implementation.name = 'pypy'", "ktconvert runs only on CPython, and this is pypy"),
        ("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1", "a Python with the GIL, and this one is free-threaded"),
        ("os.environ['CC'] = 'nocc -pipe'", "nocc is missing: install a C compiler (Debian: apt install gcc)."),
    ],
)
def test_an_unsupported_platform_is_refused_with_a_message(change: str, message: str) -> None:
    """setup.py runs in a process that pretends to be on a different platform."""
    program = f"import os, runpy, setuptools, sys, sysconfig, cffi; {change}; runpy.run_path('native_quant/_build.py')"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and message in result.stderr, result.stderr


PROGRAM = """
import sys
from ktconvert.native_quant import _ktq, kernels
assert _ktq.__file__.startswith(sys.argv[1]), _ktq.__file__
assert kernels.ISAS == ("scalar",), kernels.ISAS
assert all(isa == "scalar" for _, isa in kernels.KERNELS) and kernels.KERNELS
"""


def test_a_different_architecture_converts_to_the_same_bytes(tmp_path):
    """Builds csrc/arch/generic, for a processor without kernels of its own; headers of x86 are unavailable."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in X86_HEADERS:
        (absent / name).write_text(f'#error "{name} is missing"\n')
    out = tmp_path / "build"
    flags = {"KTCONVERT_ARCH": "generic", "KTCONVERT_CFLAGS": f"-O1 -Werror -I{absent}"}
    subprocess.run(["sh", "tests/build.sh", out, sys.executable], cwd=ROOT, env={**os.environ, **flags}, check=True)
    environment = {**os.environ, "PYTHONPATH": str(out / "lib")}
    subprocess.run([sys.executable, "-c", PROGRAM, out], env=environment, check=True)
    golden = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_golden.py"]
    result = subprocess.run(golden, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and " passed" in result.stdout and "skipped" not in result.stdout, result.stdout
    arguments = ["cpu", "-i", ROOT / "examples" / "qwen3-moe-small", "-o"]
    for name, env in (("generic", environment), ("native", os.environ)):
        command = [sys.executable, "-m", "ktconvert.pipeline.cli", *arguments, tmp_path / name]
        subprocess.run(command, env=env, check=True, capture_output=True)
    assert (
        conversion.find_differences(conversion.tree(tmp_path / "generic"), conversion.tree(tmp_path / "native")) == []
    )
    assert list((tmp_path / "native").glob("*.safetensors"))
