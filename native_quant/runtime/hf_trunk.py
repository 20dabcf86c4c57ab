"""What is no routed expert in a checkpoint that is quantized itself: dequantized by transformers while it is loaded.

transformers takes one quantization per model, and our experts are one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.beside import beside
from ktconvert.layouts.checkpoints.encodings import Weight
from ktconvert.layouts.checkpoints.encodings.pack_quantized import METHOD
from ktconvert.layouts.checkpoints.experts import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint, read_config
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import amx_card

NAME = "ktconvert"  # quant_method of KTConvertConfig
# Methods of config.json that are no quantization of the rest: none, ours, and experts packed for the GPU, beside which
# generate.py looks at what is left over.
EXPERTS_ONLY = ("", NAME, amx_card.QUANT_METHOD, METHOD)
FP8 = "fp8"  # quant_method in config.json of E4M3 with a scale per block


def dequantizer(root: Path) -> Any:
    """transformers' quantizer whose conversions dequantize a checkpoint's weights; None where nothing but routed
    experts is quantized.

    Raises UnsupportedError for what transformers cannot dequantize so, whose codes would be taken for numbers.
    """
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantization = cfg.quantization(read_config(root))
    if quantization.method == FP8:
        kind: Any = FineGrainedFP8HfQuantizer
        return kind(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    if quantization.method in EXPERTS_ONLY:
        return None
    with open_checkpoint(root) as source:
        experts = recognise(source, to_read=True).expert_tensor_names()
        rest = beside(source, experts, quantization).tensors
        packed = next((name for name, stored in rest.items() if isinstance(stored, Weight)), None)
    if packed is not None:
        raise UnsupportedError(
            f"{root}: {packed} is quantized itself ({quantization.method}), and only routed experts and FP8 can be; "
            f"give what `ktconvert dequantize {root} BF16` writes, with {root} as cpu_weights"
        )
    return None
