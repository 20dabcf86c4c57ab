"""Text that objects show of themselves."""

from __future__ import annotations


def write_repr(shown: object, state: str = "", **values: object) -> str:
    """Return the repr of an object: its class, these values, and its state if it has one."""
    words = [*(f"{name}={value!r}" for name, value in values.items()), *filter(None, [state])]
    return f"{type(shown).__name__}({', '.join(words)})"
