"""What a whole model's experts read, in float64, by hooks on transformers' own modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Read:
    """Of one layer: tokens int64 [E]; sums of squares, float64: inputs [E, H], middle [E, I]."""

    counts: Any
    inputs: Any = None
    middle: Any = None
    chosen: list[Any] = field(default_factory=list)  # the router's choices, [T, k] of each sequence

    def add(self, expert: int, inputs: Any, middle: Any) -> None:
        self.counts[expert] += len(inputs)
        for name, x in (("inputs", inputs), ("middle", middle)):
            sums = getattr(self, name)
            if sums is None:
                sums = np.zeros((len(self.counts), x.shape[1]))
                setattr(self, name, sums)
            sums[expert] += x.double().square().sum(0).numpy()


def read_by_experts(model: Path, samples: Sequence[Sequence[int]]) -> dict[int, Read]:
    """By decoder layer. Every sample goes through the whole model, computed by transformers in BF16."""
    import torch
    from transformers import AutoModelForCausalLM

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    torch.set_num_threads(1)
    whole: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    read: dict[int, Read] = {}

    def hook(layer: int) -> Callable[..., None]:
        def forward(module: Any, args: tuple[Any, ...]) -> None:
            hidden, ids, _ = args
            experts = len(module.down_proj)
            own = read.setdefault(layer, Read(np.zeros(experts, np.int64)))
            own.chosen.append(ids.numpy())
            for expert in range(experts):
                x = hidden[(ids == expert).any(1)]
                gate, up = torch.nn.functional.linear(x, module.gate_up_proj[expert]).chunk(2, -1)
                own.add(expert, x, module.act_fn(gate) * up)

        return forward

    for place in find_experts(whole):
        whole.get_submodule(place.name).register_forward_pre_hook(hook(place.layer))
    with torch.inference_mode():
        for ids in samples:
            whole(torch.tensor([list(ids)]), use_cache=False)
    return read
