"""`layers.py MODULE JOB.json`: a program written for kt_kernel, to be run with MODULE kt_kernel or
ktconvert.native_quant.

Each run goes through a model's MoE layers twice, as an inference loop does: a layer's output goes into the next. The
job names weights, shapes, method and T, a run its inputs and how many experts of a token each layer may defer; outputs
go to a safetensors file. kt-kernel's buffers know sizes by the number of tokens alone: runs must differ in it.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def prepare_kt_kernel():
    """kt-kernel 0.7.2 asks for pinned memory and a CUDA stream even on a CPU; nothing of ours needs this."""
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    for name in ("zeros", "empty", "full"):
        real = getattr(torch, name)
        setattr(torch, name, lambda *args, pin_memory=None, real=real, **options: real(*args, **options))


def wrapper(KTMoEWrapper, layer, experts, topk, hidden, width, mask, parts, path, method, **more):
    """A wrapper by the names that kt-kernel's arguments have, with two threads."""
    sizes = {"num_experts": experts, "num_experts_per_tok": topk, "hidden_size": hidden, "moe_intermediate_size": width}
    how = {"cpuinfer_threads": 2, "threadpool_count": parts, "weight_path": path, "chunked_prefill_size": 512}
    return KTMoEWrapper(layer_idx=layer, **sizes, gpu_experts_mask=mask, **how, method=method, **more)


def main(module, job):
    if module == "kt_kernel":
        prepare_kt_kernel()
    KTMoEWrapper = importlib.import_module(module).KTMoEWrapper
    KTMoEWrapper.exact = True  # ours: round where kt-kernel rounds; nothing to kt-kernel
    outs = {}
    for name, run in job["runs"].items():
        inputs = load_file(run["inputs"])
        wrappers = [make(KTMoEWrapper, job, inputs, layer, defer) for layer, defer in enumerate(run["deferred"])]
        for turn in range(2):
            hidden = inputs["hidden"]
            for layer, wrapper in enumerate(wrappers):
                ids, weights = inputs["ids"].roll(layer + turn, 0), inputs["weights"].roll(layer + turn, 0)
                wrapper.submit_forward(hidden, ids, weights, None)
                hidden = outs[f"{name}.{turn}.{layer}"] = wrapper.sync_forward(hidden, None).clone()
    save_file(outs, job["result"])


def make(KTMoEWrapper, job, inputs, layer, defer):
    topk, hidden = inputs["ids"].shape[-1], inputs["hidden"].shape[-1]
    sizes = (job["experts"], topk, hidden, job["intermediate"], inputs.get("mask"), job["numa"], job["folder"])
    more = {"cpu_save": job["save"], "max_deferred_experts_per_token": defer}
    moe = wrapper(KTMoEWrapper, layer, *sizes, job["method"], **more)
    if job["save"]:
        stacked = (inputs[f"{layer}.{name}"] for name in ("gate", "up", "down"))
        moe.load_weights_from_tensors(*stacked, torch.arange(job["experts"]))
    else:
        moe.load_weights(torch.arange(job["experts"]))
    return moe


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
