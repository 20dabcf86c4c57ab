"""Headers of safetensors files, checked against the file, and the files of a directory that make up a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
import numpy as np

from ktconvert.layouts.errors import REMEDY, InputError, UnsupportedError, bad_file, bad_tensor, unreadable_file
from ktconvert.layouts.files.manifest import LONGEST_NAME
from ktconvert.layouts.sources.containers.container import (
    Header,
    Selection,
    open_regular_file,
    read_at,
    refuse_substitute,
)
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import Array

MAX_HEADER = 100_000_000  # the limit of the reference implementation, in bytes
MAX_RANK = 64
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
MAX_NAME = 1000  # real names are much shorter, and messages quote names in full

# Bits per element of every dtype of the format.
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
METADATA = "__metadata__"
METADATA_FIRST = f'{{"{METADATA}":'
INTEGERS = {"BOOL": "u1", "I64": "<i8"}


def read_header(path: Path, file: str = "") -> Header:
    """Read and check a file's header, without weights; `file` is the file name of its tensors. Raises InputError."""
    with open_regular_file(path, ".safetensors") as (fd, status):
        head = read_at(fd, 0, 8, path)
        if len(head) < 8:
            raise bad_file(path, f"only {status.st_size} bytes, too short for a safetensors header")
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER:
            raise bad_file(path, f"is no safetensors file: its first 8 bytes are no length of a header ({length})")
        if 8 + length > status.st_size:
            raise bad_file(path, f"header of {length} bytes does not fit a file of {status.st_size} bytes")
        raw = read_at(fd, 0, 8 + length, path)
    if len(raw) != 8 + length:
        raise bad_file(path, "ends inside its header")
    entries, metadata = parse_header(raw[8:], status.st_size - 8 - length, 8 + length, str(path), file)
    return Header(entries, metadata, status.st_size, status.st_mtime_ns, hashlib.sha256(raw).hexdigest())


MOST_NUMBERS = 1 << 22  # in a matrix of layers and experts


def read_matrix(path: Path, name: str, dtype: str, form: str) -> Array:
    """Read the tensor of this name, of rank 2 and one of INTEGERS; `form` says what is needed.

    Raises InputError for any other tensor.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a directory; {form}")
    try:
        entries = {entry.name: entry for entry in read_header(path).entries}
    except InputError as error:
        raise error.with_remedy(form) if error.remedy == REMEDY else error from None
    entry = entries.get(name)
    if entry is None:
        raise InputError(f"{path}: contains {', '.join(map(repr, sorted(entries)[:3])) or 'no tensor'}; {form}")
    if entry.dtype != dtype or len(entry.shape) != 2:
        raise InputError(f"{path}: {name!r} is {entry.dtype} of shape {list(entry.shape)}; {form}")
    if math.prod(entry.shape) > MOST_NUMBERS:  # sparse files can be of any size
        raise InputError(f"{path}: {name!r} is of shape {list(entry.shape)}, larger than any model; {form}")
    data = np.fromfile(path, np.uint8, entry.nbytes, offset=entry.start)
    if len(data) != entry.nbytes:
        raise InputError(f"{path}: became shorter while it was being read; {REMEDY}")
    return data.view(INTEGERS[dtype]).reshape(entry.shape)


def parse_header(
    raw: bytes, data_size: int, data_start: int, where: str, file: str = ""
) -> tuple[tuple[TensorInfo, ...], dict[str, str]]:
    """Return the entries (in file order) and metadata of a header's JSON, checked against the bytes that follow it."""
    entries, metadata = _parse_usual(raw, data_start, file) or _parse_any(raw, data_start, where, file)
    entries.sort(key=attrgetter("start", "nbytes"))
    at = data_start
    for entry in entries:
        if entry.start != at:
            fault = "overlaps the tensor before it" if entry.start < at else "leaves a gap after the tensor before it"
            raise bad_tensor(entry.name, f"at byte {entry.start - data_start} {fault}", REMEDY, where)
        at += entry.nbytes
    if at != data_start + data_size:
        problem = "truncated" if at > data_start + data_size else "longer than its header states"
        raise bad_file(where, f"{problem} ({data_size} bytes of weights, {at - data_start} in the header)")
    return tuple(entries), metadata


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[Size, Size]


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])


def _parse_usual(raw: bytes, data_start: int, file: str) -> tuple[list[TensorInfo], dict[str, str]] | None:
    """Return the entries and metadata of a correct header as most programs write it, in a third of _parse_any's time.

    Returns None for any other header.
    """
    try:
        text = raw.decode("utf-8")
        metadata: dict[str, str] = {}
        if text.startswith(METADATA_FIRST):
            metadata, end = _METADATA.raw_decode(text, len(METADATA_FIRST))
            if not text.startswith(',"', end):
                return None
            text = "{" + text[end + 1 :]
        if not text.startswith('{"'):
            return None
        found = _ENTRIES.decode(text)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    # msgspec keeps the last of several equal keys. Without escapes, each key is a quoted word of the text.
    if "\\" in text or any(text.count(f'"{key}"') != len(found) for key in ENTRY_KEYS) or METADATA in found:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        return None
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}  # tensors share equal objects
    entries = []
    for name, entry in found.items():
        key, (start, stop) = (entry.dtype, entry.shape), entry.data_offsets
        if key not in kinds:
            kinds[key] = *key, DTYPE_BITS.get(entry.dtype, -1) * math.prod(entry.shape)
        dtype, shape, bits = kinds[key]
        if bits != (stop - start) * 8 or dtype not in DTYPE_BITS or len(name) > MAX_NAME:
            return None
        entries.append(TensorInfo(name, dtype, shape, stop - start, file, data_start + start))
    return entries, metadata


def _parse_any(raw: bytes, data_start: int, where: str, file: str) -> tuple[list[TensorInfo], dict[str, str]]:
    """Return the entries and metadata of a header. Raises InputError that names what is wrong."""
    try:
        text = raw.decode("utf-8")
        if not text.startswith("{"):
            raise ValueError("it does not begin with '{'")
        tree = json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise bad_file(where, f"header is not valid JSON ({_short(e)})") from None
    metadata = tree.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise bad_file(where, f"{METADATA} in the header must map strings to strings")
    return [_parse_entry(name, value, data_start, where, file) for name, value in tree.items()], metadata


def _parse_entry(name: str, value: Any, data_start: int, where: str, file: str) -> TensorInfo:
    """Return the tensor of a header entry; raise InputError if its dtype, shape and offsets contradict each other."""
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise bad_file(where, f"tensor name {name[:200]!r} is not valid text") from None
    if len(name) > MAX_NAME:
        raise bad_file(where, f"a tensor name has {len(name)} characters ({name[:80]!r}…)")

    def fail(problem: str) -> InputError:
        return bad_tensor(name, f": {problem}", REMEDY, where)

    if type(value) is not dict or value.keys() != ENTRY_KEYS:
        raise fail("its header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise fail(f"unknown dtype {str(dtype)[:40]!r}")
    if type(shape) is not list or len(shape) > MAX_RANK or not _are_sizes(shape):
        raise fail("shape must be a list of non-negative integers")
    if type(offsets) is not list or len(offsets) != 2 or not _are_sizes(offsets):
        raise fail("data_offsets must be two non-negative integers")
    start, stop = offsets
    total = bits * math.prod(shape)
    if stop < start or total != (stop - start) * 8:
        raise fail(f"{dtype} of shape {str(shape)[:100]} needs {_format_bits(total)}, data_offsets give {stop - start}")
    return TensorInfo(name, dtype, tuple(shape), stop - start, file, data_start + start)


def _are_sizes(values: list[Any]) -> bool:
    """Return whether all values are integers from 0 to 2^63 - 1."""
    for value in values:  # noqa: SIM110  # all() over a generator takes twice the time, and there are many
        if type(value) is not int or not 0 <= value < 1 << 63:
            return False
    return True


def _format_bits(bits: int) -> str:
    whole, rest = divmod(bits, 8)
    return f"{whole} bytes" + (f" and {rest} bits" if rest else "") if bits < 1 << 66 else "2^63 bytes or more"


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:200]!r} appears twice")
    return tree


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_METADATA = json.JSONDecoder(object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)


def _short(e: BaseException) -> str:
    """Return the reason in one line: a header can be megabytes long, its error message must not be."""
    if isinstance(e, UnicodeDecodeError):
        return f"byte {e.start} is not UTF-8"
    if isinstance(e, RecursionError):
        return "nested too deeply"
    return str(e).splitlines()[0][:300] if str(e) else type(e).__name__


INDEX_SUFFIX = ".safetensors.index.json"
SINGLE, INDEX = "model.safetensors", f"model{INDEX_SUFFIX}"
PART = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})\.safetensors")
# Files of Grok-2 and of DeepSeek's scripts. Each contains a slice of every tensor, for one GPU.
SLICE = re.compile(r".*-TP-\d+\.safetensors|model\d+-mp(?!1\.)\d+\.safetensors")


def select(root: Path, files: list[str], named: str | None = None) -> Selection | None:
    """Select the safetensors files that are a checkpoint, in the order in which transformers looks for them.

    That is: the file that the config names (`named`), model.safetensors, the files of an index.

    Raises InputError if one is missing, or several sets remain; UnsupportedError for slices of tensors.
    """
    present = [f for f in files if f.endswith(".safetensors")]
    indexes = [f for f in files if f.endswith(INDEX_SUFFIX)]
    if slices := [f for f in present if SLICE.fullmatch(f)]:
        problem = f"contains slices of tensors, one file for each GPU ({slices[0]}), which is unsupported"
        raise UnsupportedError(f"{root}: {problem}; use a release with whole tensors, or a GGUF")
    if named is None and INDEX not in indexes and SINGLE not in present and len(indexes) > 1:
        remedy = f"copy the one to convert to {INDEX}, which loaders read"
        raise InputError(f"{root}: several indexes ({', '.join(indexes)}); {remedy}")
    decider = named or (INDEX if INDEX in indexes else "".join(indexes))
    if named is None and SINGLE in present and not (decider and _index_names_shard(root / decider, SINGLE)):
        decider = SINGLE
    if decider.endswith(".json"):
        index, _ = read_index(root / decider)
        names = sorted(set(index.values()))
        for name in names:
            if not (root / name).exists():
                remedy = "download the missing file, or the index of the files that are here"
                raise bad_file(root / decider, f"names {name}, which is missing", remedy)
        return _make_selection(names, decider, [f for f in present if f not in names], index)
    if decider:
        return _make_selection([decider], decider, [f for f in (*present, *indexes) if f != decider])
    if not present:
        return None
    # Mistral releases contain the same weights twice, as model-* and as consolidated*.
    main = [f for f in present if not f.startswith("consolidated")] or present
    _require_all_shards(root, main)
    return _make_selection(main, "", [f for f in present if f not in main])


def _make_selection(
    names: list[str], decider: str, ignored: Sequence[str], index: dict[str, str] | None = None
) -> Selection:
    note = ""
    if ignored:
        by = f", following {decider}" if index is not None else ", as in transformers" if decider else ""
        note = f"{shorten_names(names)} is read{by}; {shorten_names(ignored)} is ignored"
    return Selection(names, index, tuple(ignored), decider, note)


def shorten_names(names: Sequence[str]) -> str:
    """Return the first name and how many follow it."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _index_names_shard(index: Path, shard: str) -> bool:
    """Return whether an index can be read and places tensors in this shard."""
    with contextlib.suppress(InputError):
        return shard in read_index(index)[0].values()
    return False


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """Return (tensor name -> shard in the index's directory, total_size or None) of an index. Raises InputError."""
    try:
        data = path.read_bytes()
        refuse_substitute(path, data, "the index")
        tree = msgspec.json.decode(data)
    except OSError as e:
        raise unreadable_file(path, e) from None
    except (ValueError, RecursionError, msgspec.MsgspecError):
        raise bad_file(path, "not valid JSON") from None
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_file(path, "has no weight_map")
    shards = {shard if isinstance(shard, str) else repr(shard): name for name, shard in weight_map.items()}
    for shard, name in shards.items():
        if not isinstance(weight_map[name], str) or not is_inside(shard):
            raise bad_file(path, f"places tensor {name!r} in {shard[:200]!r}, outside this directory")
        if len(shard.encode()) > LONGEST_NAME:
            raise bad_file(path, f"places tensor {name!r} in a file whose name has {len(shard)} characters")
        if not shard.endswith(".safetensors"):
            raise bad_file(path, f"places tensor {name!r} in {shard!r}, not a .safetensors file")
    plain = {shard: "/".join(PurePosixPath(shard).parts) for shard in shards}  # without "./"
    weight_map = {name: plain[shard] for name, shard in weight_map.items()}
    about = tree.get("metadata")
    total = about.get("total_size") if isinstance(about, dict) else None
    return weight_map, total if isinstance(total, int) else None


def is_inside(shard: str) -> bool:
    """Return whether the name of a file stays inside the directory."""
    parts, plain = PurePosixPath(shard).parts, shard.isprintable() and "\\" not in shard
    return plain and bool(parts) and parts[0] != "/" and ".." not in parts


def _require_all_shards(root: Path, names: list[str]) -> None:
    """Raise InputError if one of the files …-00002-of-00005 is missing, or if there are several sets of them."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := PART.fullmatch(name):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    if len(sets) > 1:
        totals = ", ".join(f"{stem}-*-of-{total}" for stem, total in sorted(sets))
        raise InputError(f"{root}: holds the shards of several checkpoints ({totals}); give a directory with one set")
    for (stem, total), numbers in sets.items():
        # Stops at the first gap: the total is what a file's name claims, and may be anything.
        missing = next((n for n in range(1, int(total) + 1) if n not in numbers), None)
        if missing is not None:
            raise bad_file(
                root, f"{stem}-{missing:05d}-of-{total}.safetensors is missing", "download it, or give one of the files"
            )
