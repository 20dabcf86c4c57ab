"""manifest.json: the files, source and settings of an output; enough to verify it without its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

import msgspec
from msgspec import Struct

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.documents import Count, Number

NAME = "manifest.json"
FORMAT = 1
LONGEST_NAME = 255  # bytes, on Linux


class SourceFile(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Identity of an input file. mtime_ns is compared on resume, but is not part of any output."""

    name: str
    size: Number
    header_sha256: str | None = None
    mtime_ns: int | None = None
    blob: str | None = None
    sha256: str | None = None

    def without_mtime(self) -> SourceFile:
        """Return the identity that a copied checkpoint keeps, as the manifest records it."""
        return msgspec.structs.replace(self, mtime_ns=None)


class OutputFile(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A file of the output; for a shard also the number of its tensors."""

    name: str
    size: Number
    sha256: str
    tensors: Number | None = None


class ManifestFormat(Struct, frozen=True):
    name: Literal["ktconvert-manifest"] = "ktconvert-manifest"
    version: Number = FORMAT


class WrittenBy(Struct, frozen=True):
    name: str
    version: str


class Manifest(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of manifest.json; settings and model are checked as CheckedManifest.

    sha256  the `digest` of everything else
    """

    format: ManifestFormat
    tool: WrittenBy
    command: str
    settings: dict[str, Any]
    model: dict[str, Any]
    source: tuple[SourceFile, ...]
    files: tuple[OutputFile, ...]
    sha256: str = ""

    @property
    def facts(self) -> OutputFacts:
        """The entry `model`, which `read` has checked."""
        return cast("OutputFacts", dict(self.model))


# --- settings and facts ---------------------------------------------------------------------------

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
# No model has more experts or NUMA slices; objects for more of them would fill the memory.
Experts = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
NumaCount = Annotated[int, msgspec.Meta(ge=1, lt=1 << 10)]


class ManifestSettings(Struct):
    arch_row: str | None = None
    no_merge_safetensor: bool = False


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
    activation: str
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
    weights_on      "input" or "output" of an expert
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
    weights_on: str
    second_moments: str
    packed_linears: int
    linear_names: dict[str, str]
    decoded: dict[str, int]
    tensors: int
    data: DatasetFacts


class CheckedManifest(Struct):
    """The fields of a manifest whose values are checked."""

    settings: ManifestSettings
    model: CheckedFacts


class _Header(Struct):
    format: ManifestFormat
    tool: WrittenBy


class _Named(Struct):
    name: str


class _AnyHeader(Struct):
    format: _Named


# --- writing and reading --------------------------------------------------------------------------


def encode(
    *,
    tool_version: str,
    command: str,
    settings: Mapping[str, Any],
    facts: OutputFacts,
    source: tuple[SourceFile, ...],
    files: list[OutputFile],
) -> bytes:
    """Return manifest.json without time stamps and paths: equal input and options give equal bytes."""
    tool, files = WrittenBy("ktconvert", tool_version), sorted(files, key=lambda f: f.name)
    about: dict[str, Any] = {"command": command, "settings": dict(settings), "model": dict(facts)}
    manifest = Manifest(format=ManifestFormat(), tool=tool, **about, source=source, files=tuple(files))
    document = msgspec.to_builtins(manifest)
    return (json.dumps({**document, "sha256": digest(document)}, indent=2) + "\n").encode()


def digest(document: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, of a manifest's JSON without white space and `sha256`, with sorted names."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return publish.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def actual_digest(manifest: Manifest) -> str:
    """Return the `digest` of a manifest's current contents; its `sha256` is that of its contents when written."""
    return digest(msgspec.to_builtins(manifest))


def read(folder: Path) -> Manifest | None:
    """Read an output's manifest; return None if there is none.

    Raises VerificationError for one that is damaged or too new.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        if documents.read(data, _AnyHeader).format.name != ManifestFormat().name:
            return None
        header = documents.read(data, _Header)
        if header.format.version > FORMAT:
            raise VerificationError(f"{path}: written by a newer ktconvert ({header.tool.version}); update this one.")
        documents.read(data, CheckedManifest)
        manifest = documents.read(data, Manifest)
        for file in manifest.files:
            if file.name.startswith("/") or ".." in Path(file.name).parts:
                raise ValueError(f"{file.name} is outside the output")
            if any(len(part) > LONGEST_NAME for part in os.fsencode(file.name).split(b"/")):
                raise ValueError("a file name is too long")
    except ValueError as error:
        raise VerificationError(
            f"{path}: not a valid manifest ({error}); convert again into a new directory."
        ) from error
    return manifest
