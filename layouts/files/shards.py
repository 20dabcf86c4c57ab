"""Layout of safetensors shards: every name, offset and size is known before the first byte is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ktconvert.layouts.tensors import TensorInfo

# The size of the padded header is a multiple of ALIGNMENT, so that whole pages of weights can be written directly.
ALIGNMENT = 4096


@dataclass(frozen=True)
class ShardPlan:
    """A shard with all offsets: the header (padded to ALIGNMENT), then the entries in order, without gaps."""

    header: bytes
    entries: tuple[TensorInfo, ...]

    @property
    def data_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes


def plan_shard(entries: Iterable[TensorInfo], metadata: Mapping[str, str]) -> ShardPlan:
    """Place entries one after the other and encode the header (format: safetensors README)."""
    entries = tuple(entries)
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.nbytes]
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return ShardPlan(len(text).to_bytes(8, "little") + text, entries)


def shard_name(number: int, total: int) -> str:
    """Return the usual file name of shard `number` (from 1) of `total`."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def index_json(shards: Iterable[tuple[str, Iterable[str], int]]) -> bytes:
    """Return model.safetensors.index.json, with total_size and sorted names.

    shards  (name, keys of its tensors, bytes of its data) of each shard
    """
    weight_map: dict[str, str] = {}
    total = 0
    for name, keys, nbytes in shards:
        total += nbytes
        weight_map.update(dict.fromkeys(keys, name))
    # The text of json.dumps(..., indent=2), which is slow because it does not use C.
    names = json.dumps(dict(sorted(weight_map.items())), separators=(",\n    ", ": "))[1:-1]
    weights = "{\n    " + names + "\n  }" if names else "{}"
    return f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {weights}\n}}\n'.encode()


def group_by_limit(sizes: Iterable[int], limit: int | None) -> list[tuple[int, int]]:
    """Split items into groups [start, stop) of at most `limit` bytes; a single item may exceed the limit.

    sizes  bytes of each item
    limit  maximum bytes of a group; None: all items form one group
    """
    sizes = list(sizes)
    if not sizes:
        return []
    starts = [0]
    total = 0
    for index, size in enumerate(sizes):
        if limit is not None and total and total + size > limit:
            starts.append(index)
            total = 0
        total += size
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))
