"""Calibration data: from a data set (local files, the hub's cache or the hub, read through `datasets`) to token ids of
each sample, in the order in which the library visits them.

Rows become samples as in kt-kernel's convert_gpu_weights.py: the first N of the split, shuffled by the seed, the chat
template applied, cut at max_length tokens, no special tokens added. Of local files only the rows that are asked for are
read, and nothing of them stays in a cache. No code of a data set is ever run: `datasets` can no longer do so.
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

from ktconvert.layouts.checkpoints.hub import HUB_ID, cache_root
from ktconvert.layouts.errors import InputError, KtconvertError, ResourceError
from ktconvert.layouts.files import documents
from ktconvert.layouts.files.direct_file import FULL
from ktconvert.pipeline.models.generating import PLAIN_TEMPLATE
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.report.text import first_line

Ids = npt.NDArray[np.int64]  # [tokens]
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
SPACE = re.compile(r"\s*")
NO_SPLIT = re.compile(r"(Unknown|Bad) split", re.IGNORECASE)
INSTRUCTION = ("instruction", "input", "output")
BLOCK = 16 << 20  # bytes; `datasets` reads blocks of 10 MiB
STRETCH = 1 << 20  # characters of a text file that are tokenized at a time


def facts_of(options: Samples) -> dict[str, Any]:
    """For manifests and descriptions: a local data set (the command line makes it absolute) by its name alone."""
    dataset = Path(options.dataset)
    return {
        "dataset": dataset.name if dataset.is_absolute() else options.dataset,
        "split": options.dataset_split,
        "samples": options.num_calibration_samples,
        "max_length": options.max_sequence_length,
        "seed": options.random_seed,
    }


def token_ids(options: Samples, tokenizer: Any, note: Callable[[str], None] | None = None) -> list[Ids]:
    """The samples, each int64 [1..max_length], in the order in which llmcompressor's oneshot would visit what samples()
    gives: the longest first, exactly as its LengthAwareSampler sorts them. That sort is not stable: how equal lengths
    are ordered is torch's choice, which may differ between CPUs and versions of torch. Raises as samples() does.
    """
    import torch

    shuffled = samples(options, tokenizer, note)
    order = torch.argsort(torch.tensor([ids.size for ids in shuffled]), descending=True)
    return [shuffled[int(index)] for index in order]


def samples(options: Samples, tokenizer: Any, note: Callable[[str], None] | None = None) -> list[Ids]:
    """The samples in the order of the shuffled rows, each int64 [1..max_length]; those without a token are left out,
    with a note. A row of jsonl, parquet or a hub's data set is a sample: its column messages through the chat template
    (without one: the contents, one per line), or its text, or instruction, input and output on lines of their own. A
    text file has no rows: it is cut into consecutive pieces of max_length tokens, of which the first N are shuffled;
    the last piece of a file is what is left. Raises InputError where the data set is not there, cannot be read, lacks
    the split, has no such column or no token at all.
    """
    files = of_split(local_files(options.dataset), options.dataset_split)
    rows: list[Ids] = []
    silence()
    with _untouched(tokenizer), tempfile.TemporaryDirectory(prefix="ktconvert-") as cache:
        for file in files:
            most = options.num_calibration_samples - len(rows)
            if kind_of(file) == "text":
                lines = (row["text"] for row in rows_of_file(file, cache))
                rows += _consecutive(lines, tokenizer, options.max_sequence_length, most)
            else:
                rows += _encoded(rows_of_file(file, cache, most), tokenizer, options.max_sequence_length, str(file))
            if len(rows) >= options.num_calibration_samples:
                break
        if not files:
            hub = rows_of_hub(options.dataset, options.dataset_split, options.num_calibration_samples, cache, note)
            rows = _encoded(hub, tokenizer, options.max_sequence_length, options.dataset)
    order = np.random.default_rng(options.random_seed).permutation(len(rows))  # what Dataset.shuffle(seed) does
    kept = [rows[index] for index in order if rows[index].size]
    if not kept:
        raise InputError(f"{options.dataset}: holds no token; give --dataset a data set with text")
    if note and len(kept) < len(rows):
        note(f"{options.dataset}: {len(rows) - len(kept)} of {len(rows)} samples hold no token and are left out")
    return kept


def _consecutive(lines: Iterable[str], tokenizer: Any, max_length: int, most: int) -> list[Ids]:
    """A text in at most `most` consecutive pieces of max_length tokens; no more of it is read than they need."""
    ids: list[int] = []
    for stretch in _stretches(lines):
        ids += tokenizer(stretch, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= most * max_length:
            break
    starts = range(0, len(ids), max_length)[:most]
    return [np.array(ids[start : start + max_length], dtype=np.int64) for start in starts]


def _stretches(lines: Iterable[str]) -> Iterator[str]:
    """The text in parts of some STRETCH characters, cut at line ends, so that a long one is never tokenized at once."""
    text = ""
    for line in lines:
        text += line
        if len(text) >= STRETCH:
            yield text
            text = ""
    if text:
        yield text


def _encoded(rows: Iterable[Row], tokenizer: Any, max_length: int, where: str) -> list[Ids]:
    """Each row's text as ids, cut at max_length. Raises InputError, which names the row."""
    encoded = []
    for number, row in enumerate(rows, 1):
        text = _text(row, tokenizer, f"{where}: row {number}")
        ids = tokenizer(text, padding=False, max_length=max_length, truncation=True, add_special_tokens=False)
        encoded.append(np.array(ids["input_ids"], dtype=np.int64))
    return encoded


def _text(row: Row, tokenizer: Any, where: str) -> str:
    """The text of a row; "" where it has none. All rows of a file have the same columns."""
    if "messages" in row:
        return _chat(row["messages"], tokenizer, where)
    columns = ["text"] if "text" in row else [name for name in INSTRUCTION if name in row]
    if not columns:
        raise InputError(
            f"{where}: has none of the columns messages, text, {', '.join(INSTRUCTION)}, only {', '.join(row)}; rename "
            "the one to be used"
        )
    for name in columns:
        if not isinstance(row[name] or "", str):
            raise InputError(f"{where}: its column {name} holds no text but {type(row[name]).__name__}; give text")
    return "\n".join(row[name] for name in columns if row[name])


def _chat(messages: Any, tokenizer: Any, where: str) -> str:
    if not messages:
        return ""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"{where}: its column messages holds no list of messages; give each a role and content")
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception as error:  # a template may raise anything
        raise InputError(
            f"{where}: the chat template refuses its messages ({first_line(error)}); give messages with role and "
            "content, or a column text"
        ) from error


@contextmanager
def _untouched(tokenizer: Any) -> Iterator[None]:
    """Restore truncation and padding afterwards: a fast tokenizer keeps them from its last call and saves them."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
        backend.enable_padding(**padding) if padding else backend.no_padding()


# --- rows -----------------------------------------------------------------------------------------


def local_files(dataset: str) -> list[Path]:
    """The files of a local data set: itself, or what lies in the folder, by name, but for folders, hidden files and
    documentation (.md or no suffix); [] for the id of one on the hub. InputError for anything else, and several kinds.
    """
    path = Path(dataset).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that is too long or impossible
        exists = False
    if not exists:
        if HUB_ID.fullmatch(dataset) and path.suffix.lower() not in KINDS:
            return []
        remedy = f"give --dataset a file or folder ({SUFFIXES}), or a hub id such as org/name"
        raise InputError(f"{dataset}: no such file or folder; {remedy}")
    if not path.is_dir():
        kind_of(path)
        return [path]
    try:
        there = sorted(file for file in path.iterdir() if not file.is_dir())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give --dataset another folder") from error
    files = [file for file in there if not file.name.startswith(".") and file.suffix.lower() not in ("", ".md")]
    if not files:
        raise InputError(f"{path}: holds no data; give --dataset a folder with files of one kind ({SUFFIXES})")
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        mixed = " and ".join(kinds)
        raise InputError(f"{path}: mixes {mixed} files; give --dataset one of them, or a folder of one kind")
    return files


def kind_of(file: Path) -> str:
    if (kind := KINDS.get(file.suffix.lower())) is None:
        raise InputError(f"{file}: is of no kind that can be read as calibration data ({SUFFIXES}); convert it")
    return kind


def of_split(files: Sequence[Path], split: str) -> Sequence[Path]:
    """Those named after the split (SPLIT.jsonl, SPLIT-00000-of-00003.parquet), or all. InputError for other splits."""
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
        if kind == "json":
            _require_objects(file, most)
        files = [glob.escape(str(file.absolute()))]
        options = {"data_files": files, "split": "train", "streaming": True, "cache_dir": cache, **LOADING[kind]}
        rows = datasets.load_dataset(kind, **options)
        yield from rows if most is None else rows.take(most)
    except Exception as error:  # every library underneath raises its own
        raise InputError(f"{file}: cannot be read as {kind} ({first_line(error)}); repair it") from error


def _require_objects(file: Path, most: int | None) -> None:
    """Raise ValueError for JSON that `datasets` must not see: rows that are no objects, or are nested deeply, end the
    process in pyarrow. Look as far as `datasets` reads for `most` rows.
    """
    left, beyond = most, 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                _require_rows(documents.parse(line.removeprefix(codecs.BOM_UTF8)))
            except ValueError as error:
                if number == 1 and isinstance(error, json.JSONDecodeError) and line.strip()[:1] in (b"[", b"{"):
                    return _require_rows_of(file.read_text(encoding="utf-8-sig"))
                raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
            if left is not None:
                left -= 1
                beyond += len(line) if left < 0 else 0
            if beyond > BLOCK:
                return


def _require_rows_of(text: str) -> None:
    """Raise ValueError where a text is not an array, or objects of several lines one after the other."""
    at, decoder = SPACE.match(text).end(), json.JSONDecoder()  # type: ignore[union-attr]
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        _require_rows(value)
        at = SPACE.match(text, at).end()  # type: ignore[union-attr]


def _require_rows(value: Any) -> None:
    """Raise ValueError for anything but an object or an array of objects, nested a few levels deep."""
    for row in value if isinstance(value, list) else [value]:
        if not isinstance(row, dict):
            raise ValueError("no JSON object")
        documents.require_plain(row)


def rows_of_hub(dataset: str, split: str, most: int, cache: str, note: Callable[[str], None] | None) -> Iterable[Row]:
    """The first rows of a split of the hub's: as `datasets` has cached or downloads them, else from a snapshot of
    `hf download`, for `datasets` searches only its own cache. Raises InputError, ResourceError.
    """
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if note:
        note(f"{dataset}: looked for in the local cache and on the hub")
    try:
        cached: Iterable[Row] = datasets.load_dataset(dataset, split=f"{split}[:{most}]")
        return cached
    except Exception as error:  # every library underneath raises its own
        try:
            folder = snapshot_download(dataset, repo_type="dataset", local_files_only=True, cache_dir=cache_root())
            return list(datasets.load_dataset(folder, split=split, streaming=True, cache_dir=cache).take(most))
        except LocalEntryNotFoundError:
            raise _explained(dataset, error) from error
        except Exception as second:
            raise _explained(dataset, second) from error


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


def silence() -> None:
    """No progress bars and logs of `datasets` and huggingface_hub: what matters is in the errors raised."""
    import datasets
    import huggingface_hub.utils

    for utils in (datasets.utils, huggingface_hub.utils):
        utils.logging.set_verbosity(logging.CRITICAL)
        utils.disable_progress_bars()
