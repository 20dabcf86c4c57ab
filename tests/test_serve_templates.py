"""Tests of `ktconvert serve`: chat templates, which are programs that come with a model, cannot block the server."""

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ktconvert.pipeline.models.serving.template_process import TemplateError, TemplateProcess, encode_render_job
from rig.programs import run_python
from rig.served import PATIENCE, copy_with_template, free_port, serve_in_process

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")

SAID = [{"role": "user", "content": "import os"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS_TO_COMPILE = "{{ 9**(9**9) }}"  # a constant
LARGE = "{{ messages[0].content * 10**10 }}"
LONG = "{{ messages[0].content * (10**7 // 3) }}"
LIMITED = "it takes more than 0.5 seconds of a CPU, 2 GiB of memory or 16777216 characters"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    yield (made := TemplateProcess(seconds=0.5))
    made._control.close()
    assert made._process.wait(PATIENCE) == 0, "it ends with its parent"


def render(process: TemplateProcess, template: str, **more: Any) -> str:
    arguments = {"conversations": [SAID], "chat_template": template, **more}
    return asyncio.run(process.render(encode_render_job(arguments)))


def test_the_process_renders_like_transformers(process):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{{ bos_token }}{% for m in messages %}{{ m|tojson }}é\n{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    more = {"bos_token": "<s>", "tools": [{"a": [None, True, 1.5]}], "add_generation_prompt": True}
    expected = render_jinja_template([SAID], chat_template=template, **more)[0][0]
    assert render(process, template, **more) == expected
    assert asyncio.run(process.find_variables(template)) == {"bos_token", "messages", "tools"}


@pytest.mark.parametrize("template", [ENDLESS, LARGE, LONG, "{{ 'x' * 10**10 }}", ENDLESS_TO_COMPILE])
def test_templates_stop_at_their_limits(template, process):
    with pytest.raises(TemplateError, match=LIMITED):
        render(process, template)
    if template == ENDLESS_TO_COMPILE:
        with pytest.raises(TemplateError, match=LIMITED):
            asyncio.run(process.find_variables(template))
    assert render(process, "{{ messages[0].content }}") == "import os"


def test_errors_of_templates_are_reported(process):
    for template, message in (("{{ raise_exception('no\n system') }}", "no system"), ("{{ 1 // 0 }}", "by zero")):
        with pytest.raises(TemplateError, match=message):
            render(process, template)


def test_the_process_restarts_after_being_killed(process):
    process._process.kill()
    process._process.wait()
    assert render(process, "{{ messages[0].content }}") == "import os"


def test_an_endless_template_does_not_block_other_clients(example, tmp_path, monkeypatch):
    """Its own client gets the reason."""
    template = "{% if messages[0].content == 'boom' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    held_up = TemplateProcess(seconds=1)
    monkeypatch.setattr("ktconvert.pipeline.models.serving.prompts.shared_process", lambda: held_up)
    with (
        serve_in_process(copy_with_template(example, tmp_path / "model", template)) as running,
        ThreadPoolExecutor(1) as other,
    ):

        def chat(content: str) -> Any:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=PATIENCE)

        chat("a")
        boom = other.submit(chat, "boom")
        running.until(lambda: running.application.active > 0)
        assert chat("a").status_code == 200 and not boom.done()
        refused = boom.result()
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith("messages: the model's chat template rejects this: it takes more than 1 seconds")
    held_up._control.close()


BLOCKED = """
import os, signal, sys, time
from ktconvert.pipeline.models.serving.server import Server
class Scheduler:
    def interrupt(self): pass
async def application(scope, receive, send):
    os.kill(os.getpid(), int(sys.argv[2]))
    time.sleep(600)
server = Server(application, Scheduler(), port=int(sys.argv[1]), log_level="warning")
import threading, urllib.request
def ask():
    while not server.started: time.sleep(0.05)
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/").close()
threading.Thread(target=ask, daemon=True).start()
server.run()
"""


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_with_a_blocked_event_loop(sig):
    result = run_python(BLOCKED, free_port(), int(sig), timeout=60)
    assert result.returncode == 128 + sig, result.stderr
