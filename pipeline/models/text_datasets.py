"""Text data sets as token ids, for calibration and training.

A data set is a local file or folder, or one of the hub; the `datasets` library reads it. Rows become samples as in
kt-kernel's convert_gpu_weights.py: the first N rows of the split, shuffled by the seed, with the chat template applied,
cut at max_length tokens, without special tokens. Only the first N rows of local files are read, and they do not stay in
a cache. No code of a data set is run: `datasets` no longer supports it.
"""

from __future__ import annotations

import codecs
import glob
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import (
    InputError,
    KTConvertError,
    ResourceError,
    UnreachableError,
    explain_absence,
)
from ktconvert.layouts.files import documents
from ktconvert.layouts.files.direct_file import DISK_FULL_REMEDIES
from ktconvert.layouts.files.facts import DatasetFacts
from ktconvert.layouts.sources.hub import HUB_ID, NO_ANSWER, cache_root, is_offline, read_endpoint
from ktconvert.pipeline.models.generating import PLAIN_TEMPLATE
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.report.text import first_line

Ids = npt.NDArray[np.int64]  # [tokens]
Row = Mapping[str, Any]

TEXT = "text"
KINDS = {".txt": TEXT, ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SUFFIXES = ", ".join(KINDS)
# Options of `datasets`: keep line ends of text, and keep rows unchanged even if they look like a coding agent's log.
LOADER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"keep_linebreaks": True},
    "json": {"parse_agent_traces": False},
    "parquet": {},
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*")  # SPLIT-00000-of-00003.parquet: names of the hub's data sets
SPACE = re.compile(r"\s*")
NO_SPLIT = re.compile(r"(Unknown|Bad) split", re.IGNORECASE)
INSTRUCTION = ("instruction", "input", "output")
USE_ROLES = "use messages with role and content"
BLOCK = 16 << 20  # bytes; `datasets` reads blocks of 10 MiB
CHUNK = 1 << 20  # characters of a text file to tokenize at a time


def describe_dataset(options: Samples) -> DatasetFacts:
    """Return the settings for manifests and model cards. A local data set appears without its directory."""
    dataset = Path(options.dataset)  # the command line makes local paths absolute
    return {
        "dataset": dataset.name if dataset.is_absolute() else options.dataset,
        "split": options.dataset_split,
        "samples": options.num_calibration_samples,
        "max_length": options.sequence_length,
        "seed": options.seed,
    }


def read_samples_by_length(options: Samples, tokenizer: Any, note: Callable[[str], None] | None = None) -> list[Ids]:
    """Return the samples of read_samples, the longest first, each int64 [1..max_length].

    This is the order of llmcompressor's oneshot, sorted exactly as its LengthAwareSampler does. The sort is not stable:
    torch chooses the order of equal lengths, which may differ between CPUs and versions of torch.
    """
    import torch

    shuffled = read_samples(options, tokenizer, note)
    order = torch.argsort(torch.tensor([ids.size for ids in shuffled]), descending=True)
    return [shuffled[int(index)] for index in order]


def read_samples(options: Samples, tokenizer: Any, note: Callable[[str], None] | None = None) -> list[Ids]:
    """Return the samples in the order of the shuffled rows, each int64 [1..max_length].

    A row of a jsonl or parquet file or of a data set of the hub is a sample: its column messages, through the chat
    template (or one content per line, if the tokenizer has none), or its column text, or its columns instruction, input
    and output, one per line. A text file is cut into consecutive samples of max_length tokens, of which the first N are
    shuffled; the last one of a file may be shorter. Samples without a token are skipped, with a note. Raises
    InputError for a data set that is missing, unreadable, without the split, without such a column or without a token.
    """
    files = select_split(local_files(options.dataset), options.dataset_split)
    rows: list[Ids] = []
    silence_libraries()
    with _preserve_settings(tokenizer), tempfile.TemporaryDirectory(prefix="ktconvert-") as cache:
        for file in files:
            limit = options.num_calibration_samples - len(rows)
            if file_kind(file) == TEXT:
                lines = (row["text"] for row in read_rows(file, cache))
                rows += _cut_text(lines, tokenizer, options.sequence_length, limit)
            else:
                rows += _encode_rows(read_rows(file, cache, limit), tokenizer, options.sequence_length, str(file))
            if len(rows) >= options.num_calibration_samples:
                break
        if not files:
            hub_rows = read_hub_rows(
                options.dataset, options.dataset_split, options.num_calibration_samples, cache, note
            )
            rows = _encode_rows(hub_rows, tokenizer, options.sequence_length, options.dataset)
    order = np.random.default_rng(options.seed).permutation(len(rows))  # the order of Dataset.shuffle(seed)
    samples = [rows[index] for index in order if rows[index].size]
    if not samples:
        raise InputError(f"{options.dataset}: has no tokens; set --dataset to a data set with text")
    if note and len(samples) < len(rows):
        note(f"{options.dataset}: {len(rows) - len(samples)} of {len(rows)} samples have no tokens and are skipped")
    return samples


def _cut_text(lines: Iterable[str], tokenizer: Any, max_length: int, limit: int) -> list[Ids]:
    """Return at most `limit` consecutive samples of max_length tokens of a text. Reads no more lines than they need."""
    ids: list[int] = []
    for chunk in _split_text(lines):
        ids += tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= limit * max_length:
            break
    starts = range(0, len(ids), max_length)[:limit]
    return [np.array(ids[start : start + max_length], dtype=np.int64) for start in starts]


def _split_text(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text in chunks of about CHUNK characters, cut at line ends, since tokenizing needs much memory."""
    text = ""
    for line in lines:
        text += line
        if len(text) >= CHUNK:
            yield text
            text = ""
    if text:
        yield text


def _encode_rows(rows: Iterable[Row], tokenizer: Any, max_length: int, source_name: str) -> list[Ids]:
    """Return the token ids of each row's text, cut at max_length. Raises InputError, which names the row."""
    encoded = []
    for number, row in enumerate(rows, 1):
        text = _read_row_text(row, tokenizer, f"{source_name}: row {number}")
        ids = tokenizer(text, padding=False, max_length=max_length, truncation=True, add_special_tokens=False)
        encoded.append(np.array(ids["input_ids"], dtype=np.int64))
    return encoded


def _read_row_text(row: Row, tokenizer: Any, place: str) -> str:
    """Return the text of a row, which may be "". All rows of a file have the same columns."""
    if "messages" in row:
        return _render_chat(row["messages"], tokenizer, place)
    columns = ["text"] if "text" in row else [name for name in INSTRUCTION if name in row]
    if not columns:
        raise InputError(
            f"{place}: has none of the columns messages, text, {', '.join(INSTRUCTION)}, but {', '.join(row)}; rename "
            "the column to use"
        )
    for name in columns:
        if not isinstance(row[name] or "", str):
            raise InputError(
                f"{place}: column {name} contains {type(row[name]).__name__}, not text; convert it to text"
            )
    return "\n".join(row[name] for name in columns if row[name])


def _render_chat(messages: Any, tokenizer: Any, place: str) -> str:
    if not messages:
        return ""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"{place}: column messages is not a list of messages; {USE_ROLES}")
    texts = [text for message in messages for text in _list_texts(message, place)]
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        rendered = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception as error:  # a template may raise any error
        raise InputError(
            f"{place}: the chat template rejects its messages ({first_line(error)}); {USE_ROLES}, or a column text"
        ) from error

    if texts and not any(text.strip() in rendered for text in texts):
        roles = ", ".join(sorted({str(message["role"]) for message in messages}))
        raise InputError(f"{place}: the chat template drops all messages (roles: {roles}); use roles that it knows")
    return rendered


def _list_texts(message: Mapping[str, Any], place: str) -> list[str]:
    """Return the texts of a message that are not empty. Raises InputError for a message without role or content."""
    content = message.get("content")
    if not message.get("role") or (content is None and not message.get("tool_calls")):
        keys = ", ".join(key for key, value in message.items() if value is not None)
        raise InputError(f"{place}: column messages has a message with {keys or 'nothing'}; {USE_ROLES}")
    parts = content if isinstance(content, list) else [] if content is None else [{"text": content}]
    texts = [text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str)]
    if len(texts) < len(parts):
        raise InputError(f"{place}: column messages has content that is no text; convert it to text")
    return [text for text in texts if text.strip()]


@contextmanager
def _preserve_settings(tokenizer: Any) -> Iterator[None]:
    """Restore truncation and padding at the end: a fast tokenizer keeps them from its last call and saves them."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        yield
        return
    truncation = backend.truncation
    padding = backend.padding
    try:
        yield
    finally:
        backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
        backend.enable_padding(**padding) if padding else backend.no_padding()


@contextmanager
def name_option(flag: str) -> Iterator[None]:
    """Name this option instead of --dataset in the remedies of errors."""
    try:
        yield
    except InputError as error:
        raise type(error)(str(error).replace("--dataset ", f"{flag} ")) from error


# --- rows of files and of the hub -----------------------------------------------------------------


def local_files(dataset: str) -> list[Path]:
    """Return the files of a local data set, sorted by name; [] for the id of a data set of the hub.

    The files of a folder, except hidden files and documentation (.md or no suffix); folders in it are not searched.
    Raises InputError for a missing or unreadable folder, and for files of several or unknown kinds.
    """
    path = Path(dataset).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that is too long or impossible
        exists = False
    if not exists:
        if (error := explain_absence(path)) is not None:
            raise error
        if HUB_ID.fullmatch(dataset) and path.suffix.lower() not in KINDS:
            return []
        remedy = f"set --dataset to a file or folder ({SUFFIXES}), or a hub id such as org/name"
        raise InputError(f"{dataset}: does not exist; {remedy}")
    if not path.is_dir():
        file_kind(path)
        return [path]
    try:
        entries = sorted(file for file in path.iterdir() if not file.is_dir())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); set --dataset to a different folder") from error
    files = [file for file in entries if not file.name.startswith(".") and file.suffix.lower() not in ("", ".md")]
    if not files:
        raise InputError(f"{path}: has no data; set --dataset to a folder with files of one kind ({SUFFIXES})")
    kinds = sorted({file_kind(file) for file in files})
    if len(kinds) > 1:
        mixed = " and ".join(kinds)
        raise InputError(f"{path}: mixes {mixed} files; set --dataset to one of them, or to a folder of one kind")
    return files


def file_kind(file: Path) -> str:
    """Return the name under which `datasets` reads a file. Raises InputError for an unknown suffix."""
    if (kind := KINDS.get(file.suffix.lower())) is None:
        raise InputError(f"{file}: unsupported kind of file (supported: {SUFFIXES}); convert it")
    return kind


def select_split(files: Sequence[Path], split: str) -> Sequence[Path]:
    """Return the files named after the split (SPLIT.jsonl, SPLIT-00000-of-00003.parquet), or all if none is.

    Raises InputError if the files are named after several other splits.
    """
    shards = {file: match[1] for file in files if (match := SHARD.fullmatch(file.name))}
    if named := [file for file in files if shards.get(file, file.stem) == split]:
        return named
    if len(splits := sorted(set(shards.values()))) > 1:
        raise InputError(f"{files[0].parent}: has no split {split}; choose {' or '.join(splits)} with --dataset-split")
    return files


def read_rows(file: Path, cache: str, limit: int | None = None) -> Iterator[Row]:
    """Yield at most `limit` rows of a local file; the rows of a text file are its lines.

    cache  directory for `datasets`

    Raises InputError for a file that cannot be read.
    """
    import datasets

    kind = file_kind(file)
    try:
        if file.stat().st_size == 0:
            return
        if kind == "json":
            _require_objects(file, limit)
        files = [glob.escape(str(file.absolute()))]
        options = {"data_files": files, "split": "train", "streaming": True, "cache_dir": cache, **LOADER_OPTIONS[kind]}
        rows = datasets.load_dataset(kind, **options)
        yield from rows if limit is None else rows.take(limit)
    except Exception as error:  # each library below raises its own errors
        raise InputError(f"{file}: cannot be read as {kind} ({first_line(error)}); repair it") from error


def _require_objects(file: Path, limit: int | None) -> None:
    """Raise ValueError for rows that are no JSON objects or are nested deeply: they would crash pyarrow.

    Checks as much of the file as `datasets` reads for `limit` rows.
    """
    remaining = limit  # rows to check
    extra = 0  # bytes after these rows
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                _require_rows(documents.parse_json(line.removeprefix(codecs.BOM_UTF8)))
            except ValueError as error:
                if number == 1 and isinstance(error, json.JSONDecodeError) and line.strip()[:1] in (b"[", b"{"):
                    return _require_json_rows(file.read_text(encoding="utf-8-sig"))
                raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
            if remaining is not None:
                remaining -= 1
                extra += len(line) if remaining < 0 else 0
            if extra > BLOCK:
                return


def _require_json_rows(text: str) -> None:
    """Raise ValueError for a text that is neither an array nor a sequence of objects."""
    position = SPACE.match(text).end()  # type: ignore[union-attr]
    decoder = json.JSONDecoder()
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        _require_rows(value)
        position = SPACE.match(text, position).end()  # type: ignore[union-attr]


def _require_rows(value: Any) -> None:
    """Raise ValueError for anything but an object or an array of objects, nested a few levels deep."""
    for row in value if isinstance(value, list) else [value]:
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        documents.require_plain(row)


def read_hub_rows(
    dataset: str, split: str, limit: int, cache: str, note: Callable[[str], None] | None
) -> Iterable[Row]:
    """Return the first `limit` rows of a split of a data set of the hub.

    They come from the cache of `datasets` or a download, else from a snapshot of `hf download`, which `datasets` does
    not search for. Raises InputError or ResourceError.
    """
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if note:
        note(f"{dataset}: searching the local cache and the hub")
    try:
        cached: Iterable[Row] = datasets.load_dataset(dataset, split=f"{split}[:{limit}]")
        return cached
    except Exception as error:  # each library below raises its own errors
        try:
            folder = snapshot_download(dataset, repo_type="dataset", local_files_only=True, cache_dir=cache_root())
            return list(datasets.load_dataset(folder, split=split, streaming=True, cache_dir=cache).take(limit))
        except LocalEntryNotFoundError:
            raise _hub_error(dataset, error) from error
        except Exception as snapshot_error:
            raise _hub_error(dataset, snapshot_error) from error


def _hub_error(dataset: str, error: BaseException) -> KTConvertError:
    """Return the error, with its remedy, for a data set of the hub that could not be loaded."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_REMEDIES:
            return ResourceError(f"{dataset}: the disk of the cache {cache_root()} is full; change HF_HOME")
        cause = cause.__cause__
    message = first_line(error)
    if NO_SPLIT.search(message):
        return InputError(f"{dataset}: {message}; choose one with --dataset-split")
    kinds = {kind.__name__ for kind in type(error).__mro__}  # their modules differ between versions
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        if "gated" in message:
            remedy = "accept on its hub page and run `hf auth login`"
            return InputError("its owner asks for consent", remedy, path=dataset)
        remedy = "correct the name, or run `hf auth login` if the data set is private"
        return InputError("neither a local path nor a public data set of the hub", remedy, path=dataset)
    remedy = (
        f"set --dataset to a file ({SUFFIXES}) or a folder of such files, or run `hf download --repo-type dataset "
        f"{dataset}` on a machine with network access and set HF_HOME to its cache"
    )
    if kinds & NO_ANSWER:
        reason = "HF_HUB_OFFLINE is set" if is_offline() else f"the hub {read_endpoint()} cannot be reached"
        return UnreachableError(f"is not in the local cache, and {reason}", remedy, path=dataset)
    return InputError(f"cannot be loaded ({message})", remedy, path=dataset)


def silence_libraries() -> None:
    """Disable progress bars and logs of `datasets` and huggingface_hub, whose errors say enough."""
    import datasets
    import huggingface_hub.utils

    for utils in (datasets.utils, huggingface_hub.utils):
        utils.logging.set_verbosity(logging.CRITICAL)
        utils.disable_progress_bars()
