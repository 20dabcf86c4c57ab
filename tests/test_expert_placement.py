"""Placement files of `ktconvert experts`: SGLang and sglang-kt place the hot experts, recordings are read, bad ones not.

What the servers do with a file is derived here from their source. The `long` tests run the functions of their wheels,
which pip downloads.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ktconvert.layouts import extras
from ktconvert.layouts.errors import KTConvertError
from ktconvert.layouts.extras import install_command
from ktconvert.layouts.files.manifest import encode_manifest
from ktconvert.layouts.outputs import launch
from ktconvert.layouts.statistics import expert_counts
from ktconvert.native_quant.runtime import expert_placement
from rig.conversion import checkpoint, run_in_process
from rig.safetensors import write_file

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
Counts = npt.NDArray[np.int64]
COUNTS = np.array([[0, 0, 0, 0], [5, 1, 5, 9], [2, 0, 7, 1]], np.int64)  # layer 0 is dense
ORDER = [[0, 1, 2, 3], [3, 0, 2, 1], [2, 0, 3, 1]]
# The options that both servers have, and those of sglang-kt (srt/arg_groups/fields/exec_.py and srt/server_args.py).
COMMON = {"--model", "--kt-weight-path", "--kt-method", "--kt-cpuinfer", "--kt-threadpool-count"}
COMMON |= {"--kt-num-gpu-experts", "--init-expert-location", FUSION := "--disable-shared-experts-fusion"}
ONLY_FORK = {"--kt-expert-placement-strategy", "--kt-gpu-experts-ratio"}


def write_statistics(folder: Path, counts: Counts = COUNTS) -> Path:
    """Write the counts of an output of `calibrate`."""
    folder.mkdir()
    write_file(folder / "counts.safetensors", {"counts": ("I64", counts)})
    document = encode_manifest(tool_version="0", command="calibrate", settings={}, facts={}, source=(), files=[])
    (folder / "manifest.json").write_bytes(document)
    return folder


def run(*arguments: object) -> dict[str, Any]:
    """Return what a successful `ktconvert experts --json` prints."""
    result = run_in_process("experts", *arguments, "--json")
    assert result.exception is None, result.exception
    return dict(json.loads(result.stdout))


def error_of(*arguments: object) -> tuple[int, str]:
    """Return exit code and message of a failing `ktconvert experts`."""
    error = run_in_process("experts", *arguments).exception
    assert isinstance(error, KTConvertError) and "\n" not in str(error), error
    return error.exit_code, str(error)


def options_of(command: str) -> dict[str, str]:
    """Return the options of a command that starts SGLang, by their flags."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len({*flags}), command
    return {flag: " ".join(value) for flag, value in split_by_flag(words[3:])}


def split_by_flag(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    starts = [n for n, word in enumerate(words) if word.startswith("--")]
    for start, stop in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[start], words[start + 1 : stop]


def hot_on_upstream(path: Path, number: int) -> Counts:
    """Return the mask of the experts that SGLang computes on the GPU: those at the first `number` places."""
    content = json.loads(path.read_text())
    assert content.keys() == {"physical_to_logical_map"}  # others would be arguments that its function does not have
    numbers = np.array(content["physical_to_logical_map"])
    for row in numbers:  # without copies of experts, each has one place
        assert sorted(row) == [*range(len(row))]
    mask = np.zeros(numbers.shape, np.int64)
    np.put_along_axis(mask, numbers[:, :number], 1, axis=1)
    return mask


def hot_on_fork(path: Path, number: int) -> Counts:
    """Return the mask of the experts that sglang-kt computes on the GPU: the `number` most frequent of all layers."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    assert content["logical_count"].dim() == 3
    frequency = content["logical_count"].sum(dim=0).float()
    mask = torch.zeros(frequency.numel(), dtype=torch.int64)
    mask[torch.topk(frequency.flatten(), number).indices] = 1
    return np.asarray(mask.view(frequency.shape).numpy())


# --- files for servers ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_sglang_computes_the_hot_experts_on_the_gpu(tmp_path: Path, number: int) -> None:
    output = tmp_path / "hot.json"
    arguments = (write_statistics(tmp_path / "s"), "--format", "sglang", "--output", output)
    document = run(*arguments, "--num-gpu-experts", number)
    mask = hot_on_upstream(output, number)
    assert {row["layer"]: row["hot"] for row in document["layers"]} == {n: [*np.flatnonzero(mask[n])] for n in (1, 2)}
    assert document["coverage"] == (COUNTS * mask).sum() / COUNTS.sum()
    assert json.loads(output.read_text())["physical_to_logical_map"] == ORDER
    options = options_of(document["command"])
    assert options.keys() == COMMON
    assert (options["--init-expert-location"], options["--kt-num-gpu-experts"]) == (str(output), str(number))


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_sglang_kt_computes_the_hot_experts_on_the_gpu(tmp_path: Path, number: int) -> None:
    """It multiplies the number by the layers with experts, and chooses among all layers together."""
    output = tmp_path / "hot.pt"
    arguments = (write_statistics(tmp_path / "s"), "--format", "sglang-kt", "--output", output)
    document = run(*arguments, "--num-gpu-experts", number)
    mask = hot_on_fork(output, 2 * number)
    assert sum(len(row["hot"]) for row in document["layers"]) == 2 * number
    assert document["coverage"] == (COUNTS * mask).sum() / COUNTS.sum()  # experts with equal counts may differ
    options = options_of(document["command"])
    assert options.keys() == COMMON | {"--kt-expert-placement-strategy"}
    assert options["--kt-expert-placement-strategy"] == "frequency"
    assert expert_placement.read_recording(output).tolist() == COUNTS.tolist()
    run(*arguments, "--num-gpu-experts", number)  # replaces the file, which has our mark


@given(layers=st.integers(1, 99), experts=st.integers(1, 512), data=st.data())
def test_the_ratio_of_sglang_kt_gives_exactly_the_total(layers: int, experts: int, data: st.DataObject) -> None:
    """It computes int(experts in total * ratio)."""
    from ktconvert.pipeline.cli.experts import _count_experts

    counts = np.ones((layers, experts), np.int64)
    total = data.draw(st.integers(0, counts.size))
    mask = np.arange(counts.size).reshape(counts.shape) < total
    flag, ratio = _count_experts(SimpleNamespace(total=total), counts, mask).split()  # type: ignore[arg-type]
    assert flag in ONLY_FORK and int(counts.size * float(ratio)) == total and 0 <= float(ratio) <= 1


@settings(deadline=None)
@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=st.integers(0, 6)))
def test_every_number_of_experts_is_the_most_used(counts: Counts) -> None:
    """One file serves any --kt-num-gpu-experts; each expert has one place."""
    numbers = np.array(json.loads(expert_placement.map_file(counts))["physical_to_logical_map"])
    for row, order in zip(counts, numbers, strict=True):
        assert order.tolist() == sorted(range(len(row)), key=lambda e: (-row[e], e))


def test_a_map_is_written_once(tmp_path: Path) -> None:
    """SGLang refuses other entries, so the file cannot say who wrote it; the same content is no error."""
    output = tmp_path / "hot.json"
    source = write_statistics(tmp_path / "s")
    arguments = (source, "--format", "sglang", "--output", output, "--num-gpu-experts")
    run(*arguments, 1)
    run(*arguments, 3)
    output.write_text(output.read_text() + " ")
    code, text = error_of(*arguments, 1)
    assert (code, text) == (7, f"{output}: exists with a different content; move it away or choose a different name.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "sglang", "--output", "x.json", "--total", 3), "the same number of experts in each layer"),
        (("--format", "sglang", "--output", "x.pt", "--num-gpu-experts", 1), "with the ending .json"),
        (("--format", "sglang-kt", "--output", "x.json", "--num-gpu-experts", 1), "with the ending .pt"),
        (("--format", "sglang-kt", "--output", "x.pt", "--num-gpu-experts", 5), "a layer has 4 experts"),
    ],
)
def test_choices_that_a_server_cannot_follow_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = error_of(write_statistics(tmp_path / "s"), *options)
    assert code == 2 and message in text and not list(tmp_path.glob("x.*"))


# --- recordings -----------------------------------------------------------------------------------


def split_steps(counts: Counts = COUNTS, dtype: Any = torch.int32) -> Any:
    """Return counts [steps, layers, experts] that sum to these, with the unused zeros of a circular buffer."""
    half = counts // 2
    return torch.from_numpy(np.stack([half, np.zeros_like(half), counts - half])).to(dtype)


def physical(map_: list[list[int]], counts: Counts = COUNTS) -> Any:
    """Return the counts of physical experts: all tokens go to an expert's first copy."""
    rows = np.zeros((len(map_), len(map_[0])), np.int64)
    for layer, row in enumerate(map_):
        for expert in range(counts.shape[1]):
            rows[layer, row.index(expert)] = counts[layer, expert]
    return torch.from_numpy(rows).to(torch.int32)


COPIES = [[0, 1, 2, 3, 0], [3, 0, 2, 1, 3], [2, 0, 3, 1, 1]]
RECORDINGS: dict[str, Callable[[], Any]] = {
    "stat": lambda: {"rank": 0, "logical_count": split_steps(), "average_utilization_rate_over_window": None},
    "one step": lambda: {"logical_count": torch.from_numpy(COUNTS)},
    "only the tensor": lambda: split_steps(dtype=torch.float32),
    "per pass, with copies of experts": lambda: {
        "records": [
            {
                "forward_pass_id": n,
                "rank": 0,
                "gatherer_key": "primary",
                "global_physical_count": physical(COPIES, part),
            }
            for n, part in enumerate((COUNTS // 2, COUNTS - COUNTS // 2))
        ],
        "last_physical_to_logical_map": torch.tensor(COPIES),
    },
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_of_servers_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "expert_distribution_recorder_1.pt"
    torch.save(RECORDINGS[name](), path)
    document = run(path, "--format", "sglang", "--output", tmp_path / "hot.json", "--num-gpu-experts", 2)
    assert document["tokens"] == COUNTS.sum() and document["coverage"] == 23 / 30
    assert json.loads((tmp_path / "hot.json").read_text())["physical_to_logical_map"] == ORDER


def with_nan() -> Any:
    steps = split_steps(dtype=torch.float32)
    steps[1, 1, 1] = float("nan")
    return {"logical_count": steps}


def records(map_: Any, value: Any) -> Any:
    return {"records": [{"global_physical_count": value}], "last_physical_to_logical_map": map_}


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN": (with_nan, "contains NaN or infinity"),
    "fractions": (lambda: {"logical_count": torch.full((1, 3, 4), 0.5)}, "contains fractions"),
    "negative": (lambda: {"logical_count": -split_steps()}, "contains negative numbers"),
    "only zeros": (lambda: {"logical_count": 0 * split_steps()}, "only zeros"),
    "no steps": (lambda: {"logical_count": split_steps()[:0].clone()}, "only zeros"),
    "no experts": (lambda: {"logical_count": torch.zeros(2, 3, 0)}, "has no experts"),
    "wrong dtype": (lambda: {"logical_count": split_steps().bool()}, "is bool of shape [3, 3, 4]"),
    "complex": (lambda: {"logical_count": split_steps().cfloat()}, "is complex64"),
    "one dimension": (lambda: {"logical_count": torch.arange(4)}, "of shape [4]"),
    "no tensor": (lambda: {"logical_count": [[1, 2]]}, "is no tensor but list"),
    "too many tokens": (lambda: {"logical_count": torch.full((1, 3, 4), 1 << 40)}, "1099511627776 tokens"),
    "a view of one number": (lambda: torch.ones(1).expand(1 << 40, 3, 4), "without all its numbers"),
    "no memory": (lambda: torch.ones(2, 3, 4, device="meta"), "without all its numbers"),
    "sparse": (lambda: split_steps().to_sparse(), "without all its numbers"),
    "other names": (
        lambda: {"gpu_expert_masks": split_steps().bool()},
        "contains 'gpu_expert_masks', no 'logical_count'",
    ),
    "other object": (lambda: "text", "contains str"),
    "duplicate in the map": (
        lambda: records(torch.tensor([[0, 0, 2]]), torch.ones(1, 3)),
        "does not name every expert",
    ),
    "number outside the map": (lambda: records(torch.tensor([[-1, 0, 1]]), torch.ones(1, 3)), "does not name every"),
    "other size than the map": (lambda: records(torch.tensor([[0, 1]]), torch.ones(1, 3)), "has shape [1, 3], but"),
    "record without counts": (lambda: records(torch.tensor([[0, 1]]), None), "is no tensor but NoneType"),
    "no records": (lambda: {**records(torch.tensor([[0, 1]]), 0), "records": []}, "only zeros"),
    "class of its own": (lambda: {"logical_count": SimpleNamespace()}, "cannot be read by torch"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_recordings_end_with_one_sentence(tmp_path: Path, name: str) -> None:
    make, message = BAD[name]
    path = tmp_path / "recording.pt"
    torch.save(make(), path)
    code, text = error_of(path, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert code == 5 and text.startswith(f"{path}: ") and message in text, text
    assert "expert_distribution_recorder_*.pt" in text and not (tmp_path / "mask.safetensors").exists()


class Marker:
    """An object whose unpickling would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_nothing_in_a_recording_is_run(tmp_path: Path) -> None:
    path, marker = tmp_path / "recording.pt", tmp_path / "run"
    torch.save({"logical_count": Marker(marker)}, path)
    code, text = error_of(path, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert code == 5 and "cannot be read by torch" in text and not marker.exists()


def test_files_that_are_no_plain_archive_are_refused(tmp_path: Path) -> None:
    """Torch would unpack compressed files, of any size, in memory; sparse ones have any size."""
    arguments = ("--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    path, plain = tmp_path / "recording.pt", tmp_path / "plain.pt"
    torch.save({"logical_count": split_steps()}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    code, text = error_of(path, *arguments)
    assert code == 5 and "compressed" in text
    for length in range(0, plain.stat().st_size, 97):
        path.write_bytes(plain.read_bytes()[:length])
        code, text = error_of(path, *arguments)
        assert code == 5 and str(path) in text
    os.truncate(path, 5 << 30)
    code, text = error_of(path, *arguments)
    assert code == 5 and "record fewer steps" in text
    for other in (tmp_path / "missing.pt", tmp_path / "counts.bin"):
        code, text = error_of(other, *arguments)
        assert code == 5 and str(other) in text


def test_only_torch_files_need_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, recording = write_statistics(tmp_path / "s"), tmp_path / "recording.pt"
    torch.save(split_steps(), recording)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    run(source, "--format", "sglang", "--output", tmp_path / "hot.json", "--num-gpu-experts", 1)
    for counts, options in ((recording, ("--output", tmp_path / "x.safetensors")),):
        code, text = error_of(counts, *options, "--num-gpu-experts", 1)
        assert code == 1 and install_command("torch") in text
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    code, text = error_of(recording, "--output", tmp_path / "x.safetensors", "--num-gpu-experts", 1)
    assert code == 1 and "install torch 2.6 or newer" in text


# --- counts of outputs, and other models ----------------------------------------------------------


@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.integers(0, (1 << 40) - 1)))
def test_counts_of_an_output_are_read_as_written(counts: Counts) -> None:
    counts[0, 0] = 1
    path = Path(os.devnull).with_name("shm") / f"counts-{os.getpid()}.json"
    path.write_bytes(expert_counts.encode_counts(counts))
    try:
        assert expert_counts.read_counts_file(path).tolist() == counts.tolist()
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[[1, 2], [3]]", "different numbers of experts"),
        ("[[1, -2]]", "not a file with counts"),
        ("[[1.5]]", "not a file with counts"),
        ("[[NaN]]", "not a file with counts"),
        ("[[1e30]]", "not a file with counts"),
        ("[[0, 0]]", "only zeros"),
        ("[[]]", "has no experts"),
        ("[]", "has no experts"),
        ("[" * 5000, "not a file with counts"),
        ('"text"', "not a file with counts"),
    ],
)
def test_damaged_counts_of_an_output_end_with_one_sentence(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / expert_counts.NAME
    header = '{"format": {"name": "ktconvert-expert-counts", "version": 1}, "counts": '
    path.write_text(f"{header}{rows}}}")
    code, text = error_of(path, "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    assert code == 5 and text.startswith(f"{path}: ") and message in text, text


def test_counts_of_another_model_are_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", layers=3, experts=4)
    weights = tmp_path / "int4"
    converted = run_in_process("cpu", "-i", model, "-o", weights, "--threadpool-count", 1)
    assert converted.exception is None, converted.exception
    for layers, experts in ((3, 4), (3, 5), (4, 4), (2, 4)):
        counts = write_statistics(tmp_path / f"{layers}-{experts}", np.ones((layers, experts), np.int64))
        for option in (("--model", model), ("--cpu-weights", weights)):
            output = tmp_path / f"{layers}-{experts}{option[0]}.json"
            arguments = (counts, "--format", "sglang", "--output", output, "--num-gpu-experts", 1, *option)
            if experts == 4 and (layers == 3 or (layers == 4 and option[0] == "--cpu-weights")):  # more dense layers
                assert str(option[1]) in run(*arguments)["command"]
                continue
            code, text = error_of(*arguments)
            assert code == 5 and f"counts of {experts} experts in layers 0-{layers - 1}" in text, text
            assert f"{option[1]} has 4 experts in layers 0-2" in text and not output.exists()
            mask = (counts, "--output", output.with_suffix(".safetensors"), "--num-gpu-experts", 1, *option)
            assert error_of(*mask) == (code, text)
    mask = (write_statistics(tmp_path / "s"), "--output", tmp_path / "mask.safetensors", "--num-gpu-experts", 1)
    result = run_in_process("experts", *mask, "--model", model, "--cpu-weights", weights)
    command = f"ktconvert serve {model} --cpu-weights {weights} --gpu-experts-mask {tmp_path / 'mask.safetensors'}"
    assert result.exception is None and result.stderr == f"next: {command}\n"


def test_an_output_with_counts_starts_its_server(tmp_path: Path) -> None:
    """The command names the output, its method and its NUMA slices."""
    model = checkpoint(tmp_path / "a model", layers=3, experts=4)
    (model / expert_counts.NAME).write_bytes(expert_counts.encode_counts(COUNTS + 1))
    weights, folder = tmp_path / "int8", tmp_path / "split"
    convert = ("cpu", "-i", model, "-o", weights, "--quant-method", "int8", "--threadpool-count", 1)
    for command in (convert, ("resplit", weights, folder, "--threadpool-count", 2)):
        result = run_in_process(*command)
        assert result.exception is None, result.exception
    assert "ktconvert experts" in (folder / "README.md").read_text()
    assert run_in_process("verify", folder).exception is None
    arguments = (folder, "--model", model, "--format", "sglang", "--output", tmp_path / "hot.json")
    options = options_of(run(*arguments, "--num-gpu-experts", 2)["command"])
    assert options["--model"] == str(model) and options["--kt-weight-path"] == str(folder)
    assert (options["--kt-method"], options["--kt-threadpool-count"]) == ("AMXINT8", "2")


@pytest.mark.parametrize(
    ("method", "name", "threadpools"),
    [("int4", "AMXINT4", "1"), ("rawint4", "RAWINT4", "NUMA_NODES"), ("fp8", "FP8", "1")],
)
def test_cpu_prints_the_command_that_starts_sglang(tmp_path: Path, method: str, name: str, threadpools: str) -> None:
    model = checkpoint(tmp_path / "model", layers=1)
    arguments = ("-i", model, "-o", tmp_path / "out", "--quant-method", method, "--threadpool-count", 1, "-v")
    result = run_in_process("cpu", *arguments)
    assert result.exception is None, result.exception
    (command,) = re.findall(r"^note: to serve it with .*?: (python .*)$", result.output, re.MULTILINE)
    options = options_of(command)
    assert options.keys() == COMMON - {"--init-expert-location", FUSION}  # the model has no shared experts
    assert (options["--model"], options["--kt-weight-path"]) == (str(model), str(tmp_path / "out"))
    assert (options["--kt-method"], options["--kt-threadpool-count"]) == (name, threadpools)


def test_the_fusion_is_not_disabled_for_a_model_without_shared_experts(tmp_path: Path) -> None:
    """Without the model, it may have some."""
    counts, model = (
        write_statistics(tmp_path / "counts", COUNTS[1:]),
        checkpoint(tmp_path / "model", layers=2, experts=4),
    )
    for option, expected in (("--model", model), False), ((), True):
        arguments = ("--format", "sglang", "--num-gpu-experts", 1, "--output", tmp_path / "hot.json")
        assert (FUSION in options_of(run(counts, *arguments, *option)["command"])) == expected


@pytest.mark.parametrize(
    ("facts", "expected"), [({"shared_experts": False}, False), ({"shared_experts": True}, True), ({}, True)]
)
def test_only_models_that_may_have_shared_experts_disable_their_fusion(facts: Any, expected: bool) -> None:
    facts |= {"numa": 1, "method": "AMXINT8"}
    for_cpu = launch.serve_cpu_experts(facts, "out", "model", sliced=True)
    for_gpu = launch.serve_whole_model(facts, "out")
    assert (FUSION in for_cpu) == (FUSION in for_gpu) == expected


# --- the servers' own functions -------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheels() -> Path:
    """Return a folder with the sources of both servers, downloaded once into build/."""
    folder = ROOT / "build" / "servers"
    for name in ("sglang==0.5.23", "sglang-kt==0.7.2"):
        target = folder / name
        if target.exists():
            continue
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name, "-d", str(folder)]
        if subprocess.run(command, capture_output=True, timeout=300).returncode:
            pytest.skip(f"{name} cannot be downloaded")
        (wheel,) = folder.glob(f"{name.split('=')[0].replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                target, [n for n in archive.namelist() if n.startswith("sglang/srt/") and n.endswith(".py")]
            )
        wheel.unlink()
    return folder


def load_functions(path: Path, names: set[str], **given: Any) -> dict[str, Any]:
    """Run only these definitions of a module, with these names of its other ones."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert {node.name for node in tree.body} == names  # type: ignore[attr-defined]
    future = ast.parse("from __future__ import annotations").body
    tree.body = [*future, *tree.body]
    space: dict[str, Any] = {"torch": torch, "json": json, "Path": Path, "logger": SimpleNamespace(info=print), **given}
    exec(compile(tree, str(path), "exec"), space)
    return space


@pytest.mark.long
def test_sglang_reads_the_map(tmp_path: Path, wheels: Path) -> None:
    """Its own functions give the experts of each physical number, and their inverse."""
    run(
        write_statistics(tmp_path / "s"),
        "--format",
        "sglang",
        "--output",
        tmp_path / "hot.json",
        "--num-gpu-experts",
        2,
    )
    source = wheels / "sglang==0.5.23" / "sglang" / "srt"
    calls: list[dict[str, Any]] = []
    moe = SimpleNamespace(init_expert_location=str(tmp_path / "hot.json"), moe_a2a_backend="none")
    metadata = SimpleNamespace(
        init_by_mapping=lambda config, moe_ep_rank, physical_to_logical_map: calls.append(locals())
    )
    space = load_functions(
        source / "eplb" / "expert_location.py",
        {"compute_initial_expert_location_metadata", "_compute_logical_to_all_physical_map", "_pad_nested_array"},
        get_exec=lambda: SimpleNamespace(moe=moe),
        ExpertLocationMetadata=metadata,
    )
    space["compute_initial_expert_location_metadata"](None, 0)
    numbers = torch.tensor(calls[0]["physical_to_logical_map"])
    assert numbers.tolist() == ORDER
    inverse = space["_compute_logical_to_all_physical_map"](numbers, 4, 1, 0)
    assert inverse.shape == (3, 4, 1)
    assert torch.equal(torch.take_along_dim(numbers, inverse[..., 0], 1), torch.arange(4).repeat(3, 1))


@pytest.mark.long
def test_sglang_kt_reads_the_counts(tmp_path: Path, wheels: Path) -> None:
    """Its own function gives the mask that `experts` printed; dense layers count as on the GPU."""
    path = tmp_path / "hot.pt"
    counts = COUNTS * 8 + np.arange(12).reshape(3, 4) * (COUNTS > 0)  # no ties
    arguments = ("--format", "sglang-kt", "--output", path, "--num-gpu-experts", 2)
    document = run(write_statistics(tmp_path / "s", counts), *arguments)
    logger = SimpleNamespace(**dict.fromkeys(("info", "debug", "warning"), lambda *_: None))
    from ktconvert.native_quant.runtime.install import generate_gpu_experts_masks

    space = load_functions(
        wheels / "sglang-kt==0.7.2" / "sglang" / "srt" / "layers" / "moe" / "kt_ep_wrapper.py",
        {"_init_kt_gpu_experts_masks"},
        _KT_GPU_EXPERTS_MASKS=None,
        logger=logger,
        get_tensor_model_parallel_rank=lambda: 0,
        generate_gpu_experts_masks=generate_gpu_experts_masks,
        dist=SimpleNamespace(is_initialized=lambda: False),
    )
    config = SimpleNamespace(num_hidden_layers=3, num_experts=4, first_k_dense_replace=1)
    server = SimpleNamespace(
        get_hf_config=lambda: config,
        kt_gpu_experts_ratio=None,
        kt_num_gpu_experts=2,
        kt_expert_placement_strategy="frequency",
        init_expert_location=str(path),
    )
    mask = space["_init_kt_gpu_experts_masks"](server)
    assert mask[0].all()
    assert {row["layer"]: row["hot"] for row in document["layers"]} == {
        n: mask[n].nonzero().flatten().tolist() for n in (1, 2)
    }


@pytest.mark.long
def test_servers_have_the_options(wheels: Path) -> None:
    fields = (wheels / "sglang==0.5.23" / "sglang" / "srt" / "arg_groups" / "fields" / "exec_.py").read_text()
    fork = (wheels / "sglang-kt==0.7.2" / "sglang" / "srt" / "server_args.py").read_text()
    for flag in COMMON - {"--model"}:
        assert f"    {flag.removeprefix('--').replace('-', '_')}: A[" in fields and f'"{flag}"' in fork, flag
    for flag in ONLY_FORK:
        assert f'"{flag}"' in fork
    assert {option.split()[0] for option in launch.make_options("m", "w", "BF16")} < COMMON
