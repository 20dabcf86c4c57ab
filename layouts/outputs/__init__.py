"""Outputs: FORMS is the table of formats of experts, by the name that loaders and manifests use."""

from __future__ import annotations

from collections.abc import Mapping

from ktconvert.layouts.outputs.amx import AMXINT4, AMXINT8
from ktconvert.layouts.outputs.backward import AMXBF16
from ktconvert.layouts.outputs.backward import COMMAND as BACKWARD
from ktconvert.layouts.outputs.bf16 import BF16
from ktconvert.layouts.outputs.compressed import W4A16, W8A16
from ktconvert.layouts.outputs.form import Form
from ktconvert.layouts.outputs.fp8 import FP8
from ktconvert.layouts.outputs.kt_layout import COMMAND, KT_BF16, KT_FP8, KT_MXFP4
from ktconvert.layouts.outputs.mxfp4 import MXFP4
from ktconvert.layouts.outputs.parts import PROJECTIONS

__all__ = ["BACKWARD", "FORMS", "LAYOUTS", "PROJECTIONS", "Form", "forms_of"]

FORMS: dict[str, Form] = {
    form.name: form for form in (AMXINT4, AMXINT8, MXFP4, FP8, BF16, KT_MXFP4, KT_FP8, KT_BF16, AMXBF16, W4A16, W8A16)
}

LAYOUTS = {"numa": "cpu", "kt": COMMAND}  # --layout -> forms_of


def forms_of(command: str) -> Mapping[str, Form]:
    """The forms that a command writes, by the value of its option."""
    return {form.option: form for form in FORMS.values() if form.command == command}
