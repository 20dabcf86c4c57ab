"""What `ktconvert --version` prints."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

MISSING = "not installed"


def version_lines() -> list[str]:
    from ktconvert.native_quant import instruction_sets
    from ktconvert.pipeline import __version__

    try:
        isa = instruction_sets.isa()
    except ValueError as error:
        isa = str(error)
    return [
        f"ktconvert {__version__}",
        f"Python {platform.python_version()}",
        f"platform {platform.platform()}",
        f"instruction set {isa} (of {', '.join(instruction_sets.available_isas())})",
        f"torch {installed('torch') or MISSING}",
        f"kt-kernel {installed('kt-kernel') or MISSING}",
    ]


def installed(package: str) -> str | None:
    """The version of a package, which is not imported; None where it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
