"""`ktconvert merge`: what kt-kernel's merge_cpu_weights.py gets wrong comes out right, and what is damaged is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rig.safetensors import bits_of, read_folder


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path) -> Path:
    """A loose folder as kt-kernel leaves it: layer folders and nothing else."""
    folder = tmp_path_factory.mktemp("loose") / "out"
    cli("cpu", "-i", example, "-o", folder, "--no-merge-safetensor")
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    return folder


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path) -> dict[str, Any]:
    """The tensors that converting to safetensors directly gives."""
    folder = tmp_path_factory.mktemp("direct") / "out"
    cli("cpu", "-i", example, "-o", folder)
    return tensors(folder)


def tensors(folder: Path) -> dict[str, Any]:
    """All tensors of all shards."""
    return bits_of(read_folder(folder))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == v.dtype and ours[k].shape == v.shape and ours[k].tobytes() == v.tobytes()
        for k, v in theirs.items()
    )


@pytest.mark.parametrize("most", [1, 96, 191, 192, 3000])
def test_any_shard_size_holds_every_tensor_once(most: int, tmp_path: Path, cli: Any, loose: Path, wanted: Any) -> None:
    cli("merge", "-i", loose, "-o", tmp_path / "out", "--max-tensors", most)
    assert same(tensors(tmp_path / "out"), wanted)
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(shards) == -(-192 // most)
    assert shards[-1].name == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())
    assert index["weight_map"].keys() == wanted.keys()


def test_a_folder_called_scale_changes_no_dtype(tmp_path: Path, cli: Any, loose: Path, wanted: Any) -> None:
    shutil.copytree(loose, tmp_path / "my_scale_dir")
    cli("merge", "-i", tmp_path / "my_scale_dir", "-o", tmp_path / "out")
    assert same(tensors(tmp_path / "out"), wanted)


def test_config_and_tokenizer_come_from_the_original(tmp_path: Path, cli: Any, loose: Path, example: Path) -> None:
    cli("merge", "-i", loose, "-o", tmp_path / "out", "-r", example)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (example / "tokenizer.json").read_bytes()
    told = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (told["method"], told["num_numa_nodes"]) == ("AMXINT4", 2)


@pytest.mark.parametrize("prefix", ["MOE_INT4", "MOE_INT8"])
def test_moe_kernel_files_are_carried_unchanged(prefix: str, tmp_path: Path, cli: Any) -> None:
    rng = np.random.default_rng(2)
    expected = {}
    for node in range(2):
        folder = tmp_path / "in" / "_layer_3" / f"_numa_{node}"
        folder.mkdir(parents=True)
        for expert in range(2):
            for projection in ("gate", "up", "down"):
                weight, scale = rng.bytes(1000 + expert), rng.bytes(64)
                for what, data in (("quant", weight), ("scale", scale)):
                    (folder / f"{prefix}_{projection}_{expert}_{len(data)}Byte_{what}_.kt").write_bytes(data)
                key = f"blk.3.ffn_{projection}_exps.{expert}.numa.{node}"
                expected |= {
                    f"{key}.weight": np.frombuffer(weight, np.int8),
                    f"{key}.scale": np.frombuffer(scale, np.float32),
                }
    cli("merge", "-i", tmp_path / "in", "-o", tmp_path / "out")
    assert same(tensors(tmp_path / "out"), expected)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path, cli: Any, loose: Path) -> None:
    victim = next((loose / "_layer_1" / "_numa_1").glob("INT4_up_5_*_quant_.kt")).relative_to(loose)

    def spoiled(name: str) -> Path:
        shutil.copytree(loose, tmp_path / name)
        return tmp_path / name

    gone = spoiled("gone")
    (gone / victim).unlink()
    assert "expert 5, up_proj, NUMA node 1" in cli("merge", "-i", gone, "-o", tmp_path / "o", code=5).stderr
    short = spoiled("short")
    (short / victim).write_bytes(b"x")
    assert victim.name in cli("merge", "-i", short, "-o", tmp_path / "o", code=5).stderr
    mixed = spoiled("mixed")
    other = mixed / victim.parent / victim.name.replace("INT4", "INT8")
    other.write_bytes((mixed / victim).read_bytes())
    assert cli("merge", "-i", mixed, "-o", tmp_path / "o", code=5).stderr
    fewer = spoiled("fewer")
    shutil.rmtree(fewer / "_layer_1" / "_numa_1")
    assert cli("merge", "-i", fewer, "-o", tmp_path / "o", code=5).stderr
    assert not (tmp_path / "o").exists()
