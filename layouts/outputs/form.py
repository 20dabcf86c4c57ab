"""What an output is: the contract that every row of `FORMS` satisfies. Nothing else knows a form's bytes, names or
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs.names import Names
from ktconvert.layouts.outputs.output import Bytes, Output
from ktconvert.layouts.outputs.parts import ExpertGrid, Part, Place
from ktconvert.quantizers import Grid, Matrix

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

Params = tuple[tuple[str, Any], ...]
Rows = slice | npt.NDArray[np.intp]


@dataclass(frozen=True)
class Tensor:
    """One of the tensors that a part of a linear becomes: how its name ends, safetensors dtype, shape, bytes."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """What one unit of the stage writes, as far as fingerprints know it.

    reading   how the source's experts are read
    metadata  of the shard, sorted
    grid      the layer and its parts
    experts   [start, stop) of them
    loose     whether they become loose files
    names     of the tensors
    """

    reading: Any
    metadata: tuple[tuple[str, str], ...]
    grid: ExpertGrid
    experts: tuple[int, int]
    loose: bool
    names: Names


@dataclass(frozen=True)
class Card:
    """A form's lines in the model card.

    head   of the front matter, above the tags
    tags   of the front matter, after "ktconvert"
    title  the heading
    about  what the folder is
    rows   (what, value) of its table
    use    how it is loaded
    """

    head: tuple[str, ...]
    tags: tuple[str, ...]
    title: str
    about: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    use: tuple[str, ...]


class Form(Protocol):
    """One of the formats of experts. A part is a matrix [n, k]; its bytes are flat uint8 arrays, one for each of
    `tensors`, in order.
    """

    @property
    def name(self) -> str:
        """Of the format, as loaders and manifests know it ("AMXINT4")."""

    @property
    def option(self) -> str:
        """What chooses it on the command line ("int4")."""

    @property
    def command(self) -> str:
        """The command that writes it."""

    @property
    def arrangement(self) -> str:
        """How reports call its files, unless they are loose ("merged")."""

    @property
    def whole(self) -> bool:
        """Whether the output is a whole model, which loaders of checkpoints open; else experts for kt-kernel, in NUMA
        parts.
        """

    @property
    def decoded_rows(self) -> int:
        """Rows of a linear that are decoded to BF16 at a time, at most."""

    @property
    def forward(self) -> bool:
        """Whether it has the experts themselves; else the transposed matrices alone."""

    @property
    def backward(self) -> bool:
        """Whether it has transposed matrices for fine-tuning (--save-backward-weights)."""

    @property
    def grid(self) -> Grid:
        """Which codes and scales it has."""

    @property
    def numbers(self) -> tuple[str, str]:
        """The name of check_numbers in the report of `verify`, and what the report says if it passes."""

    @property
    def version(self) -> int:
        """Raised whenever the bytes on disk change; part of every unit's fingerprint."""

    @property
    def stage(self) -> str:
        """The name of the stage that writes it, in fingerprints and journals."""

    @property
    def title(self) -> str:
        """What that stage does, for reports."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before converting to it."""

    @property
    def shard_bytes(self) -> int | None:
        """Default size of a shard in bytes; None: one shard for each layer."""

    def configured(self, settings: Mapping[str, Any]) -> Form:
        """This form with the options in a command's settings (or a manifest's facts)."""

    def exact(self, model: MoeModel) -> bool:
        """Whether every number of these experts stays what it is."""

    # --- sizes ---

    def illegal_reason(self, hidden: int, intermediate: int, parts: int) -> str | None:
        """Why it cannot hold experts of these sizes in this many parts; None if it can."""

    def check_loading(self, model: MoeModel, ranks_asked: Iterable[int]) -> tuple[str, ...]:
        """Notes on how an output of this model can be loaded, also in tensor-parallel ranks. Raises UnsupportedError
        where it cannot.
        """

    def tensors(self, n: int, k: int) -> tuple[Tensor, ...]:
        """What a part [n, k] becomes, in file order: a shard holds all first tensors, then all
        second ones, and so on.
        """

    def sizes(self, projection: str, suffix: str, shape: tuple[int, ...], nbytes: int) -> dict[str, int]:
        """The sizes of its part that a stored tensor shows: "hidden", "width", both or none."""

    def params(self, extent: Extent) -> Params:
        """All options that can change a byte of a unit, for its fingerprint."""

    # --- names ---

    def names(self, model: MoeModel) -> Names:
        """The names of tensors in an output of this model."""

    def names_of(self, facts: Mapping[str, Any]) -> Names:
        """The same, by the manifest's facts ({} without one)."""

    def loose_path(self, part: Part, tensor: Tensor) -> str | None:
        """The file of a tensor inside its layer's folder; None where the form has no loose files."""

    def is_trusted(self, facts: Mapping[str, Any]) -> bool:
        """Whether the manifest's facts about this form have the types that they must have."""

    # --- numbers ---

    def quantize(self, matrix: Matrix, out: Sequence[Bytes]) -> None:
        """Quantize a part by its largest values and pack it, in one pass. Raises kernels.NonFinite for NaN and Inf."""

    def pack(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        """Pack codes [n, k] and scales [n, groups] (float32, or BF16 bits as uint16: grid.scales) that were chosen
        elsewhere.
        """

    def scales(self, stored: Sequence[Bytes], n: int, k: int) -> npt.NDArray[Any]:
        """The scales of a part [n, k] as `pack` takes them, [n, groups]; a view."""

    def unpack(self, stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
        """The dequantized numbers of a part [n, k], or of some of its rows: float32 [rows, k]."""

    def error_sums(self, matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
        """Sums of x*x, y*y, x*y and (x-y)^2 over a part, x the source in BF16 and y what is stored; float64 [4]."""

    def error_bytes(self, columns: int) -> int:
        """Memory that error_sums needs for a part with this many columns, in bytes."""

    def source_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """The numbers of a linear, or of some rows of it, that errors are measured against: float32 [n, k]."""

    def scale_values(self, stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
        """The scales of a part [n, k], from the last of its tensors: float32 [n, groups], or [n / b, groups] where b
        rows share them; [0, 0] where the form has none.
        """

    def is_zero(self, stored: Sequence[Bytes]) -> bool:
        """Whether a part of finite weights is all zeros."""

    def check_numbers(self, output: Output, place: Place, notes: list[str]) -> Iterator[str]:
        """The defects in the numbers of a part, all of whose tensors are there; their sizes are checked elsewhere."""

    # --- descriptions ---

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the format, beside its name and version."""

    def config_entries(self, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
        """What config.json holds besides the source's, quantization_config above all. ignore: patterns of modules that
        stay as they are.
        """

    def check_config(self, output: Output, numa: int) -> Iterator[str]:
        """The defects of config.json beside these experts."""

    def card(self, facts: Mapping[str, Any], base_model: str | None, *, loose: bool, non_experts: str) -> Card:
        """Its lines in the model card. non_experts: what --non-experts was ("skip", "copy" or "keep")."""


def expert_bytes(form: Form, grid: ExpertGrid) -> int:
    """Bytes of all tensors of one expert."""
    return sum(tensor.nbytes for part in grid.all_parts([0]) for tensor in form.tensors(part.n, part.k))
