"""The runtime's methods, a row for each: kt-kernel's name, which weights it computes with, how these lie in memory, and
the kernels that compute it. docs/reference/methods.md shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.archs import GGUF_STYLES, Fused
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.encodings import Weight, amx, fp4, fp8, plain
from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.native_quant.runtime import stored_parts
from ktconvert.native_quant.runtime.stored_parts import StoredPart
from ktconvert.quantizers import panels


class Swiglu(NamedTuple):
    """The settings swiglu_limit and swiglu_alpha; 0: not limited, silu."""

    limit: float = 0.0
    alpha: float = 0.0

    def __str__(self) -> str:
        alpha = f" and swiglu_alpha={self.alpha:g}" if self.alpha else ""
        return f"swiglu_limit={self.limit:g}{alpha}"

    @property
    def activation(self) -> str:
        """What ACTIVATIONS of the table of architectures calls it."""
        return "swiglu_oai" if self.alpha else "swiglu_limit" if self.limit else "silu"

    def compute(self, gate: F32, up: F32) -> F32:
        """The definition, which the runtime's kernels and the models of transformers are compared with."""
        limit, alpha = self
        if limit:
            gate, up = np.clip(gate, -limit if alpha else None, limit), np.clip(up, -limit, limit)
        out: F32 = gate / (1 + np.exp(-alpha * gate)) * (up + 1) if alpha else gate / (1 + np.exp(-gate)) * up
        return out


PLAIN = Swiglu()
OAI = Swiglu(7.0, 1.702)  # of families with "swiglu_oai", where config.json does not say


def in_config(config: dict[str, Any], activation: str, layer: int) -> Swiglu | None:
    """The settings of a layer by config.json, which may list a limit per layer; None where it does not say. activation:
    of the table of architectures. Raises InputError for what is no number from 0 on.
    """
    limit = _setting(config, ("swiglu_limit", "swiglu_limits"), layer)
    if activation == "swiglu_oai":
        alpha = _setting(config, ("swiglu_alpha",), layer)
        return Swiglu(OAI.limit if limit is None else limit, OAI.alpha if alpha is None else alpha)
    return None if limit is None else Swiglu(limit)


def _setting(config: dict[str, Any], keys: tuple[str, ...], layer: int) -> float | None:
    if (found := cfg.find(config, keys)) is None:
        return None
    key, value = found
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else 0
    value = 0 if value is None else value
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise InputError(f"config.json: {key} must be a number from 0 on for layer {layer}, not {value!r}")
    return float(value)


@dataclass(frozen=True)
class InRows:
    """How a tensor of a part in memory becomes rows of items, as checkpoints store it.

    order          one of ktq.h's: KTQ_PANEL_BYTES and so on; KTQ_IN_ROWS: it lies in rows
    rows, columns  of the linear, that have one item; columns 0: all of a row
    size           bytes of an item in a row
    held           bytes of an item in memory; None: the same
    """

    order: int
    rows: int
    columns: int
    size: int
    held: int | None = None

    @property
    def _together(self) -> int:
        """Rows that lie together in memory."""
        return 1 if self.order == lib.KTQ_IN_ROWS else panels.ROWS

    def number(self, column: int) -> int:
        """Which item of a row is that of a column."""
        return column // self.columns if self.columns else 0

    def items(self, columns: int) -> int:
        """How many items of a row so many columns have."""
        return self.number(columns) or 1

    def stride(self, k: int) -> int:
        """Bytes from one panel, or row, to the next in memory, for a part of k columns."""
        return self.items(k) * (self.held or self.size) * self._together

    def offset(self, row: int, column: int, k: int) -> int:
        """Bytes in memory before the panel, or row, and the block where an element lies, for a part of k columns."""
        panel = row // self.rows // self._together
        return panel * self.stride(k) + self.number(column) * (self.held or self.size) * self._together


@dataclass(frozen=True)
class Method:
    """A method.

    name         kt-kernel's, and that of the output format that holds it. Rows of one name differ by `type`: gate, up
                 and down of a layer are each of one of them
    type         of the weights, where the name does not say it: of ggml, or the columns of a scale
    others       of the first row of a name, the others
    number       its row in csrc/forward/formats.c, which names the kernels
    weights      codes and scales, for documents
    multiple     the hidden size and the intermediate size per NUMA slice must be multiples of it
    unit         of the intermediate size's columns, as ExpertGrid explains it; a size that is no multiple of it is cut
                 in units of `multiple`
    tensors      (n, k) -> the tensors of a part in memory: codes, and scales if it has any
    encoding     of the part in memory, where outputs hold it, too, or tensors are packed on the spot; None: checkpoints
                 alone hold it
    reads        whether it computes with a checkpoint's weight as it is stored; None: with none
    write        a part of such a weight, and where its tensors are to be written (stored_parts.py); None: as its
                 encoding does. Raises kernels.NonFinite
    arrange      puts the tensors (stored, n, k) of a part as an output holds them into the order of memory, in place;
                 None: they lie in it. Raises ValueError for a code that is none
    in_rows      how its tensors become what a GPU reads, for buffers of prefill; (): no GPU reads them
    swiglu       which settings of the activation it may have
    activations  "int8" (numerics.md, section 5) or "BF16" (5b)
    """

    name: str
    number: int
    weights: str
    multiple: int
    tensors: Callable[[int, int], tuple[TensorInfo, ...]]
    encoding: Encoding | None = None
    reads: Callable[[Weight, MoeLayer], bool] | None = None
    write: Callable[[StoredPart, Sequence[Bytes]], None] | None = None
    arrange: Callable[[Sequence[Bytes], int, int], None] | None = None
    in_rows: tuple[InRows, ...] = ()
    swiglu: tuple[str, ...] = ()
    activations: str = "BF16"
    unit: int = 0
    type: str = ""
    others: tuple[Method, ...] = ()

    @property
    def rows(self) -> tuple[Method, ...]:
        return self, *self.others

    def computes(self, weight: Weight, layer: MoeLayer) -> bool:
        return self.reads is not None and self.reads(weight, layer)

    def put(self, stored: StoredPart, out: Sequence[Bytes]) -> None:
        if self.write is not None:
            self.write(stored, out)
        else:
            assert self.encoding is not None, self.name
            self.encoding.quantize(stored.part, out)

    def swiglu_of(self, config: dict[str, Any], activation: str, layer: int) -> Swiglu:
        """The settings of a layer by config.json, as far as the method has them."""
        limit, alpha = in_config(config, activation, layer) or PLAIN
        return Swiglu(limit if LIMIT in self.swiglu else 0.0, alpha if ALPHA in self.swiglu else 0.0)


LIMIT, ALPHA = "swiglu_limit", "swiglu_alpha"


def _packed(encoding: Encoding, number: int, weights: str, **more: Any) -> Method:
    return Method(encoding.name, number, weights, encoding.multiple, encoding.tensors, encoding, **more)


def _stored_as(
    *encodings: str, block: Callable[[Weight], tuple[int, int]] | None = None
) -> Callable[[Weight, MoeLayer], bool]:
    """Weights of these encodings whose rows lie one after the other, if given with a scale for each such block."""

    def reads(weight: Weight, layer: MoeLayer) -> bool:
        interleaved = isinstance(layer.style, Fused) and layer.style.interleaved
        in_rows = not layer.input_major and layer.style not in GGUF_STYLES and not interleaved
        return weight.encoding.name in encodings and in_rows and (block is None or weight.fit(False) == block(weight))

    return reads


def _nvfp4_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    """Codes as MXFP4's; by panels the scale of the whole weight, then groups of 16 columns with their 32 rows."""
    count, of_panel = n // panels.ROWS, stored_parts.NVFP4_HEADER + 2 * k
    return fp4.PANELS.tensors(n, k)[0], TensorInfo("scales", "U8", (count, of_panel), count * of_panel)


def _integer_tensors(group: int, dtype: str) -> Callable[[int, int], tuple[TensorInfo, TensorInfo]]:
    """Codes of 4 bits in two's complement, in MXFP4's order, and by panels a scale for each group of columns, row."""
    size = {"BF16": 2, "F32": 4}[dtype]

    def tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
        count, of_panel = n // panels.ROWS, k // group * panels.ROWS
        return fp4.PANELS.tensors(n, k)[0], TensorInfo("scales", dtype, (count, of_panel), count * of_panel * size)

    return tensors


def _reads_raw(weight: Weight, layer: MoeLayer) -> bool:
    """compressed-tensors' symmetric integers in groups of 32 neighbouring columns, with scales in BF16."""
    return _stored_as("INT4", block=lambda _: (4, 32))(weight, layer) and weight.tensors["scale"].dtype == "BF16"


def _gptq(group: int, number: int) -> Method:
    """GPTQ's symmetric integers in groups of so many columns that are neighbours."""

    def reads(weight: Weight, layer: MoeLayer) -> bool:
        if not _stored_as("GPTQ_INT4")(weight, layer):
            return False
        said = weight.quantization
        return weight.fit()[1] == group and False not in said.symmetric and True not in said.ordered

    weights = f"4-bit integers, float32 for each {group} columns of a row"
    more: dict[str, Any] = {
        "reads": reads,
        "write": stored_parts.write_integers,
        "swiglu": (LIMIT,),
        "type": f"groups of {group}",
    }
    return Method("GPTQ_INT4", number, weights, group, _integer_tensors(group, "F32"), **more)


def _write_packed(encoding: Encoding) -> Callable[[StoredPart, Sequence[Bytes]], None]:
    return lambda stored, out: encoding.quantize(stored.part, out)


def _of_type(
    name: str,
    number: int,
    weights: str,
    write: Callable[[StoredPart, Sequence[Bytes]], None] = stored_parts.write_blocks,
) -> Method:
    """LLAMAFILE with weights of a type of ggml."""

    def reads(weight: Weight, layer: MoeLayer) -> bool:
        return layer.style in GGUF_STYLES and weight.encoding.name == name

    def tensors_of(n: int, k: int) -> tuple[TensorInfo, ...]:
        sizes = zip(("codes", "scales"), kernels.weight_bytes(number, n, k), strict=True)
        return tuple(TensorInfo(tensor, "U8", (size,), size) for tensor, size in sizes)

    more: dict[str, Any] = {"reads": reads, "write": write, "swiglu": (LIMIT,), "type": name, "unit": GGML_UNIT}
    return Method("LLAMAFILE", number, weights, GGML_MULTIPLE, tensors_of, **more)


GGML_MULTIPLE = 128
GGML_UNIT = 256  # columns of the largest blocks, and kt-kernel's


def _by_name(rows: tuple[Method, ...]) -> dict[str, Method]:
    table: dict[str, Method] = {}
    for row in rows:
        first = table.get(row.name)
        table[row.name] = row if first is None else replace(first, others=(*first.others, row))
    return table


def _per_channel(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    return fp8.PANELS.tensors(n, k)[0], TensorInfo("scales", "F32", (n,), 4 * n)


def _reads_plain(weight: Weight, layer: MoeLayer) -> bool:
    return weight.encoding.name == "BF16" and layer.style not in GGUF_STYLES


FP8_CODES = InRows(lib.KTQ_PANEL_BYTES, 1, 1, 1)
INT8: dict[str, Any] = {"activations": "int8"}
ROWS_OF_4, ROWS_OF_8 = (f"{bits}-bit integers, float32 for each row" for bits in (4, 8))
K_SCALES = "6 bits and a least value for each 32 columns of a row, FP16 for 256"

METHODS: dict[str, Method] = _by_name(
    (
        _packed(amx.AMXINT4, lib.KTQ_FORMAT_AMXINT4, ROWS_OF_4, **INT8),
        _packed(amx.AMXINT8, lib.KTQ_FORMAT_AMXINT8, ROWS_OF_8, **INT8),
        _packed(amx.MOE_INT4_TILES, lib.KTQ_FORMAT_AMXINT4, ROWS_OF_4, arrange=amx.to_tiles, **INT8),
        _packed(amx.MOE_INT8_TILES, lib.KTQ_FORMAT_AMXINT8, ROWS_OF_8, arrange=amx.to_tiles, **INT8),
        _packed(
            *(plain.PANELS, lib.KTQ_FORMAT_BF16, "BF16"),
            reads=_reads_plain,
            in_rows=(InRows(lib.KTQ_PANEL_HALVES, 1, 1, 2),),
        ),
        _packed(
            *(fp8.PANELS, lib.KTQ_FORMAT_FP8, "E4M3, one for each 128 x 128"),
            reads=_stored_as(*fp8.SOURCES, block=lambda weight: (kernels.FP8_MULTIPLE,) * 2),
            in_rows=(FP8_CODES, InRows(lib.KTQ_IN_ROWS, kernels.FP8_MULTIPLE, kernels.FP8_MULTIPLE, 4)),
            swiglu=(LIMIT,),
        ),
        Method(
            *("FP8_PERCHANNEL", lib.KTQ_FORMAT_FP8_PERCHANNEL, "E4M3, one for each row", panels.ROWS, _per_channel),
            reads=_stored_as("F8_E4M3", block=lambda weight: (1, weight.shape[-1])),
            write=stored_parts.write_per_channel,
            in_rows=(FP8_CODES, InRows(lib.KTQ_IN_ROWS, 1, 0, 4)),
        ),
        Method(
            "MXFP8",
            lib.KTQ_FORMAT_MXFP8,
            "E4M3, E8M0 for each 32 columns of a row",
            panels.ROWS,
            lambda n, k: (fp8.PANELS.tensors(n, k)[0], fp4.PANELS.tensors(n, k)[1]),
            reads=_stored_as("MXFP8", block=lambda weight: (1, fp4.GROUP)),
            write=stored_parts.write_mxfp8,
            in_rows=(FP8_CODES, InRows(lib.KTQ_PANEL_SCALE_BYTES, 1, fp4.GROUP, 1)),
            swiglu=(LIMIT, ALPHA),
        ),
        _packed(
            *(fp4.PANELS, lib.KTQ_FORMAT_MXFP4, "E2M1, E8M0 for each 32 columns of a row"),
            in_rows=(InRows(lib.KTQ_PANEL_NIBBLES, 1, 2, 1), InRows(lib.KTQ_PANEL_EXPONENTS, 1, 32, 2, held=1)),
            reads=_stored_as("MXFP4"),
            swiglu=(LIMIT,),
        ),
        Method(
            "NVFP4",
            lib.KTQ_FORMAT_NVFP4,
            "E2M1, E4M3 for each 16 columns of a row, and a float32 for the weight",
            kernels.MXFP4_MULTIPLE,
            _nvfp4_tensors,
            reads=_stored_as("NVFP4"),
            write=stored_parts.write_nvfp4,
        ),
        Method(
            "RAWINT4",
            lib.KTQ_FORMAT_RAWINT4,
            "4-bit integers, BF16 for each 32 columns of a row",
            panels.ROWS,
            _integer_tensors(32, "BF16"),
            reads=_reads_raw,
            write=stored_parts.write_integers,
            in_rows=(InRows(lib.KTQ_PANEL_OFFSET_NIBBLES, 1, 2, 1), InRows(lib.KTQ_PANEL_SCALES, 1, 32, 2)),
            swiglu=(LIMIT,),
        ),
        _gptq(128, lib.KTQ_FORMAT_GPTQ_INT4),
        _gptq(64, lib.KTQ_FORMAT_GPTQ_INT4_64),
        _gptq(32, lib.KTQ_FORMAT_GPTQ_INT4_32),
        _of_type("Q4_0", lib.KTQ_FORMAT_Q4_0, "4-bit integers, FP16 for each 32 columns of a row"),
        _of_type("Q8_0", lib.KTQ_FORMAT_Q8_0, "8-bit integers, FP16 for each 32 columns of a row"),
        _of_type("Q4_K", lib.KTQ_FORMAT_Q4_K, f"4-bit integers, {K_SCALES}"),
        _of_type("Q5_K", lib.KTQ_FORMAT_Q5_K, f"5-bit integers, {K_SCALES}"),
        _of_type("Q6_K", lib.KTQ_FORMAT_Q6_K, "6-bit integers, 8 bits for each 16 columns of a row, FP16 for 256"),
        _of_type("MXFP4", lib.KTQ_FORMAT_MXFP4, "E2M1, E8M0 for each 32 columns of a row", _write_packed(fp4.PANELS)),
        _of_type("BF16", lib.KTQ_FORMAT_BF16, "BF16", _write_packed(plain.PANELS)),
        _of_type("F16", lib.KTQ_FORMAT_F16, "FP16", stored_parts.write_halves),
    )
)


def check_swiglu(method: str, swiglu: Swiglu) -> None:
    """Raise ValueError for settings of the activation that the method does not have."""
    for name, value in ((LIMIT, swiglu.limit), (ALPHA, swiglu.alpha)):
        if value != 0.0 and name not in METHODS[method].swiglu:
            able = ", ".join(sorted(other.name for other in METHODS.values() if name in other.swiglu))
            raise ValueError(
                f"{name}={value} must be 0 for method={method!r}: only {able} can have it in place of silu(gate) * up."
            )
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number from 0 on, not {value}")


# --- kt-kernel 0.7.2's names ---------------------------------------------------------------------

NOT_YET = ("SYCL_GPTQ_INT4",)
_INTEGERS = ("AMXINT8", "AMXINT4", "AMXINT4_1", "AMXINT4_KGroup", "AMXINT4_1KGroup")
TRAINING = (
    *(f"{name}_SFT" for name in ("AMXBF16", "AMXFP8", "MXFP4", "INT8", "RAWINT4", *_INTEGERS)),
    *(f"{name}_SFT_SkipLoRA" for name in ("AMXBF16", *_INTEGERS)),
)
SKIP_LORA = "_SFT_SkipLoRA"  # how names of methods without LoRA end
# Of those, the ones that train, and the method that holds their weights.
TRAINED = {
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


def check(mode: str, method: str, swiglu: Swiglu) -> None:
    """Raise ValueError for what kt-kernel does not know either, NotImplementedError for what only we lack."""
    if mode not in ("inference", "sft"):
        raise ValueError(f"Unknown mode: {mode!r}. There are 'inference' and 'sft'.")
    known = (*METHODS, *NOT_YET) if mode == "inference" else TRAINING
    if method not in known:
        raise ValueError(f"Unknown method {method!r} for mode {mode!r}. There are {', '.join(sorted(known))}.")
    if mode == "sft":
        if method not in TRAINED:
            what = f"method={method!r} is a name that kt-kernel lists and cannot construct"
            raise NotImplementedError(f"{what}: ktconvert trains {', '.join(TRAINED)}.")
        if any(swiglu):
            raise NotImplementedError(
                f"method={method!r} trains silu(gate) * up alone: leave swiglu_limit and _alpha 0."
            )
        return
    if method not in METHODS:
        what = f"method={method!r} is not implemented yet; ktconvert's runtime computes {', '.join(METHODS)}"
        raise NotImplementedError(f"{what}. Convert with `ktconvert cpu --quant-method int4` or another.")
    check_swiglu(method, swiglu)
