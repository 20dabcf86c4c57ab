"""Routed experts for transformers: from_pretrained(MODEL, quantization_config=KTConvertConfig(cpu_weights=OUT)).

Importing this module registers the config and its quantizer under the name "ktconvert". Each routed-experts module is replaced before
weights are loaded, so transformers finds no place for the expert tensors of the checkpoint and reads none of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.hf_modules import Place, RoutedExperts, find_experts
from ktconvert.native_quant.runtime.pool import shared_pool
from ktconvert.native_quant.runtime.weights import layers_of

NAME = "ktconvert"


@register_quantization_config(NAME)
class KTConvertConfig(QuantizationConfigMixin):
    """Where the routed experts come from, and how they are computed.

    cpu_weights  a directory that `ktconvert cpu` or kt-kernel's converter wrote
    exact        kt-kernel's rounding, bit for bit
    threads      threads of the experts; None: the physical cores that this process may use
    memory       as for Experts.load
    """

    def __init__(
        self,
        cpu_weights: str | os.PathLike[str],
        exact: bool = False,
        threads: int | None = None,
        memory: str = "auto",
        quant_method: str = NAME,
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.cpu_weights = os.fspath(cpu_weights)
        self.exact = exact
        self.threads = threads
        self.memory = memory


@register_quantizer(NAME)
class KTConvertQuantizer(HfQuantizer):
    """Puts RoutedExperts in the place of every routed-experts module."""

    requires_calibration = False
    quantization_config: KTConvertConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Replace the experts, and have the checkpoint's tensors of exactly these modules passed over without a word.

        Raises UnsupportedError for a model whose experts are others than ours, or than those in cpu_weights, and what
        Experts.load raises for weights that are damaged.
        """
        places = find_experts(model)
        loaded = self._load(type(model).__name__, places)
        for place in places:
            parent, _, name = place.name.rpartition(".")
            ours = RoutedExperts(place.layer, loaded[place.layer], place.zero_ids)
            setattr(model.get_submodule(parent), name, ours)
        model._keys_to_ignore_on_load_unexpected.update(_below(model, place) for place in places)
        return model

    def _load(self, what: str, places: list[Place]) -> dict[int, Experts]:
        """Each layer's experts, all of them before the model is touched."""
        given = self.quantization_config
        root = Path(given.cpu_weights).expanduser()
        missing = sorted({place.layer for place in places}.difference(layers_of(root)))
        if missing:
            raise UnsupportedError(
                f"{root}: holds no experts of layer {', '.join(map(str, missing))}, which {what} has; convert all layers"
            )
        pool = shared_pool(given.threads)
        return {
            place.layer: Experts.load(
                root,
                place.layer,
                num_experts=place.num_experts,
                hidden=place.hidden,
                intermediate=place.intermediate,
                memory=given.memory,
                pool=pool,
                exact=given.exact,
            )
            for place in places
        }

    def is_serializable(self) -> bool:
        """The model cannot be saved: the experts lie in cpu_weights."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No gradient flows through the experts."""
        return False


def _below(model: Any, place: Place) -> str:
    """A pattern of what the checkpoint may hold below a module, with or without the name of the base model in front."""
    base = f"{model.base_model_prefix}."
    return rf"^({re.escape(base)})?{re.escape(place.name.removeprefix(base))}\."
