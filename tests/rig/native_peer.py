"""kt-kernel's outputs: `native_peer.py JOB.json`.

The job lists runs (weights, method, layer, swiglu_limit, swiglu_alpha, sizes, a file with inputs), and the safetensors
file for the results. Instead of inputs, a run may have `ranks`: numbers of ranks for each of which GPU buffers are
written; or `tensors`, which kt-kernel packs and writes (`backward`: for training), or with which it computes a forward
and a backward with LoRA (`train`: a file). `parts`: NUMA slices, which must be equal for the whole process.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.layers import make_wrapper, prepare_kt_kernel


def write_buffers(moe, run, ranks):
    """Return [experts, 4, ranks, bytes] of GPU buffers, as large as the largest can be, and filled with 0xA5 before."""
    size = 2 * run["width"] * run["hidden"] * 2 // ranks
    outs = torch.full((run["experts"], 4, ranks, size), 0xA5, dtype=torch.uint8)
    for expert, expert_outs in enumerate(outs):
        pointers = [[rank.data_ptr() for rank in kind_outs] for kind_outs in expert_outs]
        moe.submit_write_weight_scale_to_buffer(ranks, expert, *pointers)
    moe.sync_write_weight_scale_to_buffer()
    return outs


def write_backward(run, linears, experts):
    """Write the weights that kt-kernel needs for a backward."""
    from kt_kernel.sft.amx import AMXSFTMoEWrapper

    sizes = {"num_experts": run["experts"], "num_experts_per_tok": run["topk"], "hidden_size": run["hidden"]}
    sizes |= {"moe_intermediate_size": run["width"], "num_gpu_experts": 0, "threadpool_count": run["parts"]}
    settings = {"cpuinfer_threads": 2, "weight_path": "", "chunked_prefill_size": 64, "method": run["method"]}
    moe = AMXSFTMoEWrapper(layer_idx=0, **sizes, **settings)
    moe.load_weights_from_tensors(*linears, experts)
    moe.save_backward_weights_from_tensors(*linears, experts, run["path"])


def train(KTMoEWrapper, run, linears, experts):
    """Return, by name, the output, the gradients of its inputs, and those of the six tensors of LoRA."""
    inputs, names = load_file(run["train"]), [f"{name}_{matrix}" for name in ("gate", "up", "down") for matrix in "ab"]
    sizes = (len(experts), run["topk"], run["hidden"], run["width"], None, run.get("parts", 1), "", run["method"])
    rank = inputs["gate_a"].shape[1]
    moe = make_wrapper(KTMoEWrapper, 0, *sizes, mode="sft", lora_rank=rank, lora_alpha=2.0 * rank)
    moe.share_backward_bb = False
    moe.load_weights_from_tensors(*linears, experts)
    gradients = [torch.zeros_like(inputs[name]) for name in names]
    moe.init_lora_weights(*(inputs[name] for name in names), *gradients)
    out = moe.forward(inputs["hidden"], inputs["ids"], inputs["weights"], save_for_backward=True).clone()
    hidden_gradient, weights_gradient = moe.backward(inputs["gradient"])
    results = {"out": out, "hidden": hidden_gradient.clone(), "weights": weights_gradient.clone()}
    return results | dict(zip(names, gradients, strict=True))


def main(job):
    """Do all runs and write the results."""
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
        moe = make_wrapper(KTMoEWrapper, run.get("layer", 0), *sizes, *where, **more)
        if tensors:
            moe.load_weights_from_tensors(*linears, experts)
            continue
        moe.load_weights(experts)
        if "ranks" in run:
            outs |= {f"{name}.{ranks}": write_buffers(moe, run, ranks) for ranks in run["ranks"]}
            continue
        inputs = load_file(run["inputs"])
        outs[name] = moe.forward(inputs["hidden"], inputs["ids"], inputs["weights"], None).clone()
    save_file(outs, job["result"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
