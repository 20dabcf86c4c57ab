"""Checks of a command before any work: threads, files to write, kernels, packages."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.options.declare import Options, option_fields
from ktconvert.pipeline.options.types import FilePath, PathOrHubId
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

if TYPE_CHECKING:
    from ktconvert.pipeline.models.loading import ModelChoice


def limit_threads(option: str, requested: int, reporter: Reporter) -> int:
    """Return a number of threads, capped at the CPUs of this process; a note reports that."""
    allowed = machine.usable_cpus()
    if requested > allowed:
        reporter.note(f"{option} {requested} is capped at the {plural(allowed, 'CPU')} available to this process")
    return min(requested, allowed)


def limit_optional_threads(requested: int | None, reporter: Reporter) -> int | None:
    """Return the value of --threads, capped at the CPUs of this process; None if it is not given."""
    return None if requested is None else limit_threads("--threads", requested, reporter)


def check_file(option: str, path: Path | None, endings: Collection[str] = ()) -> None:
    """Raise if the file that an option names cannot or must not be written.

    UsageError: a wrong name or folder, or a file that the command reads or writes under another option. OutputError: a
    file that ktconvert did not write.
    """
    if path is None:
        return
    place = Path(os.path.realpath(path.expanduser()))
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path}: give a file with the ending {' or '.join(endings)}.")
    if not place.parent.is_dir():
        raise UsageError(f"{option} {path}: directory {place.parent} does not exist; create it first.")
    if place.is_dir() or not os.access(place.parent, os.W_OK):
        raise UsageError(f"{option} {path}: not writable; choose a different path.")
    context = click.get_current_context()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or option in parameter.opts or not isinstance(parameter.type, FilePath | PathOrHubId):
            continue
        other = Path(value).expanduser()
        if os.path.realpath(other) == str(place) or (place.exists() and other.exists() and other.samefile(place)):
            name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise UsageError(f"{option} {path}: {name} is the same file; choose a different path.")
    publish.require_replaceable(place)


def check_plot(path: Path | None) -> None:
    """Raise KtconvertError if no plot could be drawn and written to this file."""
    from ktconvert.pipeline.report.plots import FORMATS, require_matplotlib

    check_file("--plot", path, FORMATS)
    if path is not None:
        require_matplotlib()


def check_kernels(again: str = "`ktconvert resume`") -> None:
    """Raise UsageError if KTCONVERT_ISA names a missing instruction set, and handle SIGBUS from truncated input files.

    again: the command that the user should then run.
    """
    from ktconvert.native_quant import kernels, sigbus

    try:
        kernels.isa()
    except ValueError as error:
        raise UsageError(str(error)) from error
    sigbus.guard_sigbus(
        "ktconvert: %s: became shorter or unreadable while it was being read; restore the file or check the disk, "
        f"then run {again}.",
        InputError.exit_code,
    )


def model_choice(command: str, options: Options, reporter: Reporter, extra: str | None = None) -> ModelChoice:
    """Return the model that options name, after checking kernels and packages of an extra (default: the command's)."""
    from ktconvert.native_quant.runtime import transformers_version
    from ktconvert.pipeline.models.loading import REQUIRED_PACKAGES, ModelChoice, require_packages

    check_kernels("the command again")
    require_packages(f"`ktconvert {command}`", REQUIRED_PACKAGES[extra or command], extra or command)
    transformers_version.check_version(reporter.warn)
    known = option_fields(type(options))
    values = {getattr(each.declaration, "argument", None) or each.name: each.get(options) for each in known}
    values["threads"] = limit_optional_threads(values["threads"], reporter)
    return ModelChoice(**{each.name: values[each.name] for each in fields(ModelChoice) if each.name in values})
