"""PEFT's LoRA for routed experts: three-dimensional parameters in the model, a matrix per expert in an adapter's file.

Importing this module replaces LoraModel by its subclass Tuner in PEFT's table. Therefore get_peft_model,
PeftModel.from_pretrained, save_pretrained and Trainer work without further changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from peft import LoraConfig, LoraModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer
from peft.utils import PeftType, transformers_weight_conversion

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.runtime.adapters import DEFAULT_NAMES, Projection, ProjectionAdapter
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
from ktconvert.native_quant.runtime.peft_targets import EXPERTS, list_stacked_parameters, separate_targets
from ktconvert.native_quant.runtime.training import require_trainable

# Remedies
SAVE_AGAIN = "save the adapter again"
OTHER_MODEL = "load it into the model with which it was trained"
# Names of tensors: of one expert in a file, of all experts of an unconverted model (PEFT's), of our parameters.
ONE_EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.(?P<side>lora_[AB])\.weight")
ALL_EXPERTS = re.compile(r"(?P<at>.*\.experts)(?P<inner>\.base_layer)?\.(?P<side>lora_[AB])\.weight")
FUSED = re.compile(r"(?P<at>.*\.experts)\.(?P<name>\w+)\.(?P<side>lora_[AB])\.(?P<adapter>[^.]+)")


class ProjectionLora(torch.nn.Module, LoraLayer):  # type: ignore[misc]
    """A Projection with adapters: A [E, r, in] and B [E, out, r] of each, in the ParameterDicts lora_A and lora_B."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of LoraLayer."""

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
        """Add an adapter. Raises UnsupportedError for settings that need the weights, and for a bad rank."""
        if not 0 < r <= (most := min(self.in_features, self.out_features, lib.KTQ_MAX_RANK)):
            raise UnsupportedError(f"LoRA's rank r = {r} is not within 1 to {most}, the limit for this model")
        if config.lora_bias or config.fan_in_fan_out:
            raise UnsupportedError("converted experts support LoRA only without lora_bias and fan_in_fan_out")
        plain = config.init_lora_weights in (True, False, "gaussian")
        if not plain or self.resolve_lora_variant(config=config) is not None:
            supported = "ktconvert supports plain LoRA with init_lora_weights True, False or 'gaussian'"
            raise UnsupportedError(f"these settings require the unpacked weights of experts; {supported}")
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_dropout[adapter_name] = torch.nn.Dropout(config.lora_dropout)
        experts = self.base_layer.experts
        a, b = (torch.zeros(experts, *shape) for shape in ((r, self.in_features), (self.out_features, r)))
        if config.init_lora_weights == "gaussian":
            torch.nn.init.normal_(a, std=1 / r)
        else:  # the initialization of torch.nn.Linear
            torch.nn.init.uniform_(a, -1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))
        if not config.init_lora_weights:
            torch.nn.init.uniform_(b, -1 / math.sqrt(r), 1 / math.sqrt(r))
        self.lora_A[adapter_name], self.lora_B[adapter_name] = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def active_projection_adapters(self) -> tuple[ProjectionAdapter, ...]:
        """Return the active adapters."""
        if self.disable_adapters:
            return ()
        return tuple(
            ProjectionAdapter(
                *(self.lora_A[name], self.lora_B[name]), self.r[name], self.scaling[name], self.lora_dropout[name].p
            )
            for name in self.active_adapters
            if name in self.lora_A
        )

    def merge(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "an adapter cannot be merged into packed experts; merge it into the BF16 checkpoint with "
            "`ktconvert merge-adapter`, and convert again with `ktconvert cpu`"
        )


class Tuner(LoraModel):  # type: ignore[misc]
    """LoraModel that also finds RoutedExperts, by the name `experts` or by the names of the projections."""

    def inject_adapter(self, model: torch.nn.Module, adapter_name: str, *args: Any, **other: Any) -> None:
        """Add the adapter's modules. Raises UnsupportedError for settings that RoutedExperts does not support."""
        experts = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
        self._experts = experts
        if experts:
            config = self.peft_config[adapter_name]
            projections = next(iter(experts.values())).projections
            if set(config.modules_to_save or ()) & {EXPERTS, *projections, *list_stacked_parameters(experts)}:
                remedy = "move experts from modules_to_save to target_modules"
                raise UnsupportedError(f"the weights of experts are packed and cannot be trained; {remedy}")
            self._targets = separate_targets(config, model, experts)
            if any(name.split(".")[-1] in projections for name in self._targets.modules):
                _require_adaptable(experts.values())
        super().inject_adapter(model, adapter_name, *args, **other)

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        """Return the config with the targets that inject_adapter withheld from PEFT's conversion."""
        if self._experts:
            names = peft_config.target_modules
            if isinstance(names, str):  # all-linear, for a family unknown to PEFT
                names = _linear_names(self.model)
            if names is not None or self._targets.modules:
                peft_config.target_modules = {*(names or ()), *self._targets.modules}
            stacked = list_stacked_parameters(self._experts)
            parameters = {name for name in peft_config.target_parameters or () if name.split(".")[-1] not in stacked}
            peft_config.target_parameters = parameters or None
            vars(peft_config).update(self._targets.patterns)
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
        """Return a matrix for each expert, by the names of transformers 4, vLLM and SGLang."""
        fused = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, *args, **other)
        split = {}
        for key, tensor in fused.items():
            if (match := FUSED.fullmatch(key)) is None or tensor.ndim != 3:
                split[key] = tensor
                continue
            path, name, side = match["at"], match["name"], match["side"]
            for expert, matrix in enumerate(tensor):
                split[f"{path}.{expert}.{name}.{side}.{match['adapter']}.weight"] = matrix
        return split

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model: Any, config: Any, adapter_name: str, state_dict: Any) -> Any:
        """Return tensors of all experts, made from one per expert or from PEFT's own.

        Raises InputError for an adapter of a different model.
        """
        adapted_layers = {}
        for name, module in model.named_modules():
            if isinstance(module, RoutedExperts) and module.projections:
                adapted = {
                    projection: child
                    for projection, child in module.named_children()
                    if isinstance(child, ProjectionLora) and adapter_name in child.lora_A
                }
                adapted_layers[name.removeprefix(PREFIX)] = AdaptedLayer(module.projections, adapted)
        if any(layer.adapted for layer in adapted_layers.values()):
            state_dict = _stack(adapted_layers, adapter_name, state_dict)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = Tuner

_convert = transformers_weight_conversion.convert_peft_adapter_state_dict_for_transformers


def _convert_filled(model: Any, peft_config: Any, adapter_state_dict: Any, adapter_name: str = "default") -> Any:
    """Call PEFT's function, which joins an expert's gate and up projections, with zeros for a missing one."""
    filled = dict(adapter_state_dict)
    experts = next((module for module in model.modules() if isinstance(module, RoutedExperts)), None)
    if experts is not None and len(experts.projections) == len(DEFAULT_NAMES):
        gate, up, _ = experts.projections
        partners = {gate: up, up: gate}
        for key, tensor in adapter_state_dict.items():
            if (match := ONE_EXPERT.fullmatch(key)) and match["name"] in partners:
                missing = f"{match['at']}.{match['expert']}.{partners[match['name']]}.{match['side']}.weight"
                filled.setdefault(missing, torch.zeros_like(tensor))
    return _convert(model, peft_config, filled, adapter_name)


transformers_weight_conversion.convert_peft_adapter_state_dict_for_transformers = _convert_filled


def _linear_names(model: Any) -> set[str]:
    """Return the last components of the names of all linears but the output head."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    head = model.get_output_embeddings()
    return {name.split(".")[-1] for name, module in linears if module is not head}


def _require_adaptable(experts: Iterable[RoutedExperts]) -> None:
    """Raise UnsupportedError for experts that cannot compute with an adapter."""
    for module in experts:
        if module.hot is not None:
            remedy = "load the model without hot experts"
            raise UnsupportedError(f"experts on the GPU do not support adapters; {remedy}")
        require_trainable(module.experts)


# --- files ----------------------------------------------------------------------------------------

PREFIX = "base_model.model."


class AdaptedLayer(NamedTuple):
    """Names of the projections of RoutedExperts, and those projections that have the adapter."""

    projections: tuple[str, ...]
    adapted: Mapping[str, ProjectionLora]


def _stack(layers: Mapping[str, AdaptedLayer], adapter: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored tensors, those of experts stacked as ProjectionLora has them, named without the adapter's name.

    If an adapter of experts lacks the tensors of a projection, that projection adds nothing, as in PEFT. Raises
    InputError for an adapter of a different model.
    """
    result: dict[str, torch.Tensor] = {}
    stacked: dict[tuple[str, str, str], torch.Tensor] = {}  # module, projection and side -> tensor of all experts
    matrices: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for key, tensor in stored.items():
        match = ONE_EXPERT.fullmatch(key) or ALL_EXPERTS.fullmatch(key)
        if match is None:
            result[key] = tensor
            continue
        path = match["at"].removeprefix(PREFIX)
        if path not in layers:
            raise InputError(
                f"the adapter has tensors of {path}, where the model has no experts; use an adapter of this model"
            )
        if match.re is ONE_EXPERT:
            matrices.setdefault((path, match["name"], match["side"]), {})[int(match["expert"])] = tensor
        else:
            by_projection = _split(path, layers[path], adapter, match, tensor)
            stacked.update({(path, name, match["side"]): part for name, part in by_projection.items()})
    for place, expert_matrices in matrices.items():
        if (
            sorted(expert_matrices) != list(range(len(expert_matrices)))
            or len({matrix.shape for matrix in expert_matrices.values()}) > 1
        ):
            tensor_name = ".".join(place)
            raise InputError(
                f"the adapter lacks {tensor_name} of some experts, or its sizes differ; save the adapter again"
            )
        stacked[place] = torch.stack([expert_matrices[expert] for expert in range(len(expert_matrices))])
    adapted_projections = {(path, name) for path, layer in layers.items() for name in layer.adapted}
    if unknown := [
        ".".join(place) for place, tensor in stacked.items() if place[:2] not in adapted_projections and tensor.any()
    ]:
        raise InputError(f"the adapter has {unknown[0]}, which its settings do not name", SAVE_AGAIN)
    for path, name in sorted(adapted_projections):
        for side in ("lora_A", "lora_B"):
            parameter = getattr(layers[path].adapted[name], side)[adapter]
            value = stacked.get((path, name, side))
            if value is None and stacked and not {(path, name, "lora_A"), (path, name, "lora_B")} & stacked.keys():
                value = torch.zeros_like(parameter)
            if value is None or value.shape != parameter.shape:
                problem = "lacks it" if value is None else f"has {list(value.shape)}"
                shape = list(parameter.shape)
                raise InputError(
                    f"{path}.{name}.{side} of this model is {shape}, but the adapter {problem}", OTHER_MODEL
                )
            result[f"{PREFIX}{path}.{name}.{side}"] = value
    return result


def _split(
    path: str, layer: AdaptedLayer, adapter: str, match: re.Match[str], tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Split PEFT's tensor of a stacked parameter, A [E r, in] or B [out, r E], by projection.

    If PEFT made the tensor of gate_up_proj from two projections, their ranks follow each other, and B is zero outside
    of two blocks.
    """
    side = match["side"]
    adapted = layer.adapted
    if not adapted:
        raise InputError(f"the adapter has tensors of {path}, which its settings do not name", SAVE_AGAIN)
    experts = next(iter(adapted.values())).base_layer.experts
    is_a = side == "lora_A"
    if tensor.shape[0 if is_a else 1] % experts:
        problem = f"{path}.{side} of the adapter is {list(tensor.shape)}, for a different number of experts"
        raise InputError(problem, OTHER_MODEL)
    if is_a:
        by_expert = tensor.reshape(experts, -1, tensor.shape[-1])
    else:
        by_expert = tensor.reshape(tensor.shape[0], -1, experts).permute(2, 0, 1)
    *inner, down = layer.projections
    if not match["inner"] and down in adapted:
        return {down: by_expert.contiguous()}
    if len(inner) == 1:
        return {inner[0]: by_expert.contiguous()}
    gate, up = inner
    rank = by_expert.shape[1 if is_a else 2]
    ranks = [adapted[name].r[adapter] for name in inner if name in adapted]
    if set(ranks) == {rank}:
        first, second = (by_expert, by_expert) if is_a else by_expert.chunk(2, 1)
    else:
        boundary = ranks[0] if gate in adapted else rank - ranks[0]
        if is_a:
            first, second = by_expert[:, :boundary], by_expert[:, boundary:]
        else:
            first, second = by_expert.chunk(2, 1)
            if first[..., boundary:].any() or second[..., :boundary].any():
                shape, rank_text = list(tensor.shape), " and ".join(map(str, sorted({*ranks})))
                problem = f"{path}.{side} of the adapter is {shape}, but not for {experts} experts of rank {rank_text}"
                raise InputError(problem, OTHER_MODEL)
            first = first[..., :boundary]
            second = second[..., boundary:]
    return {gate: first.contiguous(), up: second.contiguous()}
