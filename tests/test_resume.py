"""From what lies beside the output: a torn journal, a damaged plan, how the last run died."""

import json
import re
import resource
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.pipeline.cli import main
from ktconvert.pipeline.engine import journal
from rig import conversion, killpoint
from rig.bench import LAYERS, Bench


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
        assert len(journal.finished(journal.read(path))) == 1
        book = journal.Journal(path)
        assert len(journal.finished(book.records)) == 1
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
    "a byte": (lambda whole, last: whole[: 1 - last], 2),
    "all but a brace": (lambda whole, last: whole[:-2], 2),
    "all but the end of line": (lambda whole, last: whole[:-1], 2),
    "zeros after it": (lambda whole, last: whole + bytes(4096), 1),
    "no UTF-8": (lambda whole, last: whole + b"\xff\xfe\n", 1),
    "another kind of JSON": (lambda whole, last: whole + b"[1, 2]\n17\nnull\n", 1),
    "nested without end": (lambda whole, last: whole + b"[" * 100_000 + b"\n", 1),
    "half a record": (lambda whole, last: whole + b'{"event": "done", "unit": "cpu_exp', 1),
    "no file": (lambda whole, last: None, LAYERS),
    "empty": (lambda whole, last: b"", LAYERS),
    "another beginning": (lambda whole, last: b'{"ktconvert-jour', LAYERS),
    "zeros alone": (lambda whole, last: bytes(100), LAYERS),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_resumed_from_a_torn_journal(bench, stopped, what):
    change, remade = GARBAGE[what]
    expected, whole = bench.fresh(), stopped.read_bytes()
    content = change(whole, len(whole.splitlines(keepends=True)[-1]))
    stopped.unlink()
    if content is not None:
        stopped.write_bytes(content)
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_written() == remade
    bench.finished_as(expected)


@pytest.mark.long
def test_resumed_from_a_journal_torn_anywhere(bench, stopped):
    expected, whole = bench.fresh(), stopped.read_bytes()
    shutil.move(bench.work, bench.base / "kept")
    for size in range(0, len(whole), 7):
        shutil.copytree(bench.base / "kept", bench.work)
        stopped.write_bytes(whole[:size])
        done = bench.run("resume", bench.output)
        assert done.returncode == 0, f"{size} bytes: {done.stderr}"
        bench.finished_as(expected)
        shutil.rmtree(bench.output)


def test_a_file_cut_off_in_the_store_is_made_again(bench, stopped):
    expected = bench.fresh()
    shard = min((bench.work / "store").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.units_written() == 2
    bench.finished_as(expected)


@pytest.mark.parametrize("words", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_a_bit_that_flipped_in_the_store_is_made_again(bench, words):
    expected = bench.fresh(*words)
    bench.stop_after(2, *words)
    victim = min(path for path in (bench.work / "store").rglob("*") if path.is_file())
    conversion.edit(victim, keep_time=True)
    trusting = bench.base / "trusting" / "out"
    shutil.copytree(bench.work, trusting.with_name("out.work"))
    done = bench.run("resume", bench.output)
    assert f"warning: experts.layer-000 is made again: {victim} is not what was written" in done.stderr
    assert bench.units_written() == 2
    bench.finished_as(expected)
    assert bench.run("resume", trusting, "--trust-store").returncode == 0
    assert len(conversion.differing(conversion.tree(trusting), expected)) == 1


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
def test_a_damaged_plan_is_refused(bench, stopped, how, again):
    plan = bench.work / "plan.json"
    plan.write_bytes(DAMAGE[how](plan.read_bytes()))
    store = conversion.tree(bench.work / "store")
    done = bench.run("resume", bench.output) if again == "resume" else bench.cpu()
    conversion.refused(done, 7, str(bench.work if how != "an unknown command" else bench.output))
    assert conversion.tree(bench.work / "store") == store


def test_the_next_start_says_where_the_last_one_died(bench):
    bench.stop_after(1)
    with (bench.work / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "start", "unit": "experts.layer-001"}\n')
    dry = bench.run("resume", bench.output, "--dry-run")
    assert dry.returncode == 0
    assert re.search(r"skip  layer-000 .*finished before", dry.stderr + dry.stdout)
    done = bench.run("resume", bench.output)
    assert re.search(r"process \d+\) died in experts.layer-001; 1 of 3 units are finished and kept", done.stderr)
    assert bench.units_written() == 2


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
    expected = bench.fresh()
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    assert bench.cpu(kill=last).returncode == killpoint.KILLED
    done = bench.run("resume", bench.output)
    assert "died in assemble; 3 of 3 units are finished" in done.stderr
    assert bench.units_written() == 0
    bench.finished_as(expected)


def test_a_finished_output_has_nothing_to_do(bench):
    assert bench.cpu().returncode == 0
    before = conversion.identity(bench.output)
    for again in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--threadpool-count", "2")):
        assert again.returncode == 0
        assert "is finished: nothing to do" in again.stderr
    assert conversion.identity(bench.output) == before
    assert conversion.names(bench.output.parent) == ["out"]
