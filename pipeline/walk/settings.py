"""How a model is walked through, as far as every walk has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktconvert.pipeline.walk.calibration import Calibration


@dataclass(frozen=True)
class Walking:
    """The settings of a walk.

    group    experts in memory at a time
    machine  properties of the machine where it was begun that can change bytes, "threads" and "device_type" among them
    """

    calibration: Calibration
    group: int
    trust_remote_code: bool
    machine: Mapping[str, Any]

    def params(self) -> tuple[tuple[str, Any], ...]:
        """All settings that can change a byte."""
        return (
            ("calibration", tuple(sorted(vars(self.calibration).items()))),
            ("machine", json.dumps(dict(self.machine), sort_keys=True)),
        )
