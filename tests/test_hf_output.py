"""An output of `ktconvert cpu` in from_pretrained: refused without ktconvert, the whole model with
it, and random experts never."""

from __future__ import annotations

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

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.outputs import cpu_card
from rig import families
from rig.safetensors import Tensor, edit_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import KTConvertConfig  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts  # noqa: E402

OUTPUTS = {
    "copied": ("--non-experts", "copy"),
    "kept": ("--non-experts", "keep"),
    "experts alone": (),
    "loose": ("--no-merge-safetensor",),
}
LOAD = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]); print('loaded')"
COMPARE = """
import sys, torch, transformers
from ktconvert.native_quant import KTConvertConfig
def logits(path, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits
out, original = sys.argv[1:]
print(torch.equal(logits(out), logits(original, quantization_config=KTConvertConfig(cpu_weights=out))))
"""


def convert(cli: Callable[..., Any], source: Path, output: Path, *options: str) -> Path:
    cli("cpu", "-i", source, "-o", output, "--quant-method", "int8", "--threadpool-count", 1, "-q", *options)
    return output


def python(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any], example: Path) -> dict[str, Path]:
    """The bundled model in INT8, with the rest of the model and without."""
    root = tmp_path_factory.mktemp("outputs")
    return {name: convert(cli, example, root / name, *options) for name, options in OUTPUTS.items()}


def test_without_ktconvert_it_fails(outputs: dict[str, Path]) -> None:
    """By what config.json says, the same in each."""
    for path in outputs.values():
        assert json.loads((path / "config.json").read_text())["transformers_weights"] == cpu_card.NO_FILE
    for name in ("copied", "kept"):
        done = python(LOAD, outputs[name])
        assert done.returncode != 0
        assert "loaded" not in done.stdout
        assert cpu_card.NO_FILE in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["copied", "kept"])
def test_with_ktconvert_it_is_the_model_with_these_experts(name: str, outputs: dict[str, Path], example: Path) -> None:
    done = python(COMPARE, outputs[name], example)
    assert done.stdout == "True\n", done.stderr


def test_what_is_kept_has_its_own_name(outputs: dict[str, Path], example: Path) -> None:
    roots = (example, outputs["kept"])
    names = [{e.name for file in p.glob("*.safetensors") for e in read_header(file).entries} for p in roots]
    source, kept = ({name for name in found if "experts" not in name and "_exps" not in name} for found in names)
    assert source == kept
    assert "it is a whole model" in (outputs["kept"] / "README.md").read_text()


def test_a_quantized_trunk_is_not_taken_for_numbers(outputs: dict[str, Path], tmp_path: Path) -> None:
    output = Path(shutil.copytree(outputs["kept"], tmp_path / "out"))
    name = "model.layers.0.self_attn.q_proj.weight"

    def pack(tensors: dict[str, Any]) -> None:
        if name in tensors:
            shape = tensors[name].shape
            tensors[name] = Tensor("F8_E4M3", shape, bytes(math.prod(shape)))

    for path in output.glob("*.safetensors"):
        edit_file(path, pack)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(name)} is quantized itself \(F8_E4M3\)"):
        transformers.AutoModelForCausalLM.from_pretrained(output)


def sentence(output: Path) -> str:
    return (
        f"{output}: holds the routed experts alone; load the checkpoint that it was converted from, with these experts:"
        f" from_pretrained(ORIGINAL, quantization_config=KTConvertConfig(cpu_weights='{output}'))"
    )


def test_experts_alone_are_one_sentence(outputs: dict[str, Path]) -> None:
    done = python(f"from ktconvert.native_quant import KTConvertConfig\n{LOAD}", outputs["experts alone"])
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(f"UnsupportedError: {sentence(outputs['experts alone'])}")
    with pytest.raises(UnsupportedError, match=re.escape(sentence(outputs["loose"]))):
        transformers.AutoModelForCausalLM.from_pretrained(outputs["loose"])


def test_the_original_is_named(cli: Callable[..., Any], example: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(example, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"_name_or_path": "org/tiny"}))
    output = convert(cli, source, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"from_pretrained\('org/tiny', quantization_config="):
        transformers.AutoModelForCausalLM.from_pretrained(output)


def loaded(path: Path, **options: Any) -> Any:
    """A causal model, or one with a vision part; nothing may be missing and nothing left over."""
    config = transformers.AutoConfig.from_pretrained(path)
    vision = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(path, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(
    ("family", "fused", "differs"),
    [
        ("qwen3_moe", False, {"tie_word_embeddings": True}),
        ("mixtral", False, {}),
        ("deepseek_v3", False, {}),
        ("qwen3_5_moe", True, {}),
    ],
)
def test_families(family: str, fused: bool, differs: dict[str, Any], cli: Callable[..., Any], tmp_path: Path) -> None:
    """Names as each family has them: other ones than in the checkpoint, below a vision part, tied."""
    source = families.make(family, fused, tmp_path / "source", **differs)
    output = convert(cli, source, tmp_path / "out", "--non-experts", "keep" if fused else "copy")
    ours, expected = loaded(output), loaded(source, quantization_config=KTConvertConfig(cpu_weights=output))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, expected(ids).logits)
    assert ours.config.quantization_config.cpu_weights == str(output)


def test_missing_other_weights_are_not_invented(outputs: dict[str, Path], tmp_path: Path) -> None:
    output = Path(shutil.copytree(outputs["copied"], tmp_path / "out"))
    lost = ("blk.1.self_attn.q_norm.weight", "norm.weight")
    for path in output.glob("*.safetensors"):
        edit_file(path, lambda tensors: [tensors.pop(name, None) for name in lost])
    with pytest.raises(UnsupportedError, match=r"lacks model\.layers\.1\.self_attn\.q_norm\.weight and 1 more tensors"):
        transformers.AutoModelForCausalLM.from_pretrained(output)


def test_other_experts_than_those_beside_it_are_refused(outputs: dict[str, Path]) -> None:
    other = KTConvertConfig(cpu_weights=outputs["experts alone"])
    sentence = f"{outputs['copied']}: has converted experts of its own; leave out cpu_weights"
    with pytest.raises(UsageError, match=f"^{re.escape(sentence)}$"):
        transformers.AutoModelForCausalLM.from_pretrained(outputs["copied"], quantization_config=other)


def test_options_for_an_output(outputs: dict[str, Path], example: Path, tmp_path: Path) -> None:
    """Those of KTConvertConfig, given as for any other model."""
    ids, options = torch.arange(3, 40)[None], {"threads": 1, "exact": True, "memory": "copy", "num_gpu_experts": 2}
    options["gpu_experts"] = example
    for config in (KTConvertConfig(**options), KTConvertConfig(cpu_weights=outputs["kept"], **options)):
        ours = transformers.AutoModelForCausalLM.from_pretrained(outputs["kept"], quantization_config=config)
        first = next(module for module in ours.modules() if isinstance(module, RoutedExperts))
        assert first.experts.exact and first.experts.pool.threads == 1 and len(first.hot) == 2
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        example, quantization_config=KTConvertConfig(cpu_weights=outputs["kept"], **options)
    )
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, expected(ids).logits)
    with pytest.raises(ValueError, match=rf"{re.escape(str(outputs['kept']))}, .*; copy that directory"):
        ours.save_pretrained(tmp_path / "again")
