#!/usr/bin/env bash
# Check ktconvert on a machine with a CUDA GPU, without network (README.md beside this file).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" build/gpu-bundle/*.whl
export PYTHONPATH="$site" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
result=0
"$PYTHON" -m pytest -q -p no:cacheprovider tests/test_wrapper_stream.py || result=1
"$PYTHON" -m pytest -q -p no:cacheprovider tests/test_sglang.py -k cuda || result=1
"$PYTHON" tests/gpu/checks.py "$@" || result=1
exit $result
