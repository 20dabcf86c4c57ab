"""Weight files of the hub that are never whole on disk: their bytes are fetched when they are needed, and dropped."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ktconvert.layouts.errors import InputError, ResourceError
from ktconvert.layouts.files.direct_file import explain_full_disk, reserve_space
from ktconvert.layouts.sources.hub_headers import REQUESTS, Remote
from ktconvert.layouts.sources.retries import request_patiently
from ktconvert.native_quant.arrays import Array

BLOCK = 1 << 20  # bytes that are fetched at least
LONGEST_REQUEST = 16  # blocks


class RemoteFile(NamedTuple):
    """A file of the hub.

    size    bytes
    sha256  as the hub states it; None if it states none
    """

    name: str
    size: int
    sha256: str | None


class RemoteFiles:
    """The weight files of a commit: views of their bytes, which are fetched when a view is made.

    The bytes are in files without a name, in `folder`. They vanish when the process ends, also when it is killed.

    fetched_bytes  bytes that have been fetched
    on_fetched     is called after each request, by many threads
    """

    def __init__(self, remote: Remote, folder: Path) -> None:
        self._remote, self._folder = remote, folder
        self._executor = ThreadPoolExecutor(REQUESTS, thread_name_prefix="fetch")
        self._files: dict[str, _PartialFile] = {}
        self._whole: dict[str, tuple[RemoteFile, _PartialFile]] = {}
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        self.on_fetched: Callable[[], object] = lambda: None

    def view(self, name: str, size: int, start: int, stop: int) -> Array:
        """Return a view of bytes start..stop-1 of a file, uint8 [stop - start], after they have been fetched.

        Raises InputError if the hub does not send them, ResourceError if the disk is full.
        """
        return self._open(name, size).view(_Range(start, stop))

    def reserve_whole(self, file: RemoteFile) -> None:
        """Reserve the disk space of a whole file, in which views read until it is dropped.

        Raises ResourceError if the disk is full.
        """
        self._whole[file.name] = file, self._make_file(file.name, file.size, is_whole=True)

    def fetch_whole(self, name: str) -> None:
        """Fetch a file whose space is reserved, once again if its SHA-256 differs.

        Raises InputError if the hub does not send it, or sends different bytes again.
        """
        file, stored = self._whole[name]
        for _ in range(2):
            digest = hashlib.sha256()
            for block in stored.iterate_blocks():
                digest.update(block)
            self._remote.require_unchanged(name)
            if file.sha256 in (None, digest.hexdigest()):
                return
            stored.forget_blocks()
        problem = f"its SHA-256 is {digest.hexdigest()[:12]}, but the hub states {(file.sha256 or '')[:12]}"
        raise InputError(f"{self._remote.describe(name)}: {problem}; check the network and resume")

    def drop_whole(self, name: str) -> None:
        """Return the disk space of a whole file, once no view needs it."""
        if (whole := self._whole.pop(name, None)) is not None:
            whole[1].forget_blocks()

    def prefetch(self, name: str, size: int, start: int, stop: int) -> None:
        """Begin to fetch bytes start..stop-1 of a file."""
        self._open(name, size).request(start, stop)

    def release(self, name: str, start: int, stop: int) -> None:
        """Return the disk space of bytes start..stop-1, once no view needs them; a later access fetches them again."""
        if (file := self._files.get(name)) is not None and name not in self._whole:
            file.drop(_Range(start, stop))

    @property
    def held_bytes(self) -> int:
        """The disk space of the bytes that have been fetched and not released."""
        whole = [stored for _, stored in [*self._whole.values()]]
        return sum(file.held_bytes for file in [*self._files.values(), *whole])

    def close(self) -> None:
        """Stop fetching; the files vanish with their last views."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._files.clear()

    def _open(self, name: str, size: int) -> _PartialFile:
        if (whole := self._whole.get(name)) is not None:
            return whole[1]
        with self._lock:
            if name not in self._files:
                self._files[name] = self._make_file(name, size)
            return self._files[name]

    def _make_file(self, name: str, size: int, *, is_whole: bool = False) -> _PartialFile:
        def read(start: int, stop: int) -> bytes:
            data = read_patiently(self._remote, name, start, stop)
            with self._lock:
                self.fetched_bytes += len(data)
            self.on_fetched()
            return data

        return _PartialFile(read, name, size, self._folder, self._executor, is_whole=is_whole)


class _Range(NamedTuple):
    start: int
    stop: int

    def overlaps(self, other: _Range) -> bool:
        return self.start < other.stop and other.start < self.stop


class _PartialFile:
    """A file that is fetched in blocks.

    read      returns bytes start..stop-1
    is_whole  whether to reserve the disk space of the whole file
    mapped    its bytes; zeros where they have not been fetched
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        name: str,
        size: int,
        folder: Path,
        executor: ThreadPoolExecutor,
        *,
        is_whole: bool,
    ) -> None:
        self._read, self._size, self._folder, self._executor = read, size, folder, executor
        self._blocks: dict[int, Future[None]] = {}
        self._holes: dict[int, list[_Range]] = {}  # block -> parts of it that were dropped
        self._held: Counter[_Range] = Counter()  # ranges of views that exist
        self._released: list[_Range] = []  # ranges that are dropped when no view needs them
        self._lock = threading.RLock()  # a view may end while this thread has the lock
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as its bytes are needed
            if is_whole:
                reserve_space(self._file.fileno(), size)
            else:
                os.truncate(self._file.fileno(), size)
            self.mapped = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            raise ResourceError(f"{folder}: cannot hold parts of {name} ({error.strerror})") from None

    @property
    def held_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_blocks * 512

    def request(self, start: int, stop: int) -> list[Future[None]]:
        """Request the blocks that contain these bytes, unless they have been requested."""
        numbers = range(start // BLOCK, -(-stop // BLOCK))
        with self._lock:
            for first in numbers:
                if first in self._blocks:
                    continue
                last = first
                while last + 1 in numbers and last + 1 not in self._blocks and last - first + 1 < LONGEST_REQUEST:
                    last += 1
                end = min(self._size, (last + 1) * BLOCK)
                fetched = self._executor.submit(self._fetch, first * BLOCK, end)
                self._blocks |= dict.fromkeys(range(first, last + 1), fetched)
            return [self._blocks[number] for number in numbers]

    def iterate_blocks(self) -> Iterator[memoryview]:
        """Request the whole file, and yield its bytes in order as they arrive."""
        start = 0
        for fetched, blocks in itertools.groupby(self.request(0, self._size)):
            stop = min(self._size, start + BLOCK * len([*blocks]))
            fetched.result()
            yield memoryview(self.mapped)[start:stop]
            start = stop

    def forget_blocks(self) -> None:
        """Cancel the requests that have not begun; a later access fetches all bytes again."""
        with self._lock:
            for block in self._blocks.values():
                block.cancel()
            self._blocks.clear()

    def view(self, held: _Range) -> Array:
        """Return a view of these bytes, which are not dropped as long as it, or a part of it, exists."""
        with self._lock:
            self._held[held] += 1
        try:
            for block in self.request(*held):
                block.result()
            self.restore(*held)
            view: Array = np.frombuffer(self.mapped, np.uint8, held.stop - held.start, held.start)
        except BaseException:
            self._let_go(held)
            raise
        view.flags.writeable = False
        weakref.finalize(view, self._let_go, held).atexit = False
        return view

    def _let_go(self, held: _Range) -> None:
        with self._lock:
            self._held[held] -= 1
            if not self._held[held]:
                del self._held[held]
            self._drop_released()

    def drop(self, released: _Range) -> None:
        """Drop these bytes as soon as no view needs them."""
        with self._lock:
            self._released.append(released)
            self._drop_released()

    def _drop_released(self) -> None:
        waiting, self._released = self._released, []
        for released in waiting:
            if any(released.overlaps(held) for held in self._held):
                self._released.append(released)
            else:
                self._punch(*released)

    def _punch(self, start: int, stop: int) -> None:
        """Drop the whole pages among these bytes."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            return
        for number in range(first // BLOCK, -(-last // BLOCK)):
            hole = _Range(max(first, number * BLOCK), min(last, (number + 1) * BLOCK))
            self._holes.setdefault(number, []).append(hole)
        with contextlib.suppress(OSError):  # a file system without holes keeps the bytes
            self.mapped.madvise(mmap.MADV_REMOVE, first, last - first)

    def restore(self, start: int, stop: int) -> None:
        """Fetch those of these bytes again that were dropped."""
        with self._lock:
            for number in range(start // BLOCK, -(-stop // BLOCK)):
                holes = self._holes.get(number, [])
                again = [hole for hole in holes if hole.overlaps(_Range(start, stop))]
                for hole in again:
                    self._fetch(*hole)
                    holes.remove(hole)

    def _fetch(self, start: int, stop: int) -> None:
        data = memoryview(self._read(start, stop))
        with explain_full_disk(self._folder):  # a write through the map would end the process with SIGBUS
            while data:
                written = os.pwrite(self._file.fileno(), data, start)
                data, start = data[written:], start + written


def read_patiently(remote: Remote, name: str, start: int, stop: int) -> bytes:
    """Read bytes start..stop-1 of a file; try again after errors that pass.

    Raises InputError if they do not arrive.
    """

    def read() -> bytes:
        data = remote.read(name, start, stop)
        if len(data) > stop - start:
            problem = f"{remote.describe(name)}: the server sends more than the requested part of the file"
            raise InputError(f"{problem}; use one that answers requests for ranges, or download the model")
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} of {stop - start} bytes arrived")
        return data

    return request_patiently(remote.describe(name), read, "repeat the command to continue")
