"""Unusual starts of the command: ignored signals, closed streams, a closed pipe, a full disk."""

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rig import conversion


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path) -> Path:
    folder = tmp_path_factory.mktemp("start") / "int8"
    cli("cpu", "-i", example, "-o", folder, "--quant-method", "int8", "--threadpool-count", 1)
    return folder


@pytest.mark.parametrize(
    ("command", "number"),
    [("cpu", signal.SIGINT), ("cpu", signal.SIGTERM), ("verify", signal.SIGINT), ("inspect", signal.SIGTERM)],
)
def test_signals_ignored_at_the_start_still_stop_a_command(command, number, output, example, tmp_path):
    """The signal comes while the command reads a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def ignoring() -> None:  # as shells do for jobs in the background
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    where = ["-i", example, "-o", tmp_path / "out"] if command == "cpu" else [output]
    arguments = [*conversion.KTCONVERT, command, *map(str, where), "--arch-file", str(pipe)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, preexec_fn=ignoring)
    writer = -1
    try:
        while writer < 0 and process.poll() is None:
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                assert error.errno == errno.ENXIO  # not open for reading yet
                time.sleep(0.01)
        process.send_signal(number)
        _, text = process.communicate(timeout=conversion.TIMEOUT)
    finally:
        process.kill()
        os.close(writer)
    assert process.returncode == (130 if number == signal.SIGINT else -number), text
    before = " before the output was begun" if command == "cpu" else ""
    stopped = f"interrupted{before}" if number == signal.SIGINT else "stopped by SIGTERM"
    assert text.strip() == f"ktconvert: {stopped}; run the same command again."


@pytest.mark.parametrize(
    ("closed", "options"),
    [("<&-", ["--json"]), (">&-", []), ("2>&-", ["--json"]), ("<&- >&- 2>&-", [])],
)
def test_conversion_succeeds_with_closed_streams(closed, options, output, tmp_path, example, read_tree):
    where = ["-i", example, "-o", tmp_path / "out", "--quant-method", "int8", "--threadpool-count", "1"]
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", *conversion.KTCONVERT, "cpu", *where, *options]
    result = subprocess.run(line, capture_output=True, text=True, timeout=conversion.TIMEOUT)
    assert result.returncode == 0, result
    assert "Traceback" not in result.stderr
    if options:
        assert all(json.loads(line) for line in result.stdout.splitlines())
    assert read_tree(tmp_path / "out") == read_tree(output)


@pytest.mark.parametrize(
    "words",
    [
        "--version",
        "cpu {example} {out} --dry-run",
        "cpu {example} {out} --json",
        "inspect {output}",
        "run {example} --cpu-weights {output} --prompt x --max-new-tokens 1",
    ],
)
def test_a_closed_stdout_that_a_result_needs_is_an_error(words, output, example, tmp_path):
    paths = {"output": output, "example": example, "out": tmp_path / "out"}
    line = ["sh", "-c", 'exec "$@" >&-', "sh", *conversion.KTCONVERT, *words.format(**paths).split()]
    result = subprocess.run(line, capture_output=True, text=True, timeout=conversion.TIMEOUT)
    message = "ktconvert: standard output is closed; redirect it to a file or to /dev/null.\n"
    assert result.returncode == 1 and result.stderr.endswith(message), result


@pytest.mark.parametrize("arguments", [["--help"], ["cpu", "--help"], ["--version"], ["inspect", "{output}"],
                                       ["verify", "{output}", "--json"], ["cpu", "-i", "{example}", "-o", "{out}", "--json"]])  # fmt: skip
def test_a_reader_that_is_gone_is_141(arguments, output, example, tmp_path):
    paths = {"output": output, "example": example, "out": tmp_path / "out"}
    reading, writing = os.pipe()
    os.close(reading)
    command = [*conversion.KTCONVERT, *(a.format(**paths) for a in arguments)]
    with os.fdopen(writing, "wb") as pipe:
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=conversion.TIMEOUT)
    assert (result.returncode, result.stderr.count("Traceback")) == (141, 0), result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("reader", ["gone", "full"])
def test_a_failure_keeps_its_exit_code_where_it_cannot_be_printed(stream, reader, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    if reader == "full":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    command = [*conversion.KTCONVERT, "inspect", str(tmp_path / "none"), "--json"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writing}
    result = subprocess.run(command, text=True, timeout=conversion.TIMEOUT, **streams)
    os.close(writing)
    assert result.returncode == 5, result
    if stream == "stdout":
        assert result.stderr.startswith("ktconvert: ") and result.stderr.count("\n") == 1
    else:
        assert json.loads(result.stdout)["exit_code"] == 5
