"""`layers.py MODULE JOB.json`: a program written for kt_kernel, to be run with MODULE kt_kernel or
ktconvert.native_quant.

Each run goes through a model's MoE layers twice, as an inference loop does: a layer's output goes into the next. The
job names weights, shapes, method and T, a run its inputs and how many experts of a token each layer may defer; all
outputs go to a safetensors file. kt-kernel's buffers know sizes by the number of tokens alone, so runs must differ in
it.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def without_pinning(real):
    def construct(*args, **options):
        options.pop("pin_memory", None)
        return real(*args, **options)

    return construct


def prepare_kt_kernel():
    """kt-kernel 0.7.2 asks for pinned memory and a CUDA stream even on a CPU; nothing of ours needs this."""
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    for name in ("zeros", "empty", "full"):
        setattr(torch, name, without_pinning(getattr(torch, name)))


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
    wrapper = KTMoEWrapper(
        layer_idx=layer,
        num_experts=job["experts"],
        num_experts_per_tok=inputs["ids"].shape[-1],
        hidden_size=inputs["hidden"].shape[-1],
        moe_intermediate_size=job["intermediate"],
        gpu_experts_mask=inputs.get("mask"),
        cpuinfer_threads=2,
        threadpool_count=job["numa"],
        weight_path=job["folder"],
        chunked_prefill_size=512,
        cpu_save=job["save"],
        max_deferred_experts_per_token=defer,
        method=job["method"],
    )
    if job["save"]:
        stacked = (inputs[f"{layer}.{name}"] for name in ("gate", "up", "down"))
        wrapper.load_weights_from_tensors(*stacked, torch.arange(job["experts"]))
    else:
        wrapper.load_weights(torch.arange(job["experts"]))
    return wrapper


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
