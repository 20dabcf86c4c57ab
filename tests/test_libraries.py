"""Layers as AutoAWQ, GPTQModel, compressed-tensors, modelopt and transformers store them: dequantized they are the
library's own values, and converted what the definition makes of these.

KTCONVERT_GOLDEN=FOLDER tests more files of the same kind.
"""

import hashlib
import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from ktconvert.pipeline.cli.cpu import cpu
from ktconvert.pipeline.cli.dequantize import dequantize
from ktconvert.pipeline.cli.verify import verify
from ktconvert.quantizers import reference
from rig import golden
from rig.safetensors import Bits, bits_of, metadata_of, read_file, read_folder, write_file

FILES = golden.libraries()
FAMILIES = {"gptoss": "gpt_oss", "deepseek": "deepseek_v4", "minimax": "minimax_m3_vl"}  # all others: Qwen3-MoE
PROJECTIONS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}


def hashes_of(name: str) -> dict[str, dict[str, object]]:
    """Of each linear in the file: dtype, shape and SHA-256 of the library's values."""
    return dict(json.loads(metadata_of(FILES[name])["expected_sha256"]))


# gpt-oss's biases cannot be converted, and some files hold a part of an expert.
WHOLE = [name for name in FILES if not name.startswith("gptoss") and len(hashes_of(name)) % len(PROJECTIONS) == 0]


def run(command: click.Command, *words: object) -> None:
    """A command in this process."""
    done = CliRunner().invoke(command, [*map(str, words), "-q"])
    assert done.exit_code == 0, done.exception or done.output


def checkpoint(name: str, folder: Path) -> Path:
    """The layer with a config."""
    folder.mkdir()
    family = FAMILIES.get(name.split("_")[0], "qwen3_moe")
    quantization = json.loads(metadata_of(FILES[name])["quantization_config"])
    config = {"model_type": family, "num_hidden_layers": 1, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    stored = read_file(FILES[name])
    write_file(folder / "model.safetensors", {n: t for n, t in stored.items() if not n.endswith(".expected")})
    return folder


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Each layer as it is stored, and what `dequantize` made of it."""
    made = {}
    for name in FILES:
        folder = tmp_path_factory.mktemp(name)
        source, out = checkpoint(name, folder / "model"), folder / "out"
        run(dequantize, source, out)
        made[name] = source, out
    return made


@pytest.mark.parametrize("name", FILES)
def test_dequantized_to_the_values_of_the_library(name, layers):
    """Names, shapes and values of all weights; -0 counts as +0, as in the hashes. For gpt-oss these are transformers'
    tensors. Where the library's values are float16, they are compared within the two roundings."""
    source, out = layers[name]
    run(verify, out, "--against", source)
    stored, hashes = read_file(FILES[name]), hashes_of(name)
    tensors = read_folder(out)
    assert all(stem in hashes or stem.endswith("_bias") for stem in (n.removesuffix(".weight") for n in tensors))
    for key, tensor in tensors.items():
        if (expected := hashes.get(stem := key.removesuffix(".weight"))) is None:
            continue
        assert (tensor.dtype, list(tensor.shape)) == ("BF16", expected["shape"])
        bits = np.where(tensor.bits == 0x8000, 0, tensor.bits).astype("<u2")
        if expected["dtype"] == "BF16":
            assert hashlib.sha256(bits.tobytes()).hexdigest() == expected["sha256"]
        elif f"{stem}.expected" in stored:
            theirs = stored[f"{stem}.expected"].bits.view(np.float16).astype(np.float32)
            assert np.allclose(reference.bf16_to_f32(bits), theirs, rtol=2**-8 + 2**-10, atol=2**-24)


def experts(out: Path) -> dict[tuple[int, str], Bits]:
    """BF16 of each linear, by expert and projection."""
    found = {}
    for name, bits in bits_of(read_folder(out)).items():
        *_, expert, stem, _ = name.split(".")
        found[int(expert), next(p for p, names in PROJECTIONS.items() if stem in names)] = bits
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_converted_as_its_values_are(name, layers, tmp_path):
    """To int4, and to int8 in two parts."""
    source, out = layers[name]
    values = experts(out)
    for bits, parts in ((4, 1), (8, 2)):
        made = tmp_path / f"int{bits}"
        run(cpu, "-i", source, "-o", made, "--quant-method", f"int{bits}", "--threadpool-count", parts)
        tensors = bits_of(read_folder(made))
        assert len(tensors) == 2 * parts * len(values)
        for (expert, projection), linear in values.items():
            for part, chunk in enumerate(np.split(linear, parts, axis=1 if projection == "down" else 0)):
                key = f"blk.0.ffn_{projection}_exps.{expert}.numa.{part}"
                weight, scale = reference.quantize_pack(bits, np.ascontiguousarray(chunk))
                assert tensors[f"{key}.weight"].tobytes() == weight.tobytes()
                assert tensors[f"{key}.scale"].tobytes() == scale.tobytes()
