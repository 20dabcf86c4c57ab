"""--resume-layer, kt-kernel's resume by hand: what is kept, redone, added or left out."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from rig import conversion, killpoint
from rig.bench import Bench


def test_resume_layer_changes_nothing_where_our_journal_exists(bench):
    expected = bench.fresh("--no-merge-safetensor")
    bench.stop_after(1, "--no-merge-safetensor")  # layer 0 is done, 1 and 2 are missing
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.units_written() == 2
    bench.finished_as(expected)
    assert "nothing to do" in bench.cpu("--no-merge-safetensor", "--resume-layer", "2").stderr


@pytest.fixture
def kt_layers(bench: Bench) -> Callable[[int], dict[str, Any]]:
    """Makes the output look like kt-kernel's after so many layers: loose folders and nothing else."""

    def make(layers: int) -> dict[str, Any]:
        assert bench.cpu("--no-merge-safetensor").returncode == 0
        for path in bench.output.iterdir():
            if path.is_file():
                path.unlink()
            elif not path.name.startswith("_layer_") or int(path.name[7:]) >= layers:
                shutil.rmtree(path)
        return {name: seen for name, seen in conversion.identity(bench.output).items() if name.endswith(".kt")}

    return make


def weights(tree: Any) -> Any:
    return {name: data for name, data in tree.items() if name.endswith(".kt")}


def test_resume_layer_keeps_complete_layers_and_adds_the_rest(bench, kt_layers):
    expected = weights(bench.fresh("--no-merge-safetensor"))
    before = kt_layers(2)
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.units_written() == 1
    assert weights(conversion.tree(bench.output)) == expected
    after = conversion.identity(bench.output)
    assert before == {name: after[name] for name in before}  # same inodes, times and all
    assert not (bench.output / ".ktconvert").exists()
    assert conversion.names(bench.output.parent) == ["out"]
    names = {file["name"] for file in json.loads((bench.output / "manifest.json").read_text())["files"]}
    assert set(expected) <= names
    assert "nothing to do" in bench.cpu("--no-merge-safetensor", "--resume-layer", "2").stderr


def test_files_beside_kept_layers_are_not_replaced(bench, kt_layers):
    kt_layers(2)
    shutil.copy(bench.source / "tokenizer.json", bench.output)
    (bench.output / "README.md").write_text("mine")
    before = conversion.identity(bench.output)
    conversion.refused(bench.cpu("--no-merge-safetensor", "--resume-layer", "2"), 7, str(bench.output / "README.md"))
    assert conversion.identity(bench.output) == before
    (bench.output / "README.md").unlink()
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")  # the same tokenizer is no matter
    assert done.returncode == 0, done.stderr


def test_resume_layer_redoes_incomplete_layers(bench, kt_layers):
    expected = weights(bench.fresh("--no-merge-safetensor"))
    before = kt_layers(2)
    cut = next((bench.output / "_layer_0").rglob("*quant_.kt"))
    cut.write_bytes(cut.read_bytes()[:-1])
    next((bench.output / "_layer_0").rglob("*scale_.kt")).unlink()
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "2")
    assert done.returncode == 0, done.stderr
    assert bench.units_written() == 2
    assert weights(conversion.tree(bench.output)) == expected
    after = conversion.identity(bench.output)
    kept = [name for name in before if "_layer_1" in name]
    assert kept
    assert all(before[name] == after[name] for name in kept)


def test_resume_layer_where_every_layer_is_incomplete(bench, kt_layers):
    expected = weights(bench.fresh("--no-merge-safetensor"))
    kt_layers(1)
    next((bench.output / "_layer_0").rglob("*.kt")).unlink()
    done = bench.cpu("--no-merge-safetensor", "--resume-layer", "1")
    assert done.returncode == 0, done.stderr
    assert weights(conversion.tree(bench.output)) == expected


def test_killed_while_adding_to_kept_layers(bench, kt_layers):
    kt_layers(2)
    kept = bench.base / "kept"
    shutil.copytree(bench.output, kept)
    command = ("--no-merge-safetensor", "--resume-layer", "2")
    assert bench.cpu(*command).returncode == 0
    expected, points = conversion.tree(bench.output), len(bench.calls())
    for n in conversion.thinned(points, 10):
        shutil.rmtree(bench.output)
        shutil.copytree(kept, bench.output)
        assert bench.cpu(*command, kill=n).returncode == killpoint.KILLED
        died = killpoint.killed_before(bench.log)
        by_name = n % 2 and (bench.output / ".ktconvert/plan.json").exists()
        done = bench.run("resume", bench.output) if by_name else bench.cpu(*command)
        assert done.returncode == 0, f"{died}: {done.stderr}"
        assert conversion.differing(conversion.tree(bench.output), expected) == [], died
        assert conversion.names(bench.output.parent) == ["out"]


@pytest.mark.parametrize("loose", [(), ("--no-merge-safetensor",)], ids=["merged", "loose"])
def test_resume_layer_with_nothing_there_leaves_layers_out(bench, loose):
    dry = bench.cpu(*loose, "--resume-layer", "1", "--dry-run")
    assert dry.returncode == 0
    assert "layers 0 are left out" in dry.stderr
    assert conversion.names(bench.output.parent) == []
    assert bench.cpu(*loose, "--resume-layer", "1", kill=40).returncode == killpoint.KILLED
    done = bench.run("resume", bench.output)
    assert done.returncode == 0, done.stderr
    document = json.loads((bench.output / "manifest.json").read_text())
    assert document["model"]["layers"] == [1, 2]
    assert "nothing to do" in bench.cpu(*loose, "--resume-layer", "1").stderr
