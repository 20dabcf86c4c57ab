"""Authentication of requests by an API key, and error responses in OpenAI's format."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, UsageError

KEY_VARIABLE = "KTCONVERT_API_KEY"
MAX_KEY_BYTES = 4096
ERROR_TYPES = {401: "authentication_error", 500: "server_error", 503: "server_error"}  # others: invalid_request_error


@dataclass
class RequestError(Exception):
    """An error response.

    status  HTTP status
    param   the wrong parameter
    code    OpenAI's name of the error
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the response's JSON body."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shutdown_error() -> RequestError:
    """Return the error for clients whose answers are cut off because the server shuts down."""
    return RequestError(503, "the server is shutting down; ask again later")


def read_api_key(path: Path | None) -> bytes | None:
    """Return the API key from a file of one line, else from the environment variable, else None.

    Raises InputError for the file and UsageError for the variable if there is no valid key in it.
    """
    invalid: InputError | UsageError
    if path is not None:
        try:
            with path.open("rb") as file:
                key = file.read(MAX_KEY_BYTES + 1).strip()
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror}); give --api-key-file a file with the key"
            ) from None
        invalid = InputError(f"{path}: has no API key; it must be one line of ASCII")
    elif KEY_VARIABLE in os.environ:
        key = os.fsencode(os.environ[KEY_VARIABLE]).strip()
        invalid = UsageError(f"{KEY_VARIABLE}: has no API key; it must be one word of ASCII, or unset")
    else:
        return None
    if not 0 < len(key) <= MAX_KEY_BYTES or any(not 0x21 <= byte <= 0x7E for byte in key):
        raise invalid
    return key


def is_readable_by_others(path: Path) -> bool:
    """Return whether other users of this machine may read a file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def require_api_key(headers: Iterable[tuple[bytes, bytes]], key: bytes | None) -> None:
    """Raise RequestError with 401 unless the headers have this key as a bearer token.

    The comparison takes constant time. Without a key, every request passes.
    """
    value = dict(headers).get(b"authorization", b"")
    scheme, _, token = value.partition(b" ")
    if key is not None and (not hmac.compare_digest(token.strip(), key) or scheme.lower() != b"bearer"):
        problem = "is wrong" if scheme.lower() == b"bearer" else "is missing: send it as Authorization: Bearer KEY"
        raise RequestError(401, f"the API key {problem}", None, "invalid_api_key")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
