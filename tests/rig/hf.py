"""Models of transformers with our experts: loading, logits, and recordings of their experts."""

import sys
from pathlib import Path
from typing import Any


def load(model: Path, own_quantization: bool = True, **settings: Any) -> Any:
    """Load the model with these settings of KTConvertConfig; no tensor may be missing or left over.

    own_quantization: keep the quantization of the model's config, which ours replaces.
    """
    import transformers

    from ktconvert.native_quant import KTConvertConfig

    config = transformers.AutoConfig.from_pretrained(model)
    if not own_quantization:
        vars(config).pop("quantization_config", None)
    return load_complete(model, config=config, quantization_config=KTConvertConfig(**settings))


def load_complete(model: Path, text_only: bool = False, **options: Any) -> Any:
    """Load a model with transformers; no tensor may be missing or left over.

    text_only: without its vision part.
    """
    import transformers

    vision = not text_only and hasattr(transformers.AutoConfig.from_pretrained(model), "vision_config")
    kind = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    loaded, info = kind.from_pretrained(model, output_loading_info=True, **options)
    assert not any(info.values()), info
    return loaded


def logits(model: Any, ids: Any) -> Any:
    """Return the logits of ids [1, tokens]: float32 [tokens, vocabulary]."""
    import torch

    with torch.no_grad():
        return model(ids).logits.float()[0]


def random_ids(vocabulary: int, *shape: int, seed: int = 1) -> Any:
    """Draw tokens, none of them special."""
    import torch

    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def row_distances(actual: Any, expected: Any) -> Any:
    """Return, for each row, the length of the difference relative to the expected row."""
    return (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


def experts_of(model: Any) -> dict[int, Any]:
    """Return the module of routed experts of each layer, of whichever implementation."""
    names = {name: module for name, module in model.named_modules() if name.split(".")[-1] == "experts"}
    return {int(name.split("layers.")[1].split(".")[0]): module for name, module in names.items()}


def record_experts(model: Any, ids: Any) -> dict[int, tuple[Any, ...]]:
    """Run a model on tokens; return what enters each layer's experts (hidden, ids, weights) and what leaves them."""
    recorded: dict[int, tuple[Any, ...]] = {}
    hooks = [
        module.register_forward_hook(lambda _module, inputs, out, layer=layer: recorded.update({layer: (*inputs, out)}))
        for layer, module in experts_of(model).items()
    ]
    assert logits(model, ids).isfinite().all()
    for hook in hooks:
        hook.remove()
    return recorded


def run_exported() -> None:
    """Run an exported program in a process that has never loaded its experts, and again with them."""
    import torch
    from transformers import AutoModelForCausalLM

    import ktconvert.native_quant.runtime.hf  # noqa: F401
    from ktconvert.native_quant import KTConvertConfig

    model, weights, path = sys.argv[1:]
    ids = torch.arange(3, 30)[None]
    program = torch.export.load(path).module()
    with torch.no_grad():
        try:
            program(ids, use_cache=False)
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        config = KTConvertConfig(cpu_weights=weights, threads=2)
        ours = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.bfloat16)
        print(torch.equal(program(ids, use_cache=False).logits, ours(ids).logits))
