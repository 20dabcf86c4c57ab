#!/bin/sh
# Builds the extension into the folder OUT, with KTCONVERT_CFLAGS and KTCONVERT_ARCH (native_quant/_build.py), beside links to the
# rest of ktconvert: with PYTHONPATH=OUT/lib that is the ktconvert that is imported.
# Usage: tests/build.sh OUT [PYTHON]   (the interpreter with ktconvert's dependencies; default .venv/bin/python)
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${2:-.venv/bin/python}")

rm -rf "$1"
mkdir -p "$1/lib/ktconvert/native_quant"
out=$(realpath "$1")
for file in pipeline/api/*; do ln -s "$PWD/$file" "$out/lib/ktconvert/"; done
for folder in pipeline quantizers layouts; do ln -s "$PWD/$folder" "$out/lib/ktconvert/$folder"; done
for file in native_quant/*; do case $file in *.so) ;; *) ln -s "$PWD/$file" "$out/lib/ktconvert/native_quant/" ;; esac; done
"$python" setup.py -q build_ext --build-temp "$out/temp" --build-lib "$out/lib"
