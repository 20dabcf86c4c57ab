"""A smoke test: random tokens through every expert of one layer, compared with decoded weights multiplied in float32.

The runtime rounds activations to 8 bits twice, which causes a measured error of 2 to 7 % (relative L2) with rows of
very different sizes; with BF16 activations the error is below 1 %. A wrong scale, row, slice or expert causes about
100 %. The bounds are between. Both sides read the same files, so the test cannot notice exchanged weights; hashes and a
comparison with the source can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.native_quant.arrays import F32, F64, I64, U16
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.benchmark import every_expert, random_bf16
from ktconvert.native_quant.runtime.expert_source import Requirements
from ktconvert.native_quant.runtime.experts import KTExperts, open_experts
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.quantizers.reference import bf16_to_f32

Linears = Callable[[int], Iterator[tuple[F32, ...]]]

# Largest relative L2 distance from the reference, for the outputs of an expert, of a panel of rows, or of a token.
BOUND, BOUND_BF16 = 0.25, 0.05
PANEL = 32  # rows that kernels compute together
IMPLAUSIBLE = 1 << 16  # an expert whose largest output is this many times that of the other experts has a damaged scale
INPUTS = 2  # random hidden states; each goes through every expert


@dataclass(frozen=True)
class Smoke:
    """Results of a smoke test.

    error     mode -> the largest relative L2 distance of an expert's outputs
    problems  a sentence for each problem
    """

    layer: int
    experts: int
    tokens: int
    error: dict[str, float]
    bound: float
    problems: tuple[str, ...]


def smoke(path: Path, layer: int, topk: int, pool: Pool) -> Smoke:
    """Compare the outputs in each mode of the method with the reference: single experts, then topk per token."""
    source = open_experts(path)
    function = replace(source.function(layer) or PLAIN, output_norm=False)  # the model has the norm, not the files
    packed = source.load(layer, pool, Requirements())
    topk = min(topk, packed.experts)
    hidden = random_bf16(np.random.default_rng(layer), INPUTS, packed.slicing.hidden)
    linears = functools.partial(source.linears, packed)
    expected = reference(packed, linears, bf16_to_f32(hidden), function, pool.threads)  # [inputs, E, H]
    weighted = (expected / topk).astype(np.float32)  # equal weights
    if function.weights_on == "input":
        weighted = reference(packed, linears, bf16_to_f32(hidden) / np.float32(topk), function, pool.threads)
    problems = list(_find_implausible(layer, expected))
    error: dict[str, float] = {}
    single_ids = np.arange(packed.experts, dtype=np.int64)[:, None]
    grouped_ids = every_expert(topk, packed.experts)
    if METHODS[packed.method].activations == "BF16":
        modes = {"default": False}
        bound = BOUND_BF16
    else:
        modes = {"exact": True, "default": False}
        bound = BOUND
    for mode, exact in modes.items():
        with KTExperts(packed, pool=pool, exact=exact, function=function) as experts:
            single, grouped = (_forward(experts, hidden, ids) for ids in (single_ids, grouped_ids))
        context = f"layer {layer}, {mode} mode"
        bad = np.flatnonzero(~np.isfinite(single).all(axis=(0, 2)))
        problems += [f"{context}: expert {expert} gives a result that is not finite" for expert in bad]
        if bad.size:
            continue
        expected_tokens = weighted[:, grouped_ids].sum(axis=2)
        our_panels, expected_panels = (x.reshape(*x.shape[:2], -1, PANEL) for x in (single, expected))
        distances = {
            "expert {}": distance(single, expected, (0, 2)),
            f"panel {{}} of {PANEL} output rows, over all experts,": distance(our_panels, expected_panels, (0, 1, 3)),
            f"token {{}}, {topk} experts together,": distance(grouped, expected_tokens, (0, 2)),
        }
        for name, errors in distances.items():
            for index in np.flatnonzero(~(errors <= bound)):
                outputs = name.format(index)
                problems.append(f"{context}: {outputs} is {errors[index]:.2g} away from the reference, above {bound}")
        error[mode] = float(distances["expert {}"].max())
    return Smoke(layer, packed.experts, INPUTS * (len(single_ids) + len(grouped_ids)), error, bound, tuple(problems))


def _join_biases(packed: weights.LayerWeights, expert: int) -> dict[str, F32]:
    """Return the biases of an expert, [rows] of all NUMA slices, by projection; zeros if it has none."""
    slicing = replace(packed.slicing, backward=False)
    joined: dict[str, F32] = {}
    for projection in slicing.projections:
        slices = slicing.slices(expert, projection)
        parts = [packed.biases.get(numa_slice, np.zeros(numa_slice.n, np.float32)) for numa_slice in slices]
        joined[projection] = np.sum(parts, axis=0) if projection == "down" else np.concatenate(parts)
    return joined


def reference(
    packed: weights.LayerWeights, linears: Linears, hidden: F32, function: ExpertFunction = PLAIN, threads: int = 1
) -> F32:
    """Return the output of every expert for every row x of hidden [n, H], in float32: [n, E, H]."""
    out = np.zeros((len(hidden), packed.experts, packed.slicing.hidden), np.float32)

    def compute(expert: int) -> None:
        biases = _join_biases(packed, expert)
        start = 0
        with np.errstate(all="ignore"):
            for *inputs, down in linears(expert):
                stop = start + down.shape[1]
                products = (
                    hidden @ matrix.T + biases[projection][start:stop]
                    for matrix, projection in zip(inputs, packed.slicing.projections, strict=False)
                )
                out[:, expert] += function.compute(*products) @ down.T
                start = stop
        out[:, expert] += biases["down"]

    with ThreadPoolExecutor(threads, initializer=unbind_thread) as executor:
        list(executor.map(compute, range(packed.experts)))
    return out


def _forward(experts: KTExperts, hidden: U16, ids: I64) -> F32:
    """Compute every hidden state with every row of ids and equal weights: [n, len(ids), H]."""
    rows = np.ascontiguousarray(np.repeat(hidden, len(ids), axis=0))
    tiled = np.ascontiguousarray(np.tile(ids, (len(hidden), 1)))
    out = experts.forward(rows, tiled, np.full(tiled.shape, 1 / ids.shape[1], np.float32))
    return bf16_to_f32(out).reshape(len(hidden), len(ids), -1)


def distance(outputs: F32, expected: F32, axes: tuple[int, ...]) -> F64:
    """Return ||outputs - expected|| / ||expected|| over these axes, for each index of the others; 0 for 0 / 0."""
    with np.errstate(all="ignore"):
        difference = np.square(outputs.astype(np.float64) - expected).sum(axes)
        size = np.square(expected.astype(np.float64)).sum(axes)
        return np.where(difference == 0, 0.0, np.sqrt(difference / size))


def _find_implausible(layer: int, expected: F32) -> Iterator[str]:
    largest = np.abs(expected).max(axis=(0, 2))
    for expert in np.flatnonzero(~np.isfinite(largest)):
        yield f"layer {layer}: the weights of expert {expert} give a result that is not finite: a scale is damaged"
    typical = float(np.median(largest[np.isfinite(largest)])) if np.isfinite(largest).any() else 0.0
    for expert in np.flatnonzero(np.isfinite(largest) & (largest > IMPLAUSIBLE * typical)) if typical else ():
        factor = f"{float(largest[expert]) / typical:.1g} times the other experts'"
        yield f"layer {layer}: the outputs of expert {expert} are {factor}: a scale is damaged"
