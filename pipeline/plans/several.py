"""A command line that asks for several outputs: an ordinary request for each, which resumes alone."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.engine.plan import Request
from ktconvert.pipeline.options.declare import leaves, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.options.types import OneOrMore


def outputs_of(request: Request[Any]) -> list[Request[Any]]:
    """A request for each output OUT-WORD, where an option has several words; else the request itself.

    Raises UsageError where they cannot be made together.
    """
    options: ConversionOptions = request.options
    for leaf in leaves(type(options)):
        words = leaf.of(options).split(",") if isinstance(leaf.type, OneOrMore) else []
        if len(words) > 1:
            given = f"{leaf.flag} {','.join(words)}"
            _require_together(options, given, leaf.flag)
            if not request.output.name:
                raise UsageError(f"{given} adds to the name of the output, and {request.output} has none.")
            outputs = [request.output.with_name(f"{request.output.name}-{word}") for word in words]
            if len({os.path.realpath(output) for output in outputs}) < len(outputs):
                raise UsageError(
                    f"{given}: a link makes one folder of two outputs, {outputs[0]} and others; remove it."
                )
            return [
                replace(request, options=with_values(options, output=output, **{leaf.name: word}))
                for word, output in zip(words, outputs, strict=True)
            ]
    return [request]


def _require_together(options: ConversionOptions, given: str, flag: str) -> None:
    """Raise UsageError where each output needs a run of its own."""
    if options.part is not None:
        raise UsageError(f"{given}: --part shares out the files of one output; give one {flag} after the other.")
    if isinstance(options, QuantizationOptions) and options.calibrated:
        raise UsageError(
            f"{given}: GPTQ walks through the model once for each output, with what its own layers gave; give one "
            f"{flag} after the other."
        )
