"""An output of `ktconvert cpu` in from_pretrained: rejected without ktconvert, complete with it, no random experts."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.outputs import configs
from rig import families, stored
from rig.hf import experts_of, load_complete, logits
from rig.safetensors import Tensor, edit_file, read_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import KTConvertConfig  # noqa: E402

OUTPUTS = {
    "copied": ("--non-experts", "copy"),
    "kept": ("--non-experts", "keep"),
    "experts only": (),
    "loose": ("--no-merge-safetensor",),
}
# Prints the errors of transformers: for the first path without ktconvert, for the second one with it.
LOAD = """
import sys, transformers
load = transformers.AutoModelForCausalLM.from_pretrained
for path in sys.argv[1:]:
    try:
        load(path)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    from ktconvert.native_quant import KTConvertConfig
"""


def convert(cli: Callable[..., Any], source: Path, output: Path, *options: str) -> Path:
    """Convert a model to INT8."""
    cli("cpu", "-i", source, "-o", output, "--quant-method", "int8", "--threadpool-count", 1, "-q", *options)
    return output


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any], example: Path) -> dict[str, Path]:
    """Convert the bundled model to INT8, with and without its non-expert tensors."""
    root = tmp_path_factory.mktemp("outputs")
    return {name: convert(cli, example, root / name, *options) for name, options in OUTPUTS.items()}


def test_loading_without_ktconvert_fails(outputs: dict[str, Path]) -> None:
    """config.json makes transformers reject each output; ktconvert rejects outputs that have only experts."""
    for path in outputs.values():
        assert json.loads((path / "config.json").read_text())["transformers_weights"] == configs.NO_FILE
    command = [sys.executable, "-c", LOAD, str(outputs["copied"]), str(outputs["experts only"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    without_ktconvert, experts_only = done.stdout.splitlines()
    assert configs.NO_FILE in without_ktconvert
    message = "{0}: holds only routed experts; load the checkpoint that it was converted from, with these experts: "
    message += "from_pretrained(ORIGINAL, quantization_config=KTConvertConfig(cpu_weights='{0}'))"
    assert experts_only == f"UnsupportedError {message.format(outputs['experts only'])}."
    with pytest.raises(UnsupportedError, match=re.escape(message.format(outputs["loose"]))):
        transformers.AutoModelForCausalLM.from_pretrained(outputs["loose"])


def assert_same(output: Path, source: Path, **options: Any) -> Any:
    """Assert that an output gives the logits of the source with the converted experts; return the model."""
    settings = {"quantization_config": KTConvertConfig(**options)} if options else {}
    ours, ids = load_complete(output, **settings), torch.arange(3, 40)[None]
    expected = load_complete(source, quantization_config=KTConvertConfig(cpu_weights=output, **options))
    assert torch.equal(logits(ours, ids), logits(expected, ids))
    return ours


@pytest.mark.parametrize("name", ["copied", "kept"])
def test_loading_with_ktconvert_uses_the_converted_experts(name: str, outputs: dict[str, Path], example: Path) -> None:
    assert_same(outputs[name], example)
    names = [{n for n in read_folder(p) if "experts" not in n and "_exps" not in n} for p in (example, outputs[name])]
    assert (names[0] == names[1]) == (name == "kept")
    assert ("it is a whole model" in (outputs[name] / "README.md").read_text()) == (name == "kept")


def test_quantized_non_expert_tensors_are_rejected(outputs: dict[str, Path], tmp_path: Path) -> None:
    output = Path(shutil.copytree(outputs["kept"], tmp_path / "out"))
    name = "model.layers.0.self_attn.q_proj.weight"

    def pack(tensors: dict[str, Any]) -> None:
        if name in tensors:
            shape = tensors[name].shape
            tensors[name] = Tensor("F8_E4M3", shape, bytes(math.prod(shape)))

    for path in output.glob("*.safetensors"):
        edit_file(path, pack)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(name)} is quantized \(F8_E4M3\)"):
        transformers.AutoModelForCausalLM.from_pretrained(output)


def test_the_message_names_the_original_model(cli: Callable[..., Any], example: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(example, tmp_path / "source"))
    stored.configure(source, _name_or_path="org/tiny")
    output = convert(cli, source, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"from_pretrained\('org/tiny', quantization_config="):
        transformers.AutoModelForCausalLM.from_pretrained(output)


FAMILIES = [("qwen3_moe", False, {"tie_word_embeddings": True}), ("mixtral", False, {}), ("qwen3_5_moe", True, {})]


@pytest.mark.parametrize(("family", "fused", "overrides"), FAMILIES)
def test_outputs_of_each_family_load_completely(
    family: str, fused: bool, overrides: dict[str, Any], cli: Callable[..., Any], tmp_path: Path
) -> None:
    """Families differ in tensor names: renamed from the checkpoint, below a vision part, or tied."""
    source = families.make(family, fused, tmp_path / "source", **overrides)
    output = convert(cli, source, tmp_path / "out", "--non-experts", "keep" if fused else "copy")
    ours = assert_same(output, source)
    assert ours.config.quantization_config.cpu_weights == str(output)


def test_missing_non_expert_tensors_are_rejected(outputs: dict[str, Path], tmp_path: Path) -> None:
    output = Path(shutil.copytree(outputs["copied"], tmp_path / "out"))
    missing = ("blk.1.self_attn.q_norm.weight", "norm.weight")
    for path in output.glob("*.safetensors"):
        edit_file(path, lambda tensors: [tensors.pop(name, None) for name in missing])
    with pytest.raises(UnsupportedError, match=r"lacks model\.layers\.1\.self_attn\.q_norm\.weight and 1 more tensors"):
        transformers.AutoModelForCausalLM.from_pretrained(output)


def test_experts_of_a_different_directory_are_rejected(outputs: dict[str, Path]) -> None:
    other = KTConvertConfig(cpu_weights=outputs["experts only"])
    message = f"{outputs['copied']}: has converted experts of its own; leave out cpu_weights."
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        transformers.AutoModelForCausalLM.from_pretrained(outputs["copied"], quantization_config=other)


def test_options_apply_to_an_output(outputs: dict[str, Path], example: Path, tmp_path: Path) -> None:
    """The options of KTConvertConfig apply as for any other model."""
    options = {"threads": 1, "exact": True, "memory": "copy", "num_gpu_experts": 2, "gpu_experts": example}
    named = load_complete(outputs["kept"], quantization_config=KTConvertConfig(cpu_weights=outputs["kept"], **options))
    ours = assert_same(outputs["kept"], example, **options)
    for model in (named, ours):
        for module in experts_of(model).values():
            assert module.experts._exact and module.experts._pool.threads == 1 and len(module.hot) == 2
    with pytest.raises(ValueError, match=rf"{re.escape(str(outputs['kept']))}, .*; copy that directory"):
        ours.save_pretrained(tmp_path / "again")
