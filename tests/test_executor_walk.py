"""--executor where the model has to run, GPTQ and `calibrate`: the bytes are those of threads, whoever visits the experts
of a layer, and whoever dies meanwhile."""

import json
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.ui.progress import Reporter
from rig import calibrated, conversion

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
    return calibrated.data(tmp_path_factory.mktemp("data"), "texts", (300, 85, 25))[0]


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
    return commands.plan_request(commands.request(command, input=calibrated.EXAMPLE, output=output, **given))


class Events(Reporter):
    """Keeps what is told."""

    def __init__(self) -> None:
        super().__init__(verbosity=-2)
        self.told: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.told.append({"event": kind, **fields})


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_threads(case: str, dataset: Path, workers: Executor, tmp_path: Path) -> None:
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
    assert commands.run(plan(case, tmp_path / "here" / "out", dataset))
    events = Events()
    assert commands.run(plan(case, tmp_path / "away" / "out", dataset), workers, events)
    assert conversion.differing(*(conversion.tree(tmp_path / name) for name in ("away", "here"))) == []
    begun, done = (
        {(e["unit"], e.get("pid")) for e in events.told if e["event"] == which} for which in ("start", "done")
    )
    assert begun == done
    portions = [unit for unit, _ in begun if ".experts-" in unit]
    assert len(portions) == 4  # two of each layer
