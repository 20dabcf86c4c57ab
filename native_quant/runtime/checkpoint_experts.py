"""Experts of a checkpoint as it was released, cut into NUMA slices in the kernels' order, layer by layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction, states_constants
from ktconvert.layouts.checkpoints.moe_model import MoeModel, matrix_name
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.encoding import explain_size
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError, absent_path, bad_tensor
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.format import USUAL_COUNTS
from ktconvert.layouts.outputs.linear_names import NATIVE, is_rawint4
from ktconvert.layouts.outputs.opening import is_output
from ktconvert.layouts.outputs.output import CONVERT_AGAIN
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.sources.containers import CONTAINERS, GGUF
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.tensors import format_ranges, list_projections
from ktconvert.native_quant import kernels, machine
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.native_quant.matrix import FP8_E4M3, INT4, INT4_WORDS, decode
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.converted_experts import open_converted
from ktconvert.native_quant.runtime.expert_source import (
    ExpertSource,
    FileStatus,
    LoadedFiles,
    Requirements,
    directory_state,
)
from ktconvert.native_quant.runtime.methods import METHODS, Method
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.stored_slices import StoredSlice
from ktconvert.quantizers.reference import bf16_to_f32

# Callers are in Python or on the command line, and only conversions read a description of experts.
CONVERT_WITH_ROW = (
    "convert it with ktconvert.convert(..., arch_file=FILE), or `ktconvert cpu --arch-file FILE`, where FILE describes "
    "the experts, and load the output"
)


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

    def function(self, layer: int) -> ExpertFunction | None:
        function = self.model.functions.get(layer)
        return None if function == PLAIN and not states_constants(self.config) else function

    def require_computable(self) -> None:
        for layer in self.layers:
            self.select_rows(layer)

    def require_readable(self, layer: int) -> None:
        pass  # checked when the checkpoint was opened

    def linears(self, packed: weights.LayerWeights, expert: int) -> Iterator[tuple[F32, ...]]:
        """Yield the linears of an expert, decoded to BF16 by the readers of checkpoints."""
        projections = packed.slicing.projections
        stored = (self.model.linear(packed.slicing.layer, expert, projection) for projection in projections)
        yield tuple(bf16_to_f32(decode(linear)) for linear in stored)

    def load(self, layer: int, pool: Pool, required: Requirements) -> weights.LayerWeights:
        """Load a layer in required.slices NUMA slices; no weight changes.

        None: one slice for each of the pool's nodes if that divides the weights, else 1. Raises UnsupportedError if the
        layer does not meet the requirements or has a different computation, InputError if it is damaged.
        """
        with _advise_conversion(self.path):
            model = self.model
            if layer not in model.moe_layers:
                contents = f"has no experts in layer {layer}, but in {format_ranges(self.layers)}"
                raise UnsupportedError(f"{self.path}: {contents}; give one of these.")
            rows = self.select_rows(layer, required.method)
            count, h, i = model.shape(layer)
            required.check(self.path, layer, "tensors", (count, h, i))
            if _read_native_output(self.path) is not None:
                open_converted(self.path).require_metadata(layer)
            missing = required.find_missing(count)
            whole = Slicing(layer, h, i, gated=model.is_gated)
            slicing = divide_experts(self.path, rows, whole, required.slices, len(pool.nodes))
            slice_bytes = [0] * slicing.numa
            for numa_slice in slicing.all_slices(set(range(count)) - missing):
                tensors = rows[numa_slice.projection].tensors(numa_slice.n, numa_slice.k)
                slice_bytes[numa_slice.node] += sum(tensor.nbytes for tensor in tensors) * len(model.layers)
            weights.warn_of_shortages(str(self.path), slice_bytes, pool.nodes, machine.node_memory_available())

            def make_writer(expert: int, projection: str) -> weights.WriteSlice:
                linear = model.linear(layer, expert, projection)
                stored = model.weight(layer, expert, projection)

                def write(numa_slice: NumaSlice, out: Sequence[Bytes]) -> None:
                    try:
                        tensors = stored.linear_tensors(expert)
                        stored_slice = StoredSlice(numa_slice.cut_linear(linear), model.source, tensors)
                        rows[projection].write_slice(stored_slice, out)
                    except kernels.NonFinite as error:
                        position = f"row {error.row} of NUMA slice {numa_slice.node} of expert {expert}"
                        problem = f": {position} contains a number that is not finite"
                        path = model.source.path(stored.values_tensor)
                        raise bad_tensor(stored.values_tensor.name, problem, path=path) from None

                return write

            files = LoadedFiles(layer, map(model.source.path, model.layer_tensors(layer) if missing else ()))

            @contextlib.contextmanager
            def open_files() -> Iterator[None]:
                files.require_unchanged()
                with _advise_conversion(self.path):
                    yield
                for info in model.layer_tensors(layer):
                    model.source.release(info)

            packed = weights.fill_layer(rows, slicing, count, make_writer, pool, missing, open_files)
            biases = weights.cut_biases(slicing, count, functools.partial(model.bias, layer))
            return replace(packed, biases=biases)

    def select_rows(self, layer: int, required: str | None = None) -> dict[str, Method]:
        """Return the row of the method for each projection of a layer.

        Raises UnsupportedError if no method, or not the required one, computes the stored weights.
        """
        moe = self.model.moe_layers[layer]
        matching = next((rows for method in METHODS.values() if (rows := _match_rows(method, moe)) is not None), None)
        if matching and required in (None, matching["up"].name):
            return matching
        stored = " and ".join(dict.fromkeys(_describe_weight(weight, moe) for weight in moe.weights.values()))
        if matching:
            name = matching["up"].name
            reason = f"method {name} computes, not {required}; give method {name}, or convert with `ktconvert cpu`."
        else:
            nor_required = f", and neither does {required}" if required else ""
            reason = f"no method of this runtime computes{nor_required}; convert the model with `ktconvert cpu`."
        raise UnsupportedError(f"{self.path}: the experts of layer {layer} are {stored}, which {reason}")


def _match_rows(method: Method, layer: MoeLayer) -> dict[str, Method] | None:
    """Return the row of a method for each projection; None if it cannot compute one of them as stored."""
    rows = {}
    for projection in list_projections(layer.style.gated):
        stored = [weight for (name, _), weight in layer.kinds.items() if name == matrix_name(layer.style, projection)]
        row = next((row for row in method.all_rows if all(row.can_compute(weight, layer) for weight in stored)), None)
        if row is None:
            return None
        rows[projection] = row
    return rows


def _describe_weight(weight: Weight, layer: MoeLayer) -> str:
    fit = weight.resolve_scheme(layer.input_major)
    kind = weight.encoding.kind
    details = ""
    if kind == FP8_E4M3:
        details = f" with a scale for each {fit[0]} x {fit[1]}"
    elif kind in (INT4, INT4_WORDS):
        details = f" with {', '.join(_describe_integers(weight, fit[1]))}"
    order = ", stored by columns" if layer.input_major else ""
    return f"{weight.encoding.title}{details}{order}"


def _describe_integers(weight: Weight, group: int) -> list[str]:
    """Describe the properties of integers that decide which method computes them, in the words of config.json."""
    quantization = weight.quantization
    scale = next(t for role, t in weight.tensors.items() if role.startswith("scale"))
    fields = [f"group_size {group}", f"scales in {scale.dtype}"]
    if weight.encoding.kind is INT4:
        fields += [f"a {role}" for role in ("zero_point", "g_idx") if role in weight.tensors]
    return [
        *fields,
        *["sym false"] * (False in quantization.symmetric),
        *["desc_act true"] * (True in quantization.ordered),
    ]


def divide_experts(path: Path, rows: dict[str, Method], whole: Slicing, required: int | None, nodes: int) -> Slicing:
    """Divide the experts into NUMA slices. Raises UnsupportedError if the required number is impossible."""
    name = rows["up"].name
    multiple = max(row.multiple for row in rows.values())
    unit = rows["up"].preferred_multiple and (
        multiple if whole.intermediate % rows["up"].preferred_multiple else rows["up"].preferred_multiple
    )

    def explain(count: int) -> str | None:
        problem = explain_size(multiple, whole.hidden, whole.intermediate, 1 if unit and count > 0 else count)
        if not problem and unit and count * unit > whole.intermediate:
            units = whole.intermediate // unit
            return f"the intermediate size {whole.intermediate} has {units} units of {unit} columns"
        return problem

    count = required if required is not None else 1 if explain(nodes) else nodes
    if problem := explain(count):
        legal = ", ".join(str(legal_count) for legal_count in USUAL_COUNTS if not explain(legal_count)) or "none"
        problem = f"method {name} cannot compute it in {count} NUMA slices: {problem}"
        raise UnsupportedError(f"{path}: {problem}. Legal values of parts (threadpool_count): {legal}.")
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
        document = manifest.read_manifest(path) if path.is_dir() else None
    except VerificationError:
        return None  # not our manifest.json, or damaged
    fmt = FORMATS.get(str(document.model.get("method"))) if document else None
    if document is None or fmt is None or not (fmt.arrangement == NATIVE or is_rawint4(document.facts)):
        return None
    return document.facts


def open_checkpoint_experts(path: Path) -> CheckpointExperts:
    """Open a checkpoint. Reads its headers again only if a file has changed."""
    if not path.exists():
        raise absent_path(path, "give a directory of experts or a GGUF file")
    place = path.resolve() if path.is_dir() else path.parent.resolve() / path.name  # a link may point to any name
    with _advise_conversion(path):
        return CheckpointExperts(path, _open_model(place, directory_state(path)))


@functools.lru_cache(maxsize=4)
def _open_model(path: Path, state: frozenset[FileStatus]) -> MoeModel:
    source = open_checkpoint(path)
    source.require_one_reading()
    model = recognize(source)
    if _read_native_output(path) is not None:
        open_converted(path).require_manifest()
    return model


@contextlib.contextmanager
def _advise_conversion(path: Path) -> Iterator[None]:
    """Replace remedies: convert an output of ktconvert again, and describe a model's experts when it is converted."""
    try:
        yield
    except (InputError, UnsupportedError) as error:
        if "--arch-file" in error.remedy:
            raise error.with_remedy(CONVERT_WITH_ROW) from error
        if not error.remedy or not isinstance(error, InputError) or _read_native_output(path) is None:
            raise
        raise error.with_remedy(CONVERT_AGAIN) from error
