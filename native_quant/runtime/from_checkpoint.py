"""The experts of a checkpoint as it was released, for kt-kernel's native methods: sliced into NUMA parts and put into
the order of the kernels while a layer is loaded. No number changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.archs import ACTIVATIONS
from ktconvert.layouts.checkpoints.encodings import Weight
from ktconvert.layouts.checkpoints.experts import MoeModel, recognise
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMS, LAYOUTS, PROJECTIONS
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.legal import COUNTS
from ktconvert.layouts.outputs.opening import is_output
from ktconvert.layouts.outputs.parts import ExpertGrid, why_illegal
from ktconvert.native_quant import kernels, machine
from ktconvert.native_quant.matrix import FP8_E4M3
from ktconvert.native_quant.runtime.blocks import blocks, warn_of_shortages
from ktconvert.native_quant.runtime.kt_methods import LIMITED, WITH_ALPHA, activation
from ktconvert.native_quant.runtime.native_methods import METHODS, Native, Stored
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.weights import LayerWeights, arrays_of, check_columns, check_wanted, in_parallel


def is_checkpoint(path: Path) -> bool:
    """Whether weights in safetensors lie in a directory that is no output for NUMA parts: a checkpoint as it was
    released, or what `ktconvert cpu --layout kt` made of one.
    """
    return path.is_dir() and _is_checkpoint_at(path.resolve(), path.stat().st_mtime_ns)


def load(
    path: Path,
    layer: int,
    pool: Pool,
    swiglu_limit: float = 0.0,
    swiglu_alpha: float = 0.0,
    *,
    method: str | None = None,
    experts: int | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    parts: int | None = None,
) -> LayerWeights:
    """One layer of a checkpoint in so many NUMA parts (None: one for each of the pool's nodes if that divides the
    weights, else 1), in the memory of the pool's nodes.

    method .. intermediate, unless None, must agree with the checkpoint. Raises UnsupportedError where they do not, or
    where the experts compute something else; InputError where tensors are missing, damaged or not finite.
    """
    model = _opened(path)
    if layer not in model.moe_layers:
        raise UnsupportedError(
            f"{path}: holds no experts in layer {layer}, but in {ranges(list(model.layers))}; give one of these."
        )
    native = _method_of(path, model, layer, method)
    count, h, i = model.shape(layer)
    wanted = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": intermediate}
    actual = {"num_experts": count, "hidden_size": h, "moe_intermediate_size": i}
    check_wanted(path, layer, actual, wanted, "tensors")
    _check_activation(path, model, layer, native, swiglu_limit, swiglu_alpha)
    grid = ExpertGrid(layer, h, i, _parts(path, native, h, i, parts, len(pool.nodes)))
    check_columns(native.name, grid)
    sizes = {
        (part, tensor.suffix): tensor.nbytes
        for part in grid.all_parts(range(count))
        for tensor in native.tensors(part.n, part.k)
    }
    of_part = sum(size for (part, _), size in sizes.items() if part.numa == 0) * len(model.layers)
    warn_of_shortages(str(path), [of_part] * grid.numa, pool.nodes, machine.node_memory_available())

    def one(item: tuple[int, str]) -> None:
        expert, projection = item
        linear, stored = model.linear(layer, expert, projection), model.weight(layer, expert, projection)
        for part in grid.parts(expert, projection):
            try:
                native.write(Stored(part.of(linear, grid.numa), model.source, stored.one(expert)), arrays[part])
            except kernels.NonFinite as bad:
                info = stored.values
                raise InputError(
                    f"{model.source.shards[info.shard].path}: tensor {info.name!r}: row {bad.row} of NUMA part "
                    f"{part.numa} of expert {expert} holds a number that is not finite; download it again"
                ) from None

    with blocks(sizes, grid.numa, pool.nodes) as views:
        arrays = arrays_of(native, views)
        in_parallel(one, [(e, projection) for e in range(count) for projection in PROJECTIONS], pool.threads)
    for info in model.layer_tensors(layer):
        model.source.release(info)
    return LayerWeights(native, grid, count, arrays)


@functools.lru_cache(maxsize=64)
def _is_checkpoint_at(path: Path, mtime_ns: int) -> bool:
    return any(path.glob("*.safetensors")) and (not is_output(path) or _kt_layout(path) is not None)


def _kt_layout(path: Path) -> Mapping[str, Any] | None:
    """The facts of the manifest of an output of `ktconvert cpu --layout kt`; None for any other directory."""
    try:
        about = manifest.read(path)
    except VerificationError:
        return None  # not our manifest.json, or damaged
    form = FORMS.get(str(about["model"].get("method"))) if about else None
    return about["model"] if about and form and form.command == LAYOUTS["kt"] else None


def _opened(path: Path) -> MoeModel:
    """A checkpoint, read again only if the directory or a file of weights changes."""
    model = _opened_at(path.resolve(), path.stat().st_mtime_ns)
    if model.source.changed():
        _opened_at.cache_clear()
        model = _opened_at(path.resolve(), path.stat().st_mtime_ns)
    return model


@functools.lru_cache(maxsize=4)
def _opened_at(path: Path, mtime_ns: int) -> MoeModel:
    return recognise(open_checkpoint(path))


def _method_of(path: Path, model: MoeModel, layer: int, asked: str | None) -> Native:
    """The method that computes with a layer's weights as they are."""
    moe = model.moe_layers[layer]
    weights = list(moe.weights.values())
    fitting = [native for native in METHODS.values() if all(native.holds(weight, moe) for weight in weights)]
    if fitting and asked in (None, fitting[0].name):
        return fitting[0]
    stored = " and ".join(dict.fromkeys(_described(weight, moe) for weight in weights))
    if fitting:
        raise UnsupportedError(
            f"{path}: the experts of layer {layer} are {stored}, which method {fitting[0].name} computes, not {asked}; "
            f"give method {fitting[0].name}, or convert with `ktconvert cpu`."
        )
    raise UnsupportedError(
        f"{path}: the experts of layer {layer} are {stored}, which no method of this runtime computes"
        f"{f', {asked} neither' if asked else ''}; convert the model with `ktconvert cpu`."
    )


def _described(weight: Weight, layer: MoeLayer) -> str:
    block = weight.fit(layer.input_major)
    of_blocks = weight.encoding.kind == FP8_E4M3
    scaled = f" with a scale for each {block[0]} x {block[1]}" if of_blocks else ""
    turned = ", stored by columns" if layer.input_major else ""
    return f"{weight.encoding.title}{scaled}{turned}"


def _check_activation(path: Path, model: MoeModel, layer: int, native: Native, limit: float, alpha: float) -> None:
    """Raises UnsupportedError where config.json says that the experts compute something else than these settings do."""
    stated = cfg.find(model.source.config, ("swiglu_limit", "swiglu_limits"))
    clamp = stated[1] if stated else 0
    if isinstance(clamp, list):
        clamp = clamp[layer] if layer < len(clamp) else 0
    what, remedy = "", "keep them on the GPU"
    facts, given = _kt_layout(path) or {}, activation(limit, alpha)
    if facts.get("activation", given) != given:
        raise UnsupportedError(
            f"{path}: its manifest says activation {facts['activation']}, these settings say {given}; "
            "give swiglu_limit and swiglu_alpha as config.json of the model has them."
        )
    if model.weights_on != "output":
        what = "multiply routing weights with their input"
    elif model.activation == "swiglu_oai":
        if not alpha:
            what = f"compute {ACTIVATIONS[model.activation]}"
            remedy = "give swiglu_limit and swiglu_alpha" if native.name in WITH_ALPHA else remedy
    elif model.activation not in ("silu", "swiglu_limit"):
        what = f"compute {ACTIVATIONS.get(model.activation, model.activation)}"
    elif clamp and not limit:
        what = f"clamp gate and up to {clamp}"
        remedy = f"give swiglu_limit={clamp}" if native.name in LIMITED else remedy
    if what:
        raise UnsupportedError(
            f"{path}: the experts of layer {layer} {what}; method {native.name} computes silu(gate) * up with routing "
            f"weights on the output, unless told otherwise; {remedy}."
        )


def _parts(path: Path, native: Native, hidden: int, intermediate: int, asked: int | None, nodes: int) -> int:
    """The number of NUMA parts. Raises UnsupportedError where the weights cannot be cut into those asked for."""

    def reason(parts: int) -> str | None:
        return why_illegal(native.multiple, hidden, intermediate, parts)

    parts = asked if asked is not None else 1 if reason(nodes) else nodes
    if why := reason(parts):
        legal = ", ".join(str(count) for count in COUNTS if not reason(count)) or "none"
        raise UnsupportedError(
            f"{path}: method {native.name} cannot compute it in {parts} NUMA parts: {why}. Legal numbers of parts "
            f"(threadpool_count): {legal}."
        )
    return parts
