"""Pack-quantized: experts for the GPU, as compressed-tensors stores them and SGLang and vLLM load them (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files.documents import COUNT, mismatch
from ktconvert.layouts.outputs import compressed_card, ignore
from ktconvert.layouts.outputs.form import Card, Extent, Form, Params, Rows, Tensor
from ktconvert.layouts.outputs.linear_names import TEMPLATES, LinearNames, are_templates
from ktconvert.layouts.outputs.output import Bytes, Output
from ktconvert.layouts.outputs.parts import Part, Place
from ktconvert.native_quant import kernels
from ktconvert.quantizers import GROUP_GRIDS, Grid, Matrix, groups
from ktconvert.quantizers.errors import ROWS, error_sums, source_values
from ktconvert.quantizers.reference import bf16_to_f32

SUFFIXES = ("weight_packed", "weight_shape", "weight_scale")  # in the order in which they lie in a shard
PIECE = 1 << 14  # bytes of codes that are read at a time


@dataclass(frozen=True)
class Compressed:
    """W4A16 or W8A16: codes in int32 words, one BF16 scale for each group of columns, and the shape.

    rounding  how quotients are rounded: a row of kernels.ROUNDINGS
    """

    name: str
    version: int
    grid: Grid
    rounding: str = "library"

    decoded_rows = 32
    command = "gpu"
    arrangement = "pack-quantized"
    whole = True
    forward = True
    backward = False
    stage = "gpu_linears"
    notes = ()
    numbers = ("numbers", "scales finite and positive, no expert all zeros")
    shard_bytes = 5 * 10**9  # its scales, 3 % of it, are kept in memory until all codes are written

    @property
    def option(self) -> str:
        """What --quant-type calls it."""
        return self.name

    @property
    def title(self) -> str:
        """What the stage does."""
        return f"round experts to {self.name}"

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        assert self.grid.group is not None
        return self.grid.group

    def configured(self, settings: Mapping[str, Any]) -> Form:
        """With the rounding that the settings name."""
        return replace(self, rounding=settings["rounding"])

    def exact(self, model: MoeModel) -> bool:
        """Never: codes are chosen anew."""
        return False

    # --- sizes ---

    def illegal_reason(self, hidden: int, intermediate: int, parts: int) -> str | None:
        """Groups must be whole, also in each of `parts` tensor-parallel ranks."""
        for what, size in (("hidden size", hidden), ("expert width", intermediate)):
            if size % self.group:
                return (
                    f"{self.name} has groups of {self.group} columns, which do not divide the {what} {size} of this "
                    "model; convert it with `ktconvert cpu`, or serve its experts in BF16"
                )
        if parts < 1 or intermediate % (parts * self.group):
            fits = self._ranks(intermediate)
            return (
                f"the expert width {intermediate} cannot be cut into {parts} tensor-parallel ranks of whole groups of "
                f"{self.group}; choose one of {', '.join(map(str, fits))}"
            )
        return None

    def _ranks(self, intermediate: int) -> list[int]:
        return [ranks for ranks in (1, 2, 4, 8, 16) if intermediate % (ranks * self.group) == 0]

    def check_loading(self, model: MoeModel, ranks_asked: Iterable[int] = (1,)) -> tuple[str, ...]:
        """Notes on how the output can be loaded. Raises UnsupportedError where groups do not fit, alone or at one of
        these TP sizes.
        """
        group = self.group
        multiple = max(64, group)
        notes: dict[str, None] = {}
        for hidden, width in dict.fromkeys(model.shape(layer)[1:] for layer in model.layers):
            for ranks in ranks_asked:
                reason = self.illegal_reason(hidden, width, 1) or self.illegal_reason(hidden, width, ranks)
                if reason is not None:
                    raise UnsupportedError(reason)
                if hidden % 128 or width // ranks % multiple:
                    notes[
                        "Marlin, the fast kernel of vLLM and SGLang, needs a hidden size in multiples of 128 and an "
                        "expert "
                        f"width per rank in multiples of {multiple}: {hidden} and {width // ranks} take a slower one."
                    ] = None
            fits = ", ".join(map(str, self._ranks(width)))
            notes[f"Experts {width} wide in groups of {group} can be loaded with tensor parallelism {fits}."] = None
        if model.activation != "silu" or model.weights_on != "output":
            notes[
                "Marlin computes silu(gate) * up with routing weights on the output only; "
                "these experts need another kernel."
            ] = None
        return tuple(notes)

    def tensors(self, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes in words, the shape, one scale for each group."""
        bits = self.grid.bits
        packed, shape, scale = SUFFIXES
        return (
            Tensor(packed, "I32", (n, k * bits // 32), n * k * bits // 8),
            Tensor(shape, "I64", (2,), 16),
            Tensor(scale, "BF16", (n, k // self.group), 2 * n * (k // self.group)),
        )

    def sizes(self, projection: str, suffix: str, shape: tuple[int, ...], nbytes: int) -> dict[str, int]:
        """Scales have the linear's rows and its columns by groups."""
        if suffix != "weight_scale" or len(shape) != 2:
            return {}
        n, k = shape[0], shape[1] * self.group
        return {"hidden": n, "width": k} if projection == "down" else {"width": n, "hidden": k}

    def params(self, extent: Extent) -> Params:
        """All options that can change a byte."""
        parts = extent.grid.all_parts(range(*extent.experts))
        return (
            ("form", self.name),
            ("reading", extent.reading),
            ("metadata", extent.metadata),
            ("rounding", self.rounding),
            ("names", tuple(extent.names.key(p.place, "").removesuffix(".") for p in parts)),
            ("experts", extent.experts),
        )

    # --- names ---

    def names(self, model: MoeModel) -> LinearNames:
        """The linears' own, with three endings."""
        return LinearNames(SUFFIXES, model=model)

    def names_of(self, facts: Mapping[str, Any]) -> LinearNames:
        """By the manifest's templates: a name alone does not say which linear of which expert it is."""
        templates = facts.get(TEMPLATES, {})
        return LinearNames(SUFFIXES, tuple(sorted(templates.items())) if are_templates(templates) else ())

    def loose_path(self, part: Part, tensor: Tensor) -> None:
        """There are no loose files of it."""

    def is_trusted(self, facts: Mapping[str, Any]) -> bool:
        """The templates and numbers that we read have the right types."""
        return (
            are_templates(facts.get(TEMPLATES))
            and isinstance(facts.get("method"), str)
            and all(mismatch(facts.get(name), COUNT) is None for name in ("bits", "group_size", "packed_linears"))
            and "layers" in facts
        )

    # --- numbers ---

    def quantize(self, matrix: Matrix, out: Sequence[Bytes]) -> None:
        """One scale for each group of columns, from its largest value."""
        packed, shape, scale = self.typed(out, *matrix.shape)
        shape[:] = matrix.shape
        kernels.quantize_groups(self.grid.bits, matrix, packed, scale, group=self.group, rounding=self.rounding)

    def pack(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        """Codes into words, in the order of the columns."""
        packed, shape, scale = self.typed(out, *codes.shape)
        packed[:] = groups.pack_words(self.grid.bits, codes)
        shape[:] = codes.shape
        scale[:] = scales

    def typed(
        self, stored: Sequence[Bytes], n: int, k: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
        """The tensors of a linear [n, k] as what they are: words, shape, bits of BF16 scales; views."""
        packed, shape, scale = (
            data.view(dtype).reshape(tensor.shape)
            for data, dtype, tensor in zip(stored, ("<i4", "<i8", "<u2"), self.tensors(n, k), strict=True)
        )
        return packed, shape, scale

    def stored(self, packed: npt.NDArray[np.int32], scale: npt.NDArray[np.uint16]) -> list[Bytes]:
        """The tensors of a linear, from its words and scales."""
        shape = np.array([packed.shape[0], packed.shape[1] * 32 // self.grid.bits], "<i8")
        return [np.ascontiguousarray(data).reshape(-1).view(np.uint8) for data in (packed, shape, scale)]

    def codes(self, packed: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        """The signed codes of weight_packed: int8 [n, k]."""
        return groups.unpack_words(self.grid.bits, packed)

    def scales(self, stored: Sequence[Bytes], n: int, k: int) -> npt.NDArray[np.uint16]:
        """One for each group: bits of BF16 [n, k / group]."""
        return self.typed(stored, n, k)[2]

    def unpack(self, stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
        """The dequantized numbers of packed codes and BF16 scales: float32 [n, k], exact, or some of their rows."""
        packed, _, scale = self.typed(stored, n, k)
        return groups.dequantize_groups(self.grid.bits, packed[rows], scale[rows])

    def error_sums(self, matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
        """Some rows at a time."""
        return error_sums(matrix, lambda rows: self.unpack(stored, *matrix.shape, rows))

    def error_bytes(self, columns: int) -> int:
        """Some rows as float64, several times over."""
        return ROWS * 64 * columns

    def source_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """In BF16."""
        return source_values(matrix)

    def scale_values(self, stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
        """One for each group: float32 [n, k / group]."""
        return bf16_to_f32(stored.view("<u2").reshape(n, -1))

    def is_zero(self, stored: Sequence[Bytes]) -> bool:
        """Zeros have codes of zeros, and the scale that is stored where the largest value is 0."""
        packed, _, scale = stored
        return bool((scale.view("<u2") == groups.EMPTY_SCALE).all() and (packed == self._zero).all())

    @property
    def _zero(self) -> int:
        """A byte of codes 0."""
        return 0x88 if self.grid.bits == 4 else 0x80

    def check_numbers(self, output: Output, place: Place, notes: list[str]) -> Iterator[str]:
        """Scales are finite and positive, the shape is that of the codes, and no linear is all zeros unless its source
        was.
        """
        coded, about, scaled = (output.tensors[place, suffix] for suffix in SUFFIXES)
        if about.nbytes != 16 or len(scaled.shape) != 2:
            return
        where = f"{coded.name} in {coded.file}"
        n, k = (int(size) for size in output.read(about).view("<i8"))
        scales = output.read(scaled).view("<u2")
        if (n, k // self.group) != scaled.shape:
            yield f"{where}: weight_shape says {n} x {k}"
        bad = (scales >= 0x7F80) | (scales == 0)
        if bad.any():
            yield f"{where}: scale {int(np.argmax(bad))} is not a positive number"
        starts = range(0, coded.nbytes, PIECE)  # of codes that are not all zeros, only the beginning is read
        pieces = (output.read(coded, at, min(at + PIECE, coded.nbytes)) for at in starts)
        if all((piece == self._zero).all() for piece in pieces):
            if (scales == groups.EMPTY_SCALE).all():
                notes.append(f"{coded.name} is all zeros, as the scales say its source was")
            else:
                yield f"{where} is all zeros: its expert would compute nothing"

    # --- descriptions ---

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the format."""
        return {"rounding": self.rounding, "bits": self.grid.bits, "group_size": self.group}

    def config_entries(self, facts: Mapping[str, Any], ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
        """compressed-tensors' own document."""
        return {"quantization_config": compressed_card.quantization_config(self.grid, ignore)}

    def check_config(self, output: Output, numa: int) -> Iterator[str]:
        """quantization_config is as the format requires, and its ignore list separates experts
        from all other modules.
        """
        return ignore.check_config(output, lambda ignored: compressed_card.quantization_config(self.grid, ignored))

    def card(self, facts: Mapping[str, Any], base_model: str | None, *, loose: bool, non_experts: str) -> Card:
        """Its lines in the model card."""
        return compressed_card.card(facts, base_model)


W4A16 = Compressed("W4A16", version=1, grid=GROUP_GRIDS["W4A16"])
W8A16 = Compressed("W8A16", version=1, grid=GROUP_GRIDS["W8A16"])
