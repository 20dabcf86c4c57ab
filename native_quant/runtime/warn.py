"""Warnings for users of the Python API. They name the line outside ktconvert whose call caused them."""

from __future__ import annotations

import functools
import sys
import warnings

PACKAGE = "ktconvert."


def warn_user(message: str) -> None:
    """Give a UserWarning for the innermost caller outside this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@functools.cache
def warn_once(message: str) -> None:
    """Give a warning as `warn_user` does, but each text only once in a process."""
    warn_user(message)
