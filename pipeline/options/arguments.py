"""Types of the keyword arguments of ktconvert.plan, ktconvert.convert and ktconvert.verify.

Written by `python tests/test_api.py` from the declarations of the options; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Required, TypedDict


class CommonArguments(TypedDict, total=False):
    """Options of every command."""

    input: Required[str | PathLike[str]]
    output: Required[str | PathLike[str]]
    dry_run: bool
    verify_inputs: bool
    threads: int | None
    max_memory: int | None
    overwrite: bool
    delete_others: bool
    force_unlock: bool
    trust_store: bool
    json_events: bool
    quiet: bool
    verbose: bool


class CpuArguments(CommonArguments, total=False):
    """Options of `ktconvert cpu`."""

    input_type: str | None
    quant_method: str
    method_map: Sequence[str]
    ram: int | None
    experts: str
    config: str | PathLike[str] | None
    scale: str
    imatrix: str | PathLike[str] | None
    statistics: str | PathLike[str] | None
    dampening_frac: float
    calibrate: str
    gptq_steps: str
    min_expert_tokens: int
    save_statistics: str | PathLike[str] | None
    numa: int | None
    layout: str | None
    gpu: bool
    no_merge_safetensor: bool
    resume_layer: int
    save_backward_weights: bool
    fp8_expert_batch: int | None
    profile: bool
    layers: str
    non_experts: str
    part: str | None
    max_shard_size: int | None
    equalize: bool
    dataset: str | PathLike[str]
    dataset_split: str
    num_calibration_samples: int
    max_sequence_length: int
    random_seed: int
    trust_remote_code: bool
    force_cpu: bool
    max_gpu_memory: int | None
    allow_machine_change: bool
    revision: str | None
    stream: bool
    stream_ahead: int
    arch_file: str | PathLike[str] | None


class GpuArguments(CommonArguments, total=False):
    """Options of `ktconvert gpu`."""

    quant_method: str
    quant_type: str
    group_size: int
    rounding: str
    ignore_patterns: Sequence[str]
    engine: str
    torch_dtype: str
    max_cpu_memory: int | None
    tp_size: Sequence[int]
    max_shard_size: int | None
    part: str | None
    equalize: bool
    dataset: str | PathLike[str]
    dataset_split: str
    num_calibration_samples: int
    max_sequence_length: int
    random_seed: int
    dampening_frac: float
    calibrate: str
    gptq_steps: str
    min_expert_tokens: int
    save_statistics: str | PathLike[str] | None
    trust_remote_code: bool
    force_cpu: bool
    max_gpu_memory: int | None
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
    max_gpu_memory: int | None
    allow_machine_change: bool
    revision: str | None
    arch_file: str | PathLike[str] | None


class DequantizeArguments(CommonArguments, total=False):
    """Options of `ktconvert dequantize`."""

    config_path: str | None
    max_shard_size: int | None
    revision: str | None
    stream: bool
    stream_ahead: int


class FetchArguments(CommonArguments, total=False):
    """Options of `ktconvert fetch`."""

    gpu_experts_mask: str | PathLike[str] | None
    max_shard_size: int | None
    revision: str | None


class MergeArguments(CommonArguments, total=False):
    """Options of `ktconvert merge`."""

    original_path: str | PathLike[str] | None
    max_tensors: int
    layers: str


class MergeAdapterArguments(CommonArguments, total=False):
    """Options of `ktconvert merge-adapter`."""

    adapter: Required[str | PathLike[str]]
    max_shard_size: int | None
    revision: str | None
    stream: bool
    stream_ahead: int


class ResplitArguments(CommonArguments, total=False):
    """Options of `ktconvert resplit`."""

    numa: Required[int]
    against: str | PathLike[str] | None
    revision: str | None
    max_shard_size: int | None


class VerifyArguments(TypedDict, total=False):
    """Options of `ktconvert verify`."""

    against: str | PathLike[str] | None
    revision: str | None
    numa: int | None
    quant_method: str | None
    arch_file: str | PathLike[str] | None
    full: bool
    load: bool
    text: str | PathLike[str] | None
    imatrix: str | PathLike[str] | None
    statistics: str | PathLike[str] | None
    threads: int | None
