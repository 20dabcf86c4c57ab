"""Tests of `ktconvert serve`: log probabilities, several answers, formats and tool calls, as common clients ask for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.served import PATIENCE, RunningServer, copy_with_template, serve_in_process

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")

SAID = [{"role": "user", "content": "import os"}]
ANSWER = 12  # tokens
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if enable_thinking %}think\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = copy_with_template(example, tmp_path_factory.mktemp("served") / "model", TEMPLATE)
    with serve_in_process(model, name="small") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def chat(client: Any) -> Any:
    """Return a function that asks for a chat completion."""

    def ask(**more: Any) -> Any:
        settings = {"model": "small", "messages": SAID, "max_tokens": ANSWER, "temperature": 0, **more}
        return client.chat.completions.create(**settings)

    return ask


def raw_logprobs(server: RunningServer, text: str) -> Any:
    """Return the model's log probabilities after each token of a text, and its ids."""
    ids = server.scheduler.processor(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return server.scheduler.model(input_ids=ids).logits[0].float().log_softmax(-1), ids[0].tolist()


def test_chats_have_the_log_probabilities_of_the_model(server, chat):
    """Those before temperature, penalties and biases, of each token of the answer."""
    more = {"temperature": 0.5, "seed": 1, "presence_penalty": 1, "logit_bias": {"100": 5}}
    choice = chat(logprobs=True, top_logprobs=3, **more).choices[0]
    content = choice.logprobs.content
    assert len(content) == ANSWER
    assert "".join(entry.token for entry in content) == choice.message.content
    prompt = raw_logprobs(server, "import os\n")[1]
    rows, ids = raw_logprobs(server, "import os\n" + choice.message.content)
    assert ids[: len(prompt)] == prompt
    for row, token, entry in zip(rows[len(prompt) - 1 :], ids[len(prompt) :], content, strict=False):
        assert entry.logprob == pytest.approx(float(row[token]), abs=0.05)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=0.05)
        assert bytes(entry.bytes).decode() == entry.token
    assert chat().choices[0].logprobs is None
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_a_stream_has_the_log_probabilities_of_its_text(chat):
    """Each chunk those of its own tokens. A stop string and what was held back for it are left out."""
    for more in ({}, {"stop": ["nowhere", "t os"]}):
        whole = chat(logprobs=True, top_logprobs=2, **more).choices[0]
        chunks = [chunk.choices[0] for chunk in chat(logprobs=True, top_logprobs=2, stream=True, **more)]
        parts = [(chunk.delta.content, chunk.logprobs.content) for chunk in chunks if chunk.delta.content]
        entries = [entry for _, content in parts for entry in content]
        assert entries == whole.logprobs.content != []
        assert "".join(text for text, _ in parts) == whole.message.content
        if not more:
            assert all(text == "".join(entry.token for entry in content) for text, content in parts)


def test_n_answers_have_seeds_of_their_own(client, chat):
    """The answer of an index is that of a request with its seed. The prompt counts once."""
    sampled = {"temperature": 1.5, "max_tokens": 8}
    alone = [chat(seed=seed, **sampled).choices[0].message.content for seed in (5, 6, 7)]
    whole = chat(seed=5, n=3, logprobs=True, **sampled)
    assert len(set(alone)) == 3
    assert [(choice.index, choice.message.content) for choice in whole.choices] == list(enumerate(alone))
    assert all("".join(e.token for e in choice.logprobs.content) == choice.message.content for choice in whole.choices)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (chat().usage.prompt_tokens, 24)
    texts = {0: "", 1: "", 2: ""}
    *chunks, last = chat(seed=5, n=3, stream=True, stream_options={"include_usage": True}, **sampled)
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [*texts.values()] == alone
    assert (last.choices, last.usage) == ([], whole.usage)
    assert [chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason] == [0, 1, 2]
    text = {"model": "small", "max_tokens": 4, "temperature": 1.5}
    several = client.completions.create(prompt=["import", "class"], n=2, seed=1, **text)
    single = [client.completions.create(prompt=p, seed=s, **text) for p in ("import", "class") for s in (1, 2)]
    assert [choice.text for choice in several.choices] == [one.choices[0].text for one in single]
    assert several.usage.prompt_tokens == single[0].usage.prompt_tokens + single[2].usage.prompt_tokens
