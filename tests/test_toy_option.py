"""An option of `ktconvert cpu` that is made up, whole in this file: one field of its settings, and one row of the table
of commands. Help, types, plan.json, fingerprints, manifest and resume follow.
"""

import json

import msgspec
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.pipeline.cli import conversion as cli_cpu
from ktconvert.pipeline.cli import group
from ktconvert.pipeline.cli.command import Command
from ktconvert.pipeline.engine.existing import read_plan
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS, CpuOptions
from ktconvert.pipeline.options.declare import weights_option, with_values
from ktconvert.pipeline.options.types import Integer
from ktconvert.pipeline.plans.commands import make_options, make_plan, restore_options


class ToyOptions(CpuOptions):
    """Settings of `ktconvert cpu`, and one more."""

    toy: int = weights_option("Integer of toys.", Integer(min=1), default=3)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERSION_OPTIONS, "cpu", ToyOptions)  # type: ignore[misc]  # its type says Mapping
    monkeypatch.setattr(cli_cpu, "cpu", Command("cpu", ToyOptions, cli_cpu.cpu.function))


def ktconvert(*words: object) -> Result:
    return CliRunner().invoke(group, ["cpu", *map(str, words)])


def test_help_lists_the_option_and_values_are_checked():
    shown = " ".join(ktconvert("--help").output.split())
    assert "--toy N Integer of toys. [default: 3]" in shown
    result = ktconvert("-i", "a", "-o", "b", "--toy", 0)
    assert result.exit_code == 2 and "--toy" in result.output


def test_different_values_have_different_fingerprints(example, tmp_path):
    plans = [make_plan(make_options("cpu", input=example, output=tmp_path / "out", toy=toy)) for toy in (3, 3, 4)]
    three, again, four = ([unit.fingerprint for unit in plan.units] for plan in plans)
    assert three == again and not set(three) & set(four) and plans[2].document().settings["toy"] == 4


def test_manifest_records_the_value_and_resume_compares_it(example, tmp_path):
    out = tmp_path / "out"
    assert ktconvert("-q", "-i", example, "-o", out, "--layers", 0, "--toy", 5).exception is None
    assert json.loads((out / "manifest.json").read_bytes())["settings"]["toy"] == 5
    refused = ktconvert("-q", "-i", example, "-o", out, "--layers", 0).exception
    assert isinstance(refused, OutputError) and "--toy was 5, is 3" in str(refused)


def test_saved_plan_restores_the_value(example, tmp_path):
    out = tmp_path / "out"
    paths = locate(out)
    paths.root.mkdir()
    document = make_plan(make_options("cpu", input=example, output=out, toy=7)).document()
    paths.plan.write_bytes(msgspec.json.encode(document))
    saved = read_plan(paths)
    assert saved is not None and restore_options(out, saved).settings["toy"] == 7
    damaged = json.loads(paths.plan.read_bytes())
    damaged["settings"]["toy"] = "many"
    paths.plan.write_bytes(json.dumps(damaged).encode())
    saved = read_plan(paths)
    assert saved is not None
    with pytest.raises(OutputError, match="toy must be an int, not 'many'"):
        restore_options(out, saved)


def test_api_checks_names_and_values(tmp_path):
    for wrong, words in (({"toys": 1}, "unknown option toys"), ({"toy": 0}, "toy"), ({"scale": "no"}, "scale")):
        with pytest.raises(UsageError, match=words):
            make_options("cpu", input="a", output=tmp_path, **wrong)


def test_with_values_rejects_misspelt_names():
    options = make_options("cpu", input="a", output="b")
    for wrong in ({"toys": 1}, {"gptq": 1}):
        with pytest.raises(TypeError, match=f"ToyOptions has no option {next(iter(wrong))}"):
            with_values(options, **wrong)
    assert with_values(options, toy=4, revision="x").settings["toy"] == 4
