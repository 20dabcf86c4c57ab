"""A server that speaks the part of the hub's API with which huggingface_hub describes a model and reads its files."""

import contextlib
import datetime
import functools
import hashlib
import inspect
import ipaddress
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ktconvert.layouts.sources import retries
from ktconvert.pipeline.cli import main

SHORT_WAITS = "rig.hub_server:run_with_short_waits"  # program that conversion.ktconvert forks
CHUNK = 1 << 18  # bytes that are sent at once
COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+?)(?:/(?P<kind>revision|tree|paths-info)/(?P<revision>[^/]+).*)?")
RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Hub:
    """A running hub.

    url       its address, for HF_ENDPOINT
    requests  (method, path, Range) of the requests so far
    sent      bytes of files that it has sent
    rate      bytes per second of all connections together; 0: no limit
    faults    what goes wrong with the next reads of weights: "429", "503", "reset", "short" or "flip"
    statuses  answers to the next requests for a whole file of weights, or for its size
    missing   status of files that it does not have
    flipped   names of files whose last bit is flipped on the way
    """

    def __init__(self, models: dict[str, Path], url: str) -> None:
        self.models, self.url = models, url
        self.requests: list[tuple[str, str, str]] = []
        self.sent = 0
        self.faults: list[str] = []
        self.statuses: list[str] = []
        self.missing = 404
        self.ignores_ranges = False
        self.flipped: set[str] = set()
        self.rate = 0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait as long as a line of this rate needs for these bytes."""
        if self.rate:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.rate
            time.sleep(max(0.0, self._free_at - time.monotonic()))


@functools.cache
def _identify(path: Path, _modified: int) -> str:
    """Return the SHA-256 of a file, by which the hub identifies it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _describe_file(folder: Path, name: str, _modified: int) -> dict[str, Any]:
    """Return what the hub states about a file: the SHA-256 of weights, and the hash of git for other files."""
    data = (folder / name).read_bytes()
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
    lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    weights = {"lfs": lfs} if name.endswith((".safetensors", ".gguf")) else {}
    return {"rfilename": name, "size": len(data), "blobId": blob, **weights}


def _make_handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer()

        def _answer(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
            match = RESOLVE.fullmatch(path) or API.fullmatch(path)
            folder = hub.models.get(match["name"]) if match else None
            if match is None or folder is None or match["revision"] not in (None, "main", COMMIT):
                code = "RevisionNotFound" if folder else "RepoNotFound"
                self._send(hub.missing, b'{"error": "not found"}', {"X-Error-Code": code})
            elif match.re is RESOLVE:
                self._send_file(folder / match["file"])
            else:
                self._send_json(match["name"], folder, match["kind"])

        def _send_json(self, name: str, folder: Path, kind: str | None) -> None:
            files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
            entries = [
                {"type": "file", "path": file, "size": size, "oid": "0" * 40} for file, size in sorted(files.items())
            ]
            document: Any = entries
            if kind in (None, "revision"):
                siblings = [_describe_file(folder, file, (folder / file).stat().st_mtime_ns) for file in sorted(files)]
                document = {"_id": "0", "id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            elif kind == "paths-info":
                asked = self.body.decode()
                document = [entry for entry in entries if entry["path"] in unquote(asked).replace("+", " ")]
            self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def _send_file(self, path: Path) -> None:
            if not path.is_file():
                self._send(hub.missing, b"", {"X-Error-Code": "EntryNotFound"})
                return
            size = path.stat().st_size
            headers = {
                "ETag": f'"{_identify(path, path.stat().st_mtime_ns)}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            asked = "" if hub.ignores_ranges else self.headers.get("Range", "")
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            start, stop = (int(span[1]), min(size, int(span[2] or size) + 1)) if span else (0, size)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(stop - start) if self.command == "GET" else b""
            faults = hub.faults if span else hub.statuses if path.suffix == ".safetensors" else []
            fault = faults.pop(0) if faults else ""
            if data and (path.name in hub.flipped or fault == "flip"):
                data = data[:-1] + bytes([data[-1] ^ 1])
            if fault.isdigit():
                self._send(int(fault), b"", {"Retry-After": "0"})
                return
            if fault in ("reset", "short"):
                self.close_connection = True
                data = data[: len(data) // 2] if fault == "short" else b""
            hub.sent += len(data)
            if span:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._send(206 if span else 200, data, headers, stop - start)

        def _send(self, status: int, data: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                for start in range(0, len(data), CHUNK):
                    hub.wait(len(data[start : start + CHUNK]))
                    self.wfile.write(data[start : start + CHUNK])

    return Handler


def run_with_short_waits() -> None:
    """Run the command line with waits of milliseconds, not seconds, before new attempts: ours and huggingface_hub's."""
    retries.FIRST_WAIT = 0.001
    with contextlib.suppress(ImportError):
        from huggingface_hub.utils import http_backoff, http_stream_backoff

        for function in (http_backoff, http_stream_backoff):
            inspect.unwrap(function).__kwdefaults__["base_wait_time"] = 0.001
    main()


@contextlib.contextmanager
def serve_hub(models: dict[str, Path], certificate: Path | None = None) -> Iterator[Hub]:
    """Serve directories as models of a hub, org/name -> directory."""
    hub = Hub(models, "")
    with serve(_make_handler(hub), certificate) as hub.url:
        yield hub


@contextlib.contextmanager
def serve(handler: Callable[..., BaseHTTPRequestHandler], certificate: Path | None = None) -> Iterator[str]:
    """Run a server and yield its URL; certificate: a file with its certificate and key, for https://."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_certificate(folder: Path) -> Path:
    """Write a key and its certificate for 127.0.0.1, which is its own authority, to one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "certificate.pem"
    path.write_bytes(certificate + key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    return path
