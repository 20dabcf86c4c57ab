"""Threads of the runtime: shared by callers, joined at exit, and asleep without work."""

import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool
from rig import shims
from rig.pools import make_grouped_pool
from rig.programs import run_python


@pytest.fixture(scope="module")
def layer(random_experts: Any) -> list[Any]:
    """Draw the weights of a layer."""
    matrices = random_experts(4, 256, 128)
    return [matrices[name] for name in ("gate", "up", "down")]


@pytest.fixture(scope="module")
def call() -> tuple[Any, ...]:
    """Draw the arguments of a forward."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((33, 256)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x, rng.integers(0, 4, (33, 2)), rng.random((33, 2)).astype(np.float32)


@pytest.mark.parametrize("nodes", [[10_000], [-1], [0, 0], [], "0", ["0"], [0.0]], ids=str)
def test_invalid_nodes_are_rejected(nodes):
    with pytest.raises(ValueError, match=re.escape(f"from {list(machine.numa_nodes())}, not {nodes!r}")):
        Pool(2, numa_nodes=nodes)


def test_wrappers_with_different_pools_coexist(layer, call):
    pools = [Pool(1), Pool(3), make_grouped_pool(4, 2)]
    experts = [KTExperts.from_bf16(*layer, method="AMXINT8", pool=pool) for pool in pools]
    expected = experts[0].forward(*call)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            if not np.array_equal(experts[number % 3].forward(*call), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for pool in pools[1:]:
        pool.close()
    np.testing.assert_array_equal(experts[0].forward(*call), expected)


def test_background_jobs_run_in_order_and_again(layer, call):
    experts = KTExperts.from_bf16(*layer, method="AMXINT4", pool=Pool(2))
    x, ids, weights = call
    outs = [np.zeros_like(x) for _ in range(8)]
    jobs = [experts._submit(x, np.roll(ids, number, 0).copy(), weights, out=out) for number, out in enumerate(outs)]
    jobs[-1].wait()
    for number, out in enumerate(outs):  # all are finished, since the last is
        np.testing.assert_array_equal(out, experts.forward(x, np.roll(ids, number, 0).copy(), weights))
    x2 = x.copy()
    job = experts._submit(x2, ids, weights, out=outs[0])
    job.wait()
    job.wait()
    x2[:] = np.roll(x, 1, 0)
    job.submit()
    job.wait()
    np.testing.assert_array_equal(outs[0], experts.forward(x2, ids, weights))


def test_threads_are_joined_at_exit_and_take_no_signals():
    result = run_python("""
import os, signal, threading
from ktconvert.native_quant.runtime.pool import Pool
pool = Pool(4)
names = [t for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
blocked = [next(l.split()[1] for l in open(f"/proc/self/task/{t}/status") if l.startswith("SigBlk")) for t in names]
print(len(names), all(int(b, 16) >> (signal.SIGINT - 1) & 1 for b in blocked))
""")
    assert (result.returncode, result.stdout, result.stderr) == (0, "3 True\n", "")


def test_a_truncated_mapped_file_is_an_error_of_the_forward(packed_example, tmp_path):
    """Without the command line the process continues, and layers in other files compute as before."""
    out = Path(shutil.copytree(packed_example("int8"), tmp_path / "out"))
    shard = out / "model-00001-of-00002.safetensors"
    script = f"""
import os, sys, numpy as np, torch
from ktconvert.native_quant import KTExperts
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.training import compute_with_lora as trained
pool = Pool(4)
experts, other = (KTExperts.load({str(out)!r}, layer, memory="map", pool=pool) for layer in (0, 1))
call = np.full((64, 256), 0x3F80, np.uint16), np.tile(np.arange(8), (64, 1)), np.ones((64, 8), np.float32)
want = other.forward(*call)
hidden, ids, weights = torch.ones(64, 256, requires_grad=True), torch.from_numpy(call[1]), torch.ones(64, 8)
loss = trained(experts, hidden, ids, weights).sum()
whole = open({str(shard)!r}, "rb").read()
os.truncate({str(shard)!r}, 8192)
result = np.zeros_like(call[0])
for use in (
    lambda: experts.forward(*call),
    lambda: experts._submit(*call, out=result).wait(),
    lambda: trained(experts, hidden, ids, weights),
    lambda: loss.backward(),
    lambda: experts._save({str(tmp_path / "saved")!r}),
    lambda: KTExperts.load({str(out)!r}, 0, memory="map", pool=pool),
):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
assert np.array_equal(other.forward(*call), want)
del experts, loss
open({str(shard)!r}, "wb").write(whole)
assert KTExperts.load({str(out)!r}, 0, memory="map", pool=pool).forward(*call).any()
"""
    result = run_python(script)
    assert (result.returncode, result.stderr) == (0, "")
    lost, lines = f"InputError {shard}: became shorter or could not be read after layer 0", result.stdout.splitlines()
    assert [line.startswith(lost) for line in lines] == [True] * 5 + [False]
    assert lines[5].startswith(f"InputError {out}")
    assert not list(tmp_path.glob("saved/_layer*"))


def test_idle_threads_sleep(layer, call):
    experts = KTExperts.from_bf16(*layer, method="AMXINT8", pool=Pool(4))
    experts.forward(*call)

    def running() -> int:
        states = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread of a different test has just ended
                states.append((task / "stat").read_text().rsplit(")", 1)[1].split()[0])
        return states.count("R")

    until = time.monotonic() + 300
    while running() > 1:
        assert time.monotonic() < until, "threads without work keep running"
        time.sleep(0.01)


# Only the first MOST_THREADS threads start.
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
MESSAGE = "ktconvert: this process reached its limit of threads or memory; "


@pytest.fixture(scope="module")
def few_threads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that may start MOST_THREADS threads, besides those of NumPy."""
    shim = shims.build(tmp_path_factory.mktemp("few"), "few", FEW_THREADS)
    return {**shims.preload_environment(shim), "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize("most", range(4))
def test_a_conversion_without_threads_can_be_resumed(most, few_threads, cli, example, tmp_path):
    options = ("--quant-method", "int8", "--cpuinfer-threads", 2, "-q")
    failed = cli(
        "cpu", "-i", example, "-o", tmp_path / "out", *options, code=4, env=few_threads | {"MOST_THREADS": str(most)}
    )
    assert failed.stderr.startswith(MESSAGE) and failed.stderr.count("\n") == 1
    cli("resume", tmp_path / "out", "-q")


FAILURES = [
    ("runtime.pool import Pool; Pool(3)", "ResourceError: the system starts no more threads"),
    ("runtime.benchmark import read_bandwidth; read_bandwidth(3)", "RuntimeError: can't start new thread"),
]


@pytest.mark.parametrize(("program", "message"), FAILURES, ids=["pool", "bandwidth"])
def test_the_runtime_fails_cleanly_without_threads(program, message, few_threads):
    result = run_python(f"from ktconvert.native_quant.{program}", **few_threads, MOST_THREADS="1")
    assert result.returncode == 1 and message in result.stderr
