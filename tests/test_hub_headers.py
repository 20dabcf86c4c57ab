"""Headers of models of the hub: read with range requests, cached by commit, and equal to those of the whole files."""

import json
import os
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.sources.hub_headers import FIRST_BYTES
from ktconvert.layouts.sources.source import open_checkpoint
from rig import conversion
from rig.hub_server import COMMIT, Hub, serve, serve_hub

pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).resolve().parents[1]
GGUF = ROOT / "tests" / "golden" / "llama_cpp.MXFP4_MOE.gguf"
MACHINE = ("--ram", "1TB", "--vram", "0", "--disk", "4TB", "--bandwidth", "100GB")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    conversion.checkpoint(tmp_path / "models" / "small", experts=8)
    (tmp_path / "models" / "gguf").mkdir()
    shutil.copy(GGUF, tmp_path / "models" / "gguf" / "small.gguf")
    with serve_hub({f"org/{name}": tmp_path / "models" / name for name in ("small", "gguf")}) as hub:
        yield hub


def run(hub: Hub, tmp_path: Path, *arguments: str) -> Any:
    """Run ktconvert with this hub and caches of its own."""
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return conversion.ktconvert(*arguments, env=env)


def fit(hub: Hub, tmp_path: Path, name: str, *options: str) -> Any:
    return run(hub, tmp_path, "fit", name, *MACHINE, *options)


def headers_folder(tmp_path: Path, name: str) -> Path:
    """Return the folder of the cached headers of a model."""
    return tmp_path / "cache" / "ktconvert" / "headers" / f"models--org--{name}" / COMMIT


HEADERS = 100_000  # bytes of headers, more than the example has


def read_document(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_model_of_the_hub_is_predicted_like_its_copy_on_disk(hub, tmp_path):
    remote = read_document(fit(hub, tmp_path, "org/small", "--json"))
    local = read_document(fit(hub, tmp_path, str(tmp_path / "models" / "small"), "--json"))
    weights = sum(path.stat().st_size for path in (tmp_path / "models" / "small").glob("*.safetensors"))
    assert remote["download_bytes"] == weights and local["download_bytes"] == 0
    for ours, theirs in zip(remote["choices"], local["choices"], strict=True):
        streamed = ours["quant_method"] is not None and not ours["gpu_experts"] and ours["rest"] != "W4A16"
        rest = weights - local["routed_bytes"] if streamed else 0  # the files of the model are in the window
        assert 0 <= ours.pop("disk") - theirs.pop("disk") - rest - weights + HEADERS < 2 * HEADERS
        assert ours == theirs
    assert remote["commands"][0] == {"step": "download", "command": "hf download org/small --local-dir small"}
    assert not (tmp_path / "hub").exists()


def test_only_the_rest_is_downloaded_if_all_experts_are_converted(hub, tmp_path):
    document = read_document(fit(hub, tmp_path, "org/small", "--json", "--vram", "0", "--prefer", "memory"))
    first, second, third = (step["command"] for step in document["commands"][:3])
    assert first == "ktconvert fetch org/small -o small"
    assert second.startswith("ktconvert cpu -i org/small -o small-AMXINT4 ") and second.endswith(" --stream")
    assert document["compare_command"] == "ktconvert verify small-AMXINT4 --against org/small"
    assert third == "ktconvert verify small-AMXINT4"  # a comparison would download the experts again


def test_weights_are_not_read_and_headers_only_once(hub, tmp_path):
    fit(hub, tmp_path, "org/small")
    sent = hub.sent
    folder = headers_folder(tmp_path, "small")
    source = tmp_path / "models" / "small"
    with open_checkpoint(folder) as ours, open_checkpoint(source) as theirs:
        assert ours.tensors == theirs.tensors and ours.config == theirs.config
        assert [s.header_sha256 for s in ours.shards] == [s.header_sha256 for s in theirs.shards]
    assert all((folder / s.name).stat().st_blocks * 512 < s.size + 8192 for s in ours.shards)
    assert all(span for method, path, span in hub.requests if method == "GET" and path.endswith(".safetensors"))
    fit(hub, tmp_path, "org/small")
    assert hub.sent == sent > 0
    assert [*folder.glob(".*")] == []


def test_inspect_requests_headers_and_only_the_weights_that_it_measures(hub, tmp_path):
    """A third of 24 experts are measured, of which blocks of 1 MiB are fetched."""
    source = conversion.checkpoint(tmp_path / "models" / "many", layers=1, experts=24, hidden=128, width=1024)
    hub.models["org/many"] = source
    texts = []
    for name in ("org/many", str(source)):
        done = run(hub, tmp_path, "inspect", name, "--json")
        texts.append(json.dumps(read_document(done)).replace(name, "NAME"))
    assert texts[0] == texts[1] and "ktconvert cpu -i NAME" in texts[0]
    assert 0 < hub.sent < 3 * FIRST_BYTES and not (tmp_path / "hub").exists()
    columns = read_document(run(hub, tmp_path, "inspect", "org/many", "--columns", "--json"))["columns"]
    assert columns == read_document(run(hub, tmp_path, "inspect", name, "--columns", "--json"))["columns"]
    assert hub.sent < 0.8 * sum(path.stat().st_size for path in source.glob("*.safetensors"))


def test_inspect_prints_commands_for_the_inspected_revision(hub, tmp_path):
    document = read_document(run(hub, tmp_path, "inspect", "org/small", "--revision", COMMIT, "--json"))
    commands = [*document["convert"], *document["convert_gpu"]]
    assert len(commands) > 3 and all(command.endswith(f" --revision {COMMIT}") for command in commands)


def test_headers_longer_than_the_first_request_are_read_to_their_end(hub, tmp_path):
    source = conversion.checkpoint(tmp_path / "models" / "many", layers=1, experts=256, hidden=32, width=32)
    hub.models["org/many"] = source
    assert fit(hub, tmp_path, "org/many").returncode == 0
    with open_checkpoint(headers_folder(tmp_path, "many")) as ours, open_checkpoint(source) as theirs:
        assert ours.tensors == theirs.tensors
    starts = [span.partition("-")[0] for _, path, span in hub.requests if path.endswith("00001-of-00002.safetensors")]
    assert {"bytes=0", f"bytes={FIRST_BYTES}"} <= {*starts}


def test_a_file_of_a_gguf_repository_is_predicted(hub, tmp_path):
    document = read_document(fit(hub, tmp_path, "org/gguf:small.gguf", "--json"))
    assert document["download_bytes"] == GGUF.stat().st_size
    assert document["commands"][0]["command"] == "hf download org/gguf small.gguf --local-dir small"


def test_a_complete_snapshot_in_the_cache_needs_no_network(hub, tmp_path):
    model = tmp_path / "hub" / "models--org--small"
    shutil.copytree(tmp_path / "models" / "small", model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    document = read_document(fit(hub, tmp_path, "org/small", "--json"))
    assert document["download_bytes"] == 0 and hub.requests == []


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("org/absent", (), "public model of the hub"),
        ("org/small", ("--revision", "v9"), "has no revision v9"),
        ("org/gguf:absent.gguf", (), "has no file absent.gguf"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub, tmp_path, name, options, text):
    conversion.check_refusal(fit(hub, tmp_path, name, *options), 5, text)


@pytest.mark.parametrize(
    ("status", "problem", "remedy"),
    [
        (401, "neither a local path nor a public model of the hub", "correct the name, or run `hf auth login`"),
        (404, "neither a local path nor a public model of the hub", "correct the name, or run `hf auth login`"),
        (403, "the hub refuses access to the model (status 403)", "run `hf auth login`"),
        (501, "answers with status 501", "try again later"),
    ],
)
def test_answers_of_the_hub_are_told_from_a_missing_network(status, problem, remedy, tmp_path):
    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_POST = do_GET

    with serve(Refusal) as url:
        hub = Hub({}, url)
        for done in (fit(hub, tmp_path, "org/absent"), run(hub, tmp_path, "cpu", "org/absent", str(tmp_path / "out"))):
            conversion.check_refusal(done, 5, "org/absent: ", problem, remedy)
            assert "cannot be reached" not in done.stderr


def test_a_hub_that_does_not_answer_is_explained(tmp_path):
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    env |= {"HF_HUB_OFFLINE": "0"}
    conversion.check_refusal(
        conversion.ktconvert("fit", "org/small", *MACHINE, env=env),
        5,
        "org/small: does not exist here",
        "cannot be downloaded, as the hub http://127.0.0.1:9 cannot be reached; ",
        "check the network",
    )


@pytest.mark.parametrize("name", ["org/small", "org/gguf:small.gguf"])
def test_headers_of_an_earlier_call_are_used_without_a_network(hub, tmp_path, monkeypatch, name):
    first = fit(hub, tmp_path, name, "--json")
    monkeypatch.setattr(hub, "url", "http://127.0.0.1:9")
    again = fit(hub, tmp_path, name, "--json")
    assert read_document(again)["choices"] == read_document(first)["choices"]
    notes = [line for line in again.stderr.splitlines() if line.startswith("note: ")]
    assert notes == [
        f"note: {name}: the hub does not answer; the headers of commit 01234567 are those of an earlier call"
    ]
    conversion.check_refusal(fit(hub, tmp_path, name, "--revision", "v1"), 5, "cannot be downloaded")


def test_without_a_network_the_cache_is_named(tmp_path):
    env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    conversion.check_refusal(conversion.ktconvert("fit", "org/small", *MACHINE, env=env), 5, "HF_HUB_OFFLINE is set")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_named(hub, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    conversion.check_refusal(fit(hub, tmp_path, "org/small"), 4, "cannot be written")
