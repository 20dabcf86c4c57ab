"""ktconvert calibrate."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.rewriting import CalibrateOptions

EPILOG = """\b
Examples:
  ktconvert calibrate /models/Qwen3-30B-A3B --output /models/Qwen3-30B-A3B-statistics       on ultrachat_200k
  ktconvert calibrate /models/Qwen3-30B-A3B --output DIR --dataset book.txt --max-sequence-length 512
  ktconvert calibrate deepseek-ai/DeepSeek-V3.1 --output DIR --dry-run                      what it takes

The same command again, or `ktconvert resume DIR`, finishes what was cut off.
"""


@command("calibrate", CalibrateOptions, EPILOG)
def calibrate(options: CalibrateOptions) -> None:
    """Measure what a model's routed experts read: how often each is chosen, and how important each input is.

    MODEL is a directory, a .safetensors file, or a hub id (org/name). Its samples go through the model with one layer
    in memory, as for `gpu`'s GPTQ, and nothing is quantized. The folder gets imatrix.gguf, counts.safetensors and
    statistics.json.
    """
    from ktconvert.pipeline.cli.conversion import convert

    convert("calibrate", options)
