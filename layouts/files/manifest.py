"""manifest.json: the files, source and settings of an output; enough to verify it without its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.documents import Number
from ktconvert.layouts.files.facts import CheckedFacts, OutputFacts

NAME = "manifest.json"
MANIFEST_VERSION = 1
LONGEST_NAME = 255  # limit of Linux for a file name, in bytes


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
    version: Number = MANIFEST_VERSION


class WrittenBy(Struct, frozen=True):
    name: str
    version: str


class Manifest(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of manifest.json; settings and model are checked as CheckedManifest.

    sha256  result of compute_digest for all other entries
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
        """The entry `model`, which read_manifest has checked."""
        return cast("OutputFacts", dict(self.model))


# --- settings and facts ---------------------------------------------------------------------------


class ManifestSettings(Struct):
    arch_row: str | None = None
    no_merge_safetensor: bool = False


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


def encode_manifest(
    *,
    tool_version: str,
    command: str,
    settings: Mapping[str, Any],
    facts: OutputFacts,
    source: tuple[SourceFile, ...],
    files: list[OutputFile],
) -> bytes:
    """Return manifest.json without time stamps and paths: equal input and options give equal bytes."""
    manifest = Manifest(
        format=ManifestFormat(),
        tool=WrittenBy("ktconvert", tool_version),
        command=command,
        settings=dict(settings),
        model=dict(facts),
        source=source,
        files=tuple(sorted(files, key=lambda file: file.name)),
    )
    document = msgspec.to_builtins(manifest)
    return (json.dumps({**document, "sha256": compute_digest(document)}, indent=2) + "\n").encode()


def compute_digest(document: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, of a manifest's JSON without white space and `sha256`, with sorted names."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return publish.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def compute_actual_digest(manifest: Manifest) -> str:
    """Return the digest of a manifest's current contents; its `sha256` is the digest of the contents when written."""
    return compute_digest(msgspec.to_builtins(manifest))


def is_written_by(folder: Path, command: str) -> bool:
    """Return whether a command wrote a folder, by its manifest; False if the manifest is damaged."""
    try:
        return (record := read_manifest(folder)) is not None and record.command == command
    except VerificationError:
        return False


def read_manifest(folder: Path) -> Manifest | None:
    """Read an output's manifest; return None if there is none.

    Raises VerificationError for a manifest that is damaged or too new.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        if documents.decode_document(data, _AnyHeader).format.name != ManifestFormat().name:
            return None
        header = documents.decode_document(data, _Header)
        if header.format.version > MANIFEST_VERSION:
            raise VerificationError(f"{path}: written by a newer ktconvert ({header.tool.version}); update this one.")
        documents.decode_document(data, CheckedManifest)
        manifest = documents.decode_document(data, Manifest)
        for file in manifest.files:
            if file.name.startswith("/") or ".." in Path(file.name).parts:
                raise ValueError(f"{file.name} is outside the output")
            if any(len(part) > LONGEST_NAME for part in os.fsencode(file.name).split(b"/")):
                raise ValueError("a file name is too long")
    except ValueError as error:
        raise VerificationError(
            f"{path}: not a valid manifest ({error}); restore it, or convert again with --overwrite --delete-others."
        ) from error
    return manifest
