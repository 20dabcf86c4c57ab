"""The ways an order can fail, each with its exit code. One sentence: which file, which tensor, what to do."""

from __future__ import annotations


class KtconvertError(Exception):
    """A failure that is explained to the user in one sentence; never a traceback."""

    exit_code = 1


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
