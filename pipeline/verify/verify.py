"""`ktconvert verify`: an output is opened, checked in the order of the tables, and reported."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ktconvert.layouts.errors import UsageError, VerificationError
from ktconvert.layouts.files.manifest import OutputFile
from ktconvert.layouts.outputs import decoded
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_decoded, is_output, open_decoded, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.runtime.from_checkpoint import is_checkpoint, open_stored
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.ui.text import plural
from ktconvert.pipeline.verify import against, structure
from ktconvert.pipeline.verify.checks import Check, CheckItems, ProjectionErrors, Row, run_checks
from ktconvert.pipeline.verify.inputs import DECODED, Inputs, VerifyInputs, open_inputs, require_finished
from ktconvert.pipeline.verify.item_checks import check_items
from ktconvert.pipeline.verify.page_data import PageData, counts_for, page_data
from ktconvert.pipeline.verify.reload import Predictions, check_predictions, check_reload, not_compared
from ktconvert.pipeline.verify.structure import check_numbers, check_structure


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


@dataclass
class Verification:
    """An output while it is verified.

    checks    made so far
    files     those of the manifest that are there; codes: what `codes` reads
    whole     whether every weight file is there and can be read
    loadable  whether transformers finds a whole model; None: it was not asked
    """

    inputs: Inputs
    reporter: Reporter
    check_items: CheckItems
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[ProjectionErrors] = field(default_factory=list)
    loadable: bool | None = None
    predictions: Predictions | None = None

    @cached_property
    def whole(self) -> bool:
        return structure.weights_whole(self.inputs.output)

    @property
    def readable(self) -> bool:
        return self.whole and bool(self.inputs.output.methods)

    @cached_property
    def files(self) -> list[OutputFile]:
        bad = structure.unreadable(self.inputs.output)
        return [file for file in structure.listed_files(self.inputs.output) if file.name not in bad]

    @cached_property
    def codes(self) -> list[TensorInfo]:
        return structure.codes_of_others(self.inputs.output, self.inputs.measure)

    @property
    def nbytes(self) -> int:
        """How many bytes the checks of CONTENTS will report as done."""
        total: int = sum(file.size for file in self.files) + sum(tensor.nbytes for tensor in self.codes)
        if self.inputs.other is not None:
            return total + sum(stored.nbytes for stored in self.inputs.output.tensors.values())
        return total + (0 if self.inputs.source is None else against.source_bytes(self.inputs))


def _options(v: Verification) -> Check | None:
    given = v.inputs.options.numa, v.inputs.options.method
    return structure.check_options(v.inputs.measure, *given) if v.inputs.output.tensors else None


def _numbers(v: Verification) -> Check | None:
    return check_numbers(v.inputs.output, v.inputs.measure) if v.readable else None


def _codes(v: Verification) -> Check | None:
    return structure.check_codes(v.inputs.output, v.codes, v.reporter) if v.whole and v.codes else None


def _hashes(v: Verification) -> Check | None:
    listing = v.inputs.output.manifest
    return None if listing is None else structure.check_hashes(listing, v.files, v.check_items)


def _other(v: Verification) -> Check | None:
    inputs, other = v.inputs, v.inputs.other
    return None if other is None else against.compare_outputs(inputs.output, inputs.measure, other, v.check_items)


def _source(v: Verification) -> Check | None:
    """Notes, too, where the files are not those that the manifest names; equal bytes may come of it all the same."""
    output, source = v.inputs.output, v.inputs.source
    if source is None or not v.whole:
        return None
    if output.manifest is not None and output.manifest.command in ("cpu", "gpu", decoded.COMMAND):
        made_of = {(f.header_sha256, f.size) for f in output.manifest.source if f.header_sha256}
        if made_of != {(shard.header_sha256, shard.size) for shard in source.shards}:
            v.notes.append(f"{source.root}: its files are not those that the manifest says this output was made from")
    if v.inputs.model is None:
        return against.compare_decoded(output, source, v.check_items)
    check, v.errors = against.compare_source(against.comparison(v.inputs), v.check_items)
    return check


def _reload(v: Verification) -> Check | None:
    """Of a whole model without a problem, whatever its source says."""
    wrong = any(check.problems for check in v.checks if check.name != "source")
    if wrong or not (v.inputs.output.whole and v.readable and v.inputs.options.load) or v.inputs.other is not None:
        return None
    compared = ", then the source and the output" if v.inputs.model else ""
    v.reporter.say(f"transformers loads it: names first{compared}")
    check, v.loadable = check_reload(v.inputs.output)
    return check


def _predictions(v: Verification) -> Check | None:
    inputs, fmt = v.inputs, v.inputs.measure.fmt
    if v.loadable is None or inputs.model is None or fmt is None:
        return None
    if not v.loadable:
        return not_compared("the output cannot be loaded whole")
    text, threads = inputs.options.text, inputs.options.threads
    check, v.predictions = check_predictions(inputs.output, inputs.model, fmt.encoding.grid.bits, text, threads)
    return check


# What is in the files, by itself and against others.
CONTENTS = (
    Row("options", _options),
    Row("numbers", _numbers),
    Row("codes", _codes),
    Row("hashes", _hashes),
    Row("other", _other),
    Row("source", _source),
)
# What transformers says of an output for the GPU: whether its names fit, and whether it predicts what the source does.
LOADING = (Row("reload", _reload), Row("predictions", _predictions))


def verify(
    options: VerifyInputs, reporter: Reporter, executor: Executor | None = None, threads: int | None = None
) -> Report:
    """Make all checks that the options name; what is wrong with the output is in the report.

    executor  whose workers read the files, with so many threads each (None: the CPUs that they may use); None: threads
              of this process do
    Raises what open_inputs raises, and KtconvertError where a worker cannot read.
    """
    require_finished(options.output)
    ours = is_decoded(options.output) or is_output(options.output)
    if options.run and not ours and is_checkpoint(options.output):
        return _open_checkpoint(options)
    with closing(open_inputs(options)) as inputs:
        output, measured = inputs.output, inputs.measure
        v = Verification(inputs, reporter, check_items(inputs, reporter, executor, threads))
        counts = None if options.statistics is None else counts_for(options.statistics, measured, output)
        found: PageData | None = None
        v.checks += check_structure(output, measured)
        reporter.begin(v.nbytes, 0)
        try:
            v.checks.extend(run_checks(CONTENTS, v))
            if inputs.source is not None and not v.whole:
                v.notes.append(f"not compared with {options.against}, since weight files are missing or damaged")
            if options.page and v.readable:
                found = page_data(inputs, v.errors, counts)
        finally:
            reporter.end()
        v.checks.extend(run_checks(LOADING, v))
    notes = (*(note for check in v.checks for note in check.notes), *v.notes)
    return Report(output, measured, tuple(v.checks), notes, tuple(v.errors), options.against, v.predictions, found)


def _open_checkpoint(options: VerifyInputs) -> Report:
    """A checkpoint whose experts are to be computed as they are stored: what its headers tell."""
    if options.numa is not None or options.method is not None or options.against is not None:
        raise UsageError(f"{options.output} is a checkpoint: leave out --numa, --quant-method and --against.")
    root = options.output
    source = open_stored(root)
    source.require_computable()
    shapes = {layer: source.shape_of(layer) for layer in source.layers}
    measured = Measure(source.rows_of(min(shapes))["gate"].name, None, 1, False, shapes)
    check = Check(f"{plural(len(shapes), 'layer')} with all their experts, none of another size", name="tensors")
    return Report(open_decoded(root), measured, (check,))


# --- after a conversion ---------------------------------------------------------------------------


def require_sound(root: Path, *, load: bool = True) -> tuple[str, ...]:
    """The guards after a conversion for the GPU: all of verify that needs neither source nor hashes; load: names in
    transformers, too. Returns notes. Raises VerificationError with the first problem.
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


def require_decoded(root: Path) -> None:
    """The same after `dequantize`. Raises VerificationError with the first problem."""
    report = Report(output := open_decoded(root), DECODED, tuple(check_structure(output, DECODED)))
    if report.problems:
        raise VerificationError(f"{root}: {report.problems[0]}.")
