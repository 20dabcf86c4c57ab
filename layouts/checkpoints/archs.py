"""The table of mixture-of-experts architectures: which tensors are the experts, and what the experts compute.

A row is data. To add an architecture, add a row here, or hand the same row to the command as a file (arch_file.py).
Names of tensors, config keys and released dtypes were taken from published checkpoints and the loaders that read them.
Line numbers are those of transformers 5.24 and of llama.cpp at d32676d7 (August 2026).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.tensors import list_projections

# Prefixes of "layers." in tensor names. {prefix} in a template stands for any of them.
PREFIXES = (
    *("", "model.", "language_model.model.", "model.language_model."),
    *("backbone.", "language.model.", "thinker.model.", "model.llm.", "model.decoder."),
)

# Config keys: the first existing one counts. A dot separates the keys of nested objects.
NUM_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
MTP_LAYERS = ("num_nextn_predict_layers",)
ALL = "all"  # value of --experts for every stack
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "moe.num_experts")
MOE_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe.expert_hidden_dim")
DENSE_WIDTH = ("moe_intermediate_size", "intermediate_size")  # for families with one width for dense layers and experts
HIDDEN = ("routed_expert_hidden_size", "moe_latent_size", "hidden_size", "dim", "d_model")
# No model has more layers, or more experts in a layer. A file with more is damaged, and listing them fills the memory.
MOST_LAYERS, MOST_EXPERTS = 10_000, 1 << 16


@dataclass(frozen=True)
class _Projections:
    """Names of tensors of gate, up and down; without a gate (None) of two."""

    gate: str | None
    up: str
    down: str

    @property
    def matrices(self) -> tuple[str, ...]:
        return list_projections(self.gated)

    @property
    def gated(self) -> bool:
        return self.gate is not None


@dataclass(frozen=True)
class Separate(_Projections):
    """Three 2-D tensors per expert: gate and up [I, H], down [H, I]; without a gate two."""


@dataclass(frozen=True)
class Fused:
    """Two 3-D tensors per layer: gate_up [E, 2I, H] with down [E, H, I], or [E, H, 2I] with [E, I, H]; shapes decide.

    interleaved  gate and up are the even and odd rows; otherwise gate is the first half, up the second.
    """

    gate_up: str
    down: str
    interleaved: bool = False
    matrices: ClassVar[tuple[str, ...]] = ("gate_up", "down")
    gated: ClassVar[bool] = True


@dataclass(frozen=True)
class Stacked(_Projections):
    """Three 3-D tensors per layer: gate and up [E, I, H], down [E, H, I], or all transposed; the config decides.

    Without a gate, there are two.

    output_major  what holds where I = H, so that the config cannot decide.
    fixed         it always holds, whatever the config says.
    flat          all three are 2-D, [E * I, H], with one expert below the other and down transposed; the config has E.
    """

    output_major: bool = True
    fixed: bool = False
    flat: bool = False


Style = Separate | Fused | Stacked


@dataclass(frozen=True)
class Arch:
    """One family of checkpoints.

    matches      values of config.json's model_type or architectures, and after "gguf:" those of a GGUF's
                 general.architecture.
    stored       the ways its experts are published in safetensors; the tensors say which one it is.
    layers       config keys of the number of layers; what lies beyond is MTP.
    experts, width, hidden   config keys of E, I and H, to be compared with the tensors' shapes.
    shares       general.architecture of GGUFs that llama.cpp's converter writes for it, too; another row's.
    function     what its experts compute; config.json may name another activation than silu, and the constants.
    decides      its activation holds, whatever config.json calls it: an --arch-file may say so.
    router_scale a GGUF's scale of the down matrices is the router's, unless gate and up have scales, too.
    router       end of the router's name in transformers, if it is a Linear and has a different name in the checkpoint.
    after        config keys of the number of experts that precede its own in a layer: those of the stack before, which
                 the checkpoint numbers together with them
    refusal      why no format of experts can hold this family's, and what to do; None if one can. If it has `stored`
                 all the same, they can be read.
    stack        what the row describes, if the family has several stacks of layers, or of experts in a layer
    more         the rows of the further stacks; outputs number their layers after those of the preceding stacks
    """

    name: str
    matches: tuple[str, ...]
    stored: tuple[Style, ...] = ()
    layers: tuple[str, ...] = NUM_LAYERS
    experts: tuple[str, ...] = NUM_EXPERTS
    width: tuple[str, ...] = MOE_WIDTH
    hidden: tuple[str, ...] = HIDDEN
    shares: tuple[str, ...] = ()
    function: ExpertFunction = PLAIN
    decides: bool = False
    router_scale: bool = False
    router: str = ""
    after: tuple[str, ...] = ()
    refusal: str | None = None
    stack: str = ""
    more: tuple[Arch, ...] = ()

    @property
    def stacks(self) -> tuple[Arch, ...]:
        """The rows of all stacks, in the order of their layers' numbers in outputs."""
        return self, *self.more


def _make_separate(
    block: str, gate: str | None = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Separate:
    base = "{prefix}layers.{layer}." + block + "experts.{expert}."
    return Separate(gate and f"{base}{gate}.weight", f"{base}{up}.weight", f"{base}{down}.weight")


def _make_ungated(block: str, up: str, down: str) -> Separate:
    """Return the style of experts called `expert_N`, without a gate, in a block of a model without a prefix."""
    base = f"{block}.experts.expert_{{expert}}."
    return Separate(None, f"{base}{up}.weight", f"{base}{down}.weight")


def _add_stack(first: Arch, stack: str, **fields: Any) -> Arch:
    """Return the row of a family's first stack with one for the second, which differs in its name and these fields."""
    return replace(first, more=(replace(first, matches=(), stack=stack, **fields),))


def _list_keys(keys: tuple[str, ...], stack: int) -> tuple[str, ...]:
    """Return the keys of a number that is a list with one entry for each stack, or the same for all stacks."""
    return *(f"{key}.{stack}" for key in keys), *keys


def _make_fused(
    block: str, gate_up: str = "experts.gate_up_proj", down: str = "experts.down_proj", interleaved: bool = False
) -> Fused:
    base = "{prefix}layers.{layer}." + block
    return Fused(base + gate_up, base + down, interleaved)


W132 = ("w1", "w3", "w2")
MLP = (_make_separate("mlp."), _make_fused("mlp."))
SPARSE = (_make_separate("block_sparse_moe.", *W132), _make_fused("block_sparse_moe."), *MLP)
FEED_FORWARD = (_make_separate("feed_forward."), _make_fused("feed_forward."))
FEED_FORWARD_W = (_make_separate("feed_forward.", *W132), _make_fused("feed_forward."))
LINEARS = ("input_linear.weight", "output_linear.weight")
GRANITE = (_make_fused("block_sparse_moe.", *LINEARS),)
JETMOE = (_make_fused("mlp.", *LINEARS),)
ARIA = (_make_fused("mlp.", "experts.fc1.weight", "experts.fc2.weight"),)
INKLING = (_make_fused("mlp.", "experts.w13_weight", "experts.w2_weight", interleaved=True),)
FFN_W = (_make_separate("ffn.", *W132),)
BARE = (_make_separate(""), _make_fused(""))
BARE_W = (_make_separate("", *W132),)
_moe = "{prefix}layers.{layer}.moe."
MOE = (Stacked(f"{_moe}gate_proj.weight", f"{_moe}up_proj.weight", f"{_moe}down_proj.weight"),)
GEMMA = (*BARE, _make_separate("moe."))  # as published in BF16 and NVFP4
_dbrx = "transformer.blocks.{layer}.ffn.experts.mlp."
DBRX = (Stacked(f"{_dbrx}w1", f"{_dbrx}v1", f"{_dbrx}w2", flat=True),)
IQUEST = (_make_fused("mlp.", "experts.fc", "experts.proj"), MLP[0])
# GGUF: llama.cpp's converter stores all families like this. Early versions stored each expert by itself.
_blk = "blk.{layer}.ffn_"
GGUF_STYLES: tuple[Style, ...] = (
    Stacked(f"{_blk}gate_exps.weight", f"{_blk}up_exps.weight", f"{_blk}down_exps.weight", fixed=True),
    Fused(f"{_blk}gate_up_exps.weight", f"{_blk}down_exps.weight"),
    Separate(f"{_blk}gate.{{expert}}.weight", f"{_blk}up.{{expert}}.weight", f"{_blk}down.{{expert}}.weight"),
    Stacked(None, f"{_blk}up_exps.weight", f"{_blk}down_exps.weight", fixed=True),
)


def gguf_styles(gated: bool) -> tuple[Style, ...]:
    """Return the ways in which GGUFs store experts with, or without, a gate; the names of up and down are the same."""
    return tuple(style for style in GGUF_STYLES if style.gated == gated)


CHUNKS = (
    _make_separate("mlp.chunk_"),
    Stacked(f"{_blk}gate_chexps.weight", f"{_blk}up_chexps.weight", f"{_blk}down_chexps.weight", fixed=True),
)
DEEPSEEK2 = ("deepseek2",)  # llama.cpp's architecture of many families
# The functions that several families have.
LIMITED = ExpertFunction(limit=10.0)
OAI = ExpertFunction("swiglu_oai", limit=7.0, alpha=1.702)
SOFTCAP = ExpertFunction("softcap", alpha=4.0, beta=25.0)
RELU = ExpertFunction("relu", gated=False)

ARCHS = (
    Arch("DeepSeek-V3, R1, V3.1, Moonlight", ("deepseek_v3", "DeepseekV3ForCausalLM", "gguf:deepseek2"), MLP),
    Arch("DeepSeek-V3.2", ("deepseek_v32", "DeepseekV32ForCausalLM", "gguf:deepseek32"), MLP, shares=DEEPSEEK2),
    # transformers, deepseek_v4/modeling_deepseek_v4.py:1037-1074, which clamps before silu; llama.cpp,
    # src/models/deepseek4.cpp:37,161.
    Arch(
        "DeepSeek-V4",
        ("deepseek_v4", "DeepseekV4ForCausalLM", "gguf:deepseek4"),
        (*FFN_W, *MLP),
        function=LIMITED,
    ),
    # Not in transformers. Its config.json has the limit of DeepSeek-V4; llama.cpp, src/models/deepseek4.cpp:37,161.
    Arch("DeepSeek-V4.1", ("deepseek_v41", "DeepseekV41ForCausalLM", "gguf:deepseek41"), FFN_W, function=LIMITED),
    Arch(
        "DeepSeek-V2, V2-Lite, VL2", ("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek_vl_v2"), MLP, shares=DEEPSEEK2
    ),
    Arch("DeepSeek-V1", ("deepseek", "DeepseekForCausalLM", "gguf:deepseek"), MLP),
    Arch(
        "DeepSeek-OCR, Unlimited-OCR",
        (
            *("deepseek_ocr2", "deepseek_ocr2_text", "unlimited_ocr", "unlimited_ocr_text"),
            *("DeepseekOcr2ForConditionalGeneration", "UnlimitedOcrForConditionalGeneration", "gguf:deepseek2-ocr"),
        ),
        MLP,
    ),
    # Not in transformers. vLLM, models/gigachat3_5.py at 053521db: GigaChat35MoE gives its experts the swiglu_limit (10
    # by default in configs/gigachat3_5.py) of GigaChat35MLP, whose SiluAndMulWithClamp clamps before silu. llama.cpp,
    # src/models/gigachat35.cpp at e7d38ee0: a limit for each layer (LLM_KV_SWIGLU_CLAMP_EXP).
    Arch("GigaChat-3.5", ("gigachat3_5", "GigaChat35ForCausalLM", "gguf:gigachat35"), MLP, function=LIMITED),
    Arch("Kimi-K2", ("kimi_k2", "KimiK2ForCausalLM"), MLP, shares=DEEPSEEK2),
    Arch("Kimi-K2.5, K2.6", ("kimi_k25", "KimiK25ForConditionalGeneration"), MLP, shares=DEEPSEEK2),
    # Not in transformers. llama.cpp, src/models/kimi-k3.cpp:178-189 (betas) and 569-604 (equation, latent size).
    # Inkling 2 has the same equation.
    Arch(
        "Kimi-K3",
        ("kimi_k3", "KimiK3ForConditionalGeneration", "gguf:kimi-k3"),
        SPARSE,
        function=SOFTCAP,
    ),
    Arch("Kimi-Linear", ("kimi_linear", "KimiLinearForCausalLM", "gguf:kimi-linear"), SPARSE),
    Arch("Qwen2-MoE", ("qwen2_moe", "Qwen2MoeForCausalLM", "gguf:qwen2moe"), MLP),
    Arch("Qwen3-MoE, Qwen3-Coder", ("qwen3_moe", "Qwen3MoeForCausalLM", "gguf:qwen3moe"), MLP),
    Arch("Qwen3-Next, Coder-Next", ("qwen3_next", "Qwen3NextForCausalLM", "gguf:qwen3next"), MLP),
    Arch(
        "Qwen3-VL-MoE",
        ("qwen3_vl_moe", "qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", "gguf:qwen3vlmoe"),
        MLP,
    ),
    Arch("Qwen3-Omni (thinker)", ("qwen3_omni_moe", "qwen3_omni_moe_thinker"), MLP, shares=("qwen3vlmoe", "qwen3moe")),
    Arch(
        "Qwen3.5, 3.6, 3.8 MoE",
        ("qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration", "gguf:qwen35moe"),
        MLP,
    ),
    Arch("Qwen3.8-Flash-Next", ("qwen4_exp", "qwen4_exp_text", "Qwen4ExpForConditionalGeneration"), MLP),
    Arch("GLM-4.5, 4.6, 4.7", ("glm4_moe", "Glm4MoeForCausalLM", "gguf:glm4moe"), MLP),
    Arch(
        "GLM-4.5V, 4.6V", ("glm4v_moe", "glm4v_moe_text", "Glm4vMoeForConditionalGeneration"), MLP, shares=("glm4moe",)
    ),
    Arch("GLM-4.7-Flash", ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"), MLP, shares=DEEPSEEK2),
    Arch("GLM-5, 5.1, 5.2", ("glm_moe_dsa", "GlmMoeDsaForCausalLM", "gguf:glm-dsa"), MLP),
    Arch(
        "MiniMax-M2, 2.1, 2.5, 2.7",
        ("minimax_m2", "MiniMaxM2ForCausalLM", "gguf:minimax-m2"),
        SPARSE,
        width=DENSE_WIDTH,
    ),
    # transformers, minimax_m3_vl/modeling_minimax_m3_vl.py:194-231; llama.cpp, src/models/minimax-m3.cpp:67,556.
    Arch(
        "MiniMax-M3",
        (
            *("minimax_m3_vl", "minimax_m3", "minimax_m3_vl_text"),
            *("MiniMaxM3SparseForConditionalGeneration", "gguf:minimax-m3"),
        ),
        SPARSE,
        width=DENSE_WIDTH,
        function=OAI,
    ),
    # transformers, gpt_oss/modeling_gpt_oss.py:69-114; llama.cpp, src/models/openai-moe.cpp:47-56,136.
    Arch(
        "gpt-oss",
        ("gpt_oss", "GptOssForCausalLM", "gguf:gpt-oss"),
        (_make_fused("mlp.", interleaved=True),),
        width=DENSE_WIDTH,
        function=replace(OAI, biases=True),
    ),
    # transformers, openai_privacy_filter/modeling_openai_privacy_filter.py: gate is the first half
    Arch(
        "OpenAI Privacy Filter",
        ("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification"),
        (_make_fused("mlp."),),
        width=DENSE_WIDTH,
        function=replace(OAI, biases=True),
    ),
    # transformers, llama4/modeling_llama4.py:55-84,141-174; llama.cpp, src/llama-graph.cpp:1941,2080-2085.
    Arch(
        "Llama-4",
        ("llama4", "llama4_text", "Llama4ForConditionalGeneration", "Llama4ForCausalLM", "gguf:llama4"),
        FEED_FORWARD,
        width=DENSE_WIDTH,
        function=ExpertFunction(weights_on="input"),
    ),
    Arch(
        "Mixtral",  # llama.cpp has the same experts in all architectures that continue its "llama"
        ("mixtral", "MixtralForCausalLM", "gguf:llama", "gguf:llama-embed", "gguf:mistral3"),
        SPARSE,
        width=DENSE_WIDTH,
    ),
    Arch(
        "Mistral-Large-3, Mistral 4",
        ("mistral4", "mistral_large_3", "Mistral4ForCausalLM", "gguf:mistral4"),
        (*MLP, *BARE_W),
        shares=DEEPSEEK2,
    ),
    Arch(
        "Mistral-Large-4",
        ("mistral_large4", "mistral_large4_text", "MistralLarge4ForConditionalGeneration"),
        (*BARE_W, *MLP),
    ),
    Arch("Hunyuan-A13B", ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "gguf:hunyuan-moe"), MLP),
    Arch("Hy3", ("hy_v3", "HYV3ForCausalLM", "gguf:hy_v3"), MLP),
    Arch("ERNIE-4.5", ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "gguf:ernie4_5-moe"), MLP),
    _add_stack(
        Arch(
            "ERNIE-4.5-VL",
            ("ernie4_5_moe_vl", "ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
            (MLP[0],),
            experts=_list_keys(NUM_EXPERTS, 0),
            width=_list_keys(MOE_WIDTH, 0),
            stack="text",
        ),
        "images",
        experts=_list_keys(NUM_EXPERTS, 1),
        width=_list_keys(MOE_WIDTH, 1),
        after=_list_keys(NUM_EXPERTS, 0),
    ),
    # transformers, step3p7/modeling_step3p7.py:537-573, which clamps after silu.
    Arch(
        "Step-3.5, 3.7",
        ("step3p5", "step3p7", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "gguf:step35"),
        (*MOE, _make_separate("moe.")),
        function=ExpertFunction("swiglu_step"),
    ),
    Arch(
        "LongCat-Flash", ("longcat_flash", "LongcatFlashForCausalLM"), MLP, layers=("num_layers", "num_hidden_layers")
    ),
    Arch("Arctic", ("arctic", "ArcticForCausalLM", "gguf:arctic"), SPARSE, width=DENSE_WIDTH),
    Arch("MiniCPM-MoE", ("minicpm", "MiniCPMForCausalLM", "gguf:minicpm"), SPARSE, width=DENSE_WIDTH),
    Arch("MiniMax-Text-01", ("minimax", "MiniMaxForCausalLM"), SPARSE, width=DENSE_WIDTH),
    Arch("A.X-K1, K2", ("axk1", "axk2", "AXK1ForCausalLM", "AXK2ForCausalLM"), MLP),
    Arch("Beam 1", ("beam", "BeamForCausalLM"), MLP),
    Arch("Command A+", ("cohere2_moe", "Cohere2MoeForCausalLM", "gguf:cohere2moe"), MLP, width=DENSE_WIDTH),
    Arch("K-EXAONE", ("exaone_moe", "ExaoneMoeForCausalLM", "gguf:exaone-moe"), MLP),
    Arch(
        "dots3-note",
        ("dots3_note", "dots3_note_text", "Dots3NoteForConditionalGeneration", "Dots3NoteForCausalLM"),
        MLP,
    ),
    Arch("FlexOlmo", ("flex_olmo", "FlexOlmoForCausalLM"), MLP, width=DENSE_WIDTH),
    Arch("Flint", ("flint", "FlintForCausalLM"), MLP),
    Arch("Kolibri-1", ("kolibri1", "Kolibri1ForCausalLM"), MLP),
    Arch("Lara-4-Mini", ("lara_mini", "LaraMiniForCausalLM"), MLP),
    Arch("Mellum 2", ("mellum", "MellumForCausalLM", "gguf:mellum"), MLP),
    Arch("Sarvam", ("sarvam_moe", "sarvam_mla"), MLP),
    Arch("ZAYA1", ("zaya", "ZayaForCausalLM"), MLP),
    # Names and width of the two diffusion models: llama.cpp's conversion/llada.py and qwen.py.
    Arch(
        "LLaDA-MoE",
        ("LLaDAMoEModel", "LLaDAMoEModelLM", "gguf:llada-moe"),
        MLP,
        width=("expert_intermediate_size", *MOE_WIDTH),
    ),
    Arch("RND1", ("RND1", "gguf:rnd1"), MLP),
    # SGLang's models/iquest_q1.py: gate is the first half of fc, and only silu is accepted.
    Arch("IQuest-Q1", ("iquest_q1", "IQuestQ1ForCausalLM"), IQUEST, width=DENSE_WIDTH),
    # transformers' models/dbrx/modeling_dbrx.py: DbrxExpertGLU computes (silu(x w1^T) * (x v1^T)) w2.
    Arch(
        "DBRX",
        ("dbrx", "DbrxForCausalLM", "gguf:dbrx"),
        DBRX,
        experts=(*NUM_EXPERTS, "ffn_config.moe_num_experts"),
        width=(*DENSE_WIDTH, "ffn_config.ffn_hidden_size"),
    ),
    # transformers, muse_spark/modeling_muse_spark.py:127-143,191-251, which norms each output before its weight.
    Arch(
        "Muse Spark",
        ("muse_spark", "muse_spark_text", "MuseSparkForConditionalGeneration"),
        MLP,
        hidden=("moe_hidden_size", *HIDDEN),
        function=ExpertFunction(output_norm=True),
    ),
    # Not in transformers. The model's modeling_grove_moe.py (GroveMoeSparseMoeBlock.forward): the sum of the routed
    # experts, plus 0.05 times that of chunk experts id // 2 with the same weights and the same input. llama.cpp's
    # src/models/grovemoe.cpp:74-108 gives the chunk experts the routed experts' sum as input.
    _add_stack(
        Arch("GroveMoE", ("GroveMoeForCausalLM", "gguf:grovemoe"), MLP, stack="experts"),
        "chunk experts",
        stored=CHUNKS,
        experts=(),
        width=(),
    ),
    Arch("MiMo-V2", ("mimo_v2_flash", "mimo_v2", "MiMoV2FlashForCausalLM", "gguf:mimo2"), MLP),
    Arch(
        "Ling, Ring",
        (
            *("bailing_moe", "bailing_moe_v2", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
            *("gguf:bailingmoe", "gguf:bailingmoe2"),
        ),
        MLP,
    ),
    Arch(
        "Ling 3",
        (
            *("bailing_hybrid", "bailing_moe_v3_vl", "gguf:bailingmoe3", "BailingHybridForCausalLM"),
            *("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        ),
        MLP,
    ),
    # transformers, glm5_next/modeling_glm5_next.py:109-143.
    Arch("GLM-5.3-Flash", ("glm5_next", "glm5_next_text", "gguf:glm5next", "gguf:glm5-next"), MLP, function=LIMITED),
    # transformers, hy_v4/modeling_hy_v4.py:543-577.
    Arch(
        "Hy4",
        ("hy_v4", "hy_v4_vl", "hy_v4_vl_text", "HYV4ForCausalLM", "HYV4VLForConditionalGeneration", "gguf:hy_v4"),
        MLP,
        function=LIMITED,
    ),
    Arch("LFM2-MoE", ("lfm2_moe", "Lfm2MoeForCausalLM", "gguf:lfm2moe"), FEED_FORWARD_W),
    # transformers, nemotron_h/modeling_nemotron_h.py:653-712; llama.cpp, src/models/nemotron-h.cpp:99-103,211-239.
    Arch(
        "Nemotron-H",
        (
            *("nemotron_h", "NemotronHForCausalLM", "nemotron_h_puzzle", "NemotronHPuzzleForCausalLM"),
            "gguf:nemotron_h_moe",
        ),
        (_make_separate("mixer.", gate=None),),
        function=ExpertFunction("relu2", gated=False),
    ),
    # transformers, gemma4/modeling_gemma4.py:1255-1328; the router applies per_expert_scale.
    Arch(
        "Gemma-4 26B-A4B",
        ("gemma4", "gemma4_text", "Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "gguf:gemma4"),
        GEMMA,
        function=ExpertFunction("gelu_tanh"),
        router_scale=True,
    ),
    # The encoder has the decoder's experts: transformers' DiffusionGemmaModel ties them.
    Arch(
        "DiffusionGemma",
        ("diffusion_gemma", "diffusion_gemma_text", "DiffusionGemmaForBlockDiffusion", "gguf:diffusion-gemma"),
        GEMMA,
        function=ExpertFunction("gelu_tanh"),
        router_scale=True,
    ),
    Arch("dots.llm1", ("dots1", "Dots1ForCausalLM", "gguf:dots1"), MLP),
    Arch("OLMoE", ("olmoe", "OlmoeForCausalLM", "gguf:olmoe"), MLP, width=DENSE_WIDTH),
    Arch(
        "Phi-3.5-MoE",
        ("phimoe", "PhiMoEForCausalLM", "PhimoeForCausalLM", "gguf:phimoe"),
        SPARSE,
        width=DENSE_WIDTH,
        router="mlp.router",
    ),
    Arch("Jamba", ("jamba", "JambaForCausalLM", "gguf:jamba"), FEED_FORWARD, width=DENSE_WIDTH),
    Arch("Solar Open", ("solar_open", "SolarOpenForCausalLM"), MLP, shares=("glm4moe",)),
    Arch("AFMoE (Trinity)", ("afmoe", "AfmoeForCausalLM", "gguf:afmoe"), MLP),
    Arch("Laguna", ("laguna", "LagunaForCausalLM", "gguf:laguna"), MLP),
    Arch(
        "Granite 3 MoE, 4 H",
        ("granitemoe", "granitemoeshared", "granitemoehybrid", "gguf:granitemoe", "gguf:granitehybrid"),
        GRANITE,
        width=DENSE_WIDTH,
    ),
    Arch("Granite SWA", ("granitemoe_swa", "GraniteMoeSWAForCausalLM"), GRANITE, width=DENSE_WIDTH),
    Arch("Aria", ("aria", "aria_text"), ARIA, width=DENSE_WIDTH),
    Arch("JetMoE", ("jetmoe", "JetMoeForCausalLM"), JETMOE, width=DENSE_WIDTH),
    Arch(
        "Inkling",
        ("inkling_mm_model", "inkling_text", "InklingForConditionalGeneration", "gguf:inkling"),
        INKLING,
        width=DENSE_WIDTH,
    ),
    # transformers, inkling2/modeling_inkling2.py:733-793 and inkling2_loop/modeling_inkling2_loop.py:775-811.
    Arch("Inkling 2", ("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text"), INKLING, function=SOFTCAP),
    # Not in transformers. llama.cpp, src/models/grok.cpp:158-180, whose gelu has tanh; SGLang, models/grok.py:84-190.
    Arch(
        "Grok-1, Grok-2",
        ("Grok1ForCausalLM", "gguf:grok"),
        SPARSE,
        width=DENSE_WIDTH,
        function=ExpertFunction("gelu_tanh"),
    ),
    # Not in transformers. llama.cpp, src/models/smallthinker.cpp:151-158; names and keys: conversion/smallthinker.py.
    Arch(
        "SmallThinker",
        ("smallthinker", "SmallThinkerForCausalLM", "gguf:smallthinker"),
        (_make_separate("block_sparse_moe.", "gate", "up", "down"),),
        experts=("moe_num_primary_experts", *NUM_EXPERTS),
        width=("moe_ffn_hidden_size", *MOE_WIDTH),
        function=ExpertFunction("relu"),
    ),
    # llama.cpp's src/models/bert.cpp: two matrices, and gelu of the first one's product.
    Arch(
        "Nomic Embed MoE",
        ("gguf:nomic-bert-moe",),
        function=ExpertFunction("gelu_tanh", gated=False),
    ),
    # transformers, nllb_moe/modeling_nllb_moe.py:322-344: fc2(relu(fc1(x))).
    _add_stack(
        Arch(
            "NLLB-MoE",
            ("nllb-moe", "NllbMoeForConditionalGeneration"),
            (_make_ungated("model.encoder.layers.{layer}.ffn", "fc1", "fc2"),),
            layers=("encoder_layers",),
            width=("encoder_ffn_dim",),
            function=replace(RELU, biases=True),
            stack="encoder",
        ),
        "decoder",
        stored=(_make_ungated("model.decoder.layers.{layer}.ffn", "fc1", "fc2"),),
        layers=("decoder_layers",),
        width=("decoder_ffn_dim",),
    ),
    # transformers, switch_transformers/modeling_switch_transformers.py:132-154: wo(relu(wi(x))).
    _add_stack(
        Arch(
            "Switch Transformers",
            ("switch_transformers", "SwitchTransformersForConditionalGeneration"),
            (_make_ungated("encoder.block.{layer}.layer.1.mlp", "wi", "wo"),),
            layers=("num_layers",),
            width=("d_ff",),
            function=RELU,
            stack="encoder",
        ),
        "decoder",
        stored=(_make_ungated("decoder.block.{layer}.layer.2.mlp", "wi", "wo"),),
        layers=("num_decoder_layers", "num_layers"),
    ),
    # transformers' models/doge/modeling_doge.py: DogeCDMoE looks up one row of two embeddings for each expert.
    Arch(
        "Doge",
        ("doge", "DogeForCausalLM"),
        refusal="its experts are single rows of an embedding, not matrices; serve it without ktconvert, with "
        "transformers",
    ),
)
