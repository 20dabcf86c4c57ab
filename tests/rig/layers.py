"""A program written for kt_kernel, which also runs with ktconvert.native_quant: `layers.py MODULE JOB.json`.

Each run passes through a model's MoE layers twice, as an inference loop does: the output of a layer is the input of the
next. The job names weights, shapes, method and NUMA slices; a run names its inputs, and how many experts per token each
layer may defer. Outputs go to a safetensors file. kt-kernel keeps one buffer per number of tokens: runs must differ in
it.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def prepare_kt_kernel():
    """Let kt-kernel 0.7.2 run on a CPU, although it requests pinned memory and a CUDA stream."""
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    for name in ("zeros", "empty", "full"):
        real = getattr(torch, name)
        setattr(torch, name, lambda *args, pin_memory=None, real=real, **options: real(*args, **options))


def make_wrapper(KTMoEWrapper, layer, experts, topk, hidden, width, mask, slices, path, method, **options):
    """Make a wrapper with two threads, by the names of kt-kernel's arguments."""
    sizes = {"num_experts": experts, "num_experts_per_tok": topk, "hidden_size": hidden, "moe_intermediate_size": width}
    settings = {"cpuinfer_threads": 2, "threadpool_count": slices, "weight_path": path, "chunked_prefill_size": 512}
    return KTMoEWrapper(layer_idx=layer, **sizes, gpu_experts_mask=mask, **settings, method=method, **options)


def main(module, job):
    """Run the job and write its outputs."""
    if module == "kt_kernel":
        prepare_kt_kernel()
    KTMoEWrapper = importlib.import_module(module).KTMoEWrapper
    KTMoEWrapper.exact = True  # ours then rounds where kt-kernel rounds; kt-kernel ignores it
    outs = {}
    for name, run in job["runs"].items():
        inputs = load_file(run["inputs"])
        wrappers = [load_layer(KTMoEWrapper, job, inputs, layer, defer) for layer, defer in enumerate(run["deferred"])]
        for turn in range(2):
            hidden = inputs["hidden"]
            for layer, wrapper in enumerate(wrappers):
                ids, weights = inputs["ids"].roll(layer + turn, 0), inputs["weights"].roll(layer + turn, 0)
                wrapper.submit_forward(hidden, ids, weights, None)
                hidden = outs[f"{name}.{turn}.{layer}"] = wrapper.sync_forward(hidden, None).clone()
    save_file(outs, job["result"])


def load_layer(KTMoEWrapper, job, inputs, layer, defer):
    """Make the wrapper of a layer and load its weights."""
    topk, hidden = inputs["ids"].shape[-1], inputs["hidden"].shape[-1]
    sizes = (job["experts"], topk, hidden, job["intermediate"], inputs.get("mask"), job["numa"], job["folder"])
    more = {"cpu_save": job["save"], "max_deferred_experts_per_token": defer}
    moe = make_wrapper(KTMoEWrapper, layer, *sizes, job["method"], **more)
    if job["save"]:
        stacked = (inputs[f"{layer}.{name}"] for name in ("gate", "up", "down"))
        moe.load_weights_from_tensors(*stacked, torch.arange(job["experts"]))
    else:
        moe.load_weights(torch.arange(job["experts"]))
    return moe


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
