"""Models of the Hugging Face hub, found in the local cache or downloaded."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ktconvert.layouts.errors import (
    InputError,
    KTConvertError,
    ResourceError,
    UnreachableError,
    UsageError,
    explain_absence,
)
from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.sources.containers import CONTAINERS, SAFETENSORS
from ktconvert.layouts.sources.containers.gguf import split_names
from ktconvert.layouts.sources.retries import explain_certificate

PACKAGE = "huggingface_hub"  # of the extra [hub]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OTHER_URL = re.compile(r"([a-z][a-z0-9+.-]*):/+(.*)")
FILE = re.compile(rf"({HUB_ID.pattern}):([^:]+\.gguf)")  # a file of a repository, which may hold dozens of models
COMMIT = re.compile(r"[0-9a-f]{40}")
LOADED = ("*.json", "*.model", "*.py", "*.jinja", "*.txt", "*.tiktoken")  # companions that loaders may read
COMPANIONS = (*LOADED, "*.md", "LICENSE*", "NOTICE*")
WEIGHTS = tuple(f"*{container.suffix}" for container in CONTAINERS if not container.experts_only)
FILES = (*WEIGHTS, *COMPANIONS)
SIMILAR = 0.8  # similarity of two names, from 0 to 1, for which one may be a misspelling of the other
# Exceptions, by their names in several libraries, without an answer of the server
NO_ANSWER = {"ConnectionError", "OfflineModeIsEnabled", "Timeout", "TimeoutError", "TransportError"}
TRUE = ("1", "true", "yes", "on")


def resolve(name: str | Path, revision: str | None = None, *, companions_only: bool = False) -> Path:
    """Return the local path of a checkpoint given as a path, as org/name, or as org/name:FILE.gguf.

    An existing path wins, then a snapshot in the local cache that has all its weights; else it is downloaded, unless
    HF_HUB_OFFLINE is set.

    companions_only  do not download weights

    Raises InputError if that fails, UsageError for a revision of a local path.
    """
    text, path = str(name), Path(name)
    is_here = False
    with contextlib.suppress(OSError, ValueError):
        is_here = path.exists()
    if is_here:
        if revision is not None:
            raise UsageError(f"--revision {revision}: {path} is a local path; a revision is for a model of the hub")
        return path
    file = FILE.fullmatch(text)
    if file is not None and not companions_only:
        return _resolve_file(file[1], PurePosixPath(file[2]), revision)
    if not HUB_ID.fullmatch(text) or explain_absence(path) is not None:
        raise absent_model(text)
    cached = find_snapshot(text, revision)
    if cached is not None and (_has_config(cached) if companions_only else is_complete(cached)):
        return cached
    require_network(text, revision, cached)
    folder = download(text, revision, COMPANIONS if companions_only else FILES)
    if not companions_only and "gguf" in text.lower() and not any(folder.glob("*.safetensors")):
        raise InputError(f"{text}: has no safetensors; name one of its GGUF files, as {text}:FILE.gguf")
    return folder


def absent_model(text: str) -> KTConvertError:
    """Return the error for a model that is neither an existing path nor a hub id."""
    if (error := explain_absence(text)) is not None:
        return error
    if (url := OTHER_URL.fullmatch(text)) is not None:  # pathlib drops a slash
        remedy = "download its files, or give s3://, gs://, https:// or http:// to a command that reads them"
        return InputError("is a URL that cannot be read here", remedy, path=f"{url[1]}://{url[2]}")
    remedy = "check the path, or give a hub id such as org/name"
    return InputError(f"does not exist{suggest_path(text)}", remedy, path=text)


def list_parts(file: PurePosixPath) -> list[str]:
    """Return the names in a repository of all files of a GGUF that may be split. Raises UsageError for other paths."""
    if ".." in file.parts or file.is_absolute():
        raise UsageError(f"{file}: not the name of a file of a repository")
    return [str(file.with_name(part)) for part in split_names(file.name)]


def _resolve_file(name: str, file: PurePosixPath, revision: str | None) -> Path:
    files = list_parts(file)
    folder = find_snapshot(name, revision)
    if folder is None or not all((folder / part).exists() for part in files):
        require_network(name, revision, folder, files)
        folder = download(name, revision, files)
    if not (folder / file).exists():
        raise InputError(f"{name}: has no file {file}; look at its files on the hub")
    return folder / file


def require_network(name: str, revision: str | None, cached: Path | None, files: Sequence[str] = ()) -> None:
    if is_offline():
        problem = "is incomplete in" if cached else "is not in"
        remedy = f"unset it or run `{_command(name, revision, files)}` where there is a network"
        raise UnreachableError(f"{name}: {problem} the local cache {cache_root()} and HF_HUB_OFFLINE is set; {remedy}")


def is_offline() -> bool:
    """Return whether the user forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE


def read_endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def cache_root() -> Path:
    """Return the directory of the local cache, as huggingface_hub chooses it."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def find_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return the cached snapshot of org/name at a branch, tag or commit (default main); None if there is none."""
    revision = revision or "main"
    if ".." in revision.split("/") or revision.startswith("/"):
        raise UsageError(f"--revision {revision}: not the name of a branch, tag or commit")
    model = cache_root() / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = revision
    folder = model / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def is_complete(folder: Path) -> bool:
    """Return whether a snapshot has its config and every weight file of the checkpoint."""
    if not _has_config(folder):
        return False
    try:
        chosen = SAFETENSORS.select(folder, sorted(path.name for path in folder.iterdir()))
    except KTConvertError:
        return False
    return chosen is not None and all((folder / name).exists() for name in chosen.names)


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "params.json").exists()


def download(name: str, revision: str | None, patterns: Sequence[str] = FILES, folder: Path | None = None) -> Path:
    """Download the files of a model that match a pattern, and return their directory.

    folder  directory for the files; None: in the local cache

    Raises InputError and ResourceError.
    """
    require_packages(f"{name}: does not exist here, is not in the local cache, and downloading", [PACKAGE], "hub")
    from huggingface_hub import snapshot_download

    try:
        where = cache_root() if folder is None else None
        allowed = list(patterns)
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=allowed, cache_dir=where, local_dir=folder)
        )
    except Exception as e:  # every library underneath raises its own
        raise explain(name, revision, e) from None


def read_model_info(name: str, revision: str | None, purpose: str) -> Any:
    """Return what the hub states about a model: its commit, and its files with sizes and hashes.

    purpose  what it is needed for, for the message of a missing huggingface_hub

    Raises InputError if the hub cannot be read.
    """
    require_packages(f"{name}: {purpose}", [PACKAGE], "hub")
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception as e:  # every library underneath raises its own
        raise explain(name, revision, e) from None


def explain(name: str, revision: str | None, e: Exception) -> KTConvertError:
    """Return the error for an exception of huggingface_hub or a library below it."""
    errors = _list_causes(e)
    answered = next((error for error in errors if _read_status(error) is not None), e)
    kinds, status = _list_kinds(answered), _read_status(answered)
    at = f" at revision {revision}" if revision else ""
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(f"{name}: the disk of the cache {cache_root()} is full; set HF_HUB_CACHE to another")
    if "GatedRepoError" in kinds:
        return InputError(f"{name}: its owner asks for consent; accept on its hub page and run `hf auth login`")
    if "RevisionNotFoundError" in kinds:
        return InputError(f"{name}: has no revision {revision or 'main'}; look at its branches and tags on the hub")
    is_absent = status in (401, 404) and "EntryNotFoundError" not in kinds
    if "RepositoryNotFoundError" in kinds or is_absent:
        problem = f"neither a local path{suggest_path(name)} nor a public model of the hub"
        return InputError(f"{name}: {problem}; correct the name, or run `hf auth login` if the model is private")
    if status == 403:
        remedy = "run `hf auth login` with a token that may read it"
        return InputError(f"{name}: the hub refuses access to the model (status {status}); {remedy}")
    if status is not None:
        return UnreachableError(f"{name}: the hub {read_endpoint()} answers with status {status}; try again later")
    if (untrusted := explain_certificate(name, e)) is not None:
        return untrusted
    remedy = "correct the path"
    if not Path(name).parent.is_dir():  # a path rather than the name of a model
        remedy += f", check the network, or run `{_command(name, revision)}` elsewhere and give the directory"
    absent = f"does not exist here{suggest_path(name)}"
    reason = f" ({str(e).strip().partition(chr(10))[0] or type(e).__name__})"
    if NO_ANSWER & {kind for error in errors for kind in _list_kinds(error)}:
        reason = f", as the hub {read_endpoint()} cannot be reached"
    problem = f"{absent}, and the model{at} cannot be downloaded{reason}"
    return UnreachableError(f"{name}: {problem}; {remedy}")


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return an exception and those that caused it."""
    errors = [error]
    while (cause := errors[-1].__cause__) is not None:
        errors.append(cause)
    return errors


def _list_kinds(error: BaseException) -> set[str]:
    """Return the names of an exception's classes, whose modules differ between libraries and their versions."""
    return {kind.__name__ for kind in type(error).__mro__}


def _read_status(error: BaseException) -> int | None:
    """Return the status of the hub's answer that an exception reports; None if there is no answer."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def suggest_path(text: str) -> str:
    """Return a question that names an existing path similar to a mistyped one; "" if there is none."""
    path = Path(text)
    with contextlib.suppress(OSError):
        names = [other.name for other in path.parent.iterdir() if other.name != path.name]
        for name in difflib.get_close_matches(path.name, names, 1, SIMILAR):
            return f" (did you mean {path.with_name(name)}?)"
    return ""


def _command(name: str, revision: str | None, files: Sequence[str] = ()) -> str:
    return " ".join(["hf download", name, *files]) + (f" --revision {revision}" if revision else "")
