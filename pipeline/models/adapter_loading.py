"""Loading LoRA adapters, of `ktconvert train` or of PEFT, into a model: one, or several between which it switches."""

from __future__ import annotations

import re
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
)
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError, UsageError

LACKS = "it lacks tensors for modules that it names"
STATE = ("_active_adapter", "_disable_adapters")  # of each of PEFT's layers: which adapters it computes with


def with_adapter(model: Any, folder: Path, name: str) -> Any:
    """The model of this name, which computes with this adapter. Raises InputError for an adapter that does not fit."""
    return _load(model, folder, name, "default").get_base_model()


class Adapters:
    """Several adapters of one model, by the names that clients know. It computes with one at a time, first with none;
    its own weights are there once.
    """

    def __init__(self, model: Any, folders: Mapping[str, Path], name: str) -> None:
        """Load them. name: the model's, for messages. Raises InputError for an adapter that does not fit, or that
        changes more than what is computed with it.
        """
        from ktconvert.native_quant.runtime import adapters
        from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

        self._states: dict[str | None, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self._now: Any = None
        with_peft = model
        for number, folder in enumerate(folders.values()):
            with_peft = _load(with_peft, folder, name, f"adapter{number}", alone=False)
        for number, (called, folder) in enumerate(folders.items()):
            with _explained(folder, name):
                with_peft.set_adapter(f"adapter{number}")
                for experts in (each for each in model.modules() if isinstance(each, RoutedExperts)):
                    adapters.active(experts)  # refuses what could not be computed
            self._states[called] = _states(model)
        if folders:
            with_peft.base_model.disable_adapter_layers()
            self._states[None] = self._now = _states(model)
            model.requires_grad_(False)

    def switch(self, name: str | None) -> None:
        """Compute with this adapter from now on; with none for a name that none has. PEFT's own functions, which walk
        through the model, take as long as a token.
        """
        state = self._states.get(name, self._states.get(None))
        if state is not self._now:
            for attributes, values in state or ():
                attributes.update(values)
            self._now = state


def _states(model: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes of each of PEFT's layers, and what says now which adapters it computes with."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = (each for each in model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper))
    return [(vars(layer), {name: getattr(layer, name) for name in STATE}) for layer in layers]


def by_name(given: Iterable[tuple[str, Path]], model: str) -> dict[str, Path]:
    """Adapters by clients' names. UsageError for a name that is there twice, InputError for no adapter."""
    found: dict[str, Path] = {}
    for name, folder in given:
        if name == model or name in found:
            other = "the model" if name == model else "another adapter"
            raise UsageError(f"--adapter {folder}: {other} is called {name}, too; give it another name: NAME={folder}.")
        require_adapter(folder)
        found[name] = folder
    return found


def _load(model: Any, folder: Path, name: str, adapter: str, alone: bool = True) -> Any:
    """PEFT's model of this one, or itself with one adapter more; adapter: PEFT's name for it; alone: whether nothing
    else is computed with the model.
    """
    import peft

    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
    from ktconvert.native_quant.runtime.peft_targets import resolve_patterns

    settings = read_settings(folder, RUN if alone else SERVE)
    read_pairs(folder, settings, others=True)
    if not alone:
        _require_own_tensors(folder, settings)
    with _explained(folder, name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        config = peft.LoraConfig(**settings.values, inference_mode=True)
        if not any(isinstance(module, RoutedExperts) for module in model.modules()):
            resolve_patterns(config, model)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(adapter, config)
        else:
            model = peft.PeftModel(model, config, adapter)
        mapping = getattr(model.get_base_model(), "_checkpoint_conversion_mapping", {})  # as from_pretrained
        loaded = model.load_adapter(str(folder), adapter, key_mapping=mapping)
        if loaded.missing_keys:
            raise InputError(LACKS)
        if loaded.unexpected_keys:
            raise InputError(f"it has {loaded.unexpected_keys[0]}, which its settings do not name or the model lacks")
        return model.eval()


def _require_own_tensors(folder: Path, settings: Settings) -> None:
    """Raise UnsupportedError for an adapter with tensors of the model, which others are answered with."""
    saved = [*(settings["modules_to_save"] or ()), *(("token_adapter",) if settings["trainable_token_indices"] else ())]
    for info in read_header(folder / WEIGHTS).entries:
        parents = [info.name[: match.start()] for match in re.finditer(r"\.", info.name)]
        if ".lora_" not in info.name and not any(is_named(parent, saved) for parent in parents):
            what = "replaces one of the model's own weights, with which others are answered"
            raise UnsupportedError.of_tensor(info.name, what, "save it as plain LoRA", folder / WEIGHTS)


@contextmanager
def _explained(folder: Path, model: str) -> Iterator[None]:
    """What is raised for an adapter that cannot be loaded as InputError."""
    try:
        yield
    except KtconvertError as error:
        raise InputError(f"{folder}: does not fit {model}: {error}") from error
    except Exception as error:  # PEFT, torch and safetensors raise their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else lines[0]
        raise InputError(f"{folder}: does not fit {model}: {why.rstrip('.')}") from error
