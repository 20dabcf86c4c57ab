"""--executor where the model has to run, GPTQ and `calibrate`: the bytes are those of threads, whoever visits the experts
of a layer, and whoever dies meanwhile."""

import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import ResourceError
from ktconvert.pipeline.cli.status import read_status
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.plans import commands
from rig import calibrated, conversion, killpoint
from rig.dask_cluster import Cluster
from rig.forks import Forks

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")
GPTQ = {"scale": "gptq", "min_expert_tokens": 4}
# All steps, and none but GPTQ; evidence that experts share, and that they do not; what is kept beside the weights.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("cpu", {**GPTQ, "threadpool_count": 2, "non_experts": "keep"}),
    "cpu plain": ("cpu", {**GPTQ, "gptq_steps": "plain", "calibrate": "routed", "no_merge_safetensor": True}),
    "gpu": ("gpu", {"quant_type": "W8A16"}),
    "calibrate": ("calibrate", {"second_moments": True}),
}
STATISTICS = ("cpu", "gpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated.write_dataset(tmp_path_factory.mktemp("data"), "texts", (300, 85, 25))[0]


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    """Started afresh, as the processes of other hosts are."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


def plan(case: str, output: Path, dataset: Path, **more: Any) -> Any:
    command, options = CASES[case]
    data = {"dataset": str(dataset), "max_sequence_length": calibrated.MAX_LENGTH, "force_cpu": True}
    statistics = {"save_statistics": f"{output}.statistics"} if case in STATISTICS else {}
    given = {**data, **statistics, **options, "cpuinfer_threads": 1, **more}
    return commands.make_plan(commands.make_options(command, input=calibrated.EXAMPLE, output=output, **given))


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_threads(case: str, dataset: Path, workers: Executor, tmp_path: Path) -> None:
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
    assert commands.run(plan(case, tmp_path / "here" / "out", dataset))
    events = conversion.Events()
    assert commands.run(plan(case, tmp_path / "away" / "out", dataset), workers, events)
    assert conversion.find_differences(*(conversion.tree(tmp_path / name) for name in ("away", "here"))) == []
    begun, done = ({(e["unit"], e.get("pid")) for e in events.recorded if e["event"] == k} for k in ("start", "done"))
    assert begun == done
    portions = [unit for unit, _ in begun if ".experts-" in unit]
    assert len(portions) == 4  # two of each layer


class Flips(Executor):
    """Makes what it is given, and then a bit of it flips."""

    def submit(self, fn: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(attempt := fn(*arguments))
        conversion.flip_bit(locate(Path(arguments[0].conversion.output)).partial / attempt.name, -5000, keep_time=True)
        return future


def test_a_bit_that_flipped_in_what_a_worker_left(dataset: Path, tmp_path: Path) -> None:
    """It is found before it goes into the layer, and made again by the next run."""
    begun = plan("calibrate", tmp_path / "out", dataset)
    with pytest.raises(ResourceError, match=r"experts-000-003.*differs from that of the written file"):
        commands.run(begun, Flips())
    assert commands.run(begun)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killpoint.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def servers(shim: Path) -> Iterator[Forks]:
    with Forks([shim], 1, modules=("distributed", *calibrated.MODULES)) as started:
        yield started


@pytest.fixture(scope="module")
def expected(dataset: Path, servers: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("expected") / "out"
    assert servers.run(words(output, dataset), output.with_suffix(".said")).returncode == 0
    return conversion.tree(output)


def words(output: Path, dataset: Path, *more: str) -> list[str]:
    given = ("--gptq-steps", "descent", "--threadpool-count", "1", *more)
    return calibrated.scale_gptq_arguments(calibrated.EXAMPLE, output, dataset, *given)


def at(cluster: Cluster) -> tuple[str, str]:
    return "--executor", f"dask:{cluster.file}"


def finished(done: Any, output: Path, expected: Any) -> None:
    assert done.returncode == 0, done.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == ["out"]


def test_a_worker_killed_in_the_middle_of_a_portion(
    dataset: Path, expected: Any, servers: Forks, shim: Path, cluster: Cluster, tmp_path: Path
) -> None:
    output = tmp_path / "o" / "out"
    output.parent.mkdir()
    cluster.start("a", env=killpoint.signal_environment(shim, f"{output}.work/partial/gptq.layer-000.experts-", 2))
    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(servers.run, words(output, dataset, *at(cluster), "--json"), tmp_path / "said")
        cluster.wait_until_stopped("a")
        making = read_status(output)
        cluster.start("b")
        cluster.send("a", signal.SIGKILL)
        finished(coordinator.result(), output, expected)
    assert (making["done"], making["units"]) == (1, 3)  # portions do not count
    assert {unit["unit"] for unit in making["making"]} == {"gptq.layer-000", "gptq.layer-000.experts-000-003"}
    lost = [e["unit"] for e in conversion.parse_events((tmp_path / "said").read_text()) if e["event"] == "lost"]
    assert lost == ["gptq.layer-000.experts-000-003"]


def test_a_killed_coordinator(dataset: Path, expected: Any, servers: Forks, cluster: Cluster, tmp_path: Path) -> None:
    """When all portions of a layer were taken, and none was removed: the next one makes none of them again, but threads
    make the layer."""
    cluster.start("c")
    output, other = tmp_path / "o" / "out", tmp_path / "p" / "out"
    for each in (output, other):
        each.parent.mkdir()
    env = {"KILLPOINT_ROOT": f"{output}.work/partial/gptq.layer-001.experts-", "KILLPOINT_N": "1"}
    done = servers.run(words(output, dataset, *at(cluster)), tmp_path / "said", env)
    assert done.returncode == killpoint.KILLED, done.stderr
    work = output.with_name("out.work")
    made = {path.stem for path in work.glob("attempts/gptq.layer-001.experts-*.json")}
    assert len(made) == 2
    shutil.copytree(work, other.with_name("out.work"))
    done = servers.run(["resume", output, *at(cluster), "--json"], tmp_path / "said")
    finished(done, output, expected)
    told = conversion.parse_events(done.stderr)
    assert {e.get("attempt") for e in told if e["event"] == "done" and ".experts-" in e["unit"]} == made
    finished(servers.run(["resume", other], tmp_path / "said"), other, expected)


def test_a_worker_on_another_machine(dataset: Path, servers: Forks, tmp_path: Path) -> None:
    output = tmp_path / "o" / "out"
    output.parent.mkdir()
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start("a", env={"ATEN_CPU_CAPABILITY": "default", "KTCONVERT_HOST": "museum"})
        done = servers.run(words(output, dataset, *at(cluster)), tmp_path / "said")
    conversion.check_refusal(done, 7, "host museum: ", "device was CPU with ", "is CPU with DEFAULT")


def test_the_plan_says_what_lies_on_disk_for_workers(dataset: Path, servers: Forks, tmp_path: Path) -> None:
    def needed(*more: str) -> int:
        given = words(tmp_path / "out", dataset, "--dry-run", "--json", *more)
        shown = servers.run(given, tmp_path / "said", printed=tmp_path / "printed").stdout
        [plan] = [event for event in conversion.parse_events(shown) if event["event"] == "plan"]
        return int(plan["disk"]["of files that exist only meanwhile"])

    experts = 8 * 3 * 256 * 256
    assert needed("--executor", "dask:local:1") > needed() + 2 * experts  # their BF16 values, among other things
