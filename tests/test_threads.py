"""A system that starts no more threads for a process (ulimit -u, ulimit -v, a container's limit):
exit code 4, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rig import shims

# The first so many threads are started, later ones are not.
FEW_THREADS = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <errno.h>
    #include <stdlib.h>
    int pthread_create(void *thread, const void *attributes, void *(*run)(void *), void *argument) {
        static int started;
        const char *most = getenv("MOST_THREADS");
        if (most && __atomic_fetch_add(&started, 1, __ATOMIC_SEQ_CST) >= atoi(most)) return EAGAIN;
        return ((int (*)(void *, const void *, void *, void *))dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, run, argument);
    }
"""
SENTENCE = "ktconvert: the system gives this process no more threads or memory; "


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that may start threads as MOST_THREADS says; NumPy's own do not count."""
    shim = shims.build(tmp_path_factory.mktemp("few"), "few", FEW_THREADS)
    return {"LD_PRELOAD": str(shim), "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize("most", range(4))
def test_a_conversion_without_threads_can_be_resumed(
    most: int, few: dict[str, str], cli: Any, example: Path, tmp_path: Path
) -> None:
    options = ("--quant-method", "int8", "--cpuinfer-threads", 2, "-q")
    failed = cli("cpu", "-i", example, "-o", tmp_path / "out", *options, code=4, env=few | {"MOST_THREADS": str(most)})
    assert failed.stderr.startswith(SENTENCE) and failed.stderr.count("\n") == 1
    cli("resume", tmp_path / "out", "-q")


PROGRAMS = {
    "pool": "from ktconvert.native_quant.runtime.pool import Pool; Pool(3)",
    "bandwidth": "from ktconvert.native_quant.runtime.benchmark import read_bandwidth; read_bandwidth(3)",
}


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("pool", "ResourceError: the system starts no more threads"),
        ("bandwidth", "RuntimeError: can't start new thread"),
    ],
)
def test_the_runtime_ends_without_threads(program: str, sentence: str, few: dict[str, str]) -> None:
    env = {**os.environ, **few, "MOST_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAMS[program]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and sentence in done.stderr
