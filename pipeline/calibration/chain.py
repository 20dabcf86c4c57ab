"""A model as a chain of units: the samples, then the layers with experts in order.

Each unit passes the hidden states of all sequences to the next. The caller decides which files a layer's
unit writes and which visitors its experts get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.errors import InputError, ResourceError, UnsupportedError
from ktconvert.layouts.files.direct_file import DirectFile, RowFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.calibration.expert_visitors import ExpertVisitor
from ktconvert.pipeline.calibration.layer_runner import LayerRun, run_dense_layer, run_expert_layer
from ktconvert.pipeline.calibration.layered_model import LayeredModel, tensor_to_bits
from ktconvert.pipeline.calibration.portions import LayerWorkers
from ktconvert.pipeline.calibration.requirements import LAYER, find_model_width, list_remedies
from ktconvert.pipeline.engine.units import Context, Portion, Result, Unit, Written
from ktconvert.pipeline.models.pretrained import is_out_of_memory
from ktconvert.pipeline.models.text_datasets import Ids, read_samples_by_length
from ktconvert.pipeline.options.conversion_options import CalibrateOptions, QuantizationOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

SAMPLES = "samples"
LAST_OUTPUTS = "last"  # file of the last layer's outputs, if they are needed
FEW_TOKENS = 512  # with fewer in all samples, a calibration sees hardly more than noise


@dataclass(frozen=True)
class Chain:
    """The settings that the units of a chain share.

    name                  name of its stage
    version               version of its stage
    non_experts           the checkpoint's non-expert tensors, by name
    experts_at_once       experts in memory at a time
    alternative           advice in messages about a model that cannot be calibrated
    passes_hidden_states  whether layers write hidden states for the next layer
    loaded                result of load_samples, once it was called
    """

    name: str
    version: int
    model: MoeModel
    options: QuantizationOptions | CalibrateOptions
    non_experts: Mapping[str, OutputTensor]
    experts_at_once: int
    alternative: str
    passes_hidden_states: bool = True
    loaded: list[Ids] = field(default_factory=list)

    @property
    def machine(self) -> Mapping[str, Any]:
        """Properties that can change bytes, of the machine where the chain was started."""
        properties = self.options.hardware.machine
        assert properties is not None  # the plan has recorded them
        return properties

    @functools.cached_property
    def layered_model(self) -> LayeredModel:
        return LayeredModel(
            self.model.source,
            self.non_experts,
            trust_remote_code=self.options.hardware.trust_remote_code,
            device=self.machine["device_type"],
            alternative=self.alternative,
            read_function=self.model.functions.get,
        )

    @property
    def hidden_states_bytes(self) -> int:
        """Upper bound of the bytes of all samples' hidden states, in BF16."""
        samples = self.options.samples
        tokens = samples.num_calibration_samples * samples.sequence_length
        return 2 * tokens * find_model_width(self.model) if self.passes_hidden_states else 0

    def load_samples(self, reporter: Reporter) -> list[Ids]:
        """Read the samples of the data set, once. Raises InputError."""
        samples = self.options.samples
        if not self.loaded:
            try:
                self.loaded.extend(read_samples_by_length(samples, self.layered_model.tokenizer(), reporter.announce))
            except InputError as error:  # without a remedy if the data set itself has to be repaired
                raise error.with_remedy(error.remedy and f"{error.remedy}, or {self.alternative}") from error
            if (count := len(self.loaded)) < samples.num_calibration_samples:
                requested, tokens = samples.num_calibration_samples, sum(map(len, self.loaded))
                problem = f"{samples.dataset}: {plural(count, 'sample')}, fewer than the requested {requested}"
                if tokens < FEW_TOKENS:
                    reporter.warn(f"{problem}, and only {plural(tokens, 'token')} in all; calibrate with longer texts")
                else:
                    reporter.announce(problem)
        return self.loaded

    def make_samples_unit(self) -> Unit[Chain]:
        """Return the first unit, which has all settings that can change a byte; all other units depend on it."""
        samples = self.options.samples
        return Unit(
            stage=self.name,
            key=SAMPLES,
            versions=(self.version,),
            params=self.options.weights,
            bytes_out=8 * samples.num_calibration_samples * (samples.sequence_length + 1),
            in_output=False,
            handover_bytes=self.hidden_states_bytes,
            work=self,
        )

    def make_layer_units(self) -> Iterator[Unit[LayerWork]]:
        """Yield an incomplete unit for each layer with experts, in order.

        The caller replaces its versions, params and bytes_out, which are empty.
        """
        source = self.model.source
        first = 0
        for layer in self.model.layers:
            dense_layers = tuple(range(first, layer))
            first = layer + 1
            others = (tensor for n in (*dense_layers, layer) for tensor in _find_layer_tensors(self, n))
            tensors = [*self.model.layer_tensors(layer), *(info for tensor in others for info in tensor.reads)]
            yield Unit(
                stage=self.name,
                key=f"layer-{layer:03d}",
                versions=(),
                bytes_out=0,
                inputs=tuple(map(source.identity, tensors)),
                bytes_in=sum(t.nbytes for t in tensors),
                handover_bytes=self.hidden_states_bytes if layer != self.model.layers[-1] else 0,
                work=LayerWork(self, layer, dense_layers),
            )

    def outer_identities(self) -> tuple[tuple[Any, ...], ...]:
        """Return the identities of the tensors outside all decoder layers: embedding, last norm, head."""
        outer = (tensor for name, tensor in self.non_experts.items() if not LAYER.search(name))
        return tuple(self.model.source.identity(info) for tensor in outer for info in tensor.reads)


@dataclass(frozen=True)
class LayerWork:
    """The work of a unit: one layer with experts, and the dense layers right before it."""

    chain: Chain
    layer: int
    dense_layers: tuple[int, ...]

    @property
    def model(self) -> MoeModel:
        return self.chain.model


def require_calibratable(model: MoeModel, alternative: str) -> None:
    """Raise UnsupportedError, which advises `alternative`, for experts that would be calibrated wrongly.

    Raises InputError for sizes in config.json that the model does not have.
    """
    source = model.source
    if model.stacks and any(row.after for row in model.arch.more):
        problem = f"has several stacks of experts ({', '.join(model.stacks)}), and a calibration run computes the first"
        raise UnsupportedError(f"{source.root}: {problem}; use --experts {model.arch.stack}.")
    experts = model.shape(model.layers[0])[0]
    large = cfg.find_large_sizes(source.config)
    wrong_size = cfg.explain_experts_per_token(source.config, experts) or cfg.explain_large_size(large, source.tensors)
    if wrong_size:
        raise InputError(f"{source.companion_root / 'config.json'}: {wrong_size}")
    if any(function.weights_on != "output" or function.output_norm for function in model.functions.values()):
        problem = f"its experts compute {model.function_names}, which cannot be calibrated yet"
        raise UnsupportedError(f"{model.source.root}: {problem}; {alternative}.")


def _find_layer_tensors(chain: Chain, layer: int) -> list[OutputTensor]:
    """Return the non-expert tensors of a decoder layer."""
    first = chain.model.layers[0]
    layers_name, _, _ = f".{chain.model.weight_name(first, 0, 'down')}".partition(f".{first}.")
    prefix = f"{layers_name}.{layer}.".removeprefix(".")
    return [tensor for name, tensor in chain.non_experts.items() if name.startswith(prefix)]


def run_unit(
    run_layer: Callable[[Unit[Any], Path, Context], Result], unit: Unit[Any], partial: Path, context: Context
) -> Result:
    """Run a unit of a chain: the samples here, others by run_layer. Raises ResourceError if memory runs out."""
    chain: Chain = unit.work if isinstance(unit.work, Chain) else unit.work.chain
    with _prepare_run(unit.key, chain):
        return _write_samples(chain, partial, context) if chain is unit.work else run_layer(unit, partial, context)


def run_portion(
    visit: Callable[[Unit[Any], Portion, Path], Result], unit: Unit[Any], portion: Portion, partial: Path
) -> Result:
    """Run a portion of a layer's unit. Raises ResourceError if memory runs out."""
    with _prepare_run(portion.key, unit.work.chain):
        return visit(unit, portion, partial)


@contextmanager
def _prepare_run(key: str, chain: Chain) -> Iterator[None]:
    """Set torch's threads; turn its various out-of-memory errors into a ResourceError that names the unit."""
    import torch

    torch.set_num_threads(chain.machine["threads"])
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            f"{key}: not enough memory. {list_remedies(chain.options)} Then resume, or start again with --overwrite."
        ) from error


def run_layers(
    unit: Unit[Any], context: Context, visitors: Sequence[ExpertVisitor], *, needs_outputs: bool = False
) -> float:
    """Run all sequences through a unit's dense layers and its layer with experts; return that layer's sensitivity.

    needs_outputs  whether the outputs of the last layer are computed, too; else its sensitivity is 0
    """
    work: LayerWork = unit.work
    layered_model = work.chain.layered_model
    experts_at_once = work.chain.experts_at_once
    paths = context.chain_paths
    workers = None if context.make_portions is None else LayerWorkers(unit, context.make_portions)
    lengths = [len(ids) for ids in read_samples(paths.finished[SAMPLES])]
    assert paths.previous is not None
    layer_inputs = RowFile(paths.previous, sum(lengths), layered_model.hidden, new=False)
    for dense_layer in work.dense_layers:
        with layer_inputs:
            path = paths.scratch / f"after-{dense_layer:03d}"
            run = LayerRun(work.model, layered_model, dense_layer, lengths, experts_at_once)
            layer_outputs = run_dense_layer(run, layer_inputs, path)
        if layer_inputs.path != paths.previous:
            layer_inputs.path.unlink()
        layer_inputs = layer_outputs
    with layer_inputs:
        run = LayerRun(work.model, layered_model, work.layer, lengths, experts_at_once)
        output_path = paths.handover or (paths.scratch / LAST_OUTPUTS if needs_outputs else None)
        return run_expert_layer(run, visitors, layer_inputs, paths.scratch, output_path, workers)


def _write_samples(chain: Chain, partial: Path, context: Context) -> Result:
    """Write the tokens of all samples, and their embeddings for the first layer."""
    paths = context.chain_paths
    layered_model = chain.layered_model
    old_file = paths.finished.get(SAMPLES)
    if old_file is not None and old_file.exists():
        samples = read_samples(old_file)
    else:
        samples = chain.load_samples(context.reporter)
    ids = np.concatenate(samples)
    lengths = np.array([len(sample) for sample in samples], np.int64)
    written = write_arrays(partial, {"input_ids": ids, "lengths": lengths}, {})
    largest_id = int(ids.max())
    vocabulary = layered_model.hf_model.get_input_embeddings().weight.shape[0]
    if largest_id >= vocabulary:
        raise InputError(
            f"{layered_model.source.root}: its tokenizer produces token {largest_id} for "
            f"{chain.options.samples.dataset}, but the model has {vocabulary} tokens; put the model's tokenizer files "
            "beside config.json."
        )
    if paths.handover is not None:
        with RowFile(paths.handover, len(ids), layered_model.hidden, new=True) as hidden_states:
            start = 0
            for hidden in layered_model.embed(iter(samples)):
                hidden_states.write(start, tensor_to_bits(hidden))
                start += len(hidden)
            hidden_states.sync()
    return Result((written,), 2, {"samples": len(samples), "calibration_tokens": len(ids)})


def read_samples(path: Path) -> list[Ids]:
    """Read the samples of a chain, each int64 [T]. Raises InputError for a damaged file."""
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
    """Read the tensors with these names. Raises InputError for a damaged file."""
    try:
        entries = {entry.name: entry for entry in read_header(path).entries}
        if missing := [name for name in names if name not in entries or entries[name].dtype not in DTYPES]:
            raise InputError(f"has no {missing[0]} of {' or '.join(DTYPES)}", path=path)
    except InputError as error:
        raise error.with_remedy("check the disk, then resume") from error

    def read(entry: TensorInfo) -> npt.NDArray[Any]:
        dtype = DTYPES[entry.dtype]
        return np.fromfile(path, dtype, entry.nbytes // dtype.itemsize, offset=entry.start).reshape(entry.shape)

    return [read(entries[name]) for name in names]
