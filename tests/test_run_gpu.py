"""Models that `ktconvert gpu` packed: as they are, and with hot experts from them beside cold ones from converted
files.

Every family is a tiny model with random weights, packed and converted by the real commands. `pytest -s` shows what the
bounds were taken from.
"""

import json
import re
import shutil
import struct
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.errors import (
    ArgumentError,
    InputError,
    KTConvertError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from ktconvert.layouts.extras import install_command
from ktconvert.pipeline.cli.run import run
from ktconvert.pipeline.models import loading
from ktconvert.pipeline.models.loading import ModelChoice
from rig import absent, families, hf, stored
from rig.families import EXPERTS, HIDDEN, LAYERS
from rig.hf import experts_of, record_experts
from rig.safetensors import Tensors, edit_file
from rig.served import PATIENCE, serve_in_process

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors", reason="what packed models are compared with")

from safetensors.numpy import save_file  # noqa: E402

from ktconvert.native_quant import KTConvertConfig, KTExperts  # noqa: E402
from ktconvert.native_quant.runtime import hot_experts  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts  # noqa: E402
from ktconvert.native_quant.runtime.hot_experts import HotWeights  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [("qwen3_moe", "W4A16"), ("mixtral", "W8A16"), ("deepseek_v3", "W4A16")]
# A layer against the same weights in float32: its output is rounded to BF16 (2^-9), and so are gate, up, what goes into
# down, and what comes out of it, each an error of 0.002 to 0.004 that is independent of the others; the cold experts'
# sum is rounded once more. Measured: 0.0051. Another expert's weights give about 1.4.
LAYER = 0.008
SPEED = re.compile(r"prefill \d+ tokens in [\d.]+ s .*, decode \d+ tokens in [\d.]+ s \([\d.]+ tokens/s\)\n")


@dataclass(frozen=True)
class Case:
    """A checkpoint, packed (packed) and converted (cold); theirs: the packed model in transformers."""

    original: Path
    packed: Path
    cold: Path
    theirs: Any
    kind: str


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> Case:
    family, kind = request.param
    root = tmp_path_factory.mktemp(family)
    families.make(family, False, root / "model")
    cli("cpu", "-i", root / "model", "-o", root / "int8", "--quant-method", "int8", "--threadpool-count", 1)
    cli("gpu", "-i", root / "model", "-o", root / "packed", "--quant-method", "RTN", "--quant-type", kind)
    theirs = hf.load_complete(root / "packed")
    return Case(root / "model", root / "packed", root / "int8", theirs, kind)


each_family = pytest.mark.parametrize("case", CASES, indirect=True, ids=[family for family, _ in CASES])
qwen = pytest.mark.parametrize("case", CASES[:1], indirect=True, ids=["qwen3_moe"])
mixtral = pytest.mark.parametrize("case", CASES[1:2], indirect=True, ids=["mixtral"])


def load(model: Path, cold: Path, **options: Any) -> Any:
    """Load a model as docs/how-to/use-from-python.md describes."""
    return hf.load(model, own_quantization=False, cpu_weights=cold, threads=2, **options)


def logits(model: Any) -> Any:
    return hf.logits(model, hf.random_ids(families.VOCABULARY, 1, 48))


def distance(got: Any, want: Any) -> float:
    """Return the largest distance of all tokens."""
    return float(hf.row_distances(got, want).max())


def make_mask(seed: int = 0) -> Any:
    """Return a mask in which each layer has hot and cold experts."""
    mask = torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)
    for row in mask:
        row[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(seed))[:3]] = True
    return mask


def bits(tensor: Any) -> Any:
    return tensor.view(torch.uint16).numpy()


def compute_separately(case: Case, module: Any, hidden: Any, ids: Any, weights: Any) -> Any:
    """Compute each expert of each token alone: hot experts in float32, cold ones by KTExperts with one expert."""
    cold = KTExperts.load(case.cold, module.layer)
    out = torch.zeros(hidden.shape)
    for token, row in enumerate(hidden):
        for expert, weight in zip(ids[token].tolist(), weights[token].float(), strict=True):
            if expert in module.hot.weights:
                hot = module.hot.weights[expert]
                gate_up, down = hot.gate_up.float(), hot.down.float()
                gate, up = (gate_up @ row.float()).chunk(2)
                out[token] += weight * (down @ (torch.nn.functional.silu(gate) * up))
            else:
                alone = cold.forward(bits(row[None]), np.array([[expert]]), np.ones((1, 1), np.float32))
                out[token] += weight * torch.from_numpy(alone).view(torch.bfloat16)[0].float()
    return out


@each_family
def test_hot_weights_equal_those_of_compressed_tensors(case):
    """Bit for bit; and only hot ones are there."""
    mask = make_mask()
    model = load(case.packed, case.cold, gpu_experts_mask=mask)
    assert "experts=8, hidden=128, intermediate=128, hot=3 on cpu" in str(model)
    assert not any("experts" in name and "shared" not in name for name in model.state_dict())
    for layer, module in experts_of(model).items():
        assert isinstance(module, RoutedExperts)
        theirs = experts_of(case.theirs)[layer]
        assert module.hot.mask.tolist() == mask[layer].tolist()
        assert sorted(module.hot.weights) == mask[layer].nonzero()[:, 0].tolist()
        assert sorted(module.experts._packed.missing) == sorted(module.hot.weights)  # one copy of each expert
        for expert, (gate_up, down, *_) in module.hot.weights.items():
            assert torch.equal(gate_up, theirs.gate_up_proj[expert])
            assert torch.equal(down, theirs.down_proj[expert])


@each_family
@pytest.mark.parametrize("tokens", [1, 40])
def test_results_equal_separate_tokens_and_experts(case, tokens):
    mask = make_mask()
    model = load(case.packed, case.cold, gpu_experts_mask=mask)
    kinds = set()
    for layer, (hidden, ids, weights, out) in record_experts(
        model, hf.random_ids(families.VOCABULARY, 1, tokens)
    ).items():
        kinds |= set(mask[layer][ids].flatten().tolist())
        module = experts_of(model)[layer]
        expected = compute_separately(case, module, hidden.reshape(-1, HIDDEN), ids, weights)
        far = distance(out.reshape(-1, HIDDEN), expected)
        print(f"{case.kind} layer {layer}, {tokens} tokens: {far:.4f}")
        assert far < LAYER
        # Where the arithmetic is the same the bits are: the cold half is what the CPU runtime gives with the hot
        # experts left out.
        rows, weights32 = hidden.reshape(-1, HIDDEN), weights.float().contiguous()
        cold = module.experts.forward(bits(rows.contiguous()), ids.numpy(), weights32.numpy(), skip=mask[layer].numpy())
        both = module.hot.forward(rows, ids, weights32) + torch.from_numpy(cold).view(torch.bfloat16).float()
        assert torch.equal(both.to(torch.bfloat16), out.reshape(-1, HIDDEN))
    if tokens > 1:
        assert kinds == {True, False}


@each_family
def test_a_model_without_hot_experts_equals_the_converted_one(case):
    """Bit for bit, and no matter whether the rest comes from the packed model or the original."""
    expected = logits(load(case.packed, case.cold))
    none = torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)
    model = load(case.packed, case.cold, gpu_experts_mask=none)
    assert all(module.hot is None for module in experts_of(model).values())
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(load(case.original, case.cold)), expected)


@mixtral
def test_hot_experts_compute_on_their_device(case):
    """meta stands for a GPU: a tensor left behind on the CPU would not go together with the weights."""
    meta = torch.device("meta")
    hot = hot_experts.load_hot_experts(HotWeights(case.packed), 1, make_mask()[1].numpy(), meta)
    ids = torch.arange(2 * EXPERTS).reshape(-1, 4) % EXPERTS
    out = hot.forward(torch.zeros(len(ids), HIDDEN), ids, torch.ones(ids.shape))
    assert (out.device, out.dtype, out.shape) == (meta, torch.float32, (len(ids), HIDDEN))


@mixtral
def test_hot_experts_may_come_from_bf16_or_a_second_checkpoint(case):
    model = load(case.original, case.cold, num_gpu_experts=EXPERTS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(case.original)
    for layer, module in experts_of(model).items():
        for expert, (gate_up, down, *_) in module.hot.weights.items():
            assert torch.equal(gate_up, experts_of(theirs)[layer].gate_up_proj[expert])
            assert torch.equal(down, experts_of(theirs)[layer].down_proj[expert])
    mask = make_mask(1)
    other = load(case.original, case.cold, gpu_experts_mask=mask, gpu_experts=case.packed)
    assert torch.equal(logits(other), logits(load(case.packed, case.cold, gpu_experts_mask=mask)))


def copied(case: Case, folder: Path) -> Path:
    shutil.copytree(case.packed, folder)
    return folder


def overwrite(folder: Path, pattern: str, value: int) -> int:
    """Fill the tensors whose names match with 16-bit words of this value; return their number."""
    names = []

    def fill(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if re.fullmatch(pattern, name):
                tensors[name] = tensor._replace(data=struct.pack("<H", value) * (len(tensor.data) // 2))
                names.append(name)

    for path in folder.glob("*.safetensors"):
        edit_file(path, fill)
    return len(names)


@qwen
def test_cold_experts_of_the_packed_model_are_not_read(case, tmp_path):
    """NaN in all their scales and codes, and an impossible shape, change nothing."""
    spoilt = copied(case, tmp_path / "spoilt")
    assert overwrite(spoilt, r".*\.experts\.[3-7]\..*", 0x7FC0) == LAYERS * 5 * 3 * 3
    expected = logits(load(case.packed, case.cold, num_gpu_experts=3))
    assert torch.equal(logits(load(spoilt, case.cold, num_gpu_experts=3)), expected)
    with pytest.raises(InputError, match=r"experts\.3\.gate_proj\.weight_shape' is .* download it again"):
        load(spoilt, case.cold, num_gpu_experts=4)
    assert overwrite(spoilt, r".*layers\.1\..*experts\.2\.down_proj\.weight_scale", 0x7FC0) == 1
    nan = r"safetensors: tensor '.*layers\.1\..*\.2\.down_proj\.weight_scale': scale .* is nan"
    with pytest.raises(InputError, match=nan):
        load(spoilt, case.cold, num_gpu_experts=3)


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any], example: Path) -> dict[str, Path]:
    """Return the bundled model, packed and converted, and a mask for it."""
    root = tmp_path_factory.mktemp("bundled")
    cli("gpu", "-i", example, "-o", root / "w4", "--quant-method", "RTN", "--quant-type", "W4A16")
    cli("cpu", "-i", example, "-o", root / "int8", "--quant-method", "int8", "--threadpool-count", 1)
    mask = np.zeros((2, 8), np.bool_)
    mask[:, :3] = True
    save_file({hot_experts.MASK_NAME: mask}, root / "mask.safetensors")
    return {"w4": root / "w4", "int8": root / "int8", "mask": root / "mask.safetensors"}


def call(*arguments: object) -> Result:
    """Run the command in this process, which has already imported transformers."""
    return CliRunner().invoke(run, list(map(str, arguments)))


PROMPT = "def add("


def test_hot_and_cold_experts_generate_together(cli, trained_model, tmp_path, monkeypatch):
    """Without compressed-tensors, which only the packed model alone needs; there one line says what to install."""
    options = (trained_model["w4"], "--prompt", PROMPT, "--max-new-tokens", 12, "--threads", 1)
    cold = ("--cpu-weights", trained_model["int8"])
    missing = absent.hide_package("compressed_tensors", tmp_path)
    result = cli("run", *options, *cold, "--gpu-experts-mask", trained_model["mask"], env=missing)
    assert result.stdout.startswith(PROMPT) and len(result.stdout) > len(PROMPT) + 20
    assert SPEED.fullmatch(result.stderr), result.stderr
    assert call(*options, *cold, "--num-gpu-experts", 3).stdout == result.stdout
    for alone in (call(*options, *cold), call(*options)):
        assert alone.exit_code == 0 and len(alone.stdout) > len(PROMPT) + 20, alone.exception
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "compressed_tensors" else True)
    said = f"packed by compressed-tensors, not installed here: `{install_command('gpu')}`."
    assert said in str(call(*options).exception)


def test_the_server_supports_hot_experts(trained_model):
    """The server loads a packed model by a different function of transformers than `run`."""
    pytest.importorskip("fastapi")
    choice = ModelChoice(str(trained_model["w4"]), cpu_weights=trained_model["int8"], num_gpu_experts=3, threads=1)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 12, "temperature": 0}).encode()
    with serve_in_process(trained_model["w4"], choice) as running:
        answer = json.load(urllib.request.urlopen(f"{running.url}/v1/completions", body, timeout=PATIENCE))
    options = ("--cpu-weights", trained_model["int8"], "--num-gpu-experts", 3, "--threads", 1)
    spoken = call(trained_model["w4"], *options, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert spoken.stdout == f"{PROMPT}{answer['choices'][0]['text']}\n"


def ones(*shape: int, dtype: Any = np.bool_) -> Any:
    return np.ones(shape, dtype)


MASKS: list[tuple[str, dict[str, Any] | Callable[[bytes], bytes], str]] = [
    ("rows", {hot_experts.MASK_NAME: ones(3, 8)}, r"has shape \[3, 8\], but the model has 2 decoder layers"),
    ("columns", {hot_experts.MASK_NAME: ones(2, 9)}, r"layer 0 has 8 experts; use a mask of shape \[2, 8\]"),
    ("key", {"mask": ones(2, 8)}, r"contains 'mask'; give a safetensors file with a tensor 'gpu_experts_mask'"),
    ("bytes", lambda whole: whole[:-1] + b"\x02", "contains bytes other than 0 and 1"),
    ("directory", {}, "is a directory; give a safetensors file with a tensor 'gpu_experts_mask'"),
]


@pytest.mark.parametrize(("content", "why"), [m[1:] for m in MASKS], ids=[m[0] for m in MASKS])
def test_wrong_and_damaged_masks_are_rejected(trained_model, content, why, tmp_path):
    mask = tmp_path / "mask.safetensors"
    if not content:
        mask.mkdir()
    elif isinstance(content, dict):
        save_file(content, mask)
    else:
        mask.write_bytes(content(trained_model["mask"].read_bytes()))
    options = ("--cpu-weights", trained_model["int8"], "--gpu-experts-mask", mask, "--prompt", "x")
    error = call(trained_model["w4"], *options).exception
    assert type(error) is InputError
    assert re.match(rf"{re.escape(str(mask))}: .*{why}", str(error)), error


INT8 = ("--cpu-weights", "{int8}")
REFUSED: list[tuple[tuple[str, ...], type[KTConvertError], str]] = [
    (("--num-gpu-experts", "2"), UsageError, "--num-gpu-experts selects experts that --cpu-weights does not compute"),
    (
        ("--gpu-experts-mask", "{mask}"),
        UsageError,
        "--gpu-experts-mask selects experts that --cpu-weights does not compute; also give --cpu-weights",
    ),
    ((*INT8, "--num-gpu-experts", "2", "--gpu-experts-mask", "{mask}"), UsageError, "give one of them"),
    ((*INT8, "--num-gpu-experts", "9"), ArgumentError, "9 experts for the GPU, but layer 0 has 8; give at most 8"),
    (("--cpu-weights", "{w4}"), UnsupportedError, "w4: "),
]


@pytest.mark.parametrize(("options", "kind", "why"), REFUSED, ids=["N", "mask", "both", "many", "exchanged"])
def test_contradicting_options_are_rejected(trained_model, options, kind, why):
    arguments = [option.format(**trained_model) for option in options]
    error = call(trained_model["w4"], *arguments, "--prompt", "x").exception
    assert type(error) is kind, error
    assert why in str(error)


def test_config_options_are_checked(trained_model):
    with pytest.raises(UsageError, match="select experts with gpu_experts_mask or num_gpu_experts"):
        KTConvertConfig(cpu_weights=trained_model["int8"], gpu_experts=trained_model["w4"])
    with pytest.raises(UsageError, match="num_gpu_experts must be an int of at least 0, not -1"):
        KTConvertConfig(cpu_weights=trained_model["int8"], num_gpu_experts=-1)
    config = KTConvertConfig(cpu_weights=trained_model["int8"], gpu_experts_mask=torch.tensor([[True, False]]))
    again = KTConvertConfig.from_dict(json.loads(config.to_json_string()))
    assert again.gpu_experts_mask == [[True, False]]
    with pytest.raises(
        ArgumentError, match=r"gpu_experts_mask: has shape \[1, 8\], but the model has 2 decoder layers"
    ):
        hot_experts.masks_by_layer([[True] * 8], None, {0: 8, 1: 8}, 2)
    with pytest.raises(ArgumentError, match=r"gpu_experts_mask: is float64 of shape \[1, 2\]"):
        hot_experts.masks_by_layer([[0.5, 1.0]], None, {0: 2}, 1)  # type: ignore[list-item]


@qwen
def test_unsupported_checkpoints_are_rejected(case, tmp_path, trained_model):
    with pytest.raises(UnsupportedError, match="layer 0 has 8 experts of hidden size 256 and width 256, but the model"):
        load(case.packed, case.cold, num_gpu_experts=1, gpu_experts=trained_model["w4"])

    config = json.loads((case.packed / "config.json").read_text())["quantization_config"]
    model = copied(case, tmp_path / "model")
    stored.configure(model, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match="is not an input yet"):
        HotWeights(model)
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    stored.configure(model, quantization_config=config)
    with pytest.raises(
        InputError, match=r"weight_packed' has zero points according to its config, but .*zero_point is missing"
    ):
        HotWeights(model)


@qwen
def test_a_pattern_of_the_ignore_list_has_a_time_limit(case, example, tmp_path):
    """compressed-tensors would match it with `re`, which takes years."""
    packed = copied(case, tmp_path / "packed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, packed)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:([a-z0-9_.]+)+!")
    (packed / "config.json").write_text(json.dumps(config))
    loading.load_model_and_tokenizer(ModelChoice(str(packed)))


@qwen
def test_packed_non_expert_weights_need_their_scales(case, tmp_path, example):
    """transformers would fill in random numbers for them."""
    model, name = copied(case, tmp_path / "model"), "model.layers.1.self_attn.q_proj.weight"
    shutil.copy(example / "tokenizer.json", model)

    def pack(tensors: Tensors) -> None:
        if name in tensors:
            tensors[f"{name}_packed"] = tensors.pop(name)._replace(dtype="I32", shape=(HIDDEN, HIDDEN // 2))

    for path in model.glob("*.safetensors"):
        path.chmod(0o644)
        edit_file(path, pack)
    error = call(model, "--cpu-weights", case.cold, "--prompt", "x").exception
    assert isinstance(error, InputError | UnsupportedError) and name in str(error)
    with pytest.raises(InputError, match=rf"{re.escape(name)}_scale is missing"):
        transformers.AutoModelForCausalLM.from_pretrained(model, quantization_config=KTConvertConfig(case.cold))


@qwen
def test_hot_experts_reject_adapters(case):
    peft = pytest.importorskip("peft")
    mask = torch.ones(LAYERS, EXPERTS, dtype=torch.bool)
    attention = peft.get_peft_model(
        load(case.packed, case.cold, gpu_experts_mask=mask), peft.LoraConfig(target_modules=["q_proj"])
    )
    assert "experts" not in str(attention.peft_config["default"].target_modules)
    with pytest.raises(
        UnsupportedError, match="experts on the GPU do not support adapters; load the model without hot"
    ):
        peft.get_peft_model(
            load(case.packed, case.cold, gpu_experts_mask=mask), peft.LoraConfig(target_modules=["experts"])
        )


def test_too_many_hot_experts_are_rejected(monkeypatch):
    masks = [np.ones(1 << 20, np.bool_)]
    with pytest.raises(ResourceError, match=r"1048576 hot experts take .* GiB in BF16, and cpu has .* choose fewer"):
        hot_experts.require_memory(masks, 7168, 2048, torch.device("cpu"))
    hot_experts.require_memory(masks, 1, 1, torch.device("cpu"))
