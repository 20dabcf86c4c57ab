"""The names of kt_kernel.sft that sglang-kt imports to serve expert LoRA (`--kt-expert-lora-path`).

sglang-kt lets kt_kernel.sft read a layer and passes the result to the wrapper. Here the wrapper reads the files itself,
so the result only refers to them, and all checks and errors are those of load_weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class LayerReference(NamedTuple):
    """A layer in a directory, for SftMoEWrapper to load."""

    path: Path
    layer: int


def get_runtime() -> SimpleNamespace:
    """Describe the training kernels. kt-kernel raises RuntimeError on CPUs that lack a method; ours has no such CPU."""
    return SimpleNamespace(kernel="ktconvert")


def accept_config(model_config: Any) -> None:
    """Accept any config.json: load_rawint4_weights checks the weights."""


def refer_to_layer(*, checkpoint_files: Sequence[str], layer_idx: int, **_: Any) -> LayerReference:
    """Return a reference to a layer of the directory that contains these files."""
    return LayerReference(Path(checkpoint_files[0]).parent, layer_idx)


NAMES: dict[str, Any] = {
    "MOEArchConfig": SimpleNamespace,
    **dict.fromkeys(("get_rawint4_runtime", "get_mxfp4_runtime", "get_fp8_runtime"), get_runtime),
    "get_rawint4_checkpoint_contract": accept_config,
    "load_rawint4_experts_from_checkpoint_files": refer_to_layer,
    "load_block_fp8_experts_from_checkpoint_files": refer_to_layer,
}
