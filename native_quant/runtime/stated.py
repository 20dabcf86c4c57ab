"""What a manifest says of the experts beside it, held against their bytes before these are used."""

from __future__ import annotations

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import AGAIN, Output


def require_as_in_manifest(output: Output, measured: Measure) -> None:
    """Raises UnsupportedError where method or number of NUMA parts are not those of the bytes."""
    for name, actual in (("method", measured.method), ("numa", measured.numa)):
        stated = output.facts.get(name, actual)
        if stated != actual:
            raise UnsupportedError(
                f"{output.root / manifest.NAME}: says {name} {stated}, the weights beside it have {actual}; {AGAIN}."
            )
