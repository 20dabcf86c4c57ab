"""`ktconvert merge`: correct output where kt-kernel's merge_cpu_weights.py fails, and refusals of damaged folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rig.safetensors import Tensors, read_folder


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path) -> Path:
    """Convert to a loose folder with only layer folders, as kt-kernel writes it."""
    folder = tmp_path_factory.mktemp("loose") / "out"
    cli("cpu", "-i", example, "-o", folder, "--no-merge-safetensor")
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path) -> Tensors:
    """Return the tensors of a direct conversion to safetensors."""
    folder = tmp_path_factory.mktemp("direct") / "out"
    cli("cpu", "-i", example, "-o", folder)
    return read_folder(folder)


@pytest.mark.parametrize("max_tensors", [1, 191, 3000])
def test_shards_of_any_size_hold_each_tensor_once(max_tensors, tmp_path, cli, loose, expected):
    """kt-kernel's script writes a different dtype if the folder's name contains "scale"."""
    cli(
        "merge",
        "-i",
        shutil.copytree(loose, tmp_path / "my_scale_dir"),
        "-o",
        tmp_path / "out",
        "--max-tensors",
        max_tensors,
    )
    assert read_folder(tmp_path / "out") == expected
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(shards) == -(-192 // max_tensors)
    assert shards[-1].name == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in expected.values())
    assert index["weight_map"].keys() == expected.keys()


def test_config_and_tokenizer_come_from_the_original(tmp_path, cli, loose, example):
    cli("merge", "-i", loose, "-o", tmp_path / "out", "-r", example)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (example / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["method"], config["num_numa_nodes"]) == ("AMXINT4", 2)


def other_method(file: Path) -> None:
    """Copy a file under the name of a different method."""
    shutil.copy(file, file.with_name(file.name.replace("INT4", "INT8")))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "expert 5, up_proj, NUMA slice 1"),
    "truncated": (lambda file: file.write_bytes(b"x"), "INT4_up_5_"),
    "two methods": (other_method, "INT4 and INT8 files"),
    "a missing slice": (lambda file: shutil.rmtree(file.parent), "NUMA slice 1"),
    "a leading zero": (lambda file: file.rename(file.with_name(file.name.replace("_5_", "_05_"))), "_05_"),
    "in a wrong folder": (lambda file: file.rename(file.parents[1] / file.name), "INT4_up_5_"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_missing_and_damaged_files_are_named(damage, tmp_path, cli, loose):
    copy, (apply_damage, message) = Path(shutil.copytree(loose, tmp_path / "in")), DAMAGE[damage]
    apply_damage(next((copy / "_layer_1" / "_numa_1").glob("INT4_up_5_*_quant_.kt")))
    assert message in cli("merge", "-i", copy, "-o", tmp_path / "out", code=5).stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def four_layers(
    tmp_path_factory: pytest.TempPathFactory, cli: Any, write_qwen: Any, random_experts: Any
) -> tuple[Path, Path]:
    """Return a model of four layers with experts after a dense layer, and its loose folder with a manifest."""
    base = tmp_path_factory.mktemp("four")
    source = write_qwen(base / "in", {n: random_experts(2, 128, 128, seed=n) for n in range(1, 5)})
    cli("cpu", "-i", source, "-o", base / "loose", "--no-merge-safetensor", "--threadpool-count", 1)
    return source, base / "loose"


def copy_loose(folder: Path, where: Path, manifest: bool = False) -> Path:
    """Copy a loose folder; by default without a manifest, as kt-kernel writes it."""

    def ignore_files(parent: str, names: list[str]) -> list[str]:
        return [] if manifest else [n for n in names if Path(parent, n).is_file() and not n.endswith(".kt")]

    return Path(shutil.copytree(folder, where, ignore=ignore_files))


@pytest.mark.parametrize(
    ("removed", "manifest", "original"),
    [(1, True, False), (4, True, False), (1, False, True), (4, False, True), (2, False, False)],
)
def test_a_missing_layer_is_named(removed, manifest, original, tmp_path, cli, four_layers):
    """The layer is known from the manifest, from the original's config, or from its two neighbours."""
    source, complete = four_layers
    loose = copy_loose(complete, tmp_path / "loose", manifest)
    shutil.rmtree(loose / f"_layer_{removed}")
    result = cli("merge", "-i", loose, "-o", tmp_path / "out", *(["-r", source] if original else []), code=5)
    assert f"layer {removed} is missing" in result.stderr and "--layers" in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("manifest", [True, False], ids=["ours", "kt-kernel's"])
def test_layers_option_excludes_missing_layers(manifest, tmp_path, cli, four_layers):
    source, complete = four_layers
    loose = copy_loose(complete, tmp_path / "loose", manifest)
    shutil.rmtree(loose / "_layer_2")
    arguments = ["merge", "-i", loose, "-o", tmp_path / "out", "-r", source]
    assert "layer 2 has no experts; layers with experts" in cli(*arguments, "--layers", "1-2", code=3).stderr
    cli(*arguments, "--layers", "1,3")
    assert {int(name.split(".")[1]) for name in read_folder(tmp_path / "out")} == {1, 3}
    cli("verify", tmp_path / "out", "--against", source)


def test_layers_excluded_from_the_conversion_may_be_missing(tmp_path, cli, four_layers):
    source, _ = four_layers
    options = ["--no-merge-safetensor", "--threadpool-count", 1, "--layers", "1,3"]
    cli("cpu", "-i", source, "-o", tmp_path / "loose", *options)
    cli("merge", "-i", tmp_path / "loose", "-o", tmp_path / "out", "-r", source)
    cli("verify", tmp_path / "out")


@pytest.mark.parametrize("manifest", [True, False], ids=["ours", "kt-kernel's"])
def test_the_original_of_another_model_is_refused(manifest, tmp_path, cli, write_qwen, random_experts, four_layers):
    source = write_qwen(tmp_path / "in", {n: random_experts(2, 128, 128, seed=n) for n in range(4)})
    cli("cpu", "-i", source, "-o", tmp_path / "loose", "--no-merge-safetensor", "--threadpool-count", 1)
    loose = tmp_path / "loose" if manifest else copy_loose(tmp_path / "loose", tmp_path / "bare")
    original = tmp_path / "original"
    original.mkdir()
    config = json.loads((source / "config.json").read_text())
    for change, sentence in (
        ({"first_k_dense_replace": 1}, "layer 0 is dense according to first_k_dense_replace in config.json"),
        ({"mlp_only_layers": [0, 2]}, "layer 0 is dense according to mlp_only_layers in config.json"),
        ({"decoder_sparse_step": 2}, "layer 0 is dense according to decoder_sparse_step in config.json"),
        ({"num_hidden_layers": 3}, "config.json has num_hidden_layers = 3, but layer 3 has experts"),
        ({"num_experts": 4}, "config.json has num_experts = 4, but layer 0 has experts 2"),
        ({"hidden_size": 256}, "config.json has hidden_size = 256, but layer 0 has hidden size 128"),
        (
            {"moe_intermediate_size": 256},
            "config.json has moe_intermediate_size = 256, but layer 0 has expert width 128",
        ),
    ):
        (original / "config.json").write_text(json.dumps(config | change))
        result = cli("merge", "-i", loose, "-o", tmp_path / "out", "-r", original, code=5)
        assert sentence in result.stderr
    (original / "config.json").write_text(json.dumps(config))
    cli("merge", "-i", loose, "-o", tmp_path / "out", "-r", original)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"first_k_dense_replace": 1}))
    assert "layer 0 is dense" in cli("verify", tmp_path / "out", code=6).stdout


@pytest.mark.parametrize("odd", ["_layer_01", "_layer_1/_numa_00", "_layer_x"])
def test_folders_that_kt_kernel_does_not_read_are_refused(odd, tmp_path, cli, loose):
    copy = Path(shutil.copytree(loose, tmp_path / "in"))
    origin = copy / "_layer_1" / "_numa_0" if "numa" in odd else copy / "_layer_1"
    shutil.copytree(origin, copy / odd)
    result = cli("merge", "-i", copy, "-o", tmp_path / "out", code=5)
    assert f"{odd}: kt-kernel does not read this name" in result.stderr
    assert Path(odd).name in cli("verify", copy, code=6).stdout


@pytest.mark.parametrize("quantity", ["widths", "experts"])
def test_different_layers_are_merged_if_a_config_confirms_them(
    quantity, tmp_path, cli, write_qwen, random_experts, write_safetensors
):
    """`cpu` puts them into safetensors, and kt-kernel loads each layer separately."""
    sizes = [(2, 128), (2, 256)] if quantity == "widths" else [(2, 128), (3, 128)]
    layers = {n: random_experts(e, 128, w, seed=n) for n, (e, w) in enumerate(sizes)}
    source = tmp_path / "in"
    config = {"moe_intermediate_size": [w for _, w in sizes], "num_experts": [e for e, _ in sizes]}
    bits = {}
    for layer, stacked in layers.items():
        for projection, array in stacked.items():
            for expert, one in enumerate(array):
                bits[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"] = ("BF16", one)
    write_qwen(source, {n: random_experts(2, 128, 128) for n in range(2)}, **config)
    write_safetensors(source / "model.safetensors", bits)
    options = ["--threadpool-count", 1]
    cli("cpu", "-i", source, "-o", tmp_path / "direct", *options)
    cli("cpu", "-i", source, "-o", tmp_path / "loose", "--no-merge-safetensor", *options)
    bare = copy_loose(tmp_path / "loose", tmp_path / "bare")
    expected = read_folder(tmp_path / "direct")
    for at, (folder, original) in enumerate(
        ((tmp_path / "loose", []), (tmp_path / "loose", ["-r", source]), (bare, ["-r", source]))
    ):
        out = tmp_path / f"out-{at}"
        cli("merge", "-i", folder, "-o", out, *original)
        assert read_folder(out) == expected
        cli("verify", out, "--against", source)
    result = cli("merge", "-i", bare, "-o", tmp_path / "out", code=5)
    assert "layers differ in experts x hidden size x expert width" in result.stderr
    assert "neither manifest.json nor --original-path" in result.stderr
