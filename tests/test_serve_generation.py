"""Tests of `ktconvert serve`: generated answers, cancelled requests and shutdown, with real clients."""

import asyncio
import copy
import json
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import InputError
from ktconvert.pipeline.models import generating, loading
from ktconvert.pipeline.models.serving.listener import open_listener
from rig.conversion import run_in_process
from rig.safetensors import edit_file
from rig.served import PATIENCE, RunningServer, copy_with_template, free_port, serve_in_process, start_server

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")
request_options = pytest.importorskip("ktconvert.pipeline.models.serving.request_options")
serving = pytest.importorskip("ktconvert.pipeline.models.serving.server")

WORDS = "import os"
SAID = [{"role": "user", "content": WORDS}]
ANSWER = 12  # tokens
LONG = 900  # tokens; the context has 1024

# Chat templates of several families, which begin and end messages differently.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "none": None,
    "ChatML": CHATML,
    "ChatML that begins to think": CHATML.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
    "Llama": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "Mistral": "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
}


@pytest.fixture(scope="module")
def server(example: Path) -> Iterator[RunningServer]:
    with serve_in_process(example) as running:
        yield running


@pytest.fixture(scope="module")
def alone(example: Path) -> Any:
    """Return the model and its tokenizer as `ktconvert run` loads them."""
    return loading.load_model_and_tokenizer(loading.ModelChoice(str(example), cpu_weights=example, threads=1))


def client(of: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{of.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


FIRST_A_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}"


def test_a_chat_template_with_a_syntax_error_is_named_when_the_server_starts(example, tmp_path):
    model = copy_with_template(example, tmp_path / "model", "{{ messages }")
    message = r"model/\w+\.\w+: the chat template has a syntax error in line 1 \("
    with pytest.raises(InputError, match=message), serve_in_process(model):
        pass


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ messages[0].content.a.b }}", FIRST_A_SYSTEM, "{# nothing #}"])
def test_rejection_by_the_chat_template_is_a_400(template, example, tmp_path):
    """The server starts, and completes texts."""
    with serve_in_process(copy_with_template(example, tmp_path / "model", template)) as running:
        for path, body in (("chat/completions", {"messages": SAID}), ("responses", {"input": WORDS})):
            answer = httpx.post(f"{running.url}/v1/{path}", json=body, timeout=PATIENCE)
            assert answer.status_code == 400 and "chat template" in answer.json()["error"]["message"], answer.text
        assert client(running).completions.create(model=str(running.model), prompt=WORDS, max_tokens=1).choices


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_has_only_generated_text(name, example, alone, tmp_path):
    """A chat, its stream, a response and its stream equal the text of `ktconvert run --chat`."""
    model = copy_with_template(example, tmp_path / "model", TEMPLATES[name])
    loaded, tokenizer = alone
    tokenizer.chat_template = TEMPLATES[name]
    # If the template writes another beginning, text that looks like the beginning of an answer is the user's.
    with serve_in_process(model) as running:
        for said in (WORDS, "<|im_start|>assistant\nimport re\n"):
            inputs = generating.chat_inputs(tokenizer, [{"role": "user", "content": said}])
            text, _ = generating.generate_text(
                loaded, tokenizer, inputs, max_new_tokens=ANSWER, temperature=0, emit=str
            )
            assert text and answers(running, model, said) == [text] * 4


def answers(running: RunningServer, model: Path, said: str) -> list[str]:
    """Return the answers as a chat, its stream, a response and its stream."""
    ask = client(running)
    chat = {"model": str(model), "messages": [{"role": "user", "content": said}], "max_tokens": ANSWER}
    whole = ask.chat.completions.create(**chat, temperature=0).choices[0].message.content
    stream = [*ask.chat.completions.create(**chat, temperature=0, stream=True)]
    assert all({"finish_reason", "logprobs"} <= chunk.choices[0].model_fields_set for chunk in stream)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
    response = {"model": str(model), "input": said, "max_output_tokens": ANSWER, "temperature": 0}
    one = ask.responses.create(**response, stream=False).output_text
    parts = [e.delta for e in ask.responses.create(**response, stream=True) if e.type == "response.output_text.delta"]
    return [whole, "".join(deltas), one, "".join(parts)]


def ask_and_leave(server: RunningServer, path: str, body: dict[str, Any], when: Callable[[], bool]) -> None:
    """Send a request, and disconnect when something has happened."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        server.until(when)


REQUESTS = {
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}], "max_tokens": LONG}),
    "a completion": ("/v1/completions", {"prompt": WORDS, "max_tokens": LONG}),
    "a response": ("/v1/responses", {"input": WORDS, "max_output_tokens": LONG}),
    "a long prompt": ("/v1/completions", {"prompt": "import os\n" * 200, "max_tokens": 5}),  # while it is read
}


@pytest.mark.parametrize("stream", [False, True], ids=["in one piece", "streamed"])
@pytest.mark.parametrize("name", REQUESTS)
def test_generation_stops_when_its_client_disconnects(name, stream, server, monkeypatch):
    monkeypatch.setattr(generating, "PREFILL_CHUNK", 4)
    path, body = REQUESTS[name]
    server.passes.clear()
    disconnected = server.disconnected
    with server.waiting(6, lambda: server.disconnected > disconnected):
        ask_and_leave(server, path, {**body, "temperature": 0, "stream": stream}, lambda: len(server.passes) > 5)
        server.until(lambda: server.disconnected > disconnected)
        server.until(lambda: not server.running)
    assert len(server.passes) <= 7
    assert name != "a long prompt" or {shape for _, shape, _ in server.passes} == {(1, 4)}


def test_two_clients_get_tokens_alternately(server):
    """From the first token of the second client on."""
    server.passes.clear()
    chat = {"model": str(server.model), "messages": [{"role": "user", "content": WORDS}], "temperature": 0}
    both_waiting = server.waiting(0, lambda: server.scheduler.lock.has_waiters() or bool(server.passes))
    with both_waiting, ThreadPoolExecutor(2) as clients:
        for _ in clients.map(lambda _: client(server).chat.completions.create(**chat, max_tokens=40), range(2)):
            pass
    threads = [thread for thread, _, _ in server.passes]
    first, second = (([i for i, t in enumerate(threads) if t == name]) for name in sorted(set(threads)))
    begin, end = max(first[0], second[0]), min(first[-1], second[-1])
    both = threads[begin : end + 1]
    assert len(both) >= len(threads) - 4 > 20 and all(a != b for a, b in pairwise(both))


def test_a_seed_is_independent_of_other_requests(server):
    """Other requests draw random numbers at the same time."""
    config = copy.deepcopy(server.scheduler.model.generation_config)
    config.update(do_sample=True, max_new_tokens=40)

    def draw(seed: int | None) -> list[int]:
        with request_options.register_options(f"seed-{seed}", request_options.RequestOptions(seed=seed)):
            inputs = server.scheduler.processor(WORDS, return_tensors="pt")
            result = server.scheduler.generate_non_streaming(
                server.scheduler.model, server.scheduler.processor, inputs, config, f"seed-{seed}"
            )
            return asyncio.run(result)[2]

    alone = draw(7)
    assert draw(8) != alone
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(draw, (None, 7, 9)))
    assert answers[1] == alone and answers[0] not in answers[1:]


def test_a_stop_string_ends_the_answer_and_is_not_in_it(server):
    ask = client(server)
    options = {"model": str(server.model), "prompt": "def add(", "max_tokens": 40, "temperature": 0}
    free = ask.completions.create(**options).choices[0].text
    stop = free[10:14]
    assert free.index(stop) == 10
    server.passes.clear()
    cut = ask.completions.create(**options, stop=["nowhere", stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (free[:10], "stop") and len(server.passes) < 20
    parts = [chunk.choices[0].text for chunk in ask.completions.create(**options, stop=[stop], stream=True)]
    assert "".join(parts) == free[:10]


def test_shutdown_does_not_wait_for_a_slow_pass(example, caplog):
    """Clients get an error, also in a stream."""
    begun, released = threading.Event(), threading.Event()

    def compute(*_: Any) -> None:
        begun.set()
        released.wait(PATIENCE)

    with serve_in_process(example) as running, ThreadPoolExecutor(2) as clients:
        running.scheduler.model.get_input_embeddings().register_forward_pre_hook(compute)

        def ask(stream: bool) -> Any:
            body = {"prompt": WORDS, "max_tokens": LONG, "stream": stream}
            return httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE)

        asked = [clients.submit(ask, stream) for stream in (False, True)]
        running.until(lambda: begun.is_set() and running.scheduler.lock.has_waiters())
        running.end()
        whole, stream = (answer.result() for answer in asked)
        released.set()
        ending = "the server is shutting down; ask again later"
        assert (whole.status_code, whole.json()["error"]["message"]) == (503, ending)
        last = stream.text.rstrip().removesuffix("data: [DONE]").rstrip().rpartition("data: ")[2]
        assert stream.status_code == 200 and json.loads(last)["error"]["message"] == ending
    assert not any(record.exc_info for record in caplog.records)


def test_a_signal_ends_the_server_while_it_answers(example, tmp_path):
    """A stream and a whole answer: neither looks complete."""
    log = tmp_path / "log"
    with start_server(example, log) as (process, url), ThreadPoolExecutor(1) as other:
        ask = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = {"model": str(example), "prompt": WORDS, "temperature": 0, "max_tokens": LONG}
        stream = ask.completions.create(**options, stream=True)
        whole = other.submit(lambda: ask.completions.create(**options).usage.completion_tokens)
        text = [next(stream) for _ in range(10)]
        process.send_signal(signal.SIGTERM)
        for rest in (lambda: text.extend(stream), whole.result):
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                rest()
        assert 10 <= len(text) < LONG and not any(piece.choices[0].finish_reason for piece in text)
        assert process.wait(PATIENCE) == -signal.SIGTERM and "Traceback" not in log.read_text()


def finishes(of: RunningServer, tokens: int, **more: Any) -> set[Any]:
    """Return the finish reasons of an answer with at most `tokens` tokens, at every endpoint."""
    ask, model = client(of), str(of.model)
    text = {"model": model, "prompt": f"{WORDS}\n", "max_tokens": tokens, "temperature": 0, **more}
    chat = {"model": model, "messages": SAID, "max_tokens": tokens, "temperature": 0, **more}
    found = {ask.completions.create(**text).choices[0].finish_reason}
    found |= {ask.completions.create(**text, logprobs=1).choices[0].finish_reason} if not more else set()
    found |= {ask.chat.completions.create(**chat).choices[0].finish_reason}
    for create, body in ((ask.completions.create, text), (ask.chat.completions.create, chat)):
        found |= {chunk.choices[0].finish_reason for chunk in create(**body, stream=True)} - {None}
    if not more:
        reply = {"model": model, "input": WORDS, "max_output_tokens": tokens, "temperature": 0}
        found |= {ended(ask.responses.create(**reply))}
        *_, item, last = ask.responses.create(**reply, stream=True)
        assert last.type == f"response.{last.response.status}" and item.type == "response.output_item.done"
        assert item.item.status == last.response.output[-1].status == last.response.status
        found |= {ended(last.response)}
    return found


def ended(response: Any) -> str:
    """Return a response's finish reason in the words of chats."""
    if response.status == "incomplete":
        assert response.incomplete_details.reason == "max_output_tokens"
    return {"completed": "stop", "incomplete": "length"}[response.status]


def test_an_answer_that_ends_with_the_last_permitted_token_is_complete(server, example, tmp_path):
    """The answer ends with the model's own end token or a stop string. With one token less it is truncated."""
    encoded = server.scheduler.processor(f"{WORDS}\n", return_tensors="pt")
    said = server.scheduler.model.generate(**encoded, max_new_tokens=3, do_sample=False)[0, -3:].tolist()
    stop = server.scheduler.processor.decode(said[-1:])
    assert len({*said}) == 3
    assert [finishes(server, tokens, stop=stop) for tokens in (2, 3, 4)] == [{"length"}, {"stop"}, {"stop"}]
    for number in (0, 2):
        model = copy_with_template(example, tmp_path / str(number), None)
        for name in ("config.json", "generation_config.json"):
            path = model / name
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, said[number]]}))
        with serve_in_process(model) as running:
            assert finishes(running, number + 1) == finishes(running, number + 2) == {"stop"}
            assert number == 0 or finishes(running, number) == {"length"}


def test_converted_experts_give_the_same_text(server, cli, example, tmp_path):
    """Beside the model and in a whole model, since the numbers are the same."""
    whole = tmp_path / "whole"
    cli("cpu", "-i", example, "-o", whole, "--quant-method", "bf16", "--threadpool-count", 1, "--non-experts", "keep")
    card = (whole / "README.md").read_text()
    assert "ktconvert serve /path/to/this/folder\n" in card and "--cpu-weights" not in card
    said = answers(server, example, WORDS)
    for model, weights in ((whole, None), (example, whole)):
        with serve_in_process(model, loading.ModelChoice(str(model), cpu_weights=weights, threads=1)) as running:
            assert answers(running, model, WORDS) == said


def test_serve_holds_its_port_while_it_loads(example, monkeypatch, tmp_path):
    """Loading a model may take minutes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = run_in_process("serve", example, "--port", port).exception
    assert str(error).startswith(f"127.0.0.1:{port}: cannot listen (Address already in use); ")
    holder = "ktconvert.pipeline.models.serving.server.load_application"
    monkeypatch.setattr(holder, lambda *_, **__: open_listener("127.0.0.1", port, "none is free"))
    error = run_in_process("serve", example, "--port", port).exception
    assert str(error) == f"127.0.0.1:{port}: cannot listen (Address already in use); none is free."  # while it loads
    error = run_in_process("serve", example, "--cpu-weights", tmp_path / "nowhere", "--port", free_port()).exception
    assert isinstance(error, InputError) and str(error).startswith(f"{tmp_path / 'nowhere'}: does not exist")


def test_serve_rejects_an_incomplete_model(example, tmp_path):
    """As `run` does: it fills no weight with random numbers."""
    model = shutil.copytree(example, tmp_path / "model")
    edit_file(model / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    expected = "lacks 1 tensor of the model that config.json describes, such as model.norm.weight; compare both with the release"
    for load in (serving.load_application, loading.load_model_and_tokenizer):
        with pytest.raises(InputError, match=re.escape(f"{model}: {expected}")):
            load(loading.ModelChoice(str(model), cpu_weights=model, threads=1))
