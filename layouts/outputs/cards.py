"""Model cards: README.md of outputs, made only from facts, so that merged outputs have one, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts.checkpoints.expert_function import describe_record
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs.format import Card
from ktconvert.layouts.outputs.linear_names import explain_not_rawint4
from ktconvert.layouts.tensors import PROJECTIONS, format_ranges

Stats = Mapping[str, Any]  # figures of a unit
Rows = tuple[tuple[str, str], ...]
FOLDER = "/path/to/this/folder"
ORIGINAL = "/path/to/the/original/checkpoint"


def model_card(
    card: Card,
    facts: OutputFacts,
    base_model: str | None,
    notes: Sequence[str],
    stats: Sequence[Stats],
    tool_version: str,
    *,
    loose: bool = False,
    non_experts: str = "skip",
) -> bytes:
    """Return README.md: front matter for the hub, contents of the folder, how to load it, errors of its weights."""
    named: OutputFacts = {**facts, "method": facts["method"].removeprefix("KT_")}  # kt-kernel's name of the method
    words = {**named, **_words(named, base_model, loose, non_experts)}
    rows = [("made by", f"ktconvert {tool_version}")]
    lines = [
        "---",
        *([f"base_model: {base_model}"] if base_model else []),
        *([f"library_name: {card.library}"] if card.library else []),
        *("tags:", *(f"- {tag}" for tag in ("ktconvert", *card.tags, facts["method"].lower()))),
        *("---", "", f"# {card.title.format(**words)}", ""),
        *(line.format(**words) for line in card.about),
        *("", "| | |", "|---|---|"),
        *(f"| {name} | {value} |" for name, value in (*card.rows(card, named), *rows)),
        *("", "## Use", "", *card.use(named, base_model, non_experts)),
        *_error_lines(stats),
        *(_layer_lines(stats) if facts.keys() & {"scale", "methods"} else []),
        *_calibration_lines(facts, stats),
        *(["", "## Notes", "", *(f"- {note}" for note in notes)] if notes else []),
    ]
    return ("\n".join(lines) + "\n").encode()


CONTENTS = {  # what the folder contains besides routed experts, by --non-experts
    "skip": "nothing else: attention, router and shared experts stay in the original checkpoint",
    "copy": "everything else under kt-kernel's names",
    "keep": "everything else under its own names: it is a whole model",
}


def _words(facts: OutputFacts, base_model: str | None, loose: bool, non_experts: str) -> dict[str, str]:
    """Return the words that titles and paragraphs of cards have in braces, in addition to facts."""
    numa, layers = facts.get("numa"), facts.get("layers", ())
    return {
        "model": base_model or "Model",
        "this_model": base_model or "this model",
        "layers_of_experts": f"experts of {len(layers)} layers ({format_ranges(layers)})",
        "slices": f"{numa} NUMA slice{'s' if numa != 1 else ''}",
        "loose": " (loose .kt folders)" if loose else "",
        "contents": CONTENTS[non_experts],
    }


# --- rows -----------------------------------------------------------------------------------------

CHOICES = (  # how codes and scales were chosen: fact, name of the row, its text
    ("scale", "scales", "`--scale {scale}`"),
    ("imatrix", "importance matrix", "sha256 `{imatrix}`"),
    ("second_moments", "second moments", "sha256 `{second_moments}`"),
)


def _cpu_rows(card: Card, facts: OutputFacts) -> Rows:
    before = facts.get("resplit_from", ())
    return (
        ("method", f"{facts['method']} ({card.numbers.format(**facts)})"),
        *((other, f"layers {of}") for other, of in facts.get("methods", {}).items()),
        *((name, text.format(**facts)) for fact, name, text in CHOICES if fact in facts),
        *([("scales of `mse`", "; ".join(facts["without_counts"]))] if "without_counts" in facts else []),
        *equalize_rows(facts.get("equalized")),
        *([("NUMA slices", card.slices.format(**facts))] if card.slices else []),
        *([("resplit from", f"{', then '.join(map(str, before))} NUMA slices")] if before else []),
        *_size_rows(facts),
        ("source dtypes", ", ".join(facts["dtypes"])),
    )


def _gpu_rows(card: Card, facts: OutputFacts) -> Rows:
    return (
        ("experts", f"{facts['bits']} bits, {card.numbers.format(**facts)}"),
        ("method", f"{facts['quant_method']}, rounding {facts['rounding']}"),
        ("quantized linears", f"{facts['packed_linears']}"),
        *equalize_rows(facts.get("equalized")),
        *_size_rows(facts),
        ("source dtypes of the experts", ", ".join(facts["dtypes"])),
    )


def _make_decoding_rows(card: Card, facts: OutputFacts) -> Rows:
    decoded = ", ".join(f"{count} in {title}" for title, count in facts["decoded"].items()) or "none"
    return ("quantized weights of the source, now BF16", decoded), ("tensors", f"{facts['tensors']}")


def _size_rows(facts: OutputFacts) -> Rows:
    return (
        ("experts per layer", f"{facts['experts']}"),
        ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
        *([("experts compute", describe_record(facts["functions"]))] if "functions" in facts else []),
    )


def equalize_rows(equalized: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the row on equalized experts; nothing without --equalize."""
    return [] if equalized is None else [("equalized", "; ".join(equalized) or "no expert")]


# --- how to load an output ------------------------------------------------------------------------


def launch_lines(model: str, method: str, numa: str, folder: str = FOLDER) -> tuple[str, ...]:
    """Return the command that starts SGLang with these experts."""
    return (
        *("```bash", "python -m sglang.launch_server \\"),
        f"  --model {model} \\",
        f"  --kt-weight-path {folder} \\",
        f"  --kt-method {method} \\",
        f"  --kt-threadpool-count {numa} \\",
        "  --kt-cpuinfer PHYSICAL_CORES \\",
        "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU",
        *("```", "", "`ktconvert doctor` prints the two machine values."),
    )


def make_launch_lines(facts: OutputFacts, folder: str = FOLDER) -> tuple[str, ...]:
    """Return the command that starts SGLang with the output as the model, with its own or other experts on the CPU."""
    if explain_not_rawint4(facts) is None:
        return launch_lines(folder, "RAWINT4", "NUMA_NODES", folder)
    options = (f"--model {folder}", "--kt-weight-path /path/to/the/cpu/experts", "--kt-method AMXINT4")
    last = "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU"
    return "```bash", "python -m sglang.launch_server \\", *(f"  {option} \\" for option in options), last, "```"


def _use_kt_kernel(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return launch_lines(base_model or ORIGINAL, facts["method"], str(facts["numa"]))


def _use_native(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return launch_lines(base_model or ORIGINAL, facts["method"], "NUMA_NODES")


def _use_ktconvert(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    run = (f"ktconvert run {base_model or ORIGINAL} --cpu-weights {FOLDER}",)
    whole = (f"ktconvert run {FOLDER}", f"ktconvert serve {FOLDER}")
    return "```bash", *(run if non_experts == "skip" else whole), "```"


def _use_backward(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return (
        "kt-kernel's method AMXBF16_SFT takes the experts themselves from a checkpoint in BF16. kt-kernel 0.7.2 "
        "writes these",
        "files, but does not load a folder that contains nothing else.",
    )


def _use_whole_model(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    on_the_cpu = "As the model and, with kt-kernel's RAWINT4, as the experts on the CPU, from the same files:"
    on_the_gpu = "As the GPU half beside CPU experts that `ktconvert cpu` made:"
    return (
        on_the_cpu if explain_not_rawint4(facts) is None else on_the_gpu,
        *("", *make_launch_lines(facts), ""),
        f'Or without kt-kernel: `AutoModelForCausalLM.from_pretrained("{FOLDER}")`, with compressed-tensors installed.',
    )


def _use_dequantized(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return (f'`AutoModelForCausalLM.from_pretrained("{FOLDER}")`, or as the input of `ktconvert`.',)


# --- the cards of all formats ---------------------------------------------------------------------

AMX = Card(
    title="{method} expert weights of {this_model}",
    about=(
        "Routed {layers_of_experts}, quantized to {method} in {slices},",
        "in the format that kt-kernel 0.7 loads{loose}. The folder contains {contents}.",
    ),
    numbers="{bits} bits, one scale per output row and NUMA slice",
    slices="{numa}: requires `--kt-threadpool-count {numa}`",
    rows=_cpu_rows,
    use=_use_kt_kernel,
    library="kt-kernel",
    tags=("kt-kernel", "mixture-of-experts"),
)
MOE = replace(
    AMX,
    about=(
        "Routed {layers_of_experts}, quantized to {method} in {slices},",
        "in the plain order of kt-kernel's build for aarch64 with KML{loose},",
        "according to its source code; it is untested there. On AMD, kt-kernel expects the order of AOCL-BLIS under",
        "the same names, and would compute garbage from this folder. The folder contains {contents}.",
    ),
)
MXFP4 = replace(
    AMX,
    about=(
        "Routed {layers_of_experts} as {method} in {slices}, for the CPU",
        "runtime of ktconvert. kt-kernel does not load this layout. The folder contains {contents}.",
    ),
    numbers="4 bits, and 8 bits of scale for each 32 columns of a row",
    slices="{numa}",
    use=_use_ktconvert,
    library="ktconvert",
    tags=("mixture-of-experts",),
)
FP8 = replace(MXFP4, numbers="E4M3, a float32 scale for each 128 x 128")
BF16 = replace(MXFP4, numbers="16 bits, no scales")
MIXED = replace(MXFP4, numbers="a method per layer")
KT_MXFP4 = replace(
    AMX,
    about=(
        "Routed {layers_of_experts} as kt-kernel's method {method} reads them, for",
        "any number of NUMA nodes. The folder contains {contents}.",
    ),
    numbers=MXFP4.numbers,
    slices="",
    use=_use_native,
)
KT_FP8 = replace(KT_MXFP4, numbers=FP8.numbers)
KT_BF16 = replace(KT_MXFP4, numbers=BF16.numbers)
RAWINT4 = replace(KT_MXFP4, numbers="4 bits, -8 to 7, and a BF16 scale of either sign for each 32 columns of a row")
BACKWARD = replace(
    AMX,
    title="Backward matrices of {this_model}",
    about=(
        "The transposed routed {layers_of_experts} in BF16 and {slices}, for",
        "fine-tuning: the files `BF16_*_bwd_*` that kt-kernel 0.7 writes (loose .kt folders). The folder contains "
        "nothing else.",
    ),
    numbers=BF16.numbers,
    slices="{numa}",
    use=_use_backward,
)
WHOLE_MODEL = Card(
    title="{model} with experts in {method}",
    about=(
        "The whole model. The routed {layers_of_experts} are {method}; all other tensors are",
        "those of the original, under the same names. The format is compressed-tensors' pack-quantized, "
        "which transformers,",
        "vLLM and SGLang load.",
    ),
    numbers="symmetric, one BF16 scale per {group_size} columns",
    rows=_gpu_rows,
    use=_use_whole_model,
    tags=("kt-kernel", "compressed-tensors", "mixture-of-experts"),
)
DEQUANTIZED = Card(
    title="{model} in BF16",
    about=(
        "The whole model, dequantized: each quantized weight is BF16, rounded once to nearest even from its value",
        "in float32, under the name and in the shape of a BF16 release. Everything else is as in the original.",
    ),
    rows=_make_decoding_rows,
    use=_use_dequantized,
)

# --- measured errors, and the calibration of GPTQ -------------------------------------------------

ERROR = """## Error

Measured on one expert of each shard against the source in BF16 \
(`ktconvert verify --against SOURCE --full` measures all).

| projection | mean relative error | worst | lowest cosine |
|---|---|---|---|"""


def _error_lines(stats: Sequence[Stats]) -> list[str]:
    """Return the section on errors of the sampled experts; nothing if none were measured."""
    rows = []
    for projection in PROJECTIONS:
        if measured := [s[projection] for s in stats if projection in s]:
            relative = [m["relative_error"] for m in measured]
            mean, cosine = sum(relative) / len(relative), min(m["cosine"] for m in measured)
            rows.append(f"| {projection}_proj | {mean:.4f} | {max(relative):.4f} | {cosine:.5f} |")
    return ["", *ERROR.splitlines(), *rows] if rows else []


def _layer_lines(stats: Sequence[Stats]) -> list[str]:
    """Return the table of mean relative errors of the sampled experts by layer."""
    layers: dict[int, list[Stats]] = {}
    for s in stats:
        if all(key in s for key in ("layer", *PROJECTIONS)):
            layers.setdefault(s["layer"], []).append(s)
    rows = []
    for layer, sampled in sorted(layers.items()):
        errors = [[s[projection]["relative_error"] for s in sampled] for projection in PROJECTIONS]
        rows.append(f"| {layer} | {' | '.join(f'{sum(each) / len(each):.4f}' for each in errors)} |")
    return ["", "| layer | gate_proj | up_proj | down_proj |", "|---|---|---|---|", *rows] if rows else []


SEEN = {  # meaning of each value of --calibrate
    "all": "every expert saw every token",
    "routed": "each expert saw the tokens routed to it",
    "mixed": "gate and up saw every token, down those routed to its expert",
}
FEW = (
    "These experts saw too few tokens for GPTQ; their other linears have the codes of `--scale imatrix`, or of `mse` "
    "if no token was routed to the expert"
)


def _calibration_lines(facts: OutputFacts, stats: Sequence[Stats]) -> list[str]:
    """Return the section on GPTQ's calibration and the experts' tokens; nothing for rounding to nearest."""
    calibration = facts.get("calibration")
    if calibration is None:
        return []
    seen = SEEN.get(calibration["calibrate"], calibration["calibrate"])
    counted = next((s for s in stats if "calibration_tokens" in s), None)
    amount = f"{(counted or calibration)['samples']} samples"
    amount += f", {counted['calibration_tokens']} tokens" if counted else ""
    lines = [
        *("", "## Calibration", ""),
        f"{amount} of {calibration['dataset']}, at most {calibration['max_length']} tokens each "
        f"(seed {calibration['seed']}, dampening {calibration['dampening']}); {seen}.",
    ]
    if machine := facts.get("machine"):
        lines.append(f"Computed on this machine: {', '.join(f'{k} {v}' for k, v in sorted(machine.items()))}.")
    if few := facts.get("too_few_tokens"):
        lines.append(f"{FEW}: {'; '.join(few)}.")
    routed = [s for s in stats if "routed_tokens" in s]
    if routed:
        last = "not compensated" if "scale" in facts else "rounded to nearest"
        head = f"| layer | tokens routed to an expert: least | median | most | experts without tokens | {last} |"
        lines += ["", head, "|---|---|---|---|---|---|"]
        for s in routed:
            tokens = " | ".join(f"{s['routed_tokens'][key]}" for key in ("least", "median", "most", "none"))
            rounded = len(s["rounded_experts"]) + len(s["rounded_linears"])
            lines.append(f"| {s['layer']} | {tokens} | {rounded or '-'} |")
    return lines
