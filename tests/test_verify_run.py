"""`ktconvert verify --run`: what is right computes, what is damaged is found by computing, and the
reference is right itself."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime import smoke, weights
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import shared_pool
from ktconvert.quantizers.reference import bf16_to_f32
from rig.verifying import failed, in_forms, row, verified

Copy = Callable[[str], Path]
FORMS = ("int4-merged", "int8-merged", "int8-loose")


@pytest.fixture(scope="module")
def converted(packed_example: Callable[..., Path]) -> dict[str, Path]:
    """The bundled model in both methods, for two NUMA nodes."""
    return in_forms(packed_example, FORMS)


@pytest.fixture
def theirs(converted: dict[str, Path], tmp_path: Path) -> Copy:
    """A copy without a manifest, as kt-kernel's own outputs are: no hash reveals damage."""

    def one(name: str) -> Path:
        copy = Path(shutil.copytree(converted[name], tmp_path / name))
        (copy / manifest.NAME).unlink()
        return copy

    return one


def stored(output: Path, expert: int, projection: str, what: str) -> TensorInfo:
    """Where a tensor of layer 0, NUMA part 1 lies."""
    return next(
        tensor
        for (place, kind), tensor in open_output(output).tensors.items()
        if (place.layer, place.expert, place.projection, place.numa, kind) == (0, expert, projection, 1, what)
    )


def rewrite(output: Path, tensor: TensorInfo, data: bytes, at: int = 0) -> None:
    with (output / tensor.file).open("r+b") as file:
        file.seek(tensor.start + at)
        file.write(data)


@pytest.mark.parametrize("name", FORMS)
def test_a_conversion_computes(name, converted):
    report = verified(converted[name], "--run")
    assert report["code"] == 0 and report["ok"]
    check = row(report, "run")
    assert check["ok"] and "layer 0, 8 experts, 24 tokens: finite" in check["result"]
    assert (
        "(exact)" in check["result"] and "(default)" in check["result"] and f"at most {smoke.BOUND}" in check["result"]
    )


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_every_instruction_set_passes(isa, converted):
    try:
        kernels.set_isa(isa)
        result = smoke.smoke(converted["int4-merged"], 1, 3, shared_pool(2))
    finally:
        kernels.set_isa(None)
    assert not result.problems and result.error.keys() == {"exact", "default"}
    assert all(0.001 < error < 0.05 for error in result.error.values())


@pytest.mark.parametrize(
    ("name", "projection", "scale", "words"),
    [
        ("int8-loose", "down", 3e38, "not finite"),
        ("int4-merged", "gate", 3e38, "not finite"),
        ("int4-merged", "down", 1e9, "times the other experts'"),
        ("int8-merged", "up", 1e12, "times the other experts'"),
    ],
)
def test_a_huge_scale_is_found(name, projection, scale, words, theirs):
    output = theirs(name)
    rewrite(output, stored(output, 5, projection, "scale"), np.array([scale], "<f4").tobytes(), 4 * 7)
    report = verified(output, "--run")
    assert report["code"] == 6 and failed(report) == ["run"], "nothing else finds it"
    assert words in row(report, "run")["problems"][0] and "expert 5" in row(report, "run")["problems"][0]
    assert "convert it again" in report["message"]


def test_what_kt_kernel_alone_can_compute(theirs, cli):
    output = theirs("int8-loose")
    for path in output.rglob("*.kt"):
        path.rename(path.with_name(path.name.replace("INT8", "MOE_INT8")))
    assert "without --run" in cli("verify", output, "--run", code=3).stderr


def packed(random_experts: Callable[..., dict[str, Any]], parts: int = 2) -> tuple[weights.LayerWeights, Any]:
    matrices = random_experts(6, 256, 256, 3)
    return weights.pack(**matrices, method=METHODS["AMXINT8"], layer=0, parts=parts, pool=shared_pool(1)), matrices


def test_the_reference_is_the_mathematics(random_experts):
    """In float64 from the BF16 weights: as near as INT8 weights are."""
    experts, matrices = packed(random_experts)
    gate, up, down = (bf16_to_f32(matrices[name]).astype(np.float64) for name in ("gate", "up", "down"))
    hidden = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    inner = np.einsum("nh,eih->nei", hidden, gate)
    inner = inner / (1 + np.exp(-inner)) * np.einsum("nh,eih->nei", hidden, up)
    expected = np.einsum("nei,ehi->neh", inner, down)
    computed = smoke.reference(experts, experts.linears, hidden, threads=2)
    assert computed.shape == (3, 6, 256)
    assert 0.001 < smoke.distance(computed, expected.astype(np.float32), (0, 1, 2)) < 0.02


@pytest.mark.parametrize("wrong", ["expert", "panel", "token", "nan"])
def test_a_runtime_that_computes_wrong_is_found(wrong, converted, monkeypatch):
    forward = Experts.forward

    def broken(self: Experts, hidden: Any, ids: Any, weights: Any, **rest: Any) -> Any:
        if wrong == "expert":
            ids = np.where(ids == 4, 1, ids)
        out = forward(self, hidden, np.ascontiguousarray(ids), weights, **rest)
        if wrong == "panel":
            out[:, 64:96] = 0
        elif wrong == "token" and ids.shape[1] > 1:
            out[2] = out[0]
        elif wrong == "nan":
            out[1, 1] = 0x7FC0
        return out

    monkeypatch.setattr(Experts, "forward", broken)
    problems = smoke.smoke(converted["int8-merged"], 0, 3, shared_pool(1)).problems
    words = {"expert": "expert 4", "panel": "panel 2 of 32", "token": "token 2, 3 experts", "nan": "not finite"}[wrong]
    assert any(words in problem for problem in problems), problems
    assert any("exact" in problem for problem in problems) and any("default" in problem for problem in problems)
