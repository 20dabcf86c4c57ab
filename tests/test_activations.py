"""The kernels of activations agree with their NumPy definitions, in value and in slope, and among instruction sets."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktconvert.native_quant
from ktconvert.layouts.checkpoints.expert_function import ACTIVATIONS, ExpertFunction
from ktconvert.layouts.errors import ArgumentError
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.hot_experts import compute_activation
from ktconvert.native_quant.runtime.pool import Pool
from rig import isas
from rig.floats import from_bits, to_bits

KERNELS = Path(ktconvert.native_quant.__file__).parent / "csrc" / "kernels.def"
FAMILIES = re.findall(r"^FAMILY\((\w+),", KERNELS.read_text(), re.MULTILINE)
ROWS = 32  # of a panel

FUNCTIONS = {
    "silu": ExpertFunction(),
    "silu limited": ExpertFunction(limit=2.5),
    "swiglu_step": ExpertFunction("swiglu_step", limit=1.5),
    "swiglu_oai": ExpertFunction("swiglu_oai", limit=7.0, alpha=1.702),
    "softcap": ExpertFunction("softcap", alpha=4.0, beta=25.0),
    "softcap of gate": ExpertFunction("softcap", alpha=4.0),
    "gelu_tanh": ExpertFunction("gelu_tanh"),
    "gelu_erf": ExpertFunction("gelu_erf"),
    "relu": ExpertFunction("relu"),
    "relu2": ExpertFunction("relu2"),
    "relu2 ungated": ExpertFunction("relu2", gated=False),
}


class Function(ctypes.Structure):
    """ktq_function."""

    _fields_ = (
        ("activation", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "beta")),
        ("ungated", ctypes.c_int),
        ("weights_on_input", ctypes.c_int),
    )


class Activation(ctypes.Structure):
    """kt_activation."""

    _fields_ = (
        ("function", ctypes.POINTER(Function)),
        ("m", ctypes.c_int64),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_pitch", ctypes.c_int64),
        ("by_gate", ctypes.c_void_p),
        ("by_up", ctypes.c_void_p),
    )


def run_kernel(function: ExpertFunction, gate: Any, up: Any) -> tuple[Any, Any, Any]:
    """Return value and slopes by gate and up, [m, 32] each, from the kernel of the instruction set in use."""
    table = ctypes.cast(int(ffi.cast("uintptr_t", lib.ktq_kernels())), ctypes.POINTER(ctypes.c_void_p))
    kernel: Callable[[Any], None] = ctypes.CFUNCTYPE(None, ctypes.POINTER(Activation))(
        table[FAMILIES.index(function.activation)]  # type: ignore[arg-type]
    )
    number = getattr(lib, f"KTQ_{function.activation.upper()}")
    settings = Function(number, function.limit, function.alpha, function.beta, not function.gated, 0)
    value, by_gate, by_up = (np.zeros_like(gate) for _ in range(3))
    second = up.ctypes.data if function.gated else None
    common = ctypes.pointer(settings), len(gate), gate.ctypes.data, second
    kernel(Activation(*common, value.ctypes.data, ROWS, None, None))
    kernel(Activation(*common, None, 0, by_gate.ctypes.data, by_up.ctypes.data))
    return value, by_gate, by_up


def samples(seed: int) -> tuple[Any, Any]:
    """Return gate and up, float32 [96, 32]: from tiny to beyond all limits, of both signs."""
    rng = np.random.default_rng(seed)
    gate, up = (rng.standard_normal((96, ROWS)) * 10.0 ** rng.uniform(-6, 1.5, (96, ROWS)) for _ in range(2))
    return gate.astype(np.float32), up.astype(np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_equal_the_definition(name: str) -> None:
    function, (gate, up) = FUNCTIONS[name], samples(0)
    expected = function.compute(gate.astype(np.float64), up.astype(np.float64) if function.gated else 1.0)
    value, _, _ = run_kernel(function, gate, up)
    # gelu goes to 0 where its factor (1 + erf) / 2 has a constant absolute error; exp(-88) is the smallest of silu.
    factor = np.abs(gate) * (np.abs(up) + 1 if function.gated else 1)
    assert (np.abs(value - expected) <= 3e-6 * np.abs(expected) + 2e-7 * factor + 1e-30).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_equal_difference_quotients(name: str) -> None:
    function, (gate, up) = FUNCTIONS[name], samples(1)
    edges = [0.0, function.limit] if function.limit else [0.0]
    for values in (gate, up):  # a difference quotient across an edge is no derivative
        for edge in edges:
            values[np.abs(np.abs(values) - edge) < 1e-4] += 3e-4
    g, u, step = gate.astype(np.float64), up.astype(np.float64), 1e-6
    if function.activation == "swiglu_step":  # its edge is where silu(gate) reaches the limit
        near = np.abs(g / (1 + np.exp(-g)) - function.limit) < 1e-4
        gate[near] += 1e-3
        g = gate.astype(np.float64)
    _, by_gate, by_up = run_kernel(function, gate, up)
    if not function.gated:
        u = np.ones_like(u)
    quotient = (function.compute(g + step, u) - function.compute(g - step, u)) / (2 * step)
    np.testing.assert_allclose(by_gate, quotient, rtol=2e-4, atol=2e-4)
    if function.gated:
        quotient = (function.compute(g, u + step) - function.compute(g, u - step)) / (2 * step)
        np.testing.assert_allclose(by_up, quotient, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_instruction_sets_give_the_same_bits(name: str) -> None:
    gate, up = samples(2)
    gate[:4, :8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38]
    up[2:6, :8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38]
    results = {}
    for isa in isas.each():
        results[isa] = run_kernel(FUNCTIONS[name], gate, up)
    first = results["scalar"]
    for isa, result in results.items():
        for expected, actual in zip(first, result, strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=isa)


def test_every_activation_is_tested() -> None:
    assert {function.activation for function in FUNCTIONS.values()} == set(ACTIVATIONS)
    assert {getattr(lib, f"KTQ_{name.upper()}") for name in ACTIVATIONS} == set(range(len(ACTIVATIONS)))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8"])
def test_outputs_are_normalized_before_they_are_weighted(method: str, parts: int) -> None:
    rng = np.random.default_rng(3)
    gate, up = (to_bits(rng.standard_normal((4, 256, 128)) / 8) for _ in range(2))
    down, hidden = to_bits(rng.standard_normal((4, 128, 256)) / 8), to_bits(rng.standard_normal((33, 128)))
    ids = np.stack([rng.permutation(4)[:3] for _ in hidden])
    weights = rng.random((33, 3), np.float32)
    ids[5, 1], ids[6] = -1, -1
    norm = factors, epsilon = 1 + rng.standard_normal(128).astype(np.float32) / 4, 1e-6
    function = ExpertFunction(output_norm=True)
    results = []
    for threads in (1, 3):
        pool = Pool(threads, numa_nodes=[0])
        settings: Any = {"method": method, "parts": parts, "function": function, "pool": pool}
        with KTExperts.from_bf16(gate, up, down, **settings) as experts:
            results.append(experts.forward(hidden, ids, weights, norm=norm))
            ones = np.ones((33, 1), np.float32)
            each = [from_bits(experts.forward(hidden, ids[:, [j]], ones, norm=norm)) for j in range(3)]
            with pytest.raises(ValueError, match="norm of their output; give forward the norm"):
                experts.forward(hidden, ids, weights)
            for wrong, message in (
                (factors, r"norm must be a tuple of an array and a number, not float32 \[128\]"),
                ((factors[1:], epsilon), r"norm\[0\] must be a NumPy array of float32 \[128\]"),
                ((factors, 0.0), r"norm\[1\] must be a number above 0, not 0"),
            ):
                with pytest.raises(ArgumentError, match=message):
                    experts.forward(hidden, ids, weights, norm=wrong)
    np.testing.assert_array_equal(*results)
    plain = KTExperts.from_bf16(gate, up, down, method=method, parts=parts)
    expected = np.zeros((33, 128))
    for j in range(3):
        z = from_bits(plain.forward(hidden, ids[:, [j]], ones)) * factors
        z /= np.sqrt((z * z).mean(1, keepdims=True) + epsilon)
        np.testing.assert_allclose(each[j], z, rtol=0.005, atol=1e-6)
        expected += weights[:, [j]] * z
    np.testing.assert_allclose(from_bits(results[0]), expected, rtol=0.005, atol=1e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_computes_the_definition(name: str) -> None:
    torch = pytest.importorskip("torch")
    function, (gate, up) = FUNCTIONS[name], samples(4)
    inputs = (gate, up) if function.gated else (gate,)
    expected = function.compute(*(values.astype(np.float64) for values in inputs))
    first, second = torch.from_numpy(gate), torch.from_numpy(up) if function.gated else None
    value = compute_activation(function, first, second).numpy()
    assert (np.abs(value - expected) <= 1e-5 * np.abs(expected) + 2e-6 * np.abs(gate) * (np.abs(up) + 1) + 1e-30).all()
