"""Tests of the architecture table on tiny checkpoints: recognition, use of every expert tensor, orientation."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS, PREFIXES, Arch, Fused, Separate, Stacked, Style
from ktconvert.layouts.checkpoints.expert_function import (
    ACTIVATIONS,
    PLAIN,
    ExpertFunction,
    read_functions,
    record_functions,
)
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.sources.source import open_checkpoint
from rig import conversion
from rig.conversion import run_in_process
from rig.safetensors import write_file, write_shards

ROWS = {arch.name: arch for arch in ARCHS}
GEMMA = "Gemma-4 26B-A4B"
USABLE = [arch for arch in ARCHS if arch.refusal is None]
QWEN, DEEPSEEK = "Qwen3-MoE, Qwen3-Coder", "DeepSeek-V3, R1, V3.1, Moonlight"
MLP = ROWS[QWEN].stored
SEPARATE, FUSED = MLP
STACKED = ROWS["Step-3.5, 3.7"].stored[0]
E, H, I = 3, 10, 6  # noqa: E741
U8 = np.uint8
Tensors = dict[str, tuple[str, np.ndarray]]


class Model:
    """A tiny checkpoint: its tensors, and the expected values by (layer, expert, projection)."""

    def __init__(
        self,
        arch: Arch,
        style: Style,
        prefix: str = "model.",
        *,
        shape: tuple[int, int, int] = (E, H, I),
        layers: tuple[int, ...] = (1, 2),
        mtp: tuple[int, ...] = (),
        transposed: bool = False,
        nested: str = "",
    ) -> None:
        self.arch, self.style, self.prefix, self.shape = arch, style, prefix, shape
        self.rng = np.random.default_rng(0)
        self.expected_values: dict[tuple[int, int, str], np.ndarray] = {}
        self.experts: Tensors = {}
        self.non_experts: Tensors = {}
        for layer in (*layers, *mtp):
            self._layer(layer, transposed)
        base = f"{prefix}layers."
        for layer in range(max(layers) + 1):
            self.non_experts[f"{base}{layer}.self_attn.q_proj.weight"] = self.bits(4, 4)
        for layer in layers:
            self.non_experts[f"{base}{layer}.mlp.shared_experts.gate_proj.weight"] = self.bits(4, 4)
            self.non_experts[f"{base}{layer}.mlp.gate.weight"] = self.bits(shape[0], 4)
        self.non_experts[f"{base}0.mlp.gate_proj.weight"] = self.bits(4, 4)
        inner: dict[str, Any] = {"hidden_act": "silu"} if arch.function.activation == "silu" else {}
        inner |= {arch.layers[0]: max(layers) + 1, "hidden_size": shape[1]}
        inner |= {
            keys[0].removesuffix(".0").removesuffix(".1"): size
            for keys, size in ((arch.experts, shape[0]), (arch.width, shape[2]))
            if keys
        }
        self.config: dict[str, Any] = {"model_type": arch.matches[0] if arch.matches else "unheard_of"}
        self.config.update({nested: inner} if nested else inner)
        for row in arch.more:
            self._add_stack(Model(row, row.stored[0], prefix, shape=shape, layers=layers), max(layers) + 1)

    def _add_stack(self, other: "Model", first: int) -> None:
        self.experts |= other.experts
        self.config = other.config | self.config
        self.expected_values |= {(first + n, *key): values for (n, *key), values in other.expected_values.items()}

    def bits(self, *shape: int) -> tuple[str, np.ndarray]:
        return "BF16", conversion.bf16(self.rng, *shape)

    def _layer(self, layer: int, transposed: bool) -> None:
        e, h, i = self.shape
        matrices = {"gate": self.bits(e, i, h)[1], "up": self.bits(e, i, h)[1], "down": self.bits(e, h, i)[1]}
        if not self.style.gated:
            del matrices["gate"]
        for projection, values in matrices.items():
            for expert in range(e):
                self.expected_values[layer, expert, projection] = values[expert]
        if isinstance(self.style, Fused):
            if self.style.interleaved:
                matrices["gate_up"] = np.stack([matrices["gate"], matrices["up"]], axis=2).reshape(e, 2 * i, h)
            else:
                matrices["gate_up"] = np.concatenate([matrices["gate"], matrices["up"]], axis=1)
        is_flat = isinstance(self.style, Stacked) and self.style.flat
        for part in self.style.matrices:
            values = matrices[part].swapaxes(1, 2) if transposed else matrices[part]
            biases = self.bits(e, values.shape[-1] if transposed else values.shape[1])
            has_biases = self.arch.function.biases
            if is_flat:
                values = (values.swapaxes(1, 2) if part == "down" else values).reshape(e * i, h)
            if isinstance(self.style, Separate):
                for expert in range(e):
                    name = self.name(part, layer, expert)
                    self.experts[name] = ("BF16", values[expert])
                    if has_biases:
                        self.experts[f"{name.removesuffix('weight')}bias"] = ("BF16", biases[1][expert])
            else:
                self.experts[self.name(part, layer)] = ("BF16", np.ascontiguousarray(values))
                if has_biases:
                    self.experts[f"{self.name(part, layer)}_bias"] = biases

    def name(self, part: str, layer: int, expert: int = 0) -> str:
        template: str = getattr(self.style, part)
        expert += self.shape[0] if self.arch.after else 0
        return template.replace("{prefix}", self.prefix).replace("{layer}", str(layer)).replace("{expert}", str(expert))

    def to_fp8(self, part: str, layer: int, block: tuple[int, int], suffix: str = "_scale_inv", expert: int = 0) -> str:
        """Store one tensor in FP8 with random scales, and return the name of the scale tensor."""
        name = self.name(part, layer, expert)
        shape = self.experts[name][1].shape
        grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        self.experts[name] = ("F8_E4M3", self.rng.integers(0, 0x7F, shape, dtype=np.uint8))
        self.experts[name + suffix] = ("F32", self.rng.random(grid, dtype=np.float32) + 0.5)
        return name + suffix

    def save(self, root: Path) -> Path:
        """Write two shards whose tensors alternate, so that a weight and its scale are in different files."""
        root.mkdir(parents=True, exist_ok=True)
        tensors = [*self.experts.items(), *self.non_experts.items()]
        write_shards(root, [dict(tensors[half::2]) for half in range(2)])
        (root / "config.json").write_text(json.dumps(self.config))
        return root

    def read(self, root: Path, archs: tuple[Arch, ...] = ARCHS) -> MoeModel:
        return recognize(open_checkpoint(self.save(root)), archs)


def check(model: Model, moe: MoeModel, layers: tuple[int, ...] = (1, 2)) -> None:
    """Require the shapes and values of every expert, and that each byte of the expert tensors is used exactly once."""
    assert moe.layers == layers
    used: dict[str, list[tuple[int, int]]] = {}
    for layer in layers:
        assert moe.shape(layer) == model.shape
        for expert in range(model.shape[0]):
            for projection in moe.projections:
                values = moe.linear(layer, expert, projection).values
                np.testing.assert_array_equal(values, model.expected_values[layer, expert, projection])
                is_copy = moe.moe_layers[layer].input_major and getattr(model.style, "interleaved", False)
                assert not values.flags.writeable or is_copy
            for info in moe.expert_tensors(layer, expert):
                used.setdefault(info.name, []).append((info.start, info.nbytes))
    stored = {t.name: (t.start, t.nbytes) for layer in layers for t in moe.layer_tensors(layer)}
    assert used.keys() == stored.keys() == moe.expert_tensor_names()
    assert moe.expert_tensor_names() | moe.mtp_tensors == model.experts.keys()
    for name, runs in used.items():
        start, total = stored[name]
        for begin, size in sorted(runs):
            assert begin == start
            start, total = start + size, total - size
        assert total == 0


# Each row is tested with two prefixes, and each prefix with many rows. All pairs would take longer and find no more.
PAIRS = [(arch, p) for n, arch in enumerate(USABLE) for p in dict.fromkeys(("model.", PREFIXES[n % len(PREFIXES)]))]


@pytest.mark.parametrize("arch, prefix", PAIRS, ids=lambda v: v.name if isinstance(v, Arch) else v)
def test_every_row_is_read_in_every_style(arch: Arch, prefix: str, tmp_path: Path) -> None:
    nested = "text_config" if "language" in prefix else ""
    for number, style in enumerate(arch.stored):
        has_one_form = isinstance(style, Separate) or getattr(style, "flat", False)
        for transposed in (False,) if has_one_form else (False, True):
            model = Model(arch, style, prefix, transposed=transposed, nested=nested)
            parsed = model.read(tmp_path / f"{number}{transposed}")
            assert parsed.arch == arch
            assert parsed.dtypes == ("BF16",)
            assert parsed.has_shared_experts
            check(model, parsed, (1, 2, 4, 5) if arch.more else (1, 2))
            assert parsed.is_plain == (arch.function in (PLAIN, ExpertFunction("swiglu_step")))
            assert bool(parsed.notes) == bool(arch.more)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch.more], ids=lambda arch: arch.name)
def test_layers_of_further_stacks_are_numbered_after_the_first(arch: Arch, tmp_path: Path) -> None:
    """A lost expert or stack of them, and a config without a number of layers, are errors."""
    model, second = Model(arch, arch.stored[0]), arch.more[0]
    parsed = model.read(tmp_path / "right")
    assert parsed.stacks == {arch.stack: "1-2", second.stack: "4-5"}
    assert parsed.weight_name(4, 0, "up") == Model(second, second.stored[0]).name("up", 1)
    assert f"1-2 ({arch.stack}), 4-5 ({second.stack})" in parsed.notes[-1]
    config = parsed.source.config
    assert claims.find_layer_count(config) == (f"{arch.layers[0]} + {second.layers[0]}", 6)
    assert [*claims.find_layer_problems(config, parsed.layers)] == []
    assert [*claims.find_size_problems(config, {layer: parsed.shape(layer) for layer in parsed.layers})] == []
    first = Model(replace(arch, more=()), arch.stored[0]).experts
    del model.experts[parsed.weight_name(5, 1, "up")]
    with pytest.raises(InputError, match=rf"{re.escape(parsed.weight_name(5, 1, 'up'))}' is missing"):
        model.read(tmp_path / "expert")
    model.experts = {name: tensor for name, tensor in model.experts.items() if name in first}
    with pytest.raises(InputError, match=f"has no {second.stack} of {arch.name} with experts"):
        model.read(tmp_path / "stack")
    del model.config[arch.layers[0]]
    with pytest.raises(InputError, match="has no number of layers"):
        model.read(tmp_path / "count")


def test_gpu_refuses_several_stacks(tmp_path: Path) -> None:
    paths = ("-i", Model(ROWS["GroveMoE"], SEPARATE).save(tmp_path / "model"), "-o", tmp_path / "out")
    done = conversion.ktconvert("gpu", *paths, "--quant-method", "RTN", "--quant-type", "W4A16")
    conversion.check_refusal(done, 3, "has several stacks of experts (experts, chunk experts)", "use `ktconvert cpu`")


def test_rows_name_each_family_once() -> None:
    names = [m for arch in ARCHS for m in arch.matches]
    assert len(names) == len(set(names)) and len(ROWS) == len(ARCHS)
    for arch in ARCHS:
        assert arch.function.activation in ACTIVATIONS
        assert arch.stored or arch.refusal or all(name.startswith("gguf:") for name in arch.matches)
        assert arch.function.weights_on in ("output", "input")


def test_lists_in_the_config_have_a_size_for_each_stack(tmp_path: Path) -> None:
    row = ROWS["ERNIE-4.5-VL"]
    model = Model(row, row.stored[0])
    model.config |= {"n_routed_experts": [E, E], "moe_intermediate_size": [I, I]}
    check(model, model.read(tmp_path / "right"), (1, 2, 4, 5))
    model.config["moe_intermediate_size"] = [I, I + 1]
    with pytest.raises(InputError, match=rf"expert width of layer 1 must be {I}, config.json says .*\.1 = {I + 1}"):
        model.read(tmp_path / "width")
    del model.config["n_routed_experts"]
    with pytest.raises(InputError, match="no number of experts for text"):
        model.read(tmp_path / "silent")


def test_one_stack_alone_has_the_layers_and_values_of_both(tmp_path: Path) -> None:
    row = ROWS["ERNIE-4.5-VL"]
    model = Model(row, row.stored[0])
    both = model.read(tmp_path)
    for name, layers in (("text", (1, 2)), ("images", (4, 5))):
        alone = recognize(both.source, experts=name)
        assert (alone.layers, alone.stacks) == (layers, {})
        assert f"Only the {name} stack is converted" in alone.notes[-1]
        for layer in layers:
            assert alone.layer_tensors(layer) == both.layer_tensors(layer)
    with pytest.raises(UsageError, match=r"--experts chunks: .* no such stack of experts; choose all, text, images"):
        recognize(both.source, experts="chunks")


def test_every_gguf_architecture_with_experts_has_a_row() -> None:
    """In llama.cpp, Deci has names for experts, but its graph and its models are dense."""
    constants = pytest.importorskip("gguf").constants
    up = constants.MODEL_TENSOR.FFN_UP_EXP
    with_experts = {name for arch, name in constants.MODEL_ARCH_NAMES.items() if up in constants.MODEL_TENSORS[arch]}
    assert with_experts - {"deci"} <= {m.removeprefix("gguf:") for arch in ARCHS for m in arch.matches}


def test_stacks_of_dbrx_need_the_number_of_experts(tmp_path: Path) -> None:
    """Its config has the sizes in ffn_config; without them, nothing tells experts from rows."""
    model = Model(ROWS["DBRX"], ROWS["DBRX"].stored[0])
    model.config = {"model_type": "dbrx", "n_layers": 3, "d_model": H}
    model.config["ffn_config"] = {"moe_num_experts": E, "ffn_hidden_size": I, "ffn_act_fn": {"name": "silu"}}
    check(model, model.read(tmp_path / "published"))
    ffn = model.config["ffn_config"]
    for name, changes, message in (
        ("count", {"moe_num_experts": None}, "has all experts in one matrix, but config.json has no number of experts"),
        ("rows", {"moe_num_experts": 4}, r"has shape \[18, 10\], but must be \[4 \* I, H\] by config.json"),
        ("width", {"ffn_hidden_size": I + 1}, "ffn_config.ffn_hidden_size = 7"),
    ):
        model.config["ffn_config"] = ffn | changes
        with pytest.raises(InputError, match=message):
            model.read(tmp_path / name)
    model.config["ffn_config"] = ffn | {"ffn_act_fn": {"name": "gelu"}}
    assert model.read(tmp_path / "gelu").function_names == "gelu(gate) * up"


def test_a_norm_of_outputs_is_a_non_expert_tensor(tmp_path: Path) -> None:
    model = Model(ROWS["Muse Spark"], SEPARATE, nested="text_config")
    norm = "model.layers.1.mlp.experts.post_expert_norm.weight"
    model.non_experts[norm] = model.bits(H)
    model.config["text_config"]["moe_hidden_size"] = model.config["text_config"].pop("hidden_size", H)
    parsed = model.read(tmp_path)
    assert parsed.functions[1].output_norm
    assert norm not in parsed.expert_tensor_names()


@pytest.mark.parametrize("arch", [a for a in ARCHS if a.refusal], ids=lambda a: a.name)
def test_unsupported_architectures_are_refused(arch: Arch, tmp_path: Path) -> None:
    model = Model(replace(ROWS["Mixtral"], matches=arch.matches), SEPARATE)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(arch.name)}: .*(serve it without|text-only)"):
        model.read(tmp_path)


# (row, entries of the config, expected function). The config may name a different one, or use a different spelling.
LIMITED, OAI = ExpertFunction(limit=10.0), ExpertFunction("swiglu_oai", 7.0, 1.702)
SOFTCAP = ExpertFunction("softcap", alpha=4.0, beta=25.0)
FUNCTIONS: list[tuple[str, dict[str, Any], ExpertFunction]] = [
    ("Mixtral", {"hidden_act": "gelu"}, ExpertFunction("gelu_erf")),
    ("Mixtral", {"hidden_act": "gelu_new"}, ExpertFunction("gelu_tanh")),
    ("Mixtral", {"swiglu_limit": 7.0}, ExpertFunction(limit=7.0)),
    ("Mixtral", {"hidden_act": "SiLU"}, PLAIN),
    ("Mixtral", {"hidden_act": None}, PLAIN),
    (
        "Mixtral",
        {"hidden_act": "situ", "activation_situ_beta": 3, "activation_situ_linear_beta": 0},
        ExpertFunction("softcap", alpha=3.0),
    ),
    ("Kimi-K3", {"hidden_act": "situ"}, SOFTCAP),
    ("Kimi-K3", {"activation_situ_beta": 3, "activation_situ_linear_beta": 0}, ExpertFunction("softcap", alpha=3.0)),
    (GEMMA, {"hidden_activation": "gelu_pytorch_tanh"}, ExpertFunction("gelu_tanh")),
    ("MiniMax-M3", {"hidden_act": "swigluoai"}, OAI),
    ("MiniMax-M3", {"hidden_act": "silu", "swiglu_limit": 5}, replace(OAI, limit=5.0)),  # transformers writes silu
    ("DeepSeek-V4", {"hidden_act": "silu", "swiglu_limit": 9.0}, ExpertFunction(limit=9.0)),
    ("DeepSeek-V4", {}, LIMITED),
    ("JetMoE", {"activation_function": "silu"}, PLAIN),
    ("Step-3.5, 3.7", {"swiglu_limits": [0, 0, 0]}, PLAIN),  # limits of zero mean no limit
    ("Step-3.5, 3.7", {"swiglu_limits": [7, 7, 7]}, ExpertFunction("swiglu_step", limit=7.0)),
    ("Ling 3", {"expert_swiglu_limit_list": [4, 4, 4]}, ExpertFunction(limit=4.0)),
]
NO_ACTIVATION: list[tuple[str, dict[str, Any], str]] = [
    ("Mixtral", {"hidden_act": ["silu"]}, r'hidden_act is \["silu"\], an unknown activation'),
    ("Kimi-K3", {"hidden_act": "xielu"}, 'hidden_act is "xielu", an unknown activation'),
    ("SmallThinker", {"hidden_act": "silu"}, r"but experts of SmallThinker compute relu\(gate\)"),
    (GEMMA, {"hidden_activation": "silu"}, rf"of {GEMMA} compute gelu_tanh\(gate\) \* up"),
]


@pytest.mark.parametrize(("name", "config", "function"), FUNCTIONS)
def test_function_follows_from_config_and_row(name: str, config: Any, function: ExpertFunction, tmp_path: Path) -> None:
    model = Model(ROWS[name], ROWS[name].stored[0])
    model.config.update(config)
    parsed = model.read(tmp_path)
    assert set(parsed.functions.values()) == {function}
    assert parsed.is_plain == (function == PLAIN)


WRONG_CONSTANTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "DeepSeek-V4",
        {"swiglu_limit": float("nan")},
        "swiglu_limit must be a finite number of at least 0 for layer 1, not NaN",
    ),
    ("DeepSeek-V4", {"swiglu_limit": -1}, "swiglu_limit must be a finite number of at least 0 for layer 1, not -1"),
    ("Step-3.5, 3.7", {"swiglu_limits": [7]}, "swiglu_limits has 1 values, none for layer 1"),
    ("Step-3.5, 3.7", {"swiglu_limits": []}, "swiglu_limits has 0 values, none for layer 1"),
    ("Step-3.5, 3.7", {"swiglu_limits": [0, 7, -7]}, "swiglu_limits must be .* of at least 0 for layer 2, not -7"),
    ("Ling 3", {"expert_swiglu_limit_list": [0, float("nan"), 4]}, "limit_list must be a finite .* layer 1, not NaN"),
    ("GLM-5.3-Flash", {"swiglu_limit": float("inf")}, "swiglu_limit must be a finite .* for layer 1, not Infinity"),
    ("Kimi-K3", {"activation_situ_linear_beta": -25}, "activation_situ_linear_beta must be .* at least 0 .* not -25"),
    ("Inkling 2", {"mlp_gate_softcap": 0}, "mlp_gate_softcap must be a finite number above 0 for layer 1, not 0"),
    ("Kimi-K3", {"activation_situ_beta": 0}, "activation_situ_beta must be a finite number above 0 for layer 1, not 0"),
    ("MiniMax-M3", {"swiglu_alpha": "x"}, 'swiglu_alpha must be a finite number above 0 for layer 1, not "x"'),
    (QWEN, {"hidden_act": "situ"}, r"compute softcap, but alpha \(.*config.json: activation_situ_beta\) is missing"),
    (QWEN, {"hidden_act": "swigluoai", "swiglu_limit": 7}, r"but alpha \(config.json: swiglu_alpha\) is missing"),
    (GEMMA, {"swiglu_limit": 7}, "compute gelu_tanh, which has no limit, but their limit is 7; give --arch-file"),
]


@pytest.mark.parametrize(("name", "config", "message"), WRONG_CONSTANTS)
def test_wrong_constants_of_activations_are_refused(name: str, config: Any, message: str, tmp_path: Path) -> None:
    model = Model(ROWS[name], ROWS[name].stored[0])
    model.config.update(config)
    with pytest.raises(UnsupportedError, match=message):
        model.read(tmp_path)


@pytest.mark.parametrize(("name", "config"), [(name, config) for name, config, _ in WRONG_CONSTANTS + NO_ACTIVATION])
def test_wrong_functions_end_with_exit_code_3(name: str, config: Any, tmp_path: Path) -> None:
    model = Model(ROWS[name], ROWS[name].stored[0])
    model.config.update(config)
    paths = ("-i", model.save(tmp_path / "model"), "-o", tmp_path / "out")
    done = conversion.ktconvert("cpu", *paths, "--quant-method", "bf16", "--threadpool-count", "1")
    conversion.check_refusal(done, 3, "; ")
    assert not (tmp_path / "out").exists()


def test_unknown_limits_are_refused_unless_a_row_from_a_file_decides(tmp_path: Path) -> None:
    model = Model(ROWS["Mixtral"], ROWS["Mixtral"].stored[0])
    model.config["expert_clamp_value"] = 7.0
    with pytest.raises(UnsupportedError, match=r"expert_clamp_value = 7\.0 may limit the experts.*; give --arch-file"):
        model.read(tmp_path / "row")
    row = replace(ROWS["Mixtral"], matches=(), function=LIMITED, decides=True)
    assert set(model.read(tmp_path / "decides", (row, *ARCHS)).functions.values()) == {LIMITED}


def test_records_of_functions_are_read_back() -> None:
    functions = {0: PLAIN, 1: LIMITED, 2: LIMITED, 5: SOFTCAP, 6: PLAIN}
    record = record_functions(functions)
    assert record["1-2"] == {"activation": "silu", "limit": 10.0} and read_functions(record) == functions
    assert read_functions(json.dumps(record)) == functions  # as in the metadata of a shard
    texts = ("a", "1424a", '"a"', "[" * 100_000)
    for wrong in (
        {"0": {"activation": "x"}},
        {"a": {}},
        {"0": {"limit": float("nan")}},
        {"0": 1},
        [],
        {"5-1": {}},
        *texts,
    ):
        with pytest.raises(InputError, match="the record of what experts compute cannot be read"):
            read_functions(wrong)


@pytest.mark.parametrize(("name", "config", "message"), NO_ACTIVATION)
def test_unknown_or_contradicting_activations_are_refused(name: str, config: Any, message: str, tmp_path: Path) -> None:
    """The error names the option that decides."""
    model = Model(ROWS[name], ROWS[name].stored[0])
    model.config.update(config)
    message += ".*; give --arch-file, .* with the activation of the experts: activation = 'silu',"
    with pytest.raises(UnsupportedError, match=message):
        model.read(tmp_path)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("h, i", [(8, 4), (6, 6), (4, 8), (10, 6)], ids=["H=2I", "H=I", "2H=I", "other"])
@pytest.mark.parametrize("with_config", [True, False])
def test_fused_orientation_follows_from_shapes(
    h: int, i: int, transposed: bool, with_config: bool, tmp_path: Path
) -> None:
    model = Model(ROWS["Qwen3-VL-MoE"], FUSED, shape=(E, h, i), transposed=transposed)
    if not with_config:
        model.config = {"model_type": "qwen3_vl_moe"}
    check(model, model.read(tmp_path))


def test_square_stacked_matrices_take_their_orientation_from_the_row(tmp_path: Path) -> None:
    for transposed in (False, True):
        style = replace(STACKED, output_major=not transposed)
        arch = replace(ROWS["Step-3.5, 3.7"], stored=(style,))
        model = Model(arch, style, shape=(E, 8, 8), transposed=transposed)
        check(model, model.read(tmp_path / str(transposed), (arch,)))


@pytest.mark.parametrize("base", ["", "mtp.layers.0.mlp.", "model.mtp.layers.0.mlp.", "mtp.0.ffn.", "mtp_block.0.mlp."])
def test_mtp_blocks_are_left_out_and_named(base: str, tmp_path: Path) -> None:
    """MTP blocks are layers after the last one, in any encoding, or have names of their own."""
    model = Model(ROWS[QWEN if base else DEEPSEEK], SEPARATE, mtp=() if base else (3,))
    extra = {f"{base}experts.{e}.{p}_proj.weight": model.bits(2, 2) for e in range(E) for p in ("gate", "up", "down")}
    if base:
        model.experts.update(extra)
    else:
        extra = {name: tensor for name, tensor in model.experts.items() if ".layers.3." in name}
    parsed = model.read(tmp_path / "same")
    check(model, parsed)
    assert parsed.mtp_layers == (() if base else (3,)) and parsed.mtp_tensors == extra.keys()
    assert ("mtp" if base else "layer 3") in (*parsed.notes, *parsed.warnings)[0]
    if not base:
        model.experts[model.name("gate", 3)] = ("I8", np.zeros((2, 2), U8))
        model.experts[model.name("up", 3) + "_packed"] = ("I32", np.zeros((2, 2), np.int32))
        assert model.read(tmp_path / "other").layers == (1, 2)


ALIASES = {"n_routed_experts": "", "num_experts": "text_config", "num_local_experts": "llm_config"}
ALIASES |= {"moe_num_experts": "language_config", "moe": "", "moe ": "text_config"}


@pytest.mark.parametrize("key", ALIASES)
def test_config_keys_have_aliases(key: str, tmp_path: Path) -> None:
    """Some configs have the keys in an object named `moe`."""
    model = Model(ROWS[QWEN], SEPARATE, nested=ALIASES[key])
    scope = model.config[ALIASES[key]] if ALIASES[key] else model.config
    del scope["n_routed_experts"]
    scope[key.strip()] = {"num_experts": E} if key.strip() == "moe" else E
    check(model, model.read(tmp_path / "right"))
    scope[key.strip()] = {"num_experts": E + 1} if key.strip() == "moe" else E + 1
    with pytest.raises(InputError, match=rf"experts\.{E}\.gate_proj.weight' is missing"):
        model.read(tmp_path / "wrong")


Change = Callable[[Model], object]


def drop(word: str) -> Change:
    """Remove all tensors whose name contains a word."""
    return lambda model: [model.experts.pop(name) for name in list(model.experts) if word in name]


def add_scale(part: str, suffix: str) -> Change:
    """Add a scale to a tensor that has one already, or needs none."""
    return lambda model: model.experts.update({model.name(part, 2) + suffix: ("F32", np.ones((1, 1), np.float32))})


def combine(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


def set_tensor(part: str, layer: int, expert: int, *shape: int) -> Change:
    return lambda model: model.experts.update({model.name(part, layer, expert): model.bits(*shape)})


def config(**keys: Any) -> Change:
    return lambda model: model.config.update(keys)


def stray(name: str, *shape: int) -> Change:
    return lambda model: model.non_experts.update({f"model.layers.2.mlp.{name}": model.bits(*shape)})


def also(style: Style, prefix: str = "model.") -> Change:
    return lambda model: model.experts.update(Model(model.arch, style, prefix).experts)


def store_fp8(part: str, suffix: str, *shape: int, block: int = 128, expert: int = 0) -> Change:
    """Store a tensor in FP8 with a scale of this shape, or without a scale."""

    def change(model: Model) -> None:
        model.config["quantization_config"] = {"weight_block_size": [block, block]}
        scale = model.to_fp8(part, 2, (block, block), suffix, expert)
        del model.experts[scale]
        if shape:
            model.experts[scale] = ("F32", np.ones(shape, np.float32))

    return change


def store_unsupported(dtype: str, kind: Any, scale: str = "", scale_dtype: str = "U8") -> Change:
    """Store experts in an unsupported type; `scale` is the end of the name of the tensor beside each."""

    def change(model: Model) -> None:
        tensors = model.experts
        model.experts = {name: (dtype, np.zeros(values.shape, kind)) for name, (_, values) in tensors.items()}
        for name in tensors if scale else ():
            stem = name.removesuffix(".weight") if scale[0] == "." else name
            model.experts[stem + scale] = (scale_dtype, np.zeros((1, 1), U8))

    return change


LISTS = {"n_routed_experts": [9, E, E], "moe_intermediate_size": [9, I, I]}
# Unusual checkpoints that can be read: (row, change).
READ: dict[str, tuple[str, Change]] = {
    "names of another family": ("LFM2-MoE", lambda model: None),
    "lists per layer": ("Hunyuan-A13B", config(**LISTS)),
    "a hidden size of routed experts": ("Kimi-K3", config(hidden_size=2 * H, routed_expert_hidden_size=H)),
    "the router's bias among the experts": ("Laguna", stray("experts.e_score_correction_bias", E)),
}


@pytest.mark.parametrize("case", READ)
def test_unusual_checkpoints_are_read(case: str, tmp_path: Path) -> None:
    name, change = READ[case]
    model = Model(ROWS[name], SEPARATE)
    change(model)
    parsed = model.read(tmp_path)
    check(model, parsed)
    assert parsed.arch.name == name


# A weight is a different one without these, so that no message tells users to remove them.
STRAYS = {
    "1.side_proj.weight": "weights; it cannot be read: use another release of the model",
    "01.up_proj.weight": "use another release",
    "1.up_proj.pre_quant_scale": "it is a scale of inputs .* use another release",
    "1.up_proj_input.weight": "it is a matrix that inputs are multiplied by, .* use another release",
    "1.up_proj.lora_A.weight": "it is of a LoRA adapter that was not merged, .* use another release",
    "1.up_proj.lora_B.default.weight": "it is of a LoRA adapter that was not merged, .* use another release",
    "post_expert_norm.weight": "it is a norm, .* use another release",
}
FIT = r"gate_proj\.weight_scale_inv' of shape .* does not fit .* in blocks of 4x4"
REFUSED: list[tuple[str, Style, Change, str]] = [
    ("Qwen3-VL-MoE", FUSED, set_tensor("down", 2, 0, E, H, I + 1), r"neither.*\[E, 2I, H\]"),
    # gate_up [E, 2I, H] with the config's H and I exchanged is a different model, not a different orientation.
    ("Qwen3-VL-MoE", FUSED, config(hidden_size=I, moe_intermediate_size=H), "must be 10, .*hidden_size = 6"),
    (QWEN, SEPARATE, config(hidden_size=12), r"must be 10, config.json says hidden_size = 12"),
    (QWEN, SEPARATE, config(moe_intermediate_size=12), r"must be 6, config.json says moe_intermediate_size = 12"),
    ("Step-3.5, 3.7", STACKED, config(hidden_size=12), "hidden_size = 12"),
    (
        QWEN,
        SEPARATE,
        lambda m: m.experts.pop(m.name("up", 2, 1)),
        r"layers\.2\.mlp\.experts\.1\.up_proj\.weight' is missing",
    ),
    (
        QWEN,
        SEPARATE,
        combine(config(n_routed_experts=None), drop("2.mlp.experts.2.")),
        r"2\.gate_proj\.weight' is missing",
    ),
    (QWEN, SEPARATE, config(n_routed_experts=E - 1), "2.*_proj.weight' is one expert too many.*n_routed_experts = 2"),
    (QWEN, SEPARATE, set_tensor("down", 2, 1, I, H), r"down_proj.weight' has shape \[6, 10\], but must be \[10, 6\]"),
    (QWEN, SEPARATE, drop(".layers.2."), "layer 2 has a router but no experts"),
    (QWEN, SEPARATE, config(num_hidden_layers=4), "layer 3 is missing"),
    (QWEN, SEPARATE, also(FUSED), "stored in two ways"),
    (DEEPSEEK, SEPARATE, store_fp8("gate", "_scale_inv", expert=1), "1.gate_proj.weight' is FP8 but .*_inv is missing"),
    *((DEEPSEEK, SEPARATE, store_fp8("gate", "_scale_inv", *n, block=4), FIT) for n in ((2, 2), (3, 2), (I, 1), (I,))),
    (DEEPSEEK, SEPARATE, add_scale("up", "_scale_inv"), "which is BF16 and needs none"),
    (
        DEEPSEEK,
        SEPARATE,
        combine(store_fp8("gate", "_scale_inv", 1, 1), add_scale("gate", "_scale")),
        "both claim to be",
    ),
    ("Hunyuan-A13B", SEPARATE, config(**LISTS | {"moe_intermediate_size": [9, I, I + 1]}), r"_size\[2\] = 7"),
]
UNSUPPORTED: list[tuple[str, Style, Change, str]] = [
    *(
        (QWEN, SEPARATE, stray(f"experts.{name}", 2, 2), f"{name}' is among the experts but is not one.*{words}")
        for name, words in STRAYS.items()
    ),
    (QWEN, SEPARATE, also(SEPARATE, ""), "several prefixes"),
    (
        QWEN,
        SEPARATE,
        lambda m: m.experts.update({f"{m.name('up', 2, 1)[:-6]}bias": m.bits(I)}),
        r"up_proj\.bias'.*bias",
    ),
    (DEEPSEEK, SEPARATE, store_unsupported("F8_E5M2", U8, "_scale_inv"), "E5M2.*BF16"),
    (DEEPSEEK, SEPARATE, store_unsupported("F64", np.float64), "float64.*BF16"),
    (DEEPSEEK, SEPARATE, store_unsupported("I8", U8, "_scale", "F8_E5M2"), "integer.*BF16"),
    (DEEPSEEK, SEPARATE, store_unsupported("I8", U8, ".SCB"), "bitsandbytes.*BF16"),
]


@pytest.mark.parametrize(
    ("error", "name", "style", "change", "message"),
    [(InputError, *row) for row in REFUSED] + [(UnsupportedError, *row) for row in UNSUPPORTED],
)
def test_missing_extra_and_misplaced_tensors_are_refused(
    error: type[Exception], name: str, style: Style, change: Change, message: str, tmp_path: Path
) -> None:
    """The error names the file that has the tensor. 6 x 10 in blocks of 4 x 4 has 2 x 3 scales."""
    model = Model(ROWS[name], style)
    change(model)
    with pytest.raises(error, match=message) as failure:
        model.read(tmp_path)
    named_tensor = re.search(r"tensor '(.*?)'", str(failure.value))
    source = open_checkpoint(tmp_path)
    if named_tensor and named_tensor[1] in source.tensors:
        assert str(failure.value).startswith(f"{source.path(source.tensors[named_tensor[1]])}: tensor")


def test_unknown_families_are_read_if_their_form_is_known(tmp_path: Path) -> None:
    """A known form is read; two forms, unknown names, and a form that belongs to a certain family are refused."""
    styles = {
        s for arch in USABLE if not arch.more for s in arch.stored if not (isinstance(s, Fused) and s.interleaved)
    }
    arch = Arch("?", ("unheard_of",))
    for number, style in enumerate(styles):
        model = Model(arch, style)
        parsed = model.read(tmp_path / str(number))
        check(model, parsed)
        assert "unheard_of is not in the table" in parsed.notes[0]
        assert parsed.is_plain == style.gated
    for activation, limit in (("gelu_new", 0.0), ("silu", 7.0)):
        model = Model(arch, SEPARATE)
        model.config |= {"hidden_act": activation} | ({"swiglu_limit": limit} if limit else {})
        expected = ExpertFunction("gelu_tanh" if activation == "gelu_new" else "silu", limit)
        assert set(model.read(tmp_path / activation).functions.values()) == {expected}
    silent, bare = Model(arch, SEPARATE), Model(arch, SEPARATE)
    del silent.config["hidden_act"]
    bare.config = {}
    two = Model(arch, SEPARATE, layers=(1,))
    two.experts.update(Model(arch, FUSED, layers=(2,)).experts)
    none = Model(arch, Separate(*(f"blocks.{{layer}}.experts.{{expert}}.{p}" for p in "abc")))
    # Other families have the names of Inkling's tensors, w13 and w2, with gate before up.
    mixed = Model(replace(ROWS["Inkling"], matches=("unheard_of",)), ROWS["Inkling"].stored[0])
    unnamed = "is not in the table of architectures, and no configuration names its activation; "
    for number, (model, message) in enumerate(
        [
            *((two, "several forms"), (none, "--arch-file"), (mixed, r"not stored as any.*w13_weight")),
            (silent, f"unheard_of {unnamed}give --arch-file"),
        ]
    ):
        with pytest.raises(UnsupportedError, match=message):
            model.read(tmp_path / f"refused{number}")
    with pytest.raises(InputError, match=r"has a config.json without a model type, which names the activation"):
        bare.read(tmp_path / "bare")


@pytest.mark.parametrize("count", [None, 0, 1])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_dense_models_are_refused(family: str, count: int | None, tmp_path: Path) -> None:
    model = Model(Arch("?", (family,)), SEPARATE)
    model.experts = {}
    model.non_experts = {"model.layers.0.mlp.gate_proj.weight": model.bits(2, 2)}
    model.config["n_routed_experts"] = count
    with pytest.raises(UnsupportedError, match="dense model"):
        model.read(tmp_path)


@pytest.mark.parametrize("family", ["unheard_of", "qwen3_moe"])
@pytest.mark.parametrize("names", [("w13", "w2"), ("experts.w13", "experts.w2"), ()])
def test_a_model_that_counts_experts_is_never_called_dense(names: tuple[str, ...], family: str, tmp_path: Path) -> None:
    """The message names one unrecognised tensor of each kind, but none of the shared expert."""
    model = Model(Arch("?", (family,)), SEPARATE)
    model.experts = {f"model.layers.{n}.mlp.{name}": model.bits(E, 4, 4) for n in (1, 2) for name in names}
    with pytest.raises(InputError if (names, family) == ((), "qwen3_moe") else UnsupportedError) as failure:
        model.read(tmp_path)
    message = str(failure.value)
    assert ("--arch-file" if names else "--cpu-weights") in message
    assert "dense" not in message and "shared" not in message
    if names:
        listed = [f"'model.layers.1.mlp.{name}'" for name in names]
        assert f"tensors {', '.join(listed)})" in message and str(tmp_path / "model-0000") in message
    else:
        assert "n_routed_experts = 3" in message


def bits_and_scales(matrix: Any) -> np.ndarray:
    """Return the bits and the scale of each element, stacked."""
    rows = (np.arange(matrix.shape[0]) + matrix.origin[0]) // matrix.block[0]
    columns = (np.arange(matrix.shape[1]) + matrix.origin[1]) // matrix.block[1]
    return np.stack([matrix.values.astype(np.float64), matrix.scales[rows][:, columns].astype(np.float64)])


def expected_bits_and_scales(model: Model, name: str, scale: str, block: tuple[int, int]) -> np.ndarray:
    """Return the same for a whole stored tensor, computed by repeating its scales."""
    values, scales = model.experts[name][1], model.experts[scale][1]
    full = np.repeat(np.repeat(scales, block[0], axis=-2), block[1], axis=-1)
    full = full[..., : values.shape[-2], : values.shape[-1]]
    return np.stack([values.astype(np.float64), full.astype(np.float64)])


@pytest.mark.parametrize("block", [(4, 4), (4, 3), (5, 128), (128, 128), (1, 5)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fp8_blocks_keep_their_scales_in_fused_experts(
    interleaved: bool, transposed: bool, block: tuple[int, int], tmp_path: Path
) -> None:
    """The last block is partial, weight and scale are in different files, and a block spans the middle of gate_up.

    test_inputs.py tests separate experts.
    """
    style = replace(FUSED, interleaved=interleaved)
    model = Model(Arch("Blocks", ("blocks",), (style,)), style, layers=(1,), transposed=transposed)
    model.config["quantization_config"] = {"weight_block_size": list(block)}
    model.non_experts = {"model.layers.0.mlp.gate_proj.weight": model.bits(2, 2)}
    suffix = "_scale" if block[1] % 4 == 3 else "_scale_inv"
    names = {part: (model.name(part, 1), model.to_fp8(part, 1, block, suffix)) for part in style.matrices}
    moe = model.read(tmp_path, (model.arch,))
    assert moe.dtypes == ("F8_E4M3",) and moe.expert_tensor_names() == model.experts.keys()
    gate_up, down = (expected_bits_and_scales(model, *names[part], block) for part in style.matrices)
    gate_up, down = (x.swapaxes(2, 3) if transposed else x for x in (gate_up, down))
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, I), slice(I, None))
    for e in range(E):
        for projection, expected in (("gate", gate_up[:, e, gate]), ("up", gate_up[:, e, up]), ("down", down[:, e])):
            matrix = moe.linear(1, e, projection)
            assert matrix.kind.name == "fp8_e4m3"
            np.testing.assert_array_equal(bits_and_scales(matrix), expected)


@pytest.mark.parametrize("shape", [(I,), (I, 1), (1, 1), (1,), ()])
def test_fp8_scales_can_be_per_channel_or_per_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = Model(ROWS["GLM-4.5, 4.6, 4.7"], SEPARATE, layers=(1,))
    scale = model.to_fp8("gate", 1, (1, H), "_scale", 1)
    values = np.asarray(model.rng.random(shape, dtype=np.float32))
    model.experts[scale] = ("F32", values)
    each = bits_and_scales(model.read(tmp_path).linear(1, 1, "gate"))[1]
    np.testing.assert_array_equal(each, np.broadcast_to(values.reshape(-1, 1), (I, H)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(E,), (E, 2 * I)], ids=["tensor", "channel"])
def test_fused_fp8_scales_can_be_per_channel_or_per_tensor(
    transposed: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = Model(ROWS["Mistral-Large-3, Mistral 4"], FUSED, layers=(1,), transposed=transposed)
    values = model.rng.random(shape, dtype=np.float32)
    model.experts[model.to_fp8("gate_up", 1, (1, 1), "_scale")] = ("F32", values)
    parsed = model.read(tmp_path)
    for e in range(E):
        expected = np.broadcast_to(values[e].reshape(-1, 1), (2 * I, H))
        np.testing.assert_array_equal(bits_and_scales(parsed.linear(1, e, "up"))[1], expected[I:])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("ending", [".scale", ".qscale_weight", ".weight_scale_inv"])
def test_scales_have_several_names_and_dtypes(ending: str, dtype: str, tmp_path: Path) -> None:
    """Scales of activations are not among the tensors of a layer."""
    model = Model(ROWS["DeepSeek-V4"], ROWS["DeepSeek-V4"].stored[0], "", layers=(1,))
    del model.experts[model.to_fp8("gate", 1, (128, 128))]
    bits = {"F32": np.float32(0.375), "BF16": np.uint16(0x3EC0), "F16": np.float16(0.375)}[dtype]
    stem = model.name("gate", 1).removesuffix(".weight")
    model.experts |= {stem + ending: (dtype, np.full((1, 1), bits)), f"{stem}.input_scale": ("F32", np.float32([1]))}
    parsed = model.read(tmp_path)
    assert parsed.expert_tensor_names() == model.experts.keys()
    assert f"{stem}.input_scale" not in {t.name for t in parsed.layer_tensors(1)}
    scales = parsed.linear(1, 0, "gate").scales
    assert scales is not None and scales.dtype == np.float32 and scales.tolist() == [[0.375]]


def test_experts_of_other_towers_are_reported(tmp_path: Path) -> None:
    model = Model(ROWS["Qwen3-Omni (thinker)"], SEPARATE, "thinker.model.", nested="thinker_config")
    model.non_experts["talker.model.layers.0.mlp.experts.0.up_proj.weight"] = model.bits(2, 2)
    parsed = model.read(tmp_path)
    check(model, parsed)
    assert "1 tensors of other experts, such as talker.model" in parsed.notes[0]


def test_unaligned_experts_are_copied(tmp_path: Path) -> None:
    model = Model(ROWS[QWEN], SEPARATE, layers=(1,))
    model.non_experts = {"model.layers.0.odd": ("U8", np.zeros(1, U8))}
    write_file(tmp_path / "model.safetensors", {**model.non_experts, **model.experts})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    parsed = recognize(open_checkpoint(tmp_path))
    for expert in range(E):
        assert not parsed.source.array(model.name("gate", 1, expert)).flags.aligned
        gate = parsed.linear(1, expert, "gate").values
        assert gate.flags.aligned
        np.testing.assert_array_equal(gate, model.expected_values[1, expert, "gate"])


ROW = """
name = "My MoE"
matches = ["my_moe"]
experts = ["how_many"]
activation = "swiglu_step"
limit = 3

[[stored]]
style = "separate"
gate = "blocks.{layer}.moe.{expert}.a.weight"
up = "blocks.{layer}.moe.{expert}.b.weight"
down = "blocks.{layer}.moe.{expert}.c.weight"
"""


@pytest.mark.parametrize(
    ("activation", "config_activation"), [("swiglu_step", "xielu"), ("silu", "relu"), ("silu", "relu2")]
)
def test_activation_of_a_row_from_a_file_wins(activation: str, config_activation: str, tmp_path: Path) -> None:
    arch = parse_arch(ROW.replace('"swiglu_step"', f'"{activation}"'))
    model = Model(arch, arch.stored[0], "")
    model.config["hidden_act"] = config_activation
    assert model.read(tmp_path / "given", (arch, *ARCHS)).functions[1] == ExpertFunction(activation, limit=3.0)
    silent = parse_arch(ROW.replace('activation = "swiglu_step"\nlimit = 3\n', ""))
    if config_activation != "xielu":
        assert model.read(tmp_path / "silent", (silent, *ARCHS)).functions[1].activation == config_activation


def test_row_from_a_file_applies_to_any_checkpoint(tmp_path: Path) -> None:
    arch = parse_arch(
        ROW.replace('matches = ["my_moe"]', "").replace('"swiglu_step"', '"silu"').replace("limit = 3", "")
    )
    model = Model(replace(arch, matches=("qwen3_moe",)), arch.stored[0], "")
    parsed = model.read(tmp_path / "model", (arch, *ARCHS))
    assert parsed.arch is arch
    check(model, parsed)


def test_row_from_a_file_can_have_fused_experts() -> None:
    stored = f'[[stored]]\nstyle = "fused"\ninterleaved = true\ngate_up = "{FUSED.gate_up}"\ndown = "{FUSED.down}"'
    assert parse_arch(f'name = "F"\n{stored}').stored == (replace(FUSED, interleaved=True),)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('name = "My MoE"', "", "needs a name (a string), and a"),
        ('name = "My MoE"', "name = 3", "needs a name (a string), and a"),
        ("[[stored]]", "[[stowed]]", "unknown key stowed"),
        ("[[stored]]", "[other]", "unknown key other"),
        ('style = "separate"', 'style = "loose"', "stored.style must be one of separate, fused, stacked"),
        ('style = "separate"', 'style = "fused"', "unknown key stored.gate"),
        ('"swiglu_step"', '"magic"', "activation must be one of silu"),
        ('["how_many"]', '"how_many"', "experts must be a list"),
        (".{expert}.a", ".a", "stored.gate must be a tensor name with {layer} and {expert}"),
        ("blocks.{layer}.moe.{expert}.a", "{expert}.{layer}.a", "stored.gate"),
        ("blocks.{layer}.moe.{expert}.a", "blocks{layer}.moe.{expert}.a", "stored.gate"),
        ("blocks.{layer}.moe.{expert}.a", "x.{prefix}.{layer}.{expert}.a", "stored.gate"),
        ("{layer}.moe.{expert}.a", "{layer.moe", "stored.gate"),
        ('gate = "blocks.{layer}.moe.{expert}.a.weight"', "", "stored.gate"),
        ("name =", "name", "not valid TOML"),
    ],
)
def test_faulty_row_files_are_refused(old: str, new: str, message: str) -> None:
    assert old in ROW
    with pytest.raises(InputError) as failure:
        parse_arch(ROW.replace(old, new))
    assert message in str(failure.value) and str(failure.value).startswith("--arch-file: ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("name =", "name", "not valid TOML ("), ("limit", "limits", "unknown key limits; use only ")],
)
def test_faulty_row_files_are_named(old: str, new: str, message: str, example: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(ROW.replace(old, new))
    error = run_in_process("cpu", example, tmp_path / "out", "--arch-file", file).exception
    assert isinstance(error, InputError) and str(error).startswith(f"--arch-file {file}: {message}")
    assert "; " in str(error)
