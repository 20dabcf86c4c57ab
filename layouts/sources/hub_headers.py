"""Headers of models of the hub: files with the headers and holes instead of weights, cached by commit.

As in the hub's own cache, a file of weights is a link to one that is named by its SHA-256, which identifies it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from ktconvert.layouts.errors import (
    InputError,
    KTConvertError,
    ResourceError,
    UnreachableError,
    explain_absence,
)
from ktconvert.layouts.files import publish
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.containers import CONTAINERS
from ktconvert.layouts.sources.containers.container import Container
from ktconvert.layouts.sources.containers.safetensors import INDEX_SUFFIX

FIRST_BYTES = 1 << 16  # of a file; longer headers are read in steps that double
MOST_BYTES = 1 << 28  # the longest header
REQUESTS = 8  # at a time
SHA256 = re.compile(r"[0-9a-f]{64}")
CONFIGS = ("config.json", "params.json", "quantize_config.json")


class Remote(Protocol):
    """The files of a model that is not here."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start..stop-1 of a file, with one range request."""

    def describe(self, name: str) -> str:
        """Return how messages name a file."""

    def require_unchanged(self, name: str) -> None:
        """Raise InputError if a file has changed since its header was read."""

    def fetch_companions(self, folder: Path) -> Path:
        """Return a directory with all small files; `folder` has the headers."""


class Location(NamedTuple):
    """A checkpoint whose headers can be opened.

    remote  the files with its weights, if there are holes in their place; None if they are here
    note    what the user should know; "" if nothing
    """

    path: Path
    remote: Remote | None = None
    note: str = ""


def find_headers(name: str, revision: str | None = None) -> Location:
    """Return a local path, or a directory with the headers of a model of the hub.

    A path and a complete snapshot in the hub's cache win. Otherwise, headers are read with range requests and kept in
    the cache of ktconvert, in a directory for each commit. Without a network, those of an earlier call are found.

    Raises InputError if the hub cannot be read, ResourceError if the cache cannot be written.
    """
    match = hub.FILE.fullmatch(name)
    repository = match[1] if match else name
    is_here = False
    with contextlib.suppress(OSError, ValueError):
        is_here = Path(name).expanduser().exists()
    if is_here or not hub.HUB_ID.fullmatch(repository) or explain_absence(name) is not None:
        return Location(hub.resolve(Path(name).expanduser(), revision))  # which explains what is wrong
    parts = hub.list_parts(PurePosixPath(match[2])) if match else []
    cached = hub.find_snapshot(repository, revision)
    if cached is not None:
        if match is None and hub.is_complete(cached):
            return Location(cached)
        if match is not None and all((cached / part).exists() for part in parts):
            return Location(cached / match[2])
    note = ""
    try:
        hub.require_network(name, revision, cached)
        folder, remote = _fetch_headers(repository, revision, parts)
    except UnreachableError:
        earlier = _find_cached_headers(repository, revision, parts)
        if earlier is None:
            raise
        folder, remote = earlier
        note = f"{name}: the hub does not answer; the headers of commit {remote.sha[:8]} are those of an earlier call"
    return Location(folder / match[2] if match else folder, remote, note)


def cache_folder() -> Path:
    """Return the directory of cached headers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ktconvert" / "headers"


def _model_folder(repository: str) -> Path:
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def _ref_path(repository: str, revision: str | None) -> Path:
    """Return the path of the file that names the commit of a branch or tag."""
    return _model_folder(repository) / "refs" / quote(revision or "main", "")


def _find_cached_headers(repository: str, revision: str | None, files: list[str]) -> tuple[Path, Commit] | None:
    """Return what _fetch_headers returned for these arguments at its last call; None if it was never called."""
    try:
        from huggingface_hub import HfFileSystem

        sha = _ref_path(repository, revision).read_text("ascii")
    except (ImportError, OSError, ValueError):
        return None
    folder = _model_folder(repository) / sha
    is_cached = hub.COMMIT.fullmatch(sha) and (
        all((folder / name).exists() for name in files) if files else folder.is_dir() and hub.is_complete(folder)
    )
    return (folder, Commit(HfFileSystem(), repository, sha)) if is_cached else None


def _fetch_headers(repository: str, revision: str | None, files: list[str]) -> tuple[Path, Commit]:
    """Return the directory with the headers of a commit, and the commit; only missing files are requested.

    files  the only files of weights to read; []: those of the checkpoint
    """
    info = hub.read_model_info(repository, revision, "reading its headers")
    from huggingface_hub import HfFileSystem

    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    folder = _model_folder(repository) / str(info.sha)
    if missing := [name for name in files if name not in siblings]:
        raise InputError(f"{repository}: has no file {missing[0]}; look at its files on the hub")
    names = [name for name in files or select_files(siblings) if not (folder / name).exists()]
    remote = Commit(HfFileSystem(), repository, str(info.sha))

    def fetch(name: str) -> None:
        lfs = siblings[name].lfs
        # Other commits can have the same file of weights.
        blob = folder.parent / "blobs" / lfs.sha256 if lfs and SHA256.fullmatch(lfs.sha256) else None
        fetch_file(remote, folder / name, name, siblings[name].size or 0, blob)

    try:
        with ThreadPoolExecutor(REQUESTS) as executor:
            list(executor.map(fetch, names))
    except KTConvertError:
        raise
    except Exception as error:  # every library underneath raises its own
        raise hub.explain(repository, revision, error) from None
    with _new_file(_ref_path(repository, revision)) as partial:
        publish.write_file(partial, remote.sha.encode())
    return folder, remote


def select_files(names: Iterable[str]) -> Iterator[str]:
    """Yield the config, the indexes, and all files of weights of the first kind that the repository has."""
    top = [name for name in names if "/" not in name]
    yield from (name for name in top if name in CONFIGS or name.endswith(INDEX_SUFFIX))
    kinds = ([name for name in top if name.endswith(container.suffix)] for container in CONTAINERS)
    yield from next(filter(None, kinds), ())


class Commit(NamedTuple):
    """The files of a commit of the hub.

    system  huggingface_hub's file system
    """

    system: Any
    repository: str
    sha: str

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start..stop-1 of a file, with one range request."""
        with self.system.open(f"{self.repository}@{self.sha}/{name}", "rb", cache_type="none") as file:
            file.seek(start)
            data: bytes = file.read(stop - start)
        return data

    def describe(self, name: str) -> str:
        """Return how messages name a file."""
        return f"{self.repository} at {self.sha[:12]}: {name}"

    def require_unchanged(self, name: str) -> None:
        """Do nothing: files of a commit do not change."""

    def fetch_companions(self, folder: Path) -> Path:
        """Return the snapshot of the commit in the cache of the hub."""
        return hub.resolve(self.repository, self.sha, companions_only=True)


def fetch_file(remote: Remote, path: Path, name: str, size: int, blob: Path | None) -> None:
    """Fetch a whole small file, or the header of a file of weights, and publish it under its name.

    blob  if given, the file has this path, and `path` is a link to it
    """
    container = next((row for row in CONTAINERS if name.endswith(row.suffix)), None)
    file = blob or path
    if not file.exists():
        with _new_file(file) as partial:
            if container is None:
                publish.write_file(partial, remote.read(name, 0, size))
            else:
                _fetch_header(remote, name, partial, container, size)
    if blob is not None:
        with _new_file(path) as partial:
            partial.symlink_to(os.path.relpath(blob, path.parent))


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield the temporary path of a file of the cache, which then gets its name. Raises ResourceError."""
    partial = path.with_name(f".{os.getpid()}.{threading.get_ident()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.filename is None:  # of the network
            raise
        raise ResourceError(f"{path}: cannot be written ({error.strerror}); set XDG_CACHE_HOME") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _fetch_header(remote: Remote, name: str, path: Path, container: Container, size: int) -> None:
    """Write a file of this size with the header of a remote one, and a hole in place of its weights."""
    data, count = b"", FIRST_BYTES
    while True:
        data += remote.read(name, len(data), min(count, size))
        publish.write_file(path, data)
        os.truncate(path, size)
        try:
            container.read_header(path, path.name)
        except InputError as error:
            if count >= min(size, MOST_BYTES):
                raise error.with_path(name) from None
            count *= 2
        else:
            return
