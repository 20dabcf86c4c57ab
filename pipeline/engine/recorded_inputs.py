"""Inputs that are outputs of ktconvert: a file is compared with its manifest before a unit reads it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, VerificationError
from ktconvert.layouts.files import manifest, publish
from ktconvert.layouts.files.manifest import OutputFile, SourceFile
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit

REMEDY = "copy or convert it again; if you changed it on purpose, use a copy of the folder without manifest.json"


def compare_inputs(files: Mapping[Path, SourceFile], stages: Sequence[Stage[Any]]) -> tuple[Stage[Any], ...]:
    """Return stages whose units refuse input files that differ from the manifest beside them. files: those of the plan.

    Raise InputError for files whose size, or SHA-256 if known, differs. A damaged manifest counts as none.
    """
    recorded: dict[Path, OutputFile] = {}
    for root in {_root(path, file.name) for path, file in files.items()}:
        try:
            listing = manifest.read_manifest(root)
        except VerificationError:
            continue
        recorded.update({root / file.name: file for file in listing.files} if listing is not None else {})
    read = {path: (file, recorded[path]) for path, file in files.items() if path in recorded}
    weights = {path: was for path, (file, was) in read.items() if file.header_sha256 or path.suffix == ".kt"}
    for path, was in weights.items():
        if files[path].size != was.size:
            raise InputError(f"has {files[path].size} bytes, but {was.size} in the manifest", REMEDY, path=path)
        if (known := files[path].sha256) is not None:
            _require_same(path, known, was)
    weights = {path: was for path, was in weights.items() if files[path].sha256 is None}
    if not weights:
        return tuple(stages)
    recordings = _Recordings(weights)
    by_name = {files[path].name: path for path in weights}
    by_header = {(files[path].header_sha256, files[path].size): path for path in weights}

    def compare_first(stage: Stage[Any]) -> Stage[Any]:
        def run(unit: Unit[Any], partial: Path, context: Context) -> Result:
            contents = [content for *_, content in unit.inputs if isinstance(content, tuple)]
            names = {by_name.get(name) for name in unit.files} or {by_header.get(content[:2]) for content in contents}
            recordings.compare((path for path in names if path is not None), context)
            return stage.run(unit, partial, context)

        return replace(stage, run=run)

    return tuple(map(compare_first, stages))


def _root(path: Path, name: str) -> Path:
    return path.parents[len(Path(name).parts) - 1]


def _require_same(path: Path, sha256: str, was: OutputFile) -> None:
    if sha256 != was.sha256:
        problem = f"was changed: its sha256 is {sha256[:12]}, but {was.sha256[:12]} in the manifest"
        raise InputError(problem, REMEDY, path=path)


class _Recordings:
    """The hashes of input files in their manifests; each file is hashed once."""

    def __init__(self, files: Mapping[Path, OutputFile]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._compared: set[Path] = set()

    def compare(self, paths: Iterable[Path], context: Context) -> None:
        """Raise InputError for the first of these files whose bytes differ from the recorded ones."""
        for _ in context.pool.map(self._compare, sorted(paths)):
            pass

    def _compare(self, path: Path) -> None:
        with self._lock:
            lock = self._locks[path]
        with lock:
            if path in self._compared:
                return
            try:
                digest = publish.sha256_file(path)
            except OSError as error:
                raise InputError(f"cannot be read ({error.strerror})", "restore it and resume", path=path) from error
            _require_same(path, digest, self._files[path])
            self._compared.add(path)
