"""Workers on hosts that are not what they should be, and clusters that let in only who holds a certificate, or have no worker."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rig import conversion, forks
from rig.dask_cluster import Cluster, certificates, other_version
from rig.files import touch

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "source", layers=2, experts=1)


@pytest.fixture(scope="module")
def servers() -> Iterator[forks.Forks]:
    with forks.Forks([], 2, modules=("distributed",)) as started:
        yield started


def cpu(servers: forks.Forks, source: Path, output: Path, executor: str, env: dict[str, str] | None = None) -> Done:
    log = output.with_name(f"{output.name}.said")
    return servers.run(["cpu", "-i", source, "-o", output, "--executor", executor], log, env)


def test_a_worker_with_another_version_or_a_wrong_setting(source: Path, servers: forks.Forks, tmp_path: Path) -> None:
    from ktconvert.pipeline import __version__

    words = ("host museum: ktconvert 0.0.1 is installed here", f"{__version__} where the command runs")
    old, wrong = other_version(tmp_path / "old", "0.0.1"), {"KTCONVERT_ISA": "avx9"}
    for env, code, said in ((old, 7, words), (wrong, 2, ("host museum: ", "avx9"))):
        with Cluster(tmp_path / f"cluster{code}") as cluster:
            cluster.start("a", env={**env, "KTCONVERT_HOST": "museum"})
            done = cpu(servers, source, tmp_path / f"out{code}", f"dask:{cluster.file}")
        conversion.refused(done, code, *said)


@pytest.mark.parametrize("where", ["scheduler", "worker"])
def test_a_host_without_ktconvert(source: Path, servers: forks.Forks, tmp_path: Path, where: str) -> None:
    """Only workers need it."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "ktconvert.py").write_text("raise ModuleNotFoundError(\"No module named 'ktconvert'\")")
    env = {"PYTHONPATH": str(tmp_path / "without")}
    with Cluster(tmp_path / "cluster", env=env if where == "scheduler" else {}) as cluster:
        cluster.start("a", env={"PYTHONPATH": ""} if where == "scheduler" else env)
        done = cpu(servers, source, tmp_path / "out", f"dask:{cluster.file}")
    if where == "scheduler":
        assert done.returncode == 0, done.stderr
    else:
        conversion.refused(done, 1, "a worker lacks what it needs (No module named 'ktconvert')", "install the same")


@pytest.mark.parametrize("options", [(), ("--no-merge-safetensor",)])
def test_a_worker_with_another_umask(source: Path, servers: forks.Forks, tmp_path: Path, options: Any) -> None:
    outputs = {name: tmp_path / name for name in ("threads", "worker")}
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start("a", prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"))
        for output, executor in zip(outputs.values(), ("threads", f"dask:{cluster.file}"), strict=True):
            line = ("cpu", "-i", source, "-o", output, "--executor", executor, *options)
            assert servers.run(line, tmp_path / "said", {}).returncode == 0
    modes = [
        {str(path.relative_to(output)): oct(path.stat().st_mode) for path in (output, *output.rglob("*"))}
        for output in outputs.values()
    ]
    assert modes[0] == modes[1]


ELSEWHERE = {
    "no source": (5, ("source", "host elsewhere")),
    "other header": (5, ("model-00001-of-00003.safetensors had", "is not the input that")),
    "other time": (5, ("model-00001-of-00003.safetensors was modified", "is not the input that")),
    "no output": (7, ("out.work: cannot be read here", "every host needs the file system of --output")),
    "other output": (7, ("out.work: is not the folder of this conversion", "every host needs the file system")),
}


def test_a_host_that_sees_other_files(source: Path, servers: forks.Forks, tmp_path: Path) -> None:
    """It has a mount namespace of its own, where something else lies at the paths of the input or the output."""
    with conversion.Mounts() as mounts, Cluster(tmp_path / "cluster") as cluster:
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
                conversion.refused(done, code, "host elsewhere: ", *words)
                assert not (folders[name] / "seen" / "out").exists()
        done = servers.run(["resume", folders["other time"] / "seen" / "out"], tmp_path / "resumed.said")
        assert done.returncode == 0, done.stderr


def test_no_worker_that_makes_units(source: Path, servers: forks.Forks, tmp_path: Path) -> None:
    said = tmp_path / "out.said"
    with Cluster(tmp_path / "cluster") as cluster, ThreadPoolExecutor(1) as pool:
        cluster.start("other", words=("--resources", "GPU=1"))
        coordinator = pool.submit(cpu, servers, source, tmp_path / "out", f"dask:{cluster.file}")
        pause = threading.Event()
        words = "no worker offers to make units yet; start one on each host: dask worker"
        while not said.exists() or words not in said.read_text():
            assert not coordinator.done()
            pause.wait(0.02)
        cluster.start("late")
        done = coordinator.result()
    assert done.returncode == 0, done.stderr


def test_certificates(source: Path, servers: forks.Forks, tmp_path: Path) -> None:
    """Dask's own settings: whoever has them is let in."""
    with Cluster(tmp_path / "cluster", tls=certificates(tmp_path / "tls")) as cluster, ThreadPoolExecutor(2) as pool:
        cluster.start("a")
        assert cluster.address.startswith("tls://")
        stranger = pool.submit(cpu, servers, source, tmp_path / "stranger", f"dask:{cluster.address}")
        # Dask reads its settings when it is imported, which a server has done before.
        words = ("cpu", "-i", source, "-o", tmp_path / "out", "--executor", f"dask:{cluster.address}")
        holder = conversion.ktconvert(*words, env=cluster.env)
        assert holder.returncode == 0, holder.stderr
        conversion.refused(stranger.result(), 1, "--executor dask:tls://", "no Dask scheduler answers there")
    assert not (tmp_path / "stranger.work").exists()
