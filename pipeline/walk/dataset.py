"""Where the rows of a data set come from: local files, the hub's cache or the hub, read through `datasets`; its errors
in one sentence.

Of local files only the rows that are asked for are read, and nothing of them stays in a cache. No code of a data set is
ever run: `datasets` can no longer do so.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.hub import HUB_ID, cache_root
from ktconvert.layouts.errors import InputError, KtconvertError, ResourceError

Row = Mapping[str, Any]

KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SUFFIXES = ", ".join(KINDS)
# How `datasets` is to read them: text with its line ends, and rows as they are, also where they look like the log of a
# coding agent.
LOADING: dict[str, dict[str, Any]] = {
    "text": {"keep_linebreaks": True},
    "json": {"parse_agent_traces": False},
    "parquet": {},
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*")  # SPLIT-00000-of-00003.parquet, as data sets of the hub name their files
NO_SPLIT = re.compile(r"(Unknown|Bad) split", re.IGNORECASE)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def local_files(dataset: str) -> list[Path]:
    """The files of a local data set: itself, or what lies in the folder, by name; [] for the id of one on the hub.

    In a folder, hidden files and those of documentation (.md or no suffix) are skipped, and so are its folders. Raises
    InputError for a path that does not exist, a folder without data, a file of another kind, and files of several
    kinds."""
    path = Path(dataset).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that is too long or impossible
        exists = False
    if not exists:
        if HUB_ID.fullmatch(dataset) and path.suffix.lower() not in KINDS:
            return []
        raise InputError(
            f"{dataset}: no such file or folder; give --dataset a file or folder ({SUFFIXES}), or a hub id such as "
            "org/name"
        )
    if not path.is_dir():
        return [_known(path)]
    try:
        there = sorted(file for file in path.iterdir() if not file.is_dir())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give --dataset another folder") from error
    files = [_known(file) for file in there if not file.name.startswith(".") and file.suffix.lower() not in ("", ".md")]
    if not files:
        raise InputError(f"{path}: holds no data; give --dataset a folder with files of one kind ({SUFFIXES})")
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise InputError(
            f"{path}: mixes {' and '.join(kinds)} files; give --dataset one of them, or a folder of one kind"
        )
    return files


def kind_of(file: Path) -> str:
    return KINDS[file.suffix.lower()]


def _known(file: Path) -> Path:
    if file.suffix.lower() not in KINDS:
        raise InputError(f"{file}: is of no kind that can be read as calibration data ({SUFFIXES}); convert it")
    return file


def of_split(files: Sequence[Path], split: str) -> Sequence[Path]:
    """Those files that are named after the split (SPLIT.jsonl, SPLIT-00000-of-00003.parquet); all if none is.

    Raises InputError where none is, but the names show several other splits.
    """
    shards = {file: match[1] for file in files if (match := SHARD.fullmatch(file.name))}
    if named := [file for file in files if shards.get(file, file.stem) == split]:
        return named
    if len(splits := sorted(set(shards.values()))) > 1:
        raise InputError(f"{files[0].parent}: has no split {split}; choose {' or '.join(splits)} with --dataset-split")
    return files


def rows_of_file(file: Path, cache: str, most: int | None = None) -> Iterator[Row]:
    """Rows of a local file, at most `most`, lazily; of a text, its lines. cache: for `datasets`. InputError."""
    import datasets

    kind = kind_of(file)
    try:
        if file.stat().st_size == 0:
            return
        rows = datasets.load_dataset(
            kind,
            data_files=[glob.escape(str(file.absolute()))],
            split="train",
            streaming=True,
            cache_dir=cache,
            **LOADING[kind],
        )
        yield from rows if most is None else rows.take(most)
    except Exception as error:  # every library underneath raises its own
        line = _bad_line(file) if kind == "json" else None
        raise InputError(f"{file}: cannot be read as {kind} ({line or first_line(error)}); repair it") from error


def _bad_line(file: Path) -> str | None:
    """Which line of a JSON Lines file is invalid; None if all are valid or the file has another format."""
    number = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.lstrip().startswith(b"["):
                    return None
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is no JSON object"
    except ValueError as error:
        return f"line {number}: {getattr(error, 'msg', error)}"
    except OSError:
        pass
    return None


def rows_of_hub(dataset: str, split: str, most: int, cache: str, note: Callable[[str], None] | None) -> Iterable[Row]:
    """The first rows of a split of the hub's: as `datasets` has cached or downloads them, else from a snapshot that is
    there.

    `datasets` searches only its own cache, so a snapshot of `hf download` is opened here. Raises InputError,
    ResourceError."""
    import datasets

    if note:
        note(f"{dataset}: looked for in the local cache and on the hub")
    try:
        cached: Iterable[Row] = datasets.load_dataset(dataset, split=f"{split}[:{most}]")
        return cached
    except Exception as error:  # every library underneath raises its own
        try:
            rows = _rows_of_snapshot(dataset, split, most, cache)
        except Exception as second:
            raise _explained(dataset, second) from error
        if rows is None:
            raise _explained(dataset, error) from error
        return rows


def _rows_of_snapshot(dataset: str, split: str, most: int, cache: str) -> list[Row] | None:
    """The first rows of a split, from the snapshot in the local cache; None where there is none."""
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(dataset, repo_type="dataset", local_files_only=True, cache_dir=cache_root())
    except LocalEntryNotFoundError:
        return None
    return list(datasets.load_dataset(folder, split=split, streaming=True, cache_dir=cache).take(most))


def _explained(dataset: str, error: BaseException) -> KtconvertError:
    """The error for a data set of the hub that could not be loaded, with its remedy."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return ResourceError(f"{dataset}: the disk of the cache {cache_root()} is full; set HF_HOME to another")
        cause = cause.__cause__
    if NO_SPLIT.search(first_line(error)):
        return InputError(f"{dataset}: {first_line(error)}; choose one with --dataset-split")
    return InputError(
        f"{dataset}: cannot be loaded ({first_line(error)}); give --dataset FILE ({SUFFIXES}) or a folder of such "
        f"files, or run `hf download --repo-type dataset {dataset}` where there is a network and set HF_HOME to its "
        "cache, or take --quant-method RTN, which needs no data"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and logs of `datasets` and huggingface_hub: what matters is in the errors raised."""
    import datasets
    import huggingface_hub.utils

    libraries = (datasets.utils, huggingface_hub.utils)
    before = [(utils.logging.get_verbosity(), utils.are_progress_bars_disabled()) for utils in libraries]
    for utils in libraries:
        utils.logging.set_verbosity(logging.CRITICAL)
        utils.disable_progress_bars()
    try:
        yield
    finally:
        for utils, (verbosity, disabled) in zip(libraries, before, strict=True):
            utils.logging.set_verbosity(verbosity)
            if not disabled:
                utils.enable_progress_bars()
