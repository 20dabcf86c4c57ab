"""Runs inside a venv that has kt-kernel: `peer.py JOB.json` lets the real KTMoEWrapper write and load expert weights on
a CPU.

Each job is {"do": "write" | "write_backward" | "forward", ...}; results go to files that the job names.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.layers import prepare_kt_kernel


def wrapper(job, folder, save):
    prepare_kt_kernel()
    from kt_kernel import KTMoEWrapper

    return KTMoEWrapper(
        layer_idx=job["layer"],
        num_experts=job["experts"],
        num_experts_per_tok=job["topk"],
        hidden_size=job["hidden"],
        moe_intermediate_size=job["intermediate"],
        gpu_experts_mask=torch.zeros(job["experts"], dtype=torch.bool),
        cpuinfer_threads=2,
        threadpool_count=job["numa"],
        weight_path=folder,
        chunked_prefill_size=512,
        cpu_save=save,
        method=job["method"],
    )


def write_backward(job):
    prepare_kt_kernel()
    from kt_kernel.sft.amx import AMXSFTMoEWrapper

    moe = AMXSFTMoEWrapper(
        layer_idx=job["layer"],
        num_experts=job["experts"],
        num_experts_per_tok=job["topk"],
        hidden_size=job["hidden"],
        moe_intermediate_size=job["intermediate"],
        num_gpu_experts=0,
        cpuinfer_threads=2,
        threadpool_count=job["numa"],
        weight_path="",
        chunked_prefill_size=64,
        method=job["method"],
    )
    tensors = load_file(job["weights"])
    linears, experts = [tensors[name] for name in ("gate", "up", "down")], torch.arange(job["experts"])
    moe.load_weights_from_tensors(*linears, experts)
    moe.save_backward_weights_from_tensors(*linears, experts, job["folder"])


def main(job):
    if job["do"] == "write_backward":
        write_backward(job)
        return
    experts = torch.arange(job["experts"], dtype=torch.int64)
    if job["do"] == "write":
        tensors = load_file(job["weights"])
        wrapper(job, job["folder"], True).load_weights_from_tensors(
            tensors["gate"], tensors["up"], tensors["down"], experts
        )
        return
    inputs = load_file(job["inputs"])
    moe = wrapper(job, job["folder"], False)
    moe.load_weights(experts)
    out = moe.forward(inputs["hidden"], inputs["ids"], inputs["weights"], None)
    save_file({"out": out.clone().contiguous()}, job["result"])


main(json.loads(Path(sys.argv[1]).read_text()))
