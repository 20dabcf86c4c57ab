"""Errors for users, each with its exit code: one sentence that names the file, the tensor and the remedy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Self

from ktconvert.layouts.files.unfinished import find_output, is_unfinished

# Remedies: for a damaged file; for a file that the user may not read; for missing or mismatched tensors, which may be
# an error of the release itself.
REMEDY = "download that file again"
PERMISSION = "change its permissions, so that you can read it"
INCOMPLETE = "check that the download is complete, or use another release"
PUBLIC_MODULE = "ktconvert.errors"  # from which users import the classes, so that tracebacks name it


class KTConvertError(Exception):
    """A failure that is explained to the user in one sentence, "PATH: PROBLEM; REMEDY.", without a traceback.

    exit_code  exit code of the command line, which tells kinds of errors apart
    problem    what is wrong
    remedy     what to do; empty if the problem names it
    path       file or directory at fault; None if the problem names it
    tensor     name of the tensor at fault; empty if there is none
    """

    __module__ = PUBLIC_MODULE
    exit_code = 1

    def __init_subclass__(cls, exit_code: int = exit_code) -> None:
        cls.__module__ = PUBLIC_MODULE
        cls.exit_code = exit_code

    def __init__(self, problem: str, remedy: str = "", *, tensor: str = "", path: Path | str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.remedy, self.tensor, self.path = problem, remedy, tensor, path

    def __str__(self) -> str:
        return self.text + ("" if self.text.endswith(("?", "?)")) else ".")

    @property
    def text(self) -> str:
        """The sentence without its period, for use in a longer one."""
        where = "" if self.path is None else f"{self.path}: "
        return (where + self.problem + (f"; {self.remedy}" if self.remedy else "")).removesuffix(".")

    @classmethod
    def from_tensor(cls, name: str, problem: str, remedy: str = "", path: Path | str | None = None) -> Self:
        """Return the error for a tensor; `problem` follows its name."""
        return cls(f"tensor {name!r}{'' if problem.startswith(':') else ' '}{problem}", remedy, tensor=name, path=path)

    def with_path(self, path: Path | str) -> Self:
        """Return a copy of this error that names a path."""
        other = copy.copy(self)
        other.path = path
        return other

    def with_addition(self, text: str) -> Self:
        """Return a copy of this error with a text at the end of its sentence."""
        other = copy.copy(self)
        if self.remedy:
            other.remedy = self.remedy.removesuffix(".") + text
        else:
            other.problem = self.problem.removesuffix(".") + text
        return other

    def with_remedy(self, remedy: str) -> Self:
        """Return a copy of this error with a different remedy."""
        other = copy.copy(self)
        other.remedy = remedy
        return other


class MissingPackageError(KTConvertError, ImportError):  # type: ignore[misc]  # both have a `path`
    """A package that is not installed, or cannot be imported; the message has the command that installs it."""


class UsageError(KTConvertError, ValueError, exit_code=2):
    """Options that cannot be understood or do not go together."""


class ArgumentError(UsageError, exit_code=2):
    """An argument of a Python call that has the wrong type, dtype, shape or value."""


class CallError(ArgumentError, TypeError, exit_code=2):
    """A Python call with an unknown argument, or without a required one."""


class StateError(UsageError, RuntimeError, exit_code=2):
    """A Python call before the one that it needs, or after close(), such as a forward without loaded weights."""


class UnsupportedError(KTConvertError, exit_code=3):
    """A model, method or NUMA count that cannot be represented; the message names the legal choices."""


class ResourceError(KTConvertError, exit_code=4):
    """Too little disk space or memory; also quotas and file-size limits."""


class InputError(KTConvertError, exit_code=5):
    """Input that is missing, damaged, incomplete or contradictory, or has changed."""


class UnreachableError(InputError, exit_code=InputError.exit_code):
    """A hub that does not answer."""


class VerificationError(KTConvertError, exit_code=6):
    """An output that is not what it should be."""


class OutputError(KTConvertError, exit_code=7):
    """An output that is in use, cannot be written, is not ktconvert's, or was started with different options."""


class WorkerLostError(KTConvertError):
    """A unit of work that ended its worker process repeatedly; the message has the last worker's error."""


def bad_tensor(
    name: str, problem: str, remedy: str = "download it again, or use another release", path: Path | str | None = None
) -> InputError:
    """Return the error for a damaged tensor; `problem` follows its name."""
    return InputError.from_tensor(name, problem, remedy, path)


def bad_file(path: Path | str, problem: str, remedy: str = REMEDY) -> InputError:
    """Return the error for a damaged file, or a path to something that the command does not read."""
    return InputError(problem, remedy, path=path)


def absent_path(path: Path | str, remedy: str = "check the path") -> KTConvertError:
    """Return the error for a file or directory to read that does not exist."""
    return explain_absence(path) or InputError("does not exist", remedy, path=path)


def explain_absence(path: Path | str) -> KTConvertError | None:
    """Return the error for an unfinished output or a dangling link; None for any other path."""
    path = Path(path)
    try:
        if path.exists():
            return None
        target = path.readlink() if path.is_symlink() else None
    except (OSError, ValueError):  # a name that is too long or impossible
        return None
    if target is not None:
        return InputError(f"is a link to {target}, which does not exist", "correct the link", path=path)
    return explain_unfinished(path)


def explain_unfinished(path: Path) -> VerificationError | None:
    """Return the error for an output that is not finished, or its work directory; None for any other path."""
    if is_unfinished(path):
        return VerificationError("is not finished", f"run `ktconvert resume {path}`", path=path)
    if (output := find_output(path)) is not None:
        problem = "is the work directory of an unfinished conversion"
        return VerificationError(problem, f"run `ktconvert resume {output}`", path=path)
    return None


def unreadable_file(
    path: Path | str, error: OSError, problem: str = "cannot be read", remedy: str = REMEDY
) -> KTConvertError:
    """Return the error for a file that the system does not open or read, with a remedy for the reason."""
    if isinstance(error, FileNotFoundError):
        return absent_path(path, f"check the path, or {REMEDY}")
    denied = isinstance(error, PermissionError)
    return bad_file(path, f"{problem} ({error.strerror})", PERMISSION if denied else remedy)
