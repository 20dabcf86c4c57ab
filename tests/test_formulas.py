"""Families that transformers lacks, or computes differently: their published tensors compute the family's formula."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ktconvert.layouts.encodings.fp4 import dequantize
from ktconvert.native_quant.runtime.experts import KTExperts
from rig import conversion
from rig.floats import from_bits, to_bits
from rig.gguf import write as write_gguf
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
        with KTExperts.load(path, LAYER) as experts:
            actual = from_bits(experts.forward(rows, ids, weights))
        error = float(np.linalg.norm(actual - expected) / size)
        print(f"{name}, {method}: {error:.4f}")
        assert error < bound


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_grovemoe_is_the_sum_of_its_two_stacks(container: str, tmp_path: Path) -> None:
    """A chunk expert serves two experts, with their weights; its layers are numbered after those of the experts."""
    chunks = EXPERTS // 2
    rng = np.random.default_rng(0)
    stacks = {"": rng.normal(0, 0.1, (EXPERTS, 3, WIDTH, HIDDEN)), "ch": rng.normal(0, 0.1, (chunks, 3, WIDTH, HIDDEN))}
    stacks = {name: from_bits(to_bits(values)).astype(np.float64) for name, values in stacks.items()}
    model = tmp_path / ("m.gguf" if container == "gguf" else "model")
    write_grovemoe(model, stacks)
    rows = to_bits(rng.standard_normal((9, HIDDEN)))
    ids = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in rows])
    weights = rng.random(ids.shape, np.float32)
    expected = np.zeros((2, *rows.shape))
    for (token, slot), expert in np.ndenumerate(ids):
        x = from_bits(rows[token]).astype(np.float64)
        for each, (gate, up, down) in zip(expected, (stacks[""][expert], stacks["ch"][expert // 2]), strict=True):
            each[token] += weights[token, slot] * (down.T @ (silu(gate @ x) * (up @ x)))
    options = ("--quant-method", "int8", "--threadpool-count", 1, "-q")
    done = conversion.run_in_process("cpu", "-i", model, "-o", tmp_path / "int8", *options)
    assert done.exception is None, done.exception
    for path, bound in ((model, 0.005), (tmp_path / "int8", 0.03)):
        results = []
        for layer, numbers in ((LAYER, ids), (2 * LAYER + 1, ids // 2)):
            with KTExperts.load(path, layer) as experts:
                results.append(from_bits(experts.forward(rows, numbers, weights)).astype(np.float64))
        for actual, each in zip(results, expected, strict=True):
            assert np.linalg.norm(actual - each) < bound * np.linalg.norm(each)
        actual, whole = (large + 0.05 * small for large, small in (results, expected))
        assert np.linalg.norm(actual - whole) < bound * np.linalg.norm(whole)


def write_grovemoe(path: Path, stacks: dict[str, Any]) -> None:
    """Write gate, up and transposed down [E, 3, I, H] of each stack under the names of a model, or of its GGUF."""
    tensors: dict[str, Any] = {}
    for name, experts in stacks.items():
        gate, up, down = to_bits(experts).swapaxes(0, 1)
        parts = {"gate": gate, "up": up, "down": down.swapaxes(1, 2)}
        for part, values in parts.items():
            if path.suffix:
                stored = np.ascontiguousarray(values)
                tensors[f"blk.{LAYER}.ffn_{part}_{name}exps.weight"] = "BF16", stored.view(np.uint8)
            else:
                base = f"model.layers.{LAYER}.mlp.{'chunk_' if name else ''}experts"
                named = {f"{base}.{n}.{part}_proj.weight": ("BF16", matrix) for n, matrix in enumerate(values)}
                tensors |= named
    if path.suffix:
        keys = {"block_count": LAYER + 1, "embedding_length": HIDDEN, "expert_count": EXPERTS}
        keys |= {"expert_feed_forward_length": WIDTH, "expert_used_count": TOPK}
        write_gguf(path, tensors, {f"grovemoe.{key}": value for key, value in keys.items()}, "grovemoe")
        return
    path.mkdir()
    write_file(path / "model.safetensors", tensors)
    config = {"architectures": ["GroveMoeForCausalLM"], "hidden_act": "silu", "num_hidden_layers": LAYER + 1}
    config |= {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": TOPK}
    (path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": WIDTH}))
