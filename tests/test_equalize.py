"""`--equalize` scales up and down against each other: columns of down become alike, and the model stays the same."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.layouts.checkpoints import moe_model
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import Slicing, join_slices
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.statistics.imatrix import LayerSums, write_imatrix
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.pipeline.stages.quantize_experts import make_importance_reader
from ktconvert.quantizers import equalizing
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16
from rig import conversion
from rig.files import edit_json
from rig.safetensors import read_file, write_file
from rig.verifying import find_check, require_accepted, require_refused

EXPERTS, HIDDEN, WIDTH = 3, 256, 256
SCRAMBLED = "layer 0: 0, 2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; columns of down differ in experts 0 and 2 of the first layer, and rows of up compensate."""
    sizes = {"layers": 2, "experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH}
    folder = conversion.checkpoint(tmp_path_factory.mktemp("equalize") / "source", **sizes)
    path, rng = folder / "model-00001-of-00003.safetensors", np.random.default_rng(0)
    tensors: dict[str, Any] = {name: (t.dtype, t.bits) for name, t in read_file(path).items()}
    for expert in (0, 2):
        column_scales = np.exp(rng.normal(0, 0.7, WIDTH)).astype(np.float32)
        for projection, factor in (("up", 1 / column_scales[:, None]), ("down", column_scales)):
            name = f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight"
            tensors[name] = ("BF16", f32_to_bf16(bf16_to_f32(tensors[name][1]) * factor))
    write_file(path, tensors, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def imatrix(source: Path) -> Path:
    shapes = dict.fromkeys((0, 1), (EXPERTS, HIDDEN, WIDTH))

    def load(layer: int) -> LayerSums:
        rng = np.random.default_rng(layer)
        sums = [(10.0 ** rng.uniform(-3, 3, (EXPERTS, k))).astype(np.float32) for k in (HIDDEN, WIDTH)]
        return LayerSums(np.ones(EXPERTS, np.int64), *sums)

    path = source.parent / "imatrix.gguf"
    write_imatrix(path, shapes, load, datasets=["made up"], chunks=1, chunk_size=9)
    return path


def convert(source: Path, output: Path, *options: object, command: str = "cpu") -> Path:
    result = conversion.run_in_process(command, "-i", source, "-o", output, *options)
    assert result.exception is None, result.exception
    return output


def decode_expert(output: Path, layer: int, expert: int) -> list[Any]:
    """Return gate, up and down of an output in float32."""
    converted = open_output(output)
    measured = measure_output(converted)
    assert measured.fmt is not None
    grid, encoding = Slicing(layer, HIDDEN, WIDTH, measured.numa), measured.fmt.layer_format(layer).encoding
    linears = []
    for projection in PROJECTIONS:
        slices = []
        for numa_slice in grid.slices(expert, projection):
            suffixes = [tensor.name for tensor in encoding.tensors(numa_slice.n, numa_slice.k)]
            stored = [converted.read(converted.tensors[numa_slice.id, suffix]) for suffix in suffixes]
            slices.append(encoding.decode(stored, numa_slice.n, numa_slice.k, slice(None)))
        linears.append(join_slices(projection, slices))
    return linears


def scale_copy(bits: Any, exponents: Any) -> Any:
    copy = bits.copy()
    equalizing.multiply_by_powers(copy, exponents)
    return copy


EXTREMES = np.array([0, 0x8000, 1, 0x0080, 0x2000, 0x5F00, 0x7F7F, 0xFF80, 0x7FC0], np.uint16)  # from 0 to NaN


@given(st.integers(0, 2**32 - 1), st.floats(0, 20), st.booleans())
def test_equalizing_changes_no_product_of_up_and_down(seed: int, spread: float, extremes: bool) -> None:
    """The product of any number in row i of up with any in column i of down does not change."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.normal(0, spread, 32)
    up, down = (
        f32_to_bf16((rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 40) * each).astype(np.float32))
        for shape, each in (((32, 16), 1), ((16, 32), sizes))
    )
    if extremes:
        for bits in (up, down):
            bits[rng.random(bits.shape) < 0.01] = rng.choice(EXTREMES)
    row_exponents = equalizing.choose_exponents(up, down)
    level = equalizing.column_levels(down)
    center, before = equalizing.center_and_spread(level)
    if row_exponents is None:
        clamped = extremes or spread > 10  # then scaling could leave the range of normal numbers
        assert before <= equalizing.THRESHOLD or clamped
        return
    assert before > equalizing.THRESHOLD
    pairs = ((up, row_exponents[:, None]), (down, -row_exponents))
    for bits, exponents in pairs:
        x, y = (bf16_to_f32(each).astype(np.float64) for each in (bits, scale_copy(bits, exponents)))
        np.testing.assert_array_equal(y, x * 2.0**exponents)
        changed = np.abs(y[(y != x) & np.isfinite(y)])
        assert not changed.size or (changed.min() >= 2.0**-63 and changed.max() < 2.0**64)
    if not extremes and spread < 5:
        remaining = equalizing.column_levels(scale_copy(down, -row_exponents))
        assert np.abs(remaining - center).max() <= 0.5 + 1e-9


def test_levels_equal_the_definition() -> None:
    """The expected values are computed exactly, with integers."""
    rng = np.random.default_rng(1)
    down = f32_to_bf16((rng.standard_normal((200, 16)) * 2.0 ** rng.normal(0, 1, 16)).astype(np.float32))
    values = bf16_to_f32(down).astype(np.float64)
    squares = [sum(int(v * 2**40) ** 2 for v in column) for column in values.T]
    expected = [(s.bit_length() - 80 + s / 2 ** (s.bit_length() - 1)) / 2 for s in squares]
    np.testing.assert_allclose(equalizing.column_levels(down), expected, rtol=0, atol=1e-12)


PAIR: dict[str, tuple[str, ...]] = {"plain": (), "equalized": ("--equalize",)}
CASES: dict[str, tuple[object, ...]] = {
    "int4": (),
    "int8": ("--quant-method", "int8", "--threadpool-count", 1),
    "mse": ("--scale", "mse", "--max-shard-size", "100KB"),
    "imatrix": ("--scale", "imatrix", "--imatrix", "IMATRIX"),
    "mxfp4": ("--quant-method", "mxfp4", "--scale", "mse"),
    "rawint4": ("--quant-method", "rawint4"),
    "moe_int4": ("--quant-method", "moe_int4", "--layout", "plain"),
    "loose": ("--no-merge-safetensor",),
    "mix": ("--method-map", "1=fp8"),
}


@pytest.mark.parametrize("case", CASES)
def test_verify_accepts_equalized_experts(case: str, source: Path, imatrix: Path, tmp_path: Path) -> None:
    """Only up and down of experts whose columns differ have other bytes than without --equalize.

    verify explains each difference.
    """
    options = [imatrix if word == "IMATRIX" else word for word in CASES[case]]
    plain, output = (convert(source, tmp_path / name, *options, *equalize) for name, equalize in PAIR.items())
    statistics = ("--imatrix", imatrix) if case == "imatrix" else ()
    report = require_accepted(output, "--against", source, "--full", *statistics)
    assert (
        "2 experts are equalized, and up has the same codes as without --equalize"
        in find_check(report, "source")["result"]
    )
    assert report["equalized"] == [SCRAMBLED] and f"| equalized | {SCRAMBLED} |" in (output / "README.md").read_text()
    without = require_accepted(plain, "--against", source, "--full", *statistics)
    errors, errors_without = ({(e["layer"], e["projection"]): e for e in each["errors"]} for each in (report, without))
    assert errors.keys() == errors_without.keys()
    assert [key for key in errors_without if errors[key] != errors_without[key]] == [(0, "down")]
    for expert in range(EXPERTS):
        gate_up_down = zip(decode_expert(plain, 0, expert), decode_expert(output, 0, expert), strict=True)
        equal = [np.array_equal(without, equalized) for without, equalized in gate_up_down]
        assert equal == [True, expert == 1, expert == 1]
    manifest = json.loads((output / "manifest.json").read_bytes())
    assert manifest["settings"]["equalize"] is True
    assert "equalize" not in json.loads((plain / "manifest.json").read_bytes())["settings"]


def test_equalized_experts_have_less_error(source: Path, tmp_path: Path) -> None:
    """The small columns of the expert have large inputs. The reference is the checkpoint."""
    tensors = read_file(source / "model-00001-of-00003.safetensors")
    name = "model.layers.0.mlp.experts.2.{}_proj.weight"
    exact = [bf16_to_f32(tensors[name.format(projection)].bits) for projection in PROJECTIONS]
    x = np.random.default_rng(0).standard_normal((64, HIDDEN)).astype(np.float32)

    def forward(gate: Any, up: Any, down: Any) -> Any:
        g = x @ gate.T
        return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T

    outputs = {name: convert(source, tmp_path / name, "--scale", "mse", *equalize) for name, equalize in PAIR.items()}
    expected = forward(*exact)
    errors = {name: np.linalg.norm(forward(*decode_expert(path, 0, 2)) - expected) for name, path in outputs.items()}
    assert errors["equalized"] < 0.5 * errors["plain"]


def test_importance_grows_with_the_inputs(source: Path) -> None:
    with open_checkpoint(str(source)) as checkpoint:
        model = moe_model.equalize(recognize(checkpoint), (0, 1))
        equal_importance: Any = SimpleNamespace(read_importance=lambda *_: np.ones(WIDTH, np.float32))
        by_layer = [make_importance_reader(model, equal_importance, layer) for layer in (0, 1)]
        exponents = model.exponents(0, 2)
    assert exponents is not None
    importance = [function and function(2, "down") for function in by_layer]
    ratio = importance[0] / 4.0**exponents
    assert (ratio == ratio[0]).all() and ratio[0] > 0 and importance[0].max() == 1 == importance[1].max()
    assert (by_layer[0](2, "up") == 1).all()  # type: ignore[misc]


def test_equalizing_survives_resplit_and_works_for_the_gpu(source: Path, tmp_path: Path) -> None:
    one_slice = convert(source, tmp_path / "one", "--equalize", "--threadpool-count", 1)
    result = conversion.run_in_process(
        "resplit", one_slice, tmp_path / "two", "--threadpool-count", 2, "--against", source
    )
    assert result.exception is None, result.exception
    assert "--equalize" in result.output or "resplit is as good" in result.output
    assert require_accepted(tmp_path / "two", "--against", source)["equalized"] == [SCRAMBLED]
    options = ("--quant-method", "RTN", "--quant-type", "W4A16", "--equalize")
    gpu = convert(source, tmp_path / "gpu", *options, command="gpu")
    assert require_accepted(gpu, "--against", source, "--no-load")["equalized"] == [SCRAMBLED]
    assert f"| equalized | {SCRAMBLED} |" in (gpu / "README.md").read_text()


def test_verify_detects_a_wrong_exponent(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = equalizing.choose_exponents

    def wrong(up: Any, down: Any) -> Any:
        exponents = right(up, down)
        return exponents if exponents is None else exponents + (np.arange(len(exponents)) == 7).astype(np.int8)

    with monkeypatch.context() as patched:
        patched.setattr(equalizing, "choose_exponents", wrong)
        output = convert(source, tmp_path / "out", "--equalize")
    assert "quantizing the source gives" in require_refused(output, "--against", source)


def test_verify_detects_different_codes_of_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With factors that are not powers of two, conversion and verify agree, but the codes change."""

    def scale(bits: Any, exponents: Any) -> None:
        bits[:] = f32_to_bf16((bf16_to_f32(bits) * 1.4**exponents).astype(np.float32))

    monkeypatch.setattr(equalizing, "multiply_by_powers", scale)
    output = convert(source, tmp_path / "out", "--equalize")
    assert "up of expert 0 of layer 0 has different codes with and without --equalize" in require_refused(
        output, "--against", source
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ("cpu", "--quant-method", "fp8"),
            2,
            "FP8 keeps every number of these experts, or scales rows and columns together",
        ),
        (("cpu", "--quant-method", "bf16"), 2, "BF16 keeps every number"),
        (("cpu", "--quant-method", "mxfp4"), 3, "which changes if up_proj is scaled"),  # for a model that clamps up
        (("cpu", "--scale", "gptq", "--save-statistics", "S"), 2, "would describe the equalized experts"),
        (("gpu", "--quant-type", "W4A16", "--engine", "oneshot"), 2, "reads the original checkpoint"),
    ],
)
def test_unsupported_combinations_with_equalize_are_refused(
    options: tuple[str, ...], code: int, message: str, source: Path, tmp_path: Path
) -> None:
    command, *arguments = options
    if code == 3:
        source = Path(shutil.copytree(source, tmp_path / "clamped"))
        edit_json(source / "config.json", lambda config: config.update(swiglu_limit=7.0))
    if "gptq" in arguments or command == "gpu":
        pytest.importorskip("llmcompressor")
        arguments += ["--dataset", str(source / "tokenizer.json")]
    result = conversion.run_in_process(command, "-i", source, "-o", tmp_path / "out", "--equalize", *arguments)
    assert getattr(result.exception, "exit_code", None) == code and message in str(result.exception), result.exception


def test_inspect_shows_how_much_columns_differ(source: Path, tmp_path: Path) -> None:
    layers = json.loads(conversion.run_in_process("inspect", source, "--columns", "--json").output)["columns"]
    assert [(layers[layer]["experts"], layers[layer]["above"]) for layer in "01"] == [(EXPERTS, 2), (EXPERTS, 0)]
    assert layers["0"]["most"] > 0.8 and layers["0"]["of_expert"] in (0, 2) and layers["1"]["most"] < 0.3
    text = conversion.run_in_process("inspect", source, "--columns").output
    assert "2 of 3 sampled experts above 0.5" in text and "0 of 3 sampled experts above 0.5" in text
    plan = conversion.run_in_process("cpu", "-i", source, "-o", tmp_path / "out", "--equalize", "--dry-run").output
    assert "columns of down_proj differ by more than 0.5" in " ".join(plan.split())
    error = conversion.run_in_process("inspect", convert(source, tmp_path / "out"), "--columns").exception
    assert getattr(error, "exit_code", 0) == 2
