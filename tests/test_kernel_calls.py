"""How the kernels are called: wrong arguments, the choice of an instruction set, and files that cannot be read."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import KINDS, Matrix
from rig import isas
from rig.programs import python


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = kernels.isa()
    yield
    kernels.set_isa(before)


def good() -> dict[str, Any]:
    return {
        "bits": 8,
        "values": np.zeros((64, 128), np.uint16),
        "kind": "bf16",
        "weight": np.zeros(64 * 128, np.uint8),
        "scale": np.zeros(64, np.float32),
    }


def pack(bits: int, values: Any, kind: str, weight: Any, scale: Any, **options: Any) -> None:
    kernels.quantize_pack(bits, Matrix(values, KINDS[kind], **options), weight, scale)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


FP8 = {"kind": "fp8_e4m3", "values": np.zeros((64, 128), np.uint8)}
BAD_CALLS: dict[str, dict[str, Any]] = {
    "bits": {"bits": 2},
    "rows": {"values": np.zeros((63, 128), np.uint16)},
    "columns": {"values": np.zeros((64, 100), np.uint16)},
    "int4 needs 128": {"bits": 4, "weight": np.zeros(64 * 64, np.uint8)},
    "empty": {"values": np.zeros((0, 128), np.uint16)},
    "one dimension": {"values": np.zeros(64 * 128, np.uint16)},
    "dtype": {"values": np.zeros((64, 128), np.float32)},
    "byte order": {"values": np.zeros((64, 128), ">u2")},
    "no contiguous axis": {"values": np.zeros((128, 256), np.uint16)[::2, ::2]},
    "backwards": {"values": np.zeros((64, 128), np.uint16)[::-1]},
    "weight too short": {"weight": np.zeros(64 * 128 - 1, np.uint8)},
    "weight too long": {"weight": np.zeros(64 * 128 + 1, np.uint8)},
    "weight dtype": {"weight": np.zeros(64 * 128, np.int8)},
    "weight with gaps": {"weight": np.zeros(2 * 64 * 128, np.uint8)[::2]},
    "weight read-only": {"weight": read_only(np.zeros(64 * 128, np.uint8))},
    "scale length": {"scale": np.zeros(63, np.float32)},
    "scale dtype": {"scale": np.zeros(64, np.float64)},
    "scale misaligned": {"scale": np.zeros(64 * 4 + 1, np.uint8)[1:].view(np.float32)},
    "bf16 with scales": {"scales": np.ones((1, 1), np.float32)},
    "fp8 without scales": FP8,
    "fp8 scales dtype": FP8 | {"scales": np.ones((1, 1)), "block": (64, 128)},
    "fp8 scales too few": FP8 | {"scales": np.ones((1, 1), np.float32), "block": (64, 127)},
    "fp8 origin beyond": FP8 | {"scales": np.ones((1, 1), np.float32), "block": (64, 128), "origin": (1, 0)},
    "fp8 block 0": FP8 | {"scales": np.ones((64, 128), np.float32), "block": (0, 1)},
    "fp8 origin negative": FP8 | {"scales": np.ones((64, 128), np.float32), "origin": (-1, 0)},
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_wrong_arguments_are_refused(what):
    pack(**good())
    with pytest.raises(ValueError) as caught:
        pack(**(good() | BAD_CALLS[what]))
    assert str(caught.value)


def test_isa_can_be_chosen():
    assert kernels.available_isas()[0] == "scalar"
    for name in kernels.available_isas():
        kernels.set_isa(name)
        assert kernels.isa() == name
    kernels.set_isa(None)
    assert kernels.isa() == isas.chosen()
    with pytest.raises(ValueError, match="scalar"):
        kernels.set_isa("sse9")
    for name in set(kernels.ISAS) - set(kernels.available_isas()):
        with pytest.raises(ValueError, match="does not offer"):
            kernels.set_isa(name)


def test_every_family_ends_in_scalar():
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
def test_sigbus_of_others_goes_where_it_went_before(disposition, code, output, text):
    ran = python(FOREIGN_SIGBUS, disposition)
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
    ran = python(MANY_FILES, tmp_path)
    assert (ran.returncode, ran.stderr) == (5, f"{tmp_path}/4199 was cut short.\n")


@pytest.mark.parametrize(
    ("whose", "code", "text"),
    [("ours", 5, "ktconvert: model-00001.safetensors was cut short while it was read.\n"), ("other", -7, "")],
)
def test_unreadable_page_is_explained(whose, code, text):
    ran = python(SIGBUS_PROGRAM, whose)
    assert (ran.returncode, ran.stderr) == (code, text)
