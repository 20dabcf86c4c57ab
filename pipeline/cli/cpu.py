"""ktconvert cpu."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.quantization import CpuOptions

EPILOG = """\b
Examples:
  ktconvert cpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-INT4
  ktconvert cpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-INT8 --quant-method int8 --threadpool-count 2
  ktconvert cpu -i Qwen3-30B-A3B-Q8_0.gguf --config Qwen/Qwen3-30B-A3B -o OUT --quant-method int8
  ktconvert cpu -i MODEL -o OUT --scale mse          INT4 of the same size with less error
  ktconvert cpu -i MODEL -o OUT --scale gptq --dataset texts.jsonl                  with the least
  ktconvert cpu -i MODEL -o OUT --quant-method int4,int8    OUT-int4 and OUT-int8, reading MODEL once
  ktconvert cpu -i MODEL -o OUT --dry-run            what would be done, from headers only
  ktconvert cpu -i MODEL -o OUT --layers 3-10        some layers only

The same command again, or `ktconvert resume OUT`, finishes what was cut off.
"""


@command("cpu", CpuOptions, EPILOG)
def cpu(options: CpuOptions) -> None:
    """Convert a checkpoint's routed experts to kt-kernel's AMX INT4/INT8 weights, or to MXFP4, FP8 or BF16.

    Safetensors in BF16, FP16, F32, FP8, MXFP8, MXFP4, NVFP4, packed INT4 or INT8, GPTQ, AWQ, and GGUF are read; no
    GPU is needed. Memory is bounded by a few experts (--scale gptq: by one layer), whatever the model's size.
    """
    from ktconvert.pipeline.cli.conversion import convert

    convert("cpu", options)
