"""A lock whose holders take turns: first come, first served."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """Like threading.Lock, which whoever runs takes again at once, though others have waited for it longer."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()  # it is held still, by the one that waited longest
            else:
                self._held = False

    def awaited(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def step_back(self) -> None:
        """Go to the end of the line, and come back when it is our turn again. For the holder."""
        mine = threading.Event()
        with self._guard:
            if not self._waiting:
                return
            self._waiting.append(mine)
            self._waiting.popleft().set()
        mine.wait()
