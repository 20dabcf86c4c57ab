"""The shape of a model for predictions, from its headers and config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ktconvert.layouts.checkpoints.attention import find_attention_bytes, find_caches
from ktconvert.layouts.checkpoints.match import is_mtp_tensor
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import KTConvertError, UnsupportedError
from ktconvert.layouts.outputs import Format, formats_by_option
from ktconvert.layouts.outputs.format import explain_illegal_count, output_bytes
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.runtime.checkpoint_experts import CheckpointExperts, divide_experts
from ktconvert.native_quant.runtime.methods import METHODS, Method
from ktconvert.pipeline.fit.estimate import BF16, KTCONVERT, ExpertForm, ModelShape, RestForm
from ktconvert.pipeline.options.option_groups import Streaming
from ktconvert.quantizers.quantizer import ABSMAX, MSE

VOCABULARY = ("vocab_size", "padded_vocab_size")
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embed.weight", "wte.weight", "token_embd.weight")
GPU_FORMAT = "W4A16"
NO_EXPERTS = "no experts"  # name of a RestForm
GPU_LOSS = 0.0042  # of W4A16 by rounding: that of int4 with mse (docs/explanation/fit.md)


class Quality(NamedTuple):
    """Measured properties of a method: mean KL divergence in nats by --scale (accuracy.md), bytes/s of a core."""

    loss: dict[str, float]
    core_rate: float


# Losses: docs/explanation/accuracy.md, bundled model. Rates: best calls of benchmarks/fit.py --speed on Zen 4.
QUALITIES = {
    "AMXINT4": Quality({"absmax": 0.0055, "mse": 0.0042}, 28e9),
    "AMXINT8": Quality({"absmax": 0.0004}, 28e9),
    "MXFP4": Quality({"absmax": 0.0047}, 26e9),
    "FP8": Quality({"absmax": 0.0006}, 27e9),
    "BF16": Quality({"absmax": 0.0002}, 30e9),
    "RAWINT4": Quality({"absmax": 0.0027, "mse": 0.0025}, 24e9),
}
CORE_RATE = 8e9  # of the methods that read checkpoints as they are, mostly GGUF


def read_shape(
    model: MoeModel, numa: int, runtime: str, download: int = 0, rests: tuple[RestForm, ...] = ()
) -> ModelShape:
    """Return the shape of a recognized model for a number of NUMA nodes.

    download  bytes to download first
    rests     forms of the rest, if a different checkpoint provides it

    Raises UnsupportedError for a model that ktconvert refuses.
    """
    if model.refusal is not None:
        raise UnsupportedError(model.refusal)
    source, layers = model.source, model.layers
    experts = tuple(model.shape(layer)[0] for layer in layers)
    decoder_layers = model.decoder_layers
    config = source.config
    vocabulary = cfg.find_number(config, VOCABULARY)
    positions = cfg.find_number(config, (cfg.CONTEXT_LENGTH,))
    return ModelShape(
        experts,
        *cfg.find_experts_per_token(config, layers[0], max(experts)),
        decoder_layers,
        (cfg.find_number(config, ("hidden_size", "dim", "d_model")) or ("", model.shape(layers[0])[1]))[1],
        vocabulary[1] if vocabulary else 0,
        tuple(_list_forms(model, numa)),
        rests or tuple(list_rests(model, runtime)),
        find_caches(config, decoder_layers, in_transformers=runtime == KTCONVERT) or (),
        sum(sum_experts(model)),
        positions[1] if positions else None,
        find_attention_bytes(config),
        max(model.shape(layer)[2] for layer in layers),
        download,
        window_bytes=_estimate_window(source) if download and not source.container.experts_only else 0,
    )


def _estimate_window(source: TensorSource) -> int:
    """Return the bytes of the files that `cpu --stream` holds, if each layer is in one file."""
    return sum(sorted(shard.size for shard in source.shards)[-1 - Streaming().stream_ahead :])


# --- the CPU's experts ----------------------------------------------------------------------------


def _list_forms(model: MoeModel, numa: int) -> Iterator[ExpertForm]:
    """Yield the weights as they are, if the runtime computes them, and each format that `cpu` writes."""
    if (stored := _read_as_it_is(model, numa)) is not None:
        yield stored
    for fmt in formats_by_option("cpu").values():
        yield _make_form(model, fmt, numa)


def _make_form(model: MoeModel, fmt: Format, numa: int) -> ExpertForm:
    slices = numa if fmt.arrangement.sliced else 1
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    refusal = explain_illegal_count(fmt, shapes, slices)
    quality = QUALITIES[fmt.name]
    is_exact = fmt.encoding.is_exact(model)
    scale = MSE.name if MSE.name in quality.loss and not is_exact else ABSMAX.name
    return ExpertForm(
        fmt.option,
        fmt.name,
        scale,
        (0,) * len(model.layers)
        if refusal
        else tuple(_expert_bytes(model, layer, METHODS[fmt.name], slices) for layer in model.layers),
        0 if refusal else output_bytes(model, fmt, slices),
        0.0 if is_exact else quality.loss[scale],
        quality.core_rate,
        fmt.arrangement.sliced,
        f"not in {slices} NUMA slices: {refusal}" if refusal else "",
    )


def _expert_bytes(model: MoeModel, layer: int, method: Method, slices: int) -> int:
    """Return the bytes of one of a layer's experts in the order of the kernels."""
    _, hidden, width = model.shape(layer)
    slicing = Slicing(layer, hidden, width, slices, gated=model.is_gated)
    return _sum_slices(slicing, dict.fromkeys(model.projections, method))


def _sum_slices(slicing: Slicing, rows: dict[str, Method]) -> int:
    """Return the bytes of one expert in these slices.

    rows  projection -> row of the method
    """
    return sum(
        tensor.nbytes
        for numa_slice in slicing.all_slices([0])
        for tensor in rows[numa_slice.projection].tensors(numa_slice.n, numa_slice.k)
    )


def _read_as_it_is(model: MoeModel, numa: int) -> ExpertForm | None:
    """Return the form of a checkpoint that the runtime computes without a conversion; None for any other."""
    experts = CheckpointExperts(model.source.root, model)
    sizes = []
    try:
        for layer in model.layers:
            rows = experts.select_rows(layer)
            _, hidden, width = model.shape(layer)
            whole = Slicing(layer, hidden, width, gated=model.is_gated)
            sizes.append(_sum_slices(divide_experts(model.source.root, rows, whole, None, numa), rows))
    except KTConvertError:
        return None
    method = rows["up"].name
    quality = QUALITIES.get(method)
    return ExpertForm("", method, ABSMAX.name, tuple(sizes), 0, 0.0, quality.core_rate if quality else CORE_RATE)


# --- the rest -------------------------------------------------------------------------------------


def list_rests(model: MoeModel, runtime: str) -> Iterator[RestForm]:
    """Yield the forms in which a server loads everything but the CPU's experts."""
    tensors = find_rest(model)
    rest_bf16 = BF16 * sum(map(count_elements, tensors))
    rest = sum(info.nbytes for info in tensors)
    embedding = _find_embedding(tensors)
    tied = embedding is None or not any("lm_head" in info.name or info.name == "output.weight" for info in tensors)
    rows = 0 if tied or embedding is None else embedding.nbytes
    bf16_experts = tuple(BF16 * len(model.projections) * math.prod(model.shape(layer)[1:]) for layer in model.layers)
    if runtime == KTCONVERT or model.source.container.experts_only:
        rows_bf16 = 0 if rows == 0 or embedding is None else BF16 * count_elements(embedding)
        form = RestForm("BF16", rest_bf16, rest_bf16 - rows_bf16, bf16_experts)
        yield remove_experts(form) if model.source.container.experts_only else form
        return
    counts = [model.shape(layer)[0] for layer in model.layers]
    stored_bytes = sum_experts(model)
    stored_experts = tuple(nbytes // count for nbytes, count in zip(stored_bytes, counts, strict=True))
    yield RestForm("published", rest, rest - rows, stored_experts)
    gpu = formats_by_option("gpu").get(GPU_FORMAT)
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    if gpu is None or explain_illegal_count(gpu, shapes, 1):
        return
    packed = output_bytes(model, gpu, 1)
    if packed < sum(stored_bytes):
        sizes = tuple(output_bytes(model, gpu, 1, [layer]) // model.shape(layer)[0] for layer in model.layers)
        yield RestForm(GPU_FORMAT, rest_bf16, rest_bf16 - rows, sizes, packed + rest_bf16, GPU_LOSS)


def remove_experts(form: RestForm) -> RestForm:
    """Return the form of a checkpoint that has no routed experts."""
    return replace(form, name=NO_EXPERTS, expert=())


def sum_experts(model: MoeModel) -> list[int]:
    """Return the stored bytes of the routed experts, by layer with experts."""
    return [sum(info.nbytes for info in model.layer_tensors(layer)) for layer in model.layers]


def find_rest(model: MoeModel) -> list[TensorInfo]:
    """Return the tensors that are no routed experts, without those of MTP layers, which no server loads by default."""
    own, layers = model.expert_tensor_names() | model.mtp_tensors, model.decoder_layers
    return [info for name, info in model.source.tensors.items() if name not in own and not is_mtp_tensor(name, layers)]


def count_elements(info: TensorInfo) -> int:
    """Return the number of weights of a tensor; packed 4-bit weights are counted as their bytes' two codes."""
    packed = {"U8": 2, "I8": 2, "I32": 8}.get(info.dtype, 1)
    return packed * math.prod(info.shape)


def _find_embedding(tensors: list[TensorInfo]) -> TensorInfo | None:
    return next((info for info in tensors if info.name.endswith(EMBEDDINGS)), None)
