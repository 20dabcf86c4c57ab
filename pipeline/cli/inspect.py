"""ktconvert inspect."""

from __future__ import annotations

import json
import sys

import click

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.queries import InspectOptions


@command("inspect", InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Describe a checkpoint, an output or an unfinished conversion, and list what it can be converted to.

    PATH is a directory, a .safetensors or .gguf file, or a hub id (org/name, org/name:FILE.gguf). Headers only are
    read; of an AMXINT4 output without our manifest also the codes: kt-kernel misreads those that are -8; with --columns
    also weights of a checkpoint. The exit code is 3 for a checkpoint of which no command makes anything.

    Examples:
      ktconvert inspect /models/Qwen3-30B-A3B          the outputs that it can be converted to, and the commands
      ktconvert inspect /models/Qwen3-30B-A3B-INT8     its format and sizes, and whether it is complete
      ktconvert inspect /models/Qwen3-30B-A3B --columns    whether --equalize is for it
    """
    from ktconvert.pipeline.ui import inspection
    from ktconvert.pipeline.ui.progress import Reporter
    from ktconvert.pipeline.ui.text import aligned

    revision, row = options.hub.revision, options.arch.text()
    document = inspection.look(options.path, Reporter(), revision, row, columns=options.columns)
    refused = document.get("refused") if "dequantize" not in document else None
    if options.as_json:
        click.echo(json.dumps(document))
        if refused is not None:  # the object holds the reason: an error event would repeat it
            click.echo(f"ktconvert: {refused}", err=True)
            sys.exit(UnsupportedError.exit_code)
        return
    click.echo("\n".join(aligned(inspection.rows(document))))
    for note in document.get("notes", []):
        click.echo(f"\nnote: {note}")
    lines = [*document.get("convert", []), *document.get("convert_gpu", []), *document.get("dequantize", [])]
    if lines:
        click.echo("\n" + "\n".join(lines))
    if refused is not None:
        raise UnsupportedError(refused)
