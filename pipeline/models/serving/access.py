"""Who may ask (the API key, the addresses from which the server can be reached), and how a request is refused."""

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

VARIABLE = "KTCONVERT_API_KEY"
LONGEST = 4096  # bytes of a key
TYPES = {401: "authentication_error", 500: "server_error", 503: "server_error"}


@dataclass
class Refused(Exception):
    """A refusal in OpenAI's form. param: the parameter at fault; code: OpenAI's word for the reason."""

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


def key_from(path: Path | None) -> bytes | None:
    """The API key: the only line of this file, else the environment's, else None. Raises InputError or UsageError."""
    wrong: InputError | UsageError
    if path is not None:
        try:
            with path.open("rb") as file:
                key = file.read(LONGEST + 1).strip()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        wrong = InputError(f"{path}: holds no API key; it has to be one line of ASCII")
    elif VARIABLE in os.environ:
        key = os.fsencode(os.environ[VARIABLE]).strip()
        wrong = UsageError(f"{VARIABLE}: holds no API key; it has to be one word of ASCII, or unset")
    else:
        return None
    if not 0 < len(key) <= LONGEST or any(not 0x21 <= byte <= 0x7E for byte in key):
        raise wrong
    return key


def is_open(path: Path) -> bool:
    """Whether other users of this machine may read this file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def check(headers: Iterable[tuple[bytes, bytes]], key: bytes | None) -> None:
    """Raises Refused with 401 unless the request carries this key, if any, as a bearer token; in constant time."""
    given = dict(headers).get(b"authorization", b"")
    scheme, _, token = given.partition(b" ")
    if key is not None and (not hmac.compare_digest(token.strip(), key) or scheme.lower() != b"bearer"):
        what = "is wrong" if given else "is missing: send it as Authorization: Bearer KEY"
        raise Refused(401, f"the API key {what}", None, "invalid_api_key")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
