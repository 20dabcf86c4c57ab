"""Inputs of `ktconvert verify`: an output, and the source or second output to compare it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.adapter import MERGE
from ktconvert.layouts.checkpoints.adapter_merging import RECORDED
from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ALL, ARCHS
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, UsageError, VerificationError, absent_path, explain_unfinished
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.unfinished import is_unfinished
from ktconvert.layouts.outputs import dequantized
from ktconvert.layouts.outputs.measuring import Measure, measure_output
from ktconvert.layouts.outputs.opening import (
    is_dequantized,
    is_output,
    is_whole_model,
    open_dequantized,
    open_output,
    require_checkpoint,
)
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.sources.source import TensorSource, open_checkpoint
from ktconvert.layouts.statistics.folder import InputStatistics, open_model_imatrix, open_model_moments
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.stages.quantize_experts import EQUALIZED, equalize_for_format

GIVE_MODEL = "give the model that they were made from"
DECODED = Measure(dequantized.METHOD, None, 1, False, {})  # an output of `dequantize`, without converted experts


@dataclass(frozen=True)
class Inputs:
    """An output, and the source or second output to compare it with.

    other    a second output
    source   the output's source
    model    the source's model, equalized if the output is; None for an output of `dequantize`
    imatrix  input statistics that the output was made with
    adapter  adapter that was merged into the source, for the output
    """

    options: VerifyOptions
    output: Output
    measure: Measure
    other: Output | None = None
    model: MoeModel | None = None
    source: TensorSource | None = None
    imatrix: InputStatistics | None = None
    adapter: Path | None = None

    @property
    def identity(self) -> tuple[tuple[str, int, str], ...]:
        """Name, size and header hash of each file (no hash for outputs), by which workers recognize the same files."""
        files = (
            []
            if self.source is None
            else [(shard.name, shard.size, shard.header_sha256) for shard in self.source.shards]
        )
        for output in filter(None, (self.output, self.other)):
            files += [(name, (output.root / name).stat().st_size, "") for name in output.shards]
            files.append((str(output.root), sum(stored.nbytes for stored in output.tensors.values()), ""))
        return tuple(files)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


def measure_dequantized(output: Output) -> Measure:
    """Return the measure of an output of open_dequantized, which has no converted experts."""
    return replace(DECODED, method=str(output.facts["method"]))


def open_inputs(options: VerifyOptions) -> Inputs:
    """Open the output, and the source or second output to compare it with.

    Raises VerificationError for an unfinished output, UnsupportedError for a directory that is no output, InputError
    for a damaged source, UsageError for options that do not fit this output.
    """
    require_finished(options.output)
    if is_dequantized(options.output):
        if options.numa is not None or options.method is not None:
            raise UsageError(f"{options.output} is a checkpoint: leave out --numa and --quant-method.")
        output = open_dequantized(options.output)
        adapter = _find_adapter(options, output)
        if options.against is not None:
            require_checkpoint(Path(options.against).expanduser(), GIVE_MODEL)
        source = None if options.against is None else _open_source(options, options.output)
        return Inputs(options, output, measure_dequantized(output), source=source, adapter=adapter)
    output = open_output(options.output)
    _find_adapter(options, output)  # it has none
    if output.is_whole_model and options.numa is not None:
        raise UsageError(f"--numa {options.numa}: {output.root} is for the GPU and has no NUMA slices; leave it out.")
    measured = measure_output(output)
    if options.against is None:
        return Inputs(options, output, measured, imatrix=_open_imatrix(options, output, None))
    path = Path(options.against).expanduser()
    is_source = not output.is_whole_model and is_whole_model(path)  # `cpu` accepts an output of `gpu`
    if (is_output(path) or is_unfinished(path)) and not is_source:
        return Inputs(options, output, measured, _open_other(path), imatrix=_open_imatrix(options, output, None))
    require_checkpoint(path, GIVE_MODEL)
    row = options.arch_row or output.settings.get("arch_row")
    # The checks of an output for the GPU load the source with transformers, which needs whole files.
    source = _open_source(options, None if output.is_whole_model else options.output)
    experts = output.settings.get("experts", ALL)
    model = recognize(source, (parse_arch(row), *ARCHS) if row else ARCHS, experts=experts)
    if measured.fmt is None:
        measured = measure_output(output, hidden=model.shape(model.layers[0])[1])
    if EQUALIZED in output.facts and measured.fmt is not None:
        model = equalize_for_format(model, measured.fmt)
    return Inputs(options, output, measured, None, model, model.source, _open_imatrix(options, output, model))


def _find_adapter(options: VerifyOptions, output: Output) -> Path | None:
    """Return the adapter that was merged into the source; None without a source or an adapter.

    Raises InputError for a different adapter, UsageError if none is required, or if it does not exist.
    """
    record = output.manifest
    if record is None or record.command != MERGE or options.against is None:
        if options.adapter is not None:
            needed = "an output of `ktconvert merge-adapter`, and --against with the model that it was made from"
            raise UsageError(f"--adapter needs {needed}; leave it out, or correct the others.")
        return None
    folder = options.adapter or Path(output.settings["adapter"])
    if not folder.is_dir():
        remedy = "give it as --adapter, or leave out --against"
        raise UsageError(f"{output.root}: the adapter that was merged into it, {folder}, does not exist; {remedy}.")
    for file in record.source:
        path = folder / file.name.removeprefix(RECORDED)
        if file.name.startswith(RECORDED) and not (path.is_file() and publish.sha256_file(path) == file.sha256):
            raise InputError(f"is not the file that was merged into {output.root}", "use that adapter", path=path)
    return folder


def _open_source(options: VerifyOptions, stream: Path | None) -> TensorSource:
    """Open the source; `stream` as for open_checkpoint."""
    assert options.against is not None
    return open_checkpoint(options.against, options.revision, stream=stream)


def require_finished(path: Path) -> None:
    """Raise VerificationError for a conversion that is not finished, InputError if the path does not exist."""
    if (error := explain_unfinished(path)) is not None:
        raise error
    if not path.exists():
        raise absent_path(path, "give the directory of an output")


def _open_other(path: Path) -> Output:
    """Open the second output. Raises InputError if it is damaged."""
    require_finished(path)
    try:
        other = open_output(path)
    except VerificationError as error:
        raise InputError(str(error)) from error
    if other.damaged:
        raise InputError(f"{path}: {next(iter(other.damaged.values()))}; compare with an undamaged output.")
    return other


def _open_imatrix(options: VerifyOptions, output: Output, model: MoeModel | None) -> InputStatistics | None:
    """Open the input statistics of the output; None if it was made without, or if there is no source."""
    facts: Mapping[str, Any] = output.facts
    kind = next((name for name in (SecondMoments.manifest_key, Imatrix.manifest_key) if name in facts), None)
    path = options.importance.file
    if kind is None and path is not None:
        if options.page_statistics is not None:
            return None
        remedy = "leave out --imatrix, and --statistics without --report"
        raise UsageError(f"{output.root}: was made without input statistics; {remedy}.")
    if kind is None or model is None:
        return None
    recorded_sha256 = facts[kind]
    if path is None:
        first_remedy = f"--imatrix FILE (sha256 {recorded_sha256[:12]}) or " if kind == Imatrix.manifest_key else ""
        remedy = f"give {first_remedy}--statistics DIR, or leave out --against"
        raise UsageError(
            f"{output.root}: was made with input statistics, which are required to make it again; {remedy}."
        )
    statistics = (
        open_model_imatrix(path, model) if kind == Imatrix.manifest_key else open_model_moments(path.parent, model)
    )
    if statistics.sha256 != recorded_sha256:
        raise InputError(
            f"{statistics.path}: differs from the file of {output.root} (its sha256 is {statistics.sha256[:12]}, but "
            f"{recorded_sha256[:12]} in the manifest); use that file."
        )
    return statistics
