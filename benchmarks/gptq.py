"""CPU seconds of the steps of GPTQ for one expert, by shape.

Not counted: samples, and work that a layer does once for all experts, which are the factors of the Hessian of gate and
up and of the Fisher information of its outputs.

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


def random_hessian(width: int) -> gptq.Hessian:
    """Return the Hessian of correlated inputs; there are a few more inputs than columns."""
    hessian = gptq.Hessian.empty(width)
    inputs = torch.randn(width + 512, width) @ (torch.randn(width, 64) @ torch.randn(64, width) / 64 + torch.eye(width))
    hessian.add(inputs.bfloat16())
    return hessian


def time_call(function: Callable[[], object], rounds: int) -> float:
    """Return the smallest CPU seconds, over all threads, of a number of calls."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure_expert(hidden: int, width: int, method: str, rounds: int) -> dict[str, float]:
    """Return the seconds of one expert, by --gptq-steps."""
    grid = FORMATS[method].encoding.grid
    seconds = dict.fromkeys(("plain", "descent", "full"), 0.0)
    outputs = random_hessian(hidden).sum
    down, slopes = torch.randn(hidden, width).bfloat16(), random_hessian(2 * width).sum
    for rows, columns, shared in ((2 * width, hidden, True), (hidden, width, False)):
        inputs, weight = random_hessian(columns), (0.02 * torch.randn(rows, columns)).bfloat16()
        groups = weight.float().abs().reshape(rows, -1, grid.group or columns).amax(2) / grid.high
        scale = torch.exp2(torch.ceil(torch.log2(groups))) if grid.scale_dtype == "U8" else groups.bfloat16().float()
        factor = gptq.factorize_hessian(inputs, DAMPENING)
        metric = descent.make_metric(inputs, factor, DAMPENING)
        row_factor = predictions.factorize_information(
            predictions.gate_up_information(outputs, down, slopes) if shared else outputs
        )

        def plain(weight: Any, numbers: Any = slice(None), scale: Any = scale, factor: Any = factor) -> Any:
            values = gptq.round_columns(weight, factor, scale[numbers], grid.code_range)
            return descent.CodesAndScales(gptq.find_codes(values, scale[numbers], grid.code_range), scale[numbers])

        def descent_step(weight: Any, numbers: Any = slice(None), scale: Any = scale, metric: Any = metric) -> Any:
            return descent.choose_codes(weight, metric, scale[numbers], grid)

        def full(weight: Any, row_factor: Any = row_factor, descent_step: Any = descent_step) -> Any:
            return predictions.round_rows(weight, row_factor, descent_step)

        for name, step in (("plain", plain), ("descent", descent_step), ("full", full)):
            seconds[name] += time_call(functools.partial(step, weight), rounds)
        if shared:  # each expert has a factor of its own
            information = functools.partial(predictions.gate_up_information, outputs, down, slopes)
            seconds["full"] += time_call(
                lambda information=information: predictions.factorize_information(information()), rounds
            )
        else:
            extra = time_call(functools.partial(gptq.factorize_hessian, inputs, DAMPENING), rounds)
            seconds = {name: total + extra for name, total in seconds.items()}
            extra = time_call(functools.partial(descent.make_metric, inputs, factor, DAMPENING), rounds)
            seconds |= {name: seconds[name] + extra for name in ("descent", "full")}
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="AMXINT4", choices=["AMXINT4", "AMXINT8", "MXFP4", "RAWINT4"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for name in options.shapes:
            hidden, width = SHAPES[name]
            seconds = measure_expert(hidden, width, options.method, options.rounds)
            ratios = (f"{seconds[steps] / seconds['plain']:.1f}" for steps in ("descent", "full"))
            rows.append((name, f"{hidden} x {width}", *(f"{s:.2f}" for s in seconds.values()), *ratios))
            print(*rows[-1], flush=True)
    print(pages.table(("", "H x I", "plain, s", "descent", "full", "descent / plain", "full / plain"), rows))


if __name__ == "__main__":
    main()
