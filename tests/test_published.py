"""Models as they are published, with quantized attention, shared experts and dense layers: `run`, `serve`, `eval`.

They compute the model that `ktconvert dequantize` writes, with the same experts.
"""

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant.runtime.stored_tensors import find_stored_tensors
from ktconvert.pipeline.cli.eval import eval as evaluate
from ktconvert.pipeline.cli.run import run
from ktconvert.pipeline.models.loading import ModelChoice
from ktconvert.pipeline.plans.commands import make_options, make_plan
from ktconvert.pipeline.plans.commands import run as run_plan
from rig import decided, encodings, families, family_models, hf, published, served, stored
from rig.family_rows import ROWS
from rig.safetensors import Tensor, Tensors, edit_file, read_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import KTConvertConfig  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = hf.random_ids(families.VOCABULARY, 1, 40)
BF16, INT8 = "bf16", "int8"
PROMPT = ("--prompt", "import os", "--max-new-tokens", 8, "--threads", 1)
Outputs = Callable[..., Path]


def convert(command: str, source: Path, output: Path, **options: Any) -> Path:
    """Run a conversion in this process."""
    run_plan(make_plan(make_options(command, input=source, output=output, threads=1, **options)))
    return output


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Return paths(form): the published model; paths(form, BF16): dequantized; paths(form, method): converted."""
    root, made = tmp_path_factory.mktemp("published"), dict[tuple[str, str], Path]()

    def get(form: str, output: str = "") -> Path:
        folder = root / f"{form}-{output}".replace(" ", "-")
        if (form, output) not in made:
            if not output:
                made[form, output] = published.write(form, folder)
            elif output == BF16:
                made[form, output] = convert("dequantize", get(form), folder)
            else:
                made[form, output] = convert("cpu", get(form), folder, quant_method=output, numa=1)
        return made[form, output]

    return get


def load(model: Path, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model with transformers and our experts; return it with transformers' report."""
    kind, config = transformers.AutoModelForCausalLM, KTConvertConfig(threads=1, **settings)
    loaded, report = kind.from_pretrained(model, quantization_config=config, output_loading_info=True)
    return loaded, report


def call(command: Any, *arguments: object) -> Result:
    """Run a command in this process, which has already imported transformers."""
    return CliRunner().invoke(command, list(map(str, arguments)))


def text_of(*arguments: object) -> str:
    """Return the text that `run` prints."""
    done = call(run, *arguments, *PROMPT)
    assert (done.exit_code, "transformers computes" in done.stderr) == (0, False), (done.exception, done.stderr)
    return done.stdout


@pytest.mark.parametrize("form", published.FORMS)
def test_decoded_weights_equal_those_of_dequantize(form: str, paths: Outputs) -> None:
    """Float32 tensors keep their dtype; scales of the KV cache and of inputs are left out without a warning."""
    model, report = load(paths(form))
    assert not report["missing_keys"] | report["mismatched_keys"]
    assert all(".layers.2." in name for name in report["unexpected_keys"])  # the layer for multi-token prediction
    expected, _ = load(paths(form, BF16), cpu_weights=paths(form))
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    modules = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    assert {module.experts.method for module in modules} == {published.FORMS[form].method}
    for name, tensor in read_file(paths(form) / "model.safetensors").items():
        if name in ours and name.endswith("e_score_correction_bias"):
            assert ours[name].dtype == torch.float32 and ours[name].numpy().tobytes() == tensor.data
    assert torch.equal(hf.logits(model, IDS), hf.logits(expected, IDS))


@pytest.mark.parametrize("form", published.FORMS)
def test_run_generates_the_text_of_the_dequantized_model(form: str, paths: Outputs) -> None:
    """With experts as they are stored, and converted."""
    for experts in (paths(form), paths(form, INT8)):
        text = text_of(paths(form, BF16), "--cpu-weights", experts)
        assert text_of(paths(form), "--cpu-weights", experts) == text
        assert len(text) > len(PROMPT[1]) + 8


def test_transformers_computes_decoded_experts(paths: Outputs) -> None:
    assert text_of(paths("ct FP8"), "--torch-experts") == text_of(paths("ct FP8", BF16), "--torch-experts")


def test_serve_answers_with_the_text_of_run(paths: Outputs) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    model = paths("ct FP8")
    with served.serve_in_process(
        model, ModelChoice(str(model), cpu_weights=paths("ct FP8", INT8), threads=1)
    ) as running:
        request = {"model": str(model), "prompt": PROMPT[1], "max_tokens": PROMPT[3], "temperature": 0}
        answer = httpx.post(f"{running.url}/v1/completions", json=request, timeout=served.PATIENCE).json()
    text = text_of(paths("ct FP8", BF16), "--cpu-weights", paths("ct FP8", INT8))
    assert f"{PROMPT[1]}{answer['choices'][0]['text']}\n" == text


def test_eval_measures_the_experts_of_a_quantized_model(paths: Outputs, example: Path) -> None:
    """The original is the decoded model, and only the experts differ."""
    options = (
        "--text",
        example.parent / "heldout.txt",
        "--sequence-length",
        32,
        "--max-sequences",
        2,
        "--threads",
        1,
        "--json",
    )
    reports = []
    for model in (paths("modelopt NVFP4"), paths("modelopt NVFP4", BF16)):
        done = call(evaluate, model, "--cpu-weights", paths("modelopt NVFP4", INT8), *options)
        assert done.exit_code == 0, done.exception
        reports.append({name: json.loads(done.stdout)[name] for name in ("perplexity", "kl", "layers")})
    assert reports[0] == reports[1] and 0 < reports[0]["kl"]["mean"] < 0.01


def test_hot_experts_are_computed_beside_decoded_weights(paths: Outputs) -> None:
    models = paths("FP8 in blocks"), paths("FP8 in blocks", BF16)
    settings = {"cpu_weights": paths("FP8 in blocks", INT8), "num_gpu_experts": 3}
    ours, theirs = (hf.logits(load(model, **settings)[0], IDS) for model in models)
    assert torch.equal(ours, theirs)


def load_original(form: str, folder: Path, paths: Outputs) -> Any:
    """Load the decoded model with transformers, which decodes gpt-oss itself."""
    described = TEXTS[form]
    decoded = paths(form) if described.family == "gpt_oss" else paths(form, BF16)
    model = copy_model(decoded, folder, described.restore)
    kind = family_models.auto_class(described.family)
    loaded, report = kind.from_pretrained(model, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"] | report["mismatched_keys"]
    return loaded.eval()


def set_head(tensors: Tensors, head: Any) -> None:
    """Replace the head, whatever encodes it."""
    name = next(name for name in tensors if re.search(r"head\.weight$|unembed", name))
    for each in [each for each in tensors if each.startswith(name.removesuffix("weight"))]:
        del tensors[each]
    tensors[name] = Tensor("BF16", tuple(head.shape), head.view(torch.int16).numpy().tobytes())


TEXTS = {**published.FORMS, **published.MORE_FORMS}
del TEXTS["FP8, tied"]  # its head cannot be set
QUICK_TEXTS = ("modelopt NVFP4", "gpt-oss MXFP4")


@pytest.mark.parametrize("form", [pytest.param(n, marks=() if n in QUICK_TEXTS else pytest.mark.long) for n in TEXTS])
def test_run_generates_the_text_of_transformers(form: str, paths: Outputs, tmp_path: Path) -> None:
    """64 greedy tokens, with experts in BF16 and as they are stored."""
    family, method = TEXTS[form].family, TEXTS[form].method
    if ROWS[family].holds_for(transformers.__version__) is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = copy_model(paths(form), tmp_path / "model")
    original = load_original(form, tmp_path / "original", paths)
    tokenizer = decided.add_tokenizer(model)
    prompt, text = decided.decide_text(original, tokenizer)
    edit_file(
        model / "model.safetensors", lambda tensors: set_head(tensors, original.get_output_embeddings().weight.data)
    )
    converted = convert("cpu", model, tmp_path / "bf16", quant_method=BF16, numa=1)
    for experts in (("--cpu-weights", converted), ())[: 1 + bool(method)]:
        done = call(run, model, *experts, "--prompt", prompt, "--max-new-tokens", decided.TOKENS, "--threads", 1)
        assert (done.exit_code, "transformers computes" in done.stderr) == (0, False), (done.exception, done.stderr)
        assert done.stdout == f"{prompt}{text}\n"


# Median distance of the logits from those of transformers, for random weights; 4 bits are encoded a second time.
V4_BOUNDS = {"int4": 0.06, "int8": 0.02, "mxfp4": 0.015, "fp8": 0.025, "bf16": 0.015, "rawint4": 0.05}


@pytest.fixture(scope="module")
def deepseek_v4(paths: Outputs) -> tuple[Any, Any]:
    """Return the logits of DeepSeek-V4 in transformers, as it is and without the limit of its experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(paths("DeepSeek-V4", BF16))
    limited = hf.logits(model, IDS)
    for experts in hf.experts_of(model).values():
        experts.limit = 1e9
    return limited, hf.logits(model, IDS)


some_formats = [
    method if method in ("int8", "mxfp4") else pytest.param(method, marks=pytest.mark.long) for method in V4_BOUNDS
]


@pytest.mark.parametrize("method", some_formats)
def test_deepseek_v4_computes_with_its_limit_in_every_format(
    method: str, paths: Outputs, deepseek_v4: tuple[Any, Any]
) -> None:
    model, _ = load(paths("DeepSeek-V4"), cpu_weights=paths("DeepSeek-V4", method))
    distance, other = (float(hf.row_distances(hf.logits(model, IDS), each).median()) for each in deepseek_v4)
    print(f"{method}: {distance:.4f}, without the limit {other:.4f}")
    assert distance < V4_BOUNDS[method] < other / 2


def test_deepseek_v4_norms_return_the_dtype_of_their_input(paths: Outputs) -> None:
    """transformers keeps their weights in float32; linears in BF16 could not read such results."""
    model, _ = load(paths("DeepSeek-V4"))
    norm = model.model.layers[0].input_layernorm
    assert norm.weight.dtype == torch.float32
    assert norm(torch.ones(1, families.HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert norm(torch.ones(1, families.HIDDEN)).dtype == torch.float32


def copy_model(source: Path, folder: Path, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """Copy a model with changed tensors."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.safetensors"):
        edit_file(path, change)
    return folder


def test_weights_without_a_quantization_config_are_decoded(paths: Outputs, tmp_path: Path) -> None:
    """Early releases of modelopt declare NVFP4 only in hf_quant_config.json."""
    model = copy_model(paths("modelopt NVFP4"), tmp_path / "model")
    stored.configure(model, quantization_config=None, dtype=None)
    (model / "hf_quant_config.json").write_text("{}")
    assert text_of(model)
    loaded, declared = (load(path)[0] for path in (model, paths("modelopt NVFP4")))
    assert loaded.dtype in (torch.bfloat16, torch.float32)
    with torch.inference_mode():
        rows, expected = (each.bfloat16()(torch.arange(3, 40)[None]).logits for each in (loaded, declared))
    torch.testing.assert_close(rows, expected)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def add_nan(tensors: Tensors) -> None:
    shape, data = tensors[Q_PROJ].shape, bytearray(tensors[Q_PROJ].data)
    data[5] = 0x7F
    tensors[Q_PROJ] = Tensor("F8_E4M3", shape, bytes(data))


def remove_scale(tensors: Tensors) -> None:
    del tensors[f"{Q_PROJ}_scale"]


def add_integers(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = Tensor(
        "I8", (published.TOKENS, families.HIDDEN), bytes(published.TOKENS * families.HIDDEN)
    )


FAULTS: list[tuple[Callable[[Tensors], None], type[KTConvertError], str]] = [
    (add_nan, InputError, f"'{Q_PROJ}' contains a value that is not finite at row 0, column 5; download"),
    (remove_scale, InputError, f"{Q_PROJ}_scale_inv is missing; check"),
    (add_integers, UnsupportedError, "'lm_head.weight' is INT8, and stands outside the routed experts; that is not an"),
]


@pytest.mark.parametrize(("change", "kind", "message"), FAULTS)
def test_unreadable_weights_are_refused(change: Any, kind: Any, message: str, paths: Outputs, tmp_path: Path) -> None:
    """In one sentence, by `run` and by from_pretrained."""
    model = copy_model(paths("ct FP8"), tmp_path / "model", change)
    errors = [call(run, model, "--cpu-weights", paths("ct FP8", INT8), *PROMPT).exception]
    with pytest.raises(kind) as caught:
        load(model, cpu_weights=paths("ct FP8", INT8))
    for error in (*errors, caught.value):
        assert isinstance(error, kind) and message in str(error), error
        assert str(model) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("output", ["", BF16])
def test_rotated_models_are_refused(output: str, paths: Outputs, tmp_path: Path) -> None:
    """Decoded or not, their weights are those of another function."""
    model = copy_model(paths("ct FP8", output), tmp_path / "model")
    stored.configure(model, quantization_config={**published.CT_FP8, "rotation": "hadamard"})
    with pytest.raises(UnsupportedError, match=r"config\.json: by its rotation, inputs or outputs of linears are"):
        load(model, cpu_weights=paths("ct FP8", INT8))


def test_decoding_needs_memory_for_one_tensor(tmp_path: Path) -> None:
    """A thread holds two more pieces of 4 MiB."""
    rows, columns, tensors = 4096, 2048, dict[str, Any]()
    for number in range(3):
        name = f"model.layers.{number}.self_attn.q_proj.weight"
        tensors[name] = ("F8_E4M3", np.full((rows, columns), 0x38 + number, np.uint8))
        tensors[f"{name}_scale_inv"] = ("F32", np.ones((rows // 128, columns // 128), np.float32))
    model = encodings.checkpoint(tmp_path / "model", tensors, published.FP8_BLOCKS)
    weights = find_stored_tensors(open_checkpoint(model), whole=True)
    assert weights is not None and len(weights) == 3
    tracemalloc.start()
    for number, weight in enumerate(weights.values()):
        assert float(weight[...][0, 0]) == 1 + number / 8
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2 * rows * columns < peak < 1.6 * 2 * rows * columns
