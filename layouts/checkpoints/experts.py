"""Gate, up and down of one expert, whatever way the checkpoint stores them.

The tensors decide; the config is compared with them, and where the two disagree the checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints import scales
from ktconvert.layouts.checkpoints.archs import ACTIVATIONS, ARCHS, Arch, Fused, Separate, Style
from ktconvert.layouts.checkpoints.match import Layer, Scan, scan
from ktconvert.layouts.checkpoints.refusals import (
    KINDS,
    refuse_dtypes,
    refuse_formats,
    refuse_gaps,
    refuse_strays,
)
from ktconvert.layouts.checkpoints.shapes import MoeLayer, measure
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant.matrix import Matrix

PLAIN_ACTIVATIONS = ("silu", "swish")
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Expert:
    """The three linears of one expert: gate and up (I, H), down (H, I); views of the checkpoint."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class MoeModel:
    """A checkpoint whose experts were found.

    layers       numbers of the layers to convert, as the checkpoint numbers them.
    mtp_layers   layers at or beyond num_hidden_layers, left out; mtp_tensors names the expert tensors of these
                 and of blocks called mtp.
    dtypes       the dtypes that expert weights have, sorted.
    activation   key of ACTIVATIONS, or what the config calls it.
    weights_on   "output" or "input".
    notes        sentences for the plan of an AMX output; common_notes: those of them that hold for any output.
    """

    arch: Arch
    source: TensorSource
    layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    mtp_tensors: frozenset[str]
    dtypes: tuple[str, ...]
    has_shared_experts: bool
    activation: str
    weights_on: str
    notes: tuple[str, ...]
    common_notes: tuple[str, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    found: dict[int, MoeLayer] = field(default_factory=dict, repr=False)

    @property
    def plain(self) -> bool:
        """Whether the experts compute what kt-kernel's AMXINT4 and AMXINT8 compute."""
        return self.activation == "silu" and self.weights_on == "output"

    def shape(self, layer: int) -> tuple[int, int, int]:
        """(E, H, I): experts, hidden size, expert width."""
        moe = self.found[layer]
        return moe.num_experts, moe.hidden, moe.width

    def reading(self, layer: int) -> tuple[str, bool, tuple[tuple[int, int], ...]]:
        """How this layer's tensors are understood, as far as the config had a say: style, orientation, FP8 blocks."""
        moe = self.found[layer]
        return repr(moe.stored.style), moe.input_major, self.blocks

    def expert(self, layer: int, expert: int) -> Expert:
        """Gate, up and down of one expert; of the weights nothing is read yet, the scales are."""
        return Expert(*(self.linear(layer, expert, projection) for projection in PROJECTIONS))

    def linear(self, layer: int, expert: int, projection: str) -> Matrix:
        """One of an expert's linears: "gate" and "up" (I, H), "down" (H, I)."""
        moe = self.found[layer]
        style = moe.stored.style
        stored = self._matrix(moe, _part(style, projection), expert)
        if not isinstance(style, Fused) or projection == "down":
            return stored
        second = int(projection == "up")
        if style.interleaved:
            return stored.every_other(second)
        return stored.rows(second * moe.width, (second + 1) * moe.width)

    def weight(self, layer: int, expert: int, projection: str) -> TensorInfo:
        """The tensor, whole, in which this linear is stored."""
        stored = self.found[layer].stored
        part = _part(stored.style, projection)
        return stored.weights[part, expert if isinstance(stored.style, Separate) else -1]

    def expert_tensors(self, layer: int, expert: int) -> tuple[TensorInfo, ...]:
        """The bytes of one expert's weights and scales; of a 3-D tensor only this expert's part."""
        stored = self.found[layer].stored
        out: list[TensorInfo] = []
        for part in stored.style.parts:
            for tensors in (stored.weights, stored.scales):
                if (info := tensors.get((part, expert))) is not None:
                    out.append(info)
                elif (info := tensors.get((part, -1))) is not None:
                    out.append(_one(info, expert))
        return tuple(out)

    def layer_tensors(self, layer: int) -> tuple[TensorInfo, ...]:
        """Every expert tensor of a layer, scales included, each whole, in the order of their names."""
        stored = self.found[layer].stored
        return tuple(sorted((*stored.weights.values(), *stored.scales.values()), key=lambda t: t.name))

    def expert_tensor_names(self) -> set[str]:
        """Every routed-expert tensor of the converted layers, with scales and what else hangs on them; not MTP."""
        names: set[str] = set()
        for moe in self.found.values():
            names.update(t.name for t in (*moe.stored.weights.values(), *moe.stored.scales.values()))
            names.update(moe.stored.aside)
        return names

    def _matrix(self, moe: MoeLayer, part: str, expert: int) -> Matrix:
        key = part, expert if isinstance(moe.stored.style, Separate) else -1
        weight, scale = moe.stored.weights[key], moe.stored.scales.get(key)
        values = self.source.view(weight if key[1] >= 0 else _one(weight, expert))
        if not values.flags.aligned:
            values = values.copy()
        matrix = Matrix(values, KINDS[weight.dtype])
        if scale is not None:
            shape, block = scales.grid(weight, scale, self.blocks, moe.input_major)
            one = scale if key[1] >= 0 else _one(scale, expert)
            matrix = replace(matrix, scales=scales.read(self.source, one, shape), block=block)
        return matrix.T if moe.input_major else matrix


def recognise(source: TensorSource, archs: Sequence[Arch] = ARCHS) -> MoeModel:
    """Finds the experts of a checkpoint, by headers alone.

    Raises UnsupportedError for a model that cannot be represented, InputError for one that is incomplete or whose
    tensors and config disagree; both name the file and the tensor.
    """
    try:
        return _recognise(source, archs)
    except (InputError, UnsupportedError) as e:
        named = re.search(r"tensors? '([^']+)'", str(e))
        info = source.tensors.get(named[1]) if named else None
        raise type(e)(f"{source.shards[info.shard].path if info else source.root}: {e}") from None


def _recognise(source: TensorSource, archs: Sequence[Arch]) -> MoeModel:
    arch = _row(source, archs)
    notes: list[str] = []
    if arch is not None and arch.refusal is not None:
        raise UnsupportedError(f"{arch.name}: {arch.refusal}")
    seen = scan(source.tensors, arch.stored if arch else ())
    if not seen.layers and not seen.foreign:
        arch, seen = _generic(source, archs, arch, notes)
    assert arch is not None
    limit = cfg.number(source.config, arch.layers)
    refuse_formats((kind, name) for (kind, n), name in seen.foreign.items() if limit is None or n < limit[1])
    prefix, layers, mtp = _converted(seen, limit)
    stored = {n: seen.layers[prefix, n] for n in layers}
    refuse_dtypes(stored.values())
    refuse_strays(seen, prefix, mtp)
    refuse_gaps(seen, stored[layers[0]].style, prefix, layers, limit[1] if limit else 0)
    blocks = tuple(cfg.scale_blocks(source.config))
    most = 1 + max((expert for layer in stored.values() for _, expert in layer.weights), default=0)
    found = {n: measure(source.config, arch, layer, prefix, n, blocks, most) for n, layer in stored.items()}
    mtp_names = frozenset(seen.mtp) | {t for n in mtp for t in _names(seen.layers[prefix, n])}
    if seen.others:
        notes.append(f"{len(seen.others)} tensors of other experts, such as {seen.others[0]}, are not converted.")
    of_amx: list[str] = []
    if mtp_names:
        which = f"layer {', '.join(map(str, mtp))}" if mtp else "blocks called mtp"
        of_amx.append(f"The experts of the MTP part ({which}) are left out: kt-kernel does not load them.")
    activation, weights_on = _activation(source, arch), arch.weights_on
    if activation != "silu" or weights_on != "output":
        where = "" if weights_on == "output" else ", with routing weights on their input"
        of_amx.append(
            f"The experts of {arch.name} compute {ACTIVATIONS.get(activation, activation)}{where}; kt-kernel's AMXINT4 "
            "and AMXINT8 would compute something else, silu(gate) * up with routing weights on the output: "
            f"{arch.instead}."
        )
    return MoeModel(
        arch=arch,
        source=source,
        layers=tuple(layers),
        mtp_layers=tuple(mtp),
        mtp_tensors=mtp_names,
        dtypes=tuple(sorted({w.dtype for m in found.values() for w in m.stored.weights.values()})),
        has_shared_experts=seen.shared,
        activation=activation,
        weights_on=weights_on,
        notes=(*notes, *of_amx),
        common_notes=tuple(notes),
        blocks=blocks,
        found=found,
    )


def _row(source: TensorSource, archs: Sequence[Arch]) -> Arch | None:
    """The first row that the config names; a row that names no family is for any checkpoint."""
    names = cfg.families(source.config)
    anyones = (arch for arch in archs if not arch.matches)
    named = (arch for name in names for arch in archs if name in arch.matches)
    return next(anyones, None) or next(named, None)


def _generic(source: TensorSource, archs: Sequence[Arch], known: Arch | None, notes: list[str]) -> tuple[Arch, Scan]:
    """An unknown family is converted if its experts are stored in exactly one way that some row knows."""
    styles: dict[Style, Arch] = {}
    for arch in archs:
        for style in arch.stored if arch.refusal is None else ():
            styles.setdefault(style, arch)
    seen = scan(source.tensors, styles)
    hits = list(dict.fromkeys(layer.style for layer in seen.layers.values()))
    called = ", ".join(cfg.families(source.config)) or "a model without a config"
    if len(hits) > 1:
        ways = "; ".join(" + ".join(getattr(style, p) for p in style.parts) for style in hits)
        raise UnsupportedError(f"{called}: experts of several forms ({ways}); choose with --arch-file")
    if not hits and not seen.foreign:
        if not any("expert" in name for name in source.tensors):
            raise UnsupportedError(f"{called}: a dense model, it has no experts to convert")
        rows = ", ".join(arch.name for arch in archs if arch.refusal is None)
        raise UnsupportedError(
            f"{called}: its experts are not stored as any known family's; known are: {rows}. "
            "If they are gate, up and down matrices, describe them with --arch-file"
        )
    if known is not None or not hits:
        return known or Arch(called, ()), seen
    notes.append(
        f"{called} is not in the table of architectures; its experts are stored as those of {styles[hits[0]].name}, "
        "and are taken to compute silu(gate) * up with routing weights on the output."
    )
    return Arch(called, (), (hits[0],)), seen


def _converted(seen: Scan, limit: tuple[str, int] | None) -> tuple[str, list[int], list[int]]:
    """The prefix of the language model, the layers to convert, and the MTP layers."""
    prefixes = sorted({prefix for prefix, _ in seen.layers})
    if len(prefixes) != 1:
        shown = ", ".join(repr(p) for p in prefixes)
        raise UnsupportedError(f"has experts under several prefixes ({shown}); choose one with --arch-file")
    numbers = sorted(n for _, n in seen.layers)
    if limit is None:
        return prefixes[0], numbers, []
    layers = [n for n in numbers if n < limit[1]]
    if not layers:
        first = next(iter(_names(seen.layers[prefixes[0], numbers[0]])))
        raise InputError(
            f"tensor {first!r}: config.json says {limit[0]} = {limit[1]}, yet no layer below it has experts"
        )
    return prefixes[0], layers, [n for n in numbers if n >= limit[1]]


def _names(layer: Layer) -> Iterable[str]:
    return [*(t.name for t in (*layer.weights.values(), *layer.scales.values())), *layer.aside]


def _part(style: Style, projection: str) -> str:
    """Which of the style's tensors holds this projection."""
    return "gate_up" if isinstance(style, Fused) and projection != "down" else projection


def _one(info: TensorInfo, expert: int) -> TensorInfo:
    """One expert's part of a tensor that holds all of them."""
    each = info.nbytes // info.shape[0]
    return replace(info, shape=info.shape[1:], start=info.start + expert * each, nbytes=each)


def _activation(source: TensorSource, arch: Arch) -> str:
    """What the config says, where it says anything, else what the row says."""
    limit = cfg.find(source.config, ("swiglu_limit", "swiglu_limits"))
    if limit is not None and arch.activation in ("silu", "swiglu_limit"):
        clamps = any(limit[1]) if isinstance(limit[1], list) else bool(limit[1])
        return "swiglu_limit" if clamps else "silu"
    said = cfg.find(source.config, ("hidden_act", "hidden_activation"))
    if arch.activation != "silu" or said is None or not isinstance(said[1], str):
        return arch.activation
    return "silu" if said[1].lower() in PLAIN_ACTIVATIONS else said[1]
