#!/bin/sh
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer in build/asan and runs the kernels' tests with it,
# then the tests of AMX products, emulated (emulated.sh), so that the memory accesses of tile instructions are checked, too.
# Usage: tests/asan.sh [PYTHON]   (the interpreter with ktconvert's dependencies; default .venv/bin/python)
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${1:-.venv/bin/python}")
out=build/asan

KTCONVERT_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -fno-var-tracking -O1" \
    sh tests/build.sh "$out" "$python"

# PYTHONPATH precedes site-packages, so this ktconvert is imported.
libasan=$("${CC:-gcc}" -print-file-name=libasan.so)
export ASAN_OPTIONS="detect_leaks=0:handle_sigbus=0"
libstdcxx=$("${CC:-gcc}" -print-file-name=libstdc++.so.6)  # for torch's C++ exceptions
on_asan() { PYTHONPATH="$PWD/$out/lib" LD_PRELOAD="$libasan $libstdcxx" "$python" "$@"; }
on_asan -c "import ktconvert.native_quant._ktq as m; assert '/asan/' in m.__file__, m.__file__"
# Without kt-kernel, which has no sanitizer build, and without whole models, which use the same kernels.
export KTCONVERT_PEER_PYTHON=none
on_asan -m pytest -q -p no:cacheprovider tests/test_kernels.py tests/test_scale_search.py \
    tests/test_groups.py tests/test_panels.py tests/test_gptq_block.py tests/test_descent.py \
    tests/test_decoding.py tests/test_kernel_calls.py tests/test_golden.py tests/test_gemm.py tests/test_gemm_bf16.py \
    tests/test_elementwise.py tests/test_runtime.py tests/test_forward_bf16.py tests/test_runtime_load.py \
    tests/test_pool.py tests/test_moe_plain.py tests/test_llamafile.py tests/test_gpu_buffers.py tests/test_sft.py \
    tests/test_training.py -k "not run_and_eval"
# Calls instead of inline checks compile in seconds rather than minutes.
OUT=build/asan-emulated PRELOAD=$libasan \
    KTCONVERT_CFLAGS="-fsanitize=address --param asan-instrumentation-with-call-threshold=0 -fno-omit-frame-pointer -g -O1" \
    sh tests/emulated.sh "$python" -q tests/test_gemm.py tests/test_gemm_bf16.py \
    tests/test_runtime.py::test_incomplete_token_blocks_compute \
    tests/test_runtime.py::test_every_instruction_set_and_pool_gives_the_same_bits -k "amx or avxvnni"
