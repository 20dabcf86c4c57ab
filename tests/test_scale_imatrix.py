"""`ktconvert cpu --scale imatrix`: bytes of the weighted search, the record of the statistics, and refusals."""

import hashlib
import json
import os
import shlex
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from ktconvert.layouts.errors import KTConvertError
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.statistics.expert_counts import read_counts_file
from ktconvert.layouts.statistics.imatrix import LayerSums, open_imatrix, write_imatrix
from rig import conversion, killpoint
from rig.conversion import HIDDEN, KTCONVERT, WIDTH, run_in_process
from rig.safetensors import metadata_of, write_file
from rig.statistics import check_search, describe

LAYERS, EXPERTS = 2, 3
SHAPES = dict.fromkeys(range(LAYERS), (EXPERTS, HIDDEN, WIDTH))
COUNTS = np.array([9, 0, 400], np.int64)  # no token came to expert 1


def statistics(path: Path, shapes: Any = SHAPES, seed: int = 0) -> Path:
    """Draw importances between 1e-3 and 1e3, different for each expert."""

    def load(layer: int) -> LayerSums:
        rng = np.random.default_rng([seed, layer])
        experts, hidden, width = shapes[layer]
        inputs, middle = (10.0 ** rng.uniform(-3, 3, (experts, k)) for k in (hidden, width))
        counts = np.resize(COUNTS, experts)
        return LayerSums(counts, *((counts[:, None] * x).astype(np.float32) for x in (inputs, middle)))

    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    write_imatrix(path, shapes, load, datasets=["made up"], chunks=1, chunk_size=409)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("imatrix") / "source", layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def imatrix(source: Path) -> Path:
    """Write the matrix into the folder that --statistics would name."""
    return statistics(source.parent / "statistics" / "imatrix.gguf")


def convert(source: Path, output: Path, imatrix: Path, *more: object) -> Result:
    result = run_in_process("cpu", "-i", source, "-o", output, "--scale", "imatrix", "--imatrix", imatrix, *more)
    assert result.exception is None, result.exception
    return result


def test_the_next_command_has_the_statistics_that_it_needs(source: Path, imatrix: Path, tmp_path: Path) -> None:
    for number, option in enumerate((("--imatrix", imatrix), ("--statistics", imatrix.parent))):
        output = tmp_path / str(number)
        done = run_in_process("cpu", "-i", source, "-o", output, "--scale", "imatrix", *option)
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("next: "))
        words = shlex.split(line)[2:]
        assert words[-2] == option[0] and words[0] == "verify"
        assert run_in_process(*words).exit_code == 0


def refused(done: Result, code: int, *words: str) -> None:
    """Assert a refusal with this exit code, whose message contains these texts."""
    error = done.exception
    assert isinstance(error, KTConvertError) and error.exit_code == code, error
    for word in words:
        assert word in str(error), f"{word!r} is not in {str(error)!r}"
    assert "\n" not in str(error)


@pytest.fixture(scope="module", params=["int4", "int8", "mxfp4", "rawint4"])
def output(request: pytest.FixtureRequest, source: Path, imatrix: Path) -> Path:
    path = source.with_name(request.param)
    convert(source, path, imatrix, "--quant-method", request.param)
    return path


def test_bytes_equal_the_definition(source, imatrix, output):
    """Each NUMA slice is searched with the mean squares of its own columns, and unweighted without tokens."""
    opened = open_imatrix(imatrix, "small", SHAPES)
    linears = [*product(range(LAYERS), range(EXPERTS), ("gate", "up", "down"))]
    assert {linear[1] for linear in linears if opened.read_importance(*linear) is None} == {1}
    # Or the weights would change nothing. One power of two is the best of these groups anyway.
    assert check_search(source, output, linears, opened.read_importance) > 10 or output.name == "mxfp4"


def test_backward_weights_equal_those_of_mse(source, imatrix, tmp_path):
    """A row of a transpose is a column of the linear: its importance is constant along the row."""
    convert(source, tmp_path / "imatrix", imatrix, "--save-backward-weights", "--layers", "0")
    more = ("--save-backward-weights", "--layers", "0")
    assert run_in_process("cpu", "-i", source, "-o", tmp_path / "mse", "--scale", "mse", *more).exception is None
    ours, theirs = (open_output(tmp_path / name) for name in ("imatrix", "mse"))
    backward = [key for key in ours.tensors if key[0].backward]
    assert backward
    for key in backward:
        np.testing.assert_array_equal(ours.read(ours.tensors[key]), theirs.read(theirs.tensors[key]))


def test_a_folder_without_statistics_is_refused(source: Path, tmp_path: Path) -> None:
    done = conversion.ktconvert("cpu", source, tmp_path / "out", "--scale", "imatrix", "--statistics", source)
    conversion.check_refusal(done, 5, f"{source}: has no statistics of a model's experts (statistics.json); run `ktc")


def test_files_and_folders_that_are_exchanged_are_recognized(source: Path, imatrix: Path, tmp_path: Path) -> None:
    words = ("cpu", source, tmp_path / "out", "--scale")
    for options, code, message in (
        (("imatrix", "--statistics", imatrix), 2, f"{imatrix} is a file; give a folder"),
        (("imatrix", "--imatrix", imatrix.parent), 5, "is a folder, not an importance matrix; give a .gguf or .dat"),
        (("absmax", "--statistics", imatrix.parent), 2, "is not for --scale absmax; give --scale imatrix or mse,"),
    ):
        conversion.check_refusal(conversion.ktconvert(*words, *options), code, message)


def test_the_statistics_are_recorded(source, imatrix, output, tmp_path):
    digest, path = hashlib.sha256(imatrix.read_bytes()).hexdigest(), tmp_path / "a"
    same = statistics(tmp_path / "same.gguf")  # the same content elsewhere: the same output
    result = convert(source, path, same, "--quant-method", output.name)
    assert conversion.tree(path) == conversion.tree(output)
    document = json.loads((path / "manifest.json").read_bytes())
    assert document["settings"]["imatrix_sha256"] == document["model"]["imatrix"] == digest
    assert document["model"]["scale"] == document["settings"]["scale"] == "imatrix"
    assert document["model"]["without_counts"] == ["layer 0: 1", "layer 1: 1"]
    assert str(tmp_path) not in (path / "manifest.json").read_text()
    for shard in path.glob("*.safetensors"):
        assert metadata_of(shard)["imatrix"] == digest and metadata_of(shard)["scale"] == "imatrix"
    card = (path / "README.md").read_text()
    assert digest in card and "layer 0: 1; layer 1: 1" in card
    assert "no token reached these experts" in result.stderr and "layer 0: 1; layer 1: 1" in result.stderr


def test_different_statistics_have_different_fingerprints(source, imatrix, tmp_path):
    output = tmp_path / "out"
    plans = []
    for path in (imatrix, statistics(tmp_path / "other.gguf", seed=1)):
        command = ("cpu", "-i", source, "-o", output, "--scale", "imatrix", "--imatrix", path, "--dry-run", "--json")
        plans.append(json.loads(run_in_process(*command).stdout.splitlines()[-1]))
    fingerprints = [[unit["fingerprint"] for unit in plan["units"]] for plan in plans]
    assert not set(fingerprints[0]) & set(fingerprints[1])
    convert(source, output, imatrix)
    result = run_in_process(
        "cpu", "-i", source, "-o", output, "--scale", "imatrix", "--imatrix", tmp_path / "other.gguf"
    )
    refused(result, 7, "--imatrix was ", str(output))
    again = convert(source, output, imatrix)
    assert "finished" in again.stderr


def test_the_plan_counts_the_memory(source, imatrix, tmp_path):
    def planned(*how: object) -> int:
        result = run_in_process("cpu", "-i", source, "-o", tmp_path / "out", *how, "--dry-run", "--json")
        return int(json.loads(result.stdout.splitlines()[-1])["peak_memory"])

    assert planned("--scale", "imatrix", "--imatrix", imatrix) > planned("--scale", "mse")


def test_merge_and_resplit_keep_the_record(source, imatrix, tmp_path):
    loose, merged, four = (tmp_path / name for name in ("loose", "merged", "one"))
    convert(source, loose, imatrix, "--no-merge-safetensor")
    for command in (("merge", "-i", loose, "-o", merged), ("resplit", merged, four, "--threadpool-count", "1")):
        result = run_in_process(*command)
        assert result.exception is None, result.exception
    for path in (merged, four):
        model = json.loads((path / "manifest.json").read_bytes())["model"]
        assert (model["scale"], model["without_counts"]) == ("imatrix", ["layer 0: 1", "layer 1: 1"])
        assert model["imatrix"] in (path / "README.md").read_text()
        result = run_in_process("verify", path, "--against", source, "--imatrix", imatrix)
        assert result.exception is None, result.exception
    refused(
        run_in_process("resplit", merged, tmp_path / "x", "--threadpool-count", "1", "--against", source),
        3,
        "statistics",
    )


def test_verify_accepts_the_output(source, imatrix, output, tmp_path):
    for how in (("--imatrix", imatrix), ("--statistics", imatrix.parent)):
        report = json.loads(run_in_process("verify", output, "--against", source, *how, "--json").stdout)
        assert report["ok"] and report["errors"] and report["scale"] == "imatrix"
    assert run_in_process("verify", output).exception is None
    refused(run_in_process("verify", output, "--against", source), 2, "--imatrix FILE", "or leave out --against")
    other = statistics(tmp_path / "other.gguf", seed=1)
    refused(
        run_in_process("verify", output, "--against", source, "--imatrix", other),
        5,
        str(other),
        "differs from the file",
    )


def test_contradicting_options_are_refused(source, imatrix, tmp_path):
    output = tmp_path / "out"
    for how, words in (
        (("--scale", "imatrix"), "needs the importance of inputs"),
        (("--scale", "mse", "--imatrix", imatrix), "not for --scale mse"),
        (("--statistics", imatrix.parent), "not for --scale absmax"),
        (("--scale", "imatrix", "--imatrix", imatrix, "--statistics", imatrix.parent), "one of them"),
        (("--scale", "imatrix", "--imatrix", imatrix, "--quant-method", "fp8"), "leave out --scale"),
    ):
        refused(run_in_process("cpu", "-i", source, "-o", output, *how), 2, words)
    result = run_in_process("verify", source.parent / "none", "--imatrix", imatrix)
    assert isinstance(result.exception, KTConvertError)
    assert not output.exists() and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({**SHAPES, 2: SHAPES[0]}, ("in layers 0-2, but ", "in layers 0-1")),
        (dict.fromkeys(SHAPES, (EXPERTS + 1, HIDDEN, WIDTH)), ("has 4 experts of", "has 3 experts of")),
        (dict.fromkeys(SHAPES, (EXPERTS, HIDDEN, 2 * WIDTH)), (f"of {2 * WIDTH} columns", f"of {WIDTH} columns")),
    ],
    ids=["layers", "experts", "width"],
)
def test_statistics_of_a_different_model_are_refused(source, tmp_path, shapes, words):
    """One sentence names both; and if they are damaged or missing."""
    other, output = statistics(tmp_path / "imatrix.gguf", shapes), tmp_path / "out"
    command = ("cpu", "-i", source, "-o", output, "--scale", "imatrix", "--imatrix", other)
    refused(run_in_process(*command), 5, str(other), str(source), *words)
    other.write_bytes(other.read_bytes()[:-1000])
    refused(run_in_process(*command), 5, str(other), "truncated")
    other.unlink()
    refused(run_in_process(*command), 5, str(other))
    refused(run_in_process(*command[:-2], "--statistics", tmp_path), 5, str(tmp_path), "has no statistics")
    assert not output.exists()


def test_a_folder_of_statistics_must_match_its_description(source, imatrix, tmp_path):
    """The importance matrix must match statistics.json, whichever option names the file."""
    folder = tmp_path / "statistics"
    shutil.copytree(imatrix.parent, folder)
    counts = np.tile(COUNTS, (LAYERS, 1))
    write_file(folder / "counts.safetensors", {"counts": ("I64", counts)})
    describe(folder, SHAPES)
    command = ("cpu", "-i", source, "-o", tmp_path / "out", "--scale", "imatrix", "--dry-run")
    ways = (("--statistics", folder), ("--imatrix", folder / "imatrix.gguf"))
    experts = ("experts", folder, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert all(run_in_process(*words).exception is None for words in (*((*command, *way) for way in ways), experts))
    for n, way in enumerate(ways):  # the output gets the counts of the folder
        output = tmp_path / f"with-{n}"
        assert run_in_process(*command[:4], output, *command[5:-1], *way).exception is None
        assert read_counts_file(output / expert_counts.NAME).tolist() == counts.tolist()
        assert expert_counts.NAME in (output / "README.md").read_text()
    before = conversion.identity(folder)
    for way in ways:
        refused(
            run_in_process(*command[:4], folder, *command[5:], *way, "--overwrite", "--delete-others"),
            2,
            str(folder),
            "choose a different",
        )
    assert conversion.identity(folder) == before
    describe(folder, SHAPES, intermediate=2 * WIDTH)
    for way in ways:
        refused(
            run_in_process(*command, *way), 5, "statistics of made up", f"x {2 * WIDTH}", str(source), f"x {WIDTH};"
        )
    describe(folder, SHAPES)
    statistics(folder / "imatrix.gguf", seed=1)
    write_file(folder / "counts.safetensors", {"counts": ("I64", counts + 1)})
    for way in ways:
        refused(run_in_process(*command, *way), 5, str(folder), "differs from the file that statistics.json")
    refused(run_in_process(*experts), 5, "counts.safetensors: differs from the file that statistics.json")


def test_resume_needs_the_same_statistics(source, imatrix, output, tmp_path):
    """A resume gives identical bytes; with different statistics, or without them, it is refused."""
    again, given = tmp_path / "out", tmp_path / "given.gguf"
    shutil.copy(imatrix, given)
    command = [*KTCONVERT, "cpu", "-i", source, "-o", again, "--quant-method", output.name]
    command += ["--scale", "imatrix", "--imatrix", given]
    assert killpoint.run(command, again, 60, killpoint.build(tmp_path)).returncode == killpoint.KILLED
    statistics(given, seed=1)
    refused(run_in_process("resume", again), 5, str(given), "restore the old file")
    given.unlink()
    refused(run_in_process("resume", again), 5, str(given))
    shutil.copy(imatrix, given)
    os.utime(given, (1, 1))
    assert run_in_process("resume", again).exception is None and conversion.tree(again) == conversion.tree(output)
