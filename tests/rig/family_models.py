"""Tiny models with random weights of each mixture-of-experts family of transformers."""

import functools
from pathlib import Path
from typing import Any

from rig.family_rows import TINY, VISION, Row, Settings


def config_of(model_type: str, row: Row) -> Any:
    """Return a config of the family whose parts are all tiny."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**_tiny(kind, TINY, row.settings, row.vision))


def _tiny(kind: Any, sizes: Settings, settings: Settings, vision: Settings) -> Settings:
    default = kind()
    fields = default.to_dict().keys() | getattr(kind, "attribute_map", {}).keys()
    config = {name: value for name, value in sizes.items() if name in fields}
    parts = {name: part for name in kind.sub_configs if (part := getattr(default, name, None)) is not None}
    for name, part in parts.items():
        sizes_and_settings = (TINY, settings) if "text" in name else (VISION, vision)
        config[name] = {"model_type": part.model_type, **_tiny(type(part), *sizes_and_settings, vision)}
    return config if any("text" in name for name in parts) else {**config, **settings}


def auto_class(model_type: str) -> Any:
    """Return the auto class of transformers that loads a family."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as WITH_ENCODER

    if model_type in WITH_ENCODER:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM if model_type in CAUSAL else transformers.AutoModelForImageTextToText


def save_model(kind: Any, config: Any, folder: Path) -> None:
    """Save a model with random weights whose experts decide the logits."""
    import torch

    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.bfloat16)
    modules = model.named_modules()
    scales = {f"{name}.weight": float(m.embed_scale) for name, m in modules if hasattr(m, "embed_scale")}
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            gain = 2 if "experts." in name and "shared" not in name else 1
            inputs = min(weight.shape[-2:]) if weight.ndim == 3 else weight[0].numel()
            torch.nn.init.normal_(weight, std=1 / scales.get(name, 1.0) if "embed" in name else gain * inputs**-0.5)
        elif "experts." in name and name.endswith(".bias"):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)


def compute_chosen_experts(model: Any) -> None:
    """Let NLLB-MoE compute the experts that its router chose, as transformers 4 does.

    transformers 5 takes the router's mask for numbers of experts, and computes only experts 0 and 1.
    """
    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module.forward = functools.partial(_compute_nllb_experts, module)


def _compute_nllb_experts(experts: Any, hidden: Any, mask: Any, weights: Any) -> Any:
    outputs = [experts[f"expert_{n}"](hidden) * weights[:, n, None] for n in range(experts.num_experts)]
    return sum(outputs) * (1 - experts.moe_token_dropout)


def zero_experts(original: Any, ours: Any) -> None:
    """Set the weights of all experts of the original that ours replaces to zero."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    for name, module in ours.named_modules():
        if isinstance(module, RoutedExperts):
            block, _, child = name.rpartition(".")
            parent = original.get_submodule(block)
            only_experts = hasattr(parent, child) or child == block.rpartition(".")[2]
            for weight in getattr(parent, child, parent).parameters():
                if weight.ndim == 3 or only_experts:  # JetMoE's block is its experts and a router
                    weight.data.zero_()
