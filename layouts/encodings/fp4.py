"""FP4 E2M1 codes, two to a byte, with scales for groups of columns of a row.

MXFP4 has one E8M0 scale per 32 columns (OCP Microscaling Formats 1.0); ktconvert writes it row after row or in panels
of 32 (bytes.md). NVFP4 has one E4M3 scale per 16 columns, and one float32 scale for all, in two conventions that its
name shows: modelopt's weight_scale_2 multiplies the others, compressed-tensors' weight_global_scale divides them. A
stack of experts has one for each expert, for gate and for up of each, or for all; modelopt's stacks of Llama-4 have
bytes and scales along the rows, [E, columns / 2, rows] and [E, columns / 16, rows].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import (
    E8M0,
    FLOATS,
    STACK_SCALE,
    CheckpointEncoding,
    Tensors,
    count_whole_scales,
    read_scales,
    require_finite_scales,
)
from ktconvert.layouts.encodings.encoding import Defect, Encoding, Read, Rows, SourceExperts, select_rows
from ktconvert.layouts.errors import UnsupportedError, bad_tensor
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, I8, Array, Bytes
from ktconvert.native_quant.matrix import FP4_E2M1, Matrix
from ktconvert.quantizers import FLOAT_GRIDS, MXFP4_EXPONENTS, panels
from ktconvert.quantizers.packed import unpack_codes
from ktconvert.quantizers.reference import E2M1, e8m0, nvfp4

# --- in checkpoints -------------------------------------------------------------------------------

GROUP, NVFP4_GROUP = 32, 16  # columns that share a scale
FACTOR, DIVISOR = "factor", "divisor"  # roles of NVFP4's scale of a whole weight
WHOLE = {FACTOR: ("{t}_scale_2", f"{STACK_SCALE}_2"), DIVISOR: ("{t}_global_scale",)}


def _is_transposed(codes: TensorInfo, scale: TensorInfo) -> bool:
    """Return whether NVFP4 codes and scales lie along the rows."""
    if len(codes.shape) < 2:
        return False
    *stack, pairs, rows = codes.shape
    return scale.shape == (*stack, 2 * pairs // NVFP4_GROUP, rows) and 2 * pairs % NVFP4_GROUP == 0


def _make_row(
    role: str,
    pattern: str,
    scales: tuple[str, ...],
    whole: str = "",
    dtypes: tuple[str, ...] = ("U8",),
    transposed: bool = False,
) -> CheckpointEncoding:
    """Return a row for MXFP4 or NVFP4.

    whole       role of NVFP4's scale for all, FACTOR or DIVISOR; "" for MXFP4
    transposed  as in CheckpointEncoding; for NVFP4 the tensors are transposed, too
    """
    name, group, scale_types = ("NVFP4", NVFP4_GROUP, ("F8_E4M3",)) if whole else ("MXFP4", GROUP, E8M0)
    turned = transposed and whole != ""

    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """Use the type of the scales to distinguish other 4-bit formats with the same names."""
        scale, other = tensors.get("scale"), DIVISOR if whole == FACTOR else FACTOR
        if scale is None or scale.dtype not in scale_types:
            return False
        fits = not whole or whole in tensors or other not in tensors
        return fits and (not whole or turned == (len(scale.shape) == 3 and _is_transposed(tensors[role], scale)))

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes, want = tensors[role], "a matrix of bytes or a stack of such"
        if quantization.mxint and not whole:
            what = ": config.json declares integers with E8M0 scales (MXINT4), which are unsupported"
            raise UnsupportedError.from_tensor(codes.name, what, "use the model's BF16 or FP8 (E4M3) release")
        if role == "blocks":
            want = f"blocks of {GROUP // 2} bytes, [rows, columns / {GROUP}, {GROUP // 2}], of one weight or of a stack"
            if len(codes.shape) in (3, 4) and 0 not in codes.shape and codes.shape[-1] == GROUP // 2:
                return *codes.shape[:-2], codes.shape[-2] * GROUP
        elif len(codes.shape) in (2, 3) and 0 not in codes.shape:
            *stack, rows, pairs = codes.shape
            return (*stack, pairs, 2 * rows) if turned else (*stack, rows, 2 * pairs)
        raise bad_tensor(codes.name, f"has shape {list(codes.shape)}, but must be {want}")

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[()]:
        codes, scale, logical = tensors[role], tensors["scale"], shape(tensors, quantization)
        *rows, k = logical
        if not turned and (k % group or scale.shape != (*rows, k // group)):
            fits = f"which is {list(logical)} with a scale for each {group} columns of a row"
            what = f"of shape {list(scale.shape)} does not fit {codes.name!r}, {fits}"
            raise bad_tensor(scale.name, what)
        one = tensors[whole] if whole else None
        if one and (one.dtype not in FLOATS or not count_whole_scales(codes, one, logical)):
            what = f"is {one.dtype} of shape {list(one.shape)}, but must be one F32 for each weight of {codes.name!r}"
            raise bad_tensor(one.name, what)
        return ()

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        scales = (
            _read_nvfp4_scales(source, tensors) if whole else read_scales(source, tensors["scale"], (n, k // group))
        )
        codes = source.view(replace(tensors[role], dtype="U8", shape=(k // 2, n) if turned else (n, k // 2)))
        return Matrix(np.ascontiguousarray(codes.T) if turned else codes, FP4_E2M1, scales, (1, group))

    return CheckpointEncoding(
        name,
        name,
        {role: (pattern,), "scale": scales} | ({whole: WHOLE[whole]} if whole else {}),
        dtypes,
        FP4_E2M1,
        matrix,
        shape,
        fit,
        claims,
        item_bytes={role: 1} if turned else {},
        transposed=transposed,
        input_types=("nvfp4",) if whole else ("mxfp4", "fp4"),
    )


def read_two_scales(source: TensorSource, tensors: Tensors) -> tuple[Bytes, F32]:
    """Return NVFP4's E4M3 scales [n, groups] of a linear, and its float32 scale, [1, 1] or one per row, [n, 1].

    Raises InputError for a float32 scale that is not finite.
    """
    codes, scale, one = next(iter(tensors.values())), tensors["scale"], tensors.get(FACTOR) or tensors[DIVISOR]
    groups: Bytes = source.view(scale).T if _is_transposed(codes, scale) else source.view(scale)
    whole = read_scales(source, one, (prod(one.shape), 1))
    return groups, whole if len(whole) == 1 else whole.repeat(len(groups) // len(whole), axis=0)


def _read_nvfp4_scales(source: TensorSource, tensors: Tensors) -> F32:
    """Return the scales of the groups, float32 [n, groups]. Raise InputError as read_scales does."""
    (stored, whole), divides = read_two_scales(source, tensors), DIVISOR in tensors
    if divides and not whole.all():
        info = tensors[DIVISOR]
        raise bad_tensor(info.name, "divides scales and is 0", path=source.path(info))
    return require_finite_scales(source, tensors["scale"], nvfp4(stored, whole, divides))


IN_CHECKPOINTS = (
    # DeepSeek-V4; I8 or U8 is only a container.
    _make_row("weight", "{t}", ("{s}.scale", "{t}_scale", "{t}_scale_inv"), dtypes=("I8", "U8")),
    # compressed-tensors' mxfp4-pack-quantized.
    _make_row("packed", "{t}_packed", ("{t}_scale",)),
    # gpt-oss; in BF16 transformers holds its experts as gate_up_proj [E, H, 2I] and down_proj [E, I, H].
    _make_row("blocks", "{t}_blocks", ("{t}_scales",), transposed=True),
    _make_row("weight", "{t}", ("{t}_scale", STACK_SCALE), FACTOR),
    _make_row("weight", "{t}", ("{t}_scale", STACK_SCALE), FACTOR, transposed=True),
    _make_row("weight", "{t}", ("{t}_scale",), DIVISOR),
    _make_row("packed", "{t}_packed", ("{t}_scale",), DIVISOR),
    _make_row("packed", "{t}_packed", ("{t}_scale",), FACTOR),
)


# --- as we write it: MXFP4 ------------------------------------------------------------------------

ROWS_AT_A_TIME = 128  # rows to reorder at a time
CODE_BYTES = panels.ROWS // 2  # bytes of codes of a panel, for each column
BLOCK = CODE_BYTES * GROUP
NIBBLES = np.zeros(256, np.uint8)  # a quantizer's code, as a byte -> code of E2M1
NIBBLES[np.rint(2 * E2M1).astype(np.int8).view(np.uint8)[::-1]] = np.arange(16)[::-1]  # 0, and not -0


def dequantize(codes: Bytes, exponents: Bytes) -> F32:
    """Return float32 [n, k], exact."""
    n, groups = exponents.shape
    values: F32 = E2M1.take(codes).reshape(n, groups, GROUP)
    values *= e8m0(exponents)[:, :, None]
    return values.reshape(n, groups * GROUP)


def codes_from_panels(held: Bytes) -> Bytes:
    """Convert panels uint8 [n/32, 16*k] back to codes [n, k].

    A word of 16 bits has columns 0, 2, 4 and 6, or 1, 3, 5 and 7, of 8 columns of a row, from the low bits up; in half
    a block the two words of 8 columns stay together, row after row.
    """
    count, items = held.shape
    k = items // (panels.ROWS // 2)
    pairs = np.ascontiguousarray(held).view("<u4").reshape(count, k // GROUP, 2, 4, panels.HALF)
    words = np.ascontiguousarray(pairs.transpose(0, 2, 4, 1, 3)).view(np.uint8).reshape(-1, 2, 2)  # parity, byte
    codes = np.empty((len(words), 2, 2, 2), np.uint8)  # of 8 columns: byte, nibble, parity
    for parity in range(2):
        for byte in range(2):
            np.bitwise_and(words[:, parity, byte], 15, out=codes[:, byte, 0, parity])
            np.right_shift(words[:, parity, byte], 4, out=codes[:, byte, 1, parity])
    return codes.reshape(count * panels.ROWS, k)


def exponents_to_panels(exponents: Bytes) -> Bytes:
    """Convert exponents [n, k/32] to panels [n/32, k]: block after block, each with those of its 32 rows."""
    n, groups = exponents.shape
    split = exponents.reshape(n // panels.ROWS, panels.ROWS, groups)
    return np.ascontiguousarray(split.transpose(0, 2, 1)).reshape(n // panels.ROWS, groups * panels.ROWS)


def exponents_from_panels(held: Bytes) -> Bytes:
    count, k = held.shape
    split = held.reshape(count, k // panels.ROWS, panels.ROWS)
    return np.ascontiguousarray(split.transpose(0, 2, 1)).reshape(count * panels.ROWS, k // panels.ROWS)


def is_exact(model: SourceExperts) -> bool:
    """Return whether experts are MXFP4 in any storage, with scales along the columns of their linears."""
    return model.dtypes == ("MXFP4",) and not any(layer.input_major for layer in model.moe_layers.values())


def _bad_scale(codes_of: Callable[[Read, int], Bytes]) -> Defect:
    """Return the check of scales; codes_of returns the codes [1, 32] that a scale belongs to."""

    def bad_scale(read: Read, n: int, k: int) -> str:
        """Check that every scale is a number, and so are its products with the codes."""
        scales = read(1)
        for index in map(int, np.flatnonzero(scales > MXFP4_EXPONENTS[1])):
            with np.errstate(over="ignore"):
                numbers = dequantize(codes_of(read, index), scales[index].reshape(1, 1))
            if not np.isfinite(numbers).all():
                what = "is not a number" if scales[index] == 255 else "makes a number infinite"
                return f"scale {index}, {scales[index]}, {what}"
        return ""

    return bad_scale


def _pack(quantize: Callable[[Matrix, Sequence[Bytes]], None]) -> Callable[..., None]:
    """Return Encoding.pack for codes in halves of numbers; quantizing keeps numbers that are MXFP4."""

    def pack(codes: I8, exponents: Array, out: Sequence[Bytes]) -> None:
        nibbles = NIBBLES[codes.view(np.uint8)]
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        quantize(Matrix(packed, FP4_E2M1, e8m0(exponents), (1, GROUP)), out)

    return pack


def _panel_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    count = n // panels.ROWS
    codes = TensorInfo("codes", "U8", (count, CODE_BYTES * k), n * k // 2)
    return codes, TensorInfo("scales", "U8", (count, k), n * k // GROUP)


def _quantize_panels(matrix: Matrix, out: Sequence[Bytes]) -> None:
    count = matrix.shape[0] // panels.ROWS
    kernels.pack_mxfp4(matrix, out[0].reshape(count, -1), out[1].reshape(count, -1))


def _decode_panels(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    codes, scales = (each.reshape(n // panels.ROWS, -1) for each in stored)
    return dequantize(
        select_rows(codes, n, rows, codes_from_panels), select_rows(scales, n, rows, exponents_from_panels)
    )


def _panel_codes(read: Read, scale: int) -> Bytes:
    block, row = divmod(scale, panels.ROWS)
    return codes_from_panels(read(0, block * BLOCK, (block + 1) * BLOCK).reshape(1, BLOCK))[row : row + 1]


def _row_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    groups = k // GROUP
    return TensorInfo("weight", "I8", (n, k // 2), n * k // 2), TensorInfo("scale", "F8_E8M0", (n, groups), n * groups)


def _quantize_rows(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """Quantize some rows at a time into panels, and reorder these."""
    n, k = matrix.shape
    codes, scales = out[0].reshape(n, k // 2), out[1].reshape(n, -1)
    for first in range(0, n, ROWS_AT_A_TIME):
        rows = slice(first, min(n, first + ROWS_AT_A_TIME))
        made = [np.empty(tensor.shape, np.uint8) for tensor in _panel_tensors(rows.stop - first, k)]
        try:
            kernels.pack_mxfp4(matrix.rows(first, rows.stop), made[0], made[1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(first + bad.row, bad.column) from None
        kernels.unpack_mxfp4_rows(made[0], made[1], codes[rows], scales[rows])


def _decode_rows(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    return dequantize(unpack_codes(4, stored[0].reshape(n, k // 2)[rows]), stored[1].reshape(n, -1)[rows])


def _row_codes(read: Read, scale: int) -> Bytes:
    size = GROUP // 2
    return unpack_codes(4, read(0, scale * size, (scale + 1) * size).reshape(1, size))


PANELS = Encoding(
    "MXFP4",
    version=1,
    grid=FLOAT_GRIDS["mxfp4"],
    multiple=kernels.MXFP4_MULTIPLE,
    tensors=_panel_tensors,
    quantize=_quantize_panels,
    decode=_decode_panels,
    is_exact=is_exact,
    defects=(None, _bad_scale(_panel_codes)),
    pack=_pack(_quantize_panels),
    scales=lambda last, n, k: exponents_from_panels(last.reshape(n // panels.ROWS, k)),
)
ROWS = replace(
    PANELS,
    multiple=GROUP,
    tensors=_row_tensors,
    quantize=_quantize_rows,
    decode=_decode_rows,
    defects=(None, _bad_scale(_row_codes)),
    pack=_pack(_quantize_rows),
    scales=lambda last, n, k: last.reshape(n, -1),
)
