"""What `ktconvert dequantize` wrote: complete and not quantized any more; against its source, every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs import decoded
from ktconvert.layouts.outputs.card import unquantized
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.opening import open_decoded
from ktconvert.layouts.outputs.output import Output
from ktconvert.pipeline.stages import carry_over
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify.against_source import compare_carried
from ktconvert.pipeline.verify.asking import Ask
from ktconvert.pipeline.verify.checks import Check
from ktconvert.pipeline.verify.structure import check_files, check_index, check_metadata, weights_whole

MEASURE = Measure(decoded.METHOD, None, 1, False, {})  # it has no experts in one of our forms


def check_decoded(output: Output) -> list[Check]:
    """Everything that names, sizes and headers can tell; no weight is read."""
    checks = [check_files(output), check_index(output)]
    if weights_whole(output):
        checks += [check_tensors(output), check_metadata(output, MEASURE), check_config(output)]
    return [check for check in checks if check is not None]


def check_tensors(output: Output) -> Check:
    """As many tensors as the manifest says, none of them twice."""
    problems = [f"{name} is in {first} and in {second}" for name, first, second in output.doubles]
    planned = output.facts.get("tensors")
    if planned != len(output.others):
        problems.append(f"{len(output.others)} tensors are here, the plan had {planned}")
    return Check("tensors", f"{len(output.others)} tensors, as planned", tuple(problems))


def check_config(output: Output) -> Check:
    """Nothing in config.json makes a loader look for quantized weights."""
    quantized = unquantized(output.config) != output.config
    problems = ("config.json still says that the model is quantized",) if quantized else ()
    return Check("config", "nothing is quantized, says config.json", problems)


def decoded_tensors(source: TensorSource) -> dict[str, carry_over.OtherTensor]:
    """What must be there, by name. Raises InputError and UnsupportedError for a source that cannot be dequantized."""
    tensors = other_tensors(source, (), source.quantization).tensors
    return {name: carry_over.OtherTensor(name, stored) for name, stored in tensors.items()}


def compare_decoded(
    output: Output, source: TensorSource, carried: Mapping[str, carry_over.OtherTensor], ask: Ask, reporter: Reporter
) -> Check:
    """Every tensor: quantized weights are decoded again, all others are the source's."""
    problems = compare_carried(output, source, carried, ask, reporter)
    count = sum(isinstance(tensor.stored, Weight) for tensor in carried.values())
    result = f"{count} weights decoded again: the same bytes; {len(carried) - count} other tensors are the source's"
    return Check("source", result, tuple(problems))


def require_decoded(root: Path) -> None:
    """The guards after a conversion: all of verify that needs neither source nor hashes. Raises VerificationError with
    the first problem.
    """
    problem = next((problem for check in check_decoded(open_decoded(root)) for problem in check.problems), None)
    if problem is not None:
        raise VerificationError(f"{root}: {problem}.")
