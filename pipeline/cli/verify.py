"""ktconvert verify."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.errors import VerificationError
from ktconvert.pipeline.cli import options

METHODS = ("int4", "int8", "amxint4", "amxint8")

EPILOG = """\b
Examples:
  ktconvert verify /models/Qwen3-30B-A3B-INT8
  ktconvert verify /models/Qwen3-30B-A3B-INT8 --against /models/Qwen3-30B-A3B          quantize again: the same bytes?
  ktconvert verify /models/Qwen3-30B-A3B-INT8 --against /models/made-by-kt-kernel      which tensors differ?
  ktconvert verify /models/made-by-kt-kernel --numa 2 --quant-method int8              what it will be loaded as
"""


@click.command("verify", epilog=EPILOG)
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--against", default=None, help="The source (directory, file or hub id), or another output.")
@click.option("--revision", default=None, help="Branch, tag or commit, where --against is a hub id.")
@click.option("--numa", type=click.IntRange(min=1), default=None, help="The NUMA parts that it must have.")
@click.option(
    "--quant-method",
    type=click.Choice(METHODS, case_sensitive=False),
    default=None,
    help="The method that it must have: kt-kernel does not notice a wrong one.",
)
@options.arch_file
@click.option("--full", is_flag=True, help="Measure the error of every expert, not of 8 per layer.")
@options.cpuinfer_threads
@options.talk
def verify(output: Path, **given: Any) -> None:
    """Check an output, ours or kt-kernel's: structure, sizes, counts and the hash of every file.

    With --against SOURCE every expert is quantized again and must give the same bytes, and the error is measured.
    With --against ANOTHER OUTPUT the tensors that differ are named. Exit code 6 if anything is not as it should be.
    """
    from ktconvert.layouts import LAYOUTS
    from ktconvert.pipeline.report import Reporter
    from ktconvert.pipeline.verify import report as verify_report
    from ktconvert.pipeline.verify.output import Wish
    from ktconvert.pipeline.verify.output import verify as look

    # stdout is the report's alone: one table, or one JSON object.
    told = Reporter(verbosity=-1 if given["quiet"] else int(given["verbose"]))
    options.check_kernels()
    method = given["quant_method"]
    wish = Wish(
        output=output.expanduser().absolute(),
        against=None if given["against"] is None else options.stored_input(given["against"]),
        revision=given["revision"],
        numa=given["numa"],
        layout=None if method is None else LAYOUTS[method.removeprefix("amx")],
        arch=options.text_of("--arch-file", given["arch_file"]),
        full=given["full"],
        threads=options.threads(given["cpuinfer_threads"], told),
    )
    report = look(wish, told)
    for note in report.notes:
        told.note(note)
    if given["json_events"]:
        click.echo(json.dumps(verify_report.document(report)))
    elif not given["quiet"]:
        click.echo("\n".join(verify_report.lines(report)))
    if report.sentence is not None:
        if given["json_events"]:  # the object holds the sentence; a second one, of the error, would be one too many
            click.echo(f"ktconvert: {report.sentence}", err=True)
            sys.exit(VerificationError.exit_code)
        raise VerificationError(report.sentence)
