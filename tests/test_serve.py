"""ktconvert serve: transformers' OpenAI-compatible server answers with the converted experts."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from ktconvert.layouts.errors import InputError
from ktconvert.pipeline.models import generate
from ktconvert.pipeline.models.generate import Choice
from ktconvert.pipeline.models.serving import server
from rig.served import PATIENCE, free_port, started

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

CHAT = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any], example: Path) -> Path:
    out = tmp_path_factory.mktemp("serve") / "int8"
    cli("cpu", "-i", example, "-o", out, "--quant-method", "int8", "--threadpool-count", 1)
    return out


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """A server in a process of its own; SIGINT must end it."""
    with started(model, log, *options) as (process, url):
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def answering(example: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(example, tmp_path_factory.mktemp("log") / "server", "--cpu-weights", str(weights)) as url:
        yield url


def post(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text


def test_a_chat_completion_streamed_and_not(answering: str, example: Path) -> None:
    whole = json.loads(post(f"{answering}/v1/chat/completions", CHAT))
    text = whole["choices"][0]["message"]["content"]
    assert whole["object"] == "chat.completion"
    assert whole["model"] == str(example)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == CHAT["max_tokens"]
    assert whole["usage"]["prompt_tokens"] == 3  # "import", " os" and the newline of the plainest template
    assert text
    stream = post(f"{answering}/v1/chat/completions", {**CHAT, "model": str(example), "stream": True})
    pieces = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert len([d for d in deltas if d.get("content")]) > 1
    assert "".join(d.get("content") or "" for d in deltas) == text
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_two_clients_at_once(answering: str) -> None:
    with ThreadPoolExecutor(2) as clients:
        answers = list(clients.map(lambda _: post(f"{answering}/v1/chat/completions", CHAT), range(4)))
    assert len({json.loads(answer)["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_the_server_is_for_one_model(answering: str, example: Path) -> None:
    with urllib.request.urlopen(f"{answering}/v1/models") as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == [str(example)]
    with pytest.raises(HTTPError) as refused:
        post(f"{answering}/v1/chat/completions", {**CHAT, "model": "another/model"})
    assert refused.value.code == 404


def test_without_another_model(cli: Callable[..., Any], example: Path, tmp_path: Path) -> None:
    """A checkpoint by itself, and what is a whole model without it: the same numbers, so the same words."""
    whole = tmp_path / "whole"
    cli("cpu", "-i", example, "-o", whole, "--quant-method", "bf16", "--threadpool-count", 1, "--non-experts", "keep")
    card = (whole / "README.md").read_text()
    assert "ktconvert serve /path/to/this/folder\n" in card and "--cpu-weights" not in card

    def answer(model: Path) -> str:
        with serving(model, tmp_path / f"{model.name}.log") as url:
            text: str = json.loads(post(f"{url}/v1/chat/completions", CHAT))["choices"][0]["message"]["content"]
        assert "transformers computes" not in (tmp_path / f"{model.name}.log").read_text()
        return text

    with ThreadPoolExecutor(2) as servers:
        first, second = servers.map(answer, (example, whole))
    assert first and first == second


def test_a_port_that_is_taken(cli: Callable[..., Any], example: Path, weights: Path) -> None:
    """Reported at once, not after minutes of loading."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("serve", example, "--cpu-weights", weights, "--port", port, code=1)
    assert done.stderr == (
        f"ktconvert: 127.0.0.1:{port}: cannot listen there (Address already in use); choose --host and --port\n"
    )


def test_weights_that_do_not_fit(cli: Callable[..., Any], example: Path, tmp_path: Path) -> None:
    done = cli("serve", example, "--cpu-weights", tmp_path / "nowhere", "--port", free_port(), code=3)
    assert done.stderr.splitlines()[-1].startswith(f"ktconvert: {tmp_path / 'nowhere'}: is no directory")


@pytest.mark.parametrize("lacks", ["tokenizer", "tensor"])
def test_a_model_of_which_a_part_is_missing(lacks: str, example: Path, tmp_path: Path) -> None:
    """Refused as `run` does: texts are not called empty, and weights are not made up."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(example, tmp_path / "model")
    if lacks == "tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
        wanted = "has no tokenizer; put its files (tokenizer.json) beside config.json"
    else:
        tensors = load_file(model / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        wanted = "lacks 1 tensors of its model, such as model.norm.weight; download it again"
    choice = Choice(str(model), cpu_weights=model, threads=1)
    for load in (server.load, generate.load):
        with pytest.raises(InputError) as refused:
            load(choice)
        assert str(refused.value) == f"{model}: {wanted}"
