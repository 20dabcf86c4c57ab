"""Tests of `ktconvert eval`: known distributions, a model against itself, and the bundled model."""

import json
import math
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.pipeline.cli import group
from ktconvert.pipeline.cli.eval import eval as command
from ktconvert.pipeline.options.model_options import EvalOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import tokens
from rig.files import edit_json

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ktconvert.pipeline.models import evaluate, loading  # noqa: E402

COUNT, LENGTH = 3, 128
Reports = dict[str, dict[str, Any]]  # by method

# Bounds for each method: mean divergence, top-1 agreement, relative error of each layer.
METHODS = {
    "int8": ((0, 0.003), (0.98, 1.01), (0.005, 0.03)),
    "int4": ((0.003, 0.03), (0.88, 0.98), (0.05, 0.2)),
    "W8A16": ((0, 0.001), (0.98, 1.01), (0.003, 0.02)),
}


@pytest.fixture(scope="module")
def text(example: Path) -> Path:
    """Return a text that the bundled model was not trained on."""
    return example.parent / "heldout.txt"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Path]:
    """Return the bundled model converted for the CPU and for the GPU, by method."""
    root = tmp_path_factory.mktemp("converted")
    for method in METHODS:
        how = ("gpu", "--quant-method", "RTN", "--quant-type") if method[0] == "W" else ("cpu", "--quant-method")
        result = CliRunner().invoke(group, [*how, method, "-i", str(example), "-o", str(root / method), "-q"])
        assert result.exception is None, result.output
    return {method: root / method for method in METHODS}


def option_of(method: str) -> str:
    """Return the option of `eval` for a method."""
    if method[0] == "W" and find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors is not installed")
    return "--gpu-weights" if method[0] == "W" else "--cpu-weights"


def run(model: Path, weights: Path, text: Path, *options: object, option: str = "--cpu-weights") -> Result:
    arguments = [
        model,
        option,
        weights,
        "--text",
        text,
        "--sequence-length",
        LENGTH,
        "--max-sequences",
        COUNT,
        *options,
    ]
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def reports(converted: dict[str, Path], example: Path, text: Path) -> Reports:
    documents = {}
    for method, weights in converted.items():
        result = run(example, weights, text, "--json", option=option_of(method))
        assert result.exception is None, (result.output, result.exception)
        documents[method] = json.loads(result.stdout)
    return documents


def error_of(*arguments: Any, option: str = "--cpu-weights") -> tuple[int, str]:
    """Return exit code and message of a failing eval."""
    result = run(*arguments, option=option)
    assert result.exception is not None
    assert hasattr(result.exception, "exit_code") or isinstance(result.exception, SystemExit), result.exception
    return getattr(result.exception, "exit_code", result.exit_code), str(result.exception)


@pytest.mark.parametrize("method", METHODS)
def test_report_has_the_counts_and_plausible_errors(
    method: str, reports: Reports, converted: dict[str, Path], example: Path, text: Path
) -> None:
    from transformers import AutoTokenizer

    report, count = reports[method], len(AutoTokenizer.from_pretrained(example)(text.read_text())["input_ids"])
    assert (report["sequences"], report["sequence_length"], report["positions"]) == (
        COUNT,
        LENGTH,
        COUNT * (LENGTH - 1),
    )
    assert (report["tokens"], report["skip_sequences"]) == (count, 0)
    assert report["skipped_tokens"] == count - COUNT * LENGTH
    assert report["method"] == (method if method[0] == "W" else f"AMX{method.upper()}")
    weights = {"--cpu-weights": report["cpu_weights"], "--gpu-weights": report["gpu_weights"]}
    assert weights.pop(option_of(method)) == str(converted[method]) and [*weights.values()] == [None]
    divergence, agreement, error = METHODS[method]
    before, after = report["perplexity"]["original"], report["perplexity"]["converted"]
    assert 20 < before < 80 and before == pytest.approx(reports["int8"]["perplexity"]["original"], rel=1e-6)
    assert abs(math.log(after / before)) < 5 * divergence[1]
    assert divergence[0] < report["kl"]["mean"] < divergence[1]
    assert report["kl"]["mean"] < report["kl"]["p99"] <= report["kl"]["max"]
    assert agreement[0] < report["top1_agreement"] < agreement[1]
    assert [row["layer"] for row in report["layers"]] == [0, 1]
    assert all(error[0] < row["relative_error"] < error[1] for row in report["layers"])


def test_original_perplexity_equals_that_of_transformers(reports: Reports, example: Path, text: Path) -> None:
    """The reference is transformers' own loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(example)
    ids = torch.tensor(AutoTokenizer.from_pretrained(example)(text.read_text())["input_ids"])[: COUNT * LENGTH]
    with torch.inference_mode():
        losses = [float(model(input_ids=one[None], labels=one[None]).loss) for one in ids.reshape(COUNT, LENGTH)]
    assert reports["int8"]["perplexity"]["original"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)


def test_eval_prints_a_table_and_draws_a_plot(
    converted: dict[str, Path], example: Path, text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert CliRunner().invoke(command, [str(example), "--text", str(text)]).exception is not None  # no weights
    picture = tmp_path / "eval.png"
    result = run(example, converted["int4"], text, "--plot", picture)
    assert result.exception is None, result.exception
    assert "3 sequences of 128 tokens without overlap" in result.stdout and "tokens skipped" in result.stdout
    assert "KL divergence" in result.stdout and "top-1 agreement" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    for content in (text.read_bytes(), publish.MARK.encode()):  # even if ktconvert has drawn it
        (tmp_path / "t.svg").write_bytes(content)
        code, message = error_of(example, converted["int4"], tmp_path / "t.svg", "--plot", tmp_path / "t.svg")
        assert code == 2 and "--text is the same file" in message
        assert (tmp_path / "t.svg").read_bytes() == content


def test_a_model_has_no_error_against_itself(example: Path, text: Path, converted: dict[str, Path]) -> None:
    """Afterwards, no hook remains but those of the model."""
    choice = loading.ModelChoice(str(example), converted["int8"])
    sequences = evaluate.cut_sequences(choice, text.read_text(), text, 64, 2)
    original, converted = evaluate.load_pair(choice)
    hooks = [len(module._forward_hooks) for module in original.modules()]
    progress: list[int] = []
    same = evaluate.evaluate(original, original, sequences, progress.append)
    figures = evaluate.build_report(EvalOptions(model="it", text=text), sequences, same, "none")
    assert figures["kl"] == {"mean": 0, "p99": 0, "max": 0} and figures["top1_agreement"] == 1
    assert figures["perplexity"]["original"] == figures["perplexity"]["converted"]
    assert figures["layers"] == [] and progress == [64, 64]
    assert len(evaluate.evaluate(original, converted, sequences, progress.append).layers) == 2
    assert [len(module._forward_hooks) for module in original.modules()] == hooks
    shared = {p.data_ptr() for p in original.parameters()}
    assert all(p.data_ptr() in shared for p in converted.parameters()), "the rest is in memory once"


def test_eval_fails_for_predictions_that_are_not_finite(
    example: Path, text: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = KTExperts.forward

    def return_nan(self: KTExperts, *arguments: Any, **rest: Any) -> Any:
        out = forward(self, *arguments, **rest)
        out[20:21] = 0x7FC0  # loading computes fewer tokens
        return out

    monkeypatch.setattr(KTExperts, "forward", return_nan)
    code, message = error_of(example, converted["int8"], text)
    assert code == VerificationError.exit_code and "not finite" in message


def test_skip_sequences_and_max_sequences_select_sequences(
    converted: dict[str, Path], example: Path, text: Path
) -> None:
    choice = loading.ModelChoice(str(example))
    all_sequences = evaluate.cut_sequences(choice, text.read_text(), text, LENGTH, None)
    selected = evaluate.cut_sequences(choice, text.read_text(), text, LENGTH, 4, 30)
    assert (all_sequences.tokens_before, selected.tokens_before) == (0, 30 * LENGTH)
    assert (selected.ids == all_sequences.ids[30:34]).all()
    total = all_sequences.ids.size + all_sequences.tokens_after
    assert selected.tokens_before + selected.ids.size + selected.tokens_after == total == 4889
    result = run(
        example, converted["W8A16"], text, "--skip-sequences", 35, "--max-sequences", 1, option="--gpu-weights"
    )
    assert (
        f"1 sequence of 128 tokens without overlap, the first {35 * LENGTH} and the last 281 of 4889" in result.stdout
    )
    assert f"GPU weights      {converted['W8A16']} (W8A16)" in result.stdout


def test_compare_logits_matches_hand_computed_values() -> None:
    """The distributions are p = (1/2, 1/4, 1/4) and q = (1/4, 1/2, 1/4)."""
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    count = 2 * evaluate.CHUNK + 3
    comparison = evaluate.compare_logits(
        *(torch.tensor(np.tile(x, (count, 1))) for x in (p, q)), torch.arange(count) % 3
    )
    assert all(len(getattr(comparison, name)) == count for name in ("original", "converted", "divergence", "agree"))
    assert comparison.divergence == pytest.approx(0.25 * math.log(2))
    assert comparison.original[:3] == pytest.approx(-p) and comparison.converted[:3] == pytest.approx(-q)
    assert not comparison.agree.any()
    # A constant does not change a distribution; a token with probability 0 adds nothing.
    shifted = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, 0.0, 0.0]])
    comparison = evaluate.compare_logits(shifted, shifted + 7, torch.tensor([0, 1]))
    assert comparison.divergence == pytest.approx(0, abs=1e-12)
    assert comparison.agree.all() and np.isfinite(comparison.original).all()
    for original, difference, relative in ((4.0, 1.0, 0.5), (4.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0)):
        assert evaluate.ExpertsError(3, difference, original).relative == relative


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, example: Path, converted: dict[str, Path]) -> dict[str, Path]:
    """Return models, weights and texts by name, valid and invalid ones. The path "none" does not exist."""
    root = tmp_path_factory.mktemp("faulty")
    for name in ("bare", "damaged"):
        tokenizers = shutil.ignore_patterns("tokenizer*") if name == "bare" else None
        shutil.copytree(example, root / name, ignore=tokenizers)
    (root / "damaged" / "config.json").write_text("{}")
    (root / "empty").mkdir()
    (root / "short.txt").write_text("def add(a, b):\n")
    (root / "rows.jsonl").write_text('{"text": "import os"}\n' * 1000)
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00")
    shutil.copytree(converted["W8A16"], root / "one layer fewer")
    edit_json(root / "one layer fewer" / "config.json", lambda config: config.update(num_hidden_layers=1))
    valid = {"example": example, "text": example.parent / "heldout.txt", **converted}
    return {**{path.name: path for path in root.iterdir()}, **valid, "none": root / "none"}


CPU, GPU = "--cpu-weights", "--gpu-weights"
REFUSED: list[tuple[str, str, str, str, tuple[Any, ...], int, str]] = [
    ("example", CPU, "int8", "short.txt", (), 5, "short.txt: .*less than one sequence of 128"),
    ("example", CPU, "int8", "binary.txt", (), 5, "binary.txt"),
    ("example", CPU, "int8", "rows.jsonl", (), 5, "rows.jsonl: is a data set of rows; write their texts"),
    ("example", CPU, "int8", "none", (), 5, "none"),
    ("example", CPU, "int8", "text", ("--sequence-length", 4096), 2, "1024"),
    ("example", CPU, "empty", "text", (), 5, "has no .safetensors file"),
    ("bare", CPU, "int8", "text", (), 5, "no tokenizer"),
    ("damaged", CPU, "int8", "text", (), 5, ""),
    ("example", GPU, "W8A16", "text", ("--cpu-weights", "."), 2, ""),
    ("example", GPU, "W8A16", "text", ("--exact",), 2, ""),
    ("example", GPU, "example", "text", (), 5, "has no experts for the GPU"),
    ("example", GPU, "none", "text", (), 5, ""),
    ("example", GPU, "one layer fewer", "text", (), 3, "was not made from"),
    ("example", GPU, "W8A16", "text", ("--skip-sequences", 38), 5, "no sequence of 128 after the first 38"),
]


@pytest.mark.parametrize(("model", "option", "weights", "text", "options", "code", "message"), REFUSED)
def test_eval_rejects_invalid_inputs(
    model: str, option: str, weights: str, text: str, options: Any, code: int, message: str, faulty: dict[str, Path]
) -> None:
    exit_code, error = error_of(faulty[model], faulty[weights], faulty[text], *options, option=option)
    assert exit_code == code and re.search(message, error), error


def test_progress_counts_tokens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktconvert.pipeline.report.progress.LINE_EVERY", 0)
    reporter = Reporter()
    reporter.begin(1024, 0, tokens)
    reporter.advance(512)
    reporter.end()
    output = capsys.readouterr().err
    assert "512 tokens of 1024 tokens" in output and "tokens/s" in output and "50 %" in output and "ETA" in output
