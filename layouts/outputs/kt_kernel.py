"""Formats of outputs that the real kt-kernel loads, and what its methods compute with them.

The facts are from kt-kernel 0.7.2: experts.py passes swiglu_limit to FP8 and MXFP4 (and MXFP8 and LLAMAFILE, which are
no outputs), and refuses it for other methods; no method has biases, experts without a gate, or another activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction, read_functions
from ktconvert.layouts.files.facts import OutputFacts

NAME = "kt-kernel 0.7.2"
INSTEAD = "use ktconvert's runtime (`run`, `serve`, `KTMoEWrapper`)"


@dataclass(frozen=True)
class KtMethod:
    """A method of kt-kernel. limit: whether it computes silu(gate) * up with a limit, too, given as swiglu_limit."""

    name: str
    limit: bool = False

    def explain_not_computed(self, functions: Iterable[ExpertFunction]) -> str | None:
        """Explain why the method cannot compute experts with these functions; return None if it can."""
        limited = {f: replace(f, limit=0.0) if self.limit else f for f in functions}
        if not (others := dict.fromkeys(str(f) for f, usual in limited.items() if usual != PLAIN)):
            return None
        computes = f"{PLAIN}, with or without a limit" if self.limit else f"{PLAIN} without a limit"
        return f"computes only {computes}, and these experts compute {'; '.join(others)}"


# Format of an output for the CPU -> the method that loads it; None: kt-kernel does not load it.
KT_METHODS: Mapping[str, KtMethod | None] = {
    **{name: KtMethod(name) for name in ("AMXINT4", "AMXINT8", "MOE_INT4", "MOE_INT8", "RAWINT4")},
    "KT_MXFP4": KtMethod("MXFP4", limit=True),
    "KT_FP8": KtMethod("FP8", limit=True),
    "KT_BF16": KtMethod("BF16"),
    **dict.fromkeys(("MXFP4", "FP8", "BF16", "MIXED")),
}


def describe_support(facts: OutputFacts) -> str:
    """Return whether kt-kernel loads and computes an output with these facts, and what to use if it does not."""
    method, functions = KT_METHODS[facts["method"]], read_functions(facts.get("functions", {})).values()
    if method is None:
        return f"does not load it; {INSTEAD}"
    if why := method.explain_not_computed(functions):
        return f"loads it as {method.name}, but {why}; {INSTEAD}"
    if "functions" not in facts:  # an output of kt-kernel itself
        return f"loads it as {method.name}"
    limits = sorted({function.limit for function in functions if function.limit})
    given = f", if its caller passes swiglu_limit = {' or '.join(f'{limit:g}' for limit in limits)}" if limits else ""
    return f"loads and computes it as {method.name}{given}"


def note_on_support(facts: OutputFacts) -> tuple[str, ...]:
    """Return a note for an output that kt-kernel loads and would compute wrongly; () for any other."""
    support = describe_support(facts) if KT_METHODS.get(facts["method"]) else ""
    return (f"{NAME} {support}",) if INSTEAD in support else ()
