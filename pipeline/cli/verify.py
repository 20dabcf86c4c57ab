"""ktconvert verify."""

from __future__ import annotations

import json
import sys

import click

from ktconvert.layouts.checkpoints.config import experts_per_token
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import publish
from ktconvert.native_quant.runtime import from_checkpoint, smoke
from ktconvert.native_quant.runtime.methods import METHODS as COMPUTED
from ktconvert.native_quant.runtime.pool import shared_pool
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.engine.executors import opened
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.verify.checks import AGAIN, Check
from ktconvert.pipeline.verify.page import page
from ktconvert.pipeline.verify.structure import weights_whole
from ktconvert.pipeline.verify.verify import Report, document, lines
from ktconvert.pipeline.verify.verify import verify as verify_output

PAGES = (".html", ".htm")


@command("verify", VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Check an output, ours or kt-kernel's: structure, sizes, counts and the hash of every file.

    With --against SOURCE every expert is quantized again and must give the same bytes, and the error is measured.
    With --against ANOTHER OUTPUT the tensors that differ are named. With --run one layer is computed, every expert of
    it; OUTPUT may then be a checkpoint, too. An output for the GPU is also loaded by transformers, where it is
    installed: without weights, and whole with --against SOURCE. Exit code 6 if anything is not as it should be.

    Examples:
      ktconvert verify /models/Qwen3-30B-A3B-INT8
      ktconvert verify /models/Qwen3-30B-A3B-INT8 --against /models/Qwen3-30B-A3B     quantize again: the same bytes?
      ktconvert verify /models/Qwen3-30B-A3B-INT8 --against /models/made-by-kt-kernel which tensors differ?
      ktconvert verify /models/made-by-kt-kernel --numa 2 --quant-method int8         what it will be loaded as
      ktconvert verify /models/Qwen3-30B-A3B-INT8 --run                               does it compute here?
      ktconvert verify /models/Qwen3-30B-A3B-FP8 --run                                and a checkpoint as it is stored?
      ktconvert verify /models/Qwen3-30B-A3B-W4A16 --against /models/Qwen3-30B-A3B    does it predict the same?
      ktconvert verify /models/Qwen3-30B-A3B-INT4 --against /models/Qwen3-30B-A3B --full --report report.html  as a page
    """
    # Only the report goes to stdout: one table, or one JSON object.
    reporter = with_values(options.reporting, json_events=False).reporter
    preconditions.check_kernels("the command again")
    preconditions.check_file("--report", options.report, PAGES)
    threads, workers = preconditions.lowered("--cpuinfer-threads", options.threads, reporter), options.cpuinfer_threads
    options = with_values(options, cpuinfer_threads=threads, arch_row=options.arch.text())
    with opened(options.workers.executor, reporter.note, options.workers.executor_timeout) as engine:
        if engine.executor is None and engine.threads is not None:
            threads = preconditions.lowered("--executor threads", engine.threads, reporter)
            options = with_values(options, cpuinfer_threads=threads)
        report = verify_output(options, reporter, engine.executor, workers or engine.threads)
    if options.run:
        report.checks.append(run_check(report, threads))
    if options.report is not None:
        publish.write_whole(options.report, page(report).encode("utf-8", "backslashreplace"))
        reporter.say(f"page: {options.report}")
    for note in report.notes:
        reporter.note(note)
    if options.reporting.json_events:
        click.echo(json.dumps(document(report)))
    elif not options.reporting.quiet:
        click.echo("\n".join(lines(report)))
    if report.sentence is not None:
        if options.reporting.json_events:  # the object holds the sentence: an error event would repeat it
            click.echo(f"ktconvert: {report.sentence}", err=True)
            sys.exit(VerificationError.exit_code)
        raise VerificationError(report.sentence)


def run_check(report: Report, threads: int) -> Check:
    """Push a few tokens through the first layer of each method: finite, and close to what the weights give in float.
    Raises UnsupportedError for a method that cannot be computed here, InputError for a damaged checkpoint.
    """
    output, measure = report.output, report.measure
    if output.methods and (not weights_whole(output) or not measure.shapes):
        return Check("run", "", ("nothing was computed, since weight files are missing or damaged",))
    computed = COMPUTED if measure.fmt is not None else ()  # the name alone does not tell the order of opaque codes
    unknown = sorted({measure.method_of(layer) for layer in measure.shapes} - {"unknown", *computed})
    if unknown and not from_checkpoint.is_checkpoint(output.root):
        raise UnsupportedError(
            f"{output.root}: {unknown[0]} weights cannot be computed here; verify them without --run."
        )
    source = from_checkpoint.open_experts(output.root)
    first = {measure.method_of(layer): layer for layer in reversed(source.layers)}
    summaries: list[str] = []
    problems: list[str] = []
    for layer in sorted(first.values()):
        topk, _ = experts_per_token(output.config, layer, source.shape_of(layer)[0])
        try:
            result = smoke.smoke(output.root, layer, topk, shared_pool(threads))
        except (InputError, UnsupportedError, VerificationError) as error:
            if output.manifest is None and not output.methods:  # a checkpoint: there is no report of its damage
                raise
            return Check("run", "", (str(error).replace(f"{output.root}: ", ""),))
        errors = ", ".join(f"{error:.3f} ({mode})" for mode, error in result.error.items())
        summaries.append(
            f"layer {layer}, {result.experts} experts, {result.tokens} tokens: finite; "
            f"relative error against float {errors}, at most {result.bound}"
        )
        problems += result.problems
    remedy = f"{AGAIN}; if it stays so, report it with what `ktconvert doctor` prints"
    return Check("run", "; ".join(summaries), problems, remedy=remedy)
