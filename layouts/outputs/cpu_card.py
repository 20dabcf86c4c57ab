"""config.json and the model cards of experts for the CPU, from facts alone, so that merged outputs have them, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ktconvert.layouts.checkpoints.config import QUANT_METHOD as QUANT_METHOD
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import Card, Description, Format
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
    """What config.json says of these experts."""
    return entries_of(facts, tool_version, per_row=all(own.encoding.grid.per_row for own in fmt.formats))


def entries_of(facts: Mapping[str, Any], tool_version: str, *, per_row: bool) -> dict[str, Any]:
    """By facts alone; transformers loads them where QUANT_METHOD is registered. per_row: each row has a scale."""
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
    """The method and the NUMA parts that config.json names are those of the tensors."""
    about = output.config.get("quantization_config")
    if isinstance(about, dict) and about.get("quant_method") == QUANT_METHOD:
        for name, value in (("method", fmt.name), ("num_numa_nodes", numa)):
            if about.get(name) != value:
                yield f"config.json says {name} {about.get(name)}, the tensors have {value}"


def amx_card(facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str) -> Card:
    """The model card of kt-kernel's own formats."""
    numa = facts["numa"]
    about = (
        f"{_experts(facts)}, quantized to {facts['method']} in {_parts(facts)},",
        f"in the format that kt-kernel 0.7 loads{' (loose .kt folders)' if loose else ''}. The folder holds "
        f"{CONTENTS[non_experts]}.",
    )
    rows = (
        ("method", f"{facts['method']} ({facts['bits']} bits, {numbers})"),
        *_choices(facts),
        ("NUMA parts", f"{numa}: load with `--kt-threadpool-count {numa}` and no other"),
        *_resplit(facts),
    )
    return _card("kt-kernel", facts, base_model, about, rows, launch(base_model, facts["method"], str(numa)))


def moe_card(facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str) -> Card:
    """The model card of the formats of kt-kernel's build for aarch64."""
    about = (
        f"{_experts(facts)}, quantized to {facts['method']} in {_parts(facts)},",
        f"in the plain order of kt-kernel's build for aarch64 with KML{' (loose .kt folders)' if loose else ''},",
        "as its source has it: it was not tried there. On AMD, kt-kernel reads another order under the same names,",
        f"that of AOCL-BLIS, and would compute garbage from these. The folder holds {CONTENTS[non_experts]}.",
    )
    return replace(amx_card(facts, base_model, loose, non_experts, numbers), about=about)


def launch(base_model: str | None, method: str, numa: str, folder: str = "/path/to/this/folder") -> tuple[str, ...]:
    """How SGLang with kt-kernel is started with such a folder."""
    return (
        "```bash",
        "python -m sglang.launch_server \\",
        f"  --model {base_model or '/path/to/the/original/checkpoint'} \\",
        f"  --kt-weight-path {folder} \\",
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
    about = (
        f"{_experts(facts)} as {facts['method']} in {_parts(facts)}, for the CPU",
        f"runtime of ktconvert. kt-kernel does not load this layout. The folder holds {CONTENTS[non_experts]}.",
    )
    rows = (
        ("method", f"{facts['method']} ({numbers})"),
        *((method, f"layers {layers}") for method, layers in facts.get("methods", {}).items()),
        *_choices(facts),
        ("NUMA parts", f"{facts['numa']}"),
        *_resplit(facts),
    )
    run = f"ktconvert run {base_model or '/path/to/the/original/checkpoint'} --cpu-weights /path/to/this/folder"
    whole = ("ktconvert run /path/to/this/folder", "ktconvert serve /path/to/this/folder")
    use = ("```bash", *((run,) if non_experts == "skip" else whole), "```")
    return _card("ktconvert", facts, base_model, about, rows, use)


def native_card(
    method: str, facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str
) -> Card:
    """The model card of experts as this native method of kt-kernel reads them."""
    about = (
        f"{_experts(facts)} as kt-kernel's method {method} reads them, for",
        f"any number of NUMA nodes. The folder holds {CONTENTS[non_experts]}.",
    )
    rows = (("method", f"{method} ({numbers})"), *_choices(facts))
    use = launch(base_model, method, "NUMA_NODES")
    return _card("kt-kernel", {**facts, "method": method}, base_model, about, rows, use)


def backward_card(
    facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str
) -> Card:
    """The model card of backward matrices without the experts themselves."""
    about = (
        f"The transposed r{_experts(facts)[1:]} in BF16 and {_parts(facts)}, for",
        "fine-tuning: the files `BF16_*_bwd_*` that kt-kernel 0.7 writes (loose .kt folders). The folder holds "
        "nothing else.",
    )
    rows = (("method", f"{facts['method']} ({numbers})"), ("NUMA parts", f"{facts['numa']}"))
    use = (
        "kt-kernel's method AMXBF16_SFT takes the experts themselves from a checkpoint in BF16. kt-kernel 0.7.2 "
        "writes these",
        "files, but does not load a folder of them alone.",
    )
    return _card("kt-kernel", facts, base_model, about, rows, use, "Backward matrices")


def _card(
    library: str,
    facts: Mapping[str, Any],
    base_model: str | None,
    about: tuple[str, ...],
    rows: tuple[tuple[str, str], ...],
    use: tuple[str, ...],
    title: str = "{method} expert weights",
) -> Card:
    of_model = (
        ("experts per layer", f"{facts['experts']}"),
        ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
        ("activation", f"{facts['activation']}"),
        ("source dtypes", ", ".join(facts["dtypes"])),
    )
    return Card(
        head=(f"library_name: {library}",),
        tags=(*((library,) if library == "kt-kernel" else ()), "mixture-of-experts"),
        title=f"{title.format(**facts)} of {base_model or 'this model'}",
        about=about,
        rows=(*rows, *of_model),
        use=use,
    )


def _experts(facts: Mapping[str, Any]) -> str:
    return f"Routed experts of {len(facts['layers'])} layers ({ranges(facts['layers'])})"


def _parts(facts: Mapping[str, Any]) -> str:
    return f"{facts['numa']} NUMA part{'s' if facts['numa'] != 1 else ''}"


def _choices(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How codes and scales were chosen."""
    return [
        *([("scales", f"`--scale {facts['scale']}`")] if "scale" in facts else []),
        *([("importance matrix", f"sha256 `{facts['imatrix']}`")] if "imatrix" in facts else []),
        *([("second moments", f"sha256 `{facts['second_moments']}`")] if "second_moments" in facts else []),
        *([("scales of `mse`", "; ".join(facts["without_counts"]))] if "without_counts" in facts else []),
        *equalized(facts),
    ]


def equalized(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which experts --equalize changed."""
    return [("equalized", "; ".join(facts["equalized"]) or "no expert")] if "equalized" in facts else []


def _resplit(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    before = facts.get("resplit_from", ())
    return [("resplit from", f"{', then '.join(map(str, before))} NUMA parts")] if before else []


AMX = Description("one scale per output row and part", amx_card, config_entries, check_config)
MOE = replace(AMX, card=moe_card)
MXFP4 = Description("4 bits, and 8 bits of scale for each 32 columns of a row", own_card, config_entries, check_config)
FP8 = replace(MXFP4, numbers="E4M3, a float32 scale for each 128 x 128")
BF16 = replace(MXFP4, numbers="16 bits, no scales")
MIXED = replace(MXFP4, numbers="a method per layer")
KT_MXFP4 = replace(MXFP4, card=partial(native_card, "MXFP4"))
KT_FP8 = replace(FP8, card=partial(native_card, "FP8"))
RAWINT4 = replace(
    MXFP4,
    numbers="4 bits, -8 to 7, and a BF16 scale of either sign for each 32 columns of a row",
    card=partial(native_card, "RAWINT4"),
)
KT_BF16 = replace(BF16, card=partial(native_card, "BF16"))
BACKWARD = replace(BF16, card=backward_card)
