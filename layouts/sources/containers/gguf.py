"""Headers of GGUF files (versions 2 and 3, little-endian), checked completely against the file.

Only a few numbers and short texts become Python objects: a vocabulary is skipped string by string.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import REMEDY, InputError, UnsupportedError, bad_file
from ktconvert.layouts.sources.containers.container import Header, Selection, open_regular_file, read_at
from ktconvert.layouts.tensors import TensorInfo

# Prefix of llama.cpp's names (general.architecture) in model_type and in the table of architectures.
PREFIX = "gguf:"
# Key of config.json -> key of the metadata, after "{architecture}.".
KEYS = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "routed_expert_hidden_size": "moe_latent_size",
    "moe_latent_size": "expert_latent_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "intermediate_size": "feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "swiglu_limits": "swiglu_clamp_exp",
    "activation_situ_beta": "activation.situ_beta",
    "activation_situ_linear_beta": "activation.situ_linear_beta",
    "hidden_act": "hidden_activation",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
LAYERS, MTP_LAYERS = "block_count", "nextn_predict_layers"  # the last blocks are the MTP layers


def make_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata as a configuration; {} without an architecture, as in later files of a split."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    config: dict[str, Any] = {"model_type": f"{PREFIX}{architecture}"}
    for name, key in KEYS.items():
        if (value := metadata.get(f"{architecture}.{key}")) is not None:
            config[name] = value
    layers, mtp = (metadata.get(f"{architecture}.{key}") for key in (LAYERS, MTP_LAYERS))
    if type(layers) is int:
        config["num_hidden_layers"] = layers - (mtp if type(mtp) is int else 0)
    return config


@dataclass(frozen=True)
class GgmlType:
    """A type of ggml: a block of `columns` neighbours in a row is stored in `nbytes` bytes."""

    name: str
    columns: int
    nbytes: int


# By their numbers in files. ggml withdrew some of the missing numbers; others are unknown to us.
GGML_TYPES = {
    number: GgmlType(name, columns, nbytes)
    for number, name, columns, nbytes in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2)),
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
        *((8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40)),
        *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144)),
        *((13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292)),
        *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
        *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110)),
        *((22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136)),
        *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8)),
        *((29, "IQ1_M", 256, 56), (30, "BF16", 1, 2)),
        *((34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
        *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36)),
    )
}


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 1 << 28  # bytes; the largest vocabularies need a tenth of it
MAX_NAME = 1000  # bytes; ggml's own limit is 64, and messages quote names in full
MAX_RANK = 4
KEPT_TEXT = 4096  # bytes of a string, and
KEPT_ITEMS = 4096  # items of an array; larger values are dropped, since none is needed
MAX_ALIGNMENT = 1 << 20
CHUNK = 1 << 20  # bytes per read

TEXT, ARRAY = 8, 9  # types of values; all others are numbers, in struct's notation:
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
NESTED = 4  # depth of arrays in arrays; no file is known to have any
LENGTH = struct.Struct("<Q")


def read_header(path: Path, file: str = "") -> Header:
    """Read and check a file's header, without weights; `file` is the file name of its tensors.

    metadata of the result has the split.* keys, config the rest under the names of a config.json.

    Raises InputError if the file is missing, cut short, big-endian or a Git LFS pointer, or if its header is malformed;
    UnsupportedError for version 1.
    """
    with open_regular_file(path, ".gguf") as (fd, status):
        cursor = _Cursor(fd, status.st_size, path)
        tensors, pairs = _read_counts(cursor)
        metadata = _read_metadata(cursor, pairs)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.fault(f"general.alignment is {str(alignment)[:40]}, not a power of two")
        infos = [_read_tensor(cursor) for _ in range(tensors)]
        end = cursor.position
        entries = tuple(_place_tensors(infos, -(-end // alignment) * alignment, alignment, cursor, file))
        digest = hashlib.sha256()
        for start in range(0, end, CHUNK):
            digest.update(read_at(fd, start, min(CHUNK, end - start), path))
    split = {key: str(value) for key, value in metadata.items() if key.startswith("split.")}
    return Header(entries, split, status.st_size, status.st_mtime_ns, digest.hexdigest(), make_config(metadata))


class _Cursor:
    """A position in a file, starting at its beginning. Lengths that exceed the rest of the file are rejected."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self.fd, self.size, self.path = fd, size, path
        # Buffered bytes, their offset in the file, and the position in them or after them.
        self._chunk, self._start, self._at = b"", 0, 0

    @property
    def position(self) -> int:
        return self._start + self._at

    def fault(self, problem: str) -> InputError:
        return bad_file(self.path, problem)

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._chunk):
            self._load(count)
        taken = self._chunk[self._at : self._at + count]
        self._at += count
        return taken

    def number(self, code: str) -> Any:
        """Read the next number, by its code in the struct module."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def length(self, label: str, most: int, each: int = 1) -> int:
        """Read the next number, a count of things of at least `each` bytes.

        Raises InputError if it is above `most`, or beyond the file.
        """
        count: int = self.number("Q")
        if count > most or count * each > self.size - self.position:
            raise self.fault(f"the header claims {count} {label}, too many for a file of {self.size} bytes")
        return count

    def skip(self, count: int) -> None:
        self._at += count

    def skip_texts(self, count: int) -> None:
        """Skip texts, each after its length. Raises InputError if one exceeds the file."""
        chunk, at, length = self._chunk, self._at, LENGTH.unpack_from
        for _ in range(count):
            if at + LENGTH.size > len(chunk):
                self._at = at
                self._load(LENGTH.size)
                chunk, at = self._chunk, 0
            at += LENGTH.size + length(chunk, at)[0]
        self._at = at
        if self.position > self.size:
            raise self._too_short()

    def _load(self, count: int) -> None:
        start = self.position
        if start + count > self.size:
            raise self._too_short()
        if start + count > MAX_HEADER:
            raise self.fault(f"header is longer than {MAX_HEADER} bytes")
        self._start, self._at = start, 0
        self._chunk = read_at(self.fd, start, min(max(count, CHUNK), self.size - start), self.path)
        if len(self._chunk) < count:
            raise self._too_short()

    def _too_short(self) -> InputError:
        return self.fault(f"ends inside its header, at byte {self.size}")


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.size < 24:
        raise cursor.fault(f"only {cursor.size} bytes, too short for a GGUF header")
    magic, version = cursor.take(4), cursor.number("I")
    if magic == MAGIC[::-1] or (magic == MAGIC and version and version & 0xFFFF == 0):
        remedy = "use the little-endian one, or convert it with gguf-py"
        raise InputError("a big-endian GGUF file", remedy, path=cursor.path)
    if magic != MAGIC:
        raise cursor.fault(f"begins with {magic!r}, not like a GGUF file")
    if version not in VERSIONS:
        problem = f"GGUF version {version} is unsupported; supported: {' and '.join(map(str, VERSIONS))}"
        raise UnsupportedError(problem, "use a newer release of the file", path=cursor.path)
    # Least sizes. A tensor: length of its name, rank, type, offset. A pair: length of its key, type, one byte.
    return cursor.length("tensors", 1 << 32, 24), cursor.length("key-value pairs", 1 << 32, 13)


def _read_text(cursor: _Cursor, label: str, most: int) -> str:
    raw = cursor.take(cursor.length(f"bytes in {label}", most))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise cursor.fault(f"{label} {raw[:80]!r} is not UTF-8 text") from None


def _read_metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    """Read all keys with their values; None for values that are not kept."""
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = _read_text(cursor, "a key", MAX_NAME)
        if key in metadata:
            raise cursor.fault(f"key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key, cursor.number("I"))
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int, depth: int = 0) -> Any:
    """Read a value of this type; return None if it is too long to be useful here."""
    if kind in NUMBERS:
        return cursor.number(NUMBERS[kind])
    if kind == TEXT:
        count = cursor.length(f"bytes in {key!r}", cursor.size)
        if count > KEPT_TEXT:
            return cursor.skip(count)
        return cursor.take(count).decode("utf-8", "replace")
    if kind != ARRAY or depth == NESTED:
        too_deep = f"{key!r} is nested too deeply"
        raise cursor.fault(too_deep if kind == ARRAY else f"key {key!r} has a value of unknown type {kind}")
    inner: int = cursor.number("I")
    if inner == TEXT:
        return cursor.skip_texts(cursor.length(f"strings in {key!r}", cursor.size, LENGTH.size))
    if inner in NUMBERS:
        width = struct.calcsize(f"<{NUMBERS[inner]}")
        count = cursor.length(f"numbers in {key!r}", cursor.size, width)
        if count > KEPT_ITEMS:
            return cursor.skip(count * width)
        return list(struct.unpack(f"<{count}{NUMBERS[inner]}", cursor.take(count * width)))
    for _ in range(cursor.length(f"arrays in {key!r}", KEPT_ITEMS, 12)):
        _read_value(cursor, key, inner, depth + 1)
    return None


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read name, shape (rows before columns), type and offset of a tensor."""
    name = _read_text(cursor, "a tensor's name", MAX_NAME)
    rank = cursor.number("I")
    if rank > MAX_RANK:
        raise cursor.fault(f"tensor {name!r} has {rank} dimensions, more than ggml's {MAX_RANK}")
    shape = struct.unpack(f"<{rank}Q", cursor.take(8 * rank))[::-1]
    if math.prod(shape) >= 1 << 63:
        raise cursor.fault(f"tensor {name!r} of shape {list(shape)} is larger than any file")
    return name, shape, cursor.number("I"), cursor.number("Q")


def _place_tensors(
    infos: list[tuple[str, tuple[int, ...], int, int]], first: int, alignment: int, cursor: _Cursor, file: str
) -> Iterator[TensorInfo]:
    """Yield the tensors in file order, each with its bytes. Raises InputError if they overlap or exceed the file."""
    seen: set[str] = set()
    at, before = 0, ""
    ordered = sorted(infos, key=lambda info: info[3])
    for number, (name, shape, kind, offset) in enumerate(ordered):
        if name in seen:
            raise cursor.fault(f"tensor {name!r} appears twice")
        seen.add(name)
        if offset % alignment:
            raise cursor.fault(
                f"tensor {name!r} begins at byte {offset} of the data, which is not a multiple of {alignment}"
            )
        if offset < at:
            raise cursor.fault(f"tensor {name!r} overlaps {before!r}")
        known = GGML_TYPES.get(kind)
        if known is None:  # not an error yet: no encoding reads it, if the tensor is needed at all
            following = ordered[number + 1][3] if number + 1 < len(ordered) else max(offset, cursor.size - first)
            nbytes, dtype = following - offset, f"ggml type {kind}"
        else:
            columns = shape[-1] if shape else 1
            if columns % known.columns:
                has = f"tensor {name!r} of shape {list(shape)} has rows of {columns} columns"
                raise cursor.fault(f"{has}, but {known.name} is stored in blocks of {known.columns}")
            nbytes, dtype = math.prod(shape) // known.columns * known.nbytes, known.name
        at, before = offset + nbytes, name
        if first + at > cursor.size:
            raise cursor.fault(f"truncated: tensor {name!r} ends at byte {first + at}, but the file has {cursor.size}")
        yield TensorInfo(name, dtype, shape, nbytes, file, first + offset)


# --- the files of a checkpoint: one, or all of a split, as llama.cpp's gguf-split names them -----------------------

SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
COUNT = "split.count"
# GGUF files that are not a model: vision or audio encoders, and importance matrices.
OTHER = re.compile(r"mmproj|imatrix", re.I)


def select(root: Path, files: list[str]) -> Selection | None:
    """Select the GGUF files of a directory that are a checkpoint.

    Raises InputError if one is missing, or for several models.
    """
    present = [f for f in files if f.endswith(".gguf")]
    if not present:
        return None
    main = [f for f in present if not OTHER.search(f)] or present
    models = dict.fromkeys(split_names(name, 1)[0] for name in main)
    if len(models) > 1:
        raise InputError(f"{root}: holds several GGUF models ({', '.join(models)}); name one of these files")
    names = split_names(next(iter(models)))
    _require_complete(root, names)
    return Selection(names, None, tuple(f for f in present if f not in names))


def select_file(path: Path) -> Selection:
    """Select the file and the others of its split. Raises InputError if one is missing."""
    names = split_names(path.name)
    _require_complete(path.parent, names)
    return Selection(names)


def split_names(name: str, most: int | None = None) -> list[str]:
    """Return the names of all files of the split that a file belongs to, in order, or the first `most` of them."""
    match = SPLIT_NAME.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)[:most]]


def _require_complete(root: Path, names: Sequence[str]) -> None:
    for name in names:
        if len(names) > 1 and not (root / name).exists():
            raise bad_file(root / name, f"missing, one of {len(names)} files of a split")


def check_split(root: Path, names: Sequence[str], headers: Sequence[Header]) -> None:
    """Raise InputError unless the headers say that the files are one split, in this order."""
    tensors = sum(len(header.entries) for header in headers)
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        for key, value in ((COUNT, len(names)), ("split.no", number), ("split.tensors.count", tensors)):
            recorded = header.metadata.get(key, "missing" if key == COUNT and len(names) > 1 else str(value))
            merged = key == COUNT and recorded == "0" and len(names) == 1  # written by gguf-split --merge
            if recorded != str(value) and not merged:
                problem = f"{key} is {recorded}, but file names and tensors require {value}"
                remedy = f"put all files of the split into one directory under their original names, or {REMEDY}"
                raise InputError(problem, remedy, path=root / name)
