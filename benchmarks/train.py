#!/usr/bin/env python3
"""Forward and backward of routed experts with LoRA, ours and others in turns: kt-kernel's mode="sft", or transformers.

python benchmarks/train.py --peer PYTHON            a layer of Qwen3-30B-A3B; 8 GB of memory; minutes for each method
python benchmarks/train.py --experts 32 --tokens 64 a smaller layer
python benchmarks/train.py --transformers --avx2    as on a CPU with nothing beyond AVX2

PYTHON has kt-kernel 0.7.2; its CPU needs AVX512-BF16 or AMX. Both sides get random weights of the same size, the same
number of threads, BF16 factors of LoRA, and new routing for each call. kt-kernel's backward shares one scratch buffer
between layers (share_backward_bb), as its integration into transformers does; this needs the least memory. On its side,
INT8 runs without LoRA (AMXINT8_SFT_SkipLoRA), which is faster: it packs no tensors with LoRA. `--transposed`: both
multiply by transposes that were quantized separately. The side "transformers" is Qwen3MoeExperts ("eager") with PEFT's
target_parameters, all in BF16.

Turns are A B A B. The fastest call of a turn and the median of the turns count. `cpu` is CPU time: of the process for
ours, and of the workers for kt-kernel, without the caller, which spins. On a busy machine it says more than wall time.
Memory is the largest resident size of a turn, less the size before the weights were made.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import Worker, serve, worker_seconds

TOPK, RANK, SEED = 8, 16, 0
AVX2 = {"KTCONVERT_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
METHODS = {"bf16": "AMXBF16_SFT", "int8": "AMXINT8_SFT", "int4": "AMXINT4_SFT"}


def cpu_seconds() -> float:
    """Return the CPU seconds of kt-kernel's workers, or of the process if there are none."""
    return worker_seconds() or time.process_time()


def resident_bytes(field: str) -> int:
    """Return the resident bytes: now (VmRSS), or the maximum since `reset_peak` (VmHWM)."""
    return 1024 * int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def reset_peak() -> None:
    """Return free memory to the system, and restart the count of the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class Side:
    """A layer of one library, and its calls."""

    def __init__(self, threads: int, experts: int, hidden: int, width: int, transposed: int) -> None:
        self.threads, self.shape, self.transposed = threads, (experts, hidden, width), bool(transposed)
        self.wrapper: Any = None
        self.before = 0

    def open(self, method: str) -> str:
        """Make the layer."""
        raise NotImplementedError

    def make(self, factory: Callable[..., Any], method: str, share: bool) -> None:
        """Make the wrapper of either library; their interface is the same."""
        import torch

        self.before = resident_bytes("VmRSS")
        e, h, i = self.shape
        layer_options = {
            "layer_idx": 0,
            "num_experts": e,
            "num_experts_per_tok": TOPK,
            "hidden_size": h,
            "method": method,
        }
        sizes = {"moe_intermediate_size": i, "cpuinfer_threads": self.threads, "threadpool_count": 1, "weight_path": ""}
        lora = {"lora_rank": RANK, "lora_alpha": 2.0 * RANK, "mode": "sft", "gpu_experts_mask": None}
        self.wrapper = factory(**layer_options, **sizes, **lora, chunked_prefill_size=4096)
        self.wrapper.share_backward_bb = share
        rng = np.random.default_rng(SEED)
        bits = rng.integers(0x3C00, 0x3D00, (e, i, h), np.uint16) | rng.integers(0, 2, (e, i, h), np.uint16) << 15
        gate = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        self.wrapper.load_weights_from_tensors(gate, gate.clone(), gate.reshape(e, h, i).clone(), torch.arange(e))
        if "SkipLoRA" not in method:
            shapes = ((e, RANK, h), (e, i, RANK), (e, RANK, h), (e, i, RANK), (e, RANK, i), (e, h, RANK))
            factors = [torch.randn(shape).mul_(0.02).bfloat16() for shape in shapes]
            self.factors = [*factors, *map(torch.zeros_like, factors)]
            self.wrapper.init_lora_weights(*self.factors)

    def step(self, hidden: Any, ids: Any, weights: Any, gradient: Any, between: Callable[[], None]) -> None:
        """Run a forward, `between`, and its backward."""
        self.wrapper.forward(hidden, ids, weights, save_for_backward=True)
        between()
        self.wrapper.backward(gradient)

    def turn(self, tokens: int, count: int) -> dict[str, list[float]]:
        """Return wall and CPU seconds of forward and backward, by call, and memory."""
        import torch

        e, h, _ = self.shape
        reset_peak()
        generator = torch.Generator().manual_seed(SEED)
        times: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "forward_cpu", "backward_cpu")}
        for _ in range(count):
            hidden, gradient = (torch.randn(tokens, h, generator=generator).bfloat16() for _ in range(2))
            ids = torch.rand(tokens, e, generator=generator).topk(TOPK).indices
            weights = torch.rand(tokens, TOPK, generator=generator)
            at = [(time.perf_counter(), cpu_seconds())]
            self.step(hidden, ids, weights, gradient, lambda at=at: at.append((time.perf_counter(), cpu_seconds())))
            at.append((time.perf_counter(), cpu_seconds()))
            for name, before, after in zip(("forward", "backward"), at, at[1:], strict=False):
                times[name].append(after[0] - before[0])
                times[f"{name}_cpu"].append(after[1] - before[1])
        return times | {"memory": [resident_bytes("VmHWM") - self.before]}


class Ours(Side):
    """The layer of ktconvert."""

    def open(self, method: str) -> str:
        from ktconvert.native_quant import kernels
        from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper

        self.make(KTMoEWrapper, METHODS[method], share=not self.transposed)
        return f"ktconvert with {kernels.isa()}"


class Peer(Side):
    """The layer of kt-kernel."""

    def open(self, method: str) -> str:
        import cpu_only_torch  # noqa: F401  # before kt_kernel
        import kt_kernel

        suffix = "_SkipLoRA" * (method == "int8")
        self.make(kt_kernel.KTMoEWrapper, METHODS[method] + suffix, share=not self.transposed)
        return f"kt-kernel {kt_kernel.__version__} with its {kt_kernel.__cpu_variant__} variant"


class Transformers(Side):
    """The layer of transformers and PEFT."""

    def open(self, method: str) -> str:
        import peft
        import torch
        import transformers
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        self.before = resident_bytes("VmRSS")
        torch.set_num_threads(self.threads)
        e, h, i = self.shape
        sizes = {"hidden_size": h, "moe_intermediate_size": i, "num_experts": e, "num_experts_per_tok": TOPK}
        config = transformers.Qwen3MoeConfig(**sizes)
        config._experts_implementation = "eager"
        torch.set_default_dtype(torch.bfloat16)
        model = torch.nn.ModuleDict({"experts": Qwen3MoeExperts(config)})
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_parameters=targets)
        self.wrapper = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).base_model.model["experts"]
        torch.set_default_dtype(torch.float32)
        return f"transformers {transformers.__version__} with PEFT {peft.__version__}, BF16"

    def step(self, hidden: Any, ids: Any, weights: Any, gradient: Any, between: Callable[[], None]) -> None:
        weights = weights.bfloat16().requires_grad_()
        out = self.wrapper(hidden.requires_grad_(), ids, weights)
        between()
        out.backward(gradient)


SIDES = {"ours": Ours, "peer": Peer, "transformers": Transformers}


def measure(options: argparse.Namespace, method: str, folder: Path) -> None:
    """Measure both sides in turns; print a line for each number of tokens."""
    numbers = options.threads, options.experts, options.hidden, options.width, int(options.transposed)
    sizes, env = [str(n) for n in numbers], AVX2 if options.avx2 else {}
    pythons = {"ours": sys.executable} | ({"peer": options.peer} if options.peer else {})
    pythons |= {"transformers": sys.executable} if options.transformers else {}
    workers = {
        side: Worker(side, [python, __file__, "--worker", side, *sizes], folder / f"{side}.log", env)
        for side, python in pythons.items()
    }
    try:
        print(method, "|", ", ".join(worker.ask("open", method=method) for worker in workers.values()), flush=True)
        for tokens in options.tokens:
            results: dict[str, list[dict[str, float]]] = {side: [] for side in workers}
            for _ in range(options.turns):
                for side, worker in workers.items():
                    times = worker.ask("turn", tokens=tokens, count=options.count)
                    results[side].append({name: min(each) for name, each in times.items()})
            report(method, tokens, results)
    finally:
        for worker in workers.values():
            worker.close()


def report(method: str, tokens: int, results: dict[str, list[dict[str, float]]]) -> None:
    """Print medians in milliseconds, and ratios of the other sides to ours."""
    medians = {
        side: {name: 1e3 * statistics.median(turn[name] for turn in turns) for name in turns[0]}
        for side, turns in results.items()
    }
    for side, times in medians.items():
        wall, cpu = (f"{times['forward' + end]:7.1f} + {times['backward' + end]:7.1f}" for end in ("", "_cpu"))
        memory = times["memory"] / 1e3 / 2**20
        print(f"{method} {tokens:5} tokens  {side}  wall {wall} ms  cpu {cpu} ms  memory {memory:.0f} MiB", flush=True)
    for side in list(medians)[1:]:
        ratios = []
        for end in ("", "_cpu"):
            ours, theirs = (medians[one]["forward" + end] + medians[one]["backward" + end] for one in ("ours", side))
            each = [
                (theirs["forward" + end] + theirs["backward" + end]) / (ours["forward" + end] + ours["backward" + end])
                for ours, theirs in zip(results["ours"], results[side], strict=True)
            ]
            ratios.append(f"{theirs / ours:.2f} ({', '.join(f'{one:.2f}' for one in each)})")
        memory = medians[side]["memory"] / medians["ours"]["memory"]
        ratio = f"wall {ratios[0]}, cpu {ratios[1]}, memory {memory:.1f}"
        print(f"{method} {tokens:5} tokens  {side} / ours: {ratio}", flush=True)


def main() -> None:
    """Measure and report, or run as a worker."""
    if sys.argv[1:2] == ["--worker"]:
        side = SIDES[sys.argv[2]](*map(int, sys.argv[3:]))
        serve({"open": side.open, "turn": side.turn})
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has kt-kernel; default: only ours")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers and PEFT")
    parser.add_argument(
        "--transposed", action="store_true", help="multiply by transposes that were quantized separately"
    )
    parser.add_argument("--avx2", action="store_true", help="use no instructions beyond AVX2, except on the peer")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 512, 2048])
    for name, default in (("threads", 2), ("experts", 128), ("hidden", 2048), ("width", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--count", type=int, default=2, help="calls per turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktconvert-train-") as folder:
        for method in options.methods:
            measure(options, method, Path(folder))


if __name__ == "__main__":
    main()
