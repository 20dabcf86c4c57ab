"""The socket at which a server listens, opened before hours of work or minutes of loading."""

from __future__ import annotations

import socket

from ktconvert.layouts.errors import KTConvertError


def open_listener(host: str, port: int, remedy: str) -> socket.socket:
    """Return a socket that listens at host:port, where requests wait until they are accepted.

    remedy  what to do if that is impossible, for the KTConvertError that is then raised
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise KTConvertError(f"{host}:{port}: cannot listen ({reason}); {remedy}") from None
