"""A folder with the statistics of one model's experts, written by `ktconvert calibrate` or --save-statistics.

It contains imatrix.gguf, counts.safetensors (with zeros for experts that a layer does not have), optionally the second
moments of each layer, and statistics.json, which describes the model and the data. No file covers MTP blocks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, bad_file
from ktconvert.layouts.files import documents
from ktconvert.layouts.files.documents import Count, Number
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.sources.containers.safetensors import read_matrix
from ktconvert.layouts.statistics.expert_counts import require_tokens
from ktconvert.layouts.statistics.imatrix import Imatrix, Shapes, open_imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments, open_second_moments
from ktconvert.layouts.tensors import format_ranges
from ktconvert.native_quant.arrays import I64

COUNTS = "counts.safetensors"
COUNTS_KEY = "counts"  # name of the tensor in it
EXPECTED = f"expected a tensor {COUNTS_KEY!r}, int64 [decoder layers, experts], as `ktconvert calibrate` writes it"


def read_counts(path: Path) -> I64:
    """Read token counts, int64 [decoder layers, experts]. Raises InputError for a damaged or different file."""
    counts: I64 = read_matrix(path, COUNTS_KEY, "I64", EXPECTED)
    require_tokens(path, counts, EXPECTED)
    return counts


IMATRIX = "imatrix.gguf"
DOCUMENT = "statistics.json"
FOLDER_VERSION = 1
REMEDY = "write it again with `ktconvert calibrate`"
MAKE_STATISTICS = "run `ktconvert calibrate MODEL DIR`, and give DIR here"


# --- entries of statistics.json -------------------------------------------------------------------------------------


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
    """The entries of statistics.json that we read.

    sensitivity  for each layer with experts, the sum of squared routing weights divided by the sum of squares of the
                 layer's outputs; () if unknown
    """

    model: _Model
    data: _Data
    settings: dict[str, Any]
    sensitivity: tuple[Annotated[float, msgspec.Meta(ge=0)], ...] = ()


InputStatistics = Imatrix | SecondMoments  # sources of the importance of inputs


@dataclass(frozen=True)
class Statistics:
    """The contents of a folder.

    document  contents of statistics.json
    counts    tokens of each expert, int64 [decoder layers, experts]
    """

    folder: Path
    document: Document
    counts: I64

    def open_imatrix(self, model: str, shapes: Shapes, optional_layers: Collection[int] = ()) -> Imatrix:
        """Open the importance matrix of a model with these layers.

        Arguments and errors are those of the function open_imatrix.
        """
        self.require_model(model, shapes)
        imatrix = open_imatrix(self.folder / IMATRIX, model, shapes, optional_layers)
        if imatrix.sha256 != self._sha256s()[IMATRIX]:
            raise InputError(f"{imatrix.path}: differs from the file that {DOCUMENT} describes; {REMEDY}")
        return imatrix

    def open_second_moments(self, model: str, shapes: Shapes) -> SecondMoments:
        """Open the second moments of a model with these layers.

        Arguments and errors are those of the function open_second_moments.
        """
        self.require_model(model, shapes)
        return open_second_moments(self.folder / DOCUMENT, self._sha256s(), model, shapes)

    def require_model(self, model: str, shapes: Shapes, decoder_layers: int | None = None) -> None:
        """Raise InputError, which names both models, if the statistics belong to a model of different sizes.

        shapes          shapes of the model's layers with experts
        decoder_layers  number of all its layers; None if unknown
        """
        recorded = self.document.model
        recorded_sizes = map(_as_list, (recorded.experts, recorded.hidden, recorded.intermediate))
        recorded_shape = (list(recorded.layers), *recorded_sizes)
        sizes = (sorted(set(values)) for values in zip(*shapes.values(), strict=True))
        shape = (sorted(shapes), *sizes)
        depth_differs = decoder_layers is not None and decoder_layers != recorded.decoder_layers
        if recorded_shape != shape or depth_differs:
            name = recorded.name or recorded.architecture
            actual = _describe(recorded.decoder_layers if depth_differs else None, *recorded_shape)
            needed = f"{model} has {_describe(decoder_layers if depth_differs else None, *shape)}"
            raise InputError(
                f"{self.folder}: statistics of {name}, {actual}, but {needed}; use the statistics of this model"
            )

    def _sha256s(self) -> dict[str, str]:
        return {file.name: file.sha256 for file in self.document.files}


def read_statistics(folder: Path) -> Statistics:
    """Read the statistics in a folder.

    Raises InputError for files that are missing, differ from their description, or come from a newer version.
    """
    path = folder / DOCUMENT
    try:
        data = path.read_bytes()
        if documents.decode_document(data, _Listing).format.version > FOLDER_VERSION:
            raise InputError(f"{path}: written by a newer ktconvert; update this one.")
        document = documents.decode_document(data, Document)
        recorded = {file.name: file for file in document.files}
        for name in dict.fromkeys((IMATRIX, COUNTS, *recorded)):
            size = (folder / name).stat().st_size
            expected = recorded[name].size if name in recorded else "no"
            if size != expected:
                raise InputError(f"{folder / name}: has {size} bytes, but {DOCUMENT} records {expected}; {REMEDY}")
        counts = read_counts(folder / COUNTS)
        if sha256_file(folder / COUNTS) != recorded[COUNTS].sha256:
            raise InputError(f"{folder / COUNTS}: differs from the file that {DOCUMENT} describes; {REMEDY}")
        if len(document.sensitivity) not in (0, len(document.model.layers)):
            problem = f"has {len(document.sensitivity)} sensitivities for {len(document.model.layers)} layers"
            raise InputError(f"{path}: {problem}; {REMEDY}")
        shape = (document.model.decoder_layers, max(_as_list(document.model.experts)))
        if counts.shape != shape:
            problem = f"has shape {list(counts.shape)}, but {DOCUMENT} records {list(shape)}"
            raise InputError(f"{folder / COUNTS}: {problem}; {REMEDY}")
        return Statistics(folder, document, counts)
    except OSError as error:
        remedy = "use a folder of `ktconvert calibrate` or --save-statistics"
        raise InputError(f"{error.filename or path}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise InputError(f"{path}: invalid statistics ({error}); {REMEDY}") from error


def require_folder(folder: Path) -> None:
    """Raise InputError for a folder without statistics."""
    if not any((folder / name).exists() for name in (DOCUMENT, IMATRIX)):
        raise bad_file(folder, f"has no statistics of a model's experts ({DOCUMENT})", MAKE_STATISTICS)


def read_related_statistics(inputs: InputStatistics | None) -> Statistics | None:
    """Return the statistics in the folder of an importance matrix or of second moments; None if there are none."""
    if inputs is None or inputs.path.name not in (IMATRIX, DOCUMENT) or not inputs.path.with_name(DOCUMENT).exists():
        return None
    return read_statistics(inputs.path.parent)


def list_files(folder: Path) -> set[str]:
    """List the files that a folder's document describes, and the document; return an empty set without one."""
    try:
        listing = documents.decode_document((folder / DOCUMENT).read_bytes(), _Listing)
    except (OSError, ValueError):
        return set()
    return {DOCUMENT, *(file.name for file in listing.files)}


def open_checked_imatrix(path: Path, model: str, shapes: Shapes, optional_layers: Collection[int] = ()) -> Imatrix:
    """Open an importance matrix as open_imatrix does, and check it against statistics.json in its folder, if any."""
    if path.name == IMATRIX and (path.parent / DOCUMENT).exists():
        return read_statistics(path.parent).open_imatrix(model, shapes, optional_layers)
    return open_imatrix(path, model, shapes, optional_layers)


def read_folder_counts(folder: Path) -> I64:
    """Read the counts in a folder, int64 [decoder layers, experts]; if it has a document, check them against it."""
    return read_statistics(folder).counts if (folder / DOCUMENT).exists() else read_counts(folder / COUNTS)


def encode_document(entries: Mapping[str, Any], files: Sequence[Mapping[str, Any]], version: str) -> bytes:
    """Encode statistics.json from the entries of Document.

    It has no time stamps and no paths: the same input and options give the same bytes.
    """
    header = {"name": "ktconvert-statistics", "version": FOLDER_VERSION}
    document = {"format": header, "tool": {"name": "ktconvert", "version": version}, **entries, "files": list(files)}
    return (json.dumps(document, indent=2) + "\n").encode()


def _as_list(sizes: int | tuple[int, ...]) -> list[int]:
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _describe(decoder_layers: int | None, layers: Sequence[int], *sizes: Sequence[int]) -> str:
    depth = "" if decoder_layers is None else f"{decoder_layers} decoder layers, "
    experts, hidden, width = (" or ".join(map(str, values)) for values in sizes)
    return f"{depth}layers {format_ranges(layers)} with {experts} experts of {hidden} x {width}"


def open_model_imatrix(path: Path, model: MoeModel) -> Imatrix:
    """Open an importance matrix of a model. Raises InputError if it is damaged or belongs to a different model."""
    return open_checked_imatrix(path, str(model.source.root), _shapes(model), model.mtp_layers)


def open_model_moments(folder: Path, model: MoeModel) -> SecondMoments:
    """Open the second moments in a folder.

    Raises InputError if there are none, or if they belong to a different model.
    """
    return read_statistics(folder).open_second_moments(str(model.source.root), _shapes(model))


def _shapes(model: MoeModel) -> Shapes:
    return {layer: model.shape(layer) for layer in model.layers}
