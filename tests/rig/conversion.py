"""A tiny checkpoint, the real command line, and checks of its results: shared by tests that kill and resume."""

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
from rig.safetensors import write_shards

KTCONVERT = (sys.executable, "-m", "ktconvert.pipeline.cli")
TIMEOUT = 300.0  # seconds; a conversion takes 0.5 seconds, and much longer on a loaded machine
MODEL_COMMANDS = ("run", "eval", "train", "merge-adapter", "calibrate")  # commands that load models
SENTENCE_ENDS = (".", "?", "?)")
MIN_FREE = 256 << 20  # bytes that /dev/shm must have free; a test needs a few MB
# CPUs that a test uses, with a server for each; a container may report all CPUs of a large machine.
CORES = min(8, machine.usable_cpus())
HIDDEN, WIDTH = 128, 256  # the smallest that AMXINT4 in two NUMA slices allows
# Random draws are the same in every run, unless KTCONVERT_TEST_SEED is set; `make test-long` sets it.
SEED = int(os.environ.get("KTCONVERT_TEST_SEED", 0))
FUZZ = int(os.environ.get("KTCONVERT_FUZZ", 1))  # factor for the number of mutations
Tree = dict[str, bytes | None]


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Draw weights of either sign between 1/128 and 1/32, as BF16 bits."""
    return rng.integers(0, 1 << 16, shape, np.uint16) & 0x80FF | 0x3C00


def checkpoint(
    folder: Path, *, layers: int = 3, experts: int = 2, hidden: int = HIDDEN, width: int = WIDTH, seed: int = 0
) -> Path:
    """Write a BF16 checkpoint shaped like Qwen3-MoE: a shard per layer, one for the other tensors, and companions."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors: dict[str, Any] = {f"{prefix}mlp.gate.weight": bf16(rng, experts, hidden)}
        for expert in range(experts):
            for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = bf16(rng, *shape)
        shards.append(tensors)
    shards.append({"model.embed_tokens.weight": bf16(rng, 64, hidden), "model.norm.weight": bf16(rng, hidden)})
    write_shards(folder, [{key: ("BF16", data) for key, data in each.items()} for each in shards], {"format": "pt"})
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu"}
    config |= {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 1}
    config |= {"hidden_size": hidden, "moe_intermediate_size": width}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"seed": seed, "text": "word " * 50}))
    (folder / "extra").mkdir()
    (folder / "extra" / "chat_template.jinja").write_text("{{ messages }}\n")
    return folder


def flip_bit(path: Path, at: int = -1, *, keep_time: bool = False) -> None:
    """Flip the top bit of a byte of a file (by default, the sign of the last weight), and advance its mtime."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        move_time(path, before)


def ktconvert(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    prefix: Iterable[str] = (),
    program: str = forks.COMMAND_LINE,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the real command line in its own process.

    A server that has imported it forks the process, unless prefix or other options are given, or variables that only a
    new process reads. program: function MODULE:FUNCTION to fork instead of the command line.
    """
    models = _loads_models(arguments)
    changed = _find_changed_variables(env or {})
    if not (prefix or options or changed is None or (models and changed)):
        return _run(models, arguments, program, changed, cwd)
    assert program == forks.COMMAND_LINE
    command = [*prefix, *KTCONVERT, *map(str, arguments)]
    options = {"timeout": TIMEOUT, "capture_output": True, "text": True, "cwd": cwd} | options
    return subprocess.run(command, env={**os.environ, **(env or {})}, **options)


def _loads_models(arguments: Sequence[str | Path]) -> bool:
    return "gptq" in arguments or next(iter(arguments), None) in MODEL_COMMANDS


def fork(program: str, *arguments: str | Path, models: bool = False) -> subprocess.CompletedProcess[str]:
    """Call a function MODULE:FUNCTION of tests/rig or the product in its own process, with these arguments.

    The process is forked from one that has imported the command line; models: and the libraries that load models.
    """
    return _run(models, arguments, program)


def run_in_process(*arguments: object) -> Result:
    """Run the command line in this process."""
    from ktconvert.pipeline.cli import group

    return CliRunner().invoke(group, [*map(str, arguments)])


@functools.cache
def _server() -> forks.Forks:
    """Return this process's server for commands that load no model."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(forks.Forks([], modules=["rig.documents"], env=ENVIRONMENT))


def _run(
    models: bool,
    arguments: Sequence[str | Path],
    program: str = forks.COMMAND_LINE,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    from rig.model_server import model_server

    server = model_server() if models else _server()
    with tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        return server.run(  # type: ignore[no-any-return]
            arguments, logs / "log", env, printed=logs / "printed", program=program, folder=folder
        )


# Variables that pytest sets, and that torch and commands set in this process: a new process would not have them.
OWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY", "LRU_CACHE_CAPACITY"}
OWN |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TQDM_DELAY"}
# Outputs of tests depend neither on the machine nor on the user's config file.
os.environ |= {"KTCONVERT_NUMA": "2", "XDG_CONFIG_HOME": str(Path(__file__).parents[2] / "build" / "config")}
# Commands print all notes.
CONVERTING = ("cpu", "gpu", "calibrate", "dequantize", "fetch", "merge", "merge_adapter", "resplit", "resume")
VERBOSE = [f"KTCONVERT_{name.upper()}_VERBOSE" for name in (*CONVERTING, "train", "verify")]
os.environ |= dict.fromkeys(VERBOSE, "1")
ENVIRONMENT = dict(os.environ)  # before the first test


# Names of variables that a forked process reads too late begin with these.
AT_START = ("LD_", "PYTHON", "OMP_", "KTCONVERT_ISA", "DASK_")


def _find_changed_variables(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables that differ from those of the servers; None if a forked process cannot have them."""
    servers, wanted = (
        {name: value for name, value in variables.items() if name not in OWN} for variables in (ENVIRONMENT, os.environ)
    )
    wanted |= env
    changed = dict(wanted.items() - servers.items())
    return None if servers.keys() - wanted or any(name.startswith(AT_START) for name in changed) else changed


def wait_until_stopped(process: subprocess.Popen[Any]) -> None:
    """Wait until each thread of a process that got SIGSTOP has stopped, which is when its system call has ended."""
    while process.poll() is None and not _has_stopped(process.pid):
        time.sleep(0.001)


def _has_stopped(pid: int) -> bool:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] in "TZX" for task in tasks)
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the JSON events among the lines of an output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def check_refusal(done: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    """Assert that a command ended with this exit code and one complete sentence, which contains these texts."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ktconvert: ")]
    assert len(lines) == 1, done.stderr
    assert not [text for text in texts if text not in lines[0]], lines[0]
    assert lines[0].endswith(SENTENCE_ENDS), lines[0]


class Mounts(contextlib.AbstractContextManager[Any]):
    """A private mount namespace, as a context manager: other processes do not see its mounts, which end with it."""

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
        """Run mount inside the namespace."""
        subprocess.run([*self.prefix, "mount", *map(str, arguments)], check=True)

    def host_path(self, path: Path) -> Path:
        """Return the path by which processes outside the namespace reach this path."""
        return Path(f"/proc/{self._holder.pid}/root{path}")


@contextlib.contextmanager
def memory_folder(fallback: Path) -> Iterator[Path]:
    """Make a folder on a tmpfs, where syncing is free; use the fallback if the tmpfs is small, as in containers."""
    shared = Path("/dev/shm")
    is_large = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= MIN_FREE
    base = Path(tempfile.mkdtemp(dir=shared)) if is_large else fallback
    base.mkdir(parents=True, exist_ok=True)
    try:
        yield base
    finally:
        shutil.rmtree(base)


def tree(folder: Path) -> Tree:
    """Return each file's bytes, each link's target, and None for each folder, by relative path."""

    def content(p: Path) -> bytes | None:
        return str(p.readlink()).encode() if p.is_symlink() else p.read_bytes() if p.is_file() else None

    return {str(p.relative_to(folder)): content(p) for p in folder.rglob("*")}


def identity(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what a write would change: inode, size, mode and times of each entry and of the folder itself."""
    return {
        str(p): (s.st_ino, s.st_size, s.st_mode, s.st_mtime_ns, s.st_ctime_ns)
        for p in [folder, *folder.rglob("*")]
        for s in [p.lstat()]
    }


def names(folder: Path) -> list[str]:
    """Return the names of a folder's entries, sorted."""
    return sorted(path.name for path in folder.iterdir())


def find_differences(actual: Tree, expected: Tree) -> list[str]:
    """Return the names of files that are missing, extra or different: a failure then shows names instead of trees."""
    return sorted(n for n in actual.keys() | expected.keys() if actual.get(n, b"-") != expected.get(n, b"-"))


def run_in_parallel(job: Callable[[Any], Any], numbers: Iterable[Any]) -> list[Any]:
    """Return job(n) for each n; a few run at a time, in threads that wait for processes. Raise the first error."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(job, numbers))


def seeded_random() -> random.Random:
    """Return the random generator of a test, and print its seed for the case that the test fails."""
    print(f"KTCONVERT_TEST_SEED={SEED}")
    return random.Random(SEED)


def draw_seeds(count: int) -> Iterator[int]:
    """Yield `count` seeds for mutations, or KTCONVERT_FUZZ times as many."""
    draw = seeded_random()
    return (draw.getrandbits(64) for _ in range(count * FUZZ))


def draw_pairs(first: range, second: range, count: int) -> list[tuple[int, int]]:
    """Draw pairs, no two the same, since each names a folder."""
    drawn = seeded_random().sample(range(len(first) * len(second)), count)
    return [(first[n // len(second)], second[n % len(second)]) for n in drawn]


def choose_kill_points(count: int, runs: int) -> list[int]:
    """Choose kill count that are spread over a whole run; the seed decides which."""
    step = max(1, count // runs)
    offset = seeded_random().randint(1, step)
    print(f"kill count {offset}, {offset + step} ... of {count}")
    return list(range(offset, count + 1, step))


class Events(Reporter):
    """A reporter that records its events."""

    def __init__(self) -> None:
        super().__init__(verbosity=-2)
        self.recorded: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.recorded.append({"event": kind, **fields})
