"""Importance matrices: files of llama.cpp, files written by gguf-py, .dat files by their specification, damaged files.

llama.cpp wrote its files from the same statistics of the example model: 2 layers, 8 experts, 256 columns.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.errors import InputError, KTConvertError
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES, LayerSums, open_imatrix, write_imatrix
from rig import gguf as rig_gguf
from rig.golden import FOLDER

FILES = {file_format: FOLDER / f"llama_cpp.imatrix.{file_format}" for file_format in ("gguf", "dat")}
SHAPES = {0: (8, 256, 256), 1: (8, 256, 256)}
SMALL = {3: (3, 8, 4), 4: (3, 8, 4)}
NAMES = {
    "gate": "blk.{}.ffn_gate_exps.weight",
    "up": "blk.{}.ffn_up_exps.weight",
    "down": "blk.{}.ffn_down_exps.weight",
}
COUNTS = np.array([5, 0, 1 << 25], np.int64)


def draw_sums(layer: int, projection: str, shape: tuple[int, int, int] = SMALL[3]) -> Any:
    """Return the sums of a linear of a layer."""
    experts, hidden, width = shape
    rng = np.random.default_rng([layer, projection == "down"])
    return rng.uniform(0, 9, (experts, width if projection == "down" else hidden)).astype(np.float32)


def write_with_gguf_py(path: Path, tensors: Mapping[str, Any]) -> Path:
    """Write tensors with gguf-py."""
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    stored = {name: (kinds[values.dtype], values) for name, values in tensors.items()}
    return rig_gguf.write(path, stored, {"general.type": "imatrix"})


def write_small_gguf(
    path: Path, names: Mapping[str, str] = NAMES, change: Callable[[dict[str, Any]], object] = lambda tensors: None
) -> Path:
    """Write the statistics of SMALL with gguf-py, after an optional change."""
    tensors: dict[str, Any] = {"blk.3.attn_k.weight.in_sum2": np.ones(8, np.float32)}
    for layer in SMALL:
        for projection, name in names.items():
            tensors[name.format(layer) + ".in_sum2"] = draw_sums(layer, projection)
            tensors[name.format(layer) + ".counts"] = COUNTS.astype(np.float32).reshape(-1, 1)
    change(tensors)
    return write_with_gguf_py(path, tensors)


def make_binary(records: list[tuple[str, int, Any]], tail: bytes = b"") -> bytes:
    """Return the old format with these records: (name, calls, values)."""
    out = struct.pack("<i", len(records))
    for name, calls, values in records:
        data = np.asarray(values, "<f4").tobytes()
        out += struct.pack("<i", len(name.encode())) + name.encode() + struct.pack("<ii", calls, len(data) // 4) + data
    return out + tail


def make_small_binary(calls: int = 7, tail: bytes = b"") -> bytes:
    """Return the statistics of SMALL in the old format; expert 1 is written as llama.cpp writes one without tokens."""
    records = [("blk.3.attn_k.weight", 9, np.ones(8))]
    for layer in SMALL:
        for projection, name in NAMES.items():
            means = draw_sums(layer, projection) / np.maximum(COUNTS, 1)[:, None]
            means[1] = 1
            records.append((name.format(layer), calls, means * calls))
    return make_binary(records, tail)


def test_llama_cpp_files_agree():
    """The GGUF has sums and counts, the .dat means times calls: the means are equal except for rounding."""
    by_format = {file_format: open_imatrix(path, "small", SHAPES) for file_format, path in FILES.items()}
    for layer in SHAPES:
        for projection in WEIGHT_NAMES:
            counts = by_format["gguf"].sums[layer, projection].counts
            assert counts.sum() == 2 * 63 * 512  # top 2 of 8
            for expert in range(8):
                ours, theirs = (each.read_importance(layer, expert, projection) for each in by_format.values())
                assert ours is not None and theirs is not None and ours.shape == (256,)
                np.testing.assert_allclose(ours, theirs, rtol=3e-7)
    assert [by_format[f].sha256 for f in FILES] == [hashlib.sha256(p.read_bytes()).hexdigest() for p in FILES.values()]


@pytest.mark.parametrize("tail", [None, b"", struct.pack("<ii", 62, 3) + b"x.y", struct.pack("<i", 62) + bytes(4)])
def test_statistics_are_read(tmp_path, tail):
    """Files of gguf-py, and of the old format with and without the trailing fields of newer files."""
    path = tmp_path / "i"
    if tail is None:
        write_small_gguf(path)
    else:
        path.write_bytes(make_small_binary(7, tail))
    ours = open_imatrix(path, "small", SMALL)
    for layer in SMALL:
        assert ours.experts_without_tokens(layer) == (1,)
        for projection in WEIGHT_NAMES:
            sums = draw_sums(layer, projection)
            if tail is None:
                np.testing.assert_array_equal(ours.read(layer, projection), sums)
            assert ours.read_importance(layer, 1, projection) is None
            for expert in (0, 2):
                mean = sums[expert] / np.float32(COUNTS[expert])
                rtol = 0 if tail is None else 3e-7
                np.testing.assert_allclose(ours.read_importance(layer, expert, projection), mean, rtol=rtol)


def test_experts_without_calls_have_no_tokens(tmp_path):
    path = tmp_path / "i.dat"
    path.write_bytes(make_small_binary(0))
    assert open_imatrix(path, "small", SMALL).experts_without_tokens(3) == (0, 1, 2)


def test_fused_gate_and_up_are_split(tmp_path):
    names = {"gate": "blk.{}.ffn_gate_up_exps.weight", "down": NAMES["down"]}
    ours = open_imatrix(write_small_gguf(tmp_path / "i.gguf", names=names), "small", SMALL)
    for projection in WEIGHT_NAMES:
        np.testing.assert_array_equal(ours.read(4, projection), draw_sums(4, projection))


def test_separate_experts_are_read(tmp_path):
    """Models once stored each expert separately, in both formats; expert 1 has no tokens."""
    records = [
        (f"blk.{layer}.ffn_{projection}.{expert}.weight", draw_sums(layer, projection)[expert], int(COUNTS[expert]))
        for layer in SMALL
        for projection in WEIGHT_NAMES
        for expert in range(3)
    ]
    tensors = {f"{name}.in_sum2": sums for name, sums, _ in records}
    tensors |= {f"{name}.counts": np.array([count], np.float32) for name, _, count in records}
    old = tmp_path / "i.dat"
    old.write_bytes(make_binary([(name, count, sums) for name, sums, count in records]))
    for path in (write_with_gguf_py(tmp_path / "i.gguf", tensors), old):
        ours = open_imatrix(path, "small", SMALL)
        assert ours.experts_without_tokens(3) == (1,)
        np.testing.assert_array_equal(ours.read(4, "up"), draw_sums(4, "up"))
    del tensors["blk.4.ffn_up.2.weight.in_sum2"], tensors["blk.4.ffn_up.2.weight.counts"]
    check_refusal(write_with_gguf_py(tmp_path / "j.gguf", tensors), "expert 2 of layer 4, up")


def test_written_statistics_equal_llama_cpp_files(tmp_path):
    """Writing the statistics of llama.cpp's file gives its tensors, and the same keys byte for byte."""
    theirs, path = open_imatrix(FILES["gguf"], "small", SHAPES), tmp_path / "i.gguf"

    def load(layer: int) -> LayerSums:
        return LayerSums(theirs.sums[layer, "gate"].counts, theirs.read(layer, "gate"), theirs.read(layer, "down"))

    size, digest = write_imatrix(path, SHAPES, load, datasets=["out/calib.txt"], chunks=62, chunk_size=512)
    data = path.read_bytes()
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    end = data.index(b"imatrix.chunk_size") + len("imatrix.chunk_size") + 8
    start = len("GGUF") + 4 + 8  # after the number of tensors: llama.cpp's file also has those of attention
    assert data[start:end] == FILES["gguf"].read_bytes()[start:end]
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(FILES["gguf"]).tensors}
    written = gguf.GGUFReader(path).tensors
    assert [t.name for t in written] == [name for name in expected if "_exps." in name]
    for tensor in written:
        their = expected[tensor.name]
        assert (tensor.tensor_type, tensor.shape.tolist()) == (their.tensor_type, their.shape.tolist())
        np.testing.assert_array_equal(tensor.data, their.data)


def test_any_sizes_are_written_and_read(tmp_path):
    """Sizes that are not multiples of the alignment, tensors with one row, names in llama.cpp's order."""
    shapes = {layer: (1, 3, 5) if layer % 2 else (3, 8, 4) for layer in range(1, 12)}

    def load(layer: int) -> LayerSums:
        gate, down = (draw_sums(layer, projection, shapes[layer]) for projection in ("gate", "down"))
        return LayerSums(COUNTS[: len(gate)], gate, down)

    path = tmp_path / "i.gguf"
    write_imatrix(path, shapes, load, datasets=[], chunks=0, chunk_size=2048)
    read = gguf.GGUFReader(path)
    names = [tensor.name.removesuffix(".counts").removesuffix(".in_sum2") for tensor in read.tensors]
    assert names == sorted(names)
    ours = open_imatrix(path, "small", shapes)
    for layer, projection in ours.sums:
        np.testing.assert_array_equal(ours.read(layer, projection), draw_sums(layer, projection, shapes[layer]))
        np.testing.assert_array_equal(ours.sums[layer, projection].counts, COUNTS[: shapes[layer][0]])


def test_sums_that_are_not_finite_are_not_written(tmp_path):
    sums = LayerSums(COUNTS, np.full((3, 8), np.inf, np.float32), np.zeros((3, 4), np.float32))
    with pytest.raises(InputError, match="layer 3"):
        write_imatrix(tmp_path / "i.gguf", {3: SMALL[3]}, lambda _: sums, datasets=[], chunks=1, chunk_size=1)


def check_refusal(path: Path, *messages: str, shapes: Any = SMALL) -> None:
    """Assert that a file is refused with a message that names it and contains these texts."""
    with pytest.raises(InputError) as caught:
        open_imatrix(path, "the model M", shapes)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    for message in messages:
        assert message in text, text


def test_additional_layers_are_refused_unless_optional(tmp_path):
    """Statistics may include the MTP layer."""
    both = write_small_gguf(tmp_path / "i.gguf")
    check_refusal(both, "layers 3-4", "in layers 3;", shapes={3: SMALL[3]})
    assert {layer for layer, _ in open_imatrix(both, "small", {3: SMALL[3]}, optional_layers=(4,)).sums} == {3}


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("NaN", lambda t: t["blk.3.ffn_up_exps.weight.in_sum2"].__setitem__((2, 1), np.nan), "expert 2, column 1"),
    ("negative", lambda t: t["blk.3.ffn_up_exps.weight.in_sum2"].__setitem__((0, 7), -1), "-1.0 as a sum"),
    ("half a token", lambda t: t["blk.4.ffn_up_exps.weight.counts"].__setitem__(0, 0.5), "not numbers of tokens"),
    ("infinite", lambda t: t["blk.4.ffn_up_exps.weight.counts"].__setitem__(0, np.inf), "not numbers of tokens"),
    ("no counts", lambda t: t.pop("blk.4.ffn_up_exps.weight.counts"), "not both in_sum2 and counts"),
    ("no sums", lambda t: t.pop("blk.4.ffn_up_exps.weight.in_sum2"), "not both in_sum2 and counts"),
    ("no up", lambda t: [t.pop(f"blk.4.ffn_up_exps.weight.{x}") for x in ("in_sum2", "counts")], "layer 4, up"),
    ("one count", lambda t: t.update({"blk.4.ffn_up_exps.weight.counts": np.ones(1, np.float32)}), "do not match"),
    ("float16", lambda t: t.update({"blk.4.ffn_up_exps.weight.counts": np.ones((3, 1), np.float16)}), "F16, not F32"),
    ("no experts", lambda t: [t.pop(n) for n in list(t) if "exps" in n], "no importance matrix of experts"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_invalid_gguf_is_refused(tmp_path, change, message):
    check_refusal(write_small_gguf(tmp_path / "i.gguf", change=change), message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "at byte 0"),
        (b"\x01\0\0", "at byte 3"),
        (struct.pack("<i", -1) + bytes(40), "the number of records would be -1"),
        (struct.pack("<i", 1 << 30) + bytes(40), "would be 1073741824"),
        (struct.pack("<ii", 1, 1 << 30) + bytes(40), "the length of the name of record 0 would be 1073741824"),
        (struct.pack("<ii", 1, 2) + b"ab" + struct.pack("<ii", -4, 1) + bytes(4), "calls of 'ab' would be -4"),
        (struct.pack("<ii", 1, 2) + b"ab" + struct.pack("<ii", 4, 9) + bytes(4), "values of 'ab' would be 9"),
        (make_binary([("a", 1, [1])] * 2), "'a' appears twice"),
        (make_binary([("a", 1, [1])]), "no importance matrix of experts"),
        (make_small_binary(7, struct.pack("<ii", 62, 3) + b"x.yz"), "1 bytes follow"),
        (make_small_binary(7, struct.pack("<ii", 62, 5) + b"x.yz"), "would be 5"),
        (make_small_binary(-7), "would be -7"),
        (make_small_binary(7)[:-4], "values of"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF" + bytes(40), "version 0"),
    ],
)
def test_invalid_dat_is_refused(tmp_path, data, message):
    path = tmp_path / "i.dat"
    path.write_bytes(data)
    with pytest.raises(KTConvertError, match=message):
        open_imatrix(path, "the model M", SMALL)


def test_missing_files_and_folders_are_refused(tmp_path):
    check_refusal(tmp_path / "none.gguf", "does not exist")
    check_refusal(tmp_path, "is a folder, not an importance matrix")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write_small_gguf(tmp_path / "i.gguf")
    ours = open_imatrix(path, "small", SMALL)
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="changed while it was being read"):
        ours.read_importance(3, 0, "gate")


@pytest.mark.parametrize("file_format", ["gguf", "dat"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_with_a_message(tmp_path_factory, file_format, data):
    """A truncated file is refused. A file with changed bytes is refused, or finite values of the right sizes result."""
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / f"i.{file_format}"
    tail = struct.pack("<ii", 62, 3) + b"x.y"
    valid = write_small_gguf(path).read_bytes() if file_format == "gguf" else make_small_binary(7, tail)
    damaged = bytearray(valid)
    length = data.draw(st.one_of(st.none(), st.integers(0, len(valid) - 1)))
    if length is not None:
        damaged = damaged[:length]
    else:
        for at in data.draw(st.lists(st.integers(0, len(valid) - 1), min_size=1, max_size=4)):
            damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        ours = open_imatrix(path, "small", SMALL)
    except KTConvertError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    # A .dat may end before its chunks and the name of its dataset; a GGUF ends with padding.
    assert length is None or (length == len(valid) - 11 if file_format == "dat" else length >= len(valid) - 20)
    for layer, projection in ours.sums:
        for expert in range(3):
            mean = ours.read_importance(layer, expert, projection)
            assert mean is None or (mean.shape == ours.read(layer, projection)[expert].shape and (mean >= 0).all())
