"""What lies beside the weights of a checkpoint: whatever would be in the way of copying it is found before any work."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rig import conversion

# Root, too, is to be stopped by a file's mode.
AS_ANYONE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


COMMANDS: dict[str, list[Any]] = {"cpu": ["cpu"], "gpu": ["gpu", "--quant-method", "RTN"], "merge": ["merge"]}
every_command = pytest.mark.parametrize("command", ["cpu", "merge"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cli: Any) -> Path:
    """A small checkpoint, and beside it its loose files."""
    model = conversion.checkpoint(tmp_path_factory.mktemp("plain") / "model", layers=1, hidden=256, width=256)
    cli("cpu", "-i", model, "-o", model.with_name("loose"), "--no-merge-safetensor")
    return model


@pytest.fixture
def source(tmp_path: Path, plain: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "in" / "model"))


def words_of(command: str, source: Path, plain: Path, out: Path) -> list[Any]:
    """Of a command that copies companions."""
    given = ["-i", plain.with_name("loose"), "-r", source] if command == "merge" else ["-i", source]
    return [*COMMANDS[command], *given, "-o", out]


@every_command
def test_names_of_ours_make_room_for_those_of_earlier_conversions(
    command: str, source: Path, plain: Path, tmp_path: Path, cli: Any
) -> None:
    texts = {"README.md": "card", "README.source.md": "card of the source", "sub/README.md": "another"}
    texts |= {"manifest.json": '{"mine": 1}', "manifest.source.json": '{"mine": 2}', "README.source.txt": "text"}
    for name, text in texts.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    cli(*words_of(command, source, plain, tmp_path / "out"))
    expected = {"README.source.md": "card", "README.source.source.md": "card of the source", "sub/README.md": "another"}
    expected |= {"manifest.source.json": '{"mine": 1}', "manifest.source.source.json": '{"mine": 2}'}
    expected["README.source.txt"] = "text"
    out = tmp_path / "out"
    assert {name: (out / name).read_text() for name in expected} == expected
    assert "# AMXINT4" in (out / "README.md").read_text() or "W8A16" in (out / "README.md").read_text()
    listed = [file["name"] for file in json.loads((out / "manifest.json").read_text())["files"]]
    assert len(set(listed)) == len(listed)
    cli("verify", out, "--no-load")


def text(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")


def link_out(source: Path, to: str = "secret.txt", name: str = "notes.txt") -> None:
    text(source.parent / to)
    if (source / name).exists():
        (source / name).rename(source.parent / to)
    (source / name).symlink_to(f"../{to}")


SPOILED: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (lambda source: (source / "tokenizer.json").chmod(0), ("tokenizer.json", "cannot be read (Permission denied)")),
    (link_out, ("notes.txt", "secret.txt, outside the checkpoint")),
    (lambda source: (source / "sub").mkdir(0), ("model/sub", "cannot be listed (Permission denied)")),
    (lambda source: text(source / "README.md" / "a.md"), ("README.md/a.md", "the output has a file named README.md")),
    (
        lambda s: text(s / "README.md", s / "README.source.md" / "a.md"),
        ("README.source.md/a.md", "the output has a file"),
    ),
    (lambda source: link_out(source, "config.json", "config.json"), ("model/config.json", "outside the checkpoint")),
    (lambda source: link_out(source, "blobs/secret"), ("notes.txt", "blobs/secret, outside the checkpoint")),
]


@pytest.mark.parametrize(
    ("command", "spoil", "words"),
    [("cpu", *row) for row in SPOILED] + [(command, *row) for command in ("gpu", "merge") for row in SPOILED[:2]],
)
def test_what_cannot_be_copied_is_refused_before_any_work(
    command: str, spoil: Callable[[Path], None], words: tuple[str, ...], source: Path, plain: Path, tmp_path: Path
) -> None:
    spoil(source)
    done = conversion.ktconvert(*words_of(command, source, plain, tmp_path / "out"), prefix=AS_ANYONE)
    conversion.check_refusal(done, 5, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    for path in source.iterdir():
        path.chmod(0o755)


@every_command
def test_links_within_the_checkpoint_and_to_the_cache_are_followed(
    command: str, source: Path, plain: Path, tmp_path: Path, cli: Any
) -> None:
    """Downloads into a folder were links to blobs of the Hugging Face cache, once; snapshots of it: test_source.py."""
    model = tmp_path / "cache" / "models--org--name"
    (model / "snapshots").mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "hash").write_text("words")
    (source / "vocab.txt").symlink_to(model / "blobs" / "hash")
    (source / "sub").mkdir()
    (source / "sub" / "same.json").symlink_to("../tokenizer.json")
    out = tmp_path / "out"
    cli(*words_of(command, source, plain, out))
    assert (out / "vocab.txt").read_text() == "words" and not (out / "vocab.txt").is_symlink()
    assert (out / "sub" / "same.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@every_command
def test_loose_weights_are_no_companions(command: str, source: Path, plain: Path, tmp_path: Path, cli: Any) -> None:
    for name in ("x.kt", "_layer_0/notes.txt", "sub/_layer_1/_numa_0/y.kt", "sub/z.KT", "old.kt/notes.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"old")
    out = tmp_path / "out"
    cli(*words_of(command, source, plain, out))
    assert not [path for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"old"]
    cli("verify", out, "--no-load")


STRAYS = ("_layer_0/_numa_0/INT4_up_0_3Byte_quant_.kt", "x.kt", "sub/_layer_0/notes.txt")


@pytest.mark.parametrize("command", ["cpu", "gpu"])
def test_verify_notices_loose_weights_in_a_merged_output(command: str, plain: Path, tmp_path: Path, cli: Any) -> None:
    """Whether they are listed in the manifest or not, or there is none."""
    out = tmp_path / "out"
    cli(*words_of(command, plain, plain, out))
    for stray in STRAYS:
        (out / stray).parent.mkdir(parents=True, exist_ok=True)
        (out / stray).write_bytes(b"old")
    document = json.loads((out / "manifest.json").read_text())
    listed = [{"name": stray, "size": 3, "sha256": hashlib.sha256(b"old").hexdigest()} for stray in STRAYS]
    for files in ([], listed, None) if command == "cpu" else ([], listed):  # one for the GPU is known by its manifest
        if files is None:
            (out / "manifest.json").unlink()
        else:
            (out / "manifest.json").write_text(json.dumps(document | {"files": document["files"] + files}))
        checks = json.loads(cli("verify", out, "--no-load", "--json", code=6).stdout)["checks"]
        problems = next(check["problems"] for check in checks if check["name"] == "files")
        assert sorted(text.split(" is a loose weight file")[0] for text in problems) == sorted(STRAYS)
