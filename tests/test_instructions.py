"""No illegal instructions: beyond those of every x86-64 CPU, a function uses only those of its instruction set.

The extension is disassembled and compared with the target attributes of arch/x86/isa.h. KTCONVERT_EXTENSION names a
different file than the imported one, such as a wheel's.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from iced_x86 import CpuidFeature, Decoder, Mnemonic

from ktconvert.native_quant import _ktq

ROOT = Path(__file__).resolve().parents[1]
ISA_HEADER = ROOT / "native_quant" / "csrc" / "arch" / "x86" / "isa.h"
# https://gitlab.com/x86-psABIs/x86-64-ABI, table 3.1, and instructions that older CPUs treat as NOP.
BASELINE = {
    *("INTEL8086", "INTEL186", "INTEL286", "INTEL386", "INTEL486", "X64", "CPUID", "CMOV", "CX8", "FPU", "FXSR"),
    *("MMX", "SSE", "SSE2", "SYSCALL", "MULTIBYTENOP", "PAUSE", "CET_IBT"),
}
# Names in isa.h -> iced's spelling.
ICED_NAMES = {
    "avx512f": "AVX512F",
    "avx512vnni": "AVX512_VNNI",
    "avx512vbmi": "AVX512_VBMI",
    "avx512bf16": "AVX512_BF16",
    "avxvnni": "AVX_VNNI",
}
ICED_NAMES |= {"amx-tile": "AMX_TILE", "amx-int8": "AMX_INT8", "amx-bf16": "AMX_BF16"}
FEATURES = {number: name for name, number in vars(CpuidFeature).items() if not name.startswith("_")}


def read_allowed_features() -> dict[str, set[str]]:
    """Return the features of each instruction set: its target attributes in isa.h, and those that AVX implies."""
    header = re.sub(r"#else.*?#endif", "", ISA_HEADER.read_text(), flags=re.S).replace("\\\n", " ")
    sets = {"scalar": set[str]()}
    for name, targets in re.findall(
        r"#define KT_TARGET_(\w+)\s+__attribute__\(\(\s*target\(((?:\s*\"[^\"]*\")+)\)\)\)", header
    ):
        sets[name.lower()] = (
            {ICED_NAMES.get(t, t.upper()) for t in re.sub(r'["\s]', "", targets).split(",")} | {"AVX"} | WITH_AVX2
        )
    return {isa: features | BASELINE for isa, features in sets.items()}


# Every CPU with AVX2, FMA and F16C has these too (x86-64-v3 without BMI and MOVBE, which cpu.c does not check).
WITH_AVX2 = {"SSE3", "SSSE3", "SSE4_1", "SSE4_2", "POPCNT"}


def find_functions(elf: ELFFile, isas: Collection[str]) -> Iterator[tuple[str, str, bytes, int]]:
    """Yield name, instruction set, code and address of each function.

    The instruction set ends the function's name or, for a static function, the name of its file.
    """
    table = elf.get_section_by_name(".symtab")
    assert isinstance(table, SymbolTableSection), "the file was stripped of its symbols"
    file = ""
    for symbol in table.iter_symbols():
        kind, size, index = symbol["st_info"]["type"], symbol["st_size"], symbol["st_shndx"]
        if kind == "STT_FILE":
            file = symbol.name
        elif kind == "STT_FUNC" and size and index != "SHN_UNDEF":
            section = elf.get_section(index)
            begin = symbol["st_value"] - section["sh_addr"]
            suffix = symbol.name.partition(".")[0].rpartition("_")[2]
            isa = suffix if suffix in isas else Path(file).stem.rpartition("_")[2]
            yield symbol.name, isa, section.data()[begin : begin + size], symbol["st_value"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
def test_only_functions_declared_for_an_instruction_set_use_it() -> None:
    sets, used, violations, covered = read_allowed_features(), set[str](), list[str](), 0
    path = os.environ.get("KTCONVERT_EXTENSION") or _ktq.__file__
    with Path(path).open("rb") as file:
        elf = ELFFile(file)
        for name, isa, code, address in find_functions(elf, sets):
            allowed = sets.get(isa, sets["scalar"])
            covered += len(code)
            for instruction in Decoder(64, code, ip=address):
                needed = {FEATURES[feature] for feature in instruction.cpuid_features()}
                used |= needed
                if not needed <= allowed and not (name == "kt_cpu_isas" and instruction.mnemonic == Mnemonic.XGETBV):
                    violations.append(
                        f"{name} at {instruction.ip:#x}, of {isa}: {instruction} needs {needed - allowed}"
                    )
        text = elf.get_section_by_name(".text")["sh_size"]
    assert not violations, "\n".join(violations[:20])
    assert {"AVX2", "AVX512F", "AMX_INT8", "AVX512_BF16", "AVX_VNNI"} <= used
    assert covered > 0.98 * text, f"{text - covered} bytes of code belong to no function"
