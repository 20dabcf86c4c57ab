"""Tests of KTMoEWrapper(mode="sft"): kt-kernel's golden results, gradient windows, order of calls, and files."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ktconvert.layouts.errors import ArgumentError, InputError
from ktconvert.native_quant.runtime.methods import SFT_METHODS, SFT_WEIGHTS
from ktconvert.native_quant.runtime.sft import KTMoEFunction, RAWINT4ExpertWeights
from ktconvert.native_quant.runtime.training import Lora
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from rig.training import Linears, differentiate, distance, golden_weights

GOLDEN = Path(__file__).parent / "golden" / "sft"
FACTORS = [f"{name}_lora_{which}" for name in ("gate", "up", "down") for which in "ab"]
NAMES = ["output", "grad_input", "grad_weights", *(f"grad_{name}" for name in FACTORS)]
BF16 = torch.bfloat16
# kt-kernel 0.7.2's distances (relative L2) to float64 on the unquantized weights, in the order of NAMES.
PEER = {
    "AMXBF16_SFT": (4.97e-3, 6.22e-3, 4.02e-3, 4.65e-3, 4.30e-3, 4.44e-3, 4.54e-3, 4.51e-3, 4.79e-3),
    "AMXBF16_SFT_SkipLoRA": (4.01e-3, 4.72e-3, 2.31e-3),
    "AMXBF16_SFT_T2": (4.85e-3, 6.19e-3, 4.42e-3, 4.83e-3, 4.33e-3, 5.18e-3, 4.38e-3, 4.73e-3, 4.51e-3),
    "AMXINT4_SFT": (1.30e-1, 1.33e-1, 1.25e-1, 1.15e-1, 1.12e-1, 9.42e-2, 1.04e-1, 1.03e-1, 1.04e-1),
    "AMXINT4_SFT_SkipLoRA": (1.35e-1, 1.36e-1, 1.05e-1),
    "AMXINT4_SFT_T2": (1.28e-1, 1.28e-1, 9.16e-2, 1.03e-1, 1.11e-1, 1.16e-1, 1.03e-1, 1.08e-1, 9.22e-2),
    "AMXINT8_SFT": (1.96e-2, 2.01e-2, 1.72e-2, 1.09e-2, 1.29e-2, 1.13e-2, 1.24e-2, 1.23e-2, 1.24e-2),
    "AMXINT8_SFT_SkipLoRA": (2.03e-2, 2.10e-2, 1.45e-2),
    "AMXINT8_SFT_T2": (1.82e-2, 1.83e-2, 1.81e-2, 1.21e-2, 1.27e-2, 1.28e-2, 1.20e-2, 1.23e-2, 1.23e-2),
}
# Results with kt-kernel's arithmetic: all but the sum over a token's rows and, with several NUMA slices, values that are
# rounded for each slice; with integers and without stored transposes, results that need no transposed weight.
SAME = [name for name in NAMES if name != "grad_input"]
SAME_IN_PARTS = [name for name in SAME if name not in ("grad_gate_lora_a", "grad_up_lora_a")]
SAME_INTEGERS = ["output", "grad_weights", "grad_down_lora_a", "grad_down_lora_b"]
CLOSE = 2e-3


def wrapper(method: str, width: int = 256, experts: int = 4, parts: int = 1, **more: Any) -> Any:
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "hidden_size": 256, "moe_intermediate_size": width}
    how = {"gpu_experts_mask": None, "cpuinfer_threads": 2, "threadpool_count": parts, "numa_nodes": None}
    named = {"layer_idx": 0, "weight_path": "", "chunked_prefill_size": 64, "mode": "sft", "method": method}
    lora = {"lora_rank": 8, "lora_alpha": 16.0}
    return KTMoEWrapper(**{**sizes, **how, **named, **lora, **more})


def linears(width: int = 256) -> Linears:
    gate, up, down = (torch.from_numpy(bits).view(BF16) for bits in golden_weights(4, 256, width))
    return gate, up, down


def trained(
    method: str, width: int = 256, parts: int = 1, share: bool | None = None, **more: Any
) -> tuple[Any, Linears]:
    one = wrapper(method, width, parts=parts, **more)
    one.share_backward_bb = share
    one.load_weights_from_tensors(*linears(width), torch.arange(4))
    return one, linears(width)


def with_lora(one: Any, tensors: dict[str, torch.Tensor], fill: float = 7.0) -> tuple[Lora, Lora]:
    lora = Lora.from_tensors(torch.nn.Parameter(tensors[name].clone()) for name in FACTORS)
    buffers = Lora(*(torch.full_like(tensor, fill) for tensor in lora))
    one.init_lora_weights(*lora, *buffers)
    return lora, buffers


def test_sizes_that_the_files_contradict_are_rejected_by_the_constructor(packed_example: Any) -> None:
    path = packed_example("int8")
    with pytest.raises(InputError, match="layer 0 has moe_intermediate_size 256, not 512"):
        wrapper("AMXINT8_SFT", 512, experts=8, weight_path=path)
    wrapper("AMXINT8_SFT", experts=8, weight_path=path)


@pytest.mark.parametrize("share", [None, False], ids=["own codes", "transposes"])
@pytest.mark.parametrize("case", PEER)
def test_results_equal_those_of_kt_kernel(case: str, share: bool | None) -> None:
    two = case.endswith("_T2")
    method, width, parts = case.removesuffix("_T2"), 512 if two else 256, 1 + two
    given = load_file(GOLDEN / ("inputs_T2.safetensors" if two else "inputs.safetensors"))
    golden = load_file(GOLDEN / f"{case}.safetensors")
    one, weights = trained(method, width, parts, share)
    lora = None
    if "SkipLoRA" not in case:
        lora, buffers = with_lora(one, given)
    out = one.forward(given["x"], given["expert_ids"], given["weights"])
    of_x, of_weights = one.backward(given["grad_output"])
    found = dict(zip(NAMES, [out, of_x, of_weights, *(buffers if lora else ())], strict=False))
    doubles = tuple(linear.double() for linear in weights)
    exact, gradients = differentiate(
        given["x"], given["expert_ids"], given["weights"], doubles, lora, 2.0, given["grad_output"]
    )
    expected = [exact, gradients.hidden, gradients.weights, *(gradients.lora or ())]
    same = SAME_INTEGERS if "INT" in case and share is None else SAME_IN_PARTS if two else SAME
    assert found.keys() == golden.keys()
    for name, want, theirs in zip(found, expected, PEER[case], strict=True):
        if name in same:
            assert distance(found[name], golden[name]) < CLOSE, name
        # The table has three digits; with two slices q is rounded once, not for each, here to the other side.
        assert distance(found[name], want) < (1.06 if two else 1.03) * theirs, name


def test_tokens_of_absent_experts_equal_those_of_kt_kernel() -> None:
    given, golden = load_file(GOLDEN / "inputs.safetensors"), load_file(GOLDEN / "AMXBF16_SFT_edge.safetensors")
    one, _ = trained("AMXBF16_SFT")
    _, buffers = with_lora(one, given)
    out = one.forward(golden["in_x"], golden["in_ids"], golden["in_w"])
    of_x, of_weights = one.backward(golden["in_go"])
    for name, found in zip(NAMES, [out, of_x, of_weights, *buffers], strict=True):
        assert distance(found, golden[name]) < (5.6e-3 if name == "grad_input" else CLOSE), name
    assert not out[2].any() and not of_x[2].any()


def test_a_window_of_two_batches_equals_that_of_kt_kernel() -> None:
    given, golden = load_file(GOLDEN / "inputs.safetensors"), load_file(GOLDEN / "AMXBF16_SFT_accumulate.safetensors")
    one, _ = trained("AMXBF16_SFT")
    lora, buffers = with_lora(one, given)
    for batch in ("mb0", "mb1"):
        one.forward(golden[f"{batch}_x"], golden[f"{batch}_ids"], golden[f"{batch}_w"])
        one.backward(golden[f"{batch}_go"], optimizer_grad_scale=0.5)
    for name, buffer in zip(FACTORS, buffers, strict=True):
        assert distance(buffer, golden[f"grad_{name}"]) < CLOSE and not buffer[3].any(), name
    assert all(parameter.grad is buffer for parameter, buffer in zip(lora, buffers, strict=True))


def kgroup() -> tuple[Any, dict[str, torch.Tensor], Linears]:
    golden = load_file(GOLDEN / "AMXINT4_KGroup_SFT.safetensors")
    one = wrapper("AMXINT4_KGroup_SFT")
    names = [f"{name}_{what}" for name in ("gate", "up", "down") for what in ("packed", "scale")]
    one.load_rawint4_weights(RAWINT4ExpertWeights(*(golden[name] for name in names)), torch.arange(4))
    values = []
    for name in ("gate", "up", "down"):
        packed, scale = golden[f"{name}_packed"], golden[f"{name}_scale"].double()
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(2).double() - 8
        values.append(codes * scale.repeat_interleave(32, dim=-1))
    return one, golden, (values[0], values[1], values[2])


def test_grouped_scales_are_as_close_as_kt_kernel() -> None:
    """To the dequantized weights; kt-kernel rounds activations to 8 bits."""
    one, golden, weights = kgroup()
    given = load_file(GOLDEN / "inputs.safetensors")
    lora, buffers = with_lora(one, given)
    found = [one.forward(given["x"], given["expert_ids"], given["weights"]), *one.backward(given["grad_output"])]
    exact, gradients = differentiate(
        given["x"], given["expert_ids"], given["weights"], weights, lora, 2.0, given["grad_output"]
    )
    expected = [exact, gradients.hidden, gradients.weights, *(gradients.lora or ())]
    for name, ours, want in zip(NAMES, [*found, *buffers], expected, strict=True):
        assert distance(ours, want) < 1.03 * distance(golden[name], want) < 1.4e-2, name
        assert distance(ours, golden[name]) < 1.4e-2, name


@pytest.mark.parametrize("method", ["AMXBF16_SFT", "AMXINT8_SFT", "AMXINT4_SFT"])
def test_gradients_accumulate_within_a_window(method: str) -> None:
    """For every method: the first backward after a window overwrites gradients, others add to them."""
    given = load_file(GOLDEN / "inputs.safetensors")
    one, _ = trained(method)
    lora, buffers = with_lora(one, given)

    def step() -> list[torch.Tensor]:
        one.forward(given["x"], given["expert_ids"], given["weights"])
        one.backward(given["grad_output"])
        return [buffer.clone() for buffer in buffers]

    first, second = step(), step()
    assert all(distance(two, 2 * once) < 4e-3 for once, two in zip(first, second, strict=True))
    one.release_authoritative_optimizer_grads()
    assert all(parameter.grad is None for parameter in lora)
    assert all(torch.equal(one, again) for one, again in zip(first, step(), strict=True))
    torch.optim.SGD(lora, lr=0.1).step()  # in place: A and B both change
    torch.optim.SGD(lora).zero_grad()
    changed = one.forward(given["x"], given["expert_ids"], given["weights"], save_for_backward=False)
    other, _ = trained(method)
    with_lora(other, dict(zip(FACTORS, (tensor.detach() for tensor in lora), strict=True)))
    assert torch.equal(changed, other.forward(given["x"], given["expert_ids"], given["weights"]))
    lora.up_b.grad = torch.zeros_like(lora.up_b)
    one.forward(given["x"], given["expert_ids"], given["weights"])
    with pytest.raises(RuntimeError, match=r"\.grad of a LoRA parameter is not the buffer"):
        one.backward(given["grad_output"])


def test_calls_in_the_wrong_order_are_rejected() -> None:
    given = load_file(GOLDEN / "inputs.safetensors")
    x, ids, weights, gradient = (given[name] for name in ("x", "expert_ids", "weights", "grad_output"))
    one = wrapper("AMXBF16_SFT")
    for call, arguments, message in (
        ("forward", (x, ids, weights), "has no weights: call load_weights"),
        ("update_lora_weights", (), "has no LoRA: call init_lora_weights first"),
        ("backward", (gradient,), r"backward without forward\(save_for_backward=True\)"),
        ("sync_forward", (), "sync_forward without a submit_forward"),
        ("sync_backward", (), "sync_backward without a submit_backward_async"),
    ):
        with pytest.raises(RuntimeError, match=message):
            getattr(one, call)(*arguments)
    one.load_weights_from_tensors(*linears(), torch.arange(4))
    with pytest.raises(RuntimeError, match="has no LoRA"):
        one.forward(x, ids, weights)
    with_lora(one, given)
    with pytest.raises(ValueError, match="65 tokens are more than chunked_prefill_size=64"):
        one.forward(torch.zeros(65, 256), torch.zeros(65, 2), torch.zeros(65, 2))
    for call, arguments, name in (
        ("forward", (3, ids, weights), "hidden_states"),
        ("submit_forward", (x, 3, weights), "expert_ids"),
        ("submit_forward_inference", (x, ids, None), "weights"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} must be a tensor, not"):
            getattr(one, call)(*arguments)
    one.submit_forward(x, ids, weights)
    with pytest.raises(RuntimeError, match="submit_forward again"):
        one.submit_forward(x, ids, weights)
    out = one.sync_forward()
    one.submit_backward_async(gradient)
    with pytest.raises(RuntimeError, match="submit_backward_async again"):
        one.submit_backward_async(gradient)
    found = one.sync_backward()
    with pytest.raises(RuntimeError, match="backward without forward"):
        one.backward(gradient)
    assert torch.equal(out, one.forward(x, ids, weights))
    with pytest.raises(ValueError, match="optimizer_grad_scale must be finite and positive"):
        one.backward(gradient, optimizer_grad_scale=0)
    with pytest.raises(ArgumentError, match="grad_output must be a tensor, not 3"):
        one.backward(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grad_output must have the shape of the last forward"):
        one.backward(gradient[:3])
    assert all(torch.equal(*pair) for pair in zip(found, one.backward(gradient), strict=True))
    # backward uses the last saved forward, with a copy of its inputs.
    one.forward(x[:3], ids[:3], weights[:3])
    mine = x.clone()
    one.forward(mine, ids, weights)
    one.forward(x[:2], ids[:2], weights[:2], save_for_backward=False)
    mine.zero_()
    assert all(torch.equal(*pair) for pair in zip(found, one.backward(gradient), strict=True))


def test_autograd_maps_masks_and_dropout_match_plain_calls() -> None:
    given = load_file(GOLDEN / "inputs.safetensors")
    x, ids, weights, gradient = (given[name] for name in ("x", "expert_ids", "weights", "grad_output"))
    one, _ = trained("AMXINT8_SFT")
    with_lora(one, given)
    out, expected = one.forward(x, ids, weights), one.backward(gradient)
    hidden, scores = x.view(2, 8, 256).clone().requires_grad_(), weights.clone().requires_grad_()
    one.submit_forward(x, ids, weights)
    sentinel = torch.zeros((), requires_grad=True)
    settings = (256, 2, 0, True, True, None, False, False, None, None, None)
    through = KTMoEFunction.apply(hidden, ids, scores, one, sentinel, *settings)
    assert torch.equal(through.view(16, 256), out)
    through.backward(gradient.view(2, 8, 256))
    assert hidden.grad is not None and torch.equal(hidden.grad.view(16, 256), expected[0])
    assert scores.grad is not None and torch.equal(scores.grad, expected[1])

    turned = torch.tensor([2, 0, 3, 1])  # slot p computes with expert map[p]; LoRA belongs to the slot
    mapped = wrapper("AMXINT8_SFT_SkipLoRA")
    mapped.load_weights_from_tensors(*linears(), turned)
    plain, _ = trained("AMXINT8_SFT_SkipLoRA")
    assert torch.equal(mapped.forward(x, ids, weights), plain.forward(x, turned[ids], weights))
    on_gpu = wrapper("AMXINT8_SFT_SkipLoRA", num_gpu_experts=2)
    on_gpu.load_weights_from_tensors(*linears(), torch.arange(4))
    assert torch.equal(on_gpu.forward(x, ids, weights), plain.forward(x, ids.where(ids > 1, -1), weights))
    assert not on_gpu.backward(gradient)[1][ids < 2].any()

    dropping, _ = trained("AMXINT8_SFT", lora_dropout=0.5)
    with_lora(dropping, given)
    assert torch.equal(dropping.forward(x, ids, weights, save_for_backward=False), out)
    assert not torch.equal(dropping.forward(x, ids, weights), out)


def test_unsupported_methods_and_settings_are_rejected() -> None:
    for method in SFT_METHODS:
        if method in SFT_WEIGHTS:
            assert wrapper(method).method == method
        else:
            with pytest.raises(
                NotImplementedError, match=f"'{method}' is a name in kt-kernel's list that kt-kernel cannot"
            ):
                wrapper(method)
    with pytest.raises(NotImplementedError, match="full_weight_grad"):
        wrapper("AMXBF16_SFT", full_weight_grad=True)
    with pytest.raises(ValueError, match="lora_rank and lora_alpha must be positive"):
        wrapper("AMXBF16_SFT", lora_rank=0)
    with pytest.raises(RuntimeError, match="applies no LoRA"):
        wrapper("AMXBF16_SFT_SkipLoRA").init_lora_weights()
    with pytest.raises(ValueError, match="call load_rawint4_weights"):
        wrapper("RAWINT4_SFT").load_weights_from_tensors(*linears())


def test_converted_files_can_be_trained(tmp_path: Path, cli: Any, write_qwen: Any) -> None:
    """The files of `ktconvert cpu`, and the transposed ones that it writes, equal those of the wrapper and are used."""
    stacked = dict(zip(("gate", "up", "down"), golden_weights(4, 256, 256), strict=True))
    source = write_qwen(tmp_path / "in", {0: stacked})
    options = ("--quant-method", "int8", "--threadpool-count", 1, "--no-merge-safetensor", "--save-backward-weights")
    cli("cpu", "-i", source, "-o", tmp_path / "out", *options)
    given = load_file(GOLDEN / "inputs.safetensors")

    def results(one: Any) -> list[torch.Tensor]:
        _, buffers = with_lora(one, given)
        out = one.forward(given["x"], given["expert_ids"], given["weights"])
        return [out, *one.backward(given["grad_output"]), *buffers]

    def loaded(share: bool | None, folder: str = "out") -> Any:
        one = wrapper("AMXINT8_SFT", weight_path=str(tmp_path / folder))
        one.share_backward_bb = share
        one.load_weights(torch.arange(4))
        return one

    packed = trained("AMXINT8_SFT")[0]
    own, transposed = results(packed), results(trained("AMXINT8_SFT", share=False)[0])
    assert not torch.equal(own[1], transposed[1])
    for share, expected in ((None, transposed), (False, transposed), (True, own)):
        assert all(map(torch.equal, results(loaded(share)), expected)), share
    packed.save_backward_weights_from_tensors(*linears(), torch.arange(4), str(tmp_path / "saved"))
    written = {path.relative_to(tmp_path / "saved"): path.read_bytes() for path in (tmp_path / "saved").rglob("*.kt")}
    files = {path.relative_to(tmp_path / "out"): path for path in (tmp_path / "out").rglob("*_bwd_*.kt")}
    assert written and written == {name: path.read_bytes() for name, path in files.items()}
    shutil.copytree(tmp_path / "out", tmp_path / "without", ignore=shutil.ignore_patterns("*_bwd_*"))
    assert all(map(torch.equal, results(loaded(None, "without")), own))
    with pytest.raises(InputError, match="backward weight is missing"):
        loaded(False, "without")
