"""What `ktconvert --version` prints."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def version_lines() -> list[str]:
    """Ours, Python, platform, instruction set, torch, kt-kernel."""
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
        f"torch {_installed('torch')}",
        f"kt-kernel {_installed('kt-kernel')}",
    ]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
