"""A method per layer: formats that differ from layer to layer, under names that kt-kernel does not look for, since it
computes all layers with one method (bytes.md, section "A method per layer").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts.encodings.encoding import suffixes
from ktconvert.layouts.outputs import FORMATS, cpu_card, numa
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import Format, one_or_all
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.tensors import TensorInfo

NAME = "MIXED"
NOT_KT = numa.SUFFIXES[1]  # how the names of tensors end


def can_be_mixed(fmt: Format) -> bool:
    return fmt.arrangement == numa.NUMA and fmt.forward and len(suffixes(fmt.encoding)) <= len(NOT_KT)


@functools.cache
def in_a_mix(fmt: Format) -> Format:
    """A format as layers of a mix have it: the same bytes under names that kt-kernel does not look for."""
    stored = fmt.encoding.tensors
    if suffixes(fmt.encoding) == NOT_KT[: len(suffixes(fmt.encoding))]:
        return fmt

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        return tuple(replace(tensor, name=name) for tensor, name in zip(stored(n, k), NOT_KT, strict=False))

    return replace(fmt, encoding=replace(fmt.encoding, tensors=tensors), loose=None, backward=False)


def of_layers(by_layer: Mapping[int, Format]) -> Format:
    """What an output of these layers is: their format where all have one of FORMATS, else a mix."""
    formats = tuple(dict.fromkeys(by_layer.values()))
    if len(formats) == 1 and FORMATS.get(formats[0].name) == formats[0]:
        return formats[0]
    notes = tuple(dict.fromkeys(note for fmt in formats for note in fmt.notes))
    return Format(NAME, formats[0].encoding, numa.NUMA, cpu_card.MIXED, notes, by_layer=dict(by_layer))


def facts_of(fmt: Format, layers: Sequence[int]) -> dict[str, Any]:
    """What the manifest says of the format of these layers: of a mix also `methods`, name -> layers as "0-5, 60"."""
    encodings = [fmt.of_layer(layer).encoding for layer in layers]
    versions, bits = one_or_all(e.version for e in encodings), one_or_all(e.grid.bits for e in encodings)
    return {"method": fmt.name, **methods_of(fmt, layers), "layout_version": versions, "bits": bits}


def methods_of(fmt: Format, layers: Sequence[int]) -> dict[str, dict[str, str]]:
    """The entry `methods` of the manifest; {} of what is no mix."""
    if not fmt.by_layer:
        return {}
    numbers: dict[str, list[int]] = {}
    for layer in sorted(layers):
        numbers.setdefault(fmt.of_layer(layer).name, []).append(layer)
    return {"methods": {name: ranges(own) for name, own in numbers.items()}}


def formats_said(output: Output) -> tuple[Format, ...]:
    """The formats that a layer may have, by the metadata of shards: all that can be mixed; none where it is no mix."""
    if output.names != numa.NumaNames(NOT_KT):
        return ()
    said = {metadata["method"] for metadata in output.metadata.values() if {"method", "layer"} <= metadata.keys()}
    formats = tuple(in_a_mix(fmt) for fmt in FORMATS.values() if can_be_mixed(fmt))
    renamed = {fmt.name for fmt in formats if fmt != FORMATS[fmt.name]}
    return formats if len(said) > 1 or said & renamed else ()
