"""`--engine oneshot`: llmcompressor's own oneshot on the whole model in memory, to compare engine stream with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.parts import ExpertGrid, Parts
from ktconvert.pipeline.calibration import bf16
from ktconvert.pipeline.calibration.compensate import packed
from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.models.text_datasets import Ids
from ktconvert.pipeline.report.text import first_line

Quantized = Callable[[int, int, str], Parts]  # (layer, expert, projection) -> the linear
EXPERTS = r"re:.*layers\.\d+\..*experts\.\d+\.(gate|up|down)_proj$"


def quantize_model(
    root: Path, samples: Sequence[Ids], fmt: Format, *, dampening: float, every_expert: bool, trust_remote_code: bool
) -> Quantized:
    """Run oneshot with GPTQModifier on the checkpoint's routed experts; returns a function that gives a linear. Raises
    UnsupportedError for a checkpoint that the library cannot load, and for experts that it did not quantize.
    """
    import torch
    import transformers
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    from ktconvert.native_quant.runtime.hf_modules import find_experts
    from ktconvert.quantizers import gptq

    scheme = preset_name_to_scheme(fmt.name, [EXPERTS])
    assert scheme.weights is not None
    weights = scheme.weights.model_copy(update={"group_size": fmt.encoding.grid.group})
    try:
        config = pretrained.read_config(str(root), trust_remote_code=trust_remote_code)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            root, config=config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
        names = {found.layer: found.name for found in find_experts(model)}
        ids = [torch.from_numpy(sample)[None] for sample in samples]
        rows: Any = [{"input_ids": one, "attention_mask": torch.ones(one.shape)} for one in ids]
        oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(rows, batch_size=None),
            recipe=GPTQModifier(
                config_groups={"group_0": scheme.model_copy(update={"weights": weights})}, dampening_frac=dampening
            ),
            max_seq_length=max(map(len, samples)),
            num_calibration_samples=len(samples),
            moe_calibrate_all_experts=every_expert,
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise UnsupportedError(
            f"{root}: llmcompressor's oneshot cannot do it ({first_line(error)}); use --engine stream."
        ) from error

    def quantized(layer: int, expert: int, projection: str) -> Parts:
        name = f"{names[layer]}.{expert}.{projection}_proj"
        linear = model.get_submodule(name)
        if not hasattr(linear, "weight_scale"):
            raise UnsupportedError(f"{root}: llmcompressor's oneshot left {name} as it was; use --engine stream.")
        scale = linear.weight_scale.detach().to("cpu", torch.bfloat16).contiguous()
        codes = gptq.codes(linear.weight.detach().cpu(), scale, fmt.encoding.grid.code_range)
        n, k = codes.shape
        hidden, width = (n, k) if projection == "down" else (k, n)
        return packed(fmt.encoding, (expert, projection), codes, bf16.to_bits(scale), ExpertGrid(layer, hidden, width))

    return quantized
