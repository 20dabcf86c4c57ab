"""The runtime's methods, one row each: kt-kernel's name, the weights, their order in memory, and the kernels.

Also the method names of kt-kernel 0.7.2. docs/reference/methods.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktconvert.layouts.checkpoints.archs import GGUF_STYLES, Fused
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.encodings import Weight, amx, fp4, fp8, plain
from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.errors import ArgumentError
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.arrays import Bytes
from ktconvert.native_quant.runtime import stored_slices
from ktconvert.native_quant.runtime.stored_slices import StoredSlice
from ktconvert.quantizers import panels


@dataclass(frozen=True)
class RowLayout:
    """The order in memory of a slice's tensor, from which rows of items, as in checkpoints, can be copied.

    order        a constant of ktq.h, KTQ_PANEL_BYTES to KTQ_IN_ROWS (which means that memory already has rows)
    rows         rows of the linear that share an item
    columns      columns of the linear that share an item; 0: a whole row
    size         bytes of an item in a row
    memory_size  bytes of an item in memory; None: `size`
    """

    order: int
    rows: int
    columns: int
    size: int
    memory_size: int | None = None

    @property
    def _panel_rows(self) -> int:
        """Number of rows that are interleaved in memory."""
        return 1 if self.order == lib.KTQ_IN_ROWS else panels.ROWS

    def item_index(self, column: int) -> int:
        """Return the index of the item of a column within its row."""
        return column // self.columns if self.columns else 0

    def item_count(self, columns: int) -> int:
        """Return the number of items in a row of this number of columns."""
        return self.item_index(columns) or 1

    def stride(self, k: int) -> int:
        """Return the bytes from one panel, or row, to the next in memory, for a slice of k columns."""
        return self.item_count(k) * (self.memory_size or self.size) * self._panel_rows

    def offset(self, row: int, column: int, k: int) -> int:
        """Return the offset in memory of the panel (or row) and block of an element, for a slice of k columns."""
        panel = row // self.rows // self._panel_rows
        return panel * self.stride(k) + self.item_index(column) * (self.memory_size or self.size) * self._panel_rows


@dataclass(frozen=True)
class Method:
    """A method of the runtime, or one of several rows of a method.

    name                kt-kernel's name of the method, and the name of its output format. Rows with the same name
                        differ in `weight_type`; gate, up and down of a layer may each use a different row
    weight_type         type of the weights if the name does not imply it: a ggml type, or the columns of a scale
    variants            only in the first row of a name: the other rows with this name
    number              number of the row of csrc/forward/formats.c, which names the kernels
    description         codes and scales, for reports
    multiple            divides the hidden size, and the intermediate size of each NUMA slice
    preferred_multiple  divides the intermediate size of each slice, unless it does not divide the whole size
                        (Slicing.multiple); 0: the same as `multiple`
    tensors             function (n, k) that returns the tensors of a slice in memory: codes, and scales if any
    encoding            encoding of a slice in memory, for outputs and for packing at run time; None: only checkpoints
                        have such weights
    accepts             function (weight, layer) that returns whether the method computes with a checkpoint's weight
                        without re-quantizing it; None: never
    write_stored        function that writes a slice of such a weight to its tensors (stored_slices.py), and raises
                        kernels.NonFinite; None: use the encoding
    rearrange           function (tensors, n, k) that brings the tensors of an output's slice into the order in memory,
                        in place, and raises ValueError for an invalid code; None: they are stored in this order
    row_layouts         how tensors are copied to rows for the prefill buffers of a GPU; (): not supported
    activations         "int8" (numerics.md, section 5) or "BF16" (section 5b)
    rounds_to_int8      whether BF16 activations are rounded to 8 bits unless the caller objects (KTExperts.load): the
                        codes' own rounding errors are at least six times as large
    """

    name: str
    number: int
    description: str
    multiple: int
    tensors: Callable[[int, int], tuple[TensorInfo, ...]]
    encoding: Encoding | None = None
    accepts: Callable[[Weight, MoeLayer], bool] | None = None
    write_stored: Callable[[StoredSlice, Sequence[Bytes]], None] | None = None
    rearrange: Callable[[Sequence[Bytes], int, int], None] | None = None
    row_layouts: tuple[RowLayout, ...] = ()
    activations: str = "BF16"
    rounds_to_int8: bool = False
    preferred_multiple: int = 0
    weight_type: str = ""
    variants: tuple[Method, ...] = ()

    @property
    def all_rows(self) -> tuple[Method, ...]:
        """The rows with this name."""
        return self, *self.variants

    def can_compute(self, weight: Weight, layer: MoeLayer) -> bool:
        """Return whether the method computes with a checkpoint's weight without re-quantizing it."""
        return self.accepts is not None and self.accepts(weight, layer)

    def write_slice(self, stored: StoredSlice, out: Sequence[Bytes]) -> None:
        """Write a slice of a checkpoint's weight to its tensors in memory. Raises kernels.NonFinite."""
        if self.write_stored is not None:
            self.write_stored(stored, out)
        else:
            assert self.encoding is not None, self.name
            self.encoding.quantize(stored.linear, out)


def _make_row(encoding: Encoding, number: int, description: str, **fields: Any) -> Method:
    """Return the row for an encoding of outputs."""
    return Method(encoding.name, number, description, encoding.multiple, encoding.tensors, encoding, **fields)


def _match_stored(
    *encodings: str, block: Callable[[Weight], tuple[int, int]] | None = None, alternating: bool = False
) -> Callable[[Weight, MoeLayer], bool]:
    """Return a predicate for contiguous rows in one of these encodings.

    block: if given, returns the rows and columns that must share a scale.
    alternating: whether the rows of gate and up may alternate
    """

    def accepts(weight: Weight, layer: MoeLayer) -> bool:
        interleaved = isinstance(layer.style, Fused) and layer.style.interleaved and not alternating
        is_contiguous = not layer.input_major and layer.style not in GGUF_STYLES and not interleaved
        return (
            weight.encoding.name in encodings
            and is_contiguous
            and (block is None or weight.resolve_scheme(False) == block(weight))
        )

    return accepts


def _nvfp4_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    """Return codes in MXFP4's order, and for each panel the weight's scale, then a scale per 16 columns and row."""
    count, panel_size = n // panels.ROWS, stored_slices.NVFP4_HEADER + 2 * k
    return fp4.PANELS.tensors(n, k)[0], TensorInfo("scales", "U8", (count, panel_size), count * panel_size)


def _integer_tensors(group: int, dtype: str) -> Callable[[int, int], tuple[TensorInfo, TensorInfo]]:
    """Return 4-bit codes in two's complement, in MXFP4's order, and for each panel a scale per group and row."""
    size = {"BF16": 2, "F32": 4}[dtype]

    def tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
        count, panel_size = n // panels.ROWS, k // group * panels.ROWS
        return fp4.PANELS.tensors(n, k)[0], TensorInfo("scales", dtype, (count, panel_size), count * panel_size * size)

    return tensors


def _accepts_rawint4(weight: Weight, layer: MoeLayer) -> bool:
    """Return whether a weight has compressed-tensors' symmetric integers in groups of 32 columns, with BF16 scales."""
    return _match_stored("INT4", block=lambda _: (4, 32))(weight, layer) and weight.tensors["scale"].dtype == "BF16"


def _make_gptq_row(group: int, number: int) -> Method:
    """Return the row for GPTQ's symmetric integers in groups of this number of adjacent columns."""

    def accepts(weight: Weight, layer: MoeLayer) -> bool:
        if not _match_stored("GPTQ_INT4")(weight, layer):
            return False
        config = weight.quantization
        return weight.resolve_scheme()[1] == group and False not in config.symmetric and True not in config.ordered

    description = f"4-bit integers, float32 for each {group} columns of a row"
    fields: dict[str, Any] = {
        "accepts": accepts,
        "write_stored": stored_slices.write_integers,
        "weight_type": f"groups of {group}",
    }
    return Method("GPTQ_INT4", number, description, group, _integer_tensors(group, "F32"), **fields)


def _write_encoded(encoding: Encoding) -> Callable[[StoredSlice, Sequence[Bytes]], None]:
    return lambda stored, out: encoding.quantize(stored.linear, out)


GGML_MULTIPLE = 128
GGML_UNIT = 256  # columns of the largest blocks; kt-kernel's unit, too


def _make_llamafile_row(
    name: str,
    number: int,
    description: str,
    write: Callable[[StoredSlice, Sequence[Bytes]], None] = stored_slices.write_blocks,
    multiple: int = GGML_MULTIPLE,
    rounds_to_int8: bool = False,
) -> Method:
    """Return the row of LLAMAFILE for a ggml type."""

    def accepts(weight: Weight, layer: MoeLayer) -> bool:
        return layer.style in GGUF_STYLES and weight.encoding.name == name

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        sizes = zip(("codes", "scales"), kernels.weight_bytes(number, n, k), strict=True)
        return tuple(TensorInfo(tensor, "U8", (size,), size) for tensor, size in sizes)

    fields: dict[str, Any] = {
        "accepts": accepts,
        "write_stored": write,
        "weight_type": name,
        "preferred_multiple": GGML_UNIT,
        "rounds_to_int8": rounds_to_int8,
    }
    return Method("LLAMAFILE", number, description, multiple, tensors, **fields)


def _index_by_name(rows: tuple[Method, ...]) -> dict[str, Method]:
    table: dict[str, Method] = {}
    for row in rows:
        first = table.get(row.name)
        table[row.name] = row if first is None else replace(first, variants=(*first.variants, row))
    return table


def _per_channel(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    return fp8.PANELS.tensors(n, k)[0], TensorInfo("scales", "F32", (n,), 4 * n)


def _accepts_bf16(weight: Weight, layer: MoeLayer) -> bool:
    return weight.encoding.name == "BF16" and layer.style not in GGUF_STYLES


FP8_CODES = RowLayout(lib.KTQ_PANEL_BYTES, 1, 1, 1)
INT8: dict[str, Any] = {"activations": "int8"}
ROWS_OF_4, ROWS_OF_8 = (f"{bits}-bit integers, float32 for each row" for bits in (4, 8))
K_SCALES = "6 bits and a least value for each 32 columns of a row, FP16 for 256"

METHODS: dict[str, Method] = _index_by_name(
    (
        _make_row(amx.AMXINT4, lib.KTQ_FORMAT_AMXINT4, ROWS_OF_4, **INT8),
        _make_row(amx.AMXINT8, lib.KTQ_FORMAT_AMXINT8, ROWS_OF_8, **INT8),
        _make_row(amx.MOE_INT4_TILES, lib.KTQ_FORMAT_AMXINT4, ROWS_OF_4, rearrange=amx.reorder_into_tiles, **INT8),
        _make_row(amx.MOE_INT8_TILES, lib.KTQ_FORMAT_AMXINT8, ROWS_OF_8, rearrange=amx.reorder_into_tiles, **INT8),
        _make_row(
            *(plain.PANELS, lib.KTQ_FORMAT_BF16, "BF16"),
            accepts=_accepts_bf16,
            row_layouts=(RowLayout(lib.KTQ_PANEL_HALVES, 1, 1, 2),),
        ),
        _make_row(
            *(fp8.PANELS, lib.KTQ_FORMAT_FP8, "E4M3, one for each 128 x 128"),
            accepts=_match_stored(*fp8.SOURCES, block=lambda weight: (kernels.FP8_MULTIPLE,) * 2),
            row_layouts=(FP8_CODES, RowLayout(lib.KTQ_IN_ROWS, kernels.FP8_MULTIPLE, kernels.FP8_MULTIPLE, 4)),
        ),
        Method(
            *("FP8_PERCHANNEL", lib.KTQ_FORMAT_FP8_PERCHANNEL, "E4M3, one for each row", panels.ROWS, _per_channel),
            accepts=_match_stored("F8_E4M3", block=lambda weight: (1, weight.shape[-1])),
            write_stored=stored_slices.write_per_channel,
            row_layouts=(FP8_CODES, RowLayout(lib.KTQ_IN_ROWS, 1, 0, 4)),
        ),
        Method(
            "MXFP8",
            lib.KTQ_FORMAT_MXFP8,
            "E4M3, E8M0 for each 32 columns of a row",
            panels.ROWS,
            lambda n, k: (fp8.PANELS.tensors(n, k)[0], fp4.PANELS.tensors(n, k)[1]),
            accepts=_match_stored("MXFP8", block=lambda weight: (1, fp4.GROUP)),
            write_stored=stored_slices.write_mxfp8,
            row_layouts=(FP8_CODES, RowLayout(lib.KTQ_PANEL_SCALE_BYTES, 1, fp4.GROUP, 1)),
        ),
        _make_row(
            *(fp4.PANELS, lib.KTQ_FORMAT_MXFP4, "E2M1, E8M0 for each 32 columns of a row"),
            row_layouts=(
                RowLayout(lib.KTQ_PANEL_NIBBLES, 1, 2, 1),
                RowLayout(lib.KTQ_PANEL_EXPONENTS, 1, 32, 2, memory_size=1),
            ),
            accepts=_match_stored("MXFP4", alternating=True),
        ),
        Method(
            "NVFP4",
            lib.KTQ_FORMAT_NVFP4,
            "E2M1, E4M3 for each 16 columns of a row, and a float32 for the weight",
            kernels.MXFP4_MULTIPLE,
            _nvfp4_tensors,
            accepts=_match_stored("NVFP4"),
            write_stored=stored_slices.write_nvfp4,
        ),
        Method(
            "RAWINT4",
            lib.KTQ_FORMAT_RAWINT4,
            "4-bit integers, BF16 for each 32 columns of a row",
            panels.ROWS,
            _integer_tensors(32, "BF16"),
            accepts=_accepts_rawint4,
            write_stored=stored_slices.write_integers,
            row_layouts=(RowLayout(lib.KTQ_PANEL_OFFSET_NIBBLES, 1, 2, 1), RowLayout(lib.KTQ_PANEL_SCALES, 1, 32, 2)),
        ),
        _make_gptq_row(128, lib.KTQ_FORMAT_GPTQ_INT4),
        _make_gptq_row(64, lib.KTQ_FORMAT_GPTQ_INT4_64),
        _make_gptq_row(32, lib.KTQ_FORMAT_GPTQ_INT4_32),
        _make_llamafile_row(
            *("Q4_0", lib.KTQ_FORMAT_Q4_0, "4-bit integers, FP16 for each 32 columns of a row"), rounds_to_int8=True
        ),
        _make_llamafile_row("Q8_0", lib.KTQ_FORMAT_Q8_0, "8-bit integers, FP16 for each 32 columns of a row"),
        _make_llamafile_row("Q4_K", lib.KTQ_FORMAT_Q4_K, f"4-bit integers, {K_SCALES}", rounds_to_int8=True),
        _make_llamafile_row("Q5_K", lib.KTQ_FORMAT_Q5_K, f"5-bit integers, {K_SCALES}"),
        _make_llamafile_row(
            "Q6_K", lib.KTQ_FORMAT_Q6_K, "6-bit integers, 8 bits for each 16 columns of a row, FP16 for 256"
        ),
        _make_llamafile_row(
            "MXFP4",
            lib.KTQ_FORMAT_MXFP4,
            "E2M1, E8M0 for each 32 columns of a row",
            _write_encoded(fp4.PANELS),
            multiple=kernels.MXFP4_MULTIPLE,
        ),
        _make_llamafile_row("BF16", lib.KTQ_FORMAT_BF16, "BF16", _write_encoded(plain.PANELS)),
        _make_llamafile_row("F16", lib.KTQ_FORMAT_F16, "FP16", stored_slices.write_halves),
    )
)


# --- kt-kernel 0.7.2's names ---------------------------------------------------------------------

UNSUPPORTED = ("SYCL_GPTQ_INT4",)
_INTEGERS = ("AMXINT8", "AMXINT4", "AMXINT4_1", "AMXINT4_KGroup", "AMXINT4_1KGroup")
SFT_METHODS = (
    *(f"{name}_SFT" for name in ("AMXBF16", "AMXFP8", "MXFP4", "INT8", "RAWINT4", *_INTEGERS)),
    *(f"{name}_SFT_SkipLoRA" for name in ("AMXBF16", *_INTEGERS)),
)
SKIP_LORA = "_SFT_SkipLoRA"  # suffix of methods without LoRA
# Supported methods of SFT_METHODS -> the method of their weights.
SFT_WEIGHTS = {
    "AMXBF16_SFT": "BF16",
    "AMXINT8_SFT": "AMXINT8",
    "INT8_SFT": "AMXINT8",
    "AMXINT4_SFT": "AMXINT4",
    "AMXINT4_KGroup_SFT": "RAWINT4",
    "RAWINT4_SFT": "RAWINT4",
    "AMXFP8_SFT": "FP8",
    "MXFP4_SFT": "MXFP4",
    f"AMXBF16{SKIP_LORA}": "BF16",
    f"AMXINT8{SKIP_LORA}": "AMXINT8",
    f"AMXINT4{SKIP_LORA}": "AMXINT4",
}


def check_method(mode: str, method: str) -> None:
    """Raise ArgumentError for arguments that kt-kernel also rejects, NotImplementedError if only we reject them."""
    if mode not in ("inference", "sft"):
        raise ArgumentError(f"unknown mode {mode!r}; choose 'inference' or 'sft'.")
    names = (*METHODS, *UNSUPPORTED) if mode == "inference" else SFT_METHODS
    if method not in names:
        computed = ", ".join(sorted(METHODS if mode == "inference" else SFT_WEIGHTS))
        raise ArgumentError(f"unknown method {method!r} for mode {mode!r}; choose one of {computed}.")
    if mode == "sft":
        if method not in SFT_WEIGHTS:
            problem = f"method={method!r} is a name in kt-kernel's list that kt-kernel cannot construct"
            raise NotImplementedError(f"{problem}: ktconvert trains {', '.join(SFT_WEIGHTS)}.")
        return
    if method not in METHODS:
        problem = f"method={method!r} is not implemented yet; ktconvert's runtime computes {', '.join(METHODS)}"
        raise NotImplementedError(f"{problem}; convert with `ktconvert cpu --quant-method int4`, for example.")
