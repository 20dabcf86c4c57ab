"""Output formats: an encoding in an arrangement, with a description for people and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Encoding, explain_size, with_bias
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs.loose import FILE_WORDS, file_path
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing, TensorNames
from ktconvert.layouts.tensors import TensorInfo


@dataclass(frozen=True)
class Arrangement:
    """One way to arrange the experts of an output.

    name            name in reports ("merged"), for outputs without loose files
    command         command that writes it, as in manifests
    layout          value of that command's --layout that selects it; "" if it has no such option
    make_names      (name of the format, its encoding, facts of the manifest or {}, source or None) -> the naming
                    scheme of tensors. The source is given while an output is written
    is_trusted      (facts of a manifest) -> whether the required ones have the right types
    sliced          whether linears are cut into NUMA slices
    on_request      whether the formats are used only if --layout selects this arrangement
    is_whole_model  whether loaders of checkpoints open the output
    shard_bytes     default size of a shard; None: one shard per layer
    """

    name: str
    command: str
    layout: str
    make_names: Callable[[str, Encoding, OutputFacts, MoeModel | None], TensorNames]
    is_trusted: Callable[[OutputFacts], bool]
    sliced: bool = False
    on_request: bool = False
    is_whole_model: bool = False
    shard_bytes: int | None = None


def has_numa_count(facts: OutputFacts) -> bool:
    return isinstance(facts.get("numa"), int)


@dataclass(frozen=True)
class Card:
    """Texts of a format's model card (cards.py); words in braces stand for facts of a manifest.

    title         heading
    introduction  lines of the first paragraph: contents of the folder
    make_rows     (card, facts) -> (name, value) rows of the table
    make_usage    (facts, base model, value of --non-experts) -> lines that explain how to load the output
    numbers       bits and scales of the weights
    slices        number of NUMA slices; "" if any number of nodes can use the output
    library       library_name of the front matter; "" if several programs load the output
    tags          tags of the front matter
    """

    title: str
    introduction: tuple[str, ...]
    make_rows: Callable[[Card, OutputFacts], tuple[tuple[str, str], ...]]
    make_usage: Callable[[OutputFacts, str | None, str], tuple[str, ...]]
    numbers: str = ""
    slices: str = ""
    library: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """A format's model card, and its part of config.json.

    card            texts of the model card
    config_entries  (format, facts of the manifest, patterns of unquantized modules, version of ktconvert) -> entries
                    that config.json gets in addition to the source's
    check_config    (output, format, NUMA slices) -> the defects of the output's config.json
    """

    card: Card
    config_entries: Callable[[Format, OutputFacts, Sequence[str], str], dict[str, Any]]
    check_config: Callable[[Output, Format, int], Iterator[str]]


@dataclass(frozen=True)
class Format:
    """One format of experts.

    name         name for loaders and manifests ("AMXINT4")
    notes        notes for users who convert to this format
    loose        prefix of the names of loose files ("INT4"); None if the format has no loose files
    forward      whether it contains the experts themselves; else only the transposed matrices
    backward     whether it can contain transposed matrices for fine-tuning (--save-backward-weights)
    settings     names of the command's settings that select one of several encodings
    variants     values of these settings -> encoding
    by_layer     layer -> its format, in a mixed output (mixed.py); all formats have the same names of tensors
    """

    name: str
    encoding: Encoding
    arrangement: Arrangement
    description: Description
    notes: tuple[str, ...] = ()
    loose: str | None = None
    forward: bool = True
    backward: bool = False
    settings: tuple[str, ...] = ()
    variants: Mapping[tuple[Any, ...], Encoding] = field(default_factory=dict, compare=False)
    by_layer: Mapping[int, Format] = field(default_factory=dict, hash=False)

    @property
    def option(self) -> str:
        """Name on the command line ("int4")."""
        return self.encoding.grid.name

    @property
    def can_resplit(self) -> bool:
        return self.arrangement.sliced and self.forward

    def layer_format(self, layer: int) -> Format:
        """Return the format of a layer: this one, unless it is mixed."""
        return self.by_layer.get(layer, self)

    @property
    def layer_formats(self) -> tuple[Format, ...]:
        """The formats of the layers: only this one, unless it is mixed."""
        return tuple(dict.fromkeys(self.by_layer.values())) or (self,)

    def apply_settings(self, settings: Mapping[str, object]) -> Format:
        """Return this format with the encoding that a command's settings, or a manifest's facts, select."""
        # Values from a manifest may have any type, so never use them as keys.
        values = tuple(settings.get(name) for name in self.settings)
        selected = (encoding for key, encoding in self.variants.items() if key == values)
        return replace(self, encoding=next(selected, self.encoding))

    def make_names(self, facts: OutputFacts, source: MoeModel | None = None) -> TensorNames:
        return self.arrangement.make_names(self.name, self.encoding, facts, source)

    def make_names_for_source(self, source: MoeModel) -> TensorNames:
        return self.make_names({"method": self.name}, source)

    def with_biases(self) -> Format:
        """Return this format with a bias for each row of a slice."""
        by_layer = {layer: fmt.with_biases() for layer, fmt in self.by_layer.items()}
        return replace(self, encoding=with_bias(self.encoding), by_layer=by_layer)

    def loose_path(self, numa_slice: NumaSlice, tensor: TensorInfo) -> str | None:
        """Return the file of a tensor inside its layer's folder; None if the format has no loose files."""
        if self.loose is None:
            return None
        return file_path(self.loose, numa_slice, tensor.nbytes, FILE_WORDS[tensor.name])


def expert_bytes(encoding: Encoding, slicing: Slicing) -> int:
    return sum(
        tensor.nbytes
        for numa_slice in slicing.all_slices([0])
        for tensor in encoding.tensors(numa_slice.n, numa_slice.k)
    )


def output_bytes(model: MoeModel, fmt: Format, slices: int, layers: Iterable[int] | None = None) -> int:
    """Return the size of all experts in a format, in this number of NUMA slices; `layers`: only of these layers."""
    total = 0
    slices = slices if fmt.arrangement.sliced else 1
    fmt = fmt.with_biases() if model.has_biases else fmt
    for layer in model.layers if layers is None else layers:
        experts, hidden, intermediate = model.shape(layer)
        slicing = Slicing(layer, hidden, intermediate, slices, gated=model.is_gated)
        total += experts * expert_bytes(fmt.encoding, slicing)
    return total


def collapse_equal(values: Iterable[int]) -> int | list[int]:
    """Return the value if all are equal, else the sorted list of distinct values."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else distinct


USUAL_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # usual numbers of NUMA nodes


def explain_illegal_count(fmt: Format, shapes: Iterable[tuple[int, int]], numa: int) -> str | None:
    """Explain why a format cannot hold experts of these sizes (H, I) in `numa` slices; return None if it can.

    If several sizes are illegal, explain the first.
    """
    multiple = fmt.encoding.multiple
    reasons = (explain_size(multiple, hidden, width, numa) for hidden, width in dict.fromkeys(shapes))
    return next(filter(None, reasons), None)


def legal_counts(fmt: Format, shapes: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the numbers of slices, among USUAL_COUNTS, in which a format can hold experts of all these sizes."""
    shapes = tuple(shapes)
    return tuple(numa for numa in USUAL_COUNTS if explain_illegal_count(fmt, shapes, numa) is None)


def choose_count(layers: Iterable[tuple[Format, tuple[int, int]]], numa: int) -> int:
    """Return `numa`, or the largest smaller number of slices that is legal; `numa` if there is none.

    layers  format and sizes (H, I) of each layer
    """
    distinct = {*layers}
    for count in (numa, *(usual for usual in reversed(USUAL_COUNTS) if usual < numa)):
        if all(explain_illegal_count(fmt, [sizes], count) is None for fmt, sizes in distinct):
            return count
    return numa


def require_legal(
    fmt: Format, hidden: int, intermediate: int, numa: int, others: Iterable[Format] = (), option: str = "--numa"
) -> None:
    """Raise UnsupportedError, naming the legal numbers of slices for this model, unless `numa` is one of them.

    others  formats that the caller offers instead; the message names methods only if there are any
    option  the caller's name for the number of slices
    """
    if (reason := explain_illegal_count(fmt, [(hidden, intermediate)], numa)) is None:
        return
    others = [other for other in others if other.name != fmt.name]
    methods: dict[tuple[int, ...], list[str]] = {}  # by their legal numbers of slices
    for candidate in (fmt, *others):
        methods.setdefault(legal_counts(candidate, [(hidden, intermediate)]), []).append(candidate.option)
    methods.pop((), None)
    choices = [
        f"{' or '.join(names) + ' with ' if others else ''}{option} {', '.join(map(str, counts))}"
        for counts, names in methods.items()
    ]
    impossible = "no method can hold it" if others else "no number of slices is possible"
    remedy = f"use {'; or '.join(choices)}" if choices else impossible
    raise UnsupportedError(
        f"{fmt.name} cannot hold this model in {numa} NUMA slice{'s' * (numa > 1)}: {reason}; {remedy}."
    )
