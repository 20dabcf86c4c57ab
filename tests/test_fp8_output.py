"""`cpu --quant-method fp8`: outputs hold the numbers of the definition, or those of a source that is FP8 in the same
blocks; killed, resumed, damaged, refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.experts import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.parts import take_part
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import fp8, panels, reference
from ktconvert.quantizers.scales import e8m0
from rig import conversion, killpoint
from rig.safetensors import bits_of, read_file, write_file


def quantized(folder: Path, block: tuple[int, int] = (128, 128), powers: bool = False, width: int = 256) -> Path:
    """A checkpoint whose experts are FP8 in blocks."""
    conversion.checkpoint(folder, layers=2, hidden=256, width=width)
    rng = np.random.default_rng(3)
    for path in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Any] = {}
        for name, tensor in read_file(path).items():
            if "experts" not in name:
                tensors[name] = tensor
                continue
            n, k = tensor.shape
            codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
            codes[(codes & 0x7F) == fp8.NAN] = 0
            codes[:128, :128] = 0x80
            grid = (-(-n // block[0]), -(-k // block[1]))
            exponents = rng.integers(0, 140, grid).astype(np.uint8)
            tensors[name] = ("F8_E4M3", codes)
            scales = ("F8_E8M0", exponents) if powers else ("F32", e8m0(exponents) * np.float32(1.37))
            tensors[f"{name}_scale_inv"] = scales
        write_file(path, tensors, {"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parts_of(out: Path, model: MoeModel, count: int) -> Iterator[tuple[Matrix, Any, Any]]:
    """Every part of every linear: as the source has it, and its codes and scales as they were written."""
    tensors: dict[str, Any] = {}
    for shard in out.glob("*.safetensors"):
        tensors |= bits_of(read_file(shard))
    for layer in model.layers:
        for expert in range(model.shape(layer)[0]):
            for projection in PROJECTIONS:
                linear = model.linear(layer, expert, projection)
                for part in range(count):
                    key = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{part}"
                    codes, scales = tensors.pop(f"{key}.codes"), tensors.pop(f"{key}.scales")
                    yield take_part(linear, projection, part, count), panels.unlay(codes), scales
    assert not tensors


KEPT = "the experts are FP8 already: every number stays what it is"
TWICE = "rounds twice"


@pytest.mark.parametrize("parts", [1, 2])
def test_output_is_the_definition(parts: int, tmp_path: Path, cli: Any) -> None:
    source = conversion.checkpoint(tmp_path / "source", layers=2, hidden=256, width=256)
    done = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "fp8", "--threadpool-count", parts)
    assert KEPT not in done.stderr
    for matrix, codes, scales in parts_of(tmp_path / "out", recognise(open_checkpoint(source)), parts):
        wanted, wanted_scales = fp8.quantize(reference.decode(matrix))
        assert (codes == wanted).all() and (scales == wanted_scales).all()
    cli("verify", tmp_path / "out", "--against", source, "--full", "--numa", parts, "--quant-method", "fp8")


@pytest.mark.parametrize("powers", [False, True], ids=["float32 scales", "E8M0 scales"])
@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_of_128_are_kept(parts: int, powers: bool, tmp_path: Path, cli: Any) -> None:
    source = quantized(tmp_path / "source", powers=powers)
    done = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "fp8", "--threadpool-count", parts)
    assert KEPT in done.stderr and TWICE not in done.stderr
    for matrix, codes, scales in parts_of(tmp_path / "out", recognise(open_checkpoint(source)), parts):
        assert matrix.scales is not None
        (row, column), (n, k) = (start // 128 for start in matrix.origin), matrix.shape
        assert (codes == matrix.values).all()
        assert (scales == matrix.scales[row : row + n // 128, column : column + k // 128]).all()
    checked = cli("verify", tmp_path / "out", "--against", source, "--full", "--json")
    assert {layer["relative_error"] for layer in json.loads(checked.stdout)["errors"]} == {0.0}


@pytest.mark.parametrize("block", [(128, 64), (1, 256), (256, 256)])
def test_other_blocks_are_rounded(block: tuple[int, int], tmp_path: Path, cli: Any) -> None:
    source = quantized(tmp_path / "source", block)
    done = cli("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "fp8", "--threadpool-count", 2)
    assert KEPT not in done.stderr and TWICE in done.stderr
    for matrix, codes, scales in parts_of(tmp_path / "out", recognise(open_checkpoint(source)), 2):
        wanted, wanted_scales = fp8.quantize(reference.decode(matrix))
        assert (codes == wanted).all() and (scales == wanted_scales).all()


def test_refusals(tmp_path: Path, cli: Any) -> None:
    source = conversion.checkpoint(tmp_path / "source", layers=1, hidden=256, width=256)
    for code, text, *options in (
        (2, "FP8 has no loose files", "--no-merge-safetensor"),
        (2, "FP8 has no matrices for fine-tuning", "--save-backward-weights"),
        (3, "256/4 = 64, is not a multiple of 128", "--threadpool-count", "4"),
    ):
        done = cli("cpu", "-i", source, "-o", tmp_path / "x", "--quant-method", "fp8", *options, code=code)
        assert text in done.stderr


def test_killed_and_resumed_and_damaged(tmp_path: Path, cli: Any) -> None:
    source = quantized(tmp_path / "source")
    shim, log = killpoint.build(tmp_path), tmp_path / "log"

    def run(out: str, n: int) -> int:
        command = [*conversion.KTCONVERT, "cpu", "-i", source, "-o", tmp_path / out, "--quant-method", "fp8"]
        return killpoint.run(command, tmp_path / out, n, shim, log).returncode

    assert run("whole", 0) == 0
    calls = killpoint.count(log)
    for part in (1, 2):
        assert run(f"killed{part}", part * calls // 3) == killpoint.KILLED
        cli("resume", tmp_path / f"killed{part}")
        assert conversion.tree(tmp_path / f"killed{part}") == conversion.tree(tmp_path / "whole")
    shard = next((tmp_path / "whole").glob("model-00001*"))
    before = shard.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    for at, data, text in (
        (header, b"\x7f", "is not a number"),
        (-4, bytes(4), "is 0.0"),
        (-4, b"\0\0\x80\xff", "is -inf"),
    ):
        damaged = bytearray(before)
        damaged[at : at + len(data) or None] = data
        shard.write_bytes(damaged)
        assert text in cli("verify", tmp_path / "whole", code=6).stdout
