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
    """Return stages whose units refuse input files that differ from the manifest next to them.

    files  the input files of the plan

    Raises InputError for files whose size, or SHA-256 if known, differs. A damaged manifest counts as none.
    """
    recorded: dict[Path, OutputFile] = {}
    for root in {_find_root(path, file.name) for path, file in files.items()}:
        try:
            listing = manifest.read_manifest(root)
        except VerificationError:
            continue
        recorded.update({root / file.name: file for file in listing.files} if listing is not None else {})
    weights = {
        path: recorded[path]
        for path, file in files.items()
        if path in recorded and (file.header_sha256 or path.suffix == ".kt")
    }
    for path, recorded_file in weights.items():
        if files[path].size != recorded_file.size:
            problem = f"has {files[path].size} bytes, but {recorded_file.size} in the manifest"
            raise InputError(problem, REMEDY, path=path)
        if (sha256 := files[path].sha256) is not None:
            _require_same_hash(path, sha256, recorded_file)
    unhashed = {path: recorded_file for path, recorded_file in weights.items() if files[path].sha256 is None}
    if not unhashed:
        return tuple(stages)
    recordings = _Recordings(unhashed)
    by_name = {files[path].name: path for path in unhashed}
    by_header = {(files[path].header_sha256, files[path].size): path for path in unhashed}

    def add_comparison(stage: Stage[Any]) -> Stage[Any]:
        def run(unit: Unit[Any], partial: Path, context: Context) -> Result:
            contents = [content for *_, content in unit.inputs if isinstance(content, tuple)]
            paths = {by_name.get(name) for name in unit.files} or {by_header.get(content[:2]) for content in contents}
            recordings.require_same_hashes((path for path in paths if path is not None), context)
            return stage.run(unit, partial, context)

        return replace(stage, run=run)

    return tuple(map(add_comparison, stages))


def _find_root(path: Path, name: str) -> Path:
    """Return the folder below which a file has this name."""
    return path.parents[len(Path(name).parts) - 1]


def _require_same_hash(path: Path, sha256: str, recorded_file: OutputFile) -> None:
    if sha256 != recorded_file.sha256:
        problem = f"was changed: its sha256 is {sha256[:12]}, but {recorded_file.sha256[:12]} in the manifest"
        raise InputError(problem, REMEDY, path=path)


class _Recordings:
    """The hashes of input files in their manifests; each file is hashed once."""

    def __init__(self, files: Mapping[Path, OutputFile]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._compared: set[Path] = set()

    def require_same_hashes(self, paths: Iterable[Path], context: Context) -> None:
        """Raise InputError for the first of these files whose bytes differ from the recorded ones."""
        for _ in context.pool.map(self._compare_file, sorted(paths)):
            pass

    def _compare_file(self, path: Path) -> None:
        with self._lock:
            lock = self._locks[path]
        with lock:
            if path in self._compared:
                return
            try:
                digest = publish.sha256_file(path)
            except OSError as error:
                raise InputError(f"cannot be read ({error.strerror})", "restore it and resume", path=path) from error
            _require_same_hash(path, digest, self._files[path])
            self._compared.add(path)
