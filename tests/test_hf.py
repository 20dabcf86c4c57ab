"""Models of transformers whose experts come from a converted directory: equal predictions, no expert tensor loaded.

Each family is a tiny model with random weights, saved by transformers, converted to INT8 by the real command, and
loaded with KTConvertConfig. `pytest -s` shows the measurements behind the bounds below.
"""

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.sources.containers.safetensors import read_header
from rig import hf, reference, stored
from rig.families import COMMON, EXPERTS, HIDDEN, LAYERS, MLA, VOCABULARY, WIDTH, WIDTHS, make, make_config
from rig.hf import experts_of, load_complete, logits, record_experts, row_distances

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import KTConvertConfig  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts, find_experts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = hf.random_ids(VOCABULARY, 1, 48)

# (family, whether experts are stored as 3-D tensors, NUMA slices); qwen3_5_moe is published with a vision part
CASES = [
    *(("qwen3_moe", False, 1), ("qwen3_moe", True, 2), ("qwen3_5_moe", True, 1), ("deepseek_v3", False, 1)),
    *(("mixtral", False, 1), ("glm4_moe", False, 2), ("minimax_m2", False, 1)),
]
# Largest measured values: a layer against its own INT8 weights 0.026 (from rounding the activations), against the
# original weights 0.029; logits 0.028 (median), top-1 0.875. The weights of a wrong expert give about 1.4.
LAYER_INT8, LAYER, LOGITS, TOP_1 = 0.035, 0.04, 0.045, 0.8


class Case(NamedTuple):
    """A checkpoint and its converted output, both loaded: by transformers, and with our experts."""

    model: Path
    weights: Path
    original: Any
    ours: Any
    stderr: str


def names(model: Path) -> list[str]:
    """Return the names of all tensors of a checkpoint."""
    return [entry.name for path in model.glob("*.safetensors") for entry in read_header(path).entries]


def load(model: Path, weights: Path, **options: Any) -> Any:
    """Load a model with converted experts."""
    config = KTConvertConfig(cpu_weights=weights, **{"threads": 2, **options})
    return load_complete(model, text_only=True, quantization_config=config)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> Case:
    """Convert a model of a family, and load it in both ways."""
    family, fused, slices = request.param
    root = tmp_path_factory.mktemp(family)
    make(family, fused, root / "model")
    assert any(name.endswith(".experts.gate_up_proj") for name in names(root / "model")) == fused
    cli("cpu", "-i", root / "model", "-o", root / "int8", "--quant-method", "int8", "--threadpool-count", slices)
    original = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        ours = load(root / "model", root / "int8")
    return Case(root / "model", root / "int8", original, ours, stderr.getvalue())


each_family = pytest.mark.parametrize("case", CASES, indirect=True, ids=lambda c: f"{c[0]}{'-fused' * c[1]}-T{c[2]}")


def compute_experts(module: Any, hidden: Any, ids: Any, weights: Any, dequantized: bool) -> Any:
    """Compute transformers' own experts in float32, with their weights or with these weights rounded to INT8."""

    def matrix(bf16: Any) -> Any:
        if not dequantized:
            return bf16.float()
        codes, scales = reference.quantize(8, bf16.contiguous().view(torch.uint16).numpy())
        return torch.from_numpy(codes.astype(np.float32) * scales[:, None])

    out = torch.zeros(hidden.shape)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        gate, up = (hidden[token].float() @ matrix(module.gate_up_proj.data[expert]).T).chunk(2, dim=-1)
        products = (torch.nn.functional.silu(gate) * up) @ matrix(module.down_proj.data[expert]).T
        out.index_add_(0, token, products * weights[token, place, None].float())
    return out


@each_family
def test_loading_misses_no_tensor_and_reads_no_expert_tensor(case: Case) -> None:
    assert [word for word in ("experts", "MISSING", "UNEXPECTED") if word in case.stderr] == []
    theirs, ours = experts_of(case.original), experts_of(case.ours)
    assert [m.layer for m in ours.values()] == list(theirs) == list(ours)
    assert all(isinstance(m, RoutedExperts) and not list(m.parameters()) for m in ours.values())
    non_experts = {name for name in case.original.state_dict() if not name.rpartition(".")[0].endswith(".experts")}
    assert set(case.ours.state_dict()) == non_experts


@each_family
def test_each_layer_agrees_with_transformers(case: Case) -> None:
    theirs = experts_of(case.original)
    for layer, (hidden, ids, weights, out) in record_experts(case.ours, IDS).items():
        assert out.dtype == hidden.dtype
        for dequantized, bound in ((True, LAYER_INT8), (False, LAYER)):
            distance = row_distances(out, compute_experts(theirs[layer], hidden, ids, weights, dequantized)).max()
            print(f"layer {layer}, {'INT8' if dequantized else 'original'} weights: {distance:.4f}")
            assert distance < bound, layer


@each_family
def test_the_model_generates_like_the_original(case: Case) -> None:
    """Compares medians: if two experts are equally likely, a small error may select the other one."""
    expected, actual = logits(case.original, IDS), logits(case.ours, IDS)
    experts = experts_of(case.original).values()
    hooks = [m.register_forward_hook(lambda _module, _inputs, out: torch.zeros_like(out)) for m in experts]
    without_experts = row_distances(logits(case.original, IDS), expected).median()
    for hook in hooks:
        hook.remove()
    distance, same_choices = (
        row_distances(actual, expected).median(),
        (actual.argmax(-1) == expected.argmax(-1)).float().mean(),
    )
    print(
        f"{case.model.parent.name}: logits {distance:.4f}, top-1 {same_choices:.3f}, without experts {without_experts:.3f}"
    )
    assert distance < LOGITS and same_choices >= TOP_1 and without_experts > 10 * LOGITS


qwen = pytest.mark.parametrize("case", CASES[:1], indirect=True, ids=["qwen3_moe"])
mixtral = pytest.mark.parametrize("case", [("mixtral", False, 1)], indirect=True, ids=["mixtral"])


def test_identity_experts_return_their_input(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """LongCat-Flash routes tokens to experts that compute nothing."""
    sizes = {"expert_ffn_hidden_size": WIDTH, "ffn_hidden_size": 256, "n_routed_experts": EXPERTS, "zero_expert_num": 4}
    settings = {**COMMON, **MLA, **sizes, "num_layers": 1, "num_hidden_layers": 2, "moe_topk": 4, "head_dim": 16}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("longcat_flash", **{**settings, "num_key_value_heads": 4})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    theirs = experts_of(model)[0]
    theirs.gate_up_proj = torch.nn.Parameter(theirs.gate_up_proj[:EXPERTS].clone())  # as the family is published
    model.save_pretrained(tmp_path / "model")
    cli("cpu", "-i", tmp_path / "model", "-o", tmp_path / "int8", "--quant-method", "int8", "--threadpool-count", 1)
    ((hidden, ids, weights, out),) = record_experts(load(tmp_path / "model", tmp_path / "int8"), IDS).values()
    assert (ids >= EXPERTS).any()
    assert row_distances(out, theirs(hidden, ids, weights).detach().float()).max() < LAYER


@qwen
def test_float32_models_and_batches_compute(case: Case) -> None:
    """The model may have a different dtype than the experts; a batch gives the results of its rows."""
    model = load(case.model, case.weights).to(torch.float32)
    assert "layer=1, AMXINT8, experts=8, hidden=128, intermediate=128" in str(model)
    tokens = hf.random_ids(VOCABULARY, 2, 5, seed=2)
    both = model(tokens).logits  # with gradients on
    assert both.dtype == torch.float32
    for row in (0, 1):
        torch.testing.assert_close(model(tokens[row : row + 1]).logits[0], both[row], rtol=1e-4, atol=1e-4)


@mixtral
def test_config_json_can_name_the_experts(case: Case, tmp_path: Path) -> None:
    """Programs that do not know ktconvert can load a model whose config.json has our quantization_config."""
    shutil.copytree(case.model, tmp_path / "model")
    stored.configure(tmp_path / "model", quantization_config=KTConvertConfig(cpu_weights=case.weights).to_dict())
    assert torch.equal(logits(load_complete(tmp_path / "model"), IDS), logits(case.ours, IDS))


@qwen
def test_experts_of_a_different_model_are_rejected(case: Case, tmp_path: Path, cli: Callable[..., Any]) -> None:
    cli("cpu", "-i", case.model, "-o", tmp_path / "one", "--threadpool-count", 1, "--layers", 1)
    other = make("qwen3_moe", False, tmp_path / "other", num_experts=4)
    for model, weights, error, message in (
        (case.model, tmp_path / "one", UnsupportedError, "one: has no experts of layer 0, but Qwen3MoeForCausalLM has"),
        (
            other,
            case.weights,
            InputError,
            r"has num_experts 8, not 4 \(from its byte counts\); these weights belong to a different model",
        ),
    ):
        with pytest.raises(error, match=message):
            load(model, weights)
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", "empty: has no .safetensors file"), ("nowhere", "nowhere: does not exist")):
        with pytest.raises(InputError, match=message):
            load(other, tmp_path / folder)


LOCAL = {"num_local_experts": EXPERTS, "head_dim": 32}
REJECTED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"hidden_act": "gelu"}, r"Qwen3MoeExperts\) has a different activation"),
    ("llama4_text", {**WIDTHS, **LOCAL}, "is not called with hidden_states, top_k_index"),
    ("llama", {"intermediate_size": 256}, "builds no routed experts"),
]


@pytest.mark.parametrize(("family", "config", "message"), REJECTED)
def test_experts_with_a_different_computation_are_rejected(family: str, config: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        full_config = transformers.AutoConfig.for_model(family, **{**COMMON, **config})
        model = transformers.AutoModelForCausalLM.from_config(full_config)
    with pytest.raises(UnsupportedError, match=message) as caught:
        find_experts(model)
    assert "load it without converted experts" in str(caught.value)


def test_only_the_converted_layer_stack_is_found() -> None:
    """Qwen3-Omni has a talker besides the thinker; only the thinker's experts are converted."""
    with torch.device("meta"):
        thinker, talker = (
            transformers.AutoModelForCausalLM.from_config(make_config("qwen3_moe", num_experts=n)) for n in (8, 4)
        )
    both = torch.nn.ModuleDict({"thinker": thinker, "talker": talker})
    assert [(p.name, p.layer, p.num_experts, p.hidden, p.intermediate) for p in find_experts(both)] == [
        (f"thinker.model.layers.{layer}.mlp.experts", layer, EXPERTS, HIDDEN, WIDTH) for layer in range(LAYERS)
    ]
    with pytest.raises(UnsupportedError, match="two kinds of experts in layer 0"):
        find_experts(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([both])}))
    with pytest.raises(UnsupportedError, match=r"under several names \('a\.model\.', 'b\.model\.'\)"):
        find_experts(torch.nn.ModuleDict({"a": thinker, "b": talker}))
