"""Portions of a layer for an executor's workers, some experts each: what they need of the walk lies in files, as what
they leave does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.files.direct_file import RowFile
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.pipeline.engine.units import Unit
from ktconvert.pipeline.walk.arrays import Arrays, of_tensor, read_arrays, tensor_of, write_arrays
from ktconvert.pipeline.walk.consumers import Accumulator, Evidence, ExpertWeights, Tokens

if TYPE_CHECKING:
    import torch

EXPERTS = 4  # of a portion: few, for many workers; several, for each reads all rows
ROWS, GIVEN = "inputs", "given"  # files in the layer's folder: what its experts read, and what else workers need
Accumulators = tuple[dict[int, Accumulator], dict[int, Accumulator]]  # by expert: of gate and up, and of down


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


@dataclass(frozen=True)
class Portion:
    """Some experts of a layer, as they travel. folder: the layer's; sha256: of GIVEN there."""

    folder: str
    sha256: str
    first: int
    stop: int


@dataclass(frozen=True)
class PortionWork:
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
        portion=True,
        work=PortionWork(layer, portion),
    )


def hand_out(
    inputs: ExpertInputs, lengths: Sequence[int], kinds: Sequence[Evidence], experts: int, most: int
) -> list[Portion]:
    """Write what workers need beside the rows; returns the layer's portions, of at most so many experts each."""
    import torch

    arrays = {"lengths": np.array(lengths, np.int64)}
    arrays |= {"ids": of_tensor(torch.cat(inputs.ids)), "shares": of_tensor(torch.cat(inputs.shares))}
    for number, kind in enumerate(kinds):
        arrays |= stored(f"{number}", inputs.shared[kind]) if kind.shared else {}
    if inputs.outputs is not None:
        arrays["outputs"] = of_tensor(inputs.outputs)
    inputs.rows.sync()
    folder, size = inputs.rows.path.parent, min(EXPERTS, most)
    digest = write_arrays(folder / GIVEN, arrays).sha256
    firsts = range(0, experts, size)
    return [Portion(str(folder), digest, first, min(first + size, experts)) for first in firsts]


@functools.lru_cache(1)
def _given(folder: str, sha256: str) -> Arrays:
    return read_arrays(Path(folder) / GIVEN)


@contextmanager
def handed_out(
    portion: Portion, kinds: Sequence[Evidence], width: int, device: Any
) -> Iterator[tuple[list[int], ExpertInputs]]:
    """The lengths of sequences and the inputs of the layer's experts, as a worker finds them."""
    import torch

    given = _given(portion.folder, portion.sha256)
    lengths = given["lengths"].tolist()
    ids, shares = (list(torch.split(tensor_of(given[name]), lengths)) for name in ("ids", "shares"))
    shared = {kind: restored(kind, given, f"{n}", device) for n, kind in enumerate(kinds) if kind.shared}
    outputs = tensor_of(given["outputs"], device) if "outputs" in given else None
    with RowFile(Path(portion.folder) / ROWS, sum(lengths), width, new=False) as rows:
        yield lengths, ExpertInputs(rows, ids, shares, shared, outputs)


# --- what workers leave ---------------------------------------------------------------------------


def stored(name: str, accumulator: Any) -> dict[str, npt.NDArray[Any]]:
    """The fields of an accumulator, a dataclass of tensors and integers."""
    values = {f"{name}.{key}": value for key, value in vars(accumulator).items()}
    return {key: np.array(x, np.int64) if isinstance(x, int) else of_tensor(x) for key, x in values.items()}


def restored(kind: Evidence, arrays: Arrays, name: str, device: Any) -> Accumulator:
    """The accumulator that `stored` has put there."""
    empty: Any = kind.empty(0, device)
    found = {key: arrays[f"{name}.{key}"] for key in vars(empty)}
    values = {key: tensor_of(x, device) if x.shape else int(x) for key, x in found.items()}
    whole: Accumulator = replace(empty, **values)
    return whole


def evidence_left(kinds: Mapping[int, Evidence], gathered: Mapping[Evidence, Accumulators]) -> Arrays:
    """What was gathered of these kinds, by their numbers, but for what all experts share."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, kind in kinds.items():
        for side in range(kind.shared, 2):
            for expert, accumulator in gathered[kind][side].items():
                arrays |= stored(f"{number}.{side}.{expert}", accumulator)
    return arrays


def evidence_of(
    kinds: Mapping[int, Evidence], arrays: Arrays, experts: Sequence[int], inputs: ExpertInputs, device: Any
) -> dict[Evidence, Accumulators]:
    """The inverse of evidence_left."""
    gathered: dict[Evidence, Accumulators] = {}
    for number, kind in kinds.items():
        gate_up, down = (
            {
                e: inputs.shared[kind] if side < kind.shared else restored(kind, arrays, f"{number}.{side}.{e}", device)
                for e in experts
            }
            for side in range(2)
        )
        gathered[kind] = gate_up, down
    return gathered


def weights_left(weights: Mapping[int, ExpertWeights]) -> Arrays:
    return {f"{e}.{name}": of_tensor(getattr(own, name)) for e, own in weights.items() for name in PROJECTIONS}


def weights_of(arrays: Arrays, experts: Sequence[int], device: Any) -> dict[int, ExpertWeights]:
    """The inverse of weights_left."""
    return {e: ExpertWeights(**{p: tensor_of(arrays[f"{e}.{p}"], device) for p in PROJECTIONS}) for e in experts}
