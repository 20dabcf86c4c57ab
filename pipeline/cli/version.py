"""ktconvert version: nothing is imported for it but the extension; `ktconvert --version` needs no NumPy either."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

import click

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.declare import Options, option

MISSING = "not installed"


class VersionOptions(Options):
    as_json: bool = option("Print one JSON object.", flags=("--json",), default=False)


@command("version", VersionOptions)
def version(options: VersionOptions) -> None:
    """Tell which versions are at work, how this ktconvert was built, and which instruction sets it has and uses.

    Examples:
      ktconvert version
      ktconvert version --json
    """
    click.echo(json.dumps(facts()) if options.as_json else "\n".join(version_lines()))


def facts() -> dict[str, Any]:
    """What `ktconvert version --json` prints.

    wheel   the tag of the wheel that was installed, "editable" of a clone, None where nothing is installed
    in_use  None with the problem where KTCONVERT_ISA names what is not there
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
        "build": {"wheel": wheel(), "compiler": instruction_sets.COMPILER},
        "instruction_sets": {
            "built": list(instruction_sets.ISAS),
            "available": list(instruction_sets.available_isas()),
            "in_use": isa,
            "problem": problem,
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": installed("torch"),
        "kt-kernel": installed("kt-kernel"),
    }


def version_lines() -> list[str]:
    """The same for people: what `ktconvert --version` and `ktconvert version` print."""
    found = facts()
    build, isas = found["build"], found["instruction_sets"]
    return [
        f"ktconvert {found['ktconvert']}",
        f"Python {found['python']}",
        f"platform {found['platform']}",
        f"build {build['wheel'] or MISSING}, {build['compiler']}",
        f"instruction set {isas['in_use'] or isas['problem']} (of {', '.join(isas['available'])})",
        *(f"{package} {found[package] or MISSING}" for package in ("torch", "kt-kernel")),
    ]


def wheel() -> str | None:
    """How this ktconvert was installed."""
    try:
        files = metadata.distribution("ktconvert")
    except metadata.PackageNotFoundError:
        return None
    if '"editable": true' in (files.read_text("direct_url.json") or ""):
        return "editable"
    lines = (files.read_text("WHEEL") or "").splitlines()
    return next((line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")), None)


def installed(package: str) -> str | None:
    """The version of a package, which is not imported; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
