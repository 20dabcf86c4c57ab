"""Forwards in the background, and what the errors of a forward are called in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.pool import no_threads


class Job:
    """A forward that runs in the background; its arrays must live until wait() has returned.

    require_whole  raises InputError where weights could not be read
    """

    # Kept here because at exit the module's globals may be cleared before the last jobs are freed.
    _free = staticmethod(lib.ktq_job_free)

    def __init__(self, pointer: Any, require_whole: Callable[[], None], keep: tuple[object, ...]) -> None:
        self.pointer, self._require_whole, self._keep = pointer, require_whole, keep

    def submit(self) -> None:
        """Queue it (again), after waiting for its last run. It keeps its experts alive, even if they are closed."""
        lib.ktq_job_submit(self.pointer)

    def wait(self) -> None:
        """Wait for it. Raises forward()'s errors, and RuntimeError in a child that was forked while it was pending."""
        lib.ktq_job_wait(self.pointer)
        check(lib.ktq_job_result(self.pointer))
        self._require_whole()

    def __del__(self) -> None:
        self._free(self.pointer)


def check(error: int) -> None:
    """Raise the exception of a KTQ_E... code; nothing for KTQ_OK."""
    if error == lib.KTQ_OK:
        return
    if error == lib.KTQ_ESYSTEM:
        raise no_threads()
    text = ffi.string(lib.ktq_strerror(error)).decode()
    raise {lib.KTQ_ENOMEM: MemoryError, lib.KTQ_EFORK: RuntimeError}.get(error, ValueError)(text)
