"""Facts of an output, the entry `model` of its manifest.json, as typed dictionaries."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from ktconvert.layouts.files.documents import Count, Number

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
# No model has more experts or NUMA slices; objects for more of them would fill the memory.
Experts = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
NumaCount = Annotated[int, msgspec.Meta(ge=1, lt=1 << 10)]


class DatasetFacts(TypedDict):
    """The texts of a calibration run."""

    dataset: str
    split: NotRequired[str | None]
    samples: Number
    max_length: Number
    seed: Number


class CalibrationFacts(DatasetFacts):
    """The calibration run of an output: its texts, and the settings of GPTQ."""

    dampening: float
    calibrate: str
    steps: NotRequired[str]
    engine: NotRequired[str]


class MachineFacts(TypedDict):
    """The machine of a calibration run: properties that every record has; versions of packages come on top."""

    device: str
    threads: Count


class CheckedFacts(TypedDict, total=False):
    """The facts of an output that are checked when its manifest is read.

    experts, hidden, intermediate
                    one number if all layers agree, else the list of distinct ones; a text if they are not known
    without_counts  experts without input statistics, as in "layer 3: 0-5, 7"; likewise too_few_tokens (for GPTQ) and
                    equalized
    kept_layers     loose layers of an earlier output that stay in this one
    shared_experts  whether the model also has experts that compute every token
    stacks          layers of each stack of layers or experts, as in "1, 3", if the model has several
    resplit_from    numbers of NUMA slices that the output had before, in order
    """

    architecture: str
    method: str
    quant_method: str
    numa: NumaCount
    layers: list[Index]
    kept_layers: list[Index]
    experts: Experts | list[Experts] | str
    hidden: Count | list[Count] | str
    intermediate: Count | list[Count] | str
    functions: dict[str, dict[str, Any]]
    shared_experts: bool
    stacks: dict[str, str]
    dtypes: list[str]
    backward: bool
    scale: str
    imatrix: str
    without_counts: list[str]
    calibration: CalibrationFacts
    machine: MachineFacts
    too_few_tokens: list[str]
    equalized: list[str]
    resplit_from: list[NumaCount]


class OutputFacts(CheckedFacts, total=False):
    """Facts of an output, the entry `model` of its manifest: what it contains and how it was made.

    Each command records those that apply, in its own order. Readers of the facts that follow check them.

    methods         of a mixed output: method -> its layers, as in "0-5, 60"
    layout          value of --layout, if it is not the default
    second_moments  sha256 of the input statistics, as imatrix
    packed_linears  number of quantized linears; linear_names: projection -> template of their names (`gpu`)
    decoded         title of an encoding -> number of weights that were stored in it (`dequantize`)
    tensors         number of tensors (`dequantize`)
    data            texts of `calibrate`
    """

    methods: dict[str, str]
    layout_version: int | list[int]
    layout: str
    rounding: str
    bits: int | list[int]
    group_size: int | None
    second_moments: str
    packed_linears: int
    linear_names: dict[str, str]
    decoded: dict[str, int]
    tensors: int
    data: DatasetFacts
