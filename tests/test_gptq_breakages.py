"""What llmcompressor 0.14.0.1 gets wrong where one calls it as kt-kernel's script does, and proof that our output is
right.

One test for each; the library's side is its own oneshot, run on the same model and the same samples (rig/oneshot.py).
"""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.outputs.ignore import is_match
from ktconvert.quantizers import groups, reference
from rig import calibrated, families
from rig.safetensors import differing, read_folder

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)


def config_of(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())


def weights_of(path: Path) -> Any:
    """What quantization_config says of the weights."""
    return config_of(path)["quantization_config"]["config_groups"]["group_0"]["weights"]


def codes(bits: int, tensor: Any) -> Any:
    return groups.unpack_words(bits, tensor.bits).astype(np.int64)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="with torchvision the library does not fail")
def test_no_torchvision_is_needed(converted: Any) -> None:
    """The library's way to load a mixture of experts linearized lists every module of transformers,
    image processors too."""
    assert "orchvision" in converted.report("qwen3_moe decoded")["error"]
    assert converted.ours("qwen3_moe decoded").joinpath("manifest.json").exists()


def test_mixtral_has_the_names_that_loaders_look_for(converted: Any) -> None:
    """The library writes gate_proj, up_proj and down_proj, so that the experts of what is loaded are random."""
    original, _ = calibrated.reloaded(converted.model("mixtral"))
    text = calibrated.HELDOUT.read_text()[2000:2300]
    far, loading = {}, {}
    for which, path in (("ours", converted.ours("mixtral")), ("theirs", converted.theirs("mixtral"))):
        model, loading[which] = calibrated.reloaded(path)
        far[which] = calibrated.divergence(original, model, text)
    print(far)
    assert loading["theirs"]["missing_keys"] and not any(loading["ours"].values())
    assert far["theirs"] > 5 * far["ours"]
    names = {name.rsplit(".", 2)[1] for name in read_folder(converted.ours("mixtral")) if name.endswith("_packed")}
    assert names == {"w1", "w2", "w3"}


def test_calibration_is_causal(converted: Any) -> None:
    """Decoder layers of Qwen3-MoE and Mixtral get no mask in the library, and eager attention then sees all tokens."""
    masks = converted.report("qwen3_moe unrepaired")["masks"]
    assert len(masks) == 3 and all(kinds == ["none"] for kinds in masks.values())
    ours, theirs = read_folder(converted.ours("qwen3_moe")), converted.oracle("qwen3_moe unrepaired")
    wrong = differing(ours, theirs)
    assert len(wrong) == 72 and all(name.endswith(".weight_packed") for name in wrong)
    different = [float((codes(4, ours[name]) != codes(4, theirs[name])).mean()) for name in wrong]
    print(f"{np.mean(different):.1%} of the codes")
    assert np.mean(different) > 0.01
    assert differing(ours, converted.oracle("qwen3_moe")) == []  # which has its masks repaired


def test_experts_that_no_token_reached_are_not_zero(converted: Any) -> None:
    """The library takes every column of a Hessian that saw nothing for dead and sets its weights to
    zero, without a warning."""
    ours, theirs = read_folder(converted.ours("qwen3_moe routed")), converted.oracle("qwen3_moe routed")
    rounded = read_folder(converted.rounded("qwen3_moe"))
    unseen = [
        (experts, expert)
        for experts, tokens in converted.report("qwen3_moe routed")["routed"].items()
        for expert, count in enumerate(tokens)
        if not count
    ]
    assert unseen
    for experts, expert in unseen:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"{experts}.{expert}.{projection}.weight_packed"
            assert not codes(4, theirs[name]).any()
            assert codes(4, ours[name]).any()
            assert ours[name] == rounded[name]
        layer = experts.split(".")[2]
        assert re.search(
            rf"layer {layer}: .* rounded to nearest.*: .*\b{expert}\b", converted.output_of("qwen3_moe routed")
        )


def test_fp8_is_read(converted: Any) -> None:
    assert "fp8" in converted.report("qwen3_moe FP8")["error"]
    ours = read_folder(converted.ours("qwen3_moe FP8"))
    assert sum(name.endswith("weight_packed") for name in ours) == 72
    assert {tensor.dtype for tensor in ours.values()} == {"BF16", "I32", "I64"}
    assert "fp8" not in (converted.ours("qwen3_moe FP8") / "config.json").read_text()


def test_actorder_is_null(converted: Any) -> None:
    """Codes are chosen in activation order, which leaves no trace in the format; "static" makes SGLang and vLLM load
    other scales."""
    assert weights_of(converted.theirs("qwen3_moe"))["actorder"] == "static"
    assert weights_of(converted.ours("qwen3_moe"))["actorder"] is None


def test_w8a16_is_in_groups_too(converted: Any) -> None:
    for out in (converted.ours("qwen3_moe W8A16"), converted.theirs("qwen3_moe W8A16")):
        weights = weights_of(out)
        assert (weights["num_bits"], weights["strategy"], weights["group_size"]) == (8, "group", 128)
    (scale,) = {t.shape for n, t in read_folder(converted.ours("qwen3_moe W8A16")).items() if n.endswith("_scale")}
    assert scale == (128, 1)


def test_float32_keeps_the_codes_that_were_chosen(converted: Any) -> None:
    """The library stores what a division in BF16 makes of the weight that GPTQ chose: by ties, some 8-bit codes become
    their neighbours."""
    ours, theirs = read_folder(converted.ours("qwen3_moe float32")), converted.oracle("qwen3_moe W8A16")
    moved = 0
    for name in ours:
        if ".layers.0." not in name or not name.endswith("weight_packed"):
            continue  # other layers have seen other activations
        scale = ours[name.replace("_packed", "_scale")]
        values = reference.bf16_to_f32(scale.bits)
        chosen = codes(8, ours[name])
        weight = reference.bf16_to_f32(reference.f32_to_bf16(chosen.astype(np.float32) * values))
        again = reference.bf16_to_f32(reference.f32_to_bf16(weight / values))
        stored = codes(8, theirs[name])
        np.testing.assert_array_equal(stored, np.rint(np.clip(again, -128, 127)))
        np.testing.assert_array_equal(chosen, np.rint(weight / values))
        moved += int((stored != chosen).sum())
    assert moved


def test_both_names_of_the_number_of_experts_are_known(converted: Any, tmp_path: Path, cli: Any) -> None:
    """transformers 5 saves Qwen3-MoE with num_local_experts; checkpoints of others say num_experts."""
    model = tmp_path / "model"
    shutil.copytree(converted.model("qwen3_moe"), model)
    config = config_of(model)
    assert "num_experts" not in config
    config["num_experts"] = config.pop("num_local_experts")
    (model / "config.json").write_text(json.dumps(config))
    words = calibrated.arguments(model, tmp_path / "out", "W4A16", converted.dataset())
    plan = json.loads(cli(*words, "--dry-run", "--json").stdout.splitlines()[-1])
    assert plan["model"]["packed_linears"] == 72


def test_groups_that_do_not_fit_are_refused_at_once(converted: Any, tmp_path: Path, cli: Any) -> None:
    model = families.make("qwen3_moe", False, tmp_path / "model", moe_intermediate_size=192)
    done = cli(*calibrated.arguments(model, tmp_path / "out", "W4A16", converted.dataset()), code=3)
    assert "expert width 192" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("ktconvert: ")]) == 1


def test_dense_layers_beyond_the_ninth_are_left_alone(converted: Any) -> None:
    """kt-kernel's script names the first k layers with a class of characters: [0-10] is 0 and 1."""
    script = r"re:model\.layers\.[0-10]\.mlp\..*$"
    assert is_match("model.layers.1.mlp.up_proj", script) and not is_match("model.layers.5.mlp.up_proj", script)
    source, ours = read_folder(converted.model("deepseek_v3 deep")), read_folder(converted.ours("deepseek_v3 deep"))
    for layer in range(11):
        dense = {name: tensor for name, tensor in source.items() if name.startswith(f"model.layers.{layer}.mlp.")}
        assert len(dense) == 3 and dense.items() <= ours.items()
    packed = {name.split(".")[2] for name in ours if name.endswith("_packed")}
    assert packed == {"11"}


def test_norms_are_the_sources(converted: Any) -> None:
    """Qwen3-Next multiplies by 1 + weight. The library calibrates with that sum rounded to BF16,
    and subtracts 1 again when it saves."""
    name = "qwen3_next trained"
    source, ours, theirs = read_folder(converted.model(name)), read_folder(converted.ours(name)), converted.oracle(name)
    norms = [n for n in source if n.endswith("layernorm.weight") or n == "model.norm.weight"]
    assert len(norms) == 5
    assert all(source[n] != theirs[n] for n in norms)
    assert all(source[n] == ours[n] for n in source if n in ours)


OWN_TOKENIZER = """\
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 256

    def get_vocab(self):
        return {chr(byte): byte for byte in range(256)}

    def _tokenize(self, text):
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)
"""


@pytest.mark.slow
def test_a_tokenizer_with_code_of_its_own(converted: Any, tmp_path: Path, cli: Any) -> None:
    """kt-kernel's script hands --trust_remote_code to the model only."""
    model = tmp_path / "model"
    shutil.copytree(converted.model("qwen3_moe"), model)
    (model / "tokenizer.json").unlink()
    (model / "tokenization_own.py").write_text(OWN_TOKENIZER)
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    env = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    for name, code, trust in (("refused", 5, ()), ("out", 0, ("--trust-remote-code",))):
        words = calibrated.arguments(model, tmp_path / name, "W4A16", converted.dataset(), *trust)
        done = cli(*words, code=code, env=env)
        assert (code == 0) or "tokenizer" in done.stderr
    assert len(read_folder(tmp_path / "out")) == len(read_folder(converted.ours("qwen3_moe")))
