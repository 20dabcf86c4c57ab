"""How a model is walked through, as far as every walk has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktconvert.pipeline.walk.calibration import Calibration


@dataclass(frozen=True)
class Walking:
    """The settings of a walk.

    group        experts in memory at a time
    machine      properties of the machine where it was begun that can change bytes, "threads" and "device_type" among
                 them
    fingerprint  all that can change a byte: (name, value)
    """

    calibration: Calibration
    group: int
    trust_remote_code: bool
    machine: Mapping[str, Any]
    fingerprint: tuple[tuple[str, Any], ...]
