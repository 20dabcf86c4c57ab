"""Shared fixtures: small checkpoints in any encoding, and the real command line."""

import gc
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

# These modules define the shared fixtures `bench`, `servers`, `converted`, `converted_long` and `cluster`.
pytest_plugins = ("rig.bench", "rig.calibrated", "rig.dask_cluster", "rig.rates", "rig.threads")

draws.fix_draws()
gc.disable()  # pytest_collection_finish enables it


def pytest_collection_finish() -> None:
    """Exclude imported libraries from garbage collection: each full collection then takes half a second less."""
    gc.freeze()
    gc.enable()


Cli = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def example() -> Path:
    """Return the bundled trained model: 2 layers, 8 experts, H = I = 256, BF16."""
    return EXAMPLE


@pytest.fixture(params=kernels.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use each instruction set in turn and restore the previous one; skip sets that this machine lacks."""
    if request.param not in kernels.available_isas():
        pytest.skip(f"this machine has no {request.param}")
    with isas.use(request.param):
        yield request.param


@pytest.fixture(scope="session")
def packed_example(tmp_path_factory: pytest.TempPathFactory, cli: Cli, example: Path) -> Write:
    """Return a function that converts the bundled model, once per set of options. Tests must copy it to change it."""
    outputs: dict[tuple[object, ...], Path] = {}

    def get(method: str, slices: int = 1, *options: str) -> Path:
        key = (method, slices, *options)
        if key not in outputs:
            outputs[key] = tmp_path_factory.mktemp("packed") / f"{method}-T{slices}"
            arguments = ("--quant-method", method, "--threadpool-count", slices, "-q", *options)
            cli("cpu", "-i", example, "-o", outputs[key], *arguments)
        return outputs[key]

    return get


@pytest.fixture(scope="session")
def cli() -> Cli:
    """Return a function that runs the real command in its own process: cli("cpu", "-i", path, ..., code=0, env={...})."""

    def run(*arguments: object, code: int | None = 0, env: dict[str, str] | None = None) -> Any:
        result = conversion.ktconvert(*map(str, arguments), env=env)
        assert "Traceback" not in result.stderr, result.stderr
        if code is not None:
            assert result.returncode == code, (
                f"exit code {result.returncode}, not {code}\n{result.stdout}\n{result.stderr}"
            )
        return result

    return run


@pytest.fixture(scope="module")
def ktconvert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """Start the program that the test's file defines: ktconvert with an extra row in one of its tables."""
    with Toy(str(request.path), tmp_path_factory.mktemp("toy")) as toy:
        yield toy


@pytest.fixture(scope="session")
def write_safetensors() -> Write:
    """Return a function that writes {name: (dtype, array of bits)}; unsigned bits stand for dtypes that NumPy lacks."""
    return write_file


@pytest.fixture(scope="session")
def write_qwen() -> Write:
    """Return write(folder, {layer: {"gate": [E, I, H], "up": ..., "down": [E, H, I]}}), for Qwen3-MoE checkpoints."""

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
    """Return a function that draws a layer's BF16 bits: random_experts(E, H, I, seed) -> {"gate", "up", "down"}."""

    def make(experts: int, hidden: int, width: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
        rng = np.random.default_rng(seed)
        shapes = {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
        normal = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        return {name: ((x * np.float32(0.02)).view(np.uint32) >> 16).astype(np.uint16) for name, x in normal.items()}

    return make


@pytest.fixture(scope="session")
def read_tree() -> Callable[[Path], conversion.Tree]:
    """Return the function that reads a folder with all its files."""
    return conversion.tree


@pytest.fixture(scope="session")
def peer_python() -> str:
    """Return the Python of a venv with the real kt-kernel: from KTCONVERT_PEER_PYTHON, or created by `make peer`."""
    python = os.environ.get("KTCONVERT_PEER_PYTHON") or str(ROOT / "build" / "peer" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip("kt-kernel is not installed: run `make peer`, or set KTCONVERT_PEER_PYTHON")
    return python
