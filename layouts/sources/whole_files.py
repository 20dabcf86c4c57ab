"""Whole files of the hub, fetched in the order in which they are needed, compared with their SHA-256, and dropped."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ktconvert.layouts.errors import ResourceError
from ktconvert.layouts.sources.remote import RemoteFile, RemoteFiles

Names = tuple[str, ...]


def plan_windows(needs: Sequence[Names], ahead: int) -> list[Names]:
    """Return for each reader the files on the disk while it is the first unfinished one, in the order of fetching.

    needs  files of each reader, in the order in which they begin
    ahead  number of files beside its own
    """
    windows = []
    for number, own in enumerate(needs):
        window = dict.fromkeys(own)
        later = itertools.chain.from_iterable(needs[number + 1 :])
        while len(window) < len(own) + ahead and (name := next(later, None)) is not None:
            window[name] = None
        windows.append(tuple(window))
    return windows


def list_fetches(windows: Sequence[Names]) -> Iterator[str]:
    """Yield the files in the order of fetching; a file that is dropped and needed again occurs twice."""
    held: Names = ()
    for window in windows:
        yield from (name for name in window if name not in held)
        held = window


class WholeFiles:
    """Files that readers need, each of which calls `hold` with its number.

    A window of files is on the disk: those of the first unfinished reader, and the next ones. A reader waits until its
    files are complete, and stay in the window as long as it reads them.
    """

    def __init__(self, remote: RemoteFiles, files: dict[str, RemoteFile], needs: Sequence[Names], ahead: int) -> None:
        self._remote, self._files, self._needs = remote, files, needs
        self._windows = plan_windows(needs, ahead)
        self._first = 0
        self._finished: set[int] = set()
        self._fetched: dict[str, Future[None]] = {}
        self._changed = threading.Condition()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="file")  # one file at a time, with many requests

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Wait for the files of a reader, and hold them inside the block.

        Raises InputError if the hub does not send a file or sends different bytes, ResourceError if the disk is full.
        """
        try:
            with self._changed:
                self._fill_window()
                self._changed.wait_for(lambda: self._keeps_files_of(number))
                fetched = [self._fetched[name] for name in self._needs[number]]
            for file in fetched:
                file.result()
            yield
        finally:
            with self._changed:
                self._finished.add(number)
                self._fill_window()
                self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching, and drop all files."""
        with self._changed:
            self._first = len(self._windows)
            self._fill_window()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _keeps_files_of(self, number: int) -> bool:
        """Return whether the window keeps the files of a reader until it is the first unfinished one."""
        return all({*self._needs[number]} <= {*window} for window in self._windows[self._first : number + 1])

    def _fill_window(self) -> None:
        """Drop the files outside the window, reserve the disk space of the others, and begin to fetch them."""
        while self._first in self._finished:
            self._first += 1
        window = self._windows[self._first] if self._first < len(self._windows) else ()
        for name in [name for name in self._fetched if name not in window]:
            self._fetched.pop(name).cancel()
            self._remote.drop_whole(name)
        for name in window:
            if name not in self._fetched:
                self._fetched[name] = self._begin_fetching(name)

    def _begin_fetching(self, name: str) -> Future[None]:
        """Reserve the disk space of a file and begin to fetch it; the file's readers get the error of a full disk."""
        try:
            self._remote.reserve_whole(self._files[name])
        except ResourceError as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        return self._executor.submit(self._remote.fetch_whole, name)
