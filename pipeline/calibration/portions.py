"""Portions of a layer for an executor's workers, some experts each: what they need of the walk lies in files, as what
they leave does.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ktconvert.layouts.errors import ResourceError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import RowFile
from ktconvert.pipeline.calibration.consumers import Accumulator, Evidence, Tokens
from ktconvert.pipeline.engine.units import Unit, Written

if TYPE_CHECKING:
    import torch

EXPERTS = 4  # of a portion: few, for many workers; several, for each reads all rows
ROWS, GIVEN = "inputs", "given"  # files in the layer's folder: what its experts read, and what else workers need
Left = Mapping[str, Any]  # what a worker leaves, or finds: tensors, numbers and words, in lists, tuples and mappings


@dataclass
class ExpertInputs:
    """The inputs of the layer's experts: rows in a file, the router's ids and weights [T, k], and evidence."""

    rows: RowFile
    ids: list[torch.Tensor]
    shares: list[torch.Tensor]
    shared: Mapping[Evidence, Accumulator]
    outputs: torch.Tensor | None = None

    def tokens(self, experts: int) -> Tokens:
        """How many were routed to each."""
        counts = (np.bincount(ids.numpy().reshape(-1), minlength=experts)[:experts] for ids in self.ids)
        return sum(counts, np.zeros(experts, np.int64))


class Portion(NamedTuple):
    """Experts first..stop-1 of a layer, as they travel. folder: the layer's; sha256: of GIVEN there."""

    folder: str
    sha256: str
    first: int
    stop: int


class PortionWork(NamedTuple):
    """The work of a portion, of the layer's unit `of`."""

    of: Unit[Any]
    portion: Portion


def unit_of(layer: Unit[Any], portion: Portion) -> Unit[PortionWork]:
    """A portion as a unit: another one where the layer's experts read something else."""
    return Unit(
        stage=layer.stage,
        key=f"{layer.key}.experts-{portion.first:03d}-{portion.stop - 1:03d}",
        versions=layer.versions,
        params=(("of", layer.fingerprint), ("given", portion.sha256)),
        bytes_out=0,
        portion=(layer.key, functools.partial(unit_of, portion=portion)),
        work=PortionWork(layer, portion),
    )


def hand_out(
    inputs: ExpertInputs, lengths: Sequence[int], kinds: Sequence[Evidence], experts: int, most: int
) -> list[Portion]:
    """Write what workers need beside the rows; returns the layer's portions, of at most so many experts each."""
    import torch

    inputs.rows.sync()
    folder, size = inputs.rows.path.parent, min(EXPERTS, most)
    given = {"lengths": [*lengths], "ids": torch.cat(inputs.ids), "shares": torch.cat(inputs.shares)}
    shared = {number: vars(inputs.shared[kind]) for number, kind in enumerate(kinds) if kind.shared}
    digest = write(folder / GIVEN, {**given, "shared": shared, "outputs": inputs.outputs}).sha256
    firsts = range(0, experts, size)
    return [Portion(str(folder), digest, first, min(first + size, experts)) for first in firsts]


@functools.lru_cache(1)
def _given(folder: str, sha256: str, device: Any) -> Left:
    return read(Path(folder) / GIVEN, sha256, device)


@contextmanager
def handed_out(
    portion: Portion, kinds: Sequence[Evidence], width: int, device: Any
) -> Iterator[tuple[list[int], ExpertInputs]]:
    """The lengths of sequences and the inputs of the layer's experts, as a worker finds them."""
    given = _given(portion.folder, portion.sha256, device)
    lengths, shared = given["lengths"], {kinds[n]: accumulator(kinds[n], x) for n, x in given["shared"].items()}
    ids, shares = (list(given[name].cpu().split(lengths)) for name in ("ids", "shares"))
    with RowFile(Path(portion.folder) / ROWS, sum(lengths), width, new=False) as rows:
        yield lengths, ExpertInputs(rows, ids, shares, shared, given["outputs"])


def accumulator(kind: Evidence, fields: Mapping[str, Any]) -> Accumulator:
    """The one that had these fields."""
    empty: Any = kind.empty(0, None)
    whole: Accumulator = replace(empty, **fields)
    return whole


def write(path: Path, what: Left) -> Written:
    """Write a new file, synced."""
    import torch

    torch.save(dict(what), data := io.BytesIO())
    return Written("", data.getbuffer().nbytes, publish.write_file(path, data.getbuffer()))


def read(path: Path, sha256: str, device: Any) -> Left:
    """Raises ResourceError where it is not what was written."""
    import torch

    if publish.sha256(data := path.read_bytes()) != sha256:
        raise ResourceError(f"{path}: is not what was written there (its SHA-256); check the disk, then resume.")
    found: Left = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    return found
