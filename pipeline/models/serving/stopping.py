"""The end of the server: within two seconds of Ctrl-C or SIGTERM, also in the midst of answers."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from ktconvert.pipeline.models.serving.turns import Turns

PATIENCE = 1  # seconds for what is on its way to clients; one that does not read does not hold the server


class Server(uvicorn.Server):
    """uvicorn's, which waits for the answers that it is giving; here they end at once."""

    def __init__(self, config: uvicorn.Config, turns: Turns) -> None:
        config.timeout_graceful_shutdown = PATIENCE
        super().__init__(config)
        self._turns = turns

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        self._turns.interrupt()
        super().handle_exit(sig, frame)

    def run(self, *args: object, **kwargs: object) -> None:
        """Until a signal, which is raised again at the end."""
        try:
            super().run(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._turns.stop()
