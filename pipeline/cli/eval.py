"""ktconvert eval."""

from __future__ import annotations

import json
from typing import Any

import click

from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert eval /models/Qwen3-30B-A3B --cpu-weights /models/Qwen3-30B-A3B-INT4 --text book.txt
  ktconvert eval /models/Qwen3-30B-A3B --cpu-weights OUT --text book.txt --max-windows 20 --plot int4.png
  ktconvert eval /models/Qwen3-30B-A3B --gpu-weights /models/Qwen3-30B-A3B-W4A16 --text book.txt --skip-windows 20
"""


@click.command("eval", epilog=EPILOG)
@click.argument("model", type=options.PathOrHubId())
@click.option(
    "--cpu-weights",
    type=options.FilePath(),
    default=None,
    help="What MODEL was converted into for the CPU, or a checkpoint of the same model.",
)
@click.option(
    "--gpu-weights", type=options.FilePath(), default=None, help="What MODEL was converted into, for the GPU."
)
@click.option("--text", required=True, type=options.FilePath(), help="What both models read: a UTF-8 text file.")
@click.option("--window", type=options.Number(min=2), default=512, show_default=True, help="Tokens read at a time.")
@click.option(
    "--skip-windows",
    type=options.Number(min=0),
    default=0,
    show_default=True,
    help="Leave out the first so many, e.g. what was calibrated with.",
)
@click.option("--max-windows", type=options.Number(min=1), default=None, help="Read no more. [default: all]")
@click.option("--threads", type=options.Number(min=1), default=None, help="Threads. [default: physical cores]")
@click.option("--exact", is_flag=True, help="Round as kt-kernel does, bit for bit.")
@click.option("--revision", type=options.Text(), default=None, help="Branch, tag or commit of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run Python code that comes with MODEL.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=options.FilePath(), default=None, help="Draw it: FILE.png, .svg or .pdf.")
def eval(model: str, **params: Any) -> None:
    """Measure what converted experts cost: perplexity, and how far the predictions move from the original model's.

    MODEL is a directory or a hub id (org/name). Both models read the same text, window by window; the original must fit
    into memory, with --gpu-weights twice.
    """
    from ktconvert.layouts.errors import UsageError
    from ktconvert.pipeline.models import evaluate
    from ktconvert.pipeline.models.generate import Choice
    from ktconvert.pipeline.ui.plots import plot_eval
    from ktconvert.pipeline.ui.progress import Reporter
    from ktconvert.pipeline.ui.text import aligned, tokens

    gpu = params["gpu_weights"]
    if (params["cpu_weights"] is None) == (gpu is None):
        raise UsageError("give either --cpu-weights or --gpu-weights.")
    if gpu is not None and params["exact"]:
        raise UsageError("--exact is about experts on the CPU; leave it out with --gpu-weights.")
    options.check_plot(params["plot"])
    reporter = Reporter()
    evaluate.require(reporter.warn, for_gpu=gpu is not None)
    options.check_kernels("the command again")
    params["threads"] = options.computing_threads(params["threads"], reporter)
    text = evaluate.read_text(params["text"])
    settings = ("cpu_weights", "revision", "trust_remote_code", "threads", "exact")
    choice = Choice(model, **{name: params[name] for name in settings})
    method = None if gpu is None else evaluate.packed_method(gpu)
    windows = evaluate.cut(
        choice, text, params["text"], params["window"], params["max_windows"], params["skip_windows"]
    )
    original, converted = evaluate.load_pair(choice, gpu)
    reporter.begin(int(windows.ids.size), 0, tokens)
    try:
        evaluation = evaluate.evaluate(original, converted, windows, reporter.advance)
    finally:
        reporter.end()
    method = method or evaluate.method_of(converted)
    document = evaluate.document(model, params["cpu_weights"], gpu, params["text"], windows, evaluation, method)
    if params["plot"] is not None:
        plot_eval(params["plot"], document, evaluation.compared.divergence.tolist())
    if params["as_json"]:
        click.echo(json.dumps(document))
        return
    layers = [("layer", "relative error of the experts' output")]
    layers += [(str(row["layer"]), f"{row['relative_error']:.4f}") for row in document["layers"]]
    click.echo("\n".join([*aligned(evaluate.rows(document)), "", *aligned(layers)]))
