"""Read-only memory maps, one per file and process, that name their file in SIGBUS messages."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
import threading
from pathlib import Path

import numpy as np

from ktconvert.layouts.errors import InputError, ResourceError
from ktconvert.native_quant import sigbus

LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors at a limit of the process or the system


class MappedFiles:
    """Files that are mapped at their first use, in any thread.

    may_lose  whether unreadable bytes become zeros, which sigbus.find_unreadable_file reports
    """

    def __init__(self, may_lose: bool = False) -> None:
        self._maps: dict[Path, Mapping] = {}
        self._may_lose = may_lose
        self._lock = threading.Lock()

    def map(self, path: Path, size: int) -> mmap.mmap:
        """Return the bytes of a file.

        Raises InputError if the file cannot be mapped or its size changed, ResourceError at a limit of the process.
        """
        with self._lock:
            mapped = self._maps.get(path)
            if mapped is None:
                try:
                    mapped = _map(path, size)
                except OSError as e:
                    problem = f"{path}: cannot be mapped ({e.strerror})"
                    if e.errno in LIMITS:
                        limits = "the limits of this process (ulimit -n for files, -v for memory)"
                        raise ResourceError(f"{problem}; raise {limits} and start again") from None
                    raise InputError(f"{problem}; check the disk and start again") from None
                self._maps[path] = mapped
                mapped.register(path, self._may_lose)
            return mapped

    def __contains__(self, path: Path) -> bool:
        return path in self._maps

    def close(self) -> None:
        """Forget the files; each is unmapped when its last view is freed."""
        # mmap.close() is wrong here: NumPy's views do not count as exports, and would point at unmapped memory.
        with self._lock:
            self._maps.clear()


class Mapping(mmap.mmap):
    """A mapped file that is registered under its name until it is unmapped; then other files may use its addresses."""

    # Kept here because at exit the module's globals may be cleared before the last mappings are freed.
    _unregister, _is_exiting = staticmethod(sigbus.unregister_mapping), staticmethod(sys.is_finalizing)
    _address = 0

    def register(self, path: Path, may_lose: bool) -> None:
        address = int(np.frombuffer(self, np.uint8).ctypes.data)
        sigbus.register_mapping(address, len(self), str(path), may_lose)
        self._address = address

    def __del__(self) -> None:
        if self._address and not self._is_exiting():
            self._unregister(self._address)


def _map(path: Path, size: int) -> Mapping:
    """Map a file; if too many files are open, raise this process's own limit as far as allowed."""
    try:
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size != size:
                raise InputError(f"{path}: its size changed after it was opened; start again")
            return Mapping(f.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except OSError as e:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if e.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return _map(path, size)
