"""Tests of the public names of `import ktconvert`. Each example of its docstring runs.

`python tests/test_api.py` writes the generated types of keyword arguments, pipeline/options/arguments.py.
"""

from __future__ import annotations

import doctest
import importlib.metadata
import importlib.resources
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_overloads

import pytest

import ktconvert
from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import REQUIRED, Option, OptionField, Options, option_fields
from ktconvert.pipeline.options.option_groups import Reporting
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.options.types import ChoiceList, PathOrHubId, Size
from rig import conversion

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = ROOT / "pipeline" / "options" / "arguments.py"
COMMAND_LINE_ONLY = {"executor", "executor_timeout", "dry_run"}  # Python passes an Executor, and plan is a dry run
# Options of verify that its function has not: it returns the report, and the output is its first argument
PRINTING = {"output", "report", "run", *(each.name for each in option_fields(Reporting))}
HEAD = '''"""Types of the keyword arguments of ktconvert.plan, ktconvert.convert and ktconvert.verify.

Written by `python tests/test_api.py` from the declarations of the options; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, Required, TypeAlias, TypedDict, TypeVar

Word = TypeVar("Word")
OneOrSeveral: TypeAlias = Word | Sequence[Word]  # several words make several outputs
'''


def argument_type(option_field: OptionField) -> str:
    """Return the annotation of an option's keyword argument."""
    if words := getattr(option_field.click_type, "choices", ()):
        return write_choice(option_field, words)
    if option_field.value_type is Path or isinstance(option_field.click_type, PathOrHubId):
        text = "str | PathLike[str]"
    elif option_field.value_type is tuple:
        text = f"Sequence[{get_args(option_field.annotation)[0].__name__}]"
    else:
        text = option_field.value_type.__name__
    text += " | str" if isinstance(option_field.click_type, Size) else ""
    text += " | None" if option_field.default is None else ""
    return f"Required[{text}]" if option_field.default is REQUIRED else text


def write_choice(option_field: OptionField, words: Sequence[str]) -> str:
    """Return the annotation of a choice, as ruff formats it."""
    items = [f'"{word}"' if option_field.value_type is str else word for word in words]
    items += ["None"] if option_field.default is None else []
    text = f"Literal[{', '.join(items)}]"
    if len(text) > 100:
        text = "\n".join(["Literal[", *(f"        {item}," for item in items), "    ]"])
    return f"OneOrSeveral[{text}]" if isinstance(option_field.click_type, ChoiceList) else text


def list_arguments(cls: type[Options], excluded: Collection[str] = COMMAND_LINE_ONLY) -> list[str]:
    """Return the line of a TypedDict for each option of a command."""
    return [
        f"    {option_field.name}: {argument_type(option_field)}\n"
        for option_field in option_fields(cls)
        if isinstance(option_field.declaration, Option) and option_field.name not in excluded
    ]


def write_arguments() -> str:
    """Return the text of pipeline/options/arguments.py: a TypedDict for each command, and one for what all have."""
    by_command = {command: list_arguments(cls) for command, cls in CONVERSION_OPTIONS.items()}
    first, *others = by_command.values()
    common = [line for line in first if all(line in lines for lines in others)]

    def write_class(name: str, base: str, title: str, lines: list[str]) -> str:
        return f'\n\nclass {name}({base}, total=False):\n    """{title}"""\n\n{"".join(lines)}'

    text = HEAD + write_class("CommonArguments", "TypedDict", "Options of every command.", common)
    for command, lines in by_command.items():
        name = f"{CONVERSION_OPTIONS[command].__name__.removesuffix('Options')}Arguments"
        own = [line for line in lines if line not in common]
        text += write_class(name, "CommonArguments", f"Options of `ktconvert {command}`.", own)
    checks = list_arguments(VerifyOptions, COMMAND_LINE_ONLY | PRINTING)
    return text + write_class("VerifyArguments", "TypedDict", "Options of `ktconvert verify`.", checks)


def test_types_of_keyword_arguments_follow_from_the_options() -> None:
    assert ARGUMENTS.read_text() == write_arguments(), "run `python tests/test_api.py`"
    hints = get_overloads(ktconvert.plan), get_overloads(ktconvert.convert)
    for overloads in hints:
        assert [str(inspect.signature(each).parameters["command"].annotation) for each in overloads] == [
            f"Literal[{command!r}]" for command in CONVERSION_OPTIONS
        ]


def test_plans_and_reports_print_a_few_lines(tmp_path: Path, example: Path) -> None:
    output = tmp_path / "out"
    (plan,) = ktconvert.plan("cpu", input=example, output=output, quant_method="int8")
    assert repr(plan).startswith(f"Plan(options=CpuOptions(input={str(example)!r}, output={output!r}, quant_method=")
    ktconvert.convert("cpu", input=example, output=output, quant_method="int8")
    report = ktconvert.verify(output, against=example)
    for printed in (plan, plan.stages[0], plan.units[0], report):
        assert len(repr(printed)) < 1500
    assert report and report.ok
    conversion.flip_bit(next(output.glob("*.safetensors")), -5)
    assert not ktconvert.verify(output, full=True)


def test_progress_is_called_and_nothing_is_printed(
    tmp_path: Path, example: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int]] = []
    ktconvert.convert("cpu", input=example, output=tmp_path / "out", progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] > 0 and calls == sorted(calls)
    assert capfd.readouterr() == ("", "")


# Types of other packages take mypy half a minute, and no signature of ours needs them here.
MYPY_SETTINGS = """\
[mypy]
strict = True
mypy_path = build/ns
namespace_packages = True
explicit_package_bases = True
follow_imports = skip
[mypy-ktconvert.*]
follow_imports = silent
"""


def test_mypy_rejects_wrong_names_and_words(tmp_path: Path) -> None:
    if not (ROOT / "build" / "ns" / "ktconvert").exists():
        pytest.skip("needs `make types`")
    program = tmp_path / "program.py"
    calls = ('ktconvert.convert("cpu", input="model", output="out", {})', 'ktconvert.verify("out", {})')
    options = ('quant_method="int8"', 'quant_methd="int8"', 'quant_method="int9"')
    several = 'ktconvert.plan("cpu", input="model", output="out", quant_method=["int4", "int8"], max_memory="5GB")'
    program.write_text("\n".join(["import ktconvert", several, *(call.format(o) for o in options for call in calls)]))
    settings = tmp_path / "mypy.ini"
    settings.write_text(MYPY_SETTINGS)
    mypy = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", program]
    done = subprocess.run(mypy, capture_output=True, text=True, cwd=ROOT)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    lines = {line.split(":")[1] for line in errors}
    assert lines == {"5", "6", "7", "8"}, done.stdout + done.stderr


def test_docstring_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Path) -> None:
    """The bundled model is linked as `model`."""
    (tmp_path / "model").symlink_to(example)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(ktconvert, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0 and tried > 10


def test_every_name_is_documented() -> None:
    assert ktconvert.__all__ == sorted(ktconvert.__all__)
    assert ktconvert.__all__ == dir(ktconvert)
    for name in set(ktconvert.__all__) - {"__version__"}:
        assert getattr(ktconvert, name).__doc__, name


def test_every_class_has_the_same_capitals() -> None:
    """kt-kernel's KTMoEWrapper sets the pattern."""
    assert all(name.startswith("KT") for name in ktconvert.__all__ if isinstance(getattr(ktconvert, name), type))


def test_wrong_names_raise_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown command 'convert'; choose one of cpu, "):
        ktconvert.plan("convert")
    with pytest.raises(UsageError, match=r"unknown option ouput; did you mean output\?"):
        ktconvert.plan("cpu", input="model", ouput="out")
    with pytest.raises(UsageError, match=r"unknown option quant_methd; did you mean quant_method\?"):
        ktconvert.verify(tmp_path, quant_methd="int8")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="quant_method: 'int3' is not one of "):
        ktconvert.verify(tmp_path, quant_method="int3")  # type: ignore[typeddict-item]
    with pytest.raises(UsageError, match="unknown option report"):  # it returns the report
        ktconvert.verify(tmp_path, report="page.html")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"convert: name the arguments after the first, as in output='out'"):
        ktconvert.convert("model", "out")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"verify: name the arguments after the first, as in against='model'"):
        ktconvert.verify("out", "model")  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ktconvert.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method_map": "auto"}, "method_map: 'auto' is not a list of texts; give method_map=['auto']"),
        ({"max_memory": "lots"}, "max_memory: 'lots' is not a size like 5GB or 500MiB"),
        ({"max_memory": 5.5}, "max_memory: 5.5 is not a size like 5GB or 500MiB"),
        ({"threads": "many"}, "threads: 'many' is not a whole number"),
        ({"overwrite": "yes"}, "overwrite: 'yes' is not a bool"),
    ],
)
def test_wrong_values_raise_what_is_legal(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}\\.$"):
        ktconvert.plan("cpu", input="model", output="out", **wrong)


def test_convert_refuses_a_dry_run(tmp_path: Path, example: Path) -> None:
    with pytest.raises(UsageError, match="unknown option dry_run"):
        ktconvert.convert("cpu", input=example, output=tmp_path / "out", dry_run=True)  # type: ignore[call-overload]
    assert list(tmp_path.iterdir()) == []


def test_several_methods_and_sizes_are_lists_and_texts(tmp_path: Path, example: Path) -> None:
    methods: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
    plans = ktconvert.plan("cpu", input=example, output=tmp_path, quant_method=methods, max_memory="5GB")
    assert [plan.facts["method"] for plan in plans] == ["AMXINT8", "AMXINT4"]


def test_help_of_the_wrapper_shows_real_defaults() -> None:
    signature = str(inspect.signature(ktconvert.KTMoEWrapper))
    assert "object at 0x" not in signature and "weight_path: 'str' = required" in signature


def test_signatures_have_the_options_of_the_commands() -> None:
    """A default that differs between the commands is a dictionary."""
    for function, own in ((ktconvert.plan, {"command"}), (ktconvert.convert, {"command", "executor", "progress"})):
        parameters = inspect.signature(function).parameters
        options = {line.split(":")[0].strip() for cls in CONVERSION_OPTIONS.values() for line in list_arguments(cls)}
        assert parameters.keys() == own | options
        assert parameters["quant_method"].default == {"cpu": "int4", "gpu": "GPTQ"}
        assert parameters["input"].default is inspect.Parameter.empty and parameters["overwrite"].default is False
        assert {"int4", "GPTQ"} <= {*re.findall(r"'(\w+)'", str(parameters["quant_method"].annotation))}
    assert inspect.signature(ktconvert.verify).parameters.keys() >= {"output", "against", "full"}
    assert "quant_method:" in pydoc.render_doc(ktconvert.convert, renderer=pydoc.plaintext)


def test_version_is_the_same_everywhere() -> None:
    """pipeline/__init__.py defines the version; CITATION.cff and CHANGELOG.md must have the same."""
    root = Path(__file__).resolve().parents[1]
    assert importlib.metadata.version("ktconvert") == ktconvert.__version__
    notes = [sys.executable, root / ".ci" / "release_notes.py"]
    result = subprocess.run([*notes, ktconvert.__version__], capture_output=True, text=True)
    assert result.returncode == 0 and "### Added" in result.stdout, result.stderr
    assert "## [" not in result.stdout
    result = subprocess.run([*notes, "9.9.9"], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("pipeline/__init__.py: the version is ")


if __name__ == "__main__":
    ARGUMENTS.write_text(write_arguments())
