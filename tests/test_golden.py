"""kt-kernel's own bytes, and ours for other encodings: from the NumPy definition and every instruction set of this CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import KINDS, Matrix
from ktconvert.quantizers import ROW_GRIDS
from rig import reference
from rig.golden import FOLDER
from rig.safetensors import bits_of, metadata_of, read_file

CASES = [(method, case) for method in ROW_GRIDS for case in ("edge_t1", "small_t2")]
CASES += [("int8", "nodd2_t1"), ("int8", "kblock_t1")]
OURS = [(method, kind) for method in ROW_GRIDS for kind in ("fp16", "f32", "fp8_e4m3")]


def unsigned(path: Path) -> dict[str, Any]:
    """All tensors of a golden file; weights as the kernels write them, in unsigned bytes."""
    tensors = bits_of(read_file(path))
    return {name: bits.view(np.uint8) if bits.dtype == np.int8 else bits for name, bits in tensors.items()}


def parts(method: str, case: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every (key, BF16 part, kt-kernel's weight, kt-kernel's scale) of a golden file."""
    path = FOLDER / f"amx_{method}.v{ROW_GRIDS[method].version}.{case}.safetensors"
    metadata, tensors = metadata_of(path), unsigned(path)
    count = int(metadata["numa"])
    for proj in ("gate", "up", "down"):
        for expert, matrix in enumerate(tensors[f"in.{proj}"]):
            for i, part in enumerate(np.split(matrix, count, axis=1 if proj == "down" else 0)):
                key = f"blk.0.ffn_{proj}_exps.{expert}.numa.{i}"
                yield key, part, tensors[f"{key}.weight"], tensors[f"{key}.scale"]


def same(key: str, ours: Any, theirs: Any) -> None:
    different = np.flatnonzero(ours.view(np.uint8) != theirs.view(np.uint8))
    if different.size:
        at = different[0] // ours.itemsize
        pytest.fail(f"{key}: {different.size} bytes differ, first element {at}: {ours[at]!r}, not {theirs[at]!r}")


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("method", "case"), CASES)
def test_kt_kernels_bytes(method: str, case: str) -> None:
    bits = ROW_GRIDS[method].bits
    for key, part, weight, scale in parts(method, case):
        ours = np.full_like(weight, 0xAA), np.full_like(scale, np.nan)
        kernels.quantize_pack(bits, Matrix(part, KINDS["bf16"]), *ours)
        for made in (ours, reference.quantize_pack(bits, part)):
            same(f"{key}.weight", made[0], weight)
            same(f"{key}.scale", made[1], scale)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("method", "kind"), OURS)
def test_our_bytes(method: str, kind: str) -> None:
    """Red after a change to the numbers: raise the quantizer's version and run `make golden`."""
    grid = ROW_GRIDS[method]
    tensors = unsigned(FOLDER / f"amx_{method}.v{grid.version}.{kind}.safetensors")
    options: dict[str, Any] = {}
    if "in.scales" in tensors:
        options = {"scales": tensors["in.scales"], "block": tuple(tensors["in.block"].tolist())}
    for values in (tensors["in.values"], np.asfortranarray(tensors["in.values"])):
        matrix = Matrix(values, KINDS[kind], **options)
        bf16 = reference.decode(matrix)
        weight, scale = (np.empty_like(tensors[f"out.{x}"]) for x in ("weight", "scale"))
        kernels.quantize_pack(grid.bits, matrix, weight, scale)
        for made in ((kernels.decode(matrix), weight, scale), (bf16, *reference.quantize_pack(grid.bits, bf16))):
            for name, ours in zip(("bf16", "weight", "scale"), made, strict=True):
                same(name, ours.reshape(-1), tensors[f"out.{name}"].reshape(-1))
