"""Accuracy of every quantizer: tables and figures for docs/explanation/accuracy.md (`make accuracy`).

Synthetic linears: error of weights, and of outputs on held-out inputs. The bundled model: error of each layer's experts
and KL divergence from BF16, by `ktconvert cpu` and `ktconvert eval`. Calibration uses the first half of
benchmarks/heldout.txt (or the calibration inputs), measurements use the second half (or the held-out inputs), in
sequences of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pages
from synthetic_layers import F32, Layer, make_layer, relative_error

from ktconvert.layouts.outputs import FORMATS, Format
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.calibration.gptq_experts import code_steps, pack_linear
from ktconvert.pipeline.stages.quantize_experts import quantize_slice
from ktconvert.quantizers import gptq
from ktconvert.quantizers.quantizer import QUANTIZERS
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16

ROOT = Path(__file__).resolve().parents[1]
MODEL, TEXT, PAGE = (
    ROOT / "examples" / "qwen3-moe-small",
    ROOT / "benchmarks" / "heldout.txt",
    ROOT / "docs" / "explanation" / "accuracy.md",
)
KINDS = {"gauss": "Gaussian", "t5": "Student's t, 5 degrees of freedom"}
LENGTH = 512
DAMPENING = 0.1
ROWS = 256  # rows of a synthetic linear

# (title, format, --scale and --gptq-steps). Synthetic layers only show the plain steps of GPTQ.
CASES = (
    ("int4 absmax (kt-kernel's)", "AMXINT4", "absmax"),
    ("int4 mse", "AMXINT4", "mse"),
    ("int4 imatrix", "AMXINT4", "imatrix"),
    ("int4 gptq, plain", "AMXINT4", "gptq plain"),
    ("int4 gptq, descent", "AMXINT4", "gptq descent"),
    ("int4 gptq", "AMXINT4", "gptq full"),
    ("int8 absmax", "AMXINT8", "absmax"),
    ("int8 mse", "AMXINT8", "mse"),
    ("mxfp4 absmax", "MXFP4", "absmax"),
    ("mxfp4 mse", "MXFP4", "mse"),
    ("mxfp4 imatrix", "MXFP4", "imatrix"),
    ("mxfp4 gptq, plain", "MXFP4", "gptq plain"),
    ("mxfp4 gptq, descent", "MXFP4", "gptq descent"),
    ("mxfp4 gptq", "MXFP4", "gptq full"),
    ("rawint4 absmax", "RAWINT4", "absmax"),
    ("rawint4 mse", "RAWINT4", "mse"),
    ("rawint4 imatrix", "RAWINT4", "imatrix"),
    ("rawint4 gptq, plain", "RAWINT4", "gptq plain"),
    ("rawint4 gptq, descent", "RAWINT4", "gptq descent"),
    ("rawint4 gptq", "RAWINT4", "gptq full"),
)


# --- synthetic layers -----------------------------------------------------------------------------


def quantize_and_decode(output_format: Format, scale: str, bits: Any, inputs: F32) -> F32:
    """Return a linear of BF16 bits [n, k] after quantizing and decoding; calibration sees inputs [T, k]."""
    n, k = bits.shape
    if scale == "gptq plain":
        return quantize_by_gptq(output_format, bits, inputs)
    importance = (inputs.astype(np.float64) ** 2).mean(0).astype(np.float32) if scale == "imatrix" else None
    stored = [np.empty(tensor.nbytes, np.uint8) for tensor in output_format.encoding.tensors(n, k)]
    quantize_slice(output_format.encoding, QUANTIZERS[scale], Matrix(bits, BF16), stored, importance)
    return output_format.encoding.decode(stored, n, k, slice(None))


def quantize_by_gptq(output_format: Format, bits: Any, inputs: F32) -> F32:
    """Quantize as `--scale gptq` does: scales weighted by importance, then compensation."""
    import torch

    n, k = bits.shape
    hessian = gptq.Hessian.empty(k)
    for batch in np.split(inputs, 8):
        hessian.add(torch.from_numpy(batch).bfloat16())
    stored = [np.empty(tensor.nbytes, np.uint8) for tensor in output_format.encoding.tensors(n, k)]
    importance = torch.diagonal(hessian.sum).numpy().copy()
    quantize_slice(output_format.encoding, QUANTIZERS["imatrix"], Matrix(bits, BF16), stored, importance)
    scale = output_format.encoding.unpack_scales(stored[-1], n, k)
    code_range, wide = output_format.encoding.grid.code_range, code_steps(output_format.encoding, scale)
    weight = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    values = gptq.round_columns(weight, gptq.factorize_hessian(hessian, DAMPENING), wide, code_range)
    ((_, tensors),) = pack_linear(
        output_format.encoding, (0, "gate"), gptq.find_codes(values, wide, code_range), scale, Slicing(0, k, n)
    )
    return output_format.encoding.decode(tensors, n, k, slice(None))


def measure_synthetic_layers() -> list[tuple[str, list[str]]]:
    """Return a row for each case: errors of weights at K 2048 and of outputs at K 1024."""
    wide = {kind: make_layer(kind, rows=ROWS, features=2048, calibration=4096, held_out=1) for kind in KINDS}
    narrow = {kind: make_layer(kind, rows=ROWS) for kind in KINDS}

    def error(samples: Layer, output_format: Format, scale: str, outputs: bool) -> str:
        bits = f32_to_bf16(samples.weight)
        values, exact = quantize_and_decode(output_format, scale, bits, samples.calibration), bf16_to_f32(bits)
        if outputs:
            values, exact = samples.held_out @ values.T, samples.held_out @ exact.T
        return f"{100 * relative_error(values, exact):.2f} %"

    rows = []
    for title, name, scale in CASES:
        if scale in ("gptq descent", "gptq full"):
            continue
        output_format = FORMATS[name]
        cells = [
            error(samples[kind], output_format, scale, samples is narrow)
            for samples in (wide, narrow)
            for kind in KINDS
        ]
        rows.append((title, cells))
        print(title, *cells, flush=True)
    return rows


# --- the bundled model ----------------------------------------------------------------------------


def run_ktconvert(*arguments: object) -> str:
    """Run ktconvert and return its output."""
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def bits_per_weight(output_format: Format) -> str:
    """Return the bits per weight of a linear of 2048 x 2048, including scales."""
    return f"{8 * sum(tensor.nbytes for tensor in output_format.encoding.tensors(2048, 2048)) / 2048**2:.2f}"


def measure_bundled_model(folder: Path) -> list[tuple[str, list[str]]]:
    """Return a row for each case: bits per weight, KL divergence, perplexity, agreement, error of each layer."""
    text = TEXT.read_text()
    halves = [folder / "calibration.txt", folder / "evaluation.txt"]
    for path, half in zip(halves, (text[: len(text) // 2], text[len(text) // 2 :]), strict=True):
        path.write_text(half)
    calibration = ("--dataset", halves[0], "--num-calibration-samples", 128, "--sequence-length", LENGTH)
    run_ktconvert("calibrate", MODEL, "--output", folder / "statistics", *calibration)
    options = {"imatrix": ("--statistics", folder / "statistics"), "gptq": (*calibration, "--force-cpu")}
    rows = []
    for title, name, scale_and_steps in CASES:
        scale, _, steps = scale_and_steps.partition(" ")
        output = folder / f"{name}-{scale}-{steps}"
        method = FORMATS[name].option
        scale_options = () if scale == "absmax" else ("--scale", scale, *options.get(scale, ()))
        scale_options += ("--gptq-steps", steps) if steps else ()
        run_ktconvert("cpu", "-i", MODEL, "-o", output, "--quant-method", method, "--numa", 2, *scale_options)
        report = json.loads(
            run_ktconvert(
                "eval", MODEL, "--cpu-weights", output, "--text", halves[1], "--sequence-length", LENGTH, "--json"
            )
        )
        before, after = report["perplexity"]["original"], report["perplexity"]["converted"]
        layers = ", ".join(f"{100 * each['relative_error']:.1f}" for each in report["layers"])
        agreement = f"{100 * report['top1_agreement']:.1f} %"
        cells = [
            bits_per_weight(FORMATS[name]),
            f"{report['kl']['mean']:.5f}",
            f"{report['kl']['p99']:.4f}",
            f"{100 * (after / before - 1):+.2f} %",
            agreement,
        ]
        rows.append((title, [*cells, f"{layers} %"]))
        print(title, *rows[-1][1], flush=True)
    return rows


# --- the page -------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put tables, data and figures into docs/")
    options = parser.parse_args()
    errors = measure_synthetic_layers()
    with tempfile.TemporaryDirectory() as folder:
        kl = measure_bundled_model(Path(folder))
    tables: dict[str, tuple[Sequence[str], Any]] = {
        "synthetic layers": (
            ("", *(f"weights, {kind}, K 2048" for kind in KINDS), *(f"outputs, {kind}, K 1024" for kind in KINDS)),
            errors,
        ),
        "bundled model": (
            (
                "",
                "bits per weight",
                "KL, nats: mean",
                "at 99 % of tokens",
                "perplexity",
                "top-1 agreement",
                "output error of each layer",
            ),
            kl,
        ),
    }
    for name, (head, rows) in tables.items():
        body = pages.table(head, [(title, *cells) for title, cells in rows])
        if options.write:
            pages.write(PAGE, name, body)
        else:
            print(f"\n{name}\n{body}")
    if options.write:
        pages.draw("accuracy", {name: [(title, *cells) for title, cells in rows] for name, (_, rows) in tables.items()})


if __name__ == "__main__":
    main()
