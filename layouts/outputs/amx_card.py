"""config.json and the model card of experts in kt-kernel's formats, from facts alone, so that merged outputs have them,
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.form import Card
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


# What quantization_config says of AMXINT4 and AMXINT8 beyond what it says of all formats.
PER_ROW = {"strategy": "channel", "symmetric": True}


def config_entries(facts: Mapping[str, Any], tool_version: str, more: Mapping[str, Any] = PER_ROW) -> dict[str, Any]:
    """What config.json says of these experts, and `more` of their numbers; transformers loads them where QUANT_METHOD
    is registered and NO_FILE taken out.
    """
    quantization = {
        "quant_method": QUANT_METHOD,
        "method": facts["method"],
        "layout_version": facts["layout_version"],
        "bits": facts["bits"],
        **more,
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


def card(facts: Mapping[str, Any], base_model: str | None, *, loose: bool, non_experts: str) -> Card:
    """The lines of the model card."""
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
            ("method", f"{method} ({facts['bits']} bits, one scale per output row and part)"),
            *([("scales", f"`--scale {facts['scale']}`")] if "scale" in facts else []),
            *([("importance matrix", f"sha256 `{facts['imatrix']}`")] if "imatrix" in facts else []),
            *([("scales of `mse`", "; ".join(facts["without_counts"]))] if "without_counts" in facts else []),
            ("NUMA parts", f"{numa}: load with `--kt-threadpool-count {numa}` and no other"),
            *([("resplit from", f"{', then '.join(map(str, before))} NUMA parts")] if before else []),
            ("experts per layer", f"{facts['experts']}"),
            ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
            ("activation", f"{facts['activation']}"),
            ("source dtypes", ", ".join(facts["dtypes"])),
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
