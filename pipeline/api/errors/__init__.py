"""The errors that the package raises. docs/reference/exit-codes.md explains each."""

from ktconvert.layouts.errors import (
    ArgumentError,
    CallError,
    InputError,
    KTConvertError,
    MissingPackageError,
    OutputError,
    ResourceError,
    StateError,
    UnreachableError,
    UnsupportedError,
    UsageError,
    VerificationError,
    WorkerLostError,
)

__all__ = [
    "ArgumentError",
    "CallError",
    "InputError",
    "KTConvertError",
    "MissingPackageError",
    "OutputError",
    "ResourceError",
    "StateError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "WorkerLostError",
]


def __dir__() -> list[str]:
    return __all__
