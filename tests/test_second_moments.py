"""Second moments of inputs: scales searched in their metric (NumPy = scalar C = AVX2 = AVX-512), `calibrate
--second-moments`, conversions with them, and refusals.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_scale_imatrix import refused
from test_scale_search import moments_of

from ktconvert.layouts.statistics import second_moments
from ktconvert.layouts.statistics.folder import read_statistics
from ktconvert.layouts.statistics.imatrix import LayerSums, write_imatrix
from ktconvert.quantizers import FLOAT_GRIDS, ROW_GRIDS, SIGNED_GRIDS
from rig import calibrated, conversion
from rig.conversion import HIDDEN, WIDTH, run_in_process
from rig.safetensors import metadata_of, write_file
from rig.statistics import check_search, describe

GRIDS = {**ROW_GRIDS, "mxfp4": FLOAT_GRIDS["mxfp4"], **SIGNED_GRIDS}
LAYERS, EXPERTS = 2, 2
SHAPE = (EXPERTS, HIDDEN, WIDTH)
SHAPES = dict.fromkeys(range(LAYERS), SHAPE)
COUNTS = np.array([40, 0], np.int64)  # no token came to expert 1


def tensors_of(layer: int) -> dict[str, Any]:
    rng = np.random.default_rng(layer)
    down = [moments_of(rng, WIDTH, count) for count in COUNTS]
    return {
        "gate_up": ("F32", second_moments.pack_triangle(moments_of(rng, HIDDEN, 400))),
        "down": ("F32", np.stack([second_moments.pack_triangle(each) for each in down])),
        "counts": ("I64", COUNTS),
        "inputs": ("F32", np.ones((EXPERTS, HIDDEN), np.float32)),
        "middle": ("F32", np.ones((EXPERTS, WIDTH), np.float32)),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("moments") / "source", layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def statistics(source: Path) -> Path:
    folder = source.with_name("statistics")
    folder.mkdir()
    for layer in SHAPES:
        write_file(folder / second_moments.file_name(layer), tensors_of(layer), {"layer": str(layer)})
    sums = LayerSums(COUNTS, np.ones((EXPERTS, HIDDEN), np.float32), np.ones((EXPERTS, WIDTH), np.float32))
    write_imatrix(folder / "imatrix.gguf", SHAPES, lambda _: sums, datasets=["made up"], chunks=1, chunk_size=409)
    write_file(folder / "counts.safetensors", {"counts": ("I64", np.tile(COUNTS, (LAYERS, 1)))})
    return describe(folder, SHAPES)


def convert(source: Path, output: Path, statistics: Path, *more: object) -> Any:
    return run_in_process("cpu", "-i", source, "-o", output, "--scale", "mse", "--statistics", statistics, *more)


@pytest.mark.parametrize("method", ["int4", "rawint4"])
def test_bytes_equal_the_definition(method, source, statistics, tmp_path):
    """Each part of down has its own block of the matrix; without tokens it is searched without. What was read is
    recorded, and verify makes the output again with it alone.
    """
    result = convert(source, tmp_path / "out", statistics, "--quant-method", method)
    assert result.exception is None and "no token reached these experts" in result.stderr, result.exception
    moments, linears = (
        read_statistics(statistics).open_second_moments("it", SHAPES),
        ((0, "gate"), (0, "down"), (1, "down")),
    )
    assert [linear for linear in linears if moments.read_importance(1, *linear) is None] == [(1, "down")]
    assert check_search(source, tmp_path / "out", ((1, *linear) for linear in linears), moments.read_importance)
    digest = hashlib.sha256((statistics / "statistics.json").read_bytes()).hexdigest()
    document = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert document["settings"]["second_moments_sha256"] == document["model"]["second_moments"] == digest
    assert document["model"]["without_counts"] == ["layer 0: 1", "layer 1: 1"]
    assert digest in (tmp_path / "out" / "README.md").read_text()
    assert metadata_of(next((tmp_path / "out").glob("*.safetensors")))["second_moments"] == digest
    against = ("verify", tmp_path / "out", "--against", source)
    assert run_in_process(*against, "--statistics", statistics).exception is None
    refused(run_in_process(*against), 2, "give --statistics DIR")


def one(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return a function that changes a tensor of layer 1."""

    def damage(folder: Path) -> None:
        tensors = {key: (dtype, values.copy()) for key, (dtype, values) in tensors_of(1).items()}
        change(tensors[name][1])
        write_file(folder / second_moments.file_name(1), tensors, {"layer": "1"})

    return damage


def swapped(folder: Path) -> None:
    first, second = (folder / second_moments.file_name(layer) for layer in SHAPES)
    shutil.copy(first, second)


def other_shape(folder: Path) -> None:
    tensors = tensors_of(1)
    tensors["down"] = ("F32", tensors["down"][1][:, :-1])
    write_file(folder / second_moments.file_name(1), tensors, {"layer": "1"})


def cut(folder: Path) -> None:
    path = folder / second_moments.file_name(1)
    path.write_bytes(path.read_bytes()[:-100])


def at(*where: Any) -> Callable[[float], Callable[[Any], None]]:
    return lambda value: lambda values: values.__setitem__(where, value)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN": (one("gate_up", at(7)(np.nan)), "not finite"),
    "infinite": (one("down", at(0, 7)(np.inf)), "not finite"),
    "negative weight": (one("down", at(0, 0)(-1.0)), "-1.0 as the sum of squares of column 0"),
    "not a sum of x xT": (one("gate_up", at(1)(1e30)), "exceeds the bound of its diagonal"),
    "negative count": (one("counts", at(0)(-1)), "negative numbers"),
    "another layer's": (swapped, "of layer 0, not of layer 1"),
    "another shape": (other_shape, "needs F32 of shape"),
    "cut": (cut, "truncated"),
    "missing": (lambda folder: (folder / second_moments.file_name(1)).unlink(), "no second moments of layer 1"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_damaged_statistics_are_refused_in_one_sentence(what, source, statistics, tmp_path):
    folder, (damage, words) = Path(shutil.copytree(statistics, tmp_path / "statistics")), HOSTILE[what]
    damage(folder)
    refused(convert(source, tmp_path / "out", describe(folder, SHAPES)), 5, str(folder), words)
    assert not (tmp_path / "out").exists()


def test_files_that_differ_from_their_description_are_refused(source, statistics, tmp_path):
    """A changed byte is found before its layer is read; an importance matrix has no second moments."""
    folder = Path(shutil.copytree(statistics, tmp_path / "statistics"))
    conversion.flip_bit(folder / second_moments.file_name(1), -2)
    refused(convert(source, tmp_path / "out", folder), 5, second_moments.file_name(1), "statistics.json")
    for layer in SHAPES:
        (folder / second_moments.file_name(layer)).unlink()
    result = convert(source, tmp_path / "other", describe(folder, SHAPES))
    refused(result, 5, "no second moments", "--second-moments")


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")),
    reason="llmcompressor is not installed",
)
def test_calibrate_writes_second_moments(tmp_path):
    """The diagonals beside the importance matrix, in which gate and up have the tokens of each expert alone; the plan
    has the size; `cpu` takes the folder.
    """
    model, (dataset, _) = (
        calibrated.write_small_model(tmp_path / "model"),
        calibrated.write_dataset(tmp_path, "texts", (60, 25, 12)),
    )
    command = calibrated.calibrate_arguments(model, tmp_path / "out", dataset, "--second-moments")
    plan = json.loads(conversion.ktconvert(*command, "--dry-run", "--json").stdout.splitlines()[-1])
    result = conversion.ktconvert(*command)
    assert result.returncode == 0, result.stderr
    shapes = dict.fromkeys(range(3), (4, 128, 128))
    statistics = read_statistics(tmp_path / "out")
    sizes = {unit["unit"]: unit["bytes_out"] for unit in plan["units"]}
    for layer, shape in shapes.items():
        path = tmp_path / "out" / second_moments.file_name(layer)
        stored = sum(entry.nbytes for entry in second_moments.tensor_entries(shape))
        stored += 4  # its sensitivity
        assert stored == sizes[f"calibrate.layer-{layer:03d}"] == path.stat().st_size - 4096
    moments, imatrix = statistics.open_second_moments("it", shapes), statistics.open_imatrix("it", shapes)
    assert [moments.layers[n].counts.tolist() for n in shapes] == statistics.counts.tolist()
    for layer in shapes:
        total = moments.layers[layer].read_matrix("gate_up", 0, 128)
        np.testing.assert_array_equal(total, total.T)
        # Each token goes to two experts.
        np.testing.assert_allclose(undamp(total) * 2, imatrix.read(layer, "gate").sum(0), rtol=1e-4)
    assert convert(model, tmp_path / "int4", tmp_path / "out", "--threadpool-count", 1).exception is None


def undamp(matrix: Any) -> Any:
    """Return the stored diagonal: without the fraction of its mean that was added."""
    diagonal = np.diagonal(matrix).astype(np.float64)
    return diagonal - diagonal.mean() * second_moments.DAMPING / (1 + second_moments.DAMPING)
