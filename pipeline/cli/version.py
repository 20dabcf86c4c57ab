"""`ktconvert version`: versions, build and instruction sets, without importing the packages that are listed."""

from __future__ import annotations

import json

import click

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.declare import Options, declare
from ktconvert.pipeline.options.option_groups import AS_JSON
from ktconvert.pipeline.report.versions import version_document, version_lines


class VersionOptions(Options):
    as_json: bool = declare(AS_JSON, default=False)


@command("version", VersionOptions)
def version(options: VersionOptions) -> None:
    """Show the versions in use, how this ktconvert was built, and its instruction sets.

    Examples:
      ktconvert version
      ktconvert version --json
    """
    click.echo(json.dumps(version_document()) if options.as_json else "\n".join(version_lines()))
