"""Supported versions of transformers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from ktconvert.layouts.errors import KTConvertError

# (major, minor), both included: the versions that the tests cover (`make test`, `make compat`). The extras [run] and
# [serve] in pyproject.toml have the same bounds.
OLDEST, NEWEST = (5, 17), (5, 24)
BOUNDS = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
TESTED = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
REMEDY = f"pip install 'transformers{BOUNDS}'"


def check_version(warn: Callable[[str], None]) -> None:
    """Call `warn` if transformers is newer than the tested versions; raise KTConvertError if it is older."""
    if why := explain_too_old():
        raise KTConvertError(why)
    if caution := explain_too_new():
        warn(caution)


@contextmanager
def hide_renamings() -> Iterator[None]:
    """Hide the warnings of new versions about names that old versions, and PEFT, know only under the old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        yield


def explain_too_old() -> str | None:
    """Return a message with the remedy if the installed transformers is too old, else None."""
    installed, minor = _read_version()
    too_old = f"transformers {installed} is too old: ktconvert was tested with {TESTED}; {REMEDY}"
    return too_old if minor < OLDEST else None


def explain_too_new() -> str | None:
    """Return a message with a remedy in case of errors if the installed transformers is untested, else None."""
    installed, minor = _read_version()
    caution = f"is newer than the tested versions, {TESTED}; if the model does not load, or generates nonsense,"
    return f"transformers {installed} {caution} {REMEDY}" if minor > NEWEST else None


def _read_version() -> tuple[str, tuple[int, int]]:
    """Return the version and its (major, minor). A source tree on PYTHONPATH has no metadata and counts as tested."""
    try:
        installed = version("transformers") or ""
    except PackageNotFoundError:
        installed = ""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    return installed, (int(numbers[1]), int(numbers[2])) if numbers else OLDEST
