"""`ktconvert convert-adapter`: an adapter of kt-kernel's training as one of PEFT."""

from __future__ import annotations

import json
import os
import shlex

import click

from ktconvert.layouts.errors import InputError, OutputError
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.queries import ConvertAdapterOptions
from ktconvert.pipeline.report.progress import Reporter


@command("convert-adapter", ConvertAdapterOptions)
def convert_adapter(options: ConvertAdapterOptions) -> None:
    """Write an adapter of kt-kernel's training as PEFT's, with one matrix for each expert. No number changes.

    ADAPTER is a directory with fused_expert_lora.safetensors and adapter_config.json. Its experts get the names that
    they have in MODEL. The output appears when it is complete.

    Examples:
      ktconvert convert-adapter ADAPTER OUT --model MODEL
      ktconvert convert-adapter ADAPTER OUT --model Qwen/Qwen3-30B-A3B --json
    """
    from ktconvert.layouts.checkpoints.adapter import require_adapter, write_peft_adapter
    from ktconvert.layouts.checkpoints.kt_adapter import FUSED, name_experts
    from ktconvert.layouts.checkpoints.recognition import recognize
    from ktconvert.layouts.sources.source import open_checkpoint

    folder, output = options.adapter, options.output
    if os.path.lexists(output):
        raise OutputError(f"{output}: exists; choose a new directory.")
    require_adapter(folder)
    if not (folder / FUSED).is_file():
        raise InputError(f"{folder}: has no {FUSED}; use it as it is, since kt-kernel did not write it")
    model = recognize(open_checkpoint(options.model, options.hub.revision), to_read=True)
    count = write_peft_adapter(folder, output, name_experts(model))
    document = {"event": "converted", "adapter": str(folder), "output": str(output), "matrices": count}
    if options.as_json:
        click.echo(json.dumps(document))
        return
    click.echo(f"{output}: {count} matrices")
    command_line = ["ktconvert", "run", options.model, "--adapter", str(output), "--prompt", "Hello"]
    Reporter().say(f"next: {shlex.join(command_line)}")
