"""The ways an order can fail, each with its exit code. One sentence: which file, which tensor, what to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Self

# What to do about a file that is damaged, about one that the user may not read, about something that is missing or does
# not fit, which may be so in the release itself.
REMEDY = "download that file again"
PERMISSION = "change its permissions, so that you can read it"
INCOMPLETE = "check that the download is complete, or use another release"


class KtconvertError(Exception):
    """A failure that is explained to the user in one sentence, "PATH: PROBLEM; REMEDY"; never a traceback. Path and
    remedy are left out where the problem names them; tensor: the name of the one at fault.
    """

    exit_code = 1

    def __init_subclass__(cls, exit_code: int = exit_code) -> None:
        cls.exit_code = exit_code

    def __init__(self, problem: str, remedy: str = "", *, tensor: str = "", path: Path | str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.remedy, self.tensor, self.path = problem, remedy, tensor, path

    def __str__(self) -> str:
        where = "" if self.path is None else f"{self.path}: "
        return where + self.problem + (f"; {self.remedy}" if self.remedy else "")

    @classmethod
    def of_tensor(cls, name: str, what: str, remedy: str = "", path: Path | str | None = None) -> Self:
        """Of a tensor; `what` follows its name."""
        return cls(f"tensor {name!r}{'' if what.startswith(':') else ' '}{what}", remedy, tensor=name, path=path)

    def at(self, path: Path | str) -> Self:
        other = copy.copy(self)
        other.path = path
        return other

    def advising(self, remedy: str) -> Self:
        other = copy.copy(self)
        other.remedy = remedy
        return other


class UsageError(KtconvertError, exit_code=2):
    """The options cannot be understood or do not go together."""


class UnsupportedError(KtconvertError, exit_code=3):
    """The model, method or NUMA count cannot be represented; the message names the legal choices."""


class ResourceError(KtconvertError, exit_code=4):
    """Not enough disk or memory (quota and file-size limits too)."""


class InputError(KtconvertError, exit_code=5):
    """The input is damaged, incomplete, contradictory, or has changed."""


class VerificationError(KtconvertError, exit_code=6):
    """An output is not what it should be."""


class OutputError(KtconvertError, exit_code=7):
    """The output is in use, is not ours, or was begun with other options."""


class WorkerLostError(KtconvertError):
    """A unit of work ended the processes that made it, again and again; the message has the last one's words."""


def damaged_tensor(
    name: str, what: str, remedy: str = "download it again, or use another release", path: Path | str | None = None
) -> InputError:
    """The error of a tensor; `what` follows its name."""
    return InputError.of_tensor(name, what, remedy, path)


def damaged_file(path: Path | str, what: str, remedy: str = REMEDY) -> InputError:
    """The error of a file; `what` follows its path."""
    return InputError(what, remedy, path=path)


def unreadable_file(path: Path | str, error: OSError, what: str = "cannot be read", remedy: str = REMEDY) -> InputError:
    """Return the error of a file that the system does not open or read, with a remedy for its reason."""
    denied = isinstance(error, PermissionError)
    return damaged_file(path, f"{what} ({error.strerror})", PERMISSION if denied else remedy)
