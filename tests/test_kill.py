"""Pull the plug anywhere: killed before each call that changes a directory, once or twice; resumed, the output is byte
for byte that of an uninterrupted run, nothing of ours is left beside it, and the source was never written to."""

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

from rig import conversion, forks, killpoint, shims

INDEX = "model.safetensors.index.json"


# What a file system refuses -> how its calls fail.
REFUSING = {"links": ("EPERM", "link", "linkat"), "swap": ("EINVAL", "renameat2"), "locks": ("ENOLCK", "flock")}


@dataclass(frozen=True)
class Inputs:
    """What conversions read. small has 3 layers of 2 experts, tiny 2 of 1; loose is tiny, converted without merging; old
    is an output with other weights than tiny's: every file of it has the size of the file that replaces it."""

    small: Path
    tiny: Path
    loose: Path
    old: Path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    base = tmp_path_factory.mktemp("inputs")
    small = conversion.checkpoint(base / "small")
    tiny, other = (conversion.checkpoint(base / f"tiny{seed}", layers=2, experts=1, seed=seed) for seed in (0, 1))
    for source, output, more in ((tiny, "loose", ["--no-merge-safetensor"]), (other, "old", [])):
        done = conversion.ktconvert("cpu", "-i", source, "-o", base / output, "-q", *more)
        assert done.returncode == 0, done.stderr
    return Inputs(small, tiny, base / "loose", base / "old")


Running = tuple[forks.Forks, conversion.Mounts | None]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Running]]:
    """running(mounted): servers with the shims, and the namespace for mounts that they are in."""
    base = tmp_path_factory.mktemp("shims")
    preload = [*(shims.build_refusing(base, *how, selected=True) for how in REFUSING.values()), killpoint.build(base)]
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(mounted: bool) -> Running:
            mounts = stack.enter_context(conversion.Mounts()) if mounted else None
            if mounts is not None and mounts.refusal:
                pytest.skip(f"nothing can be mounted here: {mounts.refusal}")
            prefix = mounts.prefix if mounts is not None else ()
            return stack.enter_context(forks.Forks(preload, conversion.CORES, prefix)), mounts

        yield start


@dataclass(frozen=True)
class Case:
    """One kind of conversion. source names the field of Inputs that it reads."""

    command: str
    source: str
    options: tuple[str, ...] = ()
    threads: int = 2
    over: bool = False  # another output of ours lies there and is to be overwritten
    without: tuple[str, ...] = ()  # what the file system refuses, of REFUSING
    mounted: bool = False  # the output is a mount point: it cannot be renamed, so files move into it one by one
    methods: tuple[str, ...] = ()  # several outputs

    def arguments(self, inputs: Inputs, output: Path) -> list[str]:
        original = ("-r", str(inputs.tiny)) if self.command == "merge" else ()
        source = str(getattr(inputs, self.source))
        paths = (source, str(output)) if self.command == "resplit" else ("-i", source, "-o", str(output))
        return [
            *(self.command, *paths, *self.options, *original),
            *(("--overwrite",) if self.over else ()),
            *(("--quant-method", ",".join(self.methods)) if self.methods else ()),
            *("--cpuinfer-threads", str(min(self.threads, conversion.CORES))),
        ]

    def refused(self) -> dict[str, str]:
        """The environment in which calls are refused."""
        return {shims.REFUSED: " ".join(call for what in self.without for call in REFUSING[what][1:])}


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
    """Runs of one case under the shim, each in a folder of its own, compared with an uninterrupted one."""

    def __init__(self, case: Case, inputs: Inputs, base: Path, servers: Any, mounts: Any) -> None:
        self.case, self.inputs, self.base, self.servers, self.mounts = case, inputs, base, servers, mounts
        self.before = {name: conversion.identity(getattr(inputs, name)) for name in ("small", "tiny", "loose")}
        self.old = inputs.old if case.over else None
        output = self.prepare("whole")
        done = self.run(output, 0)
        assert done.returncode == 0, done.stderr
        self.wanted = {each.name: self.tree(each) for each in self.outputs(output)}
        calls = killpoint.read_calls(self.log(output))
        self.points = len(calls)
        # The first rename by which a unit is stored, the first and the last by which the output appears; with threads,
        # about there.
        own = tuple(f"{each}{place}" for each in self.outputs(output) for place in (".work/", "/.ktconvert/"))
        last = [n for n, c in enumerate(calls, 1) if c.second and not c.second.startswith(own) and "rename" in c.name]
        unit = [n for n, c in enumerate(calls, 1) if c.name == "rename" and c.second and "/store/" in c.second]
        self.appearing = sorted({*unit[:1], last[0], last[-1]})

    def prepare(self, name: str) -> Path:
        output = self.base / name / "out"
        output.parent.mkdir()
        if self.case.mounted:
            output.mkdir()
            self.mounts.mount("-t", "tmpfs", "-o", "size=64m,mode=755", "tmpfs", output)
        if self.old is not None:
            shutil.copytree(self.old, self.seen(output), dirs_exist_ok=True)
        return output

    def outputs(self, output: Path) -> list[Path]:
        return [output.with_name(f"{output.name}-{method}") for method in self.case.methods] or [output]

    def seen(self, path: Path) -> Path:
        return self.mounts.host_path(path) if self.case.mounted else path

    def tree(self, output: Path) -> Any:
        return conversion.tree(self.seen(output))

    def plan(self, output: Path) -> Path:
        return self.seen(output) / ".ktconvert/plan.json" if self.case.mounted else Path(f"{output}.work/plan.json")

    def log(self, output: Path) -> Path:
        return output.parent.with_suffix(".log")

    def run(self, output: Path, n: int, arguments: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """Killed before its n-th call; 0 lets it finish. Without arguments, the conversion from its beginning."""
        log = self.log(output)
        env = killpoint.shim_settings(output, n, log) | self.case.refused()
        arguments = arguments or self.case.arguments(self.inputs, output)
        done: subprocess.CompletedProcess[str] = self.servers.run(arguments, log.with_suffix(".said"), env)
        return done

    def whole_or_absent(self, output: Path, where: str) -> None:
        """Right after a kill: nothing that a loader could open, or all of it; what lay there before is whole."""
        for each in self.outputs(output):
            self.one_whole_or_absent(each, where)

    def one_whole_or_absent(self, output: Path, where: str) -> None:
        wanted = self.wanted[output.name]
        states = [wanted] if self.old is None else [wanted, conversion.tree(self.old)]
        files = self.tree(output)
        if self.case.mounted:
            files = {name: data for name, data in files.items() if not name.startswith(".ktconvert")}
            if "manifest.json" not in files and INDEX not in files:
                return  # neither index nor manifest: no one takes this for a model
        elif self.old is None and not output.exists():
            return
        elif self.old is not None and "swap" in self.case.without and not output.exists():
            files = conversion.tree(Path(f"{output}.work/old"))  # two renames, and killed between them
        allowed = {"manifest.json", INDEX} if self.case.mounted else set()
        assert any(set(conversion.find_differences(files, state)) <= allowed for state in states), where

    def finish(self, output: Path, by_name: bool, where: str) -> None:
        """Resume without a kill, by `ktconvert resume` (of several outputs, each alone) or by the same command, and
        compare.
        """
        if self.case.methods:
            for each in self.outputs(output) if by_name else []:
                if self.plan(each).exists():
                    done = self.run(output, 0, ["resume", str(each)])
                    assert done.returncode == 0, f"{where}: {done.stderr}"
                    assert conversion.find_differences(self.tree(each), self.wanted[each.name]) == [], where
            by_name = False  # those that were not begun
        begun = self.plan(output).exists()
        done = self.run(output, 0, ["resume", str(output)] if by_name else None)
        if by_name and not begun and (done.returncode == 7 or self.case.over):
            # Killed before there was a plan: nothing to resume, or only the old output to be seen.
            assert re.search("no conversion into it was begun|nothing to do", done.stderr), where
            done = self.run(output, 0)
        assert done.returncode == 0, f"{where}: {done.stderr}"

    def check(self, output: Path, where: str) -> None:
        for each in self.outputs(output):
            assert conversion.find_differences(self.tree(each), self.wanted[each.name]) == [], where
        assert conversion.names(output.parent) == sorted(self.wanted), where

    def killed(self, *points: int) -> None:
        """Killed before a call of the run, and of each resume; then resumed to the end."""
        output, where = self.prepare("-".join(map(str, points))), ""
        for number, n in enumerate(points):
            begun = [each for each in self.outputs(output) if self.plan(each).exists()]
            done = self.run(output, n, ["resume", str(begun[0])] if number and begun and n % 2 else None)
            if done.returncode == 0:  # threads may save a call or two, and a resume has fewer
                continue
            where += f"killed before call {n} of {self.points}, {killpoint.find_prevented_call(self.log(output))}; "
            assert done.returncode == killpoint.KILLED, f"{where}: {done.stderr}"
            self.whole_or_absent(output, where)
        self.finish(output, bool(sum(points) % 2), where)
        self.check(output, where)
        shutil.rmtree(output.parent)

    def pairs(self, count: int) -> list[tuple[int, int]]:
        return conversion.draw_pairs(range(1, self.points + 1), range(1, self.points + 1), count)

    def sources_untouched(self) -> None:
        assert self.before == {name: conversion.identity(getattr(self.inputs, name)) for name in self.before}


@pytest.fixture
def matrix(
    request: pytest.FixtureRequest, inputs: Inputs, running: Callable[[bool], Running], tmp_path: Path
) -> Iterator[Matrix]:
    case = CASES[request.param]
    with conversion.memory_folder(tmp_path) as base:
        yield Matrix(case, inputs, base, *running(case.mounted))


@pytest.mark.parametrize("matrix", CASES, indirect=True)
def test_killed_here_and_there_then_resumed(matrix):
    """Once at some points, and where a unit and the output appear; then twice, while resuming too."""
    appears = [n + late for n in matrix.appearing for late in (0, 1)]
    conversion.run_in_parallel(matrix.killed, sorted({*conversion.choose_kill_points(matrix.points, 2), *appears}))
    conversion.run_in_parallel(lambda pair: matrix.killed(*pair), matrix.pairs(1))
    matrix.sources_untouched()


@pytest.mark.parametrize("matrix", ["overwrite", "overwrite, no hard links"], indirect=True)
def test_where_inodes_change_the_old_output_vouches_for_nothing(matrix):
    """Killed right after the swap, on a file system that gives folders other inode numbers when it is mounted again.

    What lies in the work folder is the old output then: files of the right names and sizes, and none of the right
    bytes.
    """
    output = matrix.prepare("swapped")
    assert matrix.run(output, 0).returncode == 0
    calls = killpoint.read_calls(matrix.log(output))
    swap = next(n for n, call in enumerate(calls, 1) if call.name == "renameat2")
    shutil.rmtree(output.parent)
    output = matrix.prepare("killed")
    assert matrix.run(output, swap + 1).returncode == killpoint.KILLED
    assert not conversion.find_differences(matrix.tree(output), matrix.wanted[output.name])
    book = Path(f"{output}.work/journal.jsonl")
    book.write_text(re.sub(r'"inode": \d+', '"inode": 1', book.read_text()))
    matrix.finish(output, True, "with another inode")
    matrix.check(output, "with another inode")


@pytest.mark.long
@pytest.mark.parametrize("matrix", CASES, indirect=True)
def test_killed_before_every_call_then_resumed(matrix):
    print(f"{matrix.points} kill points")
    conversion.run_in_parallel(matrix.killed, range(1, matrix.points + 1))
    matrix.sources_untouched()


@pytest.mark.long
@pytest.mark.parametrize("matrix", ["merged", "loose", "overwrite", "mount point, overwrite"], indirect=True)
def test_killed_while_resuming_many_times(matrix):
    conversion.run_in_parallel(lambda pair: matrix.killed(*pair), matrix.pairs(50))
