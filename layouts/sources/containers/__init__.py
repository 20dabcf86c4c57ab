"""The table of containers: every kind of weight file that a checkpoint may consist of.

To add one, write its module in this package and list it here. A container knows nothing of experts or encodings.
"""

from __future__ import annotations

from ktconvert.layouts.sources.containers import gguf, safetensors
from ktconvert.layouts.sources.containers.container import Container

SAFETENSORS = Container("safetensors", ".safetensors", safetensors.read_header, safetensors.select)
GGUF = Container(
    "GGUF",
    ".gguf",
    gguf.read_header,
    gguf.select,
    gguf.select_file,
    gguf.check_split,
    input_type="gguf",
    experts_only=True,
)
CONTAINERS: tuple[Container, ...] = (SAFETENSORS, GGUF)  # the first is read if a directory has several kinds
