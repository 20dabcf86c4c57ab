"""A LoRA adapter's directory, as PEFT writes it: which matrices it adds to which weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files import documents
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, Array
from ktconvert.quantizers.reference import bf16_to_f32

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# What `init_lora_weights` may be (True and False: random numbers); others change the weights beside LoRA's.
KEEPING_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to a weight [out, in]: scaling * B A, with A [r, in], B [out, r], as they are stored."""

    file: Path
    a: TensorInfo
    b: TensorInfo
    scaling: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    def matrices(self) -> tuple[F32, F32]:
        """A, and B times the scaling."""
        a, b = (_read(self.file, info) for info in (self.a, self.b))
        return a, b * np.float32(self.scaling)


def require_adapter(folder: Path) -> None:
    """Raises InputError for a folder that holds none."""
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise InputError(
            f"{folder}: has no {missing[0]}; give the directory of an adapter of `ktconvert train` or PEFT"
        )


def read_adapter(folder: Path) -> dict[str, Delta]:
    """By the name of the module. Raises InputError for a damaged one, UnsupportedError for what is no plain LoRA."""
    require_adapter(folder)
    try:
        config = documents.parse((folder / CONFIG).read_bytes())
        patterns = {str(name): float(value) for name, value in (config.get("alpha_pattern") or {}).items()}
        alpha, root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        plain = config.get("peft_type") == "LORA" and not config.get("use_dora")
        plain &= config.get("init_lora_weights", True) in KEEPING_BASE
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / CONFIG}: is no configuration of LoRA ({error}); save the adapter again") from error
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in read_header(folder / WEIGHTS).entries:
        match = MATRIX.fullmatch(info.name)
        if match is None or not plain or info.dtype not in DTYPES or len(info.shape) != 2:
            what = f"{info.name} ({info.dtype} {list(info.shape)})" if plain else "what its config says"
            raise UnsupportedError(f"{folder}: {what} is no matrix of plain LoRA; train without it")
        found.setdefault(match["module"], {})[match["side"]] = info
    deltas = {}
    for module, sides in found.items():
        if len(sides) < 2 or sides["A"].shape[0] != sides["B"].shape[1]:
            raise InputError(f"{folder}: the matrices of {module} do not go together; save the adapter again")
        rank = sides["A"].shape[0]
        own = next((value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", module)), alpha)
        scaling = own / (math.sqrt(rank) if root else rank)
        deltas[module] = Delta(folder / WEIGHTS, sides["A"], sides["B"], scaling)
    return deltas


def _read(file: Path, info: TensorInfo) -> F32:
    data: Array = np.fromfile(file, DTYPES[info.dtype], math.prod(info.shape), offset=info.start)
    if data.size < math.prod(info.shape):
        raise InputError(f"{file}: became shorter while it was read; save the adapter again")
    values = bf16_to_f32(data) if info.dtype == "BF16" else data.astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{file}: {info.name} holds numbers that are not finite; train again")
    return values.reshape(info.shape)


def by_tail(deltas: Mapping[str, Delta]) -> dict[str, Delta]:
    """By the names from the layer's number on, since names of models and of checkpoints begin differently."""
    return {tail(module): delta for module, delta in deltas.items()}


def tail(name: str) -> str:
    """layers.3.self_attn.q_proj of a name that has more before it; the whole name where there are no layers."""
    at = re.search(r"layers\.\d+\.", name)
    return name if at is None else name[at.start() :]
