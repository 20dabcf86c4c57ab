"""Resuming with a torn journal, a damaged plan or existing layers, and what survives a power failure."""

import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.pipeline.cli import main
from ktconvert.pipeline.engine import journal
from rig import conversion, killpoint
from rig.bench import CONVERSIONS, LAYERS, Bench


@pytest.fixture
def stopped(bench: Bench) -> Any:
    """Stop a conversion after two of three units; return its journal, whose last line records the second unit."""
    bench.stop_after(2)
    path = bench.work / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if b'"done"' in line)
    path.write_bytes(b"".join(lines[: last + 1]))
    return path


def test_a_torn_last_line_is_ignored(tmp_path, stopped):
    whole = stopped.read_bytes()
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "torn.jsonl"
    for size in range(len(whole) - len(lines[-1]), len(whole)):
        path.write_bytes(whole[:size])
        assert len(journal.find_finished_units(journal.read_records(path))) == 1
        book = journal.Journal(path)
        assert len(journal.find_finished_units(book.records)) == 1
        book.append(journal.End(at=1.5), sync=True)
        book.close()
        assert path.read_bytes() == b"".join(lines[:-1]) + b'{"event": "end", "at": 1.5}\n'


def test_a_failed_append_keeps_other_records(tmp_path):
    path, limit = tmp_path / "journal.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    book = journal.Journal(path)
    book.append(journal.Start(unit="first"))
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))  # space for part of a line
    try:
        with pytest.raises(ResourceError):
            book.append(journal.Start(unit="second"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    book.append(journal.Start(unit="third"))
    book.close()
    assert [record.unit for record in journal.read_records(path) if isinstance(record, journal.Start)] == [
        "first",
        "third",
    ]


# Changes of the journal, whose last line records the second of three units, and the number of units made again.
JOURNAL_DAMAGE: dict[str, tuple[Callable[[bytes, int], bytes | None], int]] = {
    "none of the last record": (lambda whole, last: whole[:-last], 2),
    "zeros after it": (lambda whole, last: whole + bytes(4096), 1),
    "no UTF-8": (lambda whole, last: whole + b"\xff\xfe\n", 1),
    "another kind of JSON": (lambda whole, last: whole + b"[1, 2]\n17\nnull\n", 1),
    "nested without end": (lambda whole, last: whole + b"[" * 100_000 + b"\n", 1),
    "no file": (lambda whole, last: None, LAYERS),
    "empty": (lambda whole, last: b"", LAYERS),
}


@pytest.mark.parametrize("damage", JOURNAL_DAMAGE)
def test_resume_uses_the_intact_part_of_a_journal(bench, stopped, damage):
    change, remade = JOURNAL_DAMAGE[damage]
    expected, content_before = bench.convert_fresh(), stopped.read_bytes()
    content = change(content_before, len(content_before.splitlines(keepends=True)[-1]))
    stopped.unlink()
    if content is not None:
        stopped.write_bytes(content)
    assert bench.run("resume", bench.output).returncode == 0 and bench.count_written_units() == remade
    bench.check_output(expected)


def test_a_truncated_file_in_the_store_is_made_again(bench, stopped):
    expected = bench.convert_fresh()
    shard = min((bench.work / "store").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    assert bench.run("resume", bench.output).returncode == 0 and bench.count_written_units() == 2
    bench.check_output(expected)


@pytest.mark.parametrize("options", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_a_flipped_bit_in_the_store_is_repaired(bench, options):
    expected = bench.convert_fresh(*options)
    bench.stop_after(2, *options)
    victim = min(path for path in (bench.work / "store").rglob("*") if path.is_file())
    conversion.flip_bit(victim, keep_time=True)
    trusting = bench.base / "trusting" / "out"
    shutil.copytree(bench.work, trusting.with_name("out.work"))
    result = bench.run("resume", bench.output)
    assert f"warning: experts.layer-000 is converted again: the SHA-256 of {victim} has changed" in result.stderr
    assert bench.count_written_units() == 2
    bench.check_output(expected)
    assert bench.run("resume", trusting, "--trust-store").returncode == 0
    assert len(conversion.find_differences(conversion.tree(trusting), expected)) == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "no settings": lambda data: re.sub(rb'"settings"', b'"sittings"', data),
    "settings are a list": lambda data: json.dumps(json.loads(data) | {"settings": []}).encode(),
    "of a later version": lambda data: re.sub(rb'("ktconvert-plan": )1', rb"\g<1>2", data),
    "an unknown command": lambda data: re.sub(rb'("command": )"cpu"', rb'\1"cup"', data),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("again", ["resume", "the same command"])
def test_a_damaged_plan_is_refused(bench, stopped, how, again):
    plan = bench.work / "plan.json"
    plan.write_bytes(DAMAGE[how](plan.read_bytes()))
    store = conversion.tree(bench.work / "store")
    result = bench.run("resume", bench.output) if again == "resume" else bench.cpu()
    conversion.check_refusal(result, 7, str(bench.work if how != "an unknown command" else bench.output))
    assert conversion.tree(bench.work / "store") == store


def test_resume_reports_kills_for_memory(bench, monkeypatch, capsys):
    """The kernel's count cannot be raised here, so the test replaces it."""
    bench.stop_after(1)
    path = bench.work / "journal.jsonl"
    path.write_text(re.sub(r'"oom_kills": \w+', '"oom_kills": 4', path.read_text()))
    for kills, reported in ((4, False), (5, True)):
        monkeypatch.setattr(machine, "oom_kills", lambda kills=kills: kills)
        with pytest.raises(SystemExit) as end:
            monkeypatch.setattr(sys, "argv", ["ktconvert", "resume", str(bench.output), "--max-memory", "1MB"])
            main()
        assert end.value.code == 4  # the memory limit is refused after the last run was reported
        stderr = capsys.readouterr().err
        assert "1 of 3 units finished and kept" in stderr
        assert ("the kernel has killed a process for memory since" in stderr) == reported


def test_a_kill_during_assembly_is_reported(bench):
    expected = bench.convert_fresh()
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    assert bench.cpu(kill=last).returncode == killpoint.KILLED
    result = bench.run("resume", bench.output)
    assert "was stopped in assemble; 3 of 3 units finished" in result.stderr and bench.count_written_units() == 0
    bench.check_output(expected)


def test_an_output_made_from_a_copy_of_the_source_is_finished(bench):
    """The message says what was compared, as the weights were not."""
    assert bench.cpu().returncode == 0
    copy = shutil.copytree(bench.source, bench.source.with_name("copy"))
    result = bench.run("cpu", "-i", copy, "-o", bench.output)
    compared = "made with these options, from files with the names, sizes and headers of this input"
    assert result.returncode == 0
    following = f"next: ktconvert verify {bench.output} --against {copy}"
    assert result.stderr.endswith(f"is finished: nothing to do ({compared}); {following}\n")
    assert "warning" not in result.stderr  # copytree keeps the times


def test_a_source_that_is_newer_than_the_finished_output_gives_a_warning(bench):
    """With a hash of its content, recorded and made again, the time says nothing."""
    weights = min(bench.source.glob("*.safetensors"))
    warning = f"warning: {weights} was modified after {bench.output} was made; if it has other weights now, replace"
    for options, more in (((), ()), ((), ("--verify-inputs",)), (("--verify-inputs",), ("--verify-inputs",))):
        assert bench.cpu("--overwrite", *options).returncode == 0
        os.utime(weights)
        result = bench.cpu(*more)
        assert result.returncode == 0 and "is finished: nothing to do" in result.stderr
        assert (warning in result.stderr) == (not options), (options, more)


def test_a_finished_output_is_left_unchanged(bench):
    assert bench.cpu().returncode == 0
    before = conversion.identity(bench.output)
    for again in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--threadpool-count", "2")):
        assert again.returncode == 0 and "is finished: nothing to do" in again.stderr
    assert conversion.identity(bench.output) == before
    assert conversion.names(bench.output.parent) == ["out"]


class Disk:
    """The state of a disk if the power failed now: names and contents are safe after they were synced."""

    def __init__(self) -> None:
        self.contents: set[str] = set()  # files whose content was not synced
        self.names: set[str] = set()  # entries of folders that were not synced

    def apply(self, call: Any) -> None:
        """Apply a call."""
        name, path, second = call
        match name:
            case "open":
                self.names.add(path)
                self.contents.add(path)
            case "write" | "pwrite" | "ftruncate" | "posix_fallocate":
                self.contents.add(path)
            case "mkdir":
                self.names.add(path)
            case "link":
                self.names.add(second)
                if path in self.contents:
                    self.contents.add(second)
            case "rename":
                for known in (self.contents, self.names):
                    for old in [p for p in known if p == path or p.startswith(f"{path}/")]:
                        known.discard(old)
                        known.add(second + old.removeprefix(path))
                self.names.add(second)
            case "fsync":
                self.contents.discard(path)
                self.names = {p for p in self.names if str(Path(p).parent) != path}
            case "syncfs":
                self.contents.clear()
                self.names.clear()
            case "unlink" | "unlinkat" | "rmdir":
                self.contents.discard(path)
                self.names.discard(path)

    def unsafe(self, below: str) -> set[str]:
        """Return the parts of this file or folder, and of the names above it, that would be lost."""
        above = {below, *(str(p) for p in Path(below).parents)}
        return {p for p in self.contents | self.names if p in above or p.startswith(f"{below}/")} - {"."}


@pytest.mark.parametrize("over", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_units_are_recorded_after_they_are_durable(bench, name, over):
    if over:
        assert bench.begin(name).returncode == 0
    assert bench.begin(name, *(["--overwrite"] if over else [])).returncode == 0
    disk, stored, recorded, appeared, synced = Disk(), [], 0, 0, 0
    base = str(bench.output.parent)
    for call in bench.calls():
        call = call._replace(path="." if call.path == base else call.path)
        if call.name == "rename" and call.second.startswith("out.work/store/"):
            assert disk.unsafe(call.path) <= {call.path, "out.work/partial"}, f"{call.path} is published, not synced"
            assert call.path not in disk.contents
            stored.append(call.second)
            synced = 0
        synced += call[:2] == ("fsync", "out.work/journal.jsonl")
        if call[:2] in (("pwrite", "out.work/journal.jsonl"), ("write", "out.work/journal.jsonl")):
            for unit in stored:
                assert disk.unsafe(unit) == set(), f"{unit} may be recorded before it is durable"
        if call.name in ("rename", "renameat2") and call.second == "out":
            if over and call.name == "rename":
                continue  # refused because the output exists; then the two are swapped
            assert disk.unsafe("out.work/out") - {"out.work/out"} == set()
            assert synced == 2, "the last unit is recorded after it was published, and then that all is assembled"
            recorded, appeared = len(stored), appeared + 1
            call = call._replace(name="rename")
        if call.name in ("unlink", "unlinkat", "rmdir") and appeared:
            assert disk.unsafe("out") == set(), "the work folder is removed before the output is durable"
        disk.apply(call)
    assert appeared == 1 and recorded == len(stored) > 0
    assert disk.unsafe("out") == set()


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_index_is_moved_last(bench, name):
    """An output that is a link to a folder cannot be replaced by a rename."""
    real = bench.output.with_name("out-real")
    real.mkdir()
    bench.output.symlink_to(real)
    assert bench.begin(name).returncode == 0
    seen = False
    disk, last = Disk(), "manifest.json" if name == "loose" else "model.safetensors.index.json"

    def ours() -> set[str]:
        return {name for name in disk.unsafe("out-real") if ".ktconvert" not in name}

    for call in bench.calls():
        if call.name == "rename" and call.second == f"out-real/{last}":
            seen = True
            assert ours() == set(), "the index comes before what it names is durable"
        disk.apply(call)
    assert seen and ours() == set()


def test_resume_layer_is_ignored_with_a_journal(bench):
    expected = bench.convert_fresh("--no-merge-safetensor")
    bench.stop_after(1, "--no-merge-safetensor")  # layer 0 is done, 1 and 2 are missing
    result = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert result.returncode == 0, result.stderr
    assert bench.count_written_units() == 2
    bench.check_output(expected)
    assert "nothing to do" in bench.cpu("--no-merge-safetensor", "--resume-layer", "2").stderr


@pytest.fixture
def kt_layers(bench: Bench) -> Callable[[int], dict[str, Any]]:
    """Return a function that reduces the output to loose folders of some layers, as kt-kernel writes them."""

    def make(layers: int) -> dict[str, Any]:
        assert bench.cpu("--no-merge-safetensor").returncode == 0
        for path in bench.output.iterdir():
            if path.is_file():
                path.unlink()
            elif not path.name.startswith("_layer_") or int(path.name[7:]) >= layers:
                shutil.rmtree(path)
        return {name: seen for name, seen in conversion.identity(bench.output).items() if name.endswith(".kt")}

    return make


def kt_files(tree: Any) -> Any:
    """Return the .kt files of a tree."""
    return {name: data for name, data in tree.items() if name.endswith(".kt")}


def test_resume_layer_keeps_complete_layers(bench, kt_layers):
    expected = kt_files(bench.convert_fresh("--no-merge-safetensor"))
    before = kt_layers(2)
    result = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert result.returncode == 0, result.stderr
    assert bench.count_written_units() == 1 and kt_files(conversion.tree(bench.output)) == expected
    after = conversion.identity(bench.output)
    assert before == {name: after[name] for name in before}  # also the same inodes and times
    assert not (bench.output / ".ktconvert").exists()
    assert conversion.names(bench.output.parent) == ["out"]
    names = {file["name"] for file in json.loads((bench.output / "manifest.json").read_text())["files"]}
    assert set(expected) <= names
    assert "nothing to do" in bench.cpu("--no-merge-safetensor", "--resume-layer", "2").stderr


def test_files_beside_kept_layers_are_not_replaced(bench, kt_layers):
    kt_layers(2)
    shutil.copy(bench.source / "tokenizer.json", bench.output)
    (bench.output / "README.md").write_text("mine")
    before = conversion.identity(bench.output)
    conversion.check_refusal(
        bench.cpu("--no-merge-safetensor", "--resume-layer", "2"), 7, str(bench.output / "README.md")
    )
    assert conversion.identity(bench.output) == before
    (bench.output / "README.md").unlink()
    result = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")  # an equal tokenizer is allowed
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("layers", [1, 2])
def test_resume_layer_redoes_incomplete_layers(bench, kt_layers, layers):
    """Layer 1 is kept if it exists."""
    expected = kt_files(bench.convert_fresh("--no-merge-safetensor"))
    before = kt_layers(layers)
    cut = next((bench.output / "_layer_0").rglob("*quant_.kt"))
    cut.write_bytes(cut.read_bytes()[:-1])
    next((bench.output / "_layer_0").rglob("*scale_.kt")).unlink()
    result = bench.cpu("--no-merge-safetensor", "--resume-layer", str(layers))
    assert result.returncode == 0, result.stderr
    assert bench.count_written_units() == 4 - layers and kt_files(conversion.tree(bench.output)) == expected
    after = conversion.identity(bench.output)
    assert all(before[name] == after[name] for name in before if "_layer_1" in name)


def test_resume_layer_completes_after_a_kill(bench, kt_layers):
    kt_layers(2)
    kept = bench.base / "kept"
    shutil.copytree(bench.output, kept)
    command = ("--no-merge-safetensor", "--resume-layer", "2")
    assert bench.cpu(*command).returncode == 0
    expected, points = conversion.tree(bench.output), len(bench.calls())
    for n in conversion.choose_kill_points(points, 10):
        shutil.rmtree(bench.output)
        shutil.copytree(kept, bench.output)
        assert bench.cpu(*command, kill=n).returncode == killpoint.KILLED
        died = killpoint.find_prevented_call(bench.log)
        by_name = n % 2 and (bench.output / ".ktconvert/plan.json").exists()
        result = bench.run("resume", bench.output) if by_name else bench.cpu(*command)
        assert result.returncode == 0, f"{died}: {result.stderr}"
        assert conversion.find_differences(conversion.tree(bench.output), expected) == [], died
        assert conversion.names(bench.output.parent) == ["out"]


@pytest.mark.parametrize("loose", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_resume_layer_without_layers_excludes_earlier_ones(bench, loose):
    dry = bench.cpu(*loose, "--resume-layer", "1", "--dry-run")
    assert dry.returncode == 0 and "skipped because of --layers or --resume-layer: layer 0" in dry.stderr
    assert conversion.names(bench.output.parent) == []
    assert bench.cpu(*loose, "--resume-layer", "1", kill=40).returncode == killpoint.KILLED
    result = bench.run("resume", bench.output)
    assert result.returncode == 0, result.stderr
    document = json.loads((bench.output / "manifest.json").read_text())
    assert document["model"]["layers"] == [1, 2]
    assert "nothing to do" in bench.cpu(*loose, "--resume-layer", "1").stderr
