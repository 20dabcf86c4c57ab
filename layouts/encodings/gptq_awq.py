"""Words of integers with scales for groups of columns, as GPTQ and AWQ have them: AutoGPTQ and GPTQModel write words
along the columns, [k*bits/32, n], perhaps with zero points and an order of columns (desc_act); AutoAWQ's GEMM version
writes words of 4 bits along the rows, [k, n/8], with zero points: nibble p of a word is row 0, 2, 4, 6, 1, 3, 5, 7 [p].

The value of a code q is (q - z) * s (numerics.md, section 1). Without zero points z is 2^(bits-1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.config import QUANTIZE_CONFIG, Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import (
    CheckpointEncoding,
    Tensors,
    columns_per_scale,
    missing,
    order_of_columns,
    read_scales,
    require_matrix,
    require_shape,
)
from ktconvert.layouts.errors import InputError, UnsupportedError, damaged_tensor
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.matrix import INT4_AWQ, INT4_WORDS, INT8_WORDS, Kind, Matrix
from ktconvert.quantizers import packed

METHOD, AWQ = "gptq", "awq"
FORMATS = {"gptq": True, "gptq_v2": False}  # checkpoint_format -> whether zero points are stored less one
GEMM = ("", "gemm", "exllama", "ipex")  # versions of AWQ in config.json that store what GEMM does
# The names of a weight's tensors.
NAMES = {
    "qweight": ("{s}.qweight",),
    "scales": ("{s}.scales",),
    "qzeros": ("{s}.qzeros",),
    "g_idx": ("{s}.g_idx",),
}
BETTER = "use the model's BF16 or FP8 (E4M3) release, or one in 4-bit GPTQ or AWQ (GEMM)"


def _row(bits: int, kind: Kind) -> CheckpointEncoding:
    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """The row of 4 bits has the sentences for other widths and formats."""
        if quantization.method not in ("", METHOD):
            return False
        return (_width(tensors, quantization) == 8) == (bits == 8)

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes, width = tensors["qweight"], _width(tensors, quantization)
        if quantization.format and quantization.format not in FORMATS:
            raise UnsupportedError.of_tensor(
                codes.name, f": checkpoint_format {quantization.format!r} of GPTQ is not an input; {BETTER}"
            )
        require_matrix(codes)
        if width not in range(2, 9) or (quantization.bits and width not in quantization.bits):
            named = " or ".join(map(str, quantization.bits)) or "4 or 8"
            raise damaged_tensor(
                codes.name,
                f"of shape {list(codes.shape)} does not fit its zero points and g_idx with codes of {named} bits",
                "check bits in config.json, or download them again",
            )
        if width != bits:
            raise UnsupportedError.of_tensor(codes.name, f": GPTQ with {width:g} bits is not an input; {BETTER}")
        return codes.shape[1], codes.shape[0] * 32 // bits

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[object, ...]:
        n, k = shape(tensors, quantization)
        group = group_of_scales(tensors, n, k, quantization)
        codes, zeros, order = tensors["qweight"], tensors.get("qzeros"), tensors.get("g_idx")
        stem = codes.name.removesuffix("qweight")
        if zeros is None and False in quantization.symmetric:
            raise missing(codes, "zero points (sym: false)", f"{stem}qzeros")
        if order is None and True in quantization.ordered and group < k:
            raise missing(codes, "an order of its columns (desc_act)", f"{stem}g_idx")
        require_shape(codes, zeros, "I32", (k // group, -(-n * bits // 32)))
        require_shape(codes, order, "I32", (k,))
        if zeros is not None and not quantization.format and quantization.symmetric == (False,):
            raise InputError(_which_format(zeros))
        return bits, group, quantization.format, *tensors

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        group = group_of_scales(tensors, n, k, quantization)
        stored = tensors.get("qzeros")
        zeros = None if stored is None else _zeros(source, stored, bits, n, quantization)
        words = source.view(tensors["qweight"]).view(np.uint32).T
        scales = np.ascontiguousarray(read_scales(source, tensors["scales"], (k // group, n)).T)
        order = order_of_columns(source, tensors.get("g_idx"), group)
        return Matrix(words, kind, scales, (1, group), zeros=zeros, group_of=order)

    return CheckpointEncoding(
        f"GPTQ_INT{bits}",
        f"GPTQ ({bits} bits)",
        NAMES,
        ("I32",),
        kind,
        matrix,
        shape=shape,
        fit=fit,
        claims=claims,
        optional=frozenset({"qzeros", "g_idx"}),
        item_bytes={"scales": 8, "qzeros": 96, "g_idx": 20},
        input_types=("gptq",),
    )


def _zeros(
    source: TensorSource, stored: TensorInfo, bits: int, n: int, quantization: Quantization
) -> npt.NDArray[np.float32]:
    """Zero points, as codes: float32 [n, groups]. Where no config says how they are stored, those of symmetric codes
    say it themselves: all are in the middle. Raises InputError for others.
    """
    for name in [quantization.format] if quantization.format else FORMATS:
        points = packed.gptq_zeros(bits, source.view(stored), FORMATS[name])[:, :n]
        if quantization.format or (points == 1 << (bits - 1)).all():
            return np.ascontiguousarray(points.T, np.float32)
    raise InputError(f"{source.path(stored)}: {_which_format(stored)}")


def _which_format(zeros: TensorInfo) -> str:
    return (
        f"tensor {zeros.name!r}: no config says whether it holds zero points less one or as they are, and the weights "
        'differ; write {"checkpoint_format": "gptq"} (less one: AutoGPTQ, and most files) or {"checkpoint_format": '
        f'"gptq_v2"}} (as they are) to {QUANTIZE_CONFIG} beside the weights'
    )


def _width(tensors: Tensors, quantization: Quantization) -> float:
    """Bits of a code, by the shapes: words hold k codes along the rows of qweight, n along the columns of qzeros. Where
    there is neither g_idx nor qzeros, what the config says, else 4.
    """
    codes, order, zeros = tensors["qweight"], tensors.get("g_idx"), tensors.get("qzeros")
    if len(codes.shape) == 2 and 0 not in codes.shape:
        if order is not None and len(order.shape) == 1 and order.shape[0]:
            return codes.shape[0] * 32 / order.shape[0]
        if zeros is not None and len(zeros.shape) == 2:
            return zeros.shape[1] * 32 / codes.shape[1]
    return quantization.bits[0] if len(quantization.bits) == 1 else 4


def group_of_scales(tensors: Tensors, n: int, k: int, quantization: Quantization) -> int:
    """Columns that share a scale of `scales` [groups, n]. Raises as columns_per_scale."""
    scales = tensors["scales"]
    groups = scales.shape[0] if len(scales.shape) == 2 and scales.shape[1] == n else 0
    return columns_per_scale(tensors["qweight"], scales, (n, k), groups, quantization)


# --- AWQ ------------------------------------------------------------------------------------------


def _awq_claims(tensors: Tensors, quantization: Quantization) -> bool:
    """Where no config says what they are, eight times as many scales as words in a row are AWQ's."""
    if quantization.method:
        return quantization.method == AWQ
    codes, scales = tensors["qweight"], tensors.get("scales")
    return scales is not None and len(scales.shape) == len(codes.shape) == 2 and scales.shape[1] == 8 * codes.shape[1]


def _awq_shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
    codes, scales = tensors["qweight"], tensors["scales"]
    require_matrix(codes)
    version = quantization.format
    if version in GEMM and scales.shape[:1] == codes.shape[:1] and scales.shape[1:] != (8 * codes.shape[1],):
        version = "gemv"  # whose scales are [n, groups]
    if version not in GEMM:
        raise UnsupportedError.of_tensor(
            codes.name, f": the order of AWQ's version {version!r} is not an input; {BETTER}"
        )
    if quantization.bits not in ((), (4,)):
        named = ", ".join(map(str, quantization.bits))
        raise UnsupportedError.of_tensor(codes.name, f": AWQ with {named} bits is not an input; {BETTER}")
    return 8 * codes.shape[1], codes.shape[0]


def _awq_fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[object, ...]:
    n, k = _awq_shape(tensors, quantization)
    group = group_of_scales(tensors, n, k, quantization)
    require_shape(tensors["qweight"], tensors["qzeros"], "I32", (k // group, n // 8))
    return 4, group


def _awq_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
    n, k = _awq_shape(tensors, quantization)
    group = group_of_scales(tensors, n, k, quantization)
    words = source.view(tensors["qweight"]).view(np.uint32).T
    scales = np.ascontiguousarray(read_scales(source, tensors["scales"], (k // group, n)).T)
    zeros = np.ascontiguousarray(packed.awq_fields(source.view(tensors["qzeros"])).T, np.float32)
    return Matrix(words, INT4_AWQ, scales, (1, group), zeros=zeros)


AWQ_INT4 = CheckpointEncoding(
    "AWQ_INT4",
    "AWQ",
    {role: NAMES[role] for role in ("qweight", "qzeros", "scales")},
    ("I32",),
    INT4_AWQ,
    _awq_matrix,
    shape=_awq_shape,
    fit=_awq_fit,
    claims=_awq_claims,
    item_bytes={"scales": 8, "qzeros": 96},
    input_types=("awq",),
)

IN_CHECKPOINTS = (AWQ_INT4, _row(4, INT4_WORDS), _row(8, INT8_WORDS))
