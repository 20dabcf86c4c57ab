"""PEFT's LoRA for routed experts: three-dimensional parameters in the model, a matrix per expert in an adapter's file.

Importing this module puts Tuner into PEFT's table in place of LoraModel, which it is for everything else. So
get_peft_model, PeftModel.from_pretrained, save_pretrained and Trainer need nothing of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from peft import LoraConfig, LoraModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer
from peft.utils import PeftType

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.runtime.adapters import Projection
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
from ktconvert.native_quant.runtime.training import require_trainable

EXPERTS = "experts"
STACKED = ("gate_up_proj", "down_proj")  # transformers' own parameters, which PEFT targets in an unconverted model
# A matrix of one expert in a file, and PEFT's own tensors of all experts of an unconverted model.
OF_EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.(?P<side>lora_[AB])\.weight")
OF_ALL = re.compile(r"(?P<at>.*\.experts)(?P<inner>\.base_layer)?\.(?P<side>lora_[AB])\.weight")
FUSED = re.compile(r"(?P<at>.*\.experts)\.(?P<name>\w+)\.(?P<side>lora_[AB])\.(?P<adapter>[^.]+)")


class ProjectionLora(torch.nn.Module, LoraLayer):  # type: ignore[misc]
    """A Projection with adapters: A [E, r, in] and B [E, out, r] of each, in the ParameterDicts lora_A and lora_B."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What LoraLayer has."""

    def __init__(
        self, base_layer: Projection, adapter_name: str, config: LoraConfig, r: int, lora_alpha: int, **other: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **other)
        self.lora_A, self.lora_B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **other: Any) -> None:
        """Add an adapter. Raises UnsupportedError for settings that need the weights, and for a rank out of range."""
        if not 0 < r <= (most := min(self.in_features, self.out_features, lib.KTQ_MOST_RANK)):
            raise UnsupportedError(f"LoRA's rank r = {r} is not within 1 to {most}, the most for this model")
        if config.lora_bias or config.fan_in_fan_out:
            raise UnsupportedError("experts of ktconvert take LoRA without lora_bias and fan_in_fan_out")
        plain = config.init_lora_weights in (True, False, "gaussian")
        if not plain or self.resolve_lora_variant(config=config) is not None:
            what = "beside plain LoRA and init_lora_weights True, False or 'gaussian' needs the weights of the experts"
            raise UnsupportedError(f"what LoraConfig asks for {what}, which are packed")
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_dropout[adapter_name] = torch.nn.Dropout(config.lora_dropout)
        experts = self.base_layer.experts
        a, b = (torch.zeros(experts, *shape) for shape in ((r, self.in_features), (self.out_features, r)))
        if config.init_lora_weights == "gaussian":
            torch.nn.init.normal_(a, std=1 / r)
        else:  # as torch.nn.Linear begins
            torch.nn.init.uniform_(a, -1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))
        if not config.init_lora_weights:
            torch.nn.init.uniform_(b, -1 / math.sqrt(r), 1 / math.sqrt(r))
        self.lora_A[adapter_name], self.lora_B[adapter_name] = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def parts(self) -> tuple[tuple[torch.Tensor, torch.Tensor, int, float, float], ...]:
        """A, B, rank, scaling and dropout of each active adapter."""
        if self.disable_adapters:
            return ()
        return tuple(
            (self.lora_A[name], self.lora_B[name], self.r[name], self.scaling[name], self.lora_dropout[name].p)
            for name in self.active_adapters
            if name in self.lora_A
        )

    def merge(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "packed experts cannot take up an adapter: `ktconvert merge-adapter` folds it into the BF16 checkpoint, "
            "from which `ktconvert cpu` converts again"
        )


class Tuner(LoraModel):  # type: ignore[misc]
    """LoraModel, which also knows RoutedExperts: by the name `experts`, or by those of the three projections."""

    def inject_adapter(self, model: torch.nn.Module, adapter_name: str, *args: Any, **other: Any) -> None:
        """Raises UnsupportedError for settings that RoutedExperts cannot have."""
        self._requested = self.peft_config[adapter_name].target_modules  # PEFT turns experts' names into parameters'
        super().inject_adapter(model, adapter_name, *args, **other)

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        """The config with names of Projections in place of `experts` and of transformers' parameters."""
        found = [module for module in self.model.modules() if isinstance(module, RoutedExperts)]
        if not found:
            return super()._prepare_adapter_config(peft_config, model_config)
        if set(peft_config.modules_to_save or ()) & {EXPERTS, *found[0].projections, *STACKED}:
            remedy = "take experts out of modules_to_save, and name them among target_modules"
            raise UnsupportedError(f"the weights of experts are packed, and no gradient changes them: {remedy}")
        requested, names = self._requested, [f"{EXPERTS}.{name}" for name in found[0].projections]
        if isinstance(requested, str):
            requested = _resolved(requested, self.model, found[0].projections)
        if isinstance(requested, str):
            return super()._prepare_adapter_config(peft_config, model_config)
        requested, kept = set(requested or ()), set(peft_config.target_modules or ())
        parameters = set(peft_config.target_parameters or ())
        stacked = {name for name in parameters if name.split(".")[-1] in STACKED}
        of_experts = {name for name in requested if name.split(".")[-1] in (EXPERTS, *found[0].projections)}
        plain = stacked and not of_experts  # written for transformers' parameters
        if plain or any(name.split(".")[-1] == EXPERTS for name in of_experts):
            kept.update(names)
        peft_config.target_modules = (kept | of_experts) - {n for n in requested if n.split(".")[-1] == EXPERTS}
        peft_config.target_parameters = parameters - stacked or None
        for patterns in (peft_config.rank_pattern, peft_config.alpha_pattern):
            for pattern in [each for each in patterns if each.endswith(STACKED)]:
                del patterns[pattern]
        targeted = any(name.split(".")[-1] in found[0].projections for name in peft_config.target_modules)
        for module in found if targeted else ():
            if module.hot is not None:
                remedy = "load the model without gpu_experts_mask"
                raise UnsupportedError(f"experts that torch computes take no adapter; {remedy}")
            require_trainable(module.experts)
        return super()._prepare_adapter_config(peft_config, model_config)

    @staticmethod
    def _create_new_module(lora_config: Any, adapter_name: str, target: Any, **other: Any) -> Any:
        if isinstance(target, Projection):
            return ProjectionLora(target, adapter_name, config=lora_config, **other)
        return LoraModel._create_new_module(lora_config, adapter_name, target, **other)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, state_dict: Any, *args: Any, **other: Any
    ) -> Any:
        """A matrix for each expert, by the names of transformers 4, vLLM and SGLang."""
        found = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, *args, **other)
        named = {}
        for key, tensor in found.items():
            if (match := FUSED.fullmatch(key)) is None or tensor.ndim != 3:
                named[key] = tensor
                continue
            at, name, side = match["at"], match["name"], match["side"]
            for expert, matrix in enumerate(tensor):
                named[f"{at}.{expert}.{name}.{side}.{match['adapter']}.weight"] = matrix
        return named

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model: Any, config: Any, adapter_name: str, state_dict: Any) -> Any:
        """Tensors of all experts, from one for each or PEFT's own. InputError: an adapter of another model."""
        found = ((n, m) for n, m in model.named_modules() if isinstance(m, ProjectionLora))
        projections = {name: module for name, module in found if adapter_name in module.lora_A}
        if projections:
            state_dict = _stacked(projections, adapter_name, state_dict)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = Tuner


def _resolved(requested: str, model: Any, projections: tuple[str, ...]) -> set[str] | str:
    """`all-linear` with the experts; a regular expression that finds experts as the last parts of all that it finds."""
    if requested.lower() == "all-linear":
        linears = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        head = model.get_output_embeddings()
        return {n for n in linears if head is None or getattr(model, n, None) is not head} | {EXPERTS}
    found = [name for name, _ in model.named_modules() if re.fullmatch(requested, name)]
    if any(name.split(".")[-1] in (EXPERTS, *projections) for name in found):
        return {name.split(".")[-1] for name in found}
    return requested


def _stacked(projections: Mapping[str, ProjectionLora], adapter: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored tensors with those of experts as parameters of ProjectionLora, by the name without the adapter's."""
    rest: dict[str, torch.Tensor] = {}
    matrices: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in stored.items():
        if match := OF_EXPERT.fullmatch(key):
            at = f"{match['at']}.{match['name']}.{match['side']}"
            matrices.setdefault(at, {})[int(match["expert"])] = tensor
        elif match := OF_ALL.fullmatch(key):
            rest.update(_split(projections, adapter, match, tensor))
        else:
            rest[key] = tensor
    for at, found in matrices.items():
        if sorted(found) != list(range(len(found))) or len({matrix.shape for matrix in found.values()}) > 1:
            raise InputError(f"the adapter lacks {at} of some experts, or it has several sizes; save it again")
        rest[at] = torch.stack([found[expert] for expert in range(len(found))])
    for name, place in projections.items():
        for side in ("lora_A", "lora_B"):
            mine = getattr(place, side)[adapter]
            given = rest.get(f"{name}.{side}", rest.get(f"base_model.model.{name}.{side}"))
            if given is None or given.shape != mine.shape:
                what = "lacks it" if given is None else f"has {list(given.shape)}"
                raise InputError(
                    f"the adapter is not one of this model: {name}.{side} is {list(mine.shape)}, and the adapter {what}"
                )
    return rest


def _split(
    projections: Mapping[str, ProjectionLora], adapter: str, match: re.Match[str], tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """PEFT's tensors of transformers' stacked parameters: A [E r, in] and B [out, r E]. Where PEFT made those of
    gate_up_proj from two projections, their rank is doubled, and B is zero beside two blocks.
    """
    at, side = match["at"], match["side"]
    bare = at.removeprefix("base_model.model.")
    here = [name for name in projections if name.removeprefix("base_model.model.").startswith(f"{bare}.")]
    names = [name.split(".")[-1] for name in here]
    if len(here) != 3:
        raise InputError(f"the adapter has tensors of {at}, and the model no experts there; it is of another model")
    gate, up, down = names
    place = projections[here[0]]  # rank and experts are those of all three
    experts, r = place.base_layer.experts, place.r[adapter]
    a_side = side == "lora_A"
    if tensor.shape[0 if a_side else 1] % experts:
        raise InputError(f"the adapter is not one of this model: {at}.{side} is {list(tensor.shape)}, of other experts")
    if a_side:
        whole = tensor.reshape(experts, -1, tensor.shape[-1])
    else:
        whole = tensor.reshape(tensor.shape[0], -1, experts).permute(2, 0, 1)
    if not match["inner"]:
        return {f"{at}.{down}.{side}": whole.contiguous()}
    doubled = whole.shape[1 if a_side else 2] == 2 * r
    if a_side:
        first, second = (whole[:, :r], whole[:, r:]) if doubled else (whole, whole)
    else:
        first, second = whole.chunk(2, 1)
        if doubled:
            if first[..., r:].any() or second[..., :r].any():
                raise InputError(
                    f"{at}: the adapter's gate and up projections share both of their ranks, as PEFT trains what it "
                    "loaded with two projections in one parameter; these experts have a rank for each"
                )
            first, second = first[..., :r], second[..., r:]
    return {f"{at}.{gate}.{side}": first.contiguous(), f"{at}.{up}.{side}": second.contiguous()}
