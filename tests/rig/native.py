"""Layers of tests/golden/native_*: a checkpoint with kt-kernel's names, an input, and expected outputs."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rig import floats
from rig.safetensors import Tensors, read_file, write_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = (
    *("BF16_default", "BF16_mixtral", "FP8_default", "FP8_PERCHANNEL_default"),
    *("MXFP4_v4", "MXFP8_m3", "RAWINT4_kimi", "GPTQ_INT4_default"),
)


@dataclass(frozen=True)
class Native:
    """A layer: its method, tensors and input, its outputs in float64, and those of kt-kernel."""

    method: str
    tensors: Tensors
    hidden: npt.NDArray[np.uint16]
    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    truth: npt.NDArray[np.float64]
    kt_kernel: npt.NDArray[np.uint16]

    def write(self, folder: Path, tensors: Any = None, **config: Any) -> Path:
        """Write the layer as a checkpoint. tensors: replacements of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"hidden_act": "silu", **config}))
        write_file(folder / "model.safetensors", self.tensors if tensors is None else tensors)
        return folder


def read(name: str) -> Native:
    """Read a layer by name."""
    stored = read_file(GOLDEN / f"native_{name}.safetensors")
    inputs = (stored[f"in.{part}"].bits for part in ("hidden", "topk_ids", "topk_weights"))
    outputs = (stored[f"out.{part}"].bits for part in ("float64_reference", "kt_t1"))
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(("in.", "out."))}
    return Native(name.rsplit("_", 1)[0], tensors, *inputs, *outputs)


def run_kt_kernel(python: str, runs: Any, folder: Path) -> Tensors:
    """Return the outputs of kt-kernel itself, from native_peer.py."""
    job, result = folder / "job.json", folder / "result.safetensors"
    job.write_text(json.dumps({"runs": runs, "result": str(result)}))
    program = str(Path(__file__).with_name("native_peer.py"))
    done = subprocess.run([python, "-P", program, str(job)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return read_file(result)


def distance(out: npt.NDArray[np.uint16], truth: npt.NDArray[np.float64]) -> float:
    """Return the relative L2 distance of BF16 bits from float64 values."""
    return float(np.linalg.norm(floats.from_bits(out) - truth) / np.linalg.norm(truth))
