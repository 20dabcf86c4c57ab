"""The bytes of an output by themselves: the hash of every file, and numbers that no finite weight can give."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ktconvert.layouts.encodings.encoding import suffixes
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import Manifest, OutputFile
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import part_shape
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify.checks import CHUNK, Check, CheckItems
from ktconvert.quantizers.packed import lowest_codes


def check_hashes(listing: Manifest, files: list[OutputFile], check_items: CheckItems) -> Check:
    """Every byte of these files of a manifest, by its sha256, and what the manifest itself says."""
    # The largest first: the last one alone would leave the others idle.
    ordered = sorted(files, key=lambda file: -file.size)
    found = check_items("hashes", ordered, [file.size for file in ordered])
    wrong = {file.name: problem for file, problem in found if problem is not None}
    if (actual := manifest.actual_digest(listing)) != listing.sha256:
        wrong[manifest.NAME] = (
            f"{manifest.NAME} is not what was written: the sha256 of what it says is {actual[:12]}, "
            f"and it names {listing.sha256[:12]}"
        )
    result = f"{len(files)} files and {manifest.NAME}, every byte as it was written"
    return Check("hashes", result, tuple(wrong[name] for name in sorted(wrong)))


def hash_problem(root: Path, file: OutputFile, reporter: Reporter) -> str | None:
    """What is wrong with the bytes of a file; None where they are as they were written."""
    digest = hashlib.sha256()
    try:
        with (root / file.name).open("rb") as data:
            while chunk := data.read(CHUNK):
                digest.update(chunk)
                reporter.advance(len(chunk))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    here, listed = digest.hexdigest(), file.sha256
    figures = f"its sha256 is {here[:12]}, the manifest says {listed[:12]}"
    return None if here == listed else f"{file.name} is not what was written: {figures}"


def check_numbers(output: Output, measure: Measure) -> Check:
    """Every part's numbers are those that finite weights give."""
    try:
        problems = tuple(_wrong_numbers(output, measure))
    except VerificationError as error:
        problems = (str(error),)
    return Check("numbers", "all finite, as those of finite weights are", problems)


def _wrong_numbers(output: Output, measure: Measure) -> Iterator[str]:
    """By the format of each layer; without one, by the first that names its tensors so."""
    fmt = measure.fmt or formats_by_names(output)[0]
    for place in dict.fromkeys(place for place, _ in output.tensors):
        encoding = fmt.of_layer(place.layer).encoding
        endings = suffixes(encoding)
        _, hidden, intermediate = measure.shapes[place.layer]
        n, k = part_shape(place.projection, hidden, intermediate, measure.numa)  # 0 where they are not known
        n, k = (k, n) if place.backward else (n, k)
        if encoding.scales is not None and not n * k:
            continue
        stored = [output.tensors.get((place, suffix)) for suffix in endings]
        if any(
            s is None or s.dtype != t.dtype or (n * k and s.nbytes != t.nbytes)
            for s, t in zip(stored, encoding.tensors(n, k), strict=True)
        ):
            continue  # check_tensors says so
        read = output.reader(place, endings)
        for tensor, defect in zip(stored, encoding.defects, strict=True):
            if defect is not None and tensor is not None and (what := defect(read, n, k)):
                yield f"{tensor.name} in {tensor.file}: {what} ({output.names.describe(place, endings[-1])})"


def codes_of_others(output: Output, measure: Measure) -> list[TensorInfo]:
    """Tensors with codes of 4 bits from -7 to 7 that no manifest vouches for: ktconvert packs no others."""
    if output.manifest is not None or measure.fmt is None:
        return []
    encodings = {layer: measure.fmt.of_layer(layer).encoding for layer in {place.layer for place, _ in output.tensors}}
    coded = {n: suffixes(e)[0] for n, e in encodings.items() if e.grid.bits == 4 and e.grid.per_row}
    return [tensor for (place, suffix), tensor in output.tensors.items() if coded.get(place.layer) == suffix]


def check_codes(output: Output, codes: list[TensorInfo], reporter: Reporter) -> Check:
    """None is -8, which kt-kernel's AMXINT4 takes for another number (numerics.md, section 6b)."""
    problems = []
    for tensor in codes:
        count = 0
        for start in range(0, tensor.nbytes, CHUNK):
            data = output.read(tensor, start, min(tensor.nbytes, start + CHUNK))
            count += lowest_codes(data)
            reporter.advance(len(data))
        if count:
            problems.append(f"{tensor.name} in {tensor.file} has {count} codes of -8, which kt-kernel misreads")
    return Check("codes", "all from -7 to 7", problems, remedy="convert the model again with `ktconvert cpu`")
