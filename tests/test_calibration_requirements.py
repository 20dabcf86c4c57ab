"""Memory and disk of GPTQ: estimates equal numbers computed by hand, with advice for three sizes of GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.pipeline.calibration.requirements import (
    CARDS,
    CalibrationShape,
    describe_footprint,
    estimate_footprint,
    list_remedies,
    max_gpu_memory,
    read_shape,
)
from ktconvert.pipeline.models.pretrained import LIBRARIES
from ktconvert.pipeline.options.conversion_options import CalibrateOptions, QuantizationOptions
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.plans.commands import make_options

# 512 samples of 2048 tokens. `other_bytes` counts attention with a shared expert or, in DeepSeek, with the dense MLP of
# the first layers.
DEEPSEEK = CalibrationShape(
    hidden=7168, width=2048, experts=256, heads=128, head=192, other_bytes=1_167_000_000, dense=True, experts_at_once=8
)
QWEN_30B = CalibrationShape(hidden=2048, width=768, experts=128, heads=32, other_bytes=38_000_000, experts_at_once=8)
QWEN_235B = CalibrationShape(hidden=4096, width=1536, experts=128, heads=64, other_bytes=143_000_000, experts_at_once=8)
MODELS = {"DeepSeek-V3": DEEPSEEK, "Qwen3-30B-A3B": QWEN_30B, "Qwen3-235B-A22B": QWEN_235B}


@pytest.mark.parametrize(
    ("name", "layer", "gate_up", "down", "hidden_states", "scores"),
    [
        # 256 x 3 x 7168 x 2048 x 2; 7168^2 x 4; 2048^2 x 4; 512 x 2048 x 7168 x 2; 128 x 2048^2 x (2 + 4 + 4)
        ("DeepSeek-V3", 22_548_578_304, 205_520_896, 16_777_216, 15_032_385_536, 5_368_709_120),
        # 128 x 3 x 2048 x 768 x 2; 2048^2 x 4; 768^2 x 4; 512 x 2048 x 2048 x 2; 32 x 2048^2 x 10
        ("Qwen3-30B-A3B", 1_207_959_552, 16_777_216, 2_359_296, 4_294_967_296, 1_342_177_280),
        # 128 x 3 x 4096 x 1536 x 2; 4096^2 x 4; 1536^2 x 4; 512 x 2048 x 4096 x 2; 64 x 2048^2 x 10
        ("Qwen3-235B-A22B", 4_831_838_208, 67_108_864, 9_437_184, 8_589_934_592, 2_684_354_560),
    ],
)
def test_estimate_equals_numbers_computed_by_hand(
    name: str, layer: int, gate_up: int, down: int, hidden_states: int, scores: int
) -> None:
    estimate = estimate_footprint(MODELS[name])
    assert (estimate.layer, estimate.hidden_states, estimate.scores) == (layer, hidden_states, scores)
    assert estimate.hessians == gate_up + 8 * down
    # Mixed calibration only uses fewer tokens for down.
    assert estimate_footprint(replace(MODELS[name], calibrate="mixed")) == estimate
    assert estimate_footprint(replace(MODELS[name], calibrate="routed")).hessians == 8 * (gate_up + down)
    # Inputs and outputs of a layer and of its experts; in DeepSeek also outputs of the dense layers before them.
    assert estimate.disk == (5 if name == "DeepSeek-V3" else 4) * hidden_states


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_memory_depends_on_the_group_not_on_the_number_of_experts_and_samples(shape: CalibrationShape) -> None:
    estimate = estimate_footprint(shape)
    assert estimate.gpu == 0
    assert estimate.host == estimate_footprint(replace(shape, experts=4 * shape.experts)).host
    more = estimate_footprint(replace(shape, samples=1024)).host - estimate.host
    assert more == 512 * 2048 * 8 * (4 + 4)  # routing: numbers and weights of 8 experts per token
    assert estimate.host < LIBRARIES + 3 * estimate.weights + estimate.hessians + estimate.working + 2 * estimate.scores
    assert estimate.host > LIBRARIES + max(estimate.scores, estimate.working)
    assert estimate_footprint(replace(shape, samples=1024)).disk == 2 * estimate.disk
    assert estimate_footprint(replace(shape, length=1024)).disk * 2 == estimate.disk
    assert estimate_footprint(replace(shape, length=1024)).host < estimate.host
    # Working memory is needed for one expert at a time.
    assert estimate_footprint(replace(shape, experts_at_once=2 * shape.experts_at_once)).working == estimate.working


def test_estimate_agrees_with_the_docs_for_deepseek_and_predictions() -> None:
    """kt-kernel's README asks for the whole model in memory (1368 GB) and two layers (44.8 GB) on the GPU."""
    on_cpu, on_gpu = estimate_footprint(DEEPSEEK), estimate_footprint(replace(DEEPSEEK, on_gpu=True))
    assert on_gpu.gpu < 12 * 10**9 and on_gpu.host < on_cpu.host < 10 * 10**9 < 75 * 10**9 < on_gpu.disk < 76 * 10**9
    # Fisher information needs two metrics, one of 1536 x 1536 for each expert of a group, and the head.
    small = replace(QWEN_30B, length=16)  # so that attention is not the peak
    without, with_fisher = (estimate_footprint(replace(small, fisher=on)) for on in (False, True))
    assert with_fisher.host - without.host >= 2 * 2048**2 * 4 + QWEN_30B.experts_at_once * 1536**2 * 4
    with_head = estimate_footprint(replace(small, fisher=True, vocabulary=1_000_000))
    assert with_head.host > 1_000_000 * 2048 * 2 + with_fisher.weights


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_gpu_memory_advice_never_exceeds_that_of_kt_kernel(shape: CalibrationShape) -> None:
    estimate = estimate_footprint(replace(shape, on_gpu=True))
    assert [max_gpu_memory(card, estimate) for card in CARDS] == ["12GiB", "30GiB", "50GiB"]
    for card in (12, 16, 24, 32, 48, 80, 141):
        suggested = max_gpu_memory(card, estimate)
        if suggested is None:
            assert card << 30 < estimate.gpu + (1 << 30)
            continue
        limit = int(suggested.removesuffix("GiB")) << 30
        assert estimate.weights <= limit <= card * 0.625 * (1 << 30)
        assert limit + estimate.gpu - estimate.weights <= card << 30


def test_advice_names_sizes_and_remedies_for_small_cards() -> None:
    large = replace(DEEPSEEK, on_gpu=True, length=8192)  # 128 x 8192^2 x 10 bytes of scores: 80 GiB
    assert estimate_footprint(large).scores == 80 << 30
    assert [max_gpu_memory(card, estimate_footprint(large)) for card in CARDS] == [None, None, None]
    lines = describe_footprint(large, "Use less.")
    assert lines[-1] == "cards of 24 GiB, 48 GiB, 80 GiB are too small. Use less."
    assert "--max-gpu-memory" not in lines[-2]
    lines = describe_footprint(replace(DEEPSEEK, on_gpu=True), "")
    assert "512 samples of 2048 tokens are 14.0 GiB" in lines[0]  # 15.03 GB
    assert "21.0 GiB in BF16 and are processed 8 at a time" in lines[1]
    assert "196.0 MiB, shared by all its experts, that of down 16.0 MiB" in lines[1]
    assert "12GiB on a card of 24 GiB, 30GiB on a card of 48 GiB, 50GiB on a card of 80 GiB" in lines[3]
    assert describe_footprint(DEEPSEEK, "")[2].startswith("on a GPU it would need")
    assert (
        "for each expert, that of down"
        in describe_footprint(replace(DEEPSEEK, calibrate="routed", experts_at_once=1), "")[1]
    )


@pytest.mark.parametrize(
    ("command", "device", "samples", "expected"),
    [
        ("calibrate", "cpu", 1, "shorter sequences (--sequence-length 50)"),
        (
            "calibrate",
            "cpu",
            9,
            "fewer samples (--num-calibration-samples 4); shorter sequences (--sequence-length 50)",
        ),
        ("cpu", "cpu", 1, "--scale mse, which needs no calibration; shorter sequences (--sequence-length 50)"),
        (
            *("gpu", "cuda", 1),
            "--quant-method RTN, which needs no calibration; shorter sequences (--sequence-length 50); "
            "--force-cpu, if the GPU is too small",
        ),
    ],
)
def test_remedies_fit_the_command_and_its_options(command: str, device: str, samples: int, expected: str) -> None:
    options = make_options(command, input="a", output="b", num_calibration_samples=samples, sequence_length=100)
    assert isinstance(options, QuantizationOptions | CalibrateOptions)
    remedies = list_remedies(with_values(options, machine={"device_type": device}))
    assert remedies == f"To need less memory, in this order: {expected}."


@pytest.mark.parametrize("quant_type", ["W4A16", "W8A16"])
def test_shape_is_read_from_a_checkpoint(quant_type: str, example: Path) -> None:
    samples = Samples(num_calibration_samples=64, sequence_length=256)
    bits = 4 if quant_type == "W4A16" else 8
    shape = replace(
        read_shape(recognize(open_checkpoint(str(example))), samples), bits=bits, experts_at_once=4, on_gpu=True
    )
    # Weights of a layer: q and o 256 x 256, k and v 128 x 256, router 8 x 256, norms 2 x 256 and 2 x 64.
    non_expert_bytes = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 8 * 256 + 2 * 256 + 2 * 64)
    sizes = (256, 256, 8, 4, 64, 256)  # hidden, width, experts, heads, samples, length
    expected = CalibrationShape(
        *sizes, bits, True, "all", 4, head=64, other_bytes=non_expert_bytes, top_k=2, on_gpu=True, vocabulary=2048
    )
    assert shape == expected
