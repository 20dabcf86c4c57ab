"""The memory and disk that a walk through a model takes, computed from its sizes for the plan: nothing is loaded.

H hidden size, I expert width, E experts of a layer, N samples of T tokens. Sizes are bytes. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.report.text import size

GIB = 1 << 30
HALF, FLOAT, DOUBLE, ID = 2, 4, 8, 4  # bytes of BF16, float32, float64 and an expert's number
LIBRARIES = 3 * GIB // 4  # the interpreter with torch, transformers and llmcompressor: 0.6 GiB measured
CUDA = 3 * GIB // 2  # on the card beside tensors: CUDA, its kernels, what its allocator cannot use; not measured
# Eager attention, bytes per score (measured on a CPU): BF16 scores, the softmax's float32 input and its float32 output.
SCORE = HALF + 2 * FLOAT
GRADIENTS = 8192  # tokens, spread over all, of which gradients are taken
AT_ONCE = 256  # of them, whose predictions are in memory together
BLOCK = 128  # columns that GPTQ quantizes before it corrects the rest
MATRICES = 16  # of that width, that it holds at a time
ROWS = 8  # rows of H and of all heads together that a sequence holds at a time, in BF16: q, k, v, rotations, residual

CARDS = (24, 48, 80)  # GiB
# kt-kernel's own advice for GPTQ: no more than this part of a card for weights, by the card's size from which it holds.
SHARES = ((48, 0.625), (0, 0.5))

LESS = "To need less memory, in this order: "
SHORTER = "shorter sequences (--max-sequence-length 1024); --force-cpu, where it is the GPU that is too small."
REMEDIES_TO_CALIBRATE = f"{LESS}fewer samples (--num-calibration-samples 64); {SHORTER}"
REMEDIES = (
    f"{LESS}--quant-method RTN (gpu) or --scale mse (cpu), which need no calibration; fewer samples "
    f"(--num-calibration-samples 256); {SHORTER}"
)
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class WalkShape:
    """What a footprint follows from.

    width       I
    quantizes   whether there are Hessians and codes; else only statistics are gathered
    calibrate   which tokens an expert sees, as consumers.Evidence says
    group       experts that are in memory together
    head        values of a head, the widest of q, k and v
    rest        BF16 bytes of the largest decoder layer without its routed experts
    dense       whether layers without experts lie before one with, and are run with it
    outputs     whether it is also asked what predictions feel of the experts' outputs
    vocabulary  tokens that are predicted
    top_k       experts that a token is routed to
    statistics  whether GPTQ gathers statistics, too
    moments     whether sums of x xT are kept: Hessians that nothing is quantized with
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
    group: int = 1
    head: int = 128
    rest: int = 0
    dense: bool = False
    top_k: int = 8
    on_gpu: bool = False
    statistics: bool = False
    moments: bool = False
    outputs: bool = False
    vocabulary: int = 0

    @property
    def has_hessians(self) -> bool:
        return self.quantizes or self.moments


@dataclass(frozen=True)
class Footprint:
    """Sizes in bytes.

    host      main memory at most, libraries included
    gpu       memory of the card at most; 0 without one
    disk      files of activations that exist together, beside the output: what enters a layer and its experts, what
              leaves them, and what leaves layers without experts before it
    portions  files by which the walk and an executor's workers hand each other what they need, of a layer
    layer     the routed experts of one layer in BF16
    weights   what is computed with at a time: the layer without its experts, and one group of experts, in BF16
    hessians  of one group: gate and up's, shared or one per expert, and down's, one per expert
    squares   sums of squares of a layer and of one group, where statistics are gathered
    working   what quantizing a linear takes beside itself and its Hessian
    scores    of eager attention, one sequence
    boundary  the activations that enter a layer, a file
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
    boundary: int


def working_bytes(rows: int, width: int) -> int:
    """Bytes that quantizing a linear [rows, width] takes at most beside itself and its Hessian: five float32 copies of
    the linear, its BF16 and codes; four float32 copies of the Hessian; the matrices of a block of columns.
    """
    return rows * width * (5 * FLOAT + 2 * HALF) + 4 * FLOAT * width * width + MATRICES * rows * BLOCK * FLOAT


def footprint(shape: WalkShape) -> Footprint:
    """The arithmetic; of a layer's two steps, attention and a group of experts, the larger is the peak."""
    h, i, group = shape.hidden, shape.width, min(shape.group, shape.experts)
    expert = 3 * h * i * HALF
    tokens = shape.samples * shape.length
    shared = h * h * FLOAT if shape.has_hessians else 0
    hessians = (group * shared if shape.calibrate == "routed" else shared) + group * i * i * FLOAT * shape.has_hessians
    squares = (shape.experts + group) * (h + i) * DOUBLE if shape.statistics or not shape.quantizes else 0
    tall = 2 * i * shape.quantizes  # gate and up of an expert are quantized as one matrix
    working = max(working_bytes(tall, h), working_bytes(h, i)) if shape.quantizes else 0
    working += 2 * max(h, i) ** 2 * FLOAT if shape.moments else 0  # halved, and as it is stored
    # What predictions feel: of the layer's outputs, with its factor, and of each expert's gate and up; gradients.
    information = shape.outputs * (2 * h * h + group * (2 * i) ** 2) * FLOAT
    working += shape.outputs * 4 * FLOAT * max(h, 2 * i) ** 2
    logits = AT_ONCE * shape.vocabulary * 4 * FLOAT
    gradients = shape.outputs * (h * (shape.vocabulary * HALF + GRADIENTS * (HALF + 2 * FLOAT)) + logits)
    scores = shape.heads * shape.length**2 * SCORE
    sequence = ROWS * shape.length * (h + shape.heads * shape.head) * HALF
    # One sequence that goes into a Hessian: its product, its float32 copies; into a sum of squares: its float32 and
    # float64 copies.
    added = shared + (2 * FLOAT if shape.has_hessians else FLOAT + DOUBLE) * shape.length * h
    attention = shape.rest + shared + max(scores + sequence + added, gradients)
    codes = 2 * 3 * h * i * shape.bits // 8 * shape.quantizes
    # Experts as the file has them (mapped), in BF16, and rounded; gate and up once more as one matrix; codes of
    # an expert by both ways.
    copies = (1 if shape.on_gpu else 2) + shape.quantizes
    held = copies * group * expert + tall * h * HALF + codes
    quantizing = held + hessians + information + squares + max(working, sequence + added)
    peak = max(attention, quantizing)
    boundary = tokens * h * HALF
    routing = tokens * shape.top_k * (ID + FLOAT)  # of all tokens, in main memory
    # Handed out: the router's choices, the shared Hessian, what predictions feel; left of each expert: its values and
    # codes, or its sums.
    given = routing + shared * (shape.calibrate != "routed") + shape.outputs * h * h * FLOAT
    left = 3 * h * i * (8 * HALF + shape.bits + 1) // 8 * shape.quantizes  # at most a bit of scales for a weight
    left += (h + i) * DOUBLE * (squares > 0) + i * i * FLOAT * shape.moments
    moved = shape.rest + group * expert + sequence  # what passes through main memory on its way to a card
    return Footprint(
        host=LIBRARIES + routing + (moved if shape.on_gpu else peak),
        gpu=CUDA + peak if shape.on_gpu else 0,
        disk=(5 if shape.dense else 4) * boundary,
        portions=given + shape.experts * left,
        layer=shape.experts * expert,
        weights=shape.rest + group * expert,
        hessians=hessians,
        squares=squares,
        working=working,
        scores=scores,
        boundary=boundary,
    )


def shape_of(model: MoeModel, options: Samples) -> WalkShape:
    """Of a checkpoint's widest layer, from headers and config, and of these samples; the rest is the walk's."""
    config = model.source.config
    experts, hidden, width = map(max, zip(*(model.shape(layer) for layer in model.layers), strict=True))
    heads = _number(config, 1, "num_attention_heads", "n_head", "n_heads")
    widths = [_number(config, 0, key) for key in ("head_dim", "v_head_dim")]
    widths.append(_number(config, 0, "qk_nope_head_dim") + _number(config, 0, "qk_rope_head_dim"))
    return WalkShape(
        hidden,
        width,
        experts,
        heads,
        samples=options.num_calibration_samples,
        length=options.max_sequence_length,
        head=max(widths) or hidden // heads,
        rest=_rest(model),
        dense=model.layers != tuple(range(len(model.layers))),
        top_k=_number(config, 8, "num_experts_per_tok", "moe_topk", "top_k"),
        vocabulary=_number(config, 0, "vocab_size"),
    )


def experts_at_a_time(shape: WalkShape, budget: int) -> int:
    """How many experts fit into `budget` bytes, as stored and in BF16, with what is gathered of each; at least one."""
    h, i = shape.hidden, shape.width
    nbytes = 2 * 3 * h * i * HALF + (h + i) * DOUBLE * (not shape.quantizes) + i * i * FLOAT * shape.has_hessians
    nbytes += h * h * FLOAT * (shape.has_hessians and shape.calibrate == "routed")
    nbytes += (2 * i) ** 2 * FLOAT * shape.outputs
    return max(1, min(shape.experts, budget // nbytes))


def _number(config: Mapping[str, Any], default: int, *keys: str) -> int:
    named = cfg.number(dict(config), keys)
    return named[1] if named else default


def _rest(model: MoeModel) -> int:
    """BF16 bytes of the largest decoder layer without routed experts."""
    routed = model.expert_tensor_names() | model.mtp_tensors
    layers: dict[str, int] = {}
    for name, info in model.source.tensors.items():
        if name not in routed and (match := LAYER.search(name)):
            layers[match[1]] = layers.get(match[1], 0) + HALF * prod(info.shape)
    return max(layers.values(), default=0)


def max_gpu_memory(card_gib: int, needed: Footprint) -> str | None:
    """The --max-gpu-memory for a card of card_gib GiB; None if the card is too small. The rest of the card is for
    activations and Hessians; never more than the part that kt-kernel's README advises.
    """
    left = card_gib * GIB - (needed.gpu - needed.weights)
    share = next(part for least, part in SHARES if card_gib >= least)
    limit = min(int(card_gib * share), left // GIB)
    return f"{limit}GiB" if limit * GIB >= needed.weights else None


def advice(shape: WalkShape, cards: Sequence[int] = CARDS) -> list[str]:
    """Sentences for the plan: the memory and disk that it takes, and a --max-gpu-memory for each card."""
    needed = footprint(shape)
    shared = "for each expert" if shape.calibrate == "routed" else "shared by all its experts"
    what, name = ("GPTQ", "Hessian") if shape.quantizes else ("calibration", "sum of x xT")
    of_gate, of_down = size(shape.hidden**2 * FLOAT), size(shape.width**2 * FLOAT)
    evidence = f"the {name} of gate and up is {of_gate}, {shared}, that of down {of_down} for each expert"
    if not shape.has_hessians:
        evidence = f"the sums of squares of their inputs are {size(needed.squares)}"
    group = min(shape.group, shape.experts)
    count = "one by one" if group == 1 else f"{group} at a time"
    sentences = [
        f"{what} keeps {size(needed.disk)} of activations on disk while it runs: "
        f"{shape.samples} samples of {shape.length} tokens are {size(needed.boundary)} at each layer's entrance",
        f"one layer's experts are {size(needed.layer)} in BF16 and are taken {count}; {evidence}",
    ]
    on_gpu = needed if shape.on_gpu else footprint(replace(shape, on_gpu=True))
    limits = {card: max_gpu_memory(card, on_gpu) for card in cards}
    fitting = [f"{limit} on a card of {card} GiB" for card, limit in limits.items() if limit]
    small = [f"{card} GiB" for card, limit in limits.items() if not limit]
    takes = "it takes" if shape.on_gpu else "on a GPU it would take"
    sentences.append(f"{takes} {size(on_gpu.gpu)} of the card's memory")
    if fitting:
        rest = "activations and Hessians" if shape.quantizes else "activations"
        sentences.append(f"--max-gpu-memory: {', '.join(fitting)}; the rest is for {rest}")
    if small:
        remedies = REMEDIES if shape.quantizes else REMEDIES_TO_CALIBRATE
        sentences.append(f"too small are cards of {', '.join(small)}. {remedies}")
    return sentences
