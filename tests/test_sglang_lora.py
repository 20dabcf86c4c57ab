"""Expert LoRA in sglang-kt 0.7.2 (--kt-expert-lora-path): its calls of kt_kernel, in its order and with its arguments."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime import kt_sft
from ktconvert.native_quant.runtime.experts import open_experts
from ktconvert.native_quant.runtime.training import Lora
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from rig import programs
from rig.training import Linears, compute, distance, golden_weights

EXPERTS, TOPK, HIDDEN, WIDTH, RANK, ALPHA = 4, 2, 256, 256, 4, 8.0
MAP = torch.tensor([2, 0, 3, 1])
# --kt-method -> its name for training, options of `ktconvert cpu` (None: the BF16 checkpoint itself), and the distance
# to float64 with the same weights; integers also round activations.
METHODS = {
    "BF16": ("AMXBF16_SFT", None, 6e-3),
    "AMXINT8": ("AMXINT8_SFT", ("int8",), 2.5e-2),
    "AMXINT4": ("AMXINT4_SFT", ("int4",), 2.5e-2),
    "FP8": ("AMXFP8_SFT", ("fp8", "--layout", "kt"), 6e-3),
    "MXFP4": ("MXFP4_SFT", ("mxfp4", "--layout", "kt"), 6e-3),
    "MXFP4 slices": ("MXFP4_SFT", ("mxfp4",), 6e-3),
    "RAWINT4": ("RAWINT4_SFT", ("rawint4",), 6e-3),
}


@pytest.fixture(params=METHODS)
def stored(request: pytest.FixtureRequest, tmp_path: Path, cli: Any, write_qwen: Any) -> tuple[str, Path, float]:
    """Return the method for training, the directory of --kt-weight-path, and the limit of the distance."""
    method, options, limit = METHODS[request.param]
    stacked = dict(zip(("gate", "up", "down"), golden_weights(EXPERTS, HIDDEN, WIDTH), strict=True))
    source: Path = write_qwen(tmp_path / "in", {0: stacked})
    if options is None:
        return method, source, limit
    cli("cpu", "-i", source, "-o", tmp_path / "out", "--threadpool-count", 1, "--quant-method", *options)
    return method, tmp_path / "out", limit


def create(method: str, path: Path, **more: Any) -> Any:
    """Create and load a wrapper as KTEPWrapperMethod does."""
    common = {
        "layer_idx": 0,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "gpu_experts_mask": torch.zeros(EXPERTS, dtype=torch.bool),
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "numa_nodes": None,
        "weight_path": str(path),
        "chunked_prefill_size": 4,
    }
    native = {"group_size": 32, "zero_point": False, "swiglu_limit": 0.0} if method == "MXFP4_SFT" else {}
    lora = {"mode": "sft", "num_gpu_experts": 0, "lora_rank": RANK, "lora_alpha": ALPHA, "max_cache_depth": 1}
    wrapper = KTMoEWrapper(**{**common, **native, "method": method, **lora, **more})
    if method in ("AMXFP8_SFT", "AMXINT8_SFT"):
        wrapper.share_backward_bb = True
    elif method == "MXFP4_SFT":
        wrapper.share_backward_bb = False
    sft, loaders = kt_sft.NAMES, {"RAWINT4_SFT": "rawint4", "AMXFP8_SFT": "block_fp8"}
    if name := loaders.get(method):
        sft[f"get_{name.removeprefix('block_')}_runtime"]()
        layer = sft[f"load_{name}_experts_from_checkpoint_files"](
            checkpoint_files=sorted(map(str, path.glob("*.safetensors"))),
            sharded_metadata=None,
            layers_prefix="model.layers",
            moe_config=sft["MOEArchConfig"](expert_num=EXPERTS, weight_names=("gate_proj", "up_proj", "down_proj")),
            layer_idx=0,
            hidden_size=HIDDEN,
        )
        getattr(wrapper, f"load_{name}_weights")(layer, MAP)
    else:
        wrapper.load_weights(MAP)
    return wrapper


def draw_lora() -> Lora:
    generator = torch.Generator().manual_seed(5)
    e, r, h, i = EXPERTS, RANK, HIDDEN, WIDTH
    shapes = (e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)
    return Lora(*(torch.randn(shape, generator=generator).mul(0.1).bfloat16() for shape in shapes))


def read_linears(wrapper: Any, path: Path) -> Linears:
    """Return the weights that the wrapper computes with, in float64, in the files' order."""
    source = open_experts(path)
    experts = [next(source.linears(wrapper.moe._packed, expert)) for expert in range(EXPERTS)]
    gate, up, down = (torch.stack([torch.from_numpy(x[p]) for x in experts]).double() for p in range(3))
    return gate, up, down


def test_outputs_are_those_of_the_base_and_lora(stored: tuple[str, Path, float]) -> None:
    """More tokens than chunked_prefill_size, int32 ids and a padded token; the map applies to weights, not to LoRA."""
    method, path, limit = stored
    wrapper, lora = create(method, path), draw_lora()
    wrapper.init_lora_weights(*lora, *(torch.zeros_like(tensor) for tensor in lora))
    gate, up, down = (linear[MAP] for linear in read_linears(wrapper, path))
    factors = Lora(*(tensor.double() for tensor in lora))
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 9):
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)]).int()
        weights = torch.rand(tokens, TOPK, generator=generator)
        ids[8:] = -1
        expected = compute(x.double(), ids, weights.double(), (gate, up, down), factors, ALPHA / RANK)
        given = x.clone(), ids.clone(), weights.clone()
        wrapper.submit_forward_inference(*given, 0)
        for tensor in given:
            tensor.zero_()
        out = wrapper.sync_forward_inference(0)
        assert (out.shape, out.dtype) == (x.shape, x.dtype) and not out[8:].any()
        assert distance(out, expected) < limit
    base = compute(x.double(), ids, weights.double(), (gate, up, down))
    assert distance(expected, base) > 0.1  # LoRA matters
    wrapper.submit_forward_inference(x.half()[None], ids[None], weights[None])
    again = wrapper.sync_forward_inference()
    assert (again.shape, again.dtype) == ((1, 9, HIDDEN), torch.float16) and distance(again[0], expected) < limit


def test_calls_in_the_wrong_order_and_other_weights_are_refused(tmp_path: Path, cli: Any, write_qwen: Any) -> None:
    stacked = dict(zip(("gate", "up", "down"), golden_weights(EXPERTS, HIDDEN, WIDTH), strict=True))
    path = write_qwen(tmp_path / "in", {0: stacked})
    wrapper = create("AMXBF16_SFT", path)
    batch = torch.zeros(1, HIDDEN), torch.zeros(1, TOPK, dtype=torch.int32), torch.zeros(1, TOPK)
    with pytest.raises(RuntimeError, match="has no LoRA"):
        wrapper.submit_forward_inference(*batch, 0)
    with pytest.raises(RuntimeError, match="sync_forward_inference without a submit_forward_inference"):
        wrapper.sync_forward_inference(0)
    with pytest.raises(TypeError, match="call load_weights"):
        KTMoEWrapper(
            0, 4, 2, 256, 256, None, 2, 1, str(path), 4, method="AMXFP8_SFT", mode="sft"
        ).load_block_fp8_weights(0)
    for name in ("block_fp8", "rawint4"):
        with pytest.raises(ValueError, match=rf"load_{name}_weights needs method='\w+_SFT', not 'AMXBF16_SFT'"):
            getattr(wrapper, f"load_{name}_weights")(kt_sft.LayerReference(path, 0))
    with pytest.raises(UnsupportedError, match="which method BF16 computes, not FP8"):
        create("AMXFP8_SFT", path)


def test_the_names_can_be_imported_from_kt_kernel() -> None:
    program = (
        "from ktconvert.native_quant import install_as_kt_kernel\n"
        "install_as_kt_kernel()\n"
        "from kt_kernel.sft import MOEArchConfig, get_fp8_runtime, get_mxfp4_runtime, get_rawint4_runtime\n"
        "from kt_kernel.sft import get_rawint4_checkpoint_contract, load_block_fp8_experts_from_checkpoint_files\n"
        "from kt_kernel.sft import load_rawint4_experts_from_checkpoint_files\n"
        "get_fp8_runtime(), get_mxfp4_runtime(), get_rawint4_runtime(), get_rawint4_checkpoint_contract({})\n"
        "try: from kt_kernel.sft import KTConfig\n"
        "except ImportError as error: print(error)\n"
        "import sys, kt_kernel; print(kt_kernel.sft is sys.modules['kt_kernel.sft'], 'torch' in sys.modules)\n"
    )
    error, same = programs.python_output(program, PYTHONPATH="").splitlines()
    assert "KTConfig" in error and same == "True False"
