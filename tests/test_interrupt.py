"""Real conversions that are interrupted: by Ctrl-C once and twice, by SIGTERM, and by a change of an input."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.loop import StopFlag
from rig import conversion, killpoint, shims
from rig.absent import break_package


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a source of five layers, and its expected output."""
    base = tmp_path_factory.mktemp("five")
    source = conversion.checkpoint(base / "source", layers=5)
    assert conversion.ktconvert("cpu", "-i", source, "-o", base / "whole").returncode == 0
    return source, conversion.tree(base / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_finishes_layers_in_flight(five_layers, tmp_path, number, code):
    source, expected = five_layers
    output = tmp_path / "out"
    with killpoint.hold_conversion(source, output) as process:
        process.send_signal(number)  # pending until SIGCONT, so that it arrives before any work
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == code, stderr
    assert "finishing the layers in flight" in stderr and f"ktconvert resume {output}" in stderr
    assert not output.exists()
    records = journal.read_records(tmp_path / "out.work/journal.jsonl")
    started = [r.unit for r in records if isinstance(r, journal.Start)]
    assert sorted(r.unit for r in journal.find_finished_units(records).values()) == sorted(started)
    assert 0 < len(started) < 5 and isinstance(records[-1], journal.End)
    assert str(records[-1].why).startswith(f"stopped by {number.name}")
    result = conversion.ktconvert("resume", output)
    assert result.returncode == 0, result.stderr
    assert "was stopped" not in result.stderr
    assert f"resuming: {len(started)} of 5 units finished" in result.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(tmp_path) == ["out"]


def test_each_of_several_outputs_can_be_resumed(five_layers, tmp_path):
    source, expected = five_layers
    outputs = [tmp_path / "out-int4", tmp_path / "out-mxfp4"]
    options = ("--quant-method", "int4,mxfp4")
    with killpoint.hold_conversion(source, outputs[0], *options, output=tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == 130, stderr
    assert " and ".join(f"`ktconvert resume {output}`" for output in outputs) in stderr
    assert conversion.names(tmp_path) == ["out-int4.work", "out-mxfp4.work"]
    refused = conversion.ktconvert("resume", tmp_path / "out")
    assert (
        refused.returncode == 5 and " and ".join(f"`ktconvert resume {output}`" for output in outputs) in refused.stderr
    )
    for output in outputs:
        result = conversion.ktconvert("resume", output)
        assert result.returncode == 0, result.stderr
    assert conversion.find_differences(conversion.tree(outputs[0]), expected) == []
    assert conversion.names(tmp_path) == ["out-int4", "out-mxfp4"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_stops_at_once(five_layers, tmp_path, number, code):
    """No layer can finish, since a shim blocks them all."""
    source, expected = five_layers
    output = tmp_path / "made" / "out"
    output.parent.mkdir()
    env = {**os.environ, "LD_PRELOAD": str(shims.build_waiting(tmp_path, tmp_path / "gate"))}
    command = [*conversion.KTCONVERT, "cpu", "-i", str(source), "-o", str(output)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.poll() is None and not list(output.parent.glob("out.work/partial/experts.*")):
            time.sleep(0.01)
        process.send_signal(number)
        for line in process.stderr:
            if "finishing the layers in flight" in line:
                break
        process.send_signal(number)
        _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == code, stderr
    assert (
        f"stopped at once; run `ktconvert resume {output}` to continue with the units that are not finished." in stderr
    )
    result = conversion.ktconvert("resume", output)
    assert re.search(r"was stopped in experts.layer-00\d", result.stderr)
    assert result.returncode == 0, result.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == ["out"]


@pytest.mark.skipif(find_spec("llmcompressor") is None, reason="llmcompressor is not installed")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signal_before_the_first_layer_stops_at_once(example, tmp_path, number, code):
    """The hub of the default data set accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        env |= {"KTCONVERT_GPU_VERBOSE": "0", "TMPDIR": str(tmp_path)}
        command = [*conversion.KTCONVERT, "gpu", str(example), str(tmp_path / "made" / "out")]
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = []
            while not lines or "searching the local cache and the hub" not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            process.send_signal(number)
            _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == code, stderr
    assert "finishing the layers" not in stderr and "Traceback" not in stderr
    assert not (tmp_path / "made").exists()


# A signal comes when Python exits, and if the first argument is 1, also one before the first layer.
SIGNAL_AT_EXIT = """
import atexit, os, sys
from ktconvert.pipeline.cli import main
from ktconvert.pipeline.engine import execute
early, number, make = sys.argv.pop(1), int(sys.argv.pop(1)), execute.run_units
def run_units(*arguments):
    if early == "1":
        os.kill(os.getpid(), number)
    make(*arguments)
execute.run_units = run_units
atexit.register(os.kill, os.getpid(), number)
main()
"""


@pytest.mark.parametrize(
    ("early", "number", "code"),
    [(1, signal.SIGINT, 130), (1, signal.SIGTERM, 143), (0, signal.SIGINT, 0), (0, signal.SIGTERM, 0)],
)
def test_signal_at_exit_changes_nothing(five_layers, tmp_path, early, number, code):
    """There is no traceback, and the exit code is that of the first signal, or 0 for a finished output."""
    script = [sys.executable, "-c", SIGNAL_AT_EXIT, str(early), str(int(number))]
    command = [*script, "cpu", "-i", five_layers[0], "-o", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=conversion.TIMEOUT)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    assert ("`ktconvert resume " in result.stderr) == bool(early)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_previous_signal_handlers_are_restored(number):
    before = signal.getsignal(number)
    with StopFlag([]).handle_signals() as stop:
        os.kill(os.getpid(), number)
    assert stop.number == number and signal.getsignal(number) == before


@pytest.mark.parametrize("name", ["model-00003-of-00006.safetensors", "tokenizer.json", "config.json"])
def test_edited_input_stops_the_conversion(five_layers, tmp_path, name):
    source, expected = five_layers
    output, file = tmp_path / "out", source / name
    times = file.stat()
    with killpoint.hold_conversion(source, output) as process:
        conversion.flip_bit(file)
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    conversion.flip_bit(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert process.returncode == 5, stderr
    assert f"{name} changed while it was being read" in stderr
    result = conversion.ktconvert("cpu", "-i", source, "-o", output)
    assert result.returncode == 0, result.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []


@pytest.mark.parametrize(
    "swallow",
    [
        "class Late:\n    def __del__(self): raise KeyboardInterrupt\nLate()",
        "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt as error:\n    raise ImportError from error",
    ],
    ids=["ignored", "replaced"],
)
def test_an_interrupt_that_an_import_swallows_ends_the_process(swallow, tmp_path):
    """C code and destructors ignore exceptions, and imports may raise their own."""
    program = (
        "import sys\n"
        "from ktconvert.pipeline import cli\n"
        f"cli.group.invoke = lambda _: exec({swallow!r})\n"
        "sys.argv = ['ktconvert', 'version']\n"
        "cli.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr.strip()) == (130, "ktconvert: interrupted; run the same command again.")


@pytest.mark.parametrize(
    "interrupt", ["raise KeyboardInterrupt", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"]
)
def test_an_interrupt_of_the_first_imports_is_one_line(interrupt, tmp_path):
    env = {**os.environ, **break_package("click", tmp_path, interrupt)}
    program = ("-c", "from ktconvert.pipeline.program import main; main()")
    for words in (program, ("-m", "ktconvert", "version")):
        result = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
        assert (result.returncode, result.stderr.strip()) == (
            130,
            "ktconvert: interrupted; run the same command again.",
        )
