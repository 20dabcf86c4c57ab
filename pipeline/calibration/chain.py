"""A model as a chain of units: the samples, then one layer with experts after the other, each of which hands the hidden
states of all sequences to the next. What a layer's unit writes, and which consumers it has, is the caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.output_tensors import OtherTensor
from ktconvert.layouts.errors import InputError, ResourceError, UnsupportedError
from ktconvert.layouts.files.direct_file import DirectFile, RowFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.calibration import bf16
from ktconvert.pipeline.calibration.consumers import Consumer
from ktconvert.pipeline.calibration.footprint import LAYER
from ktconvert.pipeline.calibration.layer import LayerWalk, walk_dense_layer, walk_layer
from ktconvert.pipeline.calibration.layered import LayeredModel
from ktconvert.pipeline.calibration.portions import Portion, PortionWork, unit_of
from ktconvert.pipeline.engine.units import Context, Result, Unit, Written
from ktconvert.pipeline.models.pretrained import is_out_of_memory
from ktconvert.pipeline.models.text_datasets import Ids, read_samples_by_length
from ktconvert.pipeline.options.quantization import CalibrateOptions, QuantizationOptions

SAMPLES = "samples"


@dataclass(frozen=True)
class Chain:
    """What the units of a chain have in common; name and version: those of its stage.

    rest      the checkpoint's tensors outside the routed experts, by name
    group     experts in memory at a time
    instead   advice where the model cannot be walked through; remedies: where memory runs out
    hands_on  whether layers leave hidden states for the next
    """

    name: str
    version: int
    model: MoeModel
    options: QuantizationOptions | CalibrateOptions
    rest: Mapping[str, OtherTensor]
    group: int
    instead: str
    remedies: str
    hands_on: bool = True

    @property
    def machine(self) -> Mapping[str, Any]:
        """Properties of the machine where the walk was begun, which can change bytes."""
        machine = self.options.machine.machine
        assert machine is not None  # the plan has recorded it
        return machine

    @functools.cached_property
    def skeleton(self) -> LayeredModel:
        trusted, device = self.options.machine.trust_remote_code, self.machine["device_type"]
        return LayeredModel(
            self.model.source, self.rest, trust_remote_code=trusted, device=device, instead=self.instead
        )

    @property
    def boundary(self) -> int:
        """Bytes of the hidden states of all samples, at most: BF16."""
        samples, hidden = self.options.samples, self.model.shape(self.model.layers[0])[1]
        tokens = samples.num_calibration_samples * samples.max_sequence_length
        return 2 * tokens * hidden if self.hands_on else 0

    def first(self) -> Unit[Chain]:
        """The unit of the samples, which everything else follows, with all settings that can change a byte."""
        samples = self.options.samples
        return Unit(
            stage=self.name,
            key=SAMPLES,
            versions=(self.version,),
            params=self.options.weights,
            bytes_out=8 * samples.num_calibration_samples * (samples.max_sequence_length + 1),
            kept=False,
            handed_on=self.boundary,
            work=self,
        )

    def layers(self) -> Iterator[Unit[LayerWork]]:
        """Of each layer with experts, in order, a unit that lacks what it writes: versions, params, bytes."""
        first, source = 0, self.model.source
        for layer in self.model.layers:
            before = tuple(range(first, layer))
            first = layer + 1
            others = (tensor for n in (*before, layer) for tensor in _tensors_of_layer(self, n))
            tensors = [*self.model.layer_tensors(layer), *(info for tensor in others for info in tensor.reads)]
            yield Unit(
                stage=self.name,
                key=f"layer-{layer:03d}",
                versions=(),
                bytes_out=0,
                inputs=tuple(map(source.identity, tensors)),
                bytes_in=sum(t.nbytes for t in tensors),
                handed_on=self.boundary if layer != self.model.layers[-1] else 0,
                work=LayerWork(self, layer, before),
            )

    def outside(self) -> tuple[tuple[Any, ...], ...]:
        """What lies outside all decoder layers, as a unit names it: embedding, last norm, head."""
        outside = (tensor for name, tensor in self.rest.items() if not LAYER.search(name))
        return tuple(self.model.source.identity(info) for tensor in outside for info in tensor.reads)


@dataclass(frozen=True)
class LayerWork:
    """The work of a unit: one layer with experts, and the layers without any before it."""

    chain: Chain
    layer: int
    before: tuple[int, ...]

    @property
    def model(self) -> MoeModel:
        return self.chain.model


def require_calibratable(model: MoeModel, instead: str) -> None:
    """Raise UnsupportedError, which advises `instead`, for experts that would be calibrated wrongly; InputError for
    numbers in config.json that the model does not have.
    """
    source, experts = model.source, model.shape(model.layers[0])[0]
    large = cfg.large_sizes(source.config)
    if why := cfg.wrong_experts_per_token(source.config, experts) or cfg.wrong_size(large, source.tensors):
        raise InputError(f"{source.companion_root / 'config.json'}: {why}")
    if model.activation != "silu" or model.weights_on != "output":
        raise UnsupportedError(
            f"{model.source.root}: its experts compute something else than silu(gate) * up with routing weights on the "
            f"output, which cannot be calibrated yet; {instead}."
        )


def _tensors_of_layer(chain: Chain, layer: int) -> list[OtherTensor]:
    first = chain.model.layers[0]
    before, _, _ = f".{chain.model.weight_name(first, 0, 'gate')}".partition(f".{first}.")
    prefix = f"{before}.{layer}.".removeprefix(".")
    return [tensor for name, tensor in chain.rest.items() if name.startswith(prefix)]


def run(
    run_layer: Callable[[Unit[Any], Path, Context], Result],
    run_portion: Callable[[Unit[Any], Portion, Path], Result],
    unit: Unit[Any],
    partial: Path,
    context: Context,
) -> Result:
    """Any unit of a chain (run_layer: all but its first), or a portion of one. ResourceError where memory runs out."""
    import torch

    portion = unit.work.portion if isinstance(unit.work, PortionWork) else None
    layer = unit if portion is None else unit.work.of
    chain: Chain = layer.work if isinstance(layer.work, Chain) else layer.work.chain
    torch.set_num_threads(chain.machine["threads"])
    with _memory_explained(unit.key, chain.remedies):
        if portion is not None:
            return run_portion(layer, portion, partial)
        return _write_samples(chain, partial, context) if chain is unit.work else run_layer(unit, partial, context)


def walk(unit: Unit[Any], context: Context, consumers: Sequence[Consumer]) -> None:
    """Take all sequences through the layer that `unit` makes (LayerWork), and those before without experts."""
    work: LayerWork = unit.work
    lm, group, link, away = work.chain.skeleton, work.chain.group, context.link, context.away
    by_workers = None if away is None else lambda portions: away([unit_of(unit, portion) for portion in portions])
    lengths = [len(ids) for ids in read_samples(link.store[SAMPLES])]
    assert link.before is not None
    entering = RowFile(link.before, sum(lengths), lm.hidden, new=False)
    for dense in work.before:
        with entering:
            path = link.scratch / f"after-{dense:03d}"
            left = walk_dense_layer(LayerWalk(work.model, lm, dense, lengths, group), entering, path)
        if entering.path != link.before:
            entering.path.unlink()
        entering = left
    with entering:
        one = LayerWalk(work.model, lm, work.layer, lengths, group)
        walk_layer(one, consumers, entering, link.scratch, link.handed_on, by_workers)


@contextmanager
def _memory_explained(key: str, remedies: str) -> Iterator[None]:
    """Turn torch's ways to say that memory ran out into a ResourceError that names the unit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            f"{key}: not enough memory. {remedies} Then resume, or start again with --overwrite."
        ) from error


def _write_samples(chain: Chain, partial: Path, context: Context) -> Result:
    """Write the tokens of all samples, and for the first layer their embeddings."""
    link, lm, options = context.link, chain.skeleton, chain.options.samples
    stored = link.store.get(SAMPLES)
    if stored is not None and stored.exists():
        samples = read_samples(stored)
    else:
        samples = read_samples_by_length(options, lm.tokenizer(), context.reporter.note)
        if len(samples) < (count := options.num_calibration_samples):
            context.reporter.note(f"{options.dataset}: {len(samples)} samples, {count} were asked for")
    ids, lengths = np.concatenate(samples), np.array([len(ids) for ids in samples], np.int64)
    written = write_arrays(partial, {"input_ids": ids, "lengths": lengths}, {})
    if (last := int(ids.max())) >= (known := lm.model.get_input_embeddings().weight.shape[0]):
        raise InputError(
            f"{lm.source.root}: its tokenizer gives token {last} for {options.dataset}, and the model has {known}; put "
            "the right tokenizer files beside config.json."
        )
    if link.handed_on is not None:
        with RowFile(link.handed_on, len(ids), lm.hidden, new=True) as leaving:
            start = 0
            for hidden in lm.embed(iter(samples)):
                leaving.write(start, bf16.to_bits(hidden))
                start += len(hidden)
            leaving.sync()
    return Result((written,), 2, {"samples": len(samples), "calibration_tokens": len(ids)})


def read_samples(path: Path) -> list[Ids]:
    """The samples of a chain, each int64 [T]. Raises InputError for a damaged file."""
    ids, lengths = read_arrays(path, "input_ids", "lengths")
    return np.split(ids, np.cumsum(lengths)[:-1])


DTYPES: Mapping[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4")}


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> Written:
    """Write a new safetensors file, synced."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    plan = plan_shard([TensorInfo(key, names[x.dtype], x.shape, x.nbytes) for key, x in arrays.items()], metadata)
    with DirectFile(path, plan.size) as file:
        file.append(plan.header)
        append_arrays(file, arrays.values())
        return Written("", plan.size, file.close())


def append_arrays(file: DirectFile, arrays: Iterable[npt.NDArray[Any]]) -> None:
    for array in arrays:
        file.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_arrays(path: Path, *names: str) -> list[npt.NDArray[Any]]:
    """The tensors of these names. Raises InputError for a damaged file."""
    try:
        entries = {entry.name: entry for entry in read_header(path).entries}
        if missing := [name for name in names if name not in entries or entries[name].dtype not in DTYPES]:
            raise InputError(f"holds no {missing[0]} of {' or '.join(DTYPES)}", path=path)
    except InputError as error:
        raise error.advising("check the disk, then resume") from error

    def read(entry: TensorInfo) -> npt.NDArray[Any]:
        dtype = DTYPES[entry.dtype]
        return np.fromfile(path, dtype, entry.nbytes // dtype.itemsize, offset=entry.start).reshape(entry.shape)

    return [read(entries[name]) for name in names]
