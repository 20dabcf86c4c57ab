"""--part R/N: processes that share the units of a conversion, without an executor."""

import shutil
import subprocess
import sys

import pytest

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.job_share import parse_share
from ktconvert.pipeline.engine.paths import locate
from rig import conversion, killpoint
from rig.bench import CONVERSIONS, SHARD

SHAREABLE = [name for name in CONVERSIONS if CONVERSIONS[name][0] != "merge"]


SLURM = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "3"}  # --array=1-5:2


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/3", {}, "0/3"),
        ("12/64", {}, "12/64"),
        *((text, {}, "") for text in ("3/3", "4/3", "-1/3", "1", "1/2/3", "a/3", "1/0", "", "env")),
        ("env", {"RANK": "1", "WORLD_SIZE": "4"}, "1/4"),
        ("env", SLURM | {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_STEP": "2"}, "2/3"),
        ("env", {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3"}, "2/3"),
        ("env", {"RANK": "4", "WORLD_SIZE": "4"}, ""),
        ("env", {"RANK": "x", "WORLD_SIZE": "4"}, ""),
        ("env", {"RANK": "1"}, ""),
        ("env", SLURM, ""),
    ],
)
def test_shares_are_parsed(text, environment, expected):
    """The share is given or read from the environment; invalid shares ("" here) are refused."""
    if expected:
        part = parse_share(text, environment)
        assert str(part) == expected == f"{part.number}/{part.count}"
    else:
        with pytest.raises(UsageError, match="--part"):
            parse_share(text, environment)


@pytest.mark.parametrize("name", SHAREABLE)
def test_three_shares_make_the_same_output_as_one_process(bench, name):
    fresh = bench.base / "fresh"
    command, *rest = CONVERSIONS[name]
    assert bench.run(command, "-i", bench.source, "-o", fresh, *rest).returncode == 0
    share_command = [
        sys.executable,
        "-m",
        "ktconvert.pipeline.cli",
        command,
        "-i",
        bench.source,
        "-o",
        bench.output,
        *rest,
    ]
    shares = [
        subprocess.Popen([*share_command, "--part", f"{n}/3"], stderr=subprocess.PIPE, text=True) for n in range(3)
    ]
    messages = [share.communicate(timeout=300)[1] for share in shares]
    assert [share.returncode for share in shares] == [0, 0, 0], messages
    assert any("`ktconvert resume " in text for text in messages) and not bench.output.exists()
    assert bench.run("resume", bench.output).returncode == 0
    bench.check_output(conversion.tree(fresh))


def test_a_missing_share_is_named_and_can_run_later(bench):
    expected = bench.convert_fresh()
    for part in ("0/3", "2/3"):
        assert bench.cpu("--part", part).returncode == 0
    for _ in range(2):
        result = bench.run("resume", bench.output)
        assert result.returncode == 7
        assert "1 of 3 units are missing (layer-001), from --part 1/3" in result.stderr
    assert bench.cpu("--part", "1/3").returncode == 0
    assert bench.run("resume", bench.output).returncode == 0
    bench.check_output(expected)


def test_a_flipped_bit_of_a_share_is_repaired(bench):
    expected = bench.convert_fresh()
    for part in ("0/2", "1/2"):
        assert bench.cpu("--part", part).returncode == 0
    victim = min((bench.work / "partial").iterdir())
    conversion.flip_bit(victim, keep_time=True)
    result = bench.run("resume", bench.output)
    assert f"warning: experts.layer-000 is converted again: the SHA-256 of {victim} has changed" in result.stderr
    bench.check_output(expected)


def test_a_plan_lists_units_made_by_shares(bench):
    assert bench.cpu("--part", "0/2").returncode == 0
    stderr = bench.run("resume", bench.output, "--dry-run").stderr
    assert "3 units, 1 to run" in stderr and stderr.count("(made, not yet recorded)") == 2


@pytest.mark.parametrize("how", [("resume", "--verify-inputs"), ("cpu", "--overwrite")])
def test_units_of_an_edited_input_are_made_again(bench, how):
    for part in ("0/2", "1/2"):
        assert bench.cpu("--part", part).returncode == 0
    conversion.flip_bit(bench.source / SHARD)
    conversion.check_refusal(bench.run("resume", bench.output), 5, SHARD, "--verify-inputs")
    command, option = how
    result = bench.cpu(option) if command == "cpu" else bench.run(command, bench.output, option)
    assert result.returncode == 0, result.stderr
    assert conversion.find_differences(conversion.tree(bench.output), bench.convert_fresh(*how[1:])) == []


def test_a_different_count_keeps_finished_units(bench):
    """Units that no share has made can be made here."""
    expected = bench.convert_fresh()
    assert bench.cpu("--part", "0/3").returncode == 0
    finished = {attempt.name for attempt in attempts.read_attempts(locate(bench.output))}
    assert bench.cpu("--part", "0/2").returncode == 0
    assert {attempt.name for attempt in attempts.read_attempts(locate(bench.output))} > finished
    assert bench.run("resume", bench.output, "--executor", "threads").returncode == 0
    bench.check_output(expected)


def test_shares_add_to_existing_layers(bench):
    expected = {}
    for way in ("one process", "shares"):
        assert bench.cpu("--no-merge-safetensor", "--layers", "0").returncode == 0
        for name in ("manifest.json", "config.json", "README.md"):
            (bench.output / name).unlink()
        more = ("--no-merge-safetensor", "--resume-layer", "1")
        if way == "one process":
            assert bench.cpu(*more).returncode == 0
            expected = conversion.tree(bench.output)
            shutil.rmtree(bench.output)
        else:
            for part in ("0/2", "1/2"):
                assert bench.cpu(*more, "--part", part).returncode == 0
            result = bench.run("resume", bench.output)
            assert result.returncode == 0, result.stderr
    bench.check_output(expected)


def test_a_chain_cannot_be_shared(example, tmp_path, cli):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 50)
    calibration = ("--dataset", text, "--num-calibration-samples", "2", "--sequence-length", "16", "--force-cpu")
    where = ("-i", example, "-o", tmp_path / "out")
    result = cli("cpu", *where, "--scale", "gptq", *calibration, "--part", "0/2", code=2)
    assert "use --executor instead of --part" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_shares_need_equal_options(bench):
    assert bench.cpu("--part", "0/2").returncode == 0
    other = bench.cpu("--part", "1/2", "--quant-method", "int8")
    assert other.returncode == 7 and "--quant-method was int4, is int8" in other.stderr
    both = bench.cpu("--part", "1/2", "--executor", "dask:local:2")
    assert both.returncode == 2 and "both divide the work; give one of them" in both.stderr


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_share_killed_at_any_call_can_be_repeated(bench, step):
    expected = bench.convert_fresh()
    assert bench.cpu("--part", "1/2").returncode == 0
    n = 0
    while True:
        n += step
        result = bench.cpu("--part", "0/2", kill=n)
        if result.returncode == 0:
            break
        assert result.returncode == killpoint.KILLED
        again = bench.run("resume", bench.output)
        assert again.returncode in (0, 7), again.stderr
        if again.returncode == 0:  # it was killed after the last unit
            bench.check_output(expected)
            return
    assert n > 10 and bench.run("resume", bench.output).returncode == 0
    bench.check_output(expected)


def test_damaged_attempts_are_made_again(bench):
    expected = bench.convert_fresh()
    assert bench.cpu("--part", "0/2").returncode == 0
    records = sorted((bench.work / "attempts").glob("*.json"))
    assert len(records) == 2
    records[0].write_text("{")
    path = bench.work / "partial" / records[1].name.removesuffix(".json")
    path.write_bytes(path.read_bytes()[:-1])
    for part in ("0/2", "1/2"):
        assert bench.cpu("--part", part).returncode == 0
    assert bench.run("resume", bench.output).returncode == 0
    bench.check_output(expected)
