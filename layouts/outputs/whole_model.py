"""Whole models with quantized experts under their own names, for loaders of checkpoints (bytes.md).

The module defines their entries of config.json, their arrangement, and notes on loading them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Encoding, tensor_suffixes
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import cards, ignore
from ktconvert.layouts.outputs.format import Arrangement, Description, Format
from ktconvert.layouts.outputs.linear_names import TEMPLATES, LinearNames, are_templates
from ktconvert.layouts.outputs.output import Output
from ktconvert.quantizers import GROUP_SIZES, Grid

# `version` in quantization_config: the release of compressed-tensors that defines this document.
DOCUMENT_VERSION = "0.19.0"


def quantization_config(grid: Grid, ignored: Sequence[str]) -> dict[str, Any]:
    """Return compressed-tensors' own document; `actorder` is null, since loaders misread "static"."""
    weights = {"num_bits": grid.bits, "type": "int", "symmetric": True, "group_size": grid.group, "strategy": "group"}
    weights |= {"block_structure": None, "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None}
    weights |= {"observer": None, "observer_kwargs": {}}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "config_groups": {"group_0": scheme | {"format": "pack-quantized"}},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "version": DOCUMENT_VERSION,
    }


def config_entries(fmt: Format, facts: OutputFacts, ignored: Sequence[str], tool_version: str) -> dict[str, Any]:
    return {"quantization_config": quantization_config(fmt.encoding.grid, ignored)}


def check_config(output: Output, fmt: Format, numa: int) -> Iterator[str]:
    """Check that quantization_config fits the format, and that its ignore list names all modules but the experts."""
    return ignore.check_config(output, lambda ignored: quantization_config(fmt.encoding.grid, ignored))


DESCRIPTION = Description(cards.WHOLE_MODEL, config_entries, check_config)

RANKS = (1, 2, 4, 8, 16)  # numbers of tensor-parallel ranks that notes list


def _make_names(method: str, encoding: Encoding, facts: OutputFacts, source: MoeModel | None) -> LinearNames:
    """Return the names of the source, or of the manifest's templates; without either, no name identifies experts."""
    if source is not None:
        return LinearNames(tensor_suffixes(encoding), model=source)
    templates = facts.get(TEMPLATES, {})
    return LinearNames(tensor_suffixes(encoding), tuple(sorted(templates.items())) if are_templates(templates) else ())


def _is_trusted(facts: OutputFacts) -> bool:
    numbers = [facts.get(name) for name in ("bits", "group_size", "packed_linears")]
    are_counts = all(type(number) is int and 0 < number < 1 << 31 for number in numbers)
    return (
        are_counts
        and are_templates(facts.get(TEMPLATES))
        and isinstance(facts.get("method"), str)
        and "layers" in facts
    )


# The default size of a shard limits memory: its scales (3 % of it) stay in memory until all codes are written.
WHOLE_MODEL = Arrangement(
    "pack-quantized", "gpu", "", _make_names, _is_trusted, is_whole_model=True, shard_bytes=5 * 10**9
)


def notes_on_loading(fmt: Format, model: MoeModel, tensor_parallel: Iterable[int]) -> tuple[str, ...]:
    """Return notes on loading an output.

    tensor_parallel  numbers of tensor-parallel ranks that will load it

    Raises UnsupportedError if groups do not fit.
    """
    group = fmt.encoding.multiple
    multiple = max(64, group)
    notes: dict[str, None] = {}
    for hidden, width in dict.fromkeys(model.shape(layer)[1:] for layer in model.layers):
        for name, size in (("hidden size", hidden), ("expert width", width)):
            if size % group:
                smaller = next((f"give --group-size {other}, " for other in GROUP_SIZES if size % other == 0), "")
                raise UnsupportedError(
                    f"{fmt.name} has groups of {group} columns, but the {name} {size} of this model is not a multiple; "
                    f"{smaller}convert it with `ktconvert cpu`, or serve its experts in BF16"
                )
        legal_ranks = ", ".join(str(ranks) for ranks in RANKS if width % (ranks * group) == 0)
        for ranks in tensor_parallel:
            if ranks < 1 or width % (ranks * group):
                problem = f"cannot be split into {ranks} tensor-parallel ranks with whole groups of {group}"
                raise UnsupportedError(f"the expert width {width} {problem}; choose one of {legal_ranks}")
            if hidden % 128 or width // ranks % multiple:
                notes[
                    "Marlin, the fast kernel of vLLM and SGLang, needs a hidden size in multiples of 128 and an expert "
                    f"width per rank in multiples of {multiple}; for {hidden} and {width // ranks}, "
                    "they use a slower one."
                ] = None
        notes[f"Experts {width} wide in groups of {group} can be loaded with tensor parallelism {legal_ranks}."] = None
    if not model.is_plain:
        usual = "silu(gate) * up with routing weights on the output only"
        notes[f"Marlin computes {usual}; these experts need a different kernel."] = None
    if model.has_biases:
        notes[
            "Biases are named as by llmcompressor. transformers reads the experts of such families only from stacks; "
            "use ktconvert's runtime (W4A16 in groups of 32), or an engine that reads single experts with biases."
        ] = None
    return tuple(notes)
