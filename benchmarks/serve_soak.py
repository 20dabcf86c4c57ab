"""Sends many requests of mixed kinds to one `ktconvert serve`, drops some midway, and checks memory and statuses.

    python benchmarks/serve_soak.py examples/qwen3-moe-small --requests 1000

Prints the server's resident memory during the run and one line of JSON at the end. The exit code is 1 if the server
ended, answered with a status of 500 or more, or grew: the median of the last quarter of the measurements is compared
with that of the second quarter.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

GROWTH = 0.05  # of the resident memory; free memory that the allocator keeps varies less
PATIENCE = 300  # seconds to wait for an answer
MEASURED = 20  # number of requests between two measurements
WORDS = (
    "import os\n",
    "def add(a, b):\n    return",
    "class A:\n",
    "for x in range(10):\n    print(",
    "# é ü 漢字 😀\n",
)

Request = tuple[str, dict[str, Any]]


def chat(draw: random.Random) -> Request:
    messages = [
        {"role": draw.choice(("system", "user")), "content": text(draw)},
        {"role": "user", "content": text(draw)},
    ]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": draw.randint(1, 40), **sampling(draw)}


def completion(draw: random.Random) -> Request:
    return "/v1/completions", {"prompt": text(draw), "max_tokens": draw.randint(1, 40), **sampling(draw)}


def response(draw: random.Random) -> Request:
    return "/v1/responses", {"input": text(draw), "max_output_tokens": draw.randint(1, 40), "temperature": 0}


def long_prompt(draw: random.Random) -> Request:
    return "/v1/completions", {"prompt": "import os\n" * draw.randint(150, 320), "max_tokens": 4}


def long_answer(draw: random.Random) -> Request:
    return "/v1/completions", {"prompt": text(draw), "max_tokens": 400, "temperature": 0.9}


def scores(draw: random.Random) -> Request:
    return "/v1/completions", {"prompt": text(draw), "max_tokens": draw.randint(0, 3), "echo": True, "logprobs": 2}


def invalid_request(draw: random.Random) -> Request:
    bodies: list[dict[str, Any]] = [
        {},
        {"messages": []},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "import os\n" * 2000}]},
        {"messages": [{"role": "user", "content": "x"}], "n": 300},
        {"messages": "x", "max_tokens": 0},
    ]
    return "/v1/chat/completions", draw.choice(bodies)


KINDS = {chat: 5, completion: 4, response: 3, long_prompt: 2, long_answer: 2, scores: 1, invalid_request: 2}


def text(draw: random.Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(1, 6)))


def sampling(draw: random.Random) -> dict[str, Any]:
    return draw.choice(
        (
            {"temperature": 0},
            {"temperature": 1.2, "seed": draw.randint(0, 9)},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 0, "stop": ["\n\n", "import"]},
            {"temperature": 1, "presence_penalty": 1, "frequency_penalty": 0.5},
        )
    )


class Soak:
    """Sends requests, and records statuses and the size of the server."""

    def __init__(self, url: str, size: Callable[[], float]) -> None:
        self.url, self.size = url, size
        self.statuses: collections.Counter[str] = collections.Counter()
        self.sizes: list[float] = []
        self._lock = threading.Lock()

    def ask(self, seed: int) -> None:
        """Send the request of this number. A quarter of the requests hang up before the answer is complete."""
        draw = random.Random(seed)
        path, body = draw.choices(list(KINDS), list(KINDS.values()))[0](draw)
        if "echo" not in body and draw.random() < 0.5:
            body["stream"] = True
        elif path == "/v1/responses":
            body["stream"] = False
        content = json.dumps(body).encode()
        status = self._drop(draw, path, content) if draw.random() < 0.25 else self._finish(path, content)
        with self._lock:
            self.statuses[status] += 1
            if sum(self.statuses.values()) % MEASURED == 0:
                self.sizes.append(self.size())
                print(f"{sum(self.statuses.values())} requests: {self.sizes[-1]:.1f} MiB", file=sys.stderr, flush=True)

    def _finish(self, path: str, content: bytes) -> str:
        answer = httpx.post(self.url + path, content=content, headers=JSON, timeout=PATIENCE)
        return "500 in a stream" if ERROR.search(answer.content) and answer.is_success else str(answer.status_code)

    def _drop(self, draw: random.Random, path: str, content: bytes) -> str:
        host, _, port = self.url.removeprefix("http://").partition(":")
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            time.sleep(draw.choice((0, 0.01, 0.1, 0.5)))
        return "dropped"


ERROR = re.compile(rb'data: \{"(?:error|type)": ?(?:\{|"error")')  # an event, not text of an answer
JSON = {"Content-Type": "application/json"}


def resident_mib(pid: int) -> float:
    """Return the MiB of a process in memory, without the files that it maps (the weights)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("RssAnon", "RssShmem")) / 1024  # type: ignore[index]


def main() -> int:
    """Run the server and the requests, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=6)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "serve", options.model, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            soak = Soak(f"http://127.0.0.1:{port}", lambda: resident_mib(server.pid))
            _wait_until_ready(f"{soak.url}/health", server)
            start = time.monotonic()
            with ThreadPoolExecutor(options.clients) as clients:
                list(clients.map(soak.ask, range(options.requests)))
            seconds = time.monotonic() - start
            ended = server.poll()
        finally:
            server.terminate()
            server.wait()
        log.seek(0)
        tracebacks = log.read().count(b"Traceback")
    quarter = len(soak.sizes) // 4
    before, after = (statistics.median(part) for part in (soak.sizes[quarter : 2 * quarter], soak.sizes[-quarter:]))
    result = {
        "requests": options.requests,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(soak.statuses.items())),
        "MiB, second quarter": round(before, 1),
        "MiB, last quarter": round(after, 1),
        "MiB, most": round(max(soak.sizes), 1),
        "tracebacks": tracebacks,
    }
    print(json.dumps(result))
    failed = any(status.startswith("5") for status in soak.statuses)
    return int(failed or ended is not None or tracebacks > 0 or after > before * (1 + GROWTH))


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    while True:
        if server.poll() is not None:
            sys.exit("the server did not come up")
        try:
            httpx.get(url, timeout=5)
            return
        except httpx.HTTPError:
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
