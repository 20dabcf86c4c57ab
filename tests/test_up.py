"""`ktconvert up`: from a model's name to a server that answers, through kills, and with one sentence for bad input."""

import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts import extras
from ktconvert.layouts.files.publish import MARK
from ktconvert.pipeline.cli.up import SETUP, read_setup
from ktconvert.pipeline.report.terminal import shorten_paths
from rig import conversion, gguf, killpoint
from rig.hub_server import COMMIT, Hub, serve_hub
from rig.safetensors import read_folder
from rig.served import start_command

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen3-moe-small"
NAME = "org/small"
MACHINE = ("--ram", "64GB", "--disk", "1TB", "--numa", "1", "--bandwidth", "20GB")
OPTIONS = (*MACHINE, "--vram", "0", "--prefer", "memory")


@pytest.fixture
def hub() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    with serve_hub({NAME: EXAMPLE}) as running:
        yield running


def up(model: object, folder: Path, *options: object, **more: Any) -> Any:
    return conversion.ktconvert("up", str(model), "-o", folder, *map(str, options), **more)


def require_server_packages() -> None:
    for package in ("transformers", "fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)


def ask(url: str) -> str:
    """Return the text of the server's answer to a chat request."""
    body = {"messages": [{"role": "user", "content": "def "}], "max_tokens": 4}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.loads(answer.read())["choices"][0]["message"]["content"]
    return text


def test_missing_packages_are_named_together(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = conversion.run_in_process("up", NAME, "-o", tmp_path / "server", *OPTIONS)
    message = str(result.exception)
    assert all(text in message for text in ("huggingface_hub, ", "fastapi", "[hub,serve]")), message


def test_a_killed_setup_continues_and_ends_with_a_server_that_answers(hub, tmp_path):
    """It is killed while it converts. With all steps finished, the next call only starts the server."""
    require_server_packages()
    caches = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", **caches}
    folder, weights = tmp_path / "server", tmp_path / "server" / "small-AMXINT4"
    begin = ("up", NAME, "-o", str(folder), *OPTIONS, "--yes")
    shim = killpoint.build(tmp_path)
    killed = killpoint.run([*conversion.KTCONVERT, *begin], weights, 20, shim, env=environment)
    assert killed.returncode == killpoint.KILLED, killed.stderr
    setup = read_setup(folder)
    assert setup is not None and setup.finished == 1 and not weights.exists()
    assert f"--revision {COMMIT} --stream" in setup.steps[1].command
    with start_command(tmp_path / "log", *begin, **environment) as (_, url):
        assert ask(url)
        hub.requests.clear()
        port = url.rpartition(":")[2]
        done = up(NAME, folder, "--port", port, env=environment)
    conversion.check_refusal(done, 1, f"127.0.0.1:{port}: cannot listen")
    assert hub.requests == [] and done.stdout.count("(finished)") == 3


def test_a_gguf_is_served_with_the_other_tensors_of_the_original(hub, tmp_path):
    """Both are downloaded; of the original, only the tensors that are no experts."""
    require_server_packages()
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    hub.models["org/gguf"] = tmp_path / "gguf"
    for name, metadata, tensors in gguf.split(*gguf.quantize_example(EXAMPLE), count=2):
        gguf.write(tmp_path / "gguf" / name, tensors, metadata)
    model = "org/gguf:m-00001-of-00002.gguf"
    begin = ("up", model, "--config", NAME, "-o", str(tmp_path / "server"), *OPTIONS, "--yes")
    with start_command(tmp_path / "log", *begin, **environment) as (_, url):
        assert ask(url)
    setup = read_setup(tmp_path / "server")
    assert setup is not None
    assert [step.name for step in setup.steps] == ["download", "download the rest", "convert", "verify", "launch"]
    assert setup.steps[1].command == f"ktconvert fetch {NAME} -o small-rest --revision {COMMIT}"
    assert (tmp_path / "server" / "m-00001-of-00002-AMXINT4" / "tokenizer.json").exists()
    assert not any(".experts." in name for name in read_folder(tmp_path / "server" / "small-rest"))


def fit(*options: object, env: dict[str, str]) -> Any:
    done = conversion.ktconvert("fit", *map(str, options), "--json", env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_printed_commands_run_as_printed(hub, tmp_path):
    """With less memory, all of the original is downloaded, since a GPU must compute its experts."""
    hub.models["org/gguf"] = tmp_path / "gguf"
    for name, metadata, tensors in gguf.split(*gguf.quantize_example(EXAMPLE), count=2):
        gguf.write(tmp_path / "gguf" / name, tensors, metadata)
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    model = ("org/gguf:m-00001-of-00002.gguf", "--config", NAME)
    large = fit(*model, *OPTIONS, env=environment)
    ram = fit(*model, *MACHINE, "--vram", "24GB", env=environment)["choices"][0]["ram"] - 1
    small = fit(*model, *MACHINE, "--vram", "24GB", "--ram", ram, env=environment)
    steps = {step["step"]: step["command"] for step in large["commands"] + small["commands"]}
    del steps["launch"]
    assert [*steps] == ["download", "download the rest", "convert", "verify", "download the original"]
    shell = os.environ | environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in steps.values():
        if command.startswith("ktconvert "):
            done = conversion.ktconvert(*shlex.split(command)[1:], cwd=tmp_path, env=environment)
        else:
            done = subprocess.run(command, shell=True, cwd=tmp_path, env=shell, capture_output=True, text=True)
        assert done.returncode == 0, command + done.stderr
    downloaded = {path.name: path.read_bytes() for path in (tmp_path / "small-original").iterdir() if path.is_file()}
    assert downloaded == {path.name: path.read_bytes() for path in EXAMPLE.iterdir()}


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path):
    done = up(EXAMPLE, tmp_path / "server", *OPTIONS, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"directory: {tmp_path / 'server'}" in done.stdout
    assert all(f"# {step}\n" in done.stdout for step in ("convert", "verify", "launch"))
    assert [*tmp_path.iterdir()] == []


def test_steps_run_again_from_the_first_one_whose_output_was_removed(tmp_path):
    require_server_packages()
    folder, log = tmp_path / "server", tmp_path / "log"
    begin = ("up", str(EXAMPLE), "-o", str(folder))
    weights = folder / "qwen3-moe-small-AMXINT4"
    with start_command(log, *begin, *OPTIONS, "--yes"):
        before = conversion.tree(weights)
    shutil.rmtree(weights)
    with start_command(log, *begin):
        assert "(finished)" not in log.read_text()
        assert conversion.tree(weights).keys() == before.keys()


def test_a_used_port_is_reported_before_any_step(tmp_path):
    require_server_packages()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = up(EXAMPLE, tmp_path / "server", *OPTIONS, "--yes", "--port", port)
    conversion.check_refusal(
        done, 1, f"127.0.0.1:{port}: cannot listen (Address already in use); choose a different --port"
    )
    assert not (tmp_path / "server").exists()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang would start")
def test_the_command_of_the_launch_is_printed_without_sglang(tmp_path):
    options = (*MACHINE, "--vram", "24GB", "--runtime", "sglang", "--yes", "--port", 1234)
    done = up(EXAMPLE, tmp_path / "a b", *options)
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1:1234/v1/chat/completions" in done.stdout
    *_, change, command = done.stdout.splitlines()
    assert shlex.split(change) == ["cd", str(tmp_path / "a b")]
    assert command.startswith("python -m sglang.launch_server --model ") and command.endswith(" --port 1234")


RECORDER = """import json, os, sys
print(json.dumps({"words": sys.argv[1:], "folder": os.getcwd()}))
"""


def test_an_installed_sglang_takes_over_the_process(tmp_path):
    """It starts in the setup's directory with the outputs of the steps before. A stand-in prints what it was given."""
    program = tmp_path / "packages" / "sglang" / "launch_server.py"
    program.parent.mkdir(parents=True)
    program.write_text(RECORDER)
    (program.parent / "__init__.py").touch()
    options = (*MACHINE, "--vram", "24GB", "--runtime", "sglang", "--yes", "--port", 1234)
    done = up(EXAMPLE, tmp_path / "server", *options, env={"PYTHONPATH": str(program.parents[1])})
    assert done.returncode == 0, done.stderr
    given = json.loads(done.stdout.splitlines()[-1])
    values = dict(zip(given["words"], given["words"][1:], strict=False))
    assert Path(given["folder"]) == tmp_path / "server" and values["--port"] == "1234"
    setup = read_setup(tmp_path / "server")
    assert setup is not None and setup.finished == len(setup.steps) - 1
    for name in ("--model", "--kt-weight-path"):
        assert any((tmp_path / "server" / values[name]).glob("*.safetensors")), name


def test_nothing_starts_without_an_answer(tmp_path):
    done = up(EXAMPLE, tmp_path / "server", *OPTIONS, input="n\n")
    conversion.check_refusal(done, 2, "nothing was started; answer y, or give --yes")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("model", "options", "code", "text"),
    [
        (EXAMPLE, ("--ram", "100MB"), 4, "nothing fits"),
        (EXAMPLE, ("--runtime", "sglang"), 2, "needs a GPU"),
        ("absent", (), 5, "absent: does not exist; check the path"),
        ("model.gguf", (), 2, "a GGUF has only the experts in usable form; give the model that it was made from"),
        ("model.gguf", ("--config", "empty"), 5, "has no config.json"),
        ("model.gguf", ("--config", "bare"), 5, "bare: "),
        (EXAMPLE / "model.safetensors", (), 5, f"is a file, not a model; give the directory {EXAMPLE}."),
        (EXAMPLE, ("--config", EXAMPLE), 2, "whose own config.json counts; leave it out"),
    ],
)
def test_what_cannot_be_served_is_explained(model, options, code, text, tmp_path):
    gguf.write(tmp_path / "model.gguf", *gguf.quantize_example(EXAMPLE))
    for folder in ("empty", "bare"):
        (tmp_path / folder).mkdir()
    shutil.copy(EXAMPLE / "config.json", tmp_path / "bare")
    done = up(model, tmp_path / "server", *OPTIONS, "--yes", *options, cwd=tmp_path)
    conversion.check_refusal(done, code, text)
    assert "note: " not in done.stderr  # which would repeat the error
    assert not (tmp_path / "server").exists()


def test_a_file_as_the_output_is_refused(tmp_path):
    (tmp_path / "file").write_text("text")
    for options in (("--yes",), ("--dry-run",)):
        done = up(EXAMPLE, tmp_path / "file", *OPTIONS, *options)
        conversion.check_refusal(done, 7, f"{tmp_path / 'file'} is a file or a broken link; give a directory")


def test_a_directory_with_other_files_is_refused(tmp_path, packed_example):
    folder = packed_example("int8")
    before = sorted(folder.iterdir())
    refused = up(EXAMPLE, folder, *OPTIONS, "--yes")
    conversion.check_refusal(refused, 7, "has files, but none of an earlier `up`; give a new or empty --output")
    assert sorted(folder.iterdir()) == before


def test_a_begun_setup_refuses_other_options_and_a_damaged_file(tmp_path):
    folder = tmp_path / "server"
    (folder / "small-AMXINT4").mkdir(parents=True)
    (folder / "small-AMXINT4" / "other").touch()
    values = {"model": str(EXAMPLE), "prefer": "speed"}
    steps = [
        ["convert", f"ktconvert cpu -i {EXAMPLE} -o small-AMXINT4", "small-AMXINT4"],
        ["launch", "ktconvert serve x"],
    ]
    (folder / SETUP).write_text(json.dumps({"options": values, "steps": steps, "mark": MARK}))
    changed = up(EXAMPLE, folder, "--prefer", "memory", "--ram", "1TB")
    conversion.check_refusal(changed, 7, "was begun with no --ram, --prefer speed; give the same values")
    conversion.check_refusal(up(tmp_path, folder), 7, f"was begun with MODEL {shorten_paths(str(EXAMPLE))}; give")
    conversion.check_refusal(up(EXAMPLE, folder), 7, "small-AMXINT4")
    (folder / SETUP).write_text('{"options": {}, "steps": [["launch", "rm -r x"]]}')
    conversion.check_refusal(up(EXAMPLE, folder), 7, "cannot be read (its steps are not those of this version)")
