"""Checks on a machine with a CUDA GPU: each compares results of the GPU with the CPU or with float64.

python tests/gpu/checks.py                 run all checks, print one table; exit code 1 if one failed
python tests/gpu/checks.py NAME...         run some of them
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from ktconvert.native_quant import KTMoEWrapper, instruction_sets, machine  # noqa: E402
from rig.safetensors import read_file  # noqa: E402

EXAMPLE = ROOT / "examples" / "qwen3-moe-small"
HELD_OUT = ROOT / "examples" / "heldout.txt"
EXPERTS, HIDDEN, TOPK = 8, 256, 2  # sizes of the example
BF16_STEP = 2**-8  # relative distance of neighbouring BF16 values
Check = Callable[[Path], str]
Hot = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add a check to the table; it gets a folder, returns its figures, and raises AssertionError."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def ktconvert(*arguments: object, gpu: bool = True) -> str:
    """Run the command in a new process, with or without the GPU, and return its standard output."""
    env = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", *map(str, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command[3:])}: exit code {result.returncode}: {result.stderr[-600:]}"
    return result.stdout


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected values, in float64."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


def experts_of_example(layer: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return gate, up and down of each expert of a layer in float64."""
    tensors = read_file(EXAMPLE / "model.safetensors")

    def matrix(expert: int, projection: str) -> torch.Tensor:
        bits = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"].bits
        return torch.from_numpy(np.array(bits)).view(torch.bfloat16).double()

    return [(matrix(e, "gate"), matrix(e, "up"), matrix(e, "down")) for e in range(EXPERTS)]


def compute_experts(
    weights: Sequence[tuple[torch.Tensor, ...]], hidden: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return the sum of scale * down(silu(gate x) * up x) over a token's experts, on the device of hidden.

    Ids below 0 mean no expert.
    """
    out = torch.zeros_like(hidden)
    for expert, (gate, up, down) in enumerate(weights):
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            x = hidden[tokens]
            y = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
            out.index_add_(0, tokens, y * scales[tokens, place, None].to(y.dtype))
    return out


@check
def layer_beside_the_gpu(folder: Path) -> str:
    """Follow SGLang: start the CPU's experts on the stream, compute the GPU's experts, and add the sums."""
    ktconvert("cpu", "-i", EXAMPLE, "-o", folder / "int8", "--quant-method", "int8", "--threadpool-count", 1, "-q")
    mask = torch.tensor([True, False, False, True, False, False, True, False])
    order = torch.arange(EXPERTS - 1, -1, -1)  # physical expert p computes with logical expert order[p]
    weights = experts_of_example(0)
    physical = [weights[int(logical)] for logical in order]
    hot = [tuple(m.bfloat16().cuda() for m in each) for each in physical]
    wrapper = KTMoEWrapper(0, EXPERTS, TOPK, HIDDEN, HIDDEN, mask, 4, 1, str(folder / "int8"), 512, method="AMXINT8")
    wrapper.load_weights(order)
    worst, stream = 0.0, torch.cuda.Stream()
    for tokens in (1, 7, 64, 300):
        g = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
        ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOPK].int()
        ids[tokens // 2 :, -1] = -1  # padding
        scales = torch.rand(tokens, TOPK, generator=g)
        x, i, s = hidden.cuda(), ids.cuda(), scales.cuda()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wrapper.submit_forward(x, i, s, stream.cuda_stream)
            on_gpu = mask.cuda()[i.long().clamp(min=0)] & (i >= 0)
            from_gpu = compute_experts(hot, x, torch.where(on_gpu, i, -1), s)
            total = from_gpu.float() + wrapper.sync_forward(x, stream.cuda_stream).float()
        stream.synchronize()
        worst = max(worst, relative_error(total, compute_experts(physical, hidden.double(), ids, scales)))
    KTMoEWrapper.clear_buffer_cache()
    assert worst < 0.02, worst  # INT8's error of a layer is 0.011
    return f"relative error to float64 {worst:.4f}, INT8 experts on the CPU, BF16 on the GPU"


@check
def hot_experts_in_a_model(folder: Path) -> str:
    """Compare logits with half of the experts on the GPU with those of the same placement on the CPU alone."""
    ktconvert("cpu", "-i", EXAMPLE, "-o", folder / "int8", "--quant-method", "int8", "--threadpool-count", 1, "-q")
    ktconvert("gpu", "-i", EXAMPLE, "-o", folder / "packed", "--quant-method", "RTN", "--quant-type", "W8A16", "-q")
    logits, devices = {}, {}
    for device in ("cuda", "cpu"):
        env = os.environ | ({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})
        out = folder / f"{device}.pt"
        done = subprocess.run(
            [sys.executable, __file__, "--logits", str(folder / "packed"), str(folder / "int8"), str(out)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-600:]
        result = torch.load(out, weights_only=True)
        logits[device], devices[device] = result["logits"], result["device"]
    assert devices == {"cuda": "cuda:0", "cpu": "cpu"}, devices
    error = relative_error(logits["cuda"], logits["cpu"])
    agreement = float((logits["cuda"].argmax(-1) == logits["cpu"].argmax(-1)).float().mean())
    assert error < 0.03 and agreement > 0.95, (error, agreement)
    return f"logits differ by {error:.4f} (relative), {agreement:.1%} of the most likely tokens agree"


def write_logits(packed: str, converted: str, out: str) -> None:
    """Write the logits of a model with half of its experts hot, on the GPU if there is one."""
    import transformers

    from ktconvert.pipeline.models import loading

    choice = loading.ModelChoice(packed, Path(converted), num_gpu_experts=EXPERTS // 2, threads=4)
    model, _ = loading.load_model_and_tokenizer(choice)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE)
    ids = tokenizer(HELD_OUT.read_text()[:4000], return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        logits = model(ids.to(model.device)).logits
    torch.save({"logits": logits.float().cpu(), "device": str(model.device)}, out)


@check
def gptq_on_the_gpu(folder: Path) -> str:
    """Compare the codes of GPTQ by GPU and CPU: a different order of sums moves few of them by one."""
    codes, seconds = {}, {}
    options = ["--dataset", HELD_OUT, "--num-calibration-samples", 16, "--sequence-length", 256, "-q"]
    for device, device_options in (("cuda", []), ("cpu", ["--force-cpu"])):
        start = time.monotonic()
        ktconvert("gpu", "-i", EXAMPLE, "-o", folder / device, "--quant-type", "W4A16", *options, *device_options)
        seconds[device] = time.monotonic() - start
        shards = [read_file(shard) for shard in (folder / device).glob("*.safetensors")]
        words = {n: t.bits for shard in shards for n, t in shard.items() if n.endswith("weight_packed")}
        nibbles = [np.stack([w.view(np.uint32) >> 4 * i & 15 for i in range(8)]) for _, w in sorted(words.items())]
        codes[device] = np.concatenate([n.ravel() for n in nibbles]).astype(int)
        ktconvert("verify", folder / device)
    difference = np.abs(codes["cuda"] - codes["cpu"])
    assert len(difference) and (difference > 0).mean() < 0.05, (difference > 0).mean()
    return (
        f"{(difference > 0).mean():.3%} of {len(difference)} codes differ, {(difference > 1).mean():.4%} by more than one; "
        f"{seconds['cuda']:.0f} s, CPU {seconds['cpu']:.0f} s"
    )


@check
def calibrate_on_the_gpu(folder: Path) -> str:
    """Compare token counts of experts by GPU and CPU."""
    counts = {}
    options = ["--dataset", HELD_OUT, "--num-calibration-samples", 16, "--sequence-length", 256, "-q"]
    for device, device_options in (("cuda", []), ("cpu", ["--force-cpu"])):
        ktconvert("calibrate", EXAMPLE, "-o", folder / device, *options, *device_options)
        (tensor,) = read_file(folder / device / "counts.safetensors").values()
        counts[device] = tensor.bits.astype(int)
    moved = np.abs(counts["cuda"] - counts["cpu"]).sum() / 2 / counts["cpu"].sum()
    assert moved < 0.01, moved
    return f"{moved:.3%} of {counts['cpu'].sum()} choices of the router moved to a different expert"


@check
def train_with_the_trunk_on_the_gpu(folder: Path) -> str:
    """Compare losses of LoRA training by the CPU alone with those of attention on the GPU, INT8 experts on the CPU."""
    ktconvert("cpu", "-i", EXAMPLE, "-o", folder / "int8", "--quant-method", "int8", "--threadpool-count", 1, "-q")
    losses = {}
    options = ["--dataset", HELD_OUT, "--max-steps", 6, "--sequence-length", 128, "--batch-size", 2, "--rank", 4, "-q"]
    for device in ("cuda", "cpu"):
        output = folder / device
        arguments = ["train", EXAMPLE, "--cpu-weights", folder / "int8", "-o", output, "--threads", 4, *options]
        ktconvert(*arguments, gpu=device == "cuda")
        losses[device] = [loss for _, loss in json.loads((output / "ktconvert.json").read_text())["losses"]]
    difference = max(abs(a - b) for a, b in zip(losses["cuda"], losses["cpu"], strict=True))
    assert difference < 0.02 and losses["cuda"][-1] < losses["cuda"][0], losses
    return f"losses {losses['cuda'][0]:.4f} to {losses['cuda'][-1]:.4f} in 6 steps, at most {difference:.4f} from the CPU's"


@check
def buffers_for_prefill(folder: Path) -> str:
    """Require that experts written to pinned memory and copied to the GPU have the checkpoint's bytes."""
    wrapper = KTMoEWrapper(0, EXPERTS, TOPK, HIDDEN, HIDDEN, None, 4, 1, str(EXAMPLE), 512, method="BF16")
    wrapper.load_weights()
    ranks, share = 2, HIDDEN // 2
    for expert, (gate, up, down) in enumerate(experts_of_example(0)):
        w13 = torch.empty(ranks, 2 * share, HIDDEN, dtype=torch.bfloat16, pin_memory=True)
        w2 = torch.empty(ranks, HIDDEN, share, dtype=torch.bfloat16, pin_memory=True)
        pointers = [[rank.data_ptr() for rank in buffer] for buffer in (w13, w2)]
        wrapper.submit_write_weight_scale_to_buffer(ranks, expert, pointers[0], [0] * ranks, pointers[1], [0] * ranks)
        wrapper.sync_write_weight_scale_to_buffer()
        for rank in range(ranks):
            rows = slice(rank * share, (rank + 1) * share)
            assert torch.equal(w13[rank].cuda().double().cpu(), torch.cat([gate[rows], up[rows]]))
            assert torch.equal(w2[rank].cuda().double().cpu(), down[:, rows])
    return f"{EXPERTS} experts for {ranks} ranks, every byte"


def decode(wrapper: KTMoEWrapper, hot: Hot, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return a layer's output for one token: experts of the mask on the GPU in one product, others on the CPU.

    x is [1, H]; ids and scales are [1, k]. hot has gate and up [E', 2 I, H], down [E', H, I], and each expert's index.
    """
    gate_up, down, index_of, on_gpu = hot
    wrapper.submit_forward(x, ids, scales, torch.cuda.current_stream().cuda_stream)
    index = index_of[ids[0]]
    gate, up = (gate_up[index] @ x[0]).chunk(2, -1)
    from_gpu = (down[index] @ (torch.nn.functional.silu(gate) * up)[:, :, None])[:, :, 0]
    from_gpu = ((scales[0] * on_gpu[ids[0]])[:, None] * from_gpu).sum(0, keepdim=True)
    return from_gpu + wrapper.sync_forward(x, torch.cuda.current_stream().cuda_stream)


@check
def decode_rate(folder: Path) -> str:
    """Measure tokens per second of one layer with the shape of Qwen3-30B-A3B in INT8, from a CUDA graph.

    All experts are on the CPU, and then half of them.
    """
    experts, topk, hidden, width, layers = 128, 8, 2048, 768, 48
    g = torch.Generator().manual_seed(0)
    gate, up = ((torch.randn(experts, width, hidden, generator=g) * 0.02).bfloat16() for _ in range(2))
    down = (torch.randn(experts, hidden, width, generator=g) * 0.02).bfloat16()
    x = torch.randn(1, hidden, generator=g).bfloat16().cuda()
    routes = [torch.rand(1, experts, generator=g).argsort(1)[:, :topk].cuda() for _ in range(64)]
    scales = torch.full((1, topk), 1 / topk).cuda()
    threads = machine.physical_cores()
    rates = {}
    for share in (0, 2):
        mask = torch.arange(experts) % 2 < share / 2
        wrapper = KTMoEWrapper(0, experts, topk, hidden, width, mask, threads, 1, "", 512, method="AMXINT8")
        wrapper.load_weights_from_tensors(gate, up, down)
        on_gpu = mask if share else torch.arange(experts) < 1  # indexing needs at least one expert
        index_of = (torch.cumsum(on_gpu.int(), 0) - 1).clamp(min=0)
        hot = (torch.cat([gate, up], 1)[on_gpu].cuda(), down[on_gpu].cuda(), index_of.cuda(), mask.cuda())
        KTMoEWrapper.set_capture_batch_sizes([1])
        ids = routes[0].clone()
        decode(wrapper, hot, x, ids, scales)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(wrapper, hot, x, ids, scales)
        times = []
        for _ in range(11):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for route in routes:
                ids.copy_(route)
                graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / len(routes))
        rates[share] = 1 / (median(times[1:]) * layers)
        del graph
        KTMoEWrapper.set_capture_batch_sizes([])
        KTMoEWrapper.clear_buffer_cache()
    return (
        f"experts of {layers} layers: {rates[0]:.0f} tokens/s on the CPU, {rates[2]:.0f} with half of them on the GPU "
        f"({threads} threads, {instruction_sets.isa()})"
    )


def main() -> int:
    """Run the checks and print the table; return the exit code."""
    names = sys.argv[1:] or list(CHECKS)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    print(f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    rows = []
    for name in names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ktconvert-gpu-") as folder:
            try:
                outcome, figures = "ok", CHECKS[name](Path(folder))
            except Exception as error:  # a failed check must not hide the others
                outcome, figures = "FAILED", f"{type(error).__name__}: {error}"
        rows.append((name, outcome, f"{time.monotonic() - start:.0f} s", figures))
        print(*rows[-1], sep=" | ", flush=True)
    print("\n| check | result | time | figures |\n|---|---|---|---|")
    print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    return int(any(row[1] != "ok" for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--logits"]:
        write_logits(*sys.argv[2:])
    else:
        sys.exit(main())
