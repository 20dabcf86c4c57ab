"""`ktconvert eval`: accuracy of converted experts."""

from __future__ import annotations

import json

import click

from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command, require_one
from ktconvert.pipeline.options.model_options import EvalOptions


@command("eval", EvalOptions)
def eval(options: EvalOptions) -> None:
    """Measure the accuracy of converted experts: perplexity, divergence from the original model, error per layer.

    Both models read the same text, sequence by sequence. Memory must hold the original model, with --gpu-weights twice.

    Examples:
      ktconvert eval MODEL --cpu-weights OUT --text book.txt
      ktconvert eval MODEL --cpu-weights OUT --text book.txt --plot int4.png
      ktconvert eval MODEL --gpu-weights OUT --text book.txt --skip-sequences 20
    """
    from ktconvert.layouts.errors import UsageError
    from ktconvert.pipeline.models import evaluate
    from ktconvert.pipeline.report.plots import plot_eval
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.report.text import format_table, tokens

    gpu = options.gpu_weights
    require_one({"--cpu-weights": options.cpu_weights is not None, "--gpu-weights": gpu is not None})
    if gpu is not None and options.exact:
        raise UsageError("--exact is only for experts on the CPU; leave it out with --gpu-weights.")
    preconditions.check_plot(options.plot)
    reporter = Reporter()
    choice = preconditions.make_model_choice("eval", options, reporter, "run" if gpu is None else "gpu")
    text = evaluate.read_text(options.text)
    method = None if gpu is None else evaluate.gpu_method(gpu)
    sequences = evaluate.cut_sequences(
        choice, text, options.text, options.sequence_length, options.max_sequences, options.skip_sequences
    )
    original, converted = evaluate.load_pair(choice, gpu)
    reporter.begin(int(sequences.ids.size), 0, tokens)
    try:
        evaluation = evaluate.evaluate(original, converted, sequences, reporter.advance)
    finally:
        reporter.end()
    method = method or evaluate.expert_methods(converted)
    report = evaluate.build_report(options, sequences, evaluation, method)
    if options.as_json:
        click.echo(json.dumps(report))
    else:
        layers = [("layer", "relative error of the experts' output")]
        layers += [(str(row["layer"]), f"{row['relative_error']:.4f}") for row in report["layers"]]
        click.echo("\n".join([*format_table(evaluate.table_rows(report)), "", *format_table(layers)]))
    if options.plot is not None:
        plot_eval(options.plot, report, evaluation.errors.divergence.tolist())
