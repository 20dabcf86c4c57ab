"""Importance matrices: llama.cpp's own two files, files by gguf-py and by the documented form of .dat, and damaged ones.

llama.cpp made its files from the same statistics of tests' example model: 2 layers, 8 experts, 256 columns.
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

from ktconvert.layouts.errors import InputError, KtconvertError
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES, LayerSums, open_imatrix, write_imatrix
from rig import gguf as rig
from rig.golden import FOLDER

FILES = {form: FOLDER / f"llama_cpp.imatrix.{form}" for form in ("gguf", "dat")}
SHAPES = {0: (8, 256, 256), 1: (8, 256, 256)}
SMALL = {3: (3, 8, 4), 4: (3, 8, 4)}
NAMES = {
    "gate": "blk.{}.ffn_gate_exps.weight",
    "up": "blk.{}.ffn_up_exps.weight",
    "down": "blk.{}.ffn_down_exps.weight",
}
COUNTS = np.array([5, 0, 1 << 25], np.int64)


def sums_of(layer: int, projection: str, shape: tuple[int, int, int] = SMALL[3]) -> Any:
    experts, hidden, width = shape
    rng = np.random.default_rng([layer, projection == "down"])
    return rng.uniform(0, 9, (experts, width if projection == "down" else hidden)).astype(np.float32)


def by_gguf_py(path: Path, tensors: Mapping[str, Any]) -> Path:
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    stored = {name: (kinds[values.dtype], values) for name, values in tensors.items()}
    return rig.write(path, stored, {"general.type": "imatrix"})


def small_gguf(
    path: Path, names: Mapping[str, str] = NAMES, change: Callable[[dict[str, Any]], object] = lambda tensors: None
) -> Path:
    """The statistics of SMALL, changed, written by gguf-py."""
    tensors: dict[str, Any] = {"blk.3.attn_k.weight.in_sum2": np.ones(8, np.float32)}
    for layer in SMALL:
        for projection, name in names.items():
            tensors[name.format(layer) + ".in_sum2"] = sums_of(layer, projection)
            tensors[name.format(layer) + ".counts"] = COUNTS.astype(np.float32).reshape(-1, 1)
    change(tensors)
    return by_gguf_py(path, tensors)


def binary(records: list[tuple[str, int, Any]], tail: bytes = b"") -> bytes:
    """The old form: (name, calls, values) of each record."""
    out = struct.pack("<i", len(records))
    for name, calls, values in records:
        data = np.asarray(values, "<f4").tobytes()
        out += struct.pack("<i", len(name.encode())) + name.encode() + struct.pack("<ii", calls, len(data) // 4) + data
    return out + tail


def small_binary(calls: int = 7, tail: bytes = b"") -> bytes:
    """The same, with expert 1 as llama.cpp writes one without tokens."""
    records = [("blk.3.attn_k.weight", 9, np.ones(8))]
    for layer in SMALL:
        for projection, name in NAMES.items():
            means = sums_of(layer, projection) / np.maximum(COUNTS, 1)[:, None]
            means[1] = 1
            records.append((name.format(layer), calls, means * calls))
    return binary(records, tail)


def test_llama_cpp_files_agree():
    """The GGUF holds sums and counts, the .dat means times calls of them: the means are equal but for rounding."""
    by_form = {form: open_imatrix(path, "small", SHAPES) for form, path in FILES.items()}
    for layer in SHAPES:
        for projection in WEIGHT_NAMES:
            counts = by_form["gguf"].sums[layer, projection].counts
            assert counts.sum() == 2 * 63 * 512  # top 2 of 8
            for expert in range(8):
                ours, old = (each.importance(layer, expert, projection) for each in by_form.values())
                assert ours is not None and old is not None and ours.shape == (256,)
                np.testing.assert_allclose(ours, old, rtol=3e-7)
    assert [by_form[f].sha256 for f in FILES] == [hashlib.sha256(p.read_bytes()).hexdigest() for p in FILES.values()]


@pytest.mark.parametrize("tail", [None, b"", struct.pack("<ii", 62, 3) + b"x.y", struct.pack("<i", 62) + bytes(4)])
def test_statistics_are_read(tmp_path, tail):
    """By gguf-py, or in the old form with and without what newer files have at their end."""
    path = tmp_path / "i"
    if tail is None:
        small_gguf(path)
    else:
        path.write_bytes(small_binary(7, tail))
    ours = open_imatrix(path, "small", SMALL)
    for layer in SMALL:
        assert ours.experts_without_tokens(layer) == (1,)
        for projection in WEIGHT_NAMES:
            sums = sums_of(layer, projection)
            if tail is None:
                np.testing.assert_array_equal(ours.read(layer, projection), sums)
            assert ours.importance(layer, 1, projection) is None
            for expert in (0, 2):
                mean = sums[expert] / np.float32(COUNTS[expert])
                rtol = 0 if tail is None else 3e-7
                np.testing.assert_allclose(ours.importance(layer, expert, projection), mean, rtol=rtol)


def test_no_calls_are_no_counts(tmp_path):
    path = tmp_path / "i.dat"
    path.write_bytes(small_binary(0))
    assert open_imatrix(path, "small", SMALL).experts_without_tokens(3) == (0, 1, 2)


def test_fused_gate_and_up(tmp_path):
    names = {"gate": "blk.{}.ffn_gate_up_exps.weight", "down": NAMES["down"]}
    ours = open_imatrix(small_gguf(tmp_path / "i.gguf", names=names), "small", SMALL)
    for projection in WEIGHT_NAMES:
        np.testing.assert_array_equal(ours.read(4, projection), sums_of(4, projection))


def test_a_tensor_for_each_expert(tmp_path):
    """Models of before experts were stored together, in both forms; expert 1 was never reached."""
    records = [
        (f"blk.{layer}.ffn_{projection}.{expert}.weight", sums_of(layer, projection)[expert], int(COUNTS[expert]))
        for layer in SMALL
        for projection in WEIGHT_NAMES
        for expert in range(3)
    ]
    tensors = {f"{name}.in_sum2": sums for name, sums, _ in records}
    tensors |= {f"{name}.counts": np.array([count], np.float32) for name, _, count in records}
    old = tmp_path / "i.dat"
    old.write_bytes(binary([(name, count, sums) for name, sums, count in records]))
    for path in (by_gguf_py(tmp_path / "i.gguf", tensors), old):
        ours = open_imatrix(path, "small", SMALL)
        assert ours.experts_without_tokens(3) == (1,)
        np.testing.assert_array_equal(ours.read(4, "up"), sums_of(4, "up"))
    del tensors["blk.4.ffn_up.2.weight.in_sum2"], tensors["blk.4.ffn_up.2.weight.counts"]
    refused(by_gguf_py(tmp_path / "j.gguf", tensors), "expert 2 of layer 4, up")


def test_writing_what_was_read(tmp_path):
    """Back from llama.cpp's file come its tensors, and the same keys byte for byte."""
    theirs, path = open_imatrix(FILES["gguf"], "small", SHAPES), tmp_path / "i.gguf"

    def load(layer: int) -> LayerSums:
        return LayerSums(theirs.sums[layer, "gate"].counts, theirs.read(layer, "gate"), theirs.read(layer, "down"))

    size, digest = write_imatrix(path, SHAPES, load, datasets=["out/calib.txt"], chunks=62, chunk_size=512)
    data = path.read_bytes()
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    end = data.index(b"imatrix.chunk_size") + len("imatrix.chunk_size") + 8
    start = len("GGUF") + 4 + 8  # after the number of tensors: llama.cpp's file has those of attention, too
    assert data[start:end] == FILES["gguf"].read_bytes()[start:end]
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(FILES["gguf"]).tensors}
    written = gguf.GGUFReader(path).tensors
    assert [t.name for t in written] == [name for name in expected if "_exps." in name]
    for tensor in written:
        their = expected[tensor.name]
        assert (tensor.tensor_type, tensor.shape.tolist()) == (their.tensor_type, their.shape.tolist())
        np.testing.assert_array_equal(tensor.data, their.data)


def test_many_layers_and_one_expert(tmp_path):
    """Sizes that are no multiple of the alignment, ggml's rank of tensors with one row, names in llama.cpp's order."""
    shapes = {layer: (1, 3, 5) if layer % 2 else (3, 8, 4) for layer in range(1, 12)}

    def load(layer: int) -> LayerSums:
        gate, down = (sums_of(layer, projection, shapes[layer]) for projection in ("gate", "down"))
        return LayerSums(COUNTS[: len(gate)], gate, down)

    path = tmp_path / "i.gguf"
    write_imatrix(path, shapes, load, datasets=[], chunks=0, chunk_size=2048)
    read = gguf.GGUFReader(path)
    names = [tensor.name.removesuffix(".counts").removesuffix(".in_sum2") for tensor in read.tensors]
    assert names == sorted(names)
    ours = open_imatrix(path, "small", shapes)
    for layer, projection in ours.sums:
        np.testing.assert_array_equal(ours.read(layer, projection), sums_of(layer, projection, shapes[layer]))
        np.testing.assert_array_equal(ours.sums[layer, projection].counts, COUNTS[: shapes[layer][0]])


def test_sums_that_are_not_finite_are_not_written(tmp_path):
    sums = LayerSums(COUNTS, np.full((3, 8), np.inf, np.float32), np.zeros((3, 4), np.float32))
    with pytest.raises(InputError, match="layer 3"):
        write_imatrix(tmp_path / "i.gguf", {3: SMALL[3]}, lambda _: sums, datasets=[], chunks=1, chunk_size=1)


def refused(path: Path, *words: str, shapes: Any = SMALL) -> None:
    with pytest.raises(InputError) as caught:
        open_imatrix(path, "the model M", shapes)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    for word in words:
        assert word in text, text


def test_layers_beside_the_models(tmp_path):
    """Statistics of the MTP layer may be there."""
    both = small_gguf(tmp_path / "i.gguf")
    refused(both, "layers 3-4", "in layers 3;", shapes={3: SMALL[3]})
    assert {layer for layer, _ in open_imatrix(both, "small", {3: SMALL[3]}, optional_layers=(4,)).sums} == {3}


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("NaN", lambda t: t["blk.3.ffn_up_exps.weight.in_sum2"].__setitem__((2, 1), np.nan), "expert 2, column 1"),
    ("negative", lambda t: t["blk.3.ffn_up_exps.weight.in_sum2"].__setitem__((0, 7), -1), "-1.0 as a sum"),
    ("half a token", lambda t: t["blk.4.ffn_up_exps.weight.counts"].__setitem__(0, 0.5), "no numbers of tokens"),
    ("infinite", lambda t: t["blk.4.ffn_up_exps.weight.counts"].__setitem__(0, np.inf), "no numbers of tokens"),
    ("no counts", lambda t: t.pop("blk.4.ffn_up_exps.weight.counts"), "not both in_sum2 and counts"),
    ("no sums", lambda t: t.pop("blk.4.ffn_up_exps.weight.in_sum2"), "not both in_sum2 and counts"),
    ("no up", lambda t: [t.pop(f"blk.4.ffn_up_exps.weight.{x}") for x in ("in_sum2", "counts")], "layer 4, up"),
    ("one count", lambda t: t.update({"blk.4.ffn_up_exps.weight.counts": np.ones(1, np.float32)}), "do not belong"),
    ("float16", lambda t: t.update({"blk.4.ffn_up_exps.weight.counts": np.ones((3, 1), np.float16)}), "F16, not F32"),
    ("no experts", lambda t: [t.pop(n) for n in list(t) if "exps" in n], "no importance matrix of experts"),
]


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_gguf(tmp_path, change, words):
    refused(small_gguf(tmp_path / "i.gguf", change=change), words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "at byte 0"),
        (b"\x01\0\0", "at byte 3"),
        (struct.pack("<i", -1) + bytes(40), "the number of records would be -1"),
        (struct.pack("<i", 1 << 30) + bytes(40), "would be 1073741824"),
        (struct.pack("<ii", 1, 1 << 30) + bytes(40), "the length of the name of record 0 would be 1073741824"),
        (struct.pack("<ii", 1, 2) + b"ab" + struct.pack("<ii", -4, 1) + bytes(4), "calls of 'ab' would be -4"),
        (struct.pack("<ii", 1, 2) + b"ab" + struct.pack("<ii", 4, 9) + bytes(4), "values of 'ab' would be 9"),
        (binary([("a", 1, [1])] * 2), "'a' appears twice"),
        (binary([("a", 1, [1])]), "no importance matrix of experts"),
        (small_binary(7, struct.pack("<ii", 62, 3) + b"x.yz"), "1 bytes follow"),
        (small_binary(7, struct.pack("<ii", 62, 5) + b"x.yz"), "would be 5"),
        (small_binary(-7), "would be -7"),
        (small_binary(7)[:-4], "values of"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF" + bytes(40), "version 0"),
    ],
)
def test_bad_binary(tmp_path, data, words):
    path = tmp_path / "i.dat"
    path.write_bytes(data)
    with pytest.raises(KtconvertError, match=words):
        open_imatrix(path, "the model M", SMALL)


def test_missing_file_and_folder(tmp_path):
    refused(tmp_path / "none.gguf", "cannot be opened")
    refused(tmp_path, "not a regular file")


def test_a_file_that_changes_while_it_is_used(tmp_path):
    path = small_gguf(tmp_path / "i.gguf")
    ours = open_imatrix(path, "small", SMALL)
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="changed while it was being read"):
        ours.importance(3, 0, "gate")


@pytest.mark.parametrize("form", ["gguf", "dat"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_in_one_sentence(tmp_path_factory, form, data):
    """Cut at any byte: refused. Any bytes changed: refused, or finite values of the right sizes are read."""
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / f"i.{form}"
    tail = struct.pack("<ii", 62, 3) + b"x.y"
    whole = small_gguf(path).read_bytes() if form == "gguf" else small_binary(7, tail)
    broken = bytearray(whole)
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(whole) - 1)))
    if cut is not None:
        broken = broken[:cut]
    else:
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
            broken[at] = data.draw(st.integers(0, 255))
    path.write_bytes(broken)
    try:
        ours = open_imatrix(path, "small", SMALL)
    except KtconvertError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    # A .dat may end before its chunks and the name of its data; after the last counts of a GGUF comes padding.
    assert cut is None or (cut == len(whole) - 11 if form == "dat" else cut >= len(whole) - 20)
    for layer, projection in ours.sums:
        for expert in range(3):
            mean = ours.importance(layer, expert, projection)
            assert mean is None or (mean.shape == ours.read(layer, projection)[expert].shape and (mean >= 0).all())
