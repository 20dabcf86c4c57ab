"""An invented quantizer, defined in this file and added to the table as one row: it converts and verifies.

As a program, this file is `ktconvert` with that row: python tests/test_toy_choice.py cpu -i ... --scale toy
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.outputs.opening import open_output
from ktconvert.quantizers import Grid
from ktconvert.quantizers.quantizer import QUANTIZERS, Quantizer
from rig import conversion, reference
from rig.statistics import check_search
from rig.toys import Toy, main

LARGEST = 100 / 127  # of the codes


def choose_truncated(bf16: Any, grid: Grid, importance: Any = None) -> tuple[Any, Any]:
    """Choose codes toward zero; some codes are never used."""
    values = reference.bf16_to_f32(bf16)
    assert np.isfinite(values).all()
    step = np.abs(values).max(axis=1, keepdims=True) / np.float32(LARGEST * grid.high)
    return np.trunc(values / step).astype(np.int8), (step / grid.step).astype(np.float32)


TOY = Quantizer("toy", 7, choose_truncated)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("toy") / "source", layers=2)


OPTIONS = ("--quant-method", "int4", "--scale", "toy")


@pytest.fixture(scope="module")
def output(source: Path, ktconvert: Toy) -> Path:
    path = source.with_name("toy")
    ktconvert("cpu", "-i", source, "-o", path, *OPTIONS)
    return path


def test_chosen_codes_are_packed(source, output):
    """The output holds the chosen codes, computed by the NumPy definition."""
    linears = [(1, 1, projection) for projection in ("gate", "up", "down")]
    check_search(source, output, linears, search=choose_truncated)


def test_verify_accepts_the_output(source, output, ktconvert):
    document = json.loads((output / "manifest.json").read_bytes())
    assert document["model"]["scale"] == document["settings"]["scale"] == "toy"
    assert "| scales | `--scale toy` |" in (output / "README.md").read_text()
    assert {metadata["scale"] for metadata in open_output(output).metadata.values()} == {"toy"}
    report = json.loads(ktconvert("verify", output, "--against", source, "--json").stdout)
    assert report["ok"] and report["errors"] and report["scale"] == "toy"
    conversion.check_refusal(conversion.ktconvert("verify", output, "--against", source), 3, "toy")  # without the row
    assert json.loads(ktconvert("inspect", output, "--json").stdout)["scale"] == "toy"


def test_formats_without_codes_are_refused(source, tmp_path, ktconvert):
    fp8 = ("--quant-method", "fp8", "--scale", "toy")
    for layout in ((), ("--layout", "kt")):
        result = ktconvert("cpu", "-i", source, "-o", tmp_path / "out", *fp8, *layout, code=2)
        assert (
            "--scale toy is for --quant-method int4, int8; " in result.stderr and "leave out --scale" in result.stderr
        )
    assert not (tmp_path / "out").exists()


def test_the_choice_changes_bytes_and_settings(source, output, tmp_path, ktconvert):
    """Other bytes than by default, and the default is named in the settings alone."""
    plain = tmp_path / "plain"
    ktconvert("cpu", "-i", source, "-o", plain, *OPTIONS[:2])
    assert conversion.find_differences(conversion.tree(plain), conversion.tree(output))
    document = json.loads((plain / "manifest.json").read_bytes())
    assert document["settings"]["scale"] == "absmax" and "scale" not in document["model"]


def test_the_plan_names_scales_that_lower_the_error(source, tmp_path, ktconvert):
    for words, said in ((("int4",), True), (("int8",), False), (("int4", "--scale", "mse"), False)):
        result = ktconvert("cpu", "-i", source, "-o", tmp_path / "out", "--dry-run", "--quant-method", *words)
        assert ("--scale mse reduces the error in files of the same size" in result.stderr) is said


if __name__ == "__main__":
    main(lambda: QUANTIZERS.update({TOY.name: TOY}))
