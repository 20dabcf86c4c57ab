"""Importance matrices of llama.cpp: for each column of an expert's input, the sum of its squares over the tokens.

The module reads two file formats. NAME is the name of a weight in a GGUF model.

GGUF: tensors `NAME.in_sum2`, float32 [experts, columns], and `NAME.counts`, float32 [experts], the tokens of each
expert.

The old binary format (.dat; little-endian) has the int32 number of records, and for each record: int32 length of its
name, the name, int32 calls, int32 number of values, and the float32 values of all experts: mean square times calls. In
newer files the records are followed by int32 chunks, int32 length of the data's name, and that name. llama.cpp writes
a mean square of exactly 1 for an expert that no token reached.

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

from ktconvert.layouts.errors import REMEDY, InputError, bad_file, bad_tensor
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.sources.containers import gguf
from ktconvert.layouts.sources.containers.container import open_regular_file, read_at, read_unchanged
from ktconvert.layouts.tensors import TensorInfo, format_ranges
from ktconvert.native_quant.arrays import F32, I64

Shapes = Mapping[int, tuple[int, int, int]]  # layer -> (E, H, I): experts, hidden size, expert width

# Suffixes of the tensors of a weight.
SUMS = ".in_sum2"
COUNTS = ".counts"
# Names of the weight of all experts of a layer, or, in older models, of one expert.
WEIGHT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down|gate_up)(?:_exps|\.(\d{1,6}))\.weight")
# Projection -> its names in files.
WEIGHT_NAMES = {"gate": ("gate", "gate_up", "up"), "up": ("up", "gate_up"), "down": ("down",)}
WRONG_MODEL_REMEDY = "use the statistics of this model, from llama-imatrix or `ktconvert calibrate`"


@dataclass(frozen=True)
class Record:
    """The sums of one weight in a file.

    start        offset of the float32 values of all experts
    value_count  number of these values
    shape        [experts, columns]; None if the file does not have it
    counts       tensor with the tokens of each expert; None if `calls` is valid for all experts
    calls        number of calls in a .dat file
    """

    name: str
    start: int
    value_count: int
    shape: tuple[int, int] | None
    counts: TensorInfo | None
    calls: int = 0


@dataclass(frozen=True)
class Sums:
    """The sums of one projection of a layer.

    starts  offsets of each expert's float32 [columns] in the file, int64 [experts]
    counts  divisors that give means, int64 [experts]: tokens or (in a .dat) calls; 0 if there were no tokens
    """

    columns: int
    starts: I64
    counts: I64


@dataclass(frozen=True)
class Imatrix:
    """The importance matrix of experts in a file that must not change.

    sums  (layer, projection) -> sums of the projection
    """

    path: Path
    sha256: str
    size: int
    mtime_ns: int
    sums: Mapping[tuple[int, str], Sums]
    manifest_key: ClassVar[str] = "imatrix"  # key of the sha256

    def memory_bytes(self, threads: int) -> int:
        """Return the memory for `threads` readers: a linear's values as bytes, as numbers, and divided."""
        return threads * 12 * max(sums.columns for sums in self.sums.values())

    def read_importance(self, layer: int, expert: int, projection: str) -> F32 | None:
        """Return the mean square of each input, float32 [columns]; None without tokens.

        Raises InputError if the file changed.
        """
        sums = self.sums[layer, projection]
        count = np.float32(sums.counts[expert])
        return self._read_values(int(sums.starts[expert]), sums.columns) / count if count else None

    def read(self, layer: int, projection: str) -> F32:
        """Read the sums of all experts, float32 [experts, columns]. Raises InputError if the file changed."""
        sums = self.sums[layer, projection]
        return np.stack([self._read_values(int(start), sums.columns) for start in sums.starts])

    def experts_without_tokens(self, layer: int) -> tuple[int, ...]:
        counts = [self.sums[layer, projection].counts for projection in WEIGHT_NAMES]
        return tuple(int(n) for n in np.flatnonzero(np.min(counts, axis=0) == 0))

    def _read_values(self, start: int, count: int) -> F32:
        data = read_unchanged(self.path, ".gguf", start, 4 * count, self.size, self.mtime_ns)
        return np.frombuffer(data, "<f4").astype(np.float32)


def open_imatrix(path: Path, model: str, shapes: Shapes, optional_layers: Collection[int] = ()) -> Imatrix:
    """Open the importance matrix of these layers of a model, and check every value.

    optional_layers  layers that the file may have in addition

    Raises InputError for a file that is damaged, has values that are no sums of squares, or belongs to a different
    model.
    """
    if path.is_dir():
        remedy = "give a .gguf or .dat file; for a folder of `ktconvert calibrate`, use --statistics"
        raise InputError("is a folder, not an importance matrix", remedy, path=path)
    with open_regular_file(path, ".gguf") as (fd, status):
        if read_at(fd, 0, 4, path) == gguf.MAGIC:
            records = _read_gguf_records(path)
        else:
            records = {record.name: record for record in _read_binary_records(fd, status.st_size, path)}
        weights: dict[tuple[int, str, int], Record] = {}  # (layer, projection, expert or -1 for all) -> record
        for name, record in records.items():
            if (match := WEIGHT.fullmatch(name)) is not None:
                expert = -1 if match[3] is None else int(match[3])
                weights[int(match[1]), match[2], expert] = record
        if not weights:
            problem = f"has no importance matrix of experts (blk.N.ffn_gate_exps.weight{SUMS})"
            raise InputError(f"{path}: {problem}; {WRONG_MODEL_REMEDY}")
        layers = {layer for layer, _, _ in weights}
        if shapes.keys() - layers or layers - shapes.keys() - set(optional_layers):
            actual = format_ranges(sorted(layers))
            needed = format_ranges(sorted(shapes))
            raise InputError(
                f"{path}: has experts in layers {actual}, but {model} has them in layers {needed}; {WRONG_MODEL_REMEDY}"
            )
        sums = {}
        for layer, (experts, hidden, width) in shapes.items():
            for projection, columns in (("gate", hidden), ("up", hidden), ("down", width)):
                selected = _select_records(weights, layer, projection, experts, f"{path}: has no sums of", model)
                sums[layer, projection] = _read_sums(fd, path, selected, experts, columns, f"layer {layer} of {model}")
    return Imatrix(path, sha256_file(path), status.st_size, status.st_mtime_ns, sums)


def _select_records(
    records: Mapping[tuple[int, str, int], Record], layer: int, projection: str, experts: int, problem: str, model: str
) -> list[Record]:
    """Return the records of a projection: one with all experts, or one for each expert.

    problem  beginning of the message for missing records
    model    name of the model, for messages

    Raises InputError for missing records.
    """
    for name in WEIGHT_NAMES[projection]:
        if (shared := records.get((layer, name, -1))) is not None:
            return [shared]
        expert_records = [records.get((layer, name, expert)) for expert in range(experts)]
        if any(expert_records) and (layer, name, experts) not in records:
            missing = next((expert for expert, record in enumerate(expert_records) if record is None), None)
            if missing is not None:
                linear = f"expert {missing} of layer {layer}, {projection}"
                raise InputError(f"{problem} {linear}, which {model} has; {WRONG_MODEL_REMEDY}")
            return [record for record in expert_records if record is not None]
    raise InputError(
        f"{problem} layer {layer}, {projection}, which has {experts} experts in {model}; {WRONG_MODEL_REMEDY}"
    )


def _read_sums(fd: int, path: Path, records: list[Record], experts: int, columns: int, owner: str) -> Sums:
    """Return the sums of one projection, [experts, columns]; check every value.

    owner  the layer and its model, for messages
    """
    starts = np.empty(experts, np.int64)
    counts = np.empty(experts, np.int64)
    record_experts = experts // len(records)
    for number, record in enumerate(records):
        needed_shape = (record_experts, columns)
        if record.shape not in (None, needed_shape) or record.value_count != record_experts * columns:
            actual = f"{record.value_count} values"
            if record.shape:
                actual = "{} experts of {} columns".format(*record.shape)
            needed = f"{owner} has {record_experts} experts of {columns} columns"
            raise InputError(f"{path}: {record.name} has {actual}, but {needed}; {WRONG_MODEL_REMEDY}")
        values = np.frombuffer(_read_bytes(fd, record.start, 4 * record.value_count, path), "<f4").reshape(needed_shape)
        is_wrong = ~(np.isfinite(values) & (values >= 0))
        if is_wrong.any():
            expert, column = (int(index) for index in np.argwhere(is_wrong)[0])
            where = f"(expert {expert + number}, column {column})"
            raise bad_file(path, f"{record.name} has {values[expert, column]} as a sum of squares {where}")
        first = number * record_experts
        expert_range = slice(first, first + record_experts)
        starts[expert_range] = record.start + 4 * columns * np.arange(record_experts)
        if record.counts is None:
            # Experts that no token reached have a mean square of 1 in all columns.
            is_unreached = (values == np.float32(record.calls)).all(axis=1)
            counts[expert_range] = np.where(is_unreached, 0, record.calls)
        else:
            tokens = np.frombuffer(_read_bytes(fd, record.counts.start, record.counts.nbytes, path), "<f4")
            if not ((tokens >= 0) & (tokens < 2.0**63) & (tokens == np.floor(tokens))).all():
                problem = f"has {tokens.tolist()[:4]}, which are not numbers of tokens"
                raise bad_tensor(record.counts.name, problem, REMEDY, path)
            counts[expert_range] = tokens.astype(np.int64)
    return Sums(columns, starts, counts)


def _read_bytes(fd: int, start: int, count: int, path: Path) -> bytes:
    data = read_at(fd, start, count, path)
    if len(data) != count:
        raise bad_file(path, "shrank while it was read")
    return data


# --- the two file formats --------------------------------------------------------------------------------


def _read_gguf_records(path: Path) -> dict[str, Record]:
    """Return the records of an importance matrix in GGUF by the names of their weights."""
    entries = {entry.name: entry for entry in gguf.read_header(path).entries}
    records = {}
    for name in entries:
        weight, _, suffix = name.rpartition(".")
        if f".{suffix}" not in (SUMS, COUNTS) or WEIGHT.fullmatch(weight) is None:
            continue
        sums = entries.get(weight + SUMS)
        counts = entries.get(weight + COUNTS)
        if sums is None or counts is None:
            raise bad_file(path, f"{weight} has {suffix} but not both {SUMS[1:]} and {COUNTS[1:]}")
        if wrong := next((entry for entry in (sums, counts) if entry.dtype != "F32"), None):
            raise bad_tensor(wrong.name, f"is {wrong.dtype}, not F32", REMEDY, path)
        value_count = sums.nbytes // 4
        columns = sums.shape[-1] if sums.shape else 1
        if not value_count or value_count // columns * 4 != counts.nbytes:
            problem = f"of shape {list(sums.shape)} and {counts.name!r} of shape {list(counts.shape)}"
            raise bad_tensor(sums.name, f"{problem} do not match", REMEDY, path)
        records[weight] = Record(weight, sums.start, value_count, (value_count // columns, columns), counts)
    return records


def _read_binary_records(fd: int, size: int, path: Path) -> Iterator[Record]:
    """Yield the records of the old format. Raises InputError unless they end at the end of the file."""
    offset = 0

    def read_number(label: str, least: int, most: int) -> int:
        nonlocal offset
        data = read_at(fd, offset, 4, path)
        if len(data) < 4:
            raise bad_file(path, f"neither GGUF nor an imatrix .dat: ends before {label}, at byte {size}")
        value = int(struct.unpack("<i", data)[0])
        if not least <= value <= most:
            raise bad_file(path, f"neither GGUF nor an imatrix .dat: {label} would be {value} (at byte {offset})")
        offset += 4
        return value

    names: set[str] = set()
    for record in range(read_number("the number of records", 1, size // 12)):
        length = read_number(f"the length of the name of record {record}", 1, min(gguf.MAX_NAME, size - offset))
        name = read_at(fd, offset, length, path).decode("utf-8", "replace")
        offset += length
        calls = read_number(f"the number of calls of {name!r}", 0, (1 << 31) - 1)
        value_count = read_number(f"the number of values of {name!r}", 1, max(0, size - offset - 4) // 4)
        if name in names:
            raise bad_file(path, f"{name!r} appears twice")
        names.add(name)
        yield Record(name, offset, value_count, None, None, calls)
        offset += 4 * value_count
    if offset < size:
        read_number("the number of chunks", 0, (1 << 31) - 1)
        length = read_number("the length of the name of the data", 0, max(0, size - offset - 4))
        offset += length
    if offset != size:
        raise bad_file(path, f"{size - offset} bytes follow its last record")


# --- writing in llama.cpp's GGUF format: names, types and keys as in its save_imatrix --------------

VERSION = 3
ALIGNMENT = 32
UINT32 = 4  # number of a value's type
TYPE_F32 = 0  # number of a tensor's type


@dataclass(frozen=True)
class LayerSums:
    """The statistics of one layer.

    counts  tokens of each expert, int64 [experts]
    inputs  sums of squares of the inputs of gate and up, float32 [experts, H]
    middle  sums of squares of the inputs of down, float32 [experts, I]
    """

    counts: I64
    inputs: F32
    middle: F32


def write_imatrix(
    path: Path,
    shapes: Shapes,
    load_layer: Callable[[int], LayerSums],
    *,
    datasets: Sequence[str],
    chunks: int,
    chunk_size: int,
) -> tuple[int, str]:
    """Write a new file, synced, for the caller to publish; return its size in bytes and its sha256.

    load_layer  (layer) -> its sums; called once for each layer, in any order
    datasets    names of the data sets
    chunks      number of sequences of chunk_size tokens that the model processed

    Raises InputError for sums that are not finite, ResourceError if the disk is full.
    """
    layers = sorted(shapes, key=lambda layer: f"{layer}.")  # llama.cpp sorts tensors by name
    infos = []
    offset = 0
    for layer in layers:
        experts, hidden, width = shapes[layer]
        for projection, columns in (("down", width), ("gate", hidden), ("up", hidden)):
            for suffix, size in ((SUMS, columns), (COUNTS, 1)):
                dims = (size, experts) if experts > 1 else (size,)  # ggml omits trailing dimensions of 1
                description = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPE_F32, offset)
                infos.append(_encode_text(f"blk.{layer}.ffn_{projection}_exps.weight{suffix}") + description)
                offset += _round_up(4 * size * experts)
    head = gguf.MAGIC + struct.pack("<IQQ", VERSION, len(infos), 4)
    head += _encode_text("general.type") + struct.pack("<I", gguf.TEXT) + _encode_text("imatrix")
    head += _encode_text("imatrix.datasets") + struct.pack("<IIQ", gguf.ARRAY, gguf.TEXT, len(datasets))
    head += b"".join(map(_encode_text, datasets))
    head += _encode_text("imatrix.chunk_count") + struct.pack("<II", UINT32, chunks)
    head += _encode_text("imatrix.chunk_size") + struct.pack("<II", UINT32, chunk_size) + b"".join(infos)
    head = head.ljust(_round_up(len(head)), b"\0")
    with DirectFile(path, len(head) + offset) as file:
        file.append(head)
        for layer in layers:
            sums = load_layer(layer)
            for values in (sums.middle, sums.inputs, sums.inputs):
                if not np.isfinite(values).all():
                    raise InputError(f"the sums of squares of the inputs of layer {layer} are not finite")
                for tensor in (values, sums.counts):
                    data = np.ascontiguousarray(tensor, "<f4").tobytes()
                    file.append(data.ljust(_round_up(len(data)), b"\0"))
        return file.size, file.close()


def _encode_text(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
