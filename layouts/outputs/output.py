"""An output on disk (merged, loose or a whole model; ours or kt-kernel's), and the place of each expert's tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.encodings.encoding import TensorReader
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.files.manifest import Manifest, OutputFile
from ktconvert.layouts.outputs.slices import SliceId, TensorNames
from ktconvert.layouts.sources.containers.container import Header
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import Bytes

CONVERT_AGAIN = "convert it again"


@dataclass(frozen=True)
class Output:
    """An opened output; headers and names have been read, weights have not.

    loose               whether the experts are in loose .kt files
    methods             names of the formats whose tensors have these names; measure_output() selects one of them
    names               naming scheme of the experts' tensors
    is_whole_model      whether it is a whole model, which loaders of checkpoints open
    manifest            manifest.json; None in kt-kernel's own outputs
    config              config.json; {} if there is none
    weight_map          tensor -> shard, from the index; None without an index
    total_size          size that the index records; None without an index
    headers             shard -> its header
    tensors             (slice, suffix) -> tensor; a loose file is a tensor with the file's name
    non_expert_tensors  name -> tensor that is not of a routed expert
    duplicates          (name, first file, second file) of each tensor that exists twice
    strays              (name, file, reason) of each tensor or file that does not belong in the output
    prefixes            prefixes of the loose files' names ("INT4", ...)
    damaged             file -> reason why it cannot be read
    """

    root: Path
    loose: bool
    methods: tuple[str, ...] = field(repr=False)
    names: TensorNames = field(repr=False)
    is_whole_model: bool
    manifest: Manifest | None = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    weight_map: dict[str, str] | None = field(default=None, repr=False)
    total_size: int | None = None
    shards: list[str] = field(default_factory=list, repr=False)
    headers: dict[str, Header] = field(default_factory=dict, repr=False)
    tensors: dict[tuple[SliceId, str], TensorInfo] = field(default_factory=dict, repr=False)
    non_expert_tensors: dict[str, TensorInfo] = field(default_factory=dict, repr=False)
    duplicates: list[tuple[str, str, str]] = field(default_factory=list)
    strays: list[tuple[str, str, str]] = field(default_factory=list)
    prefixes: set[str] = field(default_factory=set)
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> OutputFacts:
        """Facts of the manifest; {} without one."""
        return {} if self.manifest is None else self.manifest.facts

    @property
    def metadata(self) -> dict[str, dict[str, str]]:
        """Shard -> its __metadata__."""
        return {shard: header.metadata for shard, header in self.headers.items()}

    @property
    def listed_files(self) -> tuple[OutputFile, ...]:
        """The files that the manifest lists; none without a manifest."""
        return () if self.manifest is None else self.manifest.files

    @cached_property
    def damaged_files(self) -> dict[str, str]:
        """File -> problem, for files that are missing, unreadable, or not as long as the manifest states."""
        problems = {}
        for file in self.listed_files:
            path = self.root / file.name
            if not path.is_file():
                problems[file.name] = f"{file.name} is missing"
            elif path.stat().st_size != file.size:
                problems[file.name] = f"{file.name} has {path.stat().st_size} bytes, the manifest says {file.size}"
        return self.damaged | problems

    @property
    def has_all_weights(self) -> bool:
        """True if every weight file exists and can be read, so that its contents can be checked."""
        return not any(name.endswith((".safetensors", ".kt")) for name in self.damaged_files)

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.manifest is None else dict(self.manifest.settings)

    def read(self, stored: TensorInfo, start: int = 0, stop: int | None = None, out: Bytes | None = None) -> Bytes:
        """Read bytes start..stop-1 of a tensor into `out`, or into new memory.

        Raises VerificationError if the file is unreadable or too short.
        """
        if out is None:
            out = np.empty((stored.nbytes if stop is None else stop) - start, np.uint8)
        path = self.root / stored.file
        view = memoryview(out.data)
        done = 0
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < out.size and (count := os.preadv(fd, [view[done:]], stored.start + start + done)):
                    done += count
            finally:
                os.close(fd)
        except OSError as error:
            raise VerificationError(f"{path}: cannot be read ({error.strerror}); check the disk.") from error
        if done < out.size:
            raise VerificationError(f"{path}: became shorter while it was read; {CONVERT_AGAIN}.")
        return out

    def make_reader(self, slice_id: SliceId, suffixes: Sequence[str]) -> TensorReader:
        """Return a reader of a slice's tensors, in the order of these suffixes; all of them must exist."""

        def read(tensor: int, start: int = 0, stop: int | None = None) -> Bytes:
            stored = self.tensors[slice_id, suffixes[tensor]]
            return self.read(stored, start, stored.nbytes if stop is None else min(stop, stored.nbytes))

        return read


def list_files(root: Path) -> Iterator[str]:
    """Yield every file of an output, relative to it, except those in hidden folders."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            yield (Path(folder) / name).relative_to(root).as_posix()
