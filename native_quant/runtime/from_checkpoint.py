"""The experts of a checkpoint as it was released: cut into NUMA slices, in the kernels' order, layer by layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.archs import ACTIVATIONS
from ktconvert.layouts.checkpoints.containers import CONTAINERS, GGUF
from ktconvert.layouts.checkpoints.moe_model import MoeModel, matrix_name, recognise
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.encoding import explain_size
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError, bad_tensor
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMATS, gpu_card
from ktconvert.layouts.outputs.card import format_ranges
from ktconvert.layouts.outputs.format import COUNTS
from ktconvert.layouts.outputs.linear_names import NATIVE
from ktconvert.layouts.outputs.opening import is_output
from ktconvert.layouts.outputs.output import AGAIN
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import kernels, machine
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.native_quant.matrix import FP8_E4M3, INT4, INT4_WORDS, decode
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.converted import Converted, open_converted
from ktconvert.native_quant.runtime.methods import ALPHA, LIMIT, METHODS, PLAIN, Method, Swiglu, in_config
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.stored_parts import StoredPart
from ktconvert.quantizers.reference import bf16_to_f32


@dataclass(frozen=True)
class Checkpoint:
    """The directory of a checkpoint, opened."""

    path: Path
    model: MoeModel
    damage: tuple[()] = ()  # one with a file that cannot be read is refused when it is opened

    @property
    def layers(self) -> list[int]:
        return list(self.model.layers)

    @property
    def config(self) -> dict[str, Any]:
        return self.model.source.config

    def shape_of(self, layer: int) -> tuple[int, int, int]:
        return self.model.shape(layer)

    def swiglu_of(self, layer: int) -> Swiglu:
        """What a layer's experts compute by config.json, as far as their method can."""
        if layer not in self.model.moe_layers:
            return PLAIN
        return self.rows_of(layer)["gate"].swiglu_of(self.config, self.model.activation, layer)

    def require_computable(self) -> None:
        """Raises UnsupportedError unless each layer's experts can be computed as they are stored; no weight is read."""
        for layer in self.layers:
            self._require_activation(layer, self.rows_of(layer)["gate"], self.swiglu_of(layer))

    def require_readable(self, layer: int) -> None:
        """As `damage`."""

    def linears(self, packed: weights.LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        """Gate, up and down of an expert, decoded to BF16 by the readers of checkpoints."""
        each = (self.model.linear(packed.slicing.layer, expert, projection) for projection in PROJECTIONS)
        gate, up, down = (bf16_to_f32(decode(linear)) for linear in each)
        yield gate, up, down

    def load(self, layer: int, pool: Pool, required: weights.Requirements) -> weights.LayerWeights:
        """One layer in so many NUMA slices (None: one for each of the pool's nodes if that divides weights, else 1);
        no number changes. Raises UnsupportedError where it is not as required, or computes something else, InputError
        where it is damaged.
        """
        with _remedies(self.path):
            model = self.model
            if layer not in model.moe_layers:
                has = f"holds no experts in layer {layer}, but in {format_ranges(self.layers)}"
                raise UnsupportedError(f"{self.path}: {has}; give one of these.")
            rows = self.rows_of(layer, required.method)
            method = rows["gate"]
            count, h, i = model.shape(layer)
            required.require(self.path, layer, "tensors", (count, h, i))
            self._require_activation(layer, method, required.swiglu)
            slicing = _grid(self.path, rows, Slicing(layer, h, i), required.parts, len(pool.nodes))
            needed = [0] * slicing.numa
            for part in slicing.all_slices(range(count)):
                tensors = rows[part.projection].tensors(part.n, part.k)
                needed[part.node] += sum(tensor.nbytes for tensor in tensors) * len(model.layers)
            weights.warn_of_shortages(str(self.path), needed, pool.nodes, machine.node_memory_available())

            def writer(expert: int, projection: str) -> Callable[[NumaSlice, Sequence[Bytes]], None]:
                linear, stored = model.linear(layer, expert, projection), model.weight(layer, expert, projection)

                def write(part: NumaSlice, out: Sequence[Bytes]) -> None:
                    try:
                        of_part = StoredPart(part.cut(linear), model.source, stored.linear_tensors(expert))
                        rows[projection].put(of_part, out)
                    except kernels.NonFinite as bad:
                        where = f"row {bad.row} of NUMA slice {part.node} of expert {expert}"
                        what, path = f": {where} holds a number that is not finite", model.source.path(stored.values)
                        raise bad_tensor(stored.values.name, what, path=path) from None

                return write

            packed = weights.fill(rows, slicing, count, writer, pool)
            for info in model.layer_tensors(layer):
                model.source.release(info)
            return packed

    def rows_of(self, layer: int, required: str | None = None) -> dict[str, Method]:
        """The method's row for each projection. UnsupportedError: none computes what is stored, or not the required."""
        moe = self.model.moe_layers[layer]
        fitting = next((rows for method in METHODS.values() if (rows := _rows(method, moe)) is not None), None)
        if fitting and required in (None, fitting["gate"].name):
            return fitting
        stored = " and ".join(dict.fromkeys(_described(weight, moe) for weight in moe.weights.values()))
        if fitting:
            name = fitting["gate"].name
            which = f"method {name} computes, not {required}; give method {name}, or convert with `ktconvert cpu`."
        else:
            neither = f", {required} neither" if required else ""
            which = f"no method of this runtime computes{neither}; convert the model with `ktconvert cpu`."
        raise UnsupportedError(f"{self.path}: the experts of layer {layer} are {stored}, which {which}")

    def _require_activation(self, layer: int, method: Method, swiglu: Swiglu) -> None:
        """Raises UnsupportedError where config.json or the shards of an output say otherwise than these settings."""
        model = self.model
        configured = in_config(model.source.config, model.activation, layer)
        what, remedy = "", "keep them on the GPU"
        facts, given = _facts(self.path) or {}, swiglu.activation
        if configured is None and facts.get("activation", given) != given:
            differ = f"its manifest says activation {facts['activation']}, these settings say {given}"
            remedy = "give swiglu_limit and swiglu_alpha as config.json of the model has them"
            raise UnsupportedError(f"{self.path}: {differ}; {remedy}.")
        if model.weights_on != "output":
            what = "multiply routing weights with their input"
        elif model.activation == "swiglu_oai":
            if configured != swiglu:
                what = f"compute {ACTIVATIONS[model.activation]}"
                remedy = f"give {configured}" if configured and ALPHA in method.swiglu else remedy
        elif model.activation not in ("silu", "swiglu_limit"):
            what = f"compute {ACTIVATIONS[model.activation]}"
        elif configured is not None and configured != swiglu:
            what = f"clamp gate and up to {configured.limit}" if configured.limit else "clamp nothing"
            remedy = f"give {configured}" if LIMIT in method.swiglu else remedy
        if what:
            raise UnsupportedError(
                f"{self.path}: the experts of layer {layer} {what}; method {method.name} computes silu(gate) * up with "
                f"routing weights on the output, unless set otherwise; {remedy}."
            )
        if facts:
            open_converted(self.path).require_metadata(layer, swiglu)


def _rows(method: Method, layer: MoeLayer) -> dict[str, Method] | None:
    """The row of a method for each projection; None where it does not compute the weights of all as they are stored."""
    rows = {}
    for projection in PROJECTIONS:
        stored = [weight for (part, _), weight in layer.weights.items() if part == matrix_name(layer.style, projection)]
        row = next((row for row in method.rows if all(row.computes(weight, layer) for weight in stored)), None)
        if row is None:
            return None
        rows[projection] = row
    return rows


def _described(weight: Weight, layer: MoeLayer) -> str:
    fit, kind = weight.fit(layer.input_major), weight.encoding.kind
    details = ""
    if kind == FP8_E4M3:
        details = f" with a scale for each {fit[0]} x {fit[1]}"
    elif kind in (INT4, INT4_WORDS):
        details = f" with {', '.join(_of_integers(weight, fit[1]))}"
    turned = ", stored by columns" if layer.input_major else ""
    return f"{weight.encoding.title}{details}{turned}"


def _of_integers(weight: Weight, group: int) -> list[str]:
    """What decides which method computes them, as config.json and the tensors call it."""
    said, scale = weight.quantization, next(t for role, t in weight.tensors.items() if role.startswith("scale"))
    fields = [f"group_size {group}", f"scales in {scale.dtype}"]
    if weight.encoding.kind is INT4:
        fields += [f"a {role}" for role in ("zero_point", "g_idx") if role in weight.tensors]
    return [*fields, *["sym false"] * (False in said.symmetric), *["desc_act true"] * (True in said.ordered)]


def _grid(path: Path, rows: dict[str, Method], whole: Slicing, required: int | None, nodes: int) -> Slicing:
    """`whole` in NUMA slices. Raises UnsupportedError where the weights cannot be cut into the required number."""
    name, multiple = rows["gate"].name, max(row.multiple for row in rows.values())
    unit = rows["gate"].unit and (multiple if whole.intermediate % rows["gate"].unit else rows["gate"].unit)

    def reason(parts: int) -> str | None:
        why = explain_size(multiple, whole.hidden, whole.intermediate, 1 if unit and parts > 0 else parts)
        if not why and unit and parts * unit > whole.intermediate:
            units = whole.intermediate // unit
            return f"the intermediate size {whole.intermediate} has {units} units of {unit} columns"
        return why

    parts = required if required is not None else 1 if reason(nodes) else nodes
    if why := reason(parts):
        legal = ", ".join(str(count) for count in COUNTS if not reason(count)) or "none"
        problem = f"method {name} cannot compute it in {parts} NUMA slices: {why}"
        raise UnsupportedError(f"{path}: {problem}. Legal numbers of slices (threadpool_count): {legal}.")
    return replace(whole, numa=parts, multiple=unit)


def is_checkpoint(path: Path) -> bool:
    """Whether it is a GGUF file, or a directory of safetensors or GGUF that is no output for NUMA slices."""
    if not path.is_dir():
        return path.suffix == GGUF.suffix
    return _is_checkpoint_at(path.resolve(), weights.contents(path))


@functools.lru_cache(maxsize=64)
def _is_checkpoint_at(path: Path, as_it_is: frozenset[weights.Status]) -> bool:
    if not any(any(path.glob(f"*{container.suffix}")) for container in CONTAINERS):
        return False
    return not is_output(path) or _facts(path) is not None


def _facts(path: Path) -> Mapping[str, Any] | None:
    """The facts of the manifest of an output that is a checkpoint for us; None for any other directory."""
    try:
        about = manifest.read(path) if path.is_dir() else None
    except VerificationError:
        return None  # not our manifest.json, or damaged
    fmt = FORMATS.get(str(about.model.get("method"))) if about else None
    if about is None or fmt is None or not (fmt.arrangement == NATIVE or gpu_card.is_rawint4(about.model)):
        return None
    return about.model


def open_stored(path: Path) -> Checkpoint:
    """A checkpoint, read again only if a file of it changes."""
    if not path.exists():
        raise InputError(f"{path}: does not exist; give a directory of experts or a GGUF file.")
    place = path.resolve() if path.is_dir() else path.parent.resolve() / path.name  # a link may lead to any name
    with _remedies(path):
        return Checkpoint(path, _opened(place, weights.contents(path)))


@functools.lru_cache(maxsize=4)
def _opened(path: Path, as_it_is: frozenset[weights.Status]) -> MoeModel:
    source = open_checkpoint(path)
    source.require_one_reading()
    model = recognise(source)
    if _facts(path) is not None:
        open_converted(path).require_manifest()
    return model


@contextlib.contextmanager
def _remedies(path: Path) -> Iterator[None]:
    """What ktconvert wrote was not downloaded: messages on its damage advise another conversion."""
    try:
        yield
    except InputError as error:
        if not error.remedy or _facts(path) is None:
            raise
        raise error.with_remedy(AGAIN) from error


def open_experts(path: Path) -> Converted | Checkpoint:
    """A directory of experts, or a GGUF file. Raises InputError for damaged files, UnsupportedError for no experts."""
    return open_stored(path) if is_checkpoint(path) else open_converted(path)
