"""`ktconvert verify`: an output is opened, checked, and reported."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import UsageError, VerificationError
from ktconvert.layouts.outputs import cpu_card, decoded
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names, measure
from ktconvert.layouts.outputs.opening import is_decoded, is_output, open_decoded, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant.runtime.from_checkpoint import is_checkpoint, open_stored
from ktconvert.pipeline.models.evaluate import read_text
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import aligned, first_of, joined, plural, size
from ktconvert.pipeline.verify import against, contents, structure
from ktconvert.pipeline.verify.checks import Check, CheckItems, ProjectionErrors, worst
from ktconvert.pipeline.verify.inputs import DECODED, Inputs, open_inputs, require_finished
from ktconvert.pipeline.verify.item_checks import check_items
from ktconvert.pipeline.verify.page_data import PageData, counts_for, page_data
from ktconvert.pipeline.verify.reload import Predictions, check_predictions, check_reload, not_compared

CHECKPOINT = "checkpoint"  # as it was released
SHOWN = 10  # problems printed per check; --json has them all
ARRANGEMENTS = {
    "merged": "{shards} safetensors shards",
    "native": "{shards} safetensors shards, as kt-kernel's native method reads them",
    "loose": "loose .kt folders",
    "pack-quantized": "a whole model for the GPU, pack-quantized, in {shards} safetensors shards",
    CHECKPOINT: "a checkpoint, in {shards} safetensors shards",
    decoded.ARRANGEMENT: "a whole checkpoint, not quantized, in {shards} safetensors shards",
}


@dataclass
class Report:
    """The result. checks are in the order in which they were made; remarks: notes that are of no check."""

    output: Output
    measure: Measure
    checks: list[Check]
    remarks: list[str] = field(default_factory=list)
    errors: list[ProjectionErrors] = field(default_factory=list)
    against: str | None = None
    predictions: Predictions | None = None
    page_data: PageData | None = None

    @property
    def problems(self) -> list[str]:
        return [problem for check in self.checks for problem in check.problems]

    @property
    def notes(self) -> list[str]:
        return [*(note for check in self.checks for note in check.notes), *self.remarks]

    @property
    def sentence(self) -> str | None:
        """The first problem, how many more, and what to do; None where all is well."""
        remedy = next((check.remedy for check in self.checks if check.problems), None)
        return None if remedy is None else f"{self.output.root}: {first_of(self.problems)}; {remedy}."


def verify(
    options: VerifyOptions, reporter: Reporter, executor: Executor | None = None, threads: int | None = None
) -> Report:
    """Make all checks that the options name; what is wrong with the output is in the report.

    executor  whose workers read the files, with so many threads each (None: the CPUs that they may use); None: threads
              of this process do
    Raises what open_inputs raises, and KtconvertError where a worker cannot read.
    """
    text, folder = None if options.text is None else read_text(options.text), options.page_statistics
    require_finished(options.output)
    ours = is_decoded(options.output) or is_output(options.output)
    if options.run and not ours and is_checkpoint(options.output):
        return _open_checkpoint(options)
    with closing(open_inputs(options)) as inputs:
        output, measured = inputs.output, inputs.measure
        counts = None if folder is None else counts_for(folder, measured, output)
        report = Report(output, measured, structure.check_structure(output, measured), against=options.against)
        readable = structure.weights_whole(output) and bool(output.methods)
        try:
            _check_contents(report, inputs, check_items(inputs, reporter, executor, threads), reporter)
            if options.report is not None and readable:
                report.page_data = page_data(inputs, report.errors, counts)
        finally:
            reporter.end()
        wrong = any(check.problems for check in report.checks if check.name != "source")  # whatever its source says
        if output.whole and readable and options.load and inputs.other is None and not wrong:
            _check_loading(report, inputs, text, reporter)
    return report


def _check_contents(report: Report, inputs: Inputs, check_items: CheckItems, reporter: Reporter) -> None:
    """What is in the files, by itself and against others, while progress is reported."""
    output, measured, options, checks = inputs.output, inputs.measure, inputs.options, report.checks
    whole, bad, source = structure.weights_whole(output), structure.unreadable(output), inputs.source
    files = [file for file in structure.listed_files(output) if file.name not in bad]
    codes = contents.codes_of_others(output, measured) if whole else []
    total = sum(file.size for file in files) + sum(tensor.nbytes for tensor in codes)
    if inputs.other is not None:
        total += sum(stored.nbytes for stored in output.tensors.values())
    elif source is not None:
        total += against.source_bytes(inputs)
    reporter.begin(total, 0)
    if output.tensors and (options.numa is not None or options.method is not None):
        checks.append(structure.check_options(measured, options.numa, options.method))
    if whole and output.methods:
        checks.append(contents.check_numbers(output, measured))
    if codes:
        checks.append(contents.check_codes(output, codes, reporter))
    if output.manifest is not None:
        checks.append(contents.check_hashes(output.manifest, files, check_items))
    if inputs.other is not None:
        checks.append(against.compare_outputs(output, measured, inputs.other, check_items))
    if source is not None and not whole:
        report.remarks.append(f"not compared with {options.against}, since weight files are missing or damaged")
    elif source is not None:
        if output.manifest is not None and output.manifest.command in ("cpu", "gpu", decoded.COMMAND):
            made_of = {(f.header_sha256, f.size) for f in output.manifest.source if f.header_sha256}
            if made_of != {(shard.header_sha256, shard.size) for shard in source.shards}:  # the bytes may be equal
                other = "its files are not those that the manifest says this output was made from"
                report.remarks.append(f"{source.root}: {other}")
        if inputs.model is None:
            checks.append(against.compare_decoded(inputs, check_items))
        else:
            check, report.errors = against.compare_source(against.comparison(inputs), check_items)
            checks.append(check)


def _check_loading(report: Report, inputs: Inputs, text: str | None, reporter: Reporter) -> None:
    """What transformers says of an output for the GPU: of its names, and of its predictions next to the source's."""
    model, fmt = inputs.model, inputs.measure.fmt
    compared = ", then the source and the output" if model else ""
    reporter.say(f"transformers loads it: names first{compared}")
    check, loadable = check_reload(inputs.output)
    report.checks.append(check)
    if model is None or fmt is None:
        return
    if loadable:
        bits = fmt.encoding.grid.bits
        check, report.predictions = check_predictions(inputs.output, model, bits, text, inputs.options.threads)
    else:
        check = not_compared("the output cannot be loaded whole")
    report.checks.append(check)


def _open_checkpoint(options: VerifyOptions) -> Report:
    """A checkpoint whose experts are to be computed as they are stored: what its headers tell."""
    if options.numa is not None or options.method is not None or options.against is not None:
        raise UsageError(f"{options.output} is a checkpoint: leave out --numa, --quant-method and --against.")
    root = options.output
    source = open_stored(root)
    source.require_computable()
    shapes = {layer: source.shape_of(layer) for layer in source.layers}
    measured = Measure(source.rows_of(min(shapes))["gate"].name, None, 1, False, shapes)
    found = f"{plural(len(shapes), 'layer')} with all their experts, none of another size"
    return Report(open_decoded(root), measured, [Check("tensors", found)])


# --- after a conversion ---------------------------------------------------------------------------


def require_sound(root: Path, *, load: bool = True) -> None:
    """The guards after a conversion for the GPU: all of verify that needs neither source nor hashes; load: names in
    transformers, too. Raises VerificationError with the first problem.
    """
    output = open_output(root)
    measured = measure(output)
    checks = [*structure.check_structure(output, measured), contents.check_numbers(output, measured)]
    report = Report(output, measured, checks)
    if load and not report.problems:
        report.checks.append(check_reload(output)[0])
    if report.sentence is not None:
        raise VerificationError(report.sentence)


def require_decoded(root: Path) -> None:
    """The same after `dequantize`. Raises VerificationError with the first problem."""
    output = open_decoded(root)
    if problems := Report(output, DECODED, structure.check_structure(output, DECODED)).problems:
        raise VerificationError(f"{root}: {problems[0]}.")


# --- for people and for programs -------------------------------------------------------------------


def facts(output: Output, measure: Measure) -> dict[str, Any]:
    """What an output is, by its bytes; who made it, by its manifest."""
    manifest, bare = output.manifest, decoded.ARRANGEMENT if output.manifest else CHECKPOINT
    arrangement = "loose" if output.loose else formats_by_names(output)[0].arrangement.name if output.methods else bare
    return {
        "output": str(output.root),
        "made_by": f"ktconvert {manifest.tool.version}" if manifest else None,
        "command": manifest.command if manifest else None,
        "arrangement": arrangement,
        **structure.sizes_of(measure),
        **{name: output.facts[name] for name in ("scale", "too_few_tokens", "equalized") if name in output.facts},
        "layers": list(measure.shapes),
        "tensors": len(output.tensors),
        "expert_bytes": sum(s.nbytes for s in output.tensors.values()),
        "other_tensors": len(output.others),
        "other_bytes": sum(s.nbytes for s in output.others.values()),
        "shards": 0 if output.loose else len(output.shards),
    }


def facts_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    maker = f"{document['made_by']} {document['command']}" if document["made_by"] else "not ktconvert (no manifest)"
    arrangement = document["arrangement"]
    rows = [("output", document["output"]), ("made by", maker)]
    rows.append(("arrangement", ARRANGEMENTS[arrangement].format(**document)))
    others = f"{size(document['other_bytes'])} in {document['other_tensors']} tensors"
    if arrangement == decoded.ARRANGEMENT:
        return [*rows, ("weights", others)]
    rows += [
        ("method", document["method"]),
        *(("", f"{method}: layers {layers}") for method, layers in document.get("methods", {}).items()),
        *([("scales", document["scale"])] if "scale" in document else []),
        *([("too few tokens", "; ".join(document["too_few_tokens"]))] if "too_few_tokens" in document else []),
        *cpu_card.equalized(document),
        *([("NUMA parts", joined(document["numa"]))] if arrangement in ("merged", "loose") else []),
        ("layers", f"{len(document['layers'])} ({ranges(document['layers'])})"),
        ("experts", joined(document["experts"])),
        ("hidden size", joined(document["hidden"] or "unknown")),
        ("expert width", joined(document["intermediate"] or "unknown")),
    ]
    if arrangement == CHECKPOINT:
        return [*rows, ("weights", others)]
    rows.append(("weights", f"{size(document['expert_bytes'])} in {document['tensors']} tensors"))
    if document["backward"]:
        rows.append(("backward", "yes"))
    if document["other_tensors"]:
        rows.append(("other", f"{document['other_tensors']} tensors, {size(document['other_bytes'])}"))
    return rows


def document(report: Report) -> dict[str, Any]:
    return {
        "event": "verified",
        **facts(report.output, report.measure),
        "ok": not report.problems,
        "message": report.sentence,
        "against": report.against,
        "checks": [
            {"name": c.name, "ok": not c.problems, "result": c.result, "problems": [*c.problems]} for c in report.checks
        ],
        "notes": list(report.notes),
        "errors": [_finite(_figures(e)) for e in report.errors],
        "worst": [_finite(e._asdict()) for e in worst(report.errors)],
        "predictions": None if report.predictions is None else asdict(report.predictions),
    }


def lines(report: Report) -> list[str]:
    out = aligned(facts_rows(facts(report.output, report.measure)))
    results = [plural(len(c.problems), "problem") if c.problems else f"ok: {c.result}" for c in report.checks]
    named = zip([check.name for check in report.checks], results, strict=True)
    out += ["", *aligned([("check", "result"), *named])]
    for check in report.checks:
        if check.problems:
            out += ["", f"{check.name}:", *(f"  {problem}" for problem in check.problems[:SHOWN])]
            if len(check.problems) > SHOWN:
                out.append(f"  ... and {len(check.problems) - SHOWN} more (--json lists them all)")
    if report.errors:
        rows: list[tuple[str, ...]] = [("layer", "projection", "relative error", "cosine", "worst expert")]
        for e in report.errors:
            error, cosine = f"{e.figures['relative_error']:.4f}", f"{e.figures['cosine']:.5f}"
            own = f"{e.worst.expert} ({e.worst.relative_error:.4f})"
            rows.append((str(e.layer), e.projection, error, cosine, own))
        measured = len(report.errors[0].experts)
        out += ["", f"error against the source in BF16, {measured} experts per layer", *aligned(rows)]
        rows = []
        for w in worst(report.errors):
            linear = f"layer {w.layer}, expert {w.expert}, {w.projection}_proj"
            rows.append((linear, f"{w.relative_error:.4f}", f"cosine {w.cosine:.5f}"))
        out += ["", "worst experts", *aligned(rows, "  ")]
    return [*out, "", "verified" if not report.problems else "NOT verified"]


def _figures(e: ProjectionErrors) -> dict[str, Any]:
    of_worst = {"worst_expert": e.worst.expert, "worst_relative_error": e.worst.relative_error}
    return {"layer": e.layer, "projection": e.projection, "experts": len(e.experts), **e.figures, **of_worst}


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
