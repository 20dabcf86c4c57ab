"""config.json and the model card of experts in strips, from facts alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ktconvert.layouts.outputs import amx_card
from ktconvert.layouts.outputs.amx_card import BESIDE, NO_FILE, QUANT_METHOD
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.form import Card
from ktconvert.layouts.outputs.output import Output


def config_entries(facts: Mapping[str, Any], tool_version: str) -> dict[str, Any]:
    """What config.json says of these experts; transformers loads them where ktconvert is imported."""
    quantization = {
        "quant_method": QUANT_METHOD,
        "method": facts["method"],
        "layout_version": facts["layout_version"],
        "bits": facts["bits"],
        "num_numa_nodes": facts["numa"],
        "targets": ["routed experts"],
        "quantizer": f"ktconvert:{tool_version}",
    }
    return {"transformers_weights": NO_FILE, "quantization_config": quantization}


def check_config(output: Output, method: str, numa: int) -> Iterator[str]:
    """The method and the NUMA parts that config.json names are those of the tensors."""
    about = output.config.get("quantization_config")
    if isinstance(about, dict) and about.get("quant_method") == QUANT_METHOD:
        for name, value in (("method", method), ("num_numa_nodes", numa)):
            if about.get(name) != value:
                yield f"config.json says {name} {about.get(name)}, the tensors have {value}"


def card(facts: Mapping[str, Any], base_model: str | None, coded: str, non_experts: str) -> Card:
    """The lines of the model card."""
    method, numa, layers = facts["method"], facts["numa"], facts["layers"]
    what = BESIDE[non_experts]
    return Card(
        head=("library_name: ktconvert",),
        tags=("mixture-of-experts",),
        title=f"{method} expert weights of {base_model or 'this model'}",
        about=(
            f"Routed experts of {len(layers)} layers ({ranges(layers)}) as {method} in {numa} NUMA "
            f"part{'s' if numa != 1 else ''}, for the CPU",
            f"runtime of ktconvert. kt-kernel does not load this layout. The folder holds {what}.",
        ),
        rows=(("method", f"{method} ({coded})"), ("NUMA parts", f"{numa}"), *_of_model(facts)),
        use=(
            "```bash",
            f"ktconvert run {base_model or '/path/to/the/original/checkpoint'} --cpu-weights /path/to/this/folder",
            "```",
        ),
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


def _of_model(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return (
        ("experts per layer", f"{facts['experts']}"),
        ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
        ("activation", f"{facts['activation']}"),
        ("source dtypes", ", ".join(facts["dtypes"])),
    )
