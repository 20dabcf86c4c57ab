"""ktconvert dequantize."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.rewriting import DequantizeOptions

EPILOG = """\b
Examples:
  ktconvert dequantize /models/DeepSeek-V3.1 /models/DeepSeek-V3.1-BF16
  ktconvert dequantize moonshotai/Kimi-K2-Thinking Kimi-K2-Thinking-BF16 --dry-run

The same command again, or `ktconvert resume OUT`, finishes what was cut off.
"""


@command("dequantize", DequantizeOptions, EPILOG)
def dequantize(options: DequantizeOptions) -> None:
    """Write a quantized checkpoint as a BF16 release: a whole model for any loader.

    SRC is a directory, a .safetensors file, or a hub id (org/name); OUT is the output directory. Every quantized weight
    becomes BF16, all other tensors stay as they are, and config.json no longer says that the model is quantized. Memory
    is bounded by some MiB, whatever the model's size.
    """
    from ktconvert.pipeline.cli.conversion import convert

    convert("dequantize", options)
