"""The plan of `ktconvert fetch`: a checkpoint without its routed experts, or with the hot ones only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import UsageError, bad_file
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import cards, configs, dequantized
from ktconvert.layouts.sources import config as cfg
from ktconvert.pipeline.engine.plan import Hooks, Plan, identify_by_stat, tool_version
from ktconvert.pipeline.options.conversion_options import FetchOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.report.text import size
from ktconvert.pipeline.stages import copy_tensors

STAGE, TITLE = "fetch", "copy tensors outside the routed experts"


def plan_fetch(options: FetchOptions) -> Plan:
    """Build the plan from headers; read no weights."""
    source = checkpoint.open_source(options)
    checkpoint.require_complete(source, "`ktconvert fetch`", "which loaders of the output need")
    model = recognize(source)
    left_out = model.expert_tensor_names() - set(_find_hot_tensors(model, options.gpu_experts_mask))
    tensors = [OutputTensor(name, info) for name, info in source.tensors.items() if name not in left_out]
    if not tensors:
        raise bad_file(source.root, "has no tensors besides routed experts", "give the complete model")
    facts: OutputFacts = {
        "architecture": ", ".join(cfg.list_families(source.config)) or "unknown",
        "method": dequantized.FETCHED,
        "layout_version": dequantized.VERSION,
        "decoded": {},
        "tensors": len(tensors),
    }
    metadata = checkpoint.shard_metadata(facts, source, ("method", "layout_version"))
    stage = copy_tensors.make_stage(source, tensors, options.max_shard_size, metadata, name=STAGE, title=TITLE)
    left_bytes = sum(source.tensors[name].nbytes for name in left_out)
    notes = (
        *source.notes,
        f"{len(left_out)} tensors of routed experts are left out ({size(left_bytes)}); a server that computes all of "
        "them on the CPU does not read them",
    )
    mask = options.gpu_experts_mask
    files = checkpoint.source_files(source) | ({mask: identify_by_stat(mask, mask.name)} if mask else {})
    base = checkpoint.base_model(source)
    return Plan(
        options=options,
        files=files,
        reads=(*source.paths(), *([mask] if mask else [])),
        stages=checkpoint.number_shards([stage]),
        facts=facts,
        notes=notes,
        companions=checkpoint.companions(source.companion_root, source.companions()),
        download=checkpoint.plan_download(options, source, [stage]),
        config=configs.encode_json(source.config),
        hooks=Hooks(
            peak_memory=lambda threads: checkpoint.BASE_MEMORY + copy_tensors.peak_memory(tensors),
            render_card=lambda stats: cards.make_model_card(cards.FETCHED, facts, base, notes, stats, tool_version()),
        ),
    )


def _find_hot_tensors(model: MoeModel, mask_file: Path | None) -> Iterator[str]:
    """Yield the names of the tensors of the experts in a mask; stacked experts share theirs.

    Raises UsageError if the mask is for other numbers of layers or experts.
    """
    if mask_file is None:
        return
    from ktconvert.native_quant.runtime.hot_experts import read_mask

    mask = read_mask(mask_file)
    layers = model.decoder_layers
    counts: Collection[int] = {model.shape(layer)[0] for layer in model.layers}
    if mask.shape[0] != layers or counts != {mask.shape[1]}:
        shape = f"{layers} layers of {' or '.join(map(str, sorted(counts)))} experts"
        problem = f"--gpu-experts-mask {mask_file}: is {list(mask.shape)}, but the model has {shape}"
        raise UsageError(problem, "give a mask of this model")
    for layer in model.layers:
        for expert in map(int, mask[layer].nonzero()[0]):
            yield from (info.name for info in model.expert_tensors(layer, expert))
