"""Models behind URLs: over HTTP from the local hub, and on S3 from moto's server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.sources import retries, url_headers
from ktconvert.layouts.sources.remote import RemoteFile, RemoteFiles
from rig import absent, conversion, killpoint
from rig.hub_server import COMMIT, SHORT_WAITS, Hub, serve_hub

LAYERS = 5
FIRST = f"model-00001-of-{LAYERS + 1:05d}.safetensors"
LAST = f"model-{LAYERS:05d}-of-{LAYERS + 1:05d}.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> conversion.Tree:
    output = tmp_path_factory.mktemp("expected") / "out"
    assert conversion.ktconvert("cpu", "-i", model, "-o", output, "--quant-method", "int8").returncode == 0
    return weights(output)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killpoint.build(tmp_path_factory.mktemp("shim"))


def weights(folder: Path) -> conversion.Tree:
    return {name: data for name, data in conversion.tree(folder).items() if name.endswith(".safetensors")}


def stream(url: str, output: Path) -> tuple[str, ...]:
    return "cpu", "-i", url, "-o", str(output), "--quant-method", "int8", "--stream"


# --- HTTP -----------------------------------------------------------------------------------------


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[Hub]:
    pytest.importorskip("aiohttp")
    with serve_hub({"org/model": shutil.copytree(model, tmp_path / "model")}) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def address(hub: Hub) -> str:
    return f"{hub.url}/org/model/resolve/{COMMIT}"


def test_a_model_behind_http_has_the_same_bytes_in_spite_of_faults(hub, environment, expected, tmp_path) -> None:
    """The server lists no folders: the index names the files of weights."""
    command = stream(address(hub), tmp_path / "out")
    hub.faults += ["503", "reset"]
    assert conversion.ktconvert(*command, "--dry-run", env=environment, program=SHORT_WAITS).returncode == 0
    hub.faults += ["503", "429", "reset", "short"]
    done = conversion.ktconvert(*command, env=environment, program=SHORT_WAITS)
    assert done.returncode == 0, done.stderr
    assert not hub.faults and weights(tmp_path / "out") == expected
    assert (tmp_path / "out" / "tokenizer.json").exists()
    done = conversion.ktconvert("verify", tmp_path / "out", "--against", address(hub), env=environment)
    assert done.returncode == 0 and "quantized again, same bytes" in done.stdout, done.stderr


def test_a_file_that_changes_while_it_is_read_is_named(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = url_headers.find_url_headers(address(hub))
    assert place.remote is not None
    path = tmp_path / "model" / LAST
    conversion.flip_bit(path)
    files = RemoteFiles(place.remote, tmp_path)
    files.reserve_whole(RemoteFile(LAST, path.stat().st_size, None))
    with pytest.raises(InputError, match=f"{LAST}: changed while it was being read"):
        files.fetch_whole(LAST)
    files.close()


class Refusal(Exception):
    """An answer of a server, as libraries raise it."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (ConnectionResetError(), [1, 2, 4, 8, 16]),
        (Refusal(503), [1, 2, 4, 8, 16]),
        (Refusal(429, Retry_After="7"), [7] * 5),
        (Refusal(429, Retry_After="3600"), [retries.LONGEST_WAIT] * 5),
        (Refusal(429, Retry_After="Fri, 01 Jan 2027 00:00:00 GMT"), [1, 2, 4, 8, 16]),
        (Refusal(403), []),
        (FileNotFoundError(), []),
    ],
)
def test_waits_before_new_attempts_grow_unless_the_server_names_one(error, waits, monkeypatch) -> None:
    """Errors that do not pass get no new attempt."""
    waited: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", waited.append)

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        retries.call_patiently(fail)
    assert waited == waits


@pytest.mark.parametrize(
    ("address", "options", "code", "reason"),
    [
        ("s3://bucket/model", (), 2, "is a URL; only `fetch`, commands with --stream"),
        ("s3://bucket/model", ("--stream", "--revision", "main"), 2, "a revision is for a model of the hub"),
        ("http://127.0.0.1:1/model", ("--stream",), 5, "cannot be read (Cannot connect"),
    ],
)
def test_urls_are_refused_with_one_sentence(address, options, code, reason, environment, tmp_path) -> None:
    pytest.importorskip("aiohttp")
    done = conversion.ktconvert("cpu", address, tmp_path / "out", *options, env=environment)
    conversion.check_refusal(done, code, address, reason)


def test_fit_and_up_read_headers_behind_a_url(hub, environment, tmp_path) -> None:
    machine = ("--ram", "1TB", "--disk", "1TB", "--bandwidth", "20GB", "--numa", "1", "--vram")
    done = conversion.ktconvert("fit", address(hub), *machine, "0", "--prefer", "memory", env=environment)
    assert done.returncode == 0, done.stderr
    assert f"ktconvert fetch {address(hub)} -o {COMMIT}\n" in done.stdout
    assert f"ktconvert cpu -i {address(hub)} -o {COMMIT}-AMXINT4 " in done.stdout
    up = ("up", address(hub), "-o", tmp_path / "server", *machine)
    done = conversion.ktconvert(*up, "0", "--prefer", "memory", "--dry-run", env=environment)
    assert done.returncode == 0, done.stderr
    done = conversion.ktconvert(*up, "24GB", "--yes", env=environment)  # experts on the GPU cannot be streamed
    conversion.check_refusal(done, 3, "needs all files on disk; download them")


def test_inspect_reads_headers_behind_a_url(hub, environment) -> None:
    done = conversion.ktconvert("inspect", address(hub), "--json", env=environment)
    assert done.returncode == 0, done.stderr
    assert all(command.endswith(" --stream") for command in json.loads(done.stdout)["convert"])


def test_a_damaged_index_is_named(hub, environment, tmp_path) -> None:
    (tmp_path / "model" / "model.safetensors.index.json").write_text("[]")
    done = conversion.ktconvert(*stream(address(hub), tmp_path / "out"), env=environment)
    conversion.check_refusal(done, 5, f"{address(hub)}/model.safetensors.index.json: not an index of weights")


def test_a_missing_package_is_named_with_its_extra(environment, tmp_path) -> None:
    environment |= absent.hide_package("s3fs", tmp_path)
    done = conversion.ktconvert(*stream("s3://bucket/model", tmp_path / "out"), env=environment)
    conversion.check_refusal(done, done.returncode, "s3:// needs s3fs, not installed here: `pip install ", "[s3]")


# --- S3 -------------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """A model on S3.

    client       boto3's
    environment  of processes that read it
    """

    client: Any
    environment: dict[str, str]

    def put(self, path: Path, name: str) -> None:
        self.client.upload_file(str(path), "bucket", f"models/model/{name}")


@pytest.fixture
def bucket(model: Path, environment: dict[str, str]) -> Iterator[Bucket]:
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    endpoint = f"http://{host}:{port}"
    names = ("aws_access_key_id", "aws_secret_access_key", "region_name")
    client = boto3.client("s3", endpoint_url=endpoint, **dict(zip(names, keys.values(), strict=True)))
    client.create_bucket(Bucket="bucket")
    served = Bucket(client, environment | keys | {"AWS_ENDPOINT_URL": endpoint})
    for path in model.iterdir():
        if path.is_file():
            served.put(path, path.name)
    yield served
    server.stop()


def test_a_model_on_s3_is_resumed_and_a_changed_file_is_named(bucket, model, expected, shim, tmp_path) -> None:
    output = tmp_path / "out"
    command = stream("s3://bucket/models/model", output)
    killed = killpoint.run([*conversion.KTCONVERT, *command], output, 60, shim, env=bucket.environment)
    assert killed.returncode == killpoint.KILLED
    changed = tmp_path / LAST
    shutil.copy(model / LAST, changed)
    conversion.flip_bit(changed)
    bucket.put(changed, LAST)
    done = conversion.ktconvert(*command, env=bucket.environment)
    conversion.check_refusal(done, 5, f"s3://bucket/models/model is not the input of {output}", f"content of {LAST}")
    bucket.put(model / LAST, LAST)
    done = conversion.ktconvert("resume", output, env=bucket.environment)
    assert done.returncode == 0, done.stderr
    assert weights(output) == expected
