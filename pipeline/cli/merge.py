"""ktconvert merge."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.rewriting import MergeOptions

EPILOG = """\b
Examples:
  ktconvert merge -i /models/loose -o /models/merged
  ktconvert merge -i /models/loose -o /models/merged -r /models/Qwen3-30B-A3B    with config and tokenizer
"""


@command("merge", MergeOptions, EPILOG)
def merge(options: MergeOptions) -> None:
    """Turn loose per-layer folders of .kt files, ours or kt-kernel's, into safetensors with an
    index. Can be resumed.
    """
    from ktconvert.pipeline.cli.conversion import convert

    convert("merge", options)
