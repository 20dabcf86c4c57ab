"""Tests of the differentiable experts: against float64, finite differences, numbers of threads, and checkpointing."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.training import Gradients, Lora, TrainingPass, compute_with_lora
from ktconvert.native_quant.runtime.weights import pack_linears
from ktconvert.quantizers.reference import f32_to_bf16
from rig import isas
from rig.training import Biases, compute, decode, differentiate, distance

E, H, WIDTH, K, RANK, SCALING = 5, 256, 384, 2, 8, 2.0
# Bounds of the distance to float64 gradients with the decoded weights: BF16 rounding, and int8 activations.
BOUNDS = {"BF16": 8e-3, "MXFP4": 8e-3, "FP8": 8e-3, "RAWINT4": 8e-3, "AMXINT8": 2.5e-2, "AMXINT4": 2.5e-2}


@functools.cache
def experts(method: str, parts: int = 1, threads: int = 2, function: ExpertFunction = PLAIN) -> KTExperts:
    rng = np.random.default_rng(0)
    shapes = {"gate": (E, WIDTH, H), "up": (E, WIDTH, H), "down": (E, H, WIDTH)}
    linears = {
        name: [Matrix(matrix, BF16) for matrix in f32_to_bf16(rng.standard_normal(shape, np.float32) / shape[2] ** 0.5)]
        for name, shape in shapes.items()
    }
    slicing, encoding = Slicing(0, H, WIDTH, parts, gated=function.gated), METHODS[method].encoding
    assert encoding is not None
    packed = pack_linears(METHODS[method], slicing, linears, encoding.quantize, Pool(threads))
    if function.biases:
        biases = dict(zip(shapes, draw_biases(), strict=True))
        cut = {s: s.cut_bias(biases[s.projection].float().numpy()[s.expert]) for s in packed.arrays}
        packed = replace(packed, biases=cut)
    return KTExperts(packed, pool=Pool(threads), function=function)


def draw_biases() -> Biases:
    """Return float64 biases of gate, up and down, which are numbers of float32."""
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn((E, n), generator=generator).double() for n in (WIDTH, WIDTH, H))


def factors(dtype: torch.dtype = torch.float32, rank: int = RANK, seed: int = 1, gated: bool = True) -> Lora:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((E, rank, H), (E, WIDTH, rank), (E, rank, H), (E, WIDTH, rank), (E, rank, WIDTH), (E, H, rank))
    tensors = [torch.randn(shape, generator=generator) / shape[2] ** 0.5 for shape in shapes]
    given = (torch.nn.Parameter(tensor.bfloat16().to(dtype)) for tensor in tensors[0 if gated else 2 :])
    return Lora.from_tensors(given)


def inputs(tokens: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, ids (some of no expert), weights, and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    if tokens > 2:
        ids[0, 0], ids[1, 1] = -1, 99
    hidden, gradient = (torch.randn(tokens, H, generator=generator).bfloat16() for _ in range(2))
    return hidden, ids, torch.rand(tokens, K, generator=generator) + 0.1, gradient


def both(step: TrainingPass, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and all gradients."""
    out, kept = step.forward()
    found = step.backward(kept, gradient)
    return [out, *flat(found)]


def flat(found: Gradients) -> list[torch.Tensor]:
    return [found.hidden, found.weights, *(found.lora.tensors if found.lora else ())]


# Without limits and relu: where a derivative jumps, rounding to BF16 chooses the side (test_activations.py tests them).
FUNCTIONS = {
    **{f"{name} ungated": ExpertFunction(name, gated=False) for name in ("relu2", "silu", "gelu_tanh")},
    "gpt-oss": ExpertFunction("swiglu_oai", alpha=1.702, biases=True),
    "biases": ExpertFunction(biases=True),
}


@pytest.mark.parametrize("isa", kernels.ISAS, indirect=True)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_each_function_are_close_to_float64(isa: str, name: str) -> None:
    """Without a gate there are no factors of it. Biases are added, and have no gradients."""
    function = FUNCTIONS[name]
    biases = draw_biases() if function.biases else ()
    for method, parts in (("BF16", 1), ("AMXINT8", 3), ("MXFP4", 2)):
        for tokens in (7, 41):
            hidden, ids, weights, gradient = inputs(tokens)
            lora, one = factors(torch.bfloat16, gated=function.gated), experts(method, parts, function=function)
            found = both(TrainingPass.create(one, hidden, ids, weights, lora, SCALING), gradient)
            given = hidden, ids, weights, decode(one), lora, SCALING, gradient, function, biases
            out, expected = differentiate(*given)
            for at, (actual, want) in enumerate(zip(found, [out, *flat(expected)], strict=True)):
                assert distance(actual, want) < BOUNDS[method], (method, tokens, at)


def test_functions_without_a_gate_give_the_same_bits_on_every_instruction_set_and_number_of_threads() -> None:
    """With dropout. Except where BF16 products are added in another order (numerics.md, section 5b)."""
    hidden, ids, weights, gradient = inputs(50)
    function, lora, found = FUNCTIONS["relu2 ungated"], factors(gated=False), []
    for isa in isas.each():
        for threads in (1, 3) if isa not in ("avx512bf16", "amx") else ():
            one = experts("AMXINT4", 3, threads, function)
            step = TrainingPass.create(one, hidden, ids, weights, lora, SCALING, 0.25)
            found.append(both(replace(step, seed=5), gradient))
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("isa", kernels.ISAS, indirect=True)
@pytest.mark.parametrize(("method", "parts"), [("BF16", 1), ("AMXINT8", 1), ("AMXINT4", 3), ("MXFP4", 2), ("FP8", 1)])
def test_gradients_are_close_to_float64(isa: str, method: str, parts: int) -> None:
    """For an expert with several blocks of tokens, experts without tokens, and an odd number of tokens."""
    for tokens in (1, 7, 41):
        hidden, ids, weights, gradient = inputs(tokens)
        lora, one = factors(torch.bfloat16), experts(method, parts)
        step = TrainingPass.create(one, hidden, ids, weights, lora, SCALING)
        out, expected = differentiate(hidden, ids, weights, decode(one), lora, SCALING, gradient)
        bound = BOUNDS[method]
        for name, found, want in zip(
            ("out", *Gradients._fields, *Lora._fields), both(step, gradient), [out, *flat(expected)], strict=False
        ):
            assert distance(found, want) < bound, (tokens, name)


def test_batches_of_any_size_give_the_same_bits() -> None:
    """For more tokens of one expert than a kernel takes at a time."""
    hidden, ids, weights, gradient = inputs(600)
    ids[:, 0] = 3
    ids[:, 1] = -1
    lora = factors()
    for method in ("AMXINT8", "BF16"):
        found = both(TrainingPass.create(experts(method), hidden, ids, weights, lora, SCALING), gradient)
        few = both(
            TrainingPass.create(experts(method), hidden[:70], ids[:70], weights[:70], lora, SCALING), gradient[:70]
        )
        for whole, part in zip(found[:3], few[:3], strict=True):
            assert torch.equal(whole[:70], part)
        expected = differentiate(hidden, ids, weights, decode(experts(method)), lora, SCALING, gradient)
        for one, want in zip(found, [expected[0], *flat(expected[1])], strict=True):
            assert distance(one, want) < BOUNDS[method]


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4", "FP8"])
def test_any_number_of_threads_gives_the_same_bits(method: str) -> None:
    hidden, ids, weights, gradient = inputs(50)
    lora = factors()

    def bits(threads: int) -> list[torch.Tensor]:
        step = TrainingPass.create(experts(method, 3, threads), hidden, ids, weights, lora, SCALING, 0.25)
        return both(TrainingPass(**{**vars(step), "seed": 5}), gradient)

    first = bits(1)
    for threads in (1, 2, 3):
        assert all(torch.equal(one, two) for one, two in zip(first, bits(threads), strict=True))


def test_every_instruction_set_gives_the_same_bits_for_integers() -> None:
    """Except where BF16 products are added in another order (numerics.md, section 5b)."""
    hidden, ids, weights, gradient = inputs(9)
    found = {}
    for isa in isas.each():
        if isa not in ("avx512bf16", "amx"):
            found[isa] = both(
                TrainingPass.create(experts("AMXINT4"), hidden, ids, weights, factors(), SCALING), gradient
            )
    for isa, tensors in found.items():
        assert all(torch.equal(one, two) for one, two in zip(tensors, found["scalar"], strict=True)), isa


def test_gradients_without_lora_or_tokens_match_the_reference() -> None:
    hidden, ids, weights, gradient = inputs(6)
    step = TrainingPass.create(experts("BF16"), hidden, ids, weights, None, 1.0)
    out, expected = differentiate(hidden, ids, weights, decode(experts("BF16")), None, 1.0, gradient)
    for found, want in zip(both(step, gradient), [out, expected.hidden, expected.weights], strict=True):
        assert distance(found, want) < BOUNDS["BF16"]
    none = TrainingPass.create(experts("BF16"), hidden[:0], ids[:0], weights[:0], factors(), SCALING)
    assert [tuple(tensor.shape) for tensor in both(none, gradient[:0])[:3]] == [(0, H), (0, H), (0, K)]
    nobody = both(
        TrainingPass.create(experts("BF16"), hidden, torch.full_like(ids, -1), weights, factors(), SCALING), gradient
    )
    assert not any(tensor.any() for tensor in nobody)


@pytest.mark.parametrize("rank", [1, 5, 16, 40, 64])
def test_gradients_of_every_rank_match_the_reference(rank: int) -> None:
    hidden, ids, weights, gradient = inputs(12)
    for dtype in (torch.bfloat16, torch.float32):
        lora = factors(dtype, rank)
        found = both(TrainingPass.create(experts("BF16"), hidden, ids, weights, lora, SCALING), gradient)
        assert all(one.dtype == dtype for one in found[3:])
        out, expected = differentiate(hidden, ids, weights, decode(experts("BF16")), lora, SCALING, gradient)
        for one, want in zip(found, [out, *flat(expected)], strict=True):
            assert distance(one, want) < BOUNDS["BF16"]


def test_the_reference_passes_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    e, h, i, r = 2, 4, 3, 2
    make = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    linears = make(e, i, h), make(e, i, h), make(e, h, i)
    lora = [make(s) for s in ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r))]
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]])
    given = [tensor.requires_grad_() for tensor in (make(3, h), make(3, 2), *lora)]
    assert torch.autograd.gradcheck(lambda x, w, *f: compute(x, ids, w, linears, Lora.from_tensors(f), 1.5), given)


def test_gradients_match_finite_differences() -> None:
    """Along the gradient of each input, for a loss in float64. The step is large because BF16 rounds the output."""
    hidden, ids, weights, gradient = inputs(24)
    lora, one = factors(), experts("BF16")
    hidden, weights = hidden.float().requires_grad_(), weights.requires_grad_()

    def loss(x: torch.Tensor, w: torch.Tensor, *f: torch.Tensor) -> torch.Tensor:
        return (compute_with_lora(one, x, ids, w, Lora.from_tensors(f), SCALING).double() * gradient.double()).sum()

    given = [hidden, weights, *lora.tensors]
    slopes = torch.autograd.grad(loss(*given), given)
    for at, slope in enumerate(slopes):
        step = slope * (0.03 * given[at].norm() / slope.norm())
        ends = []
        for sign in (1, -1):
            moved = list(given)
            moved[at] = (given[at] + sign * step).detach()
            ends.append(loss(*moved))
        assert float((ends[0] - ends[1]).detach() / (2 * (slope * step).detach().double().sum())) == pytest.approx(
            1, abs=0.06
        ), at


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_gives_the_same_gradients(dropout: float) -> None:
    hidden, ids, weights, gradient = inputs(20)
    lora, one = factors(), experts("AMXINT8")
    tensors = lora.tensors

    def gradients(how: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()

        def call(x: torch.Tensor, w: torch.Tensor, *f: torch.Tensor) -> torch.Tensor:
            return compute_with_lora(one, x, ids, w, Lora.from_tensors(f), SCALING, dropout=dropout)

        reentrant = how == "reentrant"
        out = call(x, w, *tensors) if how == "plain" else checkpoint(call, x, w, *tensors, use_reentrant=reentrant)
        found = torch.autograd.grad if how != "reentrant" else _through_backward
        return [out.detach(), *found(out, [x, w, *tensors], gradient)]

    plain = gradients("plain")
    if not dropout:
        own = both(TrainingPass.create(one, hidden, ids, weights, lora, SCALING), gradient)
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(plain, own, strict=True))
    for how in ("reentrant", "not reentrant"):
        assert all(torch.equal(one, two) for one, two in zip(plain, gradients(how), strict=True)), how


def _through_backward(out: Any, given: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    for tensor in given:
        tensor.grad = None
    out.backward(gradient)
    return [tensor.grad.clone() for tensor in given if tensor.grad is not None]


def test_dropout_is_elementwise_and_only_in_training() -> None:
    hidden, ids, weights, gradient = inputs(400)
    lora, one = factors(), experts("BF16")
    call = functools.partial(compute_with_lora, one, hidden, ids, weights, lora, SCALING)
    plain = call()
    assert torch.equal(call(dropout=0.5, training=False), plain)
    torch.manual_seed(1)
    first = call(dropout=0.5)
    assert not torch.equal(first, call(dropout=0.5))
    torch.manual_seed(1)
    assert torch.equal(first, call(dropout=0.5))
    # LoRA of down only, which is linear: the mean over many masks equals the result without a mask.
    only = Lora(*(tensor * (name in ("down_a", "down_b")) for name, tensor in lora._asdict().items()))
    base = compute_with_lora(one, hidden, ids, weights).float()
    share = compute_with_lora(one, hidden, ids, weights, only, SCALING).float() - base
    mean = torch.zeros_like(base)
    for _ in range(20):
        mean += (compute_with_lora(one, hidden, ids, weights, only, SCALING, dropout=0.3).float() - base) / 20
    assert float((mean * share).detach().sum() / (share * share).detach().sum()) == pytest.approx(1, abs=0.02)
    # Finite differences through the masks.
    seeded = TrainingPass.create(one, hidden, ids, weights, lora, SCALING, 0.3)
    found = both(seeded, gradient)

    def loss(step: TrainingPass) -> float:
        return float((step.forward()[0].double() * gradient.double()).sum())

    for name, slope in zip(Lora._fields, found[3:], strict=True):
        value = getattr(lora, name).detach()
        step = slope * (0.03 * value.norm() / slope.norm())
        ends = [
            loss(TrainingPass(**{**vars(seeded), "lora": seeded.lora._replace(**{name: value + sign * step})}))  # type: ignore[union-attr]
            for sign in (1, -1)
        ]
        assert (ends[0] - ends[1]) / (2 * float((slope * step).double().sum())) == pytest.approx(1, abs=0.06), name


def test_changing_parameters_before_backward_is_an_error_of_torch() -> None:
    hidden, ids, weights, _ = inputs(4)
    lora = factors()
    out = compute_with_lora(experts("BF16"), hidden, ids, weights, lora, SCALING)
    with torch.no_grad():
        lora.up_b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_a": torch.zeros(E, RANK, H + 1)}, r"gate_a must be \[5, 8, 256\].*not \[5, 8, 257\]; use an adapter"),
        ({"down_b": torch.zeros(E, H, RANK).double()}, "down_b is torch.float64; all must be BF16, or all float32"),
        ({"up_a": torch.zeros(E, 300, H)}, r"rank of 1 to 256"),
        ({"gate_a": None, "gate_b": None}, "LoRA of layer 0 lacks matrices of a gate, but its experts have one"),
    ],
)
def test_lora_of_wrong_shapes_is_rejected(changes: dict[str, Any], message: str) -> None:
    hidden, ids, weights, _ = inputs(4)
    with pytest.raises(ValueError, match=message):
        compute_with_lora(experts("BF16"), hidden, ids, weights, factors()._replace(**changes), SCALING)


def test_unsupported_gradients_are_rejected() -> None:
    hidden, ids, weights, _ = inputs(4)
    rng = np.random.default_rng(0)
    bits = [
        f32_to_bf16(rng.standard_normal(shape, np.float32)) for shape in ((E, WIDTH, H), (E, WIDTH, H), (E, H, WIDTH))
    ]
    weighted = KTExperts.from_bf16(*bits, method="MXFP4", function=ExpertFunction(weights_on="input"))
    with pytest.raises(
        UnsupportedError, match=r"gradients are unsupported for experts in .* routing weights on their input"
    ):
        compute_with_lora(weighted, hidden, ids, weights)
    with pytest.raises(ValueError, match="dropout must be from 0 to less than 1"):
        compute_with_lora(experts("BF16"), hidden, ids, weights, factors(), dropout=1.0)
