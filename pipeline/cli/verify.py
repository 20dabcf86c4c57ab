"""`ktconvert verify`: report on an output, as a table, JSON or an HTML page."""

from __future__ import annotations

import json
import sys

import click

from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.sources.config import find_experts_per_token
from ktconvert.native_quant.runtime import smoke
from ktconvert.native_quant.runtime.checkpoint_experts import is_checkpoint
from ktconvert.native_quant.runtime.experts import open_experts
from ktconvert.native_quant.runtime.methods import METHODS as COMPUTED
from ktconvert.native_quant.runtime.pool import get_shared_pool
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.engine.backends import open_backend
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.terminal import shorten_paths
from ktconvert.pipeline.verify.checks import CONVERT_AGAIN, Check
from ktconvert.pipeline.verify.page import render_page
from ktconvert.pipeline.verify.verify import Report, report_document, report_lines
from ktconvert.pipeline.verify.verify import verify as verify_output

PAGES = (".html", ".htm")


@command("verify", VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Check an output of ktconvert or kt-kernel: structure, sizes, counts and the hash of every file.

    With --against SOURCE, every expert is quantized again and must have the same bytes, and the error is measured. With
    --against OTHER_OUTPUT, tensors that differ are listed. With --run, OUTPUT may be a checkpoint. If transformers is
    installed, it loads outputs for the GPU. The exit code is 6 if a check fails.

    Examples:
      ktconvert verify OUT
      ktconvert verify OUT --against MODEL    compare with the source
      ktconvert verify OUT --against OTHER    compare two outputs
      ktconvert verify OUT --numa 2 --quant-method int8
      ktconvert verify OUT --against MODEL --full --report report.html
    """
    # stdout gets only the report: a table or one JSON object
    reporter = with_values(options.reporting, json_events=False).reporter
    preconditions.check_kernels("the command again")
    preconditions.check_file("--report", options.report, PAGES)
    worker_threads = options.threads
    notes: list[str] = []
    threads = preconditions.limit_threads("--threads", options.threads, notes.append)
    options = with_values(options, threads=threads, arch_row=options.arch.load_text())
    with open_backend(options.workers.executor, reporter.warn, options.workers.executor_timeout) as backend:
        if backend.executor is None and backend.threads is not None:
            threads = preconditions.limit_threads("--executor threads", backend.threads, notes.append)
            options = with_values(options, threads=threads)
        report = verify_output(options, reporter, backend.executor, worker_threads or backend.threads)
    if options.run:
        report.checks.append(run_check(report, threads))
    page = "" if options.report is None else render_page(report)
    if options.full and options.against is None:
        notes.append("--full has no effect without --against: it is for errors compared with the source")
    if options.text is not None and not any(check.name == "predictions" for check in report.checks):
        notes.append("--text has no effect: only predictions of an output for the GPU and its source are compared")
    if options.reporting.json_events:
        report.remarks += notes
        click.echo(json.dumps(report_document(report)))
    else:
        for note in notes:
            reporter.announce(note)
        _print_report(report, options, reporter)
    if options.report is not None:  # after the table, which a full disk must not take away
        publish.write_marked_file(options.report, page.encode("utf-8", "backslashreplace"))
        if not options.reporting.json_events:
            reporter.say(f"page: {options.report}")
    if report.sentence is not None:
        if options.reporting.json_events:  # the report contains the sentence: an error event would repeat it
            click.echo(f"ktconvert: {report.sentence}", err=True)
            sys.exit(VerificationError.exit_code)
        raise VerificationError(report.sentence)


def _print_report(report: Report, options: VerifyOptions, reporter: Reporter) -> None:
    for note in report.notes:
        reporter.note(note)
    reporter.count_hidden_notes()
    if not options.reporting.quiet:
        click.echo(shorten_paths("\n".join(report_lines(report))))


def run_check(report: Report, threads: int) -> Check:
    """Compute a few tokens with the first layer of each method, and compare with float arithmetic.

    Raises UnsupportedError for a method that cannot be computed here, InputError for a damaged checkpoint.
    """
    output = report.output
    measure = report.measure
    if output.methods and (not output.has_all_weights or not measure.shapes):
        return Check("run", "", ("not computed: weight files are missing or damaged",))
    # Without a known format, the order of the codes is unknown
    computable = COMPUTED if measure.fmt is not None else ()
    unknown = sorted({measure.layer_method(layer) for layer in measure.shapes} - {"unknown", *computable})
    if unknown and not is_checkpoint(output.root):
        raise UnsupportedError(
            f"{output.root}: {unknown[0]} weights cannot be computed here; verify them without --run."
        )
    source = open_experts(output.root)
    first_layers = {measure.layer_method(layer): layer for layer in reversed(source.layers)}
    summaries: list[str] = []
    problems: list[str] = []
    for layer in sorted(first_layers.values()):
        topk, _ = find_experts_per_token(output.config, layer, source.shape(layer)[0])
        try:
            result = smoke.smoke(output.root, layer, topk, get_shared_pool(threads))
        except (InputError, UnsupportedError, VerificationError) as error:
            if output.manifest is None and not output.methods:  # a checkpoint; no other check reports its damage
                raise
            return Check("run", "", (error.text.replace(f"{output.root}: ", ""),))
        errors = ", ".join(f"{error:.3f} ({mode})" for mode, error in result.error.items())
        summaries.append(
            f"layer {layer}, {result.experts} experts, {result.tokens} tokens: finite; "
            f"relative error against float {errors}, at most {result.bound}"
        )
        problems += result.problems
    remedy = f"{CONVERT_AGAIN}; if the check fails again, report it with the output of `ktconvert doctor`"
    return Check("run", "; ".join(summaries), problems, remedy=remedy)
