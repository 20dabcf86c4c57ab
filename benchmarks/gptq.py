"""CPU seconds that the steps of GPTQ take for one expert, by shape. What a layer has once for all its experts, the
factors of the Hessian of gate and up and of what predictions feel of its outputs, is not counted; nor are samples.

    python benchmarks/gptq.py [--method AMXINT4] [--threads 1] [--rounds 3]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import pages
import torch

from ktconvert.layouts.outputs import FORMATS
from ktconvert.quantizers import descent, gptq, predictions

SHAPES = {"Qwen3-30B-A3B": (2048, 768), "Qwen3-235B-A22B": (4096, 1536), "DeepSeek-V3.1": (7168, 2048)}  # H, I
DAMPENING = 0.1


def hessian(width: int) -> gptq.Hessian:
    """Of correlated inputs, a little more of them than columns."""
    found = gptq.Hessian.empty(width)
    inputs = torch.randn(width + 512, width) @ (torch.randn(width, 64) @ torch.randn(64, width) / 64 + torch.eye(width))
    found.add(inputs.bfloat16())
    return found


def timed(what: Callable[[], object], rounds: int) -> float:
    """The least CPU time of so many calls, in seconds of all threads."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        what()
        seconds.append(time.process_time() - start)
    return min(seconds)


def costs(hidden: int, width: int, method: str, rounds: int) -> dict[str, float]:
    """Seconds of an expert, by --gptq-steps."""
    grid = FORMATS[method].encoding.grid
    seconds = dict.fromkeys(("plain", "descent", "full"), 0.0)
    outputs = hessian(hidden).sum
    down, slopes = torch.randn(hidden, width).bfloat16(), hessian(2 * width).sum
    for rows, columns, shared in ((2 * width, hidden, True), (hidden, width, False)):
        inputs, weight = hessian(columns), (0.02 * torch.randn(rows, columns)).bfloat16()
        groups = weight.float().abs().reshape(rows, -1, grid.group or columns).amax(2) / grid.high
        scale = torch.exp2(torch.ceil(torch.log2(groups))) if grid.scales == "U8" else groups.bfloat16().float()
        factor = gptq.factorize(inputs, DAMPENING)
        metric = descent.make_metric(inputs, factor, DAMPENING)
        of_rows = predictions.factorize(predictions.middle_information(outputs, down, slopes) if shared else outputs)

        def plain(weight: Any, numbers: Any = slice(None), scale: Any = scale, factor: Any = factor) -> Any:
            values = gptq.compensate(weight, factor, scale[numbers], grid.code_range).values
            return descent.CodesAndScales(gptq.codes(values, scale[numbers], grid.code_range), scale[numbers])

        def descending(weight: Any, numbers: Any = slice(None), scale: Any = scale, metric: Any = metric) -> Any:
            return descent.choose(weight, metric, scale[numbers], grid)

        def full(weight: Any, of_rows: Any = of_rows, descending: Any = descending) -> Any:
            return predictions.round_in_turn(weight, of_rows, descending)

        for name, step in (("plain", plain), ("descent", descending), ("full", full)):
            seconds[name] += timed(functools.partial(step, weight), rounds)
        if shared:  # each expert has its own
            of_middle = functools.partial(predictions.middle_information, outputs, down, slopes)
            seconds["full"] += timed(lambda of_middle=of_middle: predictions.factorize(of_middle()), rounds)
        else:
            own = timed(functools.partial(gptq.factorize, inputs, DAMPENING), rounds)
            seconds = {name: total + own for name, total in seconds.items()}
            own = timed(functools.partial(descent.make_metric, inputs, factor, DAMPENING), rounds)
            seconds |= {name: seconds[name] + own for name in ("descent", "full")}
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="AMXINT4", choices=["AMXINT4", "AMXINT8", "MXFP4", "RAWINT4"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for name in wanted.shapes:
            hidden, width = SHAPES[name]
            seconds = costs(hidden, width, wanted.method, wanted.rounds)
            ratios = (f"{seconds[steps] / seconds['plain']:.1f}" for steps in ("descent", "full"))
            rows.append((name, f"{hidden} x {width}", *(f"{s:.2f}" for s in seconds.values()), *ratios))
            print(*rows[-1], flush=True)
    print(pages.table(("", "H x I", "plain, s", "descent", "full", "descent / plain", "full / plain"), rows))


if __name__ == "__main__":
    main()
