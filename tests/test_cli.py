"""The command line with the spellings of kt-kernel's scripts: its output, and where each part of it is printed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ktconvert.layouts.errors import UsageError
from ktconvert.native_quant import machine
from ktconvert.pipeline import __version__
from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.cli.command import Command
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import Option, option_fields
from ktconvert.pipeline.plans.commands import make_options, make_plan
from rig import conversion, stored
from rig.calibrated import HELDOUT
from rig.conversion import SENTENCE_ENDS
from rig.safetensors import edit_file, read_folder


def test_options_accept_underscores_and_capitals(tmp_path: Path, cli: Any, example: Path, read_tree: Any) -> None:
    cli("cpu", "-i", example, "-o", tmp_path / "a", "--quant-method", "int8", "--threadpool-count", 1)
    options = ("--Output", tmp_path / "b", "--QUANT_METHOD", "INT8", "--threadpool_count", 1, "--input-type", "BF16")
    result = cli("CPU", "--input_path", example, *options, "--LAYERS", "ALL", "--EXECUTOR", "Threads:1", "-q")
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")
    assert result.stdout == result.stderr == ""  # -q


def test_ignored_options_give_a_note(tmp_path: Path, cli: Any, example: Path) -> None:
    flags = ("--gpu", "--fp8-expert-batch 4", "--profile", "--threads 4096")
    result = cli("cpu", "-i", example, "-o", tmp_path / "a", *" ".join(flags).split())
    for flag in flags:
        assert f"note: {flag.removesuffix(' 4')}" in result.stderr


def test_options_without_effect_are_noted_without_verbose(tmp_path: Path, cli: Any, example: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one line")
    quiet = {"KTCONVERT_CPU_VERBOSE": "0", "KTCONVERT_VERIFY_VERBOSE": "0"}
    assert "note: --stream has no effect: " in cli("cpu", example, tmp_path / "a", "--stream", env=quiet).stderr
    assert "note: --text has no effect: " in cli("verify", tmp_path / "a", "--text", text, env=quiet).stderr


def test_methods_may_have_the_names_of_formats(tmp_path: Path, cli: Any, example: Path) -> None:
    for name, method in (("AMXINT8", "AMXINT8"), ("int8", "AMXINT8"), ("AMXINT4", "AMXINT4"), ("Mxfp4", "MXFP4")):
        plan = cli("cpu", example, tmp_path / "a", "--quant-method", name, "--dry-run").stdout
        assert re.search(rf"^method +{method}$", plan, re.MULTILINE), plan


def test_capped_threads_are_noted_without_verbose(tmp_path: Path, cli: Any, example: Path) -> None:
    result = cli("cpu", "-i", example, "-o", tmp_path / "a", "--threads", 100_000, env={"KTCONVERT_CPU_VERBOSE": "0"})
    assert "note: --threads 100000 is capped at the" in result.stderr and re.search("more notes?: -v", result.stderr)


def test_each_option_without_effect_is_noted(tmp_path: Path, cli: Any, example: Path) -> None:
    ignored = ("--gpu", "--profile", "--fp8-expert-batch")
    stderr = cli("cpu", example, tmp_path / "a", *ignored, 4).stderr
    assert all(f"note: {option} is accepted for compatibility with kt-kernel" in stderr for option in ignored)


def test_notes_are_only_events_with_json(tmp_path: Path, cli: Any, example: Path) -> None:
    result = cli("cpu", "-i", example, "-o", tmp_path / "a", "--gpu", "--json", "--dry-run")
    assert '{"event": "note", "text": "--gpu is accepted' in result.stdout and result.stderr == ""


def test_json_leaves_stderr_to_errors_warnings_and_progress(tmp_path: Path, cli: Any, example: Path) -> None:
    for command in (
        ("cpu", "-i", example, "-o", tmp_path / "a"),
        ("cpu", "-i", example, "-o", tmp_path / "a"),  # nothing to do
        ("verify", tmp_path / "a", "--threads", 4096, "--report", tmp_path / "a.html"),
    ):
        result = cli(*command, "--json")
        assert [line for line in result.stderr.splitlines() if " %  " not in line] == []
    assert any("--threads 4096" in note for note in json.loads(result.stdout)["notes"])


@pytest.mark.parametrize("options", [(), ("--overwrite",), ("--dry-run",), ("--executor", "nonsense")])
def test_refused_options_give_an_error_without_notes(tmp_path: Path, options: Any, cli: Any, example: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    result = cli("cpu", "-i", example, "-o", tmp_path, "--gpu", *options, code=None)
    assert result.returncode in (2, 7) and len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize("method", ["awq", "moe_int4", "MOE_INT8", "w4a16"])
def test_methods_that_are_not_for_the_cpu_are_refused(method: str, tmp_path: Path, cli: Any, example: Path) -> None:
    result = cli("cpu", "-i", example, "-o", tmp_path / "a", "--quant-method", method, code=3)
    assert method != "w4a16" or "`ktconvert gpu --quant-type`" in result.stderr
    assert "int4 (AMXINT4), int8 (AMXINT8), " in result.stderr


def test_a_method_that_is_always_refused_is_not_offered(tmp_path: Path, cli: Any) -> None:
    offered = next(line for line in read_help("cpu") if "--quant-method [" in line)
    assert "int4" in offered and "awq" not in offered
    assert "awq" not in cli("cpu", "-i", "a", "-o", "b", "--quant-method", "awk", code=2).stderr


def test_choices_are_printed_as_the_docs_write_them(tmp_path: Path, cli: Any, example: Path) -> None:
    assert "'moe_int4', 'moe_int8'" in cli("cpu", "-i", "a", "-o", "b", "--quant-method", "moe", code=2).stderr
    options = ("-i", example, "-o", tmp_path / "out", "--layout", "plain", "--dry-run", "--json")
    plan = json.loads(cli("cpu", *options, "--quant-method", "MOE-INT4").stdout.splitlines()[-1])
    assert plan["settings"]["quant_method"] == "moe_int4"


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, cli: Any, example: Path) -> None:
    out = tmp_path / "out"
    result = cli("cpu", "-i", example, "-o", out, "--dry-run")
    assert re.search(r"source -> experts: .* 2 units, 2 to run", result.stdout)
    assert "experts -> assemble" in result.stdout
    assert result.stderr.count("note: ") > 1 and "more note" not in result.stderr
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(cli("cpu", "-i", example, "-o", out, "--dry-run", "--json").stdout.splitlines()[-1])
    assert [u["unit"] for u in plan["units"]] == ["experts.layer-000", "experts.layer-001"]
    assert all(not u["done"] and u["reason"] == "not made yet" for u in plan["units"])
    assert plan["bytes_in"] == 2 * 8 * 3 * 256 * 256 * 2
    cli("cpu", "-i", example, "-o", out)
    assert "nothing to do" in cli("cpu", "-i", example, "-o", out, "--dry-run").stdout
    assert "nothing to do" in cli("cpu", "-i", example, "-o", out).stderr
    assert "nothing to do" in cli("resume", out).stderr
    cli("cpu", "-i", example, "-o", out, "--quant-method", "int8", "--dry-run", code=7)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["cpu"], 2),
        (["cpu", "-i", "{example}", "-o", "{out}", "--quant-method", "int5"], 2),
        (["cpu", "-i", "{example}", "-o", "{out}", "--no-merge-safetensor", "--non-experts", "copy"], 2),
        (["cpu", "-i", "{out}/missing", "-o", "{out}"], 5),
        (["merge", "-i", "{example}", "-o", "{out}"], 5),
        (["cpu", "-i", "{example}", "-o", "{out}", "--input-type", "fp8"], 5),
        (["resume", "{out}"], 5),
        (["cpu", "-i", "{example}", "-o", f"{__file__}/x", "-q"], 7),
        (["cpu", "-i", "{example}", "-o", f"{__file__}/x", "-q", "--dry-run"], 7),
        (["nonsense"], 2),
        (["cpu", "--threads", "many"], 2),
    ],
)
def test_refusals_print_one_sentence(arguments: list[str], code: int, tmp_path: Path, cli: Any, example: Path) -> None:
    result = cli(*[a.format(example=example, out=tmp_path / "out") for a in arguments], code=code)
    assert result.stdout == ""
    assert result.stderr.startswith("ktconvert: ") and result.stderr.count("\n") == 1
    assert result.stderr.rstrip().endswith(SENTENCE_ENDS)
    assert not (tmp_path / "out").exists()


def test_version_and_help_print_versions_and_commands(cli: Any) -> None:
    lines = cli("version").stdout.splitlines()
    first_words = ["ktconvert", "Python", "platform", "build", "instruction", "torch", "kt-kernel"]
    assert [line.split()[0] for line in lines] == first_words
    assert cli("--version").stdout.splitlines() == cli("-V").stdout.splitlines() == lines[:1]
    versions = json.loads(cli("version", "--json").stdout)
    assert f"ktconvert {versions['ktconvert']}" == lines[0] and versions["build"]["compiler"] in lines[3]
    assert versions["instruction_sets"]["built"][0] == versions["instruction_sets"]["available"][0] == "scalar"
    assert versions["instruction_sets"]["in_use"] in versions["instruction_sets"]["available"]
    assert "130/143" in cli("--help").stdout
    for command in ("cpu", "merge", "resume", "verify", "inspect", "doctor"):
        assert "Examples:" in cli(command, "--help").stdout, command


def test_hub_id_resolves_to_the_local_cache(tmp_path: Path, cli: Any, example: Path) -> None:
    repo, commit = tmp_path / "hub" / "models--org--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(example, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    assert "ktconvert cpu -i org/tiny -o tiny-AMXINT4" in cli("inspect", "org/tiny", env=env).stdout
    cli("cpu", "-i", "org/tiny", "-o", tmp_path / "out", "--revision", commit, env=env)
    assert "base_model: org/tiny" in (tmp_path / "out" / "README.md").read_text()
    cli("cpu", "-i", example, "-o", tmp_path / "local")
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "local")
    assert "HF_HUB_OFFLINE" in cli("cpu", "-i", "org/absent", "-o", tmp_path / "x", env=env, code=5).stderr


def test_arch_file_describes_an_unknown_architecture(
    tmp_path: Path, cli: Any, example: Path, packed_example: Any
) -> None:
    source = stored.model(example, tmp_path / "in", "BF16")
    stored.configure(source, model_type="mine", architectures=["Mine"])

    def rename(tensors: Any) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            new = re.sub(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w)\w*_proj.*", r"net.\1.moe.\2.\3", name)
            tensors[new] = tensors.pop(name)

    edit_file(source / "model.safetensors", rename)
    cli("cpu", "-i", source, "-o", tmp_path / "x", "--threadpool-count", 1, code=3)
    row = tmp_path / "mine.toml"
    names = [f'{part} = "net.{{layer}}.moe.{{expert}}.{part[0]}"' for part in ("gate", "up", "down")]
    row.write_text("\n".join(['name = "Mine"', 'matches = ["mine"]', "[[stored]]", 'style = "separate"', *names]))
    cli("cpu", "-i", source, "-o", tmp_path / "out", "--threadpool-count", 1, "--arch-file", row)
    cli("verify", tmp_path / "out", "--against", source, "--arch-file", row)
    assert read_folder(tmp_path / "out") == read_folder(packed_example("int4", 1))


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_do_not_import_numpy(option: str) -> None:
    program = (
        "import sys; from ktconvert.pipeline.cli import main\n"
        f"sys.argv = ['ktconvert', {option!r}]\n"
        "try: main()\n"
        "finally: print('numpy' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "False\n") and "ktconvert" in result.stdout


def get_command(name: str) -> Command:
    command = group.get_command(click.Context(group), name)
    assert isinstance(command, Command)
    return command


def test_python_m_ktconvert_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ktconvert", "version"], capture_output=True, text=True)
    assert done.stdout.startswith(f"ktconvert {__version__}\n") and done.returncode == 0


def read_help(name: str, flag: str = "--help") -> list[str]:
    """Return the lines that a command's help prints on a terminal of 80 columns."""
    return CliRunner().invoke(group, [name, flag], terminal_width=80).output.splitlines()


def test_help_is_printed_without_a_command_and_after_the_word_help(cli: Any) -> None:
    shown = cli("--help").stdout
    assert cli("help").stdout == shown
    result = cli(code=2)
    assert (result.stdout, result.stderr) == ("", shown)
    assert cli("help", "verify").stdout == cli("verify", "--help").stdout
    assert "Did you mean 'verify'" in cli("help", "verfy", code=2).stderr
    assert cli("help", "cpu", "x", "y", code=2).stderr == "ktconvert: help describes one command; leave out x, y.\n"
    assert cli("help", "cpu", "--help-all").stdout == cli("cpu", "--help-all").stdout


def test_help_all_prints_all_options_of_all_commands(cli: Any) -> None:
    shown = cli("--help-all").stdout
    assert shown.startswith(cli("--help").stdout)
    assert all(cli(name, "--help-all").stdout in shown for name in ("cpu", "run", "version"))


def test_default_number_of_slices_fits_machine_and_model(
    tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model allows 1 and 2 slices for int4."""

    def plan_slices() -> int:
        plan = make_plan(make_options("cpu", input=example, output=tmp_path / "out"))
        assert plan.facts["numa"] == plan.options.settings["numa"]
        return plan.facts["numa"]

    for nodes, slices in ((1, 1), (2, 2), (3, 2), (6, 2)):
        monkeypatch.setenv("KTCONVERT_NUMA", str(nodes))
        assert plan_slices() == slices
    monkeypatch.delenv("KTCONVERT_NUMA")
    assert plan_slices() <= machine.pool_count()
    monkeypatch.setenv("KTCONVERT_NUMA", "0")
    with pytest.raises(UsageError, match="KTCONVERT_NUMA: '0'"):
        plan_slices()


@pytest.mark.parametrize("name", CONVERSION_OPTIONS)
def test_every_conversion_has_the_same_names(name: str) -> None:
    flags = {flag for parameter in get_command(name).params for flag in parameter.opts}
    assert {"-i", "--input", "-o", "--output", "--threads", "--cpuinfer-threads"} <= flags


def test_input_and_output_need_no_flags(tmp_path: Path, cli: Any, example: Path, read_tree: Any) -> None:
    """Positional arguments stand for the missing ones of -i and -o; too few or too many are an error."""
    lines = ([example, tmp_path / "a"], ["-i", example, tmp_path / "b"], ["-o", tmp_path / "c", example])
    for line in lines:
        cli("cpu", *line, "--numa", 1, "--layers", 0, "-q")
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b") == read_tree(tmp_path / "c")
    cli("resplit", tmp_path / "a", "-o", tmp_path / "d", "--numa", 2, "-q")
    given = ["-i", example, "-o", tmp_path / "e"]
    for line, twice in (
        ([*given, tmp_path / "f"], "MODEL or OUT"),
        ([*given, tmp_path / "e"], "OUT"),
        ([*given, example], "MODEL"),
        ([*given[:2], f"{example}/"], "MODEL"),
        ([*given[:2], example, tmp_path / "e"], "MODEL"),
    ):
        assert f"ktconvert: {twice} is given twice" in cli("cpu", *line, code=2).stderr


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("cpu", "MODEL"),
        ("cpu MODEL", "OUT"),
        ("verify", "OUTPUT"),
        ("experts", "COUNTS"),
        ("merge-adapter MODEL OUT", "--adapter PATH"),
        ("resplit OLD NEW", "--numa N"),
        ("models --check", "the value of --check"),
        ("cpu MODEL OUT --quant-method", "the value of --quant-method"),
        ("cpu MODEL -o --threads 2", "the value of -o"),
        ("cpu --input --quant_method=int8 OUT", "the value of -i"),
        ("run MODEL", "--prompt TEXT or --chat"),
    ],
)
def test_missing_arguments_have_one_message(line: str, missing: str, cli: Any) -> None:
    words = line.split()
    remedy = f"add it, as `ktconvert {words[0]} --help` shows"
    assert cli(*words, code=2).stderr == f"ktconvert: {missing} is missing; {remedy}.\n"


def test_swapped_input_and_output_are_recognized(tmp_path: Path, cli: Any, example: Path, packed_example: Any) -> None:
    for first in (tmp_path / "new", packed_example("int8", 1)):
        for more in ((), ("--overwrite", "--delete-others")):
            message = "is not a model, but examples/qwen3-moe-small is one; give the model first, then the output.\n"
            assert cli("cpu", first, example, *more, code=5).stderr.endswith(message)


def test_a_second_input_or_output_is_an_error(tmp_path: Path, cli: Any, example: Path) -> None:
    result = cli("cpu", "-i", example, "-o", tmp_path / "a", "--output", tmp_path / "b", code=2)
    assert "-o is given 2 times" in result.stderr and list(tmp_path.iterdir()) == []
    cli("cpu", "-i", example, "--input-path", example, "-o", tmp_path / "a", code=2)


@pytest.mark.parametrize("line", ["verfy", "convert a b", "cpu --quant-metod int8"])
def test_wrong_names_suggest_the_right_one(line: str, cli: Any) -> None:
    assert re.search(r"Did you mean.*'(verify|cpu|--quant-method)'", cli(*line.split(), code=2).stderr)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cup", "No such command 'cup'. Did you mean 'up' or 'cpu'?"),
        ("frobnicate", "No such command 'frobnicate'; see `ktconvert --help`."),
        (
            "-v",
            "No such option '-v'; give the options of a command after its name, and -V or --version for the version.",
        ),
        ("-v verify OUT", "No such option '-v'; give the options of a command after its name, and -V"),
        ("models Makefile", "Invalid value for 'FOLDERS': Makefile is a file; give a folder; see"),
        (
            "run MODEL --prompt x --temperature -1",
            "Invalid value for '--temperature': must be at least 0, not -1.0; see",
        ),
        (
            "train MODEL OUT --learning-rate 0",
            "Invalid value for '--learning-rate': must be greater than 0, not 0; see",
        ),
        ("fit MODEL --bandwidth 0", "Invalid value for '--bandwidth': must be greater than 0, not 0; see"),
        ("train MODEL OUT --dropout 2", "Invalid value for '--dropout': must be from 0 to 0.99, not 2.0; see"),
    ],
)
def test_wrong_words_are_explained(line: str, message: str, cli: Any) -> None:
    assert cli(*line.split(), code=2).stderr.startswith(f"ktconvert: {message}")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("run MODEL OUT --prompt x", r"extra argument \(OUT\); give converted experts as --cpu-weights OUT\.$"),
        ("verify OUT MODEL", r"extra argument \(MODEL\); give the model or output to compare with as --against\.$"),
        (
            "cpu MODEL OUT --resume",
            r"'--resume'; run the same command again, or `ktconvert resume OUT`: an interrupted",
        ),
        ("serve --model MODEL", r"'--model'; give the model as the first argument, without an option\.$"),
        ("eval MODEL --max-tokens 5", "Did you mean '?--max-sequences"),
        (
            "cpu MODEL OUT --quant-type W4A16",
            r"'--quant-type', which `ktconvert gpu` has. Did you mean '--quant-method'\?$",
        ),
        ("cpu MODEL OUT --method int8", "Did you mean '?--quant-method"),
        ("gpu MODEL OUT --method RTN", "Did you mean '?--quant-method"),
        ("cpu MODEL OUT --force", "Did you mean '?--overwrite"),
        ("cpu MODEL OUT --quant int4", r"Did you mean '--quant-method'\?$"),
        ("gpu MODEL OUT --quant RTN", r"Did you mean '--quant-method' or '--quant-type'\?$"),
        ("cpu MODEL OUT --s 1", r"No such option '--s'; see `ktconvert cpu --help`\.$"),  # many begin with it
        ("--vers", r"Did you mean '--version'\?$"),
        ("train MODEL OUT --random-seed 1", "Did you mean '?--seed"),
        ("train MODEL OUT --text x", "'--text', which `ktconvert cpu` has. Did you mean '--dataset'"),
        ("train MODEL OUT --lr 1", "Did you mean '?--learning-rate"),
        ("run MODEL --dampening-frac 1", "No such option '--dampening-frac': it is one of `ktconvert cpu`, `gpu`.$"),
        (
            "run MODEL --json",
            "No such option '--json': it is one of `ktconvert fit`, `inspect`, `models`, `cpu` and others.$",
        ),
        ("run MODEL --nonsense", "No such option '--nonsense'; see `ktconvert run --help`.$"),
        ("cpu MODEL OUT --group-size 32", "No such option '--group-size': it is one of `ktconvert gpu`.$"),
    ],
)
def test_arguments_of_other_commands_give_a_hint(line: str, hint: str, cli: Any) -> None:
    assert re.search(hint, cli(*line.split(), code=2).stderr)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("train {example} OUT --dataset x --epochs 2 --max-steps 3", "--epochs and --max-steps"),
        ("cpu {example} OUT -q -v", "--quiet and --verbose"),
        ("verify {example} -v -q", "--quiet and --verbose"),
        ("cpu {example} OUT --imatrix {example} --statistics {example}", "--imatrix and --statistics"),
    ],
)
def test_contradicting_options_are_refused(line: str, options: str, example: Path, cli: Any) -> None:
    expected = f"ktconvert: {options} exclude each other; give one of them.\n"
    assert cli(*line.format(example=example).split(), code=2).stderr == expected


def test_every_option_that_differs_is_named(tmp_path: Path, cli: Any, example: Path) -> None:
    """Options that belong only to a different choice, such as those of GPTQ, count if they are given."""
    words = ("cpu", example, tmp_path / "out", "-q")
    cli(*words, "--layers", 1, "--equalize")
    named = "(--equalize was given, is not given; --layers was 1, is all);"
    assert named in cli(*words, code=7).stderr
    words = (*words, "--scale", "gptq", "--dampening-frac", 0.2, "--dataset", HELDOUT)
    assert "(--dampening-frac was not given, is 0.2; " in cli(*words, code=7).stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_errors_name_a_full_standard_output(unbuffered: str, example: Path) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [*conversion.KTCONVERT, "inspect", str(example)], env=env, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 4
    assert re.fullmatch(r"ktconvert: standard output: No space left on device; .*\n", result.stderr)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_has_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")  # a long path, which the help shows
    lines = read_help(name)
    assert len(lines) <= 60 and max(map(len, lines)) <= 80, lines
    assert any(line.startswith(f"    ktconvert {name}") for line in lines[lines.index("  Examples:") :])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_lists_every_option_once_and_ignored_ones_last(name: str) -> None:
    command = get_command(name)
    lines = read_help(name, "--help-all")
    assert max(map(len, lines)) <= 80
    heads = [line.split("  ")[1] for line in lines if re.match(r"  ([A-Z]+, )?-", line)]
    listed = [flag for head in heads for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", head)]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert sorted(["--help-all", *listed]) == sorted(
        flag for each in options for flag in each.opts + each.secondary_opts
    )
    declared = [each.declaration for each in option_fields(command.settings) if isinstance(each.declaration, Option)]
    headings = [line for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert not any(each.ignored for each in declared) or headings[-1] == "Ignored options of kt-kernel:"


def test_words_are_shown_as_they_are_written_in_help_and_messages(cli: Any) -> None:
    assert "--quant-type [W4A16|W8A16]" in " ".join(cli("gpu", "--help").stdout.split())
    assert "'int4' is not one of 'W4A16', 'W8A16'" in cli("gpu", "a", "b", "--quant-type", "int4", code=2).stderr


def test_data_sets_and_texts_have_the_same_options(tmp_path: Path, cli: Any, example: Path) -> None:
    text = tmp_path / "absent.txt"
    for command in ("calibrate", "gpu"):
        assert f"{text}: does not exist; " in cli(command, example, tmp_path / "o", "--text", text, code=5).stderr
    assert f"{text}: does not exist" in cli("eval", example, "--gpu-weights", example, "--dataset", text, code=5).stderr
