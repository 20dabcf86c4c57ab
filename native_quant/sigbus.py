"""SIGBUS of mapped files that cannot be read: a message with the file's name, or a record of the unreadable bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error


def guard_sigbus(message: str, exit_code: int = 5) -> None:
    """Let an unreadable page of a registered file end the process with a message of at most 500 bytes; %s: the file."""
    text = message if message.endswith("\n") else message + "\n"
    if text.count("%s") != 1:
        raise ValueError("the message must contain %s once, for the name of the file")
    raise_error(lib.ktq_guard_sigbus(text.encode(), exit_code))


def register_mapping(address: int, length: int, name: str, may_lose: bool = False) -> None:
    """Register the name of a mapped file.

    may_lose: without guard_sigbus, unreadable bytes become zeros, and find_unreadable_file() reports the file.
    """
    file = name.encode(errors="surrogateescape")
    raise_error(lib.ktq_register_mapping(ffi.cast("void *", address), length, file, may_lose))


def has_unreadable_file() -> bool:
    """Return whether bytes of any registered file could not be read."""
    return lib.ktq_any_lost() != 0


def find_unreadable_file(ranges: Iterable[tuple[int, int]]) -> str | None:
    """Return the file of which bytes in these ranges (address, length) could not be read; None if all could."""
    names = (lib.ktq_lost(ffi.cast("void *", address), length) for address, length in ranges)
    name = next((name for name in names if name != ffi.NULL), None)
    return None if name is None else ffi.string(name).decode(errors="surrogateescape")


def unregister_mapping(address: int) -> None:
    """Undo register_mapping; call it before unmapping the file."""
    raise_error(lib.ktq_unregister_mapping(ffi.cast("void *", address)))
