#!/usr/bin/env python3
"""Largest memory of `ktconvert serve`, by length of the prompt: as `ktconvert fit` predicts it, and as measured.

python benchmarks/fit_memory.py                                      minutes, 5 GB of disk
python benchmarks/fit_memory.py --models DeepSeek-V3 --tokens 500

Each model has layers of a released shape with random weights, few experts, and the tokenizer of the bundled model. One
server reads all prompts of a model, the shortest first. The table also shows the bundled model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shapes

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "qwen3-moe-small"
PROGRAM = (sys.executable, "-m", "ktconvert.pipeline.cli")
WORD = " os"  # one token
METHOD = "int8"
# Shape -> entries of its config that make it small.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"num_hidden_layers": 2, "num_experts": 32},
    "DeepSeek-V3": {"num_hidden_layers": 1, "n_routed_experts": 16, "first_k_dense_replace": 0, "n_group": 1}
    | {"topk_group": 1, "head_dim": 64},
}


def main() -> None:
    """Measure and print a line for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[100, 800, 3600, 15300], help="lengths of prompts")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    options = parser.parse_args()
    print(f"{'model':14} {'tokens':>6} {'predicted, MB':>13} {'measured, MB':>12} {'difference':>10}")
    with tempfile.TemporaryDirectory(prefix="ktconvert-fit-", dir=options.dir) as folder:
        compare(EXAMPLE, Path(folder) / "bundled", [800], options.threads)
        for name in options.models:
            model = Path(folder) / name
            run(sys.executable, "-c", WRITE, model, json.dumps(make_config(name)))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(EXAMPLE / file, model)
            compare(model, Path(folder) / f"{name}-{METHOD}", sorted(options.tokens), options.threads)
            shutil.rmtree(model)


def make_config(name: str) -> dict[str, Any]:
    """Return the config of a small model."""
    vocabulary = json.loads((EXAMPLE / "config.json").read_text())["vocab_size"]
    positions = {"vocab_size": vocabulary, "max_position_embeddings": 1 << 16}
    config = {**shapes.SHAPES[name].config, **MODELS[name], **positions}
    config.pop("quantization_config", None)
    return config


WRITE = """
import json, sys
from transformers import AutoConfig, AutoModelForCausalLM
import torch
config = json.loads(sys.argv[2])
config = AutoConfig.for_model(config.pop("model_type"), **config)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
"""


def compare(model: Path, weights: Path, lengths: list[int], threads: str) -> None:
    """Print the predicted and the measured memory of a server after each of these prompts."""
    run(*PROGRAM, "cpu", "-i", model, "-o", weights, "--quant-method", METHOD, "--numa", 1, "-q")
    with start_server(model, weights, threads) as (pid, url):
        for length in lengths:
            tokens = read_prompt(url, length)
            status = Path(f"/proc/{pid}/status").read_text()
            measured = 1024 * int(status.partition("VmHWM:")[2].split()[0])
            predicted = predict(model, tokens)
            figures = f"{predicted / 1e6:13,.0f} {measured / 1e6:12,.0f} {predicted / measured - 1:+10.1%}"
            print(f"{model.name:14.14} {tokens:6,} {figures}", flush=True)


def predict(model: Path, context: int) -> int:
    """Return the bytes that `fit` predicts for the converted experts and a sequence of this length."""
    machine = ("--vram", "0", "--ram", "1TB", "--disk", "1TB", "--bandwidth", "100GB", "--numa", "1")
    document = json.loads(run(*PROGRAM, "fit", model, *machine, "--context", context, "--json"))
    return next(choice["ram"] for choice in document["choices"] if choice["quant_method"] == METHOD)


@contextmanager
def start_server(model: Path, weights: Path, threads: str) -> Iterator[tuple[int, str]]:
    """Start `ktconvert serve`; yield its process number and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*PROGRAM, "serve", model, "--cpu-weights", weights, "--threads", threads, "--port", port]
    server = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    try:
        while not is_ready(url):
            if server.poll() is not None:
                sys.exit("the server did not come up")
            time.sleep(0.2)
        yield server.pid, url
    finally:
        server.terminate()
        server.wait()


def is_ready(url: str) -> bool:
    """Return whether the server answers."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def read_prompt(url: str, length: int) -> int:
    """Let the server read a prompt of about this length; return its number of tokens."""
    body = json.dumps({"prompt": WORD * length, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as response:
        return int(json.load(response)["usage"]["prompt_tokens"])


def run(*command: object) -> str:
    """Run a command; return what it prints. Raises CalledProcessError."""
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    main()
