"""kt-kernel's native methods, computed from checkpoints: closer to float64 than kt-kernel, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from rig import native
from rig.native import Native, distance
from rig.safetensors import Tensor, Tensors

NAMES = ("BF16_default", "BF16_mixtral")


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Native, Path]:
    layer = native.read(request.param)
    return layer, layer.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(2)


def forward(experts: Experts, layer: Native) -> Any:
    return experts.forward(layer.hidden, layer.ids, layer.weights)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("parts", [1, 2])
def test_at_least_as_close_to_float64_as_kt_kernel(golden: tuple[Native, Path], parts: int, pool: Pool) -> None:
    layer, path = golden
    with Experts.load(path, 0, method=layer.method, parts=parts, pool=pool) as experts:
        out = forward(experts, layer)
    assert experts.parts == parts and experts.method == layer.method
    assert distance(out, layer.truth) <= distance(layer.kt_kernel, layer.truth)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_wrapper_gives_the_same(golden: tuple[Native, Path], parts: int, pool: Pool) -> None:
    layer, path = golden
    wrapper = KTMoEWrapper(0, 2, 2, 256, 256, None, 2, parts, str(path), 512, method=layer.method)
    wrapper.load_weights(torch.arange(2))
    inputs = (torch.from_numpy(x.copy()) for x in (layer.ids, layer.weights))
    out = wrapper.forward(torch.from_numpy(layer.hidden.copy()).view(torch.bfloat16), *inputs)
    expected = forward(Experts.load(path, 0, method=layer.method, parts=parts, pool=pool), layer)
    np.testing.assert_array_equal(out.view(torch.uint16).numpy(), expected)


def test_memory_is_that_of_the_weights(golden: tuple[Native, Path]) -> None:
    layer, path = golden
    stored = sum(len(tensor.data) for tensor in layer.tensors.values())
    assert stored <= Experts.load(path, 0).nbytes <= 1.01 * stored


# --- names ---------------------------------------------------------------------------------------------------------

W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def renamed(tensors: Tensors, change: Callable[[str], str]) -> Tensors:
    return {change(name): tensor for name, tensor in tensors.items()}


def mistral(name: str) -> str:
    for ours, theirs in W.items():
        name = name.replace(ours, theirs)
    return name.replace("mlp.experts", "experts").removeprefix("model.")


def packed(tensors: Tensors) -> Tensors:
    """All experts in gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    base = "model.layers.0.mlp.experts"
    data = {p: [tensors[f"{base}.{e}.{p}_proj.weight"].bits for e in range(2)] for p in ("gate", "up", "down")}
    gate_up = np.concatenate([np.stack(data["gate"]), np.stack(data["up"])], axis=1)
    arrays = {"gate_up": gate_up, "down": np.stack(data["down"])}
    return {f"{base}.{p}_proj": Tensor("BF16", x.shape, x.tobytes()) for p, x in arrays.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: renamed(tensors, lambda name: name.replace("model.", "model.language_model.")),
        lambda tensors: renamed(tensors, lambda name: f"language_model.{name}"),
        lambda tensors: renamed(tensors, mistral),
        packed,
    ],
    ids=["model.language_model", "language_model.model", "mistral", "packed"],
)
def test_names_of_other_models(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    layer = native.read("BF16_default")
    expected = forward(Experts.load(layer.write(tmp_path / "a"), 0, parts=2), layer)
    other = Experts.load(layer.write(tmp_path / "b", change(layer.tensors)), 0, parts=2)
    np.testing.assert_array_equal(forward(other, layer), expected)


def test_experts_in_another_order(tmp_path: Path) -> None:
    layer = native.read("BF16_default")
    path = layer.write(tmp_path)
    turned = Experts.load(path, 0, order=np.array([1, 0]))
    expected = forward(Experts.load(path, 0), layer)
    np.testing.assert_array_equal(turned.forward(layer.hidden, 1 - layer.ids, layer.weights), expected)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "AMXINT4"}, UnsupportedError, "layer 0 are BF16, which method BF16 computes, not AMXINT4; give"),
        ({"layer": 3}, UnsupportedError, "holds no experts in layer 3, but in 0; give one of these"),
        ({"parts": 3}, UnsupportedError, r"3 NUMA parts: .*256/3, is not a multiple of 32. Legal .*: 1, 2, 4, 8\."),
        ({"num_experts": 4}, UnsupportedError, "num_experts 2 by its tensors, not 4"),
        ({"hidden": 512}, UnsupportedError, "hidden_size 256 by its tensors, not 512"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    options: dict[str, Any], kind: type[KtconvertError], message: str, tmp_path: Path
) -> None:
    path = native.read("BF16_default").write(tmp_path)
    with pytest.raises(kind, match=message):
        Experts.load(path, **{"layer": 0} | options)


def without(tensors: Tensors, ending: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def with_first(tensors: Tensors, ending: str, data: bytes) -> Tensors:
    """The first items of expert 1's tensor are replaced by these bytes."""
    return {
        name: tensor._replace(data=data + tensor.data[len(data) :]) if name.endswith(ending) else tensor
        for name, tensor in tensors.items()
    }


def shorter(tensors: Tensors, ending: str) -> Tensors:
    def half(tensor: Tensor) -> Tensor:
        return tensor._replace(
            shape=(tensor.shape[0] // 2, *tensor.shape[1:]), data=tensor.data[: len(tensor.data) // 2]
        )

    return {name: half(tensor) if name.endswith(ending) else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("BF16_default", lambda t: without(t, "1.up_proj.weight"), "1.up_proj.weight' is missing, though layer 0 has"),
        ("BF16_default", lambda t: shorter(t, "1.up_proj.weight"), r"has shape \[128, 256\], but must be \[256, 256\]"),
        (
            "BF16_default",
            lambda t: with_first(t, "1.up_proj.weight", b"\x80\x7f"),
            "1.up_proj.weight': row 0 of NUMA part 0 of expert 1 holds a number that is not finite; download",
        ),
    ],
)
def test_damaged_tensors_are_refused(
    name: str, change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    layer = native.read(name)
    path = layer.write(tmp_path, change(layer.tensors))
    with pytest.raises(InputError, match=message) as raised:
        Experts.load(path, 0)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_moe", "hidden_act": "gelu"}, "layer 0 compute gelu.gate. . up, this runtime silu"),
        ({"model_type": "qwen3_moe", "swiglu_limit": 7.0}, "clamp gate and up to 7.0, this runtime"),
        ({"model_type": "llama4"}, "multiply routing weights with their input"),
    ],
)
def test_experts_that_compute_something_else_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    layer = native.read("BF16_default")
    tensors = layer.tensors
    if config["model_type"] == "llama4":
        tensors = renamed(tensors, lambda name: name.replace("mlp", "feed_forward"))
    with pytest.raises(UnsupportedError, match=message):
        Experts.load(layer.write(tmp_path, tensors, num_hidden_layers=1, **config), 0)
