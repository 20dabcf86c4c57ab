"""Runs inside a venv that has kt-kernel: `peer.py JOB.json` lets the real KTMoEWrapper write and load expert weights on a
CPU. A job is {"do": "write" | "write_backward" | "forward", ...}; results go to files that it names.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.layers import prepare_kt_kernel, wrapper


def write_backward(job):
    prepare_kt_kernel()
    from kt_kernel.sft.amx import AMXSFTMoEWrapper

    sizes = {"num_experts": job["experts"], "num_experts_per_tok": job["topk"], "hidden_size": job["hidden"]}
    sizes |= {"moe_intermediate_size": job["intermediate"], "num_gpu_experts": 0, "threadpool_count": job["numa"]}
    how = {"cpuinfer_threads": 2, "weight_path": "", "chunked_prefill_size": 64, "method": job["method"]}
    moe = AMXSFTMoEWrapper(layer_idx=job["layer"], **sizes, **how)
    tensors = load_file(job["weights"])
    linears, experts = [tensors[name] for name in ("gate", "up", "down")], torch.arange(job["experts"])
    moe.load_weights_from_tensors(*linears, experts)
    moe.save_backward_weights_from_tensors(*linears, experts, job["folder"])


def main(job):
    if job["do"] == "write_backward":
        write_backward(job)
        return
    prepare_kt_kernel()
    from kt_kernel import KTMoEWrapper

    save, experts = job["do"] == "write", torch.arange(job["experts"], dtype=torch.int64)
    sizes = (
        job["experts"],
        job["topk"],
        job["hidden"],
        job["intermediate"],
        torch.zeros(len(experts), dtype=torch.bool),
    )
    moe = wrapper(KTMoEWrapper, job["layer"], *sizes, job["numa"], job["folder"], method=job["method"], cpu_save=save)
    if save:
        tensors = load_file(job["weights"])
        moe.load_weights_from_tensors(tensors["gate"], tensors["up"], tensors["down"], experts)
        return
    inputs = load_file(job["inputs"])
    moe.load_weights(experts)
    out = moe.forward(inputs["hidden"], inputs["ids"], inputs["weights"], None)
    save_file({"out": out.clone().contiguous()}, job["result"])


main(json.loads(Path(sys.argv[1]).read_text()))
