"""Every document that we read, damaged in every way that a fuzzer finds: one sentence and a documented exit code, or
success. rig.documents is the table, rig.fuzzing damages.
"""

import ast
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from ktconvert.layouts.errors import KtconvertError
from ktconvert.pipeline import cli
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.options.types import Size, TokenCountList
from rig import conversion, documents, fuzzing, mutations, rates
from rig.documents import DOCUMENTS, FIRST, Inputs, restore_file
from rig.files import edit_json

ROOT = Path(__file__).resolve().parents[1]
CODES = {0, 1, 2, 3, 4, 5, 6, 7}
SENTENCE = 2000  # characters; longer is no sentence
LONG = 1_000_000  # mutations of a long run


@pytest.fixture(autouse=True)
def usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A usage is one line, however narrow the terminal of whoever runs the tests."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return documents.make_inputs(tmp_path_factory.mktemp("fuzz"))


def command(*arguments: object, words: str = "") -> int:
    """Run a command in this process, as the real one; its exit code. A failure is one sentence, with these words."""
    code, said = documents.run(*arguments)
    lines = [line for line in said.splitlines() if not line.startswith(("note: ", "warning: ", "page: "))]
    assert code in CODES, (code, lines)
    if code:
        usage = [line for line in lines if not line.startswith(("Usage: ", "Try ")) and line]
        assert len(usage) == 1, lines
        assert usage[0].startswith("Error: " if len(usage) < len(lines) else "ktconvert: "), lines
        assert len(usage[0]) < SENTENCE, lines
        assert words in usage[0]
    return code


@pytest.mark.parametrize("name", [name for name, document in DOCUMENTS.items() if document.quick])
def test_reading_a_damaged_document_gives_a_result_or_a_sentence(name: str, inputs: Inputs) -> None:
    fuzzing.fuzz(name, inputs, DOCUMENTS[name].draws * conversion.FUZZ)


# Calls that read a document: of modules and classes, and by themselves or of anything.
READING = {"documents.read", "documents.parse", "json.load", "json.loads", "tomllib.loads", "torch.load", "np.fromfile"}
READING |= {"read_header", "read_index", "read_matrix", "read_at", "read_bytes", "read_text", "from_pretrained"}
READING |= {"load_dataset"}
# Functions that make such a call, and have no row: beginnings of their names, and why.
WITHOUT_ROW = {
    **dict.fromkeys(
        (f"ktconvert.native_quant.{name}." for name in ("machine", "runtime.benchmark", "runtime.streams")),
        "files of the kernel's",
    ),
    "ktconvert.layouts.files.direct_file.umask": "a file of the kernel's",
    "ktconvert.native_quant._build.": "files of the build",
    "ktconvert.pipeline.cli.version.wheel_tag": "files of the installation",
    "ktconvert.pipeline.cli.eval.eval": "calls a read_text that has a row",
    "ktconvert.pipeline.verify.verify.verify": "calls a read_text that has a row",
    "ktconvert.pipeline.verify.file_checks._compare_readers": "headers that open_output has read before",
    "ktconvert.pipeline.engine.assemble.fill": "a file that the same run has written",
    "ktconvert.pipeline.models.fine_tuning.": "files that the same run has written; of another's, nothing is raised",
    "ktconvert.pipeline.plans.train._identity": "headers, which have rows",
    "ktconvert.pipeline.stages.resplit_experts.": "no file",
    "ktconvert.pipeline.engine.worker._open_plan": "compares a name with all that a file holds",
    "ktconvert.pipeline.calibration.portions.load_tensors": "compares a hash with all that a file holds",
    "ktconvert.native_quant.runtime.hf_non_experts.": "headers that open_output has read before, and any text",
    "ktconvert.pipeline.models.serving.": "requests: test_serve_requests.py; and what load_model has read before",
    "ktconvert.pipeline.verify.reload.": "takes whatever transformers raises",
    "ktconvert.pipeline.calibration.gptq_experts.run_oneshot": "llmcompressor's own way to load a model",
    "ktconvert.pipeline.models.text_datasets.read_hub_rows": "data sets of the hub: test_calibration.py",
}


def readers() -> Iterator[str]:
    """The functions of the product that read a document, by their full names."""
    for folder in ("pipeline", "layouts", "quantizers", "native_quant"):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(("ktconvert", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
            yield from (f"{module}.{name}" for name in _reading(ast.parse(path.read_text()), ""))


def _reading(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            local = "" if isinstance(child, ast.ClassDef) else ".<locals>"
            yield from _reading(child, f"{inside}{child.name}{local}.")
        else:
            called = ast.unparse(child.func) if isinstance(child, ast.Call) else ""
            if called in READING or called.rpartition(".")[2] in READING:
                yield inside.removesuffix(".").removesuffix(".<locals>")
            yield from _reading(child, inside)


def test_every_reader_has_a_row(inputs: Inputs) -> None:
    """A valid document of each row gives a result, and all functions that read a document run."""
    missing = {name for name in readers() if not name.startswith(tuple(WITHOUT_ROW))} - fuzzing.trace_all(inputs)
    assert not missing, "give what these read a row in rig/documents.py"


@pytest.mark.long
@pytest.mark.parametrize("name", DOCUMENTS)
def test_reading_a_million_damaged_documents(name: str, inputs: Inputs, record_property: Any) -> None:
    """So many together: each document as many times more than in a quick run."""
    count = round(LONG * DOCUMENTS[name].draws / sum(document.draws for document in DOCUMENTS.values()))
    record_property(rates.PROPERTY, {"document": name, **fuzzing.fuzz(name, inputs, count)})


@pytest.mark.parametrize("name", [name for name, document in DOCUMENTS.items() if document.commands])
def test_commands_that_read_a_damaged_document(name: str, inputs: Inputs) -> None:
    document = DOCUMENTS[name]
    assert document.commands is not None
    path, commands = document.make(inputs), document.commands(inputs)
    with restore_file(path) as whole:
        for number, seed in enumerate(conversion.draw_seeds(8)):
            path.write_bytes(mutations.damage(document.damage, whole, seed))
            command(*commands[number % len(commands)])


def test_a_plan_whose_source_has_no_name(inputs: Inputs) -> None:
    with restore_file(inputs.work.plan):
        edit_json(inputs.work.plan, lambda plan: plan["source"][0].pop("name"))
        words = "not a plan (Object missing required field `name` - at `$.source[0]`)"
        assert command("resume", inputs.broken, "--dry-run", words=words) == 7
    with restore_file(inputs.work.plan):
        edit_json(inputs.work.plan, lambda plan: plan["settings"].pop("scale"))
        assert command("resume", inputs.broken, "--dry-run", words="cannot be read (scale is missing)") == 7
        edit_json(inputs.work.plan, lambda plan: plan["settings"].update(layers=5))
        assert command("resume", inputs.broken, "--dry-run", words="cannot be read (layers: Expected `str`") == 7


def test_a_record_without_a_fingerprint(inputs: Inputs) -> None:
    """What it says was done is done again."""
    path = inputs.work.journal
    with restore_file(path) as whole:
        path.write_bytes(whole.replace(b'"fingerprint"', b'"footprint"'))
        assert journal.find_finished_units(journal.read(path)) == {}
        assert command("resume", inputs.broken, "--dry-run") == 0


@pytest.mark.parametrize("name", ["\0", "x" * 300])
def test_a_record_of_a_file_that_cannot_be(name: str, inputs: Inputs) -> None:
    path = inputs.work.journal
    with restore_file(path) as whole:
        path.write_bytes(whole.replace(b'"files": [[""', b'"files": [[' + json.dumps(name).encode()))
        assert journal.find_finished_units(journal.read(path))
        assert command("resume", inputs.broken, "--dry-run") == 0


DEEP = b"[" * mutations.DEEP + b"]" * mutations.DEEP
LONG_NAME = b"x" * 300 + b".safetensors"


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        (
            "hub's index",
            b'"weight_map": {',
            b'"weight_map": ' + DEEP + b', "other": {',
            "is incomplete in the local cache",
        ),
        ("config of a packed output", b'"architectures": [', b'"a": ' + DEEP + b', "architectures": [', "nested too"),
        ("index", FIRST.format(3).encode(), LONG_NAME, "in a file whose name has 312 characters; download"),
        ("plan", b'"input": "', b'"input": "' + b"x" * 5000, "input: Invalid value: 'x"),
        ("samples of a chain", b"lengths", b"LENGTHS", "holds no lengths of I64 or F32; check the disk, then resume"),
        ("lock", b'"pid": ', b'"pid": 9999999999', ""),
        ("attempt", b'"pid": ', b'"pid": 9999999999', ""),
    ],
)
def test_reading_gives_a_sentence(name: str, old: bytes, new: bytes, words: str, inputs: Inputs) -> None:
    """What fuzzing has found: nesting, names and numbers beyond what Python, the system or C take, missing tensors."""
    document = DOCUMENTS[name]
    path = document.make(inputs)
    with restore_file(path) as whole:
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(KtconvertError, match=re.escape(words)) if words else contextlib.nullcontext():
            document.read(inputs, path)


def test_a_manifest_of_more_experts_than_memory_holds(inputs: Inputs) -> None:
    with restore_file(inputs.root / "packed" / "manifest.json"):
        edit_json(inputs.root / "packed" / "manifest.json", lambda document: document["model"].update(experts=1 << 32))
        assert command("verify", inputs.root / "packed", "--no-load", words="`$.model.experts`") == 6


DIGITS = "9" * 400


def numbers() -> list[tuple[str, str]]:
    """(command, option) of all options that take a number or a size."""
    values = []
    for name in cli.COMMANDS:
        command = cli.group.get_command(click.Context(cli.group), name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.IntRange | click.FloatRange | Size | TokenCountList):
                values.append((name, option.opts[0]))
            assert type(option.type) not in (click.IntRange, click.FloatRange), (name, option.opts)
    return values


@pytest.mark.parametrize(("name", "option"), numbers())
def test_numbers_of_any_length(name: str, option: str, inputs: Inputs) -> None:
    both = ["-i", inputs.root / "loose" if name == "merge" else inputs.source, "-o", inputs.new]
    where: list[object] = (
        both if name in ("cpu", "gpu", "merge") else [] if name == "doctor" else [inputs.root / "output"]
    )
    more = {"serve": ["--cpu-weights", inputs.root / "output"], "eval": ["--text", documents.make_arch(inputs)]}.get(
        name, []
    )
    for value in (DIGITS, DIGITS * 13, f"{DIGITS}.5", "nan", "inf", "1e999"):
        assert command(name, *where, *more, option, value) == 2


TYPES = """
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: float = 0.0
class Outer(msgspec.Struct):
    x: Inner | msgspec.UnsetType = msgspec.UNSET
    y: Inner | msgspec.UnsetType = msgspec.UNSET
"""
MEETING = """
import sys, threading, types
from ktconvert.layouts.files import documents
sys.setswitchinterval(1e-6)
for number in range(1000):
    sys.modules[f"m{number}"] = module = types.ModuleType(f"m{number}")
    exec(compile(sys.argv[1], module.__name__, "exec"), module.__dict__)
    together = threading.Barrier(3)
    def meet():
        together.wait()
        documents.as_type({"x": {"a": 1.0}, "y": {}}, module.Outer)
        documents.read(b'{"x": {"a": 1.0}}', module.Outer)
    threads = [threading.Thread(target=meet) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_that_meet_a_type_together() -> None:
    """msgspec 0.22 ends in a segmentation fault without a lock: each unit's result is checked by the thread that made it."""
    done = subprocess.run([sys.executable, "-c", MEETING, TYPES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
