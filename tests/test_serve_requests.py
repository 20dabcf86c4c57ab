"""Tests of `ktconvert serve`: which parameters requests may have, which are clamped or rejected, with real clients."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.pipeline.models.serving import authentication
from rig.conversion import run_in_process
from rig.served import PATIENCE, RunningServer, copy_with_template, serve_in_process

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")
request_parsing = pytest.importorskip("ktconvert.pipeline.models.serving.request_parsing")
server_module = pytest.importorskip("ktconvert.pipeline.models.serving.server")
application = pytest.importorskip("ktconvert.pipeline.models.serving.application")

CONTEXT = 1024  # of the bundled model
SAID = [{"role": "user", "content": "import os"}]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LONG = "import os\n" * CONTEXT


@pytest.fixture(scope="module")
def server(example: Path) -> Iterator[RunningServer]:
    with serve_in_process(example) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": SAID, "max_tokens": 4, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"prompt": "import os", "max_tokens": 4, **more}


def reply(**more: Any) -> dict[str, Any]:
    return {"input": "import os", "max_output_tokens": 4, **more}


# Invalid values of fields, by path; the error names the field.
FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "messages": [[], "import os", [{"role": "user", "content": LONG}]],
        "max_tokens": [0, -1, "4", 1.5],
        "max_completion_tokens": [0],
        "temperature": [-1, 3, "hot"],
        "top_p": [1.5],
        "top_k": [-2],
        "seed": [1 << 64, "a"],
        "stop": [5, ["a"] * 17],
        "presence_penalty": [3],
        "frequency_penalty": [-3],
        "logit_bias": [{"a": 1}, {"99999": 1}, {"9" * 5000: 1}, {"01": 1}, {str(n): 1 for n in range(1025)}, []],
        "metadata": [{str(n): "a" for n in range(17)}],
        "": [1],
        "n": [0, 17, 1.5, "2"],
        "logprobs": [1],
        "top_logprobs": [2, 21],
        "reasoning_effort": ["extreme", 5],
        "response_format": [{"type": "xml"}],
        "tool_choice": ["required"],
        "reasoning": ["high"],
        "ignore_eos": [True],
        "verbosity": ["low"],
        "stream": ["yes"],
        "tools": [[{"type": "function", "function": {"name": "f"}}]],  # its template does not support tools
        "generation_config": ['{"max_new_tokens": 1000000}'],
        "stream_options": [{"include_usage": True}],
        "store": [True],
        "model": [5],
        "colour": ["red"],
    },
    TEXT: {
        "prompt": ["", [], ["a", ""], [[]], 5, [1, -1], [1, 2048], [True], LONG, [1] * CONTEXT],
        "max_tokens": [0],
        "n": [0, 17],
        "best_of": [2],
        "suffix": ["end"],
        "logprobs": [-1, True],
    },
    RESPONSES: {
        "input": [[], 5, [{"type": "reasoning"}], LONG],
        "max_output_tokens": [0],
        "temperature": [-1],
        "truncation": ["auto"],
        "background": [True],
        "previous_response_id": ["resp_1"],
        "text": ["plain"],
        "reasoning": ["low"],
    },
}


REFUSED: list[tuple[str, Any, str | None]] = [
    # path, body, the parameter that the error names
    *((path, body, None) for path in (CHAT, TEXT, RESPONSES) for body in ({}, [], b'{"a')),
    *((CHAT, body, None) for body in (b"", b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', None),
    (TEXT, b'{"prompt": "a\\udfff"}', None),
    (TEXT, b"\xff\xfe", None),
    (CHAT, chat(messages=[{"content": "a"}]), "messages[0].role"),
    (CHAT, chat(messages=[*SAID, {"role": "poet", "content": "a"}]), "messages[1].role"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0]"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), None),
    (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]), None),
    (CHAT, chat(messages=[*SAID, {"role": "user", "content": "a", "colour": "red"}]), "messages[1].colour"),
    (CHAT, chat(messages=[None]), "messages[0]"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature"),
    *((CHAT, chat(stop=stop), "stop[0]") for stop in ("", "a" * 1000)),
    (CHAT, chat(logit_bias={"1": 101}), None),
    *(
        (CHAT, chat(chat_template_kwargs={name: True}), f"chat_template_kwargs.{name}")
        for name in ("enable_thinking", "chat_template")
    ),
    *((TEXT, text(stream=True, **one), *one) for one in ({"logprobs": 1}, {"echo": True}, {"prompt": ["a", "b"]})),
    (RESPONSES, reply(input=[{"role": "user"}]), "input[0]"),
    (RESPONSES, reply(input=[{"type": "input_text"}]), "input[0].content[0].text"),
    *(
        (path, make(**{field: value}), field)
        for path, make in ((CHAT, chat), (TEXT, text), (RESPONSES, reply))
        for field, values in FIELDS[path].items()
        for value in values
    ),
]


# Fields without effect that OpenAI's clients, LangChain, LiteLLM, Open WebUI, Continue, Cline and the AI SDK send.
NOTES = {"id": "m1", "name": "me", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}}
PART = {"type": "text", "text": "import os", "cache_control": {"type": "ephemeral"}}
THOUGHT = {"reasoning": "so", "reasoning_content": "so", "reasoning_details": [{}], "thinking_blocks": [{}]}
EMPTY = {"refusal": None, "audio": None, "function_call": None, "annotations": [], "tool_calls": []}
NO_EFFECT: dict[str, dict[str, Any]] = {
    CHAT: {
        "top_k": -1,
        "top_logprobs": 0,
        "logprobs": False,
        "n": 1,
        "functions": [],
        "function_call": "auto",
        "reasoning": {"effort": None},
        "reasoning_effort": "high",
        "verbosity": "medium",
        "prediction": {"type": "content", "content": "a"},
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "response_format": {"type": "text"},
        "ignore_eos": False,
        "skip_special_tokens": True,
        "min_tokens": 0,
        "length_penalty": 1.0,
        "bad_words": [],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "echo": False,
        "stop_token_ids": [],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "stop": None,
        "messages": [{"role": "user", "content": [PART], **NOTES, **THOUGHT, **EMPTY}],
    },
    TEXT: {
        "top_k": -1,
        "best_of": 1,
        "suffix": "",
        "logprobs": None,
        "use_beam_search": False,
        "prompt_cache_key": "a",
    },
    RESPONSES: {
        "top_k": -1,
        "top_logprobs": 0,
        "include": [],
        "truncation": "disabled",
        "max_tool_calls": 3,
        "store": False,
        "reasoning": {"effort": "low", "summary": None},
        "text": {"verbosity": "medium"},
        "tools": [],
        "id": None,
        "parallel_tool_calls": False,
    },
}


def send(url: str, data: bytes | None = None, **headers: Any) -> Any:
    """Send a GET request, or a POST request with a body."""
    options = {"headers": {"content-type": "application/json", **headers}, "timeout": PATIENCE}
    return httpx.get(url, **options) if data is None else httpx.post(url, content=data, **options)


def post(server: RunningServer, path: str, body: Any, **headers: Any) -> Any:
    return send(server.url + path, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers)


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_invalid_requests_are_rejected(server, path, body, param):
    """In one sentence in OpenAI's format that names the parameter, and nothing is computed."""
    before = len(server.passes)
    answer = post(server, path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
    assert len(server.passes) == before


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, chat(max_token=4), "max_token: is not a parameter here; did you mean max_tokens?"),
        (CHAT, chat(colour="red"), "colour: is not a parameter here; leave it out"),
        (CHAT, chat(messages=[{"rol": "user"}]), "messages[0].rol: is not a parameter here; did you mean role?"),
        (CHAT, chat(prompt="a"), "prompt: is not a parameter here; use messages"),
        (RESPONSES, reply(max_tokens=4), "max_tokens: is not a parameter here; use max_output_tokens"),
        (RESPONSES, reply(response_format={}), "response_format: is not a parameter here; use text.format"),
        (CHAT, chat(text={}), "text: is not a parameter here; use response_format"),
        (TEXT, text(text={}), "text: is not a parameter here; only /v1/responses has it; leave it out"),
        (RESPONSES, reply(n=2), f"n: is not a parameter here; only {CHAT} and {TEXT} have it; leave it out"),
    ],
)
def test_unknown_parameters_name_the_one_to_use(server, path, body, message):
    assert post(server, path, body).json()["error"]["message"] == message


@pytest.mark.parametrize("path", NO_EFFECT)
def test_parameters_without_effect_are_accepted(server, path):
    """The answer is the same without them."""
    plain = {CHAT: chat, TEXT: text, RESPONSES: reply}[path](temperature=0)
    answers = [post(server, path, body) for body in (plain, plain | NO_EFFECT[path] | {"temperature": 0})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    without, noted = (answer.json() for answer in answers)
    assert without.get("choices") == noted.get("choices")
    assert without["usage"] == noted["usage"]
    if path == RESPONSES:
        assert [one["output"][0]["content"] for one in (without, noted)] == [without["output"][0]["content"]] * 2


def test_parsing_a_request_does_not_block_other_clients(server, monkeypatch):
    """A megabyte of short messages takes a second to check."""
    answered, read = threading.Event(), request_parsing.parse_request

    def wait(*request: Any) -> Any:
        assert answered.wait(60), "nothing else was answered"
        return read(*request)

    monkeypatch.setattr(request_parsing, "parse_request", wait)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(post, server, CHAT, chat())
        server.until(lambda: server.application.active > 0)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        answered.set()
        assert answer.result().status_code == 200


def test_a_large_body_is_rejected(server):
    """5 MB are not kept, parsed or tokenized, and the client gets the reason."""
    answer = post(server, CHAT, chat(messages=[{"role": "user", "content": "import os " * 500_000}]))
    assert answer.status_code == 413
    assert str(1 << 20) in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": SAID}), (TEXT, {"prompt": "import os"})])
def test_a_prompt_beyond_the_context_is_rejected(server, path, body):
    """The message has both numbers. A long answer is limited to the remaining context."""
    long = {"messages": [{"role": "user", "content": LONG}]} if path == CHAT else {"prompt": LONG}
    error = post(server, path, long).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f" {CONTEXT}," in error["message"]
    assert any(int(n) > CONTEXT for n in re.findall(r"\d+", error["message"]))
    longer = json.loads(json.dumps(long).replace(r"import os\n", r"import os\n" * 30))
    error = post(server, path, longer).json()["error"]  # only the beginning is tokenized
    assert f" more than {2 * CONTEXT} " in error["message"]
    assert error["code"] == "context_length_exceeded"
    full = {"messages": [{"role": "user", "content": "import os\n" * 300}]} if path == CHAT else {"prompt": [5] * 1000}
    usage = post(server, path, {**full, "max_tokens": 1_000_000, "temperature": 0}).json()["usage"]
    assert usage["total_tokens"] <= CONTEXT
    assert usage["completion_tokens"] <= CONTEXT - usage["prompt_tokens"]


def test_unknown_paths_and_methods_are_rejected(server):
    for path in ("/v1", "/v1/embeddings", "/reset", "/openapi.json", "/v1/audio/transcriptions"):
        answer = post(server, path, {})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unknown_url"
    for answer in (send(server.url + CHAT), post(server, "/docs", {}), post(server, "/v1/models/a", {})):
        assert answer.status_code == 405
        assert answer.json()["error"]["code"] == "method_not_allowed"
    assert send(f"{server.url}/health").json() == {"status": "ok"}


def test_the_model_has_one_name(server, client, example):
    """Replies have the listed id. Requests may have it, or no name."""
    (listed,) = client.models.list().data
    assert listed.id == str(example)
    assert client.models.retrieve(listed.id) == listed
    for path, body in ((CHAT, chat()), (TEXT, text()), (RESPONSES, reply())):
        for name in ({}, {"model": listed.id}):
            assert post(server, path, body | name).json()["model"] == listed.id
        wrong = post(server, path, {**body, "model": f"{listed.id}@main"})
        assert wrong.status_code == 404
        assert wrong.json()["error"]["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="answers only for"):
        client.models.retrieve("another")
    # The first request of `transformers chat`
    assert '"ready"' in post(server, "/load_model", {"model": listed.id}).text


def said(client: Any, **more: Any) -> str:
    """Return what the model writes after SAID."""
    settings = {"model": client.models.list().data[0].id, "messages": SAID, "max_tokens": 24, "temperature": 0, **more}
    text: str = client.chat.completions.create(**settings).choices[0].message.content
    return text


def test_sampling_parameters_change_the_text(client):
    """A temperature samples, although the bundled model's generation_config does not set do_sample."""
    greedy = said(client)
    assert said(client, temperature=openai.NOT_GIVEN) == greedy
    for fewer in ({"max_tokens": openai.NOT_GIVEN}, {}):  # the smaller limit applies
        assert 0 < len(said(client, max_completion_tokens=3, **fewer)) < len(greedy) / 2
    sampled = {said(client, temperature=1.5, seed=seed) for seed in range(3)}
    assert len(sampled) == 3
    assert said(client, temperature=1.5, seed=1) == said(client, temperature=1.5, seed=1) != greedy
    # With only the likeliest token there is no other choice.
    for one in ({"top_p": 0}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert said(client, temperature=2, **one) == greedy
    assert said(client, temperature=1e-30) == greedy  # clamped: logits divided by it would overflow
    assert said(client, extra_body={"repetition_penalty": 2.0}) != greedy


def test_penalties_and_biases_change_the_text(server, client):
    """Penalties are subtracted from the logits of earlier tokens, as in the OpenAI API. A bias forces or forbids a token."""
    greedy = said(client, max_tokens=60)
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert said(client, max_tokens=60, **{penalty: 0}) == greedy
        assert said(client, max_tokens=60, **{penalty: 2}) != greedy
    forced = said(client, max_tokens=4, logit_bias={"100": 100})
    assert len(forced) % 4 == 0
    assert forced == forced[: len(forced) // 4] * 4
    assert said(client, max_tokens=4, logit_bias={"0": 100}) != forced
    for tokens in (1, 2):  # one token may come from the pass that computes its log probability
        body = text(max_tokens=tokens, logprobs=0, temperature=0, logit_bias={"100": 100})
        assert post(server, TEXT, body).json()["choices"][0]["text"] == forced[: len(forced) // 4] * tokens


def test_streams_end_as_in_the_openai_api(server):
    """With [DONE], and with usage in an event of its own if the client asks for it."""
    for path, body in ((CHAT, chat()), (TEXT, text()), (TEXT, text(prompt=[5, 6, 7]))):
        whole = post(server, path, body).json()
        for expected in (False, True):
            more = {"stream": True, "stream_options": {"include_usage": expected}}
            lines = post(server, path, {**body, **more}).text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            assert [event["usage"] for event in events if event.get("usage")] == [whole["usage"]] * expected
            assert all(event["model"] == whole["model"] for event in events)
            assert [event["choices"] for event in events][-1] == [] if expected else events[-1]["choices"]


def test_prompts_may_be_lists_and_token_ids(client, example):
    """Each prompt gets the answer of a request of its own."""
    from transformers import AutoTokenizer

    name = client.models.list().data[0].id
    tokenizer = AutoTokenizer.from_pretrained(example)
    texts = ["import os", "def main(argv):", "class Foo:"]
    ids = [tokenizer(text)["input_ids"] for text in texts]

    def complete(prompt: Any, **more: Any) -> Any:
        return client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0, **more)

    alone = [complete(text).choices[0].text for text in texts]
    assert len(set(alone)) == 3
    assert [complete(one).choices[0].text for one in ids] == alone
    for several in (texts, ids):
        answer = complete(several)
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate(alone))
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 24
        echoed = [c.text for c in complete(several, echo=True).choices]
        assert echoed == [text + more for text, more in zip(texts, alone, strict=True)]
    assert complete([5] * 4).usage.prompt_tokens == 4  # the ids are used as they are


@pytest.mark.parametrize("new", [0, 1, 6])
def test_logprobs_are_those_of_the_model(server, client, new):
    """For tokens of the prompt and for new ones, as lm-eval's loglikelihood tasks need them."""
    import torch

    ids, generate = [[5, 900, 17, 300, 44], [9, 8]], server.scheduler.model.generate
    asked = {"model": client.models.list().data[0].id, "prompt": ids, "logprobs": 3, "temperature": 0}
    server.passes.clear()
    answer = client.completions.create(**asked, echo=True, max_tokens=new)
    assert len(server.passes) == len(ids) * (1 if new < 2 else 1 + new)
    alone = client.completions.create(**asked, max_tokens=6)
    for prompt, choice, fresh in zip(ids, answer.choices, alone.choices, strict=True):
        with torch.inference_mode():
            read = generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
            logits = server.scheduler.model(input_ids=read).logits[0].float().log_softmax(-1)
        expected = [float(logits[n, token]) for n, token in enumerate(read[0, 1:].tolist())]
        reported, length = choice.logprobs, len(prompt) + new
        assert reported.token_logprobs[0] is None
        assert reported.top_logprobs[0] is None
        assert reported.token_logprobs[1:] == pytest.approx(expected[: length - 1], abs=0.05)
        assert len(reported.tokens) == len(reported.top_logprobs) == len(reported.text_offset) == length
        for n, (one, top) in enumerate(zip(reported.token_logprobs[1:], reported.top_logprobs[1:], strict=True)):
            assert sorted(top.values(), reverse=True) == pytest.approx(logits[n].topk(3).values.tolist(), abs=0.05)
            assert n < len(prompt) - 1 or one == max(top.values())  # greedy
        assert fresh.logprobs.token_logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=0.05)
        assert choice.text.startswith("".join(reported.tokens[:1]))
        assert fresh.finish_reason == "length"


def connect(server: RunningServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes the connection, after reading what it sends."""
    with connection, suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def test_idle_connections_do_not_block_other_clients(server, monkeypatch):
    """With more connections than the limit, those that have waited longest are closed, and no answer is truncated."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 30)
    stream = text(stream=True, max_tokens=CONTEXT // 4)
    with ExitStack() as opened, server.waiting(4, lambda: len(silent) == 3 * server_module.MAX_CONNECTIONS):
        server.passes.clear()
        silent: list[socket.socket] = []
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(post, server, TEXT, stream)
            server.until(lambda: len(server.passes) == 4)
            for _ in range(3 * server_module.MAX_CONNECTIONS):
                silent.append(opened.enter_context(connect(server)))
                assert send(f"{server.url}/health").status_code == 200
            assert post(server, TEXT, text()).status_code == 200
            assert answer.result().text.endswith("data: [DONE]\n\n")
        assert all(map(is_closed, silent[: server_module.MAX_CONNECTIONS]))


REQUEST = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
SLOW = {
    "nothing": [b""],
    "part of a header": [b"GET /health HTTP/1.1\r\nHo"],
    "part of a body": [f'{REQUEST}{{"prompt":'.encode()],
    "part of a body that is refused": [REQUEST.replace(TEXT, "/nowhere").encode() + b"{"],
    "part of the next request": [b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"GET"],
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW)
def test_the_connection_of_an_incomplete_request_is_closed(sent, server, monkeypatch):
    """Whatever was answered on it before."""
    for limit in ("HEADER_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(server_module, limit, 0.5)
    connection = connect(server)
    *whole, part = sent
    for request in whole:
        connection.sendall(request)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.sendall(part)
    assert is_closed(connection)


def test_the_connection_of_a_client_that_does_not_read_is_closed(server, monkeypatch):
    """Its answer ends."""
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.5)
    body = json.dumps(text(prompt=[5] * 900, echo=True, logprobs=20, max_tokens=0)).encode()
    with connect(server) as connection:
        head = REQUEST.replace("100", str(len(body))).encode()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                connection.sendall(head + body)


def test_too_many_requests_get_a_503(server, monkeypatch):
    """The next one is told to come again."""
    monkeypatch.setattr(application, "MAX_ACTIVE", 2)
    refused: list[Any] = []
    server.until(lambda: not server.application.active)  # wait for requests of earlier tests
    server.passes.clear()
    with server.waiting(1, lambda: bool(refused)), ThreadPoolExecutor(2) as others:
        answers = [others.submit(post, server, TEXT, text()) for _ in range(2)]
        server.until(lambda: server.scheduler.lock.has_waiters())
        answer = post(server, TEXT, text())
        refused.append(answer)
        assert send(f"{server.url}/health").status_code == 200
        assert [one.result().status_code for one in answers] == [200, 200]
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert post(server, TEXT, text()).status_code == 200


TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if enable_thinking %}think{% endif %}"
)
NO_ARGUMENTS: list[dict[str, Any]] = [{}, *({"arguments": none} for none in ("", " ", "null", "{}", None))]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def test_messages_reach_the_chat_template(example, tmp_path):
    """In every form that a request may have. The number of tokens of the prompt shows it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(example)
    called = {"type": "function", "id": "1", "function": {"name": "look_up", "arguments": '{"a": "os"}'}}
    without = [{"type": "function", "function": {"name": "look_up", **more}} for more in NO_ARGUMENTS]
    answered = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [called]}
    parts = [{"type": "text", "text": "import"}, {"type": "text", "text": "os"}]
    tool = {"role": "tool", "tool_call_id": "1", "content": "b"}
    chats: list[tuple[dict[str, Any], str]] = [
        (chat(), "user import os\n"),
        (chat(messages=[{"role": "user", "content": parts}]), "user import os\n"),
        (chat(messages=[{"role": "developer", "content": "a"}, *SAID]), "system a\nuser import os\n"),
        (chat(tools=[TOOL]), "look_up\nuser import os\n"),
        (chat(tools=[TOOL], tool_choice="none"), "user import os\n"),
        (chat(chat_template_kwargs={"enable_thinking": True}), "user import os\nthink"),
        (chat(messages=[*SAID, answered, tool]), "user import os\nassistant os\ntool b\n"),
        (chat(messages=[*SAID, {**answered, "tool_calls": without}, tool]), "user import os\nassistant \ntool b\n"),
        (chat(messages=[*SAID, {"role": "assistant", "content": "a", **EMPTY}]), "user import os\nassistant a\n"),
        (chat(messages=[*SAID, {"role": "assistant", **THOUGHT}]), "user import os\nassistant \n"),
        (chat(tools=[{**TOOL, "cache_control": {}}]), "look_up\nuser import os\n"),
    ]
    said_a, said_b = ({"type": "input_text", "text": text} for text in "ab")
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    call = {"type": "function_call", "call_id": "1", **called["function"]}  # type: ignore[dict-item]
    bare = {"type": "function_call", "call_id": "1", "name": "look_up"}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    given = {"type": "function_call_output", "call_id": "1", "output": [said_b]}
    output = [{"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": parts[:1]}]
    replies: list[tuple[dict[str, Any], str]] = [
        (reply(), "user import os\n"),
        (reply(instructions="a"), "system a\nuser import os\n"),
        (reply(tools=[flat]), "look_up\nuser import os\n"),
        (reply(input=[*SAID, *output]), "user import os\nassistant import\n"),
        (reply(input=[{"role": "developer", "content": "a"}]), "system a\n"),
        (reply(input=[{"role": "system", "content": "a"}], instructions="b"), "system b a\n"),
        (reply(input=[*SAID, said_b]), "user import os\nuser b\n"),
        (reply(input=[said_a, *SAID]), "user a\nuser import os\n"),
        (reply(input=[said_a, said_b]), "user a b\n"),
        (reply(input=[*SAID, call]), "user import os\nassistant os\n"),
        *((reply(input=[*SAID, {**bare, **more}]), "user import os\nassistant \n") for more in NO_ARGUMENTS),
        (reply(input=[*SAID, thought, call, given]), "user import os\nassistant os\ntool b\n"),
    ]
    with serve_in_process(copy_with_template(example, tmp_path / "model", TEMPLATE)) as running:
        for path, cases, name in ((CHAT, chats, "prompt_tokens"), (RESPONSES, replies, "input_tokens")):
            for body, prompt in cases:
                answer = post(running, path, body).json()
                assert answer["usage"][name] == len(tokenizer(prompt)["input_ids"]), (body, answer)
        for name in ("role", "m", "messages", "loop"):  # variables that the template sets itself
            refused = post(running, CHAT, chat(chat_template_kwargs={name: "a"}))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("kind", request_parsing.REQUESTS)
def test_the_table_in_the_docs_has_every_parameter(kind):
    page = (Path(__file__).parents[1] / "docs/reference/server.md").read_text()
    table = page.partition("## Parameters\n")[2].partition("\n## ")[0]
    assert [name for name in kind.model_fields if f"`{name}`" not in table] == []


KEY = "sk-0123456789"


def test_serve_asks_for_the_api_key(example):
    """Everywhere but at /health. The model may have a short name."""
    with serve_in_process(example, name="small", key=KEY.encode()) as running:
        assert send(f"{running.url}/health").status_code == 200
        good = {"authorization": f"Bearer {KEY}"}
        wrong = ({}, {"authorization": "Bearer nothing"}, {"authorization": f"Basic {KEY}"}, {"authorization": KEY})
        for path in (CHAT, TEXT, RESPONSES, "/load_model", "/v1/models", "/nowhere"):
            for headers in (*wrong, {"authorization": f"Bearer {KEY}0"}, {"authorization": b"Bearer \xe9"}):
                answer = post(running, path, {}, **headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert KEY not in answer.text
        for path, headers, status in ((CHAT, {}, 401), ("/nowhere", good, 404), ("/v1/models", good, 405)):
            answer = post(running, path, chat(user="a" * (16 << 20)), **headers)
            assert answer.status_code == status, "a client that still sends gets no answer"
        assert post(running, CHAT, chat(), **good).json()["model"] == "small"
        ask = openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0)
        assert [model.id for model in ask.models.list()] == ["small"] == [ask.models.retrieve("small").id]
        with pytest.raises(openai.AuthenticationError, match="API key"):
            ask.with_options(api_key="another").models.list()


@pytest.mark.parametrize("said", ["", " \n", "two words", "a\nb", "schl\u00fcssel", "a" * 5000])
def test_invalid_api_keys_are_rejected(said, monkeypatch, tmp_path):
    """An empty variable or file must not open the server to everybody."""
    (tmp_path / "key").write_text(said)
    with pytest.raises(InputError, match="has no API key"):
        authentication.read_api_key(tmp_path / "key")
    monkeypatch.setenv(authentication.KEY_VARIABLE, said)
    with pytest.raises(UsageError, match="has no API key"):
        authentication.read_api_key(None)


def test_the_key_comes_from_the_file_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(authentication.KEY_VARIABLE, "of-the-environment")
    assert authentication.read_api_key(None) == b"of-the-environment"
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert authentication.read_api_key(tmp_path / "key") == KEY.encode()
    with pytest.raises(InputError, match="nowhere: cannot be read"):
        authentication.read_api_key(tmp_path / "nowhere")


def test_serve_warns_of_an_unsafe_configuration(example, tmp_path, monkeypatch):
    """A public address without a key, and a key that other users can read. Before the port is opened."""
    file = tmp_path / "key"
    file.write_text(KEY)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        serve = ("serve", example, "--host", "0.0.0.0", "--port", taken.getsockname()[1])
        assert "without a key" in run_in_process(*serve).stderr
        for mode, warned in ((0o600, False), (0o640, True), (0o644, True)):
            file.chmod(mode)
            said = run_in_process(*serve, "--api-key-file", file).stderr
            assert ("other users of this machine can read the API key" in said) == warned
        monkeypatch.setenv("KTCONVERT_API_KEY", KEY)
        assert "without a key" not in run_in_process(*serve).stderr
    assert [authentication.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [authentication.is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "example.org")] == [False] * 4
