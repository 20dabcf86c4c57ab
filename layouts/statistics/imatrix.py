"""Importance matrices of llama.cpp: for each column of an expert's input, the sum of its squares over the tokens.

Two forms are read. GGUF: tensors `NAME.in_sum2`, float32 [experts, columns], and `NAME.counts`, float32 [experts], the
tokens of each expert. The old binary form (.dat; little-endian): int32 number of records, and for each: int32 length of
its name, the name, int32 calls, int32 number of values, float32 values: mean square times calls, of all experts
together. After them, in newer files, int32 chunks, int32 length of the data's name, the name. llama.cpp writes a mean
square of exactly 1 for an expert that no token reached. NAME is that of the weight in a GGUF model.
Source: tools/imatrix/imatrix.cpp of llama.cpp (save_imatrix, save_imatrix_legacy).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ktconvert.layouts.checkpoints.containers import gguf
from ktconvert.layouts.checkpoints.containers.container import opened, read_at, read_unchanged
from ktconvert.layouts.errors import REMEDY, InputError, damaged_file, damaged_tensor
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, I64

Shapes = Mapping[int, tuple[int, int, int]]  # layer -> (E, H, I): experts, hidden size, expert width

SUMS, COUNTS = ".in_sum2", ".counts"
# A weight of all experts of a layer, or in older models of one.
WEIGHT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down|gate_up)(?:_exps|\.(\d{1,6}))\.weight")
PARTS = {"gate": ("gate", "gate_up"), "up": ("up", "gate_up"), "down": ("down",)}  # a projection: names that have it
GIVE = "give the statistics of this model, from llama-imatrix or `ktconvert calibrate`"


@dataclass(frozen=True)
class Record:
    """One weight's sums in a file: so many float32 values of all experts, from a byte on; [experts, columns] where the
    file says it; where the number of tokens of each expert lies, or `calls` for all of them.
    """

    name: str
    start: int
    values: int
    shape: tuple[int, int] | None
    counts: TensorInfo | None
    calls: int = 0


@dataclass(frozen=True)
class Sums:
    """The sums of one projection of a layer: where the float32 [columns] of each expert lie in the file, int64
    [experts], and what they are to be divided by for means, tokens or (in a .dat) calls, int64 [experts]; 0: none.
    """

    columns: int
    starts: I64
    counts: I64


@dataclass(frozen=True)
class Imatrix:
    """The importance matrix of experts in a file that must not change. sums: (layer, projection) -> where they lie."""

    path: Path
    sha256: str
    size: int
    mtime_ns: int
    sums: Mapping[tuple[int, str], Sums]
    fact: ClassVar[str] = "imatrix"  # under which its sha256 is recorded

    def memory(self, threads: int) -> int:
        """Bytes that so many threads take to read it: a linear's values as they are read, as numbers, divided."""
        return threads * 12 * max(sums.columns for sums in self.sums.values())

    def importance(self, layer: int, expert: int, projection: str) -> F32 | None:
        """The mean square of each input, float32 [columns]; None without tokens. InputError if the file changed."""
        sums = self.sums[layer, projection]
        count = np.float32(sums.counts[expert])
        return self._values(int(sums.starts[expert]), sums.columns) / count if count else None

    def read(self, layer: int, projection: str) -> F32:
        """The sums of all experts, float32 [experts, columns]. Raises InputError if the file changed."""
        sums = self.sums[layer, projection]
        return np.stack([self._values(int(start), sums.columns) for start in sums.starts])

    def unreached(self, layer: int) -> tuple[int, ...]:
        counts = [self.sums[layer, projection].counts for projection in PARTS]
        return tuple(int(n) for n in np.flatnonzero(np.min(counts, axis=0) == 0))

    def _values(self, start: int, count: int) -> F32:
        data = read_unchanged(self.path, ".gguf", start, 4 * count, self.size, self.mtime_ns)
        return np.frombuffer(data, "<f4").astype(np.float32)


def open_imatrix(path: Path, model: str, shapes: Shapes, others: Collection[int] = ()) -> Imatrix:
    """The statistics of these layers of a model, every value checked. others: layers that may be in the file, too.
    InputError for a file that is damaged, has values that are no sums of squares, or is of another model.
    """
    with opened(path, ".gguf") as (fd, status):
        if read_at(fd, 0, 4, path) == gguf.MAGIC:
            records = _gguf_records(path)
        else:
            records = {record.name: record for record in _binary_records(fd, status.st_size, path)}
        found = {(int(m[1]), m[2], -1 if m[3] is None else int(m[3])): record
                 for name, record in records.items() if (m := WEIGHT.fullmatch(name))}  # fmt: skip
        if not found:
            what = f"holds no importance matrix of experts (blk.N.ffn_gate_exps.weight{SUMS})"
            raise InputError(f"{path}: {what}; {GIVE}")
        layers = {layer for layer, _, _ in found}
        if shapes.keys() - layers or layers - shapes.keys() - set(others):
            where, needed = ranges(sorted(layers)), ranges(sorted(shapes))
            raise InputError(f"{path}: has experts in layers {where}, and {model} in layers {needed}; {GIVE}")
        sums = {}
        for layer, (experts, hidden, width) in shapes.items():
            for projection, columns in (("gate", hidden), ("up", hidden), ("down", width)):
                own = _records_of(found, layer, projection, experts, f"{path}: has no sums of", model)
                sums[layer, projection] = _sums(fd, path, own, experts, columns, f"layer {layer} of {model}")
    return Imatrix(path, sha256_file(path), status.st_size, status.st_mtime_ns, sums)


def _records_of(
    found: Mapping[tuple[int, str, int], Record], layer: int, projection: str, experts: int, what: str, model: str
) -> list[Record]:
    """One record with all experts, or one for each."""
    for part in PARTS[projection]:
        if (whole := found.get((layer, part, -1))) is not None:
            return [whole]
        each = [found.get((layer, part, expert)) for expert in range(experts)]
        if any(each) and (layer, part, experts) not in found:
            missing = next((n for n, record in enumerate(each) if record is None), None)
            if missing is not None:
                raise InputError(f"{what} expert {missing} of layer {layer}, {projection}, which {model} has; {GIVE}")
            return [record for record in each if record is not None]
    raise InputError(f"{what} layer {layer}, {projection}, for its {experts} experts, as {model} has them; {GIVE}")


def _sums(fd: int, path: Path, records: list[Record], experts: int, columns: int, whose: str) -> Sums:
    """One projection's sums, of [experts, columns]; each value is looked at."""
    starts, counts = np.empty(experts, np.int64), np.empty(experts, np.int64)
    each = experts // len(records)
    for number, record in enumerate(records):
        if record.shape not in (None, (each, columns)) or record.values != each * columns:
            own_shape = "{} experts of {} columns".format(*record.shape) if record.shape else f"{record.values} values"
            needed = f"{whose} has {each} experts of {columns} columns"
            raise InputError(f"{path}: {record.name} has {own_shape}, and {needed}; {GIVE}")
        values = np.frombuffer(_read(fd, record.start, 4 * record.values, path), "<f4").reshape(each, columns)
        wrong = ~(np.isfinite(values) & (values >= 0))
        if wrong.any():
            expert, column = (int(n) for n in np.argwhere(wrong)[0])
            where = f"(expert {expert + number}, column {column})"
            raise damaged_file(path, f"{record.name} has {values[expert, column]} as a sum of squares {where}")
        own = slice(number * each, (number + 1) * each)
        starts[own] = record.start + 4 * columns * np.arange(each)
        if record.counts is None:
            filler = (values == np.float32(record.calls)).all(axis=1)
            counts[own] = np.where(filler, 0, record.calls)
        else:
            tokens = np.frombuffer(_read(fd, record.counts.start, record.counts.nbytes, path), "<f4")
            if not ((tokens >= 0) & (tokens < 2.0**63) & (tokens == np.floor(tokens))).all():
                what = f"holds {tokens.tolist()[:4]}, no numbers of tokens"
                raise damaged_tensor(record.counts.name, what, REMEDY, path)
            counts[own] = tokens.astype(np.int64)
    return Sums(columns, starts, counts)


def _read(fd: int, start: int, count: int, path: Path) -> bytes:
    data = read_at(fd, start, count, path)
    if len(data) != count:
        raise damaged_file(path, "became shorter while it was being read")
    return data


# --- the two forms --------------------------------------------------------------------------------


def _gguf_records(path: Path) -> dict[str, Record]:
    entries = {entry.name: entry for entry in gguf.read_header(path).entries}
    records = {}
    for name in entries:
        base, _, last = name.rpartition(".")
        if f".{last}" not in (SUMS, COUNTS) or WEIGHT.fullmatch(base) is None:
            continue
        sums, counts = entries.get(base + SUMS), entries.get(base + COUNTS)
        if sums is None or counts is None:
            raise damaged_file(path, f"{base} has {last} but not both {SUMS[1:]} and {COUNTS[1:]}")
        if wrong := next((e for e in (sums, counts) if e.dtype != "F32"), None):
            raise damaged_tensor(wrong.name, f"is {wrong.dtype}, not F32", REMEDY, path)
        values, columns = sums.nbytes // 4, sums.shape[-1] if sums.shape else 1
        if not values or values // columns * 4 != counts.nbytes:
            what = f"of shape {list(sums.shape)} and {counts.name!r} of shape {list(counts.shape)}"
            raise damaged_tensor(sums.name, f"{what} do not belong together", REMEDY, path)
        records[base] = Record(base, sums.start, values, (values // columns, columns), counts)
    return records


def _binary_records(fd: int, size: int, path: Path) -> Iterator[Record]:
    """The records of the old form. InputError unless they end where the file ends."""
    at = 0

    def number(what: str, least: int, most: int) -> int:
        nonlocal at
        data = read_at(fd, at, 4, path)
        at += 4
        if len(data) < 4:
            raise damaged_file(path, f"neither GGUF nor an imatrix .dat: ends before {what}, at byte {size}")
        value = int(struct.unpack("<i", data)[0])
        if not least <= value <= most:
            raise damaged_file(path, f"neither GGUF nor an imatrix .dat: {what} would be {value} (at byte {at - 4})")
        return value

    seen: set[str] = set()
    for record in range(number("the number of records", 1, size // 12)):
        length = number(f"the length of the name of record {record}", 1, min(gguf.MAX_NAME, size - at))
        name = read_at(fd, at, length, path).decode("utf-8", "replace")
        at += length
        calls = number(f"the number of calls of {name!r}", 0, (1 << 31) - 1)
        values = number(f"the number of values of {name!r}", 1, max(0, size - at - 4) // 4)
        if name in seen:
            raise damaged_file(path, f"{name!r} appears twice")
        seen.add(name)
        yield Record(name, at, values, None, None, calls)
        at += 4 * values
    if at < size:
        number("the number of chunks", 0, (1 << 31) - 1)
        length = number("the length of the name of the data", 0, max(0, size - at - 4))
        at += length
    if at != size:
        raise damaged_file(path, f"{size - at} bytes follow its last record")


# --- writing, in llama.cpp's GGUF form: names, types and keys as its save_imatrix has them --------

VERSION = 3
ALIGNMENT = 32
UINT32 = 4  # a type of values
TYPE_F32 = 0  # a type of tensors


@dataclass(frozen=True)
class LayerSums:
    """Tokens of experts, int64 [experts]; sums of squares of what they read, float32 [experts, H], [experts, I]."""

    counts: I64
    inputs: F32
    middle: F32


def write_imatrix(
    path: Path,
    shapes: Shapes,
    load: Callable[[int], LayerSums],
    *,
    datasets: Sequence[str],
    chunks: int,
    chunk_size: int,
) -> tuple[int, str]:
    """Write a new file, synced, for the caller to publish; returns its size in bytes and its sha256.

    load      gives one layer's sums; called once for each, in any order
    datasets  names of the data, of which so many sequences (chunks) of chunk_size tokens went through the model
    Raises InputError for sums that are not finite, ResourceError when the disk is full.
    """
    layers = sorted(shapes, key=lambda layer: f"{layer}.")  # as llama.cpp: by name
    infos, offset = [], 0
    for layer in layers:
        experts, hidden, width = shapes[layer]
        for projection, columns in (("down", width), ("gate", hidden), ("up", hidden)):
            for ending, size in ((SUMS, columns), (COUNTS, 1)):
                dims = (size, experts) if experts > 1 else (size,)  # ggml leaves out trailing dimensions of 1
                about = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPE_F32, offset)
                infos.append(_text(f"blk.{layer}.ffn_{projection}_exps.weight{ending}") + about)
                offset += _padded(4 * size * experts)
    head = gguf.MAGIC + struct.pack("<IQQ", VERSION, len(infos), 4)
    head += _text("general.type") + struct.pack("<I", gguf.TEXT) + _text("imatrix")
    head += _text("imatrix.datasets") + struct.pack("<IIQ", gguf.ARRAY, gguf.TEXT, len(datasets))
    head += b"".join(map(_text, datasets))
    head += _text("imatrix.chunk_count") + struct.pack("<II", UINT32, chunks)
    head += _text("imatrix.chunk_size") + struct.pack("<II", UINT32, chunk_size) + b"".join(infos)
    head = head.ljust(_padded(len(head)), b"\0")
    with DirectFile(path, len(head) + offset) as file:
        file.append(head)
        for layer in layers:
            sums = load(layer)
            for values in (sums.middle, sums.inputs, sums.inputs):
                if not np.isfinite(values).all():
                    raise InputError(f"the sums of squares of what layer {layer} reads are not finite")
                for tensor in (values, sums.counts):
                    data = np.ascontiguousarray(tensor, "<f4").tobytes()
                    file.append(data.ljust(_padded(len(data)), b"\0"))
        return file.size, file.close()


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
