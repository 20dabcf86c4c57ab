"""kt-kernel's own bytes: from the NumPy definition and from every instruction set this CPU has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import kernels
from ktconvert.quantizers import QUANTIZERS, reference

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    ("int4", "edge_t1"),
    ("int4", "small_t2"),
    ("int8", "edge_t1"),
    ("int8", "small_t2"),
    ("int8", "nodd2_t1"),
    ("int8", "kblock_t1"),
]
DTYPES = {"BF16": np.uint16, "I8": np.uint8, "F32": np.float32, "I64": np.int64}


def load(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and tensors (BF16 as uint16: NumPy has no such type)."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def parts(method: str, case: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every (key, BF16 part, kt-kernel's weight, kt-kernel's scale) of a golden file."""
    path = GOLDEN / f"amx_{method}.v{QUANTIZERS[method].version}.{case}.safetensors"
    metadata, tensors = load(path)
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


@pytest.mark.parametrize(("method", "case"), CASES)
def test_definition_gives_kt_kernels_bytes(method: str, case: str) -> None:
    for key, part, weight, scale in parts(method, case):
        ours = reference.quantize_pack(QUANTIZERS[method].bits, part)
        same(f"{key}.weight", ours[0], weight)
        same(f"{key}.scale", ours[1], scale)


@pytest.mark.parametrize("isa", kernels.ISAS)
@pytest.mark.parametrize(("method", "case"), CASES)
def test_kernels_give_kt_kernels_bytes(method: str, case: str, isa: str) -> None:
    if isa not in kernels.available_isas():
        pytest.skip(f"this machine has no {isa}")
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        for key, part, weight, scale in parts(method, case):
            ours = np.full_like(weight, 0xAA), np.full_like(scale, np.nan)
            kernels.quantize_pack(QUANTIZERS[method].bits, part, "bf16", *ours)
            same(f"{key}.weight", ours[0], weight)
            same(f"{key}.scale", ours[1], scale)
    finally:
        kernels.set_isa(before)
