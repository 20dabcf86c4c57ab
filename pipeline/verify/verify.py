"""`ktconvert verify`: check an output and report the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.adapter import MERGE
from ktconvert.layouts.errors import UsageError, VerificationError
from ktconvert.layouts.files.manifest import NAME as MANIFEST
from ktconvert.layouts.outputs import cards, dequantized
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names, measure_output
from ktconvert.layouts.outputs.opening import is_dequantized, is_output, open_dequantized, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.tensors import format_ranges, name_layers
from ktconvert.native_quant.runtime.checkpoint_experts import is_checkpoint, open_checkpoint_experts
from ktconvert.pipeline.models.evaluate import read_text
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import format_table, join_values, plural, size, summarize
from ktconvert.pipeline.verify import against, expert_checks, file_checks, tensor_checks
from ktconvert.pipeline.verify.checks import Check, CheckItems, ProjectionErrors, worst_linears
from ktconvert.pipeline.verify.inputs import DECODED, Inputs, open_inputs, require_finished
from ktconvert.pipeline.verify.item_checks import create_check_items
from ktconvert.pipeline.verify.page_data import PageData, collect_page_data, read_counts
from ktconvert.pipeline.verify.reload import Predictions, check_predictions, check_reload, skip_predictions

CHECKPOINT = "checkpoint"  # an unconverted checkpoint
GIVE_SOURCE = f"give the model that was converted, whose files are in {MANIFEST}"
COMPARABLE = ("cpu", "gpu", dequantized.COMMAND, MERGE)  # commands whose manifests have the source's headers
MAX_SHOWN = 10  # problems per check; --json has all
ARRANGEMENTS = {
    "merged": "{shards}",
    "native": "{shards} for kt-kernel's native methods",
    "loose": "loose .kt folders",
    "pack-quantized": "model for the GPU, pack-quantized, {shards}",
    CHECKPOINT: "checkpoint, {shards}",
    dequantized.ARRANGEMENT: "checkpoint, {shards}",
}


@dataclass
class Report:
    """The result of a verification.

    remarks  notes that belong to no check
    """

    output: Output
    measure: Measure
    checks: list[Check]
    remarks: list[str] = field(default_factory=list)
    errors: list[ProjectionErrors] = field(default_factory=list)
    against: str | None = None
    predictions: Predictions | None = None
    page_data: PageData | None = None

    def __repr__(self) -> str:
        """Return the path, whether the checks passed, and their results."""
        return f"Report(output={str(self.output.root)!r}, ok={self.ok}, checks={self.checks})"

    @property
    def ok(self) -> bool:
        """True if no check failed; then the report itself is true."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    @property
    def problems(self) -> list[str]:
        return [problem for check in self.checks for problem in check.problems]

    @property
    def notes(self) -> list[str]:
        return [*(note for check in self.checks for note in check.notes), *self.remarks]

    @property
    def sentence(self) -> str | None:
        """The first problem, the number of others, and the remedy; None if there is no problem."""
        remedy = next((check.remedy for check in self.checks if check.problems), None)
        return None if remedy is None else f"{self.output.root}: {summarize(self.problems)}; {remedy}."


def verify(
    options: VerifyOptions, reporter: Reporter, executor: Executor | None = None, threads: int | None = None
) -> Report:
    """Check an output as the options say; the report holds its problems.

    executor  its workers read the files; None: threads of this process read them
    threads   threads of each worker; None: the CPUs that the worker may use

    Raises the errors of open_inputs, and KTConvertError if a worker cannot read the files.
    """
    text = None if options.text is None else read_text(options.text)
    folder = options.page_statistics
    require_finished(options.output)
    converted = is_dequantized(options.output) or is_output(options.output)
    if options.run and not converted and is_checkpoint(options.output):
        return _open_checkpoint(options)
    with closing(open_inputs(options)) as inputs:
        output = inputs.output
        measured = inputs.measure
        counts = None if folder is None else read_counts(folder, measured, output)
        report = Report(output, measured, tensor_checks.check_structure(output, measured), against=options.against)
        readable = output.has_all_weights and bool(output.methods)
        try:
            _check_contents(report, inputs, create_check_items(inputs, reporter, executor, threads), reporter)
            if options.report is not None and readable:
                report.page_data = collect_page_data(inputs, report.errors, counts)
        finally:
            reporter.end()
        damaged = any(check.problems for check in report.checks if check.name != "source")
        if output.is_whole_model and readable and options.load and inputs.other is None and not damaged:
            _check_loading(report, inputs, text, reporter)
    return report


def _check_contents(report: Report, inputs: Inputs, check_items: CheckItems, reporter: Reporter) -> None:
    """Check the contents of the files, also against the source or second output, and show progress."""
    output = inputs.output
    measured = inputs.measure
    options = inputs.options
    checks = report.checks
    is_readable = output.has_all_weights
    source = inputs.source
    to_hash = [file for file in output.listed_files if file.name not in output.damaged_files]
    codes = tensor_checks.find_unverified_codes(output, measured) if is_readable else []
    total = sum(file.size for file in to_hash) + sum(tensor.nbytes for tensor in codes)
    if inputs.other is not None:
        total += sum(stored.nbytes for stored in output.tensors.values())
    elif source is not None:
        total += against.source_bytes(inputs)
    reporter.begin(total, 0)
    if output.tensors and (options.numa is not None or options.method is not None):
        checks.append(tensor_checks.check_options(measured, options.numa, options.method, options.quant_method))
    if is_readable and output.methods:
        checks.append(tensor_checks.check_numbers(output, measured))
    if codes:
        checks.append(tensor_checks.check_codes(output, codes, reporter))
    if output.manifest is not None:
        checks.append(file_checks.check_hashes(output.manifest, to_hash, check_items))
    if inputs.other is not None:
        checks.append(against.compare_outputs(output, measured, inputs.other, check_items))
    if source is not None and not is_readable:
        report.remarks.append(f"not compared with {options.against}, since weight files are missing or damaged")
    elif source is not None:
        differs = False
        if output.manifest is not None and output.manifest.command in COMPARABLE:
            recorded = {(file.header_sha256, file.size) for file in output.manifest.source if file.header_sha256}
            differs = recorded != {(shard.header_sha256, shard.size) for shard in source.shards}
            if differs:  # the weights may be equal
                problem = "its files differ from the source in the manifest of this output"
                report.remarks.append(f"{source.root}: {problem}")
        if inputs.model is None:
            check = against.compare_dequantized(inputs, check_items)
        else:
            check, report.errors = against.compare_source(expert_checks.create_comparison(inputs), check_items)
        checks.append(replace(check, remedy=GIVE_SOURCE) if differs else check)


def _check_loading(report: Report, inputs: Inputs, text: str | None, reporter: Reporter) -> None:
    """Load an output for the GPU with transformers: check its names, and compare its predictions with the source's."""
    model = inputs.model
    fmt = inputs.measure.fmt
    models = ", then the weights of source and output" if model else ""
    reporter.say(f"loading names with transformers{models}")
    check, loadable = check_reload(inputs.output)
    report.checks.append(check)
    if model is None or fmt is None:
        return
    if loadable:
        bits = fmt.encoding.grid.bits
        check, report.predictions = check_predictions(inputs.output, model, bits, text, inputs.options.thread_count)
    else:
        check = skip_predictions("the output cannot be loaded completely")
    report.checks.append(check)


def _open_checkpoint(options: VerifyOptions) -> Report:
    """Return the report of an unconverted checkpoint whose experts --run computes; reads headers only."""
    if options.numa is not None or options.method is not None or options.against is not None:
        raise UsageError(f"{options.output} is a checkpoint: leave out --numa, --quant-method and --against.")
    root = options.output
    source = open_checkpoint_experts(root)
    source.require_computable()
    shapes = {layer: source.shape(layer) for layer in source.layers}
    measured = Measure(source.select_rows(min(shapes))["gate"].name, None, 1, False, shapes)
    result = f"{plural(len(shapes), 'layer')} with all experts, all of the expected size"
    return Report(open_dequantized(root), measured, [Check("tensors", result)])


# --- after a conversion ---------------------------------------------------------------------------


def require_sound(root: Path, *, load: bool = True) -> None:
    """Check a new output of `gpu`: all checks that need neither the source nor hashes.

    load  whether to check names in transformers, too
    Raises VerificationError with the first problem.
    """
    output = open_output(root)
    measured = measure_output(output)
    checks = [*tensor_checks.check_structure(output, measured), tensor_checks.check_numbers(output, measured)]
    report = Report(output, measured, checks)
    if load and not report.problems:
        report.checks.append(check_reload(output)[0])
    if report.sentence is not None:
        raise VerificationError(report.sentence)


def require_decoded(root: Path) -> None:
    """Check a new output of `dequantize`. Raises VerificationError with the first problem."""
    output = open_dequantized(root)
    if problems := Report(output, DECODED, tensor_checks.check_structure(output, DECODED)).problems:
        raise VerificationError(f"{root}: {problems[0]}.")


# --- text and JSON --------------------------------------------------------------------------------


def describe_output(output: Output, measure: Measure) -> dict[str, Any]:
    """Return a JSON object that describes an output: sizes by its bytes, and origin by its manifest."""
    manifest = output.manifest
    bare = dequantized.ARRANGEMENT if output.manifest else CHECKPOINT
    facts: Mapping[str, Any] = output.facts
    arrangement = "loose" if output.loose else formats_by_names(output)[0].arrangement.name if output.methods else bare
    return {
        "output": str(output.root),
        "made_by": f"ktconvert {manifest.tool.version}" if manifest else None,
        "command": manifest.command if manifest else None,
        "arrangement": arrangement,
        **tensor_checks.model_sizes(measure),
        **{name: facts[name] for name in ("scale", "too_few_tokens", "equalized") if name in facts},
        "layers": list(measure.shapes),
        "tensors": len(output.tensors),
        "expert_bytes": sum(s.nbytes for s in output.tensors.values()),
        "other_tensors": len(output.non_expert_tensors),
        "other_bytes": sum(s.nbytes for s in output.non_expert_tensors.values()),
        "shards": 0 if output.loose else len(output.shards),
    }


def output_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the table rows of describe_output's object."""
    maker = f"{document['made_by']} {document['command']}" if document["made_by"] else "not ktconvert (no manifest)"
    arrangement = document["arrangement"]
    rows = [("output", document["output"]), ("made by", maker)]
    rows.append(
        ("arrangement", ARRANGEMENTS[arrangement].format(shards=plural(document["shards"], "safetensors shard")))
    )
    others = f"{size(document['other_bytes'])} in {document['other_tensors']} tensors"
    if arrangement == dequantized.ARRANGEMENT:
        return [*rows, ("weights", others)]
    rows += [
        ("method", document["method"]),
        *(("", f"{method}: {name_layers(layers)}") for method, layers in document.get("methods", {}).items()),
        *([("scales", document["scale"])] if "scale" in document else []),
        *([("too few tokens", "; ".join(document["too_few_tokens"]))] if "too_few_tokens" in document else []),
        *cards.equalize_rows(document.get("equalized")),
        *([("NUMA slices", join_values(document["numa"]))] if arrangement in ("merged", "loose") else []),
        ("layers", f"{len(document['layers'])} ({format_ranges(document['layers'])})"),
        ("experts", join_values(document["experts"])),
        ("hidden size", join_values(document["hidden"] or "unknown")),
        ("expert width", join_values(document["intermediate"] or "unknown")),
    ]
    if arrangement == CHECKPOINT:
        return [*rows, ("weights", others)]
    rows.append(("weights", f"{size(document['expert_bytes'])} in {document['tensors']} tensors"))
    if document["backward"]:
        rows.append(("backward", "yes"))
    if document["other_tensors"]:
        rows.append(("other", f"{document['other_tensors']} tensors, {size(document['other_bytes'])}"))
    return rows


def report_document(report: Report) -> dict[str, Any]:
    """Return the JSON object that `verify --json` prints."""
    return {
        "event": "verified",
        **describe_output(report.output, report.measure),
        "ok": not report.problems,
        "message": report.sentence,
        "against": report.against,
        "checks": [
            {"name": c.name, "state": c.state, "ok": not c.problems, "result": c.result, "problems": [*c.problems]}
            for c in report.checks
        ],
        "notes": list(report.notes),
        "errors": [_replace_nan(e.document()) for e in report.errors],
        "worst": [_replace_nan(e._asdict()) for e in worst_linears(report.errors)],
        "predictions": None if report.predictions is None else asdict(report.predictions),
    }


def report_lines(report: Report) -> list[str]:
    """Return the lines that `verify` prints."""
    out = format_table(output_rows(describe_output(report.output, report.measure)))
    results = [
        (check.name, plural(len(check.problems), "problem") if check.problems else f"{check.state} ({check.result})")
        for check in report.checks
    ]
    out += ["", *format_table([("check", "result"), *results])]
    for check in report.checks:
        if check.problems:
            out += ["", f"{check.name}:", *(f"  {problem}" for problem in check.problems[:MAX_SHOWN])]
            if len(check.problems) > MAX_SHOWN:
                out.append(f"  ... and {len(check.problems) - MAX_SHOWN} more (--json lists all)")
    if report.errors:
        rows: list[tuple[str, ...]] = [("layer", "projection", "relative error", "cosine", "worst expert")]
        for e in report.errors:
            error = f"{e.figures['relative_error']:.4f}"
            cosine = f"{e.figures['cosine']:.5f}"
            worst = f"{e.worst.expert} ({e.worst.relative_error:.4f})"
            rows.append((str(e.layer), e.projection, error, cosine, worst))
        measured = len(report.errors[0].experts)
        out += ["", f"error against the source in BF16, {measured} experts per layer", *format_table(rows)]
        rows = []
        for w in worst_linears(report.errors):
            linear = f"layer {w.layer}, expert {w.expert}, {w.projection}_proj"
            rows.append((linear, f"{w.relative_error:.4f}", f"cosine {w.cosine:.5f}"))
        out += ["", "worst experts", *format_table(rows, "  ")]
    return [*out, "", "verified" if not report.problems else "NOT verified"]


def _replace_nan(figures: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and Inf by None, since JSON has neither."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
