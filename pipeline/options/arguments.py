"""Types of the keyword arguments of ktconvert.plan, ktconvert.convert and ktconvert.verify.

Written by `python tests/test_api.py` from the declarations of the options; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, Required, TypeAlias, TypedDict, TypeVar

Word = TypeVar("Word")
OneOrSeveral: TypeAlias = Word | Sequence[Word]  # several words make several outputs


class CommonArguments(TypedDict, total=False):
    """Options of every command."""

    input: Required[str | PathLike[str]]
    output: Required[str | PathLike[str]]
    verify_inputs: bool
    threads: int | None
    max_memory: int | str | None
    overwrite: bool
    delete_others: bool
    force_unlock: bool
    trust_store: bool
    json_events: bool
    quiet: bool
    verbose: bool


class CpuArguments(CommonArguments, total=False):
    """Options of `ktconvert cpu`."""

    input_type: Literal[
        "bf16",
        "fp16",
        "fp8",
        "mxfp8",
        "mxfp4",
        "fp4",
        "nvfp4",
        "int4",
        "int8",
        "awq",
        "gptq",
        "gguf",
        None,
    ]
    quant_method: OneOrSeveral[Literal["int4", "int8", "mxfp4", "fp8", "bf16", "rawint4", "moe_int4", "moe_int8"]]
    method_map: Sequence[str]
    ram: int | str | None
    experts: str
    config: str | PathLike[str] | None
    scale: Literal["absmax", "mse", "imatrix", "gptq"]
    imatrix: str | PathLike[str] | None
    statistics: str | PathLike[str] | None
    dampening_frac: float
    calibrate: Literal["all", "routed", "mixed"]
    gptq_steps: Literal["plain", "descent", "full"]
    min_expert_tokens: int
    save_statistics: str | PathLike[str] | None
    numa: int | None
    layout: Literal["numa", "kt", "plain", None]
    gpu: bool
    no_merge_safetensor: bool
    resume_layer: int
    save_backward_weights: bool
    fp8_expert_batch: int | None
    profile: bool
    layers: str
    non_experts: Literal["skip", "copy", "keep"]
    part: str | None
    max_shard_size: int | str | None
    equalize: bool
    dataset: str | PathLike[str]
    dataset_split: str
    num_calibration_samples: int
    max_sequence_length: int
    random_seed: int
    trust_remote_code: bool
    force_cpu: bool
    max_gpu_memory: int | str | None
    allow_machine_change: bool
    revision: str | None
    stream: bool
    stream_ahead: int
    arch_file: str | PathLike[str] | None


class GpuArguments(CommonArguments, total=False):
    """Options of `ktconvert gpu`."""

    quant_method: Literal["GPTQ", "RTN"]
    quant_type: Literal["W4A16", "W8A16"]
    group_size: Literal[128, 64, 32]
    rounding: Literal["library", "float32"]
    ignore_patterns: Sequence[str]
    engine: Literal["stream", "oneshot"]
    torch_dtype: Literal["bfloat16", "float16", "float32"]
    max_cpu_memory: int | str | None
    tp_size: Sequence[int]
    max_shard_size: int | str | None
    part: str | None
    equalize: bool
    dataset: str | PathLike[str]
    dataset_split: str
    num_calibration_samples: int
    max_sequence_length: int
    random_seed: int
    dampening_frac: float
    calibrate: Literal["all", "routed", "mixed"]
    gptq_steps: Literal["plain", "descent", "full"]
    min_expert_tokens: int
    save_statistics: str | PathLike[str] | None
    trust_remote_code: bool
    force_cpu: bool
    max_gpu_memory: int | str | None
    allow_machine_change: bool
    revision: str | None
    stream: bool
    stream_ahead: int
    arch_file: str | PathLike[str] | None


class CalibrateArguments(CommonArguments, total=False):
    """Options of `ktconvert calibrate`."""

    second_moments: bool
    experts: str
    dataset: str | PathLike[str]
    dataset_split: str
    num_calibration_samples: int
    max_sequence_length: int
    random_seed: int
    trust_remote_code: bool
    force_cpu: bool
    max_gpu_memory: int | str | None
    allow_machine_change: bool
    revision: str | None
    arch_file: str | PathLike[str] | None


class DequantizeArguments(CommonArguments, total=False):
    """Options of `ktconvert dequantize`."""

    config_path: str | None
    max_shard_size: int | str | None
    revision: str | None
    stream: bool
    stream_ahead: int


class FetchArguments(CommonArguments, total=False):
    """Options of `ktconvert fetch`."""

    gpu_experts_mask: str | PathLike[str] | None
    max_shard_size: int | str | None
    revision: str | None


class MergeArguments(CommonArguments, total=False):
    """Options of `ktconvert merge`."""

    original_path: str | PathLike[str] | None
    max_tensors: int
    layers: str


class MergeAdapterArguments(CommonArguments, total=False):
    """Options of `ktconvert merge-adapter`."""

    adapter: Required[str | PathLike[str]]
    max_shard_size: int | str | None
    revision: str | None
    stream: bool
    stream_ahead: int


class ResplitArguments(CommonArguments, total=False):
    """Options of `ktconvert resplit`."""

    numa: Required[int]
    against: str | PathLike[str] | None
    revision: str | None
    max_shard_size: int | str | None


class VerifyArguments(TypedDict, total=False):
    """Options of `ktconvert verify`."""

    against: str | PathLike[str] | None
    revision: str | None
    numa: int | None
    quant_method: Literal[
        "w8a16",
        "w4a16",
        "bf16",
        "amxbf16",
        "rawint4",
        "kt_bf16",
        "fp8",
        "kt_fp8",
        "mxfp4",
        "kt_mxfp4",
        "moe_int8",
        "moe_int4",
        "int8",
        "amxint8",
        "int4",
        "amxint4",
        None,
    ]
    arch_file: str | PathLike[str] | None
    full: bool
    load: bool
    text: str | PathLike[str] | None
    imatrix: str | PathLike[str] | None
    statistics: str | PathLike[str] | None
    threads: int | None
