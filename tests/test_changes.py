"""Changed inputs and options: a conversion refuses them with both values or converts again, and never mixes results."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rig import conversion, killpoint
from rig.bench import LAYERS, SHARD, Bench
from rig.files import touch

# (change, file, number of units made again): the missing unit, and units that read the changed file.
INPUT_CHANGES: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "an edited weight": (conversion.flip_bit, SHARD, 2),
    "a touched file": (touch, SHARD, 2),
    "an edited companion": (lambda path: conversion.flip_bit(path, 9), "tokenizer.json", 1),
}


@pytest.mark.parametrize("command", ["resume", "the same command"])
@pytest.mark.parametrize("case", INPUT_CHANGES)
def test_units_of_a_changed_input_are_converted_again(bench: Bench, case: str, command: str) -> None:
    change, name, units = INPUT_CHANGES[case]
    bench.stop_after(2)
    change(bench.source / name)

    def convert(*options: str) -> Any:
        return bench.run("resume", bench.output, *options) if command == "resume" else bench.cpu(*options)

    store = conversion.identity(bench.work / "store")
    conversion.check_refusal(convert(), 5, name, "--verify-inputs")
    assert conversion.identity(bench.work / "store") == store
    result = convert("--verify-inputs")
    assert result.returncode == 0, result.stderr
    assert bench.count_written_units() == units
    bench.check_output(bench.convert_fresh("--verify-inputs"))


def check_resume_after_kills(
    bench: Bench, resume: Callable[..., Any], points: int, expected: Any, units: int = 0
) -> None:
    """Resume, and resume from the same state with kills at some points and after the files of units.

    Every resume must finish with the expected files.
    """
    saved = bench.base / "saved"
    shutil.copytree(bench.work, saved)
    result = resume()
    assert result.returncode == 0, result.stderr
    assert not units or bench.count_written_units() == units
    bench.check_output(expected)
    calls = bench.calls()
    unrecorded = [n + 3 for n, c in enumerate(calls) if c.name == "rename" and c.second.startswith("out.work/store/")]
    for n in sorted({*conversion.choose_kill_points(len(calls), points), *unrecorded}):
        shutil.rmtree(bench.output)
        shutil.copytree(saved, bench.work)
        assert resume(kill=n).returncode == killpoint.KILLED
        last_call = killpoint.find_prevented_call(bench.log)
        result = resume()
        assert result.returncode == 0, f"{last_call}: {result.stderr}"
        assert conversion.find_differences(conversion.tree(bench.output), expected) == [], last_call


def test_resume_after_kills_while_edited_inputs_are_converted_again(bench: Bench) -> None:
    expected = {"before": bench.convert_fresh()}
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    # All units are made, and assembled under their final names.
    assert bench.cpu(kill=last).returncode == killpoint.KILLED
    conversion.flip_bit(bench.source / SHARD)
    expected["after"] = bench.convert_fresh("--verify-inputs")
    assert "model-00002-of-00003.safetensors" in conversion.find_differences(expected["before"], expected["after"])
    check_resume_after_kills(bench, partial(bench.run, "resume", bench.output, "--verify-inputs"), 6, expected["after"])


def test_verify_inputs_ignores_a_touch_and_detects_an_edit(bench: Bench) -> None:
    expected = bench.convert_fresh("--verify-inputs")
    bench.stop_after(2, "--verify-inputs")
    conversion.flip_bit(bench.source / SHARD, keep_time=True)
    result = bench.run("resume", bench.output)
    conversion.check_refusal(result, 5, SHARD)
    assert re.search(r"content of \S+ was [0-9a-f]{12}, is [0-9a-f]{12}", result.stderr)
    conversion.flip_bit(bench.source / SHARD)  # restores the content, with a new time
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.count_written_units() == 1
    bench.check_output(expected)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def change_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format": "pt"', b'"format": "tp"', 1))


CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "header": (SHARD, change_header, r"header of \S+ was [0-9a-f]{12}, is [0-9a-f]{12}"),
    "companion's size": ("tokenizer.json", append, r"tokenizer.json had \d+ bytes, has \d+"),
    "companion gone": ("tokenizer.json", Path.unlink, r"tokenizer.json is missing"),
    "companion new": ("more.txt", Path.touch, r"more.txt is new"),
    "config": ("config.json", append, r"config.json had \d+ bytes, has \d+"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_different_input_is_refused_with_both_values(bench: Bench, case: str) -> None:
    name, change, message = CHANGES[case]
    bench.stop_after(2)
    change(bench.source / name)
    store = conversion.identity(bench.work / "store")
    for result in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--verify-inputs")):
        conversion.check_refusal(result, 5)
        assert re.search(message, result.stderr), result.stderr
    assert conversion.identity(bench.work / "store") == store


@pytest.mark.parametrize("case", ["cut off", "gone", "all gone"])
def test_a_damaged_input_is_refused_and_can_be_put_back(bench: Bench, case: str) -> None:
    expected = bench.convert_fresh()
    bench.stop_after(2)
    victim, backup = bench.source if case == "all gone" else bench.source / SHARD, bench.base / "backup"
    victim.rename(backup)
    if case == "cut off":
        victim.write_bytes(backup.read_bytes()[:-100])
    conversion.check_refusal(bench.run("resume", bench.output), 5, str(victim) if case == "all gone" else SHARD)
    victim.unlink(missing_ok=True)
    backup.rename(victim)
    assert bench.run("resume", bench.output).returncode == 0
    bench.check_output(expected)


def test_merge_detects_an_edited_loose_file(bench: Bench) -> None:
    assert bench.begin("merge").returncode == 0
    points = len(bench.calls())
    shutil.rmtree(bench.output)
    assert bench.begin("merge", kill=points * 2 // 3).returncode == killpoint.KILLED
    file = next((bench.base / "loose").rglob("INT4_up_1_*quant_.kt"))
    conversion.flip_bit(file)
    (bench.base / "loose" / "manifest.json").unlink()  # otherwise its hashes would refuse the file in any case
    for refused in (bench.begin("merge"), bench.run("resume", bench.output)):
        conversion.check_refusal(refused, 5, file.name, "--verify-inputs")
    assert bench.run("resume", bench.output, "--verify-inputs").returncode == 0
    before = conversion.tree(bench.output)
    shutil.rmtree(bench.output)
    assert bench.begin("merge", "--verify-inputs").returncode == 0
    bench.check_output(before)


def test_a_moved_input_is_accepted(bench: Bench) -> None:
    expected = bench.convert_fresh()
    bench.stop_after(2)
    moved = bench.base / "elsewhere"
    bench.source.rename(moved)
    conversion.check_refusal(bench.run("resume", bench.output), 5, str(bench.source))
    assert bench.cpu(source=moved).returncode == 0
    assert bench.count_written_units() == 1
    bench.check_output(expected)


OTHER_OPTIONS = {
    "--quant-method was int4, is int8": ("--quant-method", "int8"),
    "--layers was all, is 0-1": ("--layers", "0-1"),
    "--max-shard-size was not given, is 80000": ("--max-shard-size", "80KB"),
    "--no-merge-safetensor was not given, is given": ("--no-merge-safetensor",),
}


@pytest.mark.parametrize("message", OTHER_OPTIONS)
def test_a_changed_option_is_refused_with_both_values(bench: Bench, message: str) -> None:
    bench.stop_after(1)
    before = conversion.identity(bench.work / "store")
    conversion.check_refusal(bench.cpu(*OTHER_OPTIONS[message]), 7, message)
    assert conversion.identity(bench.work / "store") == before
    assert bench.cpu().returncode == 0
    assert bench.count_written_units() == 2
    finished = conversion.identity(bench.output)
    conversion.check_refusal(bench.cpu(*OTHER_OPTIONS[message]), 7, message)
    assert conversion.identity(bench.output) == finished


def test_a_dry_run_refuses_the_same_changes_as_a_run(bench: Bench) -> None:
    bench.stop_after(1)
    other = ("--threadpool-count", "1", "--dry-run")
    before = conversion.identity(bench.work)
    conversion.check_refusal(bench.cpu(*other), 7, "--numa was 2, is 1")
    result = bench.cpu(*other, "--overwrite")
    assert result.returncode == 0
    assert f"{LAYERS} to run" in result.stderr
    conversion.flip_bit(bench.source / SHARD)
    conversion.check_refusal(bench.cpu("--dry-run"), 5, SHARD, "--verify-inputs")
    assert bench.cpu("--dry-run", "--overwrite").returncode == 0
    assert conversion.identity(bench.work) == before


def test_options_that_change_no_byte_may_differ(bench: Bench) -> None:
    expected = bench.convert_fresh()
    bench.stop_after(1)
    paths = ("-i", bench.source, "-o", bench.output)
    first = bench.run("cpu", *paths, "--cpuinfer-threads", "64", "--max-memory", "2GiB", "-v", "--gpu", kill=25)
    assert first.returncode == killpoint.KILLED
    result = bench.run("resume", bench.output, "-q", "--json", "--max-memory", "1GiB", "--cpuinfer-threads", "1")
    assert result.returncode == 0, result.stderr
    bench.check_output(expected)


@pytest.mark.parametrize(("units", "return_to_first"), [(1, True), (3, False)])
def test_overwrite_never_mixes_bytes_of_two_option_sets(bench: Bench, units: int, return_to_first: bool) -> None:
    """Options A are killed, options B are refused without --overwrite and killed with it, then A runs again."""
    other = ("--layers", "0-1", "--threadpool-count", "1")
    expected = bench.convert_fresh() if return_to_first else bench.convert_fresh(*other)
    bench.stop_after(units)
    conversion.check_refusal(bench.cpu(*other), 7, "--numa was 2, is 1", "--overwrite")
    if return_to_first:
        for n in (12, 30, 45, 60, 75):
            assert bench.cpu(*other, "--overwrite", kill=n).returncode in (0, killpoint.KILLED)
    result = bench.cpu("--overwrite") if return_to_first else bench.cpu(*other, "--overwrite")
    assert result.returncode == 0, result.stderr
    bench.check_output(expected)


@pytest.mark.parametrize("change", ["other options", "another input"])
def test_a_run_without_finished_units_does_not_bind_the_next(bench: Bench, change: str) -> None:
    """The first run may have been refused, and the next is its corrected command."""
    bench.stop_after(0)
    conversion.flip_bit(bench.source / SHARD)
    options = ("--threadpool-count", "1") if change == "other options" else ()
    assert f"{LAYERS} to run" in bench.cpu(*options, "--dry-run").stderr
    result = bench.cpu(*options)
    assert result.returncode == 0, result.stderr
    bench.check_output(bench.convert_fresh(*options))


@pytest.mark.parametrize("point", [40, 60])
def test_overwrite_with_a_different_model_of_the_same_shape_reuses_nothing(bench: Bench, point: int) -> None:
    """Names, sizes, headers, and therefore fingerprints, are equal. --overwrite starts over, even if it is killed."""
    other = conversion.checkpoint(bench.base / "other", layers=LAYERS, seed=7)
    touch(other / SHARD)
    expected = bench.convert_fresh(source=other)
    assert bench.cpu(kill=point).returncode == killpoint.KILLED
    conversion.check_refusal(bench.cpu(source=other), 5, "--overwrite")
    check_resume_after_kills(bench, partial(bench.cpu, "--overwrite", source=other), 4, expected, LAYERS)
