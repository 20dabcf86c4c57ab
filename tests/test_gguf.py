"""GGUF inputs: every type, every way to name experts and to split files, and refusals."""

import itertools
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.extras import install_command
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.containers.gguf import GGML_TYPES, read_header, split_names
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.pipeline.report.terminal import shorten_paths
from ktconvert.quantizers import reference
from rig import conversion, floats, gguf, golden, killpoint
from rig.absent import hide_package
from rig.conversion import KTCONVERT
from rig.gguf import E, H, I, file, info, model, model_metadata, pair, write
from rig.safetensors import bits_of, read_file, read_folder

EVERY = (*gguf.TYPES, "F32", "F16", "BF16")
LAYERS = [(*EVERY[at : at + 3], *EVERY)[:3] for at in range(0, len(EVERY), 3)]
Cli = Callable[..., Any]


def read_model(path: Path, config: str | None = None) -> MoeModel:
    return recognize(open_checkpoint(path, config=config))


@pytest.fixture(scope="module")
def all_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "all.gguf", model(LAYERS), model_metadata(len(LAYERS)))


def read_expected_values(path: Path) -> dict[tuple[int, str], Any]:
    """Return the values that gguf-py reads, as BF16 [E, n, k] by layer and projection."""
    by_linear = {}
    for tensor in (t for name in split_names(path.name) for t in library.GGUFReader(path.with_name(name)).tensors):
        if match := re.match(r"blk\.(\d+)\.ffn_(\w+)_exps\.", tensor.name):
            exact = library.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            by_linear[int(match[1]), match[2]] = np.stack([*map(reference.f32_to_bf16, exact)])
    return by_linear


def write_bf16(path: Path, folder: Path, write_qwen: Any) -> Path:
    """Write the values of a GGUF file as a BF16 checkpoint."""
    layers: dict[int, dict[str, Any]] = {}
    for (layer, part), bits in read_expected_values(path).items():
        layers.setdefault(layer, {})[part] = bits
    return Path(write_qwen(folder, layers))


def assert_same_weights(actual: Path, expected: Path) -> None:
    """Require equal tensors of merged outputs, and equal loose files."""
    assert read_folder(actual) == read_folder(expected)
    ours, theirs = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*.kt")} for f in (actual, expected))
    assert ours == theirs and (ours or read_folder(actual))


def test_type_sizes_equal_those_of_gguf_py() -> None:
    theirs = {kind.value: (kind.name, *size) for kind, size in library.GGML_QUANT_SIZES.items()}
    for number, ggml_type in GGML_TYPES.items():
        assert theirs[number] == (ggml_type.name, ggml_type.columns, ggml_type.nbytes)


def test_every_type_decodes_to_the_values_of_gguf_py(all_types: Path) -> None:
    """Whole linears and slices that start inside a block of 256 columns are decoded, in both orientations."""
    moe = read_model(all_types)
    assert set(moe.dtypes) == set(EVERY) and moe.shape(0) == (E, H, I)
    for (layer, part), experts in read_expected_values(all_types).items():
        for expert, bits in enumerate(experts):
            linear, (n, k) = moe.linear(layer, expert, part), bits.shape
            assert (kernels.decode(linear) == bits).all(), (layer, part)
            sliced = linear.rows(n // 2, n - 3).columns(64, k - 64)
            assert (kernels.decode(sliced) == bits[n // 2 : n - 3, 64 : k - 64]).all()
            sliced_twice = sliced.columns(64, k - 128)
            assert (kernels.decode(sliced_twice) == bits[n // 2 : n - 3, 128 : k - 64]).all()
            assert (kernels.decode(sliced_twice.T) == bits[n // 2 : n - 3, 128 : k - 64].T).all()


def test_every_type_is_converted(all_types: Path, cli: Cli, write_qwen: Any, tmp_path: Path) -> None:
    """Outputs equal those of gguf-py's values in BF16. Slices of down start at columns 64 and 128 of a block."""
    plain = write_bf16(all_types, tmp_path / "plain", write_qwen)
    loose = ("--no-merge-safetensor", "--save-backward-weights")
    for number, (method, parts, options_of_case) in enumerate((("int4", 2, ()), ("int8", 4, ()), ("int4", 2, loose))):
        ours, theirs = tmp_path / f"ours{number}", tmp_path / f"theirs{number}"
        options = ("--quant-method", method, "--threadpool-count", parts, *options_of_case)
        cli("cpu", "-i", all_types, "-o", ours, *options, "--input-type", "gguf")
        cli("cpu", "-i", plain, "-o", theirs, *options)
        assert_same_weights(ours, theirs)
    cli("verify", tmp_path / "ours0", "--against", all_types, "--full")


def test_a_missing_decoder_gives_one_sentence(all_types: Path, cli: Cli, tmp_path: Path) -> None:
    """The extra [gguf] is needed for types that C does not decode."""
    done = cli("cpu", "-i", all_types, "-o", tmp_path / "out", code=1, env=hide_package("gguf", tmp_path))
    remedy = shorten_paths(install_command("gguf"))
    assert done.stderr.rstrip().endswith(f"needs gguf, not installed here: `{remedy}`.")
    assert not (tmp_path / "out").exists()


# Files of other programs. KTCONVERT_GOLDEN=FOLDER tests more files of this kind, including split ones.
WRITTEN = [path for name, path in golden.files("*.gguf").items() if "imatrix" not in name]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_files_of_other_programs_are_converted(path: Path, cli: Cli, write_qwen: Any, tmp_path: Path) -> None:
    moe = read_model(path)
    for (layer, part), experts in read_expected_values(path).items():
        for expert, bits in enumerate(experts):
            assert (kernels.decode(moe.linear(layer, expert, part)) == bits).all()
    for source, out in ((path, "ours"), (write_bf16(path, tmp_path / "plain", write_qwen), "theirs")):
        cli("cpu", "-i", source, "-o", tmp_path / out, "--threadpool-count", 2)
    assert_same_weights(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_forward_agrees_with_the_reference_of_kt_kernel(name: str) -> None:
    """The forward runs in float64 on our values, which are rounded to BF16."""
    path = golden.FOLDER / f"gguf_{name}.gguf"
    stored, moe = bits_of(read_file(path.with_suffix(".safetensors"))), read_model(path)

    def linear(expert: int, part: str) -> Any:
        return floats.from_bits(kernels.decode(moe.linear(0, expert, part)))

    out = floats.forward(linear, *(stored[f"in.{key}"] for key in ("hidden", "topk_ids", "topk_weights")))
    expected = stored["out.float64_reference"]
    assert np.linalg.norm(out - expected) < 4e-3 * np.linalg.norm(expected)


def write_small(path: Path, change: Callable[[dict[str, Any]], object] = lambda tensors: None, **metadata: Any) -> Path:
    tensors = model([("Q8_0",) * 3] * 2)
    change(tensors)
    arch = metadata.pop("arch", "qwen3moe")
    return write(path, tensors, {**model_metadata(metadata.pop("layers", 2), arch, **metadata)}, arch)


def test_fused_and_legacy_names_give_the_same_experts(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, Any]) -> None:
        for layer in range(2):
            gate, up = (tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight")[1] for part in ("gate", "up"))
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = ("Q8_0", np.concatenate([gate, up], axis=1))

    def separate(tensors: dict[str, Any]) -> None:
        for layer in range(2):
            for part in PROJECTIONS:
                kind, stored = tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight")
                for expert in range(E):
                    tensors[f"blk.{layer}.ffn_{part}.{expert}.weight"] = (kind, stored[expert])

    files = (
        write_small(tmp_path / "s.gguf"),
        write_small(tmp_path / "f.gguf", fuse),
        write_small(tmp_path / "c.gguf", separate),
    )
    models = [*map(read_model, files)]
    for layer in range(2):
        for expert in range(E):
            for part in PROJECTIONS:
                first, *others = (kernels.decode(m.linear(layer, expert, part)) for m in models)
                assert all((first == other).all() for other in others)


def write_split(folder: Path, count: int = 3, change: Callable[[list[Any]], object] = lambda files: None) -> Path:
    """Write a model in several files; `change` changes [name, metadata, tensors] of each."""
    files = gguf.split(model([("Q8_0",) * 3] * 2), model_metadata(2), count)
    change(files)
    for name, metadata, stored in files:
        write(folder / name, stored, metadata)
    return folder


def test_a_split_is_opened_by_its_directory_and_by_any_of_its_files(tmp_path: Path) -> None:
    single_file = read_model(write_small(tmp_path / "whole.gguf"))
    folder = write_split(tmp_path / "split")
    (folder / "mmproj-F16.gguf").write_bytes(b"never read")
    for path in (folder, *folder.glob("m-*.gguf")):
        split_model = read_model(path)
        actual, expected = (kernels.decode(each.linear(1, 1, "down")) for each in (split_model, single_file))
        assert (actual == expected).all()
        assert [shard.name for shard in split_model.source.shards] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert open_checkpoint(folder).ignored == ("mmproj-F16.gguf",)


BAD_SPLITS: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "a file is missing": (lambda files: files.pop(), r"m-00003-of-00003\.gguf: missing, one of 3 files of a split"),
    "another count": (lambda files: files[1][1].update({"split.count": 4}), "split.count is 4, but .* require 3"),
    "no count": (lambda files: files[2][1].pop("split.count"), "split.count is missing"),
    "another number": (lambda files: files[1][1].update({"split.no": 2}), "split.no is 2, but .* require 1"),
    "a tensor is missing": (lambda files: files[2][2].popitem(), "split.tensors.count is 9, but .* require 8"),
    "a tensor in two files": (
        lambda files: files[2][2].update(files[0][2]),
        r"is in m-00001-of-00003\.gguf and in m-00003-of-00003",
    ),
    "two models": (
        lambda files: files.append(["n.gguf", model_metadata(2), {}]),
        r"several GGUF models \(m-00001.*, n\.gguf\)",
    ),
}


@pytest.mark.parametrize("case", BAD_SPLITS)
def test_incomplete_and_inconsistent_splits_are_refused(case: str, tmp_path: Path) -> None:
    change, message = BAD_SPLITS[case]
    with pytest.raises(InputError, match=message):
        open_checkpoint(write_split(tmp_path / "split", change=change))
    (tmp_path / "split" / "m-00001-of-00003.gguf").rename(tmp_path / "alone.gguf")
    with pytest.raises(InputError, match=r"alone\.gguf: split\.count is 3"):
        open_checkpoint(tmp_path / "alone.gguf")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of org/name, the only model in the cache; there is no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0" * 40)
    return refs.with_name("snapshots") / ("0" * 40)


def test_a_file_of_a_hub_repository_is_read_from_the_cache(snapshot: Path) -> None:
    """All files of its split come from the cache; the error for a missing one has the download command."""
    write_split(snapshot / "Q8_0")
    source = open_checkpoint("org/name:Q8_0/m-00002-of-00003.gguf")
    assert len(source.shards) == 3 and source.root == snapshot / "Q8_0"
    (snapshot / "Q8_0" / "m-00003-of-00003.gguf").unlink()
    message = r"incomplete.*`hf download org/name Q8_0/m-00001-of-00003\.gguf Q8_0/m-00002"
    with pytest.raises(InputError, match=message):
        open_checkpoint("org/name:Q8_0/m-00002-of-00003.gguf")
    with pytest.raises(UsageError, match="not the name of a file"):
        open_checkpoint("org/name:../m.gguf")
    assert not any(".gguf" in pattern for pattern in hub.FILES)  # a repository may have a terabyte of GGUF files


@pytest.mark.parametrize(
    ("arch", "family", "function"),
    [
        ("qwen3moe", "Qwen3-MoE, Qwen3-Coder", "silu(gate) * up"),
        ("llama", "Mixtral", "silu(gate) * up"),
        ("llama4", "Llama-4", "silu(gate) * up with routing weights on their input"),
        ("gemma4", "Gemma-4 26B-A4B", "gelu_tanh(gate) * up"),
        ("diffusion-gemma", "DiffusionGemma", "gelu_tanh(gate) * up"),
        ("smallthinker", "SmallThinker", "relu(gate) * up"),
        ("kimi-k3", "Kimi-K3", "4 * tanh(gate / 4) * sigmoid(gate) * 25 * tanh(up / 25)"),
    ],
)
def test_activation_follows_from_the_architecture(arch: str, family: str, function: str, tmp_path: Path) -> None:
    metadata = {"feed_forward_length": I} if arch == "llama" else {}
    moe = read_model(write_small(tmp_path / "m.gguf", arch=arch, **metadata))
    assert (moe.arch.name, moe.function_names, moe.notes) == (family, function, ())


def test_unknown_architectures_are_read_if_they_name_their_activation(tmp_path: Path) -> None:
    """An activation is never assumed."""
    moe = read_model(write_small(tmp_path / "named.gguf", arch="brandnew", hidden_activation="gelu"))
    assert moe.function_names == "gelu(gate) * up"
    assert "gguf:brandnew is not in the table of architectures; its experts are stored as in any GGUF" in moe.notes[0]
    with pytest.raises(
        UnsupportedError, match=r"gguf:brandnew .* no configuration names its activation; give --arch-f"
    ):
        read_model(write_small(tmp_path / "silent.gguf", arch="brandnew"))


def test_constants_of_kimi_k3_are_in_the_metadata(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"activation.situ_beta": 3.0, "activation.situ_linear_beta": 20.0}
    metadata |= {"expert_latent_length": H, "embedding_length": 2 * H}
    moe = read_model(write_small(tmp_path / "m.gguf", arch="kimi-k3", **metadata))
    assert moe.function_names == "3 * tanh(gate / 3) * sigmoid(gate) * 20 * tanh(up / 20)" and moe.shape(0)[1] == H
    wrong = metadata | {"activation.situ_beta": 0.0}
    message = r"kimi-k3\.activation\.situ_beta must be a finite number above 0 for layer 0, not 0\.0; correct it"
    with pytest.raises(UnsupportedError, match=message):
        read_model(write_small(tmp_path / "wrong.gguf", arch="kimi-k3", **wrong))


def remove_tensors(*parts: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: [tensors.pop(f"blk.1.ffn_{part}_exps.weight") for part in parts]


def add_bias(tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_up_exps.bias"] = ("F32", np.zeros((E, I), np.float32))


def add_scale(tensors: dict[str, Any]) -> None:
    tensors |= model([("NVFP4",) * 3]) | {"blk.0.ffn_down_exps.scale": ("F32", np.ones(E, np.float32))}


def gemma4(*scaled: str, kind: str = "Q8_0") -> Callable[[dict[str, Any]], object]:
    """Return a change to the names of Gemma-4 in llama.cpp: gate and up in one tensor, with a scale for each expert."""

    def change(tensors: dict[str, Any]) -> None:
        tensors.clear()
        tensors |= model([(kind,) * 3])
        gate, up = (tensors.pop(f"blk.0.ffn_{part}_exps.weight")[1] for part in ("gate", "up"))
        tensors["blk.0.ffn_gate_up_exps.weight"] = (kind, np.concatenate([gate, up], axis=1))
        tensors["blk.0.ffn_gate_inp.scale"] = ("F32", np.ones(H, np.float32))
        tensors |= {f"blk.0.ffn_{part}_exps.scale": ("F32", np.full(E, 2, np.float32)) for part in scaled}

    return change


@pytest.mark.parametrize(("kind", "gemma"), [("Q8_0", "gemma4"), ("NVFP4", "gemma4"), ("Q8_0", "diffusion-gemma")])
def test_the_router_scale_of_gemma4_does_not_scale_weights(kind: str, gemma: str, tmp_path: Path) -> None:
    """The experts equal those of the file without it; beside a scale of gate and up it is one of the weights."""
    files = {}
    for name, scales in (("with", ("down",)), ("without", ())):
        files[name] = write_small(tmp_path / f"{name}.gguf", gemma4(*scales, kind=kind), arch=gemma, layers=1)
    with_scale, without_scale = (read_model(files[name]) for name in ("with", "without"))
    for expert, part in itertools.product(range(E), PROJECTIONS):
        actual, expected = (kernels.decode(each.linear(0, expert, part)) for each in (with_scale, without_scale))
        assert (actual == expected).all()
    unsupported = [(gemma4("down", "gate_up", kind=kind), gemma), (gemma4("down", kind=kind), "qwen3moe")]
    for number, (change, arch) in enumerate(unsupported):
        with pytest.raises((InputError, UnsupportedError), match=r"_exps.scale.* needs none|NVFP4 with a scale"):
            read_model(write_small(tmp_path / f"{number}.gguf", change, arch=arch, layers=1))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"expert_count": 3}, "experts of layer 0 must be 2, config.json says num_experts = 3"),
    ({"embedding_length": 256}, "hidden size of layer 0 must be 512"),
    ({"expert_feed_forward_length": 512}, "expert width of layer 0 must be 256"),
    ({"change": remove_tensors("up")}, r"'blk\.1\.ffn_up_exps\.weight' is missing"),
    ({"arch": "gpt-oss"}, r"'blk\.0\.ffn_gate_exps\.bias' is missing, but the experts have biases"),
    ({"change": remove_tensors(*PROJECTIONS)}, "layer 1 has a router but no experts"),
    ({"arch": "grovemoe"}, "has no chunk experts of GroveMoE with experts"),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"change": add_bias}, r"'blk\.1\.ffn_up_exps\.bias' is a bias, and experts of Qwen3-MoE, Qwen3-Coder have none"),
    ({"hidden_activation": "xielu"}, 'qwen3moe.hidden_activation is "xielu", an unknown activation; give --arch-file'),
    ({"arch": "smallthinker", "hidden_activation": "silu"}, 'hidden_activation is "silu", but experts of SmallThinker'),
    ({"swiglu_clamp_exp": [7.0]}, r"qwen3moe\.swiglu_clamp_exp has 1 values, none for layer 1; correct it"),
    ({"swiglu_clamp_exp": float("nan")}, r"qwen3moe\.swiglu_clamp_exp must be a finite number .* not NaN"),
    ({"change": add_scale}, r"'blk\.0\.ffn_down_exps\.weight': NVFP4 with a scale .*is not an input yet; use"),
]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [(error, *row) for error, rows in ((InputError, REFUSED), (UnsupportedError, UNSUPPORTED)) for row in rows],
)
def test_contradicting_and_unsupported_models_are_refused(
    error: type[Exception], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read_model(write_small(tmp_path / "m.gguf", **changes))


def test_metadata_names_activation_and_mtp_layers(tmp_path: Path) -> None:
    """The row or the metadata names the activation; the last blocks are MTP."""
    for arch, name, activation in (
        ("kimi-k3", "situ", "softcap"),
        ("gemma4", "gelu", "gelu_tanh"),
        ("qwen3moe", "silu", "silu"),
        ("qwen3moe", "relu", "relu"),
    ):
        source = write_small(tmp_path / f"{arch}.gguf", arch=arch, hidden_activation=name)
        assert read_model(source).functions[0].activation == activation
    moe = read_model(write_small(tmp_path / "m.gguf", nextn_predict_layers=1))
    assert moe.layers == (0,) and moe.mtp_layers == (1,)
    assert any("MTP layers (layer 1) are left out" in note for note in moe.notes)


def write_hugging_face(folder: Path, **changes: Any) -> Path:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": E, "hidden_size": H}
    config |= {"hidden_act": "silu", "moe_intermediate_size": I} | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


def test_config_gives_companions_and_the_family(tmp_path: Path, cli: Cli) -> None:
    """With --config the output has config.json and tokenizer; without it, the plan reports their absence."""
    source, config_dir = write_small(tmp_path / "in" / "m.gguf"), write_hugging_face(tmp_path / "hf")
    (tmp_path / "in" / "private.txt").write_text("unrelated")
    options = ["--threadpool-count", 1, "--quant-method", "int8"]
    cli("cpu", "-i", source, "-o", tmp_path / "with", "--config", config_dir, *options)
    assert {p.name for p in (tmp_path / "with").iterdir()} >= {"config.json", "tokenizer.json"}
    config = json.loads((tmp_path / "with" / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe" and config["quantization_config"]
    done = cli("cpu", "-i", source, "-o", tmp_path / "without", *options)
    assert "the output has no config.json and no tokenizer" in done.stderr
    assert not {p.name for p in (tmp_path / "without").iterdir()} & {"config.json", "tokenizer.json", "private.txt"}
    assert read_folder(tmp_path / "with") == read_folder(tmp_path / "without")
    cli("verify", tmp_path / "with", "--against", source)
    assert "nothing to do" in cli("cpu", "-i", source, "-o", tmp_path / "with", "--config", config_dir, *options).stderr
    before = conversion.identity(config_dir)
    for output in (config_dir, config_dir / "inside"):
        done = cli("cpu", "-i", source, "-o", output, "--config", config_dir, "--overwrite", "--delete-others", code=2)
        assert f"is part of the input {config_dir}" in done.stderr
    assert conversion.identity(config_dir) == before


def test_config_can_be_a_hub_model_or_a_folder(snapshot: Path, tmp_path: Path, example: Path) -> None:
    """The config of a hub model is read without its weights; invalid ones are refused."""
    (write_hugging_face(snapshot) / "model.safetensors").unlink()
    source = write_small(tmp_path / "m.gguf")
    moe = read_model(source, "org/name")
    assert moe.source.config["model_type"] == "qwen3_moe" and moe.source.companion_root == snapshot
    with pytest.raises(InputError, match="org/other: is not in the local cache"):
        read_model(source, "org/other")
    with_gelu = read_model(source, str(write_hugging_face(tmp_path / "gelu", hidden_act="gelu")))
    assert with_gelu.function_names == "gelu(gate) * up"
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_model(source, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="--config"):
        read_model(example, str(tmp_path / "gelu"))


CONTRADICTING_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 3}, "num_hidden_layers = 3, but the header of the weights has 2 layers"),
    ({"num_experts": 3}, "num_experts = 3, but the header of the weights has expert_count = 2"),
    ({"hidden_size": 256}, "hidden_size = 256, but the header of the weights has embedding_length = 512"),
    ({"moe_intermediate_size": 300}, "= 300, but the header of the weights has expert_feed_forward_length = 256"),
    ({"intermediate_size": 2048}, "= 2048, but the header of the weights has feed_forward_length = 1024"),
    ({"first_k_dense_replace": 1}, "= 1, but the header of the weights has leading_dense_block_count = 0"),
    ({"hidden_act": "gelu"}, "hidden_act = gelu, but the header of the weights has silu"),
    (
        {"model_type": "mixtral", "num_local_experts": E, "intermediate_size": I},
        "config.json belongs to Mixtral, but the header of the weights has general.architecture = qwen3moe, Qwen3-MoE, Qwen3-Coder",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTING_CONFIGS)
def test_a_config_that_contradicts_the_metadata_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The config is beside the file or is given. The shapes of the tensors alone would not show the contradiction."""
    metadata = {"leading_dense_block_count": 0, "hidden_activation": "silu"}
    config_dir = write_hugging_face(tmp_path / "hf", **changes)
    (config_dir / "model.safetensors").unlink()
    beside = write_small(tmp_path / "m.gguf", **metadata)
    for source, config in ((beside, str(config_dir)), (write_small(config_dir / "m.gguf", **metadata), None)):
        with pytest.raises(InputError) as error:
            read_model(source, config)
        assert f"{message}; they are not of one model" in str(error.value)


@pytest.mark.parametrize(
    ("arch", "family", "changes"),
    [
        ("deepseek2", "kimi_k2", {"n_routed_experts": E}),
        ("deepseek2", "glm4_moe_lite", {"num_nextn_predict_layers": 1, "num_hidden_layers": 1}),
        ("glm4moe", "glm4v_moe", {"first_k_dense_replace": 0}),
        ("qwen3vlmoe", "qwen3_omni_moe", {}),
        ("qwen3moe", "unheard_of", {"intermediate_size": [1024, 1024]}),
        ("brandnew", "qwen3_moe", {"intermediate_size": 1024}),
    ],
)
def test_families_can_share_an_architecture(arch: str, family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source = write_small(tmp_path / "m.gguf", arch=arch, leading_dense_block_count=0)
    config_dir = write_hugging_face(tmp_path / "hf", model_type=family, **changes)
    assert read_model(source, str(config_dir)).shape(0) == (E, H, I)


def test_unsupported_commands_and_options_refuse_gguf(tmp_path: Path, cli: Cli) -> None:
    source = write_small(tmp_path / "m.gguf")
    for command, options, code, message in (
        ("gpu", ("--quant-method", "RTN"), 3, f"{source}: `ktconvert gpu` does not support GGUF"),
        ("dequantize", (), 3, "`ktconvert dequantize` does not support GGUF"),
        ("cpu", ("--non-experts", "copy"), 3, "--non-experts copy does not support GGUF"),
        ("cpu", ("--input-type", "bf16"), 5, "the experts are Q8_0"),
    ):
        assert message in cli(command, "-i", source, "-o", tmp_path / "out", *options, code=code).stderr
    report = json.loads(cli("inspect", source, "--json").stdout)
    assert (report["container"], report["expert_dtypes"]) == ("GGUF", ["Q8_0"])
    assert report["convert"] and not report["convert_gpu"]
    assert "does not support GGUF" in report["gpu"][0]["refused"]


@pytest.mark.parametrize(("kind", "warned"), [("Q4_K", True), ("Q4_1", True), ("Q5_0", False), ("Q8_0", False)])
def test_converting_few_bits_to_int4_gives_a_warning(kind: str, warned: bool, tmp_path: Path, cli: Cli) -> None:
    source = write(tmp_path / "m.gguf", model([(kind, "Q8_0", "Q8_0")]), model_metadata(1))
    for method in ("int4", "int8"):
        plan = cli("cpu", "-i", source, "-o", tmp_path / "out", "--dry-run", "--quant-method", method)
        assert ("in int4, and of 7.2 to 8.6 % in int8" in plan.stderr) == (warned and method == "int4")


def test_resume_after_a_kill_writes_the_same_bytes_from_gguf(all_types: Path, tmp_path: Path, cli: Cli) -> None:
    command = [*KTCONVERT, "cpu", "-i", all_types, "-q", "--input-type", "gguf", "-o"]
    killpoint.check_resume(lambda out: [*command, out], lambda out: cli("resume", out), tmp_path, 2 / 3)


ARCH = pair("general.architecture", "qwen3moe")
ONE = info("a", [32], 2, 0)  # 18 bytes in Q4_0
ENDLESS = (1 << 64) - 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short"),
        (b"GGUF\3\0\0\0", "too short for a GGUF header"),
        (file([], [], bytes(24), magic=b"GGML"), "not like a GGUF file"),
        (file([], [], bytes(24), magic=b"FUGG"), "big-endian"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big-endian"),
        (file([], [], bytes(24), counts=(ENDLESS, 0)), "tensors, too many for a file of"),
        (file([], [], bytes(24), counts=(0, ENDLESS)), "key-value pairs, too many for a file of"),
        (file([], [], bytes(24), counts=(1, 0)), "ends inside its header|cannot hold|begins|truncated|too short"),
        (file([struct.pack("<Q", ENDLESS) + bytes(40)], []), "bytes in a key"),
        (file([pair("a" * 1001, 1)], []), "1001 bytes in a key"),
        (file([pair("a", 1), pair("a", 1)], []), "key 'a' appears twice"),
        (file([gguf.text(b"\xff") + bytes(12)], []), "not UTF-8"),
        (file([gguf.text("a") + struct.pack("<I", 13) + bytes(30)], []), "unknown type 13"),
        (file([gguf.text("a") + struct.pack("<IQ", 8, ENDLESS) + bytes(30)], []), "bytes in 'a'"),
        (file([gguf.text("a") + struct.pack("<IIQ", 9, 8, ENDLESS) + bytes(30)], []), "strings in 'a'"),
        (file([gguf.text("a") + struct.pack("<IIQQ", 9, 8, 2, ENDLESS) + bytes(30)], []), "ends inside its header"),
        (file([gguf.text("a") + struct.pack("<IIQ", 9, 6, 1 << 62) + bytes(30)], []), "numbers in 'a'"),
        (file([gguf.text("a") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 9], []), "nested too deeply"),
        (file([pair("general.alignment", 0)], [ONE], bytes(64)), "alignment is 0"),
        (file([pair("general.alignment", 48)], [ONE], bytes(64)), "alignment is 48"),
        (file([pair("general.alignment", "x")], [ONE], bytes(64)), "alignment is x"),
        (file([], [info("a" * 1001, [32], 2, 0)], bytes(64)), "1001 bytes in a tensor's name"),
        (file([], [info("a", [1] * 5, 0, 0)], bytes(64)), "5 dimensions"),
        (file([], [info("a", [1 << 40] * 4, 0, 0)], bytes(64)), "larger than any file"),
        (file([], [info("a", [31], 2, 0)], bytes(64)), "stored in blocks of 32"),
        (file([], [ONE, info("a", [32], 2, 32)], bytes(64)), "tensor 'a' appears twice"),
        (file([], [info("a", [32], 2, 1)], bytes(64)), "not a multiple of 32"),
        (file([], [info("a", [64], 2, 0), info("b", [32], 2, 32)], bytes(64)), "'b' overlaps 'a'"),
        (file([], [ONE], bytes(17)), "truncated: tensor 'a'"),
        (file([], [info("a", [32], 2, 1 << 62)], bytes(64)), "truncated"),
        (file([], [], bytes(24), version=1), "GGUF version 1"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ],
)
def test_damaged_and_hostile_headers_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError if "version 1" in message else InputError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 500


def test_an_unknown_type_only_matters_for_experts(tmp_path: Path) -> None:
    source = write_small(tmp_path / "m.gguf")
    data = source.read_bytes()

    def change_type(name: str, kind: int) -> bytes:
        position = data.index(gguf.text(name)) + 8 + len(name)
        rank = int.from_bytes(data[position : position + 4], "little")
        position += 4 + 8 * rank
        return data[:position] + struct.pack("<I", kind) + data[position + 4 :]

    source.write_bytes(change_type("token_embd.weight", 139))
    assert read_model(source).dtypes == ("Q8_0",)
    for kind, message in ((139, "ggml type 139"), (31, "ggml type 31")):
        source.write_bytes(change_type("blk.1.ffn_up_exps.weight", kind))
        with pytest.raises(UnsupportedError, match=rf"'blk\.1\.ffn_up_exps\.weight': .*\({message}\) is not an input"):
            read_model(source)


def test_a_vocabulary_is_skipped(tmp_path: Path) -> None:
    """300,000 texts precede a tensor; one is longer than a single read. The reader makes no list of them."""
    tokens = [f"token {n}" for n in range(150_000)]
    pairs = [
        ARCH,
        pair("tokenizer.ggml.tokens", tokens),
        pair("tokenizer.ggml.merges", [*tokens[:-1], "x" * 3_000_000]),
        pair("tokenizer.chat_template", "y" * 100_000),
        gguf.text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 150_000) + bytes(600_000),
        pair("qwen3moe.block_count", 7),
    ]
    (tmp_path / "m.gguf").write_bytes(file(pairs, [ONE], bytes(18)))
    header = read_header(tmp_path / "m.gguf")
    assert header.config == {"model_type": "gguf:qwen3moe", "num_hidden_layers": 7}
    (entry,) = header.entries
    assert (entry.name, entry.dtype, entry.shape, entry.nbytes) == ("a", "Q4_0", (32,), 18)
    assert header.size - entry.start == 18


def test_identity_of_a_header_depends_only_on_the_header(tmp_path: Path) -> None:
    path, hashes = tmp_path / "m.gguf", []
    for entry, data in ((ONE, bytes(18)), (ONE, b"\1" * 18), (info("b", [32], 2, 0), bytes(18))):
        path.write_bytes(file([ARCH], [entry], data))
        hashes.append(read_header(path).sha256)
    assert hashes[0] == hashes[1] != hashes[2]
