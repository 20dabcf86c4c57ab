"""The inner loop of GPTQ: kernels equal the NumPy definition. test_gptq_steps.py compares GPTQ with llmcompressor."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import compensation
from ktconvert.native_quant.compensation import CodeRange
from ktconvert.quantizers import FLOAT_GRIDS, reference
from rig import group_search, isas

RANGES = {
    "W4A16": CodeRange(-8, 7),
    "W8A16": CodeRange(-128, 127),
    "AMXINT4": CodeRange(-7, 7),
    "ternary": CodeRange(-1, 1),
    "unsigned": CodeRange(0, 15),
    "MXFP4": FLOAT_GRIDS["mxfp4"].code_range,
    "three bits": CodeRange(-112, 112, 3),
}
LIBRARY = (RANGES["W4A16"], RANGES["W8A16"])
KINDS = ("bf16", "f32")
NAMES = ("weight", "value", "error")


def to_bf16(x: Any) -> Any:
    return reference.bf16_to_f32(reference.f32_to_bf16(np.ascontiguousarray(x)))


def definition(code_range: CodeRange, kind: str, inverse: Any, scale: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Compute section 7 of numerics.md, a column at a time."""
    weight = weight.copy()
    value, error = np.empty_like(weight), np.empty_like(weight)
    with np.errstate(all="ignore"):
        for i in range(weight.shape[1]):
            code = group_search.nearest_codes(weight[:, i] / scale[:, i], code_range)
            value[:, i] = to_bf16(code * scale[:, i]) if kind == "bf16" else code * scale[:, i]
            error[:, i] = (weight[:, i] - value[:, i]) / inverse[i, i]
            weight[:, i:] -= error[:, i, None] * inverse[i, i:]
    return weight, value, error


def factor(rng: np.random.Generator, width: int) -> Any:
    """Return the upper Cholesky factor of an inverse Hessian; values below its diagonal must not be read."""
    inputs = rng.standard_normal((width, 2 * width)) * np.exp(rng.uniform(-2, 2, (width, 1)))
    upper = np.linalg.cholesky(np.linalg.inv(inputs @ inputs.T + 0.01 * np.eye(width))).T.astype(np.float32)
    upper[np.tril_indices(width, -1)] = np.nan
    return np.ascontiguousarray(upper)


def random_block(rng: np.random.Generator, n: int, width: int) -> tuple[Any, Any, Any]:
    """Return inverse, scale (BF16 values) and weight, with ties and outliers."""
    weight = (rng.standard_normal((n, width)) * 0.02).astype(np.float32)
    scale = to_bf16(np.exp(rng.uniform(-8, -2, (n, width))))
    ties = rng.random((n, width)) < 0.1
    weight[ties] = (scale * (rng.integers(-150, 150, (n, width)) + np.float32(0.5)))[ties]
    return factor(rng, width), scale, weight


def special_block(finite: bool) -> tuple[Any, Any, Any]:
    """Return a block with a row for each special case, and combinations of them."""
    n, width = 64, 48
    rng = np.random.default_rng(5)
    inverse, scale, weight = random_block(rng, n, width)
    weight[0] = 0
    weight[1] = -0.0
    weight[2] = 3.4e38 * rng.uniform(-1, 1, width)
    weight[3] = 1e-38 * rng.uniform(-1, 1, width)
    weight[4] = 2.0**-149 * rng.integers(-9, 9, width)
    weight[5], scale[5] = 1e-39 * rng.uniform(-1, 1, width), 2.0**-133 * rng.integers(1, 128, width)  # subnormal scales
    scale[6] = 2.0**-133
    scale[7] = 3.3895313892515355e38  # the largest BF16
    weight[8] = np.where(rng.random(width) < 0.5, 0.0, -0.0)
    weight[9] = 2.0 ** rng.integers(-149, 100, width)
    if not finite:
        scale[10] = 0
        weight[11], scale[11] = 0, 0
        weight[12, 7] = np.nan
        weight[13, 9] = -np.inf
        scale[14, 3] = np.inf
        scale[15, 20] = np.nan
        weight[16] = np.inf
        # Rounding to BF16 would overflow the bits of this NaN.
        weight[17] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
        weight[2], scale[2] = 3.4e38, 3.38953e38
        weight[40:44] = np.nan
    return inverse, scale, weight


def run_kernel(code_range: CodeRange, kind: str, inverse: Any, scale: Any, weight: Any, threads: int = 1) -> Any:
    """Run the kernel on a copy of the weights; return weight, value and error."""
    weight = weight.copy()
    value, error = np.full_like(weight, 7), np.full_like(weight, 7)
    compensation.gptq_block(code_range, kind, inverse, scale, weight, value, error, threads=threads)
    return weight, value, error


def assert_same(actual: Any, expected: Any) -> None:
    """Require equal bits, except those of NaN: the processor decides which operand's NaN it returns."""
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
        differ = np.argwhere((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b)))
        assert not len(differ), f"{name}: {len(differ)} values differ, first at {differ[0]}"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code_range", RANGES.values(), ids=RANGES)
def test_kernels_equal_the_definition(code_range: CodeRange, kind: str) -> None:
    rng = np.random.default_rng(code_range[1])
    for n, width in ((1, 1), (3, 128), (32, 32), (33, 127), (64, 128), (100, 96), (70, 31)):
        block = random_block(rng, n, width)
        expected = definition(code_range, kind, *block)
        assert np.isfinite(expected[2]).all() and expected[2].any()
        assert_same(run_kernel(code_range, kind, *block), expected)
    for finite in (True, False):
        block = special_block(finite)
        expected = definition(code_range, kind, *block)
        assert finite or np.isnan(expected[1]).any()
        assert_same(run_kernel(code_range, kind, *block), expected)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 150),
    width=st.integers(1, 128),
    code_range=st.one_of(
        st.sampled_from(list(RANGES.values())),
        st.builds(CodeRange, st.integers(-128, 0), st.integers(0, 127), st.just(0)),
    ),
    kind=st.sampled_from(KINDS),
    threads=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_kernels_equal_the_definition_for_any_shape_and_threads(
    n: int, width: int, code_range: CodeRange, kind: str, threads: int, seed: int
) -> None:
    block = random_block(np.random.default_rng(seed), n, width)
    expected = definition(code_range, kind, *block)
    for _ in isas.each():
        assert_same(run_kernel(code_range, kind, *block, threads=threads), expected)


@pytest.mark.usefixtures("isa")
def test_rows_are_independent() -> None:
    inverse, scale, weight = special_block(finite=False)
    all_rows = run_kernel(CodeRange(-8, 7), "bf16", inverse, scale, weight)
    for row in (slice(at, at + 1) for at in range(len(weight))):
        assert_same(run_kernel(CodeRange(-8, 7), "bf16", inverse, scale[row], weight[row]), [x[row] for x in all_rows])


def test_wrong_arguments_are_refused() -> None:
    inverse, scale, weight = random_block(np.random.default_rng(0), 5, 16)
    value, error = np.empty_like(weight), np.empty_like(weight)
    good: dict[str, Any] = {"code_range": CodeRange(-8, 7), "kind": "bf16", "inverse": inverse, "scale": scale}
    good |= {"weight": weight, "value": value, "error": error}
    compensation.gptq_block(**good)
    readonly = weight.copy()
    readonly.flags.writeable = False
    for change, message in (
        ({"code_range": CodeRange(-129, 127)}, "code_range must contain 0 and be within -128 to 127"),
        ({"code_range": CodeRange(1, 7)}, "code_range must contain 0"),
        ({"code_range": CodeRange(0, 128)}, "code_range must contain 0"),
        ({"code_range": CodeRange(-8, 7, 8)}, "precision must be 0 to 7"),
        ({"kind": "fp16"}, "kind 'fp16' is not one of"),
        ({"threads": 0}, "threads must be 1 or more"),
        ({"weight": weight[0]}, "not shape"),
        ({"weight": np.empty((0, 16), np.float32)}, "not shape"),
        ({"weight": np.empty((5, 129), np.float32)}, "1 to 128 columns"),
        ({"weight": weight.astype(np.float64)}, "weight must be float32"),
        ({"weight": readonly}, "weight must be writable"),
        ({"inverse": inverse[:15]}, "inverse must be float32 of shape"),
        ({"inverse": inverse.T}, "inverse must be contiguous"),
        ({"scale": scale[:, :1]}, "scale must be float32 of shape"),
        ({"value": value[:4]}, "value must be float32 of shape"),
        ({"error": value}, "may share memory"),
        ({"scale": value}, "may share memory"),
    ):
        with pytest.raises(ValueError, match=message):
            compensation.gptq_block(**{**good, **change})


def run_gpu_path(path: str, code_range: CodeRange, kind: str, inverse: Any, scale: Any, weight: Any) -> list[Any]:
    """Compute a block on the CPU by a path of quantizers.gptq that GPUs use."""
    import torch

    from ktconvert.quantizers import gptq

    work = torch.from_numpy(weight.copy())
    value, error = torch.full_like(work, 7), torch.full_like(work, 7)
    scales = torch.from_numpy(scale).to(torch.bfloat16 if kind == "bf16" else torch.float32)
    getattr(gptq, path)(gptq.Block(work, torch.from_numpy(inverse), scales, value, error), code_range)
    return [x.numpy() for x in (work, value, error)]


@pytest.mark.skipif(find_spec("llmcompressor") is None, reason="llmcompressor is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_paths_equal_the_definition(kind: str) -> None:
    """The code for GPUs runs on the CPU, where torch rounds as in the definition."""
    for n, width in ((1, 1), (75, 37), (64, 128)):
        block = random_block(np.random.default_rng(n), n, width)
        for code_range in RANGES.values():
            expected = definition(code_range, kind, *block)
            assert_same(run_gpu_path("_round_block_by_torch", code_range, kind, *block), expected)
            if code_range in LIBRARY:
                assert_same(run_gpu_path("_round_block_by_library", code_range, kind, *block), expected)
