"""Versions, build and instruction sets of this installation, without importing the packages that are listed."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

NOT_INSTALLED = "not installed"


def version_document() -> dict[str, Any]:
    """Return the JSON object of `ktconvert version --json`.

    wheel   the tag of the installed wheel, "editable" for a clone, None if nothing is installed
    in_use  None, with the problem, if KTCONVERT_ISA names a missing instruction set
    """
    from ktconvert.native_quant import instruction_sets
    from ktconvert.pipeline import __version__

    isa: str | None = None
    problem: str | None = None
    try:
        isa = instruction_sets.isa()
    except ValueError as error:
        problem = str(error)
    return {
        "ktconvert": __version__,
        "build": {"wheel": wheel_tag(), "compiler": instruction_sets.COMPILER},
        "instruction_sets": {
            "built": list(instruction_sets.ISAS),
            "available": list(instruction_sets.available_isas()),
            "in_use": isa,
            "problem": problem,
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": package_version("torch"),
        "kt-kernel": package_version("kt-kernel"),
    }


def version_lines() -> list[str]:
    """Return the lines of `ktconvert version`."""
    document = version_document()
    build = document["build"]
    isas = document["instruction_sets"]
    return [
        f"ktconvert {document['ktconvert']}",
        f"Python {document['python']}",
        f"platform {document['platform']}",
        f"build {build['wheel'] or NOT_INSTALLED}, {build['compiler']}",
        f"instruction set {isas['in_use'] or isas['problem']} (of {', '.join(isas['available'])})",
        *(f"{package} {document[package] or NOT_INSTALLED}" for package in ("torch", "kt-kernel")),
    ]


def wheel_tag() -> str | None:
    """Return the tag of the installed wheel, "editable", or None."""
    try:
        files = metadata.distribution("ktconvert")
    except metadata.PackageNotFoundError:
        return None
    if '"editable": true' in (files.read_text("direct_url.json") or ""):
        return "editable"
    lines = (files.read_text("WHEEL") or "").splitlines()
    return next((line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")), None)


def package_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
