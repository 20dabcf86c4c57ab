"""ktconvert version."""

from __future__ import annotations

import json

import click

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.cli.versions import facts, version_lines
from ktconvert.pipeline.options.queries import VersionOptions

EPILOG = """\b
Examples:
  ktconvert version
  ktconvert version --json
"""


@command("version", VersionOptions, EPILOG)
def version(options: VersionOptions) -> None:
    """Tell which versions are at work, how this ktconvert was built, and which instruction sets it has and uses."""
    click.echo(json.dumps(facts()) if options.as_json else "\n".join(version_lines()))
