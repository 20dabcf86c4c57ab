"""Loading of LoRA adapters from `ktconvert train` or PEFT: one, or several between which a model switches."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.adapter import (
    RUN,
    SERVE,
    WEIGHTS,
    Settings,
    is_named,
    read_pairs,
    read_settings,
    require_adapter,
    require_finite,
    write_peft_adapter,
)
from ktconvert.layouts.checkpoints.kt_adapter import FUSED, OF_LAYER, ExpertNames
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError, UsageError
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.native_quant.runtime.transformers_version import hide_renamings

LACKS_TENSORS = "it lacks tensors for modules that it names"
# Attributes of PEFT's layers that select the adapters to compute with.
SELECTION = ("_active_adapter", "_disable_adapters")
# For each of PEFT's layers: its attributes, and the values that select an adapter.
Selections = list[tuple[dict[str, Any], dict[str, Any]]]


def load_adapter(model: Any, folder: Path, model_name: str) -> Any:
    """Return the model, computing with this adapter.

    model_name  name of the model for messages

    Raises InputError for an adapter that does not fit the model.
    """
    return _add_adapter(model, folder, model_name, "default").get_base_model()


class Adapters:
    """Several adapters of one model, which computes with one at a time, or with none, as at the beginning.

    The model's own weights are in memory once.
    """

    def __init__(self, model: Any, folders: Mapping[str, Path], model_name: str) -> None:
        """Load the adapters.

        folders     directories by the names that clients use
        model_name  name of the model for messages

        Raises InputError for an adapter that does not fit, and UnsupportedError for one that would change the answers
        of other adapters.
        """
        from ktconvert.native_quant.runtime import adapters
        from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

        self._selections: dict[str | None, Selections] = {}
        self._current: Selections | None = None
        with_peft = model
        for number, folder in enumerate(folders.values()):
            with_peft = _add_adapter(with_peft, folder, model_name, f"adapter{number}", shared=True)
        for number, (name, folder) in enumerate(folders.items()):
            with _explain_errors(folder, model_name):
                with_peft.set_adapter(f"adapter{number}")
                for module in model.modules():
                    if isinstance(module, RoutedExperts):
                        adapters.combine_active(module)  # raises an error if the runtime cannot compute with it
            self._selections[name] = _read_selections(model)
        if folders:
            with_peft.base_model.disable_adapter_layers()
            self._selections[None] = self._current = _read_selections(model)
            model.requires_grad_(False)

    def switch(self, name: str | None) -> None:
        """Compute with the adapter of this name, or with none if no adapter has the name.

        PEFT's own functions walk through the model, which takes as long as computing a token.
        """
        selections = self._selections.get(name, self._selections.get(None))
        if selections is not self._current:
            for attributes, values in selections or ():
                attributes.update(values)
            self._current = selections


def _read_selections(model: Any) -> Selections:
    """Return which adapters each of PEFT's layers computes with now."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper))
    return [(vars(layer), {name: getattr(layer, name) for name in SELECTION}) for layer in layers]


def adapters_by_name(adapters: Iterable[tuple[str, Path]], model_name: str) -> dict[str, Path]:
    """Return the directories of adapters by the names that clients use.

    Raises UsageError for a duplicate name and InputError for a directory without an adapter.
    """
    folders: dict[str, Path] = {}
    for name, folder in adapters:
        if name == model_name or name in folders:
            owner = "the model" if name == model_name else f"the adapter in {folders[name]}"
            remedy = f"give NAME={folder}, with a different name"
            raise UsageError(f"--adapter {folder}: {owner} has the name {name}, too; {remedy}.")
        require_adapter(folder)
        folders[name] = folder
    return folders


def _add_adapter(model: Any, folder: Path, model_name: str, adapter: str, shared: bool = False) -> Any:
    """Load an adapter into a model and return the model wrapped by PEFT, which it may be already.

    adapter  PEFT's name for it
    shared   whether the model also computes with other adapters, or with none
    """
    import peft

    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
    from ktconvert.native_quant.runtime.peft_targets import resolve_patterns

    if (folder / FUSED).is_file():
        with tempfile.TemporaryDirectory() as scratch, _name_folder(folder, Path(scratch)):
            base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
            write_peft_adapter(folder, Path(scratch), _name_experts(base))
            return _add_adapter(model, Path(scratch), model_name, adapter, shared)
    settings = read_settings(folder, SERVE if shared else RUN)
    require_finite(read_pairs(folder, settings, others=True).values())
    if shared:
        _require_own_tensors(folder, settings)
    with _explain_errors(folder, model_name), hide_renamings():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        config = peft.LoraConfig(**settings.values, inference_mode=True)
        if not any(isinstance(module, RoutedExperts) for module in model.modules()):
            resolve_patterns(config, model)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(adapter, config)
        else:
            model = peft.PeftModel(model, config, adapter)
        mapping = getattr(model.get_base_model(), "_checkpoint_conversion_mapping", {})  # as from_pretrained does
        loaded = model.load_adapter(str(folder), adapter, key_mapping=mapping)
        if loaded.missing_keys:
            problem = f"{LACKS_TENSORS}, such as {loaded.missing_keys[0]}"
            raise InputError(problem, "give the model that the adapter was trained for")
        if loaded.unexpected_keys:
            raise InputError(f"it has {loaded.unexpected_keys[0]}, which its settings or the model lack")
        return model.eval()


def _name_experts(model: Any) -> dict[int, ExpertNames]:
    """Return the names of each layer's experts in a model of transformers, converted or not."""
    from ktconvert.native_quant.runtime.adapters import projection_names

    projections = projection_names(model, gated=True)  # kt-kernel trains no others
    modules = [match for name, _ in model.named_modules() if (match := OF_LAYER.fullmatch(name))]
    return {int(match["layer"]): ExpertNames(match[0], projections) for match in modules}


def _require_own_tensors(folder: Path, settings: Settings) -> None:
    """Raise UnsupportedError for an adapter that replaces tensors of the model: other adapters need the original."""
    saved = [*(settings["modules_to_save"] or ()), *(("token_adapter",) if settings["trainable_token_indices"] else ())]
    for info in read_header(folder / WEIGHTS).entries:
        parents = [info.name[: match.start()] for match in re.finditer(r"\.", info.name)]
        if ".lora_" not in info.name and not any(is_named(parent, saved) for parent in parents):
            problem = "replaces one of the model's own weights, which requests without this adapter use, too"
            raise UnsupportedError.from_tensor(info.name, problem, "save the adapter as plain LoRA", folder / WEIGHTS)


@contextmanager
def _name_folder(folder: Path, scratch: Path) -> Iterator[None]:
    """Name the user's folder instead of its copy in the messages of errors."""
    try:
        yield
    except KTConvertError as error:
        raise type(error)(str(error).replace(str(scratch), str(folder))) from error


@contextmanager
def _explain_errors(folder: Path, model_name: str) -> Iterator[None]:
    """Convert errors of PEFT, torch and safetensors for an adapter that cannot be loaded into InputError."""
    try:
        yield
    except KTConvertError as error:
        place = "" if error.path is None else f"{error.path}: "
        problem = f"does not fit {model_name}: {place}{error.problem.removesuffix('.')}"
        raise InputError(problem, error.remedy, path=folder) from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else lines[0]
        raise InputError(f"{folder}: does not fit {model_name}: {reason.rstrip('.')}") from error
