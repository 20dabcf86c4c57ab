"""Tests of `ktconvert experts`: hot experts, printed and written results, and refusals."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ktconvert.layouts.errors import KTConvertError, UsageError
from ktconvert.layouts.extras import install_command
from ktconvert.native_quant.runtime import hot_experts
from rig.conversion import run_in_process
from rig.safetensors import encode, write_file

COUNTS = np.array([[0, 0, 0, 0], [5, 1, 5, 9], [2, 0, 7, 1]], np.int64)


def write_statistics(folder: Path, counts: npt.NDArray[Any] = COUNTS, name: str = "counts", dtype: str = "I64") -> Path:
    """Write the counts that `ktconvert experts` reads of the output of `calibrate`."""
    folder.mkdir(exist_ok=True)
    write_file(folder / "counts.safetensors", {name: (dtype, counts)})
    return folder


def error_of(*arguments: object) -> tuple[int, str]:
    """Return exit code and message of a failing command."""
    error = run_in_process("experts", *arguments).exception
    assert isinstance(error, KTConvertError) and "\n" not in str(error)
    return error.exit_code, str(error)


tables = arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=st.integers(0, 6))


@given(counts=tables, data=st.data())
def test_most_used_experts_of_each_layer_are_hot(counts: npt.NDArray[np.int64], data: st.DataObject) -> None:
    """Each layer with experts has the given number of hot experts; among equals, the first are hot."""
    number = data.draw(st.integers(0, counts.shape[1]))
    mask = hot_experts.most_used_per_layer(counts, number)
    for row, hot in zip(counts, mask, strict=True):
        assert hot.sum() == (number if row.any() else 0)
        expected = sorted(range(len(row)), key=lambda e: (-row[e], e))[:number] if row.any() else []
        assert sorted(expected) == np.flatnonzero(hot).tolist()


@settings(deadline=None)
@given(counts=tables, data=st.data())
def test_most_used_experts_of_all_layers_are_hot(counts: npt.NDArray[np.int64], data: st.DataObject) -> None:
    """No cold expert has more tokens than a hot one, and layers without experts have no hot ones."""
    pytest.importorskip("torch")
    with_experts = counts.any(axis=1)
    number = data.draw(st.integers(0, int(with_experts.sum()) * counts.shape[1]))
    mask = hot_experts.most_used_in_total(counts, number)
    assert mask.sum() == number and not mask[~with_experts].any()
    if number > 0:
        assert counts[mask].min() >= np.max(counts[with_experts], initial=0, where=~mask[with_experts])
    with pytest.raises(UsageError):
        hot_experts.most_used_in_total(counts, int(with_experts.sum()) * counts.shape[1] + 1)


PEER = """
import sys
import numpy as np, torch
from kt_kernel import generate_gpu_experts_masks
case = np.load(sys.argv[1])
masks = {n: generate_gpu_experts_masks(torch.from_numpy(case[n]), int(n.split("-")[1])).numpy() for n in case}
np.savez(sys.argv[2], **masks)
"""


def cases() -> dict[str, npt.NDArray[np.int64]]:
    """Return name-number -> counts with many ties, of all sizes that torch.topk treats differently."""
    rng = np.random.default_rng(0)
    return {
        f"{layers}x{columns}below{most}-{number}": rng.integers(1, most, (layers, columns))
        for layers, columns in ((2, 8), (48, 128), (58, 256))
        for most in (3, 40, 1 << 40)
        for number in (0, 1, 7, layers * columns // 5, layers * columns - 3, layers * columns)
    }


def test_kt_kernel_selects_the_same_experts(tmp_path: Path, peer_python: str) -> None:
    """generate_gpu_experts_masks of kt-kernel is the reference, for ties, too."""
    pytest.importorskip("torch")
    np.savez(tmp_path / "in.npz", **cases())  # type: ignore[arg-type]
    command = [peer_python, "-P", "-c", PEER, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    theirs = np.load(tmp_path / "out.npz")
    for name, counts in cases().items():
        ours = hot_experts.most_used_in_total(counts, int(name.split("-")[1]))
        np.testing.assert_array_equal(ours, theirs[name], err_msg=name)


def test_mask_and_table_contain_the_hot_experts(tmp_path: Path) -> None:
    output = tmp_path / "mask.safetensors"
    result = run_in_process("experts", write_statistics(tmp_path / "s"), "--output", output, "--num-gpu-experts", 2)
    assert result.exception is None, result.exception
    expected = [[False] * 4, [True, False, False, True], [True, False, True, False]]
    assert hot_experts.read_mask(output).tolist() == expected
    per_layer = hot_experts.masks_by_layer(str(output), None, {1: 4, 2: 4}, 3)
    assert {layer: row.tolist() for layer, row in per_layer.items()} == {1: expected[1], 2: expected[2]}
    assert result.stdout.splitlines() == [
        "layer  hot  coverage  experts",
        "1      2    70.0%     0, 3",
        "2      2    90.0%     0, 2",
        "all    4    76.7%     of 4 in each layer",
    ]
    assert result.stderr == f"next: ktconvert serve MODEL --cpu-weights OUT --gpu-experts-mask {output}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mask.safetensors", "s"]


def test_total_and_json_report_the_chosen_experts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "mask.safetensors"
    for _ in range(2):  # an existing mask is replaced
        result = run_in_process("experts", write_statistics(tmp_path / "s"), "--output", output, "--total", 2, "--json")
    expected: dict[str, Any] = {"event": "chosen", "counts": str(tmp_path / "s"), "output": str(output)}
    expected |= {"format": "mask", "command": None, "experts": 4, "tokens": 30, "coverage": 16 / 30}
    expected["layers"] = [{"layer": 1, "coverage": 0.45, "hot": [3]}, {"layer": 2, "coverage": 0.7, "hot": [2]}]
    assert json.loads(result.stdout) == expected


@pytest.mark.parametrize(("suffix", "first_bytes"), [(".png", b"\x89PNG\r"), (".svg", b"<?xml"), (".pdf", b"%PDF-")])
def test_plot_only_replaces_plots(tmp_path: Path, suffix: str, first_bytes: bytes) -> None:
    """A plot replaces an earlier plot, also through a link, but no other file, and not the mask."""
    pytest.importorskip("matplotlib")
    picture, link = tmp_path / f"experts{suffix}", tmp_path / f"link{suffix}"
    arguments = (write_statistics(tmp_path / "s"), "--num-gpu-experts", 1, "--output")
    link.symlink_to(picture)
    for name in (picture, link):
        assert run_in_process("experts", *arguments, tmp_path / "mask.safetensors", "--plot", name).exception is None
        assert picture.read_bytes().startswith(first_bytes) and link.is_symlink()
    picture.write_bytes(first_bytes + b"drawn by hand, to go with what ktconvert wrote")
    for name in (picture, link):
        code, text = error_of(*arguments, tmp_path / "mask.safetensors", "--plot", name)
        assert code == 7 and f"{picture}: exists, and ktconvert did not write it" in text
    assert picture.read_bytes().startswith(first_bytes + b"drawn by hand")
    same_file = tmp_path / f"mask{suffix}"
    code, text = error_of(*arguments, same_file, "--plot", same_file)
    assert (code, text) == (2, f"--output {same_file}: give a file with the ending .safetensors.")
    assert not same_file.exists()


def test_the_file_to_write_needs_no_flag(tmp_path: Path) -> None:
    """OUT by position writes the same file as --output; COUNTS as OUT is refused."""
    counts = write_statistics(tmp_path / "s")
    by_flag, by_position = tmp_path / "flag.safetensors", tmp_path / "position.safetensors"
    for words in (("--output", by_flag), (by_position,)):
        assert run_in_process("experts", counts, *words, "--num-gpu-experts", 1).exception is None
    assert by_flag.read_bytes() == by_position.read_bytes()
    file = counts / "counts.safetensors"
    code, text = error_of(file, file, "--num-gpu-experts", 1)
    assert (code, text) == (2, f"--output {file}: COUNTS is the same file; choose a different path.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--num-gpu-experts or --total is missing"),
        (("--num-gpu-experts", 1, "--total", 1), "--num-gpu-experts and --total exclude each other"),
        (("--num-gpu-experts", 5), "a layer has 4 experts"),
        (("--total", 9), "all layers together have 8 experts"),
        (("--total", 1, "--plot", "x.txt"), "--plot x.txt"),
    ],
)
def test_wrong_choices_are_rejected(tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    output = tmp_path / "mask.safetensors"
    code, text = error_of(write_statistics(tmp_path / "s"), "--output", output, *options)
    assert code == 2 and message in text and not output.exists()


def test_only_total_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktconvert.layouts.extras.find_spec", lambda name: None)
    arguments = (write_statistics(tmp_path / "s"), "--output", tmp_path / "m.safetensors")
    problem = "choosing experts of all layers together needs torch, not installed here"
    message = f"{problem}: `{install_command('torch')}`."
    assert error_of(*arguments, "--total", 1) == (1, message)
    assert run_in_process("experts", *arguments, "--num-gpu-experts", 1).exception is None


def test_only_a_mask_is_overwritten(tmp_path: Path) -> None:
    folder = write_statistics(tmp_path / "s")
    theirs = tmp_path / "theirs.safetensors"
    write_file(theirs, {hot_experts.MASK_NAME: ("BOOL", np.zeros((3, 4), np.uint8))})
    directory = tmp_path / "folder.safetensors"
    directory.mkdir()
    for path, expected in ((folder / "counts.safetensors", 7), (theirs, 7), (directory, 7), (folder, 2)):
        code, text = error_of(folder, "--output", path, "--num-gpu-experts", 1)
        assert code == expected and str(path) in text
    assert not hot_experts.read_mask(theirs).any()
    code, text = error_of(folder, "--output", tmp_path / "none" / "mask.safetensors", "--num-gpu-experts", 1)
    assert code == 7 and "does not exist; create it first" in text


@pytest.mark.parametrize(
    ("counts", "name", "dtype", "message"),
    [
        (COUNTS, "tokens", "I64", "contains 'tokens'"),
        (COUNTS.astype(np.int32), "counts", "I32", "is I32 of shape [3, 4]"),
        (COUNTS[0], "counts", "I64", "is I64 of shape [4]"),
        (-COUNTS, "counts", "I64", "negative numbers"),
        (0 * COUNTS, "counts", "I64", "only zeros"),
        (COUNTS[:0], "counts", "I64", "has no experts"),
        *((COUNTS, "counts", size, "") for size in (0, 5, -1, None)),
    ],
)
def test_invalid_statistics_are_rejected(tmp_path: Path, counts: Any, name: str, dtype: Any, message: str) -> None:
    """Truncated and missing files are rejected, too."""
    folder = write_statistics(tmp_path / "s", counts, name, dtype if isinstance(dtype, str) else "I64")
    path = folder / "counts.safetensors"
    if dtype is None:
        path.unlink()
    elif isinstance(dtype, int):
        path.write_bytes(path.read_bytes()[:dtype])
    code, text = error_of(folder, "--output", tmp_path / "m.safetensors", "--num-gpu-experts", 1)
    assert code == 5 and message in text and str(folder) in text and (not message or "ktconvert calibrate" in text)


def test_counts_larger_than_any_model_are_not_read(tmp_path: Path) -> None:
    """A sparse file of 1 GiB takes no space."""
    path = write_statistics(tmp_path / "s", COUNTS) / "counts.safetensors"
    table = {"counts": {"dtype": "I64", "shape": [1 << 14, 1 << 13], "data_offsets": [0, 1 << 30]}}
    path.write_bytes(encode(json.dumps(table).encode(), b""))
    os.truncate(path, path.stat().st_size + (1 << 30))
    code, text = error_of(path.parent, "--output", tmp_path / "m.safetensors", "--num-gpu-experts", 1)
    assert code == 5 and "'counts' is of shape [16384, 8192], larger than any model" in text
