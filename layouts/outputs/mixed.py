"""Mixed outputs: a method per layer.

kt-kernel computes all layers with one method, so the tensors have names that it does not look for (bytes.md, section "A
method per layer").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from ktconvert.layouts.encodings.encoding import tensor_suffixes
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import FORMATS, cards, numa
from ktconvert.layouts.outputs.configs import describe_cpu
from ktconvert.layouts.outputs.format import Format, collapse_equal
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.tensors import TensorInfo, format_ranges

NAME = "MIXED"
MIXED_SUFFIXES = numa.SUFFIXES[1]  # suffixes of tensors that kt-kernel does not look for


def can_be_mixed(fmt: Format) -> bool:
    return fmt.arrangement == numa.NUMA and fmt.forward and len(tensor_suffixes(fmt.encoding)) <= len(MIXED_SUFFIXES)


@functools.cache
def rename_for_mixed_output(fmt: Format) -> Format:
    """Return a format for layers of a mixed output: the same bytes under names that kt-kernel does not look for."""
    encoding = fmt.encoding
    suffixes = tensor_suffixes(encoding)
    if suffixes == MIXED_SUFFIXES[: len(suffixes)]:
        return fmt

    def rename_tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        renamed = zip(encoding.tensors(n, k), MIXED_SUFFIXES, strict=False)
        return tuple(msgspec.structs.replace(tensor, name=suffix) for tensor, suffix in renamed)

    return replace(fmt, encoding=replace(encoding, tensors=rename_tensors), loose=None, backward=False)


def combine_formats(by_layer: Mapping[int, Format]) -> Format:
    """Return the format of an output: the format of all layers if they share one of FORMATS, else a mixed one.

    by_layer  layer -> its format
    """
    formats = tuple(dict.fromkeys(by_layer.values()))
    if len(formats) == 1 and FORMATS.get(formats[0].name) == formats[0]:
        return formats[0]
    notes = tuple(dict.fromkeys(note for fmt in formats for note in fmt.notes))
    return Format(NAME, formats[0].encoding, numa.NUMA, describe_cpu(cards.MIXED), notes, by_layer=dict(by_layer))


def manifest_facts(fmt: Format, layers: Sequence[int]) -> OutputFacts:
    """Return the manifest's facts on the format of these layers."""
    encodings = [fmt.layer_format(layer).encoding for layer in layers]
    return {
        "method": fmt.name,
        **manifest_methods(fmt, layers),
        "layout_version": collapse_equal(encoding.version for encoding in encodings),
        "bits": collapse_equal(encoding.grid.bits for encoding in encodings),
    }


def manifest_methods(fmt: Format, layers: Sequence[int]) -> OutputFacts:
    """Return the entry `methods` of the manifest, name -> "0-5, 60"; {} for a format that is not mixed."""
    if not fmt.by_layer:
        return {}
    numbers: dict[str, list[int]] = {}
    for layer in sorted(layers):
        numbers.setdefault(fmt.layer_format(layer).name, []).append(layer)
    return {"methods": {name: format_ranges(method_layers) for name, method_layers in numbers.items()}}


def find_declared_formats(output: Output) -> tuple[Format, ...]:
    """Return the formats that a layer of a mixed output may have; none if metadata of shards shows no mixed output."""
    if output.names != numa.NumaNames(MIXED_SUFFIXES):
        return ()
    declared = {metadata["method"] for metadata in output.metadata.values() if {"method", "layer"} <= metadata.keys()}
    formats = tuple(rename_for_mixed_output(fmt) for fmt in FORMATS.values() if can_be_mixed(fmt))
    renamed = {fmt.name for fmt in formats if fmt != FORMATS[fmt.name]}
    return formats if len(declared) > 1 or declared & renamed else ()
