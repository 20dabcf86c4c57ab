"""The memory that training takes beside the converted experts, estimated before anything is loaded."""

from __future__ import annotations

from ktconvert.layouts.checkpoints.config import experts_per_token
from ktconvert.pipeline.models import building, loading
from ktconvert.pipeline.models.fine_tuning import EXPERTS, target_modules
from ktconvert.pipeline.options.training_options import TrainOptions

LORA = "LoRA with gradients and AdamW"


def adapter_bytes(needed: dict[str, int]) -> int:
    """Return the bytes of the adapter's matrices in float32, of which `needs` counts gradients and two moments, too."""
    return needed[LORA] // 4


def needs(options: TrainOptions, choice: loading.ModelChoice) -> dict[str, int]:
    """What a step takes, in bytes, by the model's config alone."""
    config = loading.prepare(choice)
    import torch

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    with building.explained(choice.model, building.CONFIG, doing=building.BUILD), torch.device("meta"):
        model = building.auto_class(config).from_config(config)
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
    topk = experts_per_token(text.to_dict(), modules[0].layer, modules[0].num_experts)[0]
    # Of each route, BF16: gate, up, their product and down's output (training.Kept).
    routes = 2 * count * topk * max(3 * m.intermediate + m.hidden for m in modules)
    # What torch keeps of a layer's other parts, counted in Qwen3-MoE: float32 copies of what LoRA reads, what linear
    # layers give, in BF16 and float32, and what the norms read.
    layer = routes + count * (sum(4 * m.in_features + 6 * m.out_features for m in linears) // layers + 12 * hidden)
    kept = 2 * count * hidden * layers + layer if plan.gradient_checkpointing else layer * layers
    found = {
        "model without experts": sum(2 * one.numel() for _, one in rest),
        "activations of a step": kept,
        "gradients of one layer": 2 * routes,
        "logits and their gradient": 16 * count * text.vocab_size,  # in BF16 and float32, and of log_softmax
        LORA: 16 * parameters,
    }
    return {**found, "together": sum(found.values())}
