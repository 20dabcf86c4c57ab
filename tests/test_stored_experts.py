"""Commands and transformers with the experts of a checkpoint as they are stored.

They compute the same model as the decoded values, or fail with a message before they compute anything.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from click.testing import CliRunner, Result

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError, UsageError
from ktconvert.native_quant.runtime import smoke
from ktconvert.native_quant.runtime.experts import KTExperts, open_experts
from ktconvert.native_quant.runtime.pool import get_shared_pool
from ktconvert.pipeline.cli.bench import bench
from ktconvert.pipeline.cli.eval import eval as evaluate
from ktconvert.pipeline.cli.run import run
from ktconvert.pipeline.cli.verify import verify
from rig import families, hf, native, stored
from rig.safetensors import Tensors, edit_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import KTConvertConfig  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts, find_experts  # noqa: E402

METHODS = ("BF16", "FP8", "MXFP4", "RAWINT4", "GPTQ_INT4")
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Path]:
    """Store the bundled model in each encoding."""
    root = tmp_path_factory.mktemp("models")
    return {method: stored.model(example, root / method, method) for method in METHODS}


def call(command: Any, *arguments: object) -> Result:
    """Run the command in this process, which has already imported transformers."""
    return CliRunner().invoke(command, list(map(str, arguments)))


def loaded(model: Path, **settings: Any) -> Any:
    return hf.load(model, own_quantization=False, **settings)


def logits(model: Any) -> Any:
    return hf.logits(model, torch.arange(3, 40)[None])


@pytest.mark.parametrize("method", METHODS)
def test_a_model_computes_with_its_stored_experts(method, models, example):
    """Near what transformers computes with the same numbers: in FP8 it dequantizes them, of others it has BF16 only."""
    own = loaded(models[method], threads=2)
    modules = [module for module in own.modules() if isinstance(module, RoutedExperts)]
    assert [module.experts.method for module in modules] == [method] * 2
    named = loaded(models["BF16"], cpu_weights=models[method])
    if method != "FP8":  # whose other weights are in FP8, too
        assert torch.equal(logits(own), logits(named))
    theirs = logits(hf.load_complete(models["FP8" if method == "FP8" else "BF16"]))
    assert float((logits(own) - theirs).norm() / theirs.norm()) < (0.02 if method in ("BF16", "FP8") else 0.15)


def test_the_quantization_setting_of_a_model_is_overridden(models):
    """It can stay in the model's config, wherever it is there."""
    for options in ({}, {"cpu_weights": models["BF16"]}):
        want = logits(loaded(models["FP8"], **options))
        ours = hf.load_complete(models["FP8"], quantization_config=KTConvertConfig(**options))
        assert torch.equal(logits(ours), want)
        as_json = {"quant_method": "ktconvert"} | {name: str(path) for name, path in options.items()}
        ours = transformers.AutoModelForCausalLM.from_pretrained(models["FP8"], quantization_config=as_json)
        assert torch.equal(logits(ours), want)
        assert ours.config.quantization_config.quant_method == "ktconvert"


some = pytest.mark.parametrize("method", ["FP8", *(pytest.param(m, marks=pytest.mark.long) for m in ("BF16", "MXFP4"))])


@some
def test_run_needs_only_the_model(method, models):
    options = ("--prompt", "def add(", "--max-new-tokens", 6, "--threads", 1)
    done = call(run, models[method], *options)
    assert done.exit_code == 0 and "transformers computes" not in done.stderr, done.exception
    named = call(run, models["BF16"], "--cpu-weights", models[method], *options)
    by_torch = call(run, models["BF16"], "--torch-experts", *options)
    assert done.stdout == named.stdout == by_torch.stdout


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu", "relu"])
def test_experts_with_other_activations_are_computed(activation, example, tmp_path):
    """From the checkpoint and from what it is converted into: the text is that of transformers."""
    model = stored.model(example, tmp_path / "model", "BF16")
    stored.configure(model, hidden_act=activation)
    options = ("--prompt", "def add(", "--max-new-tokens", 8)
    by_torch = call(run, model, *options, "--torch-experts")
    result = call(run, model, *options)
    assert (result.exit_code, result.stdout) == (0, by_torch.stdout), result.exception
    assert "transformers computes the whole model" not in result.stderr


def test_unsupported_experts_are_left_to_transformers(example, tmp_path):
    """run says so; --cpu-weights refuses it. No method computes F32."""
    model = stored.model(example, tmp_path / "f32", "BF16")
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    safetensors.torch.save_file({name: tensor.float() for name, tensor in tensors.items()}, model / "model.safetensors")
    options = ("--prompt", "def add(", "--max-new-tokens", 4)
    result, by_torch = call(run, model, *options), call(run, model, *options, "--torch-experts")
    assert (result.exit_code, result.stdout) == (0, by_torch.stdout), result.exception
    assert re.search(r"warning: transformers computes the whole model, since: .*layer 0 are F32", result.stderr)
    refused = call(run, model, *options, "--cpu-weights", model).exception
    assert isinstance(refused, UnsupportedError) and "layer 0 are F32" in str(refused)
    both = call(run, model, *options, "--cpu-weights", model, "--torch-experts").exception
    assert isinstance(both, UsageError) and "exclude each other; give one" in str(both)


def test_eval_gives_the_divergence_of_stored_experts(models, example):
    text = ("--text", example.parent / "heldout.txt", "--sequence-length", 64, "--max-sequences", 2, "--json")
    means = {}
    for method in METHODS:
        done = call(evaluate, models["BF16"], "--cpu-weights", models[method], *text)
        document = json.loads(done.stdout)
        assert document["method"] == method
        means[method] = document["kl"]["mean"]
    assert 0 < means["BF16"] < means["FP8"] < min(means[method] for method in METHODS[2:])
    assert max(means.values()) < 0.02
    done = call(evaluate, models["FP8"], "--cpu-weights", models["FP8"], *text)  # its other weights are dequantized
    assert json.loads(done.stdout)["kl"]["mean"] < 0.001


@pytest.mark.parametrize("method", METHODS)
def test_verify_computes_a_layer(method, models):
    done = call(verify, models[method], "--run", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"], report["arrangement"]) == (0, True, "checkpoint")
    assert (report["method"], report["layers"], report["experts"], report["hidden"]) == (method, [0, 1], 8, 256)
    check = next(check for check in report["checks"] if check["name"] == "run")
    assert "layer 0, 8 experts, 24 tokens: finite" in check["result"]
    lines = call(verify, models[method], "--run").stdout.splitlines()
    assert "arrangement   checkpoint, 1 safetensors shard" in lines and lines[-1] == "verified"
    refused = call(verify, models[method], "--run", "--numa", 2).exception
    assert isinstance(refused, UsageError) and "leave out --numa" in str(refused)


@pytest.mark.parametrize("method", ["fp8", "rawint4"])
def test_outputs_in_native_formats_count_as_checkpoints(method, models, tmp_path, cli):
    """`cpu --layout kt` writes only experts: they are used with a different model, in slices, and in verify."""
    out = tmp_path / "out"
    cli("cpu", "-i", models["BF16"], "-o", out, "--layout", "kt", "--quant-method", method)
    if method == "fp8":
        ours, same = (loaded(models["BF16"], cpu_weights=path) for path in (out, models["FP8"]))
        assert torch.equal(logits(ours), logits(same))
    experts = KTExperts.load(out, 0, parts=2, method=method.upper())
    assert (experts.method, experts.parts) == (method.upper(), 2)
    report = json.loads(call(verify, out, "--run", "--json").stdout)
    assert report["ok"] and {"hashes", "run"} <= {check["name"] for check in report["checks"]}


def cut_short(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def with_two_types(model: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATE] = tensors[GATE]._replace(dtype="F16")

    edit_file(model / "model.safetensors", change)


FAULTS: list[tuple[Callable[[Path], None], type[KTConvertError], str]] = [
    (cut_short, InputError, r"model\.safetensors: .*(truncated|shorter)"),
    (with_two_types, UnsupportedError, "layer 1 are BF16 and FP16, which no method of this runtime"),
]


@pytest.mark.parametrize(("break_", "kind", "why"), FAULTS, ids=["cut", "two"])
def test_damage_is_reported_with_a_message(break_, kind, why, models, example, tmp_path, monkeypatch):
    """Every command reports it, and nothing is computed."""
    model = stored.model(example, tmp_path / "model", "BF16")
    break_(model)
    monkeypatch.setattr(KTExperts, "forward", None)
    prompt, text = ("--prompt", "x"), ("--text", example.parent / "heldout.txt")
    commands: list[tuple[Any, ...]] = [
        *(
            (command, models["BF16"], "--cpu-weights", model, *more)
            for command, more in ((run, prompt), (evaluate, text))
        ),
        (bench, model, "--layer", 1),
        (verify, model, "--run"),
    ]
    if kind is InputError:  # else transformers is asked what it can do with it
        commands.append((run, model, *prompt))
    for command, *options in commands:
        error = call(command, *options).exception
        assert isinstance(error, kind), (command.name, error)
        assert re.search(why, str(error)) and "\n" not in str(error) and str(model) in str(error)


def test_weights_are_decoded_whatever_method_the_config_names(models, example, tmp_path):
    """Codes are never taken for numbers, and the tensors decide what they are."""
    model = stored.model(example, tmp_path / "model", "FP8")
    expected = logits(loaded(model))
    stored.configure(model, quantization_config={"quant_method": "other"})
    assert torch.equal(logits(hf.load_complete(model, quantization_config=KTConvertConfig())), expected)


V4 = {"model_type": "deepseek_v4", "n_routed_experts": 2, "hidden_size": 256, "moe_intermediate_size": 256}


def limited(folder: Path, layers: int = 1, **config: Any) -> Path:
    """Write DeepSeek-V4's experts in MXFP4, the same in each layer."""
    layer = native.read("MXFP4_v4")
    tensors = {
        name.replace("layers.0", f"layers.{number}"): tensor
        for number in range(layers)
        for name, tensor in layer.tensors.items()
    }
    return layer.write(folder, tensors, **V4, num_experts_per_tok=2, num_hidden_layers=layers, **config)


def test_layers_may_have_different_limits(tmp_path, cli):
    """From the checkpoint and its outputs; Step-3.5 lists limits per layer, 0 for none."""
    model, limits = limited(tmp_path / "in", layers=3, swiglu_limits=[0.25, 0, 0.5]), (0.25, 0.0, 0.5)
    cli("cpu", "-i", model, "-o", tmp_path / "numa", "--quant-method", "mxfp4", "--threadpool-count", 2)
    cli("cpu", "-i", model, "-o", tmp_path / "kt", "--quant-method", "mxfp4", "--layout", "kt")
    layer = native.read("MXFP4_v4")
    outs: list[list[Any]] = []
    for path in (model, tmp_path / "numa", tmp_path / "kt"):
        assert tuple(open_experts(path).function(n).limit for n in range(3)) == limits
        experts = [KTExperts.load(path, n, parts=2, swiglu_limit=limit) for n, limit in enumerate(limits)]
        outs.append([one.forward(layer.hidden, layer.ids, layer.weights) for one in experts])
        for n in range(3):
            assert not smoke.smoke(path, n, 2, get_shared_pool(2)).problems
            with pytest.raises(UnsupportedError, match="swiglu_limit"):
                KTExperts.load(path, n, parts=2, swiglu_limit=0.125)
        with pytest.raises(UnsupportedError, match="swiglu_limit"):
            KTExperts.load(path, 1, swiglu_limit=0.25)
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
    assert (outs[0][0] != outs[0][1]).any() and (outs[0][1] != outs[0][2]).any()


@pytest.mark.parametrize("limit", ["7", -1, [1, "x"], float("nan"), True, {"a": 1}])
def test_invalid_limits_are_rejected(limit, tmp_path):
    model = limited(tmp_path / "in", layers=2, swiglu_limit=limit)
    with pytest.raises(
        UnsupportedError, match=r"swiglu_limit must be a finite number of at least 0 for layer [01], not"
    ):
        open_experts(model).function(1)


def limited_experts(family: str, **config: Any) -> Any:
    """Return a tiny model of transformers whose experts have limits."""
    with torch.device("meta"):
        sizes = {**families.COMMON, **families.WIDTHS, "head_dim": 32, **config}
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes))


def test_only_modules_with_the_same_limit_are_replaced(tmp_path):
    model = limited_experts("deepseek_v4", swiglu_limit=7.0, num_local_experts=8)
    assert [place.layer for place in find_experts(model, lambda layer: ExpertFunction(limit=7.0))] == [0, 1]
    for other in (PLAIN, ExpertFunction(limit=6.5), ExpertFunction("swiglu_oai", 7.0, 1.702)):
        with pytest.raises(
            UnsupportedError, match=r"DeepseekV4Experts\) has a different activation, but these experts"
        ):
            find_experts(model, lambda layer, other=other: other)
    mixed = {0: ExpertFunction(limit=7.0), 1: ExpertFunction(limit=10.0)}
    with pytest.raises(UnsupportedError, match=r"layers\.1\..* silu\(gate\) \* up, gate and up limited to 10; load"):
        find_experts(model, mixed.__getitem__)
