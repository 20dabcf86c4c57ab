"""Experts as floating-point numbers in strips of 32 rows, for this project's runtime (FORMAT.md, section "Strips")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs import amx_card, strip_card
from ktconvert.layouts.outputs.form import Card, Extent, Form, Params, Rows, Tensor
from ktconvert.layouts.outputs.merged import KtNames
from ktconvert.layouts.outputs.names import Names
from ktconvert.layouts.outputs.output import Bytes, Output
from ktconvert.layouts.outputs.parts import Part, Place, why_illegal
from ktconvert.quantizers import Grid, Matrix, strips
from ktconvert.quantizers.errors import ROWS, error_sums, source_values

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

SUFFIXES = ("codes", "scales")
PIECE = 1 << 12  # codes that are looked at at a time


def numa_names(facts: Mapping[str, Any]) -> KtNames:
    """Names that no loader of kt-kernel looks for: it fails instead of computing with what it cannot read."""
    return KtNames(SUFFIXES)


def no_file(part: Part, tensor: Tensor) -> None:
    """There are no loose files."""


def no_scales(stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
    """Of numbers without scales: float32 [0, 0]."""
    return np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class StripForm:
    """One of the formats of floating-point numbers: what its numbers are, and how the tensors of a part hold them.

    multiple  the hidden size and the intermediate size per NUMA part must be multiples of it
    magnitude the bits of an item of codes that say whether a number is 0
    coded     what a number is, for the model card
    lay_out   (n, k) -> the tensors of a part, codes first
    columns   items in a row of the codes' tensor -> columns
    write     Form.quantize
    read      Form.unpack
    defects   for each tensor: the stored tensors of a part, k -> what is wrong with its numbers, "" if nothing
    exact     Form.exact
    source    Form.source_values
    scaled    Form.scale_values
    decoded_rows  Form.decoded_rows
    rows      of a part in a row of the codes' tensor
    naming    facts of a manifest -> the names of tensors, as Form.names_of
    describe  facts, base model, coded, what else there is -> the model card
    command   Form.command
    forward   Form.forward
    backward  Form.backward
    loose     (part, tensor) -> its file, as Form.loose_path
    """

    name: str
    version: int
    grid: Grid
    multiple: int
    magnitude: np.unsignedinteger[Any]
    coded: str
    lay_out: Callable[[int, int], tuple[Tensor, ...]]
    columns: Callable[[int], int]
    write: Callable[[Matrix, Sequence[Bytes]], None]
    read: Callable[[Sequence[Bytes], int, int, Rows], npt.NDArray[np.float32]]
    defects: tuple[Callable[[Sequence[Bytes], int], str], ...]
    exact: Callable[[MoeModel], bool]
    source: Callable[[Matrix], npt.NDArray[np.float32]] = source_values
    scaled: Callable[[Bytes, int, int], npt.NDArray[np.float32]] = no_scales
    decoded_rows: int = strips.ROWS
    rows: int = strips.ROWS
    naming: Callable[[Mapping[str, Any]], Names] = numa_names
    describe: Callable[[Mapping[str, Any], str | None, str, str], Card] = strip_card.card
    command: str = "cpu"
    forward: bool = True
    backward: bool = False
    loose: Callable[[Part, Tensor], str | None] = no_file
    notes: tuple[str, ...] = ()

    arrangement = "merged"
    whole = False
    stage = "cpu_experts"
    numbers = ("numbers", "all finite")
    shard_bytes = None

    @property
    def option(self) -> str:
        """What --quant-method calls it."""
        return self.grid.name

    @property
    def title(self) -> str:
        """What the stage does."""
        return f"write experts as {self.name}"

    def configured(self, settings: Mapping[str, Any]) -> Form:
        """It has no settings."""
        return self

    # --- sizes ---

    def illegal_reason(self, hidden: int, intermediate: int, parts: int) -> str | None:
        """Blocks must be whole: H and I/T are multiples of their columns."""
        return why_illegal(self.multiple, hidden, intermediate, parts)

    def check_loading(self, model: MoeModel, ranks_asked: Iterable[int]) -> tuple[str, ...]:
        """This project's runtime loads it, in the NUMA parts that it has."""
        return ()

    def tensors(self, n: int, k: int) -> tuple[Tensor, ...]:
        """Codes by strips, then scales if the format has any."""
        return self.lay_out(n, k)

    def sizes(self, projection: str, suffix: str, shape: tuple[int, ...], nbytes: int) -> dict[str, int]:
        """The shape of the codes is that of the strips, or of the part."""
        if suffix != self.lay_out(0, 0)[0].suffix or len(shape) != 2:
            return {}
        n, k = shape[0] * self.rows, self.columns(shape[1])
        return {"hidden": n, "width": k} if projection == "down" else {"width": n, "hidden": k}

    def params(self, extent: Extent) -> Params:
        """All options that can change a byte."""
        return (
            ("form", self.name),
            ("reading", extent.reading),
            ("metadata", extent.metadata),
            ("numa", extent.grid.numa),
            ("experts", extent.experts),
        )

    # --- names ---

    def names(self, model: MoeModel) -> Names:
        """They do not depend on the model."""
        return self.naming({"method": self.name})

    def names_of(self, facts: Mapping[str, Any]) -> Names:
        """As naming has it."""
        return self.naming(facts)

    def loose_path(self, part: Part, tensor: Tensor) -> str | None:
        """As loose has it."""
        return self.loose(part, tensor)

    def is_trusted(self, facts: Mapping[str, Any]) -> bool:
        """The number of NUMA parts is asked for."""
        return isinstance(facts.get("numa"), int)

    # --- numbers ---

    def quantize(self, matrix: Matrix, out: Sequence[Bytes]) -> None:
        """Round, unless the source has these very numbers, and put into strips."""
        self.write(matrix, out)

    def pack(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        """No other choice of codes is made for it."""
        raise NotImplementedError(f"{self.name} has one way to choose codes")

    def scales(self, stored: Sequence[Bytes], n: int, k: int) -> npt.NDArray[Any]:
        """As pack."""
        raise NotImplementedError(f"{self.name} has one way to choose codes")

    def unpack(self, stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
        """The numbers of a part, float32 [n, k], exact, or some rows of it."""
        return self.read(stored, n, k, rows)

    def error_sums(self, matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
        """Some rows at a time."""
        return error_sums(matrix, lambda rows: self.unpack(stored, *matrix.shape, rows), self.source)

    def error_bytes(self, columns: int) -> int:
        """Some rows as float64, several times over."""
        return ROWS * 64 * columns

    def source_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """As source has it."""
        return self.source(matrix)

    def scale_values(self, stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
        """As scaled has it."""
        return self.scaled(stored, n, k)

    def is_zero(self, stored: Sequence[Bytes]) -> bool:
        """All codes are those of 0 or -0."""
        codes = stored[0].view(self.magnitude.dtype)
        return not any((codes[i : i + PIECE] & self.magnitude).any() for i in range(0, codes.size, PIECE))

    def check_numbers(self, output: Output, place: Place, notes: list[str]) -> Iterator[str]:
        """Every number is finite."""
        tensors = [output.tensors[place, tensor.suffix] for tensor in self.lay_out(0, 0)]
        stored = [output.read(tensor) for tensor in tensors]
        k = self.columns(tensors[0].shape[-1]) if tensors[0].shape else 0
        for tensor, defect in zip(tensors, self.defects, strict=True):
            if what := defect(stored, k):
                yield f"{tensor.name} in {tensor.file}: {what}"

    # --- descriptions ---

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the format."""
        return {"bits": self.grid.bits}

    def config_entries(self, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
        """Ours: no loader of whole models reads it."""
        return amx_card.config_entries(facts, tool_version, {})

    def check_config(self, output: Output, numa: int) -> Iterator[str]:
        """Method and NUMA parts are those of the tensors."""
        return amx_card.check_config(output, self.name, numa)

    def card(self, facts: Mapping[str, Any], base_model: str | None, *, loose: bool, non_experts: str) -> Card:
        """Its lines in the model card."""
        return self.describe(facts, base_model, self.coded, non_experts)


def no_defect(stored: Sequence[Bytes], k: int) -> str:
    """Of codes that are numbers whatever their bits."""
    return ""


def rows_of(held: npt.NDArray[Any], n: int, rows: Rows) -> tuple[npt.NDArray[Any], Rows]:
    """The strips [n/32, ...] that hold some of n rows, and those rows counted from their first."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(n)
        first = start // 32
        return held[first : -(-stop // 32)], slice(start - first * 32, stop - first * 32)
    return held, rows
