"""Conversions that cannot begin or continue: existing files at the output, a full disk, a second process.

The user's files stay unchanged, the message has the reason and its exit code, and the conversion can be resumed.
"""

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

import numpy as np
import pytest

from ktconvert.layouts.errors import InputError, KTConvertError, UsageError, bad_tensor, unreadable_file
from rig import conversion, forks, gguf, killpoint, shims
from rig.safetensors import write_file

# Also root must respect the mode of a folder.
WITHOUT_ROOT_RIGHTS = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a source."""
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "model", layers=2, experts=1)


@pytest.fixture(scope="module")
def expected(source: Path) -> Any:
    """Return the expected output of the source."""
    output = source.with_name("whole")
    assert conversion.ktconvert("cpu", "-i", source, "-o", output, "-q").returncode == 0
    return conversion.tree(output)


@pytest.fixture(scope="module")
def loose(source: Path) -> Path:
    """Convert the source to loose files, which `merge` reads."""
    folder = source.with_name("loose")
    assert convert(source, folder, "--no-merge-safetensor").returncode == 0
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return the path of an output in a folder of its own."""
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "out"


def convert(source: Path, output: Path, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run the conversion."""
    return conversion.ktconvert("cpu", "-i", source, "-o", output, *options, **settings)


def check_success(done: subprocess.CompletedProcess[str], output: Path, expected: Any, *beside: str) -> None:
    """Assert that the output is complete, and that only these other files are beside it."""
    assert done.returncode == 0, done.stderr
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == sorted(["out", *beside])


def check_refused_unchanged(source: Path, output: Path, code: int, *messages: str, within: Path) -> None:
    """Assert that a conversion is refused, also with --overwrite, and that nothing in this folder changes."""
    before = conversion.identity(within)
    for options in ((), ("--overwrite",)):
        conversion.check_refusal(convert(source, output, *options), code, *messages)
        assert conversion.identity(within) == before


def continue_process(process: subprocess.Popen[str], code: int, *messages: str) -> None:
    """Continue a held process; assert its exit code and its message."""
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == code and "Traceback" not in errors, errors
    assert all(message in errors for message in messages), errors


@pytest.mark.parametrize("linked", [False, True], ids=["a folder", "a link"])
def test_an_empty_folder_becomes_the_output(source, output, expected, linked):
    real = output.with_name("real") if linked else output
    real.mkdir()
    if linked:
        output.symlink_to("real")
    check_success(convert(source, output), real, expected, *["real"] * linked)
    assert output.is_symlink() == linked


def test_a_folder_of_others_is_replaced_only_with_delete_others(source, output, expected):
    (output / "deep").mkdir(parents=True)
    (output / "thesis.txt").write_text("years")
    before = conversion.identity(output)
    for options in ((), ("--dry-run",)):
        conversion.check_refusal(convert(source, output, *options), 7, str(output), "--overwrite --delete-others")
        words = (
            f"{output}: not an output of ktconvert, and",
            "delete 1 file (5 B) that no manifest lists: thesis.txt;",
        )
        conversion.check_refusal(
            convert(source, output, "--overwrite", *options), 7, *words, "different --output, or add --delete-others"
        )
        assert conversion.names(output.parent) == ["out"]
    conversion.check_refusal(convert(source, output, "--delete-others"), 2, "--overwrite")
    both = ("--overwrite", "--delete-others")
    shown = convert(source, output, *both, "--dry-run").stdout
    assert f"remove        {output}: 1 file (5 B) that no manifest lists: thesis.txt" in shown
    [reported] = json.loads(convert(source, output, *both, "--dry-run", "--json").stdout.splitlines()[-1])["replaces"]
    assert (reported["folder"], reported["listed"]["files"]) == (str(output), 0)
    assert reported["others"] == {"files": 1, "bytes": 5, "names": ["thesis.txt"]}
    assert conversion.identity(output) == before
    result = convert(source, output, *both)
    check_success(result, output, expected)
    assert "warning: --overwrite removes " in result.stderr and "thesis.txt" in result.stderr


def test_files_outside_the_manifest_are_not_overwritten(tmp_path, source, output, expected):
    """An earlier output keeps files that its manifest does not list, and links, which are not followed."""
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
    result = convert(source, output, *over)  # files of its manifest are removed without a further option
    assert result.returncode == 0, result.stderr
    assert f"removes {output}: {sum(data is not None for data in expected.values())} files (" in result.stderr
    (output / "far").symlink_to(tmp_path / "far")
    assert convert(source, output, "--overwrite", "--delete-others").returncode == 0
    assert conversion.tree(output) == expected and (tmp_path / "far" / "mine").read_text() == "years"


def test_a_damaged_manifest_is_named_with_its_remedy(source, output, expected):
    assert convert(source, output).returncode == 0
    (output / "manifest.json").write_text("{")
    remedy = "restore it, or convert again with --overwrite --delete-others."
    for result in (convert(source, output), *(conversion.ktconvert(word, output) for word in ("resume", "verify"))):
        conversion.check_refusal(result, 6, f"{output / 'manifest.json'}: not a valid manifest", remedy)
    count = sum(data is not None for data in expected.values())
    replaced = (f"{count} files", "whose manifest cannot be read: ")
    conversion.check_refusal(convert(source, output, "--overwrite"), 7, *replaced, "or add --delete-others.")
    result = convert(source, output, "--overwrite", "--delete-others")
    check_success(result, output, expected)
    assert all(words in result.stderr for words in replaced)


@pytest.mark.parametrize("link", [False, True], ids=["a file", "a broken link"])
def test_an_output_that_is_no_folder_is_refused(source, output, link):
    if link:
        output.symlink_to("nowhere")
    else:
        output.write_text("mine")
    check_refused_unchanged(source, output, 7, str(output), "is a file or a broken link", within=output.parent)


@pytest.mark.parametrize("holds", ["", "notes.txt", "out", "lock notes.txt", "lock lock.txt"])
def test_a_work_folder_of_others_is_refused(source, output, holds):
    """A file with the name of the folder is refused, too."""
    work = output.with_name("out.work")
    if not holds:
        work.write_text("mine")
    for name in holds.split():
        work.mkdir(exist_ok=True)
        (work / name).write_text("mine")
    check_refused_unchanged(source, output, 7, str(work), within=output.parent)


@pytest.mark.parametrize("existed", [False, True], ids=["nothing was there", "an output was there"])
def test_files_that_appear_during_the_run_are_not_replaced(source, expected, output, existed):
    if existed:
        assert convert(source, output, "--quant-method", "int8").returncode == 0
    with killpoint.hold_conversion(source, output, *["--overwrite"] * existed) as process:
        output.mkdir(exist_ok=existed)
        (output / "thesis.txt").write_text("years")
        before = conversion.identity(output)
        words = (
            "that no manifest lists: thesis.txt"
            if existed
            else "a different file or folder appeared during the conversion"
        )
        continue_process(process, 7, f"{output}: ", words)
    assert conversion.identity(output) == before
    conversion.check_refusal(
        conversion.ktconvert("resume", output), 7, "thesis.txt" if existed else "is not an output of ktconvert"
    )
    assert conversion.identity(output) == before
    if existed:
        (output / "thesis.txt").unlink()
    else:
        output.rename(output.with_name("thesis"))
    result = conversion.ktconvert("resume", output)
    check_success(result, output, expected, *["thesis"] * (not existed))
    assert "was stopped" not in result.stderr


@pytest.mark.parametrize("where", ["the input", "inside it", "around it", "a link to it", "its work folder"])
def test_the_input_cannot_be_the_output(tmp_path, source, where):
    mine = tmp_path / "around" / "model.work"
    shutil.copytree(source, mine)
    (tmp_path / "link").symlink_to(mine)
    outputs = {"the input": mine, "inside it": mine / "a" / "b", "around it": tmp_path / "around"}
    outputs |= {"a link to it": tmp_path / "link", "its work folder": tmp_path / "around" / "model"}
    inside = where in ("around it", "its work folder")
    message = "which this run would write to" if inside else "the input is never written to"
    check_refused_unchanged(mine, outputs[where], 2, message, within=tmp_path)


def _link_shards(source: Path, output: Path) -> list[str | Path]:
    """Link the shards of the input into the output."""
    shutil.copytree(source, output.with_name("model"))
    for shard in output.with_name("model").glob("*.safetensors"):
        (output / shard.name).write_bytes(shard.read_bytes())
        shard.unlink()
        shard.symlink_to(output / shard.name)
    return ["cpu", "-i", output.with_name("model"), "-o", output]


def _link_index(source: Path, output: Path) -> list[str | Path]:
    shutil.copytree(source, model := output.with_name("model"))
    index = model / "model.safetensors.index.json"
    index.rename(output / index.name)
    index.symlink_to(output / index.name)
    return ["dequantize", model, output]


def _use_arch_file(source: Path, output: Path) -> list[str | Path]:
    names = (f'{part} = "{{layer}}.{{expert}}.{part}"' for part in ("gate", "up", "down"))
    (output / "row.toml").write_text(
        "\n".join(['name = "x"', 'matches = ["x"]', "[[stored]]", 'style = "separate"', *names])
    )
    return ["cpu", "-i", source, "-o", output, "--arch-file", output / "row.toml"]


def _link_layers(source: Path, output: Path) -> list[str | Path]:
    shutil.copytree(source.with_name("loose"), layers := output.with_name("layers"))
    (layers / "_layer_1").rename(output / "mine")
    (layers / "_layer_1").symlink_to(output / "mine")
    return ["merge", "-i", layers, "-o", output]


def _compare_with_links(source: Path, output: Path) -> list[str | Path]:
    assert convert(source, output.with_name("old")).returncode == 0
    model = _link_shards(source, output)[2]
    return ["resplit", output.with_name("old"), output, "--threadpool-count", "1", "--against", model]


def _use_original(source: Path, output: Path) -> list[str | Path]:
    shutil.copytree(source, output, dirs_exist_ok=True)
    return ["merge", "-i", source.with_name("loose"), "-r", output, "-o", output]


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize(
    "make", [_link_shards, _link_index, _use_arch_file, _link_layers, _use_original, _compare_with_links]
)
def test_input_files_are_not_overwritten(make, source, output):
    """Wherever the file is, and whichever option names it."""
    output.mkdir()
    words = make(source, output)
    before = conversion.identity(output.parent)
    for more in ((), ("--dry-run",)):
        result = conversion.ktconvert(*words, "--overwrite", "--delete-others", *more)
        conversion.check_refusal(result, 2, str(output), "choose a different")
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
    result = conversion.ktconvert(*arguments, "-o", output, prefix=WITHOUT_ROOT_RIGHTS)
    assert result.returncode == 0, result.stderr
    assert [conversion.identity(p) for p in (mine, layers)] == before
    assert {p.stat().st_mode & 0o200 for p in output.rglob("*")} == {0o200}


def test_a_removed_current_directory_is_named(tmp_path, source):
    prefix = ("sh", "-c", 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone"))
    for words in (("cpu", "model", "out"), ("models",)):
        done = conversion.ktconvert(*words, prefix=prefix)
        conversion.check_refusal(done, 1, "the current directory has been removed; change to one that exists.")


def test_a_parent_without_folders_is_named(source):
    """The modes of /proc allow root to write, but it has no space for files."""
    remedy = "(Operation not supported); choose an output in a different directory."
    for options in ((), ("--dry-run",)):
        done = convert(source, Path("/proc/out"), *options)
        conversion.check_refusal(done, 7, f"/proc/out: cannot be created {remedy}")


def test_a_read_only_parent_is_named(source, output):
    output.parent.chmod(0o555)
    remedy = f"choose an output in a different directory, or make {output.parent} writable."
    problem = f"cannot be created (Permission denied); {remedy}"
    for missing, refused in ((output, output), (output / "deeper", output)):
        for options in ((), ("--dry-run",)):
            done = convert(source, missing, *options, prefix=WITHOUT_ROOT_RIGHTS)
            conversion.check_refusal(done, 7, f"{refused}: {problem}")


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "killed"])
def test_a_read_only_parent_moves_work_into_the_output(source, output, expected, killed):
    output.mkdir()
    output.parent.chmod(0o555)
    if killed:  # at some time during the conversion
        convert(source, output, prefix=[*WITHOUT_ROOT_RIGHTS, "timeout", "-s", "KILL", "0.4"])
    check_success(convert(source, output, prefix=WITHOUT_ROOT_RIGHTS), output, expected)


def test_what_may_not_be_read_is_named(tmp_path, source, expected):
    """The directory that cannot be entered, not a file that a command would look for in it; and a shard."""
    model = Path(shutil.copytree(source, tmp_path / "model"))
    whole = Path(shutil.copytree(source.with_name("whole"), tmp_path / "whole"))
    (shard, *_) = whole.glob("*.safetensors")
    model.chmod(0)
    shard.chmod(0)
    for words in (
        ("cpu", model, tmp_path / "o"),
        ("inspect", model),
        ("run", model, "--prompt", "x"),
        ("verify", model),
    ):
        done = conversion.ktconvert(*words, prefix=WITHOUT_ROOT_RIGHTS)
        conversion.check_refusal(done, 5, f"{model}: permission denied; change its permissions.")
    for words in (("verify", whole), ("inspect", whole)):
        done = conversion.ktconvert(*words, prefix=WITHOUT_ROOT_RIGHTS)
        conversion.check_refusal(done, 5, f"{shard}: ", "Permission denied", "; change its permissions, so that")


def test_an_output_that_is_its_input_is_refused(source):
    for words in ((source, "-o", source), ("-i", source, "-o", source), (source, source)):
        done = conversion.ktconvert("cpu", *words)
        conversion.check_refusal(done, 2, f"{source} is part of the input {source}; choose a different folder")


def test_remedies_name_what_helps(tmp_path, source, expected):
    """Also for arguments that exist, but are something else."""
    gguf.write(tmp_path / "dense.gguf", {"blk.0.ffn_gate.weight": ("F32", np.ones((8, 64), np.float32))}, {}, "llama")
    bare = Path(shutil.copytree(source, tmp_path / "bare"))
    (bare / "config.json").unlink()
    whole = source.with_name("whole")
    larger = conversion.checkpoint(tmp_path / "larger", layers=3, experts=1)
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    wrong = Path(shutil.copytree(source, tmp_path / "wrong"))
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "hidden_size": "256x"}))
    counts = "has no counts of routed tokens (counts.safetensors or expert_counts.json); run `ktconvert calibrate"
    for words, code, message in (
        (("experts", source, "-o", "mask.safetensors", "--num-gpu-experts", 1), 5, f"{source}: {counts}"),
        (("inspect", source.with_name("modle")), 5, f"does not exist (did you mean {source}?); check"),
        (
            ("cpu", tmp_path / "dense.gguf", tmp_path / "out"),
            3,
            f"{tmp_path / 'dense.gguf'}: gguf:llama: a dense model",
        ),
        (("cpu", bare, tmp_path / "out"), 5, f"{bare}: has no config.json, which names the activation"),
        (("cpu", source, tmp_path / "out", "--part", "2/2"), 2, "job shares are 0/2 to 1/2"),
        (("cpu", source, tmp_path / "out", "--part", "0/0"), 2, "--part 0/0: give R/N with an N of at least 1"),
        (("cpu", wrong, tmp_path / "out"), 5, f'{wrong}: config.json says hidden_size = "256x", which is not a whole'),
        (("merge", whole, tmp_path / "out"), 5, f"{whole}: its experts are in safetensors files already"),
        (("dequantize", source, whole), 7, f"{whole} is an output of `ktconvert cpu`; choose a different --output, or"),
        (("verify", adapter), 5, f"{adapter}: is a LoRA adapter, not an output; give the directory that"),
        (("cpu", larger, whole), 5, "restore the old input, choose a different --output, or start over with"),
    ):
        conversion.check_refusal(conversion.ktconvert(*words), code, message)


def test_a_folder_without_a_model_is_named(tmp_path, source, expected):
    """The tensors of `native` have the names of a model, as which it could be read."""
    whole, native = source.with_name("whole"), tmp_path / "native"
    assert convert(source, native, "--quant-method", "rawint4").returncode == 0
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    write_file(adapter / "adapter_model.safetensors", {"lora_A.weight": ("BF16", np.zeros((1, 8), np.uint16))})
    (statistics := tmp_path / "statistics").mkdir()
    (statistics / "statistics.json").write_text("{}")
    setup = ("-o", tmp_path / "server", "--dry-run")
    for folder, message in (
        (adapter, "is a LoRA adapter, not a model; give the model that it was trained for."),
        (statistics, "contains statistics of a model's experts, not a model; give the model."),
        (whole, "contains converted experts, not a model; give the model that they were made from."),
        (native, "contains converted experts, not a model; give the model that they were made from."),
    ):
        for words in (("fit", folder), ("up", folder, *setup)):
            conversion.check_refusal(conversion.ktconvert(*words), 5, f"{folder}: {message}")
    for command in ("inspect", "bench"):
        conversion.check_refusal(conversion.ktconvert(command, adapter), 5, f"{adapter}: is a LoRA adapter, not ")
    shard = next(whole.glob("*.safetensors"))
    refused = conversion.ktconvert("cpu", shard, tmp_path / "out")
    conversion.check_refusal(refused, 5, f"{whole}: contains converted experts, not a model; give the model that")
    refused = conversion.ktconvert("inspect", shard)
    conversion.check_refusal(refused, 5, f"{shard}: is one file of an output; give the directory {whole}.")


@pytest.fixture
def mounts() -> Iterator[Any]:
    with conversion.Mounts() as namespace:
        if namespace.refusal:
            pytest.skip(f"nothing can be mounted here: {namespace.refusal}")
        yield namespace


def test_a_mount_point_can_be_the_output(source, output, expected, mounts):
    output.mkdir()
    mounts.mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", output)
    (mounts.host_path(output) / "lost+found").mkdir()
    (mounts.host_path(output) / "thesis.txt").write_text("years")
    before = conversion.identity(mounts.host_path(output))
    conversion.check_refusal(convert(source, output, prefix=mounts.prefix), 7, "thesis.txt")
    assert conversion.identity(mounts.host_path(output)) == before
    for more in (("--overwrite", "--delete-others"), ()):
        result = convert(source, output, *more, prefix=mounts.prefix)
        assert result.returncode == 0 and ("nothing to do" in result.stderr) == (not more), result.stderr
        assert conversion.tree(mounts.host_path(output)) == expected | {"lost+found": None}
    assert conversion.names(output.parent) == ["out"]


def test_the_input_under_a_second_name_cannot_be_the_output(tmp_path, source, mounts):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(source, first / "model")
    second.mkdir()
    mounts.mount("--bind", first, second)
    before = conversion.identity(first)
    for output in (second / "model", second / "model" / "inside"):
        result = convert(first / "model", output, "--overwrite", "--delete-others", prefix=mounts.prefix)
        conversion.check_refusal(result, 2, str(output), "choose a different")
    assert conversion.identity(first) == before


def test_a_disk_too_small_is_refused_before_anything_is_read(source, output, mounts):
    base = output.parent
    mounts.mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", base)
    words = ("needed (", "of finished files", "of companion files", "to spare for headers, index, manifest", "free")
    conversion.check_refusal(convert(source, output, prefix=mounts.prefix), 4, *words)
    dry_run = convert(source, output, "--dry-run", prefix=mounts.prefix)
    assert dry_run.returncode == 0 and "warning: here, the conversion would stop: " in dry_run.stderr
    assert all(word in text for word in words for text in (dry_run.stdout, dry_run.stderr)), dry_run.stdout
    assert conversion.names(mounts.host_path(base)) == []
    mounts.mount("-o", "remount,size=64m", base)
    result = convert(source, output, prefix=mounts.prefix)
    assert result.returncode == 0, result.stderr
    assert conversion.names(mounts.host_path(base)) == ["out"]


LIMITS = {
    "nothing": (0, ("out.work/lock: File too large; raise", "ulimit -f", "then run the command again")),
    "a shard": (100_000, ("limit of 97.7 KiB (ulimit -f) is below the 16.0 MiB", "; raise it.")),
    "its header": ((16 << 20) + 100, ("limit of 16.0 MiB (ulimit -f); raise it or set --max-shard-size lower.",)),
    "a companion": (40 << 20, ("vocab.txt", "41.0 MiB to copy exceed the file size limit of 40.0 MiB", "ulimit -f")),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_file_size_limit_is_refused_before_anything_is_read(tmp_path, source, output, expected, case):
    """The message has a remedy that helps."""
    limit, messages = LIMITS[case]
    if case == "a companion":
        source = Path(shutil.copytree(source, tmp_path / "model"))
        with (source / "vocab.txt").open("wb") as file:
            file.truncate(41 << 20)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    share = convert(source, output.with_name("parts"), "--part", "0/2", preexec_fn=limited)
    conversion.check_refusal(share, 4, *(message.replace("out.work", "parts.work") for message in messages))
    conversion.check_refusal(convert(source, output, preexec_fn=limited), 4, *messages)
    assert not limit or not output.with_name("out.work").exists()
    result = convert(source, output)
    assert result.returncode == 0, result.stderr
    assert case == "a companion" or conversion.tree(output) == expected


FULL = {"merged": (), "loose": ("--no-merge-safetensor",), "overwrite": ("--overwrite", "--delete-others")}


@pytest.mark.parametrize("case", FULL)
@pytest.mark.parametrize("runs", [5, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_conversion_resumes_after_a_full_disk(tmp_path, source, case, runs):
    """From the n-th call that needs space, all calls fail; then there is space again."""
    shim = shims.build(tmp_path, "full", Path(forks.__file__).with_name("full.c").read_text())
    with conversion.memory_folder(tmp_path / "runs") as base, forks.Forks([shim]) as servers:
        output = base / "made" / "out"
        command = ["cpu", "-i", source, "-o", output, *FULL[case], "--cpuinfer-threads", "1"]

        def run(n: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
            env = {"FULL_ROOT": str(output), "FULL_N": str(n), "FULL_LOG": str(base / "count")}
            result: subprocess.CompletedProcess[str] = servers.run(arguments or command, base / "printed", env)
            return result

        def begin() -> None:
            shutil.rmtree(output.parent, ignore_errors=True)
            output.parent.mkdir()
            if case == "overwrite":
                output.mkdir()
                (output / "thesis.txt").write_text("years")

        begin()
        assert run(0).returncode == 0
        expected = conversion.tree(output)
        calls = int((base / "count").read_text())
        for n in conversion.choose_kill_points(calls, runs):
            begin()
            before = conversion.identity(output) if case == "overwrite" else None
            result = run(n)
            where = f"full from call {n} of {calls} on"
            if conversion.find_differences(conversion.tree(output) if output.exists() else {}, expected):
                assert result.returncode == 4, f"{where}: {result.stderr}"
                if before is not None:
                    assert conversion.identity(output) == before, where
            assert result.returncode in (0, 4), f"{where}: {result.stderr}"
            if result.returncode:
                conversion.check_refusal(
                    result, 4, "No space left on device; free some space, then run the command again."
                )
            begun = (output.with_name("out.work") / "plan.json").exists()
            assert begun or "are finished and kept in" not in result.stderr, f"{where}: {result.stderr}"
            resumed = run(0, "resume", output) if n % 2 and begun else run(0)
            assert resumed.returncode == 0, f"{where}: {resumed.stderr}"
            check_success(resumed, output, expected)


@pytest.mark.parametrize("finished", [0, 1])
def test_a_failed_run_keeps_only_finished_units(tmp_path, source, output, finished):
    """NaN in one layer fails the conversion; the layer before it stays for `resume`."""
    model = Path(shutil.copytree(source, tmp_path / "model"))
    shard = model / f"model-0000{1 + finished}-of-00003.safetensors"
    intact = shard.read_bytes()
    shard.write_bytes(intact[:-2] + b"\xc0\x7f")
    result = convert(model, output, "--threads", "1")
    conversion.check_refusal(result, 5, shard.name)
    assert conversion.names(output.parent) == ["out.work"] * finished
    kept = f"note: 1 of 2 units finished and kept in {output}.work; `ktconvert resume {output}` continues"
    kept += " (with --verify-inputs after you replace an input file)"
    assert (kept in result.stderr) == bool(finished)
    shard.write_bytes(intact)
    words = ("resume", output, "--verify-inputs") if finished else ("cpu", model, output)
    result = conversion.ktconvert(*words)
    assert result.returncode == 0, result.stderr
    assert conversion.names(output.parent) == ["out"]


def test_a_second_process_on_an_output_is_refused(source, expected, output):
    with killpoint.hold_conversion(source, output) as process:
        before = conversion.identity(output.parent)
        check_refused_unchanged(source, output, 7, str(output), f"process {process.pid} ", within=output.parent)
        conversion.check_refusal(conversion.ktconvert("resume", output), 7, f"process {process.pid} ")
        assert convert(source, output, "--dry-run").returncode == 0
        assert conversion.identity(output.parent) == before
        continue_process(process, 0)
    assert conversion.find_differences(conversion.tree(output), expected) == []
    assert conversion.names(output.parent) == ["out"]


# A second process finishes the same command after this one has found no output.
FINISHED_MEANWHILE = """
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


def test_a_process_accepts_an_output_that_was_just_finished(source, output, expected):
    words = ("cpu", "-i", source, "-o", output)
    command = [sys.executable, "-c", FINISHED_MEANWHILE, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=conversion.TIMEOUT)
    check_success(result, output, expected)
    assert f"{output} is finished: nothing to do" in result.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UsageError("--a and --b both divide the work; give one of them."), None),
        (UsageError("--a and --b both divide the work; give one of them"), None),
        (InputError("has no tensors", "convert it again", path="/x"), "/x: has no tensors; convert it again."),
        (InputError("/x: no such file (did you mean /y?)"), "/x: no such file (did you mean /y?)"),
        (bad_tensor("a.weight", "is empty", "use another release"), "tensor 'a.weight' is empty; use another release."),
        (unreadable_file("/x", PermissionError(13, "Permission denied")).with_remedy("log in"), None),
    ],
)
def test_every_message_is_a_complete_sentence(error: KTConvertError, message: str | None) -> None:
    assert str(error) == (message or f"{error.text}.") and not error.text.endswith(".")
