"""MXFP4, MXFP8 and NVFP4 as inputs: the libraries' own values, whatever is made of them, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.experts import PROJECTIONS, MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, KtconvertError
from ktconvert.layouts.outputs import formats_of
from ktconvert.native_quant import kernels
from ktconvert.pipeline.stages import experts
from ktconvert.quantizers import groups, reference
from rig import killpoint
from rig.conversion import KTCONVERT, tree
from rig.microscaling import KINDS, Bits, E, H, I, Kind, base_of, make
from rig.safetensors import Tensor, Tensors, bits_of, edit_file, metadata_of, read_file, read_folder, write_file

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kind, Path, dict[tuple[int, str], Bits]]:
    kind = KINDS[request.param]
    return kind, *make(kind, tmp_path_factory.mktemp("made") / "model")


def model_of(folder: Path, **how: Any) -> MoeModel:
    return recognise(open_checkpoint(folder), **how)


# ---- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
def test_values_are_those_of_the_formula(made: tuple[Kind, Path, dict[tuple[int, str], Bits]]) -> None:
    kind, folder, values = made
    model = model_of(folder)
    assert model.dtypes == (kind.name,) and model.shape(0) == (E, H, I)
    for (expert, projection), bits in values.items():
        linear = model.linear(0, expert, projection)
        assert (kernels.decode(linear) == bits).all()
        assert (reference.decode(linear) == bits).all()
        assert (kernels.decode(linear.T) == bits.T).all()


def part_of(bits: Bits, projection: str, part: int, parts: int, backward: bool) -> Bits:
    piece = np.split(bits, parts, axis=1 if projection == "down" else 0)[part]
    return np.ascontiguousarray(piece.T if backward else piece)


@pytest.mark.parametrize("method, parts", [("int4", 1), ("int4", 2), ("int8", 1), ("int8", 2), ("int8", 4)])
def test_every_part_is_the_definition_of_its_values(
    method: str, parts: int, made: tuple[Kind, Path, dict[tuple[int, str], Bits]]
) -> None:
    """All parts of all experts, forward and backward; parts of down_proj begin at columns 64, 128 and 192."""
    _, folder, values = made
    fmt = formats_of("cpu")[method]
    stage = experts.stage(
        model_of(folder), fmt, [0], numa=parts, backward=True, max_shard_size=None, metadata={"about": "a test"}
    )
    seen = 0
    for expert in range(E):
        for projection in PROJECTIONS:
            for part, packed in stage.units[0].work.make((expert, projection)):
                bits = part_of(values[expert, projection], projection, part.numa, parts, part.backward)
                weight, scale = reference.quantize_pack(fmt.encoding.grid.bits, bits)
                assert (packed[0] == weight).all() and packed[1].tobytes() == scale.tobytes()
                seen += 1
    assert seen == E * 3 * parts * 2


@pytest.mark.parametrize("name", ["DeepSeek-V4", "blocks", "MXFP8", "compressed-tensors NVFP4"])
def test_converted_claimed_verified(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """The real command, with backward matrices. 4 bits to int4 is warned of."""
    kind = KINDS[name]
    folder, values = make(kind, tmp_path / "model")
    options = ("--threadpool-count", 2, "--save-backward-weights", "--input-type", kind.claim)
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", *options)
    assert done.stderr.count("rounds twice") == 1
    assert ("int4 17 to 49 %; --quant-method int8" in done.stderr) == (kind.name != "MXFP8")
    cli("verify", tmp_path / "out", "--against", folder, "--full")
    out = bits_of(read_folder(tmp_path / "out"))
    for (expert, projection), bits in values.items():
        for part in range(2):
            weight, scale = reference.quantize_pack(4, part_of(bits, projection, part, 2, False))
            key = f"blk.0.ffn_{projection}_exps.{expert}.numa.{part}"
            assert out[f"{key}.weight"].tobytes() == weight.tobytes() and (out[f"{key}.scale"] == scale).all()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["model"]["dtypes"] == [kind.name]


def test_loose_files_hold_the_same_bytes(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = make(KINDS["DeepSeek-V4"], tmp_path / "model")
    for out, more in (("merged", ()), ("loose", ("--no-merge-safetensor",))):
        cli("cpu", "-i", folder, "-o", tmp_path / out, "--quant-method", "int8", *more)
    tensors = {t.data for name, t in read_folder(tmp_path / "merged").items() if name.endswith((".weight", ".scale"))}
    assert {p.read_bytes() for p in (tmp_path / "loose").rglob("*.kt")} == tensors


@pytest.mark.parametrize(
    "name", ["compressed-tensors MXFP4", "MXFP8", "E8M0 of 128x128, DeepSeek-V4", "modelopt NVFP4"]
)
def test_for_a_gpu(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """W4A16 of the values; what is quantized beside the experts becomes BF16 without its scales."""
    kind = KINDS[name]
    folder, values = make(kind, tmp_path / "model")
    beside_bits: Bits = None

    def with_attention(tensors: Tensors) -> None:
        nonlocal beside_bits
        stored, beside_bits = kind.make(np.random.default_rng(9), 128, 256)
        for suffix, (dtype, bits) in stored.items():
            tensors[f"model.layers.0.self_attn.q_proj{suffix}"] = Tensor(dtype, bits.shape, bits.tobytes())

    edit_file(folder / "model.safetensors", with_attention)
    model = model_of(folder)
    rest = other_tensors(model.source, model.expert_tensor_names(), model.quantization)
    assert set(rest.tensors) == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"}
    cli("gpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "RTN", "--quant-type", "W4A16")
    cli("verify", tmp_path / "out", "--against", folder, "--no-load")
    out = bits_of(read_folder(tmp_path / "out"))
    assert (out["model.layers.0.self_attn.q_proj.weight"] == beside_bits).all()
    assert not [n for n in out if "q_proj" in n and n != "model.layers.0.self_attn.q_proj.weight"]
    for key, bits in values.items():
        codes, scales = groups.quantize_groups(4, 128, bits)
        assert (out[f"{base_of(kind, *key)}.weight_packed"] == groups.pack_words(4, codes)).all()
        assert (out[f"{base_of(kind, *key)}.weight_scale"] == scales).all()


@pytest.mark.parametrize("command", ["dequantize", "gpu"])
def test_a_config_no_longer_says_that_experts_are_fp4(command: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """DeepSeek-V4's has a key of its own for that, by which loaders go."""
    folder, _ = make(KINDS["DeepSeek-V4"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "expert_dtype": "fp4", "swiglu_limit": 10}))
    gpu = ("--quant-method", "RTN", "--quant-type", "W8A16") if command == "gpu" else ()
    cli(command, "-i", folder, "-o", tmp_path / "out", *gpu)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "expert_dtype" not in written and written["swiglu_limit"] == 10


def test_inspected(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = make(KINDS["modelopt NVFP4"], tmp_path / "model")
    seen = json.loads(cli("inspect", folder, "--json").stdout)
    assert seen["expert_dtypes"] == ["NVFP4"] and seen["convert"] and seen["convert_gpu"]


@pytest.mark.parametrize("name", ["DeepSeek-V4", "MXFP8", "compressed-tensors NVFP4"])
def test_killed_and_resumed_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    folder, _ = make(KINDS[name], tmp_path / "model")
    shim, log = killpoint.build(tmp_path), tmp_path / "log"

    def run(out: Path, n: int) -> int:
        command = [*KTCONVERT, "cpu", "-i", str(folder), "-o", str(out), "--threadpool-count", "1", "-q"]
        return killpoint.run(command, out, n, shim, log).returncode

    assert run(tmp_path / "whole", 0) == 0
    wanted, calls = tree(tmp_path / "whole"), killpoint.count(log)
    assert run(tmp_path / "out", calls // 2) == killpoint.KILLED
    assert run(tmp_path / "out", 0) == 0
    assert tree(tmp_path / "out") == wanted


def test_tensors_that_no_type_is_aligned_to(made: tuple[Kind, Path, dict[tuple[int, str], Bits]]) -> None:
    _, folder, values = made
    moved = folder.with_name("moved")
    if not moved.exists():
        moved.mkdir()
        (moved / "config.json").write_bytes((folder / "config.json").read_bytes())
        odd: dict[str, Any] = {"model.odd": ("BOOL", np.ones(3, np.uint8))}
        write_file(moved / "model.safetensors", {**odd, **read_file(folder / "model.safetensors")})
    model = model_of(moved)
    for (expert, projection), bits in values.items():
        assert (kernels.decode(model.linear(0, expert, projection)) == bits).all()


def test_a_plan_counts_what_is_decoded_before_it_is_transposed(tmp_path: Path) -> None:
    """Codes of 4 bits are not read transposed; FP8 codes are."""
    for name, whole in (("DeepSeek-V4", 2 * H * I), ("MXFP8", 0)):
        folder, _ = make(KINDS[name], tmp_path / name)
        model = model_of(folder)
        assert model.reading_bytes(0, backward=True) - model.reading_bytes(0) == whole
        assert model.reading_bytes(0) == 4 * H * I // 32


# ---- files of the libraries, and of kt-kernel -----------------------------------------------------------------------


def library(name: str, folder: Path, **config: Any) -> tuple[MoeModel, dict[str, Any]]:
    """A file that a library wrote, with a config; and the hashes of its own values."""
    path = GOLDEN / f"{name}.safetensors"
    stored = {key: t for key, t in read_file(path).items() if not key.endswith(".expected")}
    quantization = json.loads(metadata_of(path)["quantization_config"])
    document = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "quantization_config": quantization} | config
    (folder / "config.json").write_text(json.dumps(document))
    write_file(folder / "model.safetensors", stored)
    return model_of(folder, to_read=True), json.loads(metadata_of(path)["expected_sha256"])


def digest(bits: Bits) -> str:
    """Of BF16 values, where -0 counts as +0."""
    return hashlib.sha256(np.where(bits == 0x8000, 0, bits).astype("<u2").tobytes()).hexdigest()


@pytest.mark.parametrize("name", ["ct_mxfp4", "ct_nvfp4", "modelopt_nvfp4"])
def test_values_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    model, hashes = library(name, tmp_path)
    seen = 0
    for expert in range(model.shape(0)[0]):
        for projection in PROJECTIONS:
            about = hashes[f"model.layers.0.mlp.experts.{expert}.{projection}_proj"]
            bits = kernels.decode(model.linear(0, expert, projection))
            assert list(bits.shape) == about["shape"] and digest(bits) == about["sha256"]
            seen += 1
    assert seen


def test_values_are_those_of_transformers_for_gpt_oss(tmp_path: Path) -> None:
    """Gate and up are even and odd rows; transformers gives both in one [E, H, 2I], and down_proj as [E, I, H]."""
    model, hashes = library("gptoss_mxfp4", tmp_path, model_type="gpt_oss")
    count, hidden, width = model.shape(0)
    assert model.arch.name == "gpt-oss" and model.refusal is not None
    gate_up = np.empty((count, hidden, 2 * width), np.uint16)
    down = np.empty((count, width, hidden), np.uint16)
    for expert in range(count):
        gate_up[expert, :, ::2] = kernels.decode(model.linear(0, expert, "gate")).T
        gate_up[expert, :, 1::2] = kernels.decode(model.linear(0, expert, "up")).T
        down[expert] = kernels.decode(model.linear(0, expert, "down")).T
    for part, bits in (("gate_up", gate_up), ("down", down)):
        about = hashes[f"model.layers.0.mlp.experts.{part}_proj"]
        assert list(bits.shape) == about["shape"] and digest(bits) == about["sha256"]


def test_gpt_oss_is_inspected_and_its_biases_are_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    library("gptoss_mxfp4", tmp_path, model_type="gpt_oss")
    seen = json.loads(cli("inspect", tmp_path, "--json").stdout)
    assert seen["expert_dtypes"] == ["MXFP4"] and "biases" in seen["refused"]
    text = cli("inspect", tmp_path).stdout
    assert (
        "expert dtypes    MXFP4" in text and "cpu, gpu         not possible: gpt-oss: its experts have biases" in text
    )
    for command in (("cpu", "-i"), ("gpu", "--quant-method", "RTN", "-i")):
        done = cli(*command, tmp_path, "-o", tmp_path / "out", code=3)
        assert "biases and a clamped activation" in done.stderr


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("name, model_type", [("native_MXFP4_v4", "deepseek_v4"), ("native_MXFP8_m3", "minimax_m3_vl")])
def test_the_forward_of_our_values_is_kt_kernels_reference(name: str, model_type: str, tmp_path: Path) -> None:
    """In float64: the values are exact in BF16."""
    stored = read_file(GOLDEN / f"{name}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 1}))
    write_file(tmp_path / "model.safetensors", {n: t for n, t in stored.items() if not n.startswith(("in.", "out."))})
    model = model_of(tmp_path)
    assert model.dtypes == (name.split("_")[1],)

    def weight(expert: int, projection: str) -> Any:
        return reference.bf16_to_f32(kernels.decode(model.linear(0, expert, projection))).astype(np.float64)

    hidden = reference.bf16_to_f32(stored["in.hidden"].bits).astype(np.float64)
    ids, weights = stored["in.topk_ids"].bits, stored["in.topk_weights"].bits.astype(np.float64)
    out = np.zeros_like(hidden)
    for token, x in enumerate(hidden):
        for expert, factor in zip(ids[token], weights[token], strict=True):
            gate, up, down = (weight(int(expert), p) for p in PROJECTIONS)
            out[token] += factor * (down @ (silu(gate @ x) * (up @ x)))
    wanted = stored["out.float64_reference"].bits
    assert np.abs(out - wanted).max() <= 1e-12 * np.abs(wanted).max()


# ---- refusals -------------------------------------------------------------------------------------------------------


def replaced(suffix: str, dtype: str, bits: Bits) -> Callable[[Tensors, str], Any]:
    return lambda tensors, base: tensors.__setitem__(f"{base}{suffix}", Tensor(dtype, bits.shape, bits.tobytes()))


def without(suffix: str) -> Callable[[Tensors, str], Any]:
    return lambda tensors, base: tensors.pop(f"{base}{suffix}")


def nothing_but_scales_of_inputs(tensors: Tensors, base: str) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    tensors[f"{base}.input_scale"] = Tensor("F32", (), bytes(4))


ONE = np.ones((1,), np.float32)
REFUSED: dict[str, tuple[str, Callable[[Tensors, str], Any], type[KtconvertError], str]] = {
    "MXFP4 without scales": (
        "DeepSeek-V4",
        without(".scale"),
        InputError,
        r"1\.w1\.weight' is I8, and its scales \(layers\.0\.ffn\.experts\.1\.w1\.scale\) are missing",
    ),
    "MXFP4 without codes": ("DeepSeek-V4", without(".weight"), InputError, r"is a scale whose weight .* is missing"),
    "too few scales": (
        "DeepSeek-V4",
        replaced(".scale", "F8_E8M0", np.zeros((I, H // 64), np.uint8)),
        InputError,
        r"scale' of shape \[256, 6\] does not fit .* \[256, 384\] with a scale for each 32 columns",
    ),
    "codes of another size": (
        "compressed-tensors MXFP4",
        replaced(".weight_packed", "U8", np.zeros((I, H // 4), np.uint8)),
        InputError,
        "shape|does not fit|must be",
    ),
    "codes that are no matrix": (
        "compressed-tensors MXFP4",
        replaced(".weight_packed", "U8", np.zeros(I * H // 2, np.uint8)),
        InputError,
        "must be a matrix of bytes",
    ),
    "E8M0 scales that fit no block": (
        "MXFP8",
        replaced(".weight_scale_inv", "U8", np.zeros((I, 7), np.uint8)),
        InputError,
        "does not fit",
    ),
    "NVFP4 without the scale for all": (
        "compressed-tensors NVFP4",
        without(".weight_global_scale"),
        InputError,
        "is NVFP4 but .*weight_(global_scale|scale_2) is missing",
    ),
    "NVFP4 with both conventions": (
        "modelopt NVFP4",
        replaced(".weight_global_scale", "F32", ONE),
        InputError,
        "needs none",
    ),
    "NVFP4 with scales for all of each row": (
        "modelopt NVFP4",
        replaced(".weight_scale_2", "F32", np.ones(I, np.float32)),
        InputError,
        "must be one F32",
    ),
    "NVFP4 with scales of MXFP4": (
        "modelopt NVFP4",
        replaced(".weight_scale", "U8", np.zeros((I, H // 32), np.uint8)),
        InputError,
        "needs none",
    ),
    "nothing but scales of inputs": (
        "modelopt NVFP4",
        nothing_but_scales_of_inputs,
        InputError,
        r"experts\.0\.gate_proj\.weight' is missing, though layer 0 has other expert tensors",
    ),
    "scales of another type": (
        "compressed-tensors MXFP4",
        replaced(".weight_scale", "BF16", np.zeros((I, H // 32), np.uint16)),
        InputError,
        "is INT4 but .*weight_shape is missing",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    name, change, error, words = REFUSED[what]
    folder, _ = make(KINDS[name], tmp_path / "model")
    edit_file(folder / "model.safetensors", lambda tensors: change(tensors, base_of(KINDS[name], 1, "gate")))
    with pytest.raises(error, match=words):
        model_of(folder)


BAD_SCALES: dict[str, tuple[str, str, Any, str]] = {
    "E8M0 255": ("DeepSeek-V4", ".scale", 255, r"w1\.scale': scale \[3, 2\] is nan"),
    "E8M0 255 of FP8": ("MXFP8", ".weight_scale_inv", 255, r"weight_scale_inv': scale \[3, 2\] is nan"),
    "E4M3 NaN": ("modelopt NVFP4", ".weight_scale", 0x7F, r"weight_scale': scale \[3, 2\] is nan"),
}


@pytest.mark.parametrize("what", BAD_SCALES)
def test_a_scale_that_is_no_number_is_refused_with_its_place(
    what: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    name, suffix, code, words = BAD_SCALES[what]
    folder, _ = make(KINDS[name], tmp_path / "model")

    def change(tensors: Tensors) -> None:
        tensor = tensors[f"{base_of(KINDS[name], 1, 'gate')}{suffix}"]
        bits = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape).copy()
        bits[3, 2] = code
        tensors[f"{base_of(KINDS[name], 1, 'gate')}{suffix}"] = Tensor(tensor.dtype, tensor.shape, bits.tobytes())

    edit_file(folder / "model.safetensors", change)
    with pytest.raises(InputError, match=words):
        model_of(folder).linear(0, 1, "gate")
    if what == "E8M0 255":
        cli("cpu", "-i", folder, "-o", tmp_path / "out", "--threadpool-count", 1, code=5)


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_a_scale_for_all_that_no_number_can_be_divided_by(value: float, tmp_path: Path) -> None:
    folder, _ = make(KINDS["compressed-tensors NVFP4"], tmp_path / "model")
    name = f"{base_of(KINDS['compressed-tensors NVFP4'], 0, 'up')}.weight_global_scale"
    data = np.array([value], np.float32).tobytes()
    edit_file(folder / "model.safetensors", lambda t: t.__setitem__(name, Tensor("F32", (1,), data)))
    with pytest.raises(InputError, match=r"weight_global_scale': scale|weight_global_scale' divides scales and is 0"):
        model_of(folder).linear(0, 0, "up")


def test_a_product_that_overflows_is_refused_with_its_place(cli: Callable[..., Any], tmp_path: Path) -> None:
    kind = KINDS["DeepSeek-V4"]
    folder, _ = make(kind, tmp_path / "model")
    base = base_of(kind, 1, "down")

    def change(tensors: Tensors) -> None:
        codes, exponents = (
            np.frombuffer(tensors[f"{base}{s}"].data, np.uint8).reshape(tensors[f"{base}{s}"].shape).copy()
            for s in (".weight", ".scale")
        )
        exponents[5, 4] = 254
        codes[5, 64:80] = 0x11  # 0.5 times 2^127
        codes[5, 70] = 0x70  # 6 times 2^127, in column 141
        tensors[f"{base}.weight"] = Tensor("I8", codes.shape, codes.tobytes())
        tensors[f"{base}.scale"] = Tensor("F8_E8M0", exponents.shape, exponents.tobytes())

    edit_file(folder / "model.safetensors", change)
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "int8", code=5)
    assert "layers.0.ffn.experts.1.w2.weight" in done.stderr and "row 5, column 141" in done.stderr


def test_experts_of_mtp_blocks_are_left_out(tmp_path: Path) -> None:
    kind = KINDS["DeepSeek-V4"]
    folder, values = make(kind, tmp_path / "model")

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            tensors[name.replace("layers.0", "mtp.0")] = tensors[name]

    edit_file(folder / "model.safetensors", change)
    model = model_of(folder)
    assert model.layers == (0,) and len(model.mtp_tensors) == 2 * len(values)
    assert "MTP" in model.notes[0]


def test_a_wrong_claim_names_what_they_are(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = make(KINDS["compressed-tensors MXFP4"], tmp_path / "model")
    done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--input-type", "mxfp8", "--dry-run", code=5)
    assert "the experts are MXFP4" in done.stderr
