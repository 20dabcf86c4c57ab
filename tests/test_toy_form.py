"""A made-up output format, whole in this file and put into the table as one row: converted, verified, cut off and
resumed.

As a program this file is `ktconvert` with that row: python tests/test_toy_form.py cpu -i ... --quant-method toy8
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.encodings.encoding import Bytes
from ktconvert.layouts.outputs import FORMS
from ktconvert.layouts.outputs.form import Card, Extent, Params, Rows, Tensor
from ktconvert.layouts.outputs.parts import Part, Place
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import Grid, reference
from ktconvert.quantizers.errors import decode_finite, error_sums, source_values
from rig import conversion, killpoint

NAME = re.compile(r"toy/(\d+)/(\d+)/(gate|up|down)/(back|front)/(\d+)/(codes|steps)")


@dataclass(frozen=True)
class ToyNames:
    """toy/LAYER/EXPERT/PROJECTION/front/PART/codes"""

    def key(self, place: Place, suffix: str) -> str:
        side = "back" if place.backward else "front"
        return f"toy/{place.layer}/{place.expert}/{place.projection}/{side}/{place.numa}/{suffix}"

    def find(self, name: str) -> tuple[Place, str] | None:
        match = NAME.fullmatch(name)
        if match is None:
            return None
        layer, expert, projection, side, numa, suffix = match.groups()
        return Place(int(layer), int(expert), projection, side == "back", int(numa)), suffix

    def stray(self, name: str) -> str | None:
        return "not a toy" if name.startswith("toy/") else None

    def describe(self, place: Place, suffix: str) -> str:
        return f"{suffix} of expert {place.expert} of layer {place.layer} ({place.projection}, part {place.numa})"


@dataclass(frozen=True)
class Toy:
    """8-bit codes row by row, one float32 scale for each row; neither in pages nor in tiles."""

    name = "TOY8"
    option = "toy8"
    decoded_rows = 32
    command = "cpu"
    arrangement = "merged"
    whole = False
    forward = True
    backward = True
    grid = Grid("toy8", bits=8, low=-127, high=127, group=None, scales="F32", version=1)
    version = 1
    stage = "toys"
    title = "make toys"
    notes = ("toys are for tests",)
    numbers = ("steps", "none negative")
    shard_bytes = None

    def configured(self, settings: Mapping[str, Any]) -> Toy:
        return self

    def exact(self, model: Any) -> bool:
        return False

    def illegal_reason(self, hidden: int, intermediate: int, parts: int) -> str | None:
        return f"{intermediate} does not divide by {parts}" if intermediate % parts else None

    def check_loading(self, model: Any, ranks_asked: Iterable[int]) -> tuple[str, ...]:
        return ()

    def tensors(self, n: int, k: int) -> tuple[Tensor, ...]:
        return Tensor("codes", "I8", (n, k), n * k), Tensor("steps", "F32", (n, 1), 4 * n)

    def sizes(self, projection: str, suffix: str, shape: tuple[int, ...], nbytes: int) -> dict[str, int]:
        names = ("hidden", "width") if projection == "down" else ("width", "hidden")
        return dict(zip(names, shape, strict=True)) if suffix == "codes" and len(shape) == 2 else {}

    def params(self, extent: Extent) -> Params:
        grid = extent.grid
        return (
            ("reading", extent.reading),
            ("metadata", extent.metadata),
            ("parts", (grid.numa, grid.backward)),
            ("experts", extent.experts),
        )

    def names(self, model: Any) -> ToyNames:
        return ToyNames()

    def names_of(self, facts: Mapping[str, Any]) -> ToyNames:
        return ToyNames()

    def loose_path(self, part: Part, tensor: Tensor) -> None:
        return None

    def is_trusted(self, facts: Mapping[str, Any]) -> bool:
        return True

    def quantize(self, matrix: Matrix, out: Sequence[Bytes]) -> None:
        self.pack(*reference.quantize(8, decode_finite(matrix)), out)

    def pack(self, codes: Any, scales: Any, out: Sequence[Bytes]) -> None:
        out[0][:] = codes.reshape(-1).view(np.uint8)
        out[1].view(np.float32)[:] = scales.reshape(-1)

    def unpack(self, stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> Any:
        codes, steps = stored[0].view(np.int8).reshape(n, k), stored[1].view(np.float32).reshape(n, 1)
        return codes[rows] * steps[rows]

    def error_sums(self, matrix: Matrix, stored: Sequence[Bytes]) -> Any:
        return error_sums(matrix, lambda rows: self.unpack(stored, *matrix.shape, rows))

    def error_bytes(self, columns: int) -> int:
        return 4096 * columns

    def source_values(self, matrix: Matrix) -> Any:
        return source_values(matrix)

    def scale_values(self, stored: Bytes, n: int, k: int) -> Any:
        return stored.view(np.float32).reshape(n, 1)

    def is_zero(self, stored: Sequence[Bytes]) -> bool:
        return not stored[0].any()

    def check_numbers(self, output: Any, place: Place, notes: list[str]) -> Iterator[str]:
        stored = output.tensors[place, "steps"]
        if not (output.read(stored).view(np.float32) >= 0).all():
            yield f"{stored.name} in {stored.file}: a step is negative"

    def facts(self) -> dict[str, Any]:
        return {"bits": 8}

    def config_entries(self, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
        return {"quantization_config": {"quant_method": "toy", "parts": facts["numa"]}}

    def check_config(self, output: Any, numa: int) -> Iterator[str]:
        if output.config["quantization_config"] != {"quant_method": "toy", "parts": numa}:
            yield "config.json says nothing of toys"

    def card(self, facts: Mapping[str, Any], base_model: str | None, *, loose: bool, non_experts: str) -> Card:
        return Card((), ("toys",), "Toys", ("Experts to play with.",), (("parts", str(facts["numa"])),), ("Do not.",))


# --- the tests ------------------------------------------------------------------------------------

COMMAND = (sys.executable, __file__)
OPTIONS = ("--quant-method", "toy8", "--threadpool-count", "2", "--save-backward-weights")


def ktconvert(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are multiples of nothing."""
    return conversion.checkpoint(tmp_path_factory.mktemp("toy") / "source", layers=2, hidden=74, width=58)


@pytest.fixture(scope="module")
def toys(source: Path) -> Path:
    output = source.with_name("toys")
    ktconvert("cpu", "-i", source, "-o", output, "--non-experts", "copy", *OPTIONS)
    return output


def test_it_is_converted(source: Path, toys: Path) -> None:
    config = json.loads((toys / "config.json").read_bytes())
    assert config["quantization_config"] == {"quant_method": "toy", "parts": 2}
    assert "# Toys" in (toys / "README.md").read_text()
    about = json.loads(ktconvert("inspect", toys, "--json").stdout)
    assert (about["method"], about["numa"], about["hidden"], about["intermediate"]) == ("TOY8", 2, 74, 58)
    assert about["complete"] and about["backward"] and about["form"] == "merged"
    weight_map = json.loads((toys / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert "toy/1/1/down/back/1/steps" in weight_map
    makeable = json.loads(ktconvert("inspect", source, "--json").stdout)["methods"]
    assert [m["legal"] for m in makeable if m["method"] == "TOY8"] == [[1, 2]]


def test_it_is_verified(source: Path, toys: Path, tmp_path: Path) -> None:
    assert "verified" in ktconvert("verify", toys).stdout
    page = tmp_path / "report.html"
    report = json.loads(ktconvert("verify", toys, "--against", source, "--full", "--json", "--report", page).stdout)
    assert "Worst rows" in page.read_text() and "highest bar" in page.read_text()
    assert report["ok"] and {error["layer"] for error in report["errors"]} == {0, 1}
    assert all(0 < error["relative_error"] < 0.01 for error in report["errors"])
    shard = next(toys.glob("model-00001*"))
    before = shard.read_bytes()
    try:
        conversion.edit(shard)
        report = json.loads(ktconvert("verify", toys, "--against", source, "--json", code=6).stdout)
        assert any("steps of expert 1 of layer 0 (down, part 1)" in p for c in report["checks"] for p in c["problems"])
    finally:
        shard.write_bytes(before)


def test_it_has_no_loose_files(source: Path, tmp_path: Path) -> None:
    done = ktconvert("cpu", "-i", source, "-o", tmp_path / "loose", *OPTIONS, "--no-merge-safetensor", code=2)
    assert "TOY8 has no loose files" in done.stderr


def test_our_runtime_says_that_it_cannot_compute_it(toys: Path) -> None:
    assert "TOY8" in ktconvert("verify", toys, "--run", code=3).stderr


def test_it_is_resumed(source: Path, toys: Path, tmp_path: Path) -> None:
    """Killed before several of its changes to the directory, and resumed each time: the same bytes."""
    shim, log = killpoint.build(tmp_path), tmp_path / "log"
    output = tmp_path / "out"
    command = [*COMMAND, "cpu", "-i", source, "-o", output, "--non-experts", "copy", *OPTIONS]
    assert killpoint.run(command, output, 0, shim, log).returncode == 0
    calls = killpoint.count(log)
    for n in (calls // 4, calls // 2, calls - 3):
        shutil.rmtree(output)
        assert killpoint.run(command, output, n, shim).returncode == killpoint.KILLED
        ktconvert("resume", output)
        assert conversion.tree(output) == conversion.tree(toys)


if __name__ == "__main__":
    FORMS[Toy.name] = Toy()
    from ktconvert.pipeline.cli import main

    main()
