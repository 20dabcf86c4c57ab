"""A whole model whose experts are quantized linears under their own names, for loaders of checkpoints (bytes.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ktconvert.layouts.encodings.encoding import Encoding, suffixes
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.format import Arrangement
from ktconvert.layouts.outputs.linear_names import TEMPLATES, LinearNames, are_templates
from ktconvert.quantizers import GROUP_SIZES

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.moe_model import MoeModel
    from ktconvert.layouts.outputs.format import Format

RANKS = (1, 2, 4, 8, 16)  # of tensor parallelism, that notes name


def _names(method: str, encoding: Encoding, facts: Mapping[str, Any], source: MoeModel | None) -> LinearNames:
    """By the source, or by the manifest's templates: a name alone does not say which linear of which expert it is."""
    if source is not None:
        return LinearNames(suffixes(encoding), model=source)
    templates = facts.get(TEMPLATES, {})
    return LinearNames(suffixes(encoding), tuple(sorted(templates.items())) if are_templates(templates) else ())


def _is_trusted(facts: Mapping[str, Any]) -> bool:
    return (
        are_templates(facts.get(TEMPLATES))
        and isinstance(facts.get("method"), str)
        and all(
            type(facts.get(name)) is int and 0 < facts[name] < 1 << 31
            for name in ("bits", "group_size", "packed_linears")
        )
        and "layers" in facts
    )


# A shard's scales, 3 % of it, are kept in memory until all codes are written.
WHOLE_MODEL = Arrangement("pack-quantized", "gpu", "", _names, _is_trusted, whole=True, shard_bytes=5 * 10**9)


def loading_notes(fmt: Format, model: MoeModel, tensor_parallel: Iterable[int]) -> tuple[str, ...]:
    """Notes on how an output of this model can be loaded, also in tensor-parallel ranks.

    Raises UnsupportedError where groups do not fit, alone or at one of these numbers of ranks.
    """
    group = fmt.encoding.multiple
    multiple = max(64, group)
    notes: dict[str, None] = {}
    for hidden, width in dict.fromkeys(model.shape(layer)[1:] for layer in model.layers):
        for what, size in (("hidden size", hidden), ("expert width", width)):
            if size % group:
                smaller = next((f"give --group-size {other}, " for other in GROUP_SIZES if size % other == 0), "")
                raise UnsupportedError(
                    f"{fmt.name} has groups of {group} columns, which do not divide the {what} {size} of this model; "
                    f"{smaller}convert it with `ktconvert cpu`, or serve its experts in BF16"
                )
        fits = ", ".join(str(ranks) for ranks in RANKS if width % (ranks * group) == 0)
        for ranks in tensor_parallel:
            if ranks < 1 or width % (ranks * group):
                raise UnsupportedError(
                    f"the expert width {width} cannot be cut into {ranks} tensor-parallel ranks of whole groups of "
                    f"{group}; choose one of {fits}"
                )
            if hidden % 128 or width // ranks % multiple:
                notes[
                    "Marlin, the fast kernel of vLLM and SGLang, needs a hidden size in multiples of 128 and an expert "
                    f"width per rank in multiples of {multiple}: {hidden} and {width // ranks} take a slower one."
                ] = None
        notes[f"Experts {width} wide in groups of {group} can be loaded with tensor parallelism {fits}."] = None
    if model.activation != "silu" or model.weights_on != "output":
        notes[
            "Marlin computes silu(gate) * up with routing weights on the output only; "
            "these experts need another kernel."
        ] = None
    return tuple(notes)
