"""A made-up output format, a toy encoding in a toy arrangement, whole in this file and put into the table as one row:
converted, verified, cut off and resumed.

As a program this file is `ktconvert` with that row: python tests/test_toy_format.py cpu -i ... --quant-method toy8
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.encodings.encoding import Bytes, Encoding, RowSelection, TensorReader
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.format import Arrangement, Card, Description, Format
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import Grid
from ktconvert.quantizers.differences import decode_finite
from rig import conversion, reference
from rig.toys import Toy, main


def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
    return TensorInfo("codes", "I8", (n, k), n * k), TensorInfo("steps", "F32", (n, 1), 4 * n)


def pack(codes: Any, scales: Any, out: Sequence[Bytes]) -> None:
    out[0][:] = codes.reshape(-1).view(np.uint8)
    out[1].view(np.float32)[:] = scales.reshape(-1)


def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
    pack(*reference.quantize(8, decode_finite(matrix)), out)


def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> Any:
    codes, steps = stored[0].view(np.int8).reshape(n, k), stored[1].view(np.float32).reshape(n, 1)
    return codes[rows] * steps[rows]


def bad_step(read: TensorReader, n: int, k: int) -> str:
    return "" if (read(1).view(np.float32) >= 0).all() else "a step is negative"


TOY8 = Encoding(
    "TOY8",
    version=1,
    grid=Grid("toy8", bits=8, low=-127, high=127, group=None, scale_dtype="F32", version=1),
    multiple=1,
    tensors=tensors,
    quantize=quantize,
    decode=decode,
    defect_checks=(None, bad_step),
    pack=pack,
    unpack_scales=lambda scale_bytes, n, k: scale_bytes.view(np.float32).reshape(n, 1),
)


NAME = re.compile(r"toy/(\d+)/(\d+)/(gate|up|down)/(back|front)/(\d+)/(codes|steps)")


@dataclass(frozen=True)
class ToyNames:
    def tensor_name(self, slice_id: SliceId, suffix: str) -> str:
        side = "back" if slice_id.backward else "front"
        return f"toy/{slice_id.layer}/{slice_id.expert}/{slice_id.projection}/{side}/{slice_id.node}/{suffix}"

    def parse(self, name: str) -> tuple[SliceId, str] | None:
        match = NAME.fullmatch(name)
        if match is None:
            return None
        layer, expert, projection, side, numa, suffix = match.groups()
        return SliceId(int(layer), int(expert), projection, side == "back", int(numa)), suffix

    def explain_stray(self, name: str) -> str | None:
        return "not a toy" if name.startswith("toy/") else None

    def describe(self, slice_id: SliceId, suffix: str) -> str:
        return f"{suffix} of expert {slice_id.expert} of layer {slice_id.layer} ({slice_id.projection}, part {slice_id.node})"


TOYS = Arrangement(
    "merged",
    "cpu",
    "numa",
    lambda method, encoding, facts, source: ToyNames(),
    is_trusted=lambda facts: True,
    sliced=True,
)


def config_entries(fmt: Format, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "toy", "parts": facts["numa"]}}


def check_config(output: Any, fmt: Format, numa: int) -> Iterator[str]:
    if output.config["quantization_config"] != {"quant_method": "toy", "parts": numa}:
        yield "config.json says nothing of toys"


CARD = Card(
    title="Toys",
    introduction=("Experts to play with.",),
    make_rows=lambda card, facts: (("slices", str(facts["numa"])),),
    make_usage=lambda facts, base_model, non_experts: ("Do not.",),
    tags=("toys",),
)


TOY = Format(
    "TOY8", TOY8, TOYS, Description(CARD, config_entries, check_config), ("toys are for tests",), backward=True
)


OPTIONS = ("--quant-method", "toy8", "--threadpool-count", "2", "--save-backward-weights")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a source whose sizes are multiples of nothing."""
    return conversion.checkpoint(tmp_path_factory.mktemp("toy") / "source", layers=2, hidden=74, width=58)


@pytest.fixture(scope="module")
def toys(source: Path, ktconvert: Toy) -> Path:
    output = source.with_name("toys")
    ktconvert("cpu", "-i", source, "-o", output, "--non-experts", "copy", *OPTIONS)
    return output


def test_the_format_is_converted(source, toys, ktconvert):
    config = json.loads((toys / "config.json").read_bytes())
    assert config["quantization_config"] == {"quant_method": "toy", "parts": 2}
    assert "# Toys" in (toys / "README.md").read_text()
    about = json.loads(ktconvert("inspect", toys, "--json").stdout)
    assert (about["method"], about["numa"], about["hidden"], about["intermediate"]) == ("TOY8", 2, 74, 58)
    assert about["complete"] and about["backward"] and about["arrangement"] == "merged"
    weight_map = json.loads((toys / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert "toy/1/1/down/back/1/steps" in weight_map
    makeable = json.loads(ktconvert("inspect", source, "--json").stdout)["methods"]
    assert [m["legal"] for m in makeable if m["method"] == "TOY8"] == [[1, 2]]


def test_verify_accepts_the_format_and_finds_damage(source, toys, tmp_path, ktconvert):
    assert "verified" in ktconvert("verify", toys).stdout
    page = tmp_path / "report.html"
    report = json.loads(ktconvert("verify", toys, "--against", source, "--full", "--json", "--report", page).stdout)
    assert "Worst rows" in page.read_text() and "highest bar" in page.read_text()
    assert report["ok"] and {error["layer"] for error in report["errors"]} == {0, 1}
    assert all(0 < error["relative_error"] < 0.01 for error in report["errors"])
    shard = next(toys.glob("model-00001*"))
    before = shard.read_bytes()
    try:
        conversion.flip_bit(shard)
        report = json.loads(ktconvert("verify", toys, "--against", source, "--json", code=6).stdout)
        assert any("steps of expert 1 of layer 0 (down, part 1)" in p for c in report["checks"] for p in c["problems"])
    finally:
        shard.write_bytes(before)


def test_the_format_is_resumed(source, toys, tmp_path, ktconvert):
    """Killed before several of its changes to the directory, and resumed each time: the same bytes."""
    ktconvert.check_resume(tmp_path, "cpu", "-i", source, "--non-experts", "copy", *OPTIONS)
    assert conversion.tree(tmp_path / "killed1") == conversion.tree(toys)


def test_loose_files_and_computing_are_refused(source, toys, tmp_path, ktconvert):
    result = ktconvert("cpu", "-i", source, "-o", tmp_path / "loose", *OPTIONS, "--no-merge-safetensor", code=2)
    assert "TOY8 has no loose files" in result.stderr
    assert "TOY8" in ktconvert("verify", toys, "--run", code=3).stderr


if __name__ == "__main__":
    main(lambda: FORMATS.update({TOY.name: TOY}))
