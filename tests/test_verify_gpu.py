"""`ktconvert verify` of outputs for the GPU: correct outputs pass, and damage that loaders ignore is found."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktconvert
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.extras import install_command
from ktconvert.layouts.files.manifest import compute_digest
from ktconvert.native_quant import machine
from ktconvert.pipeline.cli.conversion import gpu
from ktconvert.pipeline.verify.verify import require_sound
from rig import families
from rig.files import edit_json
from rig.safetensors import Tensor, Tensors, edit_file, read_file, read_folder
from rig.verifying import failed_checks, find_check, invoke, problems, run_verify

NEEDED = ("torch", "transformers", "accelerate", "compressed_tensors")
loads = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason="transformers or compressed-tensors is not installed"
)
Copy = Callable[[str], Path]
KINDS = ("W4A16", "W8A16")
EXPERTS = "model.layers.{}.mlp.experts.{}.{}_proj.{}"


def convert(source: Path, output: Path, kind: str, *more: str) -> Path:
    invoke(gpu, "-i", source, "-o", output, "--quant-method", "RTN", "--quant-type", kind, *more)
    return output


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Path]:
    """Convert the bundled model with RTN."""
    root = tmp_path_factory.mktemp("converted")
    return {kind: convert(example, root / kind, kind) for kind in KINDS}


@pytest.fixture
def copy(converted: dict[str, Path], tmp_path: Path) -> Copy:
    """Return a function that copies a converted model, to change it."""
    return lambda kind: Path(shutil.copytree(converted[kind], tmp_path / kind))


def test_output_without_its_manifest_is_refused(copy):
    """The message says what the output is, and what is missing."""
    output = copy("W4A16")
    (output / "manifest.json").unlink()
    report = run_verify(output)
    assert report["code"] == 5
    assert "is packed by compressed-tensors, but has no manifest.json; " in report["message"]


def rewrite(output: Path, change: Callable[[Tensors], None], **facts: Any) -> Path:
    """Change the tensors shard by shard, and make index and manifest match."""
    weight_map, total = {}, 0
    for shard in sorted(output.glob("*.safetensors")):
        edit_file(shard, change)
        tensors = read_file(shard)
        weight_map |= dict.fromkeys(tensors, shard.name)
        total += sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = json.loads((output / "manifest.json").read_text())
    manifest["model"] |= facts
    for file in manifest["files"]:
        data = (output / file["name"]).read_bytes()
        file |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (output / "manifest.json").write_text(json.dumps(manifest | {"sha256": compute_digest(manifest)}))
    return output


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Tensors], None]:
    """Change one tensor's bytes."""

    def one(tensors: Tensors) -> None:
        if name in tensors:
            tensors[name] = tensors[name]._replace(data=change(tensors[name].data))

    return one


def blank(packed: bytes, columns: int = 200) -> bytes:
    """Set some columns of W8A16 codes [256, 256] to zero."""
    codes = np.frombuffer(packed, np.uint8).reshape(256, 256).copy()
    codes[:, :columns] = 0x80
    return codes.tobytes()


def nudge_codes(packed: bytes) -> bytes:
    """Raise every fifth W8A16 code by one, as a calibration could."""
    codes = np.frombuffer(packed, np.uint8).copy()
    codes[::5] += codes[::5] < 255
    return codes.tobytes()


@loads
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_outputs_verify_and_predict_like_their_source(kind, converted, example):
    report = run_verify(converted[kind], "--against", example, "--quant-method", kind.lower())
    assert report["ok"] and report["notes"] == [], report["message"]
    assert find_check(report, "options")["result"] == f"{kind}, as requested"
    assert find_check(report, "reload")["result"] == "every routed expert matches Qwen3MoeForCausalLM"
    assert find_check(report, "source")["result"].startswith("144 tensors quantized again, same bytes; 21 non-expert")
    predictions = report["predictions"]
    low, high = {"W4A16": (1e-3, 0.02), "W8A16": (1e-5, 1e-3)}[kind]
    assert low < predictions["kl"] < high
    assert predictions["tokens"] == 4 * 127
    assert predictions["top1_agreement"] > {"W4A16": 0.9, "W8A16": 0.98}[kind]
    assert 3 * predictions["kl"] < predictions["bound"] < {"W4A16": 0.2, "W8A16": 0.005}[kind]
    assert f"KL divergence {predictions['kl']:.3g} nats" in find_check(report, "predictions")["result"]


@loads
def test_only_names_are_loaded_without_a_source(converted):
    report = run_verify(converted["W4A16"])
    assert report["ok"]
    assert report["predictions"] is None
    assert [check["name"] for check in report["checks"]][-2:] == ["hashes", "reload"]
    report = run_verify(converted["W4A16"], "--no-load")
    assert report["ok"]
    assert report["checks"][-1]["name"] == "hashes"


@loads
def test_predictions_are_compared_on_a_given_text(converted, example, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x = 1\n" * 60)
    predictions = run_verify(converted["W8A16"], "--against", example, "--text", text)["predictions"]
    assert predictions["tokens"] == 127 * (predictions["tokens"] // 127)
    assert predictions["kl"] < predictions["bound"]
    text.write_text("too short")
    report = run_verify(converted["W8A16"], "--against", example, "--text", text)
    assert report["code"] == 5
    assert "128 are required" in report["message"]
    assert run_verify(converted["W8A16"], "--against", example, "--text", tmp_path / "none")["code"] == 5


@loads
def test_models_that_cannot_be_loaded_give_a_note(copy, converted, example, monkeypatch):
    output = copy("W4A16")
    edit_json(output / "config.json", lambda config: config.update(model_type="of_tomorrow", architectures=["X"]))
    report = run_verify(rewrite(output, lambda _: None))
    assert report["ok"]
    assert any("not loaded: transformers cannot build it: " in note for note in report["notes"])
    monkeypatch.setattr(machine, "memory_available", lambda: 1 << 30)
    report = run_verify(converted["W4A16"], "--against", example)
    assert report["ok"]
    assert report["predictions"] is None
    each = "predictions were not compared: each of the two models needs 1.0 GiB of memory, but 1.0 GiB are free"
    assert [note[: len(each)] for note in report["notes"]] == [each]
    monkeypatch.setattr("ktconvert.pipeline.verify.reload.find_spec", lambda name: None)
    report = run_verify(converted["W4A16"], "--against", example)
    assert report["ok"]
    assert [find_check(report, name)["state"] for name in ("reload", "predictions", "hashes")] == [
        *("skipped", "skipped", "ok")
    ]
    assert any(f"not installed: `{install_command('gpu')}`" in note for note in report["notes"])
    checks = {check.name: check for check in ktconvert.verify(converted["W4A16"], against=example).checks}
    assert checks["reload"].state == "skipped" and "not loaded: " in repr(checks["reload"])


def test_wrong_method_or_numa_is_refused(converted):
    report = run_verify(converted["W4A16"], "--quant-method", "W8A16", "--no-load")
    said = "the weights have the sizes of W4A16, not of --quant-method w8a16"
    assert report["code"] == 6
    assert said in report["message"]
    report = run_verify(converted["W4A16"], "--quant-method", "int4", "--no-load")
    assert report["code"] == 6 and "not of --quant-method int4" in report["message"]
    report = run_verify(converted["W4A16"], "--numa", 1)
    assert report["code"] == 2
    assert "has no NUMA slices" in report["message"]


def nudge_all(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith("weight_packed"):
            edit(name, nudge_codes)(tensors)


def test_gptq_codes_may_differ_from_rounding(copy, example):
    output = rewrite(copy("W8A16"), nudge_all)
    assert len(problems(run_verify(output, "--against", example, "--no-load"), "source")) == 48, (
        "it says that it is RTN"
    )
    report = run_verify(rewrite(output, lambda _: None, quant_method="GPTQ"), "--against", example, "--no-load")
    assert report["ok"], report["message"]
    said = "48 linears with the scales of rounding to nearest and errors of at most 1."
    assert find_check(report, "source")["result"].startswith(said)
    assert all(0.007 < error["relative_error"] < 0.021 for error in report["errors"])


def test_columns_without_calibration_do_not_count(copy, example):
    name = EXPERTS.format(1, 5, "up", "weight_packed")
    output = rewrite(copy("W8A16"), edit(name, partial(blank, columns=100)), quant_method="GPTQ")
    report = run_verify(output, "--against", example, "--no-load")
    assert report["ok"], report["message"]
    assert "1 linear with columns that are all zeros: calibration never saw their inputs" in report["notes"]


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("weight_packed", lambda raw: raw[4096:] + raw[:4096], "times that of rounding to nearest"),
        ("weight_packed", blank, "has zeros in 200 of 256 columns"),
        ("weight_scale", lambda raw: raw[2:] + raw[:2], "quantizing the source gives"),
    ],
    ids=["rows turned", "hardly calibrated", "scales turned"],
)
@pytest.mark.parametrize("expert", [0, 5])
def test_wrong_gptq_expert_is_found(expert, suffix, change, words, copy, example):
    """Hashes, shapes and numbers are right; only the source tells the difference."""
    name = EXPERTS.format(1, expert, "up", suffix)
    output = rewrite(copy("W8A16"), edit(name, change), quant_method="GPTQ")
    assert run_verify(output, "--no-load")["ok"]
    report = run_verify(output, "--against", example, "--no-load")
    (problem,) = problems(report, "source")
    assert report["code"] == 6
    assert name in problem
    assert words in problem


def test_64_rows_suffice_to_find_a_wrong_expert(tmp_path, write_qwen, random_experts):
    """With more than 8 experts, 64 rows of each remaining expert are judged."""
    source = write_qwen(tmp_path / "source", {0: random_experts(16, 128, 128)})
    output = convert(source, tmp_path / "out", "W4A16")
    name = EXPERTS.format(0, 3, "down", "weight_packed")
    rewrite(output, edit(name, lambda raw: raw[64:] + raw[:64]), quant_method="GPTQ")
    (problem,) = problems(run_verify(output, "--against", source, "--no-load"), "source")
    assert problem.startswith(name)
    assert all(error["experts"] == 8 for error in run_verify(output, "--against", source, "--no-load")["errors"])


@loads
def test_misplaced_experts_are_found(copy, example):
    """Structure, hashes, names and numbers are right; predictions and the comparison with the source are not."""
    output = copy("W8A16")
    stored = read_folder(output)

    def turn(tensors: Tensors) -> None:
        """Give each expert's tensor in layer 1 the bytes of the next expert."""
        for name in tensors:
            tensors[name] = stored[
                re.sub(r"(layers\.1\..*experts\.)(\d)", lambda m: f"{m[1]}{(int(m[2]) + 1) % 8}", name)
            ]

    rewrite(output, turn, quant_method="GPTQ")
    assert run_verify(output, "--no-load")["ok"]
    report = run_verify(output, "--against", example)
    assert failed_checks(report) == ["source", "predictions"]
    assert len(problems(report, "source")) == 24
    (problem,) = problems(report, "predictions")
    assert problem.startswith("the output's predictions differ too much from its source's: KL divergence ")
    assert report["predictions"]["kl"] > 5 * report["predictions"]["bound"]
    assert report["predictions"]["top1_agreement"] < 0.6


@loads
def test_names_that_transformers_ignores_are_found(tmp_path):
    """The output is as llmcompressor's oneshot writes it: transformers loads it with random experts."""
    source = families.make("mixtral", False, tmp_path / "source")
    output = convert(source, tmp_path / "out", "W4A16")
    report = run_verify(output, "--against", source)
    assert report["ok"] and report["predictions"]["kl"] < report["predictions"]["bound"], report["message"]
    usual = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[re.sub(r"\.w\d\.", lambda own: usual[own[0]], name)] = tensors.pop(name)

    at = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
    names = {projection: f"{at}{projection}_proj" for projection in ("gate", "up", "down")}
    report = run_verify(rewrite(output, rename, linear_names=names))
    assert failed_checks(report) == ["reload"]
    messages = problems(report, "reload")
    assert "transformers finds no tensor for model.layers.0.mlp.experts.gate_up_proj" in messages
    assert any("has no place for model.layers.1." in p and "down_proj.weight_packed" in p for p in messages)


def test_fp8_without_scales_is_found(copy):
    name = "model.layers.0.self_attn.q_proj.weight"

    def half(tensors: Tensors) -> None:
        if name in tensors:
            tensors[name] = Tensor("F8_E4M3", (256, 256), tensors[name].data[::2])

    (problem,) = problems(run_verify(rewrite(copy("W4A16"), half)), "quantization")
    assert problem.startswith(name)
    assert "ignore its scales" in problem


def test_ignore_list_that_matches_experts_is_found(copy):
    output = copy("W4A16")
    hits = "matches model.layers.0.mlp.experts.7.up_proj, which is quantized"
    slow = ("re:(?:(?:.|..)*?)*[!#]", "the ignore list: the regular expression")
    for pattern, words in (("re:.*experts.7.up_proj", hits), slow, ("re:(", "the ignore list: '(' is not a regular")):
        edit_json(output / "config.json", lambda config, p=pattern: config["quantization_config"]["ignore"].append(p))
        (problem,) = problems(run_verify(rewrite(output, lambda _: None)), "quantization")
        assert words in problem


@loads
def test_incomplete_source_gives_notes(tmp_path, write_qwen, random_experts):
    """The source lacks attention: no fault of the conversion."""
    source = write_qwen(tmp_path / "source", {0: random_experts(2, 128, 128)}, vocab_size=16)
    report = run_verify(convert(source, tmp_path / "out", "W4A16"), "--against", source)
    assert report["ok"]
    assert report["predictions"] is None
    lacks = [note for note in report["notes"] if "transformers finds no tensor for " in note]
    assert lacks
    assert "the source has the same problem" in lacks[0]
    assert "predictions were not compared: the output cannot be loaded completely" in report["notes"]


@loads
def test_require_sound_finds_damage_after_a_conversion(copy):
    output = copy("W4A16")
    require_sound(output)
    config = (output / "config.json").read_text()
    (output / "config.json").write_text(json.dumps(json.loads(config) | {"mlp_only_layers": [1]}))
    rewrite(output, lambda _: None)
    with pytest.raises(VerificationError, match=r"has no place for model\.layers\.1\.mlp\.experts"):
        require_sound(output)
    require_sound(output, load=False)
    (output / "config.json").write_text(config)
    name = EXPERTS.format(1, 7, "down", "weight_packed")
    rewrite(output, edit(name, lambda raw: b"\x88" * len(raw)))
    with pytest.raises(VerificationError, match=rf"{name} in .* all codes are 0: the expert would compute nothing"):
        require_sound(output)
