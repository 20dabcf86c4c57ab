"""The model of a checkpoint on the meta device: its classes and buffers, and no weights."""

from __future__ import annotations

from typing import Any

from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.pipeline.walk.dataset import first_line


def build_skeleton(source: TensorSource, trust_remote_code: bool, instead: str) -> Any:
    """The model on the meta device, its buffers real, in BF16 with eager attention.

    instead: what to do where it cannot be built. Raises UnsupportedError there.
    """
    import torch
    import transformers
    from accelerate import init_empty_weights

    try:
        config = transformers.AutoConfig.from_pretrained(source.root, trust_remote_code=trust_remote_code)
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        kind: Any = transformers.AutoModelForCausalLM
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
            kind = transformers.AutoModelForImageTextToText
        with init_empty_weights(include_buffers=False):
            model = kind.from_config(
                config, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedError(
            f"{source.root}: transformers {transformers.__version__} cannot build this model ({first_line(error)}); "
            f"{instead}."
        ) from error
    return model.eval()
