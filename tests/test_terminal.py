"""Strings from files never reach a terminal unescaped, whichever library prints them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.terminal import EscapingStream, escape, shorten_paths
from rig.conversion import KTCONVERT
from rig.hub_server import serve_hub
from rig.safetensors import read_file, write_file

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipeline", "layouts", "quantizers", "native_quant")
STYLED = re.compile(rb"\x1b\[[?0-9;]*[A-Za-z]")  # what the bar of rich writes
BAD = "\x1b]0;PWNED\x07"


def on_a_terminal(*words: object, columns: int = 300) -> bytes:
    """Return everything that a command prints on a terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [*KTCONVERT, *map(str, words)], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        said = b""
        try:
            while data := os.read(ours, 1 << 16):
                said += data
        except OSError:  # the other side is closed
            pass
        process.wait()
    os.close(ours)
    return said


def test_names_in_files_are_escaped(example: Path, packed_example: Any, tmp_path: Path) -> None:
    """Names of files, architectures and tensors."""
    model = shutil.copytree(example, tmp_path / "model")
    write_file(model / f"consolidated{BAD}.safetensors", {"a": ("F32", np.zeros(2, np.float32))})
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(
        config.replace("Qwen3MoeForCausalLM", 'X\\u001b]0;PWNED\\u0007\\u009b", "Qwen3MoeForCausalLM')
    )
    output = shutil.copytree(packed_example("int8"), tmp_path / "int8")
    shard = sorted(output.glob("*.safetensors"))[0]
    tensors = read_file(shard)
    write_file(shard, {**tensors, f"stray{BAD}": next(iter(tensors.values()))})
    for words in (("inspect", model), ("verify", output), ("inspect", output)):
        said = STYLED.sub(b"", on_a_terminal(*words))
        assert not set(said) & ({*range(32), 127} - {*b"\n\r\t"}), said
        assert words[0] == "inspect" or rb"stray\x1b]0;PWNED\x07" in said, said


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_progress_is_one_line_with_the_result_below(example: Path, tmp_path: Path, columns: int) -> None:
    out = tmp_path / "out"
    text = STYLED.sub(b"", on_a_terminal("cpu", example, out, "--numa", 1, columns=columns)).decode()
    lines = [line for line in re.split(r"[\r\n]+", text) if line]
    bars = [line for line in lines if "\u2501" in line]
    assert bars and all(("ETA " in line or "100 %" in line) and len(line) <= columns for line in bars), lines
    result, following, serving = lines[lines.index(bars[-1]) + 1 :]  # tests use -v
    assert result.startswith(f"{out}: ") and following == shorten_paths(
        f"next: ktconvert verify {out} --against {example}"
    )
    assert serving.startswith("note: to serve it with SGLang: ")


NOTES = ("--numa", 2, "--gpu")  # with notes on the format, other scales and --gpu


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_the_most_important_note_is_printed_with_the_number_of_the_others(
    words: tuple[str, ...], cli: Any, example: Path, tmp_path: Path
) -> None:
    """--dry-run prints all of them, --json and -v too, and -q none.

    The command that serves the output is one of them, but not in a run without --json or -v.
    """
    quiet = {"KTCONVERT_CPU_VERBOSE": "0"}
    command = ("cpu", example, tmp_path / "out", *NOTES, *words, "--overwrite")

    def list_notes(*options: str) -> list[str]:
        lines: list[str] = cli(*command, *options, env=quiet).stderr.splitlines()
        return [line for line in lines if line.startswith(("note: ", "("))]

    every = list_notes("-v")
    assert len(every) >= 4 and all(note.startswith("note: ") for note in every)
    assert every[-1].startswith("note: to serve it with SGLang: python -m sglang.launch_server ")
    first = [*every[:2], f"({len(every) - 3} more notes: -v)"]  # after that of --gpu
    assert list_notes() == (every if words else first)
    assert list_notes("-q") == []
    events = [json.loads(line) for line in cli(*command, "--json", env=quiet).stdout.splitlines()]
    assert [shorten_paths(f"note: {event['text']}") for event in events if event["event"] == "note"] == every


def test_a_note_on_an_option_without_effect_is_always_printed(cli: Any, example: Path, tmp_path: Path) -> None:
    words = ("cpu", example, tmp_path / "out", "--dataset", "foo", "--num-calibration-samples", 3, "--dry-run")
    lines = cli(*words, env={"KTCONVERT_CPU_VERBOSE": "0"}).stderr.splitlines()
    assert [line.split()[1] for line in lines if "has no effect" in line] == ["--dataset", "--num-calibration-samples"]
    assert "has no effect" not in cli(*words, "-q", env={"KTCONVERT_CPU_VERBOSE": "0"}).stderr


def test_notes_before_and_during_the_work_are_counted_once_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    for text in ("first", "second"):
        reporter.note(text)
    reporter.begin(10, 0)
    reporter.note("third")
    reporter.end()
    assert capsys.readouterr().err.splitlines() == ["note: first", "(2 more notes: -v)"]


def test_progress_of_a_download_is_one_line(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub({"org/model": example}) as hub:
        hub.rate = 8_000_000
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "hf", "XDG_CACHE_HOME": tmp_path}.items():
            monkeypatch.setenv(name, str(value))
        words = ("cpu", "org/model", tmp_path / "out", "--numa", 1, "--stream")
        text = STYLED.sub(b"", on_a_terminal(*words, columns=60)).decode()
    bars = [line for line in re.split(r"[\r\n]+", text) if "\u2501" in line and "ETA" in line]
    assert bars and all(" fetched" in line and len(line) <= 60 for line in bars), bars


def test_progress_shows_downloaded_bytes_and_those_on_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while nothing has been converted yet."""
    now = 0.0
    monkeypatch.setattr("ktconvert.pipeline.report.progress.time.monotonic", lambda: now)
    reporter = Reporter(json_events=True)
    reporter.show_download(lambda: (5 << 20, 3 << 20))
    reporter.begin(1000, 0, units=(0, 9))
    now = 10.0
    reporter.advance(0)
    said = capsys.readouterr()
    event = json.loads(said.out.splitlines()[-1])
    assert (event["downloaded_bytes"], event["held_bytes"], event["done_bytes"]) == (5 << 20, 3 << 20, 0)
    assert said.err.startswith("0 %  ETA unknown  5.0 MiB fetched  3.0 MiB on disk  ")


def test_remaining_time_is_unknown_until_a_unit_is_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit of GPTQ reports its bytes at its end; copied tensors, and samples and statistics, which read none, do not count.

    It is unknown again while a unit takes longer than those before it.
    """
    now = 0.0
    monkeypatch.setattr("ktconvert.pipeline.report.progress.time.monotonic", lambda: now)
    reporter = Reporter(json_events=True, verbosity=-1)
    reporter.begin(1500, 0, chained_bytes=1000)
    etas = []
    steps: list[tuple[int, int, int | None]] = [(1, 300, None), (499, 0, 0)]  # seconds, bytes, bytes of a unit's end
    steps += [(90, 10, -1), (10, 90, 100), (50, 0, -1), (45, 10, -1), (10, 200, None), (10, 0, -1)]
    steps += [(900, 0, -1), (10, 900, 900), (10, 0, 0), (10, 0, -1)]
    for seconds, nbytes, unit_bytes in steps:
        now += seconds
        reporter.advance(nbytes)
        etas += [json.loads(line)["eta_seconds"] for line in capsys.readouterr().out.splitlines() if "eta_s" in line]
        if unit_bytes != -1:
            reporter.finish_unit(unit_bytes)
    assert etas == [None, None, None, 850, 805, 795, 785, None, None, 0, 0]


def test_progress_names_the_unit_that_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter()
    reporter.begin(10, 0, units=(0, 2))
    reporter.set_current("layer-000")
    reporter.advance(10)
    reporter.finish_unit()
    reporter.set_current("layer-001")
    reporter.end()
    last = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if "\u2501" in line][-1]
    assert "1/2 layer-001" in last and "100 %" in last and "ETA" not in last


def test_stream_passes_only_newlines_and_tabs() -> None:
    file = io.BytesIO()
    stream = EscapingStream(io.TextIOWrapper(file, "utf-8"))
    stream.write("".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000)))))
    stream.write("\rname\n")
    stream.flush()
    text = file.getvalue().decode()
    assert not [
        c for c in text if (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 or c in "\u202e\u2066\u2028"
    ]
    assert text.endswith("\\rname\n") and all(c in text for c in "\t\nß漢\N{ZERO WIDTH JOINER}")
    assert escape(escape(BAD)) == escape(BAD) == "\\x1b]0;PWNED\\x07"


def test_paths_below_the_current_directory_begin_there(tmp_path, monkeypatch) -> None:
    here = tmp_path / "a b"
    here.mkdir()
    monkeypatch.chdir(here)
    shortened = {
        f"{here}/out: failed; see '{here}/out/x y'": "out: failed; see 'out/x y'",
        f"{here}: is empty": ".: is empty",
        f"pip install '{here}/clone[run]'": "pip install './clone[run]'",  # without a slash, it is a package of PyPI
        f"--kt-weight-path={here}/.work": "--kt-weight-path=.work",
        f"{here}/-o": f"{here}/-o",  # not an option
        f"/data{here}/x, {here}2/x, {here}.": f"/data{here}/x, {here}2/x, {here}.",
    }
    assert {text: shorten_paths(text) for text in shortened} == shortened
    here.rmdir()
    assert shorten_paths(f"{here}/x") == f"{here}/x"


def test_all_output_passes_the_escaping_stream() -> None:
    """layouts/files writes files; styled text goes to the stream below, and is escaped before."""
    past = re.compile(r"sys\.__std|\bos\.write\([12],(?! b\")|Console\((?!file=raw_stream\()|raw_stream\(")
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if past.search(line)
    }
    assert {entry.partition(":")[0] for entry in found} == {
        "pipeline/cli/run.py",  # the text that a model writes, where a program reads it
        "pipeline/cli/status.py",
        "pipeline/engine/loop.py",  # a message of a signal handler, escaped when the run begins
        "pipeline/report/progress.py",
        "pipeline/report/terminal.py",
    }, found
