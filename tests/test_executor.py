"""--executor: every command's bytes are those of threads, whoever makes them; hosts that are not what they should be."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import KtconvertError, OutputError
from ktconvert.pipeline.engine import attempts, journal
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.plans.commands import make_plan, run
from rig import conversion, stored
from rig.dask_cluster import Cluster, make_certificates, version_environment
from rig.files import touch
from rig.forks import Forks

CASES: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "-i", "SMALL", "--max-shard-size", "80KB", "--non-experts", "keep", "--scale", "mse"),
    "cpu, loose": ("cpu", "-i", "SMALL", "--quant-method", "int8", "--save-backward-weights", "--no-merge-safetensor"),
    "gpu": ("gpu", "-i", "SMALL", "--quant-method", "RTN", "--quant-type", "W4A16"),
    "merge": ("merge", "-i", "LOOSE", "--max-tensors", "9"),
    "dequantize": ("dequantize", "-i", "FP8"),
    "resplit": ("resplit", "LOOSE", "OUTPUT", "--threadpool-count", "1"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, str]:
    base = tmp_path_factory.mktemp("inputs")
    small = conversion.checkpoint(base / "small")
    run(make_plan(options_of("cpu", small, base / "loose", no_merge_safetensor=True)))
    fp8 = stored.model(example, base / "fp8", "FP8")
    return {"SMALL": str(small), "LOOSE": str(base / "loose"), "FP8": str(fp8)}


@pytest.fixture(scope="module")
def servers() -> Iterator[Forks]:
    with Forks([], 2, modules=("distributed",)) as started:
        yield started


def options_of(command: str, source: Path, output: Path, **options: Any) -> ConversionOptions:
    return commands.make_options(command, input=source, output=output, cpuinfer_threads=2, **options)


def test_the_bytes_are_those_of_threads(
    inputs: dict[str, str], servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", "b")

    def make(case: str, name: str, *more: str) -> Any:
        output = tmp_path / case / name / "out"
        output.parent.mkdir(parents=True)
        words = [{**inputs, "OUTPUT": str(output)}.get(word, word) for word in CASES[case]]
        words += [] if "OUTPUT" in CASES[case] else ["-o", str(output)]
        done = servers.run([*words, *more], tmp_path / case / f"{name}.said")
        assert done.returncode == 0, done.stderr
        assert conversion.names(output.parent) == ["out"]
        return conversion.tree(output)

    with ThreadPoolExecutor(2) as pool:
        for case in CASES:
            expected = pool.submit(make, case, "threads")
            made = make(case, "dask", "--executor", f"dask:{cluster.file}")
            assert conversion.find_differences(made, expected.result()) == [], case


class Twice(Executor):
    """Has each unit made, loses what came of it, and has it made again; meanwhile a bit of the file has flipped."""

    def submit(self, fn: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        (task,) = arguments
        conversion.flip_bit(locate(Path(task.conversion.output)).partial / fn(task).name, keep_time=True)
        future: Future[Any] = Future()
        future.set_result(fn(task))
        return future


def test_a_bit_that_flipped_in_what_another_worker_finished(inputs: dict[str, str], tmp_path: Path) -> None:
    run(make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "threads")))
    events = conversion.Events()
    run(make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "out")), Twice(), events)
    threads = conversion.tree(tmp_path / "threads")
    assert conversion.find_differences(conversion.tree(tmp_path / "out"), threads) == []
    said = sorted(e["text"].partition(":")[0] for e in events.recorded if e["event"] == "warning")
    assert said == [f"experts.layer-00{layer} is made again" for layer in range(3)]


def test_processes_of_an_executor_do_not_keep_the_lock(tmp_path: Path) -> None:
    """They are forked while it is held, and outlive a conversion that has failed."""
    source = conversion.checkpoint(tmp_path / "source")
    plan: Plan = make_plan(options_of("cpu", source, tmp_path / "out"))
    conversion.flip_bit(source / "model-00001-of-00004.safetensors")
    with ProcessPoolExecutor(1) as executor:
        for _ in range(2):
            with pytest.raises(KtconvertError, match=r"model-00001-of-00004\.safetensors") as caught:
                run(plan, executor)
            assert not isinstance(caught.value, OutputError)


@pytest.mark.parametrize("name", ["partial", "attempts"])
def test_the_end_removes_what_a_worker_still_writes(name: str, tmp_path: Path) -> None:
    """One that was taken for dead, and was only frozen."""
    for _ in range(3):
        work = WorkDir(locate(tmp_path / "out"))
        folder, ended = work.paths.root / name, threading.Event()

        def write(folder: Path = folder, ended: threading.Event = ended) -> None:
            for number in itertools.count():
                if ended.is_set():
                    return
                with contextlib.suppress(FileNotFoundError):
                    (folder / str(number)).write_bytes(b"")

        writer = threading.Thread(target=write)
        writer.start()
        try:
            with work:
                while len(list(folder.iterdir())) < 100:
                    pass
                work.remove()
        finally:
            ended.set()
            writer.join()
        assert conversion.names(tmp_path) == []


def test_a_broken_executor_is_one_sentence(inputs: dict[str, str], tmp_path: Path) -> None:
    plan = make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "out"))
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with ProcessPoolExecutor(1, initializer=os._exit, initargs=(1,)) as broken:
        for executor, what in ((broken, "BrokenProcessPool: "), (closed, "RuntimeError: cannot schedule")):
            with pytest.raises(KtconvertError, match=rf"lost it \({what}.*ktconvert resume"):
                run(plan, executor)
    assert run(plan)


def test_the_journal_has_what_became_of_attempts_without_a_coordinator(inputs: dict[str, str], tmp_path: Path) -> None:
    plan = make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "out"))
    dead, lives = plan.units[:2]
    with WorkDir(locate(tmp_path / "out")) as work:
        child = os.fork()
        if child == 0:
            attempts.begin(work.paths, dead, "a run")
            os._exit(0)
        os.waitpid(child, 0)
        attempts.begin(work.paths, lives, "a run")
    for _ in range(2):  # once
        with WorkDir(locate(tmp_path / "out")) as work:
            noted = [(type(r), r.unit, r.pid) for r in work.journal.records if isinstance(r, journal.UnitEvent)]
            begun = [(journal.Start, dead.name, child), (journal.Start, lives.name, os.getpid())]
            assert sorted(noted, key=repr) == sorted([(journal.Lost, dead.name, child), *begun], key=repr)
    assert run(plan)


NO_SCHEDULERS = {"GARBAGE": "{", "LIST": "[]", "WITHOUT": json.dumps({"type": "Scheduler"})}


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nonsense", 2, ("nonsense", "threads, dask")),
        ("threads:0", 2, ("a number of threads",)),
        ("threads:many", 2, ("a number of threads",)),
        ("dask:", 2, ("no such file", "tcp://HOST:PORT")),
        ("dask:local:0", 2, ("a number of workers",)),
        ("DASK:Local:0", 2, ("dask:local:0", "a number of workers")),
        ("Dask:MISSING.json", 2, ("dask:MISSING.json", "no such file")),
        ("dask:MISSING.json", 2, ("MISSING.json", "no such file")),
        *((f"dask:{name}", 2, (name, "is not what `dask scheduler")) for name in NO_SCHEDULERS),
        ("dask:tcp://nothing", 1, ("tcp://nothing", "no Dask scheduler answers there")),
        ("dask:tls://127.0.0.1:1", 1, ("tls://127.0.0.1:1", "no Dask scheduler answers there")),
    ],
)
def test_what_is_no_executor(
    name: str, code: int, words: tuple[str, ...], inputs: dict[str, str], servers: Forks, tmp_path: Path
) -> None:
    for file, content in NO_SCHEDULERS.items():
        (tmp_path / file).write_text(content)
    place = name.removeprefix("dask:")
    shown = f"dask:{tmp_path / place}" if place in NO_SCHEDULERS else name
    words_of = ["cpu", "-i", inputs["SMALL"], "-o", str(tmp_path / "o" / "out"), "--executor", shown]
    done = servers.run(words_of, tmp_path / "said")
    conversion.check_refusal(done, code, "--executor", *words)
    assert not (tmp_path / "o").exists()


# The command line in a process where Dask cannot be imported.
WITHOUT_DASK = """
import sys
sys.modules["dask"] = sys.modules["distributed"] = None
from ktconvert.pipeline.cli import main
sys.argv = ["ktconvert", *sys.argv[1:]]
main()
"""


def test_without_dask_all_else_works(inputs: dict[str, str], tmp_path: Path) -> None:
    def ktconvert(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_DASK, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=conversion.TIMEOUT)

    words = ("cpu", "-i", inputs["SMALL"], "-o", str(tmp_path / "out"))
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(ktconvert, *words[:-1], str(tmp_path / "dask"), "--executor", "dask:local")
        done = ktconvert(*words, "--executor", "threads:1")
    assert done.returncode == 0, done.stderr
    conversion.check_refusal(refused.result(), 1, "needs Dask", "pip install 'ktconvert[dask]'")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "source", layers=2, experts=1)


def cpu(servers: Forks, source: Path, output: Path, executor: str) -> Any:
    log = output.with_name(f"{output.name}.said")
    return servers.run(["cpu", "-i", source, "-o", output, "--executor", executor], log)


def test_a_worker_with_another_version_or_setting(
    source: Path, servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    from ktconvert.pipeline import __version__

    words = ("host museum: ktconvert 0.0.1 is installed here", f"{__version__} where the command runs")
    old, wrong = version_environment(tmp_path / "old", "0.0.1"), {"KTCONVERT_ISA": "avx9"}
    for env, code, said in ((old, 7, words), (wrong, 2, ("host museum: ", "avx9"))):
        cluster.start("a", env={**env, "KTCONVERT_HOST": "museum"})
        conversion.check_refusal(cpu(servers, source, tmp_path / f"out{code}", f"dask:{cluster.file}"), code, *said)
        cluster.end_workers()


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds no ktconvert."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "ktconvert.py").write_text("raise ModuleNotFoundError(\"No module named 'ktconvert'\")")
    return {"PYTHONPATH": str(tmp_path / "without")}


def test_a_scheduler_without_ktconvert(source: Path, servers: Forks, without: dict[str, str], tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", env=without) as cluster:
        cluster.start("a", env={"PYTHONPATH": ""})
        done = cpu(servers, source, tmp_path / "out", f"dask:{cluster.file}")
    assert done.returncode == 0, done.stderr


def test_a_worker_without_ktconvert(
    source: Path, servers: Forks, cluster: Cluster, without: dict[str, str], tmp_path: Path
) -> None:
    cluster.start("a", env=without)
    done = cpu(servers, source, tmp_path / "out", f"dask:{cluster.file}")
    conversion.check_refusal(done, 1, "a worker lacks what it needs (No module named 'ktconvert')", "install the same")


def test_a_worker_with_another_umask(source: Path, servers: Forks, cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a", prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"))
    for options in ((), ("--no-merge-safetensor",)):
        modes = []
        for executor in ("threads", f"dask:{cluster.file}"):
            output = tmp_path / f"{len(options)}{executor[:4]}"
            line = ("cpu", "-i", source, "-o", output, "--executor", executor, *options)
            assert servers.run(line, tmp_path / "said", {}).returncode == 0
            files = (output, *output.rglob("*"))
            modes.append({str(path.relative_to(output)): oct(path.stat().st_mode) for path in files})
        assert modes[0] == modes[1]


ELSEWHERE = {
    "no source": (5, ("source", "host elsewhere")),
    "other header": (5, ("model-00001-of-00003.safetensors had", "is not the input that")),
    "other time": (5, ("model-00001-of-00003.safetensors was modified", "is not the input that")),
    "no output": (7, ("out.work: cannot be read here", "every host needs the file system of --output")),
    "other output": (7, ("out.work: is not the folder of this conversion", "every host needs the file system")),
}


def test_a_host_that_sees_other_files(source: Path, servers: Forks, cluster: Cluster, tmp_path: Path) -> None:
    """It has a mount namespace of its own, where something else lies at the paths of the input or the output."""
    with conversion.Mounts() as mounts:
        if mounts.refusal:
            pytest.skip(f"nothing can be mounted here: {mounts.refusal}")
        folders = {name: tmp_path / name.replace(" ", "-") for name in ELSEWHERE}
        for name, place in folders.items():
            (place / "seen").mkdir(parents=True)
            shutil.copytree(source, place / "source")  # copies keep their times of change
            shutil.copytree(source, place / "copy")
            seen = place / ("seen" if name.endswith("output") else "source")
            if name == "other header":
                shutil.rmtree(place / "copy")
                conversion.checkpoint(place / "copy", layers=2, experts=2)
            elif name == "other time":
                touch(place / "copy" / "model-00001-of-00003.safetensors")
            elif name == "other output":
                (place / "copy" / "out.work").mkdir()
                (place / "copy" / "out.work" / "token").write_text("another")
            mounts.mount(*(("-t", "tmpfs", "tmpfs") if name.startswith("no") else ("--bind", place / "copy")), seen)
        cluster.start("elsewhere", prefix=mounts.prefix, env={"KTCONVERT_HOST": "elsewhere"})

        def convert(name: str) -> Any:
            return cpu(servers, folders[name] / "source", folders[name] / "seen" / "out", f"dask:{cluster.file}")

        with ThreadPoolExecutor(2) as pool:
            for name, done in zip(ELSEWHERE, pool.map(convert, ELSEWHERE), strict=True):
                code, words = ELSEWHERE[name]
                conversion.check_refusal(done, code, "host elsewhere: ", *words)
                assert not (folders[name] / "seen" / "out").exists()
        done = servers.run(["resume", folders["other time"] / "seen" / "out"], tmp_path / "resumed.said")
        assert done.returncode == 0, done.stderr


def test_no_worker_that_makes_units(source: Path, servers: Forks, cluster: Cluster, tmp_path: Path) -> None:
    said = tmp_path / "out.said"
    with ThreadPoolExecutor(1) as pool:
        cluster.start("other", options=("--resources", "GPU=1"))
        coordinator = pool.submit(cpu, servers, source, tmp_path / "out", f"dask:{cluster.file}")
        pause = threading.Event()
        words = "no worker offers to make units yet; start one on each host: dask worker"
        while not said.exists() or words not in said.read_text():
            assert not coordinator.done()
            pause.wait(0.02)
        cluster.start("late")
        done = coordinator.result()
    assert done.returncode == 0, done.stderr


def test_certificates(source: Path, servers: Forks, tmp_path: Path) -> None:
    """Dask's own settings: whoever has them is let in."""
    with (
        Cluster(tmp_path / "cluster", tls=make_certificates(tmp_path / "tls")) as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        cluster.start("a")
        assert cluster.address.startswith("tls://")
        stranger = pool.submit(cpu, servers, source, tmp_path / "stranger", f"dask:{cluster.address}")
        # Dask reads its settings when it is imported, which a server has done before.
        words = ("cpu", "-i", source, "-o", tmp_path / "out", "--executor", f"dask:{cluster.address}")
        holder = conversion.ktconvert(*words, env=cluster.env)
        assert holder.returncode == 0, holder.stderr
        conversion.check_refusal(stranger.result(), 1, "--executor dask:tls://", "no Dask scheduler answers there")
    assert not (tmp_path / "stranger.work").exists()
