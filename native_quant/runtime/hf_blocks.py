"""Blocks of transformers whose experts are not a module that is called with routing ids and weights.

Each is replaced by a block with the same parameters beside the experts, and with a StackedExperts, which find_experts
finds. So the rest of the program knows one kind of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear


class StackedExperts(torch.nn.Module):
    """Experts in the form of most families: gate_up_proj [E, 2I, H] and down_proj [E, H, I], without values."""

    def __init__(self, sizes: tuple[int, int, int], act_fn: Callable[..., Any], weights_on: str = "output") -> None:
        """Create experts of sizes E, H, I. weights_on: where routing weights are multiplied, "output" or "input"."""
        super().__init__()
        self.num_experts, hidden, intermediate = sizes
        empty: Any = {"device": "meta", "dtype": torch.bfloat16}
        self.gate_up_proj = torch.nn.Parameter(torch.empty(self.num_experts, 2 * intermediate, hidden, **empty))
        self.down_proj = torch.nn.Parameter(torch.empty(self.num_experts, hidden, intermediate, **empty))
        self.act_fn, self.weights_on = act_fn, weights_on

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, H]; ids and weights are [T, k]."""
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            tokens, columns = torch.where(top_k_index == expert)
            x, weight = hidden_states[tokens], top_k_weights[tokens, columns, None]
            if self.weights_on == "input":
                x, weight = x * weight, torch.ones_like(weight)
            gate, up = linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            output = linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, tokens, (output * weight).to(out.dtype))
        return out


class Llama4Block(torch.nn.Module):
    """Llama4TextMoe, which computes all experts for all tokens, with only the chosen experts of each token."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.router, self.shared_expert, self.top_k = block.router, block.shared_expert, block.top_k
        experts, hidden, columns = block.experts.gate_up_proj.shape
        self.experts = StackedExperts((experts, hidden, columns // 2), block.experts.act_fn, weights_on="input")

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(hidden)  # [T, E], 0 for experts that are not chosen
        weights, ids = scores.topk(self.top_k, dim=1)
        return self.shared_expert(hidden) + self.experts(hidden, ids, weights), logits


class JetMoeBlock(torch.nn.Module):
    """JetMoeMoE, whose experts are two linears for sorted tokens; its bias is added once per token."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.router: Any = block.router
        self.bias: torch.nn.Parameter = block.bias
        experts, rows, hidden = block.input_linear.weight.shape
        self.experts = StackedExperts((experts, hidden, rows // 2), block.activation)

    def forward(self, layer_input: torch.Tensor) -> torch.Tensor:
        hidden = layer_input.reshape(-1, layer_input.shape[-1])
        logits, ids = self.router.layer(hidden).float().topk(self.router.top_k, dim=1)
        weights = logits.softmax(dim=1).type_as(hidden)
        out: torch.Tensor = self.experts(hidden, ids, weights)
        return out.view(layer_input.shape) + self.bias


def _stack_dbrx(block: Any) -> Any:
    """Give DbrxFFN stacked experts, which it calls like its own."""
    experts = block.experts
    sizes = experts.num_experts, experts.hidden_size, experts.ffn_hidden_size
    block.experts = StackedExperts(sizes, experts.mlp.activation_fn)
    return block


# Class of a block -> the block that replaces it, and the names of its children that held the experts.
BLOCKS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "Llama4TextMoe": (Llama4Block, ("experts",)),
    "JetMoeMoE": (JetMoeBlock, ("input_linear", "output_linear")),
    "DbrxFFN": (_stack_dbrx, ("experts",)),
}


def replace_blocks(model: torch.nn.Module) -> list[str]:
    """Replace the blocks of BLOCKS in a model without values. Return the names of the modules that held experts."""
    replaced = []
    for name, module in list(model.named_modules()):
        if (row := BLOCKS.get(type(module).__name__)) is None:
            continue
        make_block, children = row
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, make_block(module))
        replaced += [f"{name}.{each}" for each in children]
    return replaced
