"""Companions, the files beside the weights of a checkpoint: obstacles to copying them are found before any work."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rig import conversion

# Drops the capabilities by which root ignores a file's mode.
AS_ANYONE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


COMMANDS: dict[str, list[Any]] = {"cpu": ["cpu"], "gpu": ["gpu", "--quant-method", "RTN"], "merge": ["merge"]}
every_command = pytest.mark.parametrize("command", ["cpu", "merge"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cli: Any) -> Path:
    """A small checkpoint with its loose files beside it."""
    model = conversion.checkpoint(tmp_path_factory.mktemp("plain") / "model", layers=1, hidden=256, width=256)
    cli("cpu", "-i", model, "-o", model.with_name("loose"), "--no-merge-safetensor")
    return model


@pytest.fixture
def source(tmp_path: Path, plain: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "in" / "model"))


def arguments_of(command: str, source: Path, plain: Path, out: Path) -> list[Any]:
    """Return the arguments of a command that copies companions."""
    inputs = ["-i", plain.with_name("loose"), "-r", source] if command == "merge" else ["-i", source]
    return [*COMMANDS[command], *inputs, "-o", out]


@every_command
def test_companions_that_clash_with_our_files_are_renamed(
    command: str, source: Path, plain: Path, tmp_path: Path, cli: Any
) -> None:
    texts = {"README.md": "card", "README.source.md": "card of the source", "sub/README.md": "another"}
    texts |= {"manifest.json": '{"mine": 1}', "manifest.source.json": '{"mine": 2}', "README.source.txt": "text"}
    for name, text in texts.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    cli(*arguments_of(command, source, plain, tmp_path / "out"))
    expected = {"README.source.md": "card", "README.source.source.md": "card of the source", "sub/README.md": "another"}
    expected |= {"manifest.source.json": '{"mine": 1}', "manifest.source.source.json": '{"mine": 2}'}
    expected["README.source.txt"] = "text"
    out = tmp_path / "out"
    assert {name: (out / name).read_text() for name in expected} == expected
    assert "# AMXINT4" in (out / "README.md").read_text() or "W8A16" in (out / "README.md").read_text()
    listed = [file["name"] for file in json.loads((out / "manifest.json").read_text())["files"]]
    assert len(set(listed)) == len(listed)
    cli("verify", out, "--no-load")


def write_text(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")


def link_outside(source: Path, to: str = "secret.txt", name: str = "notes.txt") -> None:
    write_text(source.parent / to)
    if (source / name).exists():
        (source / name).rename(source.parent / to)
    (source / name).symlink_to(f"../{to}")


SPOILED: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (lambda source: (source / "tokenizer.json").chmod(0), ("tokenizer.json", "cannot be read (Permission denied)")),
    (link_outside, ("notes.txt", "secret.txt, outside the checkpoint")),
    (lambda source: (source / "sub").mkdir(0), ("model/sub", "cannot be listed (Permission denied)")),
    (
        lambda source: write_text(source / "README.md" / "a.md"),
        ("README.md/a.md", "the output has a file named README.md"),
    ),
    (
        lambda s: write_text(s / "README.md", s / "README.source.md" / "a.md"),
        ("README.source.md/a.md", "the output has a file"),
    ),
    (
        lambda source: link_outside(source, "config.json", "config.json"),
        ("model/config.json", "outside the checkpoint"),
    ),
    (lambda source: link_outside(source, "blobs/secret"), ("notes.txt", "blobs/secret, outside the checkpoint")),
]


@pytest.mark.parametrize(
    ("command", "spoil", "messages"),
    [("cpu", *row) for row in SPOILED] + [(command, *row) for command in ("gpu", "merge") for row in SPOILED[:2]],
)
def test_companions_that_cannot_be_copied_are_refused_before_any_work(
    command: str, spoil: Callable[[Path], None], messages: tuple[str, ...], source: Path, plain: Path, tmp_path: Path
) -> None:
    spoil(source)
    result = conversion.ktconvert(*arguments_of(command, source, plain, tmp_path / "out"), prefix=AS_ANYONE)
    conversion.check_refusal(result, 5, *messages)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    for path in source.iterdir():
        path.chmod(0o755)


@every_command
def test_links_within_the_checkpoint_and_to_the_cache_are_followed(
    command: str, source: Path, plain: Path, tmp_path: Path, cli: Any
) -> None:
    """Downloads into a folder used to be links to blobs of the Hugging Face cache. test_source.py tests snapshots."""
    model = tmp_path / "cache" / "models--org--name"
    (model / "snapshots").mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "hash").write_text("words")
    (source / "vocab.txt").symlink_to(model / "blobs" / "hash")
    (source / "sub").mkdir()
    (source / "sub" / "same.json").symlink_to("../tokenizer.json")
    out = tmp_path / "out"
    cli(*arguments_of(command, source, plain, out))
    assert (out / "vocab.txt").read_text() == "words" and not (out / "vocab.txt").is_symlink()
    assert (out / "sub" / "same.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@every_command
def test_loose_weights_are_not_copied_as_companions(
    command: str, source: Path, plain: Path, tmp_path: Path, cli: Any
) -> None:
    for name in ("x.kt", "_layer_0/notes.txt", "sub/_layer_1/_numa_0/y.kt", "sub/z.KT", "old.kt/notes.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"old")
    out = tmp_path / "out"
    cli(*arguments_of(command, source, plain, out))
    assert not [path for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"old"]
    cli("verify", out, "--no-load")


STRAYS = ("_layer_0/_numa_0/INT4_up_0_3Byte_quant_.kt", "x.kt", "sub/_layer_0/notes.txt")


@pytest.mark.parametrize("command", ["cpu", "gpu"])
def test_verify_reports_loose_weights_in_a_merged_output(command: str, plain: Path, tmp_path: Path, cli: Any) -> None:
    """verify reports them whether the manifest lists them or not, and without a manifest."""
    out = tmp_path / "out"
    cli(*arguments_of(command, plain, plain, out))
    for stray in STRAYS:
        (out / stray).parent.mkdir(parents=True, exist_ok=True)
        (out / stray).write_bytes(b"old")
    document = json.loads((out / "manifest.json").read_text())
    listed = [{"name": stray, "size": 3, "sha256": hashlib.sha256(b"old").hexdigest()} for stray in STRAYS]
    # Outputs for the GPU are only recognized by their manifest.
    for files in ([], listed, None) if command == "cpu" else ([], listed):
        if files is None:
            (out / "manifest.json").unlink()
        else:
            (out / "manifest.json").write_text(json.dumps(document | {"files": document["files"] + files}))
        checks = json.loads(cli("verify", out, "--no-load", "--json", code=6).stdout)["checks"]
        problems = next(check["problems"] for check in checks if check["name"] == "files")
        assert sorted(problem.split(" is a loose weight file")[0] for problem in problems) == sorted(STRAYS)
