"""Calibration data: from a data set to token ids, one array per sample, in the order in which the library visits them;
and the settings of a walk that reads them.

Rows become samples as in kt-kernel's convert_gpu_weights.py: the first N of the split, shuffled by the seed, the chat
template applied, cut at max_length tokens, no special tokens added.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError
from ktconvert.pipeline.models.generating import PLAIN_TEMPLATE
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.walk.dataset import (
    Row,
    first_line,
    kind_of,
    local_files,
    of_split,
    quiet,
    rows_of_file,
    rows_of_hub,
)

__all__ = ["Calibration", "local_files", "samples", "token_ids", "visiting_order"]

Ids = npt.NDArray[np.int64]  # [tokens]

INSTRUCTION = ("instruction", "input", "output")
STRETCH = 1 << 20  # characters of a text file that are tokenized at a time


@dataclass(frozen=True)
class Calibration:
    """Which samples: the first `samples` rows of a data set's split, shuffled by the seed (>= 0), each cut at
    max_length tokens.

    dataset  a file (.txt, .jsonl, .json, .parquet), a folder of such files of one kind, or a hub id
    split    of a hub's data set; of a folder, the files named after it, or all
    """

    dataset: str
    split: str
    samples: int
    max_length: int
    seed: int

    @classmethod
    def of(cls, options: Samples) -> Calibration:
        return cls(
            dataset=options.dataset,
            split=options.dataset_split,
            samples=options.num_calibration_samples,
            max_length=options.max_sequence_length,
            seed=options.random_seed,
        )

    def facts(self) -> dict[str, Any]:
        """For manifests and descriptions: a local data set by its name alone."""
        local = Path(self.dataset).is_absolute()  # as the command line stores a local one
        dataset = Path(self.dataset).name if local else self.dataset
        return {**vars(self), "dataset": dataset}


@dataclass(frozen=True)
class WalkSettings:
    """The settings of a walk.

    group        experts in memory at a time
    machine      properties of the machine where it was begun that can change bytes, "threads" and "device_type" among
                 them
    fingerprint  all that can change a byte: (name, value)
    """

    calibration: Calibration
    group: int
    trust_remote_code: bool
    machine: Mapping[str, Any]
    fingerprint: tuple[tuple[str, Any], ...]


def token_ids(calibration: Calibration, tokenizer: Any, note: Callable[[str], None] | None = None) -> list[Ids]:
    """The samples in the order in which llmcompressor's oneshot would visit what samples() gives; fewer where there are
    fewer rows.

    Each int64 [1..max_length]. The same file gives the same ids in every process of a machine. Raises as samples()
    does."""
    shuffled = samples(calibration, tokenizer, note)
    return [shuffled[index] for index in visiting_order([ids.size for ids in shuffled])]


def visiting_order(lengths: Sequence[int]) -> list[int]:
    """Indices by descending length, exactly as llmcompressor's LengthAwareSampler sorts them.

    Its sort is not stable: how equal lengths are ordered is torch's choice, which may differ between CPUs and versions
    of torch, and sorting a sorted list may change its order. To compare with oneshot, pass it the result of samples(),
    or a DataLoader of your own."""
    import torch

    return [int(index) for index in torch.argsort(torch.tensor(lengths), descending=True)]


def samples(calibration: Calibration, tokenizer: Any, note: Callable[[str], None] | None = None) -> list[Ids]:
    """The samples in the order of the shuffled rows, each int64 [1..max_length]; those without a token are left out,
    with a note.

    A row of jsonl, parquet or a hub's data set is a sample: its column messages through the chat template (without one:
    the contents, one per line), or its text, or instruction, input and output on lines of their own. A text file has no
    rows: it is cut into consecutive pieces of max_length tokens, of which the first N are shuffled; the last piece of a
    file is what is left.

    Raises InputError where the data set is not there, cannot be read, lacks the split, has no such column or no token
    at all."""
    files = of_split(local_files(calibration.dataset), calibration.split)
    rows: list[Ids] = []
    with _untouched(tokenizer), quiet(), tempfile.TemporaryDirectory(prefix="ktconvert-") as cache:
        for file in files:
            most = calibration.samples - len(rows)
            if kind_of(file) == "text":
                lines = (row["text"] for row in rows_of_file(file, cache))
                rows += _consecutive(lines, tokenizer, calibration.max_length, most)
            else:
                rows += _encoded(rows_of_file(file, cache, most), tokenizer, calibration.max_length, str(file))
            if len(rows) >= calibration.samples:
                break
        if not files:
            hub = rows_of_hub(calibration.dataset, calibration.split, calibration.samples, cache, note)
            rows = _encoded(hub, tokenizer, calibration.max_length, calibration.dataset)
    order = np.random.default_rng(calibration.seed).permutation(len(rows))  # what Dataset.shuffle(seed) does
    kept = [rows[index] for index in order if rows[index].size]
    if not kept:
        raise InputError(f"{calibration.dataset}: holds no token; give --dataset a data set with text")
    if note and len(kept) < len(rows):
        note(f"{calibration.dataset}: {len(rows) - len(kept)} of {len(rows)} samples hold no token and are left out")
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
    gathered: list[str] = []
    characters = 0
    for line in lines:
        gathered.append(line)
        characters += len(line)
        if characters >= STRETCH:
            yield "".join(gathered)
            gathered, characters = [], 0
    if gathered:
        yield "".join(gathered)


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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    truncation, padding = (backend.truncation, backend.padding) if backend else (None, None)
    try:
        yield
    finally:
        if backend:
            backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
            backend.enable_padding(**padding) if padding else backend.no_padding()
