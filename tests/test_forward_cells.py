"""Tests of benchmarks/forward.py: probes tell calls on a quiet machine from calls on a busy one."""

import math
import os
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rig.scripts import FOLDER, load_benchmark

Modules = dict[str, ModuleType]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """The modules of the benchmark, which import each other from their own folder."""
    loaded: Modules = {}
    for name in ("state", "turns", "blocks", "mixtures", "forward_cells"):
        loaded[name] = load_benchmark(name)
        monkeypatch.setitem(sys.modules, name, loaded[name])
    return loaded


def make_turn(
    walls: list[float], probes: list[float], cpu: float = 1.0, workers: float | None = None
) -> dict[str, Any]:
    assert len(probes) == len(walls) + 1
    return {"walls": walls, "probes": probes, "cpu": cpu, "workers": workers}


def make_cell(modules: Modules, **sides: list[dict[str, Any]]) -> Any:
    """Return a cell of one token that reads 20 MB of weights; memory gives 16 GB/s."""
    cells = modules["forward_cells"]
    figures = {name: cells.Figures.from_turns(rounds) for name, rounds in sides.items()}
    case = {"shape": "Qwen3-30B-A3B", "method": "int4", "threads": 1, "tokens": 1, "routing": "balanced"}
    sizes = {"distinct": 8.0, "busiest": 1.0, "bytes": 20e6, "operations": 75e6, "read": 16e9, "read_cpu": 16e9}
    other = {"ceilings": {}, "limit": 1.15, "differing": 0, "elements": 2048, "distance": 0.01, "figures": figures}
    return cells.Cell(**case, **sizes, **other)


def test_quiet_calls_are_compared_with_quiet_calls(modules: Modules) -> None:
    """Our calls were mostly busy, theirs mostly quiet; the ratio of the quiet calls is 3 to 2."""
    assert modules["forward_cells"].best_probe([0.5] + [1.0] * 50 + [2.0] * 100) == 1.0, (
        "one of a hundred probes may be wrong"
    )
    ours = [make_turn([0.002, 0.004, 0.004, 0.004], [1.0, 1.0, 2.0, 2.0, 2.0])]
    theirs = [make_turn([0.003, 0.003, 0.006], [1.0, 1.0, 1.0, 2.0], workers=0.5)]
    cell = make_cell(modules, ours=ours, kt=theirs)
    assert cell.seconds() == 0.002 and cell.seconds("kt") == 0.003
    assert cell.ratio("kt") == 1.5 and cell.mark("kt") == ""
    assert cell.read_share == 20e6 / 0.002 / 16e9
    assert cell.figures["kt"].work == 0.5 and cell.ours.work == 1.0
    assert modules["forward_cells"].cell_document(cell)["sides"] == {
        "ours": {"quiet": {"calls": 1, "wall": 0.002}, "busy": {"calls": 3, "wall": 0.004}},
        "kt": {"quiet": {"calls": 2, "wall": 0.003}, "busy": {"calls": 1, "wall": 0.006}},
    }


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="there is no C compiler")
@pytest.mark.parametrize("caller_computes", [True, False])
def test_measured_probes_are_classified(modules: Modules, tmp_path: Path, caller_computes: bool) -> None:
    """The detector probes its own thread, or runs beside the measured one, between the timed calls."""
    library = modules["state"].build(FOLDER / "state.c", tmp_path)
    calls: list[int] = []
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        detector = modules["state"].Detector(library, [other.native_id], caller_computes=caller_computes)
        result = modules["turns"].time_calls(calls.append, 7, 5, True, detector)
    finally:
        stop.set()
        other.join()
    assert calls == [12, 7, 8, 9, 10, 11]
    assert len(result["walls"]) == 5 and len(result["probes"]) == 6
    assert all(math.isfinite(probe) and probe > 0 for probe in result["probes"])
    assert detector.cpu() > 0 and result["workers"] is None
