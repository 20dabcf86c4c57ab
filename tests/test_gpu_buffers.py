"""Buffers for SGLang's prefill on GPUs equal kt-kernel's bytes, whose hashes are in golden/gpu_buffers.json."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from rig import native

RANKS = {
    "BF16_default": (1, 2, 4),
    "FP8_default": (1, 2),  # blocks of 128 columns
    "FP8_PERCHANNEL_default": (1, 2, 4),
    "MXFP4_v4": (1, 2, 4),
    "MXFP8_m3": (1, 2, 4),
    "RAWINT4_kimi": (1, 2, 4),
}
GOLDEN = native.GOLDEN / "gpu_buffers.json"
EXPERTS, SIZE = 2, 256  # SIZE is hidden and intermediate size


def make_wrapper(path: Path, method: str, parts: int = 1, **options: Any) -> KTMoEWrapper:
    return KTMoEWrapper(0, EXPERTS, 2, SIZE, SIZE, None, 2, parts, str(path), 512, method=method, **options)


def make_buffers(ranks: int) -> npt.NDArray[np.uint8]:
    """Return buffers [experts, 4, ranks, bytes] as native_peer.py does; some bytes are never written."""
    return np.full((EXPERTS, 4, ranks, 2 * SIZE * SIZE * 2 // ranks), 0xA5, np.uint8)


def pointers(expert_buffers: npt.NDArray[np.uint8]) -> list[list[int]]:
    return [[rank.ctypes.data for rank in buffer] for buffer in expert_buffers]


def write_buffers(moe: KTMoEWrapper, ranks: int) -> npt.NDArray[np.uint8]:
    """Return the buffers of all experts, written by a wrapper."""
    outs = make_buffers(ranks)
    for expert, expert_buffers in enumerate(outs):
        w13, w13_scale, w2, w2_scale = pointers(expert_buffers)
        scales = ([], [0]) if moe.method == "BF16" else (w13_scale, w2_scale)  # BF16 has no scales
        moe.submit_write_weight_scale_to_buffer(ranks, expert, w13, scales[0], w2, scales[1])
    moe.sync_write_weight_scale_to_buffer()
    return outs


def digest(outs: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(outs.tobytes()).hexdigest()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", RANKS)
def test_buffers_equal_those_of_kt_kernel(name: str, parts: int, tmp_path: Path) -> None:
    layer = native.read(name)
    moe = make_wrapper(layer.write(tmp_path), layer.method, parts)
    moe.load_weights()
    assert moe.moe is not None and moe.moe.parts == parts
    expected = json.loads(GOLDEN.read_text())[name]
    assert {str(ranks): digest(write_buffers(moe, ranks)) for ranks in RANKS[name]} == expected


@pytest.mark.parametrize("parts", [1, 2])
def test_kt_kernel_writes_the_golden_buffers(parts: int, peer_python: str, tmp_path: Path) -> None:
    if "avx512" not in kernels.available_isas():
        pytest.skip("kt-kernel has no FP8_PERCHANNEL on a CPU without AVX-512")
    runs: dict[str, dict[str, Any]] = {}
    for name, ranks in RANKS.items():
        layer, sizes = native.read(name), {"experts": EXPERTS, "topk": 2, "hidden": SIZE, "width": SIZE}
        path = str(layer.write(tmp_path / name))
        runs[name] = {"path": path, "method": layer.method, "parts": parts, "ranks": ranks, **sizes}
    theirs = native.run_kt_kernel(peer_python, runs, tmp_path)
    hashes = {name: {str(n): digest(theirs[f"{name}.{n}"].bits) for n in ranks} for name, ranks in RANKS.items()}
    assert hashes == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("ranks", RANKS["MXFP8_m3"])
def test_mxfp8_buffers_equal_the_checkpoint(ranks: int, tmp_path: Path) -> None:
    layer = native.read("MXFP8_m3")
    moe = make_wrapper(layer.write(tmp_path), "MXFP8", parts=2)
    moe.load_weights()
    for expert, expert_buffers in enumerate(write_buffers(moe, ranks)):
        for index, suffix in enumerate(("weight", "weight_scale_inv")):
            ends = [f"experts.{expert}.{linear}.{suffix}" for linear in ("w1", "w3", "w2")]
            stored = [tensor.bits for end in ends for name, tensor in layer.tensors.items() if name.endswith(end)]
            w1, w3, w2 = (np.split(bits, ranks, axis) for bits, axis in zip(stored, (0, 0, 1), strict=True))
            for rank in range(ranks):
                for kind, rows in ((index, np.concatenate([w1[rank], w3[rank]])), (2 + index, w2[rank])):
                    expected = np.frombuffer(rows.tobytes(), np.uint8)
                    np.testing.assert_array_equal(expert_buffers[kind, rank, : len(expected)], expected)


def test_buffers_contain_the_weights_of_the_runtime(tmp_path: Path) -> None:
    """The map of experts applies, as in kt-kernel; weights can also be loaded from tensors."""
    layer = native.read("BF16_default")
    path = layer.write(tmp_path)
    moe, swapped, packed = (make_wrapper(path, "BF16", parts) for parts in (1, 2, 2))
    moe.load_weights()
    swapped.load_weights(torch.tensor([1, 0]))
    names = [f"model.layers.0.mlp.experts.{{}}.{each}_proj.weight" for each in ("gate", "up", "down")]
    bits = [np.stack([layer.tensors[name.format(expert)].bits for expert in range(EXPERTS)]) for name in names]
    packed.load_weights_from_tensors(*(torch.from_numpy(each).view(torch.bfloat16) for each in bits))
    expected = write_buffers(moe, 2)
    np.testing.assert_array_equal(write_buffers(swapped, 2), expected[::-1])
    np.testing.assert_array_equal(write_buffers(packed, 2), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2), "expert_id is 2, and layer 0 has experts 0 to 1"),
        ((1, -1), "expert_id is -1"),
        ((0, 0), "gpu_tp_count is 0"),
        (
            (3, 0),
            r"gpu_tp_count is 3, but the intermediate size, 256, must be a multiple of gpu_tp_count times 128 for FP8",
        ),
        ((4, 0), "gpu_tp_count is 4"),
    ],
)
def test_wrong_arguments_are_rejected(arguments: Sequence[int], message: str, tmp_path: Path) -> None:
    layer = native.read("FP8_default")
    moe = make_wrapper(layer.write(tmp_path), "FP8")
    with pytest.raises(RuntimeError, match="layer 0 has no weights: call load_weights"):
        moe.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
    moe.load_weights()
    with pytest.raises(ValueError, match=message):
        moe.submit_write_weight_scale_to_buffer(*arguments, [1], [1], [1], [1])
    for position, wrong in itertools.product(range(4), ([], [0], [1, 1], [-1])):
        addresses = [wrong if position == place else [1] for place in range(4)]
        name = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")[position]
        with pytest.raises(ValueError, match=f"{name}_ptrs must be an address for each of 1 ranks"):
            moe.submit_write_weight_scale_to_buffer(1, 0, *addresses)
    moe.sync_write_weight_scale_to_buffer()  # nothing was submitted


def test_methods_without_gpu_layout_are_rejected(tmp_path: Path) -> None:
    layer = native.read("GPTQ_INT4_default")
    moe = make_wrapper(layer.write(tmp_path), "GPTQ_INT4")
    moe.load_weights()
    supported = "BF16, FP8, FP8_PERCHANNEL, MXFP4, MXFP8, RAWINT4"
    assert supported == ", ".join(sorted(name for name, method in METHODS.items() if method.row_layouts))
    with pytest.raises(NotImplementedError, match=f"supported: {supported}.*kt-gpu-prefill-token-threshold"):
        moe.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
