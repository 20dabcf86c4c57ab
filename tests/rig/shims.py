"""Libraries for LD_PRELOAD that take the place of some of libc's calls: a system that refuses
something, or takes its time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def build(folder: Path, name: str, code: str) -> Path:
    """Compile C into folder/NAME.so and return its path."""
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(code)
    subprocess.run([os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def refusing(folder: Path, reason: str, *calls: str) -> Path:
    """A shim for a file system that cannot do something, such as FAT and some network shares: these calls fail."""
    bodies = [f"int {call}() {{ errno = {reason}; return -1; }}" for call in calls]
    return build(folder, f"no_{calls[0]}", "\n".join(["#include <errno.h>", *bodies]))
