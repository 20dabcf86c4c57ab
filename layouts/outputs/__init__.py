"""The output formats: FORMATS is their table, by the name that loaders and manifests use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.encodings import amx, fp4, fp8, pack_quantized, plain
from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import cards, whole_model
from ktconvert.layouts.outputs.configs import describe_cpu
from ktconvert.layouts.outputs.format import Format as Format
from ktconvert.layouts.outputs.linear_names import NATIVE
from ktconvert.layouts.outputs.numa import NUMA, PLAIN
from ktconvert.layouts.outputs.slices import Slicing

ROW_SCALES_NOTE = (
    "AMXINT4 has one scale per output row and may cost accuracy: if it matters, compare with --quant-method int8"
)
UNTESTED_NOTE = (
    "the order follows the source code of kt-kernel's build for aarch64 with KML; it is untested, because kt-kernel's "
    "wheel has no MOE methods"
)
MOE_SIZES_NOTE = (
    f"{UNTESTED_NOTE}. That build requires hidden sizes in multiples of 1024, "
    "and widths per NUMA slice in multiples of 256"
)
BACKWARD_NOTE = (
    "only the backward matrices are written; kt-kernel takes the BF16 experts themselves from the checkpoint, and "
    "0.7.2 does not load a folder that contains only these files"
)
VNNI_NOTE = (
    "kt-kernel 0.7.2 computes RAWINT4 on a CPU with AVX-512 or AVX-VNNI; if the CPU has only AVX2, it ends with "
    "a segmentation fault"
)


def _make_whole_model(name: str, variants: dict[tuple[Any, ...], Encoding]) -> Format:
    return Format(
        name,
        next(iter(variants.values())),
        whole_model.WHOLE_MODEL,
        whole_model.DESCRIPTION,
        settings=pack_quantized.SETTINGS,
        variants=variants,
    )


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("AMXINT4", amx.AMXINT4, NUMA, describe_cpu(cards.AMX), (ROW_SCALES_NOTE,), loose="INT4", backward=True),
        Format("AMXINT8", amx.AMXINT8, NUMA, describe_cpu(cards.AMX), loose="INT8", backward=True),
        Format("MOE_INT4", amx.MOE_INT4, PLAIN, describe_cpu(cards.MOE), (MOE_SIZES_NOTE,), loose="MOE_INT4"),
        Format("MOE_INT8", amx.MOE_INT8, PLAIN, describe_cpu(cards.MOE), (UNTESTED_NOTE,), loose="MOE_INT8"),
        Format("MXFP4", fp4.PANELS, NUMA, describe_cpu(cards.MXFP4)),
        Format("FP8", fp8.PANELS, NUMA, describe_cpu(cards.FP8)),
        Format("BF16", plain.PANELS, NUMA, describe_cpu(cards.BF16)),
        Format("KT_MXFP4", fp4.ROWS, NATIVE, describe_cpu(cards.KT_MXFP4)),
        Format("KT_FP8", fp8.ROWS, NATIVE, describe_cpu(cards.KT_FP8)),
        Format("KT_BF16", plain.ROWS, NATIVE, describe_cpu(cards.KT_BF16)),
        Format("RAWINT4", pack_quantized.RAWINT4, NATIVE, describe_cpu(cards.RAWINT4), (VNNI_NOTE,)),
        Format(
            "AMXBF16",
            plain.BLOCKS,
            NUMA,
            describe_cpu(cards.BACKWARD),
            (BACKWARD_NOTE,),
            "BF16",
            forward=False,
            backward=True,
        ),
        _make_whole_model("W4A16", pack_quantized.W4A16),
        _make_whole_model("W8A16", pack_quantized.W8A16),
    )
}

LAYOUTS = (NUMA.layout, NATIVE.layout, PLAIN.layout)  # values of `cpu --layout`

# Methods whose byte order depends on the library that wrote them, unless our manifest declares the plain order.
OPAQUE = frozenset(fmt.name for fmt in FORMATS.values() if fmt.arrangement is PLAIN)
# The prefix of loose files -> kt-kernel's name of the method.
LOOSE_METHODS = {fmt.loose: fmt.name for fmt in FORMATS.values() if fmt.loose}


def find_format(facts: OutputFacts) -> Format | None:
    """Return the format that the facts of a manifest name; None for a format that is not ours, and for OPAQUE bytes."""
    fmt = FORMATS.get(str(facts.get("method")))
    is_known = fmt is not None and (fmt.name not in OPAQUE or fmt.arrangement.is_trusted(facts))
    return fmt if is_known else None


def formats_by_option(command: str, layout: str | None = None) -> Mapping[str, Format]:
    """Return option -> format, for the formats of experts that a command writes.

    layout  value of --layout; None: the first format of each option that needs no --layout
    """
    formats: dict[str, Format] = {}
    for fmt in FORMATS.values():
        selected = not fmt.arrangement.on_request if layout is None else layout == fmt.arrangement.layout
        if fmt.arrangement.command == command and fmt.forward and selected:
            formats.setdefault(fmt.option, fmt)
    return formats


def backward_only_format(option: str) -> Format | None:
    """Return the format that contains only the transposed matrices of an option, for --save-backward-weights."""
    return next((fmt for fmt in FORMATS.values() if fmt.option == option and not fmt.forward), None)


def has_all_loose_files(folder: Path, slicing: Slicing, experts: int, fmt: Format) -> bool:
    """Return whether a layer's folder of loose files has every file of this format, with its size."""
    try:
        return all(
            (path := fmt.loose_path(numa_slice, tensor)) is not None and (folder / path).stat().st_size == tensor.nbytes
            for numa_slice in slicing.all_slices(range(experts))
            for tensor in fmt.encoding.tensors(numa_slice.n, numa_slice.k)
        )
    except OSError:
        return False
