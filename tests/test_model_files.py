"""Tests of config.json, generation_config.json and tokenizer files, in every command that builds a model.

Training settings change nothing, and a wrong value is reported in one sentence that names the file.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.pipeline.models import loading, pretrained
from rig import calibrated, conversion, encodings, family_rows, hf, stored
from rig.calibrated import HELDOUT
from rig.safetensors import Tensor, edit_file, read_file, write_file

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states"), True)
SETTINGS |= {"use_cache": False, "return_dict": False}
FEW = ("--num-calibration-samples", 2, "--sequence-length", 32, "--cpuinfer-threads", 1, "--force-cpu", "-q")
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
# Replacements of a value; DELETED removes it.
DELETED = "DELETED"
VALUES = (None, True, 0, 1, -1, 1.5, 1e9, 10**9, 1 << 63, float("nan"), "", "x", [], [1], {}, {"a": 1}, DELETED)
MAX_CHANGED = 40  # members of an object; of larger objects, such as vocabularies, only the first member is changed


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text."""
    path: Path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(HELDOUT.read_text()[:3000])
    return path


@pytest.fixture
def model(example: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundled model that a test may change."""
    return stored.model(example, tmp_path / "model", "BF16")


def commands(model: Path, int8: Path, text: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """Return the shortest call of each command that builds a model."""
    weights, data = ("--cpu-weights", int8, "--threads", 1), ("--dataset", text, *FEW)
    small = ("--sequence-length", 32, "--batch-size", 1, "--rank", 2, "--max-steps", 1, "--target-modules", "q_proj")
    return {
        "cpu": ("cpu", "-i", model, "-o", out / "gptq", "--scale", "gptq", "--threadpool-count", 1, *data),
        "gpu": ("gpu", "-i", model, "-o", out / "gpu", "--quant-type", "W8A16", *data),
        "verify": ("verify", out / "gpu", "--against", model, "--json"),
        "calibrate": ("calibrate", model, "--output", out / "statistics", *data),
        "run": ("run", model, *weights, "--prompt", "import os", "--max-new-tokens", 3),
        "eval": ("eval", model, *weights, "--text", text, "--sequence-length", 64, "--max-sequences", 1),
        "train": ("train", model, *weights, "--dataset", text, "-o", out / "adapter", *small, "-q"),
    }


def serve(model: Path, int8: Path) -> None:
    """Load a model as `serve` does."""
    from ktconvert.pipeline.models.serving.server import load_application

    _, scheduler = load_application(loading.ModelChoice(str(model), cpu_weights=int8, threads=1))
    scheduler.stop()


def test_training_settings_do_not_break_any_command(model, example, packed_example, text, tmp_path):
    pytest.importorskip("llmcompressor")
    stored.configure(model, **SETTINGS)
    int8 = packed_example("int8")
    for name, arguments in commands(model, int8, text, tmp_path).items():
        result = conversion.run_in_process(*arguments)
        assert result.exit_code == 0, (name, result.exception)
        assert name != "verify" or "KL divergence" in result.stdout
        if name == "run":
            assert result.stdout == conversion.run_in_process(arguments[0], example, *arguments[2:]).stdout
    serve(model, int8)


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_settings_do_not_change_gradients(setting, model, example):
    """`--scale gptq` computes gradients of the predictions by the output of each layer."""
    stored.configure(model, **{setting: SETTINGS[setting]})
    hidden = torch.randn((5, 256), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    actual, expected = (load_layered(root).prediction_gradients(hidden, 0) for root in (model, example))
    assert torch.equal(actual, expected) and bool(expected.any())


def load_layered(root: Path) -> Any:
    """Load a model as the calibration run does."""
    from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
    from ktconvert.layouts.checkpoints.recognition import recognize
    from ktconvert.layouts.sources.source import open_checkpoint
    from ktconvert.pipeline.calibration.layered_model import LayeredModel

    source = open_checkpoint(root)
    names = recognize(source).expert_tensor_names()
    rest = find_non_expert_tensors(source, names, source.quantization).output_tensors()
    return LayeredModel(source, {tensor.key: tensor for tensor in rest})


# --- routers --------------------------------------------------------------------------------------


def test_float32_correction_bias_selects_the_same_experts_everywhere(text, tmp_path):
    """In calibration, in `run`, and in transformers with our experts. BF16 has 9 numbers between 6.8 and 7.1."""
    model = calibrated.write_model("minimax_m2", False, tmp_path / "model", num_local_experts=32, num_experts_per_tok=4)
    biases = 6.817 + 0.246 * torch.rand((2, 32), generator=torch.Generator().manual_seed(0))

    def publish(tensors: Any) -> None:
        for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
            layer = int(name.split("layers.")[1].split(".")[0])
            tensors[name] = Tensor("F32", (32,), biases[layer].numpy().tobytes())
        for name in [name for name in tensors if name.endswith("block_sparse_moe.gate.weight")]:
            bits = tensors[name].bits.astype(np.uint32) << 16  # also stored in float32
            tensors[name] = Tensor("F32", tensors[name].shape, (bits.view(np.float32) * 1.001).tobytes())

    edit_file(model / "model.safetensors", publish)
    result = conversion.run_in_process("calibrate", model, "--output", tmp_path / "out", "--dataset", text, *FEW)
    assert result.exit_code == 0, result.exception
    loaded, tokenizer = loading.load_model_and_tokenizer(loading.ModelChoice(str(model), cpu_weights=model, threads=1))
    ours = hf.load(model, cpu_weights=model, threads=1)
    for model_with_experts in (loaded, ours):
        for layer, module in enumerate(model_with_experts.model.layers):
            assert torch.equal(module.mlp.e_score_correction_bias, biases[layer])
            assert module.mlp.gate.weight.dtype == torch.float32
    ids = tokenizer(text.read_text(), add_special_tokens=False, return_tensors="pt")["input_ids"][:, :64]
    original = hf.load_complete(model, dtype=torch.bfloat16, attn_implementation="eager")
    counts = read_file(tmp_path / "out" / "counts.safetensors")["counts"]
    counted = np.frombuffer(counts.data, np.int64).reshape(counts.shape)
    expected = np.zeros_like(counted)
    for sample in ids.split(32, dim=1):
        for layer, (_, chosen, *_) in hf.record_experts(original, sample).items():
            expected[layer] += np.bincount(chosen.flatten(), minlength=32)
    assert counted.sum() == 2 * 4 * 64 and np.abs(counted - expected).sum() <= 0.02 * counted.sum()


@pytest.mark.parametrize(
    "family", ["kimi_linear", "laguna", "minimax_m3_vl_text", "step3p7", "lfm2_moe", "deepseek_v3"]
)
def test_router_biases_keep_their_stored_dtype(family):
    """transformers rounds the biases of most of these families, and keeps those of some in float32."""
    import transformers
    from test_families import config_of

    from ktconvert.native_quant.runtime import hf_non_experts

    hf_non_experts.keep_router_dtypes()
    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {family}")
    config = config_of(family, family_rows.ROWS[family])
    with torch.device("meta"):
        model = (
            transformers.AutoModelForCausalLM
            if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            else transformers.AutoModelForImageTextToText
        ).from_config(config)
    plan = model._get_dtype_plan(torch.bfloat16)
    names = [name for name in model.state_dict() if name.endswith(hf_non_experts.BIASES)]
    assert names and all(name.split(".")[-1] in plan for name in names)
    in_float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    biases = {name.split(".")[-1] for name in names}
    assert {name: plan[name] for name in biases} == {
        name: torch.float32 if name in in_float32 else None for name in biases
    }


# --- wrong values ---------------------------------------------------------------------------------


def find_keys(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value; only the first value of a list or a large object."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    for key, value in items[:1] if isinstance(node, list) or len(items) > MAX_CHANGED else items:
        yield (*at, key)
        yield from find_keys(value, (*at, key))


def list_changes(example: Path) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Return all changes: (file, keys of the value, replacement)."""
    documents = {name: json.loads((example / name).read_text()) for name in FILES}
    return [(name, keys, value) for name in FILES for keys in find_keys(documents[name]) for value in VALUES]


def apply_change(model: Path, example: Path, name: str, keys: tuple[Any, ...], value: Any) -> None:
    """Change one value of a file; all other files are those of the example."""
    for file in FILES:
        shutil.copyfile(example / file, model / file)
    document = node = copy.deepcopy(json.loads((example / name).read_text()))
    for key in keys[:-1]:
        node = node[key]
    if value is DELETED:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    (model / name).write_text(json.dumps(document))


def is_refused(arguments: tuple[object, ...], model: Path) -> bool:
    """Return whether a command rejects the model; a rejection needs a message and an exit code for wrong input."""
    result = conversion.run_in_process(*arguments)
    if result.exit_code == 0:
        return False
    assert isinstance(result.exception, KTConvertError), (arguments[0], result.exception)
    assert result.exception.exit_code in (2, 3, 5, 6) and str(result.exception)
    return True


WRONG_VALUES: list[tuple[str, str, Any, str]] = [
    # file, key, value, the message
    ("config.json", "hidden_size", "x", "transformers cannot load it: Validation error for field 'hidden_size': "),
    ("config.json", "num_experts_per_tok", 0, "num_experts_per_tok is 0, but a layer has 8 experts; "),
    ("config.json", "num_experts_per_tok", 99, "num_experts_per_tok is 99, but a layer has 8 experts; "),
    ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, which is more than"),
    ("config.json", "head_dim", 10**9, "head_dim is 1000000000, which is more than the stored tensors have; "),
    ("config.json", "head_dim", 0, "transformers cannot build the model that it describes: "),
    ("config.json", "head_dim", 32, ""),  # found when the model is loaded, or with older transformers when it computes
    ("config.json", "num_key_value_heads", 0, "transformers cannot build the model that it describes: "),
    ("config.json", "attention_dropout", 1.5, "attention_dropout must be at least 0 and below 1, not 1.5; "),
    ("config.json", "max_position_embeddings", 0, "max_position_embeddings must be at least 1, not 0; "),
    ("config.json", "rms_norm_eps", float("nan"), "with its settings, or with damaged weights, the model computes"),
    ("generation_config.json", "eos_token_id", "x", "eos_token_id is 'x', not the id of a token; compare it"),
    ("generation_config.json", "temperature", "hot", "temperature is 'hot', not a number from 0 to 1e+06; compare it"),
    ("generation_config.json", "top_p", 1.5, "top_p is 1.5, not a number from 0 to 1; compare it"),
    ("tokenizer.json", "model", 5, "transformers cannot load it: "),
    ("tokenizer_config.json", "added_tokens_decoder", 5, "transformers cannot load it: "),
]


@pytest.mark.parametrize(
    ("file", "key", "value", "message"), WRONG_VALUES, ids=[f"{row[1]} {row[2]}" for row in WRONG_VALUES]
)
def test_a_wrong_value_is_reported_with_its_file(file, key, value, message, model, example, packed_example, text):
    apply_change(model, example, file, (key,), value)
    arguments = commands(model, packed_example("int8"), text, model.parent)
    error = conversion.run_in_process(*arguments["run"]).exception
    assert isinstance(error, InputError) and str(error).startswith(f"{model / file}: {message}"), error
    assert "\n" not in str(error)
    if file != "generation_config.json":
        error = conversion.run_in_process(*arguments["calibrate"]).exception
        assert isinstance(error, InputError) and str(error).startswith(f"{model}"), error


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (("vocab", "a"), 1 << 31, "token 'a' has the id 2147483648, and no model has so many;"),
        (("continuing_subword_prefix",), "x", r"merge .* gives no token with the continuing_subword_prefix 'x';"),
    ],
)
def test_values_with_which_a_tokenizer_would_abort_are_reported(
    key, value, message, model, example, packed_example, text
):
    """For the id 2^31, the library allocates 4 GiB; with a wrong prefix, it ends the process."""
    apply_change(model, example, "tokenizer.json", ("model", *key), value)
    error = conversion.run_in_process(*commands(model, packed_example("int8"), text, model.parent)["run"]).exception
    with pytest.raises(InputError, match=rf"tokenizer\.json: {message}"):
        raise error


CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize(
    ("name", "contents", "problem"),
    [
        *((name, "[]", "must hold a JSON object") for name in CONFIGS),
        *((name, "", "is empty") for name in (*CONFIGS, "tokenizer.json")),
        *((name, "\n<!DOCTYPE html><html>", "a web page, not JSON") for name in (*CONFIGS, "tokenizer.json")),
    ],
)
def test_a_file_without_an_object_is_named(name, contents, problem, model, packed_example, text):
    (model / name).write_text(contents)
    error = conversion.run_in_process(*commands(model, packed_example("int8"), text, model.parent)["run"]).exception
    assert str(error) == f"{model / name}: {problem}; download that file again."


def test_layers_that_are_not_computed_are_reported(model, example, recwarn):
    apply_change(model, example, "config.json", ("num_hidden_layers",), 1)
    loading.load_model_and_tokenizer(loading.ModelChoice(str(model)))
    ignored = "num_hidden_layers is 1, so that layer 1 of the checkpoint is not computed; unless it is an MTP layer,"
    assert [str(each.message) for each in recwarn if ignored in str(each.message)]


def test_load_names_tensors_with_wrong_shapes(model, example):
    apply_change(model, example, "config.json", ("head_dim",), 32)
    message = r"config.json: makes model.layers.0.self_attn.k_norm.weight \[32\], and the stored tensor is \[64\] \(and 11 more"
    with pytest.raises(InputError, match=message):
        loading.load_model_and_tokenizer(loading.ModelChoice(str(model)))


@pytest.mark.parametrize("name", ["mlp.gate.weight", "lm_head.weight"])
def test_run_and_serve_name_tensors_with_wrong_shapes(name, model, packed_example, text):
    """transformers does not check the shapes of tensors that it loads beside experts of another class."""

    def shorten(tensors: Any) -> None:
        for key in [key for key in tensors if key.endswith(name)]:
            tensor = tensors[key]
            rows, columns = tensor.shape
            data = tensor.data[: (rows - 1) * columns * 2]
            tensors[key] = Tensor(tensor.dtype, (rows - 1, columns), data)

    edit_file(model / "model.safetensors", shorten)
    int8 = packed_example("int8")
    error = conversion.run_in_process(*commands(model, int8, text, model.parent)["run"]).exception
    message = rf"config.json: makes .*{name} \[\d+, 256\], and the stored tensor is "
    with pytest.raises(InputError, match=message):
        raise error
    with pytest.raises(InputError, match=message):
        serve(model, int8)


def test_calibration_names_tensors_with_wrong_shapes(model, example, packed_example, text):
    apply_change(model, example, "config.json", ("head_dim",), 32)
    error = conversion.run_in_process(
        *commands(model, packed_example("int8"), text, model.parent)["calibrate"]
    ).exception
    with pytest.raises(InputError, match=r"config.json: makes model.layers.0.self_attn.k_norm.weight \[32\], and the"):
        raise error


def set_nan(model: Path, name: str) -> None:
    """Make the first number of each weight with this name NaN."""
    tensors = {
        key: (tensor.dtype, tensor.bits.copy()) for key, tensor in read_file(model / "model.safetensors").items()
    }
    for key, (_, bits) in tensors.items():
        if key.endswith(name):
            bits.flat[0] = 0x7FC0
    (model / "model.safetensors").unlink()  # of the bundled model
    write_file(model / "model.safetensors", tensors, {"format": "pt"})


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "lm_head.weight"])
def test_a_model_that_computes_nan_is_compared_with_its_release(name, model, packed_example, text):
    """Also if few of its logits are NaN, or torch's attention for few tokens ignores them."""
    set_nan(model, name)
    arguments = commands(model, packed_example("int8"), text, model.parent)
    for command in ("run", "eval", "train"):
        error = conversion.run_in_process(*arguments[command]).exception
        assert isinstance(error, InputError) and f"NaN or infinity; {pretrained.COMPARE_FILES}" in str(error), error


def test_nan_is_reported_if_it_appears_after_loading(model, packed_example, text, monkeypatch):
    set_nan(model, "lm_head.weight")
    monkeypatch.setattr(pretrained, "require_finite_logits", lambda *_: None)
    arguments = commands(model, packed_example("int8"), text, model.parent)
    for command, message in {
        "run": "the model computes NaN or infinity",
        "eval": "the original model's predictions are not finite at 63 of 63 tokens",
        "train": "the loss is not finite at step 1",
    }.items():
        error = conversion.run_in_process(*arguments[command]).exception
        assert isinstance(error, KTConvertError) and f"{message}; {pretrained.COMPARE_FILES}" in str(error), error


def test_train_applies_dropout_of_attention(model, example, packed_example, text, tmp_path):
    apply_change(model, example, "config.json", ("attention_dropout",), 0.1)
    assert conversion.run_in_process(*commands(model, packed_example("int8"), text, tmp_path)["train"]).exit_code == 0


def test_an_unknown_model_type_is_unsupported(model, example, packed_example, text):
    apply_change(model, example, "config.json", ("model_type",), "x")
    for name, arguments in commands(model, packed_example("int8"), text, model.parent).items():
        if name in ("run", "eval", "train", "calibrate"):
            error = conversion.run_in_process(*arguments).exception
            assert isinstance(error, UnsupportedError) and "does not recognize this architecture" in str(error), error


def test_sampled_wrong_values_are_reported(model, example, packed_example, text):
    arguments, draw = commands(model, packed_example("int8"), text, model.parent)["run"], conversion.seeded_random()
    for change in draw.sample(list_changes(example), 8):
        apply_change(model, example, *change)
        is_refused(arguments, model)


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "eval", "train", "calibrate", "serve"])
def test_all_wrong_values_are_reported(command, model, example, packed_example, text, tmp_path):
    """All of them for `run`, and every fifth for the other commands."""
    int8, refusals = packed_example("int8"), 0
    changes = list_changes(example)[:: 1 if command == "run" else 5]
    for number, change in enumerate(changes):
        apply_change(model, example, *change)
        if command == "serve":
            try:
                serve(model, int8)
            except KTConvertError:
                refusals += 1
        else:
            refusals += is_refused(commands(model, int8, text, tmp_path / f"{number}")[command], model)
        shutil.rmtree(tmp_path / f"{number}", ignore_errors=True)
    print(f"{command}: {len(changes)} values, {refusals} refused")
    assert len(changes) > 200 and refusals > len(changes) / 4


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["modelopt NVFP4", "FP8 in rows"])
def test_load_decodes_quantized_non_expert_tensors(name, model, example, tmp_path):
    """The predictions equal those of the decoded checkpoint."""
    rng = np.random.default_rng(0)
    plain, quantized = {}, {}
    for key, tensor in read_file(example / "model.safetensors").items():
        plain[key] = quantized[key] = ("BF16", tensor.bits)
        if key.endswith("_proj.weight"):
            stored_tensors, bits = encodings.ENCODINGS[name].make(rng, *tensor.shape)
            plain[key] = ("BF16", bits)
            del quantized[key]
            quantized |= {
                key.removesuffix(".weight") + suffix: tensor_part for suffix, tensor_part in stored_tensors.items()
            }
    decoded = Path(shutil.copytree(model, tmp_path / "decoded"))
    write_file(decoded / "model.safetensors", plain, {"format": "pt"})
    write_file(model / "model.safetensors", quantized, {"format": "pt"})
    methods = {"modelopt NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    stored.configure(model, quantization_config=methods.get(name, {"quant_method": "other"}))

    def logits(root: Path, with_own_experts: bool) -> Any:
        choice = loading.ModelChoice(str(root), cpu_weights=root if with_own_experts else None, threads=1)
        return hf.logits(loading.load_model_and_tokenizer(choice)[0], torch.arange(3, 20)[None])

    assert torch.equal(logits(model, False), logits(decoded, False))
    distances = hf.row_distances(logits(model, True), logits(decoded, True))
    assert float(distances.max()) < 0.05
    result = conversion.run_in_process("run", model, "--prompt", "import os", "--max-new-tokens", 2, "--threads", 1)
    assert result.exit_code == 0 and "transformers computes" not in result.stderr, result.exception


def test_load_rejects_a_model_that_transformers_would_read_from_other_files(model, packed_example):
    (model / "model.safetensors").rename(model / "weights.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"")
    choice = loading.ModelChoice(str(model), cpu_weights=packed_example("int8"), threads=1)
    with pytest.raises(
        InputError, match=r"weights\.safetensors is read here, and transformers would read pytorch_model"
    ):
        loading.load_model_and_tokenizer(choice)


def test_load_rejects_experts_of_a_different_model(model, packed_example):
    """The experts have equal shapes, or are the same experts in a different order."""

    def choice() -> loading.ModelChoice:
        return loading.ModelChoice(str(model), cpu_weights=packed_example("int8"), threads=1)

    loading.load_model_and_tokenizer(choice())

    def rotate(tensors: Any) -> None:
        names = [name for name in tensors if ".experts." in name and "layers.1." in name]
        moved = {name: tensors[name] for name in names}
        for name in names:
            before, _, after = name.partition(".experts.")
            expert, _, part = after.partition(".")
            tensors[f"{before}.experts.{(int(expert) + 1) % 8}.{part}"] = moved[name]

    edit_file(model / "model.safetensors", rotate)
    with pytest.raises(
        InputError, match=f"int8-T1: expert 0 of layer 1 differs from that of {model}; give experts that were converted"
    ):
        loading.load_model_and_tokenizer(choice())
