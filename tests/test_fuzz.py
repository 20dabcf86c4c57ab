"""Every document that we read, with damage of every kind, gives one sentence and a documented exit code, or success.

rig.documents has the table of documents, rig.fuzzing damages them.
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

from ktconvert.layouts.errors import KTConvertError
from ktconvert.pipeline import cli
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.options.types import Size, TokenCountList
from rig import conversion, documents, fuzzing, mutations, rates
from rig.documents import DOCUMENTS, FIRST, Inputs, restore_file
from rig.files import edit_json

ROOT = Path(__file__).resolve().parents[1]
CODES = {0, 1, 2, 3, 4, 5, 6, 7}
SENTENCE = 2000  # maximum length of a sentence, in characters
LONG = 1_000_000  # number of mutations in a long run


@pytest.fixture(autouse=True)
def fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the width of the terminal, so that a usage always has one line."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return documents.make_inputs(tmp_path_factory.mktemp("fuzz"))


def run_command(*arguments: object, message: str = "") -> int:
    """Run a command in this process and return its exit code.

    Require that a failure is one sentence that contains the given words.
    """
    code, text = documents.run(*arguments)
    lines = [line for line in text.splitlines() if not line.startswith(("note: ", "warning: ", "page: "))]
    assert code in CODES, (code, lines)
    if code:
        assert len(lines) == 1 and lines[0].startswith("ktconvert: "), lines
        assert len(lines[0]) < SENTENCE, lines
        assert message in lines[0]
    return code


@pytest.mark.parametrize("name", [name for name, document in DOCUMENTS.items() if document.quick])
def test_reading_a_damaged_document_gives_a_result_or_a_sentence(name: str, inputs: Inputs) -> None:
    fuzzing.fuzz(name, inputs, DOCUMENTS[name].draws * conversion.FUZZ)


# Calls that read a document: functions with their module or class, and names that count with any prefix.
READING = {
    "documents.decode_document",
    "documents.parse_json",
    "json.load",
    "json.loads",
    "tomllib.loads",
    "torch.load",
    "np.fromfile",
}
READING |= {"read_header", "read_index", "read_matrix", "read_at", "read_bytes", "read_text", "from_pretrained"}
READING |= {"load_dataset"}
# Functions that make such a call but need no row: the start of their names, and the reason.
WITHOUT_ROW = {
    **dict.fromkeys(
        (f"ktconvert.native_quant.{name}." for name in ("machine", "runtime.benchmark", "runtime.streams")),
        "files of the Linux kernel",
    ),
    "ktconvert.layouts.files.direct_file.read_umask": "a file of the Linux kernel",
    "ktconvert.native_quant._build.": "files of the build",
    "ktconvert.pipeline.report.versions.wheel_tag": "files of the installation",
    "ktconvert.pipeline.cli.eval.eval": "calls a read_text that has a row",
    "ktconvert.pipeline.verify.verify.verify": "calls a read_text that has a row",
    "ktconvert.pipeline.engine.assemble.fill_output_folder": "a file that the same run has written",
    "ktconvert.pipeline.models.fine_tuning.": "files of the same run; files of other runs never raise",
    "ktconvert.layouts.checkpoints.adapter._refuse_dora_of_experts": "headers, which have rows",
    "ktconvert.pipeline.plans.train._identify_file": "headers, which have rows",
    "ktconvert.pipeline.stages.resplit_experts.": "reads no file",
    "ktconvert.pipeline.engine.worker._open_plan": "compares a name with the whole content of a file",
    "ktconvert.pipeline.cli.experts._write_new_file": "compares bytes with the whole content of a file",
    "ktconvert.pipeline.calibration.portions.load_tensors": "compares a hash with the whole content of a file",
    "ktconvert.native_quant.runtime.hf_non_experts.": "headers that open_output has already read, and any text",
    "ktconvert.pipeline.models.serving.": "requests (test_serve_requests.py), and files that load_model has already read",
    "ktconvert.layouts.extras._read_origin": "what pip has recorded",
    "ktconvert.layouts.sources.hub_headers.": "headers, which the readers of containers check (test_hub_headers.py)",
    "ktconvert.layouts.sources.url_headers.": "headers, and an index (test_url_sources.py)",
    "ktconvert.pipeline.cli.completion.": "a start-up file of the shell, as text (test_completion.py)",
    "ktconvert.pipeline.cli.local_models.": "a damaged file gives a row that says so (test_models.py)",
    "ktconvert.pipeline.verify.reload.": "accepts any exception of transformers",
    "ktconvert.pipeline.calibration.gptq_experts.run_oneshot": "llmcompressor loads the model",
    "ktconvert.pipeline.models.text_datasets.read_hub_rows": "data sets of the hub (test_calibration.py)",
}


def find_readers() -> Iterator[str]:
    """Yield the full names of the functions of the product that read a document."""
    for folder in ("pipeline", "layouts", "quantizers", "native_quant"):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(("ktconvert", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
            yield from (f"{module}.{name}" for name in _find_readers(ast.parse(path.read_text()), ""))


def _find_readers(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            local = "" if isinstance(child, ast.ClassDef) else ".<locals>"
            yield from _find_readers(child, f"{prefix}{child.name}{local}.")
        else:
            function = ast.unparse(child.func) if isinstance(child, ast.Call) else ""
            if function in READING or function.rpartition(".")[2] in READING:
                yield prefix.removesuffix(".").removesuffix(".<locals>")
            yield from _find_readers(child, prefix)


def test_every_reader_has_a_row(inputs: Inputs) -> None:
    """The valid documents of all rows together run every function that reads a document, and give results."""
    missing = {name for name in find_readers() if not name.startswith(tuple(WITHOUT_ROW))} - fuzzing.trace_all(inputs)
    assert not missing, "give what these read a row in rig/documents.py"


@pytest.mark.long
@pytest.mark.parametrize("name", DOCUMENTS)
def test_reading_a_million_damaged_documents_gives_results_or_sentences(
    name: str, inputs: Inputs, record_property: Any
) -> None:
    """The mutations are divided among the documents as in a quick run."""
    count = round(LONG * DOCUMENTS[name].draws / sum(document.draws for document in DOCUMENTS.values()))
    record_property(rates.PROPERTY, {"document": name, **fuzzing.fuzz(name, inputs, count)})


@pytest.mark.parametrize("name", [name for name, document in DOCUMENTS.items() if document.commands])
def test_commands_with_a_damaged_document_succeed_or_give_a_sentence(name: str, inputs: Inputs) -> None:
    document = DOCUMENTS[name]
    assert document.commands is not None
    path, commands = document.make(inputs), document.commands(inputs)
    with restore_file(path) as original:
        for number, seed in enumerate(conversion.draw_seeds(8)):
            path.write_bytes(mutations.damage(document.damage, original, seed))
            run_command(*commands[number % len(commands)])


def test_a_plan_with_missing_or_wrong_entries_is_refused(inputs: Inputs) -> None:
    with restore_file(inputs.work.plan):
        edit_json(inputs.work.plan, lambda plan: plan["source"][0].pop("name"))
        message = "not a plan (Object missing required field `name` - at `$.source[0]`)"
        assert run_command("resume", inputs.broken, "--dry-run", message=message) == 7
    with restore_file(inputs.work.plan):
        edit_json(inputs.work.plan, lambda plan: plan["settings"].pop("scale"))
        assert run_command("resume", inputs.broken, "--dry-run", message="cannot be read (scale is missing)") == 7
        edit_json(inputs.work.plan, lambda plan: plan["settings"].update(layers=5))
        message = "cannot be read (layers must be a str, not 5; give layers='5')"
        assert run_command("resume", inputs.broken, "--dry-run", message=message) == 7


def test_a_record_without_a_fingerprint_does_not_count(inputs: Inputs) -> None:
    """Its unit is made again."""
    path = inputs.work.journal
    with restore_file(path) as original:
        path.write_bytes(original.replace(b'"fingerprint"', b'"footprint"'))
        assert journal.find_finished_units(journal.read_records(path)) == {}
        assert run_command("resume", inputs.broken, "--dry-run") == 0


@pytest.mark.parametrize("name", ["\0", "x" * 300])
def test_a_record_with_an_impossible_file_name_gives_no_error(name: str, inputs: Inputs) -> None:
    path = inputs.work.journal
    with restore_file(path) as original:
        path.write_bytes(original.replace(b'"files": [[""', b'"files": [[' + json.dumps(name).encode()))
        assert journal.find_finished_units(journal.read_records(path))
        assert run_command("resume", inputs.broken, "--dry-run") == 0


DEEP = b"[" * mutations.DEEP + b"]" * mutations.DEEP
LONG_NAME = b"x" * 300 + b".safetensors"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "hub's index",
            b'"weight_map": {',
            b'"weight_map": ' + DEEP + b', "other": {',
            "is incomplete in the local cache",
        ),
        ("config of a packed output", b'"architectures": [', b'"a": ' + DEEP + b', "architectures": [', "nested too"),
        ("index", FIRST.format(3).encode(), LONG_NAME, "in a file whose name has 312 characters; download"),
        ("plan", b'"input": "', b'"input": "' + b"x" * 5000, "input: 'x"),
        ("samples of a chain", b"lengths", b"LENGTHS", "has no lengths of I64 or F32; check the disk, then resume"),
        ("lock", b'"pid": ', b'"pid": 9999999999', ""),
        ("attempt", b'"pid": ', b'"pid": 9999999999', ""),
    ],
)
def test_extreme_documents_give_one_sentence(name: str, old: bytes, new: bytes, message: str, inputs: Inputs) -> None:
    """Fuzzing found these: nesting, names and numbers beyond limits of Python, the system or C; missing tensors."""
    document = DOCUMENTS[name]
    path = document.make(inputs)
    with restore_file(path) as original:
        assert old in original
        path.write_bytes(original.replace(old, new))
        with pytest.raises(KTConvertError, match=re.escape(message)) if message else contextlib.nullcontext():
            document.read(inputs, path)


def test_a_manifest_with_too_many_experts_is_refused(inputs: Inputs) -> None:
    with restore_file(inputs.root / "packed" / "manifest.json"):
        edit_json(inputs.root / "packed" / "manifest.json", lambda document: document["model"].update(experts=1 << 32))
        assert run_command("verify", inputs.root / "packed", "--no-load", message="`$.model.experts`") == 6


DIGITS = "9" * 400


def number_options() -> list[tuple[str, str]]:
    """Return (command, option) for every option that takes a number or a size."""
    values = []
    for name in cli.COMMANDS:
        command = cli.group.get_command(click.Context(cli.group), name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.IntRange | click.FloatRange | Size | TokenCountList):
                values.append((name, option.opts[0]))
            assert type(option.type) not in (click.IntRange, click.FloatRange), (name, option.opts)
    return values


@pytest.mark.parametrize(("name", "option"), number_options())
def test_options_refuse_numbers_of_any_length(name: str, option: str, inputs: Inputs) -> None:
    input_and_output = ["-i", inputs.root / "loose" if name == "merge" else inputs.source, "-o", inputs.new]
    arguments: list[object] = (
        input_and_output if name in ("cpu", "gpu", "merge") else [] if name == "doctor" else [inputs.root / "output"]
    )
    required = {
        "serve": ["--cpu-weights", inputs.root / "output"],
        "eval": ["--text", documents.make_arch(inputs)],
    }.get(name, [])
    for value in (DIGITS, DIGITS * 13, f"{DIGITS}.5", "nan", "inf", "1e999"):
        assert run_command(name, *arguments, *required, option, value) == 2


TYPES = """
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: float = 0.0
class Outer(msgspec.Struct):
    x: Inner | msgspec.UnsetType = msgspec.UNSET
    y: Inner | msgspec.UnsetType = msgspec.UNSET
"""
CONCURRENT_READS = """
import sys, threading, types
from ktconvert.layouts.files import documents
sys.setswitchinterval(1e-6)
for number in range(1000):
    sys.modules[f"m{number}"] = module = types.ModuleType(f"m{number}")
    exec(compile(sys.argv[1], module.__name__, "exec"), module.__dict__)
    barrier = threading.Barrier(3)
    def read():
        barrier.wait()
        documents.as_type({"x": {"a": 1.0}, "y": {}}, module.Outer)
        documents.decode_document(b'{"x": {"a": 1.0}}', module.Outer)
    threads = [threading.Thread(target=read) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_can_read_a_new_type_at_the_same_time() -> None:
    """Without a lock, msgspec 0.22 crashes. Each thread checks the results of its units."""
    result = subprocess.run(
        [sys.executable, "-c", CONCURRENT_READS, TYPES], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
