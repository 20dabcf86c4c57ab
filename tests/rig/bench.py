"""Fixtures for interrupted conversions: a source, an output beside it, and a command line that can be killed."""

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
SHARD = "model-00002-of-00004.safetensors"  # the shard of the source that has layer 1
CONVERSIONS = {
    "merged": ("cpu",),
    "loose": ("cpu", "--no-merge-safetensor"),
    "cut and copied": ("cpu", "--max-shard-size", "80KB", "--non-experts", "copy"),
    "for the GPU": ("gpu", "--quant-method", "RTN", "--max-shard-size", "80KB"),
    "merge": ("merge", "--max-tensors", "9"),
}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start servers that fork for each run, with the kill-point shim loaded."""
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with forks.Forks([shim]) as server:
        yield server


class Bench:
    """A source checkpoint, an output, and the command line that converts one into the other."""

    def __init__(self, base: Path, servers: Any) -> None:
        self.base, self.servers = base, servers
        self.source: Path = conversion.checkpoint(base / "source", layers=LAYERS)
        self.output = base / "made" / "out"
        self.output.parent.mkdir()
        self.work = self.output.with_name("out.work")
        self.log = base / "log"

    def run(self, *arguments: str | Path, kill: int = 0) -> Done:
        """Run `ktconvert`; kill it before the n-th call that changes the output or its work directory."""
        self.log.unlink(missing_ok=True)
        env = {"KILLPOINT_ROOT": str(self.output), "KILLPOINT_N": str(kill), "KILLPOINT_LOG": str(self.log)}
        result: Done = self.servers.run(arguments, self.base / "printed", env)
        return result

    def cpu(self, *options: str, kill: int = 0, output: Path | None = None, source: Path | None = None) -> Done:
        """Run `ktconvert cpu` with one thread, so that the order of calls is fixed."""
        where = ("-i", source or self.source, "-o", output or self.output, "--cpuinfer-threads", "1")
        return self.run("cpu", *where, *options, kill=kill)

    def begin(self, name: str, *options: str, kill: int = 0) -> Done:
        """Run one of CONVERSIONS with one thread; merge reads a loose conversion of the source."""
        command, *rest = CONVERSIONS[name]
        source = self.source
        if command == "merge":
            source = self.base / "loose"
            if not source.exists():
                assert self.cpu("--no-merge-safetensor", output=source).returncode == 0
        where = ("-i", source, "-o", self.output, "--cpuinfer-threads", "1")
        return self.run(command, *where, *rest, *options, kill=kill)

    def convert_fresh(self, *options: str, source: Path | None = None) -> Any:
        """Convert without interruption, and return the tree of the output."""
        folder = self.base / "fresh"
        assert self.cpu(*options, output=folder, source=source).returncode == 0
        tree = conversion.tree(folder)
        shutil.rmtree(folder)
        return tree

    def calls(self) -> list[Any]:
        """Return the calls of the last run, in order; paths are relative to the folder that contains the output."""
        return killpoint.read_calls(self.log, self.output.parent)

    def stop_after(self, units: int, *options: str) -> None:
        """Start a conversion and kill it right after the journal has recorded this number of units."""
        output = self.output
        self.output = self.base / "other" / "out"
        self.output.parent.mkdir()
        assert self.cpu(*options).returncode == 0
        calls = list(enumerate(self.calls(), 1))
        synced = [n for n, call in calls if call[:2] == ("fsync", "out.work/journal.jsonl")]
        synced[0] = next(n for n, call in calls if call.second == "out.work/plan.json")
        shutil.rmtree(self.output.parent)
        self.output = output
        assert self.cpu(*options, kill=synced[units] + 1).returncode == killpoint.KILLED
        assert len(journal.find_finished_units(journal.read_records(self.work / "journal.jsonl"))) == units

    def count_written_units(self) -> int:
        """Count the units that the last run published."""
        return sum(c.name == "rename" and bool(c.second) and "/store/" in c.second for c in self.calls())

    def check_output(self, expected: Any) -> None:
        """Assert that the output equals the expected tree, and that no other file remains beside it."""
        assert conversion.find_differences(conversion.tree(self.output), expected) == []
        assert conversion.names(self.output.parent) == ["out"]


@pytest.fixture
def bench(tmp_path: Path, servers: Any) -> Iterator[Bench]:
    """Make a bench in a folder of its own, in memory if there is space."""
    with conversion.memory_folder(tmp_path) as base:
        yield Bench(base, servers)
