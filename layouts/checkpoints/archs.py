"""The table of mixture-of-experts architectures: which tensors are the experts, and what the experts compute.

A row is data. To add an architecture, add a row here, or hand the same row to the command as a small file (arch_file.py).
Names of tensors, config keys and released dtypes were taken from published checkpoints and the loaders that read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# What may stand before "layers." in a tensor's name; {prefix} in a template is any one of these.
PREFIXES = (
    "",
    "model.",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "thinker.model.",
)

# Config keys, the first one found counts; a dot goes into a nested object.
NUM_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "moe.num_experts")
MOE_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe.expert_hidden_dim")
DENSE_WIDTH = ("moe_intermediate_size", "intermediate_size")  # families whose config has one width for all
HIDDEN = ("routed_expert_hidden_size", "hidden_size", "dim")


@dataclass(frozen=True)
class Separate:
    """Three 2-D tensors per expert: gate and up [I, H], down [H, I]."""

    gate: str
    up: str
    down: str
    parts: ClassVar[tuple[str, ...]] = ("gate", "up", "down")


@dataclass(frozen=True)
class Fused:
    """Two 3-D tensors per layer: gate_up [E, 2I, H] with down [E, H, I], or [E, H, 2I] with [E, I, H]; shapes decide.

    interleaved  gate and up are the even and odd rows; otherwise gate is the first half, up the second.
    """

    gate_up: str
    down: str
    interleaved: bool = False
    parts: ClassVar[tuple[str, ...]] = ("gate_up", "down")


@dataclass(frozen=True)
class Stacked:
    """Three 3-D tensors per layer: gate and up [E, I, H], down [E, H, I]; the config decides whether all are transposed.

    output_major  what holds where I = H, so that the config cannot decide.
    """

    gate: str
    up: str
    down: str
    output_major: bool = True
    parts: ClassVar[tuple[str, ...]] = ("gate", "up", "down")


Style = Separate | Fused | Stacked


@dataclass(frozen=True)
class Arch:
    """One family of checkpoints.

    matches      values of config.json's model_type or architectures.
    stored       the ways its experts are published; the tensors say which one it is.
    experts, width, hidden   config keys of E, I and H, to be compared with the tensors' shapes.
    activation   key of ACTIVATIONS.
    weights_on   where a token's routing weight is multiplied: "output" or "input" of the expert.
    instead      what to use where activation or weights_on is not what kt-kernel's AMX experts compute.
    refusal      why this family cannot be represented at all; None if it can.
    """

    name: str
    matches: tuple[str, ...]
    stored: tuple[Style, ...] = ()
    experts: tuple[str, ...] = NUM_EXPERTS
    width: tuple[str, ...] = MOE_WIDTH
    hidden: tuple[str, ...] = HIDDEN
    activation: str = "silu"
    weights_on: str = "output"
    instead: str = "keep these experts on the GPU"
    refusal: str | None = None


# What an expert computes before down_proj. Only the first is what kt-kernel's AMXINT4 and AMXINT8 compute.
ACTIVATIONS = {
    "silu": "silu(gate) * up",
    "gelu": "gelu(gate) * up",
    "swiglu_oai": "gate * sigmoid(1.702 * gate) * (up + 1) with gate and up clamped",
    "swiglu_limit": "silu(gate) * up with gate and up clamped to a limit",
}


def _separate(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Separate:
    base = "{prefix}layers.{layer}." + block + "experts.{expert}."
    return Separate(f"{base}{gate}.weight", f"{base}{up}.weight", f"{base}{down}.weight")


def _fused(block: str, gate_up: str = "experts.gate_up_proj", down: str = "experts.down_proj") -> Fused:
    base = "{prefix}layers.{layer}." + block
    return Fused(base + gate_up, base + down)


W132 = ("w1", "w3", "w2")
MLP = (_separate("mlp."), _fused("mlp."))
SPARSE = (_separate("block_sparse_moe.", *W132), _fused("block_sparse_moe."), *MLP)
FEED_FORWARD = (_separate("feed_forward."), _fused("feed_forward."))
FEED_FORWARD_W = (_separate("feed_forward.", *W132), _fused("feed_forward."))
MOE = Stacked(*("{prefix}layers.{layer}.moe." + p + "_proj.weight" for p in ("gate", "up", "down")))

MXFP8_INSTEAD = "serve the original checkpoint with kt-kernel's MXFP8 method"
MXFP4_INSTEAD = "serve the original checkpoint with kt-kernel's MXFP4 method, which has the limit"

ARCHS = (
    Arch("DeepSeek-V3, R1, V3.1", ("deepseek_v3", "DeepseekV3ForCausalLM"), MLP),
    Arch("DeepSeek-V3.2", ("deepseek_v32", "DeepseekV32ForCausalLM"), MLP),
    Arch("DeepSeek-V2, Lite, Moonlight", ("deepseek_v2", "DeepseekV2ForCausalLM"), MLP),
    Arch("Kimi-K2", ("kimi_k2",), MLP),
    Arch("Qwen3-MoE", ("qwen3_moe", "Qwen3MoeForCausalLM"), MLP),
    Arch("Qwen2-MoE", ("qwen2_moe", "Qwen2MoeForCausalLM"), MLP),
    Arch("Mixtral", ("mixtral", "MixtralForCausalLM"), SPARSE, width=DENSE_WIDTH),
)
