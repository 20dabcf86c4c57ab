"""The versions of transformers that load models with our experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from ktconvert.layouts.errors import KtconvertError

# (major, minor), both included: what the tests pass with (`make test`, `make compat`). The extras [run] and [serve] in
# pyproject.toml have the same bounds.
OLDEST, NEWEST = (5, 17), (5, 23)
BOUNDS = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
TESTED = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
REMEDY = f"pip install 'transformers{BOUNDS}'"


def require(warn: Callable[[str], None]) -> None:
    """A sentence to `warn` where transformers is newer than the tested ones; KtconvertError where it is older."""
    if why := refusal():
        raise KtconvertError(why)
    if caution := newer():
        warn(caution)


def refusal() -> str | None:
    """Why the installed transformers cannot be used, and what to install; None where it can."""
    installed, minor = _installed()
    too_old = f"transformers {installed} is too old: ktconvert was tested with {TESTED}; {REMEDY}"
    return too_old if minor < OLDEST else None


def newer() -> str | None:
    """What to do if the installed transformers, newer than all that were tested, gives trouble; None: it is not."""
    installed, minor = _installed()
    caution = f"is newer than what ktconvert was tested with, {TESTED}; if the model does not load, or writes nonsense,"
    return f"transformers {installed} {caution} {REMEDY}" if minor > NEWEST else None


def _installed() -> tuple[str, tuple[int, int]]:
    """The version, and (major, minor) of it: a tested one of a source tree on PYTHONPATH, which has no metadata."""
    try:
        found = version("transformers") or ""
    except PackageNotFoundError:
        found = ""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return found, (int(numbers[1]), int(numbers[2])) if numbers else OLDEST
