"""The model card of experts in strips, from facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconvert.layouts.outputs import amx_card
from ktconvert.layouts.outputs.amx_card import BESIDE
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.form import Card


def card(facts: Mapping[str, Any], base_model: str | None, coded: str, non_experts: str) -> Card:
    """The lines of the model card."""
    method, numa, layers = facts["method"], facts["numa"], facts["layers"]
    before, what = facts.get("resplit_from", ()), BESIDE[non_experts]
    return Card(
        head=("library_name: ktconvert",),
        tags=("mixture-of-experts",),
        title=f"{method} expert weights of {base_model or 'this model'}",
        about=(
            f"Routed experts of {len(layers)} layers ({ranges(layers)}) as {method} in {numa} NUMA "
            f"part{'s' if numa != 1 else ''}, for the CPU",
            f"runtime of ktconvert. kt-kernel does not load this layout. The folder holds {what}.",
        ),
        rows=(
            ("method", f"{method} ({coded})"),
            ("NUMA parts", f"{numa}"),
            *([("resplit from", f"{', then '.join(map(str, before))} NUMA parts")] if before else []),
            *_of_model(facts),
        ),
        use=("```bash", *_use(base_model, non_experts), "```"),
    )


def kt_card(method: str, facts: Mapping[str, Any], base_model: str | None, coded: str, non_experts: str) -> Card:
    """The same for experts as kt-kernel's native method reads them."""
    layers = facts["layers"]
    return Card(
        head=("library_name: kt-kernel",),
        tags=("kt-kernel", "mixture-of-experts"),
        title=f"{method} expert weights of {base_model or 'this model'}",
        about=(
            f"Routed experts of {len(layers)} layers ({ranges(layers)}) as kt-kernel's method {method} reads them, for",
            f"any number of NUMA nodes. The folder holds {BESIDE[non_experts]}.",
        ),
        rows=(("method", f"{method} ({coded})"), *_of_model(facts)),
        use=amx_card.launch(base_model, method, "NUMA_NODES"),
    )


def backward_card(facts: Mapping[str, Any], base_model: str | None, coded: str, non_experts: str) -> Card:
    """The same for backward matrices without the experts themselves."""
    method, numa, layers = facts["method"], facts["numa"], facts["layers"]
    return Card(
        head=("library_name: kt-kernel",),
        tags=("kt-kernel", "mixture-of-experts"),
        title=f"Backward matrices of {base_model or 'this model'}",
        about=(
            f"The transposed routed experts of {len(layers)} layers ({ranges(layers)}) in BF16 and {numa} NUMA "
            f"part{'s' if numa != 1 else ''}, for",
            "fine-tuning: the files `BF16_*_bwd_*` that kt-kernel 0.7 writes (loose .kt folders). The folder holds "
            "nothing else.",
        ),
        rows=(("method", f"{method} ({coded})"), ("NUMA parts", f"{numa}"), *_of_model(facts)),
        use=(
            "kt-kernel's method AMXBF16_SFT takes the experts themselves from a checkpoint in BF16. kt-kernel 0.7.2 "
            "writes these",
            "files, but does not load a folder of them alone.",
        ),
    )


def _use(base_model: str | None, non_experts: str) -> tuple[str, ...]:
    """What runs the model: this folder by itself, unless it holds experts alone."""
    if non_experts != "skip":
        return "ktconvert run /path/to/this/folder", "ktconvert serve /path/to/this/folder"
    return (f"ktconvert run {base_model or '/path/to/the/original/checkpoint'} --cpu-weights /path/to/this/folder",)


def _of_model(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return (
        ("experts per layer", f"{facts['experts']}"),
        ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
        ("activation", f"{facts['activation']}"),
        ("source dtypes", ", ".join(facts["dtypes"])),
    )
