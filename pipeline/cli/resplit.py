"""ktconvert resplit."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.rewriting import ResplitOptions

EPILOG = """\b
Examples:
  ktconvert resplit /models/Qwen3-30B-A3B-INT8 /models/Qwen3-30B-A3B-INT8-4 --threadpool-count 4
  ktconvert resplit OUT NEW --threadpool-count 1 --against MODEL --dry-run      or is converting again better?
"""


@command("resplit", ResplitOptions, EPILOG)
def resplit(options: ResplitOptions) -> None:
    """Rewrite OUTPUT, experts of `cpu` or `merge` or kt-kernel, as NEW, for another number of NUMA nodes.

    MXFP4, FP8 and BF16 keep every value, and so do gate and up projections of AMXINT4 and AMXINT8. So does their down
    projection where the new number is a multiple of the old one; else its columns are rounded once more where parts
    are put together, and the plan says by how much. Can be resumed.
    """
    from ktconvert.pipeline.cli.conversion import convert

    convert("resplit", options)
