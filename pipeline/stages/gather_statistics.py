"""Statistics of what experts read: a file per layer of a chain, and the three units that end it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.statistics import folder
from ktconvert.layouts.statistics.imatrix import LayerSums, write_imatrix
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.units import Context, Link, Result, Unit, Written
from ktconvert.pipeline.stages.chain import SAMPLES
from ktconvert.pipeline.walk.consumers import Consumer, Importance, TokenCounts
from ktconvert.pipeline.walk.samples import read_samples

VERSION = 1
KEYS = tuple(Path(name).stem for name in (folder.IMATRIX, folder.COUNTS, folder.DOCUMENT))  # of the closing units
DTYPES: Mapping[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4")}


# --- one layer ------------------------------------------------------------------------------------


@dataclass
class Gathering:
    """The two consumers that gather the statistics of one layer."""

    layer: int
    counts: TokenCounts = field(default_factory=TokenCounts)
    importance: Importance = field(default_factory=Importance)

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """For the walk through the layer."""
        return self.counts, self.importance

    def write(self, path: Path) -> tuple[Written, int]:
        """Write a new file of the layer, synced; returns it and its number of tensors.

        Raises VerificationError, naming the layer and an expert, for sums that are not finite in float32.
        """
        with np.errstate(over="ignore"):
            inputs, middle = (x.astype("<f4") for x in (self.importance.inputs, self.importance.middle))
        for values in (inputs, middle):
            wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if wrong.size:
                raise VerificationError(
                    f"layer {self.layer}, expert {wrong[0]}: the squares of its inputs do not have a finite sum; the "
                    "model gives NaN or infinity on this data set. Try another --dataset."
                )
        tensors = {"counts": self.counts.tokens[self.layer].astype("<i8"), "inputs": inputs, "middle": middle}
        return _write_tensors(path, tensors, {}), len(tensors)


def layer_bytes(model: MoeModel, layer: int) -> int:
    """Bytes of a layer's file, but for its header."""
    experts, hidden, width = model.shape(layer)
    return experts * (8 + 4 * (hidden + width))


def read_layer(path: Path) -> LayerSums:
    """What Gathering wrote. Raises InputError for a damaged file."""
    stored = {}
    for entry in read_header(path).entries:
        dtype = DTYPES[entry.dtype]
        values = np.fromfile(path, dtype, entry.nbytes // dtype.itemsize, offset=entry.start)
        stored[entry.name] = values.reshape(entry.shape)
    return LayerSums(stored["counts"], stored["inputs"], stored["middle"])


def _write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Written:
    """A safetensors file of I64 and F32 tensors."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    plan = plan_shard([TensorInfo(key, names[x.dtype], x.shape, x.nbytes) for key, x in tensors.items()], metadata)
    with DirectFile(path, plan.size) as file:
        file.append(plan.header)
        for values in tensors.values():
            file.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return Written("", plan.size, file.close())


# --- the end of the chain -------------------------------------------------------------------------


@dataclass(frozen=True)
class Closing:
    """The work of a unit that ends a chain.

    about   what is known of model, data and settings before anything is computed (folder.Document)
    layers  the files of all layers, from a unit's link: (link) -> unit key -> path
    make    (work, partial path, link) -> file, number of tensors
    """

    model: MoeModel
    about: Mapping[str, Any]
    layers: Callable[[Link], Mapping[str, Path]]
    make: Callable[[Closing, Path, Link], tuple[Written, int]]

    def sums(self, link: Link, layer: int) -> LayerSums:
        """A layer's statistics."""
        return read_layer(self.layers(link)[f"layer-{layer:03d}"])


def closing_units(
    stage: str,
    last: Unit[Any],
    model: MoeModel,
    about: Mapping[str, Any],
    layers: Callable[[Link], Mapping[str, Path]],
    *,
    kept: bool,
) -> list[Unit[Any]]:
    """The units after the last layer, one for each file. kept: whether they are the output itself."""
    shapes = [model.shape(layer) for layer in model.layers]
    imatrix = sum(4 * experts * (2 * hidden + width + 3) for experts, hidden, width in shapes)
    counts = 8 * int(about["model"]["decoder_layers"]) * max(experts for experts, _, _ in shapes)
    files = (
        (folder.IMATRIX, imatrix, _imatrix),
        (folder.COUNTS, counts, _counts),
        (folder.DOCUMENT, 4096, _document),
    )
    units: list[Unit[Any]] = []
    for key, (name, nbytes, make) in zip(KEYS, files, strict=True):
        units.append(
            Unit(
                stage=stage,
                key=key,
                versions=(VERSION, folder.FORMAT),
                params=(("after", (units or [last])[-1].fingerprint), ("about", json.dumps(about, sort_keys=True))),
                inputs=(),
                final=name,
                bytes_in=0,
                bytes_out=nbytes,
                kept=kept,
                work=Closing(model, about, layers, make),
            )
        )
    return units


def run_closing(work: Closing, partial: Path, context: Context) -> Result:
    """Write the file of a closing unit."""
    link: Link = context.chain  # type: ignore[assignment]
    written, tensors = work.make(work, partial, link)
    return Result((written,), tensors)


def _imatrix(work: Closing, partial: Path, link: Link) -> tuple[Written, int]:
    data = work.about["data"]
    nbytes, digest = write_imatrix(
        partial,
        {layer: work.model.shape(layer) for layer in work.model.layers},
        lambda layer: work.sums(link, layer),
        datasets=[data["dataset"]],
        chunks=len(read_samples(link.store[SAMPLES])),
        chunk_size=data["max_length"],
    )
    return Written("", nbytes, digest), 6 * len(work.model.layers)


def _counts(work: Closing, partial: Path, link: Link) -> tuple[Written, int]:
    model = work.about["model"]
    experts = max(work.model.shape(layer)[0] for layer in work.model.layers)
    counts = np.zeros((model["decoder_layers"], experts), "<i8")
    for layer in work.model.layers:
        own = work.sums(link, layer).counts
        counts[layer, : len(own)] = own
    metadata = {key: str(model[key]) for key in ("architecture", "name", "source")}
    return _write_tensors(partial, {folder.KEY: counts}, {"format": "pt", **metadata}), 1


def _document(work: Closing, partial: Path, link: Link) -> tuple[Written, int]:
    lengths = [len(ids) for ids in read_samples(link.store[SAMPLES])]
    files = []
    for name in (folder.IMATRIX, folder.COUNTS):
        path = link.store[Path(name).stem]
        files.append({"name": name, "size": path.stat().st_size, "sha256": publish.sha256_file(path)})
    data = {**work.about["data"], "samples": len(lengths), "tokens": sum(lengths)}
    text = folder.encode({**work.about, "data": data}, files, tool_version())
    return Written("", len(text), publish.write_file(partial, text)), 0
