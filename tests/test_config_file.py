"""The config file and environment variables set defaults of options; the command line overrides them, resume has none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.cli.command import Command, build_settings
from ktconvert.pipeline.options.declare import option_fields
from rig.conversion import run_in_process
from rig.safetensors import read_folder

Write = Callable[[str], Path]


@pytest.fixture
def write_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes the config file of this process."""
    path = tmp_path / "config" / "ktconvert" / "config.toml"
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


def get_command(name: str) -> Command:
    command = group.get_command(click.Context(group), name)
    assert isinstance(command, Command)
    return command


def read_settings(name: str, *words: str) -> dict[str, Any]:
    """Return the settings of a command line by name."""
    command = get_command(name)
    with command.make_context(name, [*words], parent=click.Context(group, **group.context_settings)) as context:
        settings = build_settings(command.settings, context.params)
    return {option_field.name: option_field.get(settings) for option_field in option_fields(command.settings)}


def test_the_command_line_precedes_the_environment_and_the_file(
    write_config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_threads(*words: str) -> int:
        threads: int = read_settings("cpu", "model", "out", *words)["threads"]
        return threads

    assert read_threads() is None
    write_config("[all]\nthreads = 1")
    assert read_threads() == 1
    write_config("[all]\nthreads = 1\n[cpu]\nthreads = 2")
    assert read_threads() == 2
    monkeypatch.setenv("KTCONVERT_CPU_THREADS", "3")
    assert read_threads() == 3
    assert read_threads("--threads", "4") == 4
    monkeypatch.setenv("KTCONVERT_CPU_THREADS", "")
    assert read_threads() == 2


def test_the_command_line_replaces_defaults_that_it_excludes(
    write_config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KTCONVERT_CPU_VERBOSE")
    write_config("[cpu]\nquiet = true")
    assert read_settings("cpu", "model", "out")["quiet"]
    settings = read_settings("cpu", "model", "out", "-v")
    assert settings["verbose"] and not settings["quiet"]


def test_a_table_for_all_commands_reaches_those_that_have_the_option(write_config: Write) -> None:
    write_config("[all]\nthreads = 1\nport = 9000\nmax-memory = '4GiB'")
    assert read_settings("cpu", "model", "out")["max_memory"] == 4 << 30
    serve = read_settings("serve", "model")
    assert (serve["threads"], serve["port"]) == (1, 9000)
    assert read_settings("status", "out")["watch"] is False


def test_every_kind_of_value_can_be_set(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(
        "[cpu]\nmethod-map = ['0=int8', '1=int8']\nlayers = 1\nsave_backward_weights = true\nstatistics = '/data'\n"
        "[eval]\nsequence_length = 64\n[verify]\nload = false\n[serve]\nadapter = ['a=/x', '/y']\n[run]\ntemperature = 1\n"
    )
    cpu = read_settings("cpu", "model", "out")
    assert (cpu["method_map"], cpu["layers"], cpu["statistics"]) == (("0=int8", "1=int8"), "1", Path("/data"))
    assert cpu["save_backward_weights"] is True
    assert read_settings("verify", "out")["load"] is False
    monkeypatch.setenv("KTCONVERT_CPU_METHOD_MAP", "0=int4 1=int8")
    monkeypatch.setenv("KTCONVERT_CPU_SAVE_BACKWARD_WEIGHTS", "0")
    monkeypatch.setenv("KTCONVERT_VERIFY_LOAD", "yes")
    cpu = read_settings("cpu", "model", "out")
    assert (cpu["method_map"], cpu["save_backward_weights"]) == (("0=int4", "1=int8"), False)
    assert read_settings("verify", "out")["load"] is True


def test_the_example_of_the_page_is_valid(write_config: Write) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "environment.md").read_text()
    write_config(page.partition("```toml\n")[2].partition("```")[0])
    assert read_settings("cpu", "model", "out")["method_map"] == ("0-3=bf16",)
    assert read_settings("serve", "model")["port"] == 9000


WRONG = {
    "[cpu]\nthreds = 1": "[cpu] threds: no option with a default has this name; did you mean threads?",
    "[cpu]\nquant-metod = 1": "[cpu] quant-metod: no option with a default has this name; did you mean quant-method?",
    "[all]\nthreds = 1": "[all] threds: no option with a default has this name; did you mean threads?",
    "[cpu]\ninput = 'model'": "[cpu] input: no default can be set for this option; give it on the command line.",
    "[cpu]\ngpu = true": "[cpu] gpu: no default can be set for this option",
    "[serve]\nprot = 1": "[serve] prot: no option with a default has this name; did you mean port?",
    "[run]\nx = 1": "[run] x: no option with a default has this name; see `ktconvert run --help-all`.",
    "[cpu]\nthreads = 1\n[gpu]\nthreds = 1": "[gpu] threds: no option with a default has this name; did you mean threads?",
    "[cpi]\nthreads = 1": "[cpi]: no command has this name; did you mean cpu?",
    "threads = 1": "threads is in no table; write it below [all]",
    "[cpu]\nthreads = 0": "[cpu] threads: must be at least 1, not 0; correct the value.",
    "[cpu]\nthreads = 1.5": "[cpu] threads: '1.5' is not a valid integer; correct the value.",
    "[cpu]\nthreads = [1]": "[cpu] threads: the value has the wrong type; give a number or a text in quotes.",
    "[cpu]\nthreads = true": "[cpu] threads: the value has the wrong type; give a number or a text in quotes.",
    "[cpu]\noverwrite = 1": "[cpu] overwrite: the value has the wrong type; give true or false.",
    "[cpu]\nmethod-map = {a = 1}": "has the wrong type; give a list of values.",
    "[cpu]\nscale = 'min'": "[cpu] scale: 'min' is not one of 'absmax', 'mse', 'imatrix', 'gptq'; correct the value.",
    f"[cpu]\nthreads = 0x{'f' * 5000}": "[cpu] threads: Exceeds the limit",
    f"x = {'[' * 5000}": "cannot be read (",
    "[cpu": "cannot be read (Expected ']' at the end of a table declaration (at end of document)); correct or remove it.",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_wrong_files_are_refused_in_one_sentence(text: str, write_config: Write) -> None:
    path = write_config(text)
    error = run_in_process("cpu", "model", "out").exception
    assert str(error).startswith(f"{path}: ") and WRONG[text] in str(error) and error.exit_code == 2  # type: ignore[union-attr]


def test_unreadable_files_are_refused_in_plain_words(write_config: Write) -> None:
    path = write_config("")
    path.write_bytes(b"\xff")
    not_text = run_in_process("cpu", "model", "out").exception
    path.unlink()
    path.mkdir()
    directory = run_in_process("cpu", "model", "out").exception
    assert str(not_text) == f"{path}: cannot be read (it is not UTF-8); correct or remove it."
    assert str(directory) == f"{path}: cannot be read (Is a directory); correct or remove it."


def test_the_refusal_and_a_wrong_variable_end_the_command(write_config: Write, cli: Any) -> None:
    path = write_config("[cpu]\nthreads = 'many'")
    assert cli("cpu", "model", "out", code=2).stderr.startswith(f"ktconvert: {path}: [cpu] threads: 'many' ")
    assert cli("version", code=0).stderr == ""
    path.write_text("[cpu")
    for words in (("version",), ("doctor",), ("cpu", "--help"), ("help", "cpu"), ("--help",)):
        result = cli(*words, code=0)
        assert result.stdout and (words == ("--help",) or f"warning: {path}: cannot be read (" in result.stderr)
    path.unlink()
    result = cli("cpu", "model", "out", env={"KTCONVERT_CPU_THREADS": "many"}, code=2)
    assert "'KTCONVERT_CPU_THREADS'" in result.stderr and "'many'" in result.stderr


def test_an_error_names_where_an_option_was_set(write_config: Write, example: Path, tmp_path: Path, cli: Any) -> None:
    """The message names an option that the user has not typed."""
    arguments = ("cpu", example, tmp_path / "out")
    end = "(--layers is set by KTCONVERT_CPU_LAYERS).\n"
    assert cli(*arguments, env={"KTCONVERT_CPU_LAYERS": "99"}, code=3).stderr.endswith(end)
    path = write_config("[cpu]\nlayers = 99")
    assert cli(*arguments, code=3).stderr.endswith(f"(--layers is set by {path}).\n")
    assert cli(*arguments, "--layers", 98, code=3).stderr.endswith("layers with experts: 0-1.\n")


def test_mistyped_variables_get_a_warning(write_config: Write, cli: Any) -> None:
    """Variables of other commands, and those that resemble none of ours, belong to others."""
    wrong = {"KTCONVERT_VERSION_JSONN": "1", "KTCONVERT_NUMAA": "2"}
    result = cli("version", env={**wrong, "KTCONVERT_CPU_THREDS": "1", "KTCONVERT_GOLDEN": "1", "KTCONVERT_HOST": "a"})
    first = "KTCONVERT_NUMAA: no environment variable has this name; did you mean KTCONVERT_NUMA?"
    second, *others = result.stderr.splitlines()[1:]
    assert result.stderr.startswith(f"warning: {first}\n") and others == []
    assert second.startswith("warning: KTCONVERT_VERSION_JSONN: no environment variable has this name; see ")
    result = cli("cpu", "model", "out", env={"KTCONVERT_CPU_THREDS": "1"}, code=5)
    assert (
        "KTCONVERT_CPU_THREDS: no environment variable has this name; did you mean KTCONVERT_CPU_THREADS?"
        in result.stderr
    )


def test_a_wrong_flag_is_explained(cli: Any) -> None:
    message = cli("cpu", "model", "out", env={"KTCONVERT_CPU_OVERWRITE": "maybe"}, code=2).stderr
    assert "'KTCONVERT_CPU_OVERWRITE'): 'maybe' is not a flag; give 1 or 0; see `ktconvert cpu --help`." in message


def test_a_variable_of_an_option_without_one_gets_a_warning(cli: Any) -> None:
    result = cli("cpu", "model", "out", env={"KTCONVERT_CPU_INPUT": "other", "KTCONVERT_CPU_JSON": "1"}, code=5)
    assert result.stderr.splitlines()[:2] == [
        f"warning: KTCONVERT_CPU_{option.upper()}: no environment variable sets --{option}; give it on the command line."
        for option in ("input", "json")
    ]


def test_options_are_completed_with_a_wrong_file(write_config: Write) -> None:
    write_config("[cpu")
    shell = ShellComplete(group, {}, "ktconvert", "_KTCONVERT_COMPLETE")
    assert [item.value for item in shell.get_completions(["cpu"], "--quant")] == ["--quant-method"]


def test_resume_keeps_the_options_of_the_first_run(
    tmp_path: Path, write_config: Write, cli: Any, example: Path, packed_example: Any
) -> None:
    """Neither the conversion's variables and tables, nor the limits in [all], change an output that was begun."""
    write_config("[cpu]\nquant-method = 'int8'\n[all]\nmax-memory = '2GiB'")
    out = tmp_path / "out"
    cli("cpu", example, out, "--part", "0/2", env={"KTCONVERT_CPU_NUMA": "1"})
    write_config("[cpu]\nquant-method = 'bf16'\nnuma = 2\n[all]\nmax-memory = '3GiB'\nthreads = 1")
    env = {"KTCONVERT_CPU_SCALE": "mse", "KTCONVERT_CPU_LAYERS": "0", "KTCONVERT_NUMA": "2"}
    assert read_settings("resume", str(out))["max_memory"] is None
    cli("resume", out, "--executor", "threads", env=env)
    assert read_folder(out) == read_folder(packed_example("int8"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_names_the_variable_of_each_option(name: str, write_config: Write) -> None:
    path = write_config("[all]\nthreads = 7")
    command = get_command(name)
    text = " ".join(run_in_process(name, "--help-all").output.split())
    variables = [parameter.envvar for parameter in command.params if parameter.envvar is not None]
    assert all(f"[env var: {variable}" in text for variable in variables)
    assert len(variables) == len({*variables})
    assert (f"thenfrom[{name}]in{path}." in text.replace(" ", "")) == bool(variables)
    has_threads = f"KTCONVERT_{name.upper().replace('-', '_')}_THREADS" in variables
    assert has_threads == ("default: 7]" in text)
    assert "env var" not in run_in_process(name, "--help").output


def test_doctor_names_the_file(tmp_path: Path, write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_CONFIG_HOME is ignored, as the XDG specification says."""

    def read_line() -> str:
        lines = run_in_process("doctor", "--disk", tmp_path).output.splitlines()
        return next(line for line in lines if line.startswith("config file"))

    assert read_line().endswith(" none")
    path = write_config("[all]\nthreads = 1")
    assert read_line().endswith(f" {path}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_line().endswith(" none")
    (tmp_path / ".config").symlink_to(tmp_path / "config")
    assert read_line().endswith(f" {tmp_path}/.config/ktconvert/config.toml")
