"""What an output format is: an encoding in an arrangement, with a description for people and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Encoding, why_not_multiple
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.loose import SUFFIXES, path_in_layer
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import ExpertGrid, Names, Part
from ktconvert.layouts.tensors import TensorInfo


@dataclass(frozen=True)
class Arrangement:
    """One way to arrange the experts of an output.

    name         in reports ("merged"), unless they lie in loose files
    command      that writes it, as manifests have it
    layout       the value of that command's --layout that chooses it; "" where it has no such option
    names        (name of the format, its encoding, facts of the manifest or {}, source while an output of it is
                 written) -> the names of tensors
    is_trusted   whether the manifest's facts that are needed have the right types
    parted       whether linears are cut into NUMA parts
    on_request   whether it is only used where its layout is asked for
    whole        whether the output is a whole model, which loaders of checkpoints open
    shard_bytes  default size of a shard; None: one shard for each layer
    """

    name: str
    command: str
    layout: str
    names: Callable[[str, Encoding, Mapping[str, Any], MoeModel | None], Names]
    is_trusted: Callable[[Mapping[str, Any]], bool]
    parted: bool = False
    on_request: bool = False
    whole: bool = False
    shard_bytes: int | None = None


def has_numa_count(facts: Mapping[str, Any]) -> bool:
    return isinstance(facts.get("numa"), int)


@dataclass(frozen=True)
class Card:
    """A format's lines in the model card.

    head, tags  of the front matter: above the tags; after "ktconvert"
    about, use  what the folder is; how it is loaded
    rows        (what, value) of its table
    """

    head: tuple[str, ...]
    tags: tuple[str, ...]
    title: str
    about: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    use: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """What people and loaders read of a format: text made from the facts of a manifest.

    numbers         what its numbers are, for the model card
    card            (facts, base model, loose, value of --non-experts, numbers) -> the model card
    config_entries  (format, facts, patterns of modules that stay as they are, version of ktconvert) -> what config.json
                    holds besides the source's
    check_config    (output, format, NUMA parts) -> the defects of config.json beside these experts
    """

    numbers: str
    card: Callable[[Mapping[str, Any], str | None, bool, str, str], Card]
    config_entries: Callable[[Format, Mapping[str, Any], Sequence[str], str], dict[str, Any]]
    check_config: Callable[[Output, Format, int], Iterator[str]]


@dataclass(frozen=True)
class Format:
    """One of the formats of experts.

    name         as loaders and manifests know it ("AMXINT4")
    notes        what a user should know before converting to it
    loose        how its loose files start ("INT4"); None where it has none
    forward      whether it has the experts themselves; else the transposed matrices alone
    backward     whether it has transposed matrices for fine-tuning (--save-backward-weights)
    settings     of the command that choose among several encodings, by name
    variants     these encodings, by the values of the settings
    by_layer     of a mix: the format of each layer (mixed.py); the names of tensors are alike in all
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
        """What chooses it on the command line ("int4")."""
        return self.encoding.grid.name

    @property
    def can_resplit(self) -> bool:
        return self.arrangement.parted and self.forward

    def of_layer(self, layer: int) -> Format:
        """The format of a layer: this one, unless it is a mix."""
        return self.by_layer.get(layer, self)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats that layers have: this one alone, unless it is a mix."""
        return tuple(dict.fromkeys(self.by_layer.values())) or (self,)

    def configured(self, settings: Mapping[str, Any]) -> Format:
        """This format with the encoding that a command's settings, or a manifest's facts, choose, if they do."""
        values = tuple(settings.get(name) for name in self.settings)  # of a manifest: of any type, so never a key
        chosen = (encoding for of, encoding in self.variants.items() if of == values)
        return replace(self, encoding=next(chosen, self.encoding))

    def names(self, facts: Mapping[str, Any], source: MoeModel | None = None) -> Names:
        return self.arrangement.names(self.name, self.encoding, facts, source)

    def names_in(self, source: MoeModel) -> Names:
        return self.names({"method": self.name}, source)

    def loose_path(self, part: Part, tensor: TensorInfo) -> str | None:
        """The file of a tensor inside its layer's folder; None where the format has no loose files."""
        if self.loose is None:
            return None
        return path_in_layer(self.loose, part, tensor.nbytes, SUFFIXES[tensor.name])


def expert_bytes(encoding: Encoding, grid: ExpertGrid) -> int:
    return sum(tensor.nbytes for part in grid.all_parts([0]) for tensor in encoding.tensors(part.n, part.k))


def one_or_all(values: Iterable[int]) -> int | list[int]:
    """The value where all are equal, else the sorted list of distinct values."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else distinct


COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # NUMA nodes that machines have


def illegal_reason(fmt: Format, shapes: Iterable[tuple[int, int]], parts: int) -> str | None:
    """Why a format cannot hold experts of these sizes (H, I) in this many parts: the first reason, None if it can."""
    reasons = (why_not_multiple(fmt.encoding.multiple, h, i, parts) for h, i in dict.fromkeys(shapes))
    return next(filter(None, reasons), None)


def legal_counts(fmt: Format, shapes: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers of parts, of COUNTS, that a format can hold experts of all these sizes in."""
    shapes = tuple(shapes)
    return tuple(parts for parts in COUNTS if illegal_reason(fmt, shapes, parts) is None)


def require_legal(fmt: Format, hidden: int, intermediate: int, parts: int, others: Iterable[Format] = ()) -> None:
    """Raise UnsupportedError, naming what is legal for this model, unless `parts` is."""
    if (reason := illegal_reason(fmt, [(hidden, intermediate)], parts)) is None:
        return
    choices = []
    for candidate in (fmt, *(other for other in others if other.name != fmt.name)):
        counts = legal_counts(candidate, [(hidden, intermediate)])
        listed = ", ".join(map(str, counts)) if counts else "no NUMA count"
        choices.append(f"{candidate.option} ({candidate.name}) takes --threadpool-count {listed}")
    raise UnsupportedError(
        f"{fmt.name} cannot hold this model in {parts} NUMA parts: {reason}. Legal here: {'; '.join(choices)}."
    )
