"""Files that we read, damaged in every way that a fuzzer finds: one sentence and a documented exit code, or success."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import numpy as np
import pytest

from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS
from ktconvert.layouts.checkpoints.config import quantization
from ktconvert.layouts.checkpoints.containers.safetensors import read_header, read_index
from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint, read_config
from ktconvert.layouts.errors import KtconvertError
from ktconvert.layouts.outputs.measuring import measure
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.native_quant.runtime import hot_mask
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.pipeline import cli
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.existing import agree, saved_plan, unit_states
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.options.queries import Counts
from ktconvert.pipeline.options.types import Size
from ktconvert.pipeline.plans.commands import plan_request, saved_request
from ktconvert.pipeline.verify.structure import check_structure
from rig import conversion, gguf, mutations
from rig.files import edit_json, touch
from rig.safetensors import write_file

CODES = {0, 1, 2, 3, 4, 5, 6, 7}
SENTENCE = 2000  # characters; longer is no sentence
PARTS = ("--threadpool-count", 1)
RTN = ("--quant-method", "rtn", "--quant-type", "w4a16")
ARCH = """name = "Mine"
matches = ["qwen3_moe"]
activation = "silu"
weights_on = "output"
layers = ["num_hidden_layers"]
experts = ["num_experts"]

[[stored]]
style = "separate"
gate = "{prefix}layers.{layer}.mlp.experts.{expert}.gate_proj.weight"
up   = "{prefix}layers.{layer}.mlp.experts.{expert}.up_proj.weight"
down = "{prefix}layers.{layer}.mlp.experts.{expert}.down_proj.weight"
"""


@pytest.fixture(autouse=True)
def usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A usage is one line, however narrow the terminal of whoever runs the tests."""
    monkeypatch.setenv("COLUMNS", "80")


def command(*arguments: object, words: str = "") -> int:
    """Run a command in this process, as the real one; its exit code. A failure is one sentence, with these words."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before, sys.argv = sys.argv, ["ktconvert", *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    err.seek(0)
    lines = [line for line in err.read().splitlines() if not line.startswith(("note: ", "warning: ", "page: "))]
    assert code in CODES, (code, lines)
    if code:
        usage = [line for line in lines if not line.startswith(("Usage: ", "Try ")) and line]
        assert len(usage) == 1, lines
        assert usage[0].startswith("Error: " if len(usage) < len(lines) else "ktconvert: "), lines
        assert len(usage[0]) < SENTENCE, lines
        assert words in usage[0]
    return code


class Paths(NamedTuple):
    """A checkpoint, its outputs, and a conversion that was interrupted in its second layer."""

    root: Path
    source: Path
    output: Path  # AMXINT4
    packed: Path  # W4A16
    loose: Path
    panels: Path  # MXFP4, in NUMA parts
    native: Path  # FP8, as kt-kernel's method reads it
    broken: Path
    arch: Path  # a row of the architecture table
    gguf: Path
    mask: Path  # which experts are hot
    plan: Plan
    opened: TensorSource


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("fuzz")
    source = conversion.checkpoint(root / "source", layers=2, experts=1)
    for words in (
        ["cpu", "-o", root / "output", *PARTS],
        ["cpu", "-o", root / "loose", *PARTS, "--no-merge-safetensor"],
        ["gpu", "-o", root / "packed", *RTN],
        ["cpu", "-o", root / "panels", *PARTS, "--quant-method", "mxfp4"],
        ["cpu", "-o", root / "native", *PARTS, "--quant-method", "fp8", "--layout", "kt"],
    ):
        assert command(*words, "-i", source, "-q") == 0
    shard = source / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xc0\x7f")  # NaN
    assert command("cpu", "-i", source, "-o", root / "broken", *PARTS, "--cpuinfer-threads", 1, "-q") == 5
    old = saved_plan(locate(root / "broken"))
    assert old is not None
    plan = plan_request(saved_request(root / "broken", old))
    (root / "arch.toml").write_text(ARCH)
    tensors = gguf.model([("Q4_0", "Q8_0", "F16")], experts=1, hidden=128, width=128)
    about = gguf.about(1, embedding_length=128, expert_count=1, expert_feed_forward_length=128)
    gguf.write(root / "model.gguf", tensors, about)
    write_file(root / "mask.safetensors", {hot_mask.KEY: ("BOOL", np.array([[True], [False]]))})
    outputs = (root / name for name in ("output", "packed", "loose", "panels", "native", "broken"))
    files = (root / name for name in ("arch.toml", "model.gguf", "mask.safetensors"))
    return Paths(root, source, *outputs, *files, plan, open_checkpoint(source))


class Subject(NamedTuple):
    """A file that is damaged: where it lies, how, what reads it (here, and from the command line)."""

    file: Callable[[Paths], Path]
    kind: Callable[[Random, bytes], bytes]
    read: Callable[[Paths, Path], object]
    commands: Callable[[Paths], list[list[object]]]


def work(paths: Paths) -> Any:
    return locate(paths.broken)


def read_plan(paths: Paths, _: Path) -> None:
    old = saved_plan(work(paths))
    if old is not None:
        agree(paths.plan, old, False)


def read_journal(paths: Paths, path: Path) -> None:
    records = journal.read(path)
    journal.last_run(records)
    journal.assembled(records)
    unit_states(paths.plan, work(paths))


def read_output(root: Path) -> None:
    output = open_output(root)
    check_structure(output, measure(output))


def load_output(root: Path) -> None:
    read_output(root)
    touch(root)  # what it knows of a directory it keeps until that changes
    Experts.load(root, 0).close()


def read_architecture(paths: Paths, _: Path) -> None:
    root, opened, config = paths.source, paths.opened, read_config(paths.source)
    recognise(TensorSource(root, config, opened.shards, opened.tensors, root, quantization(config)))


def read_arch(paths: Paths, path: Path) -> None:
    row = parse_arch(path.read_text(encoding="utf-8", errors="replace"))
    recognise(paths.opened, (row, *ARCHS))


def new(paths: Paths) -> Path:
    return paths.root / "new"


def of_model(paths: Paths) -> list[list[object]]:
    where = ["-i", paths.gguf, "-o", new(paths)]
    return [["inspect", paths.gguf], ["cpu", *where, *PARTS, "--dry-run"], ["gpu", *where, *RTN, "--dry-run"]]


def read_mask(_: Paths, path: Path) -> None:
    hot_mask.per_layer(str(path), None, {0: 1, 1: 1}, 2)


def of_source(paths: Paths) -> list[list[object]]:
    return [
        ["inspect", paths.source],
        ["cpu", "-i", paths.source, "-o", new(paths), *PARTS, "--dry-run"],
        ["gpu", "-i", paths.source, "-o", new(paths), *RTN, "--dry-run"],
        ["merge", "-i", paths.loose, "-r", paths.source, "-o", new(paths), "--dry-run"],
        ["verify", paths.output, "--against", paths.source, "--report", paths.root / "report.html"],
    ]


def of_broken(paths: Paths) -> list[list[object]]:
    return [["inspect", paths.broken], ["resume", paths.broken, "--dry-run"]]


def of_output(root: Path) -> list[list[object]]:
    resplit = ["resplit", root, root.with_name("new"), "--threadpool-count", 1, "--dry-run"]
    page = ["--report", root.with_name("report.html")]
    return [["inspect", root], ["verify", root, *page], ["resume", root, "--dry-run"], resplit]


def of_packed(paths: Paths) -> list[list[object]]:
    check = ["verify", paths.packed, "--no-load", "--report", paths.root / "report.html"]
    return [*of_output(paths.packed)[::2], of_output(paths.packed)[3], check, [*check, "--against", paths.source]]


INDEX, MANIFEST = "model.safetensors.index.json", "manifest.json"
FIRST = "model-00001-of-0000{}.safetensors"
of_gguf, of_json, of_lines, of_safetensors, of_toml = (
    mutations.of_gguf, mutations.of_json, mutations.of_lines, mutations.of_safetensors, mutations.of_toml,
)  # fmt: skip


def of(
    folder: str, file: str, kind: Any = of_json, load: bool = False, more: Callable[[Paths], Any] = lambda _: []
) -> Subject:
    """A file of an output. load: the runtime reads it, too. more: commands."""

    def root(p: Paths) -> Path:
        return Path(getattr(p, folder))

    def commands(p: Paths) -> list[list[object]]:
        return [*(of_packed(p) if folder == "packed" else of_output(root(p))), *more(p)]

    read = load_output if load else read_output
    return Subject(lambda p: root(p) / file, kind, lambda p, _: read(root(p)), commands)


SUBJECTS: Mapping[str, Subject] = {
    "plan": Subject(lambda p: work(p).plan, of_json, read_plan, lambda p: [*of_broken(p), ["verify", p.broken]]),
    "journal": Subject(lambda p: work(p).journal, of_lines, read_journal, of_broken),
    "manifest": of("output", MANIFEST, more=lambda p: [["cpu", "-i", p.source, "-o", p.output, *PARTS, "--dry-run"]]),
    "index": Subject(lambda p: p.source / INDEX, of_json, lambda _, path: read_index(path), of_source),
    "config": Subject(lambda p: p.source / "config.json", of_json, read_architecture, of_source),
    "header": Subject(lambda p: p.source / FIRST.format(3), of_safetensors, lambda _, p: read_header(p), of_source),
    "GGUF": Subject(lambda p: p.gguf, of_gguf, lambda _, path: recognise(open_checkpoint(path)), of_model),
    "arch file": Subject(
        lambda p: p.arch, of_toml, read_arch, lambda p: [[*words, "--arch-file", p.arch] for words in of_source(p)[:3]]
    ),
    "mask": Subject(lambda p: p.mask, of_safetensors, read_mask, lambda _: []),
}
# The same files of other outputs.
OUTPUTS: Mapping[str, Subject] = {
    "manifest of a packed output": of(
        "packed", MANIFEST, more=lambda p: [["gpu", "-i", p.source, "-o", p.packed, *RTN, "--dry-run"]]
    ),
    "manifest of a loose output": of(
        "loose", MANIFEST, more=lambda p: [["merge", "-i", p.loose, "-o", new(p), "--dry-run"]]
    ),
    "index of an output": of("output", INDEX),
    "config of an output": of("output", "config.json"),
    "config of a packed output": of("packed", "config.json"),
    "header of an output": of("output", FIRST.format(2), of_safetensors),
    "header of a packed output": of("packed", FIRST.format(3), of_safetensors),
    "manifest of panels": of("panels", MANIFEST, load=True),
    "header of panels": of("panels", FIRST.format(2), of_safetensors, load=True),
    "header of a native output": of("native", FIRST.format(2), of_safetensors, load=True),
}


@contextlib.contextmanager
def restored(path: Path) -> Any:
    """A file that is changed within; its time of change, too, is as before."""
    whole, times = path.read_bytes(), path.stat()
    path.chmod(0o644)
    try:
        yield whole
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", [*SUBJECTS, *OUTPUTS])
def test_what_reads_a_file(name: str, paths: Paths) -> None:
    subject = {**SUBJECTS, **OUTPUTS}[name]
    path = subject.file(paths)
    with restored(path) as whole:
        for seed in conversion.seeds(400 if name in SUBJECTS else 40):
            path.write_bytes(mutations.damaged(subject.kind, whole, seed))
            with contextlib.suppress(KtconvertError):
                subject.read(paths, path)


@pytest.mark.parametrize("name", [name for name in (*SUBJECTS, *OUTPUTS) if name != "mask"])
def test_commands_that_read_a_file(name: str, paths: Paths) -> None:
    subject = {**SUBJECTS, **OUTPUTS}[name]
    path, commands = subject.file(paths), subject.commands(paths)
    with restored(path) as whole:
        for number, seed in enumerate(conversion.seeds(12)):
            path.write_bytes(mutations.damaged(subject.kind, whole, seed))
            command(*commands[number % len(commands)])


def test_a_plan_whose_source_has_no_name(paths: Paths) -> None:
    with restored(work(paths).plan):
        edit_json(work(paths).plan, lambda plan: plan["source"][0].pop("name"))
        words = "not a plan (Object missing required field `name` - at `$.source[0]`)"
        assert command("resume", paths.broken, "--dry-run", words=words) == 7
    with restored(work(paths).plan):
        edit_json(work(paths).plan, lambda plan: plan["settings"].pop("scale"))
        assert command("resume", paths.broken, "--dry-run", words="cannot be understood (scale is missing)") == 7
        edit_json(work(paths).plan, lambda plan: plan["settings"].update(layers=5))
        assert command("resume", paths.broken, "--dry-run", words="cannot be understood (layers: Expected `str`") == 7


def test_a_record_without_a_fingerprint(paths: Paths) -> None:
    """What it says was done is done again."""
    path = work(paths).journal
    with restored(path) as whole:
        path.write_bytes(whole.replace(b'"fingerprint"', b'"footprint"'))
        assert journal.finished(journal.read(path)) == {}
        assert command("resume", paths.broken, "--dry-run") == 0


@pytest.mark.parametrize("name", ["\0", "x" * 300])
def test_a_record_of_a_file_that_cannot_be(name: str, paths: Paths) -> None:
    path = work(paths).journal
    with restored(path) as whole:
        path.write_bytes(whole.replace(b'"files": [[""', b'"files": [[' + json.dumps(name).encode()))
        assert journal.finished(journal.read(path))
        assert command("resume", paths.broken, "--dry-run") == 0


def test_a_manifest_of_more_experts_than_memory_holds(paths: Paths) -> None:
    with restored(paths.packed / "manifest.json"):
        edit_json(paths.packed / "manifest.json", lambda document: document["model"].update(experts=1 << 32))
        assert command("verify", paths.packed, "--no-load", words="`$.model.experts`") == 6


DIGITS = "9" * 400


def numbers() -> list[tuple[str, str]]:
    """(command, option) of all options that take a number or a size."""
    values = []
    for name in cli.COMMANDS:
        command = cli.group.get_command(click.Context(cli.group), name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.IntRange | click.FloatRange | Size | Counts):
                values.append((name, option.opts[0]))
            assert type(option.type) not in (click.IntRange, click.FloatRange), (name, option.opts)
    return values


@pytest.mark.parametrize(("name", "option"), numbers())
def test_numbers_of_any_length(name: str, option: str, paths: Paths) -> None:
    both = ["-i", paths.loose if name == "merge" else paths.source, "-o", new(paths)]
    where: list[object] = both if name in ("cpu", "gpu", "merge") else [] if name == "doctor" else [paths.output]
    more = {"serve": ["--cpu-weights", paths.output], "eval": ["--text", paths.arch]}.get(name, [])
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
