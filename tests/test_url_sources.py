"""Models behind URLs: over HTTP from the local hub, on S3 from moto's server, on Google Cloud from its emulator."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.sources import remote, retries, url_headers
from ktconvert.layouts.sources.remote import RemoteFile, RemoteFiles
from rig import absent, conversion, killpoint
from rig.hub_server import COMMIT, SHORT_WAITS, Hub, make_certificate, serve, serve_hub

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


@pytest.mark.parametrize("missing", [403, 404])
def test_files_are_found_though_the_server_is_busy(hub, missing, model, tmp_path, monkeypatch) -> None:
    """fsspec requests a size with HEAD and GET, and takes every failure for a missing file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.001)
    hub.missing = missing
    hub.statuses += ["503"] * 11  # two or more for one of the six files, and too few to give up on any
    place = url_headers.find_url_headers(address(hub))
    assert not hub.statuses and place.remote is not None
    assert place.remote.files.keys() == {path.name for path in model.iterdir() if path.is_file()}


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
    """An answer of a server, as aiohttp raises it."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


def raised(error: Exception, cause: Exception | None = None, **attributes: object) -> Exception:
    """Return an error with a cause and attributes, as libraries raise it."""
    error.__cause__ = cause
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


UNTRUSTED = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)"


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
        (raised(FileNotFoundError(), Refusal(503, Retry_After="7")), [7] * 5),  # of fsspec
        (raised(Exception(), code=401), []),  # of gcsfs
        (OSError("Forbidden: bucket"), []),
        (raised(OSError(), raised(Exception(), response={"ResponseMetadata": {"HTTPStatusCode": 400}})), []),  # of s3fs
        (raised(ConnectionError(), Exception(UNTRUSTED)), []),
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


def test_a_server_that_ignores_ranges_is_named_at_once(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = url_headers.find_url_headers(address(hub)).remote
    monkeypatch.setattr(hub, "ignores_ranges", True)
    with pytest.raises(InputError, match="sends more than the requested part of the file; use one that answers"):
        remote.read_patiently(source, "config.json", 0, 10)


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
    conversion.check_refusal(done, done.returncode, "s3:// needs s3fs, not installed here: `", "pip install ", "[s3]")


# --- TLS ------------------------------------------------------------------------------------------


def test_a_server_is_read_if_its_authority_is_trusted(model, environment, expected, tmp_path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("cryptography")
    certificate = make_certificate(tmp_path)
    with serve_hub({"org/model": model}, certificate) as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        for source in (address(hub), "org/model"):
            done = conversion.ktconvert(*stream(source, tmp_path / "out"), env=environment)
            reason = f"{source}: the server's certificate is not trusted (self-signed certificate); "
            conversion.check_refusal(done, 5, reason, "set SSL_CERT_FILE to a file with the certificate")
        assert hub.requests == []
        environment |= {"SSL_CERT_FILE": str(certificate)}
        done = conversion.ktconvert(*stream(address(hub), tmp_path / "out"), env=environment)
        assert done.returncode == 0, done.stderr
        assert weights(tmp_path / "out") == expected


def test_an_untrusted_certificate_of_google_cloud_is_reported_at_once(model, environment, tmp_path) -> None:
    """gcsfs waits 31 seconds or more before its last attempt."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("cryptography")
    with serve_hub({"org/model": model}, make_certificate(tmp_path)) as hub:
        environment |= {"STORAGE_EMULATOR_HOST": hub.url}
        begin = time.monotonic()
        done = conversion.ktconvert(*stream("gs://bucket/model", tmp_path / "out"), env=environment)
        assert time.monotonic() - begin < 25  # most of it is the start of Python and libraries
    reason = "gs://bucket/model: the server's certificate is not trusted (self-signed certificate); "
    conversion.check_refusal(done, 5, reason, "set SSL_CERT_FILE to a file with the certificate")


# --- S3 and Google Cloud --------------------------------------------------------------------------


class Bucket(NamedTuple):
    """A bucket of a local server.

    url          of the bucket
    environment  of processes that read it
    put          uploads a file under a name
    """

    url: str
    environment: dict[str, str]
    put: Callable[[Path, str], object]


@contextlib.contextmanager
def serve_s3(folder: Path) -> Iterator[Bucket]:
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
    yield Bucket(
        "s3://bucket",
        keys | {"AWS_ENDPOINT_URL": endpoint},
        lambda path, name: client.upload_file(str(path), "bucket", name),
    )
    server.stop()


@contextlib.contextmanager
def serve_google(folder: Path) -> Iterator[Bucket]:
    """The user has no credentials; folder: of an empty configuration."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    storage = pytest.importorskip("gcp_storage_emulator.storage").Storage(use_memory_fs=True)
    with serve(partial(emulator.RequestHandler, storage)) as url:

        def post(path: str, data: bytes, kind: str) -> None:
            request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": kind})
            urllib.request.urlopen(request).close()

        post("/storage/v1/b", b'{"name": "bucket"}', "application/json")
        where = "/upload/storage/v1/b/bucket/o?uploadType=media&name="
        yield Bucket(
            "gs://bucket",
            {"STORAGE_EMULATOR_HOST": url, "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": str(folder)}
            | {"GOOGLE_APPLICATION_CREDENTIALS": ""},
            lambda path, name: post(where + quote(name, ""), path.read_bytes(), "application/octet-stream"),
        )


@pytest.fixture(params=[serve_s3, serve_google])
def bucket(request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path) -> Iterator[Bucket]:
    with request.param(tmp_path) as bucket:
        yield bucket._replace(environment=bucket.environment | environment)


def test_a_model_in_a_bucket_is_resumed_and_a_changed_file_is_named(bucket, model, expected, shim, tmp_path) -> None:
    for path in model.iterdir():
        if path.is_file():
            bucket.put(path, f"models/model/{path.name}")
    output, url = tmp_path / "out", f"{bucket.url}/models/model"
    command = stream(url, output)
    killed = killpoint.run([*conversion.KTCONVERT, *command], output, 60, shim, env=bucket.environment)
    assert killed.returncode == killpoint.KILLED
    changed = tmp_path / LAST
    shutil.copy(model / LAST, changed)
    conversion.flip_bit(changed)
    bucket.put(changed, f"models/model/{LAST}")
    done = conversion.ktconvert(*command, env=bucket.environment)
    conversion.check_refusal(done, 5, f"{url} is not the input of {output}", f"content of {LAST}")
    bucket.put(model / LAST, f"models/model/{LAST}")
    done = conversion.ktconvert("resume", output, "--quiet", env=bucket.environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert weights(output) == expected
