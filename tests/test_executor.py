"""--executor: every backend writes the bytes of threads; hosts with different files or versions are refused."""

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

from ktconvert.layouts.errors import KTConvertError, OutputError
from ktconvert.layouts.extras import install_command
from ktconvert.pipeline.engine import attempts, journal
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.plans.commands import make_plan, run
from ktconvert.pipeline.report.terminal import shorten_paths
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
    with Forks([], modules=("distributed",)) as started:
        yield started


def options_of(command: str, source: Path, output: Path, **options: Any) -> ConversionOptions:
    return commands.make_options(command, input=source, output=output, threads=2, **options)


def test_workers_write_the_same_bytes_as_threads(
    inputs: dict[str, str], servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", "b")

    def convert(case: str, name: str, *options: str) -> Any:
        output = tmp_path / case / name / "out"
        output.parent.mkdir(parents=True)
        arguments = [{**inputs, "OUTPUT": str(output)}.get(word, word) for word in CASES[case]]
        arguments += [] if "OUTPUT" in CASES[case] else ["-o", str(output)]
        result = servers.run([*arguments, *options], tmp_path / case / f"{name}.log")
        assert result.returncode == 0, result.stderr
        assert conversion.names(output.parent) == ["out"]
        return conversion.tree(output)

    with ThreadPoolExecutor(2) as pool:
        for case in CASES:
            expected = pool.submit(convert, case, "threads")
            actual = convert(case, "dask", "--executor", f"dask:{cluster.file}")
            assert conversion.find_differences(actual, expected.result()) == [], case


class RepeatingExecutor(Executor):
    """An executor that makes each unit, flips a bit of its file, loses the result and makes the unit again."""

    def submit(self, fn: Any, /, *arguments: Any, **keywords: Any) -> Future[Any]:
        (task,) = arguments
        conversion.flip_bit(locate(Path(task.conversion.output)).partial / fn(task).name, keep_time=True)
        future: Future[Any] = Future()
        future.set_result(fn(task))
        return future


def test_flipped_bits_in_files_of_workers_are_detected(inputs: dict[str, str], tmp_path: Path) -> None:
    run(make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "threads")))
    events = conversion.Events()
    run(make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "out")), RepeatingExecutor(), events)
    threads = conversion.tree(tmp_path / "threads")
    assert conversion.find_differences(conversion.tree(tmp_path / "out"), threads) == []
    warnings = sorted(e["text"].partition(":")[0] for e in events.recorded if e["event"] == "warning")
    assert warnings == [f"experts.layer-00{layer} is converted again" for layer in range(3)]


def test_processes_of_an_executor_do_not_keep_the_lock(tmp_path: Path) -> None:
    """The processes are forked while the lock is held, and outlive a failed conversion."""
    source = conversion.checkpoint(tmp_path / "source")
    plan: Plan = make_plan(options_of("cpu", source, tmp_path / "out"))
    conversion.flip_bit(source / "model-00001-of-00004.safetensors")
    with ProcessPoolExecutor(1) as executor:
        for _ in range(2):
            with pytest.raises(KTConvertError, match=r"model-00001-of-00004\.safetensors") as caught:
                run(plan, executor)
            assert not isinstance(caught.value, OutputError)


@pytest.mark.parametrize("name", ["partial", "attempts"])
def test_files_that_a_worker_still_writes_are_removed_at_the_end(name: str, tmp_path: Path) -> None:
    """The worker was thought dead, but was only frozen."""
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


def test_a_broken_executor_gives_one_sentence(inputs: dict[str, str], tmp_path: Path) -> None:
    plan = make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "out"))
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with ProcessPoolExecutor(1, initializer=os._exit, initargs=(1,)) as broken:
        for executor, reason in ((broken, "BrokenProcessPool: "), (closed, "RuntimeError: cannot schedule")):
            with pytest.raises(KTConvertError, match=rf"lost by the executor \({reason}.*run the same command again"):
                run(plan, executor)
    assert run(plan)


def test_the_journal_records_attempts_made_without_a_coordinator(inputs: dict[str, str], tmp_path: Path) -> None:
    plan = make_plan(options_of("cpu", Path(inputs["SMALL"]), tmp_path / "out"))
    dead, running = plan.units[:2]
    with WorkDir(locate(tmp_path / "out")) as work:
        child = os.fork()
        if child == 0:
            attempts.begin_attempt(work.paths, dead, "a run")
            os._exit(0)
        os.waitpid(child, 0)
        attempts.begin_attempt(work.paths, running, "a run")
    for _ in range(2):  # records are not written twice
        with WorkDir(locate(tmp_path / "out")) as work:
            recorded = [(type(r), r.unit, r.pid) for r in work.journal.records if isinstance(r, journal.UnitEvent)]
            starts = [(journal.Start, dead.name, child), (journal.Start, running.name, os.getpid())]
            assert sorted(recorded, key=repr) == sorted([(journal.Lost, dead.name, child), *starts], key=repr)
    assert run(plan)


BAD_SCHEDULER_FILES = {"GARBAGE": "{", "LIST": "[]", "WITHOUT": json.dumps({"type": "Scheduler"})}


@pytest.mark.parametrize(
    ("name", "code", "messages"),
    [
        (
            "nonsense",
            2,
            ("nonsense: unknown", " threads:N, ", " dask:local:N, ", " dask:tls://HOST:PORT, ", " dask:FILE "),
        ),
        ("threads:0", 2, ("a number of threads",)),
        ("threads:many", 2, ("a number of threads",)),
        ("dask:", 2, ("file not found", "tcp://HOST:PORT")),
        ("dask:local:0", 2, ("a number of workers",)),
        ("DASK:Local:0", 2, ("dask:local:0", "a number of workers")),
        ("Dask:MISSING.json", 2, ("dask:MISSING.json", "file not found")),
        ("dask:MISSING.json", 2, ("MISSING.json", "file not found")),
        *((f"dask:{name}", 2, (name, "not a file of `dask scheduler")) for name in BAD_SCHEDULER_FILES),
        ("dask:tcp://nothing", 1, ("tcp://nothing", "no Dask scheduler answers")),
        ("dask:tls://127.0.0.1:1", 1, ("tls://127.0.0.1:1", "no Dask scheduler answers")),
    ],
)
def test_invalid_executors_are_refused(
    name: str, code: int, messages: tuple[str, ...], inputs: dict[str, str], servers: Forks, tmp_path: Path
) -> None:
    for file, content in BAD_SCHEDULER_FILES.items():
        (tmp_path / file).write_text(content)
    file_name = name.removeprefix("dask:")
    executor = f"dask:{tmp_path / file_name}" if file_name in BAD_SCHEDULER_FILES else name
    arguments = ["cpu", "-i", inputs["SMALL"], "-o", str(tmp_path / "o" / "out"), "--executor", executor]
    result = servers.run(arguments, tmp_path / "log")
    conversion.check_refusal(result, code, "--executor", *messages)
    assert not (tmp_path / "o").exists()


# The command line in a process where Dask cannot be imported.
WITHOUT_DASK = """
import sys
sys.modules["dask"] = sys.modules["distributed"] = None
from ktconvert.pipeline.cli import main
sys.argv = ["ktconvert", *sys.argv[1:]]
main()
"""


def test_threads_work_without_dask(inputs: dict[str, str], tmp_path: Path) -> None:
    def ktconvert(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_DASK, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=conversion.TIMEOUT)

    arguments = ("cpu", "-i", inputs["SMALL"], "-o", str(tmp_path / "out"))
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(ktconvert, *arguments[:-1], str(tmp_path / "dask"), "--executor", "dask:local")
        result = ktconvert(*arguments, "--executor", "threads:1")
    assert result.returncode == 0, result.stderr
    conversion.check_refusal(refused.result(), 1, "needs distributed", shorten_paths(install_command("dask")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "source", layers=2, experts=1)


def cpu(servers: Forks, source: Path, output: Path, executor: str) -> Any:
    log = output.with_name(f"{output.name}.log")
    return servers.run(["cpu", "-i", source, "-o", output, "--executor", executor], log)


def test_workers_with_a_different_version_or_setting_are_refused(
    source: Path, servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    from ktconvert.pipeline import __version__

    messages = ("host museum: ktconvert 0.0.1 is installed here", f"{__version__} on the host of the command")
    old, wrong = version_environment(tmp_path / "old", "0.0.1"), {"KTCONVERT_ISA": "avx9"}
    for env, code, expected in ((old, 7, messages), (wrong, 2, ("host museum: ", "avx9"))):
        cluster.start("a", env={**env, "KTCONVERT_HOST": "museum"})
        conversion.check_refusal(cpu(servers, source, tmp_path / f"out{code}", f"dask:{cluster.file}"), code, *expected)
        cluster.end_workers()


@pytest.fixture
def without_ktconvert(tmp_path: Path) -> dict[str, str]:
    """Environment of a process in which ktconvert cannot be imported."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "ktconvert.py").write_text("raise ModuleNotFoundError(\"No module named 'ktconvert'\")")
    return {"PYTHONPATH": str(tmp_path / "without")}


def test_the_scheduler_needs_no_ktconvert(
    source: Path, servers: Forks, without_ktconvert: dict[str, str], tmp_path: Path
) -> None:
    with Cluster(tmp_path / "cluster", env=without_ktconvert) as cluster:
        cluster.start("a", env={"PYTHONPATH": ""})
        result = cpu(servers, source, tmp_path / "out", f"dask:{cluster.file}")
    assert result.returncode == 0, result.stderr


def test_a_worker_without_ktconvert_is_refused(
    source: Path, servers: Forks, cluster: Cluster, without_ktconvert: dict[str, str], tmp_path: Path
) -> None:
    cluster.start("a", env=without_ktconvert)
    result = cpu(servers, source, tmp_path / "out", f"dask:{cluster.file}")
    conversion.check_refusal(result, 1, "a worker lacks a module (No module named 'ktconvert')", "install the same")


def test_the_umask_of_a_worker_does_not_change_modes(
    source: Path, servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"))
    for options in ((), ("--no-merge-safetensor",)):
        modes = []
        for executor in ("threads", f"dask:{cluster.file}"):
            output = tmp_path / f"{len(options)}{executor[:4]}"
            command = ("cpu", "-i", source, "-o", output, "--executor", executor, *options)
            assert servers.run(command, tmp_path / "log", {}).returncode == 0
            files = (output, *output.rglob("*"))
            modes.append({str(path.relative_to(output)): oct(path.stat().st_mode) for path in files})
        assert modes[0] == modes[1]


DIFFERENT_HOSTS = {
    "no source": (5, ("source", "host elsewhere")),
    "other header": (5, ("model-00001-of-00003.safetensors had", "is not the input of")),
    "other time": (5, ("model-00001-of-00003.safetensors was modified", "is not the input of")),
    "no output": (7, ("out.work: cannot be read on this host", "every host needs the file system of --output")),
    "other output": (7, ("out.work: not the folder of this conversion", "every host needs the file system")),
}


def test_hosts_that_see_different_files_are_refused(
    source: Path, servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    """The worker has a mount namespace in which the input or the output is different."""
    with conversion.Mounts() as mounts:
        if mounts.refusal:
            pytest.skip(f"nothing can be mounted here: {mounts.refusal}")
        folders = {name: tmp_path / name.replace(" ", "-") for name in DIFFERENT_HOSTS}
        for name, folder in folders.items():
            (folder / "seen").mkdir(parents=True)
            shutil.copytree(source, folder / "source")  # copies keep their modification times
            shutil.copytree(source, folder / "copy")
            target = folder / ("seen" if name.endswith("output") else "source")
            if name == "other header":
                shutil.rmtree(folder / "copy")
                conversion.checkpoint(folder / "copy", layers=2, experts=2)
            elif name == "other time":
                touch(folder / "copy" / "model-00001-of-00003.safetensors")
            elif name == "other output":
                (folder / "copy" / "out.work").mkdir()
                (folder / "copy" / "out.work" / "token").write_text("another")
            mounts.mount(*(("-t", "tmpfs", "tmpfs") if name.startswith("no") else ("--bind", folder / "copy")), target)
        cluster.start("elsewhere", prefix=mounts.prefix, env={"KTCONVERT_HOST": "elsewhere"})

        def convert(name: str) -> Any:
            return cpu(servers, folders[name] / "source", folders[name] / "seen" / "out", f"dask:{cluster.file}")

        with ThreadPoolExecutor(2) as pool:
            for name, result in zip(DIFFERENT_HOSTS, pool.map(convert, DIFFERENT_HOSTS), strict=True):
                code, messages = DIFFERENT_HOSTS[name]
                conversion.check_refusal(result, code, "host elsewhere: ", *messages)
                assert not (folders[name] / "seen" / "out").exists()
        here = folders["other time"]
        words = ["cpu", "-i", here / "source", "-o", here / "seen" / "out"]
        result = servers.run(words, tmp_path / "here.log")
        assert result.returncode == 0, result.stderr


def test_a_conversion_waits_for_workers_that_offer_to_make_units(
    source: Path, servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "out.log"
    with ThreadPoolExecutor(1) as pool:
        cluster.start("other", options=("--resources", "GPU=1"))
        coordinator = pool.submit(cpu, servers, source, tmp_path / "out", f"dask:{cluster.file}")
        pause = threading.Event()
        warning = "waiting for workers; start one on each host: dask worker"
        while not log.exists() or warning not in log.read_text():
            assert not coordinator.done()
            pause.wait(0.02)
        cluster.start("late")
        result = coordinator.result()
    assert result.returncode == 0, result.stderr


def test_only_holders_of_certificates_can_connect(source: Path, servers: Forks, tmp_path: Path) -> None:
    """The certificates are in Dask's own settings."""
    with (
        Cluster(tmp_path / "cluster", tls=make_certificates(tmp_path / "tls")) as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        cluster.start("a")
        assert cluster.address.startswith("tls://")
        stranger = pool.submit(cpu, servers, source, tmp_path / "stranger", f"dask:{cluster.address}")
        # Dask reads its settings during import, and a server has imported it already.
        arguments = ("cpu", "-i", source, "-o", tmp_path / "out", "--executor", f"dask:{cluster.address}")
        holder = conversion.ktconvert(*arguments, env=cluster.env)
        assert holder.returncode == 0, holder.stderr
        conversion.check_refusal(stranger.result(), 1, "--executor dask:tls://", "no Dask scheduler answers")
    assert not (tmp_path / "stranger.work").exists()
