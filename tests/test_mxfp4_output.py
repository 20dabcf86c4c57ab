"""Experts in MXFP4, in any number of parts: what the command writes is the definition, can be resumed and verified, and
loses nothing of experts that are MXFP4 already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.experts import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings.encoding import is_zero
from ktconvert.layouts.outputs import FORMATS, PROJECTIONS
from ktconvert.layouts.outputs.parts import take_part
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.stages import experts
from ktconvert.quantizers import mxfp4, reference
from rig import conversion, encodings, killpoint
from rig import gguf as ggml
from rig.safetensors import bits_of, data_start, header_of, read_folder

FORM = FORMATS["MXFP4"].encoding
OF_SAFETENSORS = ("DeepSeek-V4", "V4 in unsigned bytes", "ct MXFP4", "blocks")


@pytest.mark.parametrize("name", OF_SAFETENSORS)
@pytest.mark.parametrize("parts", [1, 6])
def test_sources_keep_codes_and_exponents(name: str, parts: int, tmp_path: Path) -> None:
    folder, values = encodings.write(name, tmp_path / "model")
    model = recognise(open_checkpoint(folder))
    assert FORM.is_exact(model)
    stage = experts.stage(model, FORMATS["MXFP4"], [0], numa=parts, max_shard_size=None, metadata={})
    for (expert, projection), bits in values.items():
        linear = model.linear(0, expert, projection)
        packed = np.ascontiguousarray(linear.values)
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(linear.shape)
        whole = [matrix for _, matrix in stage.units[0].work.make((expert, projection))]
        for number, stored_part in enumerate(whole):
            part = take_part(linear, projection, number, parts)
            (n, k), (row, column) = part.shape, part.origin
            wanted = codes[row : row + n, column : column + k] if name != "blocks" else None
            laid = mxfp4.unlay_codes(stored_part[0].reshape(n // 32, -1))
            assert wanted is None or (laid == wanted).all()
            exact = take_part(Matrix(bits, BF16), projection, number, parts)
            assert (FORM.decode(stored_part, n, k) == reference.bf16_to_f32(np.array(exact.values))).all()
            exponents = np.log2(part.each_scale()[:, ::32].astype(np.float64)) + 127
            assert (mxfp4.unlay_exponents(stored_part[1].reshape(n // 32, -1)) == exponents).all()


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2])
def output(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cli: Any
) -> tuple[Path, Path, int]:
    """(source, output, parts) of a small BF16 checkpoint."""
    root = tmp_path_factory.mktemp("mxfp4")
    source = conversion.checkpoint(root / "source", layers=2, hidden=192, width=128)
    options = ("--quant-method", "mxfp4", "--threadpool-count", request.param)
    done = cli("cpu", "-i", source, "-o", root / "out", *options)
    assert "rounds twice" not in done.stderr and "already" not in done.stderr and "int8" not in done.stderr
    return source, root / "out", request.param


def test_output_is_the_definition(output: tuple[Path, Path, int], cli: Any) -> None:
    source, out, parts = output
    model, held = recognise(open_checkpoint(source)), bits_of(read_folder(out))
    assert len(held) == 2 * 2 * 3 * parts * 2
    assert "verified" in cli("verify", out, "--against", source, "--full").stdout
    for projection in PROJECTIONS:
        for number in range(parts):
            part = take_part(model.linear(1, 1, projection), projection, number, parts)
            codes, exponents = mxfp4.quantize(reference.decode(part))
            key = f"blk.1.ffn_{projection}_exps.1.numa.{number}"
            assert (held[f"{key}.codes"] == mxfp4.lay_codes(codes)).all()
            assert (held[f"{key}.scales"] == mxfp4.lay_exponents(exponents)).all()
            packed = [held[f"{key}.codes"].reshape(-1), held[f"{key}.scales"].reshape(-1)]
            values = FORM.decode(packed, *part.shape)
            assert (values == mxfp4.dequantize(codes, exponents)).all()
            assert (FORM.decode(packed, *part.shape, slice(5, 40)) == values[5:40]).all()
            assert (FORM.decode(packed, *part.shape, np.array([63, 1])) == values[[63, 1]]).all()
            assert not is_zero(FORM, packed, *part.shape) and is_zero(FORM, [packed[0] & 0x88, packed[1]], *part.shape)


@pytest.mark.parametrize(
    ("exponent", "wrong"),
    [(255, "scale 40, 255, is not a number"), (254, "scale 40, 254, makes a number infinite")],
)
def test_damage_is_found(exponent: int, wrong: str, output: tuple[Path, Path, int], cli: Any) -> None:
    _, out, _ = output
    key, shard = "blk.0.ffn_up_exps.1.numa.0.scales", next(iter(sorted(out.glob("model-00001*"))))
    before = shard.read_bytes()
    damaged = bytearray(before)
    damaged[data_start(shard) + header_of(shard)[key]["data_offsets"][0] + 40] = exponent
    try:
        shard.write_bytes(damaged)
        done = cli("verify", out, code=6)
        assert f"{key} in {shard.name}: {wrong}" in done.stdout + done.stderr
    finally:
        shard.write_bytes(before)


def test_what_kt_kernel_could_do_is_not_advised(output: tuple[Path, Path, int], cli: Any) -> None:
    _, out, parts = output
    said = cli("verify", out, "--numa", 4, code=6).stderr
    assert (
        f"; load it as MXFP4, {parts} NUMA part" in said
        and ", or rewrite it with `ktconvert resplit`" in said
        and "kt-" not in said
    )


def test_killed_and_resumed_to_the_same_bytes(output: tuple[Path, Path, int], tmp_path: Path) -> None:
    source, out, parts = output
    shim, log = killpoint.build(tmp_path), tmp_path / "log"
    options = ("--quant-method", "mxfp4", "--threadpool-count", str(parts), "-q")

    def run(n: int) -> int:
        command = [*conversion.KTCONVERT, "cpu", "-i", str(source), "-o", str(tmp_path / "out"), *options]
        return killpoint.run(command, tmp_path / "out", n, shim, log).returncode

    assert run(40) == killpoint.KILLED
    assert run(0) == 0
    assert conversion.tree(tmp_path / "out") == conversion.tree(out)


@pytest.mark.parametrize("stored_in", ["safetensors", "gguf"])
def test_nothing_is_lost(stored_in: str, cli: Any, tmp_path: Path) -> None:
    """The plan says so, and `verify` that the values are the source's."""
    if stored_in == "gguf":
        types = [("MXFP4",) * 3]
        source = ggml.write(tmp_path / "model.gguf", ggml.model(types, hidden=192, width=128), of_gguf())
    else:
        source, _ = encodings.write("DeepSeek-V4", tmp_path / "model")
    done = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "mxfp4")
    assert "the experts are MXFP4 already: every number stays what it is" in done.stderr
    assert "rounds twice" not in done.stderr and "int8 is the better choice" not in done.stderr
    as_bf16 = cli("cpu", "-i", source, "-o", tmp_path / "bf16", "--quant-method", "bf16")
    assert "BF16 holds all numbers of MXFP4: every number stays what it is" in as_bf16.stderr
    assert "rounds twice" not in as_bf16.stderr
    for out in ("out", "bf16"):
        report = cli("verify", tmp_path / out, "--against", source, "--full").stdout
        rows = [line.split() for line in report.splitlines() if line.startswith("0  ")]
        assert [row[1:4] for row in rows] == [[projection, "0.0000", "1.00000"] for projection in PROJECTIONS]


def of_gguf() -> dict[str, Any]:
    return ggml.about(1, embedding_length=192, expert_feed_forward_length=128)


def test_nvfp4_is_rounded(cli: Any, tmp_path: Path) -> None:
    source, _ = encodings.write("modelopt NVFP4", tmp_path / "model")
    done = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "mxfp4")
    assert "NVFP4 to MXFP4 rounds twice" in done.stderr and "already" not in done.stderr
    cli("verify", tmp_path / "out", "--against", source, "--full")
