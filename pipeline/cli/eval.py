"""ktconvert eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert eval /models/Qwen3-30B-A3B --cpu-weights /models/Qwen3-30B-A3B-INT4 --text book.txt
  ktconvert eval /models/Qwen3-30B-A3B --cpu-weights /models/Qwen3-30B-A3B-INT4 --text book.txt --max-windows 20 --plot int4.png
"""


@click.command("eval", epilog=EPILOG)
@click.argument("model")
@click.option("--cpu-weights", required=True, type=click.Path(path_type=Path), help="What MODEL was converted into.")
@click.option(
    "--text", required=True, type=click.Path(path_type=Path), help="What both models read: a UTF-8 text file."
)
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens read at a time.")
@click.option("--max-windows", type=click.IntRange(min=1), default=None, help="Read no more. [default: all]")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Threads. [default: physical cores]")
@click.option("--exact", is_flag=True, help="Round as kt-kernel does, bit for bit.")
@click.option("--revision", default=None, help="Branch, tag or commit of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run Python code that comes with MODEL.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="Draw it: FILE.png, .svg or .pdf.")
def eval(model: str, **given: Any) -> None:
    """Measure what converted experts cost: perplexity, and how far the predictions move from the original model's.

    MODEL is a directory or a hub id (org/name). Both models read the same text, window by window; the original must fit into memory.
    """
    from ktconvert.pipeline import evaluate
    from ktconvert.pipeline.figures import check_plot, plot_eval
    from ktconvert.pipeline.generate import Choice
    from ktconvert.pipeline.report import Reporter, tokens
    from ktconvert.pipeline.verify.report import aligned

    check_plot(given["plot"])
    evaluate.require()
    options.check_kernels("the command again")
    told = Reporter()
    if given["threads"] is not None:
        given["threads"] = options.lowered("--threads", given["threads"], told)
    text = evaluate.read_text(given["text"])
    settings = ("cpu_weights", "revision", "trust_remote_code", "threads", "exact")
    choice = Choice(model, **{name: given[name] for name in settings})
    windows = evaluate.cut(choice, text, given["text"], given["window"], given["max_windows"])
    original, converted = evaluate.load_pair(choice)
    told.begin(int(windows.ids.size), 0, tokens)
    try:
        found = evaluate.evaluate(original, converted, windows, told.advance)
    finally:
        told.end()
    document = evaluate.document(choice, given["text"], windows, found, evaluate.method_of(converted))
    if given["plot"] is not None:
        plot_eval(given["plot"], document, found.compared.divergence.tolist())
    if given["as_json"]:
        click.echo(json.dumps(document))
        return
    layers = [("layer", "relative error of the experts' output")]
    layers += [(str(row["layer"]), f"{row['relative_error']:.4f}") for row in document["layers"]]
    click.echo("\n".join([*aligned(evaluate.rows(document)), "", *aligned(layers)]))
