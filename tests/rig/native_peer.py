"""`native_peer.py JOB.json`: kt-kernel's outputs for checkpoints. The job lists runs (weights, method, swiglu_limit,
swiglu_alpha, sizes, a file with inputs) and the safetensors file for the results.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.layers import prepare_kt_kernel


def main(job):
    prepare_kt_kernel()
    os.environ["KT_MXFP4_BACKEND"] = "avx2"  # the only one that has NVFP4
    from kt_kernel import KTMoEWrapper

    outs = {}
    for name, run in job["runs"].items():
        wrapper = KTMoEWrapper(
            layer_idx=0,
            num_experts=run["experts"],
            num_experts_per_tok=run["topk"],
            hidden_size=run["hidden"],
            moe_intermediate_size=run["width"],
            gpu_experts_mask=torch.zeros(run["experts"], dtype=torch.bool),
            cpuinfer_threads=2,
            threadpool_count=1,
            weight_path=run["path"],
            chunked_prefill_size=512,
            method=run["method"],
            swiglu_limit=run["limit"],
            swiglu_alpha=run["alpha"],
        )
        wrapper.load_weights(torch.arange(run["experts"]))
        inputs = load_file(run["inputs"])
        outs[name] = wrapper.forward(inputs["hidden"], inputs["ids"], inputs["weights"], None).clone()
    save_file(outs, job["result"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
