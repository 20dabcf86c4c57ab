"""`ktconvert cpu` on a file system that refuses O_DIRECT: tmpfs of Linux before 6.6."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from numa.see import run

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")


@pytest.mark.on("one", "two")
def test_a_conversion_on_tmpfs():
    probe = SHM / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT))
    except OSError:
        pass
    else:
        pytest.skip(f"tmpfs of Linux {os.uname().release} takes O_DIRECT")
    finally:
        assert probe.exists()  # also where open failed: what was to be survived
        probe.unlink()
    example, out = ROOT / "examples/qwen3-moe-small", SHM / "out"
    assert not out.exists(), "of an earlier run: nothing would be written"
    done = run("ktconvert", "cpu", "-i", example, "-o", out, "--quant-method", "int4", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("ktconvert", "verify", out, "--against", example, "--full", "-q")
    assert done.returncode == 0, done.stderr
