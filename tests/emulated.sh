#!/bin/sh
# Runs tests of the kernels for instruction sets that the CPU lacks. The build, in build/emulated or $OUT, reports all of
# x86-64 as available. Tile instructions of AMX are trapped (tests/rig/amx_trapped.c). For the rest, there are two
# builds:
#   - A CPU with AVX-512 VNNI runs AVX-VNNI as AVX-512 encodes it. Selected: tests of AMX and AVX-VNNI. AVX-VNNI has
#     kernels only for AMXINT4, AMXINT8 and integers.
#   - A CPU with AVX2 only runs AVX2 instead of AVX-512 (tests/rig/avx512_emulated.h). Selected: all of these tests but
#     those of scalar and avx2, and those of the kernels that convert.
# The build uses -O1, which compiles faster: do not measure its speed. KTCONVERT_CFLAGS adds flags; PRELOAD names more
# libraries to preload.
# Usage: tests/emulated.sh [PYTHON [PYTEST-ARGUMENTS...]]   (default: .venv/bin/python, and the tests above)
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${1:-.venv/bin/python}")
flags="-DKT_EMULATED -g0 -O1"
if grep -qw avx512_vnni /proc/cpuinfo; then
    first=immintrin.h files="" emulated="(amx or avxvnni or AMXINT) and not (scalar or avx2 or avx512)"
else
    first=$PWD/tests/rig/avx512_emulated.h emulated="not (scalar or avx2)"
    files="kernels golden decoding groups scale_search descent gptq_block panels elementwise"
    # Unrolled loops would take minutes to compile. GCC warns that vectors of 64 bytes are passed in memory.
    flags="$flags -fno-tree-loop-optimize -Wno-psabi"
fi
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- tests/test_gemm.py tests/test_gemm_bf16.py \
    tests/test_llamafile.py::test_instruction_sets_give_the_same_sums \
    tests/test_llamafile.py::test_largest_products_do_not_overflow tests/test_runtime.py::test_exact_mode_gives_the_bits_of_kt_kernel \
    tests/test_runtime.py::test_every_instruction_set_and_pool_gives_the_same_bits \
    tests/test_runtime.py::test_incomplete_token_blocks_compute \
    tests/test_forward_bf16.py::test_neither_threads_nor_the_batch_change_a_bit \
    tests/test_from_checkpoint.py::test_at_least_as_close_to_float64_as_kt_kernel tests/test_training.py::test_gradients_are_close_to_float64 \
    $(for file in $files; do echo "tests/test_$file.py"; done) \
    -k "$emulated and not (avxvnni and (bf16 or FP8 or MXFP4))"
out=${OUT:-build/emulated}

KTCONVERT_CFLAGS="$flags ${KTCONVERT_CFLAGS:-}" FIRST=$first sh tests/build.sh "$out" "$python"
out=$(realpath "$out")
"${CC:-cc}" -std=gnu11 -mavx2 -mfma -Wall -Wextra ${KTCONVERT_CFLAGS:-} -O3 -shared -fPIC tests/rig/amx_trapped.c -o "$out/amx_trapped.so"

# PYTHONPATH precedes site-packages, so this ktconvert is imported.
export PYTHONPATH="$out/lib"
export LD_PRELOAD="${PRELOAD:-} $out/amx_trapped.so"
"$python" -c "import sys, ktconvert.native_quant._ktq as m; assert m.__file__.startswith(sys.argv[1]), m.__file__" "$out"
# pytest's faulthandler would take over SIGILL.
exec "$python" -m pytest -p no:cacheprovider -p no:faulthandler "$@"
