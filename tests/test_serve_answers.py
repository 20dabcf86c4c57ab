"""Tests of `ktconvert serve`: log probabilities, several answers, formats and tool calls, as common clients ask for them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from rig.served import PATIENCE, RunningServer, copy_with_template, serve_in_process

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")
chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
constraints = pytest.importorskip("ktconvert.pipeline.models.serving.constraints")
prompts = pytest.importorskip("ktconvert.pipeline.models.serving.prompts")
request_options = pytest.importorskip("ktconvert.pipeline.models.serving.request_options")
scheduler = pytest.importorskip("ktconvert.pipeline.models.serving.scheduler")
stream_decoder = pytest.importorskip("ktconvert.pipeline.models.serving.stream_decoder")

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


def raw_logprobs(server: RunningServer, text: str, prompt: int | None = None) -> Any:
    """Return the model's log probabilities after each token of a text, and its ids.

    prompt  number of tokens that the model reads together, before it reads each other one alone; None: all
    """
    ids = server.scheduler.processor(text, return_tensors="pt")["input_ids"]
    rows, cache = [], None
    with torch.inference_mode():
        for part in (ids[:, :prompt], *ids[:, ids.shape[1] if prompt is None else prompt :].split(1, dim=1)):
            if part.shape[1]:
                out = server.scheduler.model(input_ids=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                rows.append(out.logits[0])
    return torch.cat(rows).float().log_softmax(-1), ids[0].tolist()


def test_chats_have_the_log_probabilities_of_the_model(server, chat):
    """Those before temperature, penalties and biases, of each token of the answer."""
    more = {"temperature": 0.5, "seed": 1, "presence_penalty": 1, "logit_bias": {"100": 5}}
    choice = chat(logprobs=True, top_logprobs=3, **more).choices[0]
    content = choice.logprobs.content
    assert len(content) == ANSWER
    assert "".join(entry.token for entry in content) == choice.message.content
    prompt = raw_logprobs(server, "import os\n")[1]
    rows, ids = raw_logprobs(server, "import os\n" + choice.message.content, len(prompt))
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


COLOUR = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"$ref": "#/$defs/size"},
        "parts": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "size", "parts"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 10, "maximum": 99}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": COLOUR, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "wait"}},
]
LONG = 200  # tokens, enough for any thing


def is_thing(text: str) -> bool:
    """Return whether a text is JSON with the schema COLOUR."""
    thing = json.loads(text)
    assert thing.keys() == {"colour", "size", "parts"}
    assert thing["colour"] in ("red", "green")
    assert 10 <= thing["size"] <= 99
    assert 1 <= len(thing["parts"]) <= 3
    return set(thing["parts"]) <= {1, 2}


def test_answers_match_a_json_schema(chat, client):
    """Greedy, sampled, and streamed, with all other parameters; it ends when it is complete."""
    for more in ({}, {"temperature": 2, "seed": 1}, {"logit_bias": {"100": 100}}, {"presence_penalty": 2}):
        choice = chat(response_format=FORMAT, max_tokens=LONG, **more).choices[0]
        assert is_thing(choice.message.content)
        assert choice.finish_reason == "stop"
        chunks = chat(response_format=FORMAT, max_tokens=LONG, stream=True, **more)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    several = chat(response_format=FORMAT, max_tokens=LONG, n=2, seed=1, temperature=2)
    assert all(is_thing(choice.message.content) for choice in several.choices)
    flat = {"format": {"type": "json_schema", "name": "thing", "schema": COLOUR}}
    reply = client.responses.create(model="small", input="import os", text=flat, temperature=0)
    assert is_thing(reply.output_text)
    assert reply.status == "completed"


def test_answers_are_json_objects(chat):
    """Also a schema of a client library. An answer that is too long is a part of one."""
    from pydantic import BaseModel

    class Step(BaseModel, extra="forbid"):
        done: bool
        number: Literal[1, 2, 3]

    class Plan(BaseModel, extra="forbid"):
        first: Step
        second: Step | None

    text = chat(response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert text.message.content.startswith("{")
    assert text.finish_reason == "length" or isinstance(json.loads(text.message.content), dict)
    schema = {"type": "json_schema", "json_schema": {"name": "plan", "schema": Plan.model_json_schema()}}
    Plan.model_validate_json(chat(response_format=schema, max_tokens=LONG).choices[0].message.content)
    cut = chat(response_format=FORMAT, max_tokens=5).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.content.startswith('{"')


def test_a_tool_choice_forces_one_call(chat, client):
    """Of the named tool, or of any. A call that is too long is text, as the docs say."""
    named = {"type": "function", "function": {"name": "paint"}}
    for choice, names in (("required", {"paint", "wait"}), (named, {"paint"})):
        options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": LONG, "seed": 3, "temperature": 1.5}
        answer = chat(**options).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        assert call.function.name != "paint" or is_thing(call.function.arguments)
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        deltas = [chunk.choices[0].delta for chunk in chat(**options, stream=True)]
        (streamed,) = (call for delta in deltas for call in delta.tool_calls or [])
        assert streamed.function.model_dump() == call.function.model_dump()
        assert not any(delta.content for delta in deltas)
    cut = chat(tools=TOOLS, tool_choice=named, max_tokens=4).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    options = {"model": "small", "input": "import os", "tools": flat, "temperature": 0}
    *_, item = client.responses.create(**options, tool_choice={"type": "function", "name": "paint"}).output
    assert item.type == "function_call"
    assert item.name == "paint"
    assert is_thing(item.arguments)


def test_other_clients_do_not_change_a_constrained_answer(chat):
    options = {"response_format": FORMAT, "max_tokens": LONG, "temperature": 2, "seed": 9}
    alone = chat(**options).choices[0].message.content
    with ThreadPoolExecutor(3) as clients:
        others = [clients.submit(chat, seed=seed, temperature=2, max_tokens=60) for seed in range(2)]
        assert clients.submit(chat, **options).result().choices[0].message.content == alone
        assert all(other.result().choices for other in others)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    # body, beginning of the message
    ({"response_format": {"type": "xml"}}, "response_format: type has to be"),
    ({"response_format": "json"}, "response_format: type has to be"),
    ({"response_format": {"type": "json_schema"}}, "response_format: the schema has to be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format: the schema has"),
    ({"response_format": {"type": "json_schema", "json_schema": {"a": 5}}}, "response_format: json_schema has to be"),
    *(
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, f"response_format: {problem}")
        for schema, problem in (
            ({"type": "colour"}, "the schema is not supported: Invalid type"),
            ({"$ref": "#/$defs/none"}, "the schema is not supported: "),
            ({"type": "string", "pattern": "(a+"}, "the schema is not supported: regex parse error"),
            ({"type": "array", "uniqueItems": True}, "the schema is not supported: Unimplemented keys"),
            ({"enum": ["a" * (1 << 16)]}, "the schema has more than 65536 characters"),
        )
    ),
    ({"tool_choice": "required"}, "tool_choice: required needs tools"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice: has to be auto"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice: has to be auto"),
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS}, "tool_choice: fly is not"),
    ({"response_format": FORMAT, "tools": TOOLS}, "tool_choice: give none"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}],
        },
        "tools[0]: the schema is not supported: Unimplemented keys",
    ),
    (
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        "tools[0]: parameters has to be an object",
    ),
]


@pytest.mark.parametrize(("body", "message"), UNSUPPORTED, ids=lambda value: str(value)[:60])
def test_unsupported_formats_and_tools_are_rejected(body, message, server, chat):
    """With one sentence, before anything is computed."""
    before = len(server.passes)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(extra_body=body)
    error = caught.value.body
    assert error["message"].startswith(message)
    assert error["param"] == message.partition(":")[0]
    assert "\n" not in error["message"]
    assert len(server.passes) == before


CHATML = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


def test_a_constraint_begins_after_the_reasoning(example, tmp_path):
    """A model may reason freely before an answer with a format, if its chat template lets it."""
    with serve_in_process(copy_with_template(example, tmp_path / "model", CHATML), name="small") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        options = {"model": "small", "messages": SAID, "temperature": 0, "max_tokens": 60, "response_format": FORMAT}
        thinking, direct = (
            client.chat.completions.create(**options, extra_body={"chat_template_kwargs": {"enable_thinking": switch}})
            for switch in (True, False)
        )
    assert len(thinking.choices[0].message.reasoning_content) > 20
    assert not thinking.choices[0].message.content
    assert is_thing(direct.choices[0].message.content)


def test_the_reasoning_effort_reaches_the_chat_template(chat, client):
    """If it can only turn reasoning on or off, any effort turns it on. Settings of the template override it."""
    plain = chat(max_tokens=1).usage.prompt_tokens
    settings = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    efforts = [{"reasoning_effort": "high"}, {"reasoning_effort": "none"}, {"reasoning_effort": "high", **settings}]
    tokens = [chat(max_tokens=1, **more).usage.prompt_tokens for more in efforts]
    assert tokens[0] > plain
    assert tokens[1:] == [plain, plain]
    reply = {"model": "small", "input": "import os", "max_output_tokens": 1}
    replies = [client.responses.create(**reply, reasoning={"effort": effort}) for effort in ("low", "none")]
    assert [one.usage.input_tokens for one in replies] == tokens[:2]
    assert prompts.find_effort_settings({"reasoning_effort", "enable_thinking"}, "low") == {"reasoning_effort": "low"}
    assert prompts.find_effort_settings({"messages"}, "low") == {}


@pytest.mark.parametrize("begins", ["the prompt", "the answer"])
def test_reasoning_ends_with_its_closing_text(begins, server):
    tokenizer = server.scheduler.processor
    all_constraints = constraints.Constraints(tokenizer, len(tokenizer), [1], ("<think>", "</think>"))
    grammar = all_constraints.make_json_grammar(COLOUR, "response_format")
    state = all_constraints.start(grammar, "<think>\n" if begins == "the prompt" else "")

    def allowed() -> set[int]:
        return set(state.mask(torch.zeros(1, len(tokenizer)))[0].isfinite().nonzero()[:, 0].tolist())

    opening, reasoning = (tokenizer(text)["input_ids"] for text in ("<think>", "so: {</think>"))
    if begins == "the answer":
        brace = tokenizer("{")["input_ids"][0]
        assert {opening[0], brace} <= allowed()
        assert len(allowed()) < 10
        reasoning = opening + reasoning
    for token in reasoning:
        assert not state.add(token, tokenizer.decode)
    answer = tokenizer('{"colour": "red", "size": 10, "parts": [1]}')["input_ids"]
    for number, token in enumerate(answer):
        assert token in allowed()
        assert state.add(token, tokenizer.decode) == (number == len(answer) - 1)


@pytest.mark.parametrize("single", [False, True])
def test_parallel_tool_calls_can_be_turned_off(single, server):
    """The answer ends with its first call, in the format of the model."""
    parser = chat_parsing.ResponseParser(stream_decoder._get_template(None, server.scheduler.model), prefix="")
    tokenizer = server.scheduler.processor
    call = '<tool_call>\n{"name": "wait", "arguments": {"n": 1}}\n</tool_call>\n'
    items: list[Any] = []
    decoder = stream_decoder.StreamDecoder(tokenizer, parser, [1], [])
    options = request_options.RequestOptions(single_call=single)
    answer = scheduler.Answer(decoder, options, items.append, scheduler.TokenCounts())
    answer.add(torch.tensor([5]))  # the prompt
    with suppress(scheduler.GenerationEnded):
        for token in tokenizer(2 * call)["input_ids"]:
            answer.add(torch.tensor([token]))
    answer.finish()
    calls = [item for item in items if isinstance(item, stream_decoder.utils.ToolCall)]
    assert [(one.name, one.arguments) for one in calls] == [("wait", '{"n": 1}')] * (1 if single else 2)
    assert answer.is_complete == decoder.ended == single
