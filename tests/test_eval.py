"""`ktconvert eval`: the numbers of known distributions, of a model against itself, and of the bundled model in INT8,
INT4, W8A16, W4A16."""

from __future__ import annotations

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.pipeline.cli.cpu import cpu
from ktconvert.pipeline.cli.eval import eval as command
from ktconvert.pipeline.cli.gpu import gpu
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.ui.text import tokens

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ktconvert.pipeline.models import evaluate, generate  # noqa: E402

WINDOWS, WINDOW = 3, 128


@pytest.fixture(scope="module")
def text(example: Path) -> Path:
    """Text that the bundled model was not trained on."""
    return example.parent / "heldout.txt"


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Path]:
    """The bundled model in both methods."""
    root = tmp_path_factory.mktemp("converted")
    for method in ("int8", "int4"):
        done = CliRunner().invoke(cpu, ["-i", str(example), "-o", str(root / method), "--quant-method", method, "-q"])
        assert done.exception is None, done.output
    return {method: root / method for method in ("int8", "int4")}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Path]:
    """The bundled model for the GPU."""
    if find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors is not installed")
    root = tmp_path_factory.mktemp("packed")
    for kind in ("W8A16", "W4A16"):
        pack(example, root / kind, kind)
    return {kind: root / kind for kind in ("W8A16", "W4A16")}


def pack(model: Path, output: Path, kind: str) -> Path:
    words = ["-i", model, "-o", output, "--quant-method", "RTN", "--quant-type", kind, "-q"]
    done = CliRunner().invoke(gpu, [str(word) for word in words])
    assert done.exception is None, done.output
    return output


def run(model: Path, weights: Path, text: Path, *rest: object, which: str = "--cpu-weights") -> Result:
    arguments = [model, which, weights, "--text", text, "--window", WINDOW, "--max-windows", WINDOWS, *rest]
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def reports(conversions: dict[str, Path], example: Path, text: Path) -> dict[str, dict[str, Any]]:
    """The JSON document of each method."""
    documents = {}
    for method, weights in conversions.items():
        done = run(example, weights, text, "--json")
        assert done.exception is None, (done.output, done.exception)
        documents[method] = json.loads(done.stdout)
    return documents


def sentence(*arguments: Any, which: str = "--cpu-weights") -> tuple[int, str]:
    """Exit code and message of what must fail."""
    done = run(*arguments, which=which)
    assert done.exception is not None
    assert hasattr(done.exception, "exit_code") or isinstance(done.exception, SystemExit), done.exception
    return getattr(done.exception, "exit_code", done.exit_code), str(done.exception)


# ---- the bundled model -----------------------------------------------------------------------------------------------


def test_what_was_read_is_reported(reports: dict[str, dict[str, Any]], example: Path, text: Path) -> None:
    from transformers import AutoTokenizer

    count = len(AutoTokenizer.from_pretrained(example)(text.read_text())["input_ids"])
    for method, one in reports.items():
        assert (one["windows"], one["window"], one["positions"]) == (WINDOWS, WINDOW, WINDOWS * (WINDOW - 1))
        assert one["tokens"] == count and one["skipped_tokens"] == count - WINDOWS * WINDOW
        assert one["method"] == f"AMX{method.upper()}"


def test_int8_costs_little_and_int4_more(reports: dict[str, dict[str, Any]]) -> None:
    one, other = reports["int8"], reports["int4"]
    assert one["perplexity"]["original"] == other["perplexity"]["original"]
    assert 20 < one["perplexity"]["original"] < 80
    for document, far, least in ((one, 0.002, 0.98), (other, 0.05, 0.88)):
        before, after = document["perplexity"]["original"], document["perplexity"]["converted"]
        assert abs(math.log(after / before)) < far
        assert document["top1_agreement"] > least
        assert 0 < document["kl"]["mean"] < document["kl"]["p99"] <= document["kl"]["max"]
    assert 0 < one["kl"]["mean"] < 0.003 < other["kl"]["mean"] < 0.03
    assert other["top1_agreement"] < one["top1_agreement"]


def test_the_error_of_every_layer(reports: dict[str, dict[str, Any]]) -> None:
    for method, low, high in (("int8", 0.005, 0.03), ("int4", 0.05, 0.2)):
        layers = reports[method]["layers"]
        assert [row["layer"] for row in layers] == [0, 1]
        assert all(low < row["relative_error"] < high for row in layers)


def test_the_original_is_what_transformers_computes(
    reports: dict[str, dict[str, Any]], example: Path, text: Path
) -> None:
    """Perplexity by transformers' own loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(example)
    ids = torch.tensor(AutoTokenizer.from_pretrained(example)(text.read_text())["input_ids"])[: WINDOWS * WINDOW]
    with torch.inference_mode():
        losses = [float(model(input_ids=one[None], labels=one[None]).loss) for one in ids.reshape(WINDOWS, WINDOW)]
    assert reports["int8"]["perplexity"]["original"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)


def test_the_report_and_the_picture(conversions: dict[str, Path], example: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "eval.png"
    done = run(example, conversions["int4"], text, "--plot", picture)
    assert done.exception is None, done.exception
    assert "3 windows of 128 tokens without overlap" in done.stdout and "tokens left out" in done.stdout
    assert "KL divergence" in done.stdout and "top-1 agreement" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 ")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_read_is_no_picture(example: Path, text: Path, conversions: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for content in (text.read_bytes(), publish.MARK.encode()):  # our own pictures are no exception
        (tmp_path / "t.svg").write_bytes(content)
        said = sentence(example, conversions["int4"], tmp_path / "t.svg", "--plot", tmp_path / "t.svg")
        assert said[0] == 2 and "--text is the same file" in said[1]
        assert (tmp_path / "t.svg").read_bytes() == content


def test_a_model_against_itself(example: Path, text: Path, conversions: dict[str, Path]) -> None:
    """No difference at all; and no hook stays behind."""
    choice = generate.Choice(str(example), conversions["int8"])
    windows = evaluate.cut(choice, text.read_text(), text, 64, 2)
    original, converted = evaluate.load_pair(choice)
    progress: list[int] = []
    same = evaluate.evaluate(original, original, windows, progress.append)
    figures = same.figures()
    assert figures["kl"] == {"mean": 0, "p99": 0, "max": 0} and figures["top1_agreement"] == 1
    assert figures["perplexity"]["original"] == figures["perplexity"]["converted"]
    assert figures["layers"] == [] and progress == [64, 64]
    assert len(evaluate.evaluate(original, converted, windows, progress.append).layers) == 2
    assert not any(module._forward_hooks for module in original.modules())
    shared = {p.data_ptr() for p in original.parameters()}
    assert all(p.data_ptr() in shared for p in converted.parameters()), "the rest is in memory once"


def test_a_model_that_predicts_nothing_is_no_number(
    example: Path, text: Path, conversions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Experts.forward

    def broken(self: Experts, *arguments: Any, **rest: Any) -> Any:
        out = forward(self, *arguments, **rest)
        out[5] = 0x7FC0
        return out

    monkeypatch.setattr(Experts, "forward", broken)
    code, message = sentence(example, conversions["int8"], text)
    assert code == VerificationError.exit_code and "not finite" in message


# ---- experts for the GPU ---------------------------------------------------------------------------------------------


def test_eight_bits_for_the_gpu_cost_little_and_four_more(
    packed: dict[str, Path], reports: dict[str, dict[str, Any]], example: Path, text: Path
) -> None:
    documents = {}
    for kind, weights in packed.items():
        done = run(example, weights, text, "--json", which="--gpu-weights")
        assert done.exception is None, (done.output, done.exception)
        documents[kind] = json.loads(done.stdout)
    for kind, low, high in (("W8A16", 0.003, 0.02), ("W4A16", 0.05, 0.15)):
        document = documents[kind]
        assert (document["method"], document["gpu_weights"]) == (kind, str(packed[kind]))
        assert document["cpu_weights"] is None and document["skip_windows"] == 0
        assert [row["layer"] for row in document["layers"]] == [0, 1]
        assert all(low < row["relative_error"] < high for row in document["layers"])
        for same in ("tokens", "windows", "positions", "skipped_tokens"):
            assert document[same] == reports["int8"][same]
        assert document["perplexity"]["original"] == pytest.approx(reports["int8"]["perplexity"]["original"], rel=1e-6)
    assert 0 < documents["W8A16"]["kl"]["mean"] < 0.001 < documents["W4A16"]["kl"]["mean"] < 0.02
    assert documents["W8A16"]["top1_agreement"] > 0.98 > documents["W4A16"]["top1_agreement"] > 0.9


def test_windows_are_left_out(packed: dict[str, Path], example: Path, text: Path) -> None:
    choice = generate.Choice(str(example))
    every = evaluate.cut(choice, text.read_text(), text, WINDOW, None)
    some = evaluate.cut(choice, text.read_text(), text, WINDOW, 4, 30)
    assert every.before == 0 and (some.ids == every.ids[30:34]).all() and some.before == 30 * WINDOW
    whole = every.ids.size + every.skipped
    assert some.before + some.ids.size + some.skipped == whole == 4889
    done = run(example, packed["W8A16"], text, "--skip-windows", 35, "--max-windows", 1, which="--gpu-weights")
    assert f"1 windows of 128 tokens without overlap, the first {35 * WINDOW} and the last 281 of 4889" in done.stdout
    assert f"GPU weights      {packed['W8A16']} (W8A16)" in done.stdout
    code, message = sentence(example, packed["W8A16"], text, "--skip-windows", 38, which="--gpu-weights")
    assert code == 5 and "no window of 128 after the first 38" in message


def test_gpu_weights_that_do_not_do(
    packed: dict[str, Path], conversions: dict[str, Path], example: Path, text: Path, tmp_path: Path
) -> None:
    def refused(weights: Path, *rest: object) -> tuple[int, str]:
        return sentence(example, weights, text, *rest, which="--gpu-weights")

    assert refused(packed["W4A16"], "--cpu-weights", conversions["int8"])[0] == 2
    assert refused(packed["W4A16"], "--exact")[0] == 2
    assert CliRunner().invoke(command, [str(example), "--text", str(text)]).exception is not None
    code, message = refused(example)
    assert code == 3 and "holds no experts for the GPU" in message
    assert refused(conversions["int8"])[0] == 3
    assert refused(tmp_path / "none")[0] == 5


def test_gpu_weights_of_another_model(packed: dict[str, Path], example: Path, text: Path, tmp_path: Path) -> None:
    """One layer fewer."""
    other = Path(shutil.copytree(packed["W8A16"], tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 1}
    (other / "config.json").write_text(json.dumps(config))
    code, message = sentence(example, other, text, which="--gpu-weights")
    assert code == 3 and "was made from another model" in message


# ---- known distributions ---------------------------------------------------------------------------------------------


def test_comparing_distributions() -> None:
    """By hand: p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4)."""
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    count = 2 * evaluate.CHUNK + 3
    one = evaluate.compare(*(torch.tensor(np.tile(x, (count, 1))) for x in (p, q)), torch.arange(count) % 3)
    assert all(len(getattr(one, name)) == count for name in ("original", "converted", "divergence", "agree"))
    assert one.divergence == pytest.approx(0.25 * math.log(2))
    assert one.original[:3] == pytest.approx(-p) and one.converted[:3] == pytest.approx(-q)
    assert not one.agree.any()


def test_logits_may_be_shifted_and_impossible() -> None:
    """A constant changes no distribution; a token that cannot come adds nothing."""
    p = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, 0.0, 0.0]])
    one = evaluate.compare(p, p + 7, torch.tensor([0, 1]))
    assert one.divergence == pytest.approx(0, abs=1e-12) and one.agree.all()
    assert np.isfinite(one.original).all()


def test_divergence_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50, 300, generator=generator).bfloat16() for _ in range(2))
    wanted = torch.nn.functional.kl_div(
        q.double().log_softmax(-1), p.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert evaluate.compare(p, q, torch.zeros(50, dtype=torch.int64)).divergence == pytest.approx(wanted.numpy())


@pytest.mark.parametrize(
    ("original", "difference", "relative"), [(4.0, 1.0, 0.5), (4.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0)]
)
def test_the_error_of_a_layer(original: float, difference: float, relative: float) -> None:
    assert evaluate.LayerError(3, difference, original).relative == relative


# ---- what cannot be evaluated
# ------------------------------------------------------------------------------------------


def test_texts_that_do_not_do(conversions: dict[str, Path], example: Path, text: Path, tmp_path: Path) -> None:
    weights = conversions["int8"]
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("def add(a, b):\n")
    binary.write_bytes(b"\xff\xfe\x00")
    code, message = sentence(example, weights, short)
    assert code == 5 and "less than one window of 128" in message and str(short) in message
    assert sentence(example, weights, binary)[0] == 5
    assert sentence(example, weights, tmp_path / "none.txt")[0] == 5
    code, message = sentence(example, weights, text, "--window", 4096)
    assert code == 2 and "1024" in message
    assert sentence(example, weights, text, "--window", 1)[0] == 2


def test_models_and_weights_that_do_not_do(
    conversions: dict[str, Path], example: Path, text: Path, tmp_path: Path, cli: Any
) -> None:
    code, message = sentence(example, tmp_path, text)
    assert code == 3 and "holds no expert weights" in message
    assert sentence(tmp_path / "none", conversions["int8"], text)[0] == 5
    bare = tmp_path / "bare"
    shutil.copytree(example, bare)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (bare / file).unlink()
    code, message = sentence(bare, conversions["int8"], text)
    assert code == 5 and "no tokenizer" in message
    (bare / "config.json").write_text("{}")
    assert "cannot load" in cli("eval", bare, "--cpu-weights", conversions["int8"], "--text", text, code=5).stderr


def test_without_transformers(
    conversions: dict[str, Path], example: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ktconvert.pipeline.models.evaluate.find_spec", lambda name: None if name == "transformers" else True
    )
    code, message = sentence(example, conversions["int8"], text)
    assert code == 1 and message.endswith("needs transformers, not installed here: pip install 'ktconvert[run]'")


def test_progress_counts_tokens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktconvert.pipeline.ui.progress.LINE_EVERY", 0)
    reporter = Reporter()
    reporter.begin(1024, 0, tokens)
    reporter.advance(512)
    reporter.end()
    output = capsys.readouterr().err
    assert "50.0 %  512 tokens of 1024 tokens" in output and "tokens/s" in output and "ETA" in output
