"""Mapped files that cannot be read: instead of a bare SIGBUS, a message with the file's name, or what was lost."""

from __future__ import annotations

from collections.abc import Iterable

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error


def guard_sigbus(message: str, exit_code: int = 5) -> None:
    """Let an unreadable page of a registered file end the process with this message of 500 bytes; %s: the file."""
    text = message if message.endswith("\n") else message + "\n"
    if text.count("%s") != 1:
        raise ValueError("the message must hold %s once, for the name of the file")
    raise_error(lib.ktq_guard_sigbus(text.encode(), exit_code))


def register_mapping(address: int, length: int, name: str, may_lose: bool = False) -> None:
    """Names a mapped file. may_lose: without guard_sigbus, what cannot be read becomes zeros, and lost() says so."""
    file = name.encode(errors="surrogateescape")
    raise_error(lib.ktq_register_mapping(ffi.cast("void *", address), length, file, may_lose))


def lost(ranges: Iterable[tuple[int, int]]) -> str | None:
    """The file of which some bytes at these addresses, each with a length, could not be read; None: they all could."""
    if not lib.ktq_any_lost():
        return None
    names = (lib.ktq_lost(ffi.cast("void *", address), length) for address, length in ranges)
    name = next((name for name in names if name != ffi.NULL), None)
    return None if name is None else ffi.string(name).decode(errors="surrogateescape")


def unregister_mapping(address: int) -> None:
    """Undoes register_mapping; to be called before the file is unmapped."""
    raise_error(lib.ktq_unregister_mapping(ffi.cast("void *", address)))
