"""`cpu` to MXFP4, FP8 and BF16, in NUMA slices and as kt-kernel's native methods read them (`--layout kt`).

Outputs hold the values of the definition, or those of a source that already has the format. Tests kill, resume, damage
and compute with outputs, and check refusals.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction, record_functions
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import fp4
from ktconvert.layouts.encodings.encoding import is_zero
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import FORMATS, kt_kernel
from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant.matrix import Matrix
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.quantizers import packed
from rig import conversion, encodings, floats, reference
from rig import gguf as ggml
from rig.encodings import PROJECTIONS, W132
from rig.files import rewrite
from rig.safetensors import bits_of, data_start, edit_header, header_of, read_folder

METHODS = ("mxfp4", "fp8", "bf16")
KEPT = "the experts are {} already, so every number stays the same"
Outputs = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a BF16 source."""
    return conversion.checkpoint(tmp_path_factory.mktemp("outputs") / "source", layers=2, hidden=256, width=256)


@pytest.fixture(scope="module")
def outputs(source: Path, cli: Any) -> Outputs:
    """Return a function that converts the source once per method and options, and returns the output and stderr."""

    @functools.cache
    def convert(method: str, *how: object) -> tuple[Path, str]:
        out = source.with_name(f"{method} {how}")
        return out, cli("cpu", "-i", source, "-o", out, "--quant-method", method, *how).stderr

    return convert


NUMA1, NUMA2, KT = ("--threadpool-count", 1), ("--threadpool-count", 2), ("--layout", "kt")
LAYOUTS = [*((method, how) for method in METHODS for how in (NUMA1, NUMA2, KT)), ("rawint4", KT)]
every_layout = pytest.mark.parametrize(("method", "how"), LAYOUTS, ids=lambda p: p if isinstance(p, str) else p[1])


def slice_count(how: tuple[Any, ...]) -> int:
    """Return the number of NUMA slices of a layout."""
    return 1 if how == KT else how[1]


def define_tensors(method: str, how: tuple[Any, ...], bits: Any) -> list[Any]:
    """Return the tensors of a linear of these BF16 values, by the definition."""
    if method == "rawint4":
        codes, scales = reference.quantize_groups(4, 32, bits, "signed")
        return [packed.pack_words(4, codes), np.array(bits.shape), scales]
    if method == "bf16":
        return [bits if how == KT else floats.to_panels(bits)]
    codes, scales = (reference.quantize_mxfp4 if method == "mxfp4" else reference.quantize_fp8)(bits)
    if how == KT:
        return [codes[:, ::2] | codes[:, 1::2] << 4 if method == "mxfp4" else codes, scales]
    if method == "fp8":
        return [floats.to_panels(codes), scales]
    return [floats.pack_codes(codes), fp4.exponents_to_panels(scales)]


def tensor_names(method: str, how: tuple[Any, ...], layer: int, expert: int, projection: str, part: int) -> list[str]:
    """Return the names of these tensors."""
    if how != KT:
        base = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{part}"
        return [f"{base}.codes", f"{base}.scales"][: 1 if method == "bf16" else 2]
    if method == "mxfp4":  # DeepSeek-V4's
        return [f"layers.{layer}.ffn.experts.{expert}.{W132[projection]}.{suffix}" for suffix in ("weight", "scale")]
    base = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
    if method == "rawint4":
        return [f"{base}_{suffix}" for suffix in ("packed", "shape", "scale")]
    return [base, f"{base}_scale_inv"][: 1 if method == "bf16" else 2]


def check_tensors(out: Path, method: str, how: tuple[Any, ...], model: MoeModel, expected: Callable[..., Any]) -> None:
    """Assert that an output has these tensors and no others."""
    tensors = bits_of(read_folder(out))
    for layer in model.layers:
        for expert in range(model.shape(layer)[0]):
            for projection in PROJECTIONS:
                for part in Slicing(layer, *model.shape(layer)[1:], slice_count(how)).slices(expert, projection):
                    keys = tensor_names(method, how, layer, expert, projection, part.node)
                    linear = part.cut_linear(model.linear(layer, expert, projection))
                    for key, bits in zip(keys, expected(linear), strict=True):
                        assert (tensors.pop(key).view(bits.dtype) == bits).all(), key
    assert not tensors


@every_layout
def test_outputs_equal_the_definition(method, how, source, outputs, cli):
    out, stderr = outputs(method, *how)
    assert (
        (KEPT.format("BF16") in stderr) == (method == "bf16") and "rounds twice" not in stderr and "int8" not in stderr
    )
    assert ("only AVX2" in stderr) == (method == "rawint4")
    model = recognize(open_checkpoint(source))
    check_tensors(out, method, how, model, lambda part: define_tensors(method, how, reference.decode(part)))
    name = f"{'kt_' if how == KT and method != 'rawint4' else ''}{method}"
    options = ("--quant-method", name, "--numa", slice_count(how))
    report = json.loads(cli("verify", out, "--against", source, "--full", "--json", *options).stdout)
    assert report["method"] == name.upper() and name.upper() in cli("inspect", out).stdout
    opened = measure_output(open_output(out))
    assert opened.shapes == dict.fromkeys((0, 1), (2, 256, 256)) and opened.fmt == FORMATS[name.upper()]


def test_single_rows_of_an_output_can_be_decoded():
    for method, form in ((method, FORMATS[method.upper()].encoding) for method in METHODS):
        bits = conversion.bf16(np.random.default_rng(2), 256, 128)
        packed = [
            np.ascontiguousarray(tensor).reshape(-1).view(np.uint8) for tensor in define_tensors(method, NUMA1, bits)
        ]
        values = form.decode(packed, 256, 128)
        exact = {
            "bf16": reference.bf16_to_f32,
            "fp8": fp8_values,
            "mxfp4": lambda b: fp4.dequantize(*reference.quantize_mxfp4(b)),
        }
        assert (values == exact[method](bits)).all()
        for rows in (slice(5, 40), np.array([63, 1])):
            assert (form.decode(packed, 256, 128, rows) == values[rows]).all()
        assert not is_zero(form, packed, 256, 128)
        zeros = 0x88 if method == "mxfp4" else 0x80
        signs = np.resize(np.array([0, zeros] if method == "bf16" else [zeros], np.uint8), packed[0].size)
        assert is_zero(form, [packed[0] & signs, *packed[1:]], 256, 128)


def fp8_values(bits: Any) -> Any:
    """Return the values of FP8 by the definition."""
    codes, scales = reference.quantize_fp8(bits)
    return reference.E4M3[codes] * reference.repeat_blocks(scales)


def keep_tensors(method: str, part: Matrix) -> list[Any]:
    """Return the tensors of a slice whose codes and scales are kept."""
    if method == "fp8":
        (row, column), (n, k) = (start // 128 for start in part.origin), part.shape
        scales = part.scales[row : row + n // 128, column : column + k // 128]  # type: ignore[index]
        return [floats.to_panels(np.ascontiguousarray(part.values)), scales]
    scales = part.element_scales()[:, ::32]
    values = reference.bf16_to_f32(reference.decode(part)) / np.repeat(scales, 32, axis=1)
    codes = (
        np.searchsorted(encodings.E2M1[:8], np.abs(values)).astype(np.uint8) | np.signbit(values).astype(np.uint8) << 3
    )
    exponents = (np.log2(scales.astype(np.float64)) + 127).astype(np.uint8)
    return [floats.pack_codes(codes), fp4.exponents_to_panels(exponents)]


def test_rawint4_keeps_int4_in_groups_of_32(tmp_path, cli):
    """Codes, including -8, and scales are kept bit for bit."""
    folder, _ = encodings.write("ct 4", tmp_path / "model")
    stderr = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", "rawint4", *NUMA1).stderr
    assert KEPT.format("RAWINT4") in stderr and "rounds twice" not in stderr
    how = ("--quant-method", "int4", "--threadpool-count", 3, "--dry-run")
    other = cli("cpu", "-i", folder, "-o", tmp_path / "x", *how)
    assert "--quant-method rawint4 keeps every number" in other.stdout + other.stderr
    source, made = (bits_of(read_folder(path)) for path in (folder, tmp_path / "out"))
    assert made and {8, 0} <= set((next(v for k, v in made.items() if k.endswith("packed")).view(np.uint8) & 15).flat)
    for key, tensor in made.items():
        assert key.startswith("model.layers.") and (tensor == source[key]).all()
    check_unchanged_values(tmp_path / "out", folder, cli)


@pytest.mark.parametrize("method", ["int4", "mxfp4", "rawint4"])
def test_large_linears_are_packed_as_one(method, tmp_path, cli):
    """The linear is packed as a whole: weight_shape of RAWINT4 cannot be split by rows."""
    source = conversion.checkpoint(tmp_path / "source", layers=1, experts=1, hidden=1024, width=384)
    cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", method, "--scale", "mse", *NUMA1)
    cli("verify", tmp_path / "out", "--against", source, "--full")


SAME = {
    "fp8": ("FP8 in blocks", "E8M0 of 128x128"),
    "mxfp4": ("DeepSeek-V4", "V4 in unsigned bytes", "ct MXFP4", "blocks"),
}


@pytest.mark.parametrize(("method", "name"), [(method, name) for method, names in SAME.items() for name in names])
def test_codes_and_scales_are_kept(method, name, tmp_path, cli):
    """`verify` finds that no value was changed, and the plan reports it."""
    folder, _ = encodings.write(name, tmp_path / "model")
    how = ("--threadpool-count", 3)
    stderr = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", method, *how).stderr
    assert KEPT.format(method.upper()) in stderr and "rounds twice" not in stderr and "better choice" not in stderr
    check_tensors(
        tmp_path / "out", method, how, recognize(open_checkpoint(folder)), lambda part: keep_tensors(method, part)
    )
    check_unchanged_values(tmp_path / "out", folder, cli)
    again = ("cpu", "-i", folder, "-o", tmp_path / "x", *how, "--dry-run", "--quant-method")
    other = cli(*again, "int4")
    assert f"--quant-method {method} keeps every number" in other.stdout + other.stderr
    if method == "mxfp4":
        assert "stores them unchanged; leave out --scale" in cli(*again, method, "--scale", "mse", code=2).stderr


def check_unchanged_values(out: Path, folder: Path, cli: Any) -> None:
    """Assert that no value of an output differs from the source."""
    report = json.loads(cli("verify", out, "--against", folder, "--full", "--json").stdout)
    assert {layer["relative_error"] for layer in report["errors"]} == {0.0}


def test_mxfp4_of_gguf_keeps_its_values(cli, tmp_path):
    about = ggml.model_metadata(1, embedding_length=192, expert_feed_forward_length=128)
    folder = ggml.write(tmp_path / "model.gguf", ggml.model([("MXFP4",) * 3], hidden=192, width=128), about)
    held = "BF16 can represent all numbers of MXFP4, so every number stays"
    for method, message in (("mxfp4", KEPT.format("MXFP4")), ("bf16", held)):
        stderr = cli("cpu", "-i", folder, "-o", tmp_path / method, "--quant-method", method).stderr
        assert message in stderr and "rounds twice" not in stderr
        check_unchanged_values(tmp_path / method, folder, cli)


@pytest.mark.parametrize("name", ["FP8 of 128x64", "FP8 of 1x256", "FP8 of 256x256", "modelopt NVFP4"])
def test_other_scales_are_rounded(name, tmp_path, cli, monkeypatch):
    method = "mxfp4"
    if name.startswith("FP8"):
        method, block = "fp8", tuple(map(int, name.removeprefix("FP8 of ").split("x")))
        make, config = encodings.fp8(block, ".weight_scale_inv"), encodings.fp8_config(block)
        monkeypatch.setitem(encodings.ENCODINGS, name, encodings.Encoding("F8_E4M3", "fp8", make, config))
    folder, _ = encodings.write(name, tmp_path / "model")
    how = ("--threadpool-count", 3)
    stderr = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", method, *how).stderr
    assert (
        f"{'FP8' if method == 'fp8' else 'NVFP4'} to {method.upper()} rounds twice" in stderr
        and "already" not in stderr
    )
    model = recognize(open_checkpoint(folder))
    check_tensors(
        tmp_path / "out", method, how, model, lambda part: define_tensors(method, how, reference.decode(part))
    )
    cli("verify", tmp_path / "out", "--against", folder, "--full")


def test_kt_layout_is_described_in_card_and_plan(source, outputs, cli, tmp_path):
    """Without its manifest, such an output cannot be distinguished from a checkpoint."""
    for method in METHODS:
        out, stderr = outputs(method, *KT, *NUMA2)
        assert "NUMA slice" not in stderr
        card = (out / "README.md").read_text()
        assert f"--kt-method {method.upper()} " in card
        assert f"| kt-kernel 0.7.2 | loads and computes it as {method.upper()} |" in card
        ours = (outputs(method, *NUMA2)[0] / "README.md").read_text()
        assert "| kt-kernel 0.7.2 | does not load it; use ktconvert's runtime" in ours and "ktconvert run" in ours
        planned = cli("cpu", "-i", source, "-o", tmp_path / "x", "--quant-method", method, *KT, "--dry-run", "--json")
        assert len(json.loads(planned.stdout.splitlines()[-1])["units"]) == 2
    assert is_output(out) and not is_output(source)
    shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("manifest.json"))
    assert not is_output(tmp_path / "copy")


def test_plans_say_whether_kt_kernel_computes_the_experts(tmp_path, cli):
    """A limit is computed by some methods of kt-kernel, and only if they are told."""
    folder, _ = encodings.write("DeepSeek-V4", tmp_path / "model", expert_dtype="fp4", swiglu_limit=10)
    for method, how, words, warned in (
        ("int8", NUMA1, "loads it as AMXINT8, but computes only silu(gate) * up without a limit, and these", True),
        ("mxfp4", KT, "loads and computes it as MXFP4, if its caller passes swiglu_limit = 10", False),
    ):
        done = cli("cpu", "-i", folder, "-o", tmp_path / "out", "--quant-method", method, *how, "--dry-run")
        assert f"kt-kernel     {words}" in done.stdout
        assert (words in done.stderr) == warned == ("use ktconvert's runtime" in done.stderr)


@pytest.mark.parametrize("name", kt_kernel.KT_METHODS)
def test_kt_kernel_computes_only_silu(name):
    """Every output that it does not compute names the runtime that does, and the card starts that one."""
    functions = [PLAIN, ExpertFunction(limit=7.0), ExpertFunction("gelu_tanh"), ExpertFunction(biases=True)]
    functions += [ExpertFunction("relu2", gated=False), ExpertFunction(weights_on="input")]
    method = kt_kernel.KT_METHODS[name]
    for function in functions:
        can = method is not None and (function == PLAIN or (method.limit and function.limit > 0))
        support = kt_kernel.describe_support({"method": name, "functions": record_functions({0: function})})
        assert can == (kt_kernel.INSTEAD not in support) == support.startswith("loads and computes it as")
        assert can or method is None or str(function) in support
    assert method is None or method.name == name.removeprefix("KT_")


def test_verify_does_not_advise_options_of_other_programs(outputs, cli):
    stderr = cli("verify", outputs("mxfp4", *NUMA2)[0], "--numa", 4, code=6).stderr
    assert "; load it as MXFP4, 2 NUMA slice" in stderr
    assert ", or rewrite it with `ktconvert resplit`" in stderr and "kt-" not in stderr


@pytest.mark.parametrize(
    ("code", "text", "options"),
    [
        (2, "FP8 has no loose files", ("fp8", "--no-merge-safetensor")),
        (2, "FP8 has no matrices for fine-tuning", ("fp8", "--save-backward-weights")),
        (3, "256/4 = 64, is not a multiple of 128", ("fp8", "--threadpool-count", 4)),
        (3, "fp8 with --numa 1, 2", ("fp8", *KT, "--threadpool-count", 4)),
        (3, "rawint4 or bf16 with --numa 1, 2, 4, 8", ("rawint4", "--threadpool-count", 16)),
        (3, "; or bf16 or rawint4 with --numa 1, 2, 4, 8", ("int4", "--threadpool-count", 8)),
        (2, "--layout numa is for int4, int8, mxfp4, fp8, bf16; rawint4 has", ("rawint4", "--layout", "numa")),
        (2, "BF16 has no loose files; leave out --no-merge-safetensor, or add", ("bf16", "--no-merge-safetensor")),
        (2, "without the experts; add --no-merge-safetensor", ("bf16", "--save-backward-weights")),
        (3, "is not a multiple of 32", ("bf16", "--threadpool-count", 16)),
        (
            2,
            "--layout kt is for mxfp4, fp8, bf16, rawint4; int4 has the layout numa: leave out --layout",
            ("int4", *KT),
        ),
        (2, "--layout kt contains only experts", ("fp8", *KT, "--non-experts", "keep")),
        (2, "has no loose files", ("fp8", *KT, "--no-merge-safetensor")),
    ],
)
def test_unsupported_options_are_refused(code, text, options, source, tmp_path, cli):
    result = cli("cpu", "-i", source, "-o", tmp_path / "x", "--quant-method", *options, code=code)
    assert text in result.stderr


# Method, options, tensor of a weight, offset, new bytes, message.
DAMAGE: list[tuple[str, tuple[Any, ...], int, int, bytes, str]] = [
    ("mxfp4", NUMA1, 1, 40, b"\xff", "scale 40, 255, is not a number"),
    ("mxfp4", NUMA2, 1, 40, b"\xfe", "scale 40, 254, makes a number infinite"),
    ("fp8", NUMA2, 0, 0, b"\x7f", "is not a number"),
    ("fp8", NUMA2, 1, 0, bytes(4), "is 0.0"),
    ("fp8", NUMA2, 1, 0, b"\0\0\x80\xff", "is -inf"),
    ("bf16", NUMA1, 0, 6, b"\x80\x7f", "is infinite or not a number"),
    ("mxfp4", KT, 1, 3, b"\xff", "is not a number"),
    ("fp8", KT, 0, 8, b"\xff", "is not a number"),
    ("bf16", KT, 0, 2, b"\xff\x7f", "not a number"),
    ("rawint4", KT, 1, 0, b"\1", "weight_shape is 257 x 256"),
    ("rawint4", KT, 2, 4, b"\x80\xff", "scale 2 is infinite or not a number"),
]


def damage_tensor(out: Path, key: str, at: int, to: bytes) -> None:
    """Replace bytes of a tensor in an output."""
    shard = next(path for path in out.glob("*.safetensors") if key in header_of(path))
    data, begin = bytearray(shard.read_bytes()), data_start(shard) + header_of(shard)[key]["data_offsets"][0] + at
    data[begin : begin + len(to)] = to
    rewrite(shard, bytes(data))


@pytest.mark.parametrize(("method", "how", "tensor", "at", "to", "message"), DAMAGE)
def test_verify_finds_damage(method, how, tensor, at, to, message, outputs, tmp_path, cli):
    key = tensor_names(method, how, 0, 1, "up", 0)[tensor]
    out = Path(shutil.copytree(outputs(method, *how)[0], tmp_path / "out"))
    damage_tensor(out, key, at, to)
    stdout = cli("verify", out, code=6).stdout
    assert f"{key} in model-" in stdout and message in stdout
    min(out.glob("model-*.safetensors")).unlink()
    cli("verify", out, code=6)


@pytest.mark.parametrize("method", METHODS)
def test_the_runtime_computes_with_outputs(method, source, outputs, tmp_path):
    """The results have the same bits as with these experts packed in memory."""
    model, out = recognize(open_checkpoint(source)), outputs(method, *KT)[0]
    stacks = (np.stack([reference.decode(model.linear(1, e, p)) for e in range(2)]) for p in PROJECTIONS)
    expected, ours = KTExperts.from_bf16(*stacks, method=method.upper()), KTExperts.load(out, 1, parts=1)
    assert ours.method == method.upper()
    call = floats.activations(3, 256), np.tile(np.arange(2), (3, 1)), np.full((3, 2), 0.5, np.float32)
    np.testing.assert_array_equal(ours.forward(*call), expected.forward(*call))


@pytest.mark.parametrize("method", METHODS)
def test_the_runtime_refuses_contradicting_and_damaged_outputs(method, outputs, tmp_path):
    out = Path(shutil.copytree(outputs(method, *KT)[0], tmp_path / "out"))
    shard, manifest_text = min(out.glob("model-*.safetensors")), (out / "manifest.json").read_text()
    before, other = shard.read_bytes(), next(f"KT_{other.upper()}" for other in METHODS if other != method)

    def check_refusal(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            KTExperts.load(out, 0)

    for name, value, message in (
        ("method", other, f"manifest.json: has method {other}, but the weights .*; convert it ag"),
        ("numa", 2, "manifest.json: has numa 2, but the weights .*; convert it ag"),
    ):
        document = json.loads(manifest_text)
        document["model"][name] = value
        rewrite(out / "manifest.json", json.dumps(document))
        check_refusal(UnsupportedError, message)
    rewrite(out / "manifest.json", manifest_text)
    assert KTExperts.load(out, 0).method == method.upper()
    for name, value in (("method", other), ("num_experts", "9"), ("hidden_size", "64")):
        edit_header(shard, lambda header, entry={name: value}: header["__metadata__"].update(entry))
        check_refusal(UnsupportedError, rf"{shard.name}: its header has {name} {value}, .*; convert it again")
        rewrite(shard, before)
    rewrite(shard, before[:-64])
    check_refusal(InputError, rf"{shard.name}: .*; convert it again")
    rewrite(shard, before)
    key = tensor_names(method, KT, 0, 1, "gate", 0)[0 if method == "bf16" else 1]
    damage_tensor(out, key, 0, {"mxfp4": b"\xff", "fp8": b"\0\0\xc0\x7f", "bf16": b"\xc0\x7f"}[method])
    check_refusal(InputError, rf"{shard.name}: tensor '{key}': .*; convert it again")
    shard.unlink()
    check_refusal(InputError, rf"names {shard.name}, which is missing; convert it again")
