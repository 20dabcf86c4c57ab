"""Non-expert tensors that transformers loads: completeness, names and dtypes.

An output of `ktconvert cpu` may lack them, and names them as kt-kernel does. Routers keep the dtypes in which
checkpoints store them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs.numa import KEY
from ktconvert.layouts.sources.config import QUANT_METHOD
from ktconvert.layouts.sources.containers import SAFETENSORS
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.sources.source import open_checkpoint, read_quantization
from ktconvert.native_quant.runtime.hf_modules import IMAGES, LAYER, TEXT, ExpertModule
from ktconvert.native_quant.runtime.stored_tensors import FLOATS, UNQUANTIZED, StoredTensor, find_stored_tensors

# Expert tensors of an output, with the names that `make_renamings` gives them.
EXPERTS = r"\.ffn_(gate|up|down)_(bwd_)?exps\."
ANY_EXPERT = r"\.mlp\.experts\.\d+\."  # in a checkpoint of ERNIE-4.5-VL
BASE_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)
NAME = "ktconvert"  # quant_method of KTConvertConfig


def require_files(root: Path) -> None:
    """Raise UnsupportedError for a directory without safetensors files: transformers would look for other files."""
    if root.is_dir() and not any(root.glob("*.safetensors")):
        raise UnsupportedError(_advise_original(root, "holds only routed experts"))


def require_equal_shapes(mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]], model: str) -> None:
    """Raise InputError for tensors whose shapes differ from those that config.json describes.

    mismatched  name, stored shape and shape by the config
    model       directory or hub id
    """
    if mismatched:
        name, stored, expected = min(mismatched)
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        problem = f"makes {name} {list(expected)}, and the stored tensor is {list(stored)}{more}"
        path = Path(model, "config.json") if Path(model).is_dir() else model
        raise InputError(problem, "compare it with the file of the model's release", path=path)


def make_renamings(model: Any, modules: Sequence[ExpertModule]) -> list[WeightRenaming]:
    """Return renamings from kt-kernel's names (numa.rename_non_expert) to this model's, before its own conversions."""
    prefixes = {match["prefix"] for module in modules if (match := LAYER.fullmatch(module.name)) is not None}
    base, *others = prefixes
    if others:  # an encoder and a decoder: the renamings are those of the model that contains both
        parent, dot, _ = base.rstrip(".").rpartition(".")
        base = parent + dot
    names = [name for name, _ in model.get_submodule(base.rstrip(".")).named_children() if name != "layers"]
    pairs = ("blk", "layers"), *zip(names, names, strict=True)
    return [WeightRenaming(source_patterns=rf"^{a}\.", target_patterns=f"{base}{b}.") for a, b in pairs]


def require_complete(
    root: Path, files: Iterable[str], model: Any, modules: Sequence[ExpertModule], renamings: Sequence[WeightRenaming]
) -> None:
    """Raise UnsupportedError if the files lack a non-expert tensor, or hold a quantized one."""
    entries = [entry for file in files for entry in read_header(Path(file)).entries if not KEY.fullmatch(entry.name)]
    if not entries:
        raise UnsupportedError(_advise_original(root, "holds only routed experts"))
    quantized = next((e for e in entries if e.name.endswith(".weight") and e.dtype not in FLOATS), None)
    if quantized is not None:
        problem = f"{quantized.name} is quantized ({quantized.dtype}), but only routed experts may be"
        raise UnsupportedError(_advise_original(root, problem))
    names = [entry.name for entry in entries]
    missing = sorted(list_checkpoint_names(model, modules) - convert_names(model, names, renamings))
    if missing:
        other_tensors = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise UnsupportedError(_advise_original(root, f"lacks {missing[0]}{other_tensors} of {type(model).__name__}"))


def list_checkpoint_names(model: Any, modules: Sequence[ExpertModule]) -> set[str]:
    """Return the names, in the model, of the non-expert tensors that a checkpoint must have."""
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    experts = tuple(f"{module.name}." for module in modules)
    non_experts = (name for name in model.state_dict() if not name.startswith(experts))
    stored = (name for name in non_experts if name not in model.all_tied_weights_keys)
    return {name for name in stored if not any(pattern.search(name) for pattern in optional)}


def convert_names(model: Any, names: Iterable[str], renamings: Sequence[WeightRenaming]) -> set[str]:
    """Convert names in a checkpoint to names in the model: by the renamings, then by the model's own conversions."""
    mapping = get_model_conversion_mapping(model)
    renaming = [*renamings, *(x for x in mapping if isinstance(x, WeightRenaming))]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    model_tensors = model.state_dict()
    targets = set()
    for name in names:
        target, pattern = rename_source_key(name, renaming, converters, model.base_model_prefix, model_tensors)
        targets.add(target)
        for converter in converters:
            if pattern in converter.source_patterns:  # a converter may split a tensor
                first_pattern, *other_patterns = converter.target_patterns
                targets.update(target.replace(first_pattern, other) for other in other_patterns)
    return targets


def number_experts_for_images(model: Any) -> range:
    """Return the numbers of the experts for images in a checkpoint; those for text precede them (ERNIE-4.5-VL)."""
    modules = (name for name, _ in model.named_modules() if IMAGES in name and name.endswith(".experts"))
    if (name := next(modules, None)) is None:
        return range(0)
    first = model.get_submodule(name.replace(IMAGES, TEXT)).num_experts
    return range(first, first + model.get_submodule(name).num_experts)


def convert_experts_for_images(conversions: Sequence[Any], numbers: range) -> list[Any]:
    """Return conversions that read the experts for images, which have these numbers, but none for text.

    transformers' own conversions read neither where those for text are replaced.
    """
    converted = []
    for conversion in conversions:
        targets = [target for target in conversion.target_patterns if IMAGES.lstrip(".") + "experts" in target]
        if targets and numbers:
            any_number = f"(?:{'|'.join(map(str, numbers))})"
            sources = [source.replace("*", any_number) for source in conversion.source_patterns]
            operations = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(sources) > 1 else [])]
            scope = conversion.scope_prefix, conversion.base_model_prefix
            conversion = WeightConverter(sources, targets, operations)
            conversion.scope_prefix, conversion.base_model_prefix = scope
        converted.append(conversion)
    return converted


def _advise_original(root: Path, problem: str) -> str:
    """Return the message that a directory cannot be loaded by itself, but with the original checkpoint."""
    readme = root / "README.md"
    base = BASE_MODEL.search(readme.read_text(errors="replace")) if readme.is_file() else None
    original = repr(base[1]) if base else "ORIGINAL"
    call = f"from_pretrained({original}, quantization_config=KTConvertConfig(cpu_weights={str(root)!r}))"
    return f"{root}: {problem}; load the checkpoint that it was converted from, with these experts: {call}"


def find_decoded_tensors(files: Sequence[str]) -> dict[str, StoredTensor] | None:
    """Return the non-expert tensors of a checkpoint whose weights must be decoded; None if transformers can read them.

    Raises RotatedError for a rotated model, and the errors of find_stored_tensors.
    """
    root = Path(files[0]).parent
    read_quantization(root)
    headers = (read_header(Path(file)) for file in files if file.endswith(SAFETENSORS.suffix))
    if all(entry.dtype in UNQUANTIZED for header in headers for entry in header.entries):
        return None
    return find_stored_tensors(open_checkpoint(root), whole=False)


def drop_quantization_config(config: Any) -> None:
    """Remove a model's own quantization from its config.

    transformers accepts one quantization per model, which must be ours; find_stored_tensors decodes the weights.
    """
    for section in (config, config.get_text_config(decoder=True)):
        quantization = getattr(section, "quantization_config", None) or {}
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        if quantization.get("quant_method") not in (NAME, QUANT_METHOD):
            vars(section).pop("quantization_config", None)
            if quantization and config.dtype is None:  # transformers would take the dtype of a scale
                config.dtype = config.get_text_config(decoder=True).dtype or "bfloat16"


# --- dtypes of routers ---------------------------------------------------------------------------
# Families publish a router's correction bias in float32 beside BF16 weights, with values so close to each other that
# BF16 merges them: other experts are then chosen. transformers keeps it in some families and rounds it in others
# (MiniMax-M2, Kimi-Linear, LFM2).

# Names of the biases in transformers' modules.
BIASES = ("e_score_correction_bias", "expert_bias")
ROUTER = re.compile(r"(gate|router)$")
# Matches the code of a router that accepts its matrix in any dtype: it casts inputs to that dtype, or the matrix to
# float32.
CASTS = re.compile(r"\.to\(self\.weight\.dtype\)|self\.weight\.(type\(torch\.float32\)|float\(\))")

_loading: Any = modeling_utils
_get_dtype_plan = _loading.PreTrainedModel._get_dtype_plan


def keep_router_dtypes() -> None:
    """Let all models that transformers loads from now on keep the stored dtypes of routers, if they can."""
    _loading.PreTrainedModel._get_dtype_plan = get_dtype_plan


def get_dtype_plan(self: Any, dtype: Any) -> dict[str, Any]:
    """Return transformers' plan (part of a name -> dtype), with None (the stored dtype) for biases and such routers."""
    plan: dict[str, Any] = _get_dtype_plan(self, dtype)
    routers: dict[str, Any] = {name: type(module) for name, module in self.named_modules() if ROUTER.search(name)}
    casting = {kind for kind in {*routers.values()} if _matches(CASTS, kind)}
    names = {re.sub(r"\d+", "*", f"{name}.weight") for name, kind in routers.items() if kind in casting}
    names = {name for name in names if not any(pattern in name for pattern in plan)}
    for name, module in self.named_modules():
        if any(pattern in name and kind == torch.float32 for pattern, kind in plan.items()):
            keep_activation_dtype(module)
    return {**dict.fromkeys((*BIASES, *sorted(names))), **plan}


# Matches the code of a norm that returns the dtype of its weight. In DeepSeek-V4, transformers keeps these weights in
# float32, and linears in BF16 cannot read the results (pull request 47486 of transformers).
NORM = re.compile(r"return self\.weight \* hidden_states\.to\(input_dtype\)")


def keep_activation_dtype(module: torch.nn.Module) -> None:
    """Let a norm return the dtype of its input."""
    kind: Any = type(module)
    if _matches(NORM, kind) and _cast_to_input not in module._forward_hooks.values():
        module.register_forward_hook(_cast_to_input)


def _cast_to_input(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output.to(inputs[0].dtype)


@functools.cache  # reading the source of a class takes time
def _matches(code: re.Pattern[str], kind: type) -> bool:
    """Return whether the source code of a class matches."""
    try:
        return code.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):  # no source code is available
        return False
