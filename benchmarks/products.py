#!/usr/bin/env python3
"""Matrix products: the speed of each instruction set for weights of an expert, by its tokens, on one core.

python benchmarks/products.py                          every instruction set of this CPU; a minute, 1 GB of memory
python benchmarks/products.py --isa amx avx512vnni --tokens 1 2 3 4 6 8 12 16      from how many tokens AMX is faster

Each call multiplies 512 rows of a weight that comes from memory. Only calls between two quiet probes of the core count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timing
from ceilings import Ceilings, l3_bytes
from forward_cells import QUIET, best_probe
from state import Detector, build

from ktconvert.native_quant import kernels

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from rig.gemm import time_gemm

ROWS = 512  # rows of a call
TILE = 16 * 16 * 64  # multiplications of two tiles
# AMX leaves few tokens to VNNI (gemm_amx.h), but multiplies tiles of at least this number of rows itself.
MIN_ROWS = 9
SAMPLE = 1.5e-3  # approximate seconds between two probes
PEAKS = {"amx": "amx registers", "avx512vnni": "vnni"}  # peak of an instruction set in registers (ceilings.py)


@dataclass(frozen=True)
class Product:
    """One instruction set, number of bits, columns k and tokens m.

    calls   samples: seconds per call, and the worse of the states before and after (state.py)
    limit   largest quiet state
    peak    operations per second in registers; None: unknown
    """

    isa: str
    bits: int
    k: int
    tokens: int
    calls: list[tuple[float, float]]
    limit: float
    peak: float | None

    @property
    def quiet(self) -> list[float]:
        """Seconds per call of the quiet samples."""
        return [seconds for seconds, state in self.calls if state <= self.limit]

    @property
    def seconds(self) -> float:
        """Median of the quiet samples, or of all if none is quiet."""
        return statistics.median(self.quiet or [seconds for seconds, _ in self.calls])

    @property
    def operations(self) -> float:
        """INT8 operations per second."""
        return 2 * self.tokens * ROWS * self.k / self.seconds

    @property
    def tile_ns(self) -> float:
        """Nanoseconds per tile of 16 tokens x 16 rows x 64 columns, or for as many multiplications."""
        return self.seconds * 1e9 * TILE / (self.tokens * ROWS * self.k)

    @property
    def read(self) -> float:
        """Bytes of weights per second."""
        return ROWS * self.k * self.bits / 8 / self.seconds


def main() -> None:
    """Measure and report."""
    options = parse_options()
    print(", ".join(f"{key} {value}" for key, value in timing.machine().items()))
    with tempfile.TemporaryDirectory(prefix="ktconvert-products-") as scratch:
        detector = Detector(build(Path(__file__).with_name("state.c"), Path(scratch)), [], caller_computes=True)
        ceilings = Ceilings(Path(scratch), 1)
        peaks = {isa: ceilings.operations().get(PEAKS.get(isa, "")) for isa in options.isa}
        read = max(rate for _ in range(10) for what, rate in ceilings.read().items() if what != "cpu")
        del ceilings
        print(f"reads {read / 1e9:.1f} GB/s; " + ", ".join(describe_peak(isa, peak) for isa, peak in peaks.items()))
        weights = _random_bytes(max(64 << 20, 3 * l3_bytes()))
        products, probes = [], [detector.probe() for _ in range(1000)]
        for bits in options.bits:
            for k in options.k:
                print_heading(bits, k, options.isa)
                for tokens in options.tokens:
                    row = measure(bits, k, tokens, weights, detector, probes, peaks, options.rounds)
                    print_row(row, read)
                    products += row
    if options.json:
        options.json.write_text(json.dumps([asdict(product) for product in products], indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    isas = [isa for isa in reversed(kernels.available_isas()) if isa not in ("scalar", "avx512bf16")]
    parser.add_argument("--isa", nargs="+", choices=isas, default=isas)
    parser.add_argument("--bits", nargs="+", type=int, choices=(4, 8), default=[4, 8])
    parser.add_argument("--k", nargs="+", type=int, default=[768, 2048], help="columns: multiples of 128")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    return parser.parse_args()


def _random_bytes(size: int) -> Any:
    """Return codes: any bytes except -128, which no weight has."""
    piece = np.random.default_rng(0).integers(-127, 128, 8 << 20, np.int8).view(np.uint8)
    return np.resize(piece, size)


def measure(
    bits: int,
    k: int,
    tokens: int,
    weights: Any,
    detector: Detector,
    probes: list[float],
    peaks: Mapping[str, float | None],
    rounds: int,
) -> list[Product]:
    """Measure a row of the table: the instruction sets in turn, one sample each, with one weight after the other.

    Adds the probes of this row to `probes`, those of the run so far.
    """
    activations = np.random.default_rng(1).integers(-127, 128, (tokens, k), np.int8)
    size = ROWS * k * bits // 8
    matrices = weights[: weights.size // size * size].reshape(-1, size)
    min_rows = {isa: MIN_ROWS if isa == "amx" else 1 for isa in peaks}
    counts: dict[str, int] = {}
    first = 0
    samples: dict[str, list[tuple[float, float]]] = {isa: [] for isa in peaks}
    for number in range(-1, rounds):  # the first round only determines the number of calls of a sample
        for isa in peaks:
            kernels.set_isa(isa)
            count = counts.get(isa, 1)
            first = first if first + count <= len(matrices) else 0
            before = detector.probe()
            seconds = time_gemm(
                bits, activations, matrices[first : first + count], ROWS, tiled_for=max(tokens, min_rows[isa])
            )
            after = detector.probe()
            first += count
            if number < 0:
                counts[isa] = max(1, min(len(matrices), int(SAMPLE / seconds)))
            else:
                samples[isa].append((seconds / count, max(before, after)))
                probes += [before, after]
    limit = best_probe(probes) * QUIET
    return [Product(isa, bits, k, tokens, samples[isa], limit, peaks[isa]) for isa in peaks]


def describe_peak(isa: str, peak: float | None) -> str:
    return f"{isa} at most {peak / 1e12:.2f} TOPS on registers" if peak else f"no peak of {isa} is measured"


def print_heading(bits: int, k: int, isas: list[str]) -> None:
    """Print the heading of a table."""
    print(
        f"\nINT{bits}, k {k}: ns for a tile (16 x 16 x 64), TOPS, % of the peak on registers, % of read, quiet samples"
    )
    print(f"{'tokens':>6}" + "".join(f" | {isa:>32}" for isa in isas))


def print_row(row: list[Product], read: float) -> None:
    """Print one line. `*` means that no sample was quiet."""
    line = f"{row[0].tokens:6}"
    for product in row:
        peak = f"{product.operations / product.peak:5.0%}" if product.peak else f"{'-':>5}"
        calls = f"{len(product.quiet)}/{len(product.calls)}" + ("" if product.quiet else "*")
        line += (
            f" | {product.tile_ns:7.1f} {product.operations / 1e12:6.3f} {peak} {product.read / read:5.0%} {calls:>5}"
        )
    print(line, flush=True)


if __name__ == "__main__":
    main()
