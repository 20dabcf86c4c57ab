"""Mixed outputs: a method per layer.

kt-kernel computes all layers with one method, so the tensors have names that it does not look for (bytes.md, section "A
method per layer").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ktconvert.layouts.encodings.encoding import suffixes
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import FORMATS, cards, numa
from ktconvert.layouts.outputs.configs import describe_cpu
from ktconvert.layouts.outputs.format import Format, one_or_all
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.tensors import TensorInfo, format_ranges

NAME = "MIXED"
NOT_KT = numa.SUFFIXES[1]  # suffixes of tensor names


def can_be_mixed(fmt: Format) -> bool:
    return fmt.arrangement == numa.NUMA and fmt.forward and len(suffixes(fmt.encoding)) <= len(NOT_KT)


@functools.cache
def rename_for_mixed_output(fmt: Format) -> Format:
    """Return a format for layers of a mixed output: the same bytes under names that kt-kernel does not look for."""
    stored = fmt.encoding.tensors
    if suffixes(fmt.encoding) == NOT_KT[: len(suffixes(fmt.encoding))]:
        return fmt

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        return tuple(replace(tensor, name=name) for tensor, name in zip(stored(n, k), NOT_KT, strict=False))

    return replace(fmt, encoding=replace(fmt.encoding, tensors=tensors), loose=None, backward=False)


def combine_formats(by_layer: Mapping[int, Format]) -> Format:
    """Return the format of an output of these layers: that of all layers if it is one of FORMATS, else a mixed one."""
    formats = tuple(dict.fromkeys(by_layer.values()))
    if len(formats) == 1 and FORMATS.get(formats[0].name) == formats[0]:
        return formats[0]
    notes = tuple(dict.fromkeys(note for fmt in formats for note in fmt.notes))
    return Format(NAME, formats[0].encoding, numa.NUMA, describe_cpu(cards.MIXED), notes, by_layer=dict(by_layer))


def manifest_facts(fmt: Format, layers: Sequence[int]) -> OutputFacts:
    """Return the manifest's facts on the format of these layers; for a mixed one with `methods`, name -> "0-5, 60"."""
    encodings = [fmt.layer_format(layer).encoding for layer in layers]
    versions, bits = one_or_all(e.version for e in encodings), one_or_all(e.grid.bits for e in encodings)
    return {"method": fmt.name, **manifest_methods(fmt, layers), "layout_version": versions, "bits": bits}


def manifest_methods(fmt: Format, layers: Sequence[int]) -> OutputFacts:
    """Return the entry `methods` of the manifest; {} for a format that is not mixed."""
    if not fmt.by_layer:
        return {}
    numbers: dict[str, list[int]] = {}
    for layer in sorted(layers):
        numbers.setdefault(fmt.layer_format(layer).name, []).append(layer)
    return {"methods": {name: format_ranges(own) for name, own in numbers.items()}}


def find_declared_formats(output: Output) -> tuple[Format, ...]:
    """Return the formats that the metadata of shards allows for a layer: all mixable ones; none for other outputs."""
    if output.names != numa.NumaNames(NOT_KT):
        return ()
    said = {metadata["method"] for metadata in output.metadata.values() if {"method", "layer"} <= metadata.keys()}
    formats = tuple(rename_for_mixed_output(fmt) for fmt in FORMATS.values() if can_be_mixed(fmt))
    renamed = {fmt.name for fmt in formats if fmt != FORMATS[fmt.name]}
    return formats if len(said) > 1 or said & renamed else ()
