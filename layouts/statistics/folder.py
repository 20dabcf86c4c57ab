"""A folder with the statistics of one model's experts, of `ktconvert calibrate` or --save-statistics: imatrix.gguf,
counts.safetensors (zeros for experts that a layer does not have), maybe second moments of each layer, and
statistics.json, which says what they are of. The blocks of an MTP part are in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ktconvert.layouts.checkpoints.containers.safetensors import read_matrix
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files import documents
from ktconvert.layouts.files.documents import Count, Number
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.statistics.imatrix import Imatrix, Shapes, open_imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments, open_second_moments
from ktconvert.native_quant.arrays import I64

COUNTS, KEY = "counts.safetensors", "counts"
FORM = f"a tensor {KEY!r}, int64 [decoder layers, experts], is needed, as `ktconvert calibrate` writes it"


def read_counts(path: Path) -> I64:
    """int64 [decoder layers, experts]. Raises InputError where the file is damaged, or holds something else."""
    counts: I64 = read_matrix(path, KEY, "I64", FORM)
    if (counts < 0).any() or not counts.any():
        raise InputError(f"{path}: {KEY!r} holds {'a number below 0' if (counts < 0).any() else 'zeros only'}; {FORM}")
    return counts


IMATRIX, DOCUMENT = "imatrix.gguf", "statistics.json"
FORMAT = 1
MAKE = "make it again with `ktconvert calibrate`"


# --- the entries that we read -------------------------------------------------------------------------------------


class _Header(msgspec.Struct):
    name: Literal["ktconvert-statistics"]
    version: Number


class _Model(msgspec.Struct):
    architecture: str
    name: str | None
    source: str
    decoder_layers: Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]
    layers: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)], ...]
    experts: Count | tuple[Count, ...]
    hidden: Count | tuple[Count, ...]
    intermediate: Count | tuple[Count, ...]


class _Data(msgspec.Struct):
    dataset: str
    samples: Count
    tokens: Count


class _File(msgspec.Struct):
    name: str
    size: Number
    sha256: str


class _Listing(msgspec.Struct):
    format: _Header
    files: tuple[_File, ...]


class Document(_Listing):
    """statistics.json, as far as we read it."""

    model: _Model
    data: _Data
    settings: dict[str, Any]


InputStatistics = Imatrix | SecondMoments  # what says how important inputs are


@dataclass(frozen=True)
class Statistics:
    """What a folder holds. document: statistics.json; counts: int64 [decoder layers, experts]."""

    folder: Path
    document: Document
    counts: I64

    def imatrix(self, model: str, shapes: Shapes, others: Collection[int] = ()) -> Imatrix:
        """The importance matrix, for a model of these layers; arguments and errors as of open_imatrix."""
        self.require_model(model, shapes)
        opened = open_imatrix(self.folder / IMATRIX, model, shapes, others)
        if opened.sha256 != self._sha256s()[IMATRIX]:
            raise InputError(f"{opened.path}: is not the file that {DOCUMENT} beside it describes; {MAKE}")
        return opened

    def second_moments(self, model: str, shapes: Shapes) -> SecondMoments:
        """The second moments, for a model of these layers; arguments and errors as of open_second_moments."""
        self.require_model(model, shapes)
        return open_second_moments(self.folder / DOCUMENT, self._sha256s(), model, shapes)

    def require_model(self, model: str, shapes: Shapes, decoder_layers: int | None = None) -> None:
        """Raise InputError, naming both, where the statistics are of a model with other layers or experts; where given,
        with another number of layers in all. shapes: of its layers with experts.
        """
        own = self.document.model
        ours = (list(own.layers), *map(_each, (own.experts, own.hidden, own.intermediate)))
        experts, hidden, width = (sorted(set(sizes)) for sizes in zip(*shapes.values(), strict=True))
        theirs = (sorted(shapes), experts, hidden, width)
        deep = decoder_layers is not None and decoder_layers != own.decoder_layers
        if ours != theirs or deep:
            whose, has = own.name or own.architecture, _described(own.decoder_layers if deep else None, *ours)
            needed = f"{model} has {_described(decoder_layers if deep else None, *theirs)}"
            raise InputError(
                f"{self.folder}: statistics of {whose}, {has}, and {needed}; give the statistics of this model"
            )

    def _sha256s(self) -> dict[str, str]:
        return {file.name: file.sha256 for file in self.document.files}


def read_statistics(folder: Path) -> Statistics:
    """The statistics in a folder. InputError for files that are missing or not as described, or of a newer version."""
    path = folder / DOCUMENT
    try:
        data = path.read_bytes()
        if documents.read(data, _Listing).format.version > FORMAT:
            raise InputError(f"{path}: written by a newer ktconvert; update this one.")
        document = documents.read(data, Document)
        recorded = {file.name: file for file in document.files}
        for name in dict.fromkeys((IMATRIX, COUNTS, *recorded)):
            size, says = (folder / name).stat().st_size, recorded[name].size if name in recorded else "no"
            if size != says:
                raise InputError(f"{folder / name}: has {size} bytes, and {DOCUMENT} says {says}; {MAKE}")
        counts = read_counts(folder / COUNTS)
        if sha256_file(folder / COUNTS) != recorded[COUNTS].sha256:
            raise InputError(f"{folder / COUNTS}: is not the file that {DOCUMENT} beside it describes; {MAKE}")
        shape = (document.model.decoder_layers, max(_each(document.model.experts)))
        if counts.shape != shape:
            what = f"is of {list(counts.shape)} layers and experts, and {DOCUMENT} says {list(shape)}"
            raise InputError(f"{folder / COUNTS}: {what}; {MAKE}")
        return Statistics(folder, document, counts)
    except OSError as error:
        remedy = "give a folder of `ktconvert calibrate` or of --save-statistics"
        raise InputError(f"{error.filename or path}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise InputError(f"{path}: no statistics that can be understood ({error}); {MAKE}") from error


def listed(folder: Path) -> set[str]:
    """The names of the files that the document in a folder describes, and its own; none without a document of ours."""
    try:
        listing = documents.read((folder / DOCUMENT).read_bytes(), _Listing)
    except (OSError, ValueError):
        return set()
    return {DOCUMENT, *(file.name for file in listing.files)}


def imatrix_of(path: Path, model: str, shapes: Shapes, others: Collection[int] = ()) -> Imatrix:
    """The importance matrix in a file, as open_imatrix opens it; one beside a document is held against that first."""
    if path.name == IMATRIX and (path.parent / DOCUMENT).exists():
        return read_statistics(path.parent).imatrix(model, shapes, others)
    return open_imatrix(path, model, shapes, others)


def counts_of(folder: Path) -> I64:
    """The counts in a folder, int64 [decoder layers, experts]; checked against the document, if there is one."""
    return read_statistics(folder).counts if (folder / DOCUMENT).exists() else read_counts(folder / COUNTS)


def encode(about: Mapping[str, Any], files: Sequence[Mapping[str, Any]], version: str) -> bytes:
    """statistics.json, of the entries of Document. No time stamps, no paths: same input and options, same bytes."""
    header = {"name": "ktconvert-statistics", "version": FORMAT}
    document = {"format": header, "tool": {"name": "ktconvert", "version": version}, **about, "files": list(files)}
    return (json.dumps(document, indent=2) + "\n").encode()


def _each(sizes: int | tuple[int, ...]) -> list[int]:
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _described(decoder_layers: int | None, layers: Sequence[int], *sizes: Sequence[int]) -> str:
    deep = "" if decoder_layers is None else f"{decoder_layers} decoder layers, "
    experts, hidden, width = (" or ".join(map(str, each)) for each in sizes)
    return f"{deep}layers {ranges(layers)} with {experts} experts of {hidden} x {width}"


def open_model_imatrix(path: Path, model: MoeModel) -> Imatrix:
    """Return a file's importance matrix. Raise InputError for one that is damaged, or of a different model."""
    return imatrix_of(path, str(model.source.root), _shapes(model), model.mtp_layers)


def open_model_moments(folder: Path, model: MoeModel) -> SecondMoments:
    """Return the second moments in a folder. Raise InputError where there are none, or those of a different model."""
    return read_statistics(folder).second_moments(str(model.source.root), _shapes(model))


def _shapes(model: MoeModel) -> Shapes:
    return {layer: model.shape(layer) for layer in model.layers}
