"""Every option and argument that names a path: an empty one is refused, and never taken for the current directory."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.options.types import FilePath, PathOrHubId

FILL = {"model": "m", "output": "o", "path": "p", "input": "i", "src": "s", "out": "u"}
FILL |= {"cpu_weights": "c", "text": "t", "new": "n", "threadpool_count": "2", "dir": "d"}
PATHS = (FilePath, PathOrHubId)


def parameters() -> list[tuple[str, str]]:
    """(command, parameter) of every path."""
    pairs = []
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        pairs += [(name, p.name or "") for p in command.params if isinstance(p.type, PATHS)]
    return pairs


def test_every_command_takes_a_path():
    assert {name for name, _ in parameters()} == set(COMMANDS) - {"version"}


# what is typed -> what is said of it
NO_PATHS = {"": "is empty; give a path", "~nobody-here/x": "no home directory", "loop": "leads to itself"}


@pytest.mark.parametrize("typed", NO_PATHS)
@pytest.mark.parametrize(("name", "wrong"), parameters())
def test_what_can_be_no_path_is_refused(name, wrong, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    command = group.get_command(click.Context(group), name)
    assert command is not None
    words = [name]
    for parameter in command.params:
        if not (parameter.required or parameter.name == wrong):
            continue
        value = typed if parameter.name == wrong else FILL[parameter.name or ""]
        words += [value] if isinstance(parameter, click.Argument) else [parameter.opts[-1], value]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 2, done.output
    assert NO_PATHS[typed] in done.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == [tmp_path / "loop"]


def test_bytes_are_no_text(tmp_path, monkeypatch):
    """Any file may be called so; what is no path, is written into JSON or given to a tokenizer."""
    monkeypatch.chdir(tmp_path)
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        required = [p for p in command.params if p.required]
        filled = [
            [FILL[p.name or ""]] if isinstance(p, click.Argument) else [p.opts[-1], FILL[p.name or ""]]
            for p in required
        ]
        for parameter in command.params:
            if parameter.type.name == "text" and not isinstance(parameter.type, PathOrHubId):
                words = [name, *(word for words in filled for word in words), parameter.opts[-1], "a\udcff"]
                done = CliRunner().invoke(group, words)
                assert (done.exit_code, "is not UTF-8 text" in done.output) == (2, True), (words, done.exception)


NOWHERE = [("resume /", 7), ("status /", 7), ("inspect /", 5), ("verify /", 3), ("inspect .work", 5)]
NOWHERE += [("cpu -i EXAMPLE -o /", 2), ("dequantize -i EXAMPLE -o /", 2), ("cpu -i EXAMPLE -o missing/..", 7)]
NOWHERE += [("gpu -i EXAMPLE -o / --quant-method RTN", 2), ("verify .work", 3)]


@pytest.mark.parametrize(("line", "code"), NOWHERE)
def test_a_folder_beside_which_nothing_can_lie(line, code, example, tmp_path, monkeypatch):
    (tmp_path / "here" / ".work").mkdir(parents=True)
    (tmp_path / "here" / ".work" / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    done = CliRunner().invoke(group, line.replace("EXAMPLE", str(example)).split())
    assert getattr(done.exception, "exit_code", None) == code, repr(done.exception)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", ".work", "plan.json"]
