"""Rounding rows in turn by what predictions feel: the conditional optimum, less error in both metrics, and gradients."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.output_tensors import decoded_others
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.pipeline.calibration.layered_model import LayeredModel
from ktconvert.quantizers import ROW_GRIDS, descent, gptq, predictions
from rig import families
from rig.files import edit_json

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from safetensors.torch import load_file, save_file

GRID = ROW_GRIDS["int4"]


def correlated(n: int, seed: int) -> Any:
    """A metric, float32 [n, n], with few large directions."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn((2 * n, n), generator=generator) * torch.logspace(0, -2, n)
    return (mixed @ torch.linalg.qr(torch.randn((n, n), generator=generator))[0]).T.cov()


def rounded(weight: Any, metric: Any, rows: Any = slice(None)) -> descent.Chosen:
    """By GPTQ alone, with the scales of the largest values. rows: their numbers, which nothing depends on."""
    scale = weight.abs().amax(1, keepdim=True) / GRID.high
    factor = gptq.factorize(gptq.Hessian(metric, 1), 0.01)
    values = gptq.compensate(weight, factor, scale, GRID.code_range)
    return descent.Chosen(gptq.codes(values, scale, GRID.code_range), scale)


def cost(weight: Any, made: descent.Chosen, inputs: Any, outputs: Any) -> float:
    error = weight - made.values
    return float(torch.trace(outputs @ error @ inputs @ error.T))


@pytest.mark.parametrize("n", [40, 64, 150])
def test_errors_go_where_predictions_feel_them_least(n: int) -> None:
    weight, inputs, outputs = torch.randn((n, 96)), correlated(96, 1), correlated(n, 2)
    made = predictions.in_turn(weight, predictions.factorize(outputs), lambda rows, _: rounded(rows, inputs))
    alone = rounded(weight, inputs)
    assert cost(weight, made, inputs, outputs) < 0.9 * cost(weight, alone, inputs, outputs)
    plain = torch.eye(n)  # if all outputs count alike, each row is rounded as if it were alone
    same = predictions.in_turn(weight, predictions.factorize(plain), lambda rows, _: rounded(rows, inputs))
    assert torch.equal(same.codes, alone.codes) and torch.equal(same.scale, alone.scale)


def test_rows_that_are_left_make_up_for_those_before() -> None:
    """They are what is best after the errors before, by the equation of numerics.md, in float64."""
    n, first = 80, predictions.ROWS
    weight, outputs, seen = torch.randn((n, 5)), correlated(n, 3), []

    def choose(rows: Any, numbers: Any) -> descent.Chosen:
        seen.append((rows.clone(), numbers))
        return descent.Chosen(rows.round().to(torch.int8), torch.ones((len(rows), 1)))

    predictions.in_turn(weight, predictions.factorize(outputs), choose)
    order = torch.cat([numbers for _, numbers in seen])
    assert order.sort().values.tolist() == list(range(n))
    assert torch.equal(order, torch.argsort(outputs.diagonal(), descending=True))
    metric = outputs.double() + predictions.DAMPENING * outputs.double().diagonal().mean() * torch.eye(n)
    metric = metric[order][:, order].numpy()
    whole, (done, _), (after, _) = weight[order].double().numpy(), seen[0], seen[1]
    error = whole[:first] - done.round().numpy()
    rest = slice(first, first + len(after))
    best = whole[first:] + np.linalg.solve(metric[first:, first:], metric[first:, :first] @ error)
    np.testing.assert_allclose(after.numpy(), best[: rest.stop - first], atol=1e-4)


def test_what_predictions_feel_of_gate_and_up() -> None:
    """The sum over tokens of what they feel of gate and up through down, token by token."""
    down, outputs, slopes = torch.randn((6, 4)), correlated(6, 6), torch.randn((9, 8))
    found = predictions.of_middle(outputs, down, slopes.T @ slopes)
    metric = outputs + predictions.DAMPENING * outputs.diagonal().mean() * torch.eye(6)
    wide = torch.cat([down, down], 1)
    want = sum((wide * s).T @ metric @ (wide * s) for s in slopes)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_more_layers_follow_the_less_counts_what_predictions_feel() -> None:
    gradients = torch.randn((30, 6))
    first, last = predictions.information(gradients, 20), predictions.information(gradients)
    mean = last.diagonal().mean()
    torch.testing.assert_close(last, gradients.T @ gradients)
    torch.testing.assert_close(first, last + 20 * predictions.FOLLOWING * mean * torch.eye(6))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(broken: float) -> None:
    outputs = correlated(8, 7)
    outputs[3, 3] = broken
    with pytest.raises(gptq.NotFinite):
        predictions.factorize(outputs)


def layered(folder: Path) -> LayeredModel:
    source = open_checkpoint(folder)
    model = recognise(source)
    rest = decoded_others(other_tensors(source, model.expert_tensor_names(), model.quantization))
    return LayeredModel(source, {tensor.key: tensor for tensor in rest})


@pytest.fixture(scope="module")
def model(example: Path) -> LayeredModel:
    return layered(example)


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    """It gives the gradients of a head of its own with the same numbers."""
    families.make("deepseek_v3", False, tmp_path / "tied", tie_word_embeddings=True)
    shutil.copytree(tmp_path / "tied", tmp_path / "untied")
    edit_json(tmp_path / "untied" / "config.json", lambda config: config.update(tie_word_embeddings=False))
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "untied" / "model.safetensors", {"format": "pt"})
    hidden = torch.randn((40, families.HIDDEN)).bfloat16()
    tied, untied = (layered(tmp_path / name).prediction_gradients(hidden, seed=3) for name in ("tied", "untied"))
    assert torch.equal(tied, untied) and tied.isfinite().all() and tied.any()


def test_gradients_are_those_of_drawn_tokens(model: LayeredModel, example: Path) -> None:
    """Their mean square is the Fisher information, which all tokens give together."""
    import transformers

    whole = transformers.AutoModelForCausalLM.from_pretrained(example, dtype=torch.float32)
    hidden = torch.randn((4096, whole.config.hidden_size), generator=torch.Generator().manual_seed(8)).bfloat16()
    found = predictions.information(model.prediction_gradients(hidden, seed=1)) / len(hidden)
    assert torch.equal(found, predictions.information(model.prediction_gradients(hidden, seed=1)) / len(hidden))
    want = torch.zeros_like(found)
    for x in hidden[:64].float():
        p = whole.lm_head(whole.model.norm(x)).softmax(-1).detach()
        through = whole.lm_head.weight.detach() @ torch.func.jacrev(whole.model.norm)(x)
        want += through.T @ (p[:, None] * through - p[:, None] * (p @ through)) / 64
    assert abs(float(found.trace() / want.trace()) - 1) < 0.2
    top = torch.linalg.eigh(want)[1][:, -8:]  # what they feel most is what is felt most
    assert abs(float((top.T @ found @ top).trace() / (top.T @ want @ top).trace()) - 1) < 0.3


def test_slopes_are_derivatives(model: LayeredModel) -> None:
    gate, up = torch.randn((5, 7)), torch.randn((5, 7))
    found, step = model.activation_slopes(0, gate, up), 1e-3
    by_gate = (model.activate(0, gate + step, up) - model.activate(0, gate - step, up)) / (2 * step)
    torch.testing.assert_close(found, torch.cat([by_gate, torch.nn.functional.silu(gate)], 1), rtol=1e-2, atol=1e-3)
