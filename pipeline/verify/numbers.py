"""The numbers of an output by themselves: scales and codes that no finite weight can give."""

from __future__ import annotations

from collections.abc import Iterator

from ktconvert.layouts.encodings.encoding import suffixes
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import Place, part_shape
from ktconvert.pipeline.verify.checks import Check


def check_numbers(output: Output, measure: Measure) -> Check:
    """Every part's numbers are those that finite weights give."""
    try:
        problems = tuple(_wrong(output, measure))
    except VerificationError as error:
        problems = (str(error),)
    return Check("numbers", "all finite, as those of finite weights are", problems)


def _wrong(output: Output, measure: Measure) -> Iterator[str]:
    """By the output's format; without one, by the first that names its tensors so."""
    encoding = (measure.fmt or formats_by_names(output)[0]).encoding
    endings = suffixes(encoding)
    for place in dict.fromkeys(place for place, _ in output.tensors):
        n, k = _size(measure, place)
        if encoding.scales is not None and not n * k:
            continue
        tensors = encoding.tensors(n, k)
        stored = [output.tensors.get((place, suffix)) for suffix in endings]
        if any(
            s is None or s.dtype != t.dtype or (n * k and s.nbytes != t.nbytes)
            for s, t in zip(stored, tensors, strict=True)
        ):
            continue  # check_tensors says so
        read = output.reader(place, endings)
        for tensor, defect in zip(stored, encoding.defects, strict=True):
            if defect is not None and tensor is not None and (what := defect(read, n, k)):
                yield f"{tensor.name} in {tensor.file}: {what} ({output.names.describe(place, endings[-1])})"


def _size(measure: Measure, place: Place) -> tuple[int, int]:
    """(n, k) of a part; 0 where they are not known."""
    _, hidden, intermediate = measure.shapes[place.layer]
    n, k = part_shape(place.projection, hidden, intermediate, measure.numa)
    return (k, n) if place.backward else (n, k)
