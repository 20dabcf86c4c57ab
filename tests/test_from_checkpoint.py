"""kt-kernel's native methods computed from checkpoints: results are closer to float64 than kt-kernel's, or refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant.matrix import decode
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool
from rig import encodings, floats, native
from rig.files import rewrite
from rig.native import Native, distance
from rig.safetensors import Tensor, Tensors, read_file, write_file

# Bound of the relative L2 distance from float64 with the same weights. Rounding h and the output to BF16 gives 2.4e-3;
# kt-kernel's own outputs have 3.7e-3.
NEAR_FLOAT64 = 2.8e-3


@pytest.fixture(scope="module", params=native.NAMES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Native, Path]:
    layer = native.read(request.param)
    return layer, layer.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(2)


def forward(experts: KTExperts, layer: Native) -> Any:
    return experts.forward(layer.hidden, layer.ids, layer.weights)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("parts", [1, 2])
def test_at_least_as_close_to_float64_as_kt_kernel(golden: tuple[Native, Path], parts: int, pool: Pool) -> None:
    layer, path = golden
    with KTExperts.load(path, 0, method=layer.method, parts=parts, pool=pool) as experts:
        out = forward(experts, layer)
    assert experts.parts == parts and experts.method == layer.method
    assert distance(out, layer.truth) < min(NEAR_FLOAT64, distance(layer.kt_kernel, layer.truth))


def test_memory_is_close_to_the_size_of_the_file(golden: tuple[Native, Path]) -> None:
    layer, path = golden
    stored = sum(len(tensor.data) for name, tensor in layer.tensors.items() if not name.endswith("weight_shape"))
    assert stored <= KTExperts.load(path, 0).nbytes <= 1.04 * stored  # scales of GPTQ become float32


def forward_in_float64(layer: Native, path: Path, limit: float, alpha: float, least: float = -np.inf) -> Any:
    """Return the layer's output, computed in float64 from weights that BF16 represents exactly."""
    model = recognize(open_checkpoint(path))

    def linear(expert: int, projection: str) -> Any:
        return floats.from_bits(decode(model.linear(0, expert, projection)))

    return floats.forward(linear, layer.hidden, layer.ids, layer.weights, limit, alpha, least)


ACTIVATIONS = [
    *((name, 0.25, 0.0) for name in ("FP8_default", "MXFP4_v4", "RAWINT4_kimi", "GPTQ_INT4_default")),
    *(("MXFP8_m3", limit, alpha) for limit, alpha in ((0.25, 0.0), (0.25, 1.702), (0.0, 1.702))),
]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("name", "limit", "alpha"), ACTIVATIONS)
def test_limited_and_scaled_activations_are_computed(
    name: str, limit: float, alpha: float, pool: Pool, tmp_path: Path
) -> None:
    layer = native.read(name)
    # Scales become powers of two, so that BF16 represents all weights exactly.
    exponents = {"F32": (np.uint32, 0xFF800000), "BF16": (np.uint16, 0xFF80), "F16": (np.uint16, 0xFC00)}

    def power_of_two(tensor: Tensor) -> Tensor:
        if tensor.dtype not in exponents:
            return tensor
        kind, mask = exponents[tensor.dtype]
        return tensor._replace(data=(np.frombuffer(tensor.data, kind) & kind(mask)).tobytes())

    tensors = {name: power_of_two(tensor) for name, tensor in layer.tensors.items()}
    path = layer.write(tmp_path, tensors)
    hidden = floats.to_bits(floats.from_bits(layer.hidden) * 8)
    layer = replace(layer, hidden=hidden)
    experts = KTExperts.load(path, 0, parts=2, pool=pool, swiglu_limit=limit, swiglu_alpha=alpha)
    expected = forward_in_float64(layer, path, limit, alpha)
    assert distance(forward(experts, layer), expected) < NEAR_FLOAT64
    assert distance(forward(KTExperts.load(path, 0, pool=pool), layer), expected) > 10 * NEAR_FLOAT64


UNSUPPORTED_ACTIVATIONS = [
    ("MXFP8_m3", {"swiglu_limit": -1.0}, "swiglu_limit must be a finite number of at least 0, not -1.0"),
    ("MXFP8_m3", {"swiglu_alpha": float("nan")}, "swiglu_alpha must be a finite number of at least 0, not nan"),
]


@pytest.mark.parametrize(("name", "swiglu", "message"), UNSUPPORTED_ACTIVATIONS)
def test_unsupported_activations_are_rejected(name: str, swiglu: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        KTExperts.load(native.read(name).write(tmp_path), 0, **swiglu)


def nvfp4(folder: Path) -> tuple[Native, Path]:
    """Return a layer with modelopt's names; scales of whole weights are powers of two, so that BF16 is exact."""

    def change(tensors: Any, _: Any) -> None:
        tensors |= {name: ("F32", np.full((), 2.0**-13, np.float32)) for name in tensors if name.endswith("_scale_2")}

    path, _ = encodings.write("modelopt NVFP4", folder, change)
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(2) for _ in range(7)]).astype(np.int64)
    inputs = floats.activations(7, encodings.H), ids, rng.random((7, 2)).astype(np.float32)
    layer = Native("NVFP4", read_file(path / "model.safetensors"), *inputs, np.empty(0), np.empty(0, np.uint16))
    return replace(layer, truth=forward_in_float64(layer, path, 0, 0)), path


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("parts", [1, 2])
def test_nvfp4_is_close_to_float64(parts: int, pool: Pool, tmp_path: Path) -> None:
    layer, path = nvfp4(tmp_path)
    experts = KTExperts.load(path, 0, method="NVFP4", parts=parts, pool=pool)
    assert experts.parts == parts and distance(forward(experts, layer), layer.truth) < NEAR_FLOAT64


def rename_tensors(tensors: Tensors, change: Callable[[str], str]) -> Tensors:
    return {change(name): tensor for name, tensor in tensors.items()}


CONTRADICTIONS = [
    ({"method": "AMXINT4"}, "layer 0 are BF16, which method BF16 computes, not AMXINT4; give"),
    ({"layer": 3}, "has no experts in layer 3, but in 0; give one of these"),
    ({"parts": 3}, r"3 NUMA slices: .* 256 does not divide by 3. Legal .*: 1, 2, 4, 8\."),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_arguments_that_contradict_the_checkpoint_are_rejected(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = native.read("BF16_default").write(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        KTExperts.load(path, **{"layer": 0} | options)
    with pytest.raises(InputError, match=r"num_experts 2, not 4 \(from its tensors\)"):
        KTExperts.load(path, 0, num_experts=4)


def halve(tensor: Tensor) -> Tensor:
    return tensor._replace(shape=(tensor.shape[0] // 2, *tensor.shape[1:]), data=tensor.data[: len(tensor.data) // 2])


def overwrite_start(data: bytes) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor._replace(data=data + tensor.data[len(data) :])


NAN, LARGEST = b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f"  # float32
NOT_FINITE = ".weight': row 0 of NUMA slice 0 of expert 1 contains a number that is not finite; download"
INFINITE = ".weight': row .* contains a number that is not finite;"
# (checkpoint, end of the name of a tensor of expert 1, change, message)
DAMAGES = [
    ("BF16_default", "up_proj.weight", lambda tensor: None, "1.up_proj.weight' is missing, though layer 0 has"),
    ("BF16_default", "up_proj.weight", halve, r"has shape \[128, 256\], but must be \[256, 256\]"),
    ("BF16_default", "up_proj.weight", overwrite_start(b"\x80\x7f"), f"1.up_proj{NOT_FINITE}"),
    ("FP8_default", "up_proj.weight_scale_inv", overwrite_start(NAN), r"scale \[0, 0\] is nan; download it"),
    ("MXFP4_v4", "w3.scale", overwrite_start(b"\xff"), r"scale \[0, 0\] is nan; download it"),
    ("FP8_default", "up_proj.weight_scale_inv", overwrite_start(LARGEST), f"1.up_proj{INFINITE}"),
    ("FP8_PERCHANNEL_default", "up_proj.weight_scale", overwrite_start(LARGEST), f"1.up_proj{INFINITE}"),
    ("MXFP4_v4", "w3.scale", overwrite_start(b"\xfe"), f"1.w3{INFINITE}"),
    ("MXFP8_m3", "w3.weight_scale_inv", overwrite_start(b"\xfe"), f"1.w3{INFINITE}"),
    ("RAWINT4_kimi", "up_proj.weight_scale", overwrite_start(b"\xc0\x7f"), r"scale \[0, 0\] is nan; download it"),
    (
        "RAWINT4_kimi",
        "up_proj.weight_scale",
        overwrite_start(b"\x7f\x7f"),
        "1.up_proj.weight_packed': row .* is not finite;",
    ),
    ("RAWINT4_kimi", "up_proj.weight_scale", lambda tensor: None, "up_proj.weight_scale is missing"),
    ("RAWINT4_kimi", "up_proj.weight_scale", halve, "of shape .128, 8. does not fit"),
    (
        "RAWINT4_kimi",
        "up_proj.weight_shape",
        overwrite_start(b"\x01"),
        r"weight_shape' is \[257, 256\], but the codes are for",
    ),
]


@pytest.mark.parametrize(("name", "ending", "change", "message"), DAMAGES)
def test_damaged_tensors_are_rejected(
    name: str, ending: str, change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    layer = native.read(name)
    changed = {n: change(t) if n.endswith(f"1.{ending}") else t for n, t in layer.tensors.items()}
    path = layer.write(tmp_path, {n: t for n, t in changed.items() if t is not None})
    with pytest.raises(InputError, match=message) as raised:
        KTExperts.load(path, 0)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_a_weight_scale_that_causes_infinity_is_rejected(tmp_path: Path) -> None:
    """The products with scales of groups are finite: 2^0 times 2^126, but the code 6 overflows."""
    (layer, _), key = nvfp4(tmp_path), "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors = layer.tensors
    ones, large = bytes([0x38]) * len(tensors[f"{key}_scale"].data), np.float32(2.0**126).tobytes()
    changes = {f"{key}_scale": ones, f"{key}_scale_2": large}
    layer.write(tmp_path, {name: t._replace(data=changes.get(name, t.data)) for name, t in tensors.items()})
    with pytest.raises(InputError, match=f"'{key}': row 1 .* contains a number that is not finite; download it again"):
        KTExperts.load(tmp_path, 0)


OTHER_COMPUTATIONS = [
    ("qwen3_moe", {"hidden_act": "gelu"}, r"layer 0 compute gelu\(gate\) \* up, not silu"),
    (
        "qwen3_moe",
        {"swiglu_limit": 7.0},
        "layer 0 compute silu.*limited to 7, not .*limited to 0.5; use .* or leave out swiglu_limit",
    ),
]


@pytest.mark.parametrize(("family", "config", "message"), OTHER_COMPUTATIONS)
def test_experts_with_a_different_computation_are_rejected(
    family: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    layer = native.read("BF16_default")
    with pytest.raises(UnsupportedError, match=message):
        path = layer.write(tmp_path, layer.tensors, num_hidden_layers=1, model_type=family, **config)
        KTExperts.load(path, 0, swiglu_limit=0.5)


NO_METHOD = {
    "E8M0 of 32x64": "MXFP8 with a scale for each 32 x 64",
    "ct 4 zeros": "INT4 with group_size 32, scales in F16, a zero_point, sym false",
    "ct 4 bytes": "INT4 with group_size 64, scales in F16",
    "ct 4 order": "INT4 with group_size 128, scales in F16, a g_idx, desc_act true",
    "gptq 4 v1": "GPTQ (4 bits) with group_size 32, scales in F16, sym false",
    "gptq 4 order": "GPTQ (4 bits) with group_size 128, scales in F16, sym false, desc_act true",
}


@pytest.mark.parametrize("kind", NO_METHOD)
def test_unsupported_weights_are_described_and_rejected(kind: str, tmp_path: Path) -> None:
    path, _ = encodings.write(kind, tmp_path / "model")
    message = re.escape(f"layer 0 are {NO_METHOD[kind]}, which no method of this runtime computes")
    with pytest.raises(UnsupportedError, match=message):
        KTExperts.load(path, 0)
    if kind.startswith("E8M0"):
        with pytest.raises(UnsupportedError, match=f"{message}, and neither does MXFP8; convert"):
            KTExperts.load(path, 0, method="MXFP8")


def write_gptq(folder: Path, group: int, **config: Any) -> tuple[Path, Any]:
    """Write a symmetric GPTQ checkpoint with all tensors of AutoGPTQ; return it with its values in BF16."""
    pack = encodings.integers(4, group, encodings.gptq("gptq"), zeros=False)
    encoding = encodings.Encoding("GPTQ_INT4", "gptq", pack)
    tensors, values = encodings.tensors_of(encoding)
    return encodings.checkpoint(folder, tensors, encodings.gptq_config(4, group, **{"sym": True} | config)), values


@pytest.mark.parametrize("config", [{}, {"checkpoint_format": None}])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_gptq_group_size_is_computed(group: int, config: dict[str, Any], tmp_path: Path) -> None:
    path, values = write_gptq(tmp_path / "a", group, **config)
    experts = KTExperts.load(path, 0, method="GPTQ_INT4")
    assert experts.method == "GPTQ_INT4"
    assert_same_forward(experts, KTExperts.load(encodings.write_plain(tmp_path / "b", values), 0))


BAD_GPTQ = [
    (
        "qzeros",
        overwrite_start(b"\x76"),
        "qzeros' holds zero points other than 8, but no config has sym: false; convert",
    ),
    ("g_idx", lambda x: x._replace(data=x.bits[::-1].tobytes()), "g_idx' holds an order of columns, but no"),
    ("scales", halve, r"qzeros' is I32 of shape \[2, 48\]; .*qweight' and its scales require"),
    ("qweight", halve, "does not fit its zero points and g_idx with codes of 4 bits; check bits"),
]


@pytest.mark.parametrize(("role", "change", "message"), BAD_GPTQ)
def test_gptq_tensors_that_contradict_the_config_are_rejected(
    role: str, change: Any, message: str, tmp_path: Path
) -> None:
    path, _ = write_gptq(tmp_path / "model", 128)
    file, name = path / "model.safetensors", f"model.layers.0.mlp.experts.1.up_proj.{role}"
    tensors = read_file(file)
    write_file(file, tensors | {name: change(tensors[name])})
    with pytest.raises(KTConvertError, match=message) as raised:
        KTExperts.load(path, 0)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


STORED = {"ct MXFP4": "MXFP4", "blocks": "MXFP4", "E8M0 of 128x128": "FP8", "ct 4": "RAWINT4", "gptq 4": "GPTQ_INT4"}
STORED["ct NVFP4"] = "NVFP4"


@pytest.mark.parametrize("kind", STORED)
def test_other_encodings_of_the_same_numbers_give_the_same_result(kind: str, tmp_path: Path) -> None:
    """The reference is a BF16 checkpoint with the same values."""
    path, values = encodings.write(kind, tmp_path / "a")
    experts = KTExperts.load(path, 0)
    assert experts.method == STORED[kind]
    assert_same_forward(experts, KTExperts.load(encodings.write_plain(tmp_path / "b", values), 0))


def assert_same_forward(experts: KTExperts, exact: KTExperts) -> None:
    """Require the forward of BF16 weights, except that each weight may be rounded."""
    assert exact.method == "BF16"
    hidden = floats.activations(5, experts.hidden)
    call = hidden, np.tile(np.arange(2), (5, 1)), np.full((5, 2), 0.5, np.float32)
    assert distance(experts.forward(*call), floats.from_bits(exact.forward(*call))) < 2 * NEAR_FLOAT64


def test_a_rewritten_file_is_read_again(tmp_path: Path) -> None:
    layer = native.read("BF16_default")
    path = layer.write(tmp_path)
    with pytest.raises(UnsupportedError, match="has no experts in layer 1"):
        KTExperts.load(path, 1)
    moved = rename_tensors(layer.tensors, lambda name: name.replace("layers.0", "layers.1"))
    again = layer.write(tmp_path / "b", moved) / "model.safetensors"
    rewrite(path / "model.safetensors", again.read_bytes())
    expected = forward(KTExperts.load(tmp_path / "b", 1), layer)
    np.testing.assert_array_equal(forward(KTExperts.load(path, 1), layer), expected)


def test_result_is_at_least_as_close_as_that_of_kt_kernel(tmp_path: Path, peer_python: str) -> None:
    """Covers NVFP4, which has no golden file, and other activations.

    With alpha, kt-kernel's kernels without AMX limit the gate on both sides, but transformers only above.
    """
    runs: dict[str, Any] = {}
    cases, limited = {}, {}
    for name, method, limit, alpha in (
        ("nvfp4", "NVFP4", 0.0, 0.0),
        ("MXFP4_v4", "MXFP4", 0.25, 0.0),
        ("MXFP8_m3", "MXFP8", 0.25, 0.0),
        ("MXFP8_m3", "MXFP8", 0.25, 1.702),
        ("MXFP8_m3", "MXFP8", 0.0, 1.702),
    ):
        key, path = f"{name}.{limit}.{alpha}", tmp_path / name
        layer, _ = nvfp4(path) if name == "nvfp4" else (native.read(name), native.read(name).write(path))
        if limit or alpha:
            layer = replace(layer, hidden=floats.to_bits(floats.from_bits(layer.hidden) * 8))
            layer = replace(layer, truth=forward_in_float64(layer, path, limit, alpha))
        if limit and alpha:
            limited[key] = forward_in_float64(layer, path, limit, alpha, -limit)
        tensors = {"hidden": ("BF16", layer.hidden), "ids": ("I64", layer.ids), "weights": ("F32", layer.weights)}
        inputs = write_file(tmp_path / f"{key}.safetensors", tensors)
        experts = KTExperts.load(path, 0, method=method, swiglu_limit=limit, swiglu_alpha=alpha)
        sizes = {"experts": 2, "topk": 2, "hidden": experts.hidden, "width": experts.intermediate}
        options = {"path": str(path), "method": method, "limit": limit, "alpha": alpha, "inputs": str(inputs)}
        runs[key], cases[key] = sizes | options, (layer.truth, forward(experts, layer))
    theirs = native.run_kt_kernel(peer_python, runs, tmp_path)
    for key, (truth, ours) in cases.items():
        assert distance(ours, truth) <= distance(theirs[key].bits, truth), key
        assert min(distance(theirs[key].bits, each) for each in (truth, limited.get(key, truth))) < 2.0**-6, key
