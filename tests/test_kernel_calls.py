"""Calls of the kernels: wrong arguments, the choice of an instruction set, and files that cannot be read."""

from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import kernels, scale_search
from ktconvert.native_quant import matrix as matrix_kinds
from ktconvert.native_quant.matrix import KINDS, Matrix
from rig import isas
from rig.programs import run_python


def zeros(shape: Any, dtype: Any = np.uint8) -> Any:
    """Return an array of zeros."""
    return np.zeros(shape, dtype)


def read_only(array: Any) -> Any:
    """Make an array read-only."""
    array.flags.writeable = False
    return array


BITS, WIDE, ROWS = (zeros(shape, np.uint16) for shape in ((64, 128), (4, 256), (2, 64)))
ONES, EIGHT = np.ones((4, 1), np.float32), zeros((4, 8))
PACKED, SCALE = zeros(64 * 128), zeros(64, np.float32)
CODES, PANELS = zeros((128, 256), np.int8), zeros((1, 32 * 64))
WORDS, HALVES = zeros((4, 32), np.int32), zeros((4, 2), np.uint16)
BLOCKS = zeros((4, 2 * 144))


def quantize_pack(values: Any = BITS, weight: Any = PACKED, scale: Any = SCALE, bits: int = 8) -> Any:
    """Return a call of kernels.quantize_pack."""
    return lambda: kernels.quantize_pack(bits, Matrix(values, KINDS["bf16"]), weight, scale)


def pack_codes(bits: int, values: Any, weight: Any) -> Any:
    """Return a call of kernels.pack_codes."""
    return lambda: kernels.pack_codes(bits, values, weight)


def quantize_groups(values: Any = WIDE, packed: Any = WORDS, scale: Any = HALVES, **options: Any) -> Any:
    """Return a call of kernels.quantize_groups."""
    bits = options.pop("bits", 4)
    return lambda: kernels.quantize_groups(bits, Matrix(values, KINDS["bf16"]), packed, scale, **options)


def search(values: Any = ROWS, importance: Any = None, bits: int = 4) -> Any:
    """Return a call of search_scales."""
    return lambda: scale_search.search_scales(bits, values, importance)


def decode(values: Any, kind: Any, *more: Any, **options: Any) -> Any:
    """Return a call of kernels.decode."""
    return lambda: kernels.decode(Matrix(values, kind, *more, **options))


def decode_fp8(scales: Any = None, **options: Any) -> Any:
    """Return a call that decodes FP8."""
    return decode(zeros((64, 128)), KINDS["fp8_e4m3"], scales, **options)


def identity(n: int = 64) -> Any:
    """Return an identity matrix in float32."""
    return np.eye(n, dtype=np.float32)


SHARED = zeros(128 * 256, np.int8)
SKIPPED = "hold .* not .* after"
BAD: list[tuple[Any, str]] = [
    (quantize_pack(bits=2), "bits must be 4 or 8, not 2"),
    (quantize_pack(zeros((63, 128), np.uint16)), "multiples of 64, not 63 x 128"),
    (quantize_pack(zeros((64, 100), np.uint16)), "multiples of 64, not 64 x 100"),
    (quantize_pack(bits=4), "multiples of 128"),
    (quantize_pack(zeros((0, 128), np.uint16)), "neither of them 0"),
    (quantize_pack(zeros(64 * 128, np.uint16)), "not enough values|two dimensions"),
    (quantize_pack(zeros((64, 128), np.float32)), "values must be uint16"),
    (quantize_pack(zeros((64, 128), ">u2")), "this machine's byte order"),
    (quantize_pack(zeros((128, 256), np.uint16)[::2, ::2]), "one axis of values must be contiguous"),
    (quantize_pack(BITS[::-1]), "must not run backwards"),
    (quantize_pack(weight=PACKED[1:]), "weight must be uint8 of shape"),
    (quantize_pack(weight=PACKED.view(np.int8)), "weight must be uint8 of shape"),
    (quantize_pack(weight=zeros(2 * 64 * 128)[::2]), "contiguous and aligned"),
    (quantize_pack(weight=read_only(zeros(64 * 128))), "weight must be writable"),
    (quantize_pack(scale=SCALE[1:]), "scale must be float32 of shape"),
    (quantize_pack(scale=zeros(64, np.float64)), "scale must be float32 of shape"),
    (quantize_pack(scale=zeros(64 * 4 + 1)[1:].view(np.float32)), "contiguous and aligned"),
    (pack_codes(5, CODES, PACKED), "bits must be 4 or 8, not 5"),
    (pack_codes(4, CODES.view(np.uint8), PACKED), "codes must be int8"),
    (pack_codes(4, CODES[0], PACKED), "codes must be int8"),
    (pack_codes(4, CODES[:64], PACKED), "multiples of 128, not 64 x 256"),
    (pack_codes(4, CODES[::-1], PACKED), "each row of codes must be contiguous"),
    (pack_codes(4, CODES[:, ::2], PACKED), "each row of codes must be contiguous"),
    (pack_codes(4, CODES, PACKED), "weight must be uint8 of shape"),
    (pack_codes(8, SHARED.reshape(128, 256), SHARED.view(np.uint8)), "must not share memory"),
    (quantize_groups(bits=2), "bits must be 4 or 8"),
    (quantize_groups(rounding="up"), "rounding 'up' is not one of library, float32, signed"),
    (quantize_groups(bits=8, rounding="signed"), "rounding 'signed' is not one of library, float32$"),
    (quantize_groups(group=0), "multiple of 32"),
    (quantize_groups(group=48), "multiple of 32"),
    (quantize_groups(group=96), "96 does not fit 256"),
    (quantize_groups(packed=WORDS[:, :31]), "packed must be int32 of shape"),
    (quantize_groups(scale=HALVES.astype(np.float32)), "scale must be uint16"),
    (search(bits=5), "bits must be 4 or 8"),
    (search(zeros((2, 65), np.uint16)), "multiple of 64"),
    (search(zeros(64, np.uint16)), r"not uint16 of shape \(64,\)"),
    (search(zeros((2, 64), np.int16)), "must be uint16"),
    (search(zeros((64, 64), np.uint16).T), "each row of values must be contiguous"),
    (search(importance=np.ones(63, np.float32)), r"importance must be float32 \[64\]"),
    (search(importance=np.ones(64)), r"importance must be float32 \[64\]"),
    (search(importance=np.full(64, -1, np.float32)), "importance must be finite and not negative"),
    (search(importance=np.full(64, np.inf, np.float32)), "finite"),
    (search(importance=identity()[:, :32]), "importance must be"),
    (search(importance=np.asfortranarray(identity() + 1)), "must be contiguous"),
    (search(importance=identity() * np.float32(np.nan)), "finite"),
    (search(importance=-identity()), "importance must be finite and not negative"),
    (lambda: scale_search.search_groups("mxfp4", zeros((2, 48), np.uint16)), "multiple of 32"),
    (lambda: kernels.pack_mxfp4(Matrix(zeros((16, 64), np.uint16), KINDS["bf16"]), EIGHT, EIGHT), "multiples of 32"),
    (lambda: kernels.pack_mxfp4(Matrix(zeros((64, 80), np.uint16), KINDS["bf16"]), EIGHT, EIGHT), "multiples of 32"),
    (lambda: kernels.reorder_fp8(zeros((32, 64))[:, ::2], PANELS), "contiguous"),
    (lambda: kernels.reorder_fp8(zeros((32, 64), np.int8), PANELS), "uint8"),  # type: ignore[arg-type]
    (lambda: kernels.reorder_fp8(zeros((31, 64)), PANELS), "multiples of 32"),
    (lambda: kernels.reorder_fp8(zeros((32, 64)), PANELS[:, :-1]), "codes must be"),
    (decode_fp8(), "need float32 scales"),
    (decode_fp8(np.ones((1, 1)), block=(64, 128)), "need float32 scales"),
    (decode_fp8(np.ones((1, 1), np.float32), block=(64, 127)), "do not cover"),
    (decode_fp8(np.ones((1, 1), np.float32), block=(64, 128), origin=(1, 0)), "do not cover"),
    (decode_fp8(np.ones((64, 128), np.float32), block=(0, 1)), "out of range"),
    (decode_fp8(np.ones((64, 128), np.float32), origin=(-1, 0)), "out of range"),
    (decode(BITS, matrix_kinds.BF16, np.ones((1, 1), np.float32)), "no scales of their own"),
    (decode(BITS, matrix_kinds.BF16, zeros=ONES), "no scales of their own"),
    (decode(EIGHT, matrix_kinds.INT4, ONES, (1, 16), skip=1, width=16), SKIPPED),
    (decode(EIGHT, matrix_kinds.INT4, ONES, (1, 16), skip=-1, width=8), SKIPPED),
    (decode(EIGHT, matrix_kinds.INT4, ONES, (1, 15)), "do not cover"),
    (decode(EIGHT.view(np.int8), matrix_kinds.INT8, ONES, (1, 8)), "values must be uint8"),
    (decode(zeros((4, 16))[:, ::2], matrix_kinds.INT8, ONES, (1, 8)), "one axis of values must be contiguous"),
    (decode(zeros((8, 4)).T, matrix_kinds.INT8, ONES, (1, 8)), "one axis of values must be contiguous"),
    (decode(EIGHT, matrix_kinds.INT8, ONES, (1, 8), zeros=zeros((4, 2), np.float32)), "zero points must be float32"),
    (decode(EIGHT, matrix_kinds.INT8, ONES, (1, 8), zeros=zeros((4, 1))), "zero points must be float32"),
    (
        decode(EIGHT, matrix_kinds.INT8, ONES, (1, 8), column_groups=np.full(8, -1, np.int32)),
        "group of each column must be",
    ),
    (decode(EIGHT, matrix_kinds.INT8, ONES, (1, 8), column_groups=np.full(8, 1, np.int32)), "do not cover"),
    (decode(EIGHT, matrix_kinds.INT8, ONES, (1, 8), column_groups=zeros(7, np.int32)), "group of each column must be"),
    (
        decode(zeros((1, 8), np.uint32), matrix_kinds.INT4_AWQ, np.ones((8, 1), np.float32), (1, 8), skip=1, height=8),
        SKIPPED,
    ),
    (decode(zeros((8, 4), np.uint32)[::2], matrix_kinds.INT4_AWQ, np.ones((32, 1), np.float32), (1, 8)), "contiguous"),
    (decode(BLOCKS[:, :-1], matrix_kinds.Q4_K), SKIPPED),
    (decode(BLOCKS, matrix_kinds.Q4_K, skip=1, width=512), SKIPPED),
    (decode(BLOCKS, matrix_kinds.Q4_K, skip=-1, width=8), SKIPPED),
    (decode(BLOCKS, matrix_kinds.Q4_K, ONES), "no scales of their own"),
    (decode(np.asfortranarray(BLOCKS), matrix_kinds.Q4_K), "contiguous"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_wrong_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_instruction_set_can_be_chosen():
    assert kernels.available_isas()[0] == "scalar"
    for name in isas.each():
        assert kernels.isa() == name
        kernels.set_isa(None)
        assert kernels.isa() == isas.default_isa()
    with pytest.raises(ValueError, match="scalar"):
        kernels.set_isa("sse9")
    for name in set(kernels.ISAS) - set(kernels.available_isas()):
        with pytest.raises(ValueError, match="does not support"):
            kernels.set_isa(name)


def test_every_kernel_family_ends_with_scalar():
    families: dict[str, list[int]] = {}
    for family, name in kernels.KERNELS:
        families.setdefault(family, []).append(kernels.ISAS.index(name))
    for family, order in families.items():
        assert order == sorted(order, reverse=True), f"{family}: best first"
        assert order[-1] == 0, f"{family}: scalar last"


SIGBUS_PROGRAM = """
import mmap, os, sys, tempfile
import numpy as np
from ktconvert.native_quant import kernels, sigbus
from ktconvert.native_quant.matrix import BF16, Matrix
with tempfile.NamedTemporaryFile() as file:
    os.truncate(file.name, 1 << 20)
    mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    values = np.frombuffer(mapping, np.uint16).reshape(-1, 1024)
    os.truncate(file.name, 4096)
    sigbus.guard_sigbus("ktconvert: %s was cut short while it was read.")
    if sys.argv[1] == "ours":
        sigbus.register_mapping(values.ctypes.data, values.nbytes, "model-00001.safetensors")
    else:
        sigbus.register_mapping(values.ctypes.data, 4096, "another file")
        sigbus.register_mapping(values.ctypes.data + 8192, values.nbytes, "a file already closed")
        sigbus.unregister_mapping(values.ctypes.data + 8192)
    kernels.quantize_pack(8, Matrix(values, BF16), np.empty(values.size, np.uint8), np.empty(len(values), np.float32))
"""


FOREIGN_SIGBUS = """
import mmap, os, signal, sys, tempfile
import numpy as np
from ktconvert.native_quant import sigbus
dispositions = {"handler": lambda *_: print("handled", flush=True), "ignored": signal.SIG_IGN, "default": signal.SIG_DFL}
signal.signal(signal.SIGBUS, dispositions[sys.argv[1]])
sigbus.guard_sigbus("%s was cut short.")
os.kill(os.getpid(), signal.SIGBUS)
print("alive", flush=True)
with tempfile.NamedTemporaryFile() as file:
    os.truncate(file.name, 8192)
    mapping = mmap.mmap(file.fileno(), 0)
    sigbus.register_mapping(np.frombuffer(mapping, np.uint8).ctypes.data, 8192, "a shard")
    os.truncate(file.name, 4096)
    mapping[5000]
"""


@pytest.mark.parametrize(
    ("disposition", "code", "output", "text"),
    [
        ("handler", 5, "handled\nalive\n", "a shard was cut short.\n"),
        ("ignored", 5, "alive\n", "a shard was cut short.\n"),
        ("default", -7, "", ""),
    ],
)
def test_other_sigbus_handlers_keep_working(disposition, code, output, text):
    result = run_python(FOREIGN_SIGBUS, disposition)
    assert (result.returncode, result.stdout, result.stderr) == (code, output, text)


MANY_FILES = """
import resource, os, sys
from pathlib import Path
import numpy as np
from ktconvert.layouts.files.mapped import MappedFiles
from ktconvert.native_quant import sigbus
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sigbus.guard_sigbus("%s was cut short.")
files, paths = MappedFiles(), [Path(sys.argv[1], str(number)) for number in range(4200)]
for path in paths:
    with open(path, "wb") as file:
        file.truncate(8192)
    files.map(path, 8192)
MappedFiles().close()
os.truncate(paths[-1], 4096)
files.map(paths[-1], 8192)[5000]
"""


def test_any_number_of_files_can_be_mapped(tmp_path):
    result = run_python(MANY_FILES, tmp_path)
    assert (result.returncode, result.stderr) == (5, f"{tmp_path}/4199 was cut short.\n")


@pytest.mark.parametrize(
    ("owner", "code", "text"),
    [("ours", 5, "ktconvert: model-00001.safetensors was cut short while it was read.\n"), ("other", -7, "")],
)
def test_an_unreadable_page_is_explained(owner, code, text):
    result = run_python(SIGBUS_PROGRAM, owner)
    assert (result.returncode, result.stderr) == (code, text)
