"""The table of containers: every kind of weight file that a checkpoint may consist of.

To add one, write its file beside these and name it here. It knows nothing of experts, nor of how weights are encoded.
"""

from __future__ import annotations

from ktconvert.layouts.checkpoints.containers.container import Container
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.containers.safetensors_index import select

CONTAINERS: tuple[Container, ...] = (Container(".safetensors", read_header, select),)
