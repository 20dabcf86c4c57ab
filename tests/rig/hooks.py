"""Statistics of the inputs of a whole model's experts, in float64, by hooks on transformers' own modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class ExpertInputs:
    """Statistics of a layer: tokens int64 [E]; sums of squares in float64, inputs [E, H] and middle [E, I].

    routing, outputs: sums of squares of the routing weights, and of the layer's outputs.
    """

    counts: Any
    inputs: Any = None
    middle: Any = None
    chosen: list[Any] = field(default_factory=list)  # the router's choices, [T, k] for each sequence
    routing: float = 0.0
    outputs: float = 0.0

    def add(self, expert: int, inputs: Any, middle: Any) -> None:
        """Add the rows that an expert's linears read."""
        self.counts[expert] += len(inputs)
        for name, x in (("inputs", inputs), ("middle", middle)):
            sums = getattr(self, name)
            if sums is None:
                sums = np.zeros((len(self.counts), x.shape[1]))
                setattr(self, name, sums)
            sums[expert] += x.double().square().sum(0).numpy()


def measure_expert_inputs(model: Path, samples: Sequence[Sequence[int]]) -> dict[int, ExpertInputs]:
    """Run every sample through the whole model, computed by transformers in BF16; return the statistics by layer."""
    import torch
    from transformers import AutoModelForCausalLM

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    torch.set_num_threads(1)
    computed: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    statistics: dict[int, ExpertInputs] = {}

    def hook(layer: int) -> Callable[..., None]:
        def forward(module: Any, args: tuple[Any, ...]) -> None:
            hidden, ids, weights = args
            experts = len(module.down_proj)
            layer_statistics = statistics.setdefault(layer, ExpertInputs(np.zeros(experts, np.int64)))
            layer_statistics.chosen.append(ids.numpy())
            layer_statistics.routing += float(weights.double().square().sum())
            for expert in range(experts):
                x = hidden[(ids == expert).any(1)]
                gate, up = torch.nn.functional.linear(x, module.gate_up_proj[expert]).chunk(2, -1)
                layer_statistics.add(expert, x, module.act_fn(gate) * up)

        return forward

    def hook_outputs(layer: int) -> Callable[..., None]:
        def add(module: Any, args: Any, result: Any) -> None:
            hidden = result[0] if isinstance(result, tuple) else result
            statistics[layer].outputs += float(hidden.double().square().sum())

        return add

    for place in find_experts(computed):
        computed.get_submodule(place.name).register_forward_pre_hook(hook(place.layer))
        before, number, _ = place.name.partition(f".{place.layer}.")
        computed.get_submodule(before + number.rstrip(".")).register_forward_hook(hook_outputs(place.layer))
    with torch.inference_mode():
        for ids in samples:
            computed(torch.tensor([list(ids)]), use_cache=False)
    return statistics
