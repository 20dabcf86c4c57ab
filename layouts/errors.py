"""The ways an order can fail, each with its exit code. One sentence: which file, which tensor, what to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Self

REMEDY = "download that file again"


class KtconvertError(Exception):
    """A failure that is explained to the user in one sentence, "PATH: PROBLEM; REMEDY"; never a traceback. Path and
    remedy are left out where the problem names them; tensor: the name of the one at fault.
    """

    exit_code = 1

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


class UsageError(KtconvertError):
    """The options cannot be understood or do not go together."""

    exit_code = 2


class UnsupportedError(KtconvertError):
    """The model, method or NUMA count cannot be represented; the message names the legal choices."""

    exit_code = 3


class ResourceError(KtconvertError):
    """Not enough disk or memory (quota and file-size limits too)."""

    exit_code = 4


class InputError(KtconvertError):
    """The input is damaged, incomplete, contradictory, or has changed."""

    exit_code = 5


class VerificationError(KtconvertError):
    """An output is not what it should be."""

    exit_code = 6


class OutputError(KtconvertError):
    """The output is in use, is not ours, or was begun with other options."""

    exit_code = 7


class WorkerLostError(KtconvertError):
    """A unit of work ended the processes that made it, again and again; the message has the last one's words."""


def damaged_tensor(
    name: str, what: str, remedy: str = "download it again", path: Path | str | None = None
) -> InputError:
    """The error of a tensor; `what` follows its name."""
    return InputError.of_tensor(name, what, remedy, path)


def damaged_file(path: Path | str, what: str, remedy: str = REMEDY) -> InputError:
    """The error of a file; `what` follows its path."""
    return InputError(what, remedy, path=path)
