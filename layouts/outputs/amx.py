"""AMXINT4 and AMXINT8: kt-kernel's expert weights for the CPU (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs import amx_card, loose
from ktconvert.layouts.outputs.form import Card, Extent, Form, Params, Rows, Tensor
from ktconvert.layouts.outputs.merged import KtNames
from ktconvert.layouts.outputs.output import Bytes, Output
from ktconvert.layouts.outputs.parts import Part, Place, why_illegal
from ktconvert.native_quant import kernels
from ktconvert.quantizers import ROW_GRIDS, Grid, Matrix
from ktconvert.quantizers.errors import source_values

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

LOOSE_WORDS = {"weight": "quant", "scale": "scale"}  # a tensor's suffix -> its word in the names of loose files


@dataclass(frozen=True)
class Amx:
    """One of kt-kernel's AMX formats: codes in the order of the tiles, one float32 scale for each row of a part.

    file_prefix  how its loose .kt files start ("INT4")
    """

    name: str
    version: int
    grid: Grid
    file_prefix: str
    notes: tuple[str, ...] = ()

    decoded_rows = 32
    command = "cpu"
    arrangement = "merged"
    whole = False
    forward = True
    backward = True
    stage = "cpu_experts"
    numbers = ("scales", "finite, none negative")
    shard_bytes = None

    @property
    def option(self) -> str:
        """What --quant-method calls it."""
        return self.grid.name

    @property
    def title(self) -> str:
        """What the stage does."""
        return f"quantize and pack experts as {self.name}"

    @property
    def multiple(self) -> int:
        """Hidden size and intermediate size per NUMA part must be multiples of it: each is rows of one linear and
        columns of another.
        """
        return max(kernels.GEOMETRIES[self.grid.bits])

    def configured(self, settings: Mapping[str, Any]) -> Form:
        """It has no settings."""
        return self

    def exact(self, model: MoeModel) -> bool:
        """Never: codes are chosen anew."""
        return False

    # --- sizes ---

    def illegal_reason(self, hidden: int, intermediate: int, parts: int) -> str | None:
        """Tiles must be whole: H and I/T are multiples of their columns."""
        return why_illegal(self.multiple, hidden, intermediate, parts)

    def check_loading(self, model: MoeModel, ranks_asked: Iterable[int]) -> tuple[str, ...]:
        """kt-kernel loads it, in the NUMA parts that it has."""
        return ()

    def tensors(self, n: int, k: int) -> tuple[Tensor, ...]:
        """Codes, flat, in whole pages; one float32 for each row."""
        nbytes = n * k * self.grid.bits // 8
        return Tensor("weight", "I8", (nbytes,), nbytes), Tensor("scale", "F32", (n,), 4 * n)

    def sizes(self, projection: str, suffix: str, shape: tuple[int, ...], nbytes: int) -> dict[str, int]:
        """There are as many scales as rows."""
        if suffix != "scale":
            return {}
        return {"hidden" if projection == "down" else "width": nbytes // 4}

    def params(self, extent: Extent) -> Params:
        """All options that can change a byte."""
        return (
            ("layout", self.name),
            ("reading", extent.reading),
            ("metadata", extent.metadata),
            ("numa", extent.grid.numa),
            ("backward", extent.grid.backward),
            ("experts", extent.experts),
            ("merged", not extent.loose),
        )

    # --- names ---

    def names(self, model: MoeModel) -> KtNames:
        """kt-kernel's own, which do not depend on the model."""
        return KtNames()

    def names_of(self, facts: Mapping[str, Any]) -> KtNames:
        """The same."""
        return KtNames()

    def loose_path(self, part: Part, tensor: Tensor) -> str:
        """A name that carries the exact size."""
        return loose.path_in_layer(self.file_prefix, part, tensor.nbytes, LOOSE_WORDS[tensor.suffix])

    def is_trusted(self, facts: Mapping[str, Any]) -> bool:
        """The number of NUMA parts is asked for."""
        return isinstance(facts.get("numa"), int)

    # --- numbers ---

    def quantize(self, matrix: Matrix, out: Sequence[Bytes]) -> None:
        """One scale for each row, from its largest value."""
        weight, scale = out
        kernels.quantize_pack(self.grid.bits, matrix, weight, scale.view(np.float32))

    def pack(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        """Codes in the order of the tiles."""
        weight, scale = out
        kernels.pack_codes(self.grid.bits, codes, weight)
        scale.view(np.float32)[:] = scales.reshape(-1)

    def scales(self, stored: Sequence[Bytes], n: int, k: int) -> npt.NDArray[np.float32]:
        """One for each row: float32 [n, 1]."""
        return stored[1].view(np.float32).reshape(n, 1)

    def unpack(self, stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
        """The dequantized part, float32 [n, k], or some rows of it."""
        weight, scale = stored
        return kernels.dequantize(self.grid.bits, weight, scale.view(np.float32), n, k)[rows]

    def error_sums(self, matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
        """By the kernel: the same on every CPU."""
        weight, scale = stored
        return np.array(kernels.error_sums(self.grid.bits, matrix, weight, scale.view(np.float32)), dtype=np.float64)

    def error_bytes(self, columns: int) -> int:
        """The kernel decodes a strip of 32 rows at a time."""
        return 64 * columns

    def source_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """In BF16."""
        return source_values(matrix)

    def scale_values(self, stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
        """One for each row: float32 [n, 1]."""
        return stored.view(np.float32).reshape(n, 1)

    def is_zero(self, stored: Sequence[Bytes]) -> bool:
        """Only a row of zeros (or of what counts as zero) has the scale 0."""
        return not stored[1].any()

    def check_numbers(self, output: Output, place: Place, notes: list[str]) -> Iterator[str]:
        """Scales are finite and not negative, as those of finite weights always are."""
        stored = output.tensors[place, "scale"]
        if stored.nbytes % 4:
            return
        values = output.read(stored).view(np.float32)
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            row = int(np.argmax(bad))
            where = output.names.describe(place, "scale")
            yield f"{stored.name} in {stored.file}: scale of row {row} is {values[row]} ({where})"

    # --- descriptions ---

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the format."""
        return {"bits": self.grid.bits}

    def config_entries(self, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
        """Ours: no loader of whole models reads it."""
        return amx_card.config_entries(facts, tool_version)

    def check_config(self, output: Output, numa: int) -> Iterator[str]:
        """Method and NUMA parts are those of the tensors."""
        return amx_card.check_config(output, self.name, numa)

    def card(self, facts: Mapping[str, Any], base_model: str | None, *, loose: bool, non_experts: str) -> Card:
        """Its lines in the model card."""
        return amx_card.card(facts, base_model, loose=loose, non_experts=non_experts)


AMXINT4 = Amx(
    "AMXINT4",
    version=1,
    grid=ROW_GRIDS["int4"],
    file_prefix="INT4",
    notes=(
        "AMXINT4 has one scale per output row and may cost accuracy: if it matters, compare with --quant-method int8",
    ),
)
AMXINT8 = Amx("AMXINT8", version=1, grid=ROW_GRIDS["int8"], file_prefix="INT8")
# The prefix of loose files -> kt-kernel's name of the method: of those that can be merged, and of all. Only the library
# that wrote MOE_* files knows what their bytes mean; there are no BF16 files but backward ones.
MERGED = {form.file_prefix: form.name for form in (AMXINT4, AMXINT8)} | {
    name: name for name in ("MOE_INT4", "MOE_INT8")
}
METHODS = MERGED | {"BF16": "AMXBF16"}
