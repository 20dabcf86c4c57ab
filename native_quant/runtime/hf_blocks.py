"""Blocks of transformers whose experts are not a module that is called with routing ids and weights.

Each is replaced by a block with the same parameters beside the experts, and with a StackedExperts, which find_experts
finds. So the rest of the program knows one kind of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout, linear


class StackedExperts(torch.nn.Module):
    """Experts in the form of most families, without values.

    They have gate_up_proj [E, 2I, H], or up_proj [E, I, H] if they have no gate, and down_proj [E, H, I]; and a bias
    with the suffix "_bias" of each.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        act_fn: Callable[..., Any],
        weights_on: str = "output",
        gated: bool = True,
        biases: bool = False,
    ) -> None:
        """Create experts of sizes E, H, I. weights_on, gated, biases: as in ExpertFunction."""
        super().__init__()
        self.num_experts, hidden, intermediate = sizes
        self.inner = "gate_up_proj" if gated else "up_proj"
        for name, rows, columns in (
            (self.inner, (2 if gated else 1) * intermediate, hidden),
            ("down_proj", hidden, intermediate),
        ):
            self._add_parameter(name, rows, columns)
            if biases:
                self._add_parameter(f"{name}_bias", rows)
        self.act_fn, self.weights_on = act_fn, weights_on

    def _add_parameter(self, name: str, *shape: int) -> None:
        empty = torch.empty(self.num_experts, *shape, device="meta", dtype=torch.bfloat16)
        self.register_parameter(name, torch.nn.Parameter(empty))

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
            inner = self._multiply(x, self.inner, expert)
            if self.inner == "up_proj":
                inner = self.act_fn(inner)
            else:
                gate, up = inner.chunk(2, dim=-1)
                inner = self.act_fn(gate) * up
            out.index_add_(0, tokens, (self._multiply(inner, "down_proj", expert) * weight).to(out.dtype))
        return out

    def _multiply(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight, bias = self._parameters[name], self._parameters.get(f"{name}_bias")
        assert weight is not None
        return linear(x, weight[expert], None if bias is None else bias[expert])


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


class NllbExperts(torch.nn.Module):
    """NllbMoeExperts, given a weight of each token for each expert, most of them 0.

    transformers 5 takes the router's mask for numbers of experts and computes only experts 0 and 1. Earlier versions
    compute the experts with a weight, as these do.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = _stack_ungated(experts)
        self.dropout: float = experts.moe_token_dropout

    def forward(self, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor) -> Any:
        weights, ids = router_probs.topk(2, dim=1)
        weights = dropout(weights, self.dropout) if self.training else weights * (1 - self.dropout)
        return self.experts(hidden_states, ids, weights)


class SwitchExperts(torch.nn.Module):
    """SwitchTransformersExperts, given the chosen expert of each token as a mask [T, 1, E]: 0 if it has no capacity."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = _stack_ungated(experts)

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> Any:
        chosen, ids = selected_experts.squeeze(1).max(dim=1, keepdim=True)
        return self.experts(hidden_states, ids, routing_weights * chosen)


def _stack_ungated(experts: Any) -> StackedExperts:
    """Return stacked experts for a dictionary of modules with two linears and an activation."""
    first = experts["expert_0"]
    up = next(child for child in first.children() if isinstance(child, torch.nn.Linear))
    return StackedExperts(
        (experts.num_experts, up.in_features, up.out_features), first.act, gated=False, biases=up.bias is not None
    )


def _stack_dbrx(experts: Any) -> StackedExperts:
    """Return stacked experts for DbrxExperts, which are called like them."""
    return StackedExperts(
        (experts.num_experts, experts.hidden_size, experts.ffn_hidden_size), experts.mlp.activation_fn
    )


# Class of a block -> the block that replaces it, and the names of its children that held the experts; "": itself.
BLOCKS: dict[str, tuple[Callable[[Any], torch.nn.Module], tuple[str, ...]]] = {
    "Llama4TextMoe": (Llama4Block, (".experts",)),
    "JetMoeMoE": (JetMoeBlock, (".input_linear", ".output_linear")),
    "DbrxExperts": (_stack_dbrx, ("",)),
    "NllbMoeExperts": (NllbExperts, ("",)),
    "SwitchTransformersExperts": (SwitchExperts, ("",)),
}


def replace_blocks(model: torch.nn.Module) -> list[str]:
    """Replace the blocks of BLOCKS in a model without values. Return the names of the modules that held experts."""
    replaced = []
    for name, module in list(model.named_modules()):
        if (row := BLOCKS.get(type(module).__name__)) is None:
            continue
        make_block, children = row
        parent, _, child = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        setattr(owner, child, make_block(module))
        if next(owner.parameters(recurse=False), None) is None:
            owner._is_hf_initialized = True  # transformers would initialize the former experts
        replaced += [f"{name}{each}" for each in children]
    return replaced
