"""Checks of a command before any work: threads, files to write, kernels, packages."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktconvert.layouts.errors import InputError, OutputError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.cli.command import Command
from ktconvert.pipeline.options.declare import Options, option_fields
from ktconvert.pipeline.options.types import FilePath, PathOrHubId
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

if TYPE_CHECKING:
    from ktconvert.pipeline.models.loading import ModelChoice


def limit_threads(option: str, requested: int | None, note: Callable[[str], None]) -> int:
    """Return a number of threads, capped at the CPUs of this process; a note reports that. None: all CPUs."""
    allowed = machine.usable_cpus()
    if requested is not None and requested > allowed:
        note(f"{option} {requested} is capped at the {plural(allowed, 'CPU')} available to this process")
    return machine.limit_threads(requested)


def limit_optional_threads(requested: int | None, note: Callable[[str], None]) -> int | None:
    """Return the value of --threads, capped at the CPUs of this process; None if it is not given."""
    return None if requested is None else limit_threads("--threads", requested, note)


def check_file(option: str, path: Path | None, endings: Collection[str] = (), *, replace: bool = True) -> None:
    """Raise an error if the file that an option names cannot or must not be written.

    Raises UsageError for a wrong name, and for a file that the command reads or writes under a different option. Raises
    OutputError for a folder that cannot be written, and for a file that ktconvert did not write, unless the caller
    checks that (not `replace`).
    """
    if path is None:
        return
    real_path = Path(os.path.realpath(path.expanduser()))
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path}: give a file with the ending {' or '.join(endings)}.")
    if not real_path.parent.is_dir():
        raise OutputError(f"{option} {path}: directory {real_path.parent} does not exist; create it first.")
    if real_path.is_dir():
        raise OutputError(f"{option} {path}: is a directory; give a file.")
    if not os.access(real_path.parent, os.W_OK):
        raise OutputError(f"{option} {path}: not writable; choose a different path.")
    context = click.get_current_context()
    assert isinstance(context.command, Command)
    (own,) = (option_field for option_field in option_fields(context.command.settings) if option_field.flag == option)
    own_names = (own.name, getattr(own.declaration, "argument", None))
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or parameter.name in own_names or not isinstance(parameter.type, FilePath | PathOrHubId):
            continue
        other_path = Path(value).expanduser()
        if os.path.realpath(other_path) == str(real_path) or (
            real_path.exists() and other_path.exists() and other_path.samefile(real_path)
        ):
            name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise UsageError(f"{option} {path}: {name} is the same file; choose a different path.")
    if replace:
        publish.require_replaceable(real_path)


def check_plot(path: Path | None) -> None:
    """Raise KTConvertError if no plot could be drawn and written to this file."""
    from ktconvert.pipeline.report.plots import PLOT_SUFFIXES, require_matplotlib

    check_file("--plot", path, PLOT_SUFFIXES)
    if path is not None:
        require_matplotlib()


def check_kernels(command: str = "`ktconvert resume`") -> None:
    """Raise UsageError if KTCONVERT_ISA names a missing instruction set, and handle SIGBUS from truncated input files.

    command  the command that the user should then run, for the message
    """
    from ktconvert.native_quant import kernels, sigbus

    try:
        kernels.isa()
    except ValueError as error:
        raise UsageError(str(error)) from error
    sigbus.guard_sigbus(
        "ktconvert: %s: became shorter or unreadable while it was being read; restore the file or check the disk, "
        f"then run {command}.",
        InputError.exit_code,
    )


def make_model_choice(command: str, options: Options, reporter: Reporter, extra: str | None = None) -> ModelChoice:
    """Return the model that options name, after checking kernels and packages of an extra (default: the command's)."""
    from ktconvert.layouts.extras import require_packages
    from ktconvert.native_quant.runtime import transformers_version
    from ktconvert.pipeline.models.loading import REQUIRED_PACKAGES, ModelChoice

    check_kernels("the command again")
    require_packages(f"`ktconvert {command}`", REQUIRED_PACKAGES[extra or command], extra or command)
    transformers_version.check_version(reporter.warn)
    values = {
        getattr(option_field.declaration, "argument", None) or option_field.name: option_field.get(options)
        for option_field in option_fields(type(options))
    }
    values["threads"] = limit_optional_threads(values["threads"], reporter.announce)
    names = [field.name for field in fields(ModelChoice)]
    return ModelChoice(**{name: values[name] for name in names if name in values})
