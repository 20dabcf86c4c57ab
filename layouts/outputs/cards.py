"""Model cards: README.md of outputs, made only from facts, so that merged outputs have one, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts.checkpoints.expert_function import describe_record, read_functions
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import kt_kernel, launch
from ktconvert.layouts.outputs.format import Card
from ktconvert.layouts.outputs.launch import FOLDER, ORIGINAL
from ktconvert.layouts.outputs.linear_names import explain_not_rawint4
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.tensors import PROJECTIONS, format_ranges, name_layers

Stats = Mapping[str, Any]  # measured figures of a unit
Rows = tuple[tuple[str, str], ...]


def make_model_card(
    card: Card,
    facts: OutputFacts,
    base_model: str | None,
    notes: Sequence[str],
    stats: Sequence[Stats],
    tool_version: str,
    *,
    loose: bool = False,
    non_experts: str = "skip",
    has_counts: bool = False,
) -> bytes:
    """Return README.md: front matter for the hub, contents of the folder, how to load it, errors of its weights.

    has_counts  whether the folder has the tokens of each expert (expert_counts.py)
    """
    functions = read_functions(facts.get("functions", {})).values()
    if card.slices and any(function.biases or not function.gated for function in functions):  # not for kt-kernel
        card = replace(MXFP4, numbers=card.numbers)
    # kt-kernel's names of methods do not have our prefix.
    named_facts: OutputFacts = {**facts, "method": facts["method"].removeprefix("KT_")}
    support = kt_kernel.describe_support(facts) if facts["method"] in kt_kernel.KT_METHODS else ""
    words = {**named_facts, **_make_words(named_facts, base_model, loose, non_experts)}
    lines = _make_front_matter(card, facts, base_model)
    lines += ["", f"# {card.title.format(**words)}", ""]
    lines += [line.format(**words) for line in card.introduction]
    lines += ["", "| | |", "|---|---|"]
    rows = (
        *card.make_rows(card, named_facts),
        *([(kt_kernel.NAME, support)] if support else []),
        ("made by", f"ktconvert {tool_version}"),
    )
    lines += [f"| {name} | {value} |" for name, value in rows]
    make_usage = _make_ktconvert_usage if kt_kernel.INSTEAD in support else card.make_usage
    lines += ["", "## Use", "", *make_usage(named_facts, base_model, non_experts)]
    lines += COUNTS.splitlines() if has_counts else []
    lines += _make_error_lines(stats)
    if facts.keys() & {"scale", "methods"}:
        lines += _make_layer_lines(stats)
    lines += _make_calibration_lines(facts, stats)
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return ("\n".join(lines) + "\n").encode()


def _make_front_matter(card: Card, facts: OutputFacts, base_model: str | None) -> list[str]:
    """Return the front matter, which the hub reads."""
    lines = ["---"]
    if base_model:
        lines.append(f"base_model: {base_model}")
    if card.library:
        lines.append(f"library_name: {card.library}")
    lines.append("tags:")
    lines += [f"- {tag}" for tag in ("ktconvert", *card.tags, facts["method"].lower())]
    return [*lines, "---"]


CONTENTS = {  # value of --non-experts -> contents of the folder besides routed experts
    "skip": "no other weights: attention, router and shared experts stay in the original checkpoint",
    "copy": "all other weights under kt-kernel's names",
    "keep": "all other weights under their own names: it is a whole model",
}


def _make_words(facts: OutputFacts, base_model: str | None, loose: bool, non_experts: str) -> dict[str, str]:
    """Return the words for the braces in titles and paragraphs of cards, in addition to the facts."""
    numa = facts.get("numa")
    layers = facts.get("layers", ())
    return {
        "model": base_model or "Model",
        "this_model": base_model or "this model",
        "layers_of_experts": f"experts of {len(layers)} layers ({format_ranges(layers)})",
        "slices": f"{numa} NUMA slice{'s' if numa != 1 else ''}",
        "loose": " (loose .kt folders)" if loose else "",
        "contents": CONTENTS[non_experts],
    }


# --- rows -----------------------------------------------------------------------------------------

CHOICES = (  # rows on the choice of codes and scales: fact, name of the row, text of the row
    ("scale", "scales", "`--scale {scale}`"),
    ("imatrix", "importance matrix", "sha256 `{imatrix}`"),
    ("second_moments", "second moments", "sha256 `{second_moments}`"),
)


def _make_cpu_rows(card: Card, facts: OutputFacts) -> Rows:
    rows = [("method", f"{facts['method']} ({card.numbers.format(**facts)})")]
    rows += [(method, name_layers(layers)) for method, layers in facts.get("methods", {}).items()]
    rows += [(name, text.format(**facts)) for fact, name, text in CHOICES if fact in facts]
    if "without_counts" in facts:
        rows.append(("scales of `mse`", "; ".join(facts["without_counts"])))
    rows += equalize_rows(facts.get("equalized"))
    if card.slices:
        rows.append(("NUMA slices", card.slices.format(**facts)))
    if earlier_counts := facts.get("resplit_from"):
        rows.append(("resplit from", f"{', then '.join(map(str, earlier_counts))} NUMA slices"))
    rows += _make_size_rows(facts)
    rows.append(("source dtypes", ", ".join(facts["dtypes"])))
    return tuple(rows)


def _make_gpu_rows(card: Card, facts: OutputFacts) -> Rows:
    return (
        ("experts", f"{facts['bits']} bits, {card.numbers.format(**facts)}"),
        ("method", f"{facts['quant_method']}, rounding {facts['rounding']}"),
        ("quantized linears", f"{facts['packed_linears']}"),
        *equalize_rows(facts.get("equalized")),
        *_make_size_rows(facts),
        ("source dtypes of the experts", ", ".join(facts["dtypes"])),
    )


def _make_dequantized_rows(card: Card, facts: OutputFacts) -> Rows:
    decoded = ", ".join(f"{count} in {title}" for title, count in facts["decoded"].items()) or "none"
    return ("quantized weights of the source, now BF16", decoded), ("tensors", f"{facts['tensors']}")


def _make_fetched_rows(card: Card, facts: OutputFacts) -> Rows:
    return (("tensors", f"{facts['tensors']}"),)


def _make_size_rows(facts: OutputFacts) -> Rows:
    return (
        ("experts per layer", f"{facts['experts']}"),
        ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
        *([("experts compute", describe_record(facts["functions"]))] if "functions" in facts else []),
    )


def equalize_rows(equalized: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the row on equalized experts; nothing without --equalize."""
    return [] if equalized is None else [("equalized", "; ".join(equalized) or "no expert")]


COUNTS = f"""
`{expert_counts.NAME}` has the number of tokens that were routed to each expert. `ktconvert experts` chooses the \
experts
for the GPU with it:

```bash
ktconvert experts {FOLDER} --format sglang --output experts.json --num-gpu-experts N
ktconvert experts {FOLDER} --format sglang-kt --output experts.pt --num-gpu-experts N
```"""

# --- how to load an output ------------------------------------------------------------------------


def _make_kt_kernel_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return _explain_launch(launch.serve_cpu_experts(facts, FOLDER, base_model or ORIGINAL, sliced=True))


def _make_native_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return _explain_launch(launch.serve_cpu_experts(facts, FOLDER, base_model or ORIGINAL, sliced=False))


def _explain_launch(options: Sequence[str]) -> tuple[str, ...]:
    return *launch.fence_command(options), "", "`ktconvert doctor` prints the values of the machine."


def _make_ktconvert_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    with_original = (f"ktconvert run {base_model or ORIGINAL} --cpu-weights {FOLDER}",)
    whole_model = (f"ktconvert run {FOLDER}", f"ktconvert serve {FOLDER}")
    return "```bash", *(with_original if non_experts == "skip" else whole_model), "```"


def _make_backward_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return (
        "kt-kernel's method AMXBF16_SFT takes the experts themselves from a checkpoint in BF16. kt-kernel 0.7.2 "
        "writes these",
        "files, but does not load a folder without other weights.",
    )


def _make_whole_model_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    on_the_cpu = "As the model and, with kt-kernel's RAWINT4, as the experts on the CPU, from the same files:"
    on_the_gpu = "As the GPU half beside CPU experts that `ktconvert cpu` made:"
    return (
        on_the_cpu if explain_not_rawint4(facts) is None else on_the_gpu,
        *("", *launch.fence_command(launch.serve_whole_model(facts, FOLDER)), ""),
        f'Or without kt-kernel: `AutoModelForCausalLM.from_pretrained("{FOLDER}")`, with compressed-tensors installed.',
    )


def _make_dequantized_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    return (f'`AutoModelForCausalLM.from_pretrained("{FOLDER}")`, or as the input of `ktconvert`.',)


def _make_fetched_usage(facts: OutputFacts, base_model: str | None, non_experts: str) -> tuple[str, ...]:
    usage = (
        f"As the model beside CPU weights: `ktconvert serve {FOLDER} --cpu-weights CPU_WEIGHTS`, or SGLang's `--model`."
    )
    return (usage,)


# --- the cards of all formats ---------------------------------------------------------------------

AMX = Card(
    title="{method} expert weights of {this_model}",
    introduction=(
        "Routed {layers_of_experts}, quantized to {method} in {slices},",
        "in the format that kt-kernel 0.7 loads{loose}. The folder contains {contents}.",
    ),
    numbers="{bits} bits, one scale per output row and NUMA slice",
    slices="{numa}: requires `--kt-threadpool-count {numa}`",
    make_rows=_make_cpu_rows,
    make_usage=_make_kt_kernel_usage,
    library="kt-kernel",
    tags=("kt-kernel", "mixture-of-experts"),
)
MOE = replace(
    AMX,
    introduction=(
        "Routed {layers_of_experts}, quantized to {method} in {slices},",
        "in the plain order of kt-kernel's build for aarch64 with KML{loose},",
        "according to its source code; it is untested there. On AMD, kt-kernel expects the order of AOCL-BLIS under",
        "the same names, and would compute garbage from this folder. The folder contains {contents}.",
    ),
)
MXFP4 = replace(
    AMX,
    introduction=(
        "Routed {layers_of_experts} as {method} in {slices}, for the CPU",
        "runtime of ktconvert. kt-kernel does not load this layout. The folder contains {contents}.",
    ),
    numbers="4 bits, and 8 bits of scale for each 32 columns of a row",
    slices="{numa}",
    make_usage=_make_ktconvert_usage,
    library="ktconvert",
    tags=("mixture-of-experts",),
)
FP8 = replace(MXFP4, numbers="E4M3, a float32 scale for each 128 x 128")
BF16 = replace(MXFP4, numbers="16 bits, no scales")
MIXED = replace(MXFP4, numbers="a method per layer")
KT_MXFP4 = replace(
    AMX,
    introduction=(
        "Routed {layers_of_experts} as kt-kernel's method {method} reads them, for",
        "any number of NUMA nodes. The folder contains {contents}.",
    ),
    numbers=MXFP4.numbers,
    slices="",
    make_usage=_make_native_usage,
)
KT_FP8 = replace(KT_MXFP4, numbers=FP8.numbers)
KT_BF16 = replace(KT_MXFP4, numbers=BF16.numbers)
RAWINT4 = replace(KT_MXFP4, numbers="4 bits, -8 to 7, and a BF16 scale of either sign for each 32 columns of a row")
BACKWARD = replace(
    AMX,
    title="Backward matrices of {this_model}",
    introduction=(
        "The transposed routed {layers_of_experts} in BF16 and {slices}, for",
        "fine-tuning: the files `BF16_*_bwd_*` that kt-kernel 0.7 writes (loose .kt folders). The folder contains "
        "no other weights.",
    ),
    numbers=BF16.numbers,
    slices="{numa}",
    make_usage=_make_backward_usage,
)
WHOLE_MODEL = Card(
    title="{model} with experts in {method}",
    introduction=(
        "The whole model. The routed {layers_of_experts} are {method}; all other tensors are",
        "those of the original, under the same names. The format is compressed-tensors' pack-quantized, "
        "which transformers,",
        "vLLM and SGLang load.",
    ),
    numbers="symmetric, one BF16 scale per {group_size} columns",
    make_rows=_make_gpu_rows,
    make_usage=_make_whole_model_usage,
    tags=("kt-kernel", "compressed-tensors", "mixture-of-experts"),
)
DEQUANTIZED = Card(
    title="{model} in BF16",
    introduction=(
        "The whole model, dequantized: each quantized weight is BF16, rounded once to nearest even from its value",
        "in float32, under the name and in the shape of a BF16 release. Everything else is as in the original.",
    ),
    make_rows=_make_dequantized_rows,
    make_usage=_make_dequantized_usage,
)

FETCHED = Card(
    title="{model} without its routed experts",
    introduction=(
        "The tensors of the model outside its routed experts, as they were released, for a server whose CPU computes",
        "the experts from other weights. A program that computes all experts cannot use the folder.",
    ),
    make_rows=_make_fetched_rows,
    make_usage=_make_fetched_usage,
)

# --- measured errors, and the calibration of GPTQ -------------------------------------------------

ERROR = """## Error

Measured on one expert of each shard against the source in BF16 \
(`ktconvert verify --against SOURCE --full` measures all).

| projection | mean relative error | worst | lowest cosine |
|---|---|---|---|"""


def _make_error_lines(stats: Sequence[Stats]) -> list[str]:
    """Return the section on errors of the sampled experts; nothing if none were measured."""
    rows = []
    for projection in PROJECTIONS:
        if measured := [s[projection] for s in stats if projection in s]:
            relative = [m["relative_error"] for m in measured]
            mean = sum(relative) / len(relative)
            cosine = min(m["cosine"] for m in measured)
            rows.append(f"| {projection}_proj | {mean:.4f} | {max(relative):.4f} | {cosine:.5f} |")
    return ["", *ERROR.splitlines(), *rows] if rows else []


def _make_layer_lines(stats: Sequence[Stats]) -> list[str]:
    """Return the table of mean relative errors of the sampled experts by layer."""
    layers: dict[int, list[Stats]] = {}
    for s in stats:
        if all(key in s for key in ("layer", "up", "down")):
            layers.setdefault(s["layer"], []).append(s)
    measured = [p for p in PROJECTIONS if all(p in s for sampled in layers.values() for s in sampled)]
    rows = []
    for layer, sampled in sorted(layers.items()):
        errors = [[s[projection]["relative_error"] for s in sampled] for projection in measured]
        means = (f"{sum(values) / len(values):.4f}" for values in errors)
        rows.append(f"| {layer} | {' | '.join(means)} |")
    head = "".join(f" {projection}_proj |" for projection in measured)
    return ["", f"| layer |{head}", f"|{'---|' * (1 + len(measured))}", *rows] if rows else []


SEEN_TOKENS = {  # value of --calibrate -> its meaning
    "all": "every expert saw every token",
    "routed": "each expert saw the tokens routed to it",
    "mixed": "gate and up saw every token, down those routed to its expert",
}
FEW_TOKENS = (
    "These experts saw too few tokens for GPTQ; their other linears have the codes of `--scale imatrix`, or of `mse` "
    "if no token was routed to the expert"
)


def _make_calibration_lines(facts: OutputFacts, stats: Sequence[Stats]) -> list[str]:
    """Return the section on GPTQ's calibration and the experts' tokens; nothing for rounding to nearest."""
    calibration = facts.get("calibration")
    if calibration is None:
        return []
    seen = SEEN_TOKENS.get(calibration["calibrate"], calibration["calibrate"])
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
        lines.append(f"{FEW_TOKENS}: {'; '.join(few)}.")
    routed = [s for s in stats if "routed_tokens" in s]
    if routed:
        last_column = "not compensated" if "scale" in facts else "rounded to nearest"
        head = f"| layer | tokens routed to an expert: least | median | most | experts without tokens | {last_column} |"
        lines += ["", head, "|---|---|---|---|---|---|"]
        for s in routed:
            tokens = " | ".join(f"{s['routed_tokens'][key]}" for key in ("least", "median", "most", "none"))
            rounded = len(s["rounded_experts"]) + len(s["rounded_linears"])
            lines.append(f"| {s['layer']} | {tokens} | {rounded or '-'} |")
    return lines
