"""The table of the runtime's methods, held against C and the documents; and a made-up method, whole in this file and
put into the table as one row: FP8 with one scale for the whole weight, computed by the kernels of FP8_PERCHANNEL.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.encoding import Bytes
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import KTMoEWrapper
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.methods import METHODS, Method
from ktconvert.native_quant.runtime.stored_slices import StoredSlice, write_fp8_codes
from ktconvert.pipeline.cli.bench import bench
from ktconvert.pipeline.cli.doctor import describe_extension
from rig import native

METHODS_PAGE = Path(__file__).resolve().parents[1] / "docs/reference/methods.md"


def reads(weight: Weight, layer: Any) -> bool:
    return weight.encoding.name == "F8_E4M3" and weight.resolve_scheme() == weight.shape[-2:]


def write(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    assert stored.linear.scales is not None
    write_fp8_codes(stored, out[0])
    out[1].view(np.float32)[:] = stored.linear.scales[0, 0]


WHAT = "E4M3, one for the weight"
TENSORS = METHODS["FP8_PERCHANNEL"].tensors
TOY = Method("FP8_PERTENSOR", lib.KTQ_FORMAT_FP8_PERCHANNEL, WHAT, 32, TENSORS, accepts=reads, write_stored=write)
ROWS = [row for method in METHODS.values() for row in method.all_rows]
LABELS = [f"{row.name} {row.weight_type}".strip() for row in ROWS]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Method:
    monkeypatch.setitem(METHODS, TOY.name, TOY)
    return TOY


@pytest.fixture
def layers(tmp_path: Path) -> tuple[native.Native, Path, Path]:
    """Draw an input, and the same weights with a scale for each row and with one for the whole weight."""
    layer = native.read("FP8_PERCHANNEL_default")
    scales = {name: tensor.bits.flat[0] for name, tensor in layer.tensors.items() if "scale" in name}

    def with_scales(folder: str, rows: bool) -> Path:
        tensors = dict(layer.tensors)
        for name, scale in scales.items():
            data = np.full(tensors[name].shape if rows else (1,), scale, np.float32)
            tensors[name] = tensors[name]._replace(shape=data.shape, data=data.tobytes())
        return layer.write(tmp_path / folder, tensors)

    return layer, with_scales("rows", True), with_scales("whole", False)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_toy_method_computes(parts, toy, layers):
    layer, rows, whole = layers
    expected = KTExperts.load(rows, 0, parts=parts).forward(layer.hidden, layer.ids, layer.weights)
    experts = KTExperts.load(whole, 0, parts=parts)
    assert experts.method == toy.name
    np.testing.assert_array_equal(experts.forward(layer.hidden, layer.ids, layer.weights), expected)


def test_commands_know_the_toy_method(toy, layers):
    document = json.loads(CliRunner().invoke(bench, [str(layers[2]), "--tokens", "1", "--json"]).stdout)
    assert (document["method"], document["weights"], document["activations"]) == (toy.name, toy.description, "BF16")
    assert toy.name in describe_extension().methods


def test_unsupported_settings_are_rejected(toy, layers):
    _, rows, whole = layers
    with pytest.raises(UnsupportedError, match="which method FP8_PERCHANNEL computes, not FP8_PERTENSOR"):
        KTExperts.load(rows, 0, method=toy.name)
    wrapper = KTMoEWrapper(0, 2, 2, 256, 256, None, 2, 1, str(whole), 512, method=toy.name)
    with pytest.raises(NotImplementedError, match="is read from checkpoints only"):
        wrapper.load_weights_from_tensors(*[torch.zeros((2, 256, 256))] * 3)


def test_weights_without_a_row_are_rejected(layers):
    with pytest.raises(UnsupportedError, match="a scale for each 256 x 256, which no method of this runtime computes"):
        KTExperts.load(layers[2], 0)
    with pytest.raises(ValueError, match="unknown method 'FP8_PERTENSOR'"):
        KTMoEWrapper(0, 2, 2, 256, 256, None, 2, 1, str(layers[2]), 512, method=TOY.name)


def test_a_row_that_contradicts_c_is_rejected(monkeypatch, layers):
    """Before C reads past the end of an array."""
    monkeypatch.setitem(METHODS, TOY.name, replace(TOY, number=lib.KTQ_FORMAT_BF16))
    with pytest.raises(ValueError, match=r"a slice \[256, 256\] of FP8_PERTENSOR has 131072 bytes, not 66560"):
        KTExperts.load(layers[2], 0)


def test_every_format_number_of_c_has_a_row():
    numbers = {name: getattr(lib, name) for name in dir(lib) if name.startswith("KTQ_FORMAT_")}
    assert {row.number for row in ROWS} == set(numbers.values())


@pytest.mark.parametrize("method", ROWS, ids=LABELS)
def test_rows_have_the_sizes_of_c(method):
    codes, scales = ffi.new("int64_t *"), ffi.new("int64_t *")
    for n, k in ((1, 1), (2, 3), (6, 1)):
        shape = method.multiple * n, method.multiple * k
        assert lib.ktq_weight_bytes(method.number, *shape, codes, scales) == lib.KTQ_OK
        sizes = [tensor.nbytes for tensor in method.tensors(*shape)]
        assert [codes[0], scales[0]] == [sizes[0], sum(sizes[1:])]
    half = method.multiple // 2
    for shape in ((half, half), (half, 2 * half), (2 * half, half)):
        is_legal = lib.ktq_weight_bytes(method.number, *shape, codes, scales) == lib.KTQ_OK
        # Which no output and no checkpoint makes use of: fewer rows, and fewer columns than the largest type has.
        assert not is_legal or method.activations == "int8" or method.name == "LLAMAFILE"
    too_many = 2 * lib.KTQ_MAX_COLUMNS
    assert lib.ktq_weight_bytes(method.number, method.multiple, too_many, codes, scales) == lib.KTQ_EINVAL


def test_output_formats_have_the_encodings_of_the_rows():
    in_parts = {fmt.name: fmt.encoding for fmt in FORMATS.values() if fmt.can_resplit}
    held = {name: method for name, method in METHODS.items() if method.encoding is not None}
    assert in_parts.keys() == held.keys()
    assert all((in_parts[name] == method.encoding) == (method.rearrange is None) for name, method in held.items())
    for method in ROWS:
        assert method.encoding is not None or (method.accepts and method.write_stored)


def test_the_page_lists_the_rows():
    lines = [line.strip("| ").split(" | ") for line in METHODS_PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {cells[0].replace("`", ""): cells[1:] for cells in lines}

    def row(method: Method) -> list[str]:
        checkpoint, output = method.accepts is not None, method.encoding is not None
        sources = ["checkpoints"] * checkpoint + ["outputs, tensors"] * output
        nbytes = sum(tensor.nbytes for tensor in method.tensors(2048, 2048))
        size = re.sub(r"0+$", "", f"{nbytes / 2048**2:.4f}").rstrip(".")
        return [method.description, size, method.activations, ", ".join(sources), str(method.multiple)]

    for label, method in zip(LABELS, ROWS, strict=True):
        assert shown[label] == row(method), label
