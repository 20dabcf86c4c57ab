"""Rounding of rows in turn, weighted by Fisher information: the optimum, errors in both metrics, gradients."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.pipeline.calibration.layered_model import LayeredModel
from ktconvert.quantizers import ROW_GRIDS, descent, gptq, predictions
from rig import families
from rig.files import edit_json

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from safetensors.torch import load_file, save_file

GRID = ROW_GRIDS["int4"]


def draw_metric(n: int, seed: int) -> Any:
    """Return a metric, float32 [n, n], with few large directions."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn((2 * n, n), generator=generator) * torch.logspace(0, -2, n)
    return (mixed @ torch.linalg.qr(torch.randn((n, n), generator=generator))[0]).T.cov()


def round_plain(weight: Any, metric: Any, rows: Any = slice(None)) -> descent.CodesAndScales:
    """Round with plain GPTQ and absmax scales. rows: their numbers, which are ignored."""
    scale = weight.abs().amax(1, keepdim=True) / GRID.high
    factor = gptq.factorize_hessian(gptq.Hessian(metric, 1), 0.01)
    values = gptq.round_columns(weight, factor, scale, GRID.code_range)
    return descent.CodesAndScales(gptq.find_codes(values, scale, GRID.code_range), scale)


def cost(weight: Any, rounded: descent.CodesAndScales, inputs: Any, outputs: Any) -> float:
    """Return the cost of the errors in both metrics."""
    error = weight - rounded.values
    return float(torch.trace(outputs @ error @ inputs @ error.T))


@pytest.mark.parametrize("n", [40, 64, 150])
def test_rounding_in_turn_lowers_the_cost_of_errors(n: int) -> None:
    weight, inputs, outputs = torch.randn((n, 96)), draw_metric(96, 1), draw_metric(n, 2)
    rounded = predictions.round_rows(
        weight, predictions.factorize_information(outputs), lambda rows, _: round_plain(rows, inputs)
    )
    separate = round_plain(weight, inputs)
    assert cost(weight, rounded, inputs, outputs) < 0.9 * cost(weight, separate, inputs, outputs)
    plain = torch.eye(n)  # if all outputs count alike, each row is rounded as if it were alone
    unweighted = predictions.round_rows(
        weight, predictions.factorize_information(plain), lambda rows, _: round_plain(rows, inputs)
    )
    assert torch.equal(unweighted.codes, separate.codes) and torch.equal(unweighted.scale, separate.scale)


def test_remaining_rows_compensate_earlier_errors() -> None:
    """The remaining rows are optimal after the earlier errors, by the equation of numerics.md, in float64."""
    n, first = 80, predictions.ROWS
    weight, outputs, calls = torch.randn((n, 5)), draw_metric(n, 3), []

    def choose(rows: Any, numbers: Any) -> descent.CodesAndScales:
        calls.append((rows.clone(), numbers))
        return descent.CodesAndScales(rows.round().to(torch.int8), torch.ones((len(rows), 1)))

    predictions.round_rows(weight, predictions.factorize_information(outputs), choose)
    order = torch.cat([numbers for _, numbers in calls])
    assert order.sort().values.tolist() == list(range(n))
    assert torch.equal(order, torch.argsort(outputs.diagonal(), descending=True))
    metric = outputs.double() + predictions.DAMPENING * outputs.double().diagonal().mean() * torch.eye(n)
    metric = metric[order][:, order].numpy()
    original, (result, _), (after, _) = weight[order].double().numpy(), calls[0], calls[1]
    error = original[:first] - result.round().numpy()
    rest = slice(first, first + len(after))
    best = original[first:] + np.linalg.solve(metric[first:, first:], metric[first:, :first] @ error)
    np.testing.assert_allclose(after.numpy(), best[: rest.stop - first], atol=1e-4)


def test_fisher_information_of_gate_and_up_sums_over_tokens() -> None:
    """The information equals the sum over tokens of the information that passes through down."""
    down, outputs, slopes = torch.randn((6, 4)), draw_metric(6, 6), torch.randn((9, 8))
    actual = predictions.gate_up_information(outputs, down, slopes.T @ slopes)
    metric = outputs + predictions.DAMPENING * outputs.diagonal().mean() * torch.eye(6)
    wide = torch.cat([down, down], 1)
    expected = sum((wide * s).T @ metric @ (wide * s) for s in slopes)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_fisher_information_counts_less_in_early_layers() -> None:
    gradients = torch.randn((30, 6))
    first, last = predictions.fisher_information(gradients, 20), predictions.fisher_information(gradients)
    mean = last.diagonal().mean()
    torch.testing.assert_close(last, gradients.T @ gradients)
    torch.testing.assert_close(first, last + 20 * predictions.FOLLOWING_DAMPENING * mean * torch.eye(6))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(broken: float) -> None:
    outputs = draw_metric(8, 7)
    outputs[3, 3] = broken
    with pytest.raises(gptq.NotFinite):
        predictions.factorize_information(outputs)


def load_layered(folder: Path) -> LayeredModel:
    """Load a model as the calibration run does."""
    source = open_checkpoint(folder)
    model = recognize(source)
    rest = find_non_expert_tensors(source, model.expert_tensor_names(), model.quantization).output_tensors()
    return LayeredModel(source, {tensor.key: tensor for tensor in rest})


@pytest.fixture(scope="module")
def model(example: Path) -> LayeredModel:
    """Load the bundled model."""
    return load_layered(example)


def test_tied_head_gives_the_same_gradients(tmp_path: Path) -> None:
    """The same as a separate head with the same weights."""
    families.make("deepseek_v3", False, tmp_path / "tied", tie_word_embeddings=True)
    shutil.copytree(tmp_path / "tied", tmp_path / "untied")
    edit_json(tmp_path / "untied" / "config.json", lambda config: config.update(tie_word_embeddings=False))
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "untied" / "model.safetensors", {"format": "pt"})
    hidden = torch.randn((40, families.HIDDEN)).bfloat16()
    tied, untied = (load_layered(tmp_path / name).prediction_gradients(hidden, seed=3) for name in ("tied", "untied"))
    assert torch.equal(tied, untied) and tied.isfinite().all() and tied.any()


def test_gradients_belong_to_drawn_tokens(model: LayeredModel, example: Path) -> None:
    """The mean square of the gradients equals the Fisher information over all tokens."""
    import transformers

    original = transformers.AutoModelForCausalLM.from_pretrained(example, dtype=torch.float32)
    hidden = torch.randn((4096, original.config.hidden_size), generator=torch.Generator().manual_seed(8)).bfloat16()
    actual = predictions.fisher_information(model.prediction_gradients(hidden, seed=1)) / len(hidden)
    assert torch.equal(actual, predictions.fisher_information(model.prediction_gradients(hidden, seed=1)) / len(hidden))
    expected = torch.zeros_like(actual)
    for x in hidden[:64].float():
        p = original.lm_head(original.model.norm(x)).softmax(-1).detach()
        through = original.lm_head.weight.detach() @ torch.func.jacrev(original.model.norm)(x)
        expected += through.T @ (p[:, None] * through - p[:, None] * (p @ through)) / 64
    assert abs(float(actual.trace() / expected.trace()) - 1) < 0.2
    top = torch.linalg.eigh(expected)[1][:, -8:]  # the largest directions agree
    assert abs(float((top.T @ actual @ top).trace() / (top.T @ expected @ top).trace()) - 1) < 0.3


def test_slopes_are_derivatives(model: LayeredModel) -> None:
    gate, up = torch.randn((5, 7)), torch.randn((5, 7))
    actual, step = model.activation_slopes(0, gate, up), 1e-3
    by_gate = (model.activate(0, gate + step, up) - model.activate(0, gate - step, up)) / (2 * step)
    torch.testing.assert_close(actual, torch.cat([by_gate, torch.nn.functional.silu(gate)], 1), rtol=1e-2, atol=1e-3)
