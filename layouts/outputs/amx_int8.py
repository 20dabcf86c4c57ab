"""AMXINT8: kt-kernel's 8-bit expert weights (FORMAT.md)."""

from ktconvert.layouts.outputs.layout import Layout
from ktconvert.quantizers import QUANTIZERS

AMX_INT8 = Layout("AMXINT8", version=1, quantizer=QUANTIZERS["int8"], file_prefix="INT8", multiple=64)
