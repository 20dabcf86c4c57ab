"""Where a conversion cannot begin or go on: what lies at the output, a full disk, another process. What the user had is
untouched, the reason is one sentence with its exit code, and the unfinished conversion can be resumed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig import conversion, forks, killpoint, shims

# Root, too, is to be stopped by a folder's mode.
AS_ANYONE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "model", layers=2, experts=1)


@pytest.fixture(scope="module")
def expected(source: Path) -> Any:
    """The expected output of the source."""
    output = source.with_name("whole")
    assert conversion.ktconvert("cpu", "-i", source, "-o", output, "-q").returncode == 0
    return conversion.tree(output)


@pytest.fixture(scope="module")
def loose(source: Path) -> Path:
    """Its loose files, which `merge` reads."""
    folder = source.with_name("loose")
    assert convert(source, folder, "--no-merge-safetensor").returncode == 0
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "out"


def convert(source: Path, output: Path, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return conversion.ktconvert("cpu", "-i", source, "-o", output, *options, **how)


def succeeded(done: subprocess.CompletedProcess[str], output: Path, expected: Any, *beside: str) -> None:
    """The whole output is there, and nothing is left next to it but what was there."""
    assert done.returncode == 0, done.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == sorted(["out", *beside])


def refused_as_it_is(source: Path, output: Path, code: int, *words: str, within: Path) -> None:
    """With --overwrite, too; nothing that lies in this folder changes."""
    before = conversion.identity(within)
    for options in ((), ("--overwrite",)):
        conversion.check_refusal(convert(source, output, *options), code, *words)
        assert conversion.identity(within) == before


def continued(process: subprocess.Popen[str], code: int, *words: str) -> None:
    """One that was held goes on, and ends with this exit code and these words."""
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == code and "Traceback" not in errors, errors
    assert all(word in errors for word in words), errors


@pytest.mark.parametrize("linked", [False, True], ids=["a folder", "a link"])
def test_an_empty_folder_is_used(source, output, expected, linked):
    real = output.with_name("real") if linked else output
    real.mkdir()
    if linked:
        output.symlink_to("real")
    succeeded(convert(source, output), real, expected, *["real"] * linked)
    assert output.is_symlink() == linked


def test_a_folder_of_others_is_replaced_only_with_delete_others(source, output, expected):
    (output / "deep").mkdir(parents=True)
    (output / "thesis.txt").write_text("years")
    before = conversion.identity(output)
    for options in ((), ("--dry-run",)):
        conversion.check_refusal(convert(source, output, *options), 7, str(output), "--overwrite --delete-others")
        words = (str(output), "1 file (5 B) missing from its manifest: thesis.txt;", "--delete-others")
        conversion.check_refusal(convert(source, output, "--overwrite", *options), 7, *words)
        assert conversion.names(output.parent) == ["out"]
    conversion.check_refusal(convert(source, output, "--delete-others"), 2, "--overwrite")
    both = ("--overwrite", "--delete-others")
    shown = convert(source, output, *both, "--dry-run").stdout
    assert f"remove        {output}: 1 file (5 B) missing from its manifest: thesis.txt" in shown
    [reported] = json.loads(convert(source, output, *both, "--dry-run", "--json").stdout.splitlines()[-1])["replaces"]
    assert (reported["folder"], reported["listed"]["files"]) == (str(output), 0)
    assert reported["others"] == {"files": 1, "bytes": 5, "names": ["thesis.txt"]}
    assert conversion.identity(output) == before
    done = convert(source, output, *both)
    succeeded(done, output, expected)
    assert "note: --overwrite removes " in done.stderr and "thesis.txt" in done.stderr


def test_what_no_manifest_lists_is_not_overwritten(tmp_path, source, output, expected):
    """In an output of ours: files, also in folders, and links, which are not followed."""
    over = ("--overwrite", "--quant-method", "int8")
    assert convert(source, output).returncode == 0
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "mine").write_text("years")
    (output / "extra" / "notes").mkdir()
    (output / "extra" / "notes" / "n.txt").write_text("mine")
    (output / "far").symlink_to(tmp_path / "far")
    before = conversion.identity(tmp_path)
    conversion.check_refusal(convert(source, output, *over), 7, "2 files", ": far, extra/notes/n.txt;")
    assert conversion.identity(tmp_path) == before
    (output / "extra" / "notes" / "n.txt").unlink()
    (output / "far").unlink()
    done = convert(source, output, *over)  # what its manifest lists goes without more words
    assert done.returncode == 0, done.stderr
    assert f"removes {output}: {sum(data is not None for data in expected.values())} files (" in done.stderr
    (output / "far").symlink_to(tmp_path / "far")
    assert convert(source, output, "--overwrite", "--delete-others").returncode == 0
    assert conversion.tree(output) == expected and (tmp_path / "far" / "mine").read_text() == "years"


@pytest.mark.parametrize("link", [False, True], ids=["a file", "a broken link"])
def test_what_is_no_folder_is_refused(source, output, link):
    if link:
        output.symlink_to("nowhere")
    else:
        output.write_text("mine")
    refused_as_it_is(source, output, 7, str(output), "is a file or a broken link", within=output.parent)


@pytest.mark.parametrize("holds", ["", "notes.txt", "out", "lock notes.txt", "lock lock.txt"])
def test_a_work_folder_of_others_is_refused(source, output, holds):
    """A file of that name, too."""
    work = output.with_name("out.work")
    if not holds:
        work.write_text("mine")
    for name in holds.split():
        work.mkdir(exist_ok=True)
        (work / name).write_text("mine")
    refused_as_it_is(source, output, 7, str(work), within=output.parent)


@pytest.mark.parametrize("there", [False, True], ids=["nothing was there", "an output was there"])
def test_what_appears_during_the_run_is_not_replaced(source, expected, output, there):
    if there:
        assert convert(source, output, "--quant-method", "int8").returncode == 0
    with killpoint.hold_conversion(source, output, *["--overwrite"] * there) as process:
        output.mkdir(exist_ok=there)
        (output / "thesis.txt").write_text("years")
        before = conversion.identity(output)
        words = (
            "missing from its manifest: thesis.txt"
            if there
            else "a different file or folder appeared during the conversion"
        )
        continued(process, 7, f"{output}: ", words)
    assert conversion.identity(output) == before
    conversion.check_refusal(conversion.ktconvert("resume", output), 7, "thesis.txt" if there else "is not empty")
    assert conversion.identity(output) == before
    if there:
        (output / "thesis.txt").unlink()
    else:
        output.rename(output.with_name("thesis"))
    done = conversion.ktconvert("resume", output)
    succeeded(done, output, expected, *["thesis"] * (not there))
    assert "died" not in done.stderr


@pytest.mark.parametrize("where", ["the input", "inside it", "around it", "a link to it", "its work folder"])
def test_the_input_is_no_output(tmp_path, source, where):
    mine = tmp_path / "around" / "model.work"
    shutil.copytree(source, mine)
    (tmp_path / "link").symlink_to(mine)
    outputs = {"the input": mine, "inside it": mine / "a" / "b", "around it": tmp_path / "around"}
    outputs |= {"a link to it": tmp_path / "link", "its work folder": tmp_path / "around" / "model"}
    refused_as_it_is(mine, outputs[where], 2, "the input is never written to", within=tmp_path)


def _linked(source: Path, output: Path) -> list[str | Path]:
    """Shards that the input only links to."""
    shutil.copytree(source, output.with_name("model"))
    for shard in output.with_name("model").glob("*.safetensors"):
        (output / shard.name).write_bytes(shard.read_bytes())
        shard.unlink()
        shard.symlink_to(output / shard.name)
    return ["cpu", "-i", output.with_name("model"), "-o", output]


def _index(source: Path, output: Path) -> list[str | Path]:
    shutil.copytree(source, model := output.with_name("model"))
    index = model / "model.safetensors.index.json"
    index.rename(output / index.name)
    index.symlink_to(output / index.name)
    return ["dequantize", model, output]


def _arch_file(source: Path, output: Path) -> list[str | Path]:
    names = (f'{part} = "{{layer}}.{{expert}}.{part}"' for part in ("gate", "up", "down"))
    (output / "row.toml").write_text(
        "\n".join(['name = "x"', 'matches = ["x"]', "[[stored]]", 'style = "separate"', *names])
    )
    return ["cpu", "-i", source, "-o", output, "--arch-file", output / "row.toml"]


def _layers(source: Path, output: Path) -> list[str | Path]:
    shutil.copytree(source.with_name("loose"), layers := output.with_name("layers"))
    (layers / "_layer_1").rename(output / "mine")
    (layers / "_layer_1").symlink_to(output / "mine")
    return ["merge", "-i", layers, "-o", output]


def _against(source: Path, output: Path) -> list[str | Path]:
    assert convert(source, output.with_name("old")).returncode == 0
    model = _linked(source, output)[2]
    return ["resplit", output.with_name("old"), output, "--threadpool-count", "1", "--against", model]


def _original(source: Path, output: Path) -> list[str | Path]:
    shutil.copytree(source, output, dirs_exist_ok=True)
    return ["merge", "-i", source.with_name("loose"), "-r", output, "-o", output]


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("make", [_linked, _index, _arch_file, _layers, _original, _against])
def test_no_file_that_is_read_is_overwritten(make, source, output):
    """Wherever it really lies, and whichever option names it."""
    output.mkdir()
    words = make(source, output)
    before = conversion.identity(output.parent)
    for more in ((), ("--dry-run",)):
        done = conversion.ktconvert(*words, "--overwrite", "--delete-others", *more)
        conversion.check_refusal(done, 2, str(output), "the input is never written to")
        assert conversion.identity(output.parent) == before


@pytest.mark.parametrize("command", ["loose", "copy", "merge"])
def test_a_read_only_input_is_enough(tmp_path, source, loose, output, command):
    shutil.copytree(source, mine := tmp_path / "model")
    shutil.copytree(loose, layers := tmp_path / "loose")
    arguments = {
        "loose": ["cpu", "-i", mine, "--no-merge-safetensor"],
        "copy": ["cpu", "-i", mine, "--non-experts", "copy"],
        "merge": ["merge", "-i", layers, "-r", mine],
    }[command]
    for path in [q for p in (mine, layers) for q in (p, *p.rglob("*"))]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = [conversion.identity(p) for p in (mine, layers)]
    done = conversion.ktconvert(*arguments, "-o", output, prefix=AS_ANYONE)
    assert done.returncode == 0, done.stderr
    assert [conversion.identity(p) for p in (mine, layers)] == before
    assert {p.stat().st_mode & 0o200 for p in output.rglob("*")} == {0o200}


def test_a_read_only_parent_is_named(source, output):
    output.parent.chmod(0o555)
    conversion.check_refusal(convert(source, output, prefix=AS_ANYONE), 1, "out.work", "Permission denied")
    assert conversion.names(output.parent) == []


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "killed"])
def test_in_a_read_only_parent_the_work_is_done_inside(source, output, expected, killed):
    output.mkdir()
    output.parent.chmod(0o555)
    if killed:  # somewhere on the way, by its own alarm
        convert(source, output, prefix=[*AS_ANYONE, "timeout", "-s", "KILL", "0.4"])
    succeeded(convert(source, output, prefix=AS_ANYONE), output, expected)


@pytest.fixture
def mounts() -> Iterator[Any]:
    with conversion.Mounts() as namespace:
        if namespace.refusal:
            pytest.skip(f"nothing can be mounted here: {namespace.refusal}")
        yield namespace


def test_a_mount_point_is_used_and_holds_nothing_else(source, output, expected, mounts):
    output.mkdir()
    mounts.mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", output)
    (mounts.host_path(output) / "lost+found").mkdir()
    (mounts.host_path(output) / "thesis.txt").write_text("years")
    before = conversion.identity(mounts.host_path(output))
    conversion.check_refusal(convert(source, output, prefix=mounts.prefix), 7, "thesis.txt")
    assert conversion.identity(mounts.host_path(output)) == before
    for more in (("--overwrite", "--delete-others"), ()):
        done = convert(source, output, *more, prefix=mounts.prefix)
        assert done.returncode == 0 and ("nothing to do" in done.stderr) == (not more), done.stderr
        assert conversion.tree(mounts.host_path(output)) == expected | {"lost+found": None}
    assert conversion.names(output.parent) == ["out"]


def test_the_input_under_another_name_is_no_output(tmp_path, source, mounts):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(source, first / "model")
    second.mkdir()
    mounts.mount("--bind", first, second)
    before = conversion.identity(first)
    for output in (second / "model", second / "model" / "inside"):
        done = convert(first / "model", output, "--overwrite", "--delete-others", prefix=mounts.prefix)
        conversion.check_refusal(done, 2, str(output), "the input is never written to")
    assert conversion.identity(first) == before


def test_a_disk_too_small_is_refused_before_anything_is_read(source, output, mounts):
    base = output.parent
    mounts.mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", base)
    words = ("needed (", "of finished files", "of companion files", "to spare for headers, index, manifest", "free")
    conversion.check_refusal(convert(source, output, prefix=mounts.prefix), 4, *words)
    shown = convert(source, output, "--dry-run", prefix=mounts.prefix).stdout
    assert all(word in shown for word in words), shown
    mounts.mount("-o", "remount,size=64m", base)
    done = conversion.ktconvert("resume", output, prefix=mounts.prefix)
    assert done.returncode == 0, done.stderr
    assert conversion.names(mounts.host_path(base)) == ["out"]


LIMITS = {
    "nothing": (0, ("out.work/lock: File too large; raise", "ulimit -f", "then run the command again")),
    "a shard": (100_000, ("limit of 97.7 KiB (ulimit -f) is below 16.0 MiB", "; raise it.")),
    "its header": ((16 << 20) + 100, ("limit of 16.0 MiB (ulimit -f); raise it or set --max-shard-size lower.",)),
    "a companion": (40 << 20, ("vocab.txt", "41.0 MiB to copy exceed the file size limit of 40.0 MiB", "ulimit -f")),
}


@pytest.mark.parametrize("which", LIMITS)
def test_a_file_size_limit_is_refused_before_anything_is_read(tmp_path, source, output, expected, which):
    """With a remedy that helps."""
    limit, words = LIMITS[which]
    if which == "a companion":
        source = Path(shutil.copytree(source, tmp_path / "model"))
        with (source / "vocab.txt").open("wb") as file:
            file.truncate(41 << 20)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    part = convert(source, output.with_name("parts"), "--part", "0/2", preexec_fn=limited)
    conversion.check_refusal(part, 4, *(word.replace("out.work", "parts.work") for word in words))
    conversion.check_refusal(convert(source, output, preexec_fn=limited), 4, *words)
    assert not list(output.with_name("out.work").glob("store/*"))
    done = conversion.ktconvert("resume", output) if limit else convert(source, output)
    assert done.returncode == 0, done.stderr
    assert which == "a companion" or conversion.tree(output) == expected


FULL = {"merged": (), "loose": ("--no-merge-safetensor",), "overwrite": ("--overwrite", "--delete-others")}


@pytest.mark.parametrize("which", FULL)
@pytest.mark.parametrize("runs", [5, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "all"])
def test_full_from_any_call_on(tmp_path, source, which, runs):
    """From the n-th call that needs room, nothing has room any more; then there is room again."""
    shim = shims.build(tmp_path, "full", Path(forks.__file__).with_name("full.c").read_text())
    with conversion.memory_folder(tmp_path / "runs") as base, forks.Forks([shim]) as servers:
        output = base / "made" / "out"
        command = ["cpu", "-i", source, "-o", output, *FULL[which], "--cpuinfer-threads", "1"]

        def run(n: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
            env = {"FULL_ROOT": str(output), "FULL_N": str(n), "FULL_LOG": str(base / "count")}
            done: subprocess.CompletedProcess[str] = servers.run(arguments or command, base / "printed", env)
            return done

        def begin() -> None:
            shutil.rmtree(output.parent, ignore_errors=True)
            output.parent.mkdir()
            if which == "overwrite":
                output.mkdir()
                (output / "thesis.txt").write_text("years")

        begin()
        assert run(0).returncode == 0
        expected = conversion.tree(output)
        calls = int((base / "count").read_text())
        for n in conversion.choose_kill_points(calls, runs):
            begin()
            before = conversion.identity(output) if which == "overwrite" else None
            done = run(n)
            where = f"full from call {n} of {calls} on"
            if conversion.find_differences(conversion.tree(output) if output.exists() else {}, expected):
                assert done.returncode == 4, f"{where}: {done.stderr}"
                if before is not None:
                    assert conversion.identity(output) == before, where
            assert done.returncode in (0, 4), f"{where}: {done.stderr}"
            if done.returncode:
                conversion.check_refusal(
                    done, 4, "No space left on device; free some space, then run the command again."
                )
            begun = output.with_name("out.work") / "plan.json"
            again = run(0, "resume", output) if n % 2 and begun.exists() else run(0)
            assert again.returncode == 0, f"{where}: {again.stderr}"
            succeeded(again, output, expected)


def test_two_processes_on_one_output(source, expected, output):
    with killpoint.hold_conversion(source, output) as process:
        before = conversion.identity(output.parent)
        refused_as_it_is(source, output, 7, str(output), f"process {process.pid} ", within=output.parent)
        conversion.check_refusal(conversion.ktconvert("resume", output), 7, f"process {process.pid} ")
        assert convert(source, output, "--dry-run").returncode == 0
        assert conversion.identity(output.parent) == before
        continued(process, 0)
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == ["out"]


# The same command comes to its end in another process, after this one has seen that there is no output yet.
LATE = """
import subprocess, sys
from ktconvert.pipeline.engine import execute
look = execute.existing.is_finished
def late(*arguments):
    found = look(*arguments)
    execute.existing.is_finished = look
    subprocess.run([sys.executable, "-m", "ktconvert.pipeline.cli", *sys.argv[1:]], check=True)
    return found
execute.existing.is_finished = late
from ktconvert.pipeline.cli import main
main()
"""


def test_one_that_comes_when_another_one_ends(source, output, expected):
    words = ("cpu", "-i", source, "-o", output)
    command = [sys.executable, "-c", LATE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=conversion.TIMEOUT)
    succeeded(done, output, expected)
    assert f"{output} is finished: nothing to do" in done.stderr
