"""GB/s of quantizing and packing, of only packing, and of the scale search, compared with memcpy and reading memory.

    python benchmarks/kernels.py [--json] [--size-mib 256] [--rounds 7] [--isa avx512 ...]

All figures are gigabytes of source per CPU second of one thread, because other load on the machine changes wall time
but not CPU seconds. Each is the median of `rounds`; a round runs every case once, so that other load affects all of
them. The source is larger than any cache and starts 8 bytes after a page, like tensors in safetensors files. "through"
writes to memory as large as its share of the source; "reused" writes to the same buffer again and again, like the
converter. The target of the search is 0.5 G weights (1 GB) per CPU second with AVX-512.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time
from typing import Any

import numpy as np
from blocks import random_blocks

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import GGML, INTEGERS
from ktconvert.native_quant.runtime.benchmark import STREAMS, read_memory
from ktconvert.native_quant.scale_search import search_scales

MIB = 1 << 20
SHAPES = ((768, 2048), (2048, 7168))  # n, k of experts of Qwen3-30B-A3B and DeepSeek-V3
ITEM_BYTES = {
    "bf16": 2,
    "fp16": 2,
    "f32": 4,
    "fp8_e4m3": 1,
    "mxfp8": 1,
    "mxfp4": 0.5,
    "nvfp4": 0.5,
    "int4": 0.5,
    "gptq": 0.5,
    "awq": 0.5,
    "int8": 1,
    "int8_packed": 1,
    "int8_signed": 1,
    "gptq_8": 1,
    **{kind.name: kind.items / kind.columns for kind in GGML.values()},
}
# Encodings with scales: the kernel name of their values, and the block of a scale.
SCALED = {
    "fp8_e4m3": ("fp8_e4m3", (128, 128)),
    "mxfp8": ("fp8_e4m3", (1, 32)),
    "mxfp4": ("fp4_e2m1", (1, 32)),
    "nvfp4": ("fp4_e2m1", (1, 16)),
    "int4": ("int4", (1, 32)),
    "gptq": ("int4_words", (1, 128)),
    "awq": ("int4_awq", (1, 128)),
    "int8_packed": ("int8", (1, 128)),
    "int8_signed": ("int8_signed", (1, 128)),
    "gptq_8": ("int8_words", (1, 128)),
}
DECODED = (
    "fp8_e4m3",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int4",
    "gptq",
    "awq",
    "int8_packed",
    "int8_signed",
    "gptq_8",
    "fp16",
    "f32",
    *(kind.name for kind in GGML.values()),
)
ALL_KINDS = {**kernels.KINDS, **{kind.name: kind for kind in INTEGERS}}
PAGE = 4096


@dataclass(frozen=True)
class Case:
    """A case to time: `run` works on `size` bytes of source."""

    name: str
    isa: str
    kind: str
    bits: int
    n: int
    k: int
    reused: bool
    transposed: bool
    size: int
    run: Callable[[], None]


def allocate(size: int, offset: int = 0) -> Any:
    """Return zeroed bytes that start `offset` bytes after a page, all of them already mapped."""
    raw = np.zeros(size + 2 * PAGE, np.uint8)
    raw[::PAGE] = 1
    start = -raw.ctypes.data % PAGE + offset
    return raw[start : start + size]


def make_source(kind: str, size: int) -> Any:
    """Return random weights: Gaussian values, codes without NaN, or blocks."""
    rng = np.random.default_rng(0)
    buffer = allocate(size, 8)
    in_blocks = next((name for name, block in GGML.items() if block.name == kind), None)
    if in_blocks is not None:
        piece = random_blocks(in_blocks, 4 * MIB // GGML[in_blocks].items).reshape(-1)
    elif ITEM_BYTES[kind] == 0.5:
        piece = rng.integers(0, 256, 4 * MIB, np.uint8)
    elif kind in SCALED:
        piece = rng.integers(0, 127, 4 * MIB, np.uint8) | rng.integers(0, 2, 4 * MIB, np.uint8) << 7
    else:
        x = (rng.standard_normal(4 * MIB) * 0.02).astype(np.float32)
        bf16 = (x.view(np.uint32) >> 16).astype(np.uint16)
        piece = {"bf16": bf16, "fp16": x.astype(np.float16), "f32": x}[kind].view(np.uint8)
    for start in range(0, size, piece.size):
        part = buffer[start : start + piece.size]
        part[:] = piece[: part.size]
    return buffer


def make_codes(size: int) -> Any:
    """Return random codes from -7 to 7."""
    buffer = allocate(size, 8)
    piece = np.random.default_rng(0).integers(-7, 8, 4 * MIB).astype(np.int8).view(np.uint8)
    for start in range(0, size, piece.size):
        part = buffer[start : start + piece.size]
        part[:] = piece[: part.size]
    return buffer


def quantize_case(
    isa: str, kind: str, bits: int, n: int, k: int, source: Any, target: Any, reused: bool, transposed: bool = False
) -> Case:
    matrix_bytes = int(n * k * ITEM_BYTES[kind])
    packed_bytes = n * k * bits // 8
    count = max(1, source.size // matrix_bytes // (16 if isa == "scalar" else 1))
    scale = np.empty(n, np.float32)
    options: dict[str, Any] = {}
    values_of = ALL_KINDS[SCALED[kind][0] if kind in SCALED else kind]
    in_words = values_of.dtype == np.uint32  # words of a column are neighbours
    if kind in SCALED:
        rows, columns = SCALED[kind][1]
        options = {"scales": np.full((-(-n // rows), -(-k // columns)), 2.0**-10, np.float32), "block": (rows, columns)}
        if in_words:
            options["zeros"] = np.full_like(options["scales"], 7)

    def run() -> None:
        kernels.set_isa(isa)
        for i in range(count):
            values = source[i * matrix_bytes : (i + 1) * matrix_bytes].view(values_of.dtype)
            if transposed or in_words:
                values = values.reshape(k // values_of.columns, n // values_of.rows).T
            else:
                values = values.reshape(n, -1)
            start = 0 if reused else i * packed_bytes
            matrix = kernels.Matrix(values, values_of, **options)
            kernels.quantize_pack(bits, matrix, target[start : start + packed_bytes], scale)

    name = f"{kind}{' transposed' if transposed else ''} -> int{bits}"
    return Case(name, isa, kind, bits, n, k, reused, transposed, count * matrix_bytes, run)


def codes_case(isa: str, bits: int, n: int, k: int, source: Any, target: Any) -> Case:
    """Return a case that only packs codes of one byte each."""
    packed_bytes = n * k * bits // 8
    count = max(1, source.size // (n * k) // (16 if isa == "scalar" else 1))

    def run() -> None:
        kernels.set_isa(isa)
        for i in range(count):
            codes = source[i * n * k : (i + 1) * n * k].view(np.int8).reshape(n, k)
            kernels.pack_codes(bits, codes, target[:packed_bytes])

    return Case(f"codes -> int{bits}", isa, "int8", bits, n, k, True, False, count * n * k, run)


def search_case(isa: str, bits: int, n: int, k: int, source: Any, weighted: bool) -> Case:
    """Return a case that searches codes and scales of least squared error, some rows at a time like the converter."""
    matrix_bytes, step = n * k * 2, 128
    count = max(1, source.size // matrix_bytes // (256 if isa == "scalar" else 8))
    importance = np.random.default_rng(0).random(k, np.float32) if weighted else None

    def run() -> None:
        kernels.set_isa(isa)
        for i in range(count):
            values = source[i * matrix_bytes : (i + 1) * matrix_bytes].view(np.uint16).reshape(n, k)
            for first in range(0, n, step):
                search_scales(bits, values[first : first + step], importance)

    name = f"bf16 -> int{bits} codes, {'weighted' if weighted else 'mse'}"
    return Case(name, isa, "bf16", bits, n, k, True, False, count * matrix_bytes, run)


def ceilings(source: Any, target: Any) -> list[Case]:
    block = 4 * MIB

    def read() -> None:
        read_memory(source, STREAMS[-1])

    def copy(reused: bool) -> Callable[[], None]:
        def run() -> None:
            for start in range(0, source.size, block):
                target_start = 0 if reused else start
                part = source[start : start + block]
                np.copyto(target[target_start : target_start + part.size], part)

        return run

    def case(name: str, reused: bool, run: Callable[[], None]) -> Case:
        return Case(name, "", "", 0, 0, 0, reused, False, source.size, run)

    return [case("read", False, read), case("memcpy", False, copy(False)), case("memcpy", True, copy(True))]


def all_cases(isas: list[str], size: int) -> list[Case]:
    in_bytes = ("mxfp8", "int8_packed", "int8_signed", "gptq_8")  # these use the bytes of FP8
    sources = {kind: make_source(kind, size) for kind in ITEM_BYTES if kind not in ("int8", *in_bytes)}
    sources |= dict.fromkeys(in_bytes, sources["fp8_e4m3"])
    codes = make_codes(size)
    target = allocate(size)
    cases = ceilings(sources["bf16"], target)
    for isa in isas:
        for n, k in SHAPES:
            for bits in (8, 4):
                for reused in (False, True):
                    cases.append(quantize_case(isa, "bf16", bits, n, k, sources["bf16"], target, reused))
                for kind in DECODED:
                    cases.append(quantize_case(isa, kind, bits, n, k, sources[kind], target, True))
                cases.append(quantize_case(isa, "bf16", bits, n, k, sources["bf16"], target, True, transposed=True))
                cases.append(codes_case(isa, bits, n, k, codes, target))
                cases += [search_case(isa, bits, n, k, sources["bf16"], weighted) for weighted in (False, True)]
    return cases


def measure(cases: list[Case], rounds: int) -> list[float]:
    """Return the median GB of source per CPU second, by case."""
    rates: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, figures in zip(cases, rates, strict=True):
            start = thread_time()
            case.run()
            figures.append(case.size / (thread_time() - start) / 1e9)
    return [statistics.median(figures) for figures in rates]


def report(cases: list[Case], rates: list[float]) -> list[dict[str, Any]]:
    """Return a record for each case: rate, ratios to memcpy and reading, and time per output byte relative to BF16."""
    read, memcpy, memcpy_reused = rates[:3]
    plain = {
        (j.isa, j.bits, j.k): rate
        for j, rate in zip(cases, rates, strict=True)
        if j.name == f"bf16 -> int{j.bits}" and j.reused
    }
    records = []
    for case, rate in zip(cases, rates, strict=True):
        record: dict[str, Any] = {
            "what": case.name,
            "into": "reused" if case.reused else "through",
            "gb_per_cpu_second": rate,
        }
        if case.isa:
            record |= {"isa": case.isa, "n": case.n, "k": case.k}
            record["of_memcpy"] = rate / (memcpy_reused if case.reused else memcpy)
            record["of_read"] = rate / read
            bf16_rate = plain.get((case.isa, case.bits, case.k), 0.0)
            # Time per output byte, because input bytes per output byte differ by encoding.
            record["time_of_bf16"] = bf16_rate / rate * ITEM_BYTES[case.kind] / 2
        records.append(record)
    return records


def print_records(records: list[dict[str, Any]]) -> None:
    print(
        f"{'what':26} {'isa':7} {'k':>5} {'into':8} {'GB/cpu-s':>9} {'x memcpy':>9} {'x read':>7} "
        f"{'time/byte v bf16':>17}"
    )
    for r in records:
        line = f"{r['what']:26} {r.get('isa', ''):7} {r.get('k', ''):>5} {r['into']:8} {r['gb_per_cpu_second']:9.2f}"
        if "isa" in r:
            line += f" {r['of_memcpy']:9.2f} {r['of_read']:7.2f} {r['time_of_bf16']:17.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--size-mib", type=int, default=256, help="bytes of source for each encoding")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", nargs="*", choices=kernels.available_isas(), default=list(kernels.available_isas()))
    options = parser.parse_args()
    cases = all_cases(options.isa, options.size_mib * MIB)
    records = report(cases, measure(cases, options.rounds))
    if options.json:
        json.dump({"rounds": options.rounds, "size_mib": options.size_mib, "results": records}, sys.stdout, indent=1)
        print()
    else:
        print_records(records)


if __name__ == "__main__":
    main()
