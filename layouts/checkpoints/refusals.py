"""Checks before a conversion: unsupported formats, experts that no row describes, stray tensors, missing layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.archs import GGUF_STYLES, Arch, Style
from ktconvert.layouts.checkpoints.match import NUMBER, SHARED, Scan, name_of
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import InputError, UnsupportedError

MOST_NAMES = 4  # of different tensors in one sentence


def refuse_formats(tensors: Iterable[tuple[str, str]]) -> None:
    """Tensors (format, name) whose names already say that they are no input. Raises UnsupportedError."""
    for what, name in tensors:
        raise no_input(name, what)


def no_input(name: str, what: str) -> UnsupportedError:
    """The sentence for a tensor that no row of the table of encodings reads."""
    return UnsupportedError.of_tensor(name, f": {what} is not an input yet; use the model's BF16 or FP8 (E4M3) release")


def not_recognised(called: str, source: TensorSource, archs: Sequence[Arch]) -> UnsupportedError:
    """The sentence for a checkpoint in which no row finds experts: it has none, or they are stored in another way.

    Their tensors are those called so, else those of three dimensions with one matrix for each expert.
    """
    counted = cfg.number(source.config, tuple(dict.fromkeys(key for arch in archs for key in arch.experts)))
    experts = counted[1] if counted else 0
    theirs = [name for name in source.tensors if "expert" in name and not SHARED.search(name)] or [
        name for name, info in source.tensors.items() if len(info.shape) == 3 and info.shape[0] == experts > 1
    ]
    if experts < 2 and not theirs:
        return UnsupportedError(f"{called}: a dense model, it has no experts to convert")
    remedy = "if they are gate, up and down matrices, describe them with --arch-file"
    if not theirs:
        key = counted[0] if counted else ""
        return UnsupportedError(
            f"{called}: config.json says {key} = {experts}, but no tensor looks like theirs; {remedy}"
        )
    kinds = list({NUMBER.sub("#", name): name for name in reversed(theirs)}.values())[::-1]
    shown = ", ".join(map(repr, kinds[:MOST_NAMES])) + (" and others" if len(kinds) > MOST_NAMES else "")
    rows = ", ".join(arch.name for arch in archs if arch.refusal is None)
    return UnsupportedError(
        f"{called}: its experts are not stored as any known family's (tensors {shown}); {remedy}. Known are: {rows}",
        tensor=kinds[0],
    )


def refuse_strays(seen: Scan, prefix: str, mtp: Iterable[int]) -> None:
    """Names among the experts of a converted layer that are none of their parts. Raises InputError."""
    left_out = tuple(f"{prefix}layers.{n}." for n in mtp)
    for name in seen.strays:
        if name.startswith(prefix) and not (left_out and name.startswith(left_out)):
            raise InputError.of_tensor(
                name,
                "stands among the experts but is none of their parts; "
                "remove it, or describe this model with --arch-file",
            )


def refuse_gaps(seen: Scan, style: Style, prefix: str, layers: Collection[int], count: int) -> None:
    """Of `count` layers, one that has a router but no experts, or that is not there at all, was lost: InputError."""
    if "{prefix}" not in getattr(style, style.parts[0]) and style not in GGUF_STYLES:
        return  # where such a row's other tensors are is not known
    for n in range(count):
        if n in layers:
            continue
        name = name_of(style, prefix, style.parts[0], n, 0)
        if (prefix, n) in seen.routers:
            raise InputError(
                f"layer {n} has a router but no experts ({name!r} is missing)", remedy="download the model again"
            )
        if n > min(layers) and (prefix, n) not in seen.present:
            raise InputError(f"layer {n} is missing ({name!r} and all else)", remedy="download the model again")
