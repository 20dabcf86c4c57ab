"""`ktconvert verify`: an output by itself (structure, counts, hashes), against its source, or
against another output.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import UsageError, VerificationError
from ktconvert.layouts.outputs import decoded
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_decoded, is_output, open_decoded, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant.runtime.from_checkpoint import is_checkpoint, open_stored
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify import questions
from ktconvert.pipeline.verify.against_output import compare_outputs
from ktconvert.pipeline.verify.against_source import compare_source, comparison, source_bytes
from ktconvert.pipeline.verify.asking import Ask
from ktconvert.pipeline.verify.checks import Check, ProjectionErrors
from ktconvert.pipeline.verify.dequantized import MEASURE, check_decoded, compare_decoded, decoded_tensors
from ktconvert.pipeline.verify.hashes import check_hashes
from ktconvert.pipeline.verify.inputs import Inputs, VerifyOptions, open_inputs, require_finished
from ktconvert.pipeline.verify.numbers import check_numbers
from ktconvert.pipeline.verify.page_data import PageData, counts_for, page_data
from ktconvert.pipeline.verify.predictions import Predictions, check_predictions, not_compared
from ktconvert.pipeline.verify.reload import check_reload
from ktconvert.pipeline.verify.structure import (
    check_options,
    check_structure,
    files_told,
    unreadable,
    weights_whole,
)


@dataclass(frozen=True)
class Report:
    """The result. checks are in the order in which they were made."""

    output: Output
    measure: Measure
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    errors: tuple[ProjectionErrors, ...] = ()
    against: str | None = None
    predictions: Predictions | None = None
    page_data: PageData | None = None

    @property
    def problems(self) -> list[str]:
        """All of them, one sentence each."""
        return [problem for check in self.checks for problem in check.problems]

    @property
    def sentence(self) -> str | None:
        """The first problem, how many more, and what to do; None where all is well."""
        problems = self.problems
        if not problems:
            return None
        remedy = next(check.remedy for check in self.checks if check.problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{self.output.root}: {problems[0]}{more}; {remedy}."


def verify(
    options: VerifyOptions, reporter: Reporter, executor: Executor | None = None, threads: int | None = None
) -> Report:
    """Look at everything that was asked for; what is wrong with the output is in the report.

    executor  whose workers read the files, with so many threads each (None: the CPUs that they may use); None: threads
              of this process do
    Raises what open_wish raises, and KtconvertError where a worker cannot look.
    """
    require_finished(options.output)
    if (
        options.run
        and not is_decoded(options.output)
        and not is_output(options.output)
        and is_checkpoint(options.output)
    ):
        return _open_checkpoint(options)
    inputs = open_inputs(options)
    ask = questions.ask(inputs, reporter, executor, threads)
    try:
        return (_verify_decoded if is_decoded(options.output) else _verify)(inputs, ask, reporter)
    finally:
        inputs.close()


def _verify(inputs: Inputs, ask: Ask, reporter: Reporter) -> Report:
    """An output with experts in one of our forms, or kt-kernel's."""
    options, output, measured = inputs.options, inputs.output, inputs.measure
    other, model = inputs.other, inputs.model
    counts = None if options.statistics is None else counts_for(options.statistics, measured, output)
    checks = check_structure(output, measured)
    asked = check_options(measured, options.numa, options.method) if output.tensors else None
    checks += [asked] if asked else []
    whole, bad = weights_whole(output), unreadable(output)
    hashed = [file for file in files_told(output) if file.name not in bad]
    total = sum(file.size for file in hashed)
    total += sum(s.nbytes for s in output.tensors.values()) if other is not None else 0
    total += source_bytes(output, measured, model) if model is not None else 0
    notes: list[str] = []
    errors: list[ProjectionErrors] = []
    closer: PageData | None = None
    reporter.begin(total, 0)
    try:
        if whole:
            checks.append(check_numbers(output, measured))
        if output.manifest is not None:
            checks.append(check_hashes(output.manifest, hashed, ask))
        sound = whole and not any(check.problems for check in checks)
        if other is not None:
            checks.append(compare_outputs(output, measured, other, ask, reporter))
        elif model is not None and whole:
            notes += _other_source(output, model.source)
            compared = comparison(output, measured, model, imatrix=inputs.imatrix, full=options.full)
            check, errors = compare_source(compared, ask, reporter)
            checks.append(check)
        elif model is not None:
            notes.append(f"not compared with {options.against}, since weight files are missing or damaged")
        if options.page and whole:
            closer = page_data(output, measured, model, errors, counts, options.threads)
    finally:
        reporter.end()
    predictions: Predictions | None = None
    if output.whole and options.load and sound and other is None:
        loaded, predictions = _load(options, output, measured, model, reporter)
        checks += loaded
    notes = [note for check in checks for note in check.notes] + notes
    return Report(output, measured, tuple(checks), tuple(notes), tuple(errors), options.against, predictions, closer)


def _verify_decoded(inputs: Inputs, ask: Ask, reporter: Reporter) -> Report:
    """What `ktconvert dequantize` wrote, by itself and against its source."""
    options, output, source = inputs.options, inputs.output, inputs.source
    if options.statistics is not None:
        counts_for(options.statistics, MEASURE, output)
    checks, notes, bad = check_decoded(output), [], unreadable(output)
    hashed = [file for file in files_told(output) if file.name not in bad]
    total = sum(file.size for file in hashed)
    total += 0 if source is None else sum(stored.nbytes for stored in output.others.values())
    reporter.begin(total, 0)
    try:
        assert output.manifest is not None
        checks.append(check_hashes(output.manifest, hashed, ask))
        if source is not None and weights_whole(output):
            notes += _other_source(output, source)
            checks.append(compare_decoded(output, source, decoded_tensors(source), ask, reporter))
        elif source is not None:
            notes.append(f"not compared with {options.against}, since weight files are missing or damaged")
    finally:
        reporter.end()
    notes = [note for check in checks for note in check.notes] + notes
    return Report(output, MEASURE, tuple(checks), tuple(notes), against=options.against)


def _open_checkpoint(options: VerifyOptions) -> Report:
    """A checkpoint whose experts are to be computed as they are stored: what its headers tell."""
    if options.numa is not None or options.method is not None or options.against is not None:
        raise UsageError(f"{options.output} is a checkpoint: leave out --numa, --quant-method and --against.")
    root = options.output
    source = open_stored(root)
    source.require_computable()
    shapes = {layer: source.shape_of(layer) for layer in source.layers}
    measured = Measure(source.method_of(min(shapes)).name, None, 1, False, shapes)
    result = f"{len(shapes)} layers with all their experts, none of another size"
    return Report(open_decoded(root), measured, (Check("tensors", result),))


def _load(
    options: VerifyOptions, output: Output, measured: Measure, model: MoeModel | None, reporter: Reporter
) -> tuple[list[Check], Predictions | None]:
    """What transformers says of an output for the GPU: do its names fit, and does it predict
    what the source predicts?
    """
    reporter.say("transformers loads it: names first" + (", then the source and the output" if model else ""))
    names, complete = check_reload(output)
    if model is None or measured.fmt is None:
        return [names], None
    if not complete:
        return [names, not_compared("the output cannot be loaded whole")], None
    check, predictions = check_predictions(
        output, model, measured.fmt.encoding.grid.bits, options.text, options.threads
    )
    return [names, check], predictions


def require_sound(root: Path, *, load: bool = True) -> tuple[str, ...]:
    """The guards after a conversion for the GPU: all of verify that needs neither source nor hashes; load: names in
    transformers, too.

    Returns notes. Raises VerificationError with the first problem.
    """
    output = open_output(root)
    measured = measure(output)
    checks = [*check_structure(output, measured), check_numbers(output, measured)]
    if load and not any(check.problems for check in checks):
        checks.append(check_reload(output)[0])
    report = Report(output, measured, tuple(checks))
    if report.sentence is not None:
        raise VerificationError(report.sentence)
    return tuple(note for check in checks for note in check.notes)


def _other_source(output: Output, source: TensorSource) -> list[str]:
    """A note where the files of the source are not those that the manifest names; equal bytes may come of it all the
    same.
    """
    if output.manifest is None or output.manifest.command not in ("cpu", "gpu", decoded.COMMAND):
        return []
    made_of = {(f.header_sha256, f.size) for f in output.manifest.source if f.header_sha256}
    if made_of == {(shard.header_sha256, shard.size) for shard in source.shards}:
        return []
    return [f"{source.root}: its files are not those that the manifest says this output was made from"]
