"""Shell completion: real bash completes commands, options, choices and paths; --install-completion is idempotent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from ktconvert.pipeline.cli import COMMANDS, COMPLETE, group
from ktconvert.pipeline.cli.completion import SHELLS
from ktconvert.pipeline.options.types import FilePath, PathOrHubId
from rig import conversion

PARAMETERS = [(name, each) for name in COMMANDS for each in group.get_command(click.Context(group), name).params]  # type: ignore[union-attr]
PATHS = [(name, each) for name, each in PARAMETERS if isinstance(each.type, FilePath | PathOrHubId)]


def complete(*words: str) -> list[tuple[str, str]]:
    """Return (type, value) of each completion of the last word."""
    shell = ShellComplete(group, {}, "ktconvert", "_KTCONVERT_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions([*words[:-1]], words[-1])]


def test_commands_options_and_choices_are_completed() -> None:
    assert complete("re") == [("plain", "resume"), ("plain", "resplit")]
    assert ("plain", "--quant-method") in complete("cpu", "--quant")
    methods = [value for _, value in complete("cpu", "-i", "x", "--quant-method", "")]
    assert {"int8", "moe_int8"} <= {*methods} and "awq" not in methods


def test_each_word_of_a_list_is_completed() -> None:
    words = [value for _, value in complete("cpu", "-i", "x", "--quant-method", "int4,")]
    assert {"int4,int8", "int4,mxfp4"} <= {*words} and "int4,int4" not in words
    assert complete("cpu", "-i", "x", "--quant-method", "fp8,int4,int8") == [("plain", "fp8,int4,int8")]


@pytest.mark.parametrize(("name", "parameter"), PATHS, ids=lambda each: getattr(each, "name", each))
def test_every_path_is_completed(name: str, parameter: click.Parameter) -> None:
    before = [] if isinstance(parameter, click.Argument) else [parameter.opts[0]]
    assert {kind for kind, _ in complete(name, *before, "mod")} <= {"file", "dir"} != set()


def test_install_completion_adds_one_line(tmp_path: Path, cli: Any) -> None:
    for name, shell in SHELLS.items():
        env = {"HOME": str(tmp_path), "SHELL": f"/bin/{name}"}
        assert shell.startup_file in cli("--install-completion", env=env).stdout
        assert "already" in cli("--install-completion", env=env).stdout
        assert (tmp_path / shell.startup_file).read_text().count("_KTCONVERT_COMPLETE=") == 1
        (tmp_path / shell.startup_file).unlink()
        assert "Usage:" in cli("--install-completion", "--help", env=env).stdout
        assert not (tmp_path / shell.startup_file).exists()
    (tmp_path / "file").touch()
    refused = cli("--install-completion", env={"HOME": str(tmp_path / "file"), "SHELL": "/bin/bash"}, code=7).stderr
    assert (
        f"{tmp_path / 'file/.bashrc'}: cannot be written (File exists); have bash run this at its start: [" in refused
    )
    assert "set it to bash, zsh or fish." in cli("--install-completion", env={"SHELL": "/bin/dash"}, code=2).stderr


@pytest.mark.parametrize("instruction", ["foo_source", "bash_foo", "bash"])
def test_an_unknown_instruction_is_named(instruction: str, cli: Any) -> None:
    message = cli(env={COMPLETE: instruction}, code=2).stderr
    assert message == f"ktconvert: {COMPLETE}: '{instruction}' is unknown; run `ktconvert --install-completion`.\n"


def test_closed_standard_output_is_named() -> None:
    prefix = ("sh", "-c", 'exec "$0" "$@" >&-')
    done = conversion.ktconvert(prefix=prefix, env={COMPLETE: "zsh_source"})
    conversion.check_refusal(done, 1, "standard output is closed; redirect it to a file or to /dev/null.")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_loads_the_completion(tmp_path: Path) -> None:
    """New shells without the virtual environment do, by the program's path; nothing happens once the program is gone."""
    program = tmp_path / "bin" / "ktconvert"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ktconvert.pipeline.cli "$@"\n')
    program.chmod(0o755)
    home = {"HOME": str(tmp_path)}
    path = f"{program.parent}:{os.environ['PATH']}"
    done = conversion.ktconvert("--install-completion", env={**home, "SHELL": "/bin/bash", "PATH": path})
    assert done.returncode == 0, done.stderr

    def run(script: str) -> tuple[str, str]:
        words = ["bash", "--norc", "-c", f". ~/.bashrc; {script}"]
        done = subprocess.run(words, capture_output=True, text=True, env={**home, "PATH": "/usr/bin:/bin"})
        return done.stdout.strip(), done.stderr

    ask = f"COMP_WORDS=({program} resp); COMP_CWORD=1; _ktconvert_completion {program}; echo ${{COMPREPLY[@]}}"
    assert run(ask) == ("resplit", "")
    program.unlink()
    assert run("true") == ("", "")
