"""What hypothesis draws for a test does not depend on the modules that the tests before it have loaded."""

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from hypothesis import given, strategies as st
from rig import draws
draws.same_everywhere()
for name in sys.argv[2:]:
    importlib.import_module(name)

@given(st.integers(0, (1 << 64) - 1), st.integers(1, 4000), st.floats(), st.text(max_size=5), st.binary())
def draw(whole, size, number, text, data):
    print((whole, size, number, text, data))

draw()
"""
MODULES = ("ktconvert.pipeline.cli", "ktconvert.native_quant.runtime.experts", "ktconvert.quantizers.reference")


def test_modules_that_are_loaded_change_no_draw() -> None:
    folder = str(Path(__file__).parent)
    drawn = []
    for modules in ((), MODULES):
        command = [sys.executable, "-c", CODE, folder, *modules]
        drawn.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 100
