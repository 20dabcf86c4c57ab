"""A model as a chain of units: the samples, then one layer with experts after the other, each of which hands the hidden
states of all sequences to the next. What a layer's unit writes, and which consumers it has, is the caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import ResourceError, UnsupportedError
from ktconvert.layouts.files.direct_file import RowFile
from ktconvert.pipeline.engine.units import Context, Unit
from ktconvert.pipeline.stages.copy_tensors import OtherTensor
from ktconvert.pipeline.walk.calibration_data import Calibration
from ktconvert.pipeline.walk.consumers import Consumer
from ktconvert.pipeline.walk.footprint import LAYER
from ktconvert.pipeline.walk.layer import LayerWalk, SamplesWork, read_samples, walk_dense_layer, walk_layer
from ktconvert.pipeline.walk.layered import LayeredModel
from ktconvert.pipeline.walk.portions import unit_of

SAMPLES = "samples"
CPU_FULL = "DefaultCPUAllocator"  # what torch's RuntimeError for a failed allocation on the CPU names


@dataclass(frozen=True)
class Step:
    """One layer with experts in the chain, and the layers without any before it.

    inputs    what they read, as a unit names it; bytes_in: of these
    handed_on  bytes of what it hands to the next layer; 0 for the last one
    """

    layer: int
    before: tuple[int, ...]
    inputs: tuple[tuple[Any, ...], ...]
    bytes_in: int
    handed_on: int

    @property
    def key(self) -> str:
        return f"layer-{self.layer:03d}"


def require_calibratable(model: MoeModel, instead: str) -> None:
    """Raise UnsupportedError, which advises `instead`, for experts that would be calibrated wrongly."""
    if model.activation != "silu" or model.weights_on != "output":
        raise UnsupportedError(
            f"{model.source.root}: its experts compute something else than silu(gate) * up with routing weights on the "
            f"output, which cannot be calibrated yet; {instead}."
        )


def skeleton_of(
    model: MoeModel, rest: Mapping[str, OtherTensor], machine: Mapping[str, Any], *, trusted: bool, instead: str
) -> Callable[[], LayeredModel]:
    """A function that builds the layered model when it is first called. rest: the checkpoint's tensors outside the
    routed experts, by name; trusted: whether the model's Python code may run; instead: advice where it cannot be walked
    through.
    """

    @functools.cache
    def skeleton() -> LayeredModel:
        device = machine["device_type"]
        return LayeredModel(model.source, rest, trust_remote_code=trusted, device=device, instead=instead)

    return skeleton


def boundary_bytes(model: MoeModel, calibration: Calibration) -> int:
    """Bytes of the hidden states of all samples, at most: BF16."""
    return 2 * calibration.samples * calibration.max_length * model.shape(model.layers[0])[1]


def samples_unit(
    stage: str, version: int, params: tuple[tuple[str, Any], ...], handed_on: int, work: SamplesWork
) -> Unit[Any]:
    """The unit that everything else in the chain follows. params: all settings of the chain that can change a byte."""
    calibration = work.calibration
    return Unit(
        stage=stage,
        key=SAMPLES,
        versions=(version,),
        params=params,
        bytes_out=8 * (calibration.samples * calibration.max_length + calibration.samples),
        kept=False,
        handed_on=handed_on,
        work=work,
    )


def steps(model: MoeModel, rest: Mapping[str, OtherTensor], boundary: int) -> Iterator[Step]:
    """The layers with experts, in order. rest: the checkpoint's tensors outside the routed experts, by name."""
    first = 0
    for layer in model.layers:
        before = tuple(range(first, layer))
        first = layer + 1
        others = (tensor for n in (*before, layer) for tensor in tensors_of_layer(model, rest, n))
        tensors = [*model.layer_tensors(layer), *(info for tensor in others for info in tensor.reads)]
        yield Step(
            layer,
            before,
            tuple(map(model.source.identity, tensors)),
            sum(t.nbytes for t in tensors),
            boundary if layer != model.layers[-1] else 0,
        )


def tensors_outside(model: MoeModel, rest: Mapping[str, OtherTensor]) -> tuple[tuple[Any, ...], ...]:
    """What lies outside all decoder layers, as a unit names it: embedding, last norm, head."""
    outside = (tensor for name, tensor in rest.items() if not LAYER.search(name))
    return tuple(model.source.identity(info) for tensor in outside for info in tensor.reads)


def tensors_of_layer(model: MoeModel, rest: Mapping[str, OtherTensor], layer: int) -> list[OtherTensor]:
    expert = model.weight_name(model.layers[0], 0, "gate")
    before, _, _ = f".{expert}".partition(f".{model.layers[0]}.")
    prefix = f"{before}.{layer}.".removeprefix(".")
    return [tensor for name, tensor in rest.items() if name.startswith(prefix)]


def walk(
    unit: Unit[Any],
    context: Context,
    model: MoeModel,
    layer: int,
    before: Sequence[int],
    lm: LayeredModel,
    group: int,
    consumers: Sequence[Consumer],
) -> None:
    """Take all sequences through a layer, which `unit` makes, and those before without experts. group: experts in
    memory at a time.
    """
    link, away = context.link, context.away
    by_workers = None if away is None else lambda portions: away([unit_of(unit, portion) for portion in portions])
    lengths = [len(ids) for ids in read_samples(link.store[SAMPLES])]
    assert link.before is not None
    entering = RowFile(link.before, sum(lengths), lm.hidden, new=False)
    for dense in before:
        with entering:
            path = link.scratch / f"after-{dense:03d}"
            left = walk_dense_layer(LayerWalk(model, lm, dense, lengths, group), entering, path)
        if entering.path != link.before:
            entering.path.unlink()
        entering = left
    with entering:
        one = LayerWalk(model, lm, layer, lengths, group)
        walk_layer(one, consumers, entering, link.scratch, link.handed_on, by_workers)


@contextmanager
def memory_explained(key: str, remedies: str) -> Iterator[None]:
    """Turn torch's ways to say that memory ran out into a ResourceError that names the unit."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and CPU_FULL not in str(error):
            raise
        raise ResourceError(
            f"{key}: not enough memory. {remedies} Then resume, or start again with --overwrite."
        ) from error
