"""What an output format is: an encoding in an arrangement, and what people and loaders are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.outputs.arrangement import Arrangement, Names
from ktconvert.layouts.outputs.loose import SUFFIXES, path_in_layer
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.layouts.tensors import TensorInfo

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel
    from ktconvert.layouts.outputs.output import Output


@dataclass(frozen=True)
class Card:
    """A format's lines in the model card.

    head   of the front matter, above the tags
    tags   of the front matter, after "ktconvert"
    title  the heading
    about  what the folder is
    rows   (what, value) of its table
    use    how it is loaded
    """

    head: tuple[str, ...]
    tags: tuple[str, ...]
    title: str
    about: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    use: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """What people and loaders are told of a format: text made from the facts of a manifest.

    numbers         what its numbers are, for the model card
    card            (facts, base model, loose, non_experts, numbers) -> the model card. non_experts: what
                    --non-experts was
    config_entries  (format, facts, ignore, version of ktconvert) -> what config.json holds besides the source's.
                    ignore: patterns of modules that stay as they are
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
    by_rounding  the encodings by the setting `rounding`, where there are several
    """

    name: str
    encoding: Encoding
    arrangement: Arrangement
    description: Description
    notes: tuple[str, ...] = ()
    loose: str | None = None
    forward: bool = True
    backward: bool = False
    by_rounding: Mapping[str, Encoding] = field(default_factory=dict, compare=False)

    @property
    def option(self) -> str:
        """What chooses it on the command line ("int4")."""
        return self.encoding.grid.name

    @property
    def can_resplit(self) -> bool:
        """Whether its NUMA parts can be rearranged."""
        return self.arrangement.parted and self.forward

    def configured(self, settings: Mapping[str, Any]) -> Format:
        """This format with the options in a command's settings (or a manifest's facts)."""
        return replace(self, encoding=self.by_rounding[settings["rounding"]]) if self.by_rounding else self

    def names(self, facts: Mapping[str, Any], source: MoeModel | None = None) -> Names:
        """The names of tensors: Arrangement.names."""
        return self.arrangement.names(self.name, self.encoding, facts, source)

    def names_in(self, source: MoeModel) -> Names:
        """The names of tensors in an output of this model."""
        return self.names({"method": self.name}, source)

    def loose_path(self, part: Part, tensor: TensorInfo) -> str | None:
        """The file of a tensor inside its layer's folder; None where the format has no loose files."""
        if self.loose is None:
            return None
        return path_in_layer(self.loose, part, tensor.nbytes, SUFFIXES[tensor.name])


def expert_bytes(encoding: Encoding, grid: ExpertGrid) -> int:
    """Bytes of all tensors of one expert."""
    return sum(tensor.nbytes for part in grid.all_parts([0]) for tensor in encoding.tensors(part.n, part.k))
