"""Models of transformers with our experts: loaded, asked for logits, and listened to at their experts."""

from pathlib import Path
from typing import Any


def load(model: Path, own_quantization: bool = True, **settings: Any) -> Any:
    """The model with these settings of KTConvertConfig; nothing may be missing and nothing left over. own_quantization: leave
    it in the model's config, where ours takes its place."""
    import transformers

    from ktconvert.native_quant import KTConvertConfig

    config = transformers.AutoConfig.from_pretrained(model)
    if not own_quantization:
        vars(config).pop("quantization_config", None)
    return complete(model, config=config, quantization_config=KTConvertConfig(**settings))


def complete(model: Path, text_alone: bool = False, **options: Any) -> Any:
    """What transformers loads, with its vision part unless it is text_alone; no tensor may be missing or left over."""
    import transformers

    vision = not text_alone and hasattr(transformers.AutoConfig.from_pretrained(model), "vision_config")
    kind = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    loaded, info = kind.from_pretrained(model, output_loading_info=True, **options)
    assert not any(info.values()), info
    return loaded


def logits(model: Any, ids: Any) -> Any:
    """float32 [tokens, vocabulary] of ids [1, tokens]."""
    import torch

    with torch.no_grad():
        return model(ids).logits.float()[0]


def some_ids(vocabulary: int, *shape: int, seed: int = 1) -> Any:
    """Random tokens, none of them special."""
    import torch

    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def row_distances(got: Any, want: Any) -> Any:
    """Of each row: the length of the difference, relative to what was wanted."""
    return (got.float() - want).norm(dim=-1) / want.norm(dim=-1)


def experts_of(model: Any) -> dict[int, Any]:
    """Layer -> its module of routed experts, whoever computes them."""
    names = {name: module for name, module in model.named_modules() if name.split(".")[-1] == "experts"}
    return {int(name.split("layers.")[1].split(".")[0]): module for name, module in names.items()}


def heard(model: Any, ids: Any) -> dict[int, tuple[Any, ...]]:
    """Layer -> what goes into its experts (hidden, ids, weights) and what comes out, when the model reads tokens."""
    seen: dict[int, tuple[Any, ...]] = {}
    hooks = [
        module.register_forward_hook(lambda _module, inputs, out, layer=layer: seen.__setitem__(layer, (*inputs, out)))
        for layer, module in experts_of(model).items()
    ]
    assert logits(model, ids).isfinite().all()
    for hook in hooks:
        hook.remove()
    return seen
