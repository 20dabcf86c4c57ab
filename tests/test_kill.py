"""Kills before each call that changes a directory, once or twice, followed by a resume.

The output equals that of an uninterrupted run byte for byte, no file of ours remains beside it, and the source is never
written to.
"""

import contextlib
import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import InputError
from rig import conversion, forks, killpoint, shims

INDEX = "model.safetensors.index.json"


# Calls that a file system may refuse, after the error of their failure.
REFUSED_CALLS = {"links": ("EPERM", "link", "linkat"), "swap": ("EINVAL", "renameat2"), "locks": ("ENOLCK", "flock")}


@dataclass(frozen=True)
class Inputs:
    """Sources of conversions.

    small  3 layers of 2 experts
    tiny   2 layers of 1 expert
    loose  tiny, converted without merging
    old    an output with different weights than tiny's: each file has the size of the file that replaces it
    """

    small: Path
    tiny: Path
    loose: Path
    old: Path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Write the sources."""
    base = tmp_path_factory.mktemp("inputs")
    small = conversion.checkpoint(base / "small")
    tiny, other = (conversion.checkpoint(base / f"tiny{seed}", layers=2, experts=1, seed=seed) for seed in (0, 1))
    for source, output, more in ((tiny, "loose", ["--no-merge-safetensor"]), (other, "old", [])):
        result = conversion.ktconvert("cpu", "-i", source, "-o", base / output, "-q", *more)
        assert result.returncode == 0, result.stderr
    return Inputs(small, tiny, base / "loose", base / "old")


Running = tuple[forks.Forks, conversion.Mounts | None]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Running]]:
    """Return running(mounted): servers with the shims, and their mount namespace."""
    base = tmp_path_factory.mktemp("shims")
    preload = [
        *(shims.build_refusing(base, *how, selected=True) for how in REFUSED_CALLS.values()),
        killpoint.build(base),
    ]
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(mounted: bool) -> Running:
            mounts = stack.enter_context(conversion.Mounts()) if mounted else None
            if mounts is not None and mounts.refusal:
                pytest.skip(f"nothing can be mounted here: {mounts.refusal}")
            prefix = mounts.prefix if mounts is not None else ()
            return stack.enter_context(forks.Forks(preload, prefix)), mounts

        yield start


@dataclass(frozen=True)
class Case:
    """A kind of conversion. source: the field of Inputs that it reads."""

    command: str
    source: str
    options: tuple[str, ...] = ()
    threads: int = 2
    over: bool = False  # overwrite an earlier output of ours
    without: tuple[str, ...] = ()  # keys of REFUSED_CALLS: calls that the file system refuses
    mounted: bool = False  # the output is a mount point, which cannot be renamed: files move into it one by one
    methods: tuple[str, ...] = ()  # several outputs

    def arguments(self, inputs: Inputs, output: Path) -> list[str]:
        """Return the command line."""
        original = ("-r", str(inputs.tiny)) if self.command == "merge" else ()
        source = str(getattr(inputs, self.source))
        paths = (source, str(output)) if self.command == "resplit" else ("-i", source, "-o", str(output))
        return [
            *(self.command, *paths, *self.options, *original),
            *(("--overwrite",) if self.over else ()),
            *(("--quant-method", ",".join(self.methods)) if self.methods else ()),
            *("--cpuinfer-threads", str(min(self.threads, conversion.CORES))),
        ]

    def refusal_environment(self) -> dict[str, str]:
        """Return the environment in which calls are refused."""
        return {shims.REFUSED: " ".join(call for name in self.without for call in REFUSED_CALLS[name][1:])}


CASES = {
    "merged": Case("cpu", "small"),
    "loose": Case("cpu", "tiny", ("--no-merge-safetensor",)),
    "cut and copied": Case("cpu", "small", ("--max-shard-size", "80KB", "--non-experts", "copy", "--layers", "0-1")),
    "a method per layer": Case("cpu", "small", ("--method-map", "0=int8", "--method-map", "1=bf16")),
    "merge": Case("merge", "loose", ("--max-tensors", "9")),
    "resplit": Case("resplit", "loose", ("--threadpool-count", "1")),
    "for the GPU": Case("gpu", "small", ("--quant-method", "RTN", "--quant-type", "W4A16", "--max-shard-size", "80KB")),
    "several outputs": Case("cpu", "tiny", methods=("int4", "bf16")),
    "overwrite": Case("cpu", "tiny", over=True, threads=1),
    "overwrite, no hard links": Case("cpu", "tiny", over=True, without=("links",), threads=1),
    "overwrite, no swapping": Case("cpu", "tiny", over=True, without=("swap",), threads=1),
    "no hard links": Case("cpu", "tiny", without=("links",), threads=1),
    "no locks": Case("cpu", "tiny", without=("locks",), threads=1),
    "overwrite, no locks, no hard links": Case("cpu", "tiny", over=True, without=("locks", "links"), threads=1),
    "mount point": Case("cpu", "tiny", mounted=True, threads=1),
    "mounted, loose, no links": Case(
        "cpu", "tiny", ("--no-merge-safetensor",), mounted=True, without=("links",), threads=1
    ),
    "mount point, overwrite": Case("cpu", "tiny", mounted=True, over=True, threads=1),
    "mount point, overwrite, no hard links": Case(
        "cpu", "tiny", mounted=True, over=True, without=("links",), threads=1
    ),
    "loose, no hard links": Case("cpu", "tiny", ("--no-merge-safetensor",), without=("links",), threads=1),
}


class Matrix:
    """Runs of a case under the shim, each in its own folder, compared with an uninterrupted run."""

    def __init__(self, case: Case, inputs: Inputs, base: Path, servers: Any, mounts: Any) -> None:
        self.case, self.inputs, self.base, self.servers, self.mounts = case, inputs, base, servers, mounts
        self.before = {name: conversion.identity(getattr(inputs, name)) for name in ("small", "tiny", "loose")}
        self.old = inputs.old if case.over else None
        output = self.prepare("whole")
        result = self.run(output, 0)
        assert result.returncode == 0, result.stderr
        self.expected = {each.name: self.tree(each) for each in self.outputs(output)}
        calls = killpoint.read_calls(self.log(output))
        self.points = len(calls)
        # The first rename that stores a unit, and the first and the last that make the output appear (approximate with
        # threads).
        own_prefixes = tuple(f"{each}{place}" for each in self.outputs(output) for place in (".work/", "/.ktconvert/"))
        last = [
            n
            for n, c in enumerate(calls, 1)
            if c.second and not c.second.startswith(own_prefixes) and "rename" in c.name
        ]
        unit = [n for n, c in enumerate(calls, 1) if c.name == "rename" and c.second and "/store/" in c.second]
        self.appearance_points = sorted({*unit[:1], last[0], last[-1]})

    def prepare(self, name: str) -> Path:
        """Make a folder for a run; return the path of its output."""
        output = self.base / name / "out"
        output.parent.mkdir()
        if self.case.mounted:
            output.mkdir()
            self.mounts.mount("-t", "tmpfs", "-o", "size=64m,mode=755", "tmpfs", output)
        if self.old is not None:
            shutil.copytree(self.old, self.host_path(output), dirs_exist_ok=True)
        return output

    def outputs(self, output: Path) -> list[Path]:
        """Return the paths of all outputs."""
        return [output.with_name(f"{output.name}-{method}") for method in self.case.methods] or [output]

    def host_path(self, path: Path) -> Path:
        """Return the path of a file in this process's mount namespace."""
        return self.mounts.host_path(path) if self.case.mounted else path

    def tree(self, output: Path) -> Any:
        return conversion.tree(self.host_path(output))

    def plan(self, output: Path) -> Path:
        """Return the path of plan.json."""
        return (
            self.host_path(output) / ".ktconvert/plan.json" if self.case.mounted else Path(f"{output}.work/plan.json")
        )

    def log(self, output: Path) -> Path:
        return output.parent.with_suffix(".log")

    def run(self, output: Path, n: int, arguments: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command, killed before its n-th call; 0 lets it finish. Without arguments, start the conversion."""
        log = self.log(output)
        env = killpoint.shim_settings(output, n, log) | self.case.refusal_environment()
        arguments = arguments or self.case.arguments(self.inputs, output)
        result: subprocess.CompletedProcess[str] = self.servers.run(arguments, log.with_suffix(".stderr"), env)
        return result

    def check_all_complete_or_absent(self, output: Path, where: str) -> None:
        """Assert that right after a kill, loaders see nothing or a complete output."""
        for each in self.outputs(output):
            self.check_complete_or_absent(each, where)

    def check_complete_or_absent(self, output: Path, where: str) -> None:
        """Check one output."""
        wanted = self.expected[output.name]
        states = [wanted] if self.old is None else [wanted, conversion.tree(self.old)]
        files = self.tree(output)
        if self.case.mounted:
            files = {name: data for name, data in files.items() if not name.startswith(".ktconvert")}
            if "manifest.json" not in files and INDEX not in files:
                return  # no loader opens a folder without index and manifest
        elif self.old is None and not output.exists():
            return
        elif self.old is not None and "swap" in self.case.without and not output.exists():
            files = conversion.tree(Path(f"{output}.work/old"))  # killed between the two renames
        allowed = {"manifest.json", INDEX} if self.case.mounted else set()
        assert any(set(conversion.find_differences(files, state)) <= allowed for state in states), where

    def finish(self, output: Path, by_name: bool, where: str) -> None:
        """Resume without a kill, by `ktconvert resume` (of each output) or by the same command, and compare."""
        if self.case.methods:
            for each in self.outputs(output) if by_name else []:
                if self.plan(each).exists():
                    result = self.run(output, 0, ["resume", str(each)])
                    assert result.returncode == 0, f"{where}: {result.stderr}"
                    assert conversion.find_differences(self.tree(each), self.expected[each.name]) == [], where
            by_name = False  # the outputs that were not begun
        begun = self.plan(output).exists()
        result = self.run(output, 0, ["resume", str(output)] if by_name else None)
        if by_name and not begun and (result.returncode == InputError.exit_code or self.case.over):
            # Killed before the plan was written: there is nothing to resume, or only the old output.
            assert re.search("does not exist|not an unfinished conversion|nothing to do", result.stderr), where
            result = self.run(output, 0)
        assert result.returncode == 0, f"{where}: {result.stderr}"

    def check(self, output: Path, where: str) -> None:
        """Assert that all outputs are as expected, and that nothing remains beside them."""
        for each in self.outputs(output):
            assert conversion.find_differences(self.tree(each), self.expected[each.name]) == [], where
        assert conversion.names(output.parent) == sorted(self.expected), where

    def kill_and_resume(self, *points: int) -> None:
        """Kill the run and each resume before a call; then resume to the end and compare."""
        output, where = self.prepare("-".join(map(str, points))), ""
        for number, n in enumerate(points):
            begun = [each for each in self.outputs(output) if self.plan(each).exists()]
            result = self.run(output, n, ["resume", str(begun[0])] if number and begun and n % 2 else None)
            if result.returncode == 0:  # a resume, or a run with threads, may make fewer calls
                continue
            where += f"killed before call {n} of {self.points}, {killpoint.find_prevented_call(self.log(output))}; "
            assert result.returncode == killpoint.KILLED, f"{where}: {result.stderr}"
            self.check_all_complete_or_absent(output, where)
        self.finish(output, bool(sum(points) % 2), where)
        self.check(output, where)
        shutil.rmtree(output.parent)

    def draw_pairs(self, count: int) -> list[tuple[int, int]]:
        """Draw pairs of kill points."""
        return conversion.draw_pairs(range(1, self.points + 1), range(1, self.points + 1), count)

    def check_sources(self) -> None:
        """Assert that the sources were not changed."""
        assert self.before == {name: conversion.identity(getattr(self.inputs, name)) for name in self.before}


@pytest.fixture
def matrix(
    request: pytest.FixtureRequest, inputs: Inputs, running: Callable[[bool], Running], tmp_path: Path
) -> Iterator[Matrix]:
    case = CASES[request.param]
    with conversion.memory_folder(tmp_path) as base:
        yield Matrix(case, inputs, base, *running(case.mounted))


@pytest.mark.parametrize("matrix", CASES, indirect=True)
def test_resume_completes_after_kills_at_sampled_calls(matrix):
    """Kill once at some points, and where a unit and the output appear; then twice, also during a resume."""
    appears = [n + late for n in matrix.appearance_points for late in (0, 1)]
    conversion.run_in_parallel(
        matrix.kill_and_resume, sorted({*conversion.choose_kill_points(matrix.points, 2), *appears})
    )
    conversion.run_in_parallel(lambda pair: matrix.kill_and_resume(*pair), matrix.draw_pairs(1))
    matrix.check_sources()


@pytest.mark.parametrize("matrix", ["overwrite", "overwrite, no hard links"], indirect=True)
def test_resume_ignores_the_old_output_if_inodes_change(matrix):
    """Killed right after the swap, on a file system that changes inode numbers of folders when it is mounted again.

    The work folder then has the old output: files with the right names and sizes, but with wrong bytes.
    """
    output = matrix.prepare("swapped")
    assert matrix.run(output, 0).returncode == 0
    calls = killpoint.read_calls(matrix.log(output))
    swap = next(n for n, call in enumerate(calls, 1) if call.name == "renameat2")
    shutil.rmtree(output.parent)
    output = matrix.prepare("killed")
    assert matrix.run(output, swap + 1).returncode == killpoint.KILLED
    assert not conversion.find_differences(matrix.tree(output), matrix.expected[output.name])
    journal = Path(f"{output}.work/journal.jsonl")
    journal.write_text(re.sub(r'"inode": \d+', '"inode": 1', journal.read_text()))
    matrix.finish(output, True, "with a different inode")
    matrix.check(output, "with a different inode")


@pytest.mark.long
@pytest.mark.parametrize("matrix", CASES, indirect=True)
def test_resume_completes_after_a_kill_at_any_call(matrix):
    print(f"{matrix.points} kill points")
    conversion.run_in_parallel(matrix.kill_and_resume, range(1, matrix.points + 1))
    matrix.check_sources()


@pytest.mark.long
@pytest.mark.parametrize("matrix", ["merged", "loose", "overwrite", "mount point, overwrite"], indirect=True)
def test_resume_completes_after_two_kills(matrix):
    conversion.run_in_parallel(lambda pair: matrix.kill_and_resume(*pair), matrix.draw_pairs(50))
