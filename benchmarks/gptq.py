"""Seconds that GPTQ and what follows it take for one expert, by shape: a layer's Hessian of gate and up is factorized
once for all its experts, and is not counted.

    python benchmarks/gptq.py [--method AMXINT4] [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pages
import torch

from ktconvert.layouts.outputs import FORMATS
from ktconvert.quantizers import descent, gptq

SHAPES = {"Qwen3-30B-A3B": (2048, 768), "Qwen3-235B-A22B": (4096, 1536), "DeepSeek-V3.1": (7168, 2048)}  # H, I
DAMPENING = 0.1


def hessian(width: int) -> gptq.Hessian:
    """Of correlated inputs, a little more of them than columns."""
    found = gptq.Hessian.empty(width)
    inputs = torch.randn(width + 512, width) @ (torch.randn(width, 64) @ torch.randn(64, width) / 64 + torch.eye(width))
    found.add(inputs.bfloat16())
    return found


def timed(what: Callable[[], object], rounds: int) -> float:
    """The median of so many calls, in seconds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def costs(hidden: int, width: int, method: str, rounds: int) -> tuple[float, float]:
    """Seconds of an expert: of GPTQ, and of what follows."""
    grid = FORMATS[method].encoding.grid
    before = after = 0.0
    for rows, columns, shared in ((2 * width, hidden, True), (hidden, width, False)):
        inputs, weight = hessian(columns), (0.02 * torch.randn(rows, columns)).bfloat16()
        groups = weight.float().abs().reshape(rows, -1, grid.group or columns).amax(2) / grid.high
        scale = torch.exp2(torch.ceil(torch.log2(groups))) if grid.scales == "U8" else groups.bfloat16().float()
        factor = gptq.factorize(inputs, DAMPENING)
        values = gptq.compensate(weight, factor, scale, grid.code_range).values
        chosen = descent.Chosen(gptq.codes(values, scale, grid.code_range), scale)
        metric = descent.metric_of(inputs, factor, DAMPENING)
        before += timed(lambda: gptq.compensate(weight, factor, scale, grid.code_range), rounds)  # noqa: B023
        after += timed(lambda: descent.refine(weight, metric, chosen, grid), rounds)  # noqa: B023
        if not shared:
            before += timed(lambda: gptq.factorize(inputs, DAMPENING), rounds)  # noqa: B023
            after += timed(lambda: descent.metric_of(inputs, factor, DAMPENING), rounds)  # noqa: B023
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="AMXINT4", choices=["AMXINT4", "AMXINT8", "MXFP4", "RAWINT4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for name, (hidden, width) in SHAPES.items():
            before, after = costs(hidden, width, wanted.method, wanted.rounds)
            rows.append(
                (name, f"{hidden} x {width}", f"{before:.2f}", f"{after:.2f}", f"{(before + after) / before:.2f}")
            )
            print(*rows[-1], flush=True)
    print(pages.table(("", "H x I", "GPTQ, s", "descent, s", "both / GPTQ"), rows))


if __name__ == "__main__":
    main()
