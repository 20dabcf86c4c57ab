"""Requirements of a calibration: libraries, the machine's properties, memory and disk.

Memory and disk are computed from sizes for the plan; nothing is loaded. H hidden size, I expert width, E experts of a
layer, N samples of T tokens. Sizes are bytes.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import KTConvertError
from ktconvert.layouts.sources import config as cfg
from ktconvert.native_quant.runtime import transformers_version
from ktconvert.pipeline.models.pretrained import LIBRARIES
from ktconvert.pipeline.options.conversion_options import CalibrateOptions, QuantizationOptions
from ktconvert.pipeline.options.option_groups import Hardware, Samples
from ktconvert.pipeline.report.text import size

# Modules that have to be importable.
CALIBRATE_MODULES = ("torch", "transformers", "accelerate", "datasets")
GPTQ_MODULES = (*CALIBRATE_MODULES, "llmcompressor", "compressed_tensors")
# Packages whose versions can change bytes: of statistics, and of GPTQ.
CALIBRATE_PACKAGES = ("torch", "transformers")
GPTQ_PACKAGES = (*CALIBRATE_PACKAGES, "llmcompressor", "compressed-tensors")
GROUP_BYTES = 1 << 30  # memory on a CPU for a group of experts, with Hessians and working copies
GPU_SHARE = 4  # fraction of a GPU's memory for such a group: 1/4

GIB = 1 << 30
HALF, FLOAT, DOUBLE, ID = 2, 4, 8, 4  # bytes of BF16, float32, float64 and an expert's number
# Memory of the card besides tensors: CUDA, its kernels, the unusable rest of its allocator; not measured.
CUDA = 3 * GIB // 2
# Eager attention, bytes per score (measured on a CPU): BF16 scores, the softmax's float32 input and its float32 output.
SCORE = HALF + 2 * FLOAT
GRADIENT_TOKENS = 8192  # tokens with gradients, evenly spread over all tokens
TOKENS_AT_ONCE = 256  # tokens with predictions in memory at the same time
BLOCK = 128  # columns that GPTQ quantizes before it corrects the remaining columns
MATRICES = 16  # blocks of this width in memory at the same time
ROWS = 8  # rows of H and of all heads in memory for a sequence, in BF16: q, k, v, rotations, residual

CARDS = (24, 48, 80)  # GiB
# kt-kernel's own advice for GPTQ: the largest share of a card for weights, by the smallest card size it is valid for.
SHARES = ((48, 0.625), (0, 0.5))

# Command -> option without a calibration
ALTERNATIVES = {"gpu": "--quant-method RTN", "cpu": "--scale mse"}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def require_libraries(purpose: str = "--quant-method GPTQ", modules: Sequence[str] = GPTQ_MODULES) -> None:
    """Configure libraries. Raises KTConvertError, with a remedy, if one is missing or too old."""
    from ktconvert.layouts.extras import require_packages
    from ktconvert.pipeline.models.loading import set_environment

    require_packages(purpose, modules, "gpu")
    if (problem := transformers_version.explain_too_old()) is not None:
        raise KTConvertError(problem)
    set_environment()
    for package in ("LLM_COMPRESSOR", "COMPRESSED_TENSORS"):
        os.environ.setdefault(f"{package}_LOG_LEVEL", "ERROR")


def read_machine_properties(hardware: Hardware, threads: int, packages: Sequence[str]) -> dict[str, Any]:
    """Return the properties of this machine that can change bytes, sorted by name.

    Other machines add numbers in a different order.
    """
    if hardware.force_cpu:  # before torch is imported
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    import torch

    properties: dict[str, Any] = {"threads": threads, **{name: importlib.metadata.version(name) for name in packages}}
    if not hardware.force_cpu and torch.cuda.is_available():
        gpu_memory = torch.cuda.get_device_properties(0).total_memory
        group_bytes = min(gpu_memory, hardware.max_gpu_memory or gpu_memory) // GPU_SHARE
        properties |= {"device_type": "cuda", "device": torch.cuda.get_device_name(0), "group_bytes": group_bytes}
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        properties |= {"device_type": "cpu", "device": f"CPU with {capability}", "group_bytes": GROUP_BYTES}
    return dict(sorted(properties.items()))


@dataclass(frozen=True)
class CalibrationShape:
    """The sizes and settings that determine a footprint.

    hidden           hidden size H
    width            expert width I
    experts          number of experts of a layer
    heads            number of attention heads
    samples          number of samples
    length           number of tokens of a sample
    bits             bits of a code
    quantizes        whether there are Hessians and codes; otherwise only statistics are gathered
    calibrate        tokens that count for an expert, as in StatisticsSpec
    experts_at_once  number of experts that are in memory together
    head             values of a head, the widest of q, k and v
    other_bytes      BF16 bytes of the largest decoder layer without its routed experts
    dense            whether dense layers precede a layer with experts, and are run with it
    top_k            number of experts that a token is routed to
    on_gpu           whether a GPU computes
    statistics       whether GPTQ gathers statistics, too
    moments          whether sums of x xT are kept: Hessians that are not used to quantize
    fisher           whether the Fisher information of predictions about the experts' outputs is needed
    vocabulary       number of different tokens that can be predicted
    """

    hidden: int
    width: int
    experts: int
    heads: int
    samples: int = 512
    length: int = 2048
    bits: int = 4
    quantizes: bool = True
    calibrate: str = "all"
    experts_at_once: int = 1
    head: int = 128
    other_bytes: int = 0
    dense: bool = False
    top_k: int = 8
    on_gpu: bool = False
    statistics: bool = False
    moments: bool = False
    fisher: bool = False
    vocabulary: int = 0

    @property
    def has_hessians(self) -> bool:
        return self.quantizes or self.moments


@dataclass(frozen=True)
class Footprint:
    """Memory and disk that a calibration run needs, in bytes.

    host           peak of main memory, including libraries
    gpu            peak of the card's memory; 0 without a card
    disk           files of activations that exist together, in addition to the output: inputs and outputs of a layer
                   and of its experts, and outputs of the dense layers before it
    portions       files that a layer's run and the workers of an executor exchange
    layer          the routed experts of one layer in BF16
    weights        weights in use at a time: the layer without its experts, and one group of experts, in BF16
    hessians       Hessians of one group: those of gate and up, shared or one per expert, and those of down
    squares        sums of squares of a layer and of one group, if statistics are gathered
    working        working memory to quantize a linear, in addition to the linear and its Hessian
    scores         attention scores of one sequence (eager attention)
    hidden_states  the file with the inputs of a layer
    """

    host: int
    gpu: int
    disk: int
    portions: int
    layer: int
    weights: int
    hessians: int
    squares: int
    working: int
    scores: int
    hidden_states: int


def scratch_bytes(rows: int, width: int) -> int:
    """Return an upper bound of the working memory to quantize a linear [rows, width], beside itself and its Hessian.

    It holds five float32 copies of the linear, its BF16 and codes; four float32 copies of the Hessian; the matrices of
    a block of columns.
    """
    return rows * width * (5 * FLOAT + 2 * HALF) + 4 * FLOAT * width * width + MATRICES * rows * BLOCK * FLOAT


def estimate_footprint(shape: CalibrationShape) -> Footprint:
    """Compute the footprint; the peak is the larger one of a layer's two steps, attention and a group of experts."""
    h, i, group = shape.hidden, shape.width, min(shape.experts_at_once, shape.experts)
    expert_bytes = 3 * h * i * HALF
    tokens = shape.samples * shape.length
    shared = h * h * FLOAT if shape.has_hessians else 0
    hessians = (group * shared if shape.calibrate == "routed" else shared) + group * i * i * FLOAT * shape.has_hessians
    squares = (shape.experts + group) * (h + i) * DOUBLE if shape.statistics or not shape.quantizes else 0
    gate_up_rows = 2 * i * shape.quantizes  # gate and up of an expert are quantized as one matrix
    working = max(scratch_bytes(gate_up_rows, h), scratch_bytes(h, i)) if shape.quantizes else 0
    working += 2 * max(h, i) ** 2 * FLOAT if shape.moments else 0  # halved, and as stored
    # Fisher information: about the layer's outputs, with its factor, and about each expert's gate and up; gradients.
    fisher_bytes = shape.fisher * (2 * h * h + group * (2 * i) ** 2) * FLOAT
    working += shape.fisher * 4 * FLOAT * max(h, 2 * i) ** 2
    logits = TOKENS_AT_ONCE * shape.vocabulary * 4 * FLOAT
    gradients = shape.fisher * (h * (shape.vocabulary * HALF + GRADIENT_TOKENS * (HALF + 2 * FLOAT)) + logits)
    scores = shape.heads * shape.length**2 * SCORE
    sequence = ROWS * shape.length * (h + shape.heads * shape.head) * HALF
    # One sequence added to a Hessian: its product, its float32 copies; to a sum of squares: its float32 and float64
    # copies.
    added_statistics = shared + (2 * FLOAT if shape.has_hessians else FLOAT + DOUBLE) * shape.length * h
    attention = shape.other_bytes + shared + max(scores + sequence + added_statistics, gradients)
    codes = 2 * 3 * h * i * shape.bits // 8 * shape.quantizes
    # Experts as in the file (mapped), in BF16, and rounded; gate and up again as one matrix; codes of an expert, both
    # compensated and rounded to nearest.
    copies = (1 if shape.on_gpu else 2) + shape.quantizes
    held_experts = copies * group * expert_bytes + gate_up_rows * h * HALF + codes
    quantizing = held_experts + hessians + fisher_bytes + squares + max(working, sequence + added_statistics)
    peak = max(attention, quantizing)
    hidden_states = tokens * h * HALF
    routing = tokens * shape.top_k * (ID + FLOAT)  # for all tokens, in main memory
    # Sent to workers: the router's choices, the shared Hessian, Fisher information; returned for each expert: its
    # values and codes, or its sums.
    sent = routing + shared * (shape.calibrate != "routed") + shape.fisher * h * h * FLOAT
    returned = 3 * h * i * (8 * HALF + shape.bits + 1) // 8 * shape.quantizes  # at most one bit of scales per weight
    returned += (h + i) * DOUBLE * (squares > 0) + i * i * FLOAT * shape.moments
    moved_to_card = shape.other_bytes + group * expert_bytes + sequence  # through main memory
    return Footprint(
        host=LIBRARIES + routing + (moved_to_card if shape.on_gpu else peak),
        gpu=CUDA + peak if shape.on_gpu else 0,
        disk=(5 if shape.dense else 4) * hidden_states,
        portions=sent + shape.experts * returned,
        layer=shape.experts * expert_bytes,
        weights=shape.other_bytes + group * expert_bytes,
        hessians=hessians,
        squares=squares,
        working=working,
        scores=scores,
        hidden_states=hidden_states,
    )


def read_shape(model: MoeModel, options: Samples) -> CalibrationShape:
    """Return the shape of a checkpoint's widest layer, from headers and config, and of these samples.

    The caller sets the other fields.
    """
    config = model.source.config
    experts, _, width = map(max, zip(*(model.shape(layer) for layer in model.layers), strict=True))
    hidden = find_model_width(model)
    heads = _number(config, 1, "num_attention_heads", "n_head", "n_heads")
    widths = [_number(config, 0, key) for key in ("head_dim", "v_head_dim")]
    widths.append(_number(config, 0, "qk_nope_head_dim") + _number(config, 0, "qk_rope_head_dim"))
    return CalibrationShape(
        hidden,
        width,
        experts,
        heads,
        samples=options.num_calibration_samples,
        length=options.sequence_length,
        head=max(widths) or hidden // heads,
        other_bytes=_largest_layer_bytes(model),
        dense=model.layers != tuple(range(len(model.layers))),
        top_k=_number(config, 8, "num_experts_per_tok", "moe_topk", "top_k"),
        vocabulary=_number(config, 0, "vocab_size"),
    )


def find_model_width(model: MoeModel) -> int:
    """Return the hidden size of the layers, which that of experts in a latent space does not exceed."""
    hidden = max(model.shape(layer)[1] for layer in model.layers)
    return max(hidden, _number(model.source.config, 0, "hidden_size"))


def max_experts_at_once(shape: CalibrationShape, budget: int) -> int:
    """Return how many experts fit into `budget` bytes, as stored and in BF16, with statistics; at least one."""
    h, i = shape.hidden, shape.width
    nbytes = 2 * 3 * h * i * HALF + (h + i) * DOUBLE * (not shape.quantizes) + i * i * FLOAT * shape.has_hessians
    nbytes += h * h * FLOAT * (shape.has_hessians and shape.calibrate == "routed")
    nbytes += (2 * i) ** 2 * FLOAT * shape.fisher
    return max(1, min(shape.experts, budget // nbytes))


def _number(config: Mapping[str, Any], default: int, *keys: str) -> int:
    named = cfg.find_number(dict(config), keys)
    return named[1] if named else default


def _largest_layer_bytes(model: MoeModel) -> int:
    """Return the BF16 bytes of the largest decoder layer without routed experts."""
    routed = model.expert_tensor_names() | model.mtp_tensors
    layers: dict[str, int] = {}
    for name, info in model.source.tensors.items():
        if name not in routed and (match := LAYER.search(name)):
            layers[match[1]] = layers.get(match[1], 0) + HALF * prod(info.shape)
    return max(layers.values(), default=0)


def list_remedies(options: QuantizationOptions | CalibrateOptions) -> str:
    """Return advice for a calibration run that needs too much memory."""
    samples = options.samples
    remedies = [
        f"fewer samples (--num-calibration-samples {samples.num_calibration_samples // 2})",
        f"shorter sequences (--sequence-length {samples.sequence_length // 2})",
    ][samples.num_calibration_samples == 1 :]
    if (alternative := ALTERNATIVES.get(options.command)) is not None:
        remedies.insert(0, f"{alternative}, which needs no calibration")
    if options.hardware.on_gpu:
        remedies.append("--force-cpu, if the GPU is too small")
    return f"To need less memory, in this order: {'; '.join(remedies)}."


def max_gpu_memory(card_gib: int, needed: Footprint) -> str | None:
    """Return the --max-gpu-memory for a card of card_gib GiB; None if the card is too small.

    The rest of the card is for activations and Hessians; never more than the share that kt-kernel's README advises.
    """
    free = card_gib * GIB - (needed.gpu - needed.weights)
    share = next(share for minimum, share in SHARES if card_gib >= minimum)
    limit = min(int(card_gib * share), free // GIB)
    return f"{limit}GiB" if limit * GIB >= needed.weights else None


def describe_footprint(shape: CalibrationShape, remedies: str, cards: Sequence[int] = CARDS) -> list[str]:
    """Return sentences for the plan: the required memory and disk, and a --max-gpu-memory for each card.

    remedies  result of list_remedies
    """
    needed = estimate_footprint(shape)
    sharing = "for each expert" if shape.calibrate == "routed" else "shared by all its experts"
    run_name, matrix_name = ("GPTQ", "Hessian") if shape.quantizes else ("calibration", "sum of x xT")
    gate_size = size(shape.hidden**2 * FLOAT)
    down_size = size(shape.width**2 * FLOAT)
    statistics = f"the {matrix_name} of gate and up is {gate_size}, {sharing}, that of down {down_size} for each expert"
    if not shape.has_hessians:
        statistics = f"the sums of squares of their inputs are {size(needed.squares)}"
    group = min(shape.experts_at_once, shape.experts)
    count = "one at a time" if group == 1 else f"{group} at a time"
    sentences = [
        f"{run_name} keeps {size(needed.disk)} of activations on disk while it runs: "
        f"{shape.samples} samples of {shape.length} tokens are {size(needed.hidden_states)} at the input of each layer",
        f"one layer's experts are {size(needed.layer)} in BF16 and are processed {count}; {statistics}",
    ]
    on_gpu = needed if shape.on_gpu else estimate_footprint(replace(shape, on_gpu=True))
    limits = {card: max_gpu_memory(card, on_gpu) for card in cards}
    sufficient = [f"{limit} on a card of {card} GiB" for card, limit in limits.items() if limit]
    too_small = [f"{card} GiB" for card, limit in limits.items() if not limit]
    it_needs = "it needs" if shape.on_gpu else "on a GPU it would need"
    sentences.append(f"{it_needs} {size(on_gpu.gpu)} of the card's memory")
    if sufficient:
        other_data = "activations and Hessians" if shape.quantizes else "activations"
        sentences.append(f"--max-gpu-memory: {', '.join(sufficient)}; the rest is for {other_data}")
    if too_small:
        sentences.append(f"cards of {', '.join(too_small)} are too small. {remedies}")
    return sentences
