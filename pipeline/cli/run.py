"""`ktconvert run`: text generation with converted experts."""

from __future__ import annotations

import sys
from typing import Any

import click

from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.sources.rotation import RotatedError
from ktconvert.pipeline.cli import chat, preconditions
from ktconvert.pipeline.cli.command import command, require_one
from ktconvert.pipeline.options.model_options import RunOptions
from ktconvert.pipeline.report import terminal


@command("run", RunOptions)
def run(options: RunOptions) -> None:
    """Generate text with transformers, with the routed experts computed by ktconvert's runtime.

    Without --cpu-weights, the runtime computes the experts in MODEL's own format if it can; otherwise transformers
    does, and a note says why. Text goes to stdout, tokens per second to stderr. Hashes of the converted experts are not
    checked; `ktconvert verify OUT` does that.

    Examples:
      ktconvert run MODEL --cpu-weights OUT --prompt "Once upon a time"
      ktconvert run MODEL --cpu-weights OUT --chat
      ktconvert run MODEL --cpu-weights OUT --num-gpu-experts 32 --chat
      ktconvert run MODEL --cpu-weights OUT --adapter ADAPTER --chat
      ktconvert run MODEL --chat --temperature 0.7    the original experts
    """
    require_one({"--prompt TEXT": options.prompt is not None, "--chat": options.chat})
    if options.system is not None and not options.chat:
        raise UsageError("--system needs --chat")
    for flag, value in {"--top-p": options.top_p, "--seed": options.seed}.items():
        if value is not None and not options.temperature:
            raise UsageError(f"{flag} is only for sampling; add --temperature, as in --temperature 0.7")
    from ktconvert.pipeline.models import generating, loading, pretrained
    from ktconvert.pipeline.report.progress import Reporter

    reporter = Reporter()
    choice = preconditions.make_model_choice("run", options, reporter)
    if options.chat and sys.stdin.isatty():  # a large model takes minutes
        click.echo(f"loading {choice.model}", err=True)
    try:
        own = choice if options.torch_experts else loading.with_own_experts(choice, reporter.warn)
        loaded = loading.load_model_and_tokenizer(own, chats=options.chat)
    except UnsupportedError as error:
        if options.torch_experts or options.cpu_weights is not None or isinstance(error, RotatedError):
            raise
        loaded = loading.load_model_and_tokenizer(choice, chats=options.chat)
        reporter.warn(f"transformers computes the whole model, since: {error}")

    if options.seed is not None:
        import torch

        torch.manual_seed(options.seed)
    context = loading.context_length(loaded[0].config)

    def write(inputs: Any, prompt: str = "") -> str:
        count = generating.limit_new_tokens(context, inputs, options.max_new_tokens)
        if count < options.max_new_tokens:
            reporter.announce(f"the model's context of {context} tokens leaves {count} for the answer")
        _say(prompt)
        sampling: Any = {"temperature": options.temperature, "top_p": options.top_p}
        try:
            with pretrained.explain_errors(
                choice.model, pretrained.GENERATION, action="generate as it says", unchanged=(OSError,)
            ):
                text, speed = generating.generate_text(*loaded, inputs, max_new_tokens=count, **sampling, emit=_say)
        finally:  # so that a message begins a line
            _say("\n")
        click.echo(speed.describe(), err=True)
        return text

    if options.prompt is not None:
        write(generating.prompt_inputs(loaded[1], options.prompt), options.prompt)
        return
    chat.answer_messages(options.system, lambda messages: write(generating.chat_inputs(loaded[1], messages)))


def _say(text: str) -> None:
    stream = sys.stdout if sys.stdout.isatty() else terminal.raw_stream(sys.stdout)
    with terminal.name_in_errors(stream):
        stream.write(text)
        stream.flush()
