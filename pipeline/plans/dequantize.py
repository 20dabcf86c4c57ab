"""The plan of `ktconvert dequantize`: a whole checkpoint in which every quantized weight becomes BF16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor, find_non_expert_tensors
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.outputs import cards, configs, dequantized
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.pipeline.engine.plan import CONFIG, Hooks, Plan, tool_version
from ktconvert.pipeline.options.conversion_options import DequantizeOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.stages import copy_tensors

STAGE, TITLE = "dequantize", "decode quantized tensors to BF16, copy all others"

# Returns changed tensors of the output, a note on the change, and warnings
TensorChange = Callable[[TensorSource, Sequence[OutputTensor]], tuple[Sequence[OutputTensor], str, Sequence[str]]]


def plan_dequantize(
    options: DequantizeOptions, change: TensorChange | None = None, more_files: Mapping[Path, SourceFile] | None = None
) -> Plan:
    """Build the plan from headers; read no weights.

    change      applied to the source and the tensors, for `merge-adapter`
    more_files  files that are read besides the checkpoint
    """
    source = checkpoint.open_source(options)
    checkpoint.require_complete(source, f"`ktconvert {options.command}`", "which loaders of the output need")
    everything = find_non_expert_tensors(source, (), source.quantization)
    tensors: Sequence[OutputTensor] = everything.output_tensors()
    change_notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    if change is not None:
        tensors, note, warnings = change(source, tensors)
        change_notes = (note, *warnings)
    facts = _make_facts(source, tensors)
    metadata = checkpoint.shard_metadata(facts, source, ("method", "layout_version"))
    stage = copy_tensors.make_stage(source, tensors, options.max_shard_size, metadata, name=STAGE, title=TITLE)
    names = source.companions()
    dropped_files = [name for name in names if name in configs.CONFIG_FILES]
    notes = (
        *source.notes,
        *everything.notes,
        *change_notes,
        *_make_notes(facts, len(everything.dropped), dropped_files, copied=change is None),
    )
    base = checkpoint.base_model(source)
    return Plan(
        options=options,
        files={**checkpoint.source_files(source), **(more_files or {})},
        reads=(*source.paths(), *(more_files or {})),
        stages=checkpoint.number_shards([stage]),
        facts=facts,
        notes=notes,
        warnings=tuple(warnings),
        companions=checkpoint.companions(source.companion_root, [name for name in names if name not in dropped_files]),
        download=checkpoint.plan_download(options, source, [stage]),
        config=dequantized.config_json(source.config) if facts["decoded"] else configs.encode_json(source.config),
        hooks=Hooks(
            # A few windows of each shard in flight, for any number of threads.
            peak_memory=lambda threads: checkpoint.BASE_MEMORY + copy_tensors.peak_memory(tensors),
            render_card=lambda stats: cards.make_model_card(
                cards.DEQUANTIZED, facts, base, notes, stats, tool_version()
            ),
            check=_check_decoded,
        ),
    )


def _check_decoded(assembled: Path) -> None:
    from ktconvert.pipeline.verify.verify import require_decoded

    require_decoded(assembled)


def _make_facts(source: TensorSource, tensors: Sequence[OutputTensor]) -> OutputFacts:
    """Return the facts of the output.

    `decoded` is a mapping: title of an encoding -> number of weights stored in it.
    """
    counts = Counter(tensor.stored.encoding.title for tensor in tensors if isinstance(tensor.stored, Weight))
    quantization = source.quantization
    # Releases of MLX before 2025 have no quantization_config.
    mlx_bits = cfg.find_value(source.config, ("quantization.bits",))
    is_declared = quantization.method or mlx_bits or configs.remove_quantization(source.config) != source.config
    if not counts and is_declared:
        raise UnsupportedError(
            f"{source.root}: {CONFIG} declares a quantized model ({quantization.method or 'unnamed method'}), but no "
            "tensor has the names of a supported encoding; use the model's BF16 or FP8 (E4M3) release."
        )
    return {
        "architecture": ", ".join(cfg.list_families(source.config)) or "unknown",
        "method": dequantized.METHOD,
        "layout_version": dequantized.VERSION,
        "decoded": dict(sorted(counts.items())),
        "tensors": len(tensors),
    }


def _make_notes(facts: OutputFacts, scales: int, dropped_files: Sequence[str], *, copied: bool) -> list[str]:
    """Return the notes of the plan.

    scales  number of dropped tensors
    copied  whether all tensors that are not decoded are copied unchanged
    """
    weights = ", ".join(f"{plural(count, 'weight')} in {title}" for title, count in facts["decoded"].items())
    if not weights:
        return ["the source is not quantized; the output is a copy"] if copied else []
    notes = [f"{weights} become BF16; {scales} tensors of scales and similar data are dropped, all others copied"]
    if dropped_files:
        notes.append(f"{', '.join(dropped_files)} is not copied, because it describes the source's quantization")
    return notes
