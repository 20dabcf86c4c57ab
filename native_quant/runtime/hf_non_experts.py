"""Non-expert tensors that transformers loads: completeness, names, quantization and dtypes.

An output of `ktconvert cpu` may lack them, and names them as kt-kernel does. In a quantized checkpoint, transformers
dequantizes them, or we refuse them. Routers keep the dtypes in which checkpoints store them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from ktconvert.layouts.checkpoints.config import QUANT_METHOD
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint, read_quantization
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.pack_quantized import FORMAT, METHOD
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.numa import KEY
from ktconvert.native_quant.runtime.hf_modules import LAYER, ExpertModule

# Expert tensors of an output, with the names that `make_renamings` gives them.
EXPERTS = r"\.ffn_(gate|up|down)_(bwd_)?exps\."
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of weights that are not quantized
BASE_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)
NAME = "ktconvert"  # quant_method of KTConvertConfig
PACKED = "_packed"  # suffix of compressed-tensors for the name of a weight
# Methods of config.json that do not quantize non-expert tensors: none, ours, and experts packed for the GPU, which
# require_unpacked checks.
EXPERTS_ONLY = ("", NAME, QUANT_METHOD, METHOD)
FP8 = "fp8"  # quant_method in config.json of E4M3 with a scale per block


def require_files(root: Path) -> None:
    """Raise UnsupportedError for a directory without safetensors files: transformers would look for other files."""
    if root.is_dir() and not any(root.glob("*.safetensors")):
        raise UnsupportedError(_advise_original(root, "holds only routed experts"))


def make_renamings(model: Any, modules: Sequence[ExpertModule]) -> list[WeightRenaming]:
    """Return renamings from kt-kernel's names (numa.rename_non_expert) to this model's, before its own conversions."""
    match = LAYER.fullmatch(modules[0].name)
    assert match is not None
    stack = match["prefix"]
    names = [name for name, _ in model.get_submodule(stack.rstrip(".")).named_children() if name != "layers"]
    pairs = ("blk", "layers"), *zip(names, names, strict=True)
    return [WeightRenaming(source_patterns=rf"^{a}\.", target_patterns=f"{stack}{b}.") for a, b in pairs]


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
        raise UnsupportedError(
            f"{root}: {problem}; run `ktconvert dequantize` on the original checkpoint, and convert its output"
        )
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


def _advise_original(root: Path, problem: str) -> str:
    """Return the message that a directory cannot be loaded by itself, but with the original checkpoint."""
    readme = root / "README.md"
    base = BASE_MODEL.search(readme.read_text(errors="replace")) if readme.is_file() else None
    original = repr(base[1]) if base else "ORIGINAL"
    call = f"from_pretrained({original}, quantization_config=KTConvertConfig(cpu_weights={str(root)!r}))"
    return f"{root}: {problem}; load the checkpoint that it was converted from, with these experts: {call}"


def drop_quantization_config(config: Any) -> None:
    """Remove a model's own quantization from its config.

    transformers accepts one quantization per model, which must be ours. make_dequantizer and require_unpacked handle
    the quantized tensors.
    """
    for section in (config, config.get_text_config(decoder=True)):
        quantization = getattr(section, "quantization_config", None) or {}
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        if quantization.get("quant_method") not in (NAME, QUANT_METHOD):
            vars(section).pop("quantization_config", None)


def require_combinable(config: Any, model: str) -> None:
    """Raise UnsupportedError for any format of compressed-tensors but that of `ktconvert gpu`; read no files."""
    for section in (config, config.get_text_config(decoder=True)):
        quantization = getattr(section, "quantization_config", None) or {}
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        if quantization.get("quant_method") == METHOD and quantization.get("format") != FORMAT:
            rule = "only a model that `ktconvert gpu` packed can be used with CPU weights"
            remedy = f"use the output of `ktconvert dequantize {model} BF16` with the same CPU weights"
            raise UnsupportedError(f"{model}: is quantized ({METHOD}), and {rule}; {remedy}")


def make_dequantizer(root: Path) -> Any:
    """Return transformers' quantizer that dequantizes non-expert tensors; None if only experts are quantized.

    Raises UnsupportedError for methods that transformers does not dequantize.
    """
    quantization = read_quantization(root)
    if quantization.method == FP8:
        kind: Any = FineGrainedFP8HfQuantizer
        return kind(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    if quantization.method in EXPERTS_ONLY:
        return None
    with open_checkpoint(root) as source:
        experts = recognise(source, to_read=True).expert_tensor_names()
        non_experts = find_non_expert_tensors(source, experts, quantization).tensors
        quantized = next((name for name, stored in non_experts.items() if isinstance(stored, Weight)), None)
    if quantized is not None:
        problem = f"{quantized} is quantized ({quantization.method}), but only routed experts and FP8 weights may be"
        remedy = f"use the output of `ktconvert dequantize {root} BF16`, with {root} as cpu_weights"
        raise UnsupportedError(f"{root}: {problem}; {remedy}")
    return None


def require_unpacked(root: Path, files: Iterable[str], model: Any, modules: Sequence[ExpertModule]) -> None:
    """Raise UnsupportedError if a non-expert weight is packed: transformers would initialize it randomly."""
    if read_quantization(root).method != METHOD:
        return
    names = [entry.name for file in files for entry in read_header(Path(file)).entries]
    unpacked_names = [name.removesuffix(PACKED) for name in names if name.endswith(f".weight{PACKED}")]
    packed = list_checkpoint_names(model, modules) & convert_names(model, unpacked_names, ())
    if packed:
        problem = f"has quantized weights besides its routed experts ({min(packed)}{PACKED}), which is unsupported"
        remedy = f"use an output of `ktconvert gpu`, or that of `ktconvert dequantize {root} BF16`"
        raise UnsupportedError(f"{root}: {problem}; {remedy}")


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
    routers = {name: type(module) for name, module in self.named_modules() if ROUTER.search(name)}
    casting = {kind for kind in {*routers.values()} if _casts(kind)}
    names = {re.sub(r"\d+", "*", f"{name}.weight") for name, kind in routers.items() if kind in casting}
    names = {name for name in names if not any(pattern in name for pattern in plan)}
    return {**dict.fromkeys((*BIASES, *sorted(names))), **plan}


def _casts(kind: type) -> bool:
    """Return whether a class of routers computes with a matrix of any dtype."""
    try:
        return CASTS.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):  # no source code is available
        return False
