"""Run `ktconvert cpu` for `kt quant`, which looks for a script of this name beside kt_kernel.

`kt quant` passes --input-type fp8 unless its user chooses a type; ktconvert reads the type from the headers.
"""

import os
import sys

arguments = sys.argv[1:]
if "--input-type" in arguments:
    position = arguments.index("--input-type")
    del arguments[position : position + 2]
os.execv(sys.executable, [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", *arguments])
