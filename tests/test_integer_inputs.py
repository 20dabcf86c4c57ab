"""Integer codes as an input, in every format: what the libraries wrote, what the formulas say, whatever is made of them,
and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.checkpoints.experts import MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix
from ktconvert.pipeline.cli.cpu import cpu
from ktconvert.quantizers import packed, reference
from rig import golden, killpoint
from rig.conversion import KTCONVERT, tree
from rig.integers import (
    FORMATS,
    PROJECTIONS,
    E,
    Format,
    H,
    I,
    Stored,
    checkpoint,
    experts,
    gptq_config,
    random_linear,
    scheme,
)
from rig.safetensors import metadata_of, read_file, read_folder, write_file

BASE = "model.layers.0.mlp.experts.{}.{}_proj"
Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of tensors and quantization_config
NAMES = {"GPTQ": "GPTQ_INT4", "AWQ": "AWQ_INT4"}


def model_of(folder: Path) -> MoeModel:
    return recognise(open_checkpoint(folder))


def convert(source: Path, out: Path, *options: object) -> Result:
    done = CliRunner().invoke(cpu, ["-i", str(source), "-o", str(out), "-q", *map(str, options)])
    assert done.exception is None, done.exception
    return done


# ---- what the libraries wrote ---------------------------------------------------------------------------------------

FILES = golden.libraries()
LIBRARIES = [name for name in FILES if name.startswith(("awq", "gptq", "ct_pack", "ct_int8"))]


def weights(folder: Path) -> dict[str, Matrix]:
    """Each quantized linear of a checkpoint, by its name without ".weight"."""
    with open_checkpoint(folder) as source:
        stored = other_tensors(source, (), source.quantization).tensors
        found = {name: w for name, w in stored.items() if isinstance(w, Weight)}
        return {name.removesuffix(".weight"): w.matrix(source, 0) for name, w in found.items()}


def float32_values(linear: Matrix) -> Any:
    """(q - z) * s before it is rounded, by the definition."""
    zeros = linear.each_zero()
    half = np.float32(1 << packed.BITS[linear.kind.name] - 1)
    return (packed.codes(linear).astype(np.float32) - (half if zeros is None else zeros)) * linear.each_scale()


def digest(values: Any, dtype: str) -> str:
    """As the files give it: of values in the library's dtype, -0 as +0."""
    bits = values.astype(np.float16).view(np.uint16) if dtype == "F16" else reference.f32_to_bf16(values)
    return hashlib.sha256(np.where(bits == 0x8000, 0, bits).astype("<u2").tobytes()).hexdigest()


def library(name: str, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> Path:
    """A library's file with its config."""
    stored: dict[str, Any] = {**read_file(FILES[name])}
    quantization = json.loads(metadata_of(FILES[name])["quantization_config"])
    if change is not None:
        change(stored, quantization)
    return checkpoint(folder, stored, quantization)


def hashes_of(name: str) -> dict[str, Any]:
    return dict(json.loads(metadata_of(FILES[name])["expected_sha256"]))


@pytest.mark.parametrize("name", LIBRARIES)
def test_values_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """In float32 all are the library's: rounded to its own dtype, they have the hash of its own values; and ours are
    those in float32, rounded once to BF16."""
    hashes, found = hashes_of(name), weights(library(name, tmp_path))
    assert found.keys() == hashes.keys()
    for linear, about in hashes.items():
        values = float32_values(found[linear])
        assert list(values.shape) == about["shape"] and digest(values, about["dtype"]) == about["sha256"]
        assert (kernels.decode(found[linear]) == reference.f32_to_bf16(values)).all()


def test_a_zero_point_of_0_has_borrowed_from_its_neighbour(tmp_path: Path) -> None:
    """Row 10 has zero points of 0: its nibbles are 15, and those of row 11 one too few."""
    name = "gptq_4bit_g128_asym_v1"
    linear = weights(library(name, tmp_path))[BASE.format(0, "down")]
    assert linear.zeros is not None and not linear.zeros[10].any()
    stored = packed.fields(4, read_file(FILES[name])[f"{BASE.format(0, 'down')}.qzeros"].bits).T
    assert (stored[10] == 15).all() and ((stored[11] + 2) % 16 == linear.zeros[11]).all()


def to_v2(stored: dict[str, Any], quantization: dict[str, Any]) -> None:
    """4-bit codes of checkpoint_format gptq, as gptq_v2 stores them."""
    quantization["checkpoint_format"] = quantization["format"] = "gptq_v2"
    for name, tensor in stored.items():
        if name.endswith("qzeros"):
            points = tensor.bits.view(np.uint32) + np.uint32(0x11111111)
            stored[name] = tensor._replace(data=points.tobytes())


def same_values(name: str, folder: Path) -> None:
    """All linears of a folder have the values of this library's file."""
    hashes = hashes_of(name)
    for linear, matrix in weights(folder).items():
        assert digest(float32_values(matrix), "F16") == hashes[linear]["sha256"]


def test_gptq_v2_stores_the_same_zero_points_as_they_are(tmp_path: Path) -> None:
    same_values("gptq_4bit_g128_asym_v1", library("gptq_4bit_g128_asym_v1", tmp_path, to_v2))


# ---- quantize_config.json -------------------------------------------------------------------------------------------


ASYMMETRIC = "gptq_4bit_g128_asym_v1"
VERSIONS: dict[str, Change] = {"gptq": lambda stored, quantization: None, "gptq_v2": to_v2}


def apart(
    name: str, folder: Path, other_tensors: dict[str, Any] | None = None, version: str = "gptq", **kept: Any
) -> Path:
    """A library's file whose config lies in quantize_config.json; kept: what config.json still says."""
    said: dict[str, Any] = {}

    def move(stored: dict[str, Any], quantization: dict[str, Any]) -> None:
        VERSIONS[version](stored, quantization)
        said.update(quantization)
        quantization.clear()

    library(name, folder, move)
    document = json.loads((folder / "config.json").read_text())
    document |= {"quantization_config": kept} if kept else {}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "quantize_config.json").write_text(json.dumps(said if other_tensors is None else other_tensors))
    return folder


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name.startswith("gptq")])
@pytest.mark.parametrize("kept", [{}, {"quant_method": "gptq", "bits": 0}], ids=["alone", "beside another"])
def test_a_config_beside_config_json_counts(name: str, kept: dict[str, Any], tmp_path: Path) -> None:
    same_values(name, apart(name, tmp_path, **kept))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_format_may_be_all_that_it_says(version: str, tmp_path: Path) -> None:
    """The remedy where nothing says how zero points are stored."""
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    folder = apart(ASYMMETRIC, tmp_path, {}, version, **stated)
    with pytest.raises(InputError, match="no config says"):
        weights(folder)
    (folder / "quantize_config.json").write_text(json.dumps({"checkpoint_format": version}))
    same_values(ASYMMETRIC, folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_zero_points_of_symmetric_codes_need_no_format(version: str, tmp_path: Path) -> None:
    """All of them are in the middle, so that their words say it."""
    name = "gptq_4bit_g128_sym_descact_v1"

    def unsaid(stored: dict[str, Any], quantization: dict[str, Any]) -> None:
        VERSIONS[version](stored, quantization)
        for key in ("checkpoint_format", "format"):
            quantization.pop(key, None)

    same_values(name, library(name, tmp_path, unsaid))


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
def test_configs_that_contradict_each_other(said: dict[str, Any], words: str, tmp_path: Path, cli: Any) -> None:
    folder = apart(ASYMMETRIC, tmp_path / "in", said, **gptq_config(4, 128))
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--dry-run", code=5)
    assert f"{folder / 'quantize_config.json'}: {words}; correct the one that is wrong" in done.stderr


def test_the_output_does_not_say_how_its_source_was_quantized(tmp_path: Path, cli: Any) -> None:
    """Loaders would believe quantize_config.json: it is kept under another name."""
    convert = ("--threadpool-count", 1, "--quant-method", "int8")
    form = FORMATS["gptq 4 v2"]
    tensors, _ = experts(form)
    one, two = (checkpoint(tmp_path / name, tensors, said) for name, said in (("one", form.config), ("two", None)))
    (two / "quantize_config.json").write_text(json.dumps(form.config))
    for folder in (one, two):
        cli("cpu", "-i", folder, "-o", tmp_path / f"{folder.name}-out", *convert)
        cli("verify", tmp_path / f"{folder.name}-out", "--against", folder, "--full")
    assert read_folder(tmp_path / "one-out") == read_folder(tmp_path / "two-out")
    names = {path.name for path in (tmp_path / "two-out").glob("quant*")}
    assert names == {"quantize_config.source.json"}


def test_g_idx_is_permuted(tmp_path: Path) -> None:
    """The file is a proof of it only if neighbours are not of one group."""
    linear = weights(library("gptq_4bit_g128_sym_descact_v1", tmp_path))[BASE.format(1, "down")]
    assert linear.group_of is not None and (np.diff(linear.group_of) != 0).sum() > 100


# kt-kernel's own inputs: the forward in float64 on our decoded weights is that of the file.
NATIVE = {
    "native_RAWINT4_kimi": ("language_model.model.layers.0.mlp.experts", scheme(4, 32), "INT4"),
    "native_GPTQ_INT4_default": ("model.layers.0.mlp.experts", gptq_config(4, 128, sym=True), "GPTQ_INT4"),
    "native_FP8_PERCHANNEL_default": ("model.layers.0.mlp.experts", None, "F8_E4M3"),
}


@pytest.mark.parametrize("name", NATIVE)
def test_inputs_of_kt_kernel(name: str, tmp_path: Path) -> None:
    prefix, quantization, dtype = NATIVE[name]
    stored = read_file(golden.FOLDER / f"{name}.safetensors")
    tensors: dict[str, Any] = {n: t for n, t in stored.items() if n.startswith(prefix)}
    folder = checkpoint(tmp_path / "model", tensors, quantization, moe_intermediate_size=256)
    model = model_of(folder)
    assert model.dtypes == (dtype,)
    x = reference.bf16_to_f32(stored["in.hidden"].bits).astype(np.float64)
    out = np.zeros_like(x)
    ids, share = stored["in.topk_ids"].bits, stored["in.topk_weights"].bits.astype(np.float64)
    for expert in range(2):
        gate, up, down = (
            reference.bf16_to_f32(kernels.decode(model.linear(0, expert, p))).astype(np.float64) for p in PROJECTIONS
        )
        g, u = x @ gate.T, x @ up.T
        out += ((share * (ids == expert)).sum(axis=1))[:, None] * ((g / (1 + np.exp(-g)) * u) @ down.T)
    wanted = stored["out.float64_reference"].bits
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 4e-3  # BF16's rounding of each weight
    convert(folder, tmp_path / "out", "--threadpool-count", 1)


# ---- conversions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FORMATS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of each format, and its values."""
    form = FORMATS[request.param]
    tensors, values = experts(form)
    return checkpoint(tmp_path_factory.mktemp("made") / "model", tensors, form.config), values


def expected(values: dict[str, Any], bits: int, parts: int, backward: bool) -> dict[str, tuple[Any, Any]]:
    """Weight and scale of each part, by the reference, by (projection, expert, part)."""
    out = {}
    for expert in range(E):
        for part in ExpertGrid(0, H, I, parts, backward).all_parts([expert]):
            projection = part.place.projection
            bf16 = values[BASE.format(expert, projection)]
            own = slice(part.place.numa * I // parts, (part.place.numa + 1) * I // parts)
            bf16 = bf16[:, own] if projection == "down" else bf16[own]
            packed = reference.quantize_pack(bits, np.ascontiguousarray(bf16.T if part.backward else bf16))
            out[f"{projection}{'_bwd' if part.backward else ''}", expert, part.place.numa] = packed
    return out


def test_bytes_are_those_of_the_reference(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """AMXINT8 in one part, merged, and in two, loose; AMXINT4 in three, loose; all with backward matrices."""
    folder, values = made
    for bits, parts, loose in ((8, 1, False), (8, 2, True), (4, 3, True)):
        out = tmp_path / f"int{bits}-{parts}"
        options = ["--quant-method", f"int{bits}", "--threadpool-count", parts, "--save-backward-weights"]
        convert(folder, out, *options, *(["--no-merge-safetensor"] if loose else []))
        wanted = expected(values, bits, parts, backward=True)
        if loose:
            files = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.kt")}
            assert len(files) == 2 * len(wanted)
            for (projection, expert, numa), pair in wanted.items():
                for what, array in zip(("quant", "scale"), pair, strict=True):
                    name = f"_layer_0/_numa_{numa}/INT{bits}_{projection}_{expert}_{array.nbytes}Byte_{what}_.kt"
                    assert files[name] == array.tobytes(), name
        else:
            tensors = read_folder(out)
            assert len(tensors) == 2 * len(wanted)
            for (projection, expert, numa), pair in wanted.items():
                for what, array in zip(("weight", "scale"), pair, strict=True):
                    name = f"blk.0.ffn_{projection}_exps.{expert}.numa.{numa}.{what}"
                    assert tensors[name].data == array.tobytes(), name


@pytest.mark.parametrize("name", ["gptq 4 v1", "awq", "ct W8A8"])
def test_verified_resumed_and_claimed(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """Killed twice in the middle, resumed to the same bytes; a wrong claim is refused; no other v1 or v2 will do."""
    form = FORMATS[name]
    folder = checkpoint(tmp_path / "model", experts(form)[0], form.config)
    kind = "int8" if "W8A8" in name else name.split()[0]
    shim, log, out, again = killpoint.build(tmp_path), tmp_path / "log", tmp_path / "out", tmp_path / "again"
    command = [*KTCONVERT, "cpu", "-i", str(folder), "-o", str(out), "--threadpool-count", "1", "-q"]
    assert killpoint.run([*command, "--input-type", kind], out, 0, shim, log).returncode == 0
    wanted, calls = tree(out), killpoint.count(log)
    command[command.index(str(out))] = str(again)
    assert killpoint.run(command, again, calls // 2, shim).returncode == killpoint.KILLED
    assert killpoint.run(command, again, 0, shim).returncode == 0
    assert tree(again) == wanted
    cli("verify", out, "--against", folder, "--full")
    assert (
        "--input-type bf16 was given, but the experts are"
        in cli("cpu", "-i", folder, "-o", tmp_path / "no", "--input-type", "bf16", code=5).stderr
    )
    seen = json.loads(cli("inspect", folder, "--json").stdout)
    assert (
        seen["convert"] and seen["expert_dtypes"] == json.loads((out / "manifest.json").read_text())["model"]["dtypes"]
    )


def test_another_checkpoint_format_is_another_source(tmp_path: Path) -> None:
    """The same tensors as gptq and as gptq_v2 have other values, and a fingerprint of their own."""
    form = FORMATS["gptq 4 v1"]
    tensors, _ = experts(form)
    readings, values = [], []
    for name in ("gptq", "gptq_v2"):
        model = model_of(checkpoint(tmp_path / name, tensors, {**form.config, "checkpoint_format": name}))
        readings.append(model.reading(0))
        values.append(kernels.decode(model.linear(0, 0, "gate")))
    assert readings[0] != readings[1] and (values[0] != values[1]).any()


@pytest.mark.parametrize("name", ["gptq 4 v1", "awq", "ct 4 zeros"])
def test_four_bits_to_int4_are_warned_about(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    form = FORMATS[name]
    folder = checkpoint(tmp_path / "model", experts(form)[0], form.config)
    words = "bits per weight already"
    plan = "cpu", "-i", folder, "-o", tmp_path / "out", "--threadpool-count", 1, "--dry-run"
    seen = cli(*plan).stderr
    assert words in seen and "--quant-method int8 is the better choice" in seen
    assert words not in cli(*plan, "--quant-method", "int8").stderr


@pytest.mark.parametrize("name", ["gptq 4 order", "awq"])
def test_gpu_decodes_those_beside_the_experts(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """Experts and attention are packed: W8A16 is that of their values, attention comes out in BF16, nothing else."""
    form = FORMATS[name]
    tensors, values = experts(form)
    attention = random_linear(form, np.random.default_rng(9), H, H)
    stem = "model.layers.0.self_attn.q_proj"
    tensors |= {f"{stem}.{suffix}": stored for suffix, stored in form.store(attention).items()}
    values[stem] = attention.values
    plain: Stored = {f"{base}.weight": ("BF16", bits) for base, bits in values.items()}
    folders = checkpoint(tmp_path / "model", tensors, form.config), checkpoint(tmp_path / "plain", plain, None)
    for folder, out in zip(folders, ("out", "from_plain"), strict=True):
        cli("gpu", "-i", folder, "-o", tmp_path / out, "--quant-method", "RTN", "--quant-type", "W8A16")
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "from_plain")
    cli("verify", tmp_path / "out", "--against", folders[0])
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("name", ["gptq 4 order", "awq", "ct 4 zeros", "ct W8A8"])
def test_dequantized_to_the_names_and_shapes_of_a_bf16_release(
    name: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    form = FORMATS[name]
    tensors, values = experts(form)
    folder = checkpoint(tmp_path / "model", tensors, form.config)
    cli("dequantize", folder, tmp_path / "out")
    assert {n: t.bits.tolist() for n, t in read_folder(tmp_path / "out").items()} == {
        f"{base}.weight": bits.tolist() for base, bits in values.items()
    }
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    cli("verify", tmp_path / "out", "--against", folder)


def test_memory_of_the_plan_counts_what_is_transposed(tmp_path: Path) -> None:
    """Backward matrices need a linear in BF16 first; scales and zero points are unpacked."""
    form = FORMATS["awq"]
    model = model_of(checkpoint(tmp_path, experts(form)[0], form.config))
    groups = H * I // 64
    assert 8 * groups <= model.reading_bytes(0) < 2 * H * I
    assert model.reading_bytes(0, backward=True) == model.reading_bytes(0) + 2 * H * I


# ---- refusals -------------------------------------------------------------------------------------------------------

GATE = BASE.format(1, "gate")


def config(**keys: Any) -> Change:
    return lambda tensors, quantization: quantization.update(keys)


def tensor(suffix: str, dtype: str | None = None, shape: tuple[int, ...] = ()) -> Change:
    def change(tensors: Stored, quantization: dict[str, Any]) -> None:
        tensors.pop(f"{GATE}.{suffix}", None)
        if dtype is not None:
            items = {"I32": np.int32, "F16": np.float16, "U8": np.uint8, "I64": np.int64}[dtype]
            tensors[f"{GATE}.{suffix}"] = (dtype, np.zeros(shape, items))

    return change


def lost(suffix: str) -> Change:
    """No weight has this tensor."""

    def change(tensors: Stored, quantization: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(suffix)]:
            del tensors[name]

    return change


def of_three_bits(tensors: Stored, quantization: dict[str, Any]) -> None:
    quantization["bits"] = 3
    for name, (_, words) in tensors.items():
        if name.endswith(("qweight", "qzeros")):
            rows, columns = words.shape
            shape = (rows * 3 // 4, columns) if name.endswith("qweight") else (rows, columns * 3 // 4)
            tensors[name] = ("I32", np.zeros(shape, np.int32))


def of_two_formats_without_codes(tensors: Stored, quantization: dict[str, Any]) -> None:
    tensor("qweight")(tensors, quantization)
    tensor("weight_scale", "F16", (I, 8))(tensors, quantization)


REFUSED: dict[str, tuple[str, Change, type[KtconvertError], str]] = {
    "AWQ GEMV": ("awq", config(version="gemv"), UnsupportedError, "order of AWQ's version 'gemv' is not an input; use"),
    "AWQ marlin": ("awq", config(version="marlin"), UnsupportedError, "version 'marlin' is not an input; use"),
    "AWQ of 8 bits": ("awq", config(bits=8), UnsupportedError, "AWQ with 8 bits is not an input; use"),
    "AWQ without zero points": (
        "awq",
        tensor("qzeros"),
        InputError,
        "qweight' is AWQ but .*gate_proj.qzeros is missing",
    ),
    "AWQ without scales": ("awq", tensor("scales"), InputError, "scales is missing"),
    "AWQ without codes": ("awq", tensor("qweight"), InputError, "is a scale whose weight .*qweight' is missing"),
    "AWQ with an order": (
        "awq",
        tensor("g_idx", "I32", (H,)),
        InputError,
        "g_idx' scales .*, which is AWQ and needs none",
    ),
    "AWQ of other groups": ("awq", config(group_size=32), InputError, "384 x 256 in groups of 32; check group_size"),
    "AWQ that does not divide": (
        "awq",
        config(group_size=96),
        InputError,
        "in groups of 96",
    ),
    "AWQ zero points of another size": (
        "awq",
        tensor("qzeros", "I32", (4, 47)),
        InputError,
        r"be I32 of shape \[4, 48\]",
    ),
    "AWQ codes in one row": ("awq", tensor("qweight", "I32", (48,)), InputError, "must be a matrix|does not fit"),
    "AWQ codes as I64": ("awq", tensor("qweight", "I64", (256, 24)), UnsupportedError, "is not an input yet"),
    "GPTQ marlin": (
        "gptq 4 v1",
        config(checkpoint_format="marlin"),
        UnsupportedError,
        "checkpoint_format 'marlin' of GPTQ is not an input; use",
    ),
    "GPTQ marlin, by a flag": ("gptq 4 v1", config(is_marlin_format=True), UnsupportedError, "'marlin'"),
    "GPTQ of 3 bits": ("gptq 4 v1", of_three_bits, UnsupportedError, "GPTQ with 3 bits is not an input; use"),
    "GPTQ of bits that the config does not name": (
        "gptq 4 v1",
        config(bits=8),
        InputError,
        "codes of 8 bits; check bits",
    ),
    "GPTQ scales for other rows": ("gptq 4 v1", tensor("scales", "F16", (8, I // 2)), InputError, "does not fit"),
    "GPTQ scales as bytes": ("gptq 4 v1", tensor("scales", "U8", (8, I)), InputError, "must be F32, BF16 or F16"),
    "GPTQ groups that do not divide": ("gptq 4 v1", tensor("scales", "F16", (7, I)), UnsupportedError, "do not divide"),
    "GPTQ zero points of another size": (
        "gptq 4 v1",
        tensor("qzeros", "I32", (8, 47)),
        InputError,
        r"must be I32 of shape \[8, 48\]",
    ),
    "GPTQ order of other columns": ("gptq 4 v1", tensor("g_idx", "I32", (255,)), InputError, "does not fit"),
    "GPTQ order of no columns": (
        "gptq 4 v1",
        tensor("g_idx", "I32", (0,)),
        InputError,
        r"must be I32 of shape \[256\]",
    ),
    "GPTQ order as I64": ("gptq 4 v1", tensor("g_idx", "I64", (H,)), InputError, r"must be I32 of shape \[256\]"),
    "GPTQ codes without any": ("gptq 4 v1", tensor("qweight", "I32", (0, I)), InputError, "must be a matrix of words"),
    "scales of two formats without codes": (
        "gptq 4 v1",
        of_two_formats_without_codes,
        InputError,
        "is a scale whose weight .* is missing",
    ),
    "GPTQ codes that are AWQ's": ("awq", config(quant_method="gptq"), UnsupportedError, "'gemm' of GPTQ is not"),
    "AWQ codes that are GPTQ's": ("gptq 4", config(quant_method="awq"), KtconvertError, "qzeros is missing"),
    "GPTQ of sym: false, no zero points": (
        "gptq 4 v1",
        lost("qzeros"),
        InputError,
        r"qweight' has zero points \(sym: false\) by its config, but .*_proj.qzeros is missing",
    ),
    "GPTQ of desc_act, no order": (
        "gptq 4 order",
        lost("g_idx"),
        InputError,
        r"has an order of its columns \(desc_act\) by its config, but .*_proj.g_idx is missing",
    ),
    "GPTQ, one weight without zero points": (
        "gptq 4 v1",
        tensor("qzeros"),
        InputError,
        r"1\.gate_proj\.qweight'.*1\.gate_proj\.qzeros is missing",
    ),
    "GPTQ, one weight without its order": (
        "gptq 4 v2 order",
        tensor("g_idx"),
        InputError,
        r"1\.gate_proj\.qweight': .*1\.gate_proj\.g_idx is missing, and .*0\.gate_proj\.g_idx' is there",
    ),
    "GPTQ whose zero points nothing explains": (
        "gptq 4 v1",
        config(checkpoint_format=None),
        InputError,
        r'qzeros\': no config says .*"gptq"} \(less one.*"gptq_v2"} \(as they are\) to quantize_config.json',
    ),
    "compressed-tensors of actorder, no order": (
        "ct 4 order",
        lost("weight_g_idx"),
        InputError,
        r"has an order of its columns \(actorder\) by its config, but .*weight_g_idx is missing",
    ),
    "compressed-tensors, one weight without its order": (
        "ct 4 order",
        tensor("weight_g_idx"),
        InputError,
        r"1\.gate_proj\.weight_g_idx is missing",
    ),
    "W8A8 with symmetric: false, no zero points": (
        "ct W8A8",
        lost("weight_zero_point"),
        InputError,
        r"weight' has zero points by its config, but .*weight_zero_point is missing",
    ),
    "W8A8 zero points of another size": (
        "ct W8A8",
        tensor("weight_zero_point", "I32", (I, 1)),
        InputError,
        "zero points must be I8",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    name, change, kind, words = REFUSED[what]
    tensors, _ = experts(FORMATS[name])
    quantization = dict(FORMATS[name].config)
    change(tensors, quantization)
    with pytest.raises(kind, match=words) as caught:
        model_of(checkpoint(tmp_path, tensors, quantization))
    assert "tensor '" in str(caught.value) and str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_without_a_config_the_shapes_decide(name: str, tmp_path: Path) -> None:
    """Where they can: the width of compressed-tensors' codes is no shape, nor is how GPTQ stores zero points."""
    form: Format = FORMATS[name]
    tensors, values = experts(form)
    if "ct 8" in name:
        with pytest.raises(KtconvertError):
            model_of(checkpoint(tmp_path, tensors, None))
        return
    model = model_of(checkpoint(tmp_path, tensors, None))
    if form.zeros and "gptq" in name:
        with pytest.raises(InputError, match="no config says whether it holds zero points less one"):
            model.linear(0, 1, "down")
        return
    assert (kernels.decode(model.linear(0, 1, "down")) == values[BASE.format(1, "down")]).all()


def test_an_order_that_leaves_a_group_out(cli: Callable[..., Any], tmp_path: Path) -> None:
    form = FORMATS["gptq 4 order"]
    tensors, _ = experts(form)
    tensors[f"{GATE}.g_idx"] = ("I32", np.zeros(H, np.int32))
    folder = checkpoint(tmp_path / "model", tensors, form.config)
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--threadpool-count", 1, code=5)
    assert f"tensor '{GATE}.g_idx' must name each of 2 groups for 128 columns; download it again" in done.stderr


def test_a_scale_that_is_not_finite(cli: Callable[..., Any], tmp_path: Path) -> None:
    form = FORMATS["awq"]
    tensors, _ = experts(form)
    tensors[f"{GATE}.scales"][1][2, 7] = np.inf
    folder = checkpoint(tmp_path / "model", tensors, form.config)
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--threadpool-count", 1, code=5)
    assert f"tensor '{GATE}.scales': scale [2, 7] is inf" in done.stderr


def test_awq_as_an_output_is_no_method(cli: Callable[..., Any], tmp_path: Path) -> None:
    form = FORMATS["awq"]
    folder = checkpoint(tmp_path / "model", experts(form)[0], form.config)
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "awq", code=3)
    assert "--quant-method awq: nothing loads kt-kernel's AWQ layout" in done.stderr


def test_files_that_are_not_aligned(tmp_path: Path) -> None:
    """Words at odd addresses are read where they lie."""
    form = FORMATS["awq"]
    tensors, values = experts(form)
    write_file(tmp_path / "model.safetensors", {"a": ("U8", np.zeros(1, np.uint8)), **tensors})
    linear = recognise(open_checkpoint(tmp_path)).linear(0, 0, "up")
    assert not linear.values.flags.aligned
    assert (kernels.decode(linear) == values[BASE.format(0, "up")]).all()
