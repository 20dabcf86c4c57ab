"""Records of attempts are not trusted: anybody may have written the files, and process numbers may be reused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.units import Result, Unit, Written
from rig import conversion
from rig.files import edit_json

UNIT: Unit[None] = Unit("stage", "layer-000", (1,), 1, None, final="model.safetensors", bytes_in=1)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    output = locate(tmp_path / "out")
    for folder in (output.partial, output.attempts):
        folder.mkdir(parents=True)
    return output


def finish_attempt(paths: Paths) -> Attempt:
    """Write an attempt of 4 bytes with its record."""
    attempt = attempts.begin_attempt(paths, UNIT, "run")
    (paths.partial / attempt.name).write_bytes(b"0123")
    return attempts.record_result(paths, attempt, Result((Written("", 4, "0" * 64),), 1), ())


INVALID: dict[str, dict[str, Any]] = {
    "time that is not a number": {"began": float("nan")},
    "infinite time": {"ended": float("inf")},
    "time beyond the range of float": {"began": 10**400},
    "before the epoch": {"began": -1.0},
    "text that is not UTF-8": {"unit": "\ud800"},
    "malformed process": {"process": "1 here"},
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_records_are_ignored_and_swept(paths: Paths, case: str) -> None:
    edit_json(paths.attempts / f"{finish_attempt(paths).name}.json", lambda record: record.update(INVALID[case]))
    assert attempts.read_attempts(paths) == []
    attempts.remove_useless_files(paths)
    assert conversion.names(paths.root) == ["attempts", "partial"]


@pytest.mark.parametrize("files", [[], [[__file__, Path(__file__).stat().st_size, ""]], [["../../other", 4, ""]]])
def test_files_outside_the_partial_folder_do_not_complete_an_attempt(paths: Paths, files: list[Any]) -> None:
    (paths.root.parent / "other").write_bytes(b"0123")
    edit_json(
        paths.attempts / f"{finish_attempt(paths).name}.json", lambda record: record["result"].update(files=files)
    )
    (read,) = attempts.read_attempts(paths)
    assert not read.is_whole(paths)


def test_names_cannot_point_outside_the_folder(paths: Paths) -> None:
    attempt = finish_attempt(paths)
    record = json.loads((paths.attempts / f"{attempt.name}.json").read_text())
    for name in ("", ".", ".."):
        wrong = {"name": name, "result": None, "failure": "no"}
        (paths.attempts / f"{name}.json").write_text(json.dumps(record | wrong))
    attempts.remove_useless_files(paths)
    assert attempts.read_attempts(paths) == [attempt]
    assert attempt.is_whole(paths)


CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
CODE = """
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_attempts import UNIT, attempts, locate
print(attempts.begin_attempt(locate(Path(sys.argv[1])), UNIT, "run").name)
"""


def test_attempts_of_two_containers_with_equal_pids_stay_apart(paths: Paths) -> None:
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces")
    command = [*CONTAINER, sys.executable, "-c", CODE, str(paths.output), str(Path(__file__).parent)]
    names = {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert len(names) == 2
    assert {attempt.name for attempt in attempts.read_attempts(paths)} == names
    assert {attempt.process.pid for attempt in attempts.read_attempts(paths)} == {1}


def test_files_of_dead_processes_are_removed_and_their_records_kept(paths: Paths) -> None:
    ended = subprocess.Popen(["true"])
    start = machine.process_start(ended.pid)
    ended.wait()
    own = Holder.this()
    dead = Holder(ended.pid, own.host, own.boot, start, own.namespace)
    elsewhere = Holder(ended.pid, "elsewhere", own.boot, start, own.namespace)
    unfinished = [attempts.begin_attempt(paths, UNIT, "run") for _ in range(3)]
    for attempt, process in zip(unfinished, (dead, elsewhere, own), strict=True):
        record = {"process": msgspec.structs.asdict(process)}
        edit_json(paths.attempts / f"{attempt.name}.json", lambda document, record=record: document.update(record))
        (paths.partial / attempt.name).write_bytes(b"0")
    finished = finish_attempt(paths)
    attempts.remove_dead_files(paths)
    kept = sorted(attempt.name for attempt in (*unfinished[1:], finished))
    assert conversion.names(paths.partial) == kept
    assert attempts.read_attempts(paths, UNIT, known=[attempt.name for attempt in unfinished]) == [finished]
    assert len(attempts.read_attempts(paths)) == 4
