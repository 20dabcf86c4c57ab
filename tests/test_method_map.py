"""--method-map, a method per layer: parsing, the bytes of each layer, and all commands that read such an output.

kt-kernel must not load any of it as its own.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime.experts import KTExperts
from rig import calibrated, conversion
from rig.files import edit_json
from rig.golden import FOLDER
from rig.safetensors import edit_header, find_differences, metadata_of, read_folder
from rig.verifying import find_check, require_accepted, run_verify

METHODS = {0: "int8", 1: "mxfp4", 2: "int4", 3: "fp8", 4: "bf16"}  # layer -> method
NAMES = {"int4": "AMXINT4", "int8": "AMXINT8", "mxfp4": "MXFP4", "fp8": "FP8", "bf16": "BF16"}
MAP = ("0-3=int8", "1=mxfp4", "2-4=int4", "4=BF16", "3=fp8")  # the last entry of a layer applies


def run_ok(*arguments: object) -> Result:
    """Run a command in this process and require success."""
    result = conversion.run_in_process(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def convert(source: Path, out: Path, method: str, *more: object) -> Path:
    """Convert by a method."""
    run_ok("cpu", "-i", source, "-o", out, "--quant-method", method, "-q", *more)
    return out


def map_options(*texts: str) -> list[str]:
    """Return the options of a map."""
    return [word for text in texts for word in ("--method-map", text)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a source of five layers."""
    return conversion.checkpoint(tmp_path_factory.mktemp("method-map") / "source", layers=5)


@pytest.fixture(scope="module")
def mix(source: Path) -> Path:
    """Convert the source with MAP."""
    return convert(source, source.with_name("mix"), "int4", *map_options(*MAP))


@pytest.fixture(scope="module")
def single_outputs(source: Path) -> dict[str, Path]:
    """Convert the source by each method."""
    return {method: convert(source, source.with_name(method), method) for method in NAMES}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (map_options("0-2"), "0-2: give layers and their method, like 0-5=int8"),
        (map_options("0=int5"), "int5 cannot be the method of single layers; int4, int8, mxfp4, fp8 and bf16 can"),
        (map_options("0=int4,1=bf16"), "--method-map 0=int4,1=bf16: repeat --method-map for each method, like"),
        (map_options("0="), "cannot be the method of single layers"),
        (map_options("3-1=int8"), "the range 3-1 is reversed; write 1-3"),
        (map_options("x=int8"), "--method-map x: give layer numbers"),
        (map_options("0-2=int8", "all=int4"), "every layer would have int4; give --quant-method int4"),
        ([*map_options("0=int8"), "--layers", "0"], "every layer would have int8"),
        ([*map_options("0=int8"), "--no-merge-safetensor"], "leave out --no-merge-safetensor"),
        ([*map_options("0=int8"), "--save-backward-weights"], "leave out --save-backward-weights"),
        ([*map_options("0=int8"), "--resume-layer", "2"], "leave out --resume-layer"),
        (
            [*map_options("0=int8"), "--quant-method", "fp8", "--layout", "kt"],
            "--quant-method fp8: KT_FP8 cannot be the method",
        ),
        ([*map_options("0=bf16"), "--quant-method", "fp8", "--scale", "mse"], "leave out --scale"),
        ([*map_options("0=bf16"), "--scale", "imatrix"], "needs the importance of inputs"),
    ],
)
def test_invalid_maps_are_refused(options, message, source, tmp_path):
    result = conversion.run_in_process("cpu", "-i", source, "-o", tmp_path / "out", *options)
    assert getattr(result.exception, "exit_code", None) == 2 and message in str(result.exception), result.exception
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (*map_options("0-3=bf16", "4=int8"), "--quant-method", "bf16", "--threadpool-count", 8),
            "AMXINT8 cannot hold this model in 8 NUMA slices",
        ),
        (map_options("4-5=int8"), "--method-map 4-5: layer 5 has no experts; layers with experts: 0-4"),
    ],
)
def test_maps_that_do_not_fit_the_model_are_refused(options, message, source, tmp_path):
    result = conversion.run_in_process("cpu", "-i", source, "-o", tmp_path / "out", *options)
    assert isinstance(result.exception, UnsupportedError)
    assert message in str(result.exception), result.exception


def test_plan_lists_the_methods_of_layers(source, tmp_path):
    result = run_ok("cpu", "-i", source, "-o", tmp_path / "out", *map_options(*MAP), "--scale", "mse", "--dry-run")
    listed = "AMXINT8: layer 0; MXFP4: layer 1; AMXINT4: layer 2; FP8: layer 3; BF16: layer 4"
    assert f"kt-kernel cannot load it ({listed})" in result.output.replace("\n", " ")
    assert "--scale mse has no effect in layers of" in result.output.replace("\n", " ")
    assert "BF16: the experts are BF16 already" in result.output.replace("\n", " ")


def test_each_layer_has_the_bytes_of_its_method(mix, single_outputs):
    """Tensor names are none that kt-kernel's loader reads."""
    expected = {
        re.sub(r"scale$", "scales", re.sub(r"weight$", "codes", name)): tensor
        for layer, method in METHODS.items()
        for name, tensor in read_folder(single_outputs[method]).items()
        if name.startswith(f"blk.{layer}.")
    }
    assert find_differences(read_folder(mix), expected) == []
    shards = {int(about["layer"]): about for about in map(metadata_of, mix.glob("*.safetensors"))}
    assert {layer: about["method"] for layer, about in shards.items()} == {n: NAMES[m] for n, m in METHODS.items()}


def test_inspect_and_the_card_list_the_methods(mix):
    about = json.loads(run_ok("inspect", mix, "--json").stdout)
    assert about["method"] == "MIXED" and about["complete"] and about["arrangement"] == "merged"
    assert about["methods"] == {NAMES[method]: str(layer) for layer, method in METHODS.items()}
    assert "FP8: layer 3" in run_ok("inspect", mix).stdout
    assert "| FP8 | layer 3 |" in (mix / "README.md").read_text()
    assert json.loads((mix / "config.json").read_text())["quantization_config"]["methods"] == about["methods"]


def test_verify_accepts_a_mixed_output(mix, source, tmp_path):
    """The output is compared with its source and with itself, a layer of each method is computed, and the page is written."""
    report = require_accepted(mix, "--against", source, "--run", "--full", "--report", tmp_path / "page.html")
    assert "same bytes" in find_check(report, "source")["result"]
    assert [f"layer {n}," in find_check(report, "run")["result"] for n in METHODS] == [True] * len(METHODS)
    assert {error["layer"] for error in report["errors"] if error["relative_error"] == 0} == {4}
    assert "Worst rows" in (tmp_path / "page.html").read_text()
    require_accepted(mix, "--against", mix)


def test_methods_are_read_from_shards_without_a_manifest(mix, source, tmp_path):
    shutil.copytree(mix, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    assert require_accepted(tmp_path / "out", "--against", source)["methods"]["FP8"] == "3"


@pytest.mark.parametrize("scale", ["mse", "imatrix"])
def test_scale_applies_to_layers_whose_method_has_it(scale, packed_example, example):
    """Layers of other methods are the same as without --scale."""
    given = ("--imatrix", str(FOLDER / "llama_cpp.imatrix.gguf")) if scale == "imatrix" else ()
    out = packed_example("int4", 2, *map_options("1=fp8"), "--scale", scale, *given)
    require_accepted(out, "--against", example, *given)
    alone = read_folder(packed_example("int4", 2, "--scale", scale, *given)) | read_folder(packed_example("fp8", 2))
    assert {tensor.data for tensor in read_folder(out).values()} <= {tensor.data for tensor in alone.values()}


def test_gptq_compensates_each_layer_in_its_method(
    packed_example: Callable[..., Path], example: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llmcompressor")
    text, out = calibrated.HELDOUT.read_text(encoding="utf-8"), tmp_path / "out"
    lines = [json.dumps({"text": text[first : first + 300]}) for first in range(0, 2400, 300)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    run_ok(
        *calibrated.scale_gptq_arguments(
            example, out, tmp_path / "texts.jsonl", "--threadpool-count", "2", *map_options("1=int8")
        )
    )
    assert require_accepted(out, "--against", example)["methods"] == {"AMXINT4": "0", "AMXINT8": "1"}
    stored, rounded = (read_folder(path) for path in (out, packed_example("int4", 2, *map_options("1=int8"))))
    codes = [name for name in rounded if name.endswith(".codes")]
    assert {name[:6] for name in codes if stored[name].data != rounded[name].data} == {"blk.0.", "blk.1."}
    assert [KTExperts.load(out, layer).method for layer in (0, 1)] == ["AMXINT4", "AMXINT8"]


def damage_shard(layer: int, **changed: str) -> Callable[[Path], None]:
    """Return a damage to the metadata of a layer's shard."""

    def damage(out: Path) -> None:
        path = out / f"model-{layer + 1:05d}-of-00005.safetensors"
        edit_header(path, lambda header: header["__metadata__"].update(changed))

    return damage


def damage_manifest(out: Path) -> None:
    """Swap the methods of two layers in the manifest."""
    edit_json(out / "manifest.json", lambda document: document["model"]["methods"].update(FP8="2", AMXINT4="3"))


DAMAGE = {
    "a wrong method with the same names": (
        damage_shard(0, method="AMXINT4"),
        "has method AMXINT4, but its tensors have AMXINT8",
    ),
    "an unknown method": (damage_shard(0, method="AMXINT9"), "has method AMXINT9, but its tensors have AMXINT8"),
    "a method with different sizes": (
        damage_shard(3, method="BF16"),
        "its metadata has method BF16, but its tensors have FP8",
    ),
    "a bit of a layer": (lambda out: conversion.flip_bit(out / "model-00003-of-00005.safetensors"), "its sha256 is"),
    "layers of the manifest": (damage_manifest, "the manifest has methods"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_names_damaged_layers(damage, mix, tmp_path):
    out, (edit, message) = shutil.copytree(mix, tmp_path / "out"), DAMAGE[damage]
    edit(out)
    report = run_verify(out)
    problems = [problem for check in report["checks"] for problem in check["problems"]]
    assert report["code"] == 6 and any(message in problem for problem in problems), problems


def test_resplit_rearranges_each_layer_by_its_method(mix, source, tmp_path):
    """The result equals what verify computes from the source for one NUMA slice."""
    result = run_ok("resplit", mix, tmp_path / "out", "--threadpool-count", 1)
    assert "FP8: weights and scales do not change" in result.output.replace("\n", " ")
    report = require_accepted(tmp_path / "out", "--against", source)
    assert report["method"] == "MIXED" and report["methods"]["FP8"] == "3" and report["numa"] == 1


@pytest.mark.parametrize("layer", METHODS)
def test_layer_computes_the_same_as_in_an_output_of_its_method(layer, mix, single_outputs):
    rng = np.random.default_rng(layer)
    ids, weights = np.array([[0, 1]] * 3), rng.random((3, 2), np.float32)
    hidden = conversion.bf16(rng, 3, conversion.HIDDEN)
    outs = []
    for folder in (mix, single_outputs[METHODS[layer]]):
        with KTExperts.load(folder, layer) as experts:
            assert experts.method == NAMES[METHODS[layer]]
            outs.append(experts.forward(hidden, ids, weights))
    assert np.any(outs[0]) and np.array_equal(*outs)


def test_loading_a_layer_with_a_wrong_method_is_refused(mix):
    pytest.importorskip("torch")
    from ktconvert.native_quant import KTMoEWrapper

    sizes = (2, 1, conversion.HIDDEN, conversion.WIDTH)
    for layer, method in METHODS.items():
        KTMoEWrapper(layer, *sizes, None, 2, 2, str(mix), 512, method=NAMES[method]).load_weights()
    with pytest.raises(UnsupportedError, match="layer 1 has method MXFP4 according to its byte counts, not AMXINT4"):
        KTMoEWrapper(1, *sizes, None, 2, 2, str(mix), 512, method="AMXINT4").load_weights()


def test_eval_lists_all_methods(packed_example, example):
    pytest.importorskip("transformers")
    two = packed_example("int4", 1, *map_options("1=int8"))
    given = ("--text", example.parent / "heldout.txt", "--sequence-length", 32, "--max-sequences", 1)
    document = json.loads(run_ok("eval", example, "--cpu-weights", two, *given, "--json").stdout)
    assert document["method"] == "AMXINT4, AMXINT8"
    int4, int8 = (layer["relative_error"] for layer in document["layers"])
    assert 0.05 < int4 < 0.2 and 0.003 < int8 < 0.03
