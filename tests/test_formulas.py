"""Families that transformers lacks, or computes differently: their published tensors compute the family's formula."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ktconvert.layouts.encodings.fp4 import dequantize
from ktconvert.native_quant.runtime.experts import Experts
from rig import conversion
from rig.floats import from_bits, to_bits
from rig.safetensors import write_file

EXPERTS, HIDDEN, WIDTH, TOPK, LAYER = 4, 128, 256, 2, 3
Formula = Callable[[Any, Any], Any]
MLP, SPARSE = "model.layers.3.mlp.experts.", "block_sparse_moe.experts."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W132 = ("w1", "w3", "w2")


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def limit_silu(limit: float) -> Formula:
    return lambda gate, up: silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)


def gelu_tanh(x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softcap(gate: Any, up: Any) -> Any:
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


class Family(NamedTuple):
    """A published form of a layer's experts.

    formula   the products of gate and up -> the input of down, in float64
    base      of the names, before the number of the expert
    names     of gate, up and down
    config    entries of config.json
    packed    suffixes and dtypes of MXFP4 codes and scales; None for BF16
    spread    standard deviation of the inputs; with large ones, gelu, silu and relu are alike
    """

    formula: Formula
    base: str
    names: tuple[str, str, str]
    config: dict[str, Any]
    packed: tuple[str, str, str, str] | None = None
    spread: float = 2.0


# The sources of the formulas are in layouts/checkpoints/archs.py.
FAMILIES = {
    "Kimi-K3": Family(
        softcap,
        f"language_model.model.layers.3.{SPARSE}",
        W132,
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "text_config": {
                "model_type": "kimi_k3",
                "hidden_act": "situ",
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": 25.0,
                "num_experts": EXPERTS,
                "hidden_size": 2 * HIDDEN,
                "routed_expert_hidden_size": HIDDEN,
            },
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        },
        (".weight_packed", "U8", ".weight_scale", "U8"),
    ),
    "DeepSeek-V4.1": Family(
        limit_silu(10),
        "layers.3.ffn.experts.",
        W132,
        {"model_type": "deepseek_v41", "hidden_act": "silu", "swiglu_limit": 10.0, "n_routed_experts": EXPERTS},
        (".weight", "I8", ".scale", "F8_E8M0"),
    ),
    "Grok": Family(
        lambda gate, up: gelu_tanh(gate) * up,
        f"model.layers.3.{SPARSE}",
        W132,
        {"architectures": ["Grok1ForCausalLM"], "hidden_act": "gelu", "num_local_experts": EXPERTS},
        spread=0.3,
    ),
    "SmallThinker": Family(
        lambda gate, up: np.maximum(gate, 0) * up,
        f"model.layers.3.{SPARSE}",
        ("gate", "up", "down"),
        {"model_type": "smallthinker", "moe_num_primary_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH},
        spread=0.3,
    ),
    # transformers ignores the list.
    "Ling 3": Family(
        limit_silu(4),
        MLP,
        PROJECTIONS,
        {
            "model_type": "bailing_hybrid",
            "hidden_act": "silu",
            "num_experts": EXPERTS,
            "expert_swiglu_limit_list": [0, 0, 0, 4],
        },
    ),
    "GigaChat-3.5": Family(
        limit_silu(10),
        MLP,
        PROJECTIONS,
        {"model_type": "gigachat3_5", "hidden_act": "silu", "n_routed_experts": EXPERTS},
    ),
}
# Method -> bound of the relative error; None: the experts as they are stored. All weights are MXFP4 numbers.
BOUNDS = {None: 0.005, "bf16": 0.005, "mxfp4": 0.005, "int8": 0.03}


def write(family: Family, folder: Path) -> list[list[Any]]:
    """Write a layer of random experts; return the matrices of each expert in float64: gate and up [I, H], down."""
    rng, matrices, tensors = np.random.default_rng(0), list[list[Any]](), dict[str, Any]()
    for expert in range(EXPERTS):
        matrices.append([])
        for name, (n, k) in zip(family.names, ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), strict=True):
            codes, scales = rng.integers(0, 16, (n, k), np.uint8), rng.integers(122, 125, (n, k // 32), np.uint8)
            matrices[-1].append(dequantize(codes, scales).astype(np.float64))
            stem = f"{family.base}{expert}.{name}"
            if family.packed is None:
                tensors[f"{stem}.weight"] = "BF16", to_bits(matrices[-1][-1])
            else:
                weight, dtype, scale, scale_dtype = family.packed
                tensors[stem + weight] = dtype, (codes[:, ::2] | codes[:, 1::2] << 4)
                tensors[stem + scale] = scale_dtype, scales
    folder.mkdir()
    write_file(folder / "model.safetensors", tensors)
    config = {"num_hidden_layers": LAYER + 1, "hidden_size": HIDDEN, "num_experts_per_tok": TOPK} | family.config
    (folder / "config.json").write_text(json.dumps(config))
    return matrices


@pytest.mark.parametrize("name", FAMILIES)
def test_published_tensors_compute_the_formula(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    matrices = write(family, tmp_path / "model")
    rng = np.random.default_rng(1)
    rows = to_bits(family.spread * rng.standard_normal((9, HIDDEN)))
    ids = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in rows])
    weights = rng.random(ids.shape, np.float32)
    expected, plain = np.zeros((2, *rows.shape))
    for (token, slot), expert in np.ndenumerate(ids):
        gate, up, down = matrices[expert]
        x = from_bits(rows[token]).astype(np.float64)
        expected[token] += weights[token, slot] * (down @ family.formula(gate @ x, up @ x))
        plain[token] += weights[token, slot] * (down @ (silu(gate @ x) * (up @ x)))
    size = np.linalg.norm(expected)
    assert np.linalg.norm(plain - expected) > 0.05 * size, "the formula is that of plain experts"
    for method, bound in BOUNDS.items():
        path = tmp_path / str(method)
        if method is None:
            path = tmp_path / "model"
        else:
            options = ("--quant-method", method, "--threadpool-count", 1, "-q")
            done = conversion.run_in_process("cpu", "-i", tmp_path / "model", "-o", path, *options)
            assert done.exception is None, done.exception
        with Experts.load(path, LAYER) as experts:
            actual = from_bits(experts.forward(rows, ids, weights))
        error = float(np.linalg.norm(actual - expected) / size)
        print(f"{name}, {method}: {error:.4f}")
        assert error < bound
