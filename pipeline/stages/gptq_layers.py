"""The chain of GPTQ: samples, then layer after layer; each leaves the next one what its sequences have become."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts import PROJECTIONS, publish
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.safetensors import read_header
from ktconvert.layouts.checkpoints.source import TensorInfo
from ktconvert.layouts.compressed import Compressed, linear_name, plan_experts
from ktconvert.layouts.errors import InputError, ResourceError, VerificationError
from ktconvert.layouts.rows import RowFile
from ktconvert.layouts.shards import Entry, plan_shard
from ktconvert.pipeline import gptq_layer, oneshot
from ktconvert.pipeline.calibration import Calibration
from ktconvert.pipeline.gpu_needs import REMEDIES
from ktconvert.pipeline.graph import Result, Stage, Unit, Written
from ktconvert.pipeline.run import Context, Link
from ktconvert.pipeline.stages import gpu_linears
from ktconvert.pipeline.stages.carry_over import Carried
from ktconvert.pipeline.stages.expert_stream import error_figures, sampled_error, taken
from ktconvert.quantizers import gptq, groups

if TYPE_CHECKING:
    from ktconvert.pipeline.layered import LayeredModel

NAME = "gptq"
VERSION = 1
SAMPLES = "samples"
CPU_FULL = "DefaultCPUAllocator"  # what torch's RuntimeError for a failed allocation on the CPU names
Linear = tuple[int, str, gptq_layer.Packed, gptq_layer.Scales]


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    engine    "stream", or "oneshot": llmcompressor's own, for comparison
    machine   what of the machine decides about bytes, as where the conversion was begun: "threads" and "device" among it
    group     experts in memory at a time
    Others as in gptq_layer.Work.
    """

    calibration: Calibration
    dampening: float
    rounding: str
    routed: bool
    floor: int
    group: int
    engine: str
    trust_remote_code: bool
    machine: Mapping[str, Any]

    def params(self) -> tuple[tuple[str, Any], ...]:
        """All that can change a byte."""
        return (
            ("calibration", tuple(sorted(vars(self.calibration).items()))),
            ("dampening", self.dampening),
            ("rounding", self.rounding),
            ("engine", self.engine),
            ("calibrate", ("routed", self.floor) if self.routed else "all"),
            ("machine", json.dumps(dict(self.machine), sort_keys=True)),
        )


@dataclass(frozen=True)
class Job:
    """One layer with experts, and the layers without any that lie before it."""

    model: MoeModel
    form: Compressed
    settings: Settings
    layer: int
    before: tuple[int, ...]
    metadata: Mapping[str, str]
    skeleton: Callable[[], LayeredModel]
    oneshot: Callable[[Path], oneshot.Made]


def stage(
    model: MoeModel,
    form: Compressed,
    settings: Settings,
    rest: Mapping[str, Carried],
    metadata: Mapping[str, str],
) -> Stage:
    """The chain. rest: what the checkpoint holds beside its routed experts, by name."""

    @functools.cache
    def skeleton() -> LayeredModel:
        from ktconvert.pipeline.layered import LayeredModel

        code, device = settings.trust_remote_code, settings.machine["device_type"]
        return LayeredModel(model.source, rest, trust_remote_code=code, device=device)

    @functools.cache
    def library(samples: Path) -> oneshot.Made:
        return oneshot.quantize_model(
            model.source.root,
            read_samples(samples),
            form,
            dampening=settings.dampening,
            every_expert=not settings.routed,
            trust_remote_code=settings.trust_remote_code,
        )

    hidden = model.shape(model.layers[0])[1]
    most = settings.calibration.samples * settings.calibration.max_length
    boundary = 2 * most * hidden if settings.engine == "stream" else 0
    ids_bytes = 8 * (most + settings.calibration.samples)
    units = [
        Unit(
            stage=NAME,
            key=SAMPLES,
            versions=(VERSION,),
            params=settings.params(),
            inputs=(),
            final="",
            bytes_in=0,
            bytes_out=ids_bytes,
            kept=False,
            leaves=boundary,
            work=(settings, skeleton),
        )
    ]
    shards = [(shard.header_sha256, shard.size, shard.blob) for shard in model.source.shards]
    passed = 0
    for layer in model.layers:
        experts, hidden, width = model.shape(layer)
        before = tuple(range(passed, layer))
        passed = layer + 1
        about = {**metadata, "layer": str(layer), "num_experts": str(experts), "hidden_size": str(hidden)}
        about["moe_intermediate_size"] = str(width)
        beside = [c for n in (*before, layer) for c in beside_experts(model, rest, n)]
        tensors: list[TensorInfo] = [*model.layer_tensors(layer), *(i for c in beside for i in c.reads)]
        units.append(
            Unit(
                stage=NAME,
                key=f"layer-{layer:03d}",
                versions=(VERSION, gptq.VERSION, form.quantizer.version, form.version),
                params=(
                    ("after", units[-1].fingerprint),
                    ("form", form.name),
                    ("reading", model.reading(layer)),
                    ("metadata", tuple(sorted(about.items()))),
                ),
                inputs=tuple((t.name, t.dtype, t.shape, shards[t.shard]) for t in tensors),
                final="",
                bytes_in=sum(t.nbytes for t in tensors),
                bytes_out=experts * form.expert_bytes(hidden, width),
                leaves=boundary if layer != model.layers[-1] else 0,
                work=Job(model, form, settings, layer, before, about, skeleton, library),
            )
        )
    return Stage(NAME, f"calibrate, and quantize experts to {form.name}", ("source",), tuple(units), make, chain=True)


def beside_experts(model: MoeModel, rest: Mapping[str, Carried], layer: int) -> list[Carried]:
    """The tensors of a decoder layer that are no routed experts, by their names."""
    expert = model.weight(model.layers[0], 0, "gate").name
    before, _, _ = f".{expert}".partition(f".{model.layers[0]}.")
    prefix = f"{before}.{layer}.".removeprefix(".")
    return [carried for name, carried in rest.items() if name.startswith(prefix)]


def make(unit: Unit, partial: Path, context: Context) -> Result:
    """Any unit of the chain."""
    import torch

    settings: Settings = unit.work[0] if unit.key == SAMPLES else unit.work.settings
    torch.set_num_threads(int(settings.machine["threads"]))
    try:
        if unit.key == SAMPLES:
            return write_samples(unit, partial, context, settings.calibration, unit.work[1]())
        return (write_layer if settings.engine == "stream" else write_whole)(unit, partial, context, unit.work)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and CPU_FULL not in str(error):
            raise
        raise ResourceError(
            f"{unit.key}: not enough memory. {REMEDIES} Then resume, or start again with --overwrite."
        ) from error


# --- samples --------------------------------------------------------------------------------------


def write_samples(unit: Unit, partial: Path, context: Context, calibration: Calibration, lm: LayeredModel) -> Result:
    """The tokens of all samples, and for the first layer what they are embedded to."""
    from ktconvert.pipeline.calibration import token_ids

    link: Link = context.chain  # type: ignore[assignment]
    known = link.store[unit.key]
    if known.exists():
        found = read_samples(known)
    else:
        found = token_ids(calibration, lm.tokenizer(), context.reporter.note)
        if len(found) < calibration.samples:
            context.reporter.note(f"{calibration.dataset}: {len(found)} samples, {calibration.samples} were asked for")
    lengths = np.array([len(ids) for ids in found], np.int64)
    ids = np.concatenate(found)
    plan = plan_shard(
        [Entry("input_ids", "I64", ids.shape, ids.nbytes), Entry("lengths", "I64", lengths.shape, lengths.nbytes)], {}
    )
    with publish.DirectFile(partial, plan.size) as file:
        for data in (plan.header, ids.view(np.uint8), lengths.view(np.uint8)):
            file.append(data)
        digest = file.close()
    _require_known_tokens(calibration, lm, ids)
    if link.leaves is not None:
        with RowFile(link.leaves, len(ids), lm.hidden, new=True) as leaving:
            start = 0
            for hidden in lm.embed(iter(found)):
                leaving.write(start, gptq_layer.bits(hidden))
                start += len(hidden)
            leaving.sync()
    return Result((Written("", plan.size, digest),), 2, {"samples": len(found), "calibration_tokens": len(ids)})


def _require_known_tokens(calibration: Calibration, lm: LayeredModel, ids: npt.NDArray[np.int64]) -> None:
    """Raise InputError for tokens that the model has no embedding for."""
    size = lm.model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= size:
        raise InputError(
            f"{lm.source.root}: its tokenizer gives token {int(ids.max())} for {calibration.dataset}, and the model has {size}; "
            "put the right tokenizer files beside config.json."
        )


def read_samples(path: Path) -> list[npt.NDArray[np.int64]]:
    """The samples that write_samples wrote, each int64 [T]. Raises InputError for a damaged file."""
    header = read_header(path)
    found = {e.name: np.fromfile(path, "<i8", e.nbytes // 8, offset=e.start) for e in header.entries}
    return np.split(found["input_ids"], np.cumsum(found["lengths"])[:-1])


# --- a layer --------------------------------------------------------------------------------------


def write_layer(unit: Unit, partial: Path, context: Context, job: Job) -> Result:
    """One shard: the layer's routed experts; and for the next layer what leaves this one."""
    link: Link = context.chain  # type: ignore[assignment]
    lm = job.skeleton()
    samples = read_samples(link.store[SAMPLES])
    settings, model = job.settings, job.model
    work = gptq_layer.Work(
        model=model,
        form=job.form,
        layer=job.layer,
        lengths=[len(ids) for ids in samples],
        dampening=settings.dampening,
        rounding=settings.rounding,
        routed=settings.routed,
        floor=settings.floor,
        group=settings.group,
    )
    count = sum(work.lengths)
    assert link.before is not None
    entering = RowFile(link.before, count, lm.hidden, new=False)
    for layer in job.before:
        passed = _pass_through(work, lm, layer, entering, link.scratch / f"after-{layer:03d}")
        if entering.path != link.before:
            entering.path.unlink()
        entering = passed
    with entering, lm.loaded(job.layer):
        lm.require_causal(job.layer)
        inputs = gptq_layer.record(work, lm, entering, link.scratch / "inputs")
        told = gptq_layer.Told(gptq_layer.token_counts(work, inputs))
        with inputs.rows:
            outputs = None
            if link.leaves is not None:
                outputs = RowFile(link.scratch / "outputs", count, lm.hidden, new=True)
            made = gptq_layer.quantize_experts(work, lm, inputs, _rounded(job, context), told, outputs)
            size, digest, tensors = write_shard(job, partial, context, made)
        if outputs is not None and link.leaves is not None:
            with outputs, RowFile(link.leaves, count, lm.hidden, new=True) as leaving:
                gptq_layer.pass_on(work, lm, entering, outputs, leaving)
                leaving.sync()
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in job.model.layer_tensors(job.layer)))
    return Result((Written("", size, digest),), tensors, {**_figures(job, partial), **_tell(job, told, context)})


def write_whole(unit: Unit, partial: Path, context: Context, job: Job) -> Result:
    """One shard of what oneshot made of the whole model, at the first layer that asks for it."""
    link: Link = context.chain  # type: ignore[assignment]
    made = job.oneshot(link.store[SAMPLES])
    items = ((e, p, *made(job.layer, e, p)) for e in range(job.model.shape(job.layer)[0]) for p in PROJECTIONS)
    size, digest, tensors = write_shard(job, partial, context, items)
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in job.model.layer_tensors(job.layer)))
    return Result((Written("", size, digest),), tensors, {"layer": job.layer, **_figures(job, partial)})


def _pass_through(work: gptq_layer.Work, lm: LayeredModel, layer: int, entering: RowFile, path: Path) -> RowFile:
    """A layer without routed experts: what leaves it, in a new file."""
    leaving = RowFile(path, entering.count, entering.width, new=True)
    with entering, lm.loaded(layer):
        lm.require_causal(layer)
        for start, stop in work.spans():
            hidden = gptq_layer.from_bits(entering.read(start, stop), lm.device)
            leaving.write(start, gptq_layer.bits(lm.run(layer, hidden)))
    return leaving


def _rounded(job: Job, context: Context) -> gptq_layer.Rounded:
    """Round a linear to nearest, as `--quant-method RTN` does."""
    experts = job.model.shape(job.layer)[0]
    nearest = gpu_linears.Job(job.model, job.form, job.settings.rounding, job.layer, 0, experts, job.metadata)

    def rounded(expert: int, projection: str) -> tuple[gptq_layer.Packed, gptq_layer.Scales]:
        n, k = nearest.shape(projection)
        return gpu_linears.quantize(
            nearest, expert, projection, np.empty(job.form.entries("", n, k)[0].nbytes, np.uint8)
        )

    return rounded


def write_shard(job: Job, partial: Path, context: Context, made: Iterator[Linear]) -> tuple[int, str, int]:
    """Write the linears, which come in file order, as a shard: its size in bytes, sha256 and number of tensors.

    Raises VerificationError for a linear that became all zeros and was not: an expert that computes nothing.
    """
    plan = plan_experts(job.model, job.layer, range(job.model.shape(job.layer)[0]), job.form, job.metadata)
    shapes: list[tuple[int, int]] = []
    scales: list[gptq_layer.Scales] = []
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        for expert, projection, packed, scale in made:
            if not job.form.codes(packed).any():
                name = linear_name(job.model, job.layer, expert, projection)
                if not (scale == groups.EMPTY_SCALE).all():
                    raise VerificationError(
                        f"{name}: all its codes became zero; use --quant-method RTN, and tell us the model."
                    )
                context.reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")
            file.append(np.ascontiguousarray(packed).reshape(-1).view(np.uint8))
            scales.append(scale)
            shapes.append((packed.shape[0], packed.shape[1] * 32 // job.form.quantizer.bits))
            taken(job.model, job.layer, (expert, projection), context.reporter)
        file.append(np.array(shapes, "<i8").view(np.uint8).reshape(-1))
        for scale in scales:
            file.append(np.ascontiguousarray(scale).view(np.uint8).reshape(-1))
        return plan.size, file.close(), len(plan.entries)


def _figures(job: Job, shard: Path) -> dict[str, Any]:
    """How far one expert of the shard lies from the source: the quality figure of the report."""
    entries = {e.name: e for e in read_header(shard).entries}
    experts = job.model.shape(job.layer)[0]

    def error(expert: int, projection: str) -> dict[str, float]:
        name = linear_name(job.model, job.layer, expert, projection)
        packed, scale = (
            np.fromfile(shard, kind, e.nbytes // np.dtype(kind).itemsize, offset=e.start).reshape(e.shape)
            for e, kind in ((entries[f"{name}.weight_packed"], "<i4"), (entries[f"{name}.weight_scale"], "<u2"))
        )
        return error_figures(job.form.error_sums(job.model.linear(job.layer, expert, projection), packed, scale))

    return sampled_error(job.model, job.layer, 0, experts, error)


def _tell(job: Job, told: gptq_layer.Told, context: Context) -> dict[str, Any]:
    """What happened to the layer's experts, for the journal, the model card and people."""
    tokens = told.tokens
    unseen = int((tokens == 0).sum())
    figures: dict[str, Any] = {
        "layer": job.layer,
        "routed_tokens": {
            "least": int(tokens.min()),
            "median": int(np.median(tokens)),
            "most": int(tokens.max()),
            "none": unseen,
        },
        "rounded_experts": told.rounded,
        "rounded_linears": told.fell_back,
    }
    if told.rounded:
        context.reporter.note(
            f"layer {job.layer}: rounded to nearest, for fewer than {job.settings.floor} tokens were routed to them: "
            f"{len(told.rounded)} of {len(tokens)} experts ({', '.join(map(str, told.rounded[:16]))}"
            f"{', ...' if len(told.rounded) > 16 else ''})"
        )
    if told.fell_back:
        context.reporter.warn(
            f"layer {job.layer}: rounded to nearest, for their Hessian could not be factorized: {len(told.fell_back)} of "
            f"{3 * len(tokens)} linears, such as {told.fell_back[0]}; a larger --dampening-frac or more samples may help"
        )
    return figures
