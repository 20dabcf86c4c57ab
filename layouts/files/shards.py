"""Layout of safetensors shards: every name, offset and size is known before the first byte is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ktconvert.layouts.tensors import TensorInfo

ALIGNMENT = 4096  # the header is padded to it, so that whole-page weights can be written past the page cache


@dataclass(frozen=True)
class ShardPlan:
    """A shard with all offsets: header (padded to ALIGNMENT), then the entries in order, without gaps."""

    header: bytes
    entries: tuple[TensorInfo, ...]

    @property
    def data_bytes(self) -> int:
        return sum(e.nbytes for e in self.entries)

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
    """Return model.safetensors.index.json for (shard name, tensor keys, bytes of data), with total_size, sorted."""
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
    """Split sizes (bytes) into [start, stop) groups of at most `limit` bytes; None: one group.

    A single item may exceed the limit.
    """
    sizes = list(sizes)
    if not sizes:
        return []
    starts, total = [0], 0
    for at, size in enumerate(sizes):
        if limit is not None and total and total + size > limit:
            starts.append(at)
            total = 0
        total += size
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))
