"""How the kernels are called: wrong arguments, the choice of an instruction set, and files that cannot be read."""

from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import kernels, scale_search
from ktconvert.native_quant import matrix as of
from ktconvert.native_quant.matrix import KINDS, Matrix
from rig import isas
from rig.programs import run_python


def empty(shape: Any, dtype: Any = np.uint8) -> Any:
    return np.zeros(shape, dtype)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


BITS, WIDE, ROWS = (empty(shape, np.uint16) for shape in ((64, 128), (4, 256), (2, 64)))
ONES, EIGHT = np.ones((4, 1), np.float32), empty((4, 8))
PACKED, SCALE = empty(64 * 128), empty(64, np.float32)
CODES, PANELS = empty((128, 256), np.int8), empty((1, 32 * 64))
WORDS, HALVES = empty((4, 32), np.int32), empty((4, 2), np.uint16)
BLOCKS = empty((4, 2 * 144))


def pack(values: Any = BITS, weight: Any = PACKED, scale: Any = SCALE, bits: int = 8) -> Any:
    return lambda: kernels.quantize_pack(bits, Matrix(values, KINDS["bf16"]), weight, scale)


def codes(bits: int, values: Any, weight: Any) -> Any:
    return lambda: kernels.pack_codes(bits, values, weight)


def groups(values: Any = WIDE, packed: Any = WORDS, scale: Any = HALVES, **how: Any) -> Any:
    bits = how.pop("bits", 4)
    return lambda: kernels.quantize_groups(bits, Matrix(values, KINDS["bf16"]), packed, scale, **how)


def search(values: Any = ROWS, importance: Any = None, bits: int = 4) -> Any:
    return lambda: scale_search.search_scales(bits, values, importance)


def decoding(values: Any, kind: Any, *more: Any, **options: Any) -> Any:
    return lambda: kernels.decode(Matrix(values, kind, *more, **options))


def fp8(scales: Any = None, **options: Any) -> Any:
    return decoding(empty((64, 128)), KINDS["fp8_e4m3"], scales, **options)


def identity(n: int = 64) -> Any:
    return np.eye(n, dtype=np.float32)


SHARED = empty(128 * 256, np.int8)
SKIPPED = "hold .* not .* after"
BAD: list[tuple[Any, str]] = [
    (pack(bits=2), "bits must be 4 or 8, not 2"),
    (pack(empty((63, 128), np.uint16)), "multiples of 64, not 63 x 128"),
    (pack(empty((64, 100), np.uint16)), "multiples of 64, not 64 x 100"),
    (pack(bits=4), "multiples of 128"),
    (pack(empty((0, 128), np.uint16)), "neither of them 0"),
    (pack(empty(64 * 128, np.uint16)), "not enough values|two dimensions"),
    (pack(empty((64, 128), np.float32)), "values must be uint16"),
    (pack(empty((64, 128), ">u2")), "this machine's byte order"),
    (pack(empty((128, 256), np.uint16)[::2, ::2]), "one axis of values must be contiguous"),
    (pack(BITS[::-1]), "must not run backwards"),
    (pack(weight=PACKED[1:]), "weight must be uint8 of shape"),
    (pack(weight=PACKED.view(np.int8)), "weight must be uint8 of shape"),
    (pack(weight=empty(2 * 64 * 128)[::2]), "contiguous and aligned"),
    (pack(weight=read_only(empty(64 * 128))), "weight must be writable"),
    (pack(scale=SCALE[1:]), "scale must be float32 of shape"),
    (pack(scale=empty(64, np.float64)), "scale must be float32 of shape"),
    (pack(scale=empty(64 * 4 + 1)[1:].view(np.float32)), "contiguous and aligned"),
    (codes(5, CODES, PACKED), "bits must be 4 or 8, not 5"),
    (codes(4, CODES.view(np.uint8), PACKED), "codes must be int8"),
    (codes(4, CODES[0], PACKED), "codes must be int8"),
    (codes(4, CODES[:64], PACKED), "multiples of 128, not 64 x 256"),
    (codes(4, CODES[::-1], PACKED), "each row of codes must be contiguous"),
    (codes(4, CODES[:, ::2], PACKED), "each row of codes must be contiguous"),
    (codes(4, CODES, PACKED), "weight must be uint8 of shape"),
    (codes(8, SHARED.reshape(128, 256), SHARED.view(np.uint8)), "must not share memory"),
    (groups(bits=2), "bits must be 4 or 8"),
    (groups(rounding="up"), "rounding 'up' is not one of library, float32, signed"),
    (groups(bits=8, rounding="signed"), "rounding 'signed' is not one of library, float32$"),
    (groups(group=0), "multiple of 32"),
    (groups(group=48), "multiple of 32"),
    (groups(group=96), "96 does not fit 256"),
    (groups(packed=WORDS[:, :31]), "packed must be int32 of shape"),
    (groups(scale=HALVES.astype(np.float32)), "scale must be uint16"),
    (search(bits=5), "bits must be 4 or 8"),
    (search(empty((2, 65), np.uint16)), "multiple of 64"),
    (search(empty(64, np.uint16)), r"not uint16 of shape \(64,\)"),
    (search(empty((2, 64), np.int16)), "must be uint16"),
    (search(empty((64, 64), np.uint16).T), "each row of values must be contiguous"),
    (search(importance=np.ones(63, np.float32)), r"importance must be float32 \[64\]"),
    (search(importance=np.ones(64)), r"importance must be float32 \[64\]"),
    (search(importance=np.full(64, -1, np.float32)), "nowhere negative"),
    (search(importance=np.full(64, np.inf, np.float32)), "finite"),
    (search(importance=identity()[:, :32]), "importance must be"),
    (search(importance=np.asfortranarray(identity() + 1)), "must be contiguous"),
    (search(importance=identity() * np.float32(np.nan)), "finite"),
    (search(importance=-identity()), "nowhere negative"),
    (lambda: scale_search.search_groups("mxfp4", empty((2, 48), np.uint16)), "multiple of 32"),
    (lambda: kernels.pack_mxfp4(Matrix(empty((16, 64), np.uint16), KINDS["bf16"]), EIGHT, EIGHT), "multiples of 32"),
    (lambda: kernels.pack_mxfp4(Matrix(empty((64, 80), np.uint16), KINDS["bf16"]), EIGHT, EIGHT), "multiples of 32"),
    (lambda: kernels.reorder_fp8(empty((32, 64))[:, ::2], PANELS), "contiguous"),
    (lambda: kernels.reorder_fp8(empty((32, 64), np.int8), PANELS), "uint8"),  # type: ignore[arg-type]
    (lambda: kernels.reorder_fp8(empty((31, 64)), PANELS), "multiples of 32"),
    (lambda: kernels.reorder_fp8(empty((32, 64)), PANELS[:, :-1]), "codes must be"),
    (fp8(), "need float32 scales"),
    (fp8(np.ones((1, 1)), block=(64, 128)), "need float32 scales"),
    (fp8(np.ones((1, 1), np.float32), block=(64, 127)), "do not cover"),
    (fp8(np.ones((1, 1), np.float32), block=(64, 128), origin=(1, 0)), "do not cover"),
    (fp8(np.ones((64, 128), np.float32), block=(0, 1)), "out of range"),
    (fp8(np.ones((64, 128), np.float32), origin=(-1, 0)), "out of range"),
    (decoding(BITS, of.BF16, np.ones((1, 1), np.float32)), "no scales of their own"),
    (decoding(BITS, of.BF16, zeros=ONES), "no scales of their own"),
    (decoding(EIGHT, of.INT4, ONES, (1, 16), skip=1, width=16), SKIPPED),
    (decoding(EIGHT, of.INT4, ONES, (1, 16), skip=-1, width=8), SKIPPED),
    (decoding(EIGHT, of.INT4, ONES, (1, 15)), "do not cover"),
    (decoding(EIGHT.view(np.int8), of.INT8, ONES, (1, 8)), "values must be uint8"),
    (decoding(empty((4, 16))[:, ::2], of.INT8, ONES, (1, 8)), "one axis of values must be contiguous"),
    (decoding(empty((8, 4)).T, of.INT8, ONES, (1, 8)), "one axis of values must be contiguous"),
    (decoding(EIGHT, of.INT8, ONES, (1, 8), zeros=empty((4, 2), np.float32)), "zero points must be float32"),
    (decoding(EIGHT, of.INT8, ONES, (1, 8), zeros=empty((4, 1))), "zero points must be float32"),
    (decoding(EIGHT, of.INT8, ONES, (1, 8), group_of=np.full(8, -1, np.int32)), "group of each column must be"),
    (decoding(EIGHT, of.INT8, ONES, (1, 8), group_of=np.full(8, 1, np.int32)), "do not cover"),
    (decoding(EIGHT, of.INT8, ONES, (1, 8), group_of=empty(7, np.int32)), "group of each column must be"),
    (decoding(empty((1, 8), np.uint32), of.INT4_AWQ, np.ones((8, 1), np.float32), (1, 8), skip=1, height=8), SKIPPED),
    (decoding(empty((8, 4), np.uint32)[::2], of.INT4_AWQ, np.ones((32, 1), np.float32), (1, 8)), "contiguous"),
    (decoding(BLOCKS[:, :-1], of.Q4_K), SKIPPED),
    (decoding(BLOCKS, of.Q4_K, skip=1, width=512), SKIPPED),
    (decoding(BLOCKS, of.Q4_K, skip=-1, width=8), SKIPPED),
    (decoding(BLOCKS, of.Q4_K, ONES), "no scales of their own"),
    (decoding(np.asfortranarray(BLOCKS), of.Q4_K), "contiguous"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_wrong_arguments_are_rejected(call, words):
    with pytest.raises(ValueError, match=words):
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
        with pytest.raises(ValueError, match="does not offer"):
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
def test_foreign_sigbus_keeps_its_disposition(disposition, code, output, text):
    ran = run_python(FOREIGN_SIGBUS, disposition)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, output, text)


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
    ran = run_python(MANY_FILES, tmp_path)
    assert (ran.returncode, ran.stderr) == (5, f"{tmp_path}/4199 was cut short.\n")


@pytest.mark.parametrize(
    ("whose", "code", "text"),
    [("ours", 5, "ktconvert: model-00001.safetensors was cut short while it was read.\n"), ("other", -7, "")],
)
def test_an_unreadable_page_is_explained(whose, code, text):
    ran = run_python(SIGBUS_PROGRAM, whose)
    assert (ran.returncode, ran.stderr) == (code, text)
