"""Routed experts for transformers: from_pretrained(MODEL, quantization_config=KTConvertConfig(cpu_weights=OUT)).

Importing this module registers the config and its quantizer under the name "ktconvert", and under that of our outputs,
so that from_pretrained(OUT) loads the experts of OUT. Each routed-experts module is replaced before transformers loads
weights, so that it reads none of the checkpoint's expert tensors.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_utils
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.reprs import write_repr
from ktconvert.layouts.sources.config import QUANT_METHOD
from ktconvert.layouts.tensors import format_ranges, name_layers
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.runtime import adapters, hf_non_experts, hot_experts
from ktconvert.native_quant.runtime.arguments import check_calls, require_integer, require_one_of, require_path
from ktconvert.native_quant.runtime.converted_experts import MEMORY, Memory
from ktconvert.native_quant.runtime.experts import ACTIVATIONS, AUTO, Activations, KTExperts, open_experts
from ktconvert.native_quant.runtime.few_tokens import accelerate_linears
from ktconvert.native_quant.runtime.hf_blocks import replace_blocks
from ktconvert.native_quant.runtime.hf_modules import IMAGES, NORM, ExpertModule, RoutedExperts, find_experts
from ktconvert.native_quant.runtime.hf_non_experts import NAME
from ktconvert.native_quant.runtime.hot_experts import HotExperts, HotWeights, Mask
from ktconvert.native_quant.runtime.pool import get_shared_pool
from ktconvert.native_quant.runtime.same_experts import require_same_experts
from ktconvert.native_quant.runtime.stored_tensors import ACTIVATION_SCALES, StoredTensor
from ktconvert.native_quant.runtime.warn import warn_user


class KTConvertConfig(QuantizationConfigMixin):
    """Source and computation of the routed experts of a model, for from_pretrained of transformers.

    >>> config = KTConvertConfig(cpu_weights="model-int8")
    >>> model = AutoModelForCausalLM.from_pretrained("model", quantization_config=config)

    cpu_weights       converted weights, or a checkpoint whose experts are computed without conversion; None: the model
                      that is loaded
    exact             use kt-kernel's rounding, bit for bit
    activations       as for KTExperts.load
    threads           number of threads for the experts; None: the physical cores that this process may use
    memory            "copy": a copy in memory; "map": the pages of the files; "auto": copy if it fits into memory
    gpu_experts_mask  experts that torch computes, on the GPU if there is one: a bool tensor, array or lists [decoder
                      layers, experts], or a safetensors file with a tensor of this name
    num_gpu_experts   instead of a mask: the first num_gpu_experts experts of each layer
    gpu_experts       the checkpoint with these experts, packed or not: a directory or a hub id; None: the model that is
                      loaded
    quant_method      the name under which transformers finds this class
    Raises ArgumentError for invalid values, UsageError for conflicting ones; both are a ValueError. from_pretrained
    checks the files.
    """

    @check_calls()
    def __init__(
        self,
        cpu_weights: str | os.PathLike[str] | None = None,
        exact: bool = False,
        activations: Activations = AUTO,
        threads: int | None = None,
        memory: Memory = "auto",
        gpu_experts: str | os.PathLike[str] | None = None,
        gpu_experts_mask: str | os.PathLike[str] | torch.Tensor | list[list[bool]] | None = None,
        num_gpu_experts: int | None = None,
        quant_method: str = NAME,
    ) -> None:
        require_one_of("quant_method", quant_method, (NAME, QUANT_METHOD))
        require_one_of("exact", exact, (False, True))
        require_one_of("activations", activations, ACTIVATIONS)
        require_one_of("memory", memory, MEMORY)
        if gpu_experts_mask is not None and num_gpu_experts is not None:
            raise UsageError("gpu_experts_mask and num_gpu_experts exclude each other; give one of them")
        if gpu_experts is not None and gpu_experts_mask is None and num_gpu_experts is None:
            remedy = "select experts with gpu_experts_mask or num_gpu_experts"
            raise UsageError(f"gpu_experts is set, but no experts are selected; {remedy}")
        self.quant_method = quant_method  # type: ignore[assignment]
        self.exact, self.activations, self.memory = exact, activations, memory
        # JSON values, since transformers writes configs as JSON.
        self.threads = None if threads is None else require_integer("threads", threads, 1, lib.KTQ_POOL_THREADS)
        self.cpu_weights = None if cpu_weights is None else require_path("cpu_weights", cpu_weights)
        self.gpu_experts = None if gpu_experts is None else require_path("gpu_experts", gpu_experts)
        self.gpu_experts_mask = None if gpu_experts_mask is None else hot_experts.parse_mask(gpu_experts_mask)
        count = num_gpu_experts
        self.num_gpu_experts = None if count is None else require_integer("num_gpu_experts", count, 0)

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults; only the shape of a mask."""
        defaults = {name: each.default for name, each in inspect.signature(KTConvertConfig).parameters.items()}
        values = {name: value for name, value in vars(self).items() if name in defaults and value != defaults[name]}
        if isinstance(mask := values.get("gpu_experts_mask"), list):
            values["gpu_experts_mask"] = f"bool [{len(mask)}, {len(mask[0])}]"
        return write_repr(self, **values)


register_quantization_config(NAME)(KTConvertConfig)  # as a decorator, it would hide the fields from type checkers


@register_quantizer(NAME)
class KTConvertQuantizer(HfQuantizer):
    """Quantizer of transformers that replaces every routed-experts module by RoutedExperts."""

    requires_calibration = False
    quantization_config: KTConvertConfig
    _save_remedy = "`ktconvert cpu --non-experts keep` converts the original model into one directory with all weights"
    stored_tensors: dict[str, StoredTensor] | None = None  # to load instead of the files, if some are quantized
    _for_images = range(0)  # numbers of experts that are loaded, beside the replaced ones
    _shapes: Mapping[str, torch.Size] = {}  # of the model's tensors by its config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        """Replace the experts, and let transformers silently skip the checkpoint's tensors of these modules.

        Raises UnsupportedError if the experts cannot be replaced, InputError if those of cpu_weights are not the
        model's, and errors of KTExperts.load, masks_by_layer and HotWeights.
        """
        settings = self.quantization_config
        folder = Path(checkpoint_files[0]).parent if checkpoint_files else None
        root = folder if settings.cpu_weights is None else Path(settings.cpu_weights).expanduser()
        if root is None:
            raise UsageError("the model is not loaded from files; set cpu_weights to a directory with its experts")
        held_experts = replace_blocks(model)
        source_experts = open_experts(root)
        modules = find_experts(model, source_experts.function, source_experts.layers)
        for_images = hf_non_experts.number_experts_for_images(model)
        if not any(IMAGES in module.name for module in modules):
            self._for_images = for_images
        sizes = {module.layer: module.num_experts for module in modules}
        layers = max(model.config.get_text_config(decoder=True).num_hidden_layers, 1 + max(sizes))
        by_layer = hot_experts.masks_by_layer(settings.gpu_experts_mask, settings.num_gpu_experts, sizes, layers)
        masks = {layer: mask for layer, mask in by_layer.items() if mask.any()}
        source = self._open_hot_weights(modules, folder, masks) if masks else None
        if checkpoint_files and settings.quant_method == NAME:
            self.stored_tensors = hf_non_experts.find_decoded_tensors(checkpoint_files)
        loaded = self._load_experts(root, type(model).__name__, modules, masks)
        if folder is not None:
            require_same_experts(folder, root, loaded, masks)
        hot: dict[int, HotExperts] = {}
        if source is not None:
            if any(experts._function.output_norm for experts in loaded.values()):
                raise UnsupportedError(f"{root}: hot experts cannot have a norm of their output; leave them out")
            for layer in masks:
                source.require_function(layer, loaded[layer]._function)
            device = hot_experts.hot_device()
            hot_experts.require_memory(masks.values(), modules[0].hidden, modules[0].intermediate, device)
            hot = {layer: hot_experts.load_hot_experts(source, layer, mask, device) for layer, mask in masks.items()}
        names = adapters.projection_names(model, modules[0].gated)
        if find_spec("peft") is not None:
            importlib.import_module("ktconvert.native_quant.runtime.peft_tuner")  # extends get_peft_model
        for module in modules:
            parent, _, name = module.name.rpartition(".")
            block = model.get_submodule(parent)
            norm = getattr(block.get_submodule(name), NORM, None)
            layer = module.layer
            replacement = RoutedExperts(layer, loaded[layer], module.zero_ids, hot.get(layer), norm)
            adapters.add_projections(replacement, names, (module.num_experts, module.hidden, module.intermediate))
            setattr(block, name, replacement)
            if next(block.parameters(recurse=False), None) is None:
                block._is_hf_initialized = True  # some families would otherwise initialize the experts
            for name in itertools.accumulate(parent.split("."), "{}.{}".format, initial=""):
                _make_first_attribute(model.get_submodule(name.removeprefix(".")), replacement.experts)
        base = f"{model.base_model_prefix}."  # an optional prefix of names in the checkpoint
        replaced = {*held_experts, *(module.name for module in modules)}
        names_below = (re.escape(name.removeprefix(base)) for name in sorted(replaced))
        model._keys_to_ignore_on_load_unexpected.update(rf"^({re.escape(base)})?{name}\." for name in names_below)
        if for_images:
            model._keys_to_ignore_on_load_unexpected.add(hf_non_experts.ANY_EXPERT)
        if self.stored_tensors is not None:
            model._keys_to_ignore_on_load_unexpected.add(ACTIVATION_SCALES)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Let the linears that transformers loaded multiply few tokens at the memory's speed, too.

        Raises InputError for a tensor whose shape differs from that of the config, which transformers does not check.
        """
        loaded = model.state_dict()
        pairs = ((name, loaded[name].shape, shape) for name, shape in self._shapes.items() if name in loaded)
        mismatched = [(name, stored, shape) for name, stored, shape in pairs if stored != shape]
        hf_non_experts.require_equal_shapes(mismatched, model.config.name_or_path)
        accelerate_linears(model, get_shared_pool(self.quantization_config.threads))
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Return the model's own conversions, but for replaced experts. transformers passes the model since 5.21."""
        quantizer: Any = super()
        conversions = quantizer.update_weight_conversions(weight_conversions, *model)
        return hf_non_experts.convert_experts_for_images(conversions, self._for_images)

    def _open_hot_weights(
        self, modules: list[ExpertModule], folder: Path | None, masks: Mapping[int, Mask]
    ) -> HotWeights:
        """Open the checkpoint of the hot experts, which must have them, and the model's sizes. masks: layer -> mask."""
        gpu_experts = self.quantization_config.gpu_experts
        root = folder if gpu_experts is None else Path(gpu_experts).expanduser()
        if root is None:
            raise UsageError("the model is not loaded from files; set gpu_experts to the hot experts' checkpoint")
        source = HotWeights(root)
        for module in modules:
            if (mask := masks.get(module.layer)) is not None:
                source.require_experts(module.layer, (module.num_experts, module.hidden, module.intermediate), mask)
        return source

    def _load_experts(
        self, root: Path, model_class: str, modules: list[ExpertModule], hot: Mapping[int, Mask]
    ) -> dict[int, KTExperts]:
        """Load the experts of every layer that are not hot, before the model is changed. hot: layer -> mask."""
        settings = self.quantization_config
        source = open_experts(root)
        layers = {module.layer for module in modules}
        unused = sorted({*source.layers} - layers)
        if unused and not self._for_images:
            problem = (
                f"has experts of {name_layers(format_ranges(unused))}, which {model_class} lacks and which are not used"
            )
            warn_user(f"{root}: {problem}; check that it was converted from this model")
        missing = sorted(layers.difference(source.layers))
        if missing:
            source.require_readable(missing[0])
            problem = f"has no experts of {name_layers(format_ranges(missing))}, but {model_class} has"
            raise UnsupportedError(f"{root}: {problem}; give experts of all layers of this model")
        loaded: dict[int, KTExperts] = {}
        options: Any = {name: getattr(settings, name) for name in ("exact", "activations", "memory")}
        options["pool"] = get_shared_pool(settings.threads)
        for module in modules:
            sizes: Any = {"num_experts": module.num_experts, "hidden": module.hidden}
            sizes |= {"intermediate": module.intermediate}
            loaded[module.layer] = KTExperts.load(root, module.layer, **sizes, **options, skip=hot.get(module.layer))
        return loaded

    def is_serializable(self) -> bool:
        """Raise ValueError, since save_pretrained, which calls this, would leave out the experts."""
        raise ValueError(
            "this model is not serializable: its experts are in "
            f"{self.quantization_config.cpu_weights or 'the checkpoint'}, and save_pretrained would leave them out; "
            f"{self._save_remedy}, which from_pretrained loads"
        )

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Raise NotImplementedError; called by model.dequantize."""
        remedy = "load the original model without KTConvertConfig"
        raise NotImplementedError(f"converted experts cannot be dequantized; {remedy}")

    @property
    def is_trainable(self) -> bool:
        """True: gradients flow through the experts to adapters (PEFT). The weights of experts stay as they are."""
        return True


FIRST_ATTRIBUTE = "_some_experts"  # attribute of modules that contain converted experts (_make_first_attribute)
# Settings of the computation that do not depend on the directory of the experts: fields of KTConvertConfig.
OPTIONS = ("exact", "activations", "threads", "memory", "gpu_experts", "gpu_experts_mask", "num_gpu_experts")


@register_quantization_config(QUANT_METHOD)
class ConvertedConfig(KTConvertConfig):
    """The quantization_config in an output's config.json, with OPTIONS: the experts are in the same directory."""

    def __init__(self, quant_method: str = QUANT_METHOD, **settings: Any) -> None:
        super().__init__(quant_method=quant_method, **{name: settings[name] for name in OPTIONS if name in settings})


@register_quantizer(QUANT_METHOD)
class ConvertedQuantizer(KTConvertQuantizer):
    """Quantizer for an output: loads its experts and its non-expert tensors (`--non-experts keep`, `copy`)."""

    _save_remedy = "copy that directory"
    _renamings: tuple[Any, ...] = ()

    def update_attn_implementation(self, config: Any) -> Any:
        """Raise UnsupportedError for an output without safetensors files, before transformers looks for other files."""
        config.transformers_weights = None
        if config.name_or_path:
            hf_non_experts.require_files(Path(config.name_or_path))
        return config

    update_tp_plan = update_attn_implementation  # transformers 5.17 calls this instead

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        """Replace the experts; tensors have kt-kernel's names, and non-expert tensors may be missing."""
        if not checkpoint_files:
            remedy = "pass the directory of an output to from_pretrained"
            raise UsageError(f"experts can only be loaded from files; {remedy}")
        root = Path(checkpoint_files[0]).parent
        replace_blocks(model)
        source_experts = open_experts(root)
        modules = find_experts(model, source_experts.function, source_experts.layers)
        renamings = hf_non_experts.make_renamings(model, modules)
        hf_non_experts.require_complete(root, checkpoint_files, model, modules, renamings)
        self.quantization_config.cpu_weights = str(root)
        super()._process_model_before_weight_loading(model, checkpoint_files, **kwargs)
        model._keys_to_ignore_on_load_unexpected.add(hf_non_experts.EXPERTS)
        self._renamings = tuple(renamings)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Return the model's own conversions, after the renaming to the original names."""
        return [*self._renamings, *super().update_weight_conversions(weight_conversions, *model)]


hf_non_experts.keep_router_dtypes()
_loading: Any = modeling_utils
_get_hf_quantizer = _loading.get_hf_quantizer


def _get_quantizer(config: Any, quantization_config: Any, *arguments: Any, **options: Any) -> Any:
    """Call transformers' get_hf_quantizer, which would refuse a model that has a quantization of its own."""
    if isinstance(quantization_config, dict) and quantization_config.get("quant_method") == NAME:
        quantization_config = KTConvertConfig(**quantization_config)
    if isinstance(quantization_config, KTConvertConfig):
        model = config.name_or_path or "the model"
        weights = quantization_config.cpu_weights
        hf_non_experts.drop_quantization_config(config)
        model_quantization = getattr(config, "quantization_config", None) or {}
        if isinstance(model_quantization, dict) and model_quantization.get("quant_method") == QUANT_METHOD:
            if weights is not None and Path(weights).expanduser().resolve() != Path(model).resolve():
                raise UsageError(f"{model}: has converted experts of its own; leave out cpu_weights")
            config.quantization_config = model_quantization | {
                name: getattr(quantization_config, name) for name in OPTIONS
            }
            quantization_config = None
    return _get_hf_quantizer(config, quantization_config, *arguments, **options)


_loading.get_hf_quantizer = _get_quantizer
_load_model = _loading.PreTrainedModel._load_pretrained_model


def _load_stored_tensors(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any) -> Any:
    """Call transformers' _load_pretrained_model, with decoded tensors if those in the files are quantized."""
    quantizer = load_config.hf_quantizer
    if (stored := getattr(quantizer, "stored_tensors", None)) is not None:
        quantizer.stored_tensors = None  # so that the files are closed when the model is loaded
        state_dict, checkpoint_files = stored, None
    return _load_model(model, state_dict, checkpoint_files, load_config, *more)


_loading.PreTrainedModel._load_pretrained_model = staticmethod(_load_stored_tensors)


def _make_first_attribute(module: torch.nn.Module, experts: KTExperts) -> None:
    """Make experts the first attribute of a module, so that pickle raises their error before it reaches hooks."""
    if FIRST_ATTRIBUTE not in vars(module):
        attributes = dict(vars(module))
        vars(module).clear()
        vars(module).update({FIRST_ATTRIBUTE: experts, **attributes})
