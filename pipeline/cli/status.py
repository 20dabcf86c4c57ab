"""ktconvert status."""

from __future__ import annotations

import contextlib
import json
import time

import click

from ktconvert.pipeline.cli import one_line
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.queries import StatusOptions

EVERY = 2.0  # seconds between two looks


@command("status", StatusOptions)
def status(options: StatusOptions) -> None:
    """Tell how far a conversion is, which host makes what, and what failed.

    Reads the work directory next to OUTPUT and nothing else, so any host that sees it can tell.

    Examples:
      ktconvert status /shared/DeepSeek-V3.1-INT8             how far it is, and who makes what
      ktconvert status /shared/DeepSeek-V3.1-INT8 --watch     again and again, until it has ended
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ktconvert.pipeline.ui.status import RUNNING, lines, look

    output, watch, as_json = options.output, options.watch, options.as_json
    console, shown = Console(highlight=False, soft_wrap=True), None
    alive = watch and not as_json and console.is_terminal
    with Live(console=console, auto_refresh=False) if alive else contextlib.nullcontext() as live:
        while True:
            found = look(output)
            text = json.dumps(found) if as_json else "\n".join(map(one_line, lines(found)))
            if live is not None:
                live.update(Text(text), refresh=True)
            elif text != shown:
                click.echo(text)
            if not watch or found["state"] != RUNNING:
                return
            shown = text
            time.sleep(EVERY)
