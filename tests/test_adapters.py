"""Tests of LoRA adapters: supported settings, adapters of only some projections, and merge-adapter."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts import patterns
from ktconvert.layouts.checkpoints import adapter
from ktconvert.layouts.checkpoints.adapter import MERGE, RUN, SERVE, SETTINGS, read_adapter, read_settings
from ktconvert.layouts.checkpoints.kt_adapter import FUSED
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, KTConvertError, OutputError, UnsupportedError
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant.matrix import decode
from ktconvert.pipeline.plans.commands import make_options, make_plan
from ktconvert.quantizers.reference import bf16_to_f32
from rig import conversion, published
from rig.conversion import checkpoint, run_in_process
from rig.safetensors import Tensor, edit_file, read_file, read_folder, write_file

LAYERS, EXPERTS, HIDDEN, WIDTH, RANK = 2, 2, 128, 256, 4  # the sizes of rig.conversion.checkpoint
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8}
SLOW = r"(?:(?:.|..)*?)*[!#]"  # a regular expression whose match would take years
SIZES = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int = RANK, **config: Any) -> Path:
    """Write an adapter with random matrices for modules of these shapes."""
    rng, tensors = np.random.default_rng(0), {}
    for module, (rows, columns) in shapes.items():
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = (rng.standard_normal(shape) / 16).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = ("F32", values)
    folder.mkdir()
    write_file(folder / adapter.WEIGHTS, tensors)
    targets = sorted({module.split(".")[-1] for module in shapes})
    (folder / adapter.CONFIG).write_text(json.dumps(PLAIN | {"target_modules": targets} | config))
    return folder


def expert_modules(
    numbers: Any = range(EXPERTS), width: int = WIDTH, prefix: str = "model."
) -> dict[str, tuple[int, int]]:
    """Return the modules of these experts in every layer, with their shapes."""
    sizes = {name: tuple(width if size == WIDTH else size for size in shape) for name, shape in SIZES.items()}
    modules = {f"{prefix}layers.{layer}.mlp.experts.{e}" for layer in range(LAYERS) for e in numbers}
    return {f"{module}.{name}": shape for module in sorted(modules) for name, shape in sizes.items()}  # type: ignore[misc]


def configure(folder: Path, **changes: Any) -> None:
    """Change entries of an adapter's configuration."""
    file = folder / adapter.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- settings -------------------------------------------------------------------------------------


def test_the_settings_table_has_every_field_of_peft():
    """A new PEFT may have a field that changes what an adapter computes. The defaults must be equal, too."""
    peft = pytest.importorskip("peft")
    fields = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
    assert fields.keys() == SETTINGS.keys() | {"peft_type"}
    plain = peft.LoraConfig()
    for name, setting in SETTINGS.items():
        if name not in ("runtime_config", "peft_version"):
            assert getattr(plain, name) == setting.default, name


@pytest.mark.parametrize(
    ("setting", "value", "supported_by"),
    [
        ("alora_invocation_tokens", [5, 6], ()),
        ("layer_replication", [[0, 1], [0, 2]], ()),
        ("use_qalora", True, ()),
        ("kasa_config", {"beta": 1}, ()),
        ("strength_of_tomorrow", 0.5, ()),
        ("use_dora", True, (RUN, SERVE)),
        ("modules_to_save", ["lm_head"], (RUN, SERVE)),
        ("init_lora_weights", "pissa", (RUN,)),
        ("bias", "all", (RUN,)),
        ("init_lora_weights", "gaussian", (RUN, SERVE, MERGE)),
        ("lora_dropout", 0.5, (RUN, SERVE, MERGE)),
        ("strength_of_tomorrow", None, (RUN, SERVE, MERGE)),
    ],
)
def test_each_setting_is_supported_or_rejected(setting, value, supported_by, tmp_path):
    """Each command that reads adapters decides before it reads any tensor."""
    folder = write_adapter(tmp_path / "a", {}, **{setting: value})
    for command in (RUN, SERVE, MERGE):
        if command in supported_by:
            read_settings(folder, command)
        else:
            with pytest.raises(UnsupportedError, match=rf"adapter_config\.json: its '?{setting}'? .*; \w+ ") as error:
                read_settings(folder, command)
            assert error.value.exit_code == 3


@pytest.mark.parametrize("use", [RUN, SERVE, MERGE])
def test_dora_of_experts_is_refused(use, tmp_path):
    folder = write_adapter(tmp_path / "a", expert_modules(), use_dora=True)
    with pytest.raises(UnsupportedError, match=r"experts\..* has use_dora, .*; train an adapter without use_dora, or"):
        read_settings(folder, use)


def test_run_and_serve_name_a_matrix_that_is_not_finite(example, tmp_path):
    def spoil(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "lora_B" in name]:
            tensors[name] = Tensor("F32", tensors[name].shape, b"\0\0\xc0\x7f" + tensors[name].data[4:])

    folder = write_adapter(tmp_path / "adapter", {"model.layers.1.self_attn.q_proj": (256, 256)})
    edit_file(folder / adapter.WEIGHTS, spoil)
    error = conversion.run_in_process("run", example, "--adapter", folder, "--prompt", "x").exception
    assert "layers.1.self_attn.q_proj.lora_B.weight' holds numbers that are not finite; train again." in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_pattern": {"(": 8}}, "is not a regular expression"),
        ({"alpha_pattern": {SLOW: 8}}, "takes too long"),
        ({"alpha_pattern": {"q_proj": "x"}}, "its alpha_pattern is"),
        ({"target_modules": SLOW}, "takes too long"),
        ({"lora_alpha": 10**400}, "its lora_alpha is"),
        ({"lora_alpha": "x"}, "its lora_alpha is 'x'"),
        ({"r": 0}, "its r is 0"),
        ({"r": 8}, "their rank in adapter_config.json is 8"),
        ({"rank_pattern": {"q_proj": 2}}, "their rank in adapter_config.json is 2"),
        ({"target_modules": 5}, "its target_modules is 5"),
        ({"target_modules": ["v_proj"]}, "belongs to a module that adapter_config.json does not name"),
        ({"peft_type": ["LORA"]}, "it has no peft_type"),
    ],
)
def test_a_damaged_configuration_is_reported_in_one_sentence(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(patterns, "ONE_MATCH", 0.1)
    folder = write_adapter(tmp_path / "a", {f"model.{'decoder.' * 9}layers.0.self_attn.q_proj": (8, 8)})
    configure(folder, **changes)
    with pytest.raises(InputError, match=message) as error:
        read_adapter(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


def test_a_file_without_a_configuration_is_reported_in_one_sentence(tmp_path):
    folder = write_adapter(tmp_path / "a", {})
    for text in ("[]", "null", "{", "[" * 100_000, '{"peft_type": "\\ud800"}', '{"r": NaN}'):
        (folder / adapter.CONFIG).write_text(text)
        with pytest.raises(InputError, match=r"not a LoRA configuration \("):
            read_settings(folder, RUN)


def test_patterns_select_as_in_peft(tmp_path):
    """PEFT takes the first pattern that matches the end of a name, after a dot."""
    peft = pytest.importorskip("peft.utils.other")
    values = {"proj": 1.0, r"layers\.0\..*": 2.0, "q_proj|v_proj": 3.0, "experts.gate_up_proj": 4.0}
    settings = read_settings(write_adapter(tmp_path / "a", {}, alpha_pattern=values, r=1), MERGE)
    for name in ("model.layers.0.self_attn.q_proj", "layers.1.v_proj", "x.proj", "mlp.experts.gate_up_proj", "z"):
        assert settings.scale_factor(name) == values.get(peft.get_pattern_key(values, name), 8.0), name


# --- adapters of some projections -----------------------------------------------------------------


@pytest.fixture(scope="module")
def models(example) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two functions that load the example: with transformers' experts, and with ours in BF16."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from ktconvert import KTConvertConfig

    def load(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(example, **options)

    return load, lambda: load(quantization_config=KTConvertConfig())


def save_adapter(model: Any, folder: Path, **settings: Any) -> Path:
    """Let PEFT write an adapter with random matrices for a model, the same in each run."""
    import peft
    import torch

    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 64, "init_lora_weights": False, "target_modules": ["q_proj"]} | settings
    peft.get_peft_model(model, peft.LoraConfig(**config)).save_pretrained(folder)
    return folder


def write_adapter_by_expert(folder: Path, projections: tuple[str, ...], **settings: Any) -> Path:
    """Write an adapter with a module per expert, as PEFT did for transformers 4."""
    layers = settings.pop("layers", (0, 1))
    modules = [f"model.layers.{layer}.mlp.experts.{e}.{p}" for layer in layers for e in range(8) for p in projections]
    return write_adapter(folder, dict.fromkeys(modules, (256, 256)), lora_alpha=64, **settings)


STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PARTIAL: dict[str, Any] = {
    "gate_up": lambda plain, folder: save_adapter(plain(), folder, target_parameters=STACKED[:1]),
    "a layer": lambda plain, folder: save_adapter(plain(), folder, target_parameters=STACKED, layers_to_transform=[0]),
    "a parameter of a layer": lambda plain, folder: save_adapter(
        plain(), folder, target_parameters=["layers.1.mlp.experts.down_proj"], rank_pattern={r".*\.1\..*down_proj": 2}
    ),
    "gate of each": lambda plain, folder: write_adapter_by_expert(folder, ("gate_proj",)),
    "scalings": lambda plain, folder: write_adapter_by_expert(
        folder, tuple(SIZES), alpha_pattern={"gate_proj": 4, "down_proj": 99}
    ),
    "layer 0 of each": lambda plain, folder: write_adapter_by_expert(folder, tuple(SIZES), layers=(0,)),
}


def merge_into_weights(model: Any, folder: Path) -> Any:
    """Add the products of the adapter, as merge-adapter reads it, to the weights of a model."""
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, delta in read_adapter(folder).items():
            a, b = map(torch.from_numpy, delta.matrices())
            match = re.fullmatch(r"(.*)\.(\d+)\.(gate|up|gate_up|down)_proj", name)
            if match is None:
                parameters[f"{name}.weight"] += b @ a
                continue
            half = {"gate": slice(256), "up": slice(256, 512)}.get(match[3], slice(None))
            stacked = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
            parameters[stacked][int(match[2]), half] += b @ a
    return model


@pytest.mark.parametrize("name", PARTIAL)
def test_experts_with_some_projections_compute_as_in_peft(name, models, tmp_path):
    """Our runtime, the merged weights and PEFT compute the same. PEFT rejects an adapter of only gate."""
    import torch
    from peft import PeftModel

    from ktconvert.pipeline.models.adapter_loading import load_adapter

    plain, ours = models
    folder = PARTIAL[name](plain, tmp_path / "adapter")
    ids = torch.randint(0, 2048, (1, 40), generator=torch.Generator().manual_seed(3))

    def logits(model: Any) -> Any:
        with torch.inference_mode():
            return model.eval()(ids).logits.float()

    def error(actual: Any, expected: Any) -> float:
        return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())

    ours_adapted = logits(load_adapter(ours(), folder, "model"))
    assert error(ours_adapted, logits(plain())) > 0.03
    assert error(ours_adapted, logits(merge_into_weights(plain(), folder))) < 0.012
    if name not in ("gate of each", "scalings"):  # PEFT 0.21 ignores patterns for stacked experts
        assert error(ours_adapted, logits(PeftModel.from_pretrained(plain(), folder))) < 0.012


# --- merge-adapter --------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path) -> Path:
    return checkpoint(tmp_path / "model", layers=LAYERS, experts=EXPERTS)


def merge(model: Path, folder: Path, *, message: str = "") -> Path:
    """Run merge-adapter and return its output; with a message, require that it fails with it."""
    output = model.with_name("merged")
    result = run_in_process("merge-adapter", model, "--adapter", folder, "-o", output, "-q")
    if message:
        assert isinstance(result.exception, KTConvertError) and message in str(result.exception), result.output
        assert result.exception.exit_code == 5 and not output.exists()
    else:
        assert result.exit_code == 0, result.exception or result.output
    return output


def stack(model: Path) -> None:
    """Stack the checkpoint's experts, as newer checkpoints do."""
    (model / "model.safetensors.index.json").unlink()
    tensors = read_folder(model)
    for file in model.glob("*.safetensors"):
        file.unlink()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        bits = {p: np.stack([tensors.pop(f"{prefix}.{e}.{p}.weight").bits for e in range(EXPERTS)]) for p in SIZES}
        both = np.concatenate([bits["gate_proj"], bits["up_proj"]], 1)
        tensors[f"{prefix}.gate_up_proj"] = Tensor("BF16", both.shape, both.tobytes())
        tensors[f"{prefix}.down_proj"] = Tensor("BF16", bits["down_proj"].shape, bits["down_proj"].tobytes())
    write_file(model / "model.safetensors", tensors, {"format": "pt"})


def changed_tensors(model: Path, output: Path) -> set[str]:
    """Return the names of the tensors that differ between a model and an output."""
    before, after = read_folder(model), read_folder(output)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_merge_adapter_changes_only_the_named_modules(model, tmp_path):
    """A tensor of a vision tower whose name has the same end stays. Prefixes that checkpoints add are accepted."""
    file = model / "model-00001-of-00003.safetensors"
    router, vision = "model.layers.0.mlp.gate.weight", "vision_model.model.layers.0.mlp.gate.weight"
    index = model / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"][vision] = file.name
    index.write_text(json.dumps(listed))
    edit_file(file, lambda tensors: tensors.update({vision: tensors[router]}))
    folder = write_adapter(tmp_path / "a", {"model.layers.0.mlp.gate": (EXPERTS, HIDDEN)})
    assert changed_tensors(model, merge(model, folder)) == {router}
    shutil.rmtree(tmp_path / "merged")
    other = write_adapter(tmp_path / "b", {"model.language_model.layers.0.mlp.gate": (EXPERTS, HIDDEN)})
    assert changed_tensors(model, merge(model, other)) == {router}
    wrong = write_adapter(tmp_path / "c", {"audio.layers.0.mlp.gate": (EXPERTS, HIDDEN)})
    shutil.rmtree(tmp_path / "merged")
    merge(model, wrong, message="the adapter changes audio.layers.0.mlp.gate, [2, 128], but the checkpoint lacks it")


def test_merge_adapter_warns_of_an_adapter_of_a_model_with_fewer_layers(model, tmp_path):
    """Modules that the adapter's settings leave out do not count, and no layers for multi-token prediction."""
    gate = {"model.layers.0.mlp.gate": (EXPERTS, HIDDEN)}
    warning = "smaller has no matrices for model.layers.1.mlp.gate, though adapter_config.json names it"
    config = json.loads((model / "config.json").read_text())
    for name, layers, settings in (
        ("smaller", LAYERS, {}),
        ("first", LAYERS, {"layers_to_transform": [0]}),
        ("pattern", LAYERS, {"target_modules": r".*layers\.0\.mlp\.gate"}),
        ("MTP", 1, {}),
    ):
        (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        folder = write_adapter(tmp_path / name, gate, **settings)
        result = run_in_process("merge-adapter", model, "--adapter", folder, "-o", tmp_path / "merged", "--dry-run")
        assert result.exit_code == 0, result.output
        assert (warning in " ".join(result.stderr.split())) == (name == "smaller"), result.stderr


@pytest.mark.parametrize("stacked", [False, True])
def test_merge_adapter_rejects_adapters_of_other_sizes(stacked, model, tmp_path):
    """Rejected: half the width, experts counted from 1, fewer experts, more experts."""
    if stacked:
        stack(model)
    merge(
        model,
        write_adapter(tmp_path / "half", expert_modules(width=WIDTH // 2)),
        message="use an adapter of this model",
    )
    merge(model, write_adapter(tmp_path / "from-1", expert_modules((1, 2))), message="but not for expert 0")
    merge(
        model,
        write_adapter(tmp_path / "one", expert_modules((0,))),
        message="of only 1 of the 2 experts of layer 0",
    )
    merge(model, write_adapter(tmp_path / "more", expert_modules(range(3))), message="use an adapter of this model")
    before = read_folder(model)
    output = merge(model, write_adapter(tmp_path / "right", expert_modules()))
    assert changed_tensors(model, output) == {name for name in before if ".experts." in name}


def test_stacked_matrices_merge_into_separate_and_stacked_experts(model, tmp_path):
    """Adapters with PEFT's target_parameters have two matrices for all experts."""
    rng = np.random.default_rng(1)
    prefix = "model.layers.0.mlp.experts"
    folder = write_adapter(tmp_path / "a", {}, target_parameters=["experts.gate_up_proj"])
    a = rng.standard_normal((EXPERTS * RANK, HIDDEN)).astype(np.float32)
    b = rng.standard_normal((2 * WIDTH, RANK * EXPERTS)).astype(np.float32)
    names = (f"base_model.model.{prefix}.lora_{side}.weight" for side in "AB")
    write_file(folder / adapter.WEIGHTS, dict(zip(names, (("F32", a), ("F32", b)), strict=True)))
    separate = read_folder(merge(model, folder))
    shutil.rmtree(tmp_path / "merged")
    stack(model)
    together = read_folder(merge(model, folder))[f"{prefix}.gate_up_proj"].bits
    source = read_file(model / "model.safetensors")[f"{prefix}.gate_up_proj"].bits
    as_float = lambda bits: (bits.astype(np.uint32) << 16).view(np.float32)  # noqa: E731
    for expert in range(EXPERTS):
        own = [separate[f"{prefix}.{expert}.{name}.weight"].bits for name in ("gate_proj", "up_proj")]
        assert np.array_equal(np.concatenate(own), together[expert])
        expected = as_float(source[expert]) + 2 * b[:, expert::EXPERTS] @ a[expert * RANK : (expert + 1) * RANK]
        assert np.allclose(as_float(together[expert]), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("form", ["gpt-oss MXFP4", "Llama-4 ct FP8"])
def test_merging_into_quantized_experts_equals_merging_into_decoded_ones(form, tmp_path):
    """Stacks, transposed or not, with alternate or joined gate and up, and separate experts that are published."""
    released = published.write(form, tmp_path / "released")
    model = recognize(open_checkpoint(released), to_read=True)
    layer = model.layers[0]
    experts, hidden, width = model.shape(layer)
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    prefix = f"model.layers.{layer}.mlp.experts"
    modules = {f"{prefix}.{e}.{name}": shape for e in range(experts) for name, shape in shapes.items()}
    folder = write_adapter(tmp_path / "adapter", modules)
    assert run_in_process("dequantize", released, "-o", tmp_path / "decoded", "-q").exit_code == 0
    expected = read_folder(merge(tmp_path / "decoded", folder))
    shutil.rmtree(tmp_path / "merged")
    assert read_folder(merge(released, folder)) == expected
    before, after = (recognize(open_checkpoint(tmp_path / name), to_read=True) for name in ("decoded", "merged"))
    additions = read_adapter(folder)
    for name, delta in additions.items():
        _, expert, projection = name.rsplit(".", 2)
        old, new = (
            bf16_to_f32(decode(model.linear(layer, int(expert), projection.removesuffix("_proj"))))
            for model in (before, after)
        )
        a, b = delta.matrices()
        assert np.allclose(new - old, b @ a, rtol=0, atol=2**-8 * np.abs(new).max())


@pytest.mark.parametrize("stacked", [False, True])
def test_verify_adds_the_adapter_again(stacked, model, tmp_path):
    if stacked:
        stack(model)
    folder = write_adapter(tmp_path / "adapter", expert_modules())
    merged, moved = merge(model, folder), tmp_path / "moved"

    def verify(*arguments: object, code: int = 0) -> str:
        result = run_in_process("verify", *arguments)
        assert getattr(result.exception, "exit_code", result.exit_code) == code, result.output
        return f"{result.output}{result.exception}"

    assert "the adapter added to " in verify(merged, "--against", model)
    folder.rename(moved)
    assert f"{folder}, does not exist; give it as --adapter" in verify(merged, "--against", model, code=2)
    verify(merged, "--against", model, "--adapter", moved)
    assert "--adapter needs an output of" in verify(merged, "--adapter", moved, code=2)
    output = verify(merged, "--against", merged, "--adapter", moved, code=6)  # a model that has the adapter already
    assert "with the adapter at byte" in output
    configure(moved, lora_alpha=1)
    assert "adapter_config.json: is not the file that" in verify(merged, "--against", model, "--adapter", moved, code=5)


def test_a_changed_adapter_changes_the_fingerprints(model, tmp_path):
    """Changed settings and changed weights both count, and a finished output is then stale."""
    folder = write_adapter(tmp_path / "a", expert_modules())

    def fingerprints() -> Iterator[str]:
        options = make_options("merge-adapter", input=model, adapter=folder, output=tmp_path / "merged")
        plan = make_plan(options)
        return (unit.fingerprint for unit in plan.units)

    first = list(fingerprints())
    merge(model, folder)
    # Nothing to do
    assert run_in_process("merge-adapter", model, "--adapter", folder, "-o", tmp_path / "merged").exit_code == 0
    configure(folder, lora_alpha=9)
    second = list(fingerprints())
    assert not set(first) & set(second)
    result = run_in_process("merge-adapter", model, "--adapter", folder, "-o", tmp_path / "merged")
    assert "adapter/adapter_config.json was" in str(result.exception) and result.exception.exit_code == 5  # type: ignore[union-attr]
    edit_file(
        folder / adapter.WEIGHTS,
        lambda tensors: tensors.update({n: t._replace(data=t.data[::-1]) for n, t in tensors.items()}),
    )
    assert set(fingerprints()).isdisjoint({*first, *second})


# --- adapters of kt-kernel ------------------------------------------------------------------------


def write_kt_adapter(folder: Path, plain: Path) -> Path:
    """Write the matrices of experts in an adapter of PEFT as kt-kernel's training saves them."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in read_file(plain / adapter.WEIGHTS).items():
        layer, expert, projection, side = re.search(
            r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.lora_(.)", name
        ).groups()
        stack = stacks.setdefault(f"layers.{layer}.experts.{projection}_lora_{side.lower()}", [])
        assert len(stack) == int(expert)
        stack.append(np.frombuffer(tensor.data, np.float32).reshape(tensor.shape))
    folder.mkdir()
    write_file(folder / FUSED, {name: ("F32", np.stack(stack)) for name, stack in stacks.items()})
    (folder / adapter.CONFIG).write_text(json.dumps(PLAIN | {"target_modules": ["q_proj"], "lora_dropout": 0.1}))
    return folder


def convert(kt: Path, model: Path, output: Path, message: str = "", code: int = 5) -> Path:
    """Run convert-adapter and return its output; with a message, require that it fails with it and this exit code."""
    command = [*conversion.KTCONVERT, "convert-adapter", kt, output, "--model", model, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    document = json.loads(done.stdout)
    if message:
        assert message in document["message"] and done.returncode == document["exit_code"] == code
    else:
        count = len(read_file(output / adapter.WEIGHTS))
        paths = {"adapter": str(kt), "output": str(output)}
        assert document == {"event": "converted", **paths, "matrices": count}, done.stderr
    assert not [path for path in output.parent.iterdir() if ".partial" in path.name]
    return output


def test_adapters_of_kt_kernel_merge_and_convert_like_those_of_peft(model, tmp_path):
    plain = write_adapter(tmp_path / "plain", expert_modules())
    kt = write_kt_adapter(tmp_path / "kt", plain)
    expected = read_folder(merge(model, plain))
    shutil.rmtree(tmp_path / "merged")
    assert read_folder(merge(model, kt)) == expected
    output = convert(kt, model, tmp_path / "peft")
    assert read_file(output / adapter.WEIGHTS) == read_file(plain / adapter.WEIGHTS)
    config = json.loads((output / adapter.CONFIG).read_text())
    targets = ["q_proj", *(f"experts.{name}" for name in sorted(SIZES))]
    assert config == PLAIN | {"target_modules": targets, "lora_dropout": 0.0}
    convert(kt, model, output, "peft: exists; choose a new directory", OutputError.exit_code)
    convert(plain, model, tmp_path / "no", f"plain: has no {FUSED}; use it as it is")


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_kt_kernel_get_the_names_of_the_model(stacked, model, tmp_path):
    """Mixtral's experts are w1, w3 and w2 of block_sparse_moe; stacked ones of newer families have other prefixes."""
    kt = write_kt_adapter(tmp_path / "kt", write_adapter(tmp_path / "plain", expert_modules()))
    if stacked:
        stack(model)
        new_names = {"model.layers": "model.language_model.layers"}
        names = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
    else:
        new_names = {"mlp.experts": "block_sparse_moe.experts"}
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        (model / "config.json").write_text(
            json.dumps({"model_type": "mixtral", "num_hidden_layers": LAYERS, "hidden_act": "silu"})
        )

    def rename(name: str) -> str:
        for old, new in new_names.items() | ({} if stacked else names).items():
            name = name.replace(old, new)
        return name

    before = read_folder(model)
    for file in model.glob("*.safetensors*"):
        file.unlink()
    write_file(model / "model.safetensors", {rename(name): tensor for name, tensor in before.items()}, {"format": "pt"})
    output = convert(kt, model, tmp_path / "peft")
    plain = read_file(tmp_path / "plain" / adapter.WEIGHTS)
    assert read_file(output / adapter.WEIGHTS) == {rename(name): tensor for name, tensor in plain.items()}
    assert changed_tensors(model, merge(model, kt)) == {rename(name) for name in before if ".experts." in name}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("layers.1.experts.up_lora_b", "lacks tensor 'layers.1.experts.up_lora_b'"),
        ("layers.1.", "lacks layer 1; use an adapter of this model"),
        ("more", "has layer 2, where the model has no experts; use an adapter of this model"),
        ("rank", "which does not fit the other tensors or rank 4"),
        ("sizes", "is [3, 4, 128], but the model has experts of sizes [E, H, I] = [2, 128, 256]"),
        ("name", "is not LoRA of kt-kernel's experts"),
    ],
)
def test_damaged_adapters_of_kt_kernel_are_reported_in_one_sentence(damage, message, model, tmp_path):
    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(damage)]:
            del tensors[name]
        if damage == "name":
            tensors["layers.0.experts.gate"] = tensors["layers.0.experts.up_lora_b"]
        if damage == "more":
            tensors |= {name.replace("layers.1.", "layers.2."): tensor for name, tensor in tensors.items()}

    modules = expert_modules(range(3) if damage == "sizes" else range(EXPERTS))
    plain = write_adapter(tmp_path / "plain", modules, rank=8 if damage == "rank" else RANK)
    kt = write_kt_adapter(tmp_path / "kt", plain)
    edit_file(kt / FUSED, edit)
    merge(model, kt, message=message)
