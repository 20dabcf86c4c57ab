"""Tests of `ktconvert serve`: its pages for browsers, metrics, log and CORS, with a server in its own process."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import InputError, UsageError
from rig.conversion import run_in_process
from rig.served import PATIENCE, start_server

httpx = pytest.importorskip("httpx")
prometheus = pytest.importorskip("prometheus_client.parser")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")
application = pytest.importorskip("ktconvert.pipeline.models.serving.application")

ROOT = Path(__file__).resolve().parents[1]
KEY = "sk-0123456789"
ORIGIN = "https://chat.example.org"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
# A page with the elements that the chat's script uses. It prints what the page shows when it is loaded, when a message
# is sent without a key, and when the key is entered. The requests go to the server.
BROWSER = """
const errors = [], requests = [], elements = {};
let focus = null;
const note = {textContent: "", remove() {}};
class Element {
  constructor(id) { Object.assign(this, {id, value: "", dataset: {}, listeners: {}, hidden: false}); }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  focus() { focus = this.id; }
  closest() { return this; }
  replaceChildren() {}
  append() { if (this.className === "error") errors.push("shown"); }
  querySelector() { return note; }
  querySelectorAll() { return []; }
}
const document = {
  body: {dataset: NEEDS_KEY ? {needsKey: ""} : {}},
  getElementById: (id) => elements[id] ??= new Element(id),
  createElement: () => new Element(),
  querySelector: () => new Element(),
};
const Option = function () {};
const send = globalThis.fetch;
{
  const fetch = (path, options) => { requests.push(path); return send("URL" + path, options); };
  SCRIPT
}
const look = () => JSON.parse(
  JSON.stringify({requests, errors, note: note.textContent, focus, open: elements.settings.open})
);
(async () => {
  const states = [look()];
  elements.text.value = "Hello!";
  await elements.form.listeners.submit({preventDefault() {}});
  states.push(look());
  elements.key.value = "KEY";
  await elements.key.listeners.change();
  console.log(JSON.stringify([...states, look()]));
})();
"""
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) \S.*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def url(example: Path, folder: Path) -> Iterator[str]:
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    options = ("--api-key-file", str(folder / "key"), "--cors-origin", ORIGIN, "--model-name", "qwen3-moe-small")
    with start_server(example, folder / "log", *options) as (_, address):
        yield address


@pytest.fixture(scope="module")
def ask(url: str) -> Callable[..., Any]:
    """Return a function that sends a POST request with the key."""
    return lambda path, **body: httpx.post(url + path, json=body, headers=WITH_KEY, timeout=PATIENCE)


def read_metrics(url: str) -> dict[str, float]:
    """Return the value of each sample, with those of all labels added."""
    text = httpx.get(f"{url}/metrics", headers=WITH_KEY, timeout=PATIENCE).text
    values: dict[str, float] = {}
    for family in prometheus.text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0) + sample.value
    return values


def test_metrics_count_requests_and_tokens(url, ask):
    before = read_metrics(url)
    prompts = [[5, 6, 7], [8, 9]]
    usage = ask(TEXT, prompt=prompts, max_tokens=6, temperature=0).json()["usage"]
    assert ask(TEXT, prompt=prompts, max_tokens=0, echo=True, logprobs=0).status_code == 200
    assert ask(TEXT, prompt=5).status_code == 400
    after = read_metrics(url)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["ktconvert_prompt_tokens_total"] == 2 * usage["prompt_tokens"] == 10
    assert grown["ktconvert_generated_tokens_total"] == usage["completion_tokens"] == 12
    assert grown["ktconvert_tokens_per_second_count"] == len(prompts)
    assert grown["ktconvert_request_seconds_count"] == 1
    assert grown["ktconvert_requests_total"] == 4  # and the metrics before
    assert after["process_resident_memory_bytes"] > 1 << 20


def test_metrics_show_current_work(url):
    """A gauge is 0 again when the client has disconnected."""
    names = ("ktconvert_generations_running", "ktconvert_kv_cache_bytes")
    body = {"prompt": "import os", "max_tokens": 1000, "temperature": 0, "stream": True}
    with httpx.stream("POST", url + TEXT, json=body, headers=WITH_KEY, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        next(lines)
        during = read_metrics(url)
    assert during[names[0]] == 1
    assert during[names[1]] > 0
    assert during["ktconvert_generations_waiting"] == 0
    while any(read_metrics(url)[name] for name in names):
        pass


def test_each_request_is_logged_once_with_its_speed(ask, url, folder):
    """With a time, a level, and the id that the client got. Paths cannot add lines to the log."""
    identity = ask(CHAT, messages=[{"role": "user", "content": "import os"}], max_tokens=5).headers["x-request-id"]
    ask(TEXT, prompt=["a", "b", "c"], max_tokens=3)
    ask(TEXT, prompt=["a", "b"], max_tokens=1)
    httpx.get(f"{url}/a%0Ab", headers=WITH_KEY)
    httpx.get(f"{url}/health")
    lines = (folder / "log").read_text().splitlines()
    (line,) = (line for line in lines if identity.removeprefix("chatcmpl-") in line)
    assert re.search(
        r" INFO .* POST /v1/chat/completions: 200 in [\d.]+ s, prefill 3 tokens .* \([\d.]+ tokens/s\)$", line
    )
    assert any("prefill 3 tokens" in line and "decode 6 tokens" in line for line in lines)
    assert any("prefill 2 tokens" in line and "decode" not in line for line in lines)
    (refused,) = (line for line in lines if "GET /a%0Ab: 404 in " in line)
    assert r" s: unknown path /a\nb; use /v1/chat/completions, " in refused
    assert not [line for line in lines if "GET /health" in line]
    started = next(n for n, line in enumerate(lines) if f" INFO Ready: {url}/v1, " in line)
    assert [line for line in lines[started:] if not LINE.fullmatch(line)] == []


def test_pages_need_no_key_and_load_nothing_from_elsewhere(url):
    """They are light and dark, and fit on a phone."""
    for path in ("/", "/docs"):
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", answer.text)
        assert "color-scheme: light dark" in answer.text
        assert 'name="viewport" content="width=device-width' in answer.text
        assert KEY not in answer.text
    assert httpx.get(f"{url}/metrics").status_code == 401


def test_the_section_on_lm_eval_makes_questions_that_the_server_scores(ask, folder):
    """lm-eval is not installed here: this test sends the requests of its local-completions for one question."""
    page = (ROOT / "docs/how-to/serve.md").read_text()
    [command] = re.findall(r"^python (benchmarks/next_line.py .*) task$", page, re.M)
    subprocess.run([sys.executable, *command.split(), folder / "task"], cwd=ROOT, check=True)
    questions = [json.loads(line) for line in (folder / "task" / "next_line.jsonl").read_text().splitlines()]
    assert f"({len(questions)} questions" in page
    prompts = [questions[0]["text"] + choice for choice in questions[0]["choices"]]
    answer = ask(
        TEXT, prompt=prompts, model="qwen3-moe-small", max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) > 1


@needs_curl
def test_docs_describe_every_path_with_a_command_that_works(url, folder):
    """curl gets an answer from every path but /load_model, whose example has a placeholder."""
    page = httpx.get(f"{url}/docs").text
    commands = [html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", page, re.S)]
    assert len(commands) == len(application.PATHS)
    assert all(f"<code>{path.method} {path.path}</code>" in page for path in application.PATHS)
    assert "number, at least 0, at most 2" in page  # temperature
    for command in commands:
        assert 'Authorization: Bearer $KEY"' in command
        assert command.startswith(f"curl {url}/")
        script = f"{command} -sS -w '%{{http_code}}'"
        environment = {**os.environ, "KEY": KEY}
        result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=environment)
        assert result.stdout[-3:] == ("404" if '"NAME"' in command else "200"), result.stdout


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("my_server.example.org", "http://my_server.example.org"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("a$(reboot)", "http://HOST:PORT"),
        ("<b>", "http://HOST:PORT"),
    ],
)
def test_docs_name_the_address_of_the_request(host, address, url):
    """A host that would change the meaning of a command is not shown."""
    page = httpx.get(f"{url}/docs", headers={"host": host}).text
    assert f"<pre>curl {address}/health</pre>" in page.replace(" \\\n    -H &#34;Authorization: Bearer $KEY&#34;", "")
    assert f"<code>{address}/v1</code>" in page
    assert "reboot" not in page


@needs_node
def test_the_chat_asks_for_the_key_before_it_sends_a_request(url):
    page = httpx.get(url).text
    [script] = re.findall("<script>(.*?)</script>", page, re.S)
    needs_key = "<body data-needs-key>" in page
    run = BROWSER.replace("SCRIPT", script).replace("NEEDS_KEY", json.dumps(needs_key)).replace("URL", f"{url}/")
    done = subprocess.run(["node", "-"], input=run.replace("KEY", KEY), capture_output=True, text=True, check=True)
    asked, typed, entered = json.loads(done.stdout)
    note = "This server requires an API key. Enter it in the settings, then write a message."
    assert asked == {"requests": [], "errors": [], "note": note, "focus": "key", "open": True}
    assert typed == asked
    assert entered["requests"] == ["v1/models"] and entered["errors"] == []


def read_json(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of an answer or of a stream's events, except the values that change."""
    text = " ".join(text.replace("data: [DONE]", "").replace("data: ", "").split())
    objects, end = [], 0
    while end < len(text):
        content, end = json.JSONDecoder().raw_decode(text, end)
        objects.append({name: value for name, value in content.items() if name not in ("id", "created")})
        end += 1
    return objects


@needs_curl
def test_curl_commands_of_the_docs_have_the_printed_output(url, folder):
    page = (ROOT / "docs/how-to/serve.md").read_text()
    examples = re.findall(r"```bash\n(curl .*?)```\n\n```json\n(.*?)```", page, re.S)
    assert len(examples) == 3
    for command, printed in examples:
        script = command.replace("http://127.0.0.1:8000", url)
        result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, cwd=folder)
        assert read_json(result.stdout) == read_json(printed)
        assert result.stdout.endswith("data: [DONE]\n\n") == ("-sN" in command)


def test_only_pages_of_the_given_origin_may_send_requests(url):
    """Browsers ask first, without a key."""
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://other.example.org", None)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked |= {"access-control-request-headers": "authorization,content-type"}
        preflight = httpx.options(url + CHAT, headers=asked)
        answer = httpx.get(f"{url}/v1/models", headers={"origin": origin})
        assert preflight.status_code == (200 if allowed else 400)
        assert answer.status_code == 401
        for response in (preflight, answer):
            assert response.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", ""])
def test_an_invalid_origin_is_rejected(origin, example):
    error = run_in_process("serve", example, "--cors-origin", origin).exception
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"--cors-origin {origin}: not an origin; ")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_of_the_model_is_rejected(name, example):
    error = run_in_process("serve", example, "--model-name", name).exception
    assert isinstance(error, UsageError)
    assert str(error) == "--model-name is empty; give a name, or leave the option out."


@pytest.mark.parametrize(("key", "status"), [(KEY, 200), (f"{KEY}0", 401), ("wrong", 401)])
def test_only_the_key_of_the_file_opens_the_server(key, status, url):
    assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("empty", "has no API key; it must be one line of ASCII."),
        ("missing", "does not exist; check the path."),
        ("folder", "cannot be read (Is a directory); give --api-key-file a file with the key."),
    ],
)
def test_serve_refuses_to_start_without_the_key_of_its_file(name, problem, example, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    error = run_in_process("serve", example, "--api-key-file", tmp_path / name).exception
    assert isinstance(error, InputError)
    assert str(error) == f"{tmp_path / name}: {problem}"
