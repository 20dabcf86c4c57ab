"""Every encoding in safetensors as an input: values are those of its formula and of the library that wrote it, whatever is
made of them is made of these values, and what cannot be read is refused.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import packed
from rig import floats, golden, reference
from rig.conversion import run_in_process
from rig.encodings import ENCODINGS, E, H, I, Stored, checkpoint, gptq_config, scheme, write, write_plain
from rig.safetensors import NUMPY, metadata_of, read_file, read_folder, write_file

BASE = "model.layers.0.mlp.experts.{}.{}_proj"
Values = dict[tuple[int, str], Any]
Written = Callable[[str], tuple[Path, Values]]
Quantization = dict[str, Any]


def model_of(folder: Path, **how: Any) -> MoeModel:
    return recognise(open_checkpoint(folder), **how)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint in an encoding and its values; written once, only to be read."""
    return functools.cache(lambda name: write(name, tmp_path_factory.mktemp("written") / "model"))


def convert(source: Path, out: Path, method: str, *more: object) -> str:
    done = run_in_process("cpu", "-i", source, "-o", out, "--quant-method", method, *more)
    assert done.exception is None, done.exception
    return str(done.stderr)


@pytest.mark.parametrize("name", ENCODINGS)
def test_values_are_those_of_the_formula(name, written, tmp_path):
    """Also where no type is aligned to them."""
    folder, values = written(name)
    model = model_of(folder)
    assert model.dtypes == (ENCODINGS[name].name,) and model.shape(0) == (E, H, I)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    odd: dict[str, Any] = {"model.odd": ("BOOL", np.ones(3, np.uint8))}
    write_file(tmp_path / "model.safetensors", {**odd, **read_file(folder / "model.safetensors")})
    unaligned = model_of(tmp_path)
    for key, bits in values.items():
        linear = model.linear(0, *key)
        assert (kernels.decode(linear) == bits).all() and (reference.decode(linear) == bits).all()
        assert (kernels.decode(linear.T) == bits.T).all()
        assert (kernels.decode(unaligned.linear(0, *key)) == bits).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_made_of_them_is_made_of_their_values(name, written, tmp_path, cli):
    """AMXINT8 in six parts, which begin inside a group, and loose AMXINT4 in three, with matrices for fine-tuning: as of a
    BF16 checkpoint; claimed, verified, inspected; 4 bits to AMXINT4 are warned of.
    """
    encoding, (source, values) = ENCODINGS[name], written(name)
    plain = write_plain(tmp_path / "plain", values)
    more = ("--threadpool-count", 6, "--save-backward-weights")
    loose = ("--threadpool-count", 3, "--no-merge-safetensor")
    for folder, out in ((source, "ours"), (plain, "theirs")):
        claim = ("--input-type", encoding.claim if out == "ours" else "bf16")
        said = {
            "int8": convert(folder, tmp_path / out, "int8", *more, *claim),
            "int4": convert(folder, tmp_path / f"{out} loose", "int4", *loose, "--save-backward-weights"),
        }
        for method, words in said.items():
            assert words.count("rounds twice") == (out == "ours")
            few = method == "int4" and out == "ours" and encoding.is_4_bit
            assert ("bits per weight already" in words and "int4 17 to 49 %; --quant-method int8" in words) == few
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert read_folder(ours) == read_folder(theirs)
    files = [
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*.kt")}
        for f in (tmp_path / "ours loose", tmp_path / "theirs loose")
    ]
    assert files[0] == files[1] and len(files[0]) == E * 3 * 3 * 2 * 2
    cli("verify", ours, "--against", source, "--full")
    assert json.loads((ours / "manifest.json").read_text())["model"]["dtypes"] == [encoding.name]
    document = json.loads((ours / "config.json").read_text())
    assert document["quantization_config"]["method"] == "AMXINT8" and "BF16 release" in (ours / "README.md").read_text()
    assert document.get("original_quantization_config") == encoding.config
    seen = json.loads(cli("inspect", source, "--json").stdout)
    assert seen["expert_dtypes"] == [encoding.name] and seen["convert"] and seen["convert_gpu"]
    done = cli("cpu", "-i", source, "-o", tmp_path / "no", "--input-type", "bf16", "--dry-run", code=5)
    assert "--input-type bf16 was given, but the experts are" in done.stderr


@pytest.mark.parametrize(
    "name", ["ct MXFP4", "MXFP8", "E8M0 of 128x128, V4", "modelopt NVFP4", "gptq 4 order", "awq", "ct 4"]
)
def test_for_a_gpu(name, written, cli, tmp_path):
    """W8A16 of the values; attention, which is quantized as well, becomes BF16, and nothing else of it is left."""
    encoding, attention = ENCODINGS[name], "model.layers.0.self_attn.q_proj"
    stored, bits = encoding.make(np.random.default_rng(9), 128, 256)
    folder, values = write(
        name, tmp_path / "model", lambda t, _: t.update({f"{attention}{s}": x for s, x in stored.items()})
    )
    model = model_of(folder)
    rest = find_non_expert_tensors(model.source, model.expert_tensor_names(), model.quantization)
    assert set(rest.tensors) == {f"{attention}.weight", "model.layers.0.mlp.gate.weight"}
    assert {*rest.dropped} == {f"{attention}{suffix}" for suffix in list(stored)[1:]}
    cli("gpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "RTN", "--quant-type", "W8A16")
    out = {name: tensor.bits for name, tensor in read_folder(tmp_path / "out").items()}
    assert (out[f"{attention}.weight"] == bits).all()
    assert [n for n in out if attention in n] == [f"{attention}.weight"]
    for key, linear in values.items():
        codes, scales = reference.quantize_groups(8, 128, linear)
        assert (out[f"{encoding.base(*key)}.weight_packed"] == packed.pack_words(8, codes)).all()
        assert (out[f"{encoding.base(*key)}.weight_scale"] == scales).all()
    cli("verify", tmp_path / "out", "--against", folder, "--no-load")
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("command", ["dequantize", "gpu"])
def test_a_config_no_longer_says_that_experts_are_fp4(command, cli, tmp_path):
    """DeepSeek-V4's has a key of its own for that, by which loaders go."""
    folder, _ = write("DeepSeek-V4", tmp_path / "model", expert_dtype="fp4", swiglu_limit=10)
    gpu = ("--quant-method", "RTN", "--quant-type", "W8A16") if command == "gpu" else ()
    cli(command, "-i", folder, "-o", tmp_path / "out", *gpu)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "expert_dtype" not in document and document["swiglu_limit"] == 10


def test_a_plan_counts_what_is_decoded_before_it_is_transposed(written):
    """Codes of 4 bits are not read transposed; FP8 codes are. Scales and zero points are unpacked."""
    for name, whole in (("DeepSeek-V4", 2 * H * I), ("MXFP8", 0), ("awq", 2 * H * I)):
        model = model_of(written(name)[0])
        assert model.memory_for_reading(0, backward=True) - model.memory_for_reading(0) == whole
        assert H * I // 8 <= model.memory_for_reading(0) <= (2 * H * I - 1 if name == "awq" else H * I // 8)


def test_another_checkpoint_format_is_another_source(tmp_path):
    """The same tensors as gptq and as gptq_v2 have other values, and a fingerprint of their own."""
    made = [
        write("gptq 4 v1", tmp_path / v, lambda _, q, v=v: q.update(checkpoint_format=v))[0]
        for v in ("gptq", "gptq_v2")
    ]
    one, two = map(model_of, made)
    assert one.storage_identity(0) != two.storage_identity(0)
    assert (kernels.decode(one.linear(0, 0, "gate")) != kernels.decode(two.linear(0, 0, "gate"))).any()


FILES = golden.libraries()
UNSAID = dict.fromkeys(("num_experts", "hidden_size", "moe_intermediate_size"))
Change = Callable[[dict[str, Any], Quantization], Any]  # of tensors and quantization_config


def weights(folder: Path) -> dict[str, Matrix]:
    """Each quantized linear of a checkpoint, by its name without ".weight"."""
    with open_checkpoint(folder) as source:
        stored = find_non_expert_tensors(source, (), source.quantization).tensors
        found = {name: w for name, w in stored.items() if isinstance(w, Weight)}
        return {name.removesuffix(".weight"): w.matrix(source, 0) for name, w in found.items()}


def float32_values(linear: Matrix) -> Any:
    """(q - z) * s before it is rounded, by the definition."""
    zeros = linear.each_zero()
    half = np.float32(1 << packed.BITS[linear.kind.name] - 1)
    return (packed.read_codes(linear).astype(np.float32) - (half if zeros is None else zeros)) * linear.each_scale()


def digest(bits: Any) -> str:
    """Of 16-bit values, where -0 counts as +0."""
    return hashlib.sha256(np.where(bits == 0x8000, 0, bits).astype("<u2").tobytes()).hexdigest()


def library(name: str, folder: Path, change: Change = lambda tensors, quantization: None, **config: Any) -> Path:
    """A library's file with its config."""
    stored: Any = {key: tensor for key, tensor in read_file(FILES[name]).items() if not key.endswith(".expected")}
    quantization = json.loads(metadata_of(FILES[name])["quantization_config"])
    change(stored, quantization)
    return checkpoint(folder, stored, quantization, **UNSAID, **config)


def hashes_of(name: str) -> dict[str, Any]:
    return dict(json.loads(metadata_of(FILES[name])["expected_sha256"]))


def same_values(file: str, folder: Path) -> None:
    """All linears of a folder have the values of this library's file. Those of integers in float32: rounded to the
    library's own dtype, they have the hash of its own values; and ours are those in float32, rounded once to BF16.
    """
    hashes, found = hashes_of(file), weights(folder)
    stored = read_file(FILES[file])
    assert found.keys() == {name for name in hashes if any(key.startswith(f"{name}.") for key in stored)}
    for name, linear in found.items():
        bits, about = kernels.decode(linear), hashes[name]
        if linear.kind.name in packed.BITS:
            values = float32_values(linear)
            assert (bits == reference.f32_to_bf16(values)).all()
            bits = values.astype(np.float16).view(np.uint16) if about["dtype"] == "F16" else bits
        assert list(bits.shape) == about["shape"] and digest(bits) == about["sha256"]


@pytest.mark.parametrize("name", [name for name in FILES if name != "gptoss_mxfp4"])
def test_values_are_those_of_the_library(name, tmp_path):
    same_values(name, library(name, tmp_path))


@pytest.mark.parametrize("name", FILES)
def test_dequantized_to_the_values_of_the_library(name, tmp_path):
    """Also the names and shapes, for gpt-oss those of transformers; values that the library has in float16 are above."""
    family = {"gptoss": "gpt_oss", "deepseek": "deepseek_v4", "minimax": "minimax_m3_vl"}.get(
        name.split("_")[0], "qwen3_moe"
    )
    folder, out = library(name, tmp_path / "in", model_type=family, num_hidden_layers=1), tmp_path / "out"
    for words in (("dequantize", folder, out), ("verify", out, "--against", folder)):
        assert (done := run_in_process(*words)).exception is None, done.exception
    hashes = hashes_of(name)
    tensors = {key.removesuffix(".weight"): tensor for key, tensor in read_folder(out).items()}
    assert tensors and all(stem in hashes or stem.endswith("_bias") for stem in tensors)
    for stem in tensors.keys() & hashes.keys():
        assert (tensors[stem].dtype, list(tensors[stem].shape)) == ("BF16", hashes[stem]["shape"])
        if hashes[stem]["dtype"] == "BF16":
            assert digest(tensors[stem].bits) == hashes[stem]["sha256"], stem


# kt-kernel's own inputs: the forward in float64 on our decoded weights is that of the file.
NATIVE: dict[str, tuple[str, Any, str, str, float]] = {
    "RAWINT4_kimi": ("language_model.model.", scheme(4, 32), "qwen3_moe", "INT4", 4e-3),  # BF16's rounding of a weight
    "GPTQ_INT4_default": ("model.", gptq_config(4, 128, sym=True), "qwen3_moe", "GPTQ_INT4", 4e-3),
    "FP8_PERCHANNEL_default": ("model.", None, "qwen3_moe", "F8_E4M3", 4e-3),
    "MXFP4_v4": ("", None, "deepseek_v4", "MXFP4", 1e-12),
    "MXFP8_m3": ("", None, "minimax_m3_vl", "MXFP8", 1e-12),
}


@pytest.mark.parametrize("name", NATIVE)
def test_inputs_of_kt_kernel(name, tmp_path):
    prefix, quantization, family, dtype, near = NATIVE[name]
    stored = read_file(golden.FOLDER / f"native_{name}.safetensors")
    tensors: Any = {n: t for n, t in stored.items() if n.startswith(prefix) and not n.startswith(("in.", "out."))}
    model = model_of(checkpoint(tmp_path, tensors, quantization, model_type=family, **UNSAID))
    assert model.dtypes == (dtype,)

    def linear(expert: int, projection: str) -> Any:
        return floats.from_bits(kernels.decode(model.linear(0, expert, projection)))

    given = (stored[f"in.{name}"].bits for name in ("hidden", "topk_ids", "topk_weights"))
    out, expected = floats.forward(linear, *given), stored["out.float64_reference"].bits
    assert np.linalg.norm(out - expected) <= near * np.linalg.norm(expected)


ASYMMETRIC, SYMMETRIC = "gptq_4bit_g128_asym_v1", "gptq_4bit_g128_sym_descact_v1"


def to_v2(stored: dict[str, Any], quantization: Quantization) -> None:
    """4-bit codes of checkpoint_format gptq, as gptq_v2 stores them."""
    quantization["checkpoint_format"] = quantization["format"] = "gptq_v2"
    for name, tensor in stored.items():
        if name.endswith("qzeros"):
            points = tensor.bits.view(np.uint32) + np.uint32(0x11111111)
            stored[name] = tensor._replace(data=points.tobytes())


VERSIONS: dict[str, Change] = {"gptq": lambda stored, quantization: None, "gptq_v2": to_v2}


def in_its_own_file(name: str, folder: Path, said: Quantization | None = None, version="gptq", **kept: Any) -> Path:
    """A library's file with a quantize_config.json, what the library says or `said`; kept: what config.json still says."""
    moved: Quantization = {}

    def move(stored: dict[str, Any], quantization: Quantization) -> None:
        VERSIONS[version](stored, quantization)
        moved.update(quantization)
        quantization.clear()
        quantization.update(kept)

    library(name, folder, move)
    (folder / "quantize_config.json").write_text(json.dumps(moved if said is None else said))
    return folder


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("gptq")])
@pytest.mark.parametrize("kept", [{}, {"quant_method": "gptq", "bits": 0}], ids=["alone", "beside another"])
def test_quantize_config_json_is_read_as_config_json_is(name, kept, tmp_path):
    same_values(name, in_its_own_file(name, tmp_path, **kept))


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_of_gptq(version, tmp_path):
    """Of the zero points: in config.json, or in quantize_config.json, where it may be all that it says and is the remedy
    where nothing says it. Zero points of symmetric codes need none: all of them are in the middle.
    """
    same_values(ASYMMETRIC, library(ASYMMETRIC, tmp_path / "said", VERSIONS[version]))
    usual = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    folder = in_its_own_file(ASYMMETRIC, tmp_path / "own", {}, version, **usual)
    with pytest.raises(InputError, match="no config says"):
        weights(folder)
    (folder / "quantize_config.json").write_text(json.dumps({"checkpoint_format": version}))
    same_values(ASYMMETRIC, folder)

    def unsaid(stored: dict[str, Any], quantization: Quantization) -> None:
        VERSIONS[version](stored, quantization)
        for key in ("checkpoint_format", "format"):
            quantization.pop(key, None)

    same_values(SYMMETRIC, library(SYMMETRIC, tmp_path / "symmetric", unsaid))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"checkpoint_format": "gptq_v2"}, "says checkpoint_format gptq_v2, and config.json says gptq"),
        ({"desc_act": True}, "says desc_act true, and config.json says false"),
        ({"sym": True}, "says sym true, and config.json says false"),
        ({"bits": 8}, "says bits 8, and config.json says 4"),
        ({"group_size": 64}, "says group_size 64, and config.json says 128"),
        ({"quant_method": "awq"}, "says quant_method awq, and config.json says gptq"),
    ],
)
def test_configs_that_contradict_each_other(said, words, tmp_path, cli):
    folder = in_its_own_file(ASYMMETRIC, tmp_path / "in", said, **gptq_config(4, 128))
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--dry-run", code=5)
    assert f"{folder / 'quantize_config.json'}: {words}; correct the one that is wrong" in done.stderr


def test_the_output_does_not_say_how_its_source_was_quantized(tmp_path, written, cli):
    """Loaders would believe quantize_config.json: it is kept under another name."""
    one, two = written("gptq 4 v2")[0], tmp_path / "two"
    write("gptq 4 v2", two, lambda _, quantization: quantization.clear())
    (two / "quantize_config.json").write_text(json.dumps(ENCODINGS["gptq 4 v2"].config))
    for folder, out in ((one, tmp_path / "one-out"), (two, tmp_path / "two-out")):
        convert(folder, out, "int8", "--threadpool-count", 1)
        cli("verify", out, "--against", folder, "--full")
    assert read_folder(tmp_path / "one-out") == read_folder(tmp_path / "two-out")
    assert [path.name for path in (tmp_path / "two-out").glob("quant*")] == ["quantize_config.source.json"]


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n.startswith(("ct 4", "ct 8", "ct W", "gptq", "awq"))])
def test_without_a_config_the_shapes_decide(name, tmp_path):
    """Where they can: how GPTQ stores zero points is no shape."""
    folder, values = write(name, tmp_path, lambda _, quantization: quantization.clear())
    if "gptq" in name and name != "gptq 4":
        with pytest.raises(InputError, match="no config says whether it holds zero points less one"):
            model_of(folder).linear(0, 1, "down")
    else:
        assert (kernels.decode(model_of(folder).linear(0, 1, "down")) == values[1, "down"]).all()


Spoil = Callable[[Stored, Quantization, str], Any]  # tensors, quantization_config, how one weight's names begin


def config(**keys: Any) -> Spoil:
    return lambda tensors, quantization, base: quantization.update(keys)


def tensor(suffix: str, dtype: str | None = None, shape: tuple[int, ...] = (), value: float = 0) -> Spoil:
    """A tensor of one weight is missing, or other numbers of this dtype and shape."""

    def spoil(tensors: Stored, quantization: Quantization, base: str) -> None:
        tensors.pop(f"{base}{suffix}", None)
        if dtype is not None:
            tensors[f"{base}{suffix}"] = (dtype, np.full(shape, value, NUMPY[dtype]))

    return spoil


def lost(suffix: str) -> Spoil:
    """No weight has this tensor."""
    return lambda tensors, quantization, base: [tensors.pop(name) for name in [*tensors] if name.endswith(suffix)]


def value(suffix: str, at: Any, to: Any) -> Spoil:
    """One number of a tensor."""
    return lambda tensors, quantization, base: tensors[f"{base}{suffix}"][1].__setitem__(at, to)


def of_three_bits(tensors: Stored, quantization: Quantization, base: str) -> None:
    quantization["bits"] = 3
    for name, (_, held) in tensors.items():
        if name.endswith(("qweight", "qzeros")):
            rows, columns = held.shape
            shape = (rows * 3 // 4, columns) if name.endswith("qweight") else (rows, columns * 3 // 4)
            tensors[name] = ("I32", np.zeros(shape, np.int32))


def of_two_encodings_without_codes(tensors: Stored, quantization: Quantization, base: str) -> None:
    tensor(".qweight")(tensors, quantization, base)
    tensor(".weight_scale", "F16", (I, 8))(tensors, quantization, base)


def nothing_but_scales_of_inputs(tensors: Stored, quantization: Quantization, base: str) -> None:
    lost("_proj.weight")(tensors, quantization, base)
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    tensors[f"{base}.input_scale"] = ("F32", np.zeros((), np.float32))


REFUSED: list[tuple[str, Spoil, str]] = [
    ("DeepSeek-V4", tensor(".scale"), r"1\.w1\.weight' is I8, and its scales \(.*experts\.1\.w1\.scale\) are missing"),
    ("DeepSeek-V4", tensor(".weight"), r"is a scale whose weight .* is missing"),
    ("DeepSeek-V4", tensor(".scale", "F8_E8M0", (I, 4)), r"4\] does not fit .* with a scale for each 32 columns"),
    ("ct MXFP4", tensor(".weight_packed", "U8", (I * H // 2,)), "must be a matrix of bytes"),
    ("ct MXFP4", tensor(".weight_scale", "BF16", (I, H // 32)), "is INT4 but .*weight_shape is missing"),
    ("MXFP8", tensor(".weight_scale_inv", "U8", (I, 7)), "does not fit"),
    ("ct NVFP4", tensor(".weight_global_scale"), r"is NVFP4 but .*weight_(global_scale|scale_2) is missing"),
    ("modelopt NVFP4", tensor(".weight_global_scale", "F32", (1,), 1), "needs none"),
    ("modelopt NVFP4", tensor(".weight_scale_2", "F32", (I,), 1), "must be one F32"),
    ("modelopt NVFP4", tensor(".weight_scale", "U8", (I, H // 32)), "needs none"),
    ("modelopt NVFP4", nothing_but_scales_of_inputs, "0.gate_proj.weight' is missing, though layer 0 has other exp"),
    ("ct 4", tensor(".weight_packed"), "is a scale whose weight .*weight_packed' is missing"),
    ("ct 4", tensor(".weight_scale"), "weight_packed' is INT4 but .*weight_scale is missing"),
    ("ct 4", tensor(".weight_scale", "BF16", (I, 4)), "does not fit .*384 x 256 in groups of 32"),
    ("ct 4", tensor(".weight_scale", "U8", (I, 8)), "scales must be F32, BF16 or F16"),
    ("ct 4", tensor(".weight_shape", "F32", (2,)), "must be two I64"),
    ("ct 4", tensor(".weight_packed", "I32", (I, 64)), "must be|has shape"),
    ("ct 4", tensor(".weight_zero_point", "I32", (47, 8)), r"must be I32 of shape \[48, 8\]"),
    ("ct 4", tensor(".weight_g_idx", "I32", (H // 2,)), r"must be I32 of shape \[256\]"),
    ("ct 4 zeros", lost("weight_zero_point"), "packed' has zero points by its config, but .*zero_point is missing"),
    ("ct 4 order", lost("weight_g_idx"), r"order of its columns \(actorder\) by its config, but .*g_idx is missing"),
    ("ct 4 order", tensor(".weight_g_idx"), r"1\.gate_proj\.weight_g_idx is missing"),
    ("ct W8A8", lost("weight_zero_point"), "weight' has zero points by its config, but .*zero_point is missing"),
    ("ct W8A8", tensor(".weight_zero_point", "I32", (I, 1)), "zero points must be I8"),
    ("awq", tensor(".qzeros"), r"qweight' is AWQ but .*gate_proj.qzeros is missing"),
    ("awq", tensor(".g_idx", "I32", (H,)), "g_idx' scales .*, which is AWQ and needs none"),
    ("awq", config(group_size=32), "384 x 256 in groups of 32; check group_size"),
    ("awq", config(group_size=96), "in groups of 96"),
    ("awq", tensor(".qweight", "I32", (48,)), "must be a matrix|does not fit"),
    ("gptq 4", config(quant_method="awq"), "qzeros is missing"),
    ("gptq 4 v1", config(bits=8), "codes of 8 bits; check bits"),
    ("gptq 4", config(dynamic={"lm_head": {"bits": 8}}), "codes of 4 or 8 bits; check bits"),
    ("gptq 4 v1", tensor(".scales", "F16", (8, I // 2)), "does not fit"),
    ("gptq 4 v1", tensor(".qzeros", "I32", (8, 47)), r"must be I32 of shape \[8, 48\]"),
    ("gptq 4 v1", tensor(".g_idx", "I64", (H,)), r"must be I32 of shape \[256\]"),
    ("gptq 4 v1", tensor(".qweight", "I32", (0, I)), "must be a matrix of words"),
    ("gptq 4 v1", of_two_encodings_without_codes, "is a scale whose weight .* is missing"),
    ("gptq 4 v1", lost("qzeros"), r"qweight' has zero points \(sym: false\) by its config, but .*qzeros is missing"),
    ("gptq 4 v1", tensor(".qzeros"), r"1\.gate_proj\.qweight'.*1\.gate_proj\.qzeros is missing"),
    ("gptq 4 order", lost("g_idx"), r"an order of its columns \(desc_act\) by its config, but .*g_idx is missing"),
    ("gptq 4 v2 order", tensor(".g_idx"), r"1\.gate_proj\.g_idx is missing, and .*0\.gate_proj\.g_idx' is there"),
    ("gptq 4 v1", config(checkpoint_format=None), r'no config says .*"gptq"} \(less one.*"gptq_v2"} \(as they are\)'),
]
UNSUPPORTED: list[tuple[str, Spoil, str]] = [
    ("awq", config(version="gemv"), "order of AWQ's version 'gemv' is not an input; use"),
    ("awq", config(bits=8), "AWQ with 8 bits is not an input; use"),
    ("awq", tensor(".qweight", "I64", (256, 24)), "is not an input yet"),
    ("awq", config(quant_method="gptq"), "'gemm' of GPTQ is not"),
    ("gptq 4 v1", config(checkpoint_format="marlin"), "checkpoint_format 'marlin' of GPTQ is not an input; use"),
    ("gptq 4 v1", config(is_marlin_format=True), "'marlin'"),
    ("gptq 4 v1", of_three_bits, "GPTQ with 3 bits is not an input; use"),
    ("gptq 4 v1", tensor(".scales", "F16", (7, I)), "do not divide"),
    ("ct 4", tensor(".weight_scale", "BF16", (I, 3)), "do not divide the 256 columns"),
    ("ct 4", tensor(".weight_packed", "I64", (I, 16)), "is not an input yet"),
    ("ct 4", config(quant_method="awq"), "is not an input yet"),
]


@pytest.mark.parametrize(
    ("error", "name", "spoil", "words"),
    [(error, *row) for error, rows in ((InputError, REFUSED), (UnsupportedError, UNSUPPORTED)) for row in rows],
)
def test_what_cannot_be_read_is_refused(error, name, spoil, words, tmp_path):
    base = ENCODINGS[name].base(1, "gate")
    folder, _ = write(name, tmp_path, lambda tensors, quantization: spoil(tensors, quantization, base))
    with pytest.raises(error, match=words) as caught:
        model_of(folder)
    assert "tensor '" in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def too_large(tensors: Stored, quantization: Quantization, base: str) -> None:
    value(".scale", (5, 4), 254)(tensors, quantization, base)
    value(".weight", (5, slice(64, 80)), 0x11)(tensors, quantization, base)  # 0.5 times 2^127
    value(".weight", (5, 70), 0x70)(tensors, quantization, base)  # 6 times 2^127, in column 141


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("DeepSeek-V4", value(".scale", (3, 2), 255), "w1.scale': scale [3, 2] is nan"),
        ("FP8 in blocks", value(".weight_scale_inv", (2, 1), np.nan), "weight_scale_inv': scale [2, 1] is nan"),
        ("FP8 in blocks", value(".weight_scale_inv", (2, 1), np.inf), "weight_scale_inv': scale [2, 1] is inf"),
        ("DeepSeek-V4", too_large, "holds a value that is not finite at row 5, column 141"),
        ("MXFP8", value(".weight_scale_inv", (3, 2), 255), "weight_scale_inv': scale [3, 2] is nan"),
        ("modelopt NVFP4", value(".weight_scale", (3, 2), 0x7F), "weight_scale': scale [3, 2] is nan"),
        ("ct NVFP4", value(".weight_global_scale", 0, 0), "weight_global_scale' divides scales and is 0"),
        ("ct NVFP4", value(".weight_global_scale", 0, np.nan), "weight_global_scale': scale [0, 0] is nan"),
        ("ct NVFP4", value(".weight_global_scale", 0, np.inf), "weight_global_scale': scale [0, 0] is inf"),
        ("awq", value(".scales", (2, 7), np.inf), "gate_proj.scales': scale [2, 7] is inf"),
        ("ct 4 order", value(".weight_g_idx", slice(None), 0), "g_idx' must name each of 2 groups for 128 columns"),
        ("ct 4", value(".weight_shape", 1, H - 1), ".weight_shape' says [384, 255], its codes are for [384, 256]"),
    ],
)
def test_what_is_found_when_a_weight_is_read(name, spoil, words, tmp_path):
    """The command names the tensor, and writes nothing."""
    base = ENCODINGS[name].base(1, "gate")
    folder, _ = write(name, tmp_path / "model", lambda tensors, quantization: spoil(tensors, quantization, base))
    command = ("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "int8", "--threadpool-count", 1)
    error = run_in_process(*command).exception
    assert isinstance(error, InputError) and words in str(error), error
    assert base in str(error) and not (tmp_path / "out").exists()


def test_an_order_of_which_nothing_is_set_is_none(tmp_path):
    unset = tensor(".weight_g_idx", "I32", (H,), -1)
    folder, _ = write("ct 4", tmp_path, lambda t, _: [unset(t, {}, BASE.format(e, "gate")) for e in range(E)])
    assert model_of(folder).linear(0, 1, "gate").group_of is None


def test_gpt_oss_is_refused(tmp_path, cli):
    """Its biases, though its weights can be read."""
    folder = library("gptoss_mxfp4", tmp_path, model_type="gpt_oss")
    seen = json.loads(cli("inspect", folder, "--json").stdout)
    assert seen["expert_dtypes"] == ["MXFP4"] and "biases" in seen["refused"]
    assert "not possible: gpt-oss: its experts have biases" in cli("inspect", folder).stdout
    for command in (("cpu", "-i"), ("gpu", "--quant-method", "RTN", "-i")):
        done = cli(*command, folder, "-o", tmp_path / "out", code=3)
        assert "biases and a clamped activation" in done.stderr
