"""`ktconvert gpu` with GPTQ writes the same tensors as llmcompressor's oneshot for equal samples and causal masks."""

import itertools
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.quantizers import packed, reference
from rig import calibrated, conversion
from rig.model_server import model_server
from rig.safetensors import find_differences, read_folder

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)


# Cases for which llmcompressor with repaired masks writes the same bytes. With routed calibration, this only holds for
# experts that have tokens.
EQUAL = [
    name
    for name, case in calibrated.CASES.items()
    if case.oracle is not None and case.oracle.keys() <= {"calibrate_all", "group"}
]
# Bounds of the KL divergence to the source, relative to that without experts; at most 0.125 and 0.0003 are measured.
NEAR = {"W4A16": 0.2, "W8A16": 0.001}


def parametrize_cases(names: list[str], long: list[str]) -> Any:
    """Return a mark for (fixture, name) of these cases. The long ones are more families, computed with two threads."""
    rows = [pytest.param("converted_long", name, marks=pytest.mark.long) for name in long]
    return pytest.mark.parametrize(("fixture", "name"), [*(("converted", name) for name in names), *rows])


@parametrize_cases(EQUAL, list(calibrated.LONG))
def test_tensors_equal_those_of_llmcompressor(fixture: str, name: str, request: pytest.FixtureRequest) -> None:
    """Tensors that are not quantized are equal, too. The masks of the library were causal in every layer."""
    actual = request.getfixturevalue(fixture)
    report = actual.report(name)
    assert report["masks"] and all(kinds == ["causal"] for kinds in report["masks"].values())
    source, ours, theirs = read_folder(actual.model(name)), read_folder(actual.ours(name)), actual.oracle(name)
    assert sum("weight_packed" in tensor for tensor in ours) >= 24
    allowed = {n for n in source if n.endswith("e_score_correction_bias")}  # llmcompressor stores float32
    assert all(ours[n] == source[n] for n in allowed)
    # With routed calibration, llmcompressor writes zeros for experts without tokens.
    if "--calibrate" in actual.cases[name].options:
        without_tokens = [
            (x, e) for x, tokens in report["routed"].items() for e, count in enumerate(tokens) if not count
        ]
        allowed |= {f"{x}.{e}.{p}_proj.weight_packed" for x, e in without_tokens for p in ("gate", "up", "down")}
    assert set(find_differences(ours, theirs)) <= allowed
    assert len(allowed) < len(ours) / 10


def test_number_of_experts_in_memory_does_not_change_bytes(converted: Any, tmp_path: Path) -> None:
    """A new process computes with one expert in memory at a time."""
    arguments = calibrated.gpu_arguments(converted.model("qwen3_moe"), tmp_path / "out", "W4A16", converted.dataset())
    program = (
        "import sys; from ktconvert.pipeline.cli import main; from ktconvert.pipeline.calibration import requirements; "
    )
    program += "requirements.GROUP_BYTES = 1; sys.argv[0] = 'ktconvert'; main()"
    result = calibrated.run_python(program, *arguments, "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]  # no library prints anything between the events
    assert events[-1]["event"] == "finished"
    assert find_differences(read_folder(tmp_path / "out"), read_folder(converted.ours("qwen3_moe"))) == []


def test_storage_of_experts_in_the_source_does_not_change_bytes(converted: Any) -> None:
    ours = {name: read_folder(converted.ours(name)) for name in calibrated.CASES if name.startswith("qwen3_moe")}
    assert find_differences(ours["qwen3_moe fused"], ours["qwen3_moe"]) == []
    assert find_differences(ours["qwen3_moe FP8"], ours["qwen3_moe decoded"]) == []
    assert find_differences(ours["qwen3_moe FP8"], ours["qwen3_moe"]) != []


def test_engine_oneshot_equals_llmcompressor(converted: Any) -> None:
    """The engine also prints the limitations of the library."""
    name = "qwen3_moe unrepaired"
    assert find_differences(read_folder(converted.ours(name)), converted.oracle(name)) == []
    assert "mask, which is not causal for some models" in converted.log_text(name)


@parametrize_cases(list(calibrated.VERIFIED), list(calibrated.VERIFIED_LONG))
def test_output_verifies_reloads_and_predicts_like_the_source(
    fixture: str, name: str, request: pytest.FixtureRequest
) -> None:
    converted = request.getfixturevalue(fixture)
    assert converted.verified(name) == 0, converted.log_text(f"{name} verified")
    source = converted.model("qwen3_moe decoded" if name.endswith("FP8") else name)
    original, _ = calibrated.load_with_info(source)
    model, loading = calibrated.load_with_info(converted.ours(name))
    assert not any(loading.values()), loading
    text = calibrated.HELDOUT.read_text()[2000:2300]
    divergence = calibrated.divergence(original, model, text)
    divergence_without_experts = calibrated.divergence(original, calibrated.load_without_experts(source), text)
    print(f"{name}: KL {divergence:.5f}, without experts {divergence_without_experts:.3f}")
    assert divergence < NEAR[converted.cases[name].kind] * divergence_without_experts


def test_config_and_card_describe_the_calibration(converted: Any) -> None:
    for name, case in calibrated.CASES.items():
        out = converted.ours(name)
        quantization = json.loads((out / "config.json").read_text())["quantization_config"]
        (group,) = quantization["config_groups"].values()
        assert group["targets"] == ["Linear"]
        weights = group["weights"]
        groups_of = 32 if "--group-size" in case.options else 128
        assert (weights["num_bits"], weights["group_size"], weights["actorder"]) == (int(case.kind[1]), groups_of, None)
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["model"]["quant_method"] == "GPTQ", name
        assert "GPTQ" in (out / "README.md").read_text()
        for file in calibrated.TOKENIZER:
            assert (out / file).read_bytes() == (calibrated.EXAMPLE / file).read_bytes()


def test_gptq_has_less_error_than_rounding(converted: Any) -> None:
    """The bundled trained model predicts text that is not in the calibration data."""
    original, _ = calibrated.load_with_info(converted.model("bundled"))
    text = calibrated.HELDOUT.read_text()[4000:6000]
    gptq, rtn = (
        calibrated.divergence(original, calibrated.load_with_info(path)[0], text)
        for path in (converted.ours("bundled"), converted.rounded("bundled"))
    )
    print(f"W4A16: KL {gptq:.5f} with GPTQ, {rtn:.5f} rounded to nearest")
    assert gptq < rtn


def test_float32_rounding_keeps_chosen_codes(converted: Any) -> None:
    """llmcompressor divides GPTQ's weights by BF16 scales, so that ties move some 8-bit codes to their neighbours.

    Scales and tensors that are not quantized are equal.
    """
    ours, library = (read_folder(converted.ours(f"qwen3_moe {kind}")) for kind in ("float32", "W8A16"))
    assert all(name.endswith("weight_packed") for name in find_differences(ours, library))
    # Later layers have different inputs.
    first = [name for name in find_differences(ours, library) if ".layers.0." in name]
    for name in first:
        ours_codes, library_codes = (
            packed.unpack_words(8, tensors[name].bits).astype(int) for tensors in (ours, library)
        )
        scale = reference.bf16_to_f32(ours[name.replace("_packed", "_scale")].bits)
        weight = reference.bf16_to_f32(reference.f32_to_bf16(ours_codes.astype(np.float32) * scale))
        again = reference.bf16_to_f32(reference.f32_to_bf16(weight / scale))
        np.testing.assert_array_equal(library_codes, np.rint(np.clip(again, -128, 127)))
    assert first


@pytest.mark.parametrize(("name", "floor"), [("qwen3_moe routed", 1), ("qwen3_moe floor", 4)])
def test_experts_with_too_few_tokens_are_rounded(name: str, floor: int, converted: Any) -> None:
    """Such experts equal those of RTN bit for bit and are listed; other experts differ."""
    ours, rounded = read_folder(converted.ours(name)), read_folder(converted.rounded("qwen3_moe"))
    reported = {}
    for line in converted.log_text(name).splitlines():
        if "rounded to nearest" in line:
            head, _, listed = line.rpartition(": ")
            reported[int(head.partition("layer ")[2].partition(":")[0])] = [int(e) for e in listed.split(", ")]
            assert f"fewer than {floor} tokens" in head
    # Routing equals the library's in the first layer, and in later ones if both round the same experts.
    for experts, tokens in converted.report("qwen3_moe routed")["routed"].items():
        layer = int(experts.split(".")[2])
        few = [e for e, count in enumerate(tokens) if count < floor]
        if floor == 1 or layer == 0:
            assert reported.get(layer, []) == few
    assert reported

    def tensors_of_expert(tensors: Any, layer: int, expert: int) -> Any:
        return {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{layer}.mlp.experts.{expert}.")}

    all_experts = itertools.product(range(3), range(8))
    nearest = {
        (layer, e)
        for layer, e in all_experts
        if tensors_of_expert(ours, layer, e) == tensors_of_expert(rounded, layer, e)
    }
    assert nearest == {(layer, e) for layer, listed in reported.items() for e in listed}


@pytest.fixture(scope="module")
def server() -> Any:
    return model_server()


def test_values_that_are_not_finite_stop_the_run(converted: Any, server: Any, tmp_path: Path) -> None:
    """The message names the layer; finished units are kept, so that a different data set can be tried."""
    import torch
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(converted.model("qwen3_moe"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"].fill_(torch.finfo(torch.bfloat16).max)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    arguments = calibrated.gpu_arguments(model, tmp_path / "out", "W4A16", converted.dataset())
    conversion.check_refusal(server.run(arguments, tmp_path / "log"), 6, "layer 1", "RTN")
    assert not (tmp_path / "out").exists()


def test_model_without_a_tokenizer_is_refused(converted: Any, server: Any, tmp_path: Path) -> None:
    without = shutil.ignore_patterns(*calibrated.TOKENIZER)
    model = shutil.copytree(converted.model("qwen3_moe"), tmp_path / "model", ignore=without)
    arguments = calibrated.gpu_arguments(model, tmp_path / "out", "W4A16", converted.dataset())
    conversion.check_refusal(server.run(arguments, tmp_path / "log"), 5, "tokenizer")


OWN_TOKENIZER = """\
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 256
    get_vocab = lambda self: {chr(byte): byte for byte in range(256)}
    _tokenize = lambda self, text: [chr(byte) for byte in text.encode()]
    _convert_token_to_id = lambda self, token: ord(token)
    _convert_id_to_token = lambda self, index: chr(index)
"""


@pytest.mark.slow
def test_tokenizer_with_its_own_code_requires_trust(converted: Any, server: Any, tmp_path: Path, cli: Any) -> None:
    """kt-kernel's script passes --trust_remote_code only to the model."""
    model = tmp_path / "model"
    shutil.copytree(converted.model("qwen3_moe"), model)
    (model / "tokenizer.json").unlink()
    (model / "tokenization_own.py").write_text(OWN_TOKENIZER)
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    env = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    arguments = calibrated.gpu_arguments(model, tmp_path / "refused", "W4A16", converted.dataset())
    conversion.check_refusal(server.run(arguments, tmp_path / "log"), 5, "tokenizer")
    arguments = calibrated.gpu_arguments(model, tmp_path / "out", "W4A16", converted.dataset(), "--trust-remote-code")
    cli(*arguments, env=env)
    assert len(read_folder(tmp_path / "out")) == len(read_folder(converted.ours("qwen3_moe")))
