"""The table of containers: every kind of weight file that a checkpoint may consist of.

To add one, write its file beside these and name it here. A container knows nothing of experts or of encodings.
"""

from __future__ import annotations

from ktconvert.layouts.checkpoints.containers.container import Container
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.containers.safetensors_index import select

CONTAINERS: tuple[Container, ...] = (Container(".safetensors", read_header, select),)
