"""Files of a model on the Hugging Face hub: their sizes and hashes, and comparison and replacement of local copies."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ktconvert.layouts.errors import InputError, KTConvertError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import explain_full_disk
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.containers.safetensors import is_inside

CHUNK_BYTES = 4 << 20  # bytes in memory at a time


class HubFile(NamedTuple):
    """A file of a model on the hub.

    size     bytes
    digest   SHA-256, in hex; or the SHA-1 of git's blob, for a file that git stores itself
    is_blob  whether the digest is the one of git's blob
    """

    name: str
    size: int
    digest: str
    is_blob: bool


def list_files(name: str, revision: str | None) -> tuple[str, list[HubFile]]:
    """Return the commit and the files of a model on the hub at a branch, tag or commit (default main).

    Raises InputError if the hub cannot be read, or does not state a size and a hash for each file.
    """
    if hub.is_offline():
        raise InputError(f"{name}: its hashes are on the hub, and HF_HUB_OFFLINE is set; unset it")
    info = hub.read_model_info(name, revision, "reading its hashes from the hub")
    files = []
    for sibling in info.siblings or ():
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if sibling.size is None or not digest or not is_inside(sibling.rfilename):
            problem = f"{name}: the hub states no size and hash of {sibling.rfilename}"
            raise InputError(f"{problem}; if HF_ENDPOINT names a mirror, unset it")
        files.append(HubFile(sibling.rfilename, sibling.size, digest, sibling.lfs is None))
    return str(info.sha), files


def select_files(folder: Path, files: Iterable[HubFile]) -> list[HubFile]:
    """Return the files of the hub that a local checkpoint has or lacks.

    A checkpoint may lack documents, files in subfolders, a second set of weights (consolidated*), and all that GGUF
    files do not need.
    """
    by_name = {file.name: file for file in files}
    present = [name for name in by_name if os.path.lexists(folder / name)]
    if not any(name.endswith(".safetensors") for name in present) and any(name.endswith(".gguf") for name in present):
        needed = {part for name in present if name.endswith(".gguf") for part in hub.list_parts(PurePosixPath(name))}
    else:
        top = [name for name in by_name if any(fnmatch(name, pattern) for pattern in (*hub.WEIGHTS, *hub.LOADED))]
        top = [name for name in top if "/" not in name]
        first_set = [name for name in top if not name.startswith("consolidated")]
        needed = {*(first_set if any(name.endswith(".safetensors") for name in first_set) else top)}
    return [file for name, file in by_name.items() if name in needed or name in present]


def explain_difference(path: Path, file: HubFile, advance: Callable[[int], None] = lambda _: None) -> str | None:
    """Return how a local file differs from the one of the hub; None if it has the same size and hash.

    advance  is called with the number of bytes after each read
    """
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"has {size} bytes instead of {file.size}"
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False) if file.is_blob else hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest.hexdigest() == file.digest else "has the right size, but different bytes"


def replace_file(name: str, commit: str, file: HubFile, path: Path) -> None:
    """Download a file of a model on the hub, compare it with its hash, and put it in the place of a local one.

    Until then the local file stays as it is. A link of the hub's cache stays; the file that it names is replaced.

    Raises InputError if the download fails or has a different hash, ResourceError if the disk is full.
    """
    from huggingface_hub import hf_hub_download

    target = path.resolve()
    publish.make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".ktconvert-", dir=target.parent) as partial:
        try:
            with explain_full_disk(target):
                # Without force_download, it would copy a file of the hub's cache, which may be damaged.
                found = hf_hub_download(name, file.name, revision=commit, local_dir=partial, force_download=True)
        except KTConvertError:
            raise
        except Exception as error:  # every library underneath raises its own
            raise hub.explain(name, commit, error) from None
        if (difference := explain_difference(Path(found), file)) is not None:
            raise InputError(f"{path}: its download {difference}; check the network, and repair again")
        publish.sync_tree(Path(partial))
        publish.publish_path(Path(found), target)
