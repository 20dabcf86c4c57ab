"""Backward files of BF16 experts equal kt-kernel's files and the NumPy definition; commands describe or refuse them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, F32, Matrix
from ktconvert.pipeline.cli.describe import describe_path
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify.verify import Report, verify
from ktconvert.quantizers import panels
from rig import conversion, floats, isas, reference
from rig.safetensors import bits_of, read_file

GOLDEN = Path(__file__).parent / "golden" / "amx_bf16.v1.backward_t1.safetensors"
OPTIONS = ("--quant-method", "bf16", "--no-merge-safetensor", "--save-backward-weights")
Bits = npt.NDArray[np.uint16]


def bits(shape: tuple[int, ...], seed: int) -> Bits:
    """Return random finite BF16 numbers, including subnormal ones and -0."""
    values = np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)
    values[(values & 0x7F80) == 0x7F80] = 0x8000
    return values


@given(
    n=st.sampled_from((32, 96, 256, 288, 544)),
    k=st.sampled_from((32, 64, 1792, 1824, 3616)),
    seed=st.integers(0, 9),
    transposed=st.booleans(),
    isa=st.sampled_from(kernels.available_isas()),
)
@settings(max_examples=25)
def test_blocks_equal_the_definition(n: int, k: int, seed: int, transposed: bool, isa: str) -> None:
    values = bits((n, k), seed)
    codes = np.empty(n * k, np.uint16)
    with isas.use(isa):
        kernels.pack_bf16(Matrix(values.T.copy().T if transposed else values, BF16), codes)
    assert (codes == floats.to_blocks(values)).all()
    assert (panels.from_blocks(codes, n, k) == values).all()


@pytest.mark.parametrize(("n", "k"), [(64, 96), (544, 1856), (288, 3616)])
def test_each_element_has_the_documented_position(n: int, k: int) -> None:
    """The formula of bytes.md holds for every element."""
    r, c = np.arange(n)[:, None], np.arange(k)[None, :]
    nb, kb = r // 256 * 256, c // 1792 * 1792
    rows, columns = np.minimum(256, n - nb), np.minimum(1792, k - kb)
    i, j = (r - nb) % 32, (c - kb) % 32
    at = nb * k + kb * rows + (r - nb) // 32 * 32 * columns + (c - kb) // 32 * 32 * 32
    at = at + i // 16 * 512 + j // 2 * 32 + i % 16 * 2 + j % 2
    positions = np.arange(n * k, dtype=np.uint32).reshape(n, k)
    assert (floats.to_blocks(positions)[at] == positions).all()


def test_unsupported_weights_are_rejected_before_packing() -> None:
    for row in (0, 255, 256, 287):
        values = np.ones((288, 96), np.float32)
        values[row, 95] = np.inf
        with pytest.raises(kernels.NonFinite) as raised:
            kernels.pack_bf16(Matrix(values, F32), np.empty(288 * 96, np.uint16))
        assert (raised.value.row, raised.value.column) == (row, 95)
    matrix = Matrix(np.zeros((64, 64), np.uint16), BF16)
    for codes in (np.empty(64 * 64 - 1, np.uint16), np.empty(64 * 64, np.uint8), np.empty(2 * 64 * 64, np.uint16)[::2]):
        with pytest.raises(ValueError, match="codes must be"):
            kernels.pack_bf16(matrix, codes)  # type: ignore[arg-type]


def kt_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.kt")}


def run_verify(output: Path, **options: Any) -> Report:
    return verify(VerifyOptions(output=output, **options), Reporter(verbosity=-1))


def expected_files(layer: int, stacked: dict[str, Bits], slices: int) -> dict[str, bytes]:
    """Return the files that kt-kernel writes for one layer: the transposed slices, and empty scales."""
    files = {}
    width = stacked["down"].shape[2] // slices
    for projection, linears in stacked.items():
        for expert, linear in enumerate(linears):
            for number in range(slices):
                rows = slice(number * width, (number + 1) * width)
                transposed = (linear[:, rows] if projection == "down" else linear[rows]).T
                data = floats.to_blocks(transposed).tobytes()
                start = f"_layer_{layer}/_numa_{number}/BF16_{projection}_bwd_{expert}_"
                files |= {f"{start}{len(data)}Byte_quant_.kt": data, f"{start}0Byte_scale_.kt": b""}
    return files


def test_files_equal_golden_files(tmp_path: Path, cli: Any, write_qwen: Any) -> None:
    golden = bits_of(read_file(GOLDEN))
    source = write_qwen(tmp_path / "in", {0: {p: golden[f"in.{p}"] for p in PROJECTIONS}})
    cli("cpu", "-i", source, "-o", tmp_path / "out", "--threadpool-count", 1, *OPTIONS)
    theirs = {name.removeprefix("file:"): data.tobytes() for name, data in golden.items() if name.startswith("file:")}
    ours = kt_files(tmp_path / "out")
    assert len(theirs) == 6 and {name: ours.get(name) for name in theirs} == theirs
    scales = {name.rsplit("_", 3)[0] + "_0Byte_scale_.kt" for name in theirs}  # left out of the golden file: empty
    assert {name: data for name, data in ours.items() if name not in theirs} == dict.fromkeys(scales, b"")


@pytest.mark.parametrize(("parts", "dtype"), [(1, "BF16"), (2, "F32"), (4, "BF16")])
def test_slices_equal_the_definition(
    parts: int, dtype: str, tmp_path: Path, cli: Any, write_qwen: Any, random_experts: Any
) -> None:
    """Sizes exceed a block of 256 rows and of 1792 columns. verify passes with and without the source."""
    layers = {layer: random_experts(2, 1856, 256, seed=layer) for layer in (0, 1)}
    stored = {layer: dict(stacked) for layer, stacked in layers.items()}
    if dtype == "F32":
        rng = np.random.default_rng(5)
        stored = {n: {p: rng.standard_normal(a.shape, np.float32) for p, a in s.items()} for n, s in layers.items()}
        layers = {n: {p: reference.f32_to_bf16(a) for p, a in s.items()} for n, s in stored.items()}
    source, out = write_qwen(tmp_path / "in", stored, dtype), tmp_path / "out"
    result = cli("cpu", "-i", source, "-o", out, "--threadpool-count", parts, *OPTIONS)
    assert ("every number stays the same" in result.stderr) == (dtype == "BF16")
    assert "only the backward matrices are written" in result.stderr
    assert kt_files(out) == expected_files(0, layers[0], parts) | expected_files(1, layers[1], parts)
    report = run_verify(out, against=str(source), full=True)
    assert not report.problems and report.measure.method == "AMXBF16" and report.measure.numa == parts
    assert report.measure.shapes == {0: (2, 1856, 256), 1: (2, 1856, 256)}
    assert len(report.errors) == 6 and all(e.figures["cosine"] == pytest.approx(1) for e in report.errors)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("backward") / "source", layers=2, hidden=96, width=64)


@pytest.fixture(scope="module")
def output(source: Path, cli: Any) -> Path:
    out = source.with_name("out")
    cli("cpu", "-i", source, "-o", out, "--threadpool-count", 2, *OPTIONS)
    return out


def test_inspect_verify_and_plan_describe_backward_files(source: Path, output: Path, cli: Any) -> None:
    info = json.loads(cli("inspect", output, "--json").stdout)
    assert (info["method"], info["numa"], info["hidden"], info["intermediate"]) == ("AMXBF16", 2, 96, 64)
    assert info["complete"] and info["backward"] and info["arrangement"] == "loose" and info["tensors"] == 48
    card = (output / "README.md").read_text()
    assert "# Backward matrices" in card and "- amxbf16" in card and "The folder contains no other weights" in card
    assert json.loads((output / "config.json").read_bytes())["quantization_config"]["method"] == "AMXBF16"
    assert "verified" in cli("verify", output, "--numa", 2, "--quant-method", "amxbf16").stdout
    assert "not for --numa 1" in str(run_verify(output, numa=1).sentence)
    events = cli(*cpu(source, output.with_name("x"), 2), "--dry-run", "--json").stdout.splitlines()
    plan = next(event for event in map(json.loads, events) if event["event"] == "plan")
    assert plan["model"]["method"] == "AMXBF16" and plan["loose"]
    assert plan["bytes_out"] == sum(map(len, kt_files(output).values()))


def test_folders_written_by_kt_kernel_can_be_read(source: Path, output: Path, tmp_path: Path, cli: Any) -> None:
    """Without manifest and config, the files show only the product of hidden size and width."""
    for layer in (0, 1):
        shutil.copytree(output / f"_layer_{layer}", tmp_path / "kt" / f"_layer_{layer}")
    info = json.loads(cli("inspect", tmp_path / "kt", "--json").stdout)
    assert (info["method"], info["numa"], info["hidden"], info["complete"]) == ("AMXBF16", 2, 0, True)
    assert "hidden size   unknown" in cli("inspect", tmp_path / "kt").stdout
    for ours, other in ((tmp_path / "kt", source), (tmp_path / "kt", output), (output, tmp_path / "kt")):
        report = run_verify(ours, against=str(other))
        assert report.sentence is None and report.checks[-1].name == ("source" if other == source else "other")
    conversion.flip_bit(next((tmp_path / "kt/_layer_1").rglob("*down*quant_.kt")))
    sentence = str(run_verify(tmp_path / "kt", against=str(source)).sentence)
    assert "layer 1, expert" in sentence and "backward weight" in sentence


def test_unsupported_commands_and_weights_are_refused(
    source: Path, output: Path, tmp_path: Path, write_qwen: Any, random_experts: Any
) -> None:
    new, stacked = tmp_path / "new", random_experts(2, 96, 64)
    stacked["up"][1, 45, 7] = 0x7F80  # in the second NUMA slice
    infinite = write_qwen(tmp_path / "infinite", {0: stacked})
    for code, messages, arguments in (
        (3, ("BF16 files cannot be merged", "stay loose; give INT4"), ("merge", "-i", output, "-o", new)),
        (3, ("AMXBF16 weights cannot be rearranged",), ("resplit", output, new, "--threadpool-count", "1")),
        (3, ("its method is AMXBF16",), ("bench", output)),
        (3, ("AMXBF16 cannot hold", "is not a multiple of 32"), cpu(source, new, 4)),
        (5, ("experts.1.up_proj", "row 45, column 7"), cpu(infinite, new, 2)),
        (5, ("row 45, column 7",), (*cpu(infinite, new, 2)[:7], "--quant-method", "bf16")),
        (3, ("64 does not divide by 3", "use bf16 with --numa 1, 2."), cpu(source, new, 3)),
    ):
        conversion.check_refusal(conversion.ktconvert(*arguments), code, *messages)
    assert not new.exists()


def cpu(source: Path, out: Path, parts: int) -> tuple[str | Path, ...]:
    return ("cpu", "-i", source, "-o", out, "--threadpool-count", str(parts), *OPTIONS)


@pytest.mark.parametrize("damage", ["half", "scale", "forward", "infinite"])
def test_damaged_folders_are_refused(damage: str, output: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(output, tmp_path / "copy"))
    files = sorted((copy / "_layer_1").rglob("*quant_.kt"))
    name = files[3].relative_to(copy).as_posix()
    if damage == "half":
        for path in files[3:]:
            path.unlink()
    elif damage == "scale":
        name = name.rsplit("_", 3)[0] + "_0Byte_scale_.kt"
        (copy / name).unlink()
    elif damage == "forward":
        name = name.replace("_bwd_", "_")
        shutil.copy(files[3], copy / name)
    else:
        files[3].write_bytes(files[3].read_bytes()[:-2] + b"\x80\x7f")
    assert any(name in problem for problem in run_verify(copy).problems)
    assert describe_path(str(copy), Reporter())["complete"] == (damage == "infinite")
