"""Requests that are repeated after errors that pass: broken connections, too many requests, errors of the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ktconvert.layouts.errors import KTConvertError

Result = TypeVar("Result")

ATTEMPTS = 6
FIRST_WAIT = 1.0  # seconds before the second attempt; each further wait is twice as long
LONGEST_WAIT = 60.0  # seconds between two attempts
# Answers after which another attempt can help: too many requests, and errors of the server
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
FINAL = (FileNotFoundError, PermissionError, KTConvertError)  # errors after which none can


def call_patiently(request: Callable[[], Result]) -> Result:
    """Return the result of a request; try again after errors that pass, as long as the server asks to wait.

    Raises the error of the last attempt.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return request()
        except Exception as error:  # every library underneath raises its own
            if (wait := _seconds_to_wait(error, attempt)) is None:
                raise
            time.sleep(wait)
    return request()


def _seconds_to_wait(error: Exception, attempt: int) -> float | None:
    """Return how long to wait before another attempt; None if it cannot help."""
    delay = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (attempt - 1))
    response = getattr(error, "response", error)  # the errors of aiohttp are their own responses
    status = getattr(response, "status_code", getattr(response, "status", None))
    if status is None:  # the connection was refused, reset or too slow
        return None if isinstance(error, FINAL) else delay
    if status not in TEMPORARY:
        return None
    after = (getattr(response, "headers", None) or {}).get("Retry-After", "")
    return min(LONGEST_WAIT, float(after)) if after.isdigit() else delay
