"""Documents of ours: a type that several threads meet for the first time at once."""

import subprocess
import sys

TYPES = """
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: float = 0.0
class Outer(msgspec.Struct):
    x: Inner | msgspec.UnsetType = msgspec.UNSET
    y: Inner | msgspec.UnsetType = msgspec.UNSET
"""
MEETING = """
import sys, threading, types
from ktconvert.layouts.files import documents
sys.setswitchinterval(1e-6)
for number in range(1000):
    sys.modules[f"m{number}"] = module = types.ModuleType(f"m{number}")
    exec(compile(sys.argv[1], module.__name__, "exec"), module.__dict__)
    together = threading.Barrier(3)
    def meet():
        together.wait()
        documents.as_type({"x": {"a": 1.0}, "y": {}}, module.Outer)
        documents.read(b'{"x": {"a": 1.0}}', module.Outer)
    threads = [threading.Thread(target=meet) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_that_meet_a_type_together() -> None:
    """msgspec 0.22 ends in a segmentation fault without a lock: each unit's result is checked by the thread that made it."""
    done = subprocess.run([sys.executable, "-c", MEETING, TYPES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
