"""What was begun with another input or other options is refused with both values, or redone, never mixed."""

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

# What changes, where, and how many units are then made: those that read it, and the one that was missing.
NOTICED: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "an edited weight": (conversion.flip_bit, SHARD, 2),
    "a touched file": (touch, SHARD, 2),
    "an edited companion": (lambda path: conversion.flip_bit(path, 9), "tokenizer.json", 1),
}


@pytest.mark.parametrize("again", ["resume", "the same command"])
@pytest.mark.parametrize("what", NOTICED)
def test_a_changed_input_is_noticed_and_made_again(bench: Bench, what: str, again: str) -> None:
    change, name, units = NOTICED[what]
    bench.stop_after(2)
    change(bench.source / name)

    def go(*options: str) -> Any:
        return bench.run("resume", bench.output, *options) if again == "resume" else bench.cpu(*options)

    store = conversion.identity(bench.work / "store")
    conversion.check_refusal(go(), 5, name, "--verify-inputs")
    assert conversion.identity(bench.work / "store") == store
    done = go("--verify-inputs")
    assert done.returncode == 0, done.stderr
    assert bench.count_written_units() == units
    bench.check_output(bench.convert_fresh("--verify-inputs"))


def killed_anywhere(bench: Bench, go_on: Callable[..., Any], points: int, expected: Any, units: int = 0) -> None:
    """What is there is gone on from; and so it is from the same state, killed at some points and after units' files."""
    kept = bench.base / "kept"
    shutil.copytree(bench.work, kept)
    done = go_on()
    assert done.returncode == 0, done.stderr
    assert not units or bench.count_written_units() == units
    bench.check_output(expected)
    calls = bench.calls()
    unrecorded = [n + 3 for n, c in enumerate(calls) if c.name == "rename" and c.second.startswith("out.work/store/")]
    for n in sorted({*conversion.choose_kill_points(len(calls), points), *unrecorded}):
        shutil.rmtree(bench.output)
        shutil.copytree(kept, bench.work)
        assert go_on(kill=n).returncode == killpoint.KILLED
        died = killpoint.find_prevented_call(bench.log)
        done = go_on()
        assert done.returncode == 0, f"{died}: {done.stderr}"
        assert conversion.find_differences(conversion.tree(bench.output), expected) == [], died


def test_killed_while_what_was_edited_is_made_again(bench: Bench) -> None:
    expected = {"before": bench.convert_fresh()}
    assert bench.cpu().returncode == 0
    last = next(n for n, c in enumerate(bench.calls(), 1) if c.name == "rename" and c.second == "out")
    shutil.rmtree(bench.output)
    assert bench.cpu(kill=last).returncode == killpoint.KILLED  # all made, and assembled under the final names
    conversion.flip_bit(bench.source / SHARD)
    expected["after"] = bench.convert_fresh("--verify-inputs")
    assert "model-00002-of-00003.safetensors" in conversion.find_differences(expected["before"], expected["after"])
    killed_anywhere(bench, partial(bench.run, "resume", bench.output, "--verify-inputs"), 6, expected["after"])


def test_with_hashes_a_touched_input_costs_nothing_and_an_edit_is_seen(bench: Bench) -> None:
    expected = bench.convert_fresh("--verify-inputs")
    bench.stop_after(2, "--verify-inputs")
    conversion.flip_bit(bench.source / SHARD, keep_time=True)
    done = bench.run("resume", bench.output)
    conversion.check_refusal(done, 5, SHARD)
    assert re.search(r"content of \S+ was [0-9a-f]{12}, is [0-9a-f]{12}", done.stderr)
    conversion.flip_bit(bench.source / SHARD)  # it is what it was, and touched
    assert bench.run("resume", bench.output).returncode == 0
    assert bench.count_written_units() == 1
    bench.check_output(expected)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def other_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format": "pt"', b'"format": "tp"', 1))


CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "header": (SHARD, other_header, r"header of \S+ was [0-9a-f]{12}, is [0-9a-f]{12}"),
    "companion's size": ("tokenizer.json", append, r"tokenizer.json had \d+ bytes, has \d+"),
    "companion gone": ("tokenizer.json", Path.unlink, r"tokenizer.json is gone"),
    "companion new": ("more.txt", Path.touch, r"more.txt is new"),
    "config": ("config.json", append, r"config.json had \d+ bytes, has \d+"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_input_is_refused_with_both_values(bench: Bench, what: str) -> None:
    name, change, words = CHANGES[what]
    bench.stop_after(2)
    change(bench.source / name)
    store = conversion.identity(bench.work / "store")
    for done in (bench.cpu(), bench.run("resume", bench.output), bench.cpu("--verify-inputs")):
        conversion.check_refusal(done, 5)
        assert re.search(words, done.stderr), done.stderr
    assert conversion.identity(bench.work / "store") == store


@pytest.mark.parametrize("what", ["cut off", "gone", "all gone"])
def test_a_damaged_input_is_refused_and_can_be_put_back(bench: Bench, what: str) -> None:
    expected = bench.convert_fresh()
    bench.stop_after(2)
    victim, away = bench.source if what == "all gone" else bench.source / SHARD, bench.base / "away"
    victim.rename(away)
    if what == "cut off":
        victim.write_bytes(away.read_bytes()[:-100])
    conversion.check_refusal(bench.run("resume", bench.output), 5, str(victim) if what == "all gone" else SHARD)
    victim.unlink(missing_ok=True)
    away.rename(victim)
    assert bench.run("resume", bench.output).returncode == 0
    bench.check_output(expected)


def test_an_edited_loose_file_is_noticed_by_merge(bench: Bench) -> None:
    assert bench.begin("merge").returncode == 0
    points = len(bench.calls())
    shutil.rmtree(bench.output)
    assert bench.begin("merge", kill=points * 2 // 3).returncode == killpoint.KILLED
    file = next((bench.base / "loose").rglob("INT4_up_1_*quant_.kt"))
    conversion.flip_bit(file)
    (bench.base / "loose" / "manifest.json").unlink()  # with it, the file would be refused whatever is asked for
    for again in (bench.begin("merge"), bench.run("resume", bench.output)):
        conversion.check_refusal(again, 5, file.name, "--verify-inputs")
    assert bench.run("resume", bench.output, "--verify-inputs").returncode == 0
    before = conversion.tree(bench.output)
    shutil.rmtree(bench.output)
    assert bench.begin("merge", "--verify-inputs").returncode == 0
    bench.check_output(before)


def test_a_moved_input_is_the_same_input(bench: Bench) -> None:
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
    "--no-merge-safetensor was False, is True": ("--no-merge-safetensor",),
}


@pytest.mark.parametrize("words", OTHER_OPTIONS)
def test_a_changed_option_is_refused_with_both_values(bench: Bench, words: str) -> None:
    bench.stop_after(1)
    before = conversion.identity(bench.work / "store")
    conversion.check_refusal(bench.cpu(*OTHER_OPTIONS[words]), 7, words)
    assert conversion.identity(bench.work / "store") == before
    assert bench.cpu().returncode == 0
    assert bench.count_written_units() == 2
    finished = conversion.identity(bench.output)
    conversion.check_refusal(bench.cpu(*OTHER_OPTIONS[words]), 7, words)
    assert conversion.identity(bench.output) == finished


def test_a_dry_run_refuses_what_the_run_would(bench: Bench) -> None:
    bench.stop_after(1)
    other = ("--threadpool-count", "1", "--dry-run")
    before = conversion.identity(bench.work)
    conversion.check_refusal(bench.cpu(*other), 7, "--threadpool-count was 2, is 1")
    done = bench.cpu(*other, "--overwrite")
    assert done.returncode == 0
    assert f"{LAYERS} to run" in done.stderr
    conversion.flip_bit(bench.source / SHARD)
    conversion.check_refusal(bench.cpu("--dry-run"), 5, SHARD, "--verify-inputs")
    assert bench.cpu("--dry-run", "--overwrite").returncode == 0
    assert conversion.identity(bench.work) == before


def test_what_cannot_change_a_byte_may_change(bench: Bench) -> None:
    expected = bench.convert_fresh()
    bench.stop_after(1)
    where = ("-i", bench.source, "-o", bench.output)
    many = bench.run("cpu", *where, "--cpuinfer-threads", "64", "--max-memory", "2GiB", "-v", "--gpu", kill=25)
    assert many.returncode == killpoint.KILLED
    done = bench.run("resume", bench.output, "-q", "--json", "--max-memory", "1GiB", "--cpuinfer-threads", "1")
    assert done.returncode == 0, done.stderr
    bench.check_output(expected)


@pytest.mark.parametrize(("units", "back"), [(1, True), (3, False)])
def test_there_and_back_again(bench: Bench, units: int, back: bool) -> None:
    """Option A, killed; B, refused, then let with --overwrite, and killed; then A again: never a byte of the other."""
    other = ("--layers", "0-1", "--threadpool-count", "1")
    expected = bench.convert_fresh() if back else bench.convert_fresh(*other)
    bench.stop_after(units)
    conversion.check_refusal(bench.cpu(*other), 7, "--threadpool-count was 2, is 1", "--overwrite")
    if back:
        for n in (12, 30, 45, 60, 75):
            assert bench.cpu(*other, "--overwrite", kill=n).returncode in (0, killpoint.KILLED)
    done = bench.cpu("--overwrite") if back else bench.cpu(*other, "--overwrite")
    assert done.returncode == 0, done.stderr
    bench.check_output(expected)


@pytest.mark.parametrize("again", ["other options", "another input"])
def test_what_made_nothing_binds_nobody(bench: Bench, again: str) -> None:
    """It may have been refused, and what follows is the command as it should have been."""
    bench.stop_after(0)
    conversion.flip_bit(bench.source / SHARD)
    more = ("--threadpool-count", "1") if again == "other options" else ()
    assert f"{LAYERS} to run" in bench.cpu(*more, "--dry-run").stderr
    done = bench.cpu(*more)
    assert done.returncode == 0, done.stderr
    bench.check_output(bench.convert_fresh(*more))


@pytest.mark.parametrize("point", [40, 60])
def test_another_model_of_the_same_shape_takes_nothing_over(bench: Bench, point: int) -> None:
    """Same names, sizes and headers, so the same fingerprints: --overwrite starts over, wherever that is cut off."""
    other = conversion.checkpoint(bench.base / "other", layers=LAYERS, seed=7)
    touch(other / SHARD)
    expected = bench.convert_fresh(source=other)
    assert bench.cpu(kill=point).returncode == killpoint.KILLED
    conversion.check_refusal(bench.cpu(source=other), 5, "--overwrite")
    killed_anywhere(bench, partial(bench.cpu, "--overwrite", source=other), 4, expected, LAYERS)
