"""`native_peer.py JOB.json`: kt-kernel's outputs. The job lists runs (weights, method, layer, swiglu_limit, swiglu_alpha,
sizes, a file with inputs) and the safetensors file for the results. In place of inputs a run may have `ranks`: what is
written to GPU buffers for each of these counts of ranks; or `tensors`: kt-kernel packs and writes them, `backward` for
training; or computes with them a forward and a backward with LoRA (`train`: a file). `parts`: NUMA slices, of the whole
process.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.layers import prepare_kt_kernel, wrapper


def buffers(moe, run, ranks):
    """[experts, 4, ranks, bytes] of the buffers, each as large as the largest can be and filled with 0xA5 before."""
    size = 2 * run["width"] * run["hidden"] * 2 // ranks
    outs = torch.full((run["experts"], 4, ranks, size), 0xA5, dtype=torch.uint8)
    for expert, of_expert in enumerate(outs):
        pointers = [[rank.data_ptr() for rank in of_kind] for of_kind in of_expert]
        moe.submit_write_weight_scale_to_buffer(ranks, expert, *pointers)
    moe.sync_write_weight_scale_to_buffer()
    return outs


def write_backward(run, linears, experts):
    from kt_kernel.sft.amx import AMXSFTMoEWrapper

    sizes = {"num_experts": run["experts"], "num_experts_per_tok": run["topk"], "hidden_size": run["hidden"]}
    sizes |= {"moe_intermediate_size": run["width"], "num_gpu_experts": 0, "threadpool_count": run["parts"]}
    how = {"cpuinfer_threads": 2, "weight_path": "", "chunked_prefill_size": 64, "method": run["method"]}
    moe = AMXSFTMoEWrapper(layer_idx=0, **sizes, **how)
    moe.load_weights_from_tensors(*linears, experts)
    moe.save_backward_weights_from_tensors(*linears, experts, run["path"])


def train(KTMoEWrapper, run, linears, experts):
    """By name: the output, the gradients of its inputs, and those of the six tensors of LoRA."""
    given, factors = load_file(run["train"]), [f"{name}_{which}" for name in ("gate", "up", "down") for which in "ab"]
    sizes = (len(experts), run["topk"], run["hidden"], run["width"], None, run.get("parts", 1), "", run["method"])
    rank = given["gate_a"].shape[1]
    moe = wrapper(KTMoEWrapper, 0, *sizes, mode="sft", lora_rank=rank, lora_alpha=2.0 * rank)
    moe.share_backward_bb = False
    moe.load_weights_from_tensors(*linears, experts)
    gradients = [torch.zeros_like(given[name]) for name in factors]
    moe.init_lora_weights(*(given[name] for name in factors), *gradients)
    out = moe.forward(given["hidden"], given["ids"], given["weights"], save_for_backward=True).clone()
    of_hidden, of_weights = moe.backward(given["gradient"])
    found = {"out": out, "hidden": of_hidden.clone(), "weights": of_weights.clone()}
    return found | dict(zip(factors, gradients, strict=True))


def main(job):
    prepare_kt_kernel()
    if any(run["method"] == "NVFP4" for run in job["runs"].values()):
        os.environ["KT_MXFP4_BACKEND"] = "avx2"  # the only one that has it, but without buffers
    from kt_kernel import KTMoEWrapper

    outs = {}
    for name, run in job["runs"].items():
        tensors, experts = load_file(run["tensors"]) if "tensors" in run else {}, torch.arange(run["experts"])
        linears = [tensors[name] for name in ("gate", "up", "down") if tensors]
        if run.get("backward"):
            write_backward(run, linears, experts)
            continue
        if "train" in run:
            outs |= train(KTMoEWrapper, run, linears, experts)
            continue
        sizes = (len(experts), run["topk"], run["hidden"], run["width"], torch.zeros(len(experts), dtype=torch.bool))
        more = {"swiglu_limit": run.get("limit", 0.0), "swiglu_alpha": run.get("alpha", 0.0), "cpu_save": bool(tensors)}
        where = run.get("parts", 1), run["path"], run["method"]
        moe = wrapper(KTMoEWrapper, run.get("layer", 0), *sizes, *where, **more)
        if tensors:
            moe.load_weights_from_tensors(*linears, experts)
            continue
        moe.load_weights(experts)
        if "ranks" in run:
            outs |= {f"{name}.{ranks}": buffers(moe, run, ranks) for ranks in run["ranks"]}
            continue
        inputs = load_file(run["inputs"])
        outs[name] = moe.forward(inputs["hidden"], inputs["ids"], inputs["weights"], None).clone()
    save_file(outs, job["result"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
