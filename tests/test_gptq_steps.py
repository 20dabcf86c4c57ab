"""The three steps of GPTQ together equal llmcompressor's; with one scale per row, they equal the paper's algorithm."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant.compensation import CodeRange
from ktconvert.quantizers import packed
from rig import reference

if find_spec("torch") is None or find_spec("llmcompressor") is None:
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

import torch

from ktconvert.quantizers import gptq

RANGES = {"W4A16": CodeRange(-8, 7), "W8A16": CodeRange(-128, 127)}
BITS = {"W4A16": 4, "W8A16": 8}
pytestmark = pytest.mark.usefixtures("one_thread")


def make_hessian(k: int, dead: int = 0, batches: tuple[int, ...] = (900, 0, 7), seed: int = 0) -> gptq.Hessian:
    """Return a Hessian of correlated inputs of different sizes; the first `dead` columns are 0."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) * torch.linspace(0.1, 3, k)
    hessian = gptq.Hessian.empty(k)
    for tokens in batches:
        x = torch.randn(tokens, k, generator=generator) @ mixing
        x[:, :dead] = 0
        hessian.add(x.bfloat16())
    return hessian


def linear(n: int, k: int, group: int, bits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and their absmax scales, both BF16."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(n, k, generator=generator) * 0.02).bfloat16()
    scale = reference.group_scales(bits, group, weight.view(torch.uint16).numpy())
    return weight, torch.from_numpy(scale).view(torch.bfloat16)


def quantize_by_library(
    bits: int, group: int, weight: torch.Tensor, scale: torch.Tensor, hessian: Any, dampening: float, order: Any
) -> tuple[torch.Tensor, bool]:
    """Call quantize_weight of llmcompressor; return values float32 [n, k], and whether it rounded to nearest."""
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    strategy: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    args = QuantizationArgs(**strategy, group_size=group, actorder=order)
    scales: dict[str, Any] = {"scale": scale[None], "zero_point": torch.zeros_like(scale)[None], "global_scale": None}
    arguments = {"weights": weight.float()[None], "hessians": hessian[None].clone(), "quant_args": args}
    values, _, fell_back = quantize_weight(**arguments, **scales, percdamp=dampening)  # type: ignore[misc]
    return values[0], bool(fell_back[0])


@pytest.mark.parametrize("order", ["static", None])
@pytest.mark.parametrize("dampening", [1e-6, 0.1])
@pytest.mark.parametrize(
    ("n", "k", "group", "dead"),
    [(65, 320, 64, 0), (1, 128, 128, 127), (33, 200, 40, 150), (300, 384, 128, 3), (4, 130, 130, 1)],
)
@pytest.mark.parametrize("quant_type", RANGES)
def test_gptq_steps_equal_llmcompressor(
    quant_type: str, n: int, k: int, group: int, dead: int, dampening: float, order: str | None
) -> None:
    """Values, fallback and the codes that compressed-tensors packs are equal."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    bits, code_range = BITS[quant_type], RANGES[quant_type]
    weight, scale = linear(n, k, group, bits)
    hessian = make_hessian(k, dead)
    mean = hessian.sum / torch.tensor(float(hessian.batches))
    values, fell_back = quantize_by_library(bits, group, weight, scale, mean, dampening, order)
    factor = gptq.factorize_hessian(hessian, dampening, by_activation=order is not None)
    actual = gptq.round_columns(weight, factor, scale, code_range)
    assert torch.equal(actual.view(torch.int32), values.view(torch.int32)) and factor.fell_back == fell_back
    assert int(factor.dead.sum()) == dead

    args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group)
    for x, s in ((values, scale.float()), (values.bfloat16(), scale)):
        expected = quantize(x=x, scale=s, zero_point=None, args=args, dtype=torch.int8)
        codes = gptq.find_codes(x, s, code_range)
        assert torch.equal(codes, expected)
        if k * bits % 32 == 0:
            assert np.array_equal(packed.pack_words(bits, codes.numpy()), pack_to_int32(expected, bits).numpy())


def test_hessians_equal_those_of_llmcompressor() -> None:
    from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian

    reader = torch.nn.Linear(96, 1, bias=False, device="meta")
    theirs, count = make_empty_hessian(reader, device=torch.device("cpu")), torch.zeros(())
    ours = gptq.Hessian.empty(96)
    for tokens in (1, 50, 3):
        x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        accumulate_hessian(x, reader, theirs, count)
        ours.add(x)
    assert torch.equal(ours.sum, theirs) and ours.batches == int(count) == 3


def test_hessian_without_a_factor_rounds_to_nearest() -> None:
    """llmcompressor does the same for a Hessian that is not positive definite."""
    weight, scale = linear(9, 64, 32, 4)
    hessian = make_hessian(64)
    hessian.sum[3, 5] = hessian.sum[5, 3] = 1e9
    factor = gptq.factorize_hessian(hessian, 0.01)
    actual = gptq.round_columns(weight, factor, scale, CodeRange(-8, 7))
    expected, fell_back = quantize_by_library(4, 32, weight, scale, hessian.sum / hessian.batches, 0.01, "static")
    assert fell_back and factor.fell_back and torch.equal(actual, expected)
    nearest, _ = reference.quantize_groups(4, 32, weight.view(torch.uint16).numpy(), "float32")
    assert np.array_equal(gptq.find_codes(actual, scale.float(), CodeRange(-8, 7)).numpy(), nearest)


@pytest.mark.parametrize("dampening", [1e-5, 1e-6, 1e-7])
def test_nearly_singular_hessian_rounds_to_nearest(dampening: float) -> None:
    """Its inverse may have no factor, for which llmcompressor raises an error."""
    weight, scale = linear(3, 384, 128, 4)
    hessian = make_hessian(384, dead=3, batches=(100,))
    try:
        _, fell_back = quantize_by_library(4, 128, weight, scale, hessian.sum / hessian.batches, dampening, "static")
    except torch.linalg.LinAlgError:
        fell_back = True
    factor = gptq.factorize_hessian(hessian, dampening)
    assert factor.fell_back == fell_back == torch.equal(factor.upper, torch.eye(384))
    assert torch.isfinite(gptq.round_columns(weight, factor, scale, CodeRange(-8, 7))).all()


def test_linears_that_share_a_hessian_can_be_one_tall_matrix() -> None:
    factor = gptq.factorize_hessian(make_hessian(160), 0.01)
    parts = [linear(n, 160, 32, 4, seed=n) for n in (5, 64, 1)]
    tall = gptq.round_columns(
        torch.cat([w for w, _ in parts]), factor, torch.cat([s for _, s in parts]), CodeRange(-8, 7)
    )
    for part, (weight, scale) in zip(tall.split([5, 64, 1]), parts, strict=True):
        assert torch.equal(part, gptq.round_columns(weight, factor, scale, CodeRange(-8, 7)))


def test_wrong_shapes_and_values_that_are_not_finite_are_refused() -> None:
    weight, scale = linear(3, 64, 32, 4)
    broken = make_hessian(64)
    broken.sum[7, 7] = torch.inf
    with pytest.raises(gptq.NotFinite, match="Hessian of its calibration inputs"):
        gptq.factorize_hessian(broken, 0.01)
    with pytest.raises(gptq.NotFinite, match="Hessian"):
        gptq.factorize_hessian(gptq.Hessian.empty(64), 0.01)  # no batch
    factor = gptq.factorize_hessian(make_hessian(64), 0.01)
    with pytest.raises(gptq.NotFinite, match="loss of GPTQ is"):
        gptq.round_columns(weight * torch.inf, factor, scale, CodeRange(-8, 7))
    with pytest.raises(ValueError, match="64 columns do not fall into 3 groups"):
        gptq.round_columns(weight, factor, scale[:, [0, 1, 1]], CodeRange(-8, 7))
    with pytest.raises(ValueError, match=r"must be bfloat16 or float32, not torch\.float16"):
        gptq.round_columns(weight, factor, scale.half(), CodeRange(-8, 7))


def gptq_in_float64(
    weight: Any, hessian: Any, scale: Any, code_range: CodeRange, dampening: float, ordered: bool
) -> Any:
    """Return the codes [n, k] of GPTQ in float64, without Cholesky and blocks (arXiv 2210.17323, equations 2 and 3).

    After each column, one step of Gaussian elimination gives the inverse of the remaining H.
    """
    h, w = hessian.copy(), weight.astype(np.float64)
    k = len(h)
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    order = np.argsort(-np.diag(hessian), kind="stable") if ordered else np.arange(k)
    inverse = np.linalg.inv(h + dampening * np.diag(h).mean() * np.eye(k))
    codes = np.zeros(w.shape, np.int64)
    for i in order:
        codes[:, i] = np.clip(np.rint(w[:, i] / scale), *code_range[:2])
        error = (w[:, i] - codes[:, i] * scale) / inverse[i, i]
        w -= np.outer(error, inverse[i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = np.inf  # never used again
    return codes


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("bits", "step", "code_range"), [(4, 16, CodeRange(-7, 7)), (8, 1, CodeRange(-127, 127))])
def test_gptq_with_one_scale_per_row_equals_the_paper(
    bits: int, step: int, code_range: CodeRange, ordered: bool
) -> None:
    """Codes of AMXINT4 and AMXINT8 equal those of the definition except near ties."""
    n, k, dead = 64, 320, 4
    generator = torch.Generator().manual_seed(bits)
    weight = (torch.randn(n, k, generator=generator) * 0.02).bfloat16()
    weight[5] = 0  # its scale is 0
    nearest, row_scale = reference.quantize(bits, weight.view(torch.uint16).numpy())
    assert row_scale[5] == 0
    scale = torch.from_numpy(row_scale * np.float32(step))[:, None]
    hessian = make_hessian(k, dead)
    factor = gptq.factorize_hessian(hessian, 0.01, by_activation=ordered)
    values = gptq.round_columns(weight, factor, scale, code_range)
    codes = gptq.find_codes(values, scale, code_range)
    assert torch.equal(values, codes * scale)  # in float32, as numerics.md specifies for these formats
    assert code_range[0] <= int(codes.min()) and int(codes.max()) <= code_range[1]
    assert not codes[:, :dead].any() and not codes[5].any()

    h = hessian.sum.double().numpy() / hessian.batches
    x, s = weight.double().numpy(), np.where(row_scale == 0, 1, row_scale * step).astype(np.float64)
    expected = gptq_in_float64(x, h, s, code_range, 0.01, ordered)
    differ = (codes.numpy() != expected).mean()
    print(f"{bits} bits: {differ:.2%} of codes differ")
    assert differ < 0.02

    def loss(candidate: Any) -> float:
        error = x - candidate * s[:, None]
        return float(np.einsum("ni,ij,nj->", error, h, error))

    print(f"loss {loss(codes.numpy()):.4g}, oracle {loss(expected):.4g}, nearest {loss(nearest.astype(np.int64)):.4g}")
    assert loss(codes.numpy()) == pytest.approx(loss(expected), rel=0.02)
    assert loss(codes.numpy()) < 0.7 * loss(nearest.astype(np.int64))
