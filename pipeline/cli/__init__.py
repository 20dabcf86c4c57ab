"""The command line: options in, a plan out; no logic. One file per command, imported when it is called."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import TextIO

import click

from ktconvert.pipeline.report import terminal

# command -> what --help says of it
COMMANDS: Mapping[str, str] = {
    "cpu": "Convert a checkpoint's routed experts to AMX INT4/INT8, MXFP4, FP8 or BF16 weights for the CPU.",
    "gpu": "Quantize a checkpoint's routed experts to W4A16/W8A16 for the GPU.",
    "calibrate": "Measure what a model's routed experts read: importance matrix and routing counts.",
    "dequantize": "Write a quantized checkpoint as a BF16 release.",
    "merge-adapter": "Fold a LoRA adapter into a BF16 checkpoint, to be converted again.",
    "merge": "Turn loose per-layer folders of .kt files into safetensors.",
    "resplit": "Rewrite an output for another number of NUMA nodes.",
    "resume": "Finish a conversion that was cut off.",
    "status": "Tell how far a conversion is, who makes what, and what failed; from any host.",
    "verify": "Check an output, alone or against its source or another output.",
    "inspect": "Describe a checkpoint or an output, and list what it can be converted to.",
    "bench": "Measure how fast this machine computes an output's experts, next to how fast it reads memory.",
    "experts": "Choose the experts that are to be hot, by how often they were routed to.",
    "train": "Train a LoRA adapter through the experts as they were converted.",
    "run": "Let a model write, its experts computed from converted weights.",
    "serve": "Serve a model to OpenAI clients, its experts computed from converted weights.",
    "eval": "Measure what converted experts cost: perplexity, divergence, error per layer.",
    "doctor": "Describe this machine, and print the kt-kernel flags that fit it.",
    "version": "Tell versions, how this ktconvert was built, and the instruction sets.",
}

# The commands that stand in conversion.py; any other has a module of its name.
CONVERSIONS = ("cpu", "gpu", "calibrate", "dequantize", "merge", "merge-adapter", "resplit", "resume")
LONGEST = 1000  # characters of a message
COMPLETE = "_KTCONVERT_COMPLETE"  # by which a shell asks how a line may go on

EPILOG = """\b
Exit codes:
  0        done
  1        the system refused something (named in the message)
  2        options that cannot be understood
  3        unsupported model or method (the message names what is legal)
  4        not enough disk or memory
  5        bad input data, or a source that changed
  6        verification failed
  7        the output is in use, not ours, or made with other options
  130/143  interrupted (Ctrl-C / SIGTERM); `ktconvert resume OUTPUT` goes on

\b
Examples:
  ktconvert inspect Qwen/Qwen3-30B-A3B
  ktconvert cpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-INT8 --quant-method int8
  ktconvert gpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-W4A16 --quant-method RTN --quant-type W4A16
  ktconvert resume /models/Qwen3-30B-A3B-INT8
  ktconvert verify /models/Qwen3-30B-A3B-INT8 --against /models/Qwen3-30B-A3B
"""

# What Python and the dynamic linker say where a limit of this process is reached.
LIMITED = ("can't start new thread", "failed to map segment", "annot allocate memory")


def normal(token: str) -> str:
    """How commands, options and choices are spelled. Underscores and capitals are as good: --INPUT_PATH, INT4."""
    return token.lower().replace("_", "-")


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called, so that --help is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        _import_numpy()
        module = importlib.import_module(f"ktconvert.pipeline.cli.{'conversion' if name in CONVERSIONS else name}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


def _import_numpy() -> None:
    """Import NumPy without its linear algebra library's threads, one per CPU: nothing here multiplies with it."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    importlib.import_module("numpy")
    if before is None:  # children, and PyTorch where it has OpenBLAS, keep the threads that they would have
        del os.environ[name]
    else:
        os.environ[name] = before


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from ktconvert.pipeline.cli.version import version_lines

        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": normal, "max_content_width": 120},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show versions and exit.",
)
def group() -> None:
    """Convert mixture-of-experts checkpoints into expert weights for the CPU, as kt-kernel
    loads them, and for the GPU.
    """


def main() -> None:
    """Run the command line; every failure is one sentence on stderr and a documented exit code."""
    _open_streams()
    _take_signals()
    try:
        if instruction := os.environ.get(COMPLETE):
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(group, {}, "ktconvert", COMPLETE, instruction))
        with group.make_context("ktconvert", sys.argv[1:]) as context:
            group.invoke(context)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        _fail(error.format_message(), 2, usage.getvalue().rstrip())
    except KeyboardInterrupt:
        click.echo(err=True)  # after the terminal's ^C
        _fail("interrupted", 130)
    except BrokenPipeError:  # nothing reads our output any more
        _discard(sys.stdout)
        sys.exit(141)
    except MemoryError:
        _fail("not enough memory; set --max-memory or lower --cpuinfer-threads, then resume", 4)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if isinstance(error, OSError) and code is None:
            from ktconvert.layouts.files.direct_file import FULL, no_space_sentence

            where = error.filename or "the system"
            if error.errno in FULL:
                _fail(no_space_sentence(where, error), 4)
            _fail(f"{where}: {error.strerror or error}", 4 if error.errno == errno.ENOMEM else 1)
        if isinstance(error, RuntimeError | ImportError) and any(text in str(error) for text in LIMITED):
            _fail(
                "the system gives this process no more threads or memory; raise its limits (ulimit -u, ulimit -v) "
                "or lower --cpuinfer-threads, then resume",
                4,
            )
        if code is None:
            raise
        _fail(str(error), code)


def _open_streams() -> None:
    """Open /dev/null in place of closed standard streams: else the next file we open would get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    terminal.install()


def _take_signals() -> None:
    """Undo what a parent process may have set: shells start jobs in the background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _fail(message: str, code: int, text: str | None = None) -> None:
    """End with an exit code, a text on stderr (by default the message in one line), and with --json an event."""
    for number in (signal.SIGINT, signal.SIGTERM):  # one that comes now, perhaps again, leaves no traceback
        signal.signal(number, lambda caught, _: os._exit(128 + caught))
    message = one_line(message)
    if "--json" in map(normal, sys.argv):
        _print(sys.stdout, json.dumps({"event": "error", "message": message, "exit_code": code}))
    lines = [f"ktconvert: {message}"] if text is None else map(one_line, text.splitlines())
    _print(sys.stderr, "\n".join(lines))
    sys.exit(code)


def one_line(text: str) -> str:
    """Files hold any text, of any length, and messages quote them."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]} ... {plain[-LONGEST // 2 :]}"


def _print(stream: TextIO, text: str) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Let what a stream buffers go nowhere: the interpreter would fail to write it, and exit with its own code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
