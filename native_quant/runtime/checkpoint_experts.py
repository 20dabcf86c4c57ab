"""Experts of a checkpoint as it was released, cut into NUMA slices in the kernels' order, layer by layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.archs import ACTIVATIONS
from ktconvert.layouts.checkpoints.containers import CONTAINERS, GGUF
from ktconvert.layouts.checkpoints.moe_model import MoeModel, matrix_name
from ktconvert.layouts.checkpoints.recognition import recognise
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.encoding import explain_size
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError, bad_tensor
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.format import COUNTS
from ktconvert.layouts.outputs.linear_names import NATIVE, is_rawint4
from ktconvert.layouts.outputs.opening import is_output
from ktconvert.layouts.outputs.output import AGAIN
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS, format_ranges
from ktconvert.native_quant import kernels, machine
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.native_quant.matrix import FP8_E4M3, INT4, INT4_WORDS, decode
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.converted_experts import open_converted
from ktconvert.native_quant.runtime.expert_source import ExpertSource, FileStatus, Requirements, directory_state
from ktconvert.native_quant.runtime.methods import METHODS, Method
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.stored_slices import StoredSlice
from ktconvert.native_quant.runtime.swiglu import ALPHA, LIMIT, PLAIN, Swiglu, read_swiglu
from ktconvert.quantizers.reference import bf16_to_f32


@dataclass(frozen=True)
class CheckpointExperts(ExpertSource):
    """A checkpoint in a directory or a GGUF file."""

    path: Path
    model: MoeModel

    @property
    def layers(self) -> list[int]:
        return list(self.model.layers)

    @property
    def config(self) -> dict[str, Any]:
        return self.model.source.config

    @property
    def damage(self) -> list[str]:
        return []  # opening refuses a checkpoint with an unreadable file

    def shape(self, layer: int) -> tuple[int, int, int]:
        return self.model.shape(layer)

    def swiglu(self, layer: int) -> Swiglu:
        if layer not in self.model.moe_layers:
            return PLAIN
        return self.select_rows(layer)["gate"].get_swiglu(self.config, self.model.activation, layer)

    def require_computable(self) -> None:
        for layer in self.layers:
            self._require_activation(layer, self.select_rows(layer)["gate"], self.swiglu(layer))

    def require_readable(self, layer: int) -> None:
        pass  # checked when the checkpoint was opened

    def linears(self, packed: weights.LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        """Yield gate, up and down of an expert, decoded to BF16 by the readers of checkpoints."""
        each = (self.model.linear(packed.slicing.layer, expert, projection) for projection in PROJECTIONS)
        gate, up, down = (bf16_to_f32(decode(linear)) for linear in each)
        yield gate, up, down

    def load(self, layer: int, pool: Pool, required: Requirements) -> weights.LayerWeights:
        """Load a layer in required.parts NUMA slices; no weight changes.

        None: one slice for each of the pool's nodes if that divides the weights, else 1. Raises UnsupportedError if the
        layer does not meet the requirements or has a different computation, InputError if it is damaged.
        """
        with _advise_conversion(self.path):
            model = self.model
            if layer not in model.moe_layers:
                has = f"has no experts in layer {layer}, but in {format_ranges(self.layers)}"
                raise UnsupportedError(f"{self.path}: {has}; give one of these.")
            rows = self.select_rows(layer, required.method)
            method = rows["gate"]
            count, h, i = model.shape(layer)
            required.check(self.path, layer, "tensors", (count, h, i))
            self._require_activation(layer, method, required.swiglu)
            slicing = _divide(self.path, rows, Slicing(layer, h, i), required.parts, len(pool.nodes))
            needed = [0] * slicing.numa
            for numa_slice in slicing.all_slices(range(count)):
                tensors = rows[numa_slice.projection].tensors(numa_slice.n, numa_slice.k)
                needed[numa_slice.node] += sum(tensor.nbytes for tensor in tensors) * len(model.layers)
            weights.warn_of_shortages(str(self.path), needed, pool.nodes, machine.node_memory_available())

            def make_writer(expert: int, projection: str) -> weights.WriteSlice:
                linear, stored = model.linear(layer, expert, projection), model.weight(layer, expert, projection)

                def write(numa_slice: NumaSlice, out: Sequence[Bytes]) -> None:
                    try:
                        tensors = stored.linear_tensors(expert)
                        rows[projection].write_slice(StoredSlice(numa_slice.cut(linear), model.source, tensors), out)
                    except kernels.NonFinite as bad:
                        where = f"row {bad.row} of NUMA slice {numa_slice.node} of expert {expert}"
                        what, path = f": {where} contains a number that is not finite", model.source.path(stored.values)
                        raise bad_tensor(stored.values.name, what, path=path) from None

                return write

            packed = weights.fill_layer(rows, slicing, count, make_writer, pool)
            for info in model.layer_tensors(layer):
                model.source.release(info)
            return packed

    def select_rows(self, layer: int, required: str | None = None) -> dict[str, Method]:
        """Return the row of the method for each projection of a layer.

        Raises UnsupportedError if no method, or not the required one, computes the stored weights.
        """
        moe = self.model.moe_layers[layer]
        matching = next((rows for method in METHODS.values() if (rows := _match_rows(method, moe)) is not None), None)
        if matching and required in (None, matching["gate"].name):
            return matching
        stored = " and ".join(dict.fromkeys(_describe_weight(weight, moe) for weight in moe.weights.values()))
        if matching:
            name = matching["gate"].name
            which = f"method {name} computes, not {required}; give method {name}, or convert with `ktconvert cpu`."
        else:
            named = f", and neither does {required}" if required else ""
            which = f"no method of this runtime computes{named}; convert the model with `ktconvert cpu`."
        raise UnsupportedError(f"{self.path}: the experts of layer {layer} are {stored}, which {which}")

    def _require_activation(self, layer: int, method: Method, swiglu: Swiglu) -> None:
        """Raise UnsupportedError if config.json or the shards of an output contradict these settings."""
        model = self.model
        configured = read_swiglu(model.source.config, model.activation, layer)
        what, remedy = "", "keep them on the GPU"
        recorded, given = _read_native_output(self.path) or {}, swiglu.activation
        if configured is None and recorded.get("activation", given) != given:
            differ = f"its manifest has activation {recorded['activation']}, but these settings {given}"
            remedy = "set swiglu_limit and swiglu_alpha to the values in the model's config.json"
            raise UnsupportedError(f"{self.path}: {differ}; {remedy}.")
        if model.weights_on != "output":
            what = "multiply routing weights with their input"
        elif model.activation == "swiglu_oai":
            if configured != swiglu:
                what = f"compute {ACTIVATIONS[model.activation]}"
                remedy = f"set {configured}" if configured and ALPHA in method.swiglu else remedy
        elif model.activation not in ("silu", "swiglu_limit"):
            what = f"compute {ACTIVATIONS[model.activation]}"
        elif configured is not None and configured != swiglu:
            what = f"clamp gate and up to {configured.limit}" if configured.limit else "clamp nothing"
            remedy = f"set {configured}" if LIMIT in method.swiglu else remedy
        if what:
            raise UnsupportedError(
                f"{self.path}: the experts of layer {layer} {what}; method {method.name} computes silu(gate) * up with "
                f"routing weights on the output, unless set otherwise; {remedy}."
            )
        if recorded:
            open_converted(self.path).require_metadata(layer, swiglu)


def _match_rows(method: Method, layer: MoeLayer) -> dict[str, Method] | None:
    """Return the row of a method for each projection; None if it cannot compute one of them as stored."""
    rows = {}
    for projection in PROJECTIONS:
        stored = [weight for (part, _), weight in layer.weights.items() if part == matrix_name(layer.style, projection)]
        row = next((row for row in method.rows if all(row.can_compute(weight, layer) for weight in stored)), None)
        if row is None:
            return None
        rows[projection] = row
    return rows


def _describe_weight(weight: Weight, layer: MoeLayer) -> str:
    fit, kind = weight.fit(layer.input_major), weight.encoding.kind
    details = ""
    if kind == FP8_E4M3:
        details = f" with a scale for each {fit[0]} x {fit[1]}"
    elif kind in (INT4, INT4_WORDS):
        details = f" with {', '.join(_describe_integers(weight, fit[1]))}"
    order = ", stored by columns" if layer.input_major else ""
    return f"{weight.encoding.title}{details}{order}"


def _describe_integers(weight: Weight, group: int) -> list[str]:
    """Describe the properties of integers that decide which method computes them, in the words of config.json."""
    said, scale = weight.quantization, next(t for role, t in weight.tensors.items() if role.startswith("scale"))
    fields = [f"group_size {group}", f"scales in {scale.dtype}"]
    if weight.encoding.kind is INT4:
        fields += [f"a {role}" for role in ("zero_point", "g_idx") if role in weight.tensors]
    return [*fields, *["sym false"] * (False in said.symmetric), *["desc_act true"] * (True in said.ordered)]


def _divide(path: Path, rows: dict[str, Method], whole: Slicing, required: int | None, nodes: int) -> Slicing:
    """Divide the experts into NUMA slices. Raises UnsupportedError if the required number is impossible."""
    name, multiple = rows["gate"].name, max(row.multiple for row in rows.values())
    unit = rows["gate"].unit and (multiple if whole.intermediate % rows["gate"].unit else rows["gate"].unit)

    def reason(count: int) -> str | None:
        why = explain_size(multiple, whole.hidden, whole.intermediate, 1 if unit and count > 0 else count)
        if not why and unit and count * unit > whole.intermediate:
            units = whole.intermediate // unit
            return f"the intermediate size {whole.intermediate} has {units} units of {unit} columns"
        return why

    count = required if required is not None else 1 if reason(nodes) else nodes
    if why := reason(count):
        legal = ", ".join(str(legal_count) for legal_count in COUNTS if not reason(legal_count)) or "none"
        problem = f"method {name} cannot compute it in {count} NUMA slices: {why}"
        raise UnsupportedError(f"{path}: {problem}. Legal numbers of slices (threadpool_count): {legal}.")
    return replace(whole, numa=count, multiple=unit)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a directory of safetensors or GGUF without converted NUMA slices."""
    if not path.is_dir():
        return path.suffix == GGUF.suffix
    return _is_checkpoint(path.resolve(), directory_state(path))


@functools.lru_cache(maxsize=64)
def _is_checkpoint(path: Path, state: frozenset[FileStatus]) -> bool:
    if not any(any(path.glob(f"*{container.suffix}")) for container in CONTAINERS):
        return False
    return not is_output(path) or _read_native_output(path) is not None


def _read_native_output(path: Path) -> Mapping[str, Any] | None:
    """Return the model settings in the manifest of an output in a checkpoint's format; None for other directories."""
    try:
        about = manifest.read(path) if path.is_dir() else None
    except VerificationError:
        return None  # not our manifest.json, or damaged
    fmt = FORMATS.get(str(about.model.get("method"))) if about else None
    if about is None or fmt is None or not (fmt.arrangement == NATIVE or is_rawint4(about.facts)):
        return None
    return about.facts


def open_checkpoint_experts(path: Path) -> CheckpointExperts:
    """Open a checkpoint. Reads its headers again only if a file has changed."""
    if not path.exists():
        raise InputError(f"{path}: does not exist; give a directory of experts or a GGUF file.")
    place = path.resolve() if path.is_dir() else path.parent.resolve() / path.name  # a link may point to any name
    with _advise_conversion(path):
        return CheckpointExperts(path, _open_model(place, directory_state(path)))


@functools.lru_cache(maxsize=4)
def _open_model(path: Path, state: frozenset[FileStatus]) -> MoeModel:
    source = open_checkpoint(path)
    source.require_one_reading()
    model = recognise(source)
    if _read_native_output(path) is not None:
        open_converted(path).require_manifest()
    return model


@contextlib.contextmanager
def _advise_conversion(path: Path) -> Iterator[None]:
    """Replace the remedy of errors in an output of ktconvert: convert again, instead of downloading again."""
    try:
        yield
    except InputError as error:
        if not error.remedy or _read_native_output(path) is None:
            raise
        raise error.with_remedy(AGAIN) from error
