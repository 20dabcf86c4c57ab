"""Background jobs of the runtime: objects that they keep alive, calls that they reject, and forks."""

from pathlib import Path

from rig import shims
from rig.programs import python_output

# A failure here ends or blocks the process, so each script runs in its own. A forward takes a tenth of a second.
SLOW_LAYER = """
import gc, os, threading, time
import numpy as np
from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool

rng = np.random.default_rng(0)
bf16 = lambda *shape: (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
pool = Pool(3)
experts = KTExperts.from_bf16(bf16(8, 256, 512), bf16(8, 256, 512), bf16(8, 512, 256), method="AMXINT8", pool=pool)
call = bf16(4000, 512), rng.integers(0, 8, (4000, 4)), rng.random((4000, 4), np.float32)
small = tuple(array[:64].copy() for array in call)
expected, small_expected = experts.forward(*call), experts.forward(*small)
out = np.zeros_like(expected)

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def wait_for_threads(count):
    while len(os.listdir("/proc/self/task")) != count:
        time.sleep(0.01)

def error_of(kind, work):
    try:
        work()
    except kind as error:
        return str(error)
"""


def run(script: str, preload: Path | None = None) -> str:
    """Run a script after SLOW_LAYER, and return its output."""
    return python_output(SLOW_LAYER + script, preload=preload)


def test_a_job_keeps_its_experts_alive():
    run("""
job = experts._submit(*call, out=out)
experts.close()
gc.collect()
job.wait()
assert np.array_equal(out, expected)
out[:] = 0
job.submit()
job.wait()
assert np.array_equal(out, expected)
""")


def test_closed_experts_and_pools_reject_calls():
    out = run("""
job = experts._submit(*call, out=out)
pool.close()
job.wait()
assert np.array_equal(out, expected)
job.submit()
print(error_of(ValueError, job.wait))
print(error_of(ValueError, lambda: experts._submit(*call, out=out).wait()))
print(error_of(ValueError, lambda: experts.forward(*call)))
experts.close()
print(error_of(ValueError, lambda: experts.forward(*call)))
print(error_of(ValueError, lambda: experts._submit(*call, out=out)))
""")
    assert out == 3 * "the pool of threads was closed\n" + 2 * "the experts of layer 0 were closed; load them again.\n"


def test_experts_can_be_closed_during_a_forward():
    run("""
thread = threading.Thread(target=lambda: experts.forward(*call, out=out))
thread.start()
time.sleep(0.02)
experts.close()
gc.collect()
thread.join()
assert np.array_equal(out, expected) or not out.any()  # computed or rejected
""")


def test_a_pending_job_does_not_follow_into_a_forked_child():
    run("""
def work():
    message = error_of(RuntimeError, jobs[-1].wait)
    jobs.pop()  # freed without waiting
    jobs[-1].submit()
    jobs[-1].wait()
    return "forked before this was computed" in message and np.array_equal(out, expected)

jobs = [experts._submit(*call, out=out) for _ in range(4)]
in_child(work)
jobs[-1].wait()
assert np.array_equal(out, expected)
""")


def test_threads_of_a_forked_child_take_turns(tmp_path):
    """If two threads find a pool without threads, only one of them starts them."""
    slow = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <unistd.h>
        int pthread_mutex_init(void *mutex, const void *attributes) {
            usleep(20000);
            return ((int (*)(void *, const void *))dlsym(RTLD_NEXT, "pthread_mutex_init"))(mutex, attributes);
        }
    """
    script = """
def work():
    results = []
    barrier = threading.Barrier(4)

    def one():
        barrier.wait()
        results.extend(experts.forward(*small) for _ in range(3))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for_threads(3)
    return len(results) == 12 and all(np.array_equal(one, small_expected) for one in results)

in_child(work)
"""
    run(script, shims.build(tmp_path, "slow", slow))


def test_failed_thread_starts_are_retried():
    run("""
import resource

def work():
    done = threading.Event()
    for _ in range(20):  # they take the stacks of the parent's threads, so that new threads need memory
        threading.Thread(target=done.wait).start()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    messages = [error_of(ResourceError, lambda: experts.forward(*small)) for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_AS, before)
    good = np.array_equal(experts.forward(*small), small_expected)
    done.set()
    wait_for_threads(3)
    return good and None not in messages

in_child(work)
""")


def test_ids_that_change_during_a_job_do_no_harm(tmp_path):
    """Ids are read only once. The shim changes them while a forward sorts them; a second read would find more."""
    changing = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdlib.h>
        void qsort(void *base, size_t count, size_t size, int (*compare)(const void *, const void *)) {
            ((void (*)(void *, size_t, size_t, void *))dlsym(RTLD_NEXT, "qsort"))(base, count, size, compare);
            const char *address = getenv("IDS");
            for (long i = 0; address && i < 10000; i++) ((long *)strtoul(address, NULL, 10))[i] = 0;
        }
    """
    script = """
tokens, ids, weights = bf16(10_000, 512), np.full((10_000, 1), -1), np.ones((10_000, 1), np.float32)
experts = KTExperts(experts._packed, pool=Pool(2))  # a new pool, which has no memory yet
os.environ["IDS"] = str(ids.ctypes.data)
assert not experts.forward(tokens, ids, weights).any()
assert not ids.any()
"""
    run(script, shims.build(tmp_path, "changing", changing))
