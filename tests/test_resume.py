"""What resume keeps, redoes and refuses: the order of calls, a torn journal, changed inputs and options, --resume-layer, Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ktconvert.layouts.errors import ResourceError
from ktconvert.pipeline import journal, machine
from ktconvert.pipeline.cli import main


def load(name: str) -> ModuleType:
    path = Path(__file__).parent / "rig" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


killpoint, rig, forks = load("killpoint"), load("conversion"), load("forks")
Done = subprocess.CompletedProcess[str]
LAYERS = 3


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with forks.Forks([shim], 2) as made:
        yield made


class Bench:
    """A source, an output beside it, and the command line."""

    def __init__(self, base: Path, servers: Any) -> None:
        self.base, self.servers = base, servers
        self.source: Path = rig.checkpoint(base / "source", layers=LAYERS)
        self.output = base / "made" / "out"
        self.output.parent.mkdir()
        self.work = self.output.with_name("out.work")
        self.log = base / "log"

    def run(self, *arguments: str | Path, kill: int = 0) -> Done:
        """`ktconvert` with these arguments, killed before its n-th call that changes the output or beside it."""
        self.log.unlink(missing_ok=True)
        env = {"KILLPOINT_ROOT": str(self.output), "KILLPOINT_N": str(kill), "KILLPOINT_LOG": str(self.log)}
        done: Done = self.servers.run(arguments, self.base / "said", env)
        return done

    def cpu(self, *options: str, kill: int = 0, output: Path | None = None, source: Path | None = None) -> Done:
        """`ktconvert cpu` with one thread, so that calls come in one order."""
        where = ("-i", source or self.source, "-o", output or self.output)
        return self.run("cpu", *where, "--cpuinfer-threads", "1", *options, kill=kill)

    def fresh(self, *options: str, source: Path | None = None) -> Any:
        """What an uninterrupted run makes."""
        place = self.base / "fresh"
        assert self.cpu(*options, output=place, source=source).returncode == 0
        made = rig.tree(place)
        shutil.rmtree(place)
        return made

    def calls(self) -> list[Any]:
        """The calls of the last run, in order; paths below the folder that holds the output."""
        base = f"{self.output.parent}/"
        return [
            call._replace(path=call.path.removeprefix(base), second=call.second and call.second.removeprefix(base))
            for call in killpoint.calls(self.log)
        ]

    def stop_after(self, units: int, *options: str) -> None:
        """A conversion that is killed right after so many units were recorded."""
        place = self.output
        self.output = self.base / "other" / "out"
        self.output.parent.mkdir()
        assert self.cpu(*options).returncode == 0
        calls = list(enumerate(self.calls(), 1))
        synced = [n for n, call in calls if call[:2] == ("fsync", "out.work/journal.jsonl")]
        synced[0] = next(n for n, call in calls if call.second == "out.work/plan.json")
        shutil.rmtree(self.output.parent)
        self.output = place
        assert self.cpu(*options, kill=synced[units] + 1).returncode == killpoint.KILLED
        assert len(journal.finished(journal.read(self.work / "journal.jsonl"))) == units

    def units_made(self) -> int:
        """How many units the last run made."""
        return sum(c.name == "rename" and bool(c.second) and "/store/" in c.second for c in self.calls())

    def finished_as(self, wanted: Any) -> None:
        """The output is what it should be, and nothing is left beside it."""
        assert rig.differing(rig.tree(self.output), wanted) == []
        assert rig.names(self.output.parent) == ["out"]


@pytest.fixture
def bench(tmp_path: Path, servers: Any) -> Iterator[Bench]:
    with rig.in_memory(tmp_path) as base:
        yield Bench(base, servers)


# ---- the order of calls ----------------------------------------------------------------------------------------------


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


CONVERSIONS = {
    "merged": ("cpu",),
    "loose": ("cpu", "--no-merge-safetensor"),
    "cut and copied": ("cpu", "--max-shard-size", "80KB", "--non-experts", "copy"),
    "merge": ("merge", "--max-tensors", "9"),
}


@pytest.fixture
def begun(bench: Bench) -> Callable[..., Done]:
    """Runs one of CONVERSIONS with one thread."""

    def run(which: str, *options: str, kill: int = 0) -> Done:
        command, *rest = CONVERSIONS[which]
        source = bench.source
        if command == "merge":
            source = bench.base / "loose"
            if not source.exists():
                assert bench.cpu("--no-merge-safetensor", output=source).returncode == 0
        where = ("-i", source, "-o", bench.output, "--cpuinfer-threads", "1")
        return bench.run(command, *where, *rest, *options, kill=kill)

    return run


@pytest.mark.parametrize("over", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("which", CONVERSIONS)
def test_nothing_counts_before_it_is_durable(bench: Bench, begun: Callable[..., Done], which: str, over: bool) -> None:
    if over:
        assert begun(which).returncode == 0
    assert begun(which, *(["--overwrite"] if over else [])).returncode == 0
    disk, stored, recorded, appeared = Disk(), [], 0, 0
    base = str(bench.output.parent)
    for call in bench.calls():
        call = call._replace(path="." if call.path == base else call.path)
        if call.name == "rename" and call.second.startswith("out.work/store/"):
            assert disk.unsafe(call.path) <= {call.path, "out.work/partial"}, f"{call.path} is published, not synced"
            assert call.path not in disk.contents
            stored.append(call.second)
        if call[:2] in (("pwrite", "out.work/journal.jsonl"), ("write", "out.work/journal.jsonl")):
            for unit in stored:
                assert disk.unsafe(unit) == set(), f"{unit} may be recorded before it is durable"
        if call.name in ("rename", "renameat2") and call.second == "out":
            if over and call.name == "rename":
                continue  # refused, since something lies there; then the two are swapped
            assert disk.unsafe("out.work/out") - {"out.work/out"} == set()
            recorded, appeared = len(stored), appeared + 1
            call = call._replace(name="rename")
        if call.name in ("unlink", "unlinkat", "rmdir") and appeared:
            assert disk.unsafe("out") == set(), "the work folder is removed before the output is durable"
        disk.apply(call)
    assert appeared == 1
    assert recorded == len(stored) > 0
    assert disk.unsafe("out") == set()


@pytest.mark.parametrize("which", CONVERSIONS)
def test_where_files_move_in_the_index_comes_last(bench: Bench, begun: Callable[..., Done], which: str) -> None:
    """An output that is a link to a folder cannot be renamed to."""
    real = bench.output.with_name("out-real")
    real.mkdir()
    bench.output.symlink_to(real)
    assert begun(which).returncode == 0
    seen = False
    disk, last = Disk(), "manifest.json" if which == "loose" else "model.safetensors.index.json"

    def ours() -> set[str]:
        return {name for name in disk.unsafe("out-real") if ".ktconvert" not in name}

    for call in bench.calls():
        if call.name == "rename" and call.second == f"out-real/{last}":
            seen = True
            assert ours() == set(), "the index comes before what it names is durable"
        disk.apply(call)
    assert seen
    assert ours() == set()


@pytest.mark.parametrize("which", CONVERSIONS)
def test_a_unit_is_synced_renamed_and_recorded_in_this_order(
    bench: Bench, begun: Callable[..., Done], which: str
) -> None:
    assert begun(which).returncode == 0
    calls = bench.calls()
    renames = [n for n, c in enumerate(calls) if c.name == "rename" and c.second.startswith("out.work/store/")]
    assert renames
    for n in renames:
        kind = "syncfs" if which == "loose" else "fsync"
        expected = [
            (kind, calls[n].path),
            ("rename", calls[n].path),
            ("fsync", "out.work/store"),
            ("pwrite", "out.work/journal.jsonl"),
            ("fsync", "out.work/journal.jsonl"),
        ]
        assert [c[:2] for c in calls[n - 1 : n + 4]] == expected
    last = next(n for n, c in enumerate(calls) if c.name == "rename" and c.second == "out")
    assert calls[last].path == "out.work/out"
    assert calls[last + 1][:2] == ("fsync", str(bench.output.parent))


# ---- the journal and the plan ----------------------------------------------------------------------------------------


@pytest.fixture
def stopped(bench: Bench) -> Any:
    """A conversion killed after two of three units; the journal's last line is the record of the second."""
    bench.stop_after(2)
    path = bench.work / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if b'"done"' in line)
    path.write_bytes(b"".join(lines[: last + 1]))
    return path


def test_a_torn_last_line_does_not_count(tmp_path: Path, stopped: Path) -> None:
    whole = stopped.read_bytes()
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "torn.jsonl"
    for size in range(len(whole) - len(lines[-1]), len(whole)):
        path.write_bytes(whole[:size])
        assert len(journal.finished(journal.read(path))) == 1
        book = journal.Journal(path)
        assert len(journal.finished(book.records)) == 1
        book.append({"event": "end"}, sync=True)
        book.close()
        assert path.read_bytes() == b"".join(lines[:-1]) + b'{"event": "end"}\n'


def test_a_record_that_did_not_fit_hides_no_other(tmp_path: Path) -> None:
    path, limit = tmp_path / "journal.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    book = journal.Journal(path)
    book.append({"event": "start", "unit": "first"})
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))  # room for a part of a line
    try:
        with pytest.raises(ResourceError):
            book.append({"event": "start", "unit": "second"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    book.append({"event": "start", "unit": "third"})
    book.close()
    assert [record.get("unit") for record in journal.read(path)] == [None, "first", "third"]


@pytest.mark.parametrize("left", ["none of it", "a byte", "half", "all but a brace", "all but the end of line"])
def test_resumed_from_a_torn_journal(bench: Bench, stopped: Path, left: str) -> None:
    wanted, whole = bench.fresh(), stopped.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    keep = {"none of it": 0, "a byte": 1, "half": last // 2, "all but a brace": last - 2}.get(left, last - 1)
    stopped.write_bytes(whole[: len(whole) - last + keep])
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_made() == 2
    bench.finished_as(wanted)


@pytest.mark.slow
def test_resumed_from_a_journal_torn_anywhere(bench: Bench, stopped: Path) -> None:
    wanted, whole = bench.fresh(), stopped.read_bytes()
    shutil.move(bench.work, bench.base / "kept")
    for size in range(0, len(whole), 7):
        shutil.copytree(bench.base / "kept", bench.work)
        stopped.write_bytes(whole[:size])
        done = bench.run("resume", bench.output)
        assert done.returncode == 0, f"{size} bytes: {done.stderr}"
        bench.finished_as(wanted)
        shutil.rmtree(bench.output)


GARBAGE = {
    "zeros": (bytes(4096), 1),
    "no UTF-8": (b"\xff\xfe\n", 1),
    "another kind of JSON": (b"[1, 2]\n17\nnull\n", 1),
    "nested without end": (b"[" * 100_000 + b"\n", 1),
    "half a record": (b'{"event": "done", "unit": "cpu_exp', 1),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_after_the_records_is_cut_off(bench: Bench, stopped: Path, what: str) -> None:
    garbage, made = GARBAGE[what]
    wanted = bench.fresh()
    stopped.write_bytes(stopped.read_bytes() + garbage)
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_made() == made
    bench.finished_as(wanted)


@pytest.mark.parametrize("content", [None, b"", b"\n", b'{"ktconvert-jour', bytes(100)])
def test_without_a_journal_everything_is_made_again(bench: Bench, stopped: Path, content: bytes | None) -> None:
    wanted = bench.fresh()
    stopped.unlink()
    if content is not None:
        stopped.write_bytes(content)
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_made() == LAYERS
    bench.finished_as(wanted)


def test_a_file_cut_off_in_the_store_is_made_again(bench: Bench, stopped: Path) -> None:
    wanted = bench.fresh()
    shard = min((bench.work / "store").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_made() == 2
    bench.finished_as(wanted)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "no object": lambda data: b"[]",
    "no settings": lambda data: re.sub(rb'"settings"', b'"sittings"', data),
    "settings are a list": lambda data: json.dumps(json.loads(data) | {"settings": []}).encode(),
    "of a later version": lambda data: re.sub(rb'("ktconvert-plan": )1', rb"\g<1>2", data),
    "an unknown command": lambda data: re.sub(rb'("command": )"cpu"', rb'\1"cup"', data),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("again", ["resume", "the same command"])
def test_a_damaged_plan_is_refused(bench: Bench, stopped: Path, how: str, again: str) -> None:
    plan = bench.work / "plan.json"
    plan.write_bytes(DAMAGE[how](plan.read_bytes()))
    store = rig.tree(bench.work / "store")
    done = bench.run("resume", bench.output) if again == "resume" else bench.cpu()
    rig.refused(done, 7, str(bench.work if how != "an unknown command" else bench.output))
    assert rig.tree(bench.work / "store") == store


# ---- after a death ---------------------------------------------------------------------------------------------------


def test_the_next_start_says_where_the_last_one_died(bench: Bench) -> None:
    bench.stop_after(1)
    with (bench.work / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "start", "unit": "cpu_experts.layer-001"}\n')
    dry = bench.run("resume", bench.output, "--dry-run")
    assert dry.returncode == 0
    assert re.search(r"skip  layer-000 .*finished before", dry.stderr + dry.stdout)
    done = bench.run("resume", bench.output)
    assert re.search(r"process \d+\) died in cpu_experts.layer-001; 1 of 3 units are finished and kept", done.stderr)
    assert bench.units_made() == 2


def test_the_next_start_says_that_memory_ran_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the kernel counts cannot be raised here, so the count is another one."""
    bench.stop_after(1)
    path = bench.work / "journal.jsonl"
    path.write_text(re.sub(r'"oom_kills": \w+', '"oom_kills": 4', path.read_text()))
    for kills, told in ((4, False), (5, True)):
        monkeypatch.setattr(machine, "oom_kills", lambda kills=kills: kills)
        with pytest.raises(SystemExit) as end:
            monkeypatch.setattr(sys, "argv", ["ktconvert", "resume", str(bench.output), "--max-memory", "1MB"])
            main()
        assert end.value.code == 4  # one that small is refused, after it was said how the last run ended
        said = capsys.readouterr().err
        assert "1 of 3 units are finished and kept" in said
        assert ("the kernel has killed for memory since then" in said) == told


def test_a_death_at_the_very_end_is_told_too(bench: Bench) -> None:
    wanted = bench.fresh()
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    assert bench.cpu(kill=last).returncode == killpoint.KILLED
    done = bench.run("resume", bench.output)
    assert "died in assemble; 3 of 3 units are finished" in done.stderr
    assert bench.units_made() == 0
    bench.finished_as(wanted)


def test_a_finished_output_has_nothing_to_do(bench: Bench) -> None:
    assert bench.cpu().returncode == 0
    before = rig.identity(bench.output)
    for again in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--threadpool-count", "2")):
        assert again.returncode == 0
        assert "is finished: nothing to do" in again.stderr
    assert rig.identity(bench.output) == before
    assert rig.names(bench.output.parent) == ["out"]


def test_nothing_was_begun(bench: Bench) -> None:
    rig.refused(bench.run("resume", bench.output), 7, "no conversion into it was begun")
    assert rig.names(bench.output.parent) == []


# ---- a changed input -------------------------------------------------------------------------------------------------

SHARD = "model-00002-of-00004.safetensors"  # layer 1


@pytest.mark.parametrize("again", ["resume", "the same command"])
def test_an_edited_weight_is_noticed_and_converted_again(bench: Bench, again: str) -> None:
    bench.stop_after(2)
    rig.edit(bench.source / SHARD)

    def go(*options: str) -> Done:
        return bench.run("resume", bench.output, *options) if again == "resume" else bench.cpu(*options)

    store = rig.identity(bench.work / "store")
    rig.refused(go(), 5, SHARD, "--verify-inputs")
    assert rig.identity(bench.work / "store") == store
    done = go("--verify-inputs")
    assert done.returncode == 0, done.stderr
    assert bench.units_made() == 2  # the layer that reads it, and the one that was missing
    bench.finished_as(bench.fresh("--verify-inputs"))


def test_killed_while_what_was_edited_is_made_again(bench: Bench) -> None:
    wanted = {"before": bench.fresh()}
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    assert bench.cpu(kill=last).returncode == killpoint.KILLED  # all made, and assembled under the final names
    rig.edit(bench.source / SHARD)
    wanted["after"] = bench.fresh("--verify-inputs")
    assert "model-00002-of-00003.safetensors" in rig.differing(wanted["before"], wanted["after"])
    kept = bench.base / "kept"
    shutil.copytree(bench.work, kept)
    done = bench.run("resume", bench.output, "--verify-inputs")
    assert done.returncode == 0, done.stderr
    points = len(bench.calls())
    for n in rig.thinned(points, 10):
        shutil.rmtree(bench.output)
        shutil.copytree(kept, bench.work)
        assert bench.run("resume", bench.output, "--verify-inputs", kill=n).returncode == killpoint.KILLED
        died = killpoint.killed_before(bench.log)
        done = bench.run("resume", bench.output, "--verify-inputs")
        assert done.returncode == 0, f"{died}: {done.stderr}"
        assert rig.differing(rig.tree(bench.output), wanted["after"]) == [], died


def test_a_touched_input_costs_its_units_and_no_more(bench: Bench) -> None:
    wanted = bench.fresh("--verify-inputs")
    bench.stop_after(2)
    os.utime(bench.source / SHARD)
    rig.refused(bench.cpu(), 5, SHARD, "--verify-inputs")
    assert bench.cpu("--verify-inputs").returncode == 0
    assert bench.units_made() == 2
    bench.finished_as(wanted)


def test_with_hashes_a_touched_input_costs_nothing(bench: Bench) -> None:
    wanted = bench.fresh("--verify-inputs")
    bench.stop_after(2, "--verify-inputs")
    os.utime(bench.source / SHARD)
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_made() == 1
    bench.finished_as(wanted)


def test_with_hashes_an_edit_is_seen_whatever_its_time_says(bench: Bench) -> None:
    bench.stop_after(2, "--verify-inputs")
    rig.edit(bench.source / SHARD, keep_time=True)
    done = bench.run("resume", bench.output)
    rig.refused(done, 5, SHARD)
    assert re.search(r"content of \S+ was [0-9a-f]{12}, is [0-9a-f]{12}", done.stderr)


def _resize(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "header": (lambda source: rig.edit(source / SHARD, 30), r"header of \S+ was [0-9a-f]{12}, is [0-9a-f]{12}"),
    "companion's size": (lambda source: _resize(source / "tokenizer.json"), r"tokenizer.json had \d+ bytes, has \d+"),
    "companion gone": (lambda source: (source / "tokenizer.json").unlink(), r"tokenizer.json is gone"),
    "companion new": (lambda source: (source / "more.txt").write_text("x"), r"more.txt is new"),
    "config": (lambda source: _resize(source / "config.json"), r"config.json had \d+ bytes, has \d+"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_input_is_refused_with_both_values(bench: Bench, what: str) -> None:
    change, said = CHANGES[what]
    bench.stop_after(2)
    if what == "header":  # still a header that can be read: one more space in its metadata would be another size
        path = bench.source / SHARD
        path.write_bytes(path.read_bytes().replace(b'"format": "pt"', b'"format": "tp"', 1))
    else:
        change(bench.source)
    store = rig.identity(bench.work / "store")
    for done in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--verify-inputs")):
        rig.refused(done, 5)
        assert re.search(said, done.stderr), done.stderr
    assert rig.identity(bench.work / "store") == store


@pytest.mark.parametrize("what", ["cut off", "gone", "all gone"])
def test_a_damaged_input_is_refused_and_can_be_put_back(bench: Bench, what: str) -> None:
    wanted = bench.fresh()
    bench.stop_after(2)
    victim = bench.source if what == "all gone" else bench.source / SHARD
    away = bench.base / "away"
    if what == "cut off":
        data, times = victim.read_bytes(), victim.stat()
        victim.write_bytes(data[:-100])
    else:
        victim.rename(away)
    rig.refused(bench.run("resume", bench.output), 5, str(victim) if what == "all gone" else SHARD)
    if what == "cut off":
        victim.write_bytes(data)
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        away.rename(victim)
    assert bench.run("resume", bench.output).returncode == 0
    bench.finished_as(wanted)


def test_an_edited_companion_is_noticed_and_copied_anew(bench: Bench) -> None:
    bench.stop_after(2)
    rig.edit(bench.source / "tokenizer.json", 9)
    rig.refused(bench.run("resume", bench.output), 5, "tokenizer.json", "--verify-inputs")
    assert bench.run("resume", bench.output, "--verify-inputs").returncode == 0
    assert bench.units_made() == 1
    bench.finished_as(bench.fresh("--verify-inputs"))


def test_an_edited_loose_file_is_noticed_by_merge(bench: Bench, begun: Callable[..., Done]) -> None:
    assert begun("merge").returncode == 0
    points = len(bench.calls())
    shutil.rmtree(bench.output)
    assert begun("merge", kill=points * 2 // 3).returncode == killpoint.KILLED
    file = next((bench.base / "loose").rglob("INT4_up_1_*quant_.kt"))
    rig.edit(file)
    for again in (begun("merge"), bench.run("resume", bench.output)):
        rig.refused(again, 5, file.name, "--verify-inputs")
    assert bench.run("resume", bench.output, "--verify-inputs").returncode == 0
    made = rig.tree(bench.output)
    shutil.rmtree(bench.output)
    assert begun("merge", "--verify-inputs").returncode == 0
    bench.finished_as(made)


def test_a_moved_input_is_the_same_input(bench: Bench) -> None:
    wanted = bench.fresh()
    bench.stop_after(2)
    moved = bench.base / "elsewhere"
    bench.source.rename(moved)
    rig.refused(bench.run("resume", bench.output), 5, str(bench.source))
    assert bench.cpu(source=moved).returncode == 0
    assert bench.units_made() == 1
    bench.finished_as(wanted)


# ---- a changed option ------------------------------------------------------------------------------------------------

OTHER_OPTIONS = {
    "--quant-method was int4, is int8": ("--quant-method", "int8"),
    "--threadpool-count was 2, is 1": ("--threadpool-count", "1"),
    "--layers was all, is 0-1": ("--layers", "0-1"),
    "--non-experts was skip, is copy": ("--non-experts", "copy"),
    "--max-shard-size was not given, is 80000": ("--max-shard-size", "80KB"),
    "--no-merge-safetensor was False, is True": ("--no-merge-safetensor",),
    "--save-backward-weights was False, is True": ("--save-backward-weights",),
}


@pytest.mark.parametrize("said", OTHER_OPTIONS)
def test_a_changed_option_is_refused_with_both_values(bench: Bench, said: str) -> None:
    bench.stop_after(1)
    before = rig.identity(bench.work / "store")
    rig.refused(bench.cpu(*OTHER_OPTIONS[said]), 7, said)
    assert rig.identity(bench.work / "store") == before
    assert bench.cpu().returncode == 0
    assert bench.units_made() == 2
    finished = rig.identity(bench.output)
    rig.refused(bench.cpu(*OTHER_OPTIONS[said]), 7, said)
    assert rig.identity(bench.output) == finished


def test_a_dry_run_refuses_what_the_run_would(bench: Bench) -> None:
    bench.stop_after(1)
    other = ("--threadpool-count", "1", "--dry-run")
    before = rig.identity(bench.work)
    rig.refused(bench.cpu(*other), 7, "--threadpool-count was 2, is 1")
    done = bench.cpu(*other, "--overwrite")
    assert done.returncode == 0
    assert f"{LAYERS} to run" in done.stderr
    rig.edit(bench.source / SHARD)
    rig.refused(bench.cpu("--dry-run"), 5, SHARD, "--verify-inputs")
    assert bench.cpu("--dry-run", "--overwrite").returncode == 0
    assert rig.identity(bench.work) == before


def test_another_command_is_refused(bench: Bench) -> None:
    loose = bench.base / "loose"
    assert bench.cpu("--no-merge-safetensor", output=loose).returncode == 0
    bench.stop_after(1)
    rig.refused(bench.run("merge", "-i", loose, "-o", bench.output), 7, "command was cpu, is merge")


def test_what_cannot_change_a_byte_may_change(bench: Bench) -> None:
    wanted = bench.fresh()
    bench.stop_after(1)
    where = ("-i", bench.source, "-o", bench.output)
    many = bench.run("cpu", *where, "--cpuinfer-threads", "64", "--max-memory", "2GiB", "-v", "--gpu", kill=25)
    assert many.returncode == killpoint.KILLED
    done = bench.run("resume", bench.output, "-q", "--json", "--max-memory", "1GiB", "--cpuinfer-threads", "1")
    assert done.returncode == 0, done.stderr
    bench.finished_as(wanted)


@pytest.mark.parametrize("units", [0, 1, 3])
@pytest.mark.parametrize("back", [False, True], ids=["to B", "and back to A"])
def test_there_and_back_again(bench: Bench, units: int, back: bool) -> None:
    """Option A, killed; B, refused, then let with --overwrite, and killed; then A again: never a byte of the other."""
    other = ("--layers", "0-1", "--threadpool-count", "1")
    wanted = bench.fresh() if back else bench.fresh(*other)
    bench.stop_after(units)
    rig.refused(bench.cpu(*other), 7, "--threadpool-count was 2, is 1", "--overwrite")
    if back:
        for n in (12, 30, 45, 60, 75):
            assert bench.cpu(*other, "--overwrite", kill=n).returncode in (0, killpoint.KILLED)
    done = bench.cpu("--overwrite") if back else bench.cpu(*other, "--overwrite")
    assert done.returncode == 0, done.stderr
    bench.finished_as(wanted)


@pytest.mark.parametrize("point", [20, 60, 100])
def test_another_model_of_the_same_shape_takes_nothing_over(bench: Bench, point: int) -> None:
    """Same names, sizes and headers, so the same fingerprints: --overwrite starts over, wherever that is cut off."""
    other = rig.checkpoint(bench.base / "other", layers=LAYERS, seed=7)
    wanted = bench.fresh(source=other)
    assert bench.cpu(kill=point).returncode == killpoint.KILLED
    rig.refused(bench.cpu(source=other), 5, "--overwrite")
    kept = bench.base / "kept"
    shutil.copytree(bench.work, kept)
    done = bench.cpu("--overwrite", source=other)
    assert done.returncode == 0, done.stderr
    assert bench.units_made() == LAYERS
    bench.finished_as(wanted)
    calls = bench.calls()
    unrecorded = [n + 3 for n, c in enumerate(calls) if c.name == "rename" and c.second.startswith("out.work/store/")]
    for n in sorted({*rig.thinned(len(calls), 4), *unrecorded}):
        shutil.rmtree(bench.output)
        shutil.copytree(kept, bench.work)
        assert bench.cpu("--overwrite", source=other, kill=n).returncode == killpoint.KILLED
        died = killpoint.killed_before(bench.log)
        done = bench.cpu("--overwrite", source=other)
        assert done.returncode == 0, f"{died}: {done.stderr}"
        assert rig.differing(rig.tree(bench.output), wanted) == [], died


# ---- --resume-layer --------------------------------------------------------------------------------------------------


def test_resume_layer_changes_nothing_where_our_journal_exists(bench: Bench) -> None:
    wanted = bench.fresh("--no-merge-safetensor")
    bench.stop_after(1, "--no-merge-safetensor")  # layer 0 is done, 1 and 2 are missing
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.units_made() == 2
    bench.finished_as(wanted)
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
        return {name: seen for name, seen in rig.identity(bench.output).items() if name.endswith(".kt")}

    return make


def weights(found: Any) -> Any:
    return {name: data for name, data in found.items() if name.endswith(".kt")}


def test_resume_layer_keeps_complete_layers_and_adds_the_rest(bench: Bench, kt_layers: Callable[[int], Any]) -> None:
    wanted = weights(bench.fresh("--no-merge-safetensor"))
    before = kt_layers(2)
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.units_made() == 1
    assert weights(rig.tree(bench.output)) == wanted
    after = rig.identity(bench.output)
    assert before == {name: after[name] for name in before}  # same inodes, times and all
    assert not (bench.output / ".ktconvert").exists()
    assert rig.names(bench.output.parent) == ["out"]
    names = {file["name"] for file in json.loads((bench.output / "manifest.json").read_text())["files"]}
    assert set(wanted) <= names
    assert "nothing to do" in bench.cpu("--no-merge-safetensor", "--resume-layer", "2").stderr


def test_resume_layer_redoes_incomplete_layers(bench: Bench, kt_layers: Callable[[int], Any]) -> None:
    wanted = weights(bench.fresh("--no-merge-safetensor"))
    before = kt_layers(2)
    cut = next((bench.output / "_layer_0").rglob("*quant_.kt"))
    cut.write_bytes(cut.read_bytes()[:-1])
    next((bench.output / "_layer_0").rglob("*scale_.kt")).unlink()
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.units_made() == 2
    assert weights(rig.tree(bench.output)) == wanted
    after = rig.identity(bench.output)
    kept = [name for name in before if "_layer_1" in name]
    assert kept
    assert all(before[name] == after[name] for name in kept)


def test_resume_layer_where_every_layer_is_incomplete(bench: Bench, kt_layers: Callable[[int], Any]) -> None:
    wanted = weights(bench.fresh("--no-merge-safetensor"))
    kt_layers(1)
    next((bench.output / "_layer_0").rglob("*.kt")).unlink()
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "1")
    assert done.returncode == 0, done.stderr
    assert weights(rig.tree(bench.output)) == wanted


def test_killed_while_adding_to_kept_layers(bench: Bench, kt_layers: Callable[[int], Any]) -> None:
    kt_layers(2)
    kept = bench.base / "kept"
    shutil.copytree(bench.output, kept)
    command = ("--no-merge-safetensor", "--resume-layer", "2")
    assert bench.cpu(*command).returncode == 0
    wanted, points = rig.tree(bench.output), len(bench.calls())
    for n in rig.thinned(points, 10):
        shutil.rmtree(bench.output)
        shutil.copytree(kept, bench.output)
        assert bench.cpu(*command, kill=n).returncode == killpoint.KILLED
        died = killpoint.killed_before(bench.log)
        by_name = n % 2 and (bench.output / ".ktconvert/plan.json").exists()
        done = bench.run("resume", bench.output) if by_name else bench.cpu(*command)
        assert done.returncode == 0, f"{died}: {done.stderr}"
        assert rig.differing(rig.tree(bench.output), wanted) == [], died
        assert rig.names(bench.output.parent) == ["out"]


@pytest.mark.parametrize("loose", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_resume_layer_with_nothing_there_leaves_layers_out(bench: Bench, loose: tuple[str, ...]) -> None:
    dry = bench.cpu(*loose, "--resume-layer", "1", "--dry-run")
    assert dry.returncode == 0
    assert "layers 0 are left out" in dry.stderr
    assert rig.names(bench.output.parent) == []
    assert bench.cpu(*loose, "--resume-layer", "1", kill=40).returncode == killpoint.KILLED
    done = bench.run("resume", bench.output)
    assert done.returncode == 0, done.stderr
    made = json.loads((bench.output / "manifest.json").read_text())
    assert made["model"]["layers"] == [1, 2]
    assert "nothing to do" in bench.cpu(*loose, "--resume-layer", "1").stderr


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A source of a few seconds, and what comes of it."""
    return rig.larger(tmp_path_factory.mktemp("larger"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_once_it_finishes_the_layers_in_flight(
    larger: tuple[Path, Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source, wanted = larger
    output = tmp_path / "out"
    with rig.held(source, output) as process:
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        _, said = process.communicate(timeout=rig.TIMEOUT)
    assert process.returncode == code, said
    assert "finishing the layer in flight" in said
    assert f"ktconvert resume {output}" in said
    assert not output.exists()
    records = journal.read(tmp_path / "out.work/journal.jsonl")
    started = [r["unit"] for r in records if r.get("event") == "start"]
    assert sorted(r["unit"] for r in journal.finished(records).values()) == sorted(started)
    assert 0 < len(started) < 5
    assert records[-1] == {"event": "end"}
    done = rig.ktconvert("resume", output)
    assert done.returncode == 0, done.stderr
    assert "died" not in done.stderr
    assert f"resuming: {len(started)} of 5 units are finished" in done.stderr
    assert rig.differing(rig.tree(output), wanted) == []
    assert rig.names(tmp_path) == ["out"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_twice_it_stops_at_once(
    larger: tuple[Path, Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source, wanted = larger
    output = tmp_path / "out"
    with rig.held(source, output) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        for line in process.stderr:
            if "finishing the layer in flight" in line:
                break
        process.send_signal(number)
        _, said = process.communicate(timeout=rig.TIMEOUT)
    assert process.returncode == code, said
    if "stopped at once" in said:  # it may have been done with the layer before the second signal came
        done = rig.ktconvert("resume", output)
        assert re.search(r"died in cpu_experts.layer-00\d", done.stderr)
    else:
        done = rig.ktconvert("cpu", "-i", source, "-o", output)
    assert done.returncode == 0, done.stderr
    assert rig.differing(rig.tree(output), wanted) == []
    assert rig.names(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["model-00003-of-00006.safetensors", "tokenizer.json", "config.json"])
def test_an_input_edited_during_the_run_stops_it(larger: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    source, wanted = larger
    output, file = tmp_path / "out", source / name
    times = file.stat()
    with rig.held(source, output) as process:
        rig.edit(file)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=rig.TIMEOUT)
    rig.edit(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert process.returncode == 5, said
    assert f"{name} changed while it was being read" in said
    done = rig.ktconvert("resume", output)
    assert done.returncode == 0, done.stderr
    assert rig.differing(rig.tree(output), wanted) == []
