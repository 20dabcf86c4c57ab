"""Resumed from what lies beside the output: a torn journal, a damaged plan, layers that are there; and what survives a
power cut.
"""

import json
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
    """A conversion killed after two of three units; the journal's last line is the record of the second."""
    bench.stop_after(2)
    path = bench.work / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if b'"done"' in line)
    path.write_bytes(b"".join(lines[: last + 1]))
    return path


def test_a_torn_last_line_does_not_count(tmp_path, stopped):
    whole = stopped.read_bytes()
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "torn.jsonl"
    for size in range(len(whole) - len(lines[-1]), len(whole)):
        path.write_bytes(whole[:size])
        assert len(journal.find_finished_units(journal.read(path))) == 1
        book = journal.Journal(path)
        assert len(journal.find_finished_units(book.records)) == 1
        book.append(journal.End(at=1.5), sync=True)
        book.close()
        assert path.read_bytes() == b"".join(lines[:-1]) + b'{"event": "end", "at": 1.5}\n'


def test_a_record_that_did_not_fit_hides_no_other(tmp_path):
    path, limit = tmp_path / "journal.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    book = journal.Journal(path)
    book.append(journal.Start(unit="first"))
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))  # room for a part of a line
    try:
        with pytest.raises(ResourceError):
            book.append(journal.Start(unit="second"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    book.append(journal.Start(unit="third"))
    book.close()
    assert [record.unit for record in journal.read(path) if isinstance(record, journal.Start)] == ["first", "third"]


# What the journal's bytes become, the last line being the record of the second of three units -> units made again.
GARBAGE: dict[str, tuple[Callable[[bytes, int], bytes | None], int]] = {
    "none of the last record": (lambda whole, last: whole[:-last], 2),
    "zeros after it": (lambda whole, last: whole + bytes(4096), 1),
    "no UTF-8": (lambda whole, last: whole + b"\xff\xfe\n", 1),
    "another kind of JSON": (lambda whole, last: whole + b"[1, 2]\n17\nnull\n", 1),
    "nested without end": (lambda whole, last: whole + b"[" * 100_000 + b"\n", 1),
    "no file": (lambda whole, last: None, LAYERS),
    "empty": (lambda whole, last: b"", LAYERS),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_resumed_from_a_torn_journal(bench, stopped, what):
    change, remade = GARBAGE[what]
    expected, whole = bench.convert_fresh(), stopped.read_bytes()
    content = change(whole, len(whole.splitlines(keepends=True)[-1]))
    stopped.unlink()
    if content is not None:
        stopped.write_bytes(content)
    assert bench.run("resume", bench.output).returncode == 0 and bench.count_written_units() == remade
    bench.check_output(expected)


def test_a_file_cut_off_in_the_store_is_made_again(bench, stopped):
    expected = bench.convert_fresh()
    shard = min((bench.work / "store").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    assert bench.run("resume", bench.output).returncode == 0 and bench.count_written_units() == 2
    bench.check_output(expected)


@pytest.mark.parametrize("words", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_a_bit_that_flipped_in_the_store_is_made_again(bench, words):
    expected = bench.convert_fresh(*words)
    bench.stop_after(2, *words)
    victim = min(path for path in (bench.work / "store").rglob("*") if path.is_file())
    conversion.flip_bit(victim, keep_time=True)
    trusting = bench.base / "trusting" / "out"
    shutil.copytree(bench.work, trusting.with_name("out.work"))
    done = bench.run("resume", bench.output)
    assert f"warning: experts.layer-000 is converted again: the SHA-256 of {victim} has changed" in done.stderr
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
    done = bench.run("resume", bench.output) if again == "resume" else bench.cpu()
    conversion.check_refusal(done, 7, str(bench.work if how != "an unknown command" else bench.output))
    assert conversion.tree(bench.work / "store") == store


def test_the_next_start_says_that_memory_ran_out(bench, monkeypatch, capsys):
    """What the kernel counts cannot be raised here, so the count is another one."""
    bench.stop_after(1)
    path = bench.work / "journal.jsonl"
    path.write_text(re.sub(r'"oom_kills": \w+', '"oom_kills": 4', path.read_text()))
    for kills, reported in ((4, False), (5, True)):
        monkeypatch.setattr(machine, "oom_kills", lambda kills=kills: kills)
        with pytest.raises(SystemExit) as end:
            monkeypatch.setattr(sys, "argv", ["ktconvert", "resume", str(bench.output), "--max-memory", "1MB"])
            main()
        assert end.value.code == 4  # one that small is refused, after it was said how the last run ended
        stderr = capsys.readouterr().err
        assert "1 of 3 units are finished and kept" in stderr
        assert ("the kernel has killed for memory since then" in stderr) == reported


def test_a_death_at_the_very_end_is_reported_too(bench):
    expected = bench.convert_fresh()
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    assert bench.cpu(kill=last).returncode == killpoint.KILLED
    done = bench.run("resume", bench.output)
    assert "died in assemble; 3 of 3 units are finished" in done.stderr and bench.count_written_units() == 0
    bench.check_output(expected)


def test_a_finished_output_has_nothing_to_do(bench):
    assert bench.cpu().returncode == 0
    before = conversion.identity(bench.output)
    for again in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--threadpool-count", "2")):
        assert again.returncode == 0 and "is finished: nothing to do" in again.stderr
    assert conversion.identity(bench.output) == before
    assert conversion.names(bench.output.parent) == ["out"]


class Disk:
    """What would be left of the calls so far if the power went now: names and contents count once they were synced."""

    def __init__(self) -> None:
        self.contents: set[str] = set()  # files whose content was not synced
        self.names: set[str] = set()  # entries of folders that were not synced

    def apply(self, call: Any) -> None:
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
        """What of this file or folder would be lost, the names above it too."""
        above = {below, *(str(p) for p in Path(below).parents)}
        return {p for p in self.contents | self.names if p in above or p.startswith(f"{below}/")} - {"."}


@pytest.mark.parametrize("over", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("which", CONVERSIONS)
def test_nothing_counts_before_it_is_durable(bench, which, over):
    if over:
        assert bench.begin(which).returncode == 0
    assert bench.begin(which, *(["--overwrite"] if over else [])).returncode == 0
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
                continue  # refused, since something lies there; then the two are swapped
            assert disk.unsafe("out.work/out") - {"out.work/out"} == set()
            assert synced == 2, "the last unit is recorded after it was published, and then that all is assembled"
            recorded, appeared = len(stored), appeared + 1
            call = call._replace(name="rename")
        if call.name in ("unlink", "unlinkat", "rmdir") and appeared:
            assert disk.unsafe("out") == set(), "the work folder is removed before the output is durable"
        disk.apply(call)
    assert appeared == 1 and recorded == len(stored) > 0
    assert disk.unsafe("out") == set()


@pytest.mark.parametrize("which", CONVERSIONS)
def test_where_files_move_in_the_index_comes_last(bench, which):
    """An output that is a link to a folder cannot be renamed to."""
    real = bench.output.with_name("out-real")
    real.mkdir()
    bench.output.symlink_to(real)
    assert bench.begin(which).returncode == 0
    seen = False
    disk, last = Disk(), "manifest.json" if which == "loose" else "model.safetensors.index.json"

    def ours() -> set[str]:
        return {name for name in disk.unsafe("out-real") if ".ktconvert" not in name}

    for call in bench.calls():
        if call.name == "rename" and call.second == f"out-real/{last}":
            seen = True
            assert ours() == set(), "the index comes before what it names is durable"
        disk.apply(call)
    assert seen and ours() == set()


def test_resume_layer_changes_nothing_where_our_journal_exists(bench):
    expected = bench.convert_fresh("--no-merge-safetensor")
    bench.stop_after(1, "--no-merge-safetensor")  # layer 0 is done, 1 and 2 are missing
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.count_written_units() == 2
    bench.check_output(expected)
    assert "nothing to do" in bench.cpu("--no-merge-safetensor", "--resume-layer", "2").stderr


@pytest.fixture
def kt_layers(bench: Bench) -> Callable[[int], dict[str, Any]]:
    """Makes the output look like kt-kernel's after so many layers: loose folders and nothing else."""

    def make(layers: int) -> dict[str, Any]:
        assert bench.cpu("--no-merge-safetensor").returncode == 0
        for path in bench.output.iterdir():
            if path.is_file():
                path.unlink()
            elif not path.name.startswith("_layer_") or int(path.name[7:]) >= layers:
                shutil.rmtree(path)
        return {name: seen for name, seen in conversion.identity(bench.output).items() if name.endswith(".kt")}

    return make


def weights(tree: Any) -> Any:
    return {name: data for name, data in tree.items() if name.endswith(".kt")}


def test_resume_layer_keeps_complete_layers_and_adds_the_rest(bench, kt_layers):
    expected = weights(bench.convert_fresh("--no-merge-safetensor"))
    before = kt_layers(2)
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.count_written_units() == 1 and weights(conversion.tree(bench.output)) == expected
    after = conversion.identity(bench.output)
    assert before == {name: after[name] for name in before}  # same inodes, times and all
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
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")  # the same tokenizer is no matter
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layers", [1, 2])
def test_resume_layer_redoes_incomplete_layers(bench, kt_layers, layers):
    """Where layer 1 is there, it is kept; else there is none to be kept."""
    expected = weights(bench.convert_fresh("--no-merge-safetensor"))
    before = kt_layers(layers)
    cut = next((bench.output / "_layer_0").rglob("*quant_.kt"))
    cut.write_bytes(cut.read_bytes()[:-1])
    next((bench.output / "_layer_0").rglob("*scale_.kt")).unlink()
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", str(layers))
    assert done.returncode == 0, done.stderr
    assert bench.count_written_units() == 4 - layers and weights(conversion.tree(bench.output)) == expected
    after = conversion.identity(bench.output)
    assert all(before[name] == after[name] for name in before if "_layer_1" in name)


def test_killed_while_adding_to_kept_layers(bench, kt_layers):
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
        done = bench.run("resume", bench.output) if by_name else bench.cpu(*command)
        assert done.returncode == 0, f"{died}: {done.stderr}"
        assert conversion.find_differences(conversion.tree(bench.output), expected) == [], died
        assert conversion.names(bench.output.parent) == ["out"]


@pytest.mark.parametrize("loose", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_resume_layer_with_nothing_there_leaves_layers_out(bench, loose):
    dry = bench.cpu(*loose, "--resume-layer", "1", "--dry-run")
    assert dry.returncode == 0 and "layers 0 are left out" in dry.stderr
    assert conversion.names(bench.output.parent) == []
    assert bench.cpu(*loose, "--resume-layer", "1", kill=40).returncode == killpoint.KILLED
    done = bench.run("resume", bench.output)
    assert done.returncode == 0, done.stderr
    document = json.loads((bench.output / "manifest.json").read_text())
    assert document["model"]["layers"] == [1, 2]
    assert "nothing to do" in bench.cpu(*loose, "--resume-layer", "1").stderr
