"""What `ktconvert verify` is given, opened: an output, and the source or other output that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.checkpoints.archs import ARCHS
from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint
from ktconvert.layouts.errors import InputError, UsageError, VerificationError
from ktconvert.layouts.outputs import decoded
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_decoded, is_output, is_whole_model, open_decoded, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.statistics.folder import InputStatistics
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.pipeline.engine.paths import locate, output_of
from ktconvert.pipeline.plans.quantizing import moments_in, open_for
from ktconvert.pipeline.stages.expert_stream import FACT, equalized

DECODED = Measure(decoded.METHOD, None, 1, False, {})  # of what `dequantize` wrote: no experts in one of our forms


@dataclass(frozen=True)
class VerifyInputs:
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
class Inputs:
    """An output, and what it is compared with.

    other   another output; None where there is none
    model   the experts of its source, equalized if the output is; None where there is none, or the output is a
            checkpoint without experts of ours
    source  the source itself
    """

    options: VerifyInputs
    output: Output
    measure: Measure
    other: Output | None = None
    model: MoeModel | None = None
    source: TensorSource | None = None
    imatrix: InputStatistics | None = None

    @property
    def files(self) -> tuple[tuple[str, int, str], ...]:
        """What tells these files from others: names, sizes, hashes of the source's headers; loose files as one."""
        here = []
        for each in (self.output, self.other):
            if each is not None:
                here += [(name, (each.root / name).stat().st_size, "") for name in each.shards]
                here.append((str(each.root), sum(stored.nbytes for stored in each.tensors.values()), ""))
        shards = () if self.source is None else self.source.shards
        return (*here, *((shard.name, shard.size, shard.header_sha256) for shard in shards))

    def close(self) -> None:
        """Unmap the source."""
        if self.source is not None:
            self.source.close()


def open_inputs(options: VerifyInputs) -> Inputs:
    """Open what is to be verified.

    Raises VerificationError for an unfinished output, UnsupportedError for what is no output, InputError for a damaged
    source, UsageError for options that do not fit this output.
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
    other: Output | None = None
    model: MoeModel | None = None
    if options.against is not None:
        path = Path(options.against).expanduser()
        made_from_it = not output.whole and is_whole_model(path)  # `cpu` takes what `gpu` wrote
        if (is_output(path) or locate(path).plan.exists()) and not made_from_it:
            other = _open_other(path)
        else:
            model = _open_source(options, output)
            if measured.fmt is None:
                measured = measure(output, hidden=model.shape(model.layers[0])[1])
            if FACT in output.facts and measured.fmt is not None:
                model = equalized(model, measured.fmt)
    imatrix = _open_imatrix(options, output, model)
    return Inputs(options, output, measured, other, model, None if model is None else model.source, imatrix)


def require_finished(path: Path) -> None:
    """Raise VerificationError for a conversion that is not finished, InputError where there is nothing at all."""
    paths = locate(path)
    if paths.plan.exists() and (paths.inside or not path.exists()):
        raise VerificationError(f"{path}: is not finished; run `ktconvert resume {path}`.")
    if (finished := output_of(path)) is not None:
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


def _open_source(options: VerifyInputs, output: Output) -> MoeModel:
    from ktconvert.layouts.checkpoints.arch_file import parse_arch

    assert options.against is not None
    row = options.arch or output.settings.get("arch_row")
    source = open_checkpoint(options.against, options.revision)
    return recognise(source, (parse_arch(row), *ARCHS) if row else ARCHS)


def _open_imatrix(options: VerifyInputs, output: Output, model: MoeModel | None) -> InputStatistics | None:
    """The statistics of inputs that the output was made with; None where it was made without, or there is no source."""
    fact = next((name for name in (SecondMoments.fact, Imatrix.fact) if name in output.facts), None)
    if fact is None and options.imatrix is not None:
        if options.statistics is not None:  # for the page
            return None
        raise UsageError(
            f"{output.root}: was made without statistics of inputs; leave out --imatrix, and --statistics without "
            "--report."
        )
    if fact is None or model is None:
        return None
    made_with = output.facts[fact]
    if options.imatrix is None:
        either = f"--imatrix FILE (sha256 {made_with[:12]}) or " if fact == Imatrix.fact else ""
        raise UsageError(
            f"{output.root}: was made with statistics of inputs, and can be made again with them only: give {either}"
            "--statistics DIR, or leave out --against."
        )
    path = options.imatrix
    inputs = open_for(path, model) if fact == Imatrix.fact else moments_in(path.parent, model)
    if inputs.sha256 != made_with:
        raise InputError(
            f"{inputs.path}: is not the file that {output.root} was made with (its sha256 is {inputs.sha256[:12]}, the "
            f"manifest says {made_with[:12]}); give that file."
        )
    return inputs
