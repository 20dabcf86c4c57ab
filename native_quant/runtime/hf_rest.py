"""What transformers loads beside the routed experts: of an output of `ktconvert cpu`, whether it holds the whole model,
by which names; of a quantized checkpoint, weights that transformers dequantizes while it loads, or that we refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint, read_quantization
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.pack_quantized import FORMAT, METHOD
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import cpu_card
from ktconvert.layouts.outputs.numa import KEY
from ktconvert.native_quant.runtime.hf_modules import LAYER, ExpertModule

# The expert tensors of an output, by the names that `renamings` maps them to.
EXPERTS = r"\.ffn_(gate|up|down)_(bwd_)?exps\."
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of weights that are not quantized
BASE_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)
NAME = "ktconvert"  # quant_method of KTConvertConfig
PACKED = "_packed"  # what compressed-tensors adds to the name of a weight
# Methods of config.json that are no quantization of the rest: none, ours, and experts packed for the GPU, for which
# there is require_plain.
EXPERTS_ONLY = ("", NAME, cpu_card.QUANT_METHOD, METHOD)
FP8 = "fp8"  # quant_method in config.json of E4M3 with a scale per block


def require_files(root: Path) -> None:
    """Raises UnsupportedError for a directory without safetensors files: transformers would look for others."""
    if root.is_dir() and not any(root.glob("*.safetensors")):
        raise UnsupportedError(_load_the_original(root, "holds the routed experts alone"))


def renamings(model: Any, modules: Sequence[ExpertModule]) -> list[WeightRenaming]:
    """From kt-kernel's names (numa.rename_non_expert) to this model's, to be applied before its own conversions."""
    match = LAYER.fullmatch(modules[0].name)
    assert match is not None
    stack = match["prefix"]
    names = [name for name, _ in model.get_submodule(stack.rstrip(".")).named_children() if name != "layers"]
    pairs = ("blk", "layers"), *zip(names, names, strict=True)
    return [WeightRenaming(source_patterns=rf"^{a}\.", target_patterns=f"{stack}{b}.") for a, b in pairs]


def require_rest(
    root: Path, files: Iterable[str], model: Any, modules: Sequence[ExpertModule], first: Sequence[WeightRenaming]
) -> None:
    """Raises UnsupportedError where the files lack a non-expert tensor, or hold a quantized one."""
    entries = [entry for file in files for entry in read_header(Path(file)).entries if not KEY.fullmatch(entry.name)]
    if not entries:
        raise UnsupportedError(_load_the_original(root, "holds the routed experts alone"))
    packed = next((e for e in entries if e.name.endswith(".weight") and e.dtype not in FLOATS), None)
    if packed is not None:
        what = f"{packed.name} is quantized itself ({packed.dtype}), and only routed experts can be"
        raise UnsupportedError(f"{root}: {what}; convert what `ktconvert dequantize` writes of the original checkpoint")
    names = [entry.name for entry in entries]
    missing = sorted(needed_tensors(model, modules) - targets(model, names, first))
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise UnsupportedError(_load_the_original(root, f"lacks {missing[0]}{more} of {type(model).__name__}"))


def needed_tensors(model: Any, modules: Sequence[ExpertModule]) -> set[str]:
    """The tensors that the checkpoint must have, by their names in the model."""
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    experts = tuple(f"{module.name}." for module in modules)
    own = (name for name in model.state_dict() if not name.startswith(experts))
    stored = (name for name in own if name not in model.all_tied_weights_keys)
    return {name for name in stored if not any(pattern.search(name) for pattern in optional)}


def targets(model: Any, names: Iterable[str], first: Sequence[WeightRenaming]) -> set[str]:
    """The tensors that these become, by their names in the model."""
    mapping = get_model_conversion_mapping(model)
    renaming = [*first, *(x for x in mapping if isinstance(x, WeightRenaming))]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    known, targets = model.state_dict(), set()
    for name in names:
        target, pattern = rename_source_key(name, renaming, converters, model.base_model_prefix, known)
        targets.add(target)
        for converter in converters:
            if pattern in converter.source_patterns:  # one tensor may become several
                one, *others = converter.target_patterns
                targets.update(target.replace(one, other) for other in others)
    return targets


def _load_the_original(root: Path, why: str) -> str:
    readme = root / "README.md"
    base = BASE_MODEL.search(readme.read_text(errors="replace")) if readme.is_file() else None
    original = repr(base[1]) if base else "ORIGINAL"
    call = f"from_pretrained({original}, quantization_config=KTConvertConfig(cpu_weights={str(root)!r}))"
    return f"{root}: {why}; load the checkpoint that it was converted from, with these experts: {call}"


def give_way(config: Any) -> None:
    """Take the quantization of a model out of its config, since transformers takes one per model, and ours is to be it;
    dequantizer and require_plain see to what is quantized.
    """
    for part in (config, config.get_text_config(decoder=True)):
        own = getattr(part, "quantization_config", None) or {}
        own = own if isinstance(own, dict) else own.to_dict()
        if own.get("quant_method") not in (NAME, cpu_card.QUANT_METHOD):
            vars(part).pop("quantization_config", None)


def require_combinable(config: Any, model: str) -> None:
    """Raise UnsupportedError at once for another format of compressed-tensors than that of `ktconvert gpu`."""
    for part in (config, config.get_text_config(decoder=True)):
        own = getattr(part, "quantization_config", None) or {}
        own = own if isinstance(own, dict) else own.to_dict()
        if own.get("quant_method") == METHOD and own.get("format") != FORMAT:
            which = "only routed experts that `ktconvert gpu` packed can be combined with others"
            remedy = f"give what `ktconvert dequantize {model} BF16` writes, with the same CPU weights"
            raise UnsupportedError(f"{model}: is quantized itself ({METHOD}), and {which}; {remedy}")


def dequantizer(root: Path) -> Any:
    """transformers' own, which dequantizes as it loads; None: experts alone are quantized. UnsupportedError: others."""
    quantization = read_quantization(root)
    if quantization.method == FP8:
        kind: Any = FineGrainedFP8HfQuantizer
        return kind(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    if quantization.method in EXPERTS_ONLY:
        return None
    with open_checkpoint(root) as source:
        experts = recognise(source, to_read=True).expert_tensor_names()
        rest = other_tensors(source, experts, quantization).tensors
        packed = next((name for name, stored in rest.items() if isinstance(stored, Weight)), None)
    if packed is not None:
        what = f"{packed} is quantized itself ({quantization.method}), and only routed experts and FP8 can be"
        remedy = f"give what `ktconvert dequantize {root} BF16` writes, with {root} as cpu_weights"
        raise UnsupportedError(f"{root}: {what}; {remedy}")
    return None


def require_plain(root: Path, files: Iterable[str], model: Any, modules: Sequence[ExpertModule]) -> None:
    """Raises UnsupportedError where a weight beside the experts is packed: transformers would make up numbers."""
    if read_quantization(root).method != METHOD:
        return
    names = [entry.name for file in files for entry in read_header(Path(file)).entries]
    plain = [name.removesuffix(PACKED) for name in names if name.endswith(f".weight{PACKED}")]
    packed = needed_tensors(model, modules) & targets(model, plain, ())
    if packed:
        what = f"is quantized beyond its routed experts ({min(packed)}{PACKED}), and only these combine with others"
        remedy = f"give a model that `ktconvert gpu` made, or what `ktconvert dequantize {root} BF16` writes"
        raise UnsupportedError(f"{root}: {what}; {remedy}")
