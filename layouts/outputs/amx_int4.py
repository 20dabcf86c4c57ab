"""AMXINT4: kt-kernel's 4-bit expert weights (FORMAT.md)."""

from ktconvert.layouts.outputs.layout import Layout
from ktconvert.quantizers import QUANTIZERS

AMX_INT4 = Layout("AMXINT4", version=1, quantizer=QUANTIZERS["int4"], file_prefix="INT4", multiple=128)
