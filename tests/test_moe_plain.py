"""MOE_INT4 and MOE_INT8 with `--layout plain`: formulas and order of kt-kernel's source, for each instruction set.

Outputs are converted, merged, rearranged, damaged and computed; bytes without a manifest that names the layout are not
interpreted.
"""

import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.encodings import amx
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import kernels
from ktconvert.native_quant import matrix as matrix_kinds
from ktconvert.native_quant.runtime.experts import KTExperts
from rig import conversion, floats, isas, reference
from rig.files import rewrite
from rig.safetensors import bits_of, read_folder

BITS = (4, 8)
METHODS = ("moe_int4", "moe_int8")


def difficult_values(n: int, k: int) -> Any:
    """Return BF16 bits [n, k]: every magnitude, halves of both steps, zeros, and rows around the smallest scale."""
    rng = np.random.default_rng(n + k)
    x = rng.standard_normal((n, k)) * 2.0 ** rng.integers(-140, 127, (n, 1))
    x[1] = rng.integers(-127, 128, k) / 2
    x[1, 0] = 127  # a scale of 1: halves of an INT8 step
    x[2] = rng.integers(-14, 15, k) * 8
    x[2, 0] = -112  # a scale of 1: halves of an INT4 step
    x[3] = 0
    x[4] = 2.0**-126 * rng.uniform(-127, 127, k)
    x[5] = 2.0**-127 * rng.uniform(-1, 1, k)
    x[6] = 3.3e38 * rng.choice([-1, 1], k)
    return reference.f32_to_bf16(np.clip(x, -3.3e38, 3.3e38).astype(np.float32))


def quantize(bits: int, values: Any) -> tuple[Any, Any]:
    """Quantize by the kernel."""
    weight, scale = np.empty(values.size * bits // 8, np.uint8), np.empty(len(values), np.float32)
    kernels.quantize_plain(bits, matrix_kinds.Matrix(values, matrix_kinds.BF16), weight, scale)
    return weight, scale


@pytest.mark.parametrize("bits", BITS)
def test_codes_round_halves_away_from_zero(bits):
    """Compares with the formula in fractions."""
    values = difficult_values(128, 128)
    codes, scales = reference.quantize_plain(bits, values)
    x = reference.bf16_to_f32(values)
    for row, scale in enumerate(scales):
        d = np.abs(x[row]).max().astype(np.float64) / (127 if bits == 8 else 112)
        assert scale == (np.float32(d) if np.float32(d) >= 2.0**-126 else 0)
        step = Fraction(float(scale)) * (1 if bits == 8 else 16)
        for value, code in zip(x[row, :32], codes[row, :32], strict=True):
            q = np.float32(float(Fraction(float(value)) / step)) if step else np.float32(0)
            magnitude = int(abs(Fraction(float(q))) + Fraction(1, 2))
            assert code == (magnitude if q > 0 else -magnitude)


@pytest.mark.parametrize("bits", BITS)
def test_the_order_equals_that_of_kt_kernel(bits):
    n, k = 16, 128
    codes = np.random.default_rng(0).integers(-7, 8, (n, k)).astype(np.int8)
    weight = amx.pack_plain(bits, codes)
    for r in range(n):
        for c in range(k):
            if bits == 8:
                at, shift = r // 8 * 8 * k + c // 32 * 256 + r % 8 * 32 + c % 32, 0
            else:
                at, shift = r // 8 * 4 * k + c // 64 * 256 + r % 8 * 32 + c % 32, 4 * (c % 64 < 32)
            mask = (1 << bits) - 1
            assert weight[at] >> shift & mask == int(codes[r, c]) & mask
    np.testing.assert_array_equal(amx.unpack_plain(bits, weight, n, k), codes)


@pytest.mark.parametrize("bits", BITS)
def test_every_instruction_set_equals_the_definition(bits):
    for n, k in ((128, 128), (128, 384)):
        values = difficult_values(n, k)
        codes, scales = reference.quantize_plain(bits, values)
        for name in isas.each():
            for stored in (values, np.asfortranarray(values)):
                weight, scale = quantize(bits, stored)
                np.testing.assert_array_equal(weight, amx.pack_plain(bits, codes), name)
                np.testing.assert_array_equal(scale.view(np.uint32), scales.view(np.uint32), name)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", BITS)
def test_non_finite_values_are_reported_with_their_position(bits):
    values = difficult_values(128, 128)
    values[70, 9] = 0x7F80
    with pytest.raises(kernels.NonFinite) as caught:
        quantize(bits, values)
    assert (caught.value.row, caught.value.column) == (70, 9)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a source."""
    return conversion.checkpoint(tmp_path_factory.mktemp("moe") / "source", layers=2, hidden=256, width=256)


@pytest.fixture(scope="module", params=METHODS)
def outputs(request: pytest.FixtureRequest, source: Path, cli: Any) -> tuple[str, Path, Path]:
    """Convert to loose files and to safetensors in two NUMA slices; return the method and both folders."""
    loose, merged = (source.with_name(f"{request.param} {kind}") for kind in ("loose", "merged"))
    options = ("--quant-method", request.param, "--layout", "plain", "--threadpool-count", 2)
    cli("cpu", "-i", source, "-o", loose, *options, "--no-merge-safetensor")
    cli("cpu", "-i", source, "-o", merged, *options)
    return request.param.upper(), loose, merged


def forward(experts: KTExperts) -> Any:
    """Run a forward on fixed inputs."""
    rng = np.random.default_rng(1)
    hidden = floats.to_bits(rng.standard_normal((5, 256)))
    ids, weights = rng.integers(0, 2, (5, 2)), rng.random((5, 2)).astype(np.float32)
    return experts.forward(hidden, ids, weights)


def test_outputs_equal_the_definition(source, outputs, cli):
    method, loose, merged = outputs
    bits = FORMATS[method].encoding.grid.bits
    stored, weights = bits_of(read_folder(merged)), bits_of(read_folder(source))
    down = weights["model.layers.1.mlp.experts.1.down_proj.weight"].view(np.uint16)[:, 128:]
    codes, scales = reference.quantize_plain(bits, np.ascontiguousarray(down))
    key = "blk.1.ffn_down_exps.1.numa.1"
    np.testing.assert_array_equal(stored[f"{key}.weight"].view(np.uint8), amx.pack_plain(bits, codes))
    np.testing.assert_array_equal(stored[f"{key}.scale"].view(np.float32), scales)
    file = loose / "_layer_1" / "_numa_1" / f"{method}_down_1_{down.size * bits // 8}Byte_quant_.kt"
    assert file.read_bytes() == stored[f"{key}.weight"].tobytes()
    cli("merge", "-i", loose, "-o", loose.with_suffix(".one"))
    assert bits_of(read_folder(loose.with_suffix(".one"))).keys() == stored.keys()
    for folder in (loose, merged, loose.with_suffix(".one")):
        report = json.loads(cli("inspect", folder, "--json").stdout)
        assert (report["method"], report["numa"], report["hidden"], report["complete"]) == (method, 2, 256, True)
        cli("verify", folder, "--against", source, "--run")
    cli("verify", merged, "--quant-method", "int8", code=6)


def test_results_follow_from_the_codes(source, outputs):
    """Files and tensors give equal results, close to those of AMXINT4 and AMXINT8."""
    method, loose, merged = outputs
    weights = bits_of(read_folder(source))
    linears = [
        np.stack([weights[f"model.layers.0.mlp.experts.{e}.{p}_proj.weight"].view(np.uint16) for e in range(2)])
        for p in ("gate", "up", "down")
    ]
    expected = KTExperts.from_bf16(*linears, method=method, parts=2)
    for folder in (loose, merged):
        for memory in ("copy", "map"):
            loaded = KTExperts.load(folder, 0, memory=memory)
            assert loaded.method == method
            np.testing.assert_array_equal(forward(loaded), forward(expected))
    amxs = KTExperts.from_bf16(*linears, method=method.removeprefix("MOE_").join(("AMX", "")), parts=2)
    difference = floats.from_bits(forward(amxs)) - floats.from_bits(forward(expected))
    assert 0 < np.linalg.norm(difference) < 0.2 * np.linalg.norm(floats.from_bits(forward(expected)))
    with pytest.raises(UnsupportedError, match=f"{method} has no loose files"):
        expected._save(loose / "saved")


def test_resplit_keeps_the_method(source, outputs, tmp_path, cli):
    method, _, merged = outputs
    cli("resplit", merged, tmp_path / "one", "--threadpool-count", 1)
    cli("verify", tmp_path / "one", "--against", source, "--run")
    assert json.loads(cli("inspect", tmp_path / "one", "--json").stdout)["method"] == method


def test_outputs_without_a_manifest_are_not_computed(outputs, tmp_path, cli):
    """Codes of such outputs could be in AOCL's order."""
    method, *folders = outputs
    for number, folder in enumerate(folders):
        bare = tmp_path / str(number)
        shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("manifest.json"))
        assert json.loads(cli("inspect", bare, "--json").stdout)["method"] == method
        with pytest.raises(UnsupportedError, match=f"{method}, which this runtime cannot compute"):
            KTExperts.load(bare, 0)
        cli("resplit", bare, tmp_path / "new", "--threadpool-count", 1, code=3)
    cli("merge", "-i", tmp_path / "0", "-o", tmp_path / "merged")
    assert read_folder(tmp_path / "merged") == read_folder(tmp_path / "1")
    with pytest.raises(UnsupportedError, match=f"{method}, which this runtime cannot compute"):
        KTExperts.load(tmp_path / "merged", 0)


def test_an_invalid_code_is_reported_with_its_position(outputs, tmp_path):
    method, loose, _ = outputs
    shutil.copytree(loose, tmp_path / "loose")
    file = next((tmp_path / "loose" / "_layer_0" / "_numa_1").glob(f"{method}_up_1_*_quant_.kt"))
    rewrite(file, file.read_bytes()[:-1] + b"\x88"[: method == "MOE_INT4"] + b"\x80"[method == "MOE_INT4" :])
    with pytest.raises(InputError, match=f"{file.name}: layer 0, expert 1, up_proj, NUMA slice 1, weight: the code at"):
        KTExperts.load(tmp_path / "loose", 0)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_plain_layout_can_be_written(method, source, tmp_path, cli):
    def stderr_of(code: int, *options: object) -> str:
        stderr = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", method, *options, code=code).stderr
        return stderr

    for options in ((), ("--layout", "numa"), ("--layout", "kt")):
        stderr = stderr_of(3, *options)
        assert "needs the order of AOCL-BLIS" in stderr and "AMXINT8 output of int8 on AMD" in stderr
    assert "no matrices for fine-tuning" in stderr_of(2, "--layout", "plain", "--save-backward-weights")
    assert (
        "plain is for moe_int4, moe_int8"
        in cli("cpu", "-i", source, "-o", tmp_path / "out", "--layout", "plain", code=2).stderr
    )
    small = conversion.checkpoint(tmp_path / "small", layers=1, hidden=256, width=96)
    stderr = cli(
        "cpu", "-i", small, "-o", tmp_path / "out", "--quant-method", method, "--layout", "plain", code=3
    ).stderr
    assert "; no method can hold it" in stderr and "is not a multiple of" in stderr
