"""The weights of a quantized checkpoint that are no routed experts: transformers dequantizes them while it loads, or we
refuse them. transformers takes one quantization per model, and our experts are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint, read_quantization
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.pack_quantized import FORMAT, METHOD
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import cpu_card

if TYPE_CHECKING:
    from ktconvert.native_quant.runtime.hf_modules import ExpertModule

NAME = "ktconvert"  # quant_method of KTConvertConfig
PACKED = "_packed"  # what compressed-tensors adds to the name of a weight
# Methods of config.json that are no quantization of the rest: none, ours, and experts packed for the GPU, for which
# there is require_plain.
EXPERTS_ONLY = ("", NAME, cpu_card.QUANT_METHOD, METHOD)
FP8 = "fp8"  # quant_method in config.json of E4M3 with a scale per block


def give_way(config: Any, model: str) -> None:
    """Take the quantization of a model out of its config, since transformers takes one per model, and ours is to be it.

    What is quantized is seen to when the files are there: dequantizer, require_plain. Raises UnsupportedError at once
    for experts that compressed-tensors packed in another format than `ktconvert gpu`.
    """
    for part in (config, config.get_text_config(decoder=True)):
        own = getattr(part, "quantization_config", None) or {}
        own = own if isinstance(own, dict) else own.to_dict()
        method = own.get("quant_method")
        if method in (NAME, cpu_card.QUANT_METHOD):
            continue
        if method == METHOD and own.get("format") != FORMAT:
            raise UnsupportedError(
                f"{model}: is quantized itself ({method}), and only routed experts that `ktconvert gpu` packed can be "
                f"combined with others; give what `ktconvert dequantize {model} BF16` writes, with the same CPU weights"
            )
        vars(part).pop("quantization_config", None)


def dequantizer(root: Path) -> Any:
    """transformers' quantizer whose conversions dequantize a checkpoint's weights; None where nothing but routed
    experts is quantized.

    Raises UnsupportedError for what transformers cannot dequantize so, whose codes would be taken for numbers.
    """
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantization = read_quantization(root)
    if quantization.method == FP8:
        kind: Any = FineGrainedFP8HfQuantizer
        return kind(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    if quantization.method in EXPERTS_ONLY:
        return None
    with open_checkpoint(root) as source:
        experts = recognise(source, to_read=True).expert_tensor_names()
        rest = other_tensors(source, experts, quantization).tensors
        packed = next((name for name, stored in rest.items() if isinstance(stored, Weight)), None)
    if packed is not None:
        raise UnsupportedError(
            f"{root}: {packed} is quantized itself ({quantization.method}), and only routed experts and FP8 can be; "
            f"give what `ktconvert dequantize {root} BF16` writes, with {root} as cpu_weights"
        )
    return None


def require_plain(root: Path, files: Iterable[str], model: Any, modules: Sequence[ExpertModule]) -> None:
    """Raises UnsupportedError where a weight that the model needs beside its routed experts is packed: transformers
    would not find it, and fill in random numbers.
    """
    if read_quantization(root).method != METHOD:
        return
    from ktconvert.native_quant.runtime import hf_output

    names = [entry.name for file in files for entry in read_header(Path(file)).entries]
    plain = [name.removesuffix(PACKED) for name in names if name.endswith(f".weight{PACKED}")]
    packed = hf_output.needed_tensors(model, modules) & hf_output.targets(model, plain, ())
    if packed:
        raise UnsupportedError(
            f"{root}: is quantized beyond its routed experts ({min(packed)}{PACKED}), and only these can be combined "
            f"with others; give a model that `ktconvert gpu` made, or what `ktconvert dequantize {root} BF16` writes"
        )
