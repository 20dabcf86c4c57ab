"""All options and arguments that name a path: an empty path is refused, and not taken for the current directory."""

from pathlib import Path

import click
import pytest

from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.options.types import FilePath, PathOrHubId
from rig.conversion import run_in_process

FILL = {"model": "m", "output": "o", "path": "p", "input": "i", "src": "s", "out": "u"}
FILL |= {"cpu_weights": "c", "text": "t", "new": "n", "numa": "2", "dir": "d", "adapter": "a"}
FILL |= {"dataset": "b", "counts": "k"}


def get_command(name: str) -> click.Command:
    """Return a command."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return command


def make_arguments(name: str, parameter: click.Parameter, text: str) -> list[str]:
    """Return a command with all required arguments, and this value for one parameter."""
    arguments = [name]
    for other in get_command(name).params:
        if other.required or other.name == parameter.name:
            value = text if other.name == parameter.name else FILL[other.name or ""]
            arguments += [value] if isinstance(other, click.Argument) else [other.opts[-1], value]
    return arguments


PARAMETERS = [(name, parameter) for name in COMMANDS for parameter in get_command(name).params]
PATHS = [(name, each) for name, each in PARAMETERS if isinstance(each.type, FilePath | PathOrHubId)]
TEXTS = [(n, each) for n, each in PARAMETERS if each.type.name == "text" and not isinstance(each.type, PathOrHubId)]


def test_path_options_exist_in_every_command():
    assert {name for name, _ in PATHS} == set(COMMANDS) - {"version"}


# Invalid paths, and their messages.
NO_PATHS = {
    "": "is empty; give a path",
    "~nobody-here/x": "in the home directory of an unknown user",
    "loop": "a loop of symbolic links",
}


@pytest.mark.parametrize("typed", NO_PATHS)
@pytest.mark.parametrize(("name", "wrong"), PATHS, ids=lambda x: getattr(x, "name", x))
def test_invalid_paths_are_refused(name, wrong, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    result = run_in_process(*make_arguments(name, wrong, typed))
    assert result.exit_code == 2 and NO_PATHS[typed] in result.output.replace("\n", " "), result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "loop"]


def test_absolute_paths_have_no_dots(tmp_path, monkeypatch):
    """Dots after a link that leads elsewhere stay: without them, the path would be a different one."""
    (tmp_path / "a" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/empty")
    monkeypatch.chdir(tmp_path / "a")
    for typed, shown in (("../a/./empty", "a/empty"), ("../link/../empty", "a/../link/../empty")):
        assert str(run_in_process("cpu", typed, "out").exception).startswith(f"{tmp_path / shown}: has no ")


def test_text_that_is_not_utf8_is_refused(tmp_path, monkeypatch):
    """File names may have any bytes, but texts are written into JSON or given to a tokenizer."""
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS:
        result = run_in_process(*make_arguments(name, text, "a\udcff"))
        assert (result.exit_code, "is not UTF-8 text" in result.output) == (2, True), (name, text, result.exception)


WITHOUT_FOLDER = [("resume /", 5), ("status /", 5), ("inspect /", 5), ("verify /", 5), ("inspect .work", 5)]
WITHOUT_FOLDER += [("cpu -i EXAMPLE -o /", 2), ("dequantize -i EXAMPLE -o /", 2), ("cpu -i EXAMPLE -o missing/..", 7)]
WITHOUT_FOLDER += [("gpu -i EXAMPLE -o / --quant-method RTN", 2), ("verify .work", 5)]


@pytest.mark.parametrize(("line", "code"), WITHOUT_FOLDER)
def test_output_needs_a_folder_for_its_work_directory(line, code, example, tmp_path, monkeypatch):
    (tmp_path / "here" / ".work").mkdir(parents=True)
    (tmp_path / "here" / ".work" / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    result = run_in_process(*line.replace("EXAMPLE", str(example)).split())
    assert getattr(result.exception, "exit_code", None) == code, repr(result.exception)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", ".work", "plan.json"]
