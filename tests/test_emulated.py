"""Tests of emulated kernels for instruction sets that this CPU may lack (AMX, AVX-VNNI, AVX-512)."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from ktconvert.native_quant import kernels

ROOT = Path(__file__).resolve().parents[1]
# The files whose tests must run, by instruction set. AVX-VNNI has kernels only for AMXINT4 and AMXINT8.
INTEGERS = ("test_gemm", "test_runtime", "test_from_checkpoint", "test_training")
PRODUCTS = (*INTEGERS, "test_gemm_bf16", "test_forward_bf16")
EMULATED: dict[str, tuple[str, ...]] = {"amx": PRODUCTS, "avxvnni": INTEGERS}
HAS_AVX512VNNI = "avx512vnni" in kernels.available_isas()
if not HAS_AVX512VNNI:
    EMULATED |= dict.fromkeys(("avx512", "avx512vnni", "avx512bf16"), (*PRODUCTS, "test_kernels"))


# CPUs that have these instruction sets test the real kernels anyway; to emulate AVX-512 with AVX2 takes six minutes.
@pytest.mark.slow if HAS_AVX512VNNI and not set(EMULATED) <= set(kernels.available_isas()) else pytest.mark.long
def test_emulated_kernels_pass_their_tests(tmp_path: Path) -> None:
    if "avx2" not in kernels.available_isas():
        pytest.skip("this machine has no avx2, with which the emulated build computes")
    env = {**os.environ, "OUT": str(tmp_path / "build"), "PYTEST_ADDOPTS": "-v"}
    command = ["sh", "tests/emulated.sh", sys.executable]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1700)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
    # "tests/test_gemm.py::test_name[4-amx-17] PASSED [ 3%]"
    lines = re.findall(r"^tests/(\w+)\.py::\w+\[(\S+)\] (PASSED|SKIPPED)", result.stdout, re.MULTILINE)
    outcomes = Counter((file, isa, word) for file, names, word in lines for isa in EMULATED if isa in names.split("-"))
    for isa, files in EMULATED.items():
        for file in files:
            assert outcomes[file, isa, "PASSED"] > 0, f"no test of {file} ran with {isa}:\n{result.stdout}"
            assert outcomes[file, isa, "SKIPPED"] == 0, f"a test of {file} was skipped with {isa}:\n{result.stdout}"


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="there is no C compiler")
@pytest.mark.parametrize("bits", [8, 4])
def test_amx_reads_each_cache_line_of_the_weights_once(tmp_path: Path, bits: int) -> None:
    """The call that reads a line fetches it, or the call before does so while it multiplies."""
    if "avx2" not in kernels.available_isas():
        pytest.skip("this machine has no avx2, with which codes are unpacked")
    program, include = tmp_path / "fetches", ROOT / "native_quant" / "csrc"
    command = [os.environ.get("CC", "cc"), "-std=c11", "-O1", f"-I{include}", f"-I{include / 'arch' / 'x86'}"]
    if not HAS_AVX512VNNI:
        command += ["-Wno-psabi", "-include", str(ROOT / "tests" / "rig" / "avx512_emulated.h")]
    subprocess.run([*command, "-o", program, ROOT / "tests" / "rig" / "fetches.c"], check=True)
    # k: within a column block of 3584, and beyond one. Tokens: at most two tiles (9, 32), and more (33).
    for k, panels, (m, rows) in product((128, 512, 768, 1280, 2048, 3712), (1, 2, 3, 8), ((9, 9), (32, 16), (33, 11))):
        case = [str(number) for number in (bits, m, rows, k, panels)]
        result = subprocess.run([program, *case], capture_output=True, text=True, check=True)
        counts, elsewhere, early = result.stdout.split()
        assert len(counts) == panels * 32 * k * bits // 8 // 64
        assert (set(counts), elsewhere, early) == ({"1"}, "0", "0"), case
