"""Loading by the runtime: checks with a message for each fault, and equal results for each form of output."""

import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.errors import ArgumentError, InputError, UnsupportedError
from ktconvert.native_quant.runtime.converted_experts import open_converted
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.weights import run_parallel
from rig.files import rewrite
from rig.safetensors import edit_header

Outputs = dict[tuple[str, str], Path]


@pytest.fixture(scope="module")
def outputs(packed_example: Any) -> Outputs:
    """Convert the bundled model in two NUMA slices: merged and loose, INT4 and INT8."""
    forms = {"merged": (), "loose": ("--no-merge-safetensor",)}
    return {(m, form): packed_example(m, 2, *more) for m in ("int4", "int8") for form, more in forms.items()}


@pytest.fixture
def damaged(outputs: Outputs, tmp_path: Path) -> Path:
    """Return a merged INT4 output to damage, without a manifest, as kt-kernel writes it."""
    shutil.copytree(outputs["int4", "merged"], tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    return tmp_path / "out"


@pytest.fixture(scope="module")
def call() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((5, 256)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(5)]).astype(np.int64)
    return x, ids, rng.random((5, 2)).astype(np.float32)


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_every_form_and_memory_mode_gives_the_same_results(method, outputs, call):
    results = [
        KTExperts.load(outputs[method, form], 1, memory=memory).forward(*call)
        for form in ("merged", "loose")
        for memory in ("auto", "map", "copy")
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_loaded_experts_have_their_properties(outputs):
    assert open_converted(outputs["int4", "merged"]).layers == open_converted(outputs["int8", "loose"]).layers == [0, 1]
    sizes = {"num_experts": 8, "hidden": 256, "intermediate": 256}
    with KTExperts.load(outputs["int8", "loose"], 0, method="AMXINT8", **sizes) as experts:
        assert (experts.method, experts.layer, experts.num_experts, experts.parts) == ("AMXINT8", 0, 8, 2)
        assert (experts.hidden, experts.intermediate) == (256, 256)
        assert experts.nbytes == 8 * 3 * 256 * 256 + 8 * 4 * (256 + 256 + 2 * 256)


def test_a_saved_layer_equals_the_loose_layer(outputs, tmp_path, read_tree):
    experts = KTExperts.load(outputs["int4", "merged"], 1)
    experts._save(tmp_path)
    experts._save(tmp_path)  # again: takes the old one's place
    assert read_tree(tmp_path / "_layer_1") == read_tree(outputs["int4", "loose"] / "_layer_1")
    assert [path.name for path in tmp_path.iterdir()] == ["_layer_1"]


def test_a_different_number_of_slices_is_reported_once(outputs, damaged):
    with pytest.warns(UserWarning, match="made for 2 NUMA slices, run with 1") as given:
        KTExperts.load(damaged, 0, parts=1)
    assert [warning.filename for warning in given] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KTExperts.load(damaged, 1, parts=1)
        KTExperts.load(damaged, 1, parts=2)
    with pytest.raises(UnsupportedError, match="resplit --numa 1`"):
        KTExperts.load(damaged, 0, parts=1, strict=True)
    with pytest.raises(UnsupportedError, match=r"made for 2 NUMA slices, run with 3: .*across nodes\.$"):  # 256 / 3
        KTExperts.load(damaged, 0, parts=3, strict=True)


WRONG = [
    ({"method": "AMXINT8"}, UnsupportedError, "method AMXINT4 according to its byte counts, not AMXINT8"),
    ({"num_experts": 16}, InputError, r"num_experts 8, not 16 \(from its byte counts\)"),
    ({"hidden": 512}, InputError, r"hidden_size 256, not 512 \(from its byte counts\)"),
    ({"intermediate": 128}, InputError, r"moe_intermediate_size 256, not 128 \(from its byte counts\)"),
    ({"layer": 7}, UnsupportedError, "has no layer 7, but layers 0-1"),
]


@pytest.mark.parametrize(("wrong", "error", "sentence"), WRONG)
def test_experts_of_a_different_model_are_rejected(wrong, error, sentence, outputs):
    with pytest.raises(error, match=sentence):
        KTExperts.load(outputs["int4", "merged"], **{"layer": 0, **wrong})


def shard_of(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def shorten(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def lose_an_expert(out: Path) -> None:
    key = "blk.0.ffn_up_exps.3.numa.1.weight"
    edit_header(shard_of(out), lambda header: header.update({"elsewhere": header.pop(key)}))


def leave_a_gap(out: Path) -> None:
    def shrink(header: dict[str, Any]) -> None:
        entry = header["blk.0.ffn_down_exps.2.numa.0.weight"]
        entry["data_offsets"][1] -= 64
        entry["shape"] = [entry["shape"][0] - 64]

    edit_header(shard_of(out), shrink)


def shorten_a_file_and_its_name(out: Path) -> None:
    folder = out / "_layer_0" / "_numa_0"
    (folder / "INT8_down_2_32768Byte_quant_.kt").unlink()
    (folder / "INT8_down_2_32704Byte_quant_.kt").write_bytes(bytes(32704))


HARMS: list[tuple[Callable[[Path], object], str, str]] = [
    (lose_an_expert, "merged", "layer 0, expert 3, up_proj, NUMA slice 1, weight is missing"),
    (lambda out: shorten(shard_of(out), 4096), "merged", "layer 0|model-00001"),
    (
        lambda out: shard_of(out).unlink(),
        "merged",
        r"layer 0 cannot be read \(model-0.*safetensors is missing\); convert",
    ),
    (leave_a_gap, "merged", r"layer 0 cannot be read \(model-00001"),
    (
        shorten_a_file_and_its_name,
        "loose",
        "expert 2, down_proj, NUMA slice 0, weight: contains 32704 bytes, not 32768",
    ),
    (lambda out: shorten(min((out / "_layer_0" / "_numa_1").iterdir())), "loose", "bytes, but its name states"),
]


@pytest.mark.parametrize(("harm", "form", "sentence"), HARMS)
def test_damage_is_reported_with_a_message(harm, form, sentence, outputs, tmp_path):
    """The other layer can still be loaded."""
    out = shutil.copytree(outputs["int8", form], tmp_path / "out")
    (out / "manifest.json").unlink()
    harm(out)
    with pytest.raises(InputError, match=sentence):
        KTExperts.load(out, 0)
    KTExperts.load(out, 1)


@pytest.mark.parametrize(("name", "value"), [("method", "AMXINT8"), ("num_experts", "9")])
def test_contradictory_headers_are_rejected(name, value, damaged):
    edit_header(shard_of(damaged), lambda header: header["__metadata__"].update({name: value}))
    with pytest.raises(UnsupportedError, match=f"{name} {value}"):
        KTExperts.load(damaged, 0)


def test_unreadable_records_of_loose_files_are_rejected(outputs, tmp_path):
    shutil.copytree(outputs["int8", "loose"], tmp_path / "out")
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    about["model"]["functions"] = {"0": {"activation": "unheard_of"}}
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="the record of what experts compute cannot be read"):
        KTExperts.load(tmp_path / "out", 0)


def test_a_shard_rewritten_in_place_is_read_again(damaged):
    """After a layer was loaded from it: its header is not the one that was read then."""
    loaded = KTExperts.load(damaged, 0)
    shard = shard_of(damaged)
    before = shard.read_bytes()
    edit_header(shard, lambda header: header["__metadata__"].update(num_experts="9"))
    with pytest.raises(UnsupportedError, match="num_experts 9"):
        KTExperts.load(damaged, 0)
    rewrite(shard, before)
    assert KTExperts.load(damaged, 0).nbytes == loaded.nbytes


def test_directories_without_weights_are_rejected(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match=str(path)):
            KTExperts.load(path, 0)


def test_invalid_weights_are_rejected(random_experts):
    layer = random_experts(2, 256, 128)
    arrays = [layer[name] for name in ("gate", "up", "down")]
    with pytest.raises(ArgumentError, match=r"method must be one of 'AMXINT4', .* not 'AMXINT2'"):
        KTExperts.from_bf16(*arrays, method="AMXINT2")
    with pytest.raises(UnsupportedError, match="multiple of 128"):
        KTExperts.from_bf16(*arrays, parts=2)
    with pytest.raises(ValueError, match=r"\[E, I, H\]"):
        KTExperts.from_bf16(arrays[0], arrays[2], arrays[1])
    arrays[1][1, 5, 9] = 0x7F80
    with pytest.raises(ValueError, match="row 5, column 9"):
        KTExperts.from_bf16(*arrays)


@pytest.mark.parametrize("fails", [3, 1])
def test_the_first_exception_is_raised_and_stops_further_items(fails):
    """The first item counts, not the first thread that failed: item 1 fails while item 0 is still running."""
    second_failed, begun = threading.Event(), []

    def work(item: int) -> None:
        begun.append(item)
        if item == fails:
            second_failed.set()
            raise ValueError(f"item {item}")
        if fails == 1:
            assert second_failed.wait(300)
            raise ValueError("item 0")

    with pytest.raises(ValueError, match="item 3" if fails == 3 else "item 0"):
        run_parallel(work, range(100 if fails == 3 else 2), 1 if fails == 3 else 2)
    assert fails == 1 or begun == [0, 1, 2, 3]
