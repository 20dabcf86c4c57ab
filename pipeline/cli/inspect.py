"""ktconvert inspect."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert inspect /models/Qwen3-30B-A3B          what can be made of it, and the line that makes it
  ktconvert inspect /models/Qwen3-30B-A3B-INT8     what it was made into, and whether it is complete
"""


@click.command("inspect", epilog=EPILOG)
@click.argument("path", type=options.PathOrHubId())
@click.option("--revision", default=None, help="Branch, tag or commit of a hub id.")
@options.arch_file
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(path: str, **given: Any) -> None:
    """Say what a checkpoint, an output or an unfinished conversion is, and what can be made of it.

    PATH is a directory, a .safetensors file, or a hub id (org/name). Headers only are read.
    """
    from ktconvert.pipeline.tell import inspect as look
    from ktconvert.pipeline.verify.report import aligned

    arch_file = options.text_of("--arch-file", given["arch_file"])
    found = look.look(path, given["revision"], arch_file)
    refused = found.get("refused")
    if given["as_json"]:
        click.echo(json.dumps(found))
        if refused is not None:  # the object holds the reason; a second one, of the error, would be one too many
            click.echo(f"ktconvert: {refused}", err=True)
            sys.exit(UnsupportedError.exit_code)
        return
    click.echo("\n".join(aligned(look.rows(found))))
    for note in found.get("notes", []):
        click.echo(f"\nnote: {note}")
    lines = [*found.get("convert", []), *found.get("convert_gpu", [])]
    if lines:
        click.echo("\n" + "\n".join(lines))
    if refused is not None:
        raise UnsupportedError(refused)
