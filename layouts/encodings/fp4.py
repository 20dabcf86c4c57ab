"""FP4 E2M1 codes, two to a byte, with scales for groups of columns of a row.

MXFP4 has one E8M0 scale per 32 columns (OCP Microscaling Formats 1.0); ktconvert writes it row after row or in panels
of 32 rows (bytes.md). NVFP4 has one E4M3 scale per 16 columns, and one float32 scale for the whole weight. The name of
that scale shows how it applies: modelopt's weight_scale_2 multiplies the scales of the groups, compressed-tensors'
weight_global_scale divides them. A stack of experts has one such scale for each expert, for gate and up of each expert,
or for all experts. modelopt's stacks of Llama-4 have bytes and scales along the rows, [E, columns / 2, rows] and
[E, columns / 16, rows].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import msgspec
import numpy as np

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
from ktconvert.layouts.encodings.encoding import (
    DefectCheck,
    Encoding,
    RowSelection,
    SourceExperts,
    TensorReader,
    select_rows,
)
from ktconvert.layouts.errors import UnsupportedError, bad_tensor
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, I8, Array, Bytes
from ktconvert.native_quant.matrix import FP4_E2M1, Matrix
from ktconvert.quantizers import FLOAT_GRIDS, MXFP4_EXPONENTS, panels
from ktconvert.quantizers.packed import unpack_codes
from ktconvert.quantizers.reference import E2M1, e8m0_to_f32, nvfp4_scales

# --- in checkpoints -------------------------------------------------------------------------------

# Numbers of columns that share a scale.
GROUP = 32
NVFP4_GROUP = 16
# Roles of NVFP4's scale of a whole weight, and its possible names.
FACTOR = "factor"
DIVISOR = "divisor"
WHOLE_SCALE_NAMES = {FACTOR: ("{t}_scale_2", f"{STACK_SCALE}_2"), DIVISOR: ("{t}_global_scale",)}


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
    whole_role: str = "",
    dtypes: tuple[str, ...] = ("U8",),
    transposed: bool = False,
) -> CheckpointEncoding:
    """Return a row for MXFP4 or NVFP4.

    role        role of the values
    pattern     name of the values
    scales      possible names of the scales
    whole_role  role of NVFP4's scale of a whole weight, FACTOR or DIVISOR; "" for MXFP4
    transposed  as in CheckpointEncoding; for NVFP4 the tensors are transposed, too
    """
    is_nvfp4 = whole_role != ""
    name = "NVFP4" if is_nvfp4 else "MXFP4"
    group = NVFP4_GROUP if is_nvfp4 else GROUP
    scale_types = ("F8_E4M3",) if is_nvfp4 else E8M0
    tensors_transposed = transposed and is_nvfp4

    def accepts(tensors: Tensors, quantization: Quantization) -> bool:
        """Use the type of the scales to distinguish other 4-bit formats with the same names."""
        scale = tensors.get("scale")
        if scale is None or scale.dtype not in scale_types:
            return False
        if not is_nvfp4:
            return True
        other_role = DIVISOR if whole_role == FACTOR else FACTOR
        if whole_role not in tensors and other_role in tensors:
            return False
        return tensors_transposed == (len(scale.shape) == 3 and _is_transposed(tensors[role], scale))

    def infer_shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors[role]
        required = "a matrix of bytes or a stack of such"
        if quantization.lookalike and not is_nvfp4:
            problem = f": config.json declares {quantization.lookalike}, which are unsupported"
            raise UnsupportedError.from_tensor(codes.name, problem, "use the model's BF16 or FP8 (E4M3) release")
        if role == "blocks":
            required = (
                f"blocks of {GROUP // 2} bytes, [rows, columns / {GROUP}, {GROUP // 2}], of one weight or of a stack"
            )
            if len(codes.shape) in (3, 4) and 0 not in codes.shape and codes.shape[-1] == GROUP // 2:
                return *codes.shape[:-2], codes.shape[-2] * GROUP
        elif len(codes.shape) in (2, 3) and 0 not in codes.shape:
            *stack, rows, pairs = codes.shape
            return (*stack, pairs, 2 * rows) if tensors_transposed else (*stack, rows, 2 * pairs)
        raise bad_tensor(codes.name, f"has shape {list(codes.shape)}, but must be {required}")

    def resolve_scheme(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[()]:
        codes = tensors[role]
        scale = tensors["scale"]
        logical = infer_shape(tensors, quantization)
        *rows, k = logical
        if not tensors_transposed and (k % group or scale.shape != (*rows, k // group)):
            expected = f"which is {list(logical)} with a scale for each {group} columns of a row"
            problem = f"of shape {list(scale.shape)} does not fit {codes.name!r}, {expected}"
            raise bad_tensor(scale.name, problem)
        whole = tensors[whole_role] if is_nvfp4 else None
        if whole and (whole.dtype not in FLOATS or not count_whole_scales(codes, whole, logical)):
            needed = f"must be one F32 for each weight of {codes.name!r}"
            raise bad_tensor(whole.name, f"is {whole.dtype} of shape {list(whole.shape)}, but {needed}")
        return ()

    def make_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = infer_shape(tensors, quantization)
        if is_nvfp4:
            scales = _read_nvfp4_scales(source, tensors)
        else:
            scales = read_scales(source, tensors["scale"], (n, k // group))
        stored_shape = (k // 2, n) if tensors_transposed else (n, k // 2)
        codes = source.view(msgspec.structs.replace(tensors[role], dtype="U8", shape=stored_shape))
        return Matrix(np.ascontiguousarray(codes.T) if tensors_transposed else codes, FP4_E2M1, scales, (1, group))

    return CheckpointEncoding(
        name,
        name,
        {role: (pattern,), "scale": scales} | ({whole_role: WHOLE_SCALE_NAMES[whole_role]} if is_nvfp4 else {}),
        dtypes,
        FP4_E2M1,
        make_matrix,
        infer_shape,
        resolve_scheme,
        accepts,
        item_bytes={role: 1} if tensors_transposed else {},
        transposed=transposed,
        input_types=("nvfp4",) if is_nvfp4 else ("mxfp4", "fp4"),
    )


def read_two_scales(source: TensorSource, tensors: Tensors) -> tuple[Bytes, F32]:
    """Return NVFP4's E4M3 scales [n, groups] of a linear, and its float32 scale, [1, 1] or one per row, [n, 1].

    Raises InputError for a float32 scale that is not finite.
    """
    codes = next(iter(tensors.values()))
    scale = tensors["scale"]
    group_scales: Bytes = source.view(scale).T if _is_transposed(codes, scale) else source.view(scale)
    whole = tensors.get(FACTOR) or tensors[DIVISOR]
    whole_scales = read_scales(source, whole, (prod(whole.shape), 1))
    if len(whole_scales) > 1:
        whole_scales = whole_scales.repeat(len(group_scales) // len(whole_scales), axis=0)
    return group_scales, whole_scales


def _read_nvfp4_scales(source: TensorSource, tensors: Tensors) -> F32:
    """Return the scales of the groups, float32 [n, groups]. Raises InputError as read_scales does."""
    group_scales, whole_scales = read_two_scales(source, tensors)
    divides = DIVISOR in tensors
    if divides and not whole_scales.all():
        info = tensors[DIVISOR]
        raise bad_tensor(info.name, "divides scales and is 0", path=source.path(info))
    return require_finite_scales(source, tensors["scale"], nvfp4_scales(group_scales, whole_scales, divides))


IN_CHECKPOINTS = (
    # DeepSeek-V4: its bytes have the dtype I8 or U8.
    _make_row("weight", "{t}", ("{s}.scale", "{t}_scale", "{t}_scale_inv"), dtypes=("I8", "U8")),
    # compressed-tensors' mxfp4-pack-quantized.
    _make_row("packed", "{t}_packed", ("{t}_scale",)),
    # gpt-oss: in BF16 transformers holds its experts as gate_up_proj [E, H, 2I] and down_proj [E, I, H].
    _make_row("blocks", "{t}_blocks", ("{t}_scales",), transposed=True),
    _make_row("weight", "{t}", ("{t}_scale", STACK_SCALE), FACTOR),
    _make_row("weight", "{t}", ("{t}_scale", STACK_SCALE), FACTOR, transposed=True),
    _make_row("weight", "{t}", ("{t}_scale",), DIVISOR),
    _make_row("packed", "{t}_packed", ("{t}_scale",), DIVISOR),
    _make_row("packed", "{t}_packed", ("{t}_scale",), FACTOR),
)


# --- as we write it: MXFP4 ------------------------------------------------------------------------

ROWS_AT_A_TIME = 128  # number of rows to reorder at a time
CODE_BYTES = panels.ROWS // 2  # bytes of codes in each column of a panel
BLOCK = CODE_BYTES * GROUP
# A quantizer's code, as a byte -> code of E2M1. The order is reversed so that the code 0 becomes 0 and not -0.
NIBBLES = np.zeros(256, np.uint8)
NIBBLES[np.rint(2 * E2M1).astype(np.int8).view(np.uint8)[::-1]] = np.arange(16)[::-1]


def dequantize(codes: Bytes, exponents: Bytes) -> F32:
    """Return the numbers of codes [n, k] with the exponents [n, k/32] of their groups: float32 [n, k], exact."""
    n, groups = exponents.shape
    values: F32 = E2M1.take(codes).reshape(n, groups, GROUP)
    values *= e8m0_to_f32(exponents)[:, :, None]
    return values.reshape(n, groups * GROUP)


def codes_from_panels(panel_codes: Bytes) -> Bytes:
    """Convert panels uint8 [n/32, 16*k] back to codes [n, k].

    Each 8 columns of a row are two words of 16 bits: the first has columns 0, 2, 4 and 6, the second 1, 3, 5 and 7,
    from the low bits up. In half a block the two words stay together, row after row.
    """
    count, items = panel_codes.shape
    k = items // (panels.ROWS // 2)
    pairs = np.ascontiguousarray(panel_codes).view("<u4").reshape(count, k // GROUP, 2, 4, panels.HALF)
    words = np.ascontiguousarray(pairs.transpose(0, 2, 4, 1, 3)).view(np.uint8).reshape(-1, 2, 2)  # axes: parity, byte
    codes = np.empty((len(words), 2, 2, 2), np.uint8)  # axes of 8 columns: byte, nibble, parity
    for parity in range(2):
        for byte in range(2):
            np.bitwise_and(words[:, parity, byte], 15, out=codes[:, byte, 0, parity])
            np.right_shift(words[:, parity, byte], 4, out=codes[:, byte, 1, parity])
    return codes.reshape(count * panels.ROWS, k)


def exponents_to_panels(exponents: Bytes) -> Bytes:
    """Convert exponents [n, k/32] to panels [n/32, k], block after block; a block has the exponents of its 32 rows."""
    n, groups = exponents.shape
    split = exponents.reshape(n // panels.ROWS, panels.ROWS, groups)
    return np.ascontiguousarray(split.transpose(0, 2, 1)).reshape(n // panels.ROWS, groups * panels.ROWS)


def exponents_from_panels(panel_exponents: Bytes) -> Bytes:
    count, k = panel_exponents.shape
    split = panel_exponents.reshape(count, k // panels.ROWS, panels.ROWS)
    return np.ascontiguousarray(split.transpose(0, 2, 1)).reshape(count * panels.ROWS, k // panels.ROWS)


def is_exact(model: SourceExperts) -> bool:
    """Return whether experts are MXFP4 in any storage, with scales along the columns of their linears."""
    return model.dtypes == ("MXFP4",) and not any(layer.input_major for layer in model.moe_layers.values())


def _make_scale_check(read_codes: Callable[[TensorReader, int], Bytes]) -> DefectCheck:
    """Return the check of scales.

    read_codes  (reader, number of a scale) -> the codes [1, 32] of that scale
    """

    def find_bad_scale(read: TensorReader, n: int, k: int) -> str:
        """Check that every scale is a number, and that its products with the codes are finite."""
        scales = read(1)
        for index in map(int, np.flatnonzero(scales > MXFP4_EXPONENTS[1])):
            with np.errstate(over="ignore"):
                numbers = dequantize(read_codes(read, index), scales[index].reshape(1, 1))
            if not np.isfinite(numbers).all():
                problem = "is not a number" if scales[index] == 255 else "makes a number infinite"
                return f"scale {index}, {scales[index]}, {problem}"
        return ""

    return find_bad_scale


def _make_pack(quantize: Callable[[Matrix, Sequence[Bytes]], None]) -> Callable[..., None]:
    """Return Encoding.pack for codes in units of 0.5; `quantize` keeps numbers that are MXFP4 already."""

    def pack(codes: I8, exponents: Array, out: Sequence[Bytes]) -> None:
        nibbles = NIBBLES[codes.view(np.uint8)]
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        quantize(Matrix(packed, FP4_E2M1, e8m0_to_f32(exponents), (1, GROUP)), out)

    return pack


def _panel_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    count = n // panels.ROWS
    codes = TensorInfo("codes", "U8", (count, CODE_BYTES * k), n * k // 2)
    return codes, TensorInfo("scales", "U8", (count, k), n * k // GROUP)


def _quantize_panels(matrix: Matrix, out: Sequence[Bytes]) -> None:
    count = matrix.shape[0] // panels.ROWS
    kernels.pack_mxfp4(matrix, out[0].reshape(count, -1), out[1].reshape(count, -1))


def _decode_panels(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
    codes, scales = (tensor.reshape(n // panels.ROWS, -1) for tensor in stored)
    return dequantize(
        select_rows(codes, n, rows, codes_from_panels), select_rows(scales, n, rows, exponents_from_panels)
    )


def _read_panel_codes(read: TensorReader, scale: int) -> Bytes:
    block, row = divmod(scale, panels.ROWS)
    return codes_from_panels(read(0, block * BLOCK, (block + 1) * BLOCK).reshape(1, BLOCK))[row : row + 1]


def _row_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    groups = k // GROUP
    return TensorInfo("weight", "I8", (n, k // 2), n * k // 2), TensorInfo("scale", "F8_E8M0", (n, groups), n * groups)


def _quantize_rows(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """Quantize some rows at a time into panels, and reorder the panels into rows."""
    n, k = matrix.shape
    codes = out[0].reshape(n, k // 2)
    scales = out[1].reshape(n, -1)
    for first in range(0, n, ROWS_AT_A_TIME):
        rows = slice(first, min(n, first + ROWS_AT_A_TIME))
        panel_codes, panel_scales = (
            np.empty(tensor.shape, np.uint8) for tensor in _panel_tensors(rows.stop - first, k)
        )
        try:
            kernels.pack_mxfp4(matrix.rows(first, rows.stop), panel_codes, panel_scales)
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(first + bad.row, bad.column) from None
        kernels.unpack_mxfp4_rows(panel_codes, panel_scales, codes[rows], scales[rows])


def _decode_rows(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
    return dequantize(unpack_codes(4, stored[0].reshape(n, k // 2)[rows]), stored[1].reshape(n, -1)[rows])


def _read_row_codes(read: TensorReader, scale: int) -> Bytes:
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
    defect_checks=(None, _make_scale_check(_read_panel_codes)),
    pack=_make_pack(_quantize_panels),
    unpack_scales=lambda scale_bytes, n, k: exponents_from_panels(scale_bytes.reshape(n // panels.ROWS, k)),
)
ROWS = replace(
    PANELS,
    multiple=GROUP,
    tensors=_row_tensors,
    quantize=_quantize_rows,
    decode=_decode_rows,
    defect_checks=(None, _make_scale_check(_read_row_codes)),
    pack=_make_pack(_quantize_rows),
    unpack_scales=lambda scale_bytes, n, k: scale_bytes.reshape(n, -1),
)
