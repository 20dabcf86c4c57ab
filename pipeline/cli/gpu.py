"""ktconvert gpu."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import SeveralValues, command
from ktconvert.pipeline.options.quantization import GpuOptions

EPILOG = """\b
Examples:
  ktconvert gpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-W4A16 --quant-type W4A16       GPTQ, on ultrachat_200k
  ktconvert gpu -i /models/Qwen3-30B-A3B -o OUT --dataset texts.jsonl --num-calibration-samples 128
  ktconvert gpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-W8A16 --quant-method RTN           no calibration
  ktconvert gpu -i MODEL -o OUT --dry-run                     what would be done, and what it takes

The same command again, or `ktconvert resume OUT`, finishes what was cut off.
"""


@command("gpu", GpuOptions, EPILOG, SeveralValues)
def gpu(options: GpuOptions) -> None:
    """Quantize a checkpoint's routed experts to W4A16 or W8A16, for the GPU: SGLang, vLLM and transformers load the
    output.

    What `cpu` reads is read here too; memory is bounded by a few experts (RTN) or by one layer (GPTQ),
    whatever the model's size. All other tensors are copied as they are.
    """
    from ktconvert.pipeline.cli.conversion import convert

    convert("gpu", options)
