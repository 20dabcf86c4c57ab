"""Writes our own golden files (`make golden`): encodings other than BF16, from the NumPy definition alone.

The other files in this folder are bytes of other programs, such as kt-kernel, and are never written here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

from ktconvert.layouts.encodings import fp4
from ktconvert.native_quant.matrix import KINDS, Matrix
from ktconvert.quantizers import FLOAT_GRIDS, ROW_GRIDS
from ktconvert.quantizers.quantizer import MSE
from rig import floats, reference, scale_search

FOLDER = Path(__file__).parent
N, K = 128, 128
BLOCK = (48, 80)  # partial blocks at both ends


def sources() -> dict[str, Any]:
    """Return a linear in each encoding, with rows of zeros, of -0 and of subnormal numbers, and an outlier."""
    rng = np.random.default_rng(20240229)
    x = rng.standard_normal((N, K)).astype(np.float32) * 0.05
    x[1] = 0
    x[2] = -0.0
    x[3] *= np.float32(1e-7)
    x[5, 9] = 60000
    fp8 = rng.integers(0, 256, (N, K)).astype(np.uint8)
    fp8[fp8 & 0x7F == 0x7F] = 0x7E
    fp8[1], fp8[2], fp8[3] = 0, 0x80, fp8[3] & 0x87
    return {"fp16": x.astype(np.float16).view(np.uint16), "f32": x, "fp8_e4m3": fp8}


def extremes() -> Any:
    """Return BF16 bits: blocks of 32 columns around any power of two, with ties of E2M1, zeros and subnormals."""
    rng = np.random.default_rng(4)
    top = np.repeat(rng.integers(0, 255, (64, 4)), 32, axis=1)
    exponents = np.maximum(top - rng.integers(0, 7, top.shape), 0)
    magnitudes = exponents << 7 | rng.choice([0, 1, 32, 64, 96, 127], top.shape)
    magnitudes[5] = 0
    return (magnitudes | rng.integers(0, 2, top.shape) << 15).astype(np.uint16)


def main() -> None:
    scales = np.random.default_rng(7).uniform(1e-4, 1e-2, (-(-N // BLOCK[0]), -(-K // BLOCK[1]))).astype(np.float32)
    for kind, values in sources().items():
        options = {"scales": scales, "block": BLOCK} if kind == "fp8_e4m3" else {}
        bf16 = reference.decode(Matrix(values, KINDS[kind], **options))
        for quantizer in ROW_GRIDS.values():
            weight, scale = reference.quantize_pack(quantizer.bits, bf16)
            tensors = {"in.values": values, "out.bf16": bf16, "out.weight": weight, "out.scale": scale}
            if options:
                tensors |= {"in.scales": scales, "in.block": np.array(BLOCK)}
            path = FOLDER / f"amx_{quantizer.name}.v{quantizer.version}.{kind}.safetensors"
            path.write_bytes(save(tensors))
        source = {"in.values": values} | {f"in.{key}": np.array(value) for key, value in options.items()}
        for name, in_panels in IN_PANELS.items():
            write(name, kind, source, in_panels(bf16))
    write("mxfp4", "bf16", {"in.values": extremes()}, IN_PANELS["mxfp4"](extremes()))
    (FOLDER / f"mse.v{MSE.version}.safetensors").write_bytes(save(search_scales()))


def search_scales() -> dict[str, Any]:
    """Return codes and scales of least squared error for Gaussian rows and for Student's t with 5 degrees of freedom.

    For the experts of kt-kernel's edge_t1, return scales and the SHA-256 of their many codes.
    """
    rng = np.random.default_rng(12)
    samples = {"gauss": rng.standard_normal((32, 256)), "t5": rng.standard_t(5, (32, 256))}
    tensors: dict[str, Any] = {"importance": (rng.standard_normal(256) ** 2).astype(np.float32)}
    for name, values in samples.items():
        bf16 = tensors[f"in.{name}"] = reference.f32_to_bf16((values * 0.02).astype(np.float32))
        for bits in (4, 8):
            for suffix, importance in (("mse", None), ("weighted", tensors["importance"])):
                key = f"out.{name}.int{bits}.{suffix}"
                tensors[f"{key}.codes"], tensors[f"{key}.scale"] = scale_search.search(bits, bf16, importance)
    for grid in ROW_GRIDS.values():
        edge = dict(deserialize((FOLDER / f"amx_{grid.name}.v{grid.version}.edge_t1.safetensors").read_bytes()))
        for projection in ("gate", "up", "down"):
            stored = edge[f"in.{projection}"]
            for expert, matrix in enumerate(np.frombuffer(stored["data"], np.uint16).reshape(stored["shape"])):
                codes, scale = scale_search.search(grid.bits, matrix)
                key = f"edge.{grid.name}.{projection}.{expert}"
                tensors[f"{key}.codes_sha256"] = np.frombuffer(hashlib.sha256(codes).digest(), np.uint8)
                tensors[f"{key}.scale"] = scale
    return tensors


def write(name: str, kind: str, source: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write codes and scales of BF16 values as a floating-point format stores them."""
    (FOLDER / f"{name}.v{FLOAT_GRIDS[name].version}.{kind}.safetensors").write_bytes(save(source | tensors))


def mxfp4_in_panels(bf16: Any) -> dict[str, Any]:
    """Return codes and scales of BF16 values in MXFP4."""
    codes, exponents = reference.quantize_mxfp4(bf16)
    return {"out.codes": floats.pack_codes(codes), "out.scales": fp4.exponents_to_panels(exponents)}


def fp8_in_panels(bf16: Any) -> dict[str, Any]:
    """Return codes and scales of BF16 values in FP8."""
    codes, scales = reference.quantize_fp8(bf16)
    return {"out.codes": floats.to_panels(codes), "out.scales": scales}


IN_PANELS = {"mxfp4": mxfp4_in_panels, "fp8": fp8_in_panels, "bf16": lambda bf16: {"out.codes": floats.to_panels(bf16)}}


if __name__ == "__main__":
    main()
