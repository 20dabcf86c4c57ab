"""config.json and the model cards of experts for the CPU, from facts alone, so that merged outputs have them, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import Card, Description, Format
from ktconvert.layouts.outputs.output import Output

QUANT_METHOD = "kt_amx"
# transformers ignores an unknown quantization with a warning and initializes the experts at random. It refuses to load
# a weight file of this name, for any model, and prints the name.
NO_FILE = "none; these are experts for the CPU: import KTConvertConfig from ktconvert.native_quant before loading them"

# What the folder holds besides, by --non-experts.
BESIDE = {
    "skip": "nothing else: attention, router and shared experts stay in the original checkpoint",
    "copy": "everything else under kt-kernel's names",
    "keep": "everything else under its own names: it is a whole model",
}


def config_entries(fmt: Format, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
    """What config.json says of these experts."""
    return entries_of(facts, tool_version, per_row=fmt.encoding.grid.per_row)


def entries_of(facts: Mapping[str, Any], tool_version: str, *, per_row: bool) -> dict[str, Any]:
    """The same by facts alone; transformers loads such experts where QUANT_METHOD is registered and NO_FILE taken out.

    per_row: whether each row has one scale.
    """
    quantization = {
        "quant_method": QUANT_METHOD,
        "method": facts["method"],
        "layout_version": facts["layout_version"],
        "bits": facts["bits"],
        **({"strategy": "channel", "symmetric": True} if per_row else {}),
        "num_numa_nodes": facts["numa"],
        "targets": ["routed experts"],
        "quantizer": f"ktconvert:{tool_version}",
    }
    return {"transformers_weights": NO_FILE, "quantization_config": quantization}


def check_config(output: Output, fmt: Format, numa: int) -> Iterator[str]:
    """The method and the NUMA parts that config.json names are those of the tensors."""
    about = output.config.get("quantization_config")
    if isinstance(about, dict) and about.get("quant_method") == QUANT_METHOD:
        for name, value in (("method", fmt.name), ("num_numa_nodes", numa)):
            if about.get(name) != value:
                yield f"config.json says {name} {about.get(name)}, the tensors have {value}"


def amx_card(facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str) -> Card:
    """The model card of kt-kernel's own formats."""
    method, numa, layers = facts["method"], facts["numa"], facts["layers"]
    before = facts.get("resplit_from", ())
    what = BESIDE[non_experts]
    return Card(
        head=("library_name: kt-kernel",),
        tags=("kt-kernel", "mixture-of-experts"),
        title=f"{method} expert weights of {base_model or 'this model'}",
        about=(
            f"Routed experts of {len(layers)} layers ({ranges(layers)}), quantized to {method} in {numa} NUMA "
            f"part{'s' if numa != 1 else ''},",
            f"in the format that kt-kernel 0.7 loads{' (loose .kt folders)' if loose else ''}. The folder holds "
            f"{what}.",
        ),
        rows=(
            ("method", f"{method} ({facts['bits']} bits, {numbers})"),
            *([("scales", f"`--scale {facts['scale']}`")] if "scale" in facts else []),
            *([("importance matrix", f"sha256 `{facts['imatrix']}`")] if "imatrix" in facts else []),
            *([("scales of `mse`", "; ".join(facts["without_counts"]))] if "without_counts" in facts else []),
            ("NUMA parts", f"{numa}: load with `--kt-threadpool-count {numa}` and no other"),
            *([("resplit from", f"{', then '.join(map(str, before))} NUMA parts")] if before else []),
            *_of_model(facts),
        ),
        use=launch(base_model, method, str(numa)),
    )


def launch(base_model: str | None, method: str, numa: str) -> tuple[str, ...]:
    """How SGLang with kt-kernel is started with such a folder."""
    return (
        "```bash",
        "python -m sglang.launch_server \\",
        f"  --model {base_model or '/path/to/the/original/checkpoint'} \\",
        "  --kt-weight-path /path/to/this/folder \\",
        f"  --kt-method {method} \\",
        f"  --kt-threadpool-count {numa} \\",
        "  --kt-cpuinfer PHYSICAL_CORES \\",
        "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU",
        "```",
        "",
        "`ktconvert doctor` prints the two machine values.",
    )


def own_card(facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str) -> Card:
    """The model card of experts that this project's runtime alone computes."""
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
            ("method", f"{method} ({numbers})"),
            ("NUMA parts", f"{numa}"),
            *([("resplit from", f"{', then '.join(map(str, before))} NUMA parts")] if before else []),
            *_of_model(facts),
        ),
        use=("```bash", *_use(base_model, non_experts), "```"),
    )


def native_card(
    method: str, facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str
) -> Card:
    """The model card of experts as this native method of kt-kernel reads them."""
    layers = facts["layers"]
    return Card(
        head=("library_name: kt-kernel",),
        tags=("kt-kernel", "mixture-of-experts"),
        title=f"{method} expert weights of {base_model or 'this model'}",
        about=(
            f"Routed experts of {len(layers)} layers ({ranges(layers)}) as kt-kernel's method {method} reads them, for",
            f"any number of NUMA nodes. The folder holds {BESIDE[non_experts]}.",
        ),
        rows=(("method", f"{method} ({numbers})"), *_of_model(facts)),
        use=launch(base_model, method, "NUMA_NODES"),
    )


def backward_card(
    facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str
) -> Card:
    """The model card of backward matrices without the experts themselves."""
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
        rows=(("method", f"{method} ({numbers})"), ("NUMA parts", f"{numa}"), *_of_model(facts)),
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


AMX = Description("one scale per output row and part", amx_card, config_entries, check_config)
MXFP4 = Description("4 bits, and 8 bits of scale for each 32 columns of a row", own_card, config_entries, check_config)
FP8 = replace(MXFP4, numbers="E4M3, a float32 scale for each 128 x 128")
BF16 = replace(MXFP4, numbers="16 bits, no scales")
KT_MXFP4 = replace(MXFP4, card=partial(native_card, "MXFP4"))
KT_FP8 = replace(FP8, card=partial(native_card, "FP8"))
KT_BF16 = replace(BF16, card=partial(native_card, "BF16"))
BACKWARD = replace(BF16, card=backward_card)
