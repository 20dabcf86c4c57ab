"""A source, an output beside it, and the command line, to be cut off where a test wants it: fixtures and what they give."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktconvert.pipeline.engine import journal
from rig import conversion, forks, killpoint

Done = subprocess.CompletedProcess[str]
LAYERS = 3
SHARD = "model-00002-of-00004.safetensors"  # of the source: layer 1
CONVERSIONS = {
    "merged": ("cpu",),
    "loose": ("cpu", "--no-merge-safetensor"),
    "cut and copied": ("cpu", "--max-shard-size", "80KB", "--non-experts", "copy"),
    "for the GPU": ("gpu", "--quant-method", "RTN", "--max-shard-size", "80KB"),
    "merge": ("merge", "--max-tensors", "9"),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with forks.Forks([shim], 2) as server:
        yield server


class Bench:
    """A source, an output beside it, and the command line."""

    def __init__(self, base: Path, servers: Any) -> None:
        self.base, self.servers = base, servers
        self.source: Path = conversion.checkpoint(base / "source", layers=LAYERS)
        self.output = base / "made" / "out"
        self.output.parent.mkdir()
        self.work = self.output.with_name("out.work")
        self.log = base / "log"

    def run(self, *arguments: str | Path, kill: int = 0) -> Done:
        """`ktconvert` with these arguments, killed before its n-th call that changes the output or beside it."""
        self.log.unlink(missing_ok=True)
        env = {"KILLPOINT_ROOT": str(self.output), "KILLPOINT_N": str(kill), "KILLPOINT_LOG": str(self.log)}
        done: Done = self.servers.run(arguments, self.base / "printed", env)
        return done

    def cpu(self, *options: str, kill: int = 0, output: Path | None = None, source: Path | None = None) -> Done:
        """`ktconvert cpu` with one thread, so that calls come in one order."""
        where = ("-i", source or self.source, "-o", output or self.output, "--cpuinfer-threads", "1")
        return self.run("cpu", *where, *options, kill=kill)

    def begin(self, which: str, *options: str, kill: int = 0) -> Done:
        """One of CONVERSIONS with one thread; merge reads what a loose conversion of the source made."""
        command, *rest = CONVERSIONS[which]
        source = self.source
        if command == "merge":
            source = self.base / "loose"
            if not source.exists():
                assert self.cpu("--no-merge-safetensor", output=source).returncode == 0
        where = ("-i", source, "-o", self.output, "--cpuinfer-threads", "1")
        return self.run(command, *where, *rest, *options, kill=kill)

    def fresh(self, *options: str, source: Path | None = None) -> Any:
        place = self.base / "fresh"
        assert self.cpu(*options, output=place, source=source).returncode == 0
        tree = conversion.tree(place)
        shutil.rmtree(place)
        return tree

    def calls(self) -> list[Any]:
        """The calls of the last run, in order; paths below the folder that holds the output."""
        return killpoint.calls(self.log, self.output.parent)

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
        assert len(journal.find_finished_units(journal.read(self.work / "journal.jsonl"))) == units

    def units_written(self) -> int:
        return sum(c.name == "rename" and bool(c.second) and "/store/" in c.second for c in self.calls())

    def finished_as(self, expected: Any) -> None:
        """The output is what it should be, and nothing is left beside it."""
        assert conversion.differing(conversion.tree(self.output), expected) == []
        assert conversion.names(self.output.parent) == ["out"]


@pytest.fixture
def bench(tmp_path: Path, servers: Any) -> Iterator[Bench]:
    with conversion.in_memory(tmp_path) as base:
        yield Bench(base, servers)
