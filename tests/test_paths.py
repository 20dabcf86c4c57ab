"""Every option and argument that names a path: an empty one is refused, and never taken for the current directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ktconvert.pipeline.cli import COMMANDS, group

FILL = {"model": "m", "output": "o", "path": "p", "input_path": "i", "output_dir": "o", "model_id": "m"}
FILL |= {"cpu_weights": "c", "text": "t", "new": "n", "threadpool_count": "2", "dir": "d"}
# What is typed as text and is a path, or a hub id.
EITHER = {"input_path", "model_id", "model", "path", "against", "dataset"}


def parameters() -> list[tuple[str, str]]:
    """(command, parameter) of every path."""
    pairs = []
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        pairs += [(name, p.name or "") for p in command.params if isinstance(p.type, click.Path) or p.name in EITHER]
    return pairs


def test_every_command_takes_a_path() -> None:
    assert {name for name, _ in parameters()} == set(COMMANDS)


@pytest.mark.parametrize(("name", "empty"), parameters())
def test_an_empty_path_is_refused(name: str, empty: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command = group.get_command(click.Context(group), name)
    assert command is not None
    words = [name]
    for parameter in command.params:
        if not (parameter.required or parameter.name == empty):
            continue
        value = "" if parameter.name == empty else FILL[parameter.name or ""]
        words += [value] if isinstance(parameter, click.Argument) else [parameter.opts[-1], value]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 2, done.output
    assert "is empty; give a path" in done.output
    assert list(tmp_path.iterdir()) == []
