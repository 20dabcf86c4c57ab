"""Safetensors files, read, written and edited by their specification, without the library and without our own parser.

A file is 8 bytes with the length of its header, the header (JSON: dtype, shape and bytes of each tensor), and the data.
The library and our own parser also read every file that is read or written here: they must agree.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rig.files import move_time, rewrite

Bits = npt.NDArray[Any]
Header = dict[str, Any]
METADATA = "__metadata__"
# Unsigned bits stand for dtypes that NumPy lacks.
NUMPY: dict[str, Any] = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_}
NUMPY |= {"F32": np.float32, "F64": np.float64, "U8": np.uint8, "U16": np.uint16, "BF16": np.uint16, "F16": np.uint16}
NUMPY |= {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8}


class Tensor(NamedTuple):
    """A stored tensor, equal to any other with the same dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def bits(self) -> Bits:
        """Return its elements; read-only."""
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)


Tensors = dict[str, Tensor]


def encode(header: Header | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return the bytes of a file. length: false value for its first 8 bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def require_same_reading(path: Path) -> None:
    """Assert that the safetensors package reads the same tensors as our parser; skip damage that ours refuses."""
    from ktconvert.layouts.errors import KTConvertError
    from ktconvert.layouts.sources.containers.safetensors import read_header
    from ktconvert.pipeline.verify.file_checks import read_header_with_package

    try:
        ours = {entry.name: (entry.dtype, entry.shape) for entry in read_header(path).entries}
    except KTConvertError:
        return
    assert read_header_with_package(path) == ours, path


def data_start(path: Path) -> int:
    """Return the offset of the data."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def header_of(path: Path) -> Header:
    """Return the header, including its metadata."""
    with path.open("rb") as file:
        header: Header = json.loads(file.read(data_start(path))[8:])
    return header


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a header."""
    metadata: dict[str, str] = header_of(path).get(METADATA, {})
    return metadata


def read_file(path: Path) -> Tensors:
    """Return all tensors of a file, in the order of its header."""
    require_same_reading(path)
    data, start = path.read_bytes(), data_start(path)
    return {
        name: Tensor(e["dtype"], tuple(e["shape"]), data[slice(*(start + at for at in e["data_offsets"]))])
        for name, e in header_of(path).items()
        if name != METADATA
    }


def read_folder(folder: Path) -> Tensors:
    """Return all tensors of a folder's files, and assert that none occurs twice."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        more = read_file(path)
        assert not tensors.keys() & more.keys(), path
        tensors |= more
    return tensors


def bits_of(tensors: Tensors) -> dict[str, Bits]:
    """Return the elements of each tensor."""
    return {name: tensor.bits for name, tensor in tensors.items()}


def find_differences(ours: Tensors, theirs: Tensors) -> list[str]:
    """Return the names of tensors that are missing, extra or different."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def write_file(
    path: Path, tensors: Mapping[str, Tensor | tuple[str, Bits]], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write tensors, or (dtype, array of bits), one after the other; the header is padded to a multiple of 8 bytes."""
    table: Header = {} if metadata is None else {METADATA: dict(metadata)}
    parts, offset = [], 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            tensor = Tensor(tensor[0], tensor[1].shape, np.ascontiguousarray(tensor[1]).tobytes())
        begin, offset = offset, offset + len(tensor.data)
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, offset]}
        parts.append(tensor.data)
    text = json.dumps(table).encode()
    path.write_bytes(encode(text.ljust(math.ceil(len(text) / 8) * 8), b"".join(parts)))
    require_same_reading(path)
    return path


def write_shards(root: Path, shards: Sequence[Mapping[str, Any]], metadata: dict[str, str] | None = None) -> None:
    """Write shards of a checkpoint, and their index."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(root / name, tensors, metadata)
        weight_map |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_file(path: Path, change: Callable[[Tensors], object]) -> None:
    """Change a file's tensors, keep its metadata, and advance its mtime."""
    before, metadata, tensors = path.stat(), header_of(path).get(METADATA), read_file(path)
    change(tensors)
    path.chmod(0o644)
    write_file(path, tensors, metadata)
    move_time(path, before)


def edit_header(path: Path, change: Callable[[Header], object]) -> None:
    """Change a header in place and advance the mtime; the header may not become longer than its padded length."""
    header, start, data = header_of(path), data_start(path), path.read_bytes()
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert 8 + len(text) <= start
    rewrite(path, encode(text.ljust(start - 8), data[start:]))
