"""Files as read-only memory: mapped once per process, named for the message that a page which cannot be read gives."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from pathlib import Path

import numpy as np

from ktconvert.layouts.errors import InputError, ResourceError
from ktconvert.native_quant import sigbus

LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class MappedFiles:
    """Maps files at their first use. Safe to use from many threads."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def map(self, path: Path, size: int) -> mmap.mmap:
        """The file's bytes.

        Raises InputError if it cannot be mapped or no longer has `size` bytes, ResourceError where a limit of this
        process is reached."""
        with self._lock:
            mapped = self._maps.get(path)
            if mapped is None:
                try:
                    mapped = _map(path, size)
                except OSError as e:
                    if e.errno in LIMITS:
                        raise ResourceError(
                            f"{path}: cannot be mapped ({e.strerror}); raise the limits of this process "
                            "(ulimit -n for files, -v for memory) and start again"
                        ) from None
                    raise InputError(
                        f"{path}: cannot be mapped ({e.strerror}); check the disk and start again"
                    ) from None
                self._maps[path] = mapped
                sigbus.register_mapping(_address(mapped), size, str(path))
            return mapped

    def __contains__(self, path: Path) -> bool:
        return path in self._maps

    def close(self) -> None:
        """Lets go of the files; each is unmapped when the last view of it goes."""
        # Not mmap.close(): numpy's views do not count as exports, and would be left pointing at nothing.
        with self._lock:
            for mapped in self._maps.values():
                sigbus.unregister_mapping(_address(mapped))
            self._maps.clear()


def _map(path: Path, size: int) -> mmap.mmap:
    """A mapping keeps a file open: where too many are, this process's own limit is raised as far as it may."""
    try:
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size != size:
                raise InputError(f"{path}: its size changed since it was opened; start again")
            return mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except OSError as e:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if e.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return _map(path, size)


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)
