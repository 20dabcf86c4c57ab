"""The end of the server: within two seconds of Ctrl-C or SIGTERM, in the midst of answers too."""

from __future__ import annotations

import atexit
import os
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from ktconvert.pipeline.models.serving.scheduler import Scheduler

PATIENCE = 1  # seconds for what is on its way; a client that does not read it does not hold the server
INTERRUPTED = 130  # the exit code


class Server(uvicorn.Server):
    """uvicorn's, which waits for the answers that it is giving; here they end at once."""

    def __init__(self, config: uvicorn.Config, turns: Scheduler) -> None:
        config.timeout_graceful_shutdown = PATIENCE
        super().__init__(config)
        self._turns = turns

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        self._turns.interrupt()
        super().handle_exit(sig, frame)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Until a signal, which uvicorn raises again at the end: SIGTERM ends the process, SIGINT is an exception."""
        try:
            super().run(*args, **kwargs)
        except KeyboardInterrupt:
            # The interpreter would take the model apart first, which is seconds, and wait for layers in computation.
            atexit.register(os._exit, INTERRUPTED)
            raise
