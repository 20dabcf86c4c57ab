"""Whether a loose folder is whole: its layers among themselves, against its manifest and the original's config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs import Format, loose
from ktconvert.layouts.outputs.card import ranges
from ktconvert.pipeline.stages.merge_parts import LooseFile

WHAT = ("experts", "hidden size", "expert width")
FACTS = ("experts", "hidden", "intermediate")  # what the manifest calls them
MOST_LAYERS = 10_000  # more is no model
AGAIN = "convert it again"
CLAIM = ", and neither a manifest.json beside them nor --original-path says that they do"
CHOOSE = "if they are left out on purpose, name those to merge with --layers"


@dataclass(frozen=True)
class LooseLayer:
    """One layer: NUMA parts, number of experts, whether it has backward matrices; H and I, 0 where not known."""

    numa: int
    experts: int
    backward: bool
    hidden: int
    width: int

    @property
    def shape(self) -> claims.Shape:
        """E, H and I."""
        return self.experts, self.hidden, self.width


def measure_layer(files: Sequence[LooseFile], fmt: Format | None) -> LooseLayer:
    """What the files of one layer say by their names and sizes. form: None where it is not ours, and bytes mean nothing
    to us.

    Raises InputError for a file whose size does not fit the others.
    """
    parts = [file.part for file in files]
    numa, experts = 1 + max(p.numa for p in parts), 1 + max(p.expert for p in parts)
    backward = any(p.backward for p in parts)
    if fmt is None:
        return LooseLayer(numa, experts, backward, 0, 0)
    rows = {
        projection: Counter(
            f.nbytes // 4 for f in files if (f.what, f.part.projection, f.part.backward) == ("scale", projection, False)
        ).most_common(1)[0][0]
        for projection in ("gate", "down")
    }
    hidden, width = rows["down"], rows["gate"]
    for file in files:
        n, k = (hidden, width) if (file.part.projection == "down") != file.part.backward else (width, hidden)
        expected = next(tensor.nbytes for tensor in fmt.encoding.tensors(n, k) if tensor.name == file.what)
        if file.nbytes != expected:
            raise InputError(
                f"{file.path}: {file.nbytes} bytes do not fit hidden size {hidden} and width {width * numa} "
                f"in {numa} parts ({expected} would)."
            )
    return LooseLayer(numa, experts, backward, hidden, width * numa)


def require_whole(
    root: Path,
    layers: Mapping[int, LooseLayer],
    recorded: Mapping[str, Any] | None,
    config: dict[str, Any] | None,
    *,
    chosen: bool,
) -> None:
    """Raise InputError where a layer is missing or is not of the same conversion and model as the others.

    recorded  the facts of the manifest beside the layers, if there is one
    config    the config.json of --original-path, None without that option
    chosen    whether the user named the layers: then others may be missing, and the config does not decide which have
              experts
    """
    for name, what in (("numa", "NUMA parts"), ("backward", "backward matrices"), ("hidden", "hidden size")):
        _require_one(root, what, {n: getattr(layer, name) for n, layer in layers.items()})
    shapes = {n: layer.shape for n, layer in layers.items()}
    for problem in _unlike_manifest(layers, recorded, chosen) if recorded is not None else ():
        raise InputError(f"{root}: manifest.json {problem}; {AGAIN}.")
    if config is not None:
        problems = [
            *(claims.layer_problems(config, list(layers)) if not chosen else ()),
            *claims.size_problems(config, shapes),
        ]
        for problem in problems:
            raise InputError(f"{root}: {problem}; give the original of these layers with --original-path.")
    if not chosen:
        missing = list(islice((n for n in _expected(layers, recorded, config) if n not in layers), MOST_LAYERS))
        if missing:
            which = f"layers {ranges(missing)} are" if len(missing) > 1 else f"layer {missing[0]} is"
            raise InputError(f"{root}: {which} missing, {ranges(list(layers))} there; {AGAIN}, or {CHOOSE}.")
    if recorded is None:
        for at, what in ((0, WHAT[0]), (2, WHAT[2])):
            if config is None or any(claims.sizes(config, n)[what] is None for n in layers):
                _require_one(root, what, {n: shape[at] for n, shape in shapes.items()}, CLAIM)


def _require_one(root: Path, what: str, values: Mapping[int, int], claim: str = "") -> None:
    """Raise InputError where layers differ in what must be the same for all."""
    by_value: dict[int, list[int]] = {}
    for layer, value in values.items():
        by_value.setdefault(value, []).append(layer)
    if len(by_value) > 1:
        shown = "; ".join(f"{_value(value)} in layers {ranges(layers)}" for value, layers in by_value.items())
        raise InputError(f"{root}: layers differ in {what} ({shown}){claim}; convert those that are wrong again.")


def _value(value: int) -> str:
    return ("none", "some")[value] if isinstance(value, bool) else str(value)


def _unlike_manifest(layers: Mapping[int, LooseLayer], recorded: Mapping[str, Any], chosen: bool) -> Iterator[str]:
    """The ways in which the layers contradict the manifest, whose sizes are one number or a list of all that occur."""
    known = recorded_layers(recorded)
    if known is not None and not chosen:
        for layer in layers:
            if layer not in known:
                yield f"names no layer {layer}, and {loose.layer_folder(layer)} is here"
    for layer, measured in layers.items():
        for name, what, size in zip(
            ("numa", *FACTS), ("NUMA parts", *WHAT), (measured.numa, *measured.shape), strict=True
        ):
            value = recorded.get(name)
            allowed = value if isinstance(value, list) else [value]
            if size and isinstance(value, int | list) and size not in allowed:
                yield f"says {name} {value}, layer {layer} has {what} {size}"


def recorded_layers(recorded: Mapping[str, Any]) -> list[int] | None:
    """The layers that a manifest says were converted or kept; None where it does not say."""
    named = [recorded.get("layers"), recorded.get("kept_layers", [])]
    if all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in named):
        return sorted({n for numbers in named for n in numbers or ()})
    return None


def _expected(
    layers: Mapping[int, LooseLayer], recorded: Mapping[str, Any] | None, config: dict[str, Any] | None
) -> Iterable[int]:
    """The layers that must be there: by the manifest, else by the config, else all up to the last one present."""
    if recorded is not None and (known := recorded_layers(recorded)) is not None:
        return known
    by_config = claims.moe_layers(config) if config is not None else None
    if by_config is not None:
        return by_config
    limit = claims.num_layers(config) if config is not None else None
    return range(min(layers), limit[1] if limit is not None and limit[1] < MOST_LAYERS else max(layers) + 1)
