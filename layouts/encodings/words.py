"""Integers in words with scales for groups of columns, as checkpoints store them.

The formats are compressed-tensors' pack-quantized (of llmcompressor and `ktconvert gpu`, and Kimi-K2's INT4), GPTQ and
AWQ. pack-quantized has words along the rows, [n, k*bits/32]. It may have zero points, packed along the rows of scales,
and an order of columns (actorder). AutoGPTQ and GPTQModel write words along the columns, [k*bits/32, n]. They may have
zero points and an order of columns (desc_act). AutoAWQ's GEMM version writes words of 4-bit codes along the rows,
[k, n/8], with zero points; nibble p of a word is row (0, 2, 4, 6, 1, 3, 5, 7)[p].

The value of a code q is (q - z) * s (numerics.md, section 1). Without zero points z is 2^(bits-1).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from ktconvert.layouts.encodings.checkpoint import FLOATS, CheckpointEncoding, Tensors, absent_tensor, read_scales
from ktconvert.layouts.errors import InputError, UnsupportedError, bad_tensor
from ktconvert.layouts.sources.config import QUANT_METHOD, QUANTIZE_CONFIG, Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, I32
from ktconvert.native_quant.matrix import INT4, INT4_AWQ, INT4_WORDS, INT8, INT8_WORDS, Kind, Matrix
from ktconvert.quantizers import packed

# Quantization methods in config.json.
PACKER = "compressed-tensors"
GPTQ = "gptq"
AWQ = "awq"
ZERO_POINTS_LESS_ONE = {"gptq": True, "gptq_v2": False}  # checkpoint_format -> whether zero points are stored less one
GEMM = ("", "gemm", "exllama", "ipex")  # versions of AWQ in config.json with the order of GEMM
NAMES = {"qweight": ("{s}.qweight",), "scales": ("{s}.scales",), "qzeros": ("{s}.qzeros",), "g_idx": ("{s}.g_idx",)}
REMEDY = "use the model's BF16 or FP8 (E4M3) release, or one in 4-bit GPTQ or AWQ (GEMM)"


def _find_group_size(
    codes: TensorInfo, scale: TensorInfo, shape: tuple[int, int], groups: int, quantization: Quantization
) -> int:
    """Return how many columns of a linear [n, k] share a scale.

    groups  number of scales of a row; 0 if the shape of the scales does not fit

    Raises InputError if tensors or config disagree, UnsupportedError for groups that do not divide a row.
    """
    n, k = shape
    if scale.dtype not in FLOATS:
        raise bad_tensor(scale.name, f"is {scale.dtype}; scales must be F32, BF16 or F16")
    matching = [size for size in quantization.groups if groups == -(-k // size)]
    if groups and (k % groups or (groups > 1 and matching and all(k % size for size in matching))):
        problem = (
            f": groups of {max(matching, default=k // groups)} columns do not divide the {k} columns of {codes.name!r}"
        )
        raise UnsupportedError.from_tensor(scale.name, problem, "use the model's BF16 or FP8 (E4M3) release")
    if not groups or (groups > 1 and quantization.groups and not matching):
        sizes = " or ".join(map(str, quantization.groups)) or "any size"
        problem = f"of shape {list(scale.shape)} does not fit {codes.name!r}, {n} x {k} in groups of {sizes}"
        raise bad_tensor(scale.name, problem, "check group_size in config.json, or use another release")
    return k // groups


def _read_column_groups(source: TensorSource, stored: TensorInfo | None, group: int) -> I32 | None:
    """Return the group of each column from g_idx; None if groups are runs of neighbours, or all numbers are -1.

    Raises InputError for groups of different sizes.
    """
    if stored is None:
        return None
    order = np.array(source.view(stored), np.int32)
    plain = np.arange(order.size, dtype=np.int32) // group
    if (order == plain).all() or (order == -1).all():
        return None
    if not (np.sort(order) == plain).all():
        problem = f"must name each of {order.size // group} groups for {group} columns"
        raise bad_tensor(stored.name, problem, path=source.path(stored))
    return order


def _require_word_matrix(codes: TensorInfo) -> None:
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise bad_tensor(codes.name, f"has shape {list(codes.shape)}, but must be a matrix of words")


def _require_i32(codes: TensorInfo, info: TensorInfo | None, shape: tuple[int, ...]) -> None:
    """Raise InputError for a tensor beside the codes that is not I32 of this shape."""
    if info is not None and (info.dtype, info.shape) != ("I32", shape):
        needed = f"{codes.name!r} and its scales require I32 of shape {list(shape)}"
        problem = f"is {info.dtype} of shape {list(info.shape)}; {needed}"
        raise bad_tensor(info.name, problem)


# --- pack-quantized -------------------------------------------------------------------------------

WORD_BITS = {"I32": 32, "U8": 8}  # dtype of weight_packed -> bits of an item
WIDTHS = ((4, INT4), (8, INT8))


def _make_pack_quantized(bits: int, kind: Kind) -> CheckpointEncoding:
    """Return the row that reads compressed-tensors' pack-quantized weights of `bits` bits.

    Their tensors are words of codes, scales, and optional zero points and g_idx.
    """

    def accepts(tensors: Tensors, quantization: Quantization) -> bool:
        """Compare `bits` with the config's width of codes, or with 4 if it names none or several."""
        if quantization.method not in ("", PACKER, QUANT_METHOD):
            return False
        if tensors["packed"].dtype == "U8" and ("scale" not in tensors or tensors["scale"].dtype not in FLOATS):
            return False  # four-bit floats
        return bits == (quantization.bits[0] if len(quantization.bits) == 1 else 4)

    def infer_shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors["packed"]
        _require_word_matrix(codes)
        return codes.shape[0], codes.shape[1] * WORD_BITS[codes.dtype] // bits

    def resolve_scheme(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[object, ...]:
        n, k = infer_shape(tensors, quantization)
        group = _find_packed_group(tensors, n, k, quantization)
        codes = tensors["packed"]
        zeros = tensors.get("zero_point")
        order = tensors.get("g_idx")
        stem = codes.name.removesuffix("packed")
        if zeros is None and quantization.symmetric == (False,):
            raise absent_tensor(codes, "zero points", f"{stem}zero_point")
        if order is None and quantization.ordered == (True,) and group < k:
            raise absent_tensor(codes, "an order of its columns (actorder)", f"{stem}g_idx")
        _require_i32(codes, zeros, (-(-n * bits // 32), k // group))
        _require_i32(codes, order, (k,))
        return (bits, group, *(role for role in ("zero_point", "g_idx") if role in tensors))

    def make_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = infer_shape(tensors, quantization)
        group = _find_packed_group(tensors, n, k, quantization)
        shape_tensor = tensors["shape"]
        if (recorded := np.array(source.view(shape_tensor)).tolist()) != [n, k]:
            problem = f"is {recorded}, but the codes are for {[n, k]}"
            raise bad_tensor(shape_tensor.name, problem, path=source.path(shape_tensor))
        codes = source.view(msgspec.structs.replace(tensors["packed"], dtype="U8", shape=(n, k * bits // 8)))
        scales = read_scales(source, tensors["scale"], (n, k // group))
        zeros = None
        if (zero_tensor := tensors.get("zero_point")) is not None:
            zeros = np.ascontiguousarray(packed.unpack_codes(bits, source.view(zero_tensor).T).T[:n], np.float32)
        column_groups = _read_column_groups(source, tensors.get("g_idx"), group)
        return Matrix(codes, kind, scales, (1, group), zeros=zeros, column_groups=column_groups)

    name = kind.name.upper()
    optional = frozenset({"zero_point", "g_idx"})
    names = {role: (f"{{t}}_{role}",) for role in ("packed", "scale", "zero_point", "g_idx", "shape")}
    # An item of zero points is a word of 8 codes, which are held as bytes, twice, and as float32.
    item_bytes = {"zero_point": 48, "g_idx": 20}
    types = (kind.name,)
    return CheckpointEncoding(
        name,
        name,
        names,
        tuple(WORD_BITS),
        kind,
        make_matrix,
        infer_shape,
        resolve_scheme,
        accepts,
        optional,
        item_bytes,
        input_types=types,
    )


def narrow_to_weight(source: TensorSource, tensors: Tensors, quantization: Quantization) -> Quantization:
    """Return the quantization of one weight: if the config does not name a single width, weight_shape determines it.

    Raises InputError for a weight_shape that contradicts the words.
    """
    codes = tensors.get("packed")
    shape_tensor = tensors.get("shape")
    if len(quantization.bits) == 1 or codes is None or shape_tensor is None or codes.dtype not in WORD_BITS:
        return quantization
    _require_word_matrix(codes)
    _require_two_numbers(shape_tensor)
    columns = int(source.view(shape_tensor)[1])
    allowed = quantization.bits or tuple(width for width, _ in WIDTHS)
    bits = [width for width in allowed if -(-columns * width // WORD_BITS[codes.dtype]) == codes.shape[1]]
    if len(bits) != 1:
        widths = " or ".join(map(str, allowed))
        problem = f"is for {columns} columns, but {codes.name!r} of shape {list(codes.shape)} with {widths} bits is not"
        remedy = "check num_bits in config.json, or download both again"
        raise bad_tensor(shape_tensor.name, problem, remedy, source.path(shape_tensor))
    return replace(quantization, bits=tuple(bits))


def _require_two_numbers(tensor: TensorInfo) -> None:
    """Raise InputError for a weight_shape that is not two integers."""
    if tensor.dtype not in ("I64", "I32") or tensor.shape != (2,):
        raise bad_tensor(tensor.name, f"is {tensor.dtype} of shape {list(tensor.shape)}; must be two I64")


def _find_packed_group(tensors: Tensors, n: int, k: int, quantization: Quantization) -> int:
    _require_two_numbers(tensors["shape"])
    scale = tensors["scale"]
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == n else 0
    return _find_group_size(tensors["packed"], scale, (n, k), groups, quantization)


# --- GPTQ -----------------------------------------------------------------------------------------


def _make_gptq(bits: int, kind: Kind) -> CheckpointEncoding:
    """Return the row that reads GPTQ weights of `bits` bits: qweight, qzeros, scales and g_idx."""

    def accepts(tensors: Tensors, quantization: Quantization) -> bool:
        """Accept all widths but 8 in the row of 4 bits, which has the messages for other widths and formats."""
        if quantization.method not in ("", GPTQ):
            return False
        return (_find_width(tensors, quantization) == 8) == (bits == 8)

    def infer_shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors["qweight"]
        width = _find_width(tensors, quantization)
        if quantization.format and quantization.format not in ZERO_POINTS_LESS_ONE:
            problem = f": checkpoint_format {quantization.format!r} of GPTQ is unsupported; {REMEDY}"
            raise UnsupportedError.from_tensor(codes.name, problem)
        _require_word_matrix(codes)
        if width not in range(2, 9) or (quantization.bits and width not in quantization.bits):
            widths = " or ".join(map(str, quantization.bits)) or "4 or 8"
            problem = f"of shape {list(codes.shape)} does not fit its zero points and g_idx with codes of {widths} bits"
            raise bad_tensor(codes.name, problem, "check bits in config.json, or use another release")
        if width != bits:
            raise UnsupportedError.from_tensor(codes.name, f": GPTQ with {width:g} bits is unsupported; {REMEDY}")
        return codes.shape[1], codes.shape[0] * 32 // bits

    def resolve_scheme(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[object, ...]:
        n, k = infer_shape(tensors, quantization)
        group = find_gptq_group(tensors, n, k, quantization)
        codes = tensors["qweight"]
        zeros = tensors.get("qzeros")
        order = tensors.get("g_idx")
        stem = codes.name.removesuffix("qweight")
        if zeros is None and False in quantization.symmetric:
            raise absent_tensor(codes, "zero points (sym: false)", f"{stem}qzeros")
        if order is None and True in quantization.ordered and group < k:
            raise absent_tensor(codes, "an order of its columns (desc_act)", f"{stem}g_idx")
        _require_i32(codes, zeros, (k // group, -(-n * bits // 32)))
        _require_i32(codes, order, (k,))
        if zeros is not None and not quantization.format and quantization.symmetric == (False,):
            raise InputError(_explain_unknown_format(zeros))
        return bits, group, quantization.format, *tensors

    def make_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = infer_shape(tensors, quantization)
        group = find_gptq_group(tensors, n, k, quantization)
        zero_tensor = tensors.get("qzeros")
        zeros = None if zero_tensor is None else _read_zeros(source, zero_tensor, bits, n, quantization)
        column_groups = _read_column_groups(source, tensors.get("g_idx"), group)
        matrix = _read_transposed(source, tensors, kind, (k // group, n), group)
        return replace(matrix, zeros=zeros, column_groups=column_groups)

    name = f"GPTQ_INT{bits}"
    title = f"GPTQ ({bits} bits)"
    optional = frozenset({"qzeros", "g_idx"})
    item_bytes = {"scales": 8, "qzeros": 96, "g_idx": 20}
    types = ("gptq",)
    return CheckpointEncoding(
        name,
        title,
        NAMES,
        ("I32",),
        kind,
        make_matrix,
        infer_shape,
        resolve_scheme,
        accepts,
        optional,
        item_bytes,
        input_types=types,
    )


def _read_transposed(source: TensorSource, tensors: Tensors, kind: Kind, shape: tuple[int, int], group: int) -> Matrix:
    """Return a linear whose words and scales [groups, n] are stored transposed."""
    scales = np.ascontiguousarray(read_scales(source, tensors["scales"], shape).T)
    return Matrix(source.view(tensors["qweight"]).view(np.uint32).T, kind, scales, (1, group))


def _read_zeros(source: TensorSource, stored: TensorInfo, bits: int, n: int, quantization: Quantization) -> F32:
    """Return zero points as codes, float32 [n, groups]. If no config names their format, all must be 2^(bits-1)."""
    for name in [quantization.format] if quantization.format else ZERO_POINTS_LESS_ONE:
        points = packed.unpack_gptq_zeros(bits, source.view(stored), ZERO_POINTS_LESS_ONE[name])[:, :n]
        if quantization.format or (points == 1 << (bits - 1)).all():
            return np.ascontiguousarray(points.T, np.float32)
    raise InputError(f"{source.path(stored)}: {_explain_unknown_format(stored)}")


def _explain_unknown_format(zeros: TensorInfo) -> str:
    return (
        f"tensor {zeros.name!r}: no config states whether its zero points are stored minus one; write "
        '{"checkpoint_format": "gptq"} (minus one: AutoGPTQ, and most files) or {"checkpoint_format": '
        f'"gptq_v2"}} (unchanged) to {QUANTIZE_CONFIG} beside the weights'
    )


def _find_width(tensors: Tensors, quantization: Quantization) -> float:
    """Return the bits of a code, from the shapes of qweight and g_idx, which has k items, or qzeros, which has n codes.

    Without both it is the config's width, 0 if the config names several, or 4 if it names none.
    """
    codes = tensors["qweight"]
    order = tensors.get("g_idx")
    zeros = tensors.get("qzeros")
    if len(codes.shape) == 2 and 0 not in codes.shape:
        if order is not None and len(order.shape) == 1 and order.shape[0]:
            return codes.shape[0] * 32 / order.shape[0]
        if zeros is not None and len(zeros.shape) == 2:
            return zeros.shape[1] * 32 / codes.shape[1]
    if not quantization.bits:
        return 4
    return quantization.bits[0] if len(quantization.bits) == 1 else 0


def find_gptq_group(tensors: Tensors, n: int, k: int, quantization: Quantization) -> int:
    """Return how many columns share a scale of `scales` [groups, n]. Raise errors as _find_group_size does."""
    scales = tensors["scales"]
    groups = scales.shape[0] if len(scales.shape) == 2 and scales.shape[1] == n else 0
    return _find_group_size(tensors["qweight"], scales, (n, k), groups, quantization)


# --- AWQ ------------------------------------------------------------------------------------------


def _accepts_awq(tensors: Tensors, quantization: Quantization) -> bool:
    """Use the config; without one, accept weights with eight times as many scales in a row as words."""
    if quantization.method:
        return quantization.method == AWQ
    codes = tensors["qweight"]
    scales = tensors.get("scales")
    return scales is not None and len(scales.shape) == len(codes.shape) == 2 and scales.shape[1] == 8 * codes.shape[1]


def _infer_awq_shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
    codes = tensors["qweight"]
    scales = tensors["scales"]
    _require_word_matrix(codes)
    version = quantization.format
    if version in GEMM and scales.shape[:1] == codes.shape[:1] and scales.shape[1:] != (8 * codes.shape[1],):
        version = "gemv"  # its scales are [n, groups]
    if version not in GEMM:
        problem = f": the order of AWQ's version {version!r} is unsupported; {REMEDY}"
        raise UnsupportedError.from_tensor(codes.name, problem)
    if quantization.bits and 4 not in quantization.bits:
        widths = ", ".join(map(str, quantization.bits))
        raise UnsupportedError.from_tensor(codes.name, f": AWQ with {widths} bits is unsupported; {REMEDY}")
    return 8 * codes.shape[1], codes.shape[0]


def _resolve_awq_scheme(tensors: Tensors, quantization: Quantization, input_major: bool | None) -> tuple[object, ...]:
    n, k = _infer_awq_shape(tensors, quantization)
    group = find_gptq_group(tensors, n, k, quantization)
    _require_i32(tensors["qweight"], tensors["qzeros"], (k // group, n // 8))
    return 4, group


def _read_awq_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
    n, k = _infer_awq_shape(tensors, quantization)
    group = find_gptq_group(tensors, n, k, quantization)
    zeros = np.ascontiguousarray(packed.unpack_awq(source.view(tensors["qzeros"])).T, np.float32)
    return replace(_read_transposed(source, tensors, INT4_AWQ, (k // group, n), group), zeros=zeros)


AWQ_INT4 = CheckpointEncoding(
    "AWQ_INT4",
    "AWQ",
    {role: NAMES[role] for role in ("qweight", "qzeros", "scales")},
    ("I32",),
    INT4_AWQ,
    _read_awq_matrix,
    infer_shape=_infer_awq_shape,
    resolve_scheme=_resolve_awq_scheme,
    accepts=_accepts_awq,
    item_bytes={"scales": 8, "qzeros": 96},
    input_types=("awq",),
)
PACK_QUANTIZED = tuple(_make_pack_quantized(bits, kind) for bits, kind in WIDTHS)
GPTQ_AWQ = (AWQ_INT4, _make_gptq(4, INT4_WORDS), _make_gptq(8, INT8_WORDS))
