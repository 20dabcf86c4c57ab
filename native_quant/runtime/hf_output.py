"""An output of `ktconvert cpu` as a checkpoint for transformers: whether it holds the whole model, by which names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.numa import KEY
from ktconvert.native_quant.runtime.hf_modules import LAYER, ExpertModule

# The expert tensors of an output, by the names that `renamings` maps them to.
EXPERTS = r"\.ffn_(gate|up|down)_(bwd_)?exps\."
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of weights that are not quantized
BASE_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)


def require_files(root: Path) -> None:
    """Raises UnsupportedError for a directory without safetensors files: transformers would look for others."""
    if root.is_dir() and not any(root.glob("*.safetensors")):
        raise UnsupportedError(_load_the_original(root, "holds the routed experts alone"))


def renamings(model: Any, modules: Sequence[ExpertModule]) -> list[WeightRenaming]:
    """From kt-kernel's names (numa.rename_non_expert) to this model's, to be applied before its own conversions."""
    match = LAYER.fullmatch(modules[0].name)
    assert match is not None
    stack = match["prefix"]
    siblings = [name for name, _ in model.get_submodule(stack.rstrip(".")).named_children() if name != "layers"]
    return [
        WeightRenaming(source_patterns=r"^blk\.", target_patterns=f"{stack}layers."),
        *(WeightRenaming(source_patterns=rf"^{name}\.", target_patterns=f"{stack}{name}.") for name in siblings),
    ]


def require_rest(
    root: Path, files: Iterable[str], model: Any, modules: Sequence[ExpertModule], first: Sequence[WeightRenaming]
) -> None:
    """Raises UnsupportedError where the files lack a non-expert tensor of the model, which would be random, or hold one
    that is quantized, whose codes would be taken for numbers.
    """
    entries = [entry for file in files for entry in read_header(Path(file)).entries if not KEY.fullmatch(entry.name)]
    if not entries:
        raise UnsupportedError(_load_the_original(root, "holds the routed experts alone"))
    packed = next((e for e in entries if e.name.endswith(".weight") and e.dtype not in FLOATS), None)
    if packed is not None:
        raise UnsupportedError(
            f"{root}: {packed.name} is quantized itself ({packed.dtype}), and only routed experts can be; convert what "
            "`ktconvert dequantize` writes of the original checkpoint"
        )
    names = [entry.name for entry in entries]
    missing = sorted(needed_tensors(model, modules) - targets(model, names, first))
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise UnsupportedError(_load_the_original(root, f"lacks {missing[0]}{more} of {type(model).__name__}"))


def needed_tensors(model: Any, modules: Sequence[ExpertModule]) -> set[str]:
    """The tensors that the checkpoint must have, by their names in the model."""
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    experts = tuple(f"{module.name}." for module in modules)
    return {
        name
        for name in model.state_dict()
        if not name.startswith(experts)
        and name not in model.all_tied_weights_keys
        and not any(pattern.search(name) for pattern in optional)
    }


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
    return (
        f"{root}: {why}; load the checkpoint that it was converted from, with these experts:"
        f" from_pretrained({original}, quantization_config=KTConvertConfig(cpu_weights={str(root)!r}))"
    )
