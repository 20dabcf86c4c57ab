"""Checkpoints whose linears need rotated inputs: every command refuses them.

Without the rotation, the weights are those of a different model. Rotations that are folded into the weights on both
sides change nothing.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.sources.rotation import RotatedError
from ktconvert.layouts.sources.source import open_checkpoint
from rig.conversion import run_in_process
from rig.encodings import write
from rig.safetensors import edit_file

Q = "model.layers.0.self_attn.q_proj"


def transforms(*locations: str) -> dict[str, Any]:
    """Return compressed-tensors' transform_config: a Hadamard matrix at these locations."""
    apply = [
        {"targets": ["re:.*q_proj$"], "location": location, "inverse": n > 0} for n, location in enumerate(locations)
    ]
    return {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}


def spinquant(**online: bool) -> dict[str, Any]:
    """Return a SpinQuant config."""
    return {
        "algorithm": "spinquant",
        "r1": True,
        "r2": True,
        "r3": False,
        "r4": False,
        "online_r1_rotation": False,
        **online,
    }


ROTATED: list[tuple[dict[str, Any], str]] = [
    ({"transform_config": transforms("input", "weight_input")}, "transform_config"),
    ({"transform_config": transforms("weight_output", "output")}, "transform_config"),
    ({"transform_config": transforms("k_cache", "q_attn")}, "transform_config"),
    ({"transform_config": {"config_groups": {"v": {}}}}, "transform_config"),
    ({"rotation": "hadamard"}, "rotation"),  # GPTQModel
    ({"rotation_config": {"algorithm": "hadamard", "block_size": 32}}, "rotation_config"),  # AutoRound
    ({"rotation_config": spinquant(online_r1_rotation=True)}, "rotation_config"),
    ({"spinquant_config": spinquant(r4=True)}, "spinquant_config"),
    ({"algo_config": [{"name": "rotation", "r4": True}]}, "name 'rotation'"),  # Quark
    ({"algo_config": [spinquant(r3=True)]}, "algorithm 'spinquant'"),
    ({"quant_method": "quip"}, "quant_method 'quip'"),
    ({"quant_method": "exl3"}, "quant_method 'exl3'"),
    ({"quant_method": "fp_quant", "hadamard_group_size": 32}, "quant_method 'fp_quant'"),
]
FOLDED: list[dict[str, Any]] = [
    {"transform_config": {}},
    {"transform_config": None},
    {"transform_config": {"config_groups": {}}},
    {"transform_config": transforms("weight_output", "weight_input")},
    {"rotation": None, "rotation_configs": []},
    {"rotation_config": spinquant()},
    {"algo_config": [spinquant(name="rotation")]},
    {"ignore": ["model.rotation"], "extra_config": {"model.rotation.1": {"bits": 8}}},
]


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json"])
@pytest.mark.parametrize(("quantization_entries", "key"), ROTATED)
def test_a_config_that_rotates_is_refused(
    quantization_entries: dict[str, Any], key: str, file: str, tmp_path: Path
) -> None:
    write(
        "ct 4",
        tmp_path,
        lambda _, quantization: quantization.update(quantization_entries if file == "config.json" else {}),
    )
    if file != "config.json":
        (tmp_path / file).write_text(json.dumps(quantization_entries))
    with pytest.raises(
        RotatedError, match=f"/{file}: by its {key}, inputs or outputs of linears are rotated .*; use a"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("quantization_entries", FOLDED)
def test_folded_rotations_are_read(quantization_entries: dict[str, Any], tmp_path: Path) -> None:
    write("ct 4", tmp_path, lambda _, quantization: quantization.update(quantization_entries))
    open_checkpoint(tmp_path).close()


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        *((f"{Q}.{end}", True) for end in ("v_input.weight", "u_output.weight", "SU", "suh", "spinquant_r1_type")),
        (f"{Q}.forward_hadamard_matrix", True),
        ("model.layers.0.self_attn.conv_input.weight", False),  # not below a linear
        ("model.embed_vision.patch_input.weight", False),
    ],
)
def test_tensors_of_rotations_are_refused(name: str, refused: bool, tmp_path: Path) -> None:
    def add(tensors: Any, _: Any) -> None:
        tensors |= {n: ("BF16", np.zeros((4, 4), np.uint16)) for n in (name, f"{Q}.weight")}

    write("ct 4", tmp_path, add)
    if refused:
        with pytest.raises(RotatedError, match=f"model.safetensors: by tensor '{name}', inputs or outputs"):
            open_checkpoint(tmp_path)
    else:
        open_checkpoint(tmp_path).close()


@pytest.fixture(scope="module")
def models(example: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copy the bundled model, rotated by its config, or by a tensor."""
    folder = tmp_path_factory.mktemp("rotated")
    made = {how: shutil.copytree(example, folder / how) for how in ("config", "tensor")}
    quantization_entries = {
        "quant_method": "compressed-tensors",
        "transform_config": transforms("input", "weight_input"),
    }
    config = json.loads((made["config"] / "config.json").read_text())
    (made["config"] / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_entries}))
    edit_file(
        made["tensor"] / "model.safetensors",
        lambda tensors: tensors.update({f"{Q}.v_input.weight": tensors[f"{Q}.weight"]}),
    )
    return made


@pytest.mark.parametrize("how", ["config", "tensor"])
def test_every_command_refuses_a_rotated_model(
    how: str, models: dict[str, Path], example: Path, tmp_path: Path
) -> None:
    """A command that only compares with such a model refuses it, too."""
    model, out, data = models[how], tmp_path / "out", Path("examples/heldout.txt").absolute()
    unrotated = tmp_path / "unrotated"
    assert run_in_process("dequantize", "-i", example, "-o", unrotated).exception is None
    commands: list[tuple[object, ...]] = [
        ("cpu", "-i", model, "-o", out),
        ("gpu", "-i", model, "-o", out, "--quant-method", "RTN", "--quant-type", "W8A16"),
        ("dequantize", "-i", model, "-o", out),
        ("calibrate", model, "--dataset", data, "-o", out),
        ("inspect", model),
        ("verify", unrotated, "--against", model),
        ("run", model, "--prompt", "a"),
        ("serve", model),
        ("train", model, "--dataset", data, "-o", out),
    ]
    for command in commands:
        done = run_in_process(*command)
        assert isinstance(done.exception, RotatedError) and done.exception.exit_code == 3, (command, done.exception)
        assert str(done.exception).startswith(str(model)) and not out.exists() and not done.stdout
        assert "transformers computes" not in done.stderr
