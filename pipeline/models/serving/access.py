"""The API key, and the addresses from which the server can be reached."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.pipeline.models.serving.refused import Refused

VARIABLE = "KTCONVERT_API_KEY"
LONGEST = 4096  # bytes of a key


def key_from(path: Path | None) -> bytes | None:
    """The API key: the only line of this file, else the environment's; None without either.

    Raises InputError for a file that cannot be read or holds no key, UsageError for a variable that holds none.
    """
    if path is not None:
        try:
            with path.open("rb") as file:
                text = file.read(LONGEST + 1)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        return _checked(text.strip(), InputError(f"{path}: holds no API key; it has to be one line of ASCII"))
    variable = os.environ.get(VARIABLE)
    if variable is None:
        return None
    wrong = UsageError(f"{VARIABLE}: holds no API key; it has to be one word of ASCII, or unset")
    return _checked(os.fsencode(variable).strip(), wrong)


def _checked(key: bytes, wrong: Exception) -> bytes:
    if not 0 < len(key) <= LONGEST or any(not 0x21 <= byte <= 0x7E for byte in key):
        raise wrong
    return key


def is_open(path: Path) -> bool:
    """Whether other users of this machine may read this file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def check(headers: Iterable[tuple[bytes, bytes]], key: bytes | None) -> None:
    """Raises Refused with 401 unless the request carries this key as a bearer token. Any time it takes says nothing of
    the key.
    """
    if key is None:
        return
    given = dict(headers).get(b"authorization", b"")
    scheme, _, token = given.partition(b" ")
    if not hmac.compare_digest(token.strip(), key) or scheme.lower() != b"bearer":
        what = "is wrong" if given else "is missing: send it as Authorization: Bearer KEY"
        raise Refused(401, f"the API key {what}", None, "invalid_api_key")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
