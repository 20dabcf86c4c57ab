"""Tests of the public names of `import ktconvert`. Each example of its docstring runs.

`python tests/test_api.py` writes the generated types of the public names, pipeline/api/__init__.pyi.
"""

from __future__ import annotations

import ast
import doctest
import importlib.metadata
import importlib.resources
import inspect
import json
import os
import pydoc
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import ktconvert
import ktconvert.layouts.errors as layouts_errors
from ktconvert import errors
from ktconvert._functions import group_options, list_parameters, write_parameter
from ktconvert.layouts.errors import ArgumentError, CallError, MissingPackageError, UnsupportedError, UsageError
from ktconvert.layouts.extras import install_command
from ktconvert.native_quant.runtime.experts import READ_ONLY
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.python_names import use_python_names
from ktconvert.pipeline.options.queries import VerifyOptions
from rig import conversion, stored
from rig.absent import hide_package

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "pipeline" / "api" / "__init__.pyi"
HEAD = '''"""Types of the public names, for editors and type checkers.

Written by `python tests/test_api.py` from the declarations of the options; do not edit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from os import PathLike
from pathlib import Path
from typing import Literal, overload

from ktconvert import errors as errors
from ktconvert._results import KTCheck as KTCheck
from ktconvert._results import KTPlan as KTPlan
from ktconvert._results import KTProjectionError as KTProjectionError
from ktconvert._results import KTReport as KTReport
from ktconvert._results import KTUnit as KTUnit
from ktconvert.layouts.errors import KTConvertError as KTConvertError
from ktconvert.native_quant.runtime.experts import KTExperts as KTExperts
from ktconvert.native_quant.runtime.hf import KTConvertConfig as KTConvertConfig
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper as KTMoEWrapper
from ktconvert.pipeline import __version__ as __version__

'''
RUNNING = (
    "executor: Executor | None = None",
    "progress: Callable[[int, int], object] | None = None",
)


def write_function(name: str, command: str, result: str, own: Sequence[str], options: Sequence[str]) -> str:
    """Return the overload of a function for a command."""
    title = (inspect.getdoc(getattr(ktconvert, name)) or "").splitlines()[0].replace("COMMAND", command)
    words = [f'command: Literal["{command}"]', "/", *options[:2], "*", *own, *options[2:]]
    lines = "".join(f"    {word},\n" for word in words)
    return f'@overload\ndef {name}(\n{lines}) -> {result}:\n    """{title}"""\n'


def write_stub() -> str:
    """Return the text of pipeline/api/__init__.pyi."""
    text = HEAD
    for name, result, own in (("plan", "list[KTPlan]", ()), ("convert", "list[Path]", RUNNING)):
        for command, cls in CONVERSION_OPTIONS.items():
            options = [write_parameter(each) for each in list_parameters(cls).values()]
            text += write_function(name, command, result, own, options) + "\n"
    options = [write_parameter(each) for each in list_parameters(VerifyOptions).values()]
    lines = "".join(f"    {word},\n" for word in (*options[:2], "*", *options[2:]))
    title = (inspect.getdoc(ktconvert.verify) or "").splitlines()[0]
    return text + f'def verify(\n{lines}) -> KTReport:\n    """{title}"""\n'


def test_the_stub_follows_from_the_options() -> None:
    assert ast.dump(ast.parse(STUB.read_text())) == ast.dump(ast.parse(write_stub())), "run `python tests/test_api.py`"
    imported = re.findall(r"import \w+ as (\w+)", STUB.read_text())
    assert sorted([*imported, "plan", "convert", "verify"]) == sorted([*ktconvert.__all__, "errors"])
    assert ktconvert.errors is errors


def test_plans_and_reports_print_a_few_lines(tmp_path: Path, example: Path) -> None:
    output = tmp_path / "out"
    (plan,) = ktconvert.plan("cpu", input=example, output=output, quant_method="int8")
    assert repr(plan).startswith(f"KTPlan(output={str(output)!r}, architecture='Qwen3-MoE")
    assert "method='AMXINT8'" in repr(plan) and "units='2 files, " in repr(plan)
    ktconvert.convert("cpu", input=example, output=output, quant_method="int8", threads=10**9)  # capped at the CPUs
    report = ktconvert.verify(output, against=example)
    for printed in (plan, plan.units[0], report):
        assert len(repr(printed)) < 1500
    assert report and report.ok
    conversion.flip_bit(next(output.glob("*.safetensors")), -5)
    assert f"ok=True, against={str(example)!r}, checks=['files: ok', " in repr(report)
    failed = ktconvert.verify(output, full=True)
    assert not failed and "'hashes: 1 problem'" in repr(failed) and f"sentence={failed.sentence!r}" in repr(failed)
    assert repr(failed.checks[0]) == f"KTCheck(name='files', result={failed.checks[0].result!r}, ok)"
    assert "KTCheck(name='hashes', problems=['model-" in repr(failed.checks)


def test_progress_is_called_and_nothing_is_printed(
    tmp_path: Path, example: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int]] = []
    ktconvert.convert("cpu", input=example, output=tmp_path / "out", progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] > 0 and calls == sorted(calls)
    assert capfd.readouterr() == ("", "")


def test_an_error_of_progress_and_ctrl_c_stop_the_work_which_the_same_call_resumes(
    tmp_path: Path, example: Path
) -> None:
    seen: list[float] = []

    def stop_by_error(done: int, total: int) -> None:
        if done == total // 4:
            raise LookupError("stop")

    def stop_by_signal(done: int, total: int) -> None:
        seen.append(done / total)
        if done == total // 4:
            signal.raise_signal(signal.SIGINT)

    for stop, error in ((stop_by_error, LookupError), (stop_by_signal, KeyboardInterrupt)):
        with pytest.raises(error):
            ktconvert.convert("cpu", example, tmp_path / "out", threads=1, progress=stop)
    assert 0.5 <= seen[-1] < 1  # the first of two layers is finished
    ktconvert.convert(
        "cpu", example, tmp_path / "out", threads=1, progress=lambda *call: seen.append(call[0] / call[1])
    )
    assert seen[-1] == 1 and ktconvert.verify(tmp_path / "out")


def test_options_for_locks_and_hashes_have_an_effect(
    tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "lock").touch()
    (tmp_path / "out.work" / "lock.held").write_text("{}")  # of an unknown process
    with pytest.raises(ktconvert.KTConvertError, match="force_unlock=True"):
        ktconvert.convert("cpu", example, output)
    ktconvert.convert("cpu", example, output, force_unlock=True, verify_inputs=True)
    assert capsys.readouterr().err.startswith("warning: force_unlock=True removed ")
    manifest = json.loads((output / "manifest.json").read_text())
    assert "sha256" in manifest["source"][0]


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
    several = 'ktconvert.plan("cpu", "model", "out", quant_method=["int4", "int8"], max_memory="5GB")'
    classes = (
        "ktconvert.KTMoEWrapper(layer=0)",
        "ktconvert.KTConvertConfig(thread=1)",
        'ktconvert.KTExperts.load("out")',
        "ktconvert.KTMoEWrapper(0, 8, 2, 256, 256)",
        'ktconvert.KTExperts.load("out", 0, memory="mmap")',
        'ktconvert.KTConvertConfig("out", activations="fp4")',
        "ktconvert.KTExperts()",
        'ktconvert.KTExperts("out", 0)',
        *(f'ktconvert.KTExperts.load("out", 0).{name} = 3' for name in READ_ONLY),
    )
    legal = (
        'ktconvert.KTMoEWrapper(0, 8, 2, 256, 256, None, 1, 1, "out", 512)',
        'ktconvert.KTExperts.load("out", 0, memory="map", activations="int8")',
    )
    named = [call.format(option) for option in options for call in calls]
    program.write_text("\n".join(["import ktconvert", several, *named, *classes, *legal]))
    settings = tmp_path / "mypy.ini"
    settings.write_text(MYPY_SETTINGS)
    mypy = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", program]
    done = subprocess.run(mypy, capture_output=True, text=True, cwd=ROOT)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    lines = {line.split(":")[1] for line in errors}
    assert lines == {str(line) for line in range(5, 5 + 4 + len(classes))}, done.stdout + done.stderr


def test_docstring_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Path) -> None:
    (tmp_path / "examples").symlink_to(example.parent)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(ktconvert, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0 and tried > 10


@pytest.mark.parametrize(("name", "least"), [("use-from-python", 5), ("gguf", 1)])
def test_snippets_of_the_page_run(
    name: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Path
) -> None:
    """Each snippet of a page has its imports, and runs in a clone of the repository."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    (tmp_path / "examples").symlink_to(example.parent)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to" / f"{name}.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for snippet in snippets:
        exec(snippet, {})
    assert len(snippets) >= least
    for written in tmp_path.glob("*.gguf"):
        assert ktconvert.KTExperts.load(written, 0).method == "LLAMAFILE"


def test_results_have_only_documented_attributes(tmp_path: Path, example: Path) -> None:
    (plan,) = ktconvert.plan("cpu", example, tmp_path / "int8", quant_method="int8")
    ktconvert.convert("cpu", example, tmp_path / "int8", quant_method="int8")
    report = ktconvert.verify(tmp_path / "int8", against=example)
    experts = ktconvert.KTExperts.load(tmp_path / "int8", 0)
    for result in (plan, plan.units[0], report, report.checks[0], report.errors[0], experts):
        names = [name for name in dir(result) if not name.startswith("_")]
        documented = re.findall(r"^ *((?:\w+, )*\w+)(?:  |$)", inspect.getdoc(result) or "", re.MULTILINE)
        methods = [name for name in names if inspect.getdoc(getattr(type(result), name, None))]
        missing = {*names} - {name for each in documented for name in each.split(", ")} - {*methods}
        assert names and not missing, type(result)


def test_the_module_of_errors_has_every_exception_without_heavy_imports() -> None:
    classes = {name for name, value in vars(layouts_errors).items() if isinstance(value, type)}
    ours = {name for name in classes if issubclass(getattr(layouts_errors, name), ktconvert.KTConvertError)}
    assert errors.__all__ == dir(errors) == sorted(ours)
    assert {getattr(errors, name).__module__ for name in errors.__all__} == {errors.__name__}
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    assert {*re.findall(r"`(\w+Error)`", page)} & ours == ours
    program = "import sys, ktconvert.errors; sys.exit(bool({'numpy', 'click', 'torch'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_name_is_documented() -> None:
    assert ktconvert.__all__ == sorted(ktconvert.__all__)
    assert ktconvert.__all__ == dir(ktconvert)
    for name in set(ktconvert.__all__) - {"__version__"}:
        assert getattr(ktconvert, name).__doc__, name
    for function, commands in ((ktconvert.plan, CONVERSION_OPTIONS), (ktconvert.verify, {"verify": VerifyOptions})):
        words = {*re.findall(r"\w+", function.__doc__ or "")}
        assert all(words >= {*list_parameters(cls)} for cls in commands.values())
    help_text = " ".join((ktconvert.convert.__doc__ or "").split())
    for words_of_help in (
        "chosen; gptq runs the model on text. ['absmax', 'mse', 'imatrix', 'gptq'; default \"absmax\"]",
        "[cpu: 'all', 'routed', 'mixed'; default \"mixed\"] [gpu: 'all', 'routed', 'mixed'; default \"all\"]",
        "one for each node. [resplit: required]",
    ):
        assert words_of_help in help_text


@pytest.mark.parametrize(("name", "extra"), [("KTMoEWrapper", "torch"), ("KTConvertConfig", "run")])
def test_without_torch_its_classes_raise_the_command_that_installs_it(name: str, extra: str, tmp_path: Path) -> None:
    """Everything else works, also help()."""
    program = f"import ktconvert, pydoc\npydoc.render_doc(ktconvert)\nktconvert.KTExperts\nfrom ktconvert import {name}"
    environment = os.environ | hide_package("torch", tmp_path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ktconvert.errors.MissingPackageError: ktconvert.{name} needs torch, not installed")
    assert last.endswith(f"{install_command(extra)}`.")
    assert issubclass(MissingPackageError, ImportError)


WRONG_FIELDS: list[dict[str, Any]] = [
    *({"threads": value} for value in (-1, 0, "4", 2.0, True, 10**6)),
    *({"exact": value} for value in ("yes", 1)),
    *({"memory": value} for value in ("fast", None)),
    *({name: value} for name in ("cpu_weights", "gpu_experts") for value in (3, "")),
    *({"num_gpu_experts": value} for value in (-1, "3")),
    *({"gpu_experts_mask": value} for value in (3, [True], [], [[1, 0]], [[True], [True, False]])),
    {"quant_method": "int8"},
]


@pytest.mark.parametrize("wrong", WRONG_FIELDS, ids=str)
def test_the_config_refuses_wrong_values_of_each_field(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    (name,) = wrong
    selected = {"num_gpu_experts": 1} if name == "gpu_experts" else {}
    with pytest.raises(ArgumentError, match=f"^{name} must be .*, not .*\\.$"):
        ktconvert.KTConvertConfig(**wrong, **selected)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_messages_about_infinite_weights_name_matrix_and_expert(name: str) -> None:
    matrices = {each: np.zeros((2, 256, 256), np.uint16) for each in ("gate", "up", "down")}
    matrices[name][1, 200, 150] = 0x7FC0  # in the second NUMA slice
    with pytest.raises(ArgumentError, match=f"^{name} must be finite, but row 200, column 150 of expert 1 is "):
        ktconvert.KTExperts.from_bf16(**matrices, parts=2)


def test_messages_of_the_classes_name_their_arguments() -> None:
    zeros = np.zeros((2, 256, 256), np.uint16)
    with pytest.raises(UnsupportedError, match=r"in 3 NUMA slices: .*; use parts \(threadpool_count\) 1, 2\.$"):
        ktconvert.KTExperts.from_bf16(zeros, zeros, zeros, parts=3)
    with pytest.raises(ArgumentError, match=r"^method must be one of 'AMXINT4', 'AMXINT8', .*, not 'int8'"):
        ktconvert.KTExperts.load("out", 0, method="int8")
    pytest.importorskip("transformers")
    mask = [[True, False], [False, False], [True, True]]
    config = ktconvert.KTConvertConfig(cpu_weights="out", gpu_experts_mask=mask)
    assert repr(config) == "KTConvertConfig(cpu_weights='out', gpu_experts_mask='bool [3, 2]')"
    with pytest.raises(ValueError, match=r"^gpu_experts_mask and num_gpu_experts exclude each other; give one of them"):
        ktconvert.KTConvertConfig(gpu_experts_mask="mask.safetensors", num_gpu_experts=1)
    with pytest.raises(ValueError, match=r"^gpu_experts is set, but no experts are selected; "):
        ktconvert.KTConvertConfig(gpu_experts="packed")


def test_every_class_has_the_same_capitals() -> None:
    """kt-kernel's KTMoEWrapper sets the pattern."""
    assert all(name.startswith("KT") for name in ktconvert.__all__ if isinstance(getattr(ktconvert, name), type))


def test_wrong_names_raise_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'model' is not a conversion; plan and convert take one of 'cpu', "):
        ktconvert.plan("model", "out")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"'resume' is not a conversion; call ktconvert\.convert again"):
        ktconvert.convert("resume", "out")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="'serve' is not a conversion; plan and convert take one of 'cpu', "):
        ktconvert.plan("serve", "model", "out")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="'CPU' is not a conversion; did you mean 'cpu'"):
        ktconvert.plan("CPU", "model", "out")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"\['cpu'\] is not a conversion; plan and convert take one of 'cpu', "):
        ktconvert.plan(["cpu"], "model", "out")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"group_size must be one of 128, 64, 32, not 5\.$"):
        ktconvert.plan("gpu", "model", "out", group_size=5)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"quant_method: int8 is given twice\.$"):
        ktconvert.plan("cpu", "model", "out", quant_method=["int8", "int8"])
    with pytest.raises(ArgumentError, match=r"quant_method must be one of 'GPTQ', 'RTN', not 'int8'\.$"):
        ktconvert.plan("gpu", "model", "out", quant_method="int8")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="unknown option model; give input and output"):
        ktconvert.convert("cpu", model="model")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="unknown option bits; `ktconvert cpu --help-all` lists the options"):
        ktconvert.convert("cpu", "model", "out", bits=8)  # type: ignore[call-overload]
    with pytest.raises(CallError, match=r"^plan: too many positional arguments; help\(ktconvert\.plan\) lists"):
        ktconvert.plan("cpu", "model", "out", "more")  # type: ignore[call-overload]
    with pytest.raises(CallError, match=r"unknown option ouput; did you mean output\?"):
        ktconvert.plan("cpu", input="model", ouput="out")
    with pytest.raises(UsageError, match=r"unknown option quant_methd; did you mean quant_method\?"):
        ktconvert.verify(tmp_path, quant_methd="int8")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"quant_method must be one of .*'int4', .*, not 'int3'\.$"):
        ktconvert.verify(tmp_path, quant_method="int3")  # type: ignore[typeddict-item]
    with pytest.raises(UsageError, match="report is an option of the command line; verify returns its report"):
        ktconvert.verify(tmp_path, report="page.html")  # type: ignore[call-arg]
    for wrong in ({"executor": 3}, {"progress": 3}, {"progress": lambda done: None}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be a .*, not (3|<function)"):
            ktconvert.convert("cpu", "model", "out", **wrong)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ktconvert.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method_map": {0: "int8"}}, "method_map must be a list of str, not {0: 'int8'}; give method_map=['0=int8']"),
        ({"method_map": 5}, "method_map must be a list of str, not 5"),
        ({"numa": 2.5}, "numa must be an int, not 2.5"),
        ({"quant_type": "W4A16"}, "unknown option quant_type; it is an option of 'gpu'"),
        *(
            ({name: "a\0b"}, f"{name}: 'a\\x00b' has a NUL character; leave it out")
            for name in ("input", "output", "imatrix", "arch_file")
        ),
        ({"quant_method": []}, "quant_method must be a str or a list of at least one str, not []"),
        ({"quant_method": {"int8"}}, "quant_method must be a str or a list of at least one str, not {'int8'}"),
        ({"max_memory": "lots"}, "max_memory: 'lots' is not a size like 5GB or 500MiB"),
        ({"max_memory": 5.5}, "max_memory must be an int, or a str such as '5GB' or '500MiB', not 5.5"),
        ({"threads": "many"}, "threads must be an int, not 'many'"),
        ({"overwrite": "yes"}, "overwrite must be a bool, not 'yes'"),
        ({"layers": 5}, "layers must be a str, not 5; give layers='5'"),
        ({"layers": [0, 3]}, "layers must be a str, not [0, 3]; give layers='0,3'"),
        ({"arch_file": 5}, "arch_file must be a path, not 5"),
        ({"dampening_frac": "half"}, "dampening_frac must be a float, not 'half'"),
    ],
)
def test_wrong_values_raise_what_is_legal(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}\\.$"):
        ktconvert.plan("cpu", **{"input": "model", "output": "out"} | wrong)


def test_paths_with_a_nul_character_name_the_argument(tmp_path: Path) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: ktconvert.convert("cpu", "model", "a\0b"),
        lambda: ktconvert.verify("a\0b"),
        lambda: ktconvert.verify(tmp_path, against="a\0b"),
    )
    for call, name in zip(calls, ("output", "output", "against"), strict=True):
        with pytest.raises(ArgumentError, match=rf"^{name}: 'a\\x00b' has a NUL character; leave it out\.$"):
            call()


def test_numbers_of_numpy_and_single_items_are_accepted(tmp_path: Path, example: Path) -> None:
    options: dict[str, Any] = {"numa": np.int64(2), "dampening_frac": np.float32(0.5), "method_map": "0=int8"}
    (plan,) = ktconvert.plan("cpu", example, tmp_path / "out", **options)
    assert plan.facts["numa"] == 2 and plan.facts["methods"] == {"AMXINT8": "0", "AMXINT4": "1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "9"}, "layers='9': layer 9 has no experts"),
        ({"scale": "imatrix"}, "scale='imatrix' needs the importance of inputs; give imatrix=FILE or statistics=DIR."),
        ({"delete_others": True}, "delete_others=True needs overwrite=True; add it, or leave out delete_others=True."),
        ({"quant_method": "bf16", "scale": "mse"}, "scale='mse' is for quant_method='int4'"),
        ({"max_shard_size": 10**9, "no_merge_safetensor": True}, "leave it out with no_merge_safetensor=True."),
        ({"numa": 7}, "use int4 or fp8 with numa=1, 2;"),
        ({"config": "nowhere"}, "config='nowhere': "),
    ],
    ids=str,
)
def test_errors_name_keyword_arguments(options: dict[str, Any], message: str, tmp_path: Path, example: Path) -> None:
    """On the command line, the same errors name its options."""
    for function in (ktconvert.plan, ktconvert.convert):
        with pytest.raises(ktconvert.KTConvertError) as caught:
            function("cpu", example, tmp_path / "out", **options)
        assert message in str(caught.value) and "--" not in str(caught.value)
        assert repr(caught.value) == f"{type(caught.value).__name__}({caught.value.problem!r})"


def test_notes_of_results_name_keyword_arguments(tmp_path: Path, example: Path) -> None:
    (plan,) = ktconvert.plan("cpu", example, tmp_path / "out")
    assert any("compare with quant_method='int8'" in note for note in plan.notes)
    ktconvert.convert("cpu", example, tmp_path / "out", numa=1)
    report = ktconvert.verify(tmp_path / "out", numa=2)
    assert report.sentence is not None and "not for numa=2" in report.sentence
    assert not any("--numa" in text for text in (*report.problems, *report.notes))


def test_commands_in_messages_stay_commands() -> None:
    with use_python_names(VerifyOptions) as rename:
        for text in (
            "run `ktconvert resplit OUT NEW --numa 2`",
            "serve with --kt-method AMXINT8 --kt-threadpool-count 2",
            "run `hf download org/name --revision main`",
        ):
            assert rename(text) == text
        assert rename("give --overwrite --delete-others") == "give overwrite=True delete_others=True"
        assert rename("give --ram 400GB, --numa 2 or --threads N") == "give ram='400GB', numa=2 or threads=N"
        assert rename("--arch-file /a/b.toml: cannot be read") == "arch_file='/a/b.toml': cannot be read"


@pytest.mark.parametrize(
    ("function", "option", "remedy"),
    [
        (ktconvert.convert, {"dry_run": True}, "call ktconvert.plan"),
        (ktconvert.convert, {"part": "1/2"}, "pass an Executor to ktconvert.convert"),
        (ktconvert.plan, {"progress": print}, "give it to ktconvert.convert"),
    ],
    ids=["dry-run", "part", "progress"],
)
def test_arguments_of_the_command_line_or_of_another_function_have_a_remedy(
    tmp_path: Path, example: Path, function: Any, option: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ArgumentError, match=remedy):
        function("cpu", input=example, output=tmp_path / "out", **option)
    assert list(tmp_path.iterdir()) == []


def test_experts_with_an_unknown_activation_are_converted_with_a_description(tmp_path: Path, example: Path) -> None:
    source = stored.model(example, tmp_path / "in", "BF16")
    stored.configure(source, hidden_act="xielu")
    with pytest.raises(UnsupportedError, match=r"; convert it with ktconvert\.convert\(\.\.\., arch_file=FILE\)"):
        ktconvert.KTExperts.load(source, 0)


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_attributes_that_the_computation_relies_on_cannot_be_changed(name: str) -> None:
    bits = np.zeros((2, 128, 128), np.uint16)
    experts = ktconvert.KTExperts.from_bf16(bits, bits, bits)
    before = getattr(experts, name)
    with pytest.raises(AttributeError, match=f"{name} of KTExperts cannot be changed"):
        setattr(experts, name, 3)
    assert getattr(experts, name) == before


def test_several_methods_and_sizes_are_lists_and_texts(tmp_path: Path, example: Path) -> None:
    methods: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
    plans = ktconvert.plan("cpu", input=example, output=tmp_path, quant_method=methods, max_memory="5GB")
    assert [plan.facts["method"] for plan in plans] == ["AMXINT8", "AMXINT4"]


def test_help_of_the_classes_shows_public_types_and_real_defaults() -> None:
    wrapper = str(inspect.signature(ktconvert.KTMoEWrapper))
    assert "object" not in wrapper and "weight_path: 'str | PathLike[str]', chunked_prefill_size: 'int', " in wrapper
    shown = pydoc.render_doc(ktconvert.KTExperts, renderer=pydoc.plaintext)
    assert "KTExperts()" not in shown and "unknown" not in shown
    assert not re.search(r"LayerWeights|Pool\b|ExpertFunction|'[UIF]\d\d", shown)
    for method in (ktconvert.KTExperts.load, ktconvert.KTExperts.from_bf16):
        assert "NDArray[np.int64]" in str(inspect.signature(method))


def test_wrong_names_and_missing_arguments_of_the_classes_have_a_remedy() -> None:
    pytest.importorskip("transformers")
    experts, config = ktconvert.KTExperts, ktconvert.KTConvertConfig
    for call, options, message in (
        (experts, {}, "use KTExperts.load(path, layer), or KTExperts.from_bf16(gate, up, down)."),
        (experts, {"path": "out"}, "use KTExperts.load(path, layer), or KTExperts.from_bf16(gate, up, down)."),
        (ktconvert.plan, {}, "plan needs command by position."),
        (ktconvert.verify, {}, "verify needs output=..."),
        (experts.load, {"path": "out"}, "KTExperts.load needs layer=..."),
        (experts.load, {"path": "out", "layr": 0}, "KTExperts.load has no argument layr; did you mean layer?"),
        (experts.from_bf16, {}, "KTExperts.from_bf16 needs gate=..., up=..., down=..."),
        (config, {"cpu_weight": "out"}, "KTConvertConfig has no argument cpu_weight; did you mean cpu_weights?"),
        (
            config,
            {"zzz": 1},
            "KTConvertConfig has no argument zzz; help(ktconvert.KTConvertConfig) lists the arguments.",
        ),
    ):
        with pytest.raises(ArgumentError) as caught:
            call(**options)
        assert str(caught.value) == message
        assert isinstance(caught.value, TypeError) or call is experts


def test_help_of_the_functions_fits_the_screen_and_explains_every_option() -> None:
    """A signature with all options, which the stub has, would be one long line."""
    for function in (ktconvert.plan, ktconvert.convert, ktconvert.verify):
        text = pydoc.render_doc(function, renderer=pydoc.plaintext)
        assert max(map(len, text.splitlines())) < 250
        assert any("--help-all`" in line or "as for plan" in line for line in text.splitlines())
        commands = {"verify": VerifyOptions} if function is ktconvert.verify else CONVERSION_OPTIONS
        lines = text.partition("Options (")[2].splitlines()[1:]
        options = {name: row for rows in group_options(commands).values() for name, row in rows.items()}
        assert sorted(line.split()[0] for line in lines if line[4:5].strip()) == sorted(options)
        assert max(map(len, lines)) <= 120
        for rows in group_options(commands).values():
            for _, meaning in rows.values():
                assert "--" not in re.sub("`[^`]+`", "", meaning), "names options as the command line does"


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
    STUB.write_text(write_stub())
    subprocess.run([sys.executable, "-m", "ruff", "format", STUB], check=True)
