"""A refusal, in the form in which OpenAI's API and its clients know errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TYPES = {401: "authentication_error", 500: "server_error", 503: "server_error"}


@dataclass
class Refused(Exception):
    """status: of HTTP; message: one sentence; param: the parameter at fault; code: OpenAI's word for the reason."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def ending() -> Refused:
    """What clients get whose answers the end of the server cuts off."""
    return Refused(503, "the server is ending; ask again later")
