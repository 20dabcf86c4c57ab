"""ktconvert run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert run /models/Qwen3-30B-A3B --cpu-weights /models/Qwen3-30B-A3B-INT8 --prompt "Once upon a time"
  ktconvert run /models/Qwen3-30B-A3B --cpu-weights /models/Qwen3-30B-A3B-INT8 --chat
  ktconvert run /models/Qwen3-30B-A3B-W4A16 --cpu-weights /models/Qwen3-30B-A3B-INT8 --num-gpu-experts 32 --chat
  ktconvert run examples/qwen3-moe-small --prompt "def add("               its experts as they are stored
  ktconvert run examples/qwen3-moe-small --prompt "def add(" --torch-experts               by transformers, to compare
"""


@click.command("run", epilog=EPILOG)
@click.argument("model", type=options.PathOrHubId())
@click.option(
    "--cpu-weights",
    type=options.FilePath(),
    default=None,
    help="What MODEL was converted into, or a checkpoint; its experts are computed from it. [default: MODEL]",
)
@click.option("--torch-experts", is_flag=True, help="Leave the experts to transformers, for comparison.")
@options.gpu_experts
@click.option("--prompt", type=options.Text(), default=None, help="The text to continue, as it stands.")
@click.option("--chat", is_flag=True, help="Talk with the model, line by line; Ctrl-D ends.")
@click.option("--max-new-tokens", type=options.Number(min=1), default=256, show_default=True, help="Tokens per answer.")
@click.option(
    "--temperature",
    type=options.Real(min=0),
    default=0.0,
    help="0: always the likeliest token; above: chosen by chance. [default: 0]",
)
@click.option("--threads", type=options.Number(min=1), default=None, help="Threads. [default: physical cores]")
@click.option("--exact", is_flag=True, help="Round as kt-kernel does, bit for bit.")
@click.option("--revision", type=options.Text(), default=None, help="Branch, tag or commit of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run Python code that comes with MODEL.")
def run(model: str, **params: Any) -> None:
    """Let a model write, through transformers, with its routed experts computed by ktconvert's runtime.

    MODEL is a directory or a hub id (org/name), in BF16, FP8 or from `ktconvert gpu`. Without --cpu-weights its experts
    are computed as they are stored, where the runtime can (`transformers` does it otherwise, and a note says why). Text
    goes to stdout as it comes, tokens per second to stderr.
    """
    if params["torch_experts"] and params["cpu_weights"] is not None:
        raise UsageError("--torch-experts leaves the experts to transformers: leave out --cpu-weights.")
    if params["chat"] == (params["prompt"] is not None):
        raise UsageError("give either --prompt TEXT or --chat")
    from ktconvert.pipeline.models import generate, writing
    from ktconvert.pipeline.ui.progress import Reporter

    options.check_kernels("the command again")
    reporter = Reporter()
    generate.require("run", reporter.warn)
    params["threads"] = options.computing_threads(params["threads"], reporter)
    settings = (
        "cpu_weights",
        "gpu_experts_mask",
        "num_gpu_experts",
        "revision",
        "trust_remote_code",
        "threads",
        "exact",
    )
    choice = generate.Choice(model, **{name: params[name] for name in settings})
    if params["torch_experts"] or params["cpu_weights"] is not None:
        loaded = generate.load(choice)
    else:
        loaded = generate.load_as_stored(choice, reporter.note)

    def write(inputs: Any) -> str:
        text, speed = writing.write(
            *loaded, inputs, max_new_tokens=params["max_new_tokens"], temperature=params["temperature"], say=_say
        )
        _say("\n")
        click.echo(speed.line(), err=True)
        return text

    if params["prompt"] is not None:
        inputs = writing.prompt_inputs(loaded[1], params["prompt"])
        _say(params["prompt"])
        write(inputs)
        return
    messages: list[dict[str, str]] = []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": write(writing.chat_inputs(loaded[1], messages))})


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines() -> Iterator[str]:
    """What the user types, less empty lines, to the end of the input. Raises InputError for what is no text."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and remembers them
    while True:
        try:
            line = input("> " if typed else "")
            line.encode()  # in some locales Python lets any byte pass
        except EOFError:
            return
        except UnicodeError as error:
            raise InputError("standard input is not UTF-8 text; convert it first") from error
        if line.strip():
            yield line
