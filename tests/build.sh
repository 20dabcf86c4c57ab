#!/bin/sh
# Builds the extension into the folder OUT, with KTCONVERT_CFLAGS and KTCONVERT_ARCH (native_quant/_build.py), beside links
# to the rest of ktconvert. PYTHONPATH=OUT/lib imports this ktconvert.
# FIRST names a header that many files include: gcc precompiles it.
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
if [ -n "${FIRST:-}" ]; then
    export KTCONVERT_CFLAGS="${KTCONVERT_CFLAGS:-} -D_GNU_SOURCE= -include $out/first.h"
    echo "#include <$FIRST>" > "$out/first.h"
    # gcc uses a precompiled header only for files that have the same flags.
    flags='import runpy, sysconfig; print(sysconfig.get_config_var("CFLAGS"), *runpy.run_path("native_quant/_build.py")["COMPILE"])'
    "${CC:-cc}" $("$python" -c "$flags") -fPIC $KTCONVERT_CFLAGS -x c-header "$out/first.h" -o "$out/first.h.gch"
fi
"$python" setup.py -q build_ext --build-temp "$out/temp" --build-lib "$out/lib"
