"""What `ktconvert verify` is given, opened: an output, and the source or other output that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS
from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint
from ktconvert.layouts.errors import InputError, UsageError, VerificationError
from ktconvert.layouts.outputs import decoded
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_decoded, is_output, is_whole_model, open_decoded, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.statistics.folder import InputStatistics, open_model_imatrix, open_model_moments
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.pipeline.engine.paths import locate, output_of
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.stages.quantize_experts import EQUALIZED, equalize_for_format

DECODED = Measure(decoded.METHOD, None, 1, False, {})  # of what `dequantize` wrote: no experts in one of our forms


@dataclass(frozen=True)
class Inputs:
    """An output, and what it is compared with: another output, or its source and the model of that, equalized if the
    output is; no model where the output is a checkpoint without experts of ours.
    """

    options: VerifyOptions
    output: Output
    measure: Measure
    other: Output | None = None
    model: MoeModel | None = None
    source: TensorSource | None = None
    imatrix: InputStatistics | None = None

    @property
    def files(self) -> tuple[tuple[str, int, str], ...]:
        """What tells these files from others: names, sizes, hashes of the source's headers; loose files as one."""
        found = [] if self.source is None else [(s.name, s.size, s.header_sha256) for s in self.source.shards]
        for each in filter(None, (self.output, self.other)):
            found += [(name, (each.root / name).stat().st_size, "") for name in each.shards]
            found.append((str(each.root), sum(stored.nbytes for stored in each.tensors.values()), ""))
        return tuple(found)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


def open_inputs(options: VerifyOptions) -> Inputs:
    """Open what is to be verified. Raises VerificationError for an unfinished output, UnsupportedError for what is no
    output, InputError for a damaged source, UsageError for options that do not fit this output.
    """
    require_finished(options.output)
    if is_decoded(options.output):
        if options.numa is not None or options.method is not None:
            raise UsageError(f"{options.output} is a checkpoint: leave out --numa and --quant-method.")
        source = None if options.against is None else open_checkpoint(options.against, options.revision)
        return Inputs(options, open_decoded(options.output), DECODED, source=source)
    output = open_output(options.output)
    if output.whole and options.numa is not None:
        raise UsageError(f"--numa {options.numa}: {output.root} is for the GPU and has no NUMA parts; leave it out.")
    measured = measure(output)
    if options.against is None:
        return Inputs(options, output, measured, imatrix=_open_imatrix(options, output, None))
    path = Path(options.against).expanduser()
    made_from_it = not output.whole and is_whole_model(path)  # `cpu` takes what `gpu` wrote
    if (is_output(path) or locate(path).plan.exists()) and not made_from_it:
        return Inputs(options, output, measured, _open_other(path), imatrix=_open_imatrix(options, output, None))
    row = options.arch_row or output.settings.get("arch_row")
    source = open_checkpoint(options.against, options.revision)
    model = recognise(source, (parse_arch(row), *ARCHS) if row else ARCHS)
    if measured.fmt is None:
        measured = measure(output, hidden=model.shape(model.layers[0])[1])
    if EQUALIZED in output.facts and measured.fmt is not None:
        model = equalize_for_format(model, measured.fmt)
    return Inputs(options, output, measured, None, model, model.source, _open_imatrix(options, output, model))


def require_finished(path: Path) -> None:
    """Raise VerificationError for a conversion that is not finished, InputError where there is nothing at all."""
    paths = locate(path)
    if paths.plan.exists() and (paths.inside or not path.exists()):
        raise VerificationError(f"{path}: is not finished; run `ktconvert resume {path}`.")
    if (finished := output_of(path)) is not None:
        unfinished = "is the work directory of a conversion that is not finished"
        raise VerificationError(f"{path}: {unfinished}; run `ktconvert resume {finished}`.")
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


def _open_imatrix(options: VerifyOptions, output: Output, model: MoeModel | None) -> InputStatistics | None:
    """The statistics of inputs that the output was made with; None where it was made without, or there is no source."""
    fact = next((name for name in (SecondMoments.manifest_key, Imatrix.manifest_key) if name in output.facts), None)
    path = options.importance.file
    if fact is None and path is not None:
        if options.page_statistics is not None:
            return None
        remedy = "leave out --imatrix, and --statistics without --report"
        raise UsageError(f"{output.root}: was made without statistics of inputs; {remedy}.")
    if fact is None or model is None:
        return None
    made_with = output.facts[fact]
    if path is None:
        either = f"--imatrix FILE (sha256 {made_with[:12]}) or " if fact == Imatrix.manifest_key else ""
        remedy = f"give {either}--statistics DIR, or leave out --against"
        raise UsageError(
            f"{output.root}: was made with statistics of inputs, and can be made again with them only: {remedy}."
        )
    inputs = open_model_imatrix(path, model) if fact == Imatrix.manifest_key else open_model_moments(path.parent, model)
    if inputs.sha256 != made_with:
        raise InputError(
            f"{inputs.path}: is not the file that {output.root} was made with (its sha256 is {inputs.sha256[:12]}, the "
            f"manifest says {made_with[:12]}); give that file."
        )
    return inputs
