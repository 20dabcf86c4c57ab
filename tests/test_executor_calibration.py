"""--executor for GPTQ and `calibrate`, which run the model: any backend writes the same bytes as threads.

Also tests of workers and coordinators that are killed meanwhile.
"""

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
from rig.model_server import MODULES, model_server

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")
GPTQ = {"scale": "gptq", "min_expert_tokens": 4}
# All GPTQ steps, and only GPTQ; Hessians that experts share, and of their own; non-expert tensors beside the weights.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("cpu", {**GPTQ, "numa": 2, "non_experts": "keep"}),
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
    """New processes, like those of other hosts, forked from one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    with ProcessPoolExecutor(2, context) as pool:
        yield pool


def plan(case: str, output: Path, dataset: Path, **extra: Any) -> Any:
    """Return the plan of a case with one thread."""
    command, options = CASES[case]
    data = {"dataset": str(dataset), "sequence_length": calibrated.MAX_LENGTH, "force_cpu": True}
    statistics = {"save_statistics": f"{output}.statistics"} if case in STATISTICS else {}
    settings = {**data, **statistics, **options, "threads": 1, **extra}
    return commands.make_plan(commands.make_options(command, input=calibrated.EXAMPLE, output=output, **settings))


@pytest.mark.parametrize("case", CASES)
def test_calibration_on_workers_writes_the_same_bytes_as_threads(
    case: str, dataset: Path, workers: Executor, tmp_path: Path
) -> None:
    for name in ("threads", "workers"):
        (tmp_path / name).mkdir()
    assert commands.run(plan(case, tmp_path / "threads" / "out", dataset))
    events = conversion.Events()
    assert commands.run(plan(case, tmp_path / "workers" / "out", dataset), workers, events)
    assert conversion.find_differences(*(conversion.tree(tmp_path / name) for name in ("workers", "threads"))) == []
    started, result = (
        {(e["unit"], e.get("pid")) for e in events.recorded if e["event"] == k} for k in ("start", "done")
    )
    assert started == result
    portions = [unit for unit, _ in started if ".experts-" in unit]
    assert len(portions) == 4  # two for each layer


class BitFlippingExecutor(Executor):
    """An executor that makes each portion and then flips a bit of its file."""

    def submit(self, fn: Any, /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(attempt := fn(*arguments))
        conversion.flip_bit(locate(Path(arguments[0].conversion.output)).partial / attempt.name, -5000, keep_time=True)
        return future


def test_a_flipped_bit_in_a_portion_is_detected(dataset: Path, tmp_path: Path) -> None:
    """The run stops before it uses the portion, and the next run makes the portion again."""
    calibration = plan("calibrate", tmp_path / "out", dataset)
    with pytest.raises(ResourceError, match=r"experts-000-003.*differs from that of the written file"):
        commands.run(calibration, BitFlippingExecutor())
    assert commands.run(calibration)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killpoint.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def servers() -> Forks:
    return model_server()


@pytest.fixture(scope="module")
def expected(dataset: Path, servers: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("expected") / "out"
    assert servers.run(arguments_of(output, dataset), output.with_suffix(".log")).returncode == 0
    return conversion.tree(output)


def arguments_of(output: Path, dataset: Path, *extra: str) -> list[str]:
    options = ("--gptq-steps", "descent", "--threadpool-count", "1", *extra)
    return calibrated.scale_gptq_arguments(calibrated.EXAMPLE, output, dataset, *options)


def executor_option(cluster: Cluster) -> tuple[str, str]:
    return "--executor", f"dask:{cluster.file}"


def check_finished(done: Any, output: Path, expected: Any) -> None:
    assert done.returncode == 0, done.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == ["out"]


def test_a_portion_of_a_killed_worker_is_made_by_another(
    dataset: Path, expected: Any, servers: Forks, shim: Path, cluster: Cluster, tmp_path: Path
) -> None:
    output = tmp_path / "o" / "out"
    output.parent.mkdir()
    cluster.start("a", env=killpoint.signal_environment(shim, f"{output}.work/partial/gptq.layer-000.experts-", 2))
    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(
            servers.run, arguments_of(output, dataset, *executor_option(cluster), "--json"), tmp_path / "log"
        )
        cluster.wait_until_stopped("a")
        making = read_status(output)
        cluster.start("b")
        cluster.send("a", signal.SIGKILL)
        check_finished(coordinator.result(), output, expected)
    assert (making["done"], making["units"]) == (1, 3)  # portions do not count
    assert {unit["unit"] for unit in making["making"]} == {"gptq.layer-000", "gptq.layer-000.experts-000-003"}
    lost = [e["unit"] for e in conversion.parse_events((tmp_path / "log").read_text()) if e["event"] == "lost"]
    assert lost == ["gptq.layer-000.experts-000-003"]


def test_resume_after_a_killed_coordinator_keeps_portions(
    dataset: Path, expected: Any, servers: Forks, cluster: Cluster, tmp_path: Path
) -> None:
    """The coordinator is killed after it has read all portions of a layer: workers reuse the portions, threads make the layer."""
    cluster.start("c")
    output, other = tmp_path / "o" / "out", tmp_path / "p" / "out"
    for each in (output, other):
        each.parent.mkdir()
    env = {"KILLPOINT_ROOT": f"{output}.work/partial/gptq.layer-001.experts-", "KILLPOINT_N": "1"}
    result = servers.run(arguments_of(output, dataset, *executor_option(cluster)), tmp_path / "log", env)
    assert result.returncode == killpoint.KILLED, result.stderr
    work = output.with_name("out.work")
    portions = {path.stem for path in work.glob("attempts/gptq.layer-001.experts-*.json")}
    assert len(portions) == 2
    shutil.copytree(work, other.with_name("out.work"))
    result = servers.run(["resume", output, *executor_option(cluster), "--json"], tmp_path / "log")
    check_finished(result, output, expected)
    events = conversion.parse_events(result.stderr)
    assert {e.get("attempt") for e in events if e["event"] == "done" and ".experts-" in e["unit"]} == portions
    check_finished(servers.run(["resume", other], tmp_path / "log"), other, expected)


def test_a_worker_with_a_different_processor_is_refused(dataset: Path, servers: Forks, tmp_path: Path) -> None:
    output = tmp_path / "o" / "out"
    output.parent.mkdir()
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start("a", env={"ATEN_CPU_CAPABILITY": "default", "KTCONVERT_HOST": "museum"})
        result = servers.run(arguments_of(output, dataset, *executor_option(cluster)), tmp_path / "log")
    conversion.check_refusal(result, 7, "host museum: ", "device was CPU with ", "is CPU with DEFAULT")


def test_the_plan_counts_the_files_for_workers(dataset: Path, servers: Forks, tmp_path: Path) -> None:
    def bytes_needed(*executor: str) -> int:
        arguments = arguments_of(tmp_path / "out", dataset, "--dry-run", "--json", *executor)
        output = servers.run(arguments, tmp_path / "log", printed=tmp_path / "printed").stdout
        [plan] = [event for event in conversion.parse_events(output) if event["event"] == "plan"]
        return int(plan["disk"]["of files that exist only meanwhile"])

    experts = 8 * 3 * 256 * 256
    assert bytes_needed("--executor", "dask:local:1") > bytes_needed() + 2 * experts  # workers read the experts in BF16
