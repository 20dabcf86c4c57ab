"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.ui.progress import Reporter

F = TypeVar("F", bound=Callable[..., Any])
MOST = 1 << 62
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """Bytes, written as 5GB, 500MiB or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
        amount = float(match[1]) * FACTORS[match[2] or ""] if match else 0.0
        if not 1 <= amount < MOST:
            self.fail(f"{str(value)[:40]!r} is not a size like 5GB or 500MiB", param, ctx)
        return int(amount)


class Number(click.IntRange):
    """A whole number, and none that no machine could count to: C and torch take no longer ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        number: int = super().convert(value, param, ctx)
        if number >= MOST:
            self.fail(f"{str(value)[:40]!r} is too large", param, ctx)
        return number


class Real(click.FloatRange):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class FilePath(click.Path):
    """A file or a directory, as a Path. An empty one is refused: Path("") would be the current directory."""

    def __init__(self, **how: Any) -> None:
        super().__init__(path_type=Path, **how)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path."""
        if wrong := _no_path(value):
            self.fail(wrong, param, ctx)
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        return path.expanduser().resolve() if path.name == ".." else path  # what lies beside a folder has its name


class PathOrHubId(click.types.StringParamType):
    """A file, a directory or a hub id (org/name), as text; not an empty one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        if wrong := _no_path(value):
            self.fail(wrong, param, ctx)
        return super().convert(value, param, ctx)


def _no_path(value: Any) -> str | None:
    """Why this can be no path; None where it can."""
    if not os.fspath(value):
        return "is empty; give a path"
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        return f"{os.fspath(value)!r} begins with a user who has no home directory here"
    try:
        path.resolve()
    except RuntimeError:
        return f"{os.fspath(value)!r} is a symbolic link that leads to itself"
    return None


class Text(click.types.StringParamType):
    """Text: Python passes bytes that are none on as characters that nothing can write or encode."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("is not UTF-8 text", param, ctx)
        return text


class Spelled(Text):
    """Text, of which a word at the beginning may be in capitals, as choices may.

    words  a regular expression for that word
    """

    def __init__(self, words: str) -> None:
        self._words = re.compile(f"({words})(?=:|$)", re.IGNORECASE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, with this word in small letters."""
        text = super().convert(value, param, ctx)
        found = self._words.match(text)
        return text if found is None else found[0].lower() + text[found.end() :]


def cpuinfer_threads(command: F) -> F:
    """--cpuinfer-threads."""
    return click.option(
        "--cpuinfer-threads",
        type=Number(min=1),
        default=None,
        help="Threads. [default: the CPUs this process may use]",
    )(command)


def max_memory(command: F) -> F:
    """--max-memory."""
    return click.option(
        "--max-memory",
        type=Size(),
        default=None,
        help="Stay below this much memory, e.g. 4GiB. [default: what is free]",
    )(command)


def part(command: F) -> F:
    """--part."""
    return click.option(
        "--part",
        type=Spelled("env"),
        default=None,
        help="Make every N-th file only, from number R on: R/N, or env (RANK and WORLD_SIZE, or a SLURM array's). When "
        "all parts are made, `ktconvert resume` puts the output together.",
    )(command)


def executor(command: F) -> F:
    """Who does the work: --executor, --executor-timeout."""
    return in_order(
        click.option(
            "--executor",
            type=Spelled("threads|dask(:(local|tcp|tls))?"),
            default="threads",
            show_default=True,
            help="Who makes the files: threads[:N] here, or Dask's workers on many hosts: dask:tcp://HOST:8786, "
            "dask:tls://HOST:8786, dask:FILE (of a scheduler), dask:local[:N].",
        ),
        click.option(
            "--executor-timeout",
            type=Number(min=1),
            default=None,
            help="Seconds to wait for Dask's workers while there are none. [default: 3600]",
        ),
    )(command)


def arch_file(command: F) -> F:
    """--arch-file."""
    return click.option(
        "--arch-file",
        type=FilePath(),
        default=None,
        help="A row for an architecture that is not in the table (TOML).",
    )(command)


def overwrite(command: F) -> F:
    """What may be replaced: --overwrite, --delete-others."""
    return in_order(
        click.option(
            "--overwrite", is_flag=True, help="Replace the output that lies there, once the new one is complete."
        ),
        click.option(
            "--delete-others", is_flag=True, help="With --overwrite: also delete files there that no manifest lists."
        ),
    )(command)


def left_behind(command: F) -> F:
    """What becomes of what an earlier run left: --force-unlock, --trust-store."""
    return in_order(
        click.option(
            "--force-unlock",
            is_flag=True,
            help="Take away the lock of a process that has ended on another host, on a file system without locks.",
        ),
        click.option(
            "--trust-store",
            is_flag=True,
            help="Go on from finished files without hashing them first: many TB on slow storage take long.",
        ),
    )(command)


def checkpoint(command: F) -> F:
    """How the input of a conversion of experts is read: --verify-inputs, --revision, --arch-file."""
    return input_files(arch_file(command))


def in_order(*given: Callable[[F], F]) -> Callable[[F], F]:
    """These options, one after the other in --help."""

    def decorate(command: F) -> F:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


def input_files(command: F) -> F:
    """Which files are read, and how closely they are looked at: --verify-inputs, --revision."""
    return in_order(
        click.option(
            "--verify-inputs", is_flag=True, help="Hash all input files, and notice any change of them on resume."
        ),
        click.option("--revision", type=Text(), default=None, help="Branch, tag or commit of a hub id."),
    )(command)


def gpu_experts(command: F) -> F:
    """Which experts come from MODEL and not from --cpu-weights: --gpu-experts-mask, --num-gpu-experts."""
    return in_order(
        click.option(
            "--gpu-experts-mask",
            type=FilePath(),
            default=None,
            help="Safetensors file with gpu_experts_mask, bool [layers, experts]: these experts come from MODEL.",
        ),
        click.option(
            "--num-gpu-experts",
            type=Number(min=0),
            default=None,
            help="Instead of a mask: the first N experts of each layer come from MODEL.",
        ),
    )(command)


def importance(command: F) -> F:
    """Where the importance of inputs is read from: --imatrix, --statistics."""
    return in_order(
        click.option(
            "--imatrix",
            type=FilePath(),
            default=None,
            help="Of --scale imatrix: llama.cpp's importance matrix of the model, GGUF or .dat.",
        ),
        click.option(
            "--statistics", type=FilePath(), default=None, help="Of --scale imatrix, instead: DIR/imatrix.gguf."
        ),
    )(command)


def imatrix_of(params: Mapping[str, Any]) -> Path | None:
    """The file that --imatrix or --statistics names. Raises UsageError for both."""
    from ktconvert.layouts.statistics.folder import IMATRIX

    file, folder = params["imatrix"], params["statistics"]
    if file is not None and folder is not None:
        raise UsageError("--imatrix and --statistics both name an importance matrix; give one of them.")
    path: Path | None = file if folder is None else folder / IMATRIX
    return None if path is None else path.expanduser().absolute()


def reporting(command: F) -> F:
    """Options for what is reported, and how: --json, -q, -v."""
    return in_order(
        click.option("--json", "json_events", is_flag=True, help="One JSON event per line on stdout."),
        click.option("-q", "--quiet", is_flag=True, help="Warnings and errors only."),
        click.option("-v", "--verbose", is_flag=True, help="Say more."),
    )(command)


def reporter(json_events: bool, quiet: bool, verbose: bool) -> Reporter:
    """The reporter that these flags ask for."""
    return Reporter(json_events=json_events, verbosity=-1 if quiet else int(verbose))


def threads(requested: int | None, reporter: Reporter) -> int:
    """--cpuinfer-threads: the number of threads to use, never more than this process may use."""
    return lowered("--cpuinfer-threads", requested or machine.allowed_cpus(), reporter)


def computing_threads(requested: int | None, reporter: Reporter) -> int | None:
    """--threads, of a command that computes: never more than this process may use; None where it is not given."""
    return None if requested is None else lowered("--threads", requested, reporter)


def lowered(option: str, requested: int, reporter: Reporter) -> int:
    """At most as many threads as this process may use; a note where that is less."""
    allowed = machine.allowed_cpus()
    if requested > allowed:
        reporter.note(
            f"{option} {requested} is lowered to the {allowed} CPU{'s' if allowed != 1 else ''} that this process may "
            "use"
        )
    return min(requested, allowed)


def stored_input(text: str) -> str:
    """An existing local path made absolute, so that resume works from anywhere; a hub id unchanged."""
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() else text


def absolute(path: Path | None) -> str | None:
    """A path that holds from anywhere."""
    return None if path is None else str(path.expanduser().absolute())


def check_file(option: str, path: Path | None, endings: Collection[str] = ()) -> None:
    """Raise, before any work, where the one file that an option names could not or must not be written.

    Raises UsageError for no place for such a file, and for a file that the command reads or writes besides; OutputError
    where something lies that we did not write.
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
    from ktconvert.pipeline.ui.plots import KINDS, require_matplotlib

    check_file("--plot", path, KINDS)
    if path is not None:
        require_matplotlib()


def check_kernels(again: str = "`ktconvert resume`") -> None:
    """Fail in one sentence where KTCONVERT_ISA names what this CPU or the kernels lack, and later where an input file
    breaks off.

    again  what the user should then run
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


def text_of(option: str, path: Path | None) -> str | None:
    """The text of a small file that an option names."""
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: cannot be read ({error}).") from error
