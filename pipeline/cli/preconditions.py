"""What a command makes sure of before any work: threads, files to be written, kernels."""

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
from ktconvert.pipeline.options.declare import Options, leaves
from ktconvert.pipeline.options.types import FilePath, PathOrHubId
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

if TYPE_CHECKING:
    from ktconvert.pipeline.models.loading import ModelChoice


def computing_threads(requested: int | None, reporter: Reporter) -> int | None:
    """--threads, of a command that computes: never more than this process may use; None where it is not given."""
    return None if requested is None else lowered("--threads", requested, reporter)


def lowered(option: str, requested: int, reporter: Reporter) -> int:
    """At most as many threads as this process may use; a note where that is less."""
    allowed = machine.allowed_cpus()
    if requested > allowed:
        reporter.note(f"{option} {requested} is lowered to the {plural(allowed, 'CPU')} that this process may use")
    return min(requested, allowed)


def check_file(option: str, path: Path | None, endings: Collection[str] = ()) -> None:
    """Raise, before any work, where the one file that an option names could not or must not be written: UsageError for
    no place for such a file, and for one that the command reads or writes besides; OutputError for one that is not
    ours.
    """
    if path is None:
        return
    place = Path(os.path.realpath(path.expanduser()))
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path}: give a file that ends in {' or '.join(endings)}.")
    if not place.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {place.parent}; make it first.")
    if place.is_dir() or not os.access(place.parent, os.W_OK):
        raise UsageError(f"{option} {path}: no file can be written there; give another one.")
    context = click.get_current_context()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or option in parameter.opts or not isinstance(parameter.type, FilePath | PathOrHubId):
            continue
        other = Path(value).expanduser()
        if os.path.realpath(other) == str(place) or (place.exists() and other.exists() and other.samefile(place)):
            name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise UsageError(f"{option} {path}: {name} is the same file; give another one.")
    publish.require_replaceable(place)


def check_plot(path: Path | None) -> None:
    """Raise, before any work, where no picture could be drawn and written to this file."""
    from ktconvert.pipeline.report.plots import KINDS, require_matplotlib

    check_file("--plot", path, KINDS)
    if path is not None:
        require_matplotlib()


def check_kernels(again: str = "`ktconvert resume`") -> None:
    """Fail in one sentence where KTCONVERT_ISA names what this CPU or the kernels lack, and later where an input file
    breaks off. again: what the user should then run.
    """
    from ktconvert.native_quant import kernels, sigbus

    try:
        kernels.isa()
    except ValueError as error:
        raise UsageError(str(error)) from error
    sigbus.guard_sigbus(
        "ktconvert: %s: became shorter or could not be read while it was being read; "
        f"put the file back or check the disk, then run {again}.",
        InputError.exit_code,
    )


def model_choice(command: str, options: Options, reporter: Reporter, extra: str | None = None) -> ModelChoice:
    """What the options name, once kernels and packages (of this extra, by default the command's) are there."""
    from ktconvert.native_quant.runtime import transformers_version
    from ktconvert.pipeline.models.loading import REQUIRED_PACKAGES, ModelChoice, require_packages

    check_kernels("the command again")
    require_packages(f"`ktconvert {command}`", REQUIRED_PACKAGES[extra or command], extra or command)
    transformers_version.require(reporter.warn)
    values = {getattr(leaf.declared, "argument", None) or leaf.name: leaf.of(options) for leaf in leaves(type(options))}
    values["threads"] = computing_threads(values["threads"], reporter)
    return ModelChoice(**{each.name: values[each.name] for each in fields(ModelChoice) if each.name in values})
