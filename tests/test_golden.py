"""The NumPy definition and every instruction set give kt-kernel's bytes, and our golden bytes of other encodings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.encodings.encoding import tensor_suffixes
from ktconvert.layouts.encodings.pack_quantized import RAWINT4
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import KINDS, Matrix
from ktconvert.quantizers import ROW_GRIDS
from rig import floats, native, reference
from rig.golden import FOLDER
from rig.safetensors import bits_of, metadata_of, read_file

CASES = [(method, case) for method in ROW_GRIDS for case in ("edge_t1", "small_t2")]
CASES += [("int8", "nodd2_t1"), ("int8", "kblock_t1")]
OURS = [(method, kind) for method in ROW_GRIDS for kind in ("fp16", "f32", "fp8_e4m3")]


def read_unsigned(path: Path) -> dict[str, Any]:
    """Return all tensors of a golden file, with weights in unsigned bytes as kernels write them."""
    tensors = bits_of(read_file(path))
    return {name: bits.view(np.uint8) if bits.dtype == np.int8 else bits for name, bits in tensors.items()}


def read_slices(method: str, case: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (key, BF16 slice, kt-kernel's weight, kt-kernel's scale) of a golden file."""
    path = FOLDER / f"amx_{method}.v{ROW_GRIDS[method].version}.{case}.safetensors"
    metadata, tensors = metadata_of(path), read_unsigned(path)
    count = int(metadata["numa"])
    for proj in ("gate", "up", "down"):
        for expert, matrix in enumerate(tensors[f"in.{proj}"]):
            for i, bf16 in enumerate(np.split(matrix, count, axis=1 if proj == "down" else 0)):
                key = f"blk.0.ffn_{proj}_exps.{expert}.numa.{i}"
                yield key, bf16, tensors[f"{key}.weight"], tensors[f"{key}.scale"]


def assert_equal_bytes(key: str, actual: Any, expected: Any) -> None:
    """Require equal bytes; report the first difference."""
    different = np.flatnonzero(actual.view(np.uint8) != expected.view(np.uint8))
    if different.size:
        first = different[0] // actual.itemsize
        pytest.fail(
            f"{key}: {different.size} bytes differ, first element {first}: {actual[first]!r}, not {expected[first]!r}"
        )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("method", "case"), CASES)
def test_packed_slices_equal_the_bytes_of_kt_kernel(method: str, case: str) -> None:
    bits = ROW_GRIDS[method].bits
    for key, bf16, weight, scale in read_slices(method, case):
        ours = np.full_like(weight, 0xAA), np.full_like(scale, np.nan)
        kernels.quantize_pack(bits, Matrix(bf16, KINDS["bf16"]), *ours)
        for actual in (ours, reference.quantize_pack(bits, bf16)):
            assert_equal_bytes(f"{key}.weight", actual[0], weight)
            assert_equal_bytes(f"{key}.scale", actual[1], scale)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("method", "kind"), OURS)
def test_results_equal_our_golden_bytes(method: str, kind: str) -> None:
    """If this fails after a change of the numbers, raise the quantizer's version and run `make golden`."""
    grid = ROW_GRIDS[method]
    tensors = read_unsigned(FOLDER / f"amx_{method}.v{grid.version}.{kind}.safetensors")
    options: dict[str, Any] = {}
    if "in.scales" in tensors:
        options = {"scales": tensors["in.scales"], "block": tuple(tensors["in.block"].tolist())}
    for values in (tensors["in.values"], np.asfortranarray(tensors["in.values"])):
        matrix = Matrix(values, KINDS[kind], **options)
        bf16 = reference.decode(matrix)
        weight, scale = (np.empty_like(tensors[f"out.{x}"]) for x in ("weight", "scale"))
        kernels.quantize_pack(grid.bits, matrix, weight, scale)
        for results in ((kernels.decode(matrix), weight, scale), (bf16, *reference.quantize_pack(grid.bits, bf16))):
            for name, ours in zip(("bf16", "weight", "scale"), results, strict=True):
                assert_equal_bytes(name, ours.reshape(-1), tensors[f"out.{name}"].reshape(-1))


def test_rawint4_decodes_to_the_numbers_of_kt_kernel() -> None:
    """Decoded weights give the outputs that kt-kernel's file was stored with."""
    layer = native.read("RAWINT4_kimi")

    def linear(expert: int, projection: str) -> Any:
        (stem,) = {name.rpartition(".")[0] for name in layer.tensors if f".experts.{expert}.{projection}_proj." in name}
        tensors = {each: layer.tensors[f"{stem}.{each}"].bits for each in tensor_suffixes(RAWINT4)}
        tensors["weight_shape"] = tensors["weight_shape"].astype(np.int64)
        stored = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in tensors.values()]
        return RAWINT4.decode(stored, 256, 256, slice(None)).astype(np.float64)

    out = floats.forward(linear, layer.hidden, layer.ids, layer.weights)
    np.testing.assert_allclose(out, layer.truth, rtol=1e-9, atol=1e-12 * np.abs(layer.truth).max())
