"""A tiny checkpoint, the real command line, and what must hold afterwards: shared by the tests of kills and resumes."""

import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from ktconvert.native_quant import machine
from ktconvert.pipeline.report.progress import Reporter
from rig import forks
from rig.files import move_time
from rig.safetensors import write_file

KTCONVERT = (sys.executable, "-m", "ktconvert.pipeline.cli")
TIMEOUT = 300.0  # seconds; a conversion takes half of one, a loaded machine many times that
# Commands that load models, and what a server of them has loaded, so that a run takes one second and not five.
OF_MODELS = ("run", "eval", "train", "merge-adapter")
MODELS = (
    *("accelerate", "datasets", "transformers.trainer", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
    *("ktconvert.pipeline.models.fine_tuning", "ktconvert.pipeline.models.evaluate"),
)
ROOM = 256 << 20  # bytes; a test needs a few MB
# That a test makes use of: each runs a server, and a container may show all of a large machine's.
CORES = min(8, machine.usable_cpus())
HIDDEN, WIDTH = 128, 256  # the smallest that AMXINT4 in two NUMA slices allows
# What is drawn by chance is the same in every run, unless KTCONVERT_TEST_SEED is another; `make test-long` draws others.
SEED = int(os.environ.get("KTCONVERT_TEST_SEED", 0))
FUZZ = int(os.environ.get("KTCONVERT_FUZZ", 1))  # how many times more mutations than usual
Tree = dict[str, bytes | None]


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Random weights of either sign between 1/128 and 1/32, as BF16 bits."""
    return rng.integers(0, 1 << 16, shape, np.uint16) & 0x80FF | 0x3C00


def checkpoint(
    folder: Path, *, layers: int = 3, experts: int = 2, hidden: int = HIDDEN, width: int = WIDTH, seed: int = 0
) -> Path:
    """A BF16 Qwen3-MoE-shaped checkpoint: one shard per layer and one for the rest, config, tokenizer, a nested file."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors: dict[str, Any] = {f"{at}mlp.gate.weight": bf16(rng, experts, hidden)}
        for expert in range(experts):
            for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = bf16(rng, *shape)
        shards.append(tensors)
    shards.append({"model.embed_tokens.weight": bf16(rng, 64, hidden), "model.norm.weight": bf16(rng, hidden)})
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, {key: ("BF16", data) for key, data in tensors.items()}, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu"}
    config |= {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 1}
    config |= {"hidden_size": hidden, "moe_intermediate_size": width}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"seed": seed, "text": "word " * 50}))
    (folder / "extra").mkdir()
    (folder / "extra" / "chat_template.jinja").write_text("{{ messages }}\n")
    return folder


def edit(path: Path, at: int = -1, *, keep_time: bool = False) -> None:
    """Change one bit of a file (of the last weight, its sign); the time of change moves on, unless it is to be kept."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        move_time(path, before)


def ktconvert(
    *arguments: str | Path, env: Mapping[str, str] | None = None, prefix: Iterable[str] = (), **how: Any
) -> subprocess.CompletedProcess[str]:
    """The real command line, in a process of its own: forked from one that has imported it, unless it is to be special."""
    if not (env or prefix or how) and threading.current_thread() is threading.main_thread():
        run, begun_in = _server(MODELS if arguments and arguments[0] in OF_MODELS else ())
        if begun_in == _environment():
            return run(arguments)
    command = [*prefix, *KTCONVERT, *map(str, arguments)]
    how = {"timeout": TIMEOUT, "capture_output": True, "text": True} | how
    return subprocess.run(command, env={**os.environ, **(env or {})}, **how)


def fork(program: str, *arguments: str | Path, modules: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Call a function of tests/rig or the product, MODULE:FUNCTION, with these arguments in a process of its own, forked
    from one that has imported the command line and these modules.
    """
    server, _ = _server(tuple(modules))
    return server(arguments, program)


def here(*arguments: object) -> Result:
    from ktconvert.pipeline.cli import group

    return CliRunner().invoke(group, [*map(str, arguments)])


@functools.cache
def _server(
    modules: tuple[str, ...],
) -> tuple[Callable[..., subprocess.CompletedProcess[str]], dict[str, str]]:
    """A server for this process, and the environment that it was started in."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    said = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = stack.enter_context(forks.Forks([], 1, modules=(*modules, "rig.documents")))

    def run(words: Sequence[str | Path], program: str = forks.COMMAND_LINE) -> subprocess.CompletedProcess[str]:
        return server.run(words, said / "log", printed=said / "printed", program=program)  # type: ignore[no-any-return]

    return run, _environment()


# What pytest says of itself, and what torch and commands that compute with it set in this process where it is not set:
# nothing that a process would find otherwise.
OWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY", "LRU_CACHE_CAPACITY"}
OWN |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TQDM_DELAY"}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OWN}


def wait_until_stopped(process: subprocess.Popen[Any]) -> None:
    """SIGSTOP reaches a thread when its system call ends; what that call does is seen until then."""
    while process.poll() is None and not _stands_still(process.pid):
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] in "TZX" for task in tasks)
    except (FileNotFoundError, ProcessLookupError):  # a thread ended just now
        return False


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One sentence, this exit code, these words."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ktconvert: ")]
    assert len(lines) == 1, done.stderr
    assert not [word for word in words if word not in lines[0]], lines[0]


class Mounts(contextlib.AbstractContextManager[Any]):
    """A mount namespace of our own: its mounts are invisible to other processes and end with it. A context manager."""

    def __init__(self) -> None:
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        ready = ["sh", "-c", "echo ready; exec sleep 3600"]
        command = ["unshare", "--mount", "--propagation", "private", *user, *ready]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._holder.stdout is not None
        line = self._holder.stdout.readline().strip()
        enter = ["-U", "--preserve-credentials"] if user else []
        self.prefix = ["nsenter", "-t", str(self._holder.pid), "-m", *enter]
        self.refusal = "" if line == "ready" else line or "unshare failed"

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.wait()

    def mount(self, *arguments: str | Path) -> None:
        subprocess.run([*self.prefix, "mount", *map(str, arguments)], check=True)

    def seen(self, path: Path) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{path}")


@contextlib.contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A folder on a tmpfs, where syncing costs nothing; on disk where the tmpfs is small, as in many containers."""
    shared = Path("/dev/shm")
    roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= ROOM
    base = Path(tempfile.mkdtemp(dir=shared)) if roomy else otherwise
    base.mkdir(parents=True, exist_ok=True)
    try:
        yield base
    finally:
        shutil.rmtree(base)


def tree(folder: Path) -> Tree:
    """Every file with its bytes, every folder, and where links point."""

    def content(p: Path) -> bytes | None:
        return str(p.readlink()).encode() if p.is_symlink() else p.read_bytes() if p.is_file() else None

    return {str(p.relative_to(folder)): content(p) for p in folder.rglob("*")}


def identity(folder: Path) -> dict[str, tuple[int, ...]]:
    """What a write would change: inode, size, mode and times of every entry, the folder itself included."""
    return {
        str(p): (s.st_ino, s.st_size, s.st_mode, s.st_mtime_ns, s.st_ctime_ns)
        for p in [folder, *folder.rglob("*")]
        for s in [p.lstat()]
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def differing(actual: Tree, expected: Tree) -> list[str]:
    """The names of what is missing, extra or has other bytes: readable where the trees themselves are not."""
    return sorted(n for n in actual.keys() | expected.keys() if actual.get(n, b"-") != expected.get(n, b"-"))


def in_parallel(job: Callable[[Any], Any], numbers: Iterable[Any]) -> list[Any]:
    """job(n) for every n, a few at a time; processes do the work. The first failure is raised."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(job, numbers))


def chance() -> random.Random:
    """What draws for a test. A test that fails shows the seed."""
    print(f"KTCONVERT_TEST_SEED={SEED}")
    return random.Random(SEED)


def seeds(count: int) -> Iterator[int]:
    """Of mutations: so many, or KTCONVERT_FUZZ times as many. A failing test shows its own in the trace."""
    draw = chance()
    return (draw.getrandbits(64) for _ in range(count * FUZZ))


def pairs(first: range, second: range, count: int) -> list[tuple[int, int]]:
    """Pairs by chance, no two the same: each names a folder."""
    drawn = chance().sample(range(len(first) * len(second)), count)
    return [(first[n // len(second)], second[n % len(second)]) for n in drawn]


def thinned(points: int, runs: int) -> list[int]:
    """Kill points spread over a whole run; which ones depends on the seed."""
    step = max(1, points // runs)
    offset = chance().randint(1, step)
    print(f"kill points {offset}, {offset + step} ... of {points}")
    return list(range(offset, points + 1, step))


class Events(Reporter):
    """Keeps what is told."""

    def __init__(self) -> None:
        super().__init__(verbosity=-2)
        self.told: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.told.append({"event": kind, **fields})
