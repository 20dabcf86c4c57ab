"""ktconvert status."""

from __future__ import annotations

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
    found = look(output)
    console = Console(highlight=False, soft_wrap=True)
    if as_json or not watch or not console.is_terminal:
        shown = None
        while True:
            text = json.dumps(found) if as_json else "\n".join(map(one_line, lines(found)))
            if text != shown:
                click.echo(text)
                shown = text
            if not watch or found["state"] != RUNNING:
                return
            time.sleep(EVERY)
            found = look(output)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Text("\n".join(map(one_line, lines(found)))), refresh=True)
            if found["state"] != RUNNING:
                return
            time.sleep(EVERY)
            found = look(output)
