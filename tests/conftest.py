"""Shared fixtures: small checkpoints of any encoding and way of storage, and the real command line."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ktconvert.native_quant import kernels
from rig import conversion, draws, encodings, isas
from rig.safetensors import write_file
from rig.toys import Toy

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "qwen3-moe-small"

# Their fixtures are for all tests: `bench` and `servers`, `converted` and `converted_long`, `cluster`.
pytest_plugins = ("rig.bench", "rig.calibrated", "rig.dask_cluster", "rig.rates", "rig.threads")

draws.same_everywhere()

Cli = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def example() -> Path:
    """The bundled trained model: 2 layers, 8 experts, H = I = 256, BF16."""
    return EXAMPLE


@pytest.fixture(params=kernels.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in use; a machine without it says so. Whatever the test sets, the one before is put back."""
    if request.param not in kernels.available_isas():
        pytest.skip(f"this machine has no {request.param}")
    with isas.using(request.param):
        yield request.param


@pytest.fixture(scope="session")
def packed_example(tmp_path_factory: pytest.TempPathFactory, cli: Cli, example: Path) -> Write:
    """The bundled model, converted once for each choice; whoever changes it copies it first."""
    outputs: dict[tuple[object, ...], Path] = {}

    def get(method: str, parts: int = 1, *more: str) -> Path:
        key = (method, parts, *more)
        if key not in outputs:
            outputs[key] = tmp_path_factory.mktemp("packed") / f"{method}-T{parts}"
            options = ("--quant-method", method, "--threadpool-count", parts, "-q", *more)
            cli("cpu", "-i", example, "-o", outputs[key], *options)
        return outputs[key]

    return get


@pytest.fixture(scope="session")
def cli() -> Cli:
    """Run the real command in a process of its own: cli("cpu", "-i", path, ..., code=0, env={...})."""

    def run(*arguments: object, code: int | None = 0, env: dict[str, str] | None = None) -> Any:
        done = conversion.ktconvert(*map(str, arguments), env=env)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="module")
def ktconvert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """The program that a test's file is: with a row of its own in a table."""
    with Toy(str(request.path), tmp_path_factory.mktemp("toy")) as toy:
        yield toy


@pytest.fixture(scope="session")
def write_safetensors() -> Write:
    """Write a safetensors file from {name: (dtype, array of its bits)}; dtypes that NumPy lacks come as unsigned bits."""

    return write_file


@pytest.fixture(scope="session")
def write_qwen() -> Write:
    """Write a Qwen3-MoE checkpoint: write_qwen(folder, {layer: {"gate": [E, I, H], "up": ..., "down": [E, H, I]}})."""

    def write(folder: Path, layers: dict[int, dict[str, npt.NDArray[Any]]], dtype: str = "BF16", **config: Any) -> Path:
        experts, width, hidden = next(iter(layers.values()))["gate"].shape
        sizes = {"num_hidden_layers": max(layers) + 1, "num_experts": experts, "num_experts_per_tok": 2}
        sizes |= {"hidden_size": hidden, "moe_intermediate_size": width}
        dense = {"mlp_only_layers": [n for n in range(max(layers)) if n not in layers]}
        tensors: dict[str, tuple[str, npt.NDArray[Any]]] = {}
        for layer, stacked in layers.items():
            for expert in range(experts):
                for projection, array in stacked.items():
                    base, _, suffix = projection.partition(".")
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{base}_proj.{suffix or 'weight'}"
                    tensors[name] = (dtype if not suffix else "F32", array[expert])
            tensors[f"model.layers.{layer}.input_layernorm.weight"] = ("BF16", np.full(hidden, 0x3F80, np.uint16))
        tensors["model.embed_tokens.weight"] = ("BF16", np.zeros((16, hidden), np.uint16))
        return encodings.checkpoint(folder, tensors, **(sizes | dense | config))

    return write


@pytest.fixture(scope="session")
def random_experts() -> Callable[..., dict[str, npt.NDArray[Any]]]:
    """Random BF16 bits of one layer: random_experts(E, H, I, seed) -> {"gate", "up", "down"}."""

    def make(experts: int, hidden: int, width: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
        rng = np.random.default_rng(seed)
        shapes = {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
        normal = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        return {name: ((x * np.float32(0.02)).view(np.uint32) >> 16).astype(np.uint16) for name, x in normal.items()}

    return make


@pytest.fixture(scope="session")
def read_tree() -> Callable[[Path], conversion.Tree]:
    return conversion.tree


@pytest.fixture(scope="session")
def peer_python() -> str:
    """The Python of a venv that has the real kt-kernel: KTCONVERT_PEER_PYTHON names one, `make peer` makes one."""
    python = os.environ.get("KTCONVERT_PEER_PYTHON") or str(ROOT / "build" / "peer" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip("kt-kernel is not here: run `make peer`, or set KTCONVERT_PEER_PYTHON")
    return python
