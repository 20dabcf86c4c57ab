"""`ktconvert verify`: an output by itself (structure, counts, hashes), against its source, or
against another output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.checkpoints.archs import ARCHS
from ktconvert.layouts.checkpoints.experts import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint
from ktconvert.layouts.errors import InputError, UsageError, VerificationError
from ktconvert.layouts.outputs import decoded
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_decoded, is_output, is_whole_model, open_decoded, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.native_quant.runtime import from_checkpoint
from ktconvert.pipeline.engine.places import locate
from ktconvert.pipeline.plans.importance import open_for
from ktconvert.pipeline.tell.report import Reporter
from ktconvert.pipeline.verify.checks import Check, LayerError
from ktconvert.pipeline.verify.dequantized import MEASURE, check_decoded, compare_decoded
from ktconvert.pipeline.verify.figures import Figures, counts_for, figures
from ktconvert.pipeline.verify.hashes import check_hashes
from ktconvert.pipeline.verify.numbers import check_numbers
from ktconvert.pipeline.verify.other import compare_outputs
from ktconvert.pipeline.verify.predictions import Predictions, check_predictions, not_compared
from ktconvert.pipeline.verify.reload import check_reload
from ktconvert.pipeline.verify.source import compare_source, source_bytes
from ktconvert.pipeline.verify.structure import (
    check_options,
    check_structure,
    files_told,
    unreadable,
    weights_whole,
)


@dataclass(frozen=True)
class Wish:
    """What to verify.

    against       a checkpoint (path or hub id) or another output
    numa, method  what the user means to load
    arch          the text of --arch-file, for an output whose manifest has none
    load          whether transformers is to load an output for the GPU: its names, and against its source its
                  predictions
    text          what source and output then read; None: our own
    imatrix       the importance matrix that the output was made with
    run           whether the experts will be computed, so that the output may be a checkpoint
    page          whether worst rows and scales are looked for, too, for the page
    statistics    a folder with statistics, for the page
    """

    output: Path
    against: str | None = None
    revision: str | None = None
    numa: int | None = None
    method: str | None = None
    arch: str | None = None
    full: bool = False
    load: bool = True
    text: str | None = None
    imatrix: Path | None = None
    threads: int = 1
    run: bool = False
    page: bool = False
    statistics: Path | None = None


@dataclass(frozen=True)
class Report:
    """The result. checks are in the order in which they were made."""

    output: Output
    measure: Measure
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    errors: tuple[LayerError, ...] = ()
    against: str | None = None
    predictions: Predictions | None = None
    figures: Figures | None = None

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


def verify(wish: Wish, reporter: Reporter) -> Report:
    """Look at everything that was asked for; what is wrong with the output is in the report.

    Raises VerificationError for an unfinished output, UnsupportedError for what is no output, InputError for a damaged
    source, UsageError for what cannot be asked of this output.
    """
    require_finished(wish.output)
    if is_decoded(wish.output):
        if wish.statistics is not None:
            counts_for(wish.statistics, MEASURE, open_decoded(wish.output))
        return _verify_decoded(wish, reporter)
    if wish.run and not is_output(wish.output) and from_checkpoint.is_checkpoint(wish.output):
        return _open_checkpoint(wish)
    output = open_output(wish.output)
    if output.whole and wish.numa is not None:
        raise UsageError(f"--numa {wish.numa}: {output.root} is for the GPU and has no NUMA parts; leave it out.")
    measured = measure(output)
    counts = None if wish.statistics is None else counts_for(wish.statistics, measured, output)
    other: Output | None = None
    model: MoeModel | None = None
    if wish.against is not None:
        path = Path(wish.against).expanduser()
        made_from_it = not output.whole and is_whole_model(path)  # `cpu` takes what `gpu` wrote
        if (is_output(path) or locate(path).plan.exists()) and not made_from_it:
            other = _open_other(path)
        else:
            model = _open_source(wish, output)
            if measured.form is None:
                measured = measure(output, hidden=model.shape(model.layers[0])[1])
    imatrix = _open_imatrix(wish, output, model)
    checks = check_structure(output, measured)
    asked = check_options(measured, wish.numa, wish.method) if output.tensors else None
    checks += [asked] if asked else []
    whole, bad = weights_whole(output), unreadable(output)
    hashed = [file for file in files_told(output) if file["name"] not in bad]
    total = sum(file["size"] for file in hashed)
    total += sum(s.nbytes for s in output.tensors.values()) if other is not None else 0
    total += source_bytes(output, measured, model) if model is not None else 0
    notes: list[str] = []
    errors: list[LayerError] = []
    closer: Figures | None = None
    reporter.begin(total, 0)
    try:
        if whole:
            checks.append(check_numbers(output, measured.form))
        if output.manifest is not None:
            checks.append(check_hashes(output, hashed, wish.threads, reporter))
        sound = whole and not any(check.problems for check in checks)
        if other is not None:
            checks.append(compare_outputs(output, measured, other, threads=wish.threads, reporter=reporter))
        elif model is not None and whole:
            notes += _other_source(output, model.source)
            check, errors = compare_source(
                output,
                measured,
                model,
                imatrix=imatrix,
                full=wish.full,
                threads=wish.threads,
                reporter=reporter,
            )
            checks.append(check)
        elif model is not None:
            notes.append(f"not compared with {wish.against}, since weight files are missing or damaged")
        if wish.page and whole:
            closer = figures(output, measured, model, errors, counts, wish.threads)
    finally:
        reporter.end()
        if model is not None:
            model.source.close()
    predictions: Predictions | None = None
    if output.whole and wish.load and sound and other is None:
        loaded, predictions = _load(wish, output, measured, model, reporter)
        checks += loaded
    notes = [note for check in checks for note in check.notes] + notes
    return Report(output, measured, tuple(checks), tuple(notes), tuple(errors), wish.against, predictions, closer)


def _verify_decoded(wish: Wish, reporter: Reporter) -> Report:
    """What `ktconvert dequantize` wrote, by itself and against its source."""
    if wish.numa is not None or wish.method is not None:
        raise UsageError(f"{wish.output} is a checkpoint: leave out --numa and --quant-method.")
    output = open_decoded(wish.output)
    source = None if wish.against is None else open_checkpoint(wish.against, wish.revision)
    checks, notes, bad = check_decoded(output), [], unreadable(output)
    hashed = [file for file in files_told(output) if file["name"] not in bad]
    total = sum(file["size"] for file in hashed)
    total += 0 if source is None else sum(stored.nbytes for stored in output.others.values())
    reporter.begin(total, 0)
    try:
        checks.append(check_hashes(output, hashed, wish.threads, reporter))
        if source is not None and weights_whole(output):
            notes += _other_source(output, source)
            checks.append(compare_decoded(output, source, threads=wish.threads, reporter=reporter))
        elif source is not None:
            notes.append(f"not compared with {wish.against}, since weight files are missing or damaged")
    finally:
        reporter.end()
        if source is not None:
            source.close()
    notes = [note for check in checks for note in check.notes] + notes
    return Report(output, MEASURE, tuple(checks), tuple(notes), against=wish.against)


def _open_checkpoint(wish: Wish) -> Report:
    """A checkpoint whose experts are to be computed as they are stored: what its headers tell."""
    if wish.numa is not None or wish.method is not None or wish.against is not None:
        raise UsageError(f"{wish.output} is a checkpoint: leave out --numa, --quant-method and --against.")
    root = wish.output
    from_checkpoint.require_computable(root)
    shapes = {layer: from_checkpoint.shape_of(root, layer) for layer in from_checkpoint.layers_of(root)}
    measured = Measure(from_checkpoint.method_of(root, min(shapes)), None, 1, False, shapes)
    result = f"{len(shapes)} layers with all their experts, none of another size"
    return Report(open_decoded(root), measured, (Check("tensors", result),))


def _load(
    wish: Wish, output: Output, measured: Measure, model: MoeModel | None, reporter: Reporter
) -> tuple[list[Check], Predictions | None]:
    """What transformers says of an output for the GPU: do its names fit, and does it predict
    what the source predicts?
    """
    reporter.say("transformers loads it: names first" + (", then the source and the output" if model else ""))
    names, complete = check_reload(output)
    if model is None or measured.form is None:
        return [names], None
    if not complete:
        return [names, not_compared("the output cannot be loaded whole")], None
    check, predictions = check_predictions(output, model, measured.form.grid.bits, wish.text, wish.threads)
    return [names, check], predictions


def require_sound(root: Path, *, load: bool = True) -> tuple[str, ...]:
    """The guards after a conversion for the GPU: all of verify that needs neither source nor hashes; load: names in
    transformers, too.

    Returns notes. Raises VerificationError with the first problem.
    """
    output = open_output(root)
    measured = measure(output)
    checks = [*check_structure(output, measured), check_numbers(output, measured.form)]
    if load and not any(check.problems for check in checks):
        checks.append(check_reload(output)[0])
    report = Report(output, measured, tuple(checks))
    if report.sentence is not None:
        raise VerificationError(report.sentence)
    return tuple(note for check in checks for note in check.notes)


def require_finished(path: Path) -> None:
    """Raise VerificationError for a conversion that was begun and not finished, InputError where there is nothing at
    all.
    """
    places = locate(path)
    if places.plan.exists() and (places.inside or not path.exists()):
        raise VerificationError(f"{path}: is not finished; run `ktconvert resume {path}`.")
    if (path / "plan.json").exists() and path.name.endswith(".work"):
        finished = path.with_name(path.name.removesuffix(".work"))
        raise VerificationError(
            f"{path}: is the work directory of a conversion that is not finished; run `ktconvert resume {finished}`."
        )
    if not path.exists():
        raise InputError(f"{path}: no such directory; give the directory of an output.")


def _open_other(path: Path) -> Output:
    """The output to compare with; what is wrong with it is bad input."""
    require_finished(path)
    try:
        other = open_output(path)
    except VerificationError as error:
        raise InputError(str(error)) from error
    if other.damaged:
        raise InputError(f"{path}: {next(iter(other.damaged.values()))}; compare with an undamaged output.")
    return other


def _open_source(wish: Wish, output: Output) -> MoeModel:
    from ktconvert.layouts.checkpoints.arch_file import parse_arch

    assert wish.against is not None
    row = wish.arch or (output.manifest or {"settings": {}})["settings"].get("arch_file")
    source = open_checkpoint(wish.against, wish.revision)
    return recognise(source, (parse_arch(row), *ARCHS) if row else ARCHS)


def _open_imatrix(wish: Wish, output: Output, model: MoeModel | None) -> Imatrix | None:
    """The importance matrix that the output was made with; None where it was made without, or there is no source."""
    made_with = output.facts.get("imatrix")
    if made_with is None and wish.imatrix is not None:
        if wish.statistics is not None:  # for the page
            return None
        raise UsageError(
            f"{output.root}: was not made with --scale imatrix; leave out --imatrix, and --statistics without --report."
        )
    if made_with is None or model is None:
        return None
    if wish.imatrix is None:
        raise UsageError(
            f"{output.root}: was made with --scale imatrix, and can be made again from its statistics only: give "
            f"--imatrix FILE (sha256 {made_with[:12]}) or --statistics DIR, or leave out --against."
        )
    opened = open_for(wish.imatrix, model)
    if opened.sha256 != made_with:
        raise InputError(
            f"{wish.imatrix}: is not the file that {output.root} was made with (its sha256 is {opened.sha256[:12]}, "
            f"the manifest says {made_with[:12]}); give that file."
        )
    return opened


def _other_source(output: Output, source: TensorSource) -> list[str]:
    """A note where the files of the source are not those that the manifest names; equal bytes may come of it all the
    same.
    """
    if output.manifest is None or output.manifest["command"] not in ("cpu", "gpu", decoded.COMMAND):
        return []
    made_of = {(f.get("header_sha256"), f["size"]) for f in output.manifest["source"] if f.get("header_sha256")}
    if made_of == {(shard.header_sha256, shard.size) for shard in source.shards}:
        return []
    return [f"{source.root}: its files are not those that the manifest says this output was made from"]
