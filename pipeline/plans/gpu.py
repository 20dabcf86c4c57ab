"""The plan of `ktconvert gpu`: from options and a checkpoint's headers to stages, sizes, notes and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors, other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import Format, card, formats_of
from ktconvert.layouts.outputs.ignore import USUAL_PATTERNS, ignore_list
from ktconvert.layouts.outputs.linear_names import TEMPLATES, name_templates
from ktconvert.layouts.outputs.whole_model import loading_notes
from ktconvert.pipeline.engine.plan import CONFIG, Assembly, Plan, Request, tool_version
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.gptq import settings as of_gptq
from ktconvert.pipeline.plans import statistics
from ktconvert.pipeline.plans.checkpoint import (
    BASE_MEMORY,
    CheckpointFiles,
    base_model,
    collector_at_rest,
    companions,
    files_named,
    number_shards,
    require_whole,
    rows_for,
    shape_facts,
    shard_metadata,
    source_files,
)
from ktconvert.pipeline.plans.quantizing import Quantizing, compensated, rounded
from ktconvert.pipeline.stages import copy_tensors, quantize_experts
from ktconvert.pipeline.walk import environment as machine


def require_available(quant_method: str, torch_dtype: str) -> None:
    """Raise KtconvertError where something is not installed, UnsupportedError where this
    version makes something else.
    """
    if quant_method == "GPTQ":
        machine.require()
    if torch_dtype != "bfloat16":
        raise UnsupportedError(
            f"--torch-dtype {torch_dtype}: experts are rounded from BF16 and their scales are BF16; leave the option "
            "out."
        )


@collector_at_rest()
def plan_gpu(request: Request, hashed: Callable[[int], None] | None = None) -> Plan:
    """Read headers only, and say everything that will happen. hashed is called with the number of bytes as
    --verify-inputs reads them.

    Raises UnsupportedError, InputError or UsageError before any weight is read.
    """
    settings = dict(request.settings)
    require_available(settings["quant_method"], settings["torch_dtype"])
    source = open_checkpoint(request.input, request.tuning.get("revision"))
    require_whole(source, "`ktconvert gpu`")
    if not (source.root / CONFIG).is_file():
        raise InputError(f"{source.root}: has no {CONFIG}, which loaders of the output need; download it too.")
    model = recognise(source, rows_for(settings.get("arch_file")))
    fmt = formats_of("gpu")[settings["quant_type"]].configured(settings)
    loading = loading_notes(fmt, model, request.tuning.get("tp_size") or (1,))
    ignore = ignore_list(model, (*USUAL_PATTERNS, *settings["ignore_patterns"]))
    rest = other_tensors(source, model.expert_tensor_names(), model.quantization)
    tensors = copy_tensors.decoded_others(rest)

    facts = _facts(model, fmt, settings)
    about = ("method", "layout_version", "quant_method", "rounding", "activation", "weights_on")
    metadata = shard_metadata(facts, source, about)
    quantizing = QUANTIZING[settings["quant_method"]](request, model, fmt, rest, metadata)
    stages = number_shards([quantizing.stage, *_carried(tensors, model, settings["max_shard_size"], metadata)])
    beside_weights = source.companions()
    dropped_files = [name for name in beside_weights if name in card.CONFIG_FILES]
    copied = companions(source.root, [name for name in beside_weights if name not in dropped_files])
    notes = tuple(_notes(model, rest, dropped_files, loading))
    entries = fmt.description.config_entries(fmt, facts, ignore, tool_version())
    config = card.config_json(source.config, entries, whole=fmt.arrangement.whole)
    files = source_files(source, request, hashed)
    return Plan(
        request=replace(request, settings=settings),
        source=files,
        reads=(*source.paths(), *files_named(request)),
        stages=stages,
        facts=facts,
        notes=(*notes, *quantizing.notes),
        assembly=Assembly(companions=copied, config=config, loose=False, side_output=statistics.side_output(request)),
        conversion=GpuConversion(CheckpointFiles(source, files), fmt, quantizing, tensors, facts, notes),
        scratch_bytes=quantizing.scratch_bytes,
        advice=quantizing.advice,
        remedies=quantizing.remedies,
    )


@dataclass(frozen=True)
class GpuConversion:
    """`ktconvert gpu`; a Conversion."""

    files: CheckpointFiles
    fmt: Format
    quantizing: Quantizing
    carried: tuple[copy_tensors.OtherTensor, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]

    def peak_memory(self, threads: int) -> int:
        """As the way of quantizing needs it, and the tensors beside the experts."""
        return max(self.quantizing.peak_memory(threads), BASE_MEMORY + copy_tensors.peak_memory(self.carried))

    def require_ready(self) -> None:
        """Calibration goes on only on the machine where it began."""
        self.quantizing.require_ready()

    def card(self, stats: Sequence[Mapping[str, Any]]) -> bytes:
        """README.md of the output."""
        base = base_model(self.files.source)
        lines = self.fmt.description.card(self.facts, base, False, "keep", self.fmt.description.numbers)
        return card.model_card(lines, base, self.facts, self.notes, stats, tool_version())

    def check(self, assembled: Path) -> None:
        """Raise VerificationError for an output that is not what its manifest and loaders expect.

        Whether transformers finds a name for every expert is asked only where it is in memory already.
        """
        from ktconvert.pipeline.verify.verify import require_sound

        require_sound(assembled, load=self.facts["quant_method"] == "GPTQ")


def _rounded(
    request: Request, model: MoeModel, fmt: Format, _rest: OtherTensors, metadata: Mapping[str, str]
) -> Quantizing:
    limit = request.settings["max_shard_size"]
    return rounded(quantize_experts.stage(model, fmt, model.layers, max_shard_size=limit, metadata=metadata))


# --quant-method -> the stage that makes the experts.
QUANTIZING: Mapping[str, Callable[[Request, MoeModel, Format, OtherTensors, Mapping[str, str]], Quantizing]] = {
    "GPTQ": compensated,
    "RTN": _rounded,
}


def _carried(
    tensors: Sequence[copy_tensors.OtherTensor],
    model: MoeModel,
    max_shard_size: int | None,
    metadata: Mapping[str, str],
) -> list[Stage[Any]]:
    stage = copy_tensors.stage(model.source, tensors, max_shard_size, metadata)
    return [stage] if stage.units else []


def _facts(model: MoeModel, fmt: Format, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architecture": model.arch.name,
        "method": fmt.name,
        "layout_version": fmt.encoding.version,
        "quant_method": settings["quant_method"],
        "rounding": settings["rounding"],
        "bits": fmt.encoding.grid.bits,
        "group_size": fmt.encoding.grid.group,
        **shape_facts(model, model.layers),
        **(of_gptq.facts(settings) if settings["quant_method"] == "GPTQ" else {}),
        "packed_linears": sum(3 * model.shape(layer)[0] for layer in model.layers),
        TEMPLATES: name_templates(model),
    }


def _notes(model: MoeModel, rest: OtherTensors, dropped_files: list[str], loading: tuple[str, ...]) -> list[str]:
    notes = list(model.common_notes)
    weights = [stored for stored in rest.tensors.values() if isinstance(stored, Weight)]
    decoded, titles = len(weights), sorted({weight.encoding.title for weight in weights})
    for title in encodings.quantized(model.dtypes):
        notes.append(
            f"{title} to integers rounds twice: where there is a BF16 release, convert that for better accuracy"
        )
    if decoded:
        notes.append(
            f"{decoded} {' and '.join(titles)} tensors outside the routed experts are written as BF16, multiplied by "
            "their scales: loaders would read them unscaled"
        )
    if model.mtp_tensors:
        which = f"layer {', '.join(map(str, model.mtp_layers))}" if model.mtp_layers else "blocks called mtp"
        notes.append(f"the experts of the MTP part ({which}) are not quantized, and named in the ignore list")
    if dropped_files:
        notes.append(f"{', '.join(dropped_files)} is left out: it tells how the source was quantized")
    return [*notes, *loading]
