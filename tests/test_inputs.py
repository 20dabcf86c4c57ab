"""Each encoding of safetensors as an input.

Values equal those of the formula and of the library that wrote the file, outputs are made from these values, and files
that cannot be read are refused.
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
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.sources.source import open_checkpoint
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


def open_model(folder: Path, **options: Any) -> MoeModel:
    """Recognise the model of a folder."""
    return recognize(open_checkpoint(folder), **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function that writes a checkpoint in an encoding once, and returns its path and values."""
    return functools.cache(lambda name: write(name, tmp_path_factory.mktemp("written") / "model"))


def convert(source: Path, out: Path, method: str, *more: object) -> str:
    """Convert, require success, and return stderr."""
    result = run_in_process("cpu", "-i", source, "-o", out, "--quant-method", method, *more)
    assert result.exception is None, result.exception
    return str(result.stderr)


@pytest.mark.parametrize("name", ENCODINGS)
def test_values_are_those_of_the_formula(name, written, tmp_path):
    """Values at addresses that are not aligned for any type are the same."""
    folder, values = written(name)
    model = open_model(folder)
    assert model.dtypes == (ENCODINGS[name].name,) and model.shape(0) == (E, H, I)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    odd: dict[str, Any] = {"model.odd": ("BOOL", np.ones(3, np.uint8))}
    write_file(tmp_path / "model.safetensors", {**odd, **read_file(folder / "model.safetensors")})
    unaligned = open_model(tmp_path)
    for key, bits in values.items():
        linear = model.linear(0, *key)
        assert (kernels.decode(linear) == bits).all() and (reference.decode(linear) == bits).all()
        assert (kernels.decode(linear.T) == bits.T).all()
        assert (kernels.decode(unaligned.linear(0, *key)) == bits).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_outputs_equal_those_of_the_decoded_values(name, written, tmp_path, cli):
    """AMXINT8 in six NUMA slices, which begin inside a group, and loose AMXINT4 in three, with backward weights.

    The output equals that of a BF16 checkpoint; --input-type, verify and inspect accept it; 4 bits to AMXINT4 give a
    warning.
    """
    encoding, (source, values) = ENCODINGS[name], written(name)
    plain = write_plain(tmp_path / "plain", values)
    sliced = ("--threadpool-count", 6, "--save-backward-weights")
    loose = ("--threadpool-count", 3, "--no-merge-safetensor")
    for folder, out in ((source, "ours"), (plain, "theirs")):
        claim = ("--input-type", encoding.claim if out == "ours" else "bf16")
        messages = {
            "int8": convert(folder, tmp_path / out, "int8", *sliced, *claim),
            "int4": convert(folder, tmp_path / f"{out} loose", "int4", *loose, "--save-backward-weights"),
        }
        for method, message in messages.items():
            assert message.count("rounds twice") == (out == "ours")
            is_4_bit = method == "int4" and out == "ours" and encoding.is_4_bit
            assert ("an error of 17 to 49 % in int4, and of 7.2 to 8.6 % in int8" in message) == is_4_bit
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
    report = json.loads(cli("inspect", source, "--json").stdout)
    assert report["expert_dtypes"] == [encoding.name] and report["convert"] and report["convert_gpu"]
    result = cli("cpu", "-i", source, "-o", tmp_path / "no", "--input-type", "bf16", "--dry-run", code=5)
    assert "--input-type bf16 was given, but the experts are" in result.stderr


@pytest.mark.parametrize(
    "name", ["ct MXFP4", "MXFP8", "E8M0 of 128x128, V4", "modelopt NVFP4", "gptq 4 order", "awq", "ct 4"]
)
def test_gpu_outputs_hold_the_decoded_values(name, written, cli, tmp_path):
    """W8A16 holds the values; attention, which is also quantized, becomes BF16 without its other tensors."""
    encoding, attention = ENCODINGS[name], "model.layers.0.self_attn.q_proj"
    stored, bits = encoding.make(np.random.default_rng(9), 128, 256)
    folder, values = write(
        name, tmp_path / "model", lambda t, _: t.update({f"{attention}{s}": x for s, x in stored.items()})
    )
    model = open_model(folder)
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
def test_an_output_config_does_not_declare_fp4_experts(command, cli, tmp_path):
    """DeepSeek-V4's config has a key for FP4 experts, which loaders follow."""
    folder, _ = write("DeepSeek-V4", tmp_path / "model", expert_dtype="fp4", swiglu_limit=10)
    gpu = ("--quant-method", "RTN", "--quant-type", "W8A16") if command == "gpu" else ()
    cli(command, "-i", folder, "-o", tmp_path / "out", *gpu)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "expert_dtype" not in document and document["swiglu_limit"] == 10


def test_a_plan_counts_memory_for_transposing(written):
    """4-bit codes are not read transposed, FP8 codes are. Scales and zero points are unpacked."""
    for name, decoded_bytes in (("DeepSeek-V4", 2 * H * I), ("MXFP8", 0), ("awq", 2 * H * I)):
        model = open_model(written(name)[0])
        assert model.memory_for_reading(0, backward=True) - model.memory_for_reading(0) == decoded_bytes
        assert H * I // 8 <= model.memory_for_reading(0) <= (2 * H * I - 1 if name == "awq" else H * I // 8)


def test_checkpoint_formats_have_different_fingerprints(tmp_path):
    """The same tensors have different values as gptq and as gptq_v2, and a different fingerprint."""
    folders = [
        write("gptq 4 v1", tmp_path / v, lambda _, q, v=v: q.update(checkpoint_format=v))[0]
        for v in ("gptq", "gptq_v2")
    ]
    one, two = map(open_model, folders)
    assert one.storage_identity(0) != two.storage_identity(0)
    assert (kernels.decode(one.linear(0, 0, "gate")) != kernels.decode(two.linear(0, 0, "gate"))).any()


FILES = golden.libraries()
UNSET_SIZES = dict.fromkeys(("num_experts", "hidden_size", "moe_intermediate_size"))
Change = Callable[[dict[str, Any], Quantization], Any]  # takes tensors and quantization_config


def read_linears(folder: Path) -> dict[str, Matrix]:
    """Return each quantized linear of a checkpoint, by its name without ".weight"."""
    with open_checkpoint(folder) as source:
        stored = find_non_expert_tensors(source, (), source.quantization).tensors
        quantized = {name: w for name, w in stored.items() if isinstance(w, Weight)}
        return {name.removesuffix(".weight"): w.read_linear(source, 0) for name, w in quantized.items()}


def float32_values(linear: Matrix) -> Any:
    """Return (q - z) * s before it is rounded, by the definition."""
    zeros = linear.element_zeros()
    half = np.float32(1 << packed.BITS[linear.kind.name] - 1)
    return (packed.read_codes(linear).astype(np.float32) - (half if zeros is None else zeros)) * linear.element_scales()


def digest(bits: Any) -> str:
    """Return a hash of 16-bit values, with -0 replaced by +0."""
    return hashlib.sha256(np.where(bits == 0x8000, 0, bits).astype("<u2").tobytes()).hexdigest()


def write_library_file(
    name: str, folder: Path, change: Change = lambda tensors, quantization: None, **config: Any
) -> Path:
    """Write a library's file with its config."""
    stored: Any = {key: tensor for key, tensor in read_file(FILES[name]).items() if not key.endswith(".expected")}
    quantization = json.loads(metadata_of(FILES[name])["quantization_config"])
    change(stored, quantization)
    return checkpoint(folder, stored, quantization, **UNSET_SIZES, **config)


def read_hashes(name: str) -> dict[str, Any]:
    """Return the hashes of the library's own values."""
    return dict(json.loads(metadata_of(FILES[name])["expected_sha256"]))


def check_values(file: str, folder: Path) -> None:
    """Assert that all linears of a folder have the values of a library's file.

    Values of integers are compared in float32: rounded to the library's dtype, they have the hash of its own values,
    and our values are those in float32, rounded once to BF16.
    """
    hashes, linears = read_hashes(file), read_linears(folder)
    stored = read_file(FILES[file])
    assert linears.keys() == {name for name in hashes if any(key.startswith(f"{name}.") for key in stored)}
    for name, linear in linears.items():
        bits, expected = kernels.decode(linear), hashes[name]
        if linear.kind.name in packed.BITS:
            values = float32_values(linear)
            assert (bits == reference.f32_to_bf16(values)).all()
            bits = values.astype(np.float16).view(np.uint16) if expected["dtype"] == "F16" else bits
        assert list(bits.shape) == expected["shape"] and digest(bits) == expected["sha256"]


@pytest.mark.parametrize("name", [name for name in FILES if name != "gptoss_mxfp4"])
def test_values_are_those_of_the_library(name, tmp_path):
    check_values(name, write_library_file(name, tmp_path))


@pytest.mark.parametrize("name", FILES)
def test_dequantize_gives_the_values_of_the_library(name, tmp_path):
    """Names and shapes are compared, too, for gpt-oss those of transformers; float16 values are tested above."""
    family = {"gptoss": "gpt_oss", "deepseek": "deepseek_v4", "minimax": "minimax_m3_vl"}.get(
        name.split("_")[0], "qwen3_moe"
    )
    folder, out = write_library_file(name, tmp_path / "in", model_type=family, num_hidden_layers=1), tmp_path / "out"
    for arguments in (("dequantize", folder, out), ("verify", out, "--against", folder)):
        assert (result := run_in_process(*arguments)).exception is None, result.exception
    hashes = read_hashes(name)
    tensors = {key.removesuffix(".weight"): tensor for key, tensor in read_folder(out).items()}
    assert tensors and all(stem in hashes or stem.endswith("_bias") for stem in tensors)
    for stem in tensors.keys() & hashes.keys():
        assert (tensors[stem].dtype, list(tensors[stem].shape)) == ("BF16", hashes[stem]["shape"])
        if hashes[stem]["dtype"] == "BF16":
            assert digest(tensors[stem].bits) == hashes[stem]["sha256"], stem


# Inputs of kt-kernel: the float64 forward with our decoded weights equals that of the file.
NATIVE: dict[str, tuple[str, Any, str, str, float]] = {
    "RAWINT4_kimi": ("language_model.model.", scheme(4, 32), "qwen3_moe", "INT4", 4e-3),  # BF16's rounding of a weight
    "GPTQ_INT4_default": ("model.", gptq_config(4, 128, sym=True), "qwen3_moe", "GPTQ_INT4", 4e-3),
    "FP8_PERCHANNEL_default": ("model.", None, "qwen3_moe", "F8_E4M3", 4e-3),
    "MXFP4_v4": ("", None, "deepseek_v4", "MXFP4", 1e-12),
    "MXFP8_m3": ("", None, "minimax_m3_vl", "MXFP8", 1e-12),
}


@pytest.mark.parametrize("name", NATIVE)
def test_inputs_of_kt_kernel_have_its_values(name, tmp_path):
    prefix, quantization, family, dtype, tolerance = NATIVE[name]
    stored = read_file(golden.FOLDER / f"native_{name}.safetensors")
    tensors: Any = {n: t for n, t in stored.items() if n.startswith(prefix) and not n.startswith(("in.", "out."))}
    model = open_model(checkpoint(tmp_path, tensors, quantization, model_type=family, **UNSET_SIZES))
    assert model.dtypes == (dtype,)

    def linear(expert: int, projection: str) -> Any:
        return floats.from_bits(kernels.decode(model.linear(0, expert, projection)))

    inputs = (stored[f"in.{name}"].bits for name in ("hidden", "topk_ids", "topk_weights"))
    out, expected = floats.forward(linear, *inputs), stored["out.float64_reference"].bits
    assert np.linalg.norm(out - expected) <= tolerance * np.linalg.norm(expected)


ASYMMETRIC, SYMMETRIC = "gptq_4bit_g128_asym_v1", "gptq_4bit_g128_sym_descact_v1"


def to_v2(stored: dict[str, Any], quantization: Quantization) -> None:
    """Store 4-bit codes of checkpoint_format gptq as gptq_v2 stores them."""
    quantization["checkpoint_format"] = quantization["format"] = "gptq_v2"
    for name, tensor in stored.items():
        if name.endswith("qzeros"):
            points = tensor.bits.view(np.uint32) + np.uint32(0x11111111)
            stored[name] = tensor._replace(data=points.tobytes())


VERSIONS: dict[str, Change] = {"gptq": lambda stored, quantization: None, "gptq_v2": to_v2}


def write_quantize_config(
    name: str, folder: Path, declared: Quantization | None = None, version="gptq", **kept: Any
) -> Path:
    """Write a library's file with a quantize_config.json, from the library or `declared`.

    kept: entries that remain in config.json.
    """
    moved: Quantization = {}

    def move(stored: dict[str, Any], quantization: Quantization) -> None:
        VERSIONS[version](stored, quantization)
        moved.update(quantization)
        quantization.clear()
        quantization.update(kept)

    write_library_file(name, folder, move)
    (folder / "quantize_config.json").write_text(json.dumps(moved if declared is None else declared))
    return folder


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("gptq")])
@pytest.mark.parametrize("kept", [{}, {"quant_method": "gptq", "bits": 0}], ids=["alone", "beside another"])
def test_quantize_config_json_is_read_like_config_json(name, kept, tmp_path):
    check_values(name, write_quantize_config(name, tmp_path, **kept))


@pytest.mark.parametrize("version", VERSIONS)
def test_gptq_versions_are_read_from_either_config(version, tmp_path):
    """The version of zero points is read from config.json, or from quantize_config.json, which may have nothing else.

    If no file has it, quantize_config.json is the remedy. Symmetric codes need no version: all their zero points are in
    the middle.
    """
    check_values(ASYMMETRIC, write_library_file(ASYMMETRIC, tmp_path / "declared", VERSIONS[version]))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    folder = write_quantize_config(ASYMMETRIC, tmp_path / "own", {}, version, **config)
    with pytest.raises(InputError, match="no config states"):
        read_linears(folder)
    (folder / "quantize_config.json").write_text(json.dumps({"checkpoint_format": version}))
    check_values(ASYMMETRIC, folder)

    def remove_version(stored: dict[str, Any], quantization: Quantization) -> None:
        VERSIONS[version](stored, quantization)
        for key in ("checkpoint_format", "format"):
            quantization.pop(key, None)

    check_values(SYMMETRIC, write_library_file(SYMMETRIC, tmp_path / "symmetric", remove_version))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"checkpoint_format": "gptq_v2"}, "has checkpoint_format gptq_v2, but config.json has gptq"),
        ({"desc_act": True}, "has desc_act true, but config.json has false"),
        ({"sym": True}, "has sym true, but config.json has false"),
        ({"bits": 8}, "has bits 8, but config.json has 4"),
        ({"group_size": 64}, "has group_size 64, but config.json has 128"),
        ({"quant_method": "awq"}, "has quant_method awq, but config.json has gptq"),
    ],
)
def test_contradicting_configs_are_refused(declared, message, tmp_path, cli):
    folder = write_quantize_config(ASYMMETRIC, tmp_path / "in", declared, **gptq_config(4, 128))
    result = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--dry-run", code=5)
    assert f"{folder / 'quantize_config.json'}: {message}; correct the one that is wrong" in result.stderr


def test_an_output_does_not_declare_the_quantization_of_its_source(tmp_path, written, cli):
    """Loaders would follow quantize_config.json, so it is kept under a different name."""
    one, two = written("gptq 4 v2")[0], tmp_path / "two"
    write("gptq 4 v2", two, lambda _, quantization: quantization.clear())
    (two / "quantize_config.json").write_text(json.dumps(ENCODINGS["gptq 4 v2"].config))
    for folder, out in ((one, tmp_path / "one-out"), (two, tmp_path / "two-out")):
        convert(folder, out, "int8", "--threadpool-count", 1)
        cli("verify", out, "--against", folder, "--full")
    assert read_folder(tmp_path / "one-out") == read_folder(tmp_path / "two-out")
    assert [path.name for path in (tmp_path / "two-out").glob("quant*")] == ["quantize_config.source.json"]


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n.startswith(("ct 4", "ct 8", "ct W", "gptq", "awq"))])
def test_shapes_decide_without_a_config(name, tmp_path):
    """Shapes cannot decide how GPTQ stores zero points."""
    folder, values = write(name, tmp_path, lambda _, quantization: quantization.clear())
    if "gptq" in name and name != "gptq 4":
        with pytest.raises(InputError, match="no config states whether its zero points are stored minus one"):
            open_model(folder).linear(0, 1, "down")
    else:
        assert (kernels.decode(open_model(folder).linear(0, 1, "down")) == values[1, "down"]).all()


# Takes tensors, quantization_config, and the prefix of one weight's names
Damage = Callable[[Stored, Quantization, str], Any]


def set_config(**keys: Any) -> Damage:
    """Change entries of the quantization_config."""
    return lambda tensors, quantization, base: quantization.update(keys)


def replace_tensor(suffix: str, dtype: str | None = None, shape: tuple[int, ...] = (), value: float = 0) -> Damage:
    """Remove a tensor of a weight, or replace it by one of this dtype and shape."""

    def damage(tensors: Stored, quantization: Quantization, base: str) -> None:
        tensors.pop(f"{base}{suffix}", None)
        if dtype is not None:
            tensors[f"{base}{suffix}"] = (dtype, np.full(shape, value, NUMPY[dtype]))

    return damage


def remove_all(suffix: str) -> Damage:
    """Remove this tensor of all weights."""
    return lambda tensors, quantization, base: [tensors.pop(name) for name in [*tensors] if name.endswith(suffix)]


def set_value(suffix: str, at: Any, to: Any) -> Damage:
    """Change one number of a tensor."""
    return lambda tensors, quantization, base: tensors[f"{base}{suffix}"][1].__setitem__(at, to)


def store_three_bits(tensors: Stored, quantization: Quantization, base: str) -> None:
    """Store codes of 3 bits."""
    quantization["bits"] = 3
    for name, (_, bits) in tensors.items():
        if name.endswith(("qweight", "qzeros")):
            rows, columns = bits.shape
            shape = (rows * 3 // 4, columns) if name.endswith("qweight") else (rows, columns * 3 // 4)
            tensors[name] = ("I32", np.zeros(shape, np.int32))


def mix_encodings_without_codes(tensors: Stored, quantization: Quantization, base: str) -> None:
    """Replace the codes of a weight by the scales of a different encoding."""
    replace_tensor(".qweight")(tensors, quantization, base)
    replace_tensor(".weight_scale", "F16", (I, 8))(tensors, quantization, base)


def keep_only_input_scales(tensors: Stored, quantization: Quantization, base: str) -> None:
    """Remove all tensors of experts, and add one scale of inputs."""
    remove_all("_proj.weight")(tensors, quantization, base)
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    tensors[f"{base}.input_scale"] = ("F32", np.zeros((), np.float32))


REFUSED: list[tuple[str, Damage, str]] = [
    (
        "DeepSeek-V4",
        replace_tensor(".scale"),
        r"1\.w1\.weight' is I8, and its scales \(.*experts\.1\.w1\.scale\) are missing",
    ),
    ("DeepSeek-V4", replace_tensor(".weight"), r"is a scale whose weight .* is missing"),
    (
        "DeepSeek-V4",
        replace_tensor(".scale", "F8_E8M0", (I, 4)),
        r"4\] does not fit .* with a scale for each 32 columns",
    ),
    ("ct MXFP4", replace_tensor(".weight_packed", "U8", (I * H // 2,)), "must be a matrix of bytes"),
    ("ct MXFP4", replace_tensor(".weight_scale", "BF16", (I, H // 32)), "is INT4 but .*weight_shape is missing"),
    ("MXFP8", replace_tensor(".weight_scale_inv", "U8", (I, 7)), "does not fit"),
    ("ct NVFP4", replace_tensor(".weight_global_scale"), r"is NVFP4 but .*weight_(global_scale|scale_2) is missing"),
    ("modelopt NVFP4", replace_tensor(".weight_global_scale", "F32", (1,), 1), "needs none"),
    ("modelopt NVFP4", replace_tensor(".weight_scale_2", "F32", (I,), 1), "must be one F32"),
    ("modelopt NVFP4", replace_tensor(".weight_scale", "U8", (I, H // 32)), "needs none"),
    ("modelopt NVFP4", keep_only_input_scales, "0.gate_proj.weight' is missing, though layer 0 has other exp"),
    ("ct 4", replace_tensor(".weight_packed"), "is a scale whose weight .*weight_packed' is missing"),
    ("ct 4", replace_tensor(".weight_scale"), "weight_packed' is INT4 but .*weight_scale is missing"),
    ("ct 4", replace_tensor(".weight_scale", "BF16", (I, 4)), "does not fit .*384 x 256 in groups of 32"),
    ("ct 4", replace_tensor(".weight_scale", "U8", (I, 8)), "scales must be F32, BF16 or F16"),
    ("ct 4", replace_tensor(".weight_shape", "F32", (2,)), "must be two I64"),
    ("ct 4", replace_tensor(".weight_packed", "I32", (I, 64)), "must be|has shape"),
    ("ct 4", replace_tensor(".weight_zero_point", "I32", (47, 8)), r"require I32 of shape \[48, 8\]"),
    ("ct 4", replace_tensor(".weight_g_idx", "I32", (H // 2,)), r"require I32 of shape \[256\]"),
    (
        "ct 4 zeros",
        remove_all("weight_zero_point"),
        "packed' has zero points according to its config, but .*zero_point is missing",
    ),
    (
        "ct 4 order",
        remove_all("weight_g_idx"),
        r"order of its columns \(actorder\) according to its config, but .*g_idx is missing",
    ),
    ("ct 4 order", replace_tensor(".weight_g_idx"), r"1\.gate_proj\.weight_g_idx is missing"),
    (
        "ct W8A8",
        remove_all("weight_zero_point"),
        "weight' has zero points according to its config, but .*zero_point is missing",
    ),
    ("ct W8A8", replace_tensor(".weight_zero_point", "I32", (I, 1)), "zero points must be I8"),
    ("awq", replace_tensor(".qzeros"), r"qweight' is AWQ but .*gate_proj.qzeros is missing"),
    ("awq", replace_tensor(".g_idx", "I32", (H,)), "g_idx' scales .*, which is AWQ and needs none"),
    ("awq", set_config(group_size=32), "384 x 256 in groups of 32; check group_size"),
    ("awq", set_config(group_size=96), "in groups of 96"),
    ("awq", replace_tensor(".qweight", "I32", (48,)), "must be a matrix|does not fit"),
    ("gptq 4", set_config(quant_method="awq"), "qzeros is missing"),
    ("gptq 4 v1", set_config(bits=8), "codes of 8 bits; check bits"),
    ("gptq 4", set_config(dynamic={"lm_head": {"bits": 8}}), "codes of 4 or 8 bits; check bits"),
    ("gptq 4 v1", replace_tensor(".scales", "F16", (8, I // 2)), "does not fit"),
    ("gptq 4 v1", replace_tensor(".qzeros", "I32", (8, 47)), r"require I32 of shape \[8, 48\]"),
    ("gptq 4 v1", replace_tensor(".g_idx", "I64", (H,)), r"require I32 of shape \[256\]"),
    ("gptq 4 v1", replace_tensor(".qweight", "I32", (0, I)), "must be a matrix of words"),
    ("gptq 4 v1", mix_encodings_without_codes, "is a scale whose weight .* is missing"),
    (
        "gptq 4 v1",
        remove_all("qzeros"),
        r"qweight' has zero points \(sym: false\) according to its config, but .*qzeros is missing",
    ),
    ("gptq 4 v1", replace_tensor(".qzeros"), r"1\.gate_proj\.qweight'.*1\.gate_proj\.qzeros is missing"),
    (
        "gptq 4 order",
        remove_all("g_idx"),
        r"an order of its columns \(desc_act\) according to its config, but .*g_idx is missing",
    ),
    (
        "gptq 4 v2 order",
        replace_tensor(".g_idx"),
        r"1\.gate_proj\.g_idx is missing, and .*0\.gate_proj\.g_idx' is there",
    ),
    (
        "gptq 4 v1",
        set_config(checkpoint_format=None),
        r'no config states .*"gptq"} \(minus one.*"gptq_v2"} \(unchanged\)',
    ),
]
UNSUPPORTED: list[tuple[str, Damage, str]] = [
    ("awq", set_config(version="gemv"), "order of AWQ's version 'gemv' is unsupported; use"),
    ("awq", set_config(bits=8), "AWQ with 8 bits is unsupported; use"),
    ("awq", replace_tensor(".qweight", "I64", (256, 24)), "is not an input yet"),
    ("awq", set_config(quant_method="gptq"), "'gemm' of GPTQ is unsupported"),
    ("gptq 4 v1", set_config(checkpoint_format="marlin"), "checkpoint_format 'marlin' of GPTQ is unsupported; use"),
    ("gptq 4 v1", set_config(is_marlin_format=True), "'marlin'"),
    ("gptq 4 v1", store_three_bits, "GPTQ with 3 bits is unsupported; use"),
    ("gptq 4 v1", replace_tensor(".scales", "F16", (7, I)), "do not divide"),
    ("ct 4", replace_tensor(".weight_scale", "BF16", (I, 3)), "do not divide the 256 columns"),
    ("ct 4", replace_tensor(".weight_packed", "I64", (I, 16)), "is not an input yet"),
    ("ct 4", set_config(quant_method="awq"), "is not an input yet"),
]


@pytest.mark.parametrize(
    ("error", "name", "damage", "message"),
    [(error, *row) for error, rows in ((InputError, REFUSED), (UnsupportedError, UNSUPPORTED)) for row in rows],
)
def test_unreadable_checkpoints_are_refused(error, name, damage, message, tmp_path):
    base = ENCODINGS[name].base(1, "gate")
    folder, _ = write(name, tmp_path, lambda tensors, quantization: damage(tensors, quantization, base))
    with pytest.raises(error, match=message) as caught:
        open_model(folder)
    assert "tensor '" in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def make_value_too_large(tensors: Stored, quantization: Quantization, base: str) -> None:
    """Store a value beyond the range of BF16."""
    set_value(".scale", (5, 4), 254)(tensors, quantization, base)
    set_value(".weight", (5, slice(64, 80)), 0x11)(tensors, quantization, base)  # 0.5 times 2^127
    set_value(".weight", (5, 70), 0x70)(tensors, quantization, base)  # 6 times 2^127, in column 141


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("DeepSeek-V4", set_value(".scale", (3, 2), 255), "w1.scale': scale [3, 2] is nan"),
        ("FP8 in blocks", set_value(".weight_scale_inv", (2, 1), np.nan), "weight_scale_inv': scale [2, 1] is nan"),
        ("FP8 in blocks", set_value(".weight_scale_inv", (2, 1), np.inf), "weight_scale_inv': scale [2, 1] is inf"),
        ("DeepSeek-V4", make_value_too_large, "contains a value that is not finite at row 5, column 141"),
        ("MXFP8", set_value(".weight_scale_inv", (3, 2), 255), "weight_scale_inv': scale [3, 2] is nan"),
        ("modelopt NVFP4", set_value(".weight_scale", (3, 2), 0x7F), "weight_scale': scale [3, 2] is nan"),
        ("ct NVFP4", set_value(".weight_global_scale", 0, 0), "weight_global_scale' divides scales and is 0"),
        ("ct NVFP4", set_value(".weight_global_scale", 0, np.nan), "weight_global_scale': scale [0, 0] is nan"),
        ("ct NVFP4", set_value(".weight_global_scale", 0, np.inf), "weight_global_scale': scale [0, 0] is inf"),
        ("awq", set_value(".scales", (2, 7), np.inf), "gate_proj.scales': scale [2, 7] is inf"),
        ("ct 4 order", set_value(".weight_g_idx", slice(None), 0), "g_idx' must name each of 2 groups for 128 columns"),
        (
            "ct 4",
            set_value(".weight_shape", 1, H - 1),
            ".weight_shape' is [384, 255], but the codes are for [384, 256]",
        ),
    ],
)
def test_damaged_values_stop_the_conversion(name, damage, message, tmp_path):
    """The command names the tensor, and writes nothing."""
    base = ENCODINGS[name].base(1, "gate")
    folder, _ = write(name, tmp_path / "model", lambda tensors, quantization: damage(tensors, quantization, base))
    command = ("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "int8", "--threadpool-count", 1)
    error = run_in_process(*command).exception
    assert isinstance(error, InputError) and message in str(error), error
    assert base in str(error) and not (tmp_path / "out").exists()


def test_an_unset_column_order_is_ignored(tmp_path):
    store_unset = replace_tensor(".weight_g_idx", "I32", (H,), -1)
    folder, _ = write("ct 4", tmp_path, lambda t, _: [store_unset(t, {}, BASE.format(e, "gate")) for e in range(E)])
    assert open_model(folder).linear(0, 1, "gate").column_groups is None
