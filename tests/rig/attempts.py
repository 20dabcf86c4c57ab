"""Calibrations that are cut off: killed where a test wants it, resumed, and compared with one that was never cut off."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ktconvert.pipeline.engine import journal
from rig import calibrated, conversion, killpoint


class Attempts:
    """Conversions of one small model, each into a folder of its own, killed where a test wants it.

    arguments  (model, output, data set) -> the words of a conversion
    stage      of its chain, and the keys of its units
    calls      what an uninterrupted run calls, in order; paths without the output's folder
    wanted     what it makes, in the output and beside it
    """

    def __init__(
        self, base: Path, servers: Any, arguments: Callable[..., list[str]], stage: str, units: Sequence[str]
    ) -> None:
        self.base, self.servers, self.arguments = base, servers, arguments
        self.stage, self.units = stage, units
        self.model: Path = calibrated.small(base / "model")
        self.dataset, _ = calibrated.data(base, "texts", (60, 25, 12))
        self.before = conversion.identity(self.model)
        output = self.output("whole")
        assert self.run(output).returncode == 0
        self.wanted = conversion.tree(output.parent)
        self.made = conversion.tree(output)
        self.calls = self.calls_of(output)

    def output(self, name: str) -> Path:
        output = self.base / name / "out"
        output.parent.mkdir()
        return output

    def run(self, output: Path, *words: str, kill: int = 0) -> subprocess.CompletedProcess[str]:
        """Killed before its n-th call that changes something; 0 lets it finish. Without words: from its beginning."""
        log = output.parent.with_suffix(".log")
        log.unlink(missing_ok=True)
        env = {"KILLPOINT_ROOT": str(output), "KILLPOINT_N": str(kill), "KILLPOINT_LOG": str(log)}
        arguments = list(words) or self.arguments(self.model, output, self.dataset)
        done: subprocess.CompletedProcess[str] = self.servers.run(arguments, log.with_suffix(".said"), env)
        return done

    def calls_of(self, output: Path) -> list[Any]:
        return killpoint.calls(output.parent.with_suffix(".log"), output.parent)

    def finish(self, output: Path, where: str, *words: str) -> None:
        done = self.run(output, *words)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        assert conversion.differing(conversion.tree(output.parent), self.wanted) == [], where

    def killed(self, *points: int) -> None:
        """Killed before a call of the run, and of each resume; then resumed to the end. What was finished is not made
        again.
        """
        output, where = self.output("-".join(map(str, points))), f"killed before {[self.calls[n - 1] for n in points]}"
        ended = [self.run(output, kill=n).returncode for n in points]
        assert ended[0] == killpoint.KILLED and {*ended} <= {0, killpoint.KILLED}, f"{where}: {ended}"
        begun = output.with_name("out.work").joinpath("plan.json").exists()
        assert begun or not output.exists() or conversion.differing(conversion.tree(output), self.made) == [], where
        finished = self.recorded(output)
        self.finish(output, where, *(("resume", str(output)) if begun and points[0] % 2 else ()))
        again = {call.second for call in self.calls_of(output) if call.name == "rename" and call.second}
        for unit in self.units if begun else ():
            assert any(f"store/{self.stage}.{unit}." in name for name in again) == (unit not in finished), (where, unit)
        shutil.rmtree(output.parent)

    def recorded_at(self, unit: str) -> int:
        """The number of the call by which a unit's record became durable."""
        name = f"/{self.stage}.{unit}."
        stored = next(n for n, c in enumerate(self.calls) if c.name == "rename" and name in str(c.second))
        book = ("fsync", "out.work/journal.jsonl")
        return next(n for n, call in enumerate(self.calls, 1) if n > stored and call[:2] == book)

    def recorded(self, output: Path) -> set[str]:
        book = output.with_name("out.work") / "journal.jsonl"
        done = journal.finished(journal.read(book)).values() if book.exists() else ()
        return {record.unit.removeprefix(f"{self.stage}.") for record in done}

    def within(self, unit: str) -> list[int]:
        """The numbers of the calls that write what belongs to a unit before it is whole."""
        part = f"partial/{self.stage}.{unit}"
        return [n for n, call in enumerate(self.calls, 1) if part in call.path and "write" in call.name]
