"""Portions of a layer's experts for the workers of an executor.

A worker reads the data of the layer from files, and writes its result to a file.
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
from ktconvert.pipeline.calibration.expert_visitors import Accumulator, StatisticsSpec, TokenCounts
from ktconvert.pipeline.engine.units import MakePortions, Portion, Unit, Written

if TYPE_CHECKING:
    import torch

EXPERTS = 4  # experts of a portion: few, so that many workers get one; several, because each portion reads all rows
# Files in the layer's folder: the experts' inputs, and everything else that workers need.
ROWS_FILE, SETTINGS_FILE = "inputs", "settings"
TensorTree = Mapping[str, Any]  # tensors, numbers and strings, nested in lists, tuples and mappings


@dataclass
class ExpertInputs:
    """The inputs of a layer's experts.

    rows             hidden states of all tokens, in a file
    expert_ids       the router's choices for each sequence, [T, k]
    routing_weights  the router's weights for each sequence, [T, k]
    shared           accumulators that all experts share
    output_fisher    as in ExpertGroup
    """

    rows: RowFile
    expert_ids: list[torch.Tensor]
    routing_weights: list[torch.Tensor]
    shared: Mapping[StatisticsSpec, Accumulator]
    output_fisher: torch.Tensor | None = None

    def count_tokens(self, experts: int) -> TokenCounts:
        """Return the number of tokens routed to each expert."""
        counts = (np.bincount(ids.numpy().reshape(-1), minlength=experts)[:experts] for ids in self.expert_ids)
        return sum(counts, np.zeros(experts, np.int64))


class LayerWorkers(NamedTuple):
    """Workers that make portions of a layer's unit, some experts each."""

    unit: Unit[Any]
    make_portions: MakePortions


def write_portions(
    unit: Unit[Any],
    inputs: ExpertInputs,
    lengths: Sequence[int],
    specs: Sequence[StatisticsSpec],
    experts: int,
    max_experts: int,
) -> list[Portion]:
    """Write the files that workers read; return the layer's portions, each of at most max_experts experts."""
    import torch

    inputs.rows.sync()
    folder = inputs.rows.path.parent
    size = min(EXPERTS, max_experts)
    settings = {
        "lengths": [*lengths],
        "ids": torch.cat(inputs.expert_ids),
        "shares": torch.cat(inputs.routing_weights),
        "shared": {number: vars(inputs.shared[spec]) for number, spec in enumerate(specs) if spec.shared_gate_up},
        "outputs": inputs.output_fisher,
    }
    digest = save_tensors(folder / SETTINGS_FILE, settings).sha256
    portions = []
    for first in range(0, experts, size):
        stop = min(first + size, experts)
        key = f"{unit.key}.experts-{first:03d}-{stop - 1:03d}"
        portions.append(Portion(unit.stage, key, unit.key, unit.fingerprint, str(folder), digest, first, stop))
    return portions


@functools.lru_cache(1)
def _load_settings(folder: str, sha256: str, device: Any) -> TensorTree:
    return load_tensors(Path(folder) / SETTINGS_FILE, sha256, device)


@contextmanager
def open_expert_inputs(
    portion: Portion, specs: Sequence[StatisticsSpec], width: int, device: Any
) -> Iterator[tuple[list[int], ExpertInputs]]:
    """Open the files of `write_portions` in a worker; yield the lengths of the sequences and the experts' inputs."""
    settings = _load_settings(portion.folder, portion.sha256, device)
    lengths = settings["lengths"]
    shared = {specs[n]: restore_accumulator(specs[n], fields) for n, fields in settings["shared"].items()}
    ids, weights = (list(settings[name].cpu().split(lengths)) for name in ("ids", "shares"))
    with RowFile(Path(portion.folder) / ROWS_FILE, sum(lengths), width, new=False) as rows:
        yield lengths, ExpertInputs(rows, ids, weights, shared, settings["outputs"])


def restore_accumulator(spec: StatisticsSpec, fields: Mapping[str, Any]) -> Accumulator:
    """Return an accumulator with these fields."""
    empty: Any = spec.new_accumulator(0, None)
    accumulator: Accumulator = replace(empty, **fields)
    return accumulator


def save_tensors(path: Path, tensors: TensorTree) -> Written:
    """Write a new file, synced."""
    import torch

    torch.save(dict(tensors), data := io.BytesIO())
    return Written("", data.getbuffer().nbytes, publish.write_file(path, data.getbuffer()))


def load_tensors(path: Path, sha256: str, device: Any) -> TensorTree:
    """Read a file of `save_tensors`. Raises ResourceError if its hash differs."""
    import torch

    if publish.sha256(data := path.read_bytes()) != sha256:
        raise ResourceError(f"{path}: its SHA-256 differs from that of the written file; check the disk, then resume.")
    tensors: TensorTree = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    return tensors
