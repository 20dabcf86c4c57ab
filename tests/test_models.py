"""ktconvert models: the list of local models, and comparison and repair of a checkpoint with a hub."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ktconvert.layouts.errors import InputError, UsageError, VerificationError
from ktconvert.layouts.sources.hub_files import HubFile, select_files
from rig import gguf
from rig.conversion import flip_bit, run_in_process
from rig.hub_server import COMMIT, Hub, serve_hub
from rig.safetensors import write_file

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands" / "models.md"
WEIGHTS = "model.safetensors"


@pytest.fixture
def models(tmp_path: Path, cli: Any) -> Any:
    """Return a function that runs `ktconvert models` with a cache of its own, tmp_path/cache."""

    def run(*arguments: object, hub: Hub | None = None, code: int = 0) -> Any:
        env = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
        return cli("models", *arguments, code=code, env={**env, "HF_ENDPOINT": hub.url if hub else ""})

    return run


@pytest.fixture(scope="module")
def hub(example: Path) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    with serve_hub({"org/tiny": example}) as server:
        yield server


def cache_snapshot(source: Path, cache: Path, name: str = "org/tiny", commit: str = COMMIT) -> Path:
    """Write a snapshot as huggingface_hub does, whose files are links to blobs; return its directory."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copyfile(file, repository / "blobs" / f"{commit}-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/{commit}-{file.name}")
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def list_states(printed: str, root: Path) -> dict[str, tuple[str, str, str, str]]:
    """Return name (without the root) -> kind, method, state and detail."""
    return {
        model["name"].removeprefix(f"{root}/"): (model["kind"], model["method"], model["state"], model["detail"])
        for model in json.loads(printed)["models"]
    }


def copy_files(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def test_list_has_kind_method_size_and_state(
    tmp_path: Path, cli: Any, models: Any, example: Path, packed_example: Any
) -> None:
    folder = tmp_path / "models"
    copy_files(example, folder / "tiny")
    copy_files(packed_example("int8"), folder / "tiny-INT8")
    cli("cpu", "-i", example, "-o", folder / "tiny-MXFP4", "--quant-method", "mxfp4", "--part", "0/2")
    cli("dequantize", example, folder / "tiny-BF16")
    copy_files(example, folder / "partial")
    (folder / "partial" / WEIGHTS).rename(folder / "partial" / "model-00001-of-00004.safetensors")
    (folder / "gguf").mkdir()
    gguf.write(folder / "a.gguf", gguf.model([("Q4_K",) * 3]), gguf.model_metadata(1))
    shutil.copyfile(folder / "a.gguf", folder / "gguf" / "b-00001-of-00003.gguf")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    write_file(folder / "adapter" / "adapter_model.safetensors", {})
    (folder / "notes").mkdir()
    (folder / "notes" / "manifest.json").write_text('{"name": "an extension of a browser"}')
    cache_snapshot(example, tmp_path / "cache", commit="1" * 40)
    cache_snapshot(example, tmp_path / "cache")

    assert list_states(models(folder, "--json").stdout, folder) == {
        f"org/tiny@{'1' * 12}": ("checkpoint", "BF16", "complete", ""),
        "org/tiny": ("checkpoint", "BF16", "complete", ""),
        "a.gguf": ("checkpoint", "Q4_K", "complete", ""),
        "adapter": ("adapter", "LoRA, rank 4", "complete", ""),
        "gguf/b-00001-of-00003.gguf": ("checkpoint", "", "incomplete", "2 files missing: b-00002-of-00003.gguf, ..."),
        "partial": ("checkpoint", "", "incomplete", "3 files missing: model-00002-of-00004.safetensors, ..."),
        "tiny": ("checkpoint", "BF16", "complete", ""),
        "tiny-BF16": ("dequantize", "BF16", "complete", ""),
        "tiny-INT8": ("cpu", "AMXINT8", "complete", ""),
        "tiny-MXFP4": ("cpu", "MXFP4", "unfinished", "1 of 2"),
    }
    listed = json.loads(models(folder / "tiny", "--json").stdout)["models"]  # the folder itself is a model
    assert listed[-1]["path"] == str(folder / "tiny")
    assert listed[-1]["bytes"] == sum(file.stat().st_size for file in example.iterdir())
    lines = models(folder).stdout.replace(str(folder), "/models").splitlines()
    shown = PAGE.read_text().partition("```text\n")[2].partition("```")[0].splitlines()
    assert [line.split() for line in shown] == [line.split() for line in lines if "@" not in line]


def test_damaged_models_are_listed_as_such(tmp_path: Path, models: Any, example: Path, packed_example: Any) -> None:
    folder = tmp_path / "models"
    output = packed_example("int8")
    for name, source in (("cut", example), ("config", example), ("index", example), ("manifest", output)):
        copy_files(source, folder / name)
    for name in ("lost", "short", "edited", "plan.work", "journal.work"):
        copy_files(output, folder / name)
    os.truncate(folder / "cut" / WEIGHTS, 1000)
    (folder / "gguf").mkdir()
    (folder / "gguf" / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (folder / "config" / "config.json").write_bytes(b"\xff{")
    (folder / "index" / "model.safetensors.index.json").write_text('{"weight_map": [[[')
    (folder / "index" / WEIGHTS).unlink()
    copy_files(example, folder / "no index")
    (folder / "no index" / WEIGHTS).rename(folder / "no index" / "model-00001-of-00001.safetensors")
    (folder / "manifest" / "manifest.json").write_text("{")
    shard = next((folder / "lost").glob("*.safetensors"))
    shard.unlink()
    os.truncate(folder / "short" / shard.name, 1000)
    text = (folder / "edited" / "manifest.json").read_text()
    (folder / "edited" / "manifest.json").write_text(text.replace("AMXINT8", "AMXINT4"))
    for name in ("plan", "journal"):
        (folder / f"{name}.work" / f"{name}.json").write_text("[]")
    (folder / "loop").symlink_to("loop")
    (folder / "a\nname").mkdir()
    (folder / "a\nname" / WEIGHTS).write_bytes(b"\x00" * 20)
    snapshot = cache_snapshot(example, tmp_path / "cache")
    (snapshot / WEIGHTS).resolve().unlink()
    (tmp_path / "cache" / "models--org--begun" / "blobs").mkdir(parents=True)

    states = list_states(models(folder, "--json").stdout, folder)
    assert {name: state for name, (_, _, state, _) in states.items() if name != "journal.work"} == {
        "org/begun": "incomplete",
        "org/tiny": "incomplete",
        "a\nname": "incomplete",
        **dict.fromkeys(("cut", "config", "index", "manifest", "short", "edited", "plan", "gguf/cut.gguf"), "damaged"),
        **dict.fromkeys(("lost", "no index"), "incomplete"),
    }
    assert states["no index"][3] == "1 file missing: model.safetensors.index.json"
    assert states["org/tiny"][3] == f"1 file missing: {WEIGHTS}"
    assert states["lost"][3] == f"1 file missing: {shard.name}"
    assert states["edited"][3].startswith("manifest.json ") and states["short"][3].startswith(shard.name)
    assert len(models(folder).stdout.splitlines()) == 1 + len(states)  # one line each


def test_checkpoints_with_wrong_experts_are_listed_as_such(tmp_path: Path, models: Any, example: Path) -> None:
    tensors = load_file(example / WEIGHTS)
    name = next(name for name in tensors if name.endswith("experts.3.down_proj.weight"))
    for folder, tensor in (("lacking", None), ("cut", tensors.pop(name)[:-8])):
        copy_files(example, tmp_path / "models" / folder)
        save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "models" / folder / WEIGHTS)

    states = list_states(models(tmp_path / "models", "--json").stdout, tmp_path / "models")
    assert {folder: state for folder, (_, _, state, _) in states.items()} == {"lacking": "incomplete", "cut": "damaged"}
    assert states["lacking"][3].startswith(f"tensor '{name}' is missing")
    assert states["cut"][3].startswith(f"{WEIGHTS}: tensor '{name}' has shape ")


def test_a_loose_file_hides_no_models(tmp_path: Path, models: Any, packed_example: Any) -> None:
    copy_files(packed_example("int8"), tmp_path / "int8")
    write_file(tmp_path / "mask.safetensors", {})
    states = list_states(models(tmp_path, "--json").stdout, tmp_path)
    assert states == {"int8": ("cpu", "AMXINT8", "complete", "")}


@pytest.mark.parametrize("has_counts", [True, False])
def test_statistics_are_named_as_such(has_counts: bool, tmp_path: Path, models: Any, cli: Any) -> None:
    """--save-statistics writes a folder without a manifest, and without a config."""
    folder = tmp_path / "statistics"
    folder.mkdir()
    (folder / "statistics.json").write_text("{}")
    (folder / "imatrix.gguf").touch()
    if has_counts:
        write_file(folder / "counts.safetensors", {"counts": ("I64", np.ones((2, 8), np.int64))})
    (listed,) = json.loads(models(folder, "--json").stdout)["models"]
    assert (listed["kind"], listed["state"]) == ("statistics", "complete" if has_counts else "damaged")
    for command in ("inspect", "verify"):
        message = cli(command, folder, code=5).stderr
        assert f"{folder}: contains statistics of a model's experts, but no weights; use it with" in message


def test_empty_folders_have_no_models(tmp_path: Path, models: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert models(tmp_path / "empty").stdout == f"no models in {tmp_path / 'cache'} and {tmp_path / 'empty'}\n"
    assert json.loads(models(tmp_path / "empty", "--json").stdout)["models"] == []
    models(tmp_path / "absent", code=InputError.exit_code)


def test_check_finds_a_flipped_bit_and_repairs_it(tmp_path: Path, models: Any, example: Path, hub: Hub) -> None:
    folder = copy_files(example, tmp_path / "model")
    arguments = ("--check", folder, "--against", "org/tiny")
    assert f"5 files (8.9 MiB) equal those of org/tiny@{COMMIT}" in models(*arguments, hub=hub).stdout
    flip_bit(folder / WEIGHTS)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("2", "3"))
    (folder / "tokenizer.json").unlink()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    found = models(*arguments, hub=hub, code=VerificationError.exit_code)
    assert found.stdout.splitlines() == [
        "config.json has the right size, but different bytes",
        f"{WEIGHTS} has the right size, but different bytes",
        "tokenizer.json is missing",
    ]
    assert "3 damaged or missing files of 5; run the command again with --repair" in found.stderr
    document = json.loads(models(*arguments, "--json", hub=hub, code=VerificationError.exit_code).stdout)
    assert [entry["file"] for entry in document["bad"]] == ["config.json", WEIGHTS, "tokenizer.json"]
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert "tokenizer.json was downloaded again" in models(*arguments, "--repair", hub=hub).stdout
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in example.iterdir()
    }
    unharmed = {"generation_config.json", "tokenizer_config.json"}
    assert {name for name, time in before.items() if (folder / name).stat().st_mtime_ns == time} == unharmed


def test_repair_in_the_cache_keeps_links(tmp_path: Path, models: Any, example: Path, hub: Hub) -> None:
    snapshot = cache_snapshot(example, tmp_path / "cache")
    (snapshot / "tokenizer.json").resolve().unlink()
    flip_bit((snapshot / WEIGHTS).resolve())
    models("--check", "org/tiny", hub=hub, code=VerificationError.exit_code)
    models("--check", "org/tiny", "--repair", hub=hub)
    assert all(file.is_symlink() for file in snapshot.iterdir())
    assert all((snapshot / file.name).read_bytes() == file.read_bytes() for file in example.iterdir())
    assert len([*snapshot.parents[1].rglob("*")]) == 4 + 2 * len([*example.iterdir()]) + 1  # nothing else is left


def test_repair_with_a_damaged_download_keeps_the_old_file(
    tmp_path: Path, models: Any, example: Path, hub: Hub
) -> None:
    folder = copy_files(example, tmp_path / "model")
    flip_bit(folder / WEIGHTS)
    old = (folder / WEIGHTS).read_bytes()
    hub.flipped.add(WEIGHTS)
    try:
        arguments = ("--check", folder, "--against", "org/tiny", "--repair")
        failed = models(*arguments, hub=hub, code=InputError.exit_code)
    finally:
        hub.flipped.clear()
    assert f"{folder / WEIGHTS}: its download has the right size, but different bytes" in failed.stderr
    assert (folder / WEIGHTS).read_bytes() == old
    assert {file.name for file in folder.iterdir()} == {file.name for file in example.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--repair"], UsageError, "--repair is only for --check"),
        (["--check", "{folder}"], UsageError, "add its hub id, as in --against org/name"),
        (["--check", "org/tiny", "--against", "org/tiny"], UsageError, "only for a directory"),
        (["{folder}", "--check", "org/tiny"], UsageError, "--check takes no FOLDERS"),
        (["--check", "org/tiny"], InputError, "not in the local cache"),
        (["--check", "{folder}/absent"], InputError, "does not exist; check the path"),
        (["--check", "{output}/README.md"], InputError, "is a file, not a model; give the directory "),
        (["--check", "{folder}", "--against", "{output}"], UsageError, "not a hub id; give that of the model"),
        (["--check", "{output}"], UsageError, "an output of ktconvert; check it with `ktconvert verify "),
    ],
)
def test_refusals_say_what_to_do(
    arguments: list[str],
    error: Any,
    message: str,
    tmp_path: Path,
    packed_example: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    words = (word.format(folder=tmp_path, output=packed_example("int8")) for word in arguments)
    exception = run_in_process("models", *words).exception
    assert isinstance(exception, error) and message in str(exception)


def test_refusals_of_the_hub_are_explained(tmp_path: Path, models: Any, hub: Hub) -> None:
    def refuse(*arguments: str) -> str:
        return models("--check", tmp_path, "--against", *arguments, hub=hub, code=InputError.exit_code).stderr  # type: ignore[no-any-return]

    assert "org/absent: neither a local path nor a public model of the hub" in refuse("org/absent")
    assert "org/tiny: has no revision old" in refuse("org/tiny", "--revision", "old")


@pytest.mark.parametrize(
    ("present", "selected"),
    [
        ([], ["config.json", "model-1.safetensors", "model-2.safetensors"]),
        (["README.md"], ["README.md", "config.json", "model-1.safetensors", "model-2.safetensors"]),
        (
            ["model-1.safetensors", "original/weights.safetensors"],
            ["config.json", "model-1.safetensors", "model-2.safetensors", "original/weights.safetensors"],
        ),
        (["Q4/a-00002-of-00002.gguf"], ["Q4/a-00001-of-00002.gguf", "Q4/a-00002-of-00002.gguf"]),
    ],
)
def test_only_needed_and_present_files_are_compared(present: list[str], selected: list[str], tmp_path: Path) -> None:
    names = ["README.md", "consolidated.safetensors", "config.json", "model-1.safetensors", "model-2.safetensors"]
    names += ["original/weights.safetensors", "Q4/a-00001-of-00002.gguf", "Q4/a-00002-of-00002.gguf", "Q8.gguf"]
    for name in present:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = [HubFile(name, 0, "", is_blob=False) for name in names]
    assert sorted(file.name for file in select_files(tmp_path, files)) == selected
