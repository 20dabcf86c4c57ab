"""The memory that training takes beside the converted experts, estimated before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from ktconvert.layouts.checkpoints.config import experts_per_token
from ktconvert.pipeline.models import loading
from ktconvert.pipeline.models.fine_tuning import EXPERTS, target_modules
from ktconvert.pipeline.options.training_options import TrainOptions
from ktconvert.pipeline.ui.text import size


def needs(options: TrainOptions, choice: loading.ModelChoice) -> dict[str, int]:
    """What a step takes, in bytes, by the model's config alone."""
    config = loading.prepare(choice)
    import torch

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    with loading.explained(choice.model), torch.device("meta"):
        model = loading.auto_class(config).from_config(config)
    modules, plan, rank = find_experts(model), options.schedule_options, options.lora.rank
    names = target_modules(options, model)
    inside = tuple(f"{module.name}." for module in modules)
    rest = [(name, one) for name, one in model.named_parameters() if not name.startswith(inside)]
    linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n.split(".")[-1] in names]
    parameters = sum(rank * (m.in_features + m.out_features) for m in linears)
    if EXPERTS in names:
        parameters += sum(3 * rank * m.num_experts * (m.hidden + m.intermediate) for m in modules)
    text = config.get_text_config(decoder=True)
    count, hidden, layers = plan.batch_size * plan.sequence_length, modules[0].hidden, text.num_hidden_layers
    per_route = max(module.intermediate for module in modules)
    topk = experts_per_token(text.to_dict(), modules[0].layer, modules[0].num_experts)[0]
    # BF16: gate, up and their product of each route; some dozen rows of H of the layer's other parts.
    layer = 2 * count * (3 * topk * per_route + 12 * hidden)
    kept = 2 * count * hidden * layers + layer if plan.gradient_checkpointing else layer * layers
    return {
        "model without experts": sum(2 * one.numel() for _, one in rest),
        "one layer's experts, in BF16": max(6 * m.num_experts * m.hidden * m.intermediate for m in modules),
        "activations of a step": kept,
        "logits and their gradient": 8 * count * text.vocab_size,
        "LoRA with gradients and AdamW": 16 * parameters,
    }


def in_words(found: Mapping[str, int]) -> list[tuple[str, str]]:
    """Rows of a table."""
    return [*((what, size(nbytes)) for what, nbytes in found.items()), ("together", size(sum(found.values())))]
