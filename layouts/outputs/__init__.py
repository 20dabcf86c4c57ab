"""Where bytes lie, in checkpoints and in outputs. LAYOUTS is the table of outputs, by the name of kt-kernel's --quant-method."""

from __future__ import annotations

from ktconvert.layouts.outputs.amx_int4 import AMX_INT4
from ktconvert.layouts.outputs.amx_int8 import AMX_INT8
from ktconvert.layouts.outputs.layout import PROJECTIONS, Layout

__all__ = ["LAYOUTS", "PROJECTIONS", "Layout", "layout_named"]

LAYOUTS = {"int4": AMX_INT4, "int8": AMX_INT8}


def layout_named(name: str) -> Layout:
    """The layout that kt-kernel calls so ("AMXINT4"). Raises KeyError."""
    return {layout.name: layout for layout in LAYOUTS.values()}[name]
