#!/bin/sh
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer into build/asan and runs the kernels' tests on it. AMX and
# AVX-VNNI are emulated as in emulated.sh, so what tile instructions read and write is checked, too.
# Usage: tests/asan.sh [PYTHON]   (the interpreter with ktconvert's dependencies; default .venv/bin/python)
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${1:-.venv/bin/python}")
out=build/asan

flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -fno-var-tracking -O1"
KTCONVERT_CFLAGS="-DKT_EMULATED $flags" sh tests/build.sh "$out" "$python"
"${CC:-cc}" -std=gnu11 -mavx2 -mfma -Wall -Wextra $flags -O3 -shared -fPIC tests/rig/amx_trapped.c -o "$out/amx_trapped.so"

# PYTHONPATH comes before site-packages, so this ktconvert is the one that is imported.
libasan=$("${CC:-gcc}" -print-file-name=libasan.so)
export PYTHONPATH="$PWD/$out/lib" LD_PRELOAD="$libasan $PWD/$out/amx_trapped.so" ASAN_OPTIONS="detect_leaks=0:handle_sigbus=0"
"$python" -c "import ktconvert.native_quant._ktq as m; assert '/asan/' in m.__file__, m.__file__"
# pytest's faulthandler would take SIGILL over.
exec "$python" -m pytest -q -p no:cacheprovider -p no:faulthandler tests/test_kernels.py tests/test_pack_codes.py tests/test_groups.py tests/test_mxfp4.py tests/test_fp8.py tests/test_gptq_block.py tests/test_packed_codes.py tests/test_ggml_blocks.py tests/test_kernel_calls.py \
    tests/test_golden.py tests/test_gemm.py tests/test_gemm_bf16.py tests/test_elementwise.py tests/test_runtime.py tests/test_forward_bf16.py tests/test_runtime_load.py tests/test_pool.py
