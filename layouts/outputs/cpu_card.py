"""config.json and model cards of experts for the CPU, made only from facts, so that merged outputs have them, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ktconvert.layouts.checkpoints.config import QUANT_METHOD as QUANT_METHOD
from ktconvert.layouts.outputs.card import Card, format_ranges
from ktconvert.layouts.outputs.format import Description, Format
from ktconvert.layouts.outputs.output import Output

# transformers ignores an unknown quantization with a warning and initializes the experts at random. It refuses to load
# a weight file of this name, for any model, and prints the name.
NO_FILE = "none; these are experts for the CPU: import KTConvertConfig from ktconvert.native_quant before loading them"

# What the folder holds besides, by --non-experts.
CONTENTS = {
    "skip": "nothing else: attention, router and shared experts stay in the original checkpoint",
    "copy": "everything else under kt-kernel's names",
    "keep": "everything else under its own names: it is a whole model",
}


def config_entries(fmt: Format, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
    return quantization_entries(facts, tool_version, per_row=all(own.encoding.grid.per_row for own in fmt.formats))


def quantization_entries(facts: Mapping[str, Any], tool_version: str, *, per_row: bool) -> dict[str, Any]:
    """Return the entries of config.json, made only from facts; transformers loads them if QUANT_METHOD is registered.

    per_row  whether each row has a scale
    """
    quantization = {
        "quant_method": QUANT_METHOD,
        "method": facts["method"],
        **({"methods": facts["methods"]} if "methods" in facts else {}),
        "layout_version": facts["layout_version"],
        "bits": facts["bits"],
        **({"strategy": "channel", "symmetric": True} if per_row else {}),
        "num_numa_nodes": facts["numa"],
        "targets": ["routed experts"],
        "quantizer": f"ktconvert:{tool_version}",
    }
    return {"transformers_weights": NO_FILE, "quantization_config": quantization}


def check_config(output: Output, fmt: Format, numa: int) -> Iterator[str]:
    """Check that config.json names the method and number of NUMA slices of the tensors."""
    about = output.config.get("quantization_config")
    if isinstance(about, dict) and about.get("quant_method") == QUANT_METHOD:
        for name, value in (("method", fmt.name), ("num_numa_nodes", numa)):
            if about.get(name) != value:
                yield f"config.json says {name} {about.get(name)}, the tensors have {value}"


def launch_lines(
    base_model: str | None, method: str, numa: str, folder: str = "/path/to/this/folder"
) -> tuple[str, ...]:
    """Return the command that starts SGLang with these experts."""
    return (
        *("```bash", "python -m sglang.launch_server \\"),
        f"  --model {base_model or '/path/to/the/original/checkpoint'} \\",
        f"  --kt-weight-path {folder} \\",
        f"  --kt-method {method} \\",
        f"  --kt-threadpool-count {numa} \\",
        "  --kt-cpuinfer PHYSICAL_CORES \\",
        "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU",
        *("```", "", "`ktconvert doctor` prints the two machine values."),
    )


Facts = Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """A kind of folder, by the program that reads it.

    slices  the table's text on NUMA slices; "" if any number of nodes can use the folder
    use     (facts, base model, non_experts) -> how to load it
    """

    about: tuple[str, ...]
    slices: str
    use: Callable[[Facts, str | None, str], tuple[str, ...]]
    library: str = "kt-kernel"
    title: str = "{method} expert weights"


def _use_kt_kernel(facts: Mapping[str, Any], base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return launch_lines(base_model, facts["method"], str(facts["numa"]))


def _use_ktconvert(facts: Mapping[str, Any], base_model: str | None, non_experts: str) -> tuple[str, ...]:
    run = f"ktconvert run {base_model or '/path/to/the/original/checkpoint'} --cpu-weights /path/to/this/folder"
    whole = ("ktconvert run /path/to/this/folder", "ktconvert serve /path/to/this/folder")
    return "```bash", *((run,) if non_experts == "skip" else whole), "```"


WITH_SLICES = "{numa}: load with `--kt-threadpool-count {numa}` and no other"
AMX_KIND = _Kind(
    (
        "Routed {experts}, quantized to {method} in {slices},",
        "in the format that kt-kernel 0.7 loads{loose}. The folder holds {contents}.",
    ),
    WITH_SLICES,
    _use_kt_kernel,
)
MOE_KIND = _Kind(
    (
        "Routed {experts}, quantized to {method} in {slices},",
        "in the plain order of kt-kernel's build for aarch64 with KML{loose},",
        "as its source has it: it was not tried there. On AMD, kt-kernel reads another order under the same names,",
        "that of AOCL-BLIS, and would compute garbage from these. The folder holds {contents}.",
    ),
    WITH_SLICES,
    _use_kt_kernel,
)
OWN_KIND = _Kind(
    (
        "Routed {experts} as {method} in {slices}, for the CPU",
        "runtime of ktconvert. kt-kernel does not load this layout. The folder holds {contents}.",
    ),
    "{numa}",
    _use_ktconvert,
    "ktconvert",
)
NATIVE_KIND = _Kind(
    (
        "Routed {experts} as kt-kernel's method {method} reads them, for",
        "any number of NUMA nodes. The folder holds {contents}.",
    ),
    "",
    lambda facts, base_model, non_experts: launch_lines(base_model, facts["method"], "NUMA_NODES"),
)
BACKWARD_KIND = _Kind(
    (
        "The transposed routed {experts} in BF16 and {slices}, for",
        "fine-tuning: the files `BF16_*_bwd_*` that kt-kernel 0.7 writes (loose .kt folders). The folder holds "
        "nothing else.",
    ),
    "{numa}",
    lambda facts, base_model, non_experts: (
        "kt-kernel's method AMXBF16_SFT takes the experts themselves from a checkpoint in BF16. kt-kernel 0.7.2 "
        "writes these",
        "files, but does not load a folder of them alone.",
    ),
    title="Backward matrices",
)


def _card(kind: _Kind, facts: Facts, base_model: str | None, loose: bool, non_experts: str, numbers: str) -> Card:
    facts = {**facts, "method": facts["method"].removeprefix("KT_")}  # as kt-kernel calls it
    method, layers, numa = facts["method"], facts["layers"], facts["numa"]
    words = {
        "method": method,
        "experts": f"experts of {len(layers)} layers ({format_ranges(layers)})",
        "slices": f"{numa} NUMA part{'s' if numa != 1 else ''}",
        "loose": " (loose .kt folders)" if loose else "",
        "contents": CONTENTS[non_experts],
    }
    before = facts.get("resplit_from", ())
    rows = (
        ("method", f"{method} ({numbers.format(**facts)})"),
        *((other, f"layers {of}") for other, of in facts.get("methods", {}).items()),
        *((what, text.format(**facts)) for key, what, text in CHOICES if key in facts),
        *([("scales of `mse`", "; ".join(facts["without_counts"]))] if "without_counts" in facts else []),
        *equalize_rows(facts),
        *([("NUMA parts", kind.slices.format(**facts))] if kind.slices else []),
        *([("resplit from", f"{', then '.join(map(str, before))} NUMA parts")] if before else []),
        *size_rows(facts),
        ("source dtypes", ", ".join(facts["dtypes"])),
    )
    return Card(
        head=(f"library_name: {kind.library}",),
        tags=(*((kind.library,) if kind.library == "kt-kernel" else ()), "mixture-of-experts"),
        title=f"{kind.title.format(**facts)} of {base_model or 'this model'}",
        about=tuple(line.format(**words) for line in kind.about),
        rows=rows,
        use=kind.use(facts, base_model, non_experts),
    )


CHOICES = (  # how codes and scales were chosen
    ("scale", "scales", "`--scale {scale}`"),
    ("imatrix", "importance matrix", "sha256 `{imatrix}`"),
    ("second_moments", "second moments", "sha256 `{second_moments}`"),
)


def size_rows(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return (
        ("experts per layer", f"{facts['experts']}"),
        ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
        ("activation", f"{facts['activation']}"),
    )


def equalize_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("equalized", "; ".join(facts["equalized"]) or "no expert")] if "equalized" in facts else []


AMX = Description(
    "{bits} bits, one scale per output row and part", partial(_card, AMX_KIND), config_entries, check_config
)
MOE = replace(AMX, card=partial(_card, MOE_KIND))
MXFP4 = replace(AMX, numbers="4 bits, and 8 bits of scale for each 32 columns of a row", card=partial(_card, OWN_KIND))
FP8 = replace(MXFP4, numbers="E4M3, a float32 scale for each 128 x 128")
BF16 = replace(MXFP4, numbers="16 bits, no scales")
MIXED = replace(MXFP4, numbers="a method per layer")
KT_MXFP4, KT_FP8, KT_BF16 = (replace(each, card=partial(_card, NATIVE_KIND)) for each in (MXFP4, FP8, BF16))
RAWINT4 = replace(KT_MXFP4, numbers="4 bits, -8 to 7, and a BF16 scale of either sign for each 32 columns of a row")
BACKWARD = replace(BF16, card=partial(_card, BACKWARD_KIND))
