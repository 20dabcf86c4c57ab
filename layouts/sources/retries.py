"""Requests that are repeated after errors that pass: broken connections, too many requests, errors of the server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ktconvert.layouts.errors import InputError, KTConvertError

Result = TypeVar("Result")

ATTEMPTS = 6
FIRST_WAIT = 1.0  # seconds before the second attempt; each further wait is twice as long
LONGEST_WAIT = 60.0  # seconds between two attempts
# Answers after which another attempt can help: too many requests, and errors of the server
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
STATUS_NAMES = ("status_code", "status", "code")  # in httpx and requests, in aiohttp, and in gcsfs
UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED\] certificate verify failed: (.+?)\.? \(_ssl")


def request_patiently(place: str, request: Callable[[], Result], remedy: str) -> Result:
    """Return the result of a request; try again after errors that pass.

    place, remedy  of the message

    Raises InputError if the request fails for good.
    """
    try:
        return call_patiently(request)
    except KTConvertError:
        raise
    except Exception as error:  # every library underneath raises its own
        raise explain_failure(place, error, remedy) from None


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


def explain_failure(place: str, error: Exception, remedy: str) -> InputError:
    """Return the error for a request that has failed for good."""
    if (explained := explain_certificate(place, error)) is not None:
        return explained
    problem = str(_find_original(error)).strip().partition("\n")[0] or type(error).__name__
    return InputError(f"{place}: cannot be read ({problem}); {remedy}")


def explain_certificate(place: str, error: Exception) -> InputError | None:
    """Return the error for a server whose certificate is not trusted; None for other failures."""
    cause: BaseException | None = error
    while cause is not None:
        if match := UNTRUSTED.search(str(cause)):
            variable = "AWS_CA_BUNDLE" if place.startswith("s3:") else "SSL_CERT_FILE"
            remedy = f"check the address, or set {variable} to a file with the certificate of its authority"
            return InputError(f"{place}: the server's certificate is not trusted ({match[1]}); {remedy}")
        cause = cause.__cause__
    return None


def read_status(error: Exception) -> int | None:
    """Return the status of the answer that an error reports; None without an answer, as if a connection breaks."""
    original = _find_original(error)
    response = _find_response(original)
    if isinstance(response, dict):  # of botocore
        status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status
    for name in STATUS_NAMES:
        if isinstance(status := getattr(response, name, None), int):
            return status
    if isinstance(original, PermissionError) or str(original).startswith("Forbidden"):  # gcsfs has only the text
        return 403
    return 404 if isinstance(original, FileNotFoundError) else None


def _find_original(error: BaseException) -> BaseException:
    """Return the error that fsspec has translated into one of Python's: into FileNotFoundError, whatever it is."""
    while type(error).__module__ == "builtins" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _find_response(error: BaseException) -> Any:
    """Return the answer that an error has; the errors of aiohttp and gcsfs are their own answers."""
    return getattr(error, "response", error)


def _seconds_to_wait(error: Exception, attempt: int) -> float | None:
    """Return how long to wait before another attempt; None if it cannot help."""
    status = read_status(error)
    if isinstance(error, KTConvertError) or explain_certificate("", error) or status not in (None, *TEMPORARY):
        return None
    delay = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (attempt - 1))
    headers = getattr(_find_response(_find_original(error)), "headers", None) or {}
    after = headers.get("Retry-After", "")
    return min(LONGEST_WAIT, float(after)) if after.isdigit() else delay
