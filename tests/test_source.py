"""Opening checkpoints: correct data, and messages for everything that is damaged or hostile."""

import json
import os
import re
import struct
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.layouts import extras
from ktconvert.layouts.errors import InputError, MissingPackageError, ResourceError, UnsupportedError, UsageError
from ktconvert.layouts.extras import install_command
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.containers.safetensors import DTYPE_BITS, INDEX, parse_header, read_header
from ktconvert.layouts.sources.source import open_checkpoint
from rig import conversion
from rig.safetensors import encode

Header = dict[str, Any]


def tensor(shape: list[int], start: int, stop: int, dtype: str = "U8") -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Write two shards with an index, and a config."""
    root = tmp_path / "sharded"
    root.mkdir()
    weight_map = {}
    for number, names in enumerate((("a", "b"), ("c",)), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({n: np.full((2, 3), ord(n), np.float32) for n in names}, root / file)
        weight_map.update(dict.fromkeys(names, file))
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text('{"hidden_size": 3}')
    return root


def edit_index(root: Path, **changed: str | None) -> None:
    tree = json.loads((root / INDEX).read_text())
    tree["weight_map"].update(changed)
    tree["weight_map"] = {k: v for k, v in tree["weight_map"].items() if v is not None}
    (root / INDEX).write_text(json.dumps(tree))


def test_a_config_with_a_byte_order_mark_is_refused(sharded):
    """transformers does not read it."""
    path = sharded / "config.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    with pytest.raises(InputError, match=r"config\.json: not valid JSON \(line 1, column 1\)"):
        open_checkpoint(sharded)


def test_a_sharded_directory_is_opened(sharded):
    source = open_checkpoint(sharded)
    assert sorted(source.tensors) == ["a", "b", "c"]
    assert [s.name for s in source.shards] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert source.config == {"hidden_size": 3}
    info = source.tensors["c"]
    assert (info.dtype, info.shape, info.file, info.nbytes) == ("F32", (2, 3), source.shards[1].name, 24)
    assert source.shards[1].path.read_bytes()[info.start : info.start + 24] == np.full(6, ord("c"), "<f4").tobytes()
    np.testing.assert_array_equal(source.array("c"), np.full((2, 3), ord("c"), np.float32))
    assert source.shards[0].blob is None
    assert source.ignored == ()


def test_single_files_and_missing_indexes_are_opened(sharded):
    (sharded / INDEX).unlink()
    assert sorted(open_checkpoint(sharded).tensors) == ["a", "b", "c"]
    alone = open_checkpoint(str(sharded / "model-00001-of-00002.safetensors"))
    assert sorted(alone.tensors) == ["a", "b"]
    assert alone.companions() == ["config.json"]
    (sharded / "config.json").unlink()
    (sharded / "private.txt").write_text("not the model's")
    assert alone.companions() == []


def test_every_dtype_is_viewed_correctly(tmp_path):
    header, at = {}, 0
    for dtype, bits in DTYPE_BITS.items():
        header[dtype] = tensor([4, 2], at, at + bits, dtype)
        at += bits
    data = np.random.default_rng(1).integers(0, 2, at, dtype=np.uint8).tobytes()
    (tmp_path / "model.safetensors").write_bytes(encode(header, data))
    source = open_checkpoint(tmp_path)
    seen: dict[str, Any] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.float32}
    seen |= {"F8_E4M3": np.uint8, "I8": np.uint8, "I32": np.int32}
    for dtype, kind in seen.items():
        values = source.array(dtype)
        assert values.dtype == kind
        assert values.shape == (4, 2)
        assert not values.flags.writeable
        start = header[dtype]["data_offsets"][0]
        assert values.tobytes() == data[start : start + values.nbytes]
    with pytest.raises(UnsupportedError, match="F6_E2M3"):
        source.array("F6_E2M3")


def test_scalars_and_empty_tensors_are_read(tmp_path):
    header = {"scalar": tensor([], 0, 4, "F32"), "none": tensor([0, 3], 4, 4, "F32")}
    (tmp_path / "model.safetensors").write_bytes(encode(header, struct.pack("<f", 1.5)))
    source = open_checkpoint(tmp_path)
    assert source.array("scalar") == 1.5
    assert source.array("none").shape == (0, 3)
    source.release(source.tensors["none"])


def resident(file: Path) -> int:
    """Return how many KiB of this file are mapped into memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(int(next(x for x in lines if x.startswith("Rss:")).split()[1]) for line in lines if str(file) in line)


def test_release_gives_pages_back(tmp_path):
    size = 8 << 20
    file = tmp_path / "model.safetensors"
    file.write_bytes(encode({"a": tensor([size], 0, size), "b": tensor([size], size, 2 * size)}, b"ab" * size))
    source = open_checkpoint(tmp_path)
    assert resident(file) == 0
    source.release(source.tensors["a"])  # not mapped yet: nothing to do
    source.prefetch(source.tensors["a"])
    total = int(source.array("a").sum()) + int(source.array("b").sum())
    assert resident(file) >= 2 * size // 1024
    source.release(source.tensors["b"])
    assert abs(resident(file) - size // 1024) <= 8
    assert int(source.array("a").sum()) + int(source.array("b").sum()) == total
    source.close()
    assert resident(file) == 0


def test_a_file_truncated_after_opening_is_not_mapped(sharded):
    source = open_checkpoint(sharded)
    os.truncate(source.shards[0].path, 10)
    with pytest.raises(InputError, match="changed"):
        source.array("a")


COMPANIONS = """LICENSE chat_template.jinja generation_config.json merges.txt modeling_x.py sub/deep/vocab.txt
    tiktoken.model tokenizer.json tokenizer_config.json vocab.json"""
OTHERS = """.gitattributes .cache/x.json pytorch_model.bin pytorch_model.bin.index.json x.gguf onnx/m.onnx sub/.secret
    original/consolidated.00.pth model.safetensors.index.fp16.json sub/w.safetensors a.PT"""


def test_companions_are_listed(sharded):
    for name in (*COMPANIONS.split(), *OTHERS.split()):
        (sharded / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded / name).write_text("{}")
    (sharded / "dangling.json").symlink_to("nowhere")
    assert open_checkpoint(sharded).companions() == sorted([*COMPANIONS.split(), "config.json"])


def test_consolidated_weights_are_ignored_beside_shards(sharded):
    """Beside others they are ignored; alone they are the checkpoint, with a config of their own. Folders are not walked."""
    save(sharded / "consolidated.safetensors", "other")
    save(sharded / "original" / "model-00001-of-00002.safetensors", "a")
    for _ in range(2):
        source = open_checkpoint(sharded)
        assert source.ignored == ("consolidated.safetensors",)
        assert "other" not in source.tensors
        assert len(source.shards) == 2
        (sharded / INDEX).unlink(missing_ok=True)
    for path in (shard(sharded, 1), shard(sharded, 2), sharded / "config.json"):
        path.unlink()
    (sharded / "params.json").write_text('{"dim": 8}')
    source = open_checkpoint(sharded)
    assert list(source.tensors) == ["other"]
    assert source.config == {"dim": 8}


def shard(root: Path, number: int) -> Path:
    return root / f"model-0000{number}-of-00002.safetensors"


def save(path: Path, *names: str) -> None:
    path.parent.mkdir(exist_ok=True)
    safetensors.numpy.save_file({name: np.zeros(1) for name in names}, path)


def only(root: Path, name: str, data: bytes = b"PK") -> None:
    """Replace the checkpoint by one other file."""
    for path in root.iterdir():
        path.unlink()
    (root / name).write_bytes(data)


def special(root: Path, make: Callable[[Path], object]) -> None:
    shard(root, 1).unlink()
    make(shard(root, 1))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BILLION = "model-00001-of-999999999.safetensors"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: shard(root, 2).unlink(), r"model-00002-of-00002.*missing"),
        (lambda root: (shard(root, 2).unlink(), (root / INDEX).unlink()), r"model-00002-of-00002.*missing"),
        (
            lambda root: (save(root / "model-00001-of-00001.safetensors", "z"), (root / INDEX).unlink()),
            "several checkpoints",
        ),
        (lambda root: (only(root, "x"), save(root / BILLION, "z")), r"model-00002-of-999999999.* is missing"),
        (
            lambda root: (save(shard(root, 2), "c", "a"), (root / INDEX).unlink()),
            "tensor 'a' is in model-00001.* and in model-00002.*, and no index says which one counts; give one",
        ),
        (lambda root: several_indexes(root), f"several indexes .a.*, b.*; copy the one to convert to {INDEX}"),
        (lambda root: shard(root, 1).write_text(POINTER), "Git LFS pointer"),
        (lambda root: (root / INDEX).write_text(POINTER), "Git LFS pointer, not the index"),
        (lambda root: shard(root, 1).write_text("<!DOCTYPE html>\n<html lang=en>"), "a web page, not the weights"),
        (lambda root: only(root, "x"), r"has no \.safetensors"),
        (lambda root: special(root, os.mkfifo), "not a regular file"),
        (lambda root: special(root, os.mkdir), "not a regular file|cannot be"),
    ],
)
def test_files_that_are_no_checkpoint_are_refused(spoil, words, sharded):
    spoil(sharded)
    with pytest.raises(InputError, match=words):
        open_checkpoint(sharded)


@pytest.mark.parametrize(("name", "what"), [("m.pt", r"PyTorch \.pt"), ("pytorch_model.bin", r"PyTorch \.bin")])
def test_other_formats_are_refused(sharded, name, what):
    only(sharded, name)
    for path, words in ((sharded, what), (sharded / name, r"not a \.safetensors or \.gguf file")):
        with pytest.raises(UnsupportedError, match=words):
            open_checkpoint(path)


OUTSIDE = ("/etc/passwd", "../model", "sub/../../model", "x\0y", "a\\b")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({"a": f"{name}.safetensors"}, "outside this directory") for name in OUTSIDE),
        *(({"a": name}, "outside this directory") for name in ("", 7, ["x"])),
        ({"a": "config.json"}, "not a .safetensors file"),
        ({"d": "model-00003-of-00003.safetensors"}, "which is missing; download the missing file, or the index of the"),
    ],
)
def test_an_index_cannot_name_files_elsewhere(sharded, changed, words):
    edit_index(sharded, **changed)
    with pytest.raises(InputError) as failure:
        open_checkpoint(sharded)
    assert words in str(failure.value)
    assert str(sharded) in str(failure.value)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"d": SECOND}, f"names 1 tensor that no file holds, such as d ({SECOND})"),
        ({"a": SECOND}, f"names 1 tensor in other files than those that hold them, such as a ({SECOND})"),
        ({"b": None}, "does not name 1 tensor of its files, such as b"),
        ({"a": f"./{FIRST}", "b": f".//{FIRST}"}, None),
    ],
)
def test_headers_override_a_different_index(sharded, changed, words):
    """All existing tensors are read, with a note, since loaders also follow the headers."""
    edit_index(sharded, **changed)
    source = open_checkpoint(sharded)
    assert sorted(source.tensors) == ["a", "b", "c"]
    assert source.tensors["a"].file == FIRST
    assert list(source.notes) == [f"{INDEX} {words}"] * (words is not None)
    assert source.conflict is None


@pytest.mark.parametrize("overlay", ["model-overlay.safetensors", "a-overlay.safetensors"])
def test_the_index_decides_among_copies(sharded, overlay):
    """transformers takes the copy in the last file by name: where that is another, a note says so, and what computes
    with both readers refuses."""
    safetensors.numpy.save_file({"a": np.full((2, 3), 7, np.float32)}, sharded / overlay)
    edit_index(sharded, a=overlay)
    source = open_checkpoint(sharded)
    assert source.array("a")[0, 0] == 7
    assert source.array("b")[0, 0] == ord("b")
    chosen = f"chooses among copies of 1 tensor in several files: a is read from {overlay}, not from {FIRST}"
    assert source.notes[0] == f"{INDEX} {chosen}"
    merged: dict[str, Any] = {}
    for name in sorted(path.name for path in sharded.glob("*.safetensors")):  # as transformers merges them
        merged |= safetensors.numpy.load_file(sharded / name)
    agrees = bool(merged["a"][0, 0] == 7)
    assert agrees == overlay.startswith("model") == (len(source.notes) == 1)
    if agrees:
        source.require_one_reading()
    else:
        with pytest.raises(
            InputError, match=f"'a' is read from {overlay}, .* transformers would read its copy in {FIRST}"
        ):
            source.require_one_reading()


def several_indexes(root: Path) -> None:
    for name in ("a", "b"):
        (root / f"{name}.safetensors.index.json").write_bytes((root / INDEX).read_bytes())
    (root / INDEX).unlink()


def name_weights(root: Path, name: str) -> None:
    (root / "config.json").write_text(json.dumps({"transformers_weights": name}))


SINGLE = "model.safetensors"
# What is done to a sharded directory -> the files that are read, and the note.
SETS: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "a later save": (
        lambda root: save(root / SINGLE, "a"),
        [SINGLE],
        "model.safetensors is read, as in transformers; ",
    ),
    "a later save, and shards gone": (
        lambda root: (save(root / SINGLE, "a"), shard(root, 1).unlink(), shard(root, 2).unlink()),
        [SINGLE],
        f"model.safetensors is read, as in transformers; {INDEX} is ignored",
    ),
    "an index that names it": (
        lambda root: (save(root / SINGLE, "d"), edit_index(root, d=SINGLE)),
        [FIRST, SECOND, SINGLE],
        "",
    ),
    "a damaged index": (
        lambda root: (save(root / SINGLE, "a"), (root / INDEX).write_text("{")),
        [SINGLE],
        f"model.safetensors is read, as in transformers; {FIRST} (and 2 more) is ignored",
    ),
    "another precision": (lambda root: save(root / "model.fp16.safetensors", "a"), [FIRST, SECOND], f"{FIRST} (and 1 "),
    "a name that is no file here": (lambda root: name_weights(root, "none; these are experts"), [FIRST, SECOND], ""),
    "named by config.json": (
        lambda root: (save(root / SINGLE, "a"), name_weights(root, SECOND)),
        [SECOND],
        f"{SECOND} is read, as in transformers; {FIRST} (and 2 more) is ignored",
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_the_same_files_are_read_as_by_transformers(name, sharded):
    modeling = pytest.importorskip("transformers.modeling_utils")
    change, expected, note = SETS[name]
    change(sharded)
    source = open_checkpoint(sharded)
    assert [each.name for each in source.shards] == expected
    assert source.conflict is source.not_found is None
    assert source.notes[:1] == () if not note else source.notes[0].startswith(note)
    named = source.config.get("transformers_weights") if name == "named by config.json" else None
    theirs, _ = modeling._get_resolved_checkpoint_files(str(sharded), None, None, None, None, False, named)
    assert {Path(file).name for file in theirs} <= {*expected}


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda root: (root / INDEX).unlink(), "download it"),
        (
            lambda root: (only(root, "a.safetensors"), save(root / "a.safetensors", "a")),
            f"rename a.safetensors to {SINGLE}",
        ),
        (
            lambda root: (root / INDEX).rename(root / "a.safetensors.index.json"),
            f"copy a.safetensors.index.json to {INDEX}",
        ),
    ],
)
def test_weights_that_transformers_would_not_find_are_named(sharded, change, remedy):
    modeling = pytest.importorskip("transformers.modeling_utils")
    change(sharded)
    source = open_checkpoint(sharded)
    assert source.notes[-1].startswith(f"{INDEX} is missing, by which transformers finds the weights in ")
    with pytest.raises(
        InputError, match=f"^{re.escape(str(sharded))}: {re.escape(INDEX)} is missing, .*; {remedy}\\.$"
    ):
        source.require_found()
    with pytest.raises(OSError, match="no file named"):
        modeling._get_resolved_checkpoint_files(str(sharded), None, None, None, None, False)
    assert open_checkpoint(sharded / source.shards[0].name).not_found is None


def test_weights_that_transformers_would_not_read_are_named(sharded):
    """Without an index and without model.safetensors it takes PyTorch's files, whatever else lies there."""
    (sharded / INDEX).unlink()
    assert open_checkpoint(sharded).conflict is None
    (sharded / "pytorch_model.bin").write_bytes(b"PK")
    source = open_checkpoint(sharded)
    assert source.notes == (f"{FIRST} is read here, and transformers would read pytorch_model.bin",)
    with pytest.raises(InputError, match="give a directory that holds only one of them"):
        source.require_one_reading()


@pytest.mark.parametrize("name", [FIRST, INDEX])
def test_a_file_without_permission_is_reported_as_such(name, sharded):
    (sharded / name).chmod(0)
    anyone = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    result = conversion.ktconvert("inspect", sharded, prefix=anyone)
    assert result.returncode == 5 and "download" not in result.stderr, result.stderr
    assert f"{sharded / name}: cannot be" in result.stderr
    assert "(Permission denied); change its permissions, so that you can read it" in result.stderr


@pytest.mark.parametrize("name", ["pytorch_model-00001-TP-00{}.safetensors", "model{}-mp2.safetensors"])
def test_slices_of_tensors_are_refused(name, tmp_path):
    for rank in range(2):
        save(tmp_path / name.format(rank), "a")
    with pytest.raises(UnsupportedError, match=r"slices of tensors, one file for each GPU .*; use a release"):
        open_checkpoint(tmp_path)


DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
LONG = b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}'


# What a file says of its header, by the words with which it is refused.
LIES: dict[str, list[bytes]] = {
    "too short": [b"", b"\x08\0\0"],
    "no length of a header": [encode({}, length=1 << 63), encode({}, length=100_000_001)],
    "does not fit": [encode({}, length=1000)],
    "not valid JSON": [*map(encode, (b"", b"null", b"[]", b" {}", b"{]", "{}".encode("utf-16"), LONG))],
    "NaN is not JSON": [encode(b'{"a":NaN}')],
    "not UTF-8": [encode(b'{"\xff":1}')],
    "nested too deeply": [encode(DEEP)],
    "'a' appears twice": [encode(b'{"a":1,"a":1}')],
    "'dtype' appears twice": [encode(b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x")],
    "not valid text": [encode(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")],
    "1001 characters": [encode({"a" * 1001: tensor([1], 0, 1)}, b"x")],
    "exactly dtype, shape and data_offsets": [
        encode({"a": entry}, b"x") for entry in (1, {"dtype": "U8", "shape": [1]}, tensor([1], 0, 1) | {"more": 1})
    ],
    "unknown dtype": [encode({"a": tensor([1], 0, 1) | {"dtype": dtype}}, b"x") for dtype in ("Q3", ["U8"])],
    "shape must be": [
        encode({"a": tensor([1], 0, 1) | {"shape": shape}}, b"x")
        for shape in ([-1], [1.0], [True], [1] * 65, [1 << 63], {})
    ],
    "data_offsets must be": [encode({"a": tensor([1], 0, 1) | {"data_offsets": at}}, b"x") for at in ([-1, 0], [0])],
    "data_offsets give": [encode({"a": tensor([1], 1, 0)}, b"x"), encode({"a": tensor([1 << 62] * 60, 0, 1)}, b"x")],
    "needs 2 bytes": [encode({"a": tensor([2], 0, 1)}, b"x")],
    "needs 0 bytes and 4 bits": [encode({"a": tensor([1], 0, 1, "F4")}, b"x")],
    "overlaps": [encode({"a": tensor([2], 0, 2), "b": tensor([2], at, at + 2)}, b"xyz"[: at + 2]) for at in (0, 1)],
    "leaves a gap": [
        encode({"a": tensor([1], 0, 1), "b": tensor([1], 2, 3)}, b"xyz"),
        encode({"a": tensor([1], 1, 2)}, b"xy"),
    ],
    "truncated": [encode({"a": tensor([4], 0, 4)}, b"xyz")],
    "longer than its header states": [encode({"a": tensor([2], 0, 2)}, b"xyz"), encode({}, b"x")],
    "__metadata__": [encode({"__metadata__": about}) for about in ({"a": 1}, [])],
}


@pytest.mark.parametrize(("words", "data"), [(words, data) for words, files in LIES.items() for data in files])
def test_false_headers_are_refused(tmp_path, words, data):
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(InputError) as failure:
        read_header(file)
    message = str(failure.value)
    assert words in message
    assert str(file) in message
    assert "download" in message
    assert "\n" not in message
    assert len(message) < 1000


ABOUT = b'"__metadata__":{"format":"pt","more":"a \\"word\\""},'
PLAIN = b'{"a.weight":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},"b":{"dtype":"F4","shape":[2],"data_offsets":[6,7]}}'
PIECES = [
    b"",
    b" ",
    b",",
    b"{",
    b"}",
    b"[",
    b"]",
    b"0",
    b"-0",
    b"1.0",
    b"true",
    b"null",
    b'"',
    b"\\",
    b"\\u0061",
    b"\xff",
]
PIECES += [
    b'"dtype"',
    b'"shape":[2],',
    b'"data_offsets":[0,6]',
    b'"a.weight"',
    b'"b":{},',
    b"\n",
    b"\x01",
    b"\xc3\xa4",
    ABOUT,
]


@given(
    about=st.sampled_from([b"", ABOUT, ABOUT * 2]),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 8), st.sampled_from(PIECES)), max_size=3),
)
def test_a_header_means_the_same_however_it_is_spelled(about, changes):
    """A space after its first brace, which no program writes, changes neither the tensors nor the message."""
    raw = b"{" + about + PLAIN[1:]
    for start, count, piece in changes:
        raw = raw[:start] + piece + raw[start + count :]
    results = []
    for spelled in (raw, raw[:1] + b" " + raw[1:]):
        try:
            results.append(str(parse_header(spelled, 7, 100, "file")))
        except InputError as error:
            results.append(re.sub(r"\d+", "N", str(error)))  # positions in the text
    assert results[0] == results[1]


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES_OF_OTHER = ("config.json", "tokenizer.model", "model-00001-of-00002.safetensors", "other-Q4_K.gguf")


@pytest.fixture
def cache(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a hub cache as huggingface_hub does: blobs, a snapshot of links, a ref."""
    root = tmp_path / "hub"
    model = root / "models--org--name"
    snapshot = model / "snapshots" / COMMIT
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        blob = f"{number:064x}"
        file.rename(model / "blobs" / blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob)
    (model / "refs" / "main").write_text(COMMIT)
    for name in ("HF_HUB_OFFLINE", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    monkeypatch.setattr("socket.socket", None)  # any use of the network fails at once
    return root


def test_a_cached_snapshot_is_opened(cache):
    source = open_checkpoint("org/name")
    assert sorted(source.tensors) == ["a", "b", "c"]
    assert source.config == {"hidden_size": 3}
    assert source.shards[0].blob == f"{1:064x}"
    assert source.array("b")[0, 0] == ord("b")
    assert source.companions() == ["config.json"]
    for revision in ("main", COMMIT):
        assert open_checkpoint("org/name", revision).root == source.root


CACHES = {"a": {"HF_HUB_CACHE": "a", "HF_HOME": "b"}, "b/hub": {"HF_HOME": "b"}}
CACHES |= {"c/huggingface/hub": {"XDG_CACHE_HOME": "c"}, "d/.cache/huggingface/hub": {"HOME": "d"}}


@pytest.mark.parametrize("where", CACHES)
def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch, where):
    for name in ("HF_HUB_CACHE", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CACHES[where].items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert hub.cache_root() == tmp_path / where


def test_an_existing_path_overrides_a_hub_id(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    safetensors.numpy.save_file({"mine": np.zeros(1)}, tmp_path / "org" / "name" / "model.safetensors")
    assert list(open_checkpoint("org/name").tensors) == ["mine"]
    with pytest.raises(UsageError, match="--revision main"):
        open_checkpoint("org/name", "main")


@pytest.mark.parametrize("value", ["1", "YES"])
def test_offline_mode_uses_only_the_cache(cache, monkeypatch, value):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert open_checkpoint("org/name").root.name == COMMIT
    with pytest.raises(InputError, match=r"org/other: is not in the local cache .*hf download org/other`"):
        open_checkpoint("org/other")
    with pytest.raises(InputError, match="hf download org/name --revision v2`"):
        open_checkpoint("org/name", "v2")
    (cache / "models--org--name" / "blobs" / f"{2:064x}").unlink()
    with pytest.raises(InputError, match="org/name: is incomplete in the local cache"):
        open_checkpoint("org/name")
    snapshots = cache / "models--org--name" / "snapshots"
    (snapshots / COMMIT).rename(snapshots / "branch")  # no name of a commit, and none that a ref has
    for revision in (None, "branch"):
        with pytest.raises(InputError, match="org/name: is not in the local cache"):
            open_checkpoint("org/name", revision)


def test_invalid_hub_ids_are_refused(cache):
    for name in ("org/name/more", "/org/name", "~org/name", "org", "./org/name", "../org/name", "x\0y"):
        with pytest.raises(InputError, match="does not exist"):
            open_checkpoint(name)
    for revision in ("../../x", "/etc", ".."):
        with pytest.raises(UsageError, match="--revision"):
            open_checkpoint("org/name", revision)


FAILURES = {"ConnectionError": "hf download org/other", "GatedRepoError": "hf auth login", "ENOSPC": "is full"}
FAILURES |= {"RepositoryNotFoundError": "neither a local path nor a public model"}
FAILURES |= {"RevisionNotFoundError": "has no revision v9"}


@pytest.mark.parametrize("raised", FAILURES)
def test_failed_downloads_are_explained(cache, monkeypatch, raised):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def fail(*args: object, **more: object) -> str:
        raise OSError(28, "full") if raised == "ENOSPC" else type(raised, (Exception,), {})("long\nstory")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ResourceError if raised == "ENOSPC" else InputError) as failure:
        open_checkpoint("org/other", "v9")
    assert FAILURES[raised] in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(("companions_only", "weights"), [(False, True), (True, False)])
def test_only_needed_files_are_downloaded(cache, monkeypatch, companions_only, weights):
    """Companions always, weights where they are needed, GGUF files never: a repository may hold a terabyte of them."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    downloaded: list[str] = []

    def download(name: str, *, allow_patterns: list[str], **more: object) -> str:
        downloaded.extend(file for file in FILES_OF_OTHER if any(fnmatch(file, p) for p in allow_patterns))
        return str(cache / "models--org--name" / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.resolve("org/other", companions_only=companions_only)
    assert downloaded == ["config.json", "tokenizer.model", *(["model-00001-of-00002.safetensors"] if weights else [])]


def test_downloading_without_huggingface_hub(cache, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == hub.PACKAGE else True)
    with pytest.raises(MissingPackageError, match=re.escape(install_command("hub"))):
        open_checkpoint("org/other")
