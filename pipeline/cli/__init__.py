"""The command line: parsing, printing and exit codes. One module per command, imported when it is called."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import click

from ktconvert.pipeline import __version__
from ktconvert.pipeline.report import terminal
from ktconvert.pipeline.report.text import one_line

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# heading of --help -> its commands -> their lines
HEADINGS: Mapping[str, Mapping[str, str]] = {
    "Choose": {
        "fit": "Predict which formats of a model fit a machine, how fast and how accurate, and print the commands.",
        "inspect": "Describe a checkpoint or an output, and list the possible conversions.",
        "models": "List local checkpoints and outputs, or compare a checkpoint with the hub and repair it.",
    },
    "Convert": {
        "cpu": "Convert a checkpoint's routed experts to AMX INT4/INT8, RAWINT4, MXFP4, FP8 or BF16 for the CPU.",
        "gpu": "Quantize a checkpoint's routed experts to W4A16/W8A16 for the GPU.",
        "dequantize": "Write a quantized checkpoint as a BF16 release.",
        "fetch": "Download a model without its routed experts.",
        "resume": "Finish an interrupted conversion or training.",
        "status": "Show the progress of a conversion, from any host.",
        "verify": "Check an output, by itself or against its source or another output.",
        "merge": "Merge loose per-layer folders of .kt files into safetensors.",
        "resplit": "Rewrite an output for a different number of NUMA nodes.",
    },
    "Calibrate": {
        "calibrate": "Measure the inputs of a model's routed experts: importance matrix and routing counts.",
        "experts": "Choose hot experts by their routing counts.",
    },
    "Run": {
        "up": "Set up a model and serve it, with the commands that `fit` prints.",
        "run": "Generate text with converted experts.",
        "serve": "Serve a model with converted experts to OpenAI clients.",
        "eval": "Measure the accuracy of converted experts: perplexity, divergence, error per layer.",
    },
    "Train": {
        "train": "Train a LoRA adapter with converted experts.",
        "merge-adapter": "Fold a LoRA adapter into a BF16 checkpoint.",
        "convert-adapter": "Write an adapter of kt-kernel as PEFT's.",
    },
    "This machine": {
        "doctor": "Describe this machine, and print the kt-kernel flags that fit it.",
        "bench": "Measure how fast this machine computes an output's experts, and its memory bandwidth.",
        "version": "Show versions, the build, and instruction sets.",
    },
}
COMMANDS = {name: text for commands in HEADINGS.values() for name, text in commands.items()}


# The commands in conversion.py; every other command has a module with its name.
CONVERSIONS = ("cpu", "gpu", "calibrate", "dequantize", "fetch", "merge", "merge-adapter", "resplit", "resume")
INTERRUPTED = "interrupted; run the same command again."
CLOSE = 0.75  # similarity of suggested options
COMPLETE = "_KTCONVERT_COMPLETE"  # set by a shell that asks for completions

EPILOG = """`ktconvert help COMMAND` describes a command.

\b
Exit codes:
  0        success
  1        a system call failed, or a package is missing or too old
  2        invalid options
  3        unsupported model or method (the message lists the supported ones)
  4        not enough disk space or memory
  5        an input that does not exist, is damaged or has changed
  6        verification failed
  7        the output cannot be written, is in use, not ours, or was made with other options
  130/143  interrupted (Ctrl-C, SIGTERM); the message says how to continue

\b
Examples:
  ktconvert up Qwen/Qwen3-30B-A3B    all steps from a name to a server
  ktconvert cpu MODEL OUT --quant-method int8
  ktconvert gpu MODEL OUT --quant-method RTN --quant-type W4A16
  ktconvert resume OUT
  ktconvert verify OUT --against MODEL
  ktconvert serve MODEL --cpu-weights OUT
"""

# Words that people try for a command -> what they mean
OTHER_WORDS = {
    **dict.fromkeys(("convert", "quantize", "quantise"), "'cpu' or 'gpu'"),
    **dict.fromkeys(("list", "ls"), "'models'"),
    **dict.fromkeys(("chat", "generate"), "'run'"),
    "download": "'fetch'",
}

# Options of other commands and programs that people try -> what they mean, if the command has that
OTHER_OPTIONS = {
    "--force": "--overwrite",
    "--lr": "--learning-rate",
    "--max-tokens": "--max-sequences",
    "--method": "--quant-method",
    "--quant-type": "--quant-method",
    "--random-seed": "--seed",
    "--text": "--dataset",
}
# Other such options -> what to do instead
OTHER_REMEDIES = {
    "--model": "give the model as the first argument, without an option",
    "--resume": "run the same command again, or `ktconvert resume OUT`: an interrupted run continues",
}
MAX_COMPLETIONS = 3  # options to suggest that begin with the given word
MAX_OWNERS = 4  # commands to name for an option that another command lacks
# What one argument too many probably is: name of an option -> how to give it
EXTRA_ARGUMENTS = {
    "cpu_weights": "converted experts as --cpu-weights OUT",
    "against": "the model or output to compare with as --against",
}
EXTRA_ARGUMENT = "Got unexpected extra argument ("  # click's message for one argument too many

# Messages of Python and the dynamic linker when this process reaches a limit
LIMIT_MESSAGES = ("can't start new thread", "failed to map segment", "annot allocate memory")


def normalize_token(token: str) -> str:
    """Return the canonical spelling of a command, option or choice; underscores and capitals are allowed, too.

    A letter stays as it is: -V is the version, and -v shows more.
    """
    return token if len(token) == 1 else token.lower().replace("_", "-")


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called, so that --help is instant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line; `help COMMAND` means `COMMAND --help`. Raises UsageError for more words."""
        is_help = bool(args) and normalize_token(args[0]) == "help"
        if is_help and len(words := [word for word in args[1:] if not word.startswith("-")]) > 1:
            from ktconvert.layouts.errors import UsageError

            raise UsageError(f"help describes one command; leave out {', '.join(words[1:])}")
        return super().parse_args(ctx, [*args[1:], "--help"] if is_help else args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        _import_numpy()
        function = name.replace("-", "_")
        module = importlib.import_module(f"ktconvert.pipeline.cli.{'conversion' if name in CONVERSIONS else function}")
        command: click.Command = getattr(module, function)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click knows only imported commands
            name = error.command_name
            near = OTHER_WORDS.get(name) or " or ".join(map(repr, difflib.get_close_matches(name, COMMANDS)))
            suggestion = f". Did you mean {near}?" if near else ""
            raise click.NoSuchCommand(name, f"No such command {name!r}{suggestion}", ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([*commands.items()])


def _import_numpy() -> None:
    """Import NumPy without the threads of its linear algebra library, which we do not use."""
    name = "OPENBLAS_NUM_THREADS"
    old_value = os.environ.get(name)
    os.environ[name] = "1"
    importlib.import_module("numpy")
    if old_value is None:  # children, and PyTorch with OpenBLAS, keep their usual number of threads
        del os.environ[name]
    else:
        os.environ[name] = old_value


def _install_completion(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from ktconvert.pipeline.cli.completion import install_completion

        click.echo(install_completion())
        ctx.exit()


def _print_all_help(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Print the help of the group, then that of each command with all its options."""
    if value and not ctx.resilient_parsing:
        click.echo(ctx.get_help())
        for name in COMMANDS:
            command = group.get_command(ctx, name)
            assert command is not None
            click.echo()
            with contextlib.suppress(click.exceptions.Exit):
                command.make_context(name, ["--help-all"], ctx)
        ctx.exit()


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"ktconvert {__version__}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": normalize_token,
        "max_content_width": 120,
    },
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option(
    "--install-completion",
    is_flag=True,
    expose_value=False,
    callback=_install_completion,
    help="Complete commands, options and paths in your shell (bash, zsh or fish).",
)
@click.option(
    "--help-all",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_all_help,
    help="Show all options of all commands and exit.",
)
def group() -> None:
    """Convert the experts of mixture-of-experts checkpoints into weights for the CPU (for kt-kernel) and the GPU."""


def main() -> None:
    """Run the command line. Every failure prints one sentence on stderr and has a documented exit code."""
    _open_streams()
    _reset_signals()
    warnings.showwarning = _print_warning
    sys.unraisablehook = _report_unraisable
    try:
        if instruction := os.environ.get(COMPLETE):
            from click.shell_completion import shell_complete

            with terminal.name_in_errors(sys.stdout):  # click writes to its binary stream
                is_unknown = shell_complete(group, {}, "ktconvert", COMPLETE, instruction) != 0
                if is_unknown:
                    _fail(f"{COMPLETE}: {instruction!r} is unknown; run `ktconvert --install-completion`.", 2)
                sys.exit()
        with group.make_context("ktconvert", sys.argv[1:]) as context:
            group.invoke(context)
        sys.stdout.flush()
        for number in (signal.SIGINT, signal.SIGTERM):  # the command is done: a late signal does not make it fail
            signal.signal(number, lambda *_: os._exit(0))
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _print(sys.stderr, error.format_message())
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(_describe_usage(error), 2)
    except KeyboardInterrupt as error:
        if code := getattr(error, "exit_code", None):  # of a run that can be resumed
            _fail(str(error), code)
        click.echo(err=True)  # the line of the terminal's ^C
        _fail(str(error) or INTERRUPTED, 130)
    except BrokenPipeError:  # the reader of our output has ended
        _discard(sys.stdout)
        sys.exit(141)
    except MemoryError:
        _fail("not enough memory; set --max-memory or lower --threads, then resume.", 4)
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):  # such as one during an import
            _fail(INTERRUPTED, 130)
        code = getattr(error, "exit_code", None)
        is_limit = isinstance(error, RuntimeError | ImportError) and any(text in str(error) for text in LIMIT_MESSAGES)
        if code is None and not is_limit:
            from ktconvert.layouts.extras import explain_broken_package

            if (broken := explain_broken_package(error)) is not None:
                _fail(str(broken), broken.exit_code)
        if isinstance(error, OSError) and code is None:
            from ktconvert.layouts.files.direct_file import DISK_FULL_REMEDIES, no_space_sentence

            place = error.filename or "the system"
            if place == terminal.STDOUT:
                _discard(sys.stdout)
                if error.errno == errno.EBADF:
                    _fail("standard output is closed; redirect it to a file or to /dev/null.", 1)
            if error.filename is None and error.errno == errno.ENOENT and not _has_current_directory():
                _fail("the current directory has been removed; change to one that exists.", 1)
            if error.errno in DISK_FULL_REMEDIES:
                _fail(no_space_sentence(place, error), 4)
            if isinstance(error, PermissionError) and error.filename:
                denied = _find_unreadable(Path(os.fsdecode(error.filename)))
                _fail(f"{denied}: permission denied; change its permissions.", 1 if os.access(denied, os.R_OK) else 5)
            _fail(f"{place}: {error.strerror or error}.", 4 if error.errno == errno.ENOMEM else 1)
        if is_limit:
            _fail(
                "this process reached its limit of threads or memory; raise its limits (ulimit -u, ulimit -v) "
                "or lower --threads, then resume.",
                4,
            )
        if code is None:
            raise
        _fail(str(error), code)


def _has_current_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return False
    return True


def _open_streams() -> None:
    """Open /dev/null in place of closed standard streams: otherwise prints would go into the next file that we open.

    Results that a closed stdout cannot receive are an error: its /dev/null cannot be written.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = os.O_RDONLY if name == "stdout" else os.O_RDWR
            os.set_inheritable(os.open(os.devnull, mode), True)  # gets the lowest free number, which is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    terminal.install()


def _find_unreadable(path: Path) -> Path:
    """Return the directory that keeps the user from a path; the path itself if there is none."""
    return next((parent for parent in reversed(path.parents) if not os.access(parent, os.X_OK)), path)


def _reset_signals() -> None:
    """Reset signal handlers: shells start background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Print a line and end the process by SIGTERM."""
    os.write(2, b"\nktconvert: stopped by SIGTERM; run the same command again.\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process after a Ctrl-C that Python or C code would ignore, such as one in an import; report the rest."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _print(sys.stderr, f"\nktconvert: {INTERRUPTED}")
        os._exit(130)
    sys.__unraisablehook__(unraisable)


def _describe_usage(error: click.ClickException) -> str:
    """Return click's sentence about the options, with a remedy."""
    if isinstance(error, click.NoSuchOption):
        own = [] if error.ctx is None else [name for param in error.ctx.command.params for name in param.opts]
        if remedy := OTHER_REMEDIES.get(error.option_name):
            return f"No such option '{error.option_name}'; {remedy}."
        near = [name for name in [OTHER_OPTIONS.get(error.option_name)] if name in own]
        owners = _find_owners(error)
        if owners and not near:
            others = " and others" if len(owners) > MAX_OWNERS else ""
            named = "`, `".join(owners[:MAX_OWNERS])
            return f"No such option '{error.option_name}': it is one of `ktconvert {named}`{others}."
        if not near and not owners:
            near = _complete_option(error) or difflib.get_close_matches(
                error.option_name, error.possibilities or (), 1, CLOSE
            )
        if not near and error.ctx is not None and error.ctx.parent is None:  # before a command
            remedy = "give the options of a command after its name, and -V or --version for the version"
            return f"No such option '{error.option_name}'; {remedy}."
        if near:
            owner = f", which `ktconvert {owners[0]}` has" if owners else ""
            return f"No such option '{error.option_name}'{owner}. Did you mean {' or '.join(map(repr, near))}?"
        error = click.NoSuchOption(error.option_name, ctx=error.ctx)  # without click's own suggestions
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None or message.endswith(("?", "?)")):  # "Did you mean ...?"
        return message
    if message.startswith(EXTRA_ARGUMENT):
        names = {param.name for param in context.command.params}
        if option := next((text for name, text in EXTRA_ARGUMENTS.items() if name in names), None):
            return f"{message.rstrip('.')}; give {option}."
    return f"{message.rstrip('.')}; see `{context.command_path} --help`."


def _complete_option(error: click.NoSuchOption) -> list[str]:
    """Return the options of a command that begin with the word of an error; none if there are many."""
    params = [] if error.ctx is None else error.ctx.command.params
    spellings = [[name for name in param.opts if name.startswith(error.option_name)] for param in params]
    names = [own[0] for own in spellings if own]  # not a second spelling of the same option
    return names if len(names) <= MAX_COMPLETIONS else []


def _find_owners(error: click.NoSuchOption) -> list[str]:
    """Return the commands that have an option which the command of an error lacks."""
    if error.ctx is None or error.ctx.parent is None:  # no command
        return []
    commands = {name: group.get_command(error.ctx, name) for name in COMMANDS}
    return [
        name for name, other in commands.items() if other and any(error.option_name in p.opts for p in other.params)
    ]


def _fail(message: str, code: int) -> None:
    """Exit with a code, the message in one line on stderr, and with --json an event."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal must not print a traceback from here on
        signal.signal(number, lambda caught, _: os._exit(128 + caught))
    message = one_line(message)
    if "--json" in map(normalize_token, sys.argv):
        _print(sys.stdout, json.dumps({"event": "error", "message": message, "exit_code": code}))
    _print(sys.stderr, f"ktconvert: {message}")
    sys.exit(code)


def _print_warning(message: Warning | str, *_: object, **_options: object) -> None:
    """Print a warning of Python without the place in the code."""
    _print(sys.stderr, f"warning: {one_line(str(message))}")


def _print(stream: TextIO, text: str) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Discard the buffer of a stream: the interpreter would fail to write it, and exit with its own code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
