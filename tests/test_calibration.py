"""Calibration data: the rows and token ids that kt-kernel takes, in the order of llmcompressor, from local files."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.errors import InputError
from ktconvert.pipeline.models.text_datasets import Ids, local_files, read_samples, read_samples_by_length
from ktconvert.pipeline.options.option_groups import Samples
from rig import conversion
from rig.hub_server import serve_hub

pytest.importorskip("datasets", reason="needs the extra gpu")
pytest.importorskip("transformers", reason="needs the extra gpu")

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples" / "heldout.txt"
WORDS = TEXT.read_text().split()
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('no role') }}{% endif %}"
    "{% if m['role'] != 'silent' %}<{{ m['role'] }}>{{ m['content'] }}</>{% endif %}{% endfor %}"
)
MESSAGES = [
    [{"role": "user", "content": " ".join(WORDS[i : i + 5])}, {"role": "assistant", "content": " ".join(WORDS[:i])}]
    for i in range(40)
]


@functools.cache
def tokenizer(template: str | None = None) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples" / "qwen3-moe-small", chat_template=template)


def samples_of(
    dataset: object, split: str = "train_sft", count: int = 512, length: int = 64, seed: int = 42
) -> Samples:
    return Samples(
        dataset=str(dataset),
        dataset_split=split,
        num_calibration_samples=count,
        sequence_length=length,
        seed=seed,
    )


def decode_texts(samples_ids: list[Ids]) -> list[str]:
    return [tokenizer().decode(ids) for ids in samples_ids]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


def are_equal(left: list[Ids], right: list[Ids]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def test_samples_are_those_of_kt_kernel(tmp_path: Path) -> None:
    import datasets

    file = write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages} for messages in MESSAGES])
    chat = tokenizer(TEMPLATE)
    expected = (
        datasets.load_dataset("json", data_files=str(file), split="train[:30]", cache_dir=str(tmp_path / "cache"))
        .shuffle(seed=7)
        .map(lambda row: {"text": chat.apply_chat_template(row["messages"], tokenize=False)})
        .map(lambda row: chat(row["text"], padding=False, max_length=64, truncation=True, add_special_tokens=False))
    )
    read = read_samples(samples_of(file, count=30, seed=7), chat)
    assert [ids.tolist() for ids in read] == expected["input_ids"]
    assert {ids.dtype for ids in read} == {np.dtype(np.int64)}
    assert max(ids.size for ids in read) == 64 and len({ids.size for ids in read}) > 5
    assert not are_equal(read, read_samples(samples_of(file, count=30, seed=8), chat))


def test_samples_have_the_order_of_llmcompressor(tmp_path: Path) -> None:
    """Hundreds of samples have few lengths. The sampler's sort is not stable, so that the order of ties shows."""
    pytest.importorskip("llmcompressor", reason="needs the extra gpu")
    import datasets
    from llmcompressor.datasets.utils import LengthAwareSampler

    rows = [{"text": " ".join(WORDS[i : i + 1 + i * 7 % 23])} for i in range(400)]
    samples = samples_of(write_jsonl(tmp_path / "rows.jsonl", rows), length=24)
    unsorted = read_samples(samples, tokenizer())
    visited = list(LengthAwareSampler(datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in unsorted]})))
    assert are_equal(read_samples_by_length(samples, tokenizer()), [unsorted[index] for index in visited])
    stable = sorted(range(len(unsorted)), key=lambda index: -unsorted[index].size)
    assert visited != stable, "without ties this test proves nothing"


def test_text_is_cut_into_full_samples() -> None:
    all_ids = tokenizer()(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    samples = read_samples_by_length(samples_of(TEXT, length=100), tokenizer())
    chunks = sorted(all_ids[start : start + 100] for start in range(0, len(all_ids), 100))
    assert sorted(ids.tolist() for ids in samples) == chunks
    assert [ids.size for ids in samples] == [100] * (len(all_ids) // 100) + [len(all_ids) % 100]
    first = read_samples_by_length(samples_of(TEXT, length=100, count=8), tokenizer())
    assert sorted(ids.tolist() for ids in first) == sorted(all_ids[start : start + 100] for start in range(0, 800, 100))
    assert [ids.tolist() for ids in first] != [all_ids[start : start + 100] for start in range(0, 800, 100)]


def test_long_text_is_read_as_far_as_needed(tmp_path: Path) -> None:
    """The end of the text is not UTF-8, but is never read; every sample is full."""
    file = tmp_path / "long.txt"
    file.write_bytes(TEXT.read_bytes() * 1100 + b"\xff")
    assert file.stat().st_size > 15 << 20
    samples = read_samples(samples_of(file, count=24, length=16384), tokenizer())
    assert [ids.size for ids in samples] == [16384] * 24
    chunks = decode_texts(samples)
    assert sum(map(len, chunks)) > 1 << 20, "the text was read in one piece"
    assert all(chunk in TEXT.read_text() * 6 for chunk in chunks)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": MESSAGES[3], "text": "no"}, "".join(m["content"] + "\n" for m in MESSAGES[3])),
        ({"text": "def f():\n    return 1", "instruction": "no"}, "def f():\n    return 1"),
        ({"id": "1", "source": "s", "model": "m", "system_prompt": "p", "text": "an agent's log"}, "an agent's log"),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add.\n3"),
        ({"instruction": "Add.", "input": "1 2", "output": "3", "id": 9}, "Add.\n1 2\n3"),
    ],
    ids=["messages", "text", "columns of a format of datasets", "instruction", "instruction with input"],
)
def test_columns_are_chosen_by_preference(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    lines = write_jsonl(tmp_path / "rows.jsonl", [row])
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([row]))
    table = write_parquet(tmp_path / "rows.parquet", {name: [value] for name, value in row.items()})
    for file in (lines, array, table):
        assert decode_texts(read_samples_by_length(samples_of(file, length=2048), tokenizer())) == [expected]


def test_empty_samples_are_left_out_and_reported(tmp_path: Path) -> None:
    notes: list[str] = []
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("one", "", None, "two")])
    assert sorted(decode_texts(read_samples_by_length(samples_of(file), tokenizer(), notes.append))) == ["one", "two"]
    assert notes == [f"{file}: 2 of 4 samples have no tokens and are skipped"]


def test_files_of_a_folder_are_read_in_order_of_name(tmp_path: Path) -> None:
    folder = tmp_path / "a [folder]*"
    for number in (2, 0, 1):
        write_parquet(folder / f"part{number}.parquet", {"text": [f"{number} {row}" for row in range(10)]})
    (folder / "README.md").write_text("what this is")
    (folder / ".gitattributes").write_text("")
    assert [file.name for file in local_files(str(folder))] == ["part0.parquet", "part1.parquet", "part2.parquet"]
    read = decode_texts(read_samples(samples_of(folder, count=25), tokenizer()))
    assert sorted(read) == sorted(f"{row // 10} {row % 10}" for row in range(25))
    assert decode_texts(read_samples_by_length(samples_of(f"{folder}/", count=3), tokenizer())) != []
    (tmp_path / "texts").mkdir()
    for name in ("b.txt", "a.txt"):  # no sample has text of two files
        (tmp_path / "texts" / name).write_text(f"{name} " * 30)
    chunks = decode_texts(read_samples(samples_of(tmp_path / "texts", length=50), tokenizer()))
    assert all(("a.txt" in text) != ("b.txt" in text) for text in chunks) and len(chunks) > 2


def test_split_chooses_among_files_named_after_splits(tmp_path: Path) -> None:
    for name in ("train_sft-00000-of-00002", "train_sft-00001-of-00002-0abc", "test_sft-00000-of-00001"):
        write_parquet(tmp_path / f"{name}.parquet", {"text": [name]})
    assert {text[:9] for text in decode_texts(read_samples(samples_of(tmp_path), tokenizer()))} == {"train_sft"}
    assert decode_texts(read_samples(samples_of(tmp_path, "test_sft"), tokenizer())) == ["test_sft-00000-of-00001"]
    with pytest.raises(InputError, match="has no split train; choose test_sft or train_sft with --dataset-split"):
        read_samples(samples_of(tmp_path, "train"), tokenizer())


def test_settings_of_the_tokenizer_do_not_change() -> None:
    backend = tokenizer().backend_tokenizer
    backend.enable_truncation(max_length=5)
    before = backend.truncation
    read_samples(samples_of(TEXT, count=2), tokenizer())
    assert backend.truncation == before
    backend.no_truncation()
    read_samples(samples_of(TEXT, count=2), tokenizer())
    assert backend.truncation is None


def write_damaged_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Write damaged files; return the path and the expected message of each kind of damage."""
    good = write_parquet(folder / "good.parquet", {"text": ["a"] * 20}).read_bytes()
    contents = {
        "bad line": ("bad.jsonl", b'{"text": "a"}\n{"text": b}\n', "line 2: Expecting value"),
        "cut off": ("cut.jsonl", b'{"text": "a"}\n{"text": "b', "line 2: Unterminated string"),
        "no objects": ("numbers.jsonl", b"1\n2\n", "line 1: not a JSON object"),
        "null": ("null.jsonl", b'null\n{"text": "a"}\n', "line 1: not a JSON object"),
        "null in an array": ("null.json", b'[null,\n{"text": "a"}]', "not a JSON object"),
        "deep": ("deep.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 70 + b"]" * 70 + b"}", "line 2: nested too deeply"),
        "far too deep": ("deeper.jsonl", b'{"text": ' + b"[" * 100000 + b"]" * 100000 + b"}", "line 1: nested too deeply"),
        "deep in an array": ("deep.json", b'[\n{"a": ' + b'{"a":' * 100000 + b"1" + b"}" * 100001 + b"]", "too deeply"),
        "half a character": ("half.jsonl", b'{"text": "\\ud800"}\n', "line 1: .*surrogates not allowed"),
        "no JSON": ("bad.json", b'[{"text": "a"}, {', "cannot be read as json"),
        "parquet cut off": ("cut.parquet", good[:-9], "cannot be read as parquet .*; repair it"),
        "Latin-1": ("latin.txt", "café\n".encode("latin-1"), "'utf-8' codec can't decode"),
        "other columns": ("columns.jsonl", b'{"prompt": "a", "answer": "b"}\n', "none of the columns .* but prompt, answer;"),
        "a number": ("number.jsonl", b'{"text": "a"}\n{"text": 3}\n', "row 2: column text contains int, not text"),
        "messages of text": ("messages.jsonl", b'{"messages": "hello"}\n', "row 1: column messages is not a list of messages"),
        "messages without a role": ("roles.jsonl", b'{"messages": [{"from": "human", "value": "a"}]}\n', "row 1: .* a message with from, value; use messages with role"),
        "messages without content": ("contents.jsonl", b'{"messages": [{"role": "user"}]}\n', "row 1: .* a message with role; use messages with role and"),
        "messages of numbers": ("fives.jsonl", b'{"messages": [{"role": "user", "content": 5}]}\n', "row 1: .* content that is no text"),
        "messages of images": ("images.jsonl", b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', "row 1: .* content that is no text"),
        "messages of unknown roles": ("usr.jsonl", b'{"messages": [{"role": "silent", "content": "a"}]}\n', r"row 1: the chat template drops all messages .roles: silent.; use"),
        "messages for the template": ("raise.jsonl", b'{"messages": [{"role": "nobody", "content": "a"}]}\n', "row 1: the chat template rejects .*no role"),
        "nothing": ("empty.jsonl", b"", "has no tokens"),
        "spaces": ("empty.txt", b"", "has no tokens"),
        "unknown kind": ("table.csv", b"text\na\n", "table.csv: unsupported kind of file"),
    }  # fmt: skip
    for name, content, _ in contents.values():
        (folder / name).write_bytes(content)
    return {kind: (folder / name, message) for kind, (name, _, message) in contents.items()}


def test_damaged_files_are_reported_in_one_sentence(tmp_path: Path) -> None:
    for kind, (file, message) in write_damaged_files(tmp_path).items():
        with pytest.raises(InputError, match=message) as caught:
            read_samples(samples_of(file), tokenizer(TEMPLATE))
        assert str(file) in str(caught.value) and "\n" not in str(caught.value), kind


def test_paths_without_usable_data_are_refused(tmp_path: Path) -> None:
    for dataset, files, message in (
        ("mixed", ("a.jsonl", "b.txt"), "mixes json and text files"),
        ("unknown", ("a.jsonl", "b.csv"), "b.csv: unsupported kind of file"),
        ("empty", ("README.md",), "has no data"),
        ("none", (), "does not exist"),
    ):
        for name in files:
            write_jsonl(tmp_path / dataset / name, [{"text": "a"}])
        with pytest.raises(InputError, match=message):
            local_files(str(tmp_path / dataset))
    with pytest.raises(InputError, match="does not exist"):
        local_files("data/none.jsonl")
    assert local_files("HuggingFaceH4/ultrachat_200k") == []  # the name of a repository


def write_hub_cache(home: Path, name: str) -> None:
    """Write the files that `hf download --repo-type dataset` creates: snapshots/, and refs/main with its name."""
    root = home / "hub" / f"datasets--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)
    for split in ("train_sft", "test_sft"):
        for shard in range(2):
            file = root / "snapshots" / ("a" * 40) / "data" / f"{split}-0000{shard}-of-00002.parquet"
            write_parquet(
                file, {"messages": [[{"role": "user", "content": f"{split} {shard} {row}"}] for row in range(10)]}
            )


OFFLINE = """
import json, sys
from transformers import AutoTokenizer
from ktconvert.layouts.errors import KTConvertError
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.models.text_datasets import read_samples_by_length

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
batches = []
for dataset, split in json.loads(sys.argv[2]):
    try:
        samples = Samples(dataset=dataset, dataset_split=split, num_calibration_samples=12, sequence_length=64)
        batches.append([ids.tolist() for ids in read_samples_by_length(samples, tokenizer)])
    except KTConvertError as error:
        batches.append(f"{type(error).__name__} {error}")
print(json.dumps(batches))
"""


def test_offline_runs_read_local_files_and_downloads(tmp_path: Path) -> None:
    """A downloaded snapshot is read, errors name a remedy, and reading local files leaves no files behind."""
    home = tmp_path / "home"
    write_hub_cache(home / "hf", "org/chat")
    before = {path for path in home.rglob("*") if path.is_file()}
    splits = [(str(TEXT), "train"), ("org/chat", "train_sft"), ("org/chat", "other"), ("org/none", "train_sft")]
    command = [sys.executable, "-c", OFFLINE, str(ROOT / "examples" / "qwen3-moe-small"), json.dumps(splits)]
    env = {"HF_HUB_OFFLINE": "1", "HOME": str(home), "HF_HOME": str(home / "hf"), "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    assert result.returncode == 0 and result.stderr == "", result.stderr
    local, rows, split, missing = json.loads(result.stdout)
    assert local == [ids.tolist() for ids in read_samples_by_length(samples_of(TEXT, count=12), tokenizer())]
    expected = {f"train_sft {row // 10} {row % 10}\n" for row in range(12)}
    assert {tokenizer().decode(ids) for ids in rows} == expected and len(rows) == 12
    assert split.startswith("InputError org/chat: Bad split: other.") and "train_sft" in split
    problem = "is not in the local cache, and HF_HUB_OFFLINE is set; "
    assert missing.startswith(f"UnreachableError org/none: {problem}")
    for remedy in ("set --dataset to a file", "hf download --repo-type dataset org/none"):
        assert remedy in missing
    leftovers = {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"} - before
    assert not leftovers, leftovers


@pytest.mark.parametrize(
    ("words", "offline", "problem", "alternative"),
    [
        ("cpu --scale gptq", "1", "is not in the local cache, and HF_HUB_OFFLINE is set; set --dataset", "--scale mse"),
        (
            "gpu --quant-method GPTQ",
            "0",
            "neither a local path nor a public data set of the hub; correct the name",
            "--quant-method RTN",
        ),
    ],
)
def test_a_data_set_that_cannot_be_loaded_has_a_remedy_of_the_command(
    words: str, offline: str, problem: str, alternative: str, tmp_path: Path
) -> None:
    pytest.importorskip("llmcompressor")
    command, *options = words.split()
    with serve_hub({}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "hf")}
        paths = ROOT / "examples" / "qwen3-moe-small", tmp_path / "out"
        done = conversion.ktconvert(command, *paths, "--dataset", "org/none", *options, env=env)
    conversion.check_refusal(done, 5, f"org/none: {problem}", f", or use {alternative}.")
    assert "EntryNotFound" not in done.stderr
