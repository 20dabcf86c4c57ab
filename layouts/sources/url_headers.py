"""Headers of models behind URLs (s3://, gs://, https://), which fsspec reads; kept like those of models of the hub."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ktconvert.layouts.errors import InputError, KTConvertError, UsageError
from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.containers.safetensors import INDEX, SINGLE, is_inside
from ktconvert.layouts.sources.hub_headers import REQUESTS, Location, cache_folder, fetch_file, select_files
from ktconvert.layouts.sources.retries import (
    call_patiently,
    explain_certificate,
    explain_failure,
    read_status,
    request_patiently,
)

# Protocol -> the package that fsspec needs for it, and the extra that installs it
PROTOCOLS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "https": ("aiohttp", "https"), "http": ("aiohttp", "https")}
URL = re.compile(rf"({'|'.join(PROTOCOLS)})://[^/]+.*")
# Files to try if the server does not list its folders
USUAL_FILES = (
    *(INDEX, SINGLE, "config.json", "generation_config.json", "preprocessor_config.json", "quantize_config.json"),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
)
# What may identify the bytes, the best first. On Google Cloud, the etag changes with the metadata, too.
VERSIONS = ("md5Hash", "generation", "Content-MD5", "ETag", "VersionId", "Last-Modified")
ABSENT = (404, 410)  # statuses
REFUSED = (401, 403)  # many servers also refuse files that do not exist
REMEDY = "check the URL, your credentials and the network"

# gcsfs logs a warning for each request without credentials, and tracebacks of the errors that it raises.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())


class RemoteFolder(NamedTuple):
    """The files of a folder behind a URL.

    system  fsspec's file system
    root    path of the folder in it
    files   name -> what fsspec states about it
    """

    system: Any
    url: str
    root: str
    files: Mapping[str, Mapping[str, Any]]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start..stop-1 of a file, with one range request."""
        data: bytes = self.system.cat_file(f"{self.root}/{name}", start=start, end=stop)
        return data

    def describe(self, name: str) -> str:
        """Return how messages name a file."""
        return f"{self.url}/{name}"

    def require_unchanged(self, name: str) -> None:
        """Raise InputError if a file has changed since its header was read."""
        info = request_patiently(
            self.describe(name), partial(self.system.info, f"{self.root}/{name}"), "repeat the command to continue"
        )
        if identify(name, info) != identify(name, self.files[name]):
            problem = "changed while it was being read; restore the old file and resume"
            raise InputError(f"{self.describe(name)}: {problem}")

    def fetch_companions(self, folder: Path) -> Path:
        """Return the folder with the headers, after all small files have been fetched into it."""
        names = [name for name in self.files if any(fnmatch(name, pattern) for pattern in hub.COMPANIONS)]
        self.fetch(folder, names)
        return folder

    def fetch(self, folder: Path, names: Iterable[str]) -> None:
        """Fetch small files, and headers of files of weights, unless they are in the folder."""

        def fetch_missing(name: str) -> None:
            is_weights = any(fnmatch(name, pattern) for pattern in hub.WEIGHTS)
            blob = folder.parent / "blobs" / identify(name, self.files[name]) if is_weights else None
            if not (folder / name).exists():
                size = int(self.files[name]["size"])
                request = partial(fetch_file, self, folder / name, name, size, blob)
                request_patiently(self.describe(name), request, REMEDY)

        with ThreadPoolExecutor(REQUESTS) as executor:
            list(executor.map(fetch_missing, names))


def find_url_headers(url: str, revision: str | None = None) -> Location:
    """Return a directory with the headers of a model behind a URL, and its files.

    Raises UsageError for a revision, KTConvertError if a package is missing, InputError if the URL cannot be read.
    """
    if revision is not None:
        raise UsageError(f"--revision {revision}: {url} is a URL; a revision is for a model of the hub")
    url = url.rstrip("/")
    protocol = url.partition(":")[0]
    package, extra = PROTOCOLS[protocol]
    require_packages(f"{protocol}://", ["fsspec", package], extra)
    import fsspec

    if protocol == "gs":
        _fail_at_untrusted_certificates()
    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        remote = RemoteFolder(system, url, root, _list_files(system, root))
    except KTConvertError:
        raise
    except Exception as error:  # every library underneath raises its own
        raise explain_failure(url, error, REMEDY) from None
    if not any(fnmatch(name, pattern) for name in remote.files for pattern in hub.WEIGHTS):
        raise InputError(
            f"{url}: no file of weights is found there, or you may not read it; check the URL and your credentials"
        )
    identities = "".join(identify(name, info) for name, info in sorted(remote.files.items()))
    folder = cache_folder() / f"urls--{_hash(url)}" / _hash(identities)
    remote.fetch(folder, select_files(remote.files))
    return Location(folder, remote)


@cache
def _fail_at_untrusted_certificates() -> None:
    """Let gcsfs raise the error of an untrusted certificate at once; it would repeat the request for 30 seconds."""
    from gcsfs import retry  # type: ignore[import-untyped]

    is_retriable = retry.is_retriable
    retry.is_retriable = lambda error: explain_certificate("", error) is None and is_retriable(error)


def identify(name: str, info: Mapping[str, Any]) -> str:
    """Return a hash of what identifies the bytes of a file: its name, size and version; no hash of its bytes."""
    identity = [name, info["size"], _find_version(info)]
    return f"url-{_hash(repr(identity))}"


def _find_version(info: Mapping[str, Any]) -> str | None:
    """Return what best identifies the bytes of a file among what is stated about it; None if nothing does."""
    return next((str(info[key]) for key in VERSIONS if info.get(key)), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _list_files(system: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """Return what is stated about each file of a folder.

    If the server does not list it, the index and the usual names are tried.

    Raises InputError for a file without a size, or without an ETag or another version.
    """
    missing: tuple[int, ...] = (*ABSENT, *REFUSED)
    listed = _request_unless(missing, partial(system.ls, root, detail=False)) or ()  # once: the URL may be wrong
    names = {str(path).rstrip("/").rpartition("/")[2] for path in listed}
    if any(fnmatch(name, pattern) for name in names for pattern in hub.WEIGHTS):
        missing = ABSENT
    else:
        index = _request_unless(missing, partial(call_patiently, partial(system.cat_file, f"{root}/{INDEX}")))
        names = {*USUAL_FILES, *(() if index is None else _list_indexed(index, f"{root}/{INDEX}"))}
    chosen = [name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in hub.FILES)]

    def read_info(name: str) -> Any:
        return _request_unless(missing, partial(call_patiently, partial(system.info, f"{root}/{name}")))

    with ThreadPoolExecutor(REQUESTS) as executor:
        files = {name: info for name, info in zip(chosen, executor.map(read_info, chosen), strict=True) if info}
    for name, info in files.items():
        if info.get("size") is None or _find_version(info) is None:
            raise InputError(f"{root}/{name}: the server states no size or no ETag; download the model first")
    return files


def _list_indexed(index: bytes, path: str) -> set[str]:
    """Return the names of the files of weights in an index. Raises InputError."""
    try:
        names = {*json.loads(index)["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{path}: not an index of weights; download the model again") from None
    return {name for name in names if isinstance(name, str) and is_inside(name)}


def _request_unless(statuses: Collection[int], request: Callable[[], Any]) -> Any:
    """Return the result of a request; None if the server answers with one of these statuses."""
    try:
        return request()
    except Exception as error:  # every library underneath raises its own
        if read_status(error) in statuses:
            return None
        raise
