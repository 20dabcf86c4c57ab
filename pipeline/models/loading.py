"""Loading of a model through transformers, with or without converted experts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import adapter
from ktconvert.layouts.encodings.pack_quantized import FORMAT, METHOD
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError, UsageError, bad_file
from ktconvert.layouts.extras import install_command, require_packages
from ktconvert.layouts.outputs.opening import (
    is_output,
    is_whole_model,
    open_output,
    require_directory,
    require_model,
)
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources import hub, rotation
from ktconvert.layouts.sources.source import TensorSource, open_checkpoint
from ktconvert.native_quant.runtime import hot_experts
from ktconvert.native_quant.runtime.checkpoint_experts import open_checkpoint_experts
from ktconvert.native_quant.runtime.converted_experts import Memory
from ktconvert.native_quant.runtime.experts import AUTO, INT8, Activations, open_experts
from ktconvert.native_quant.runtime.pool import get_shared_pool
from ktconvert.native_quant.runtime.required_packages import RUN_PACKAGES
from ktconvert.native_quant.runtime.stored_tensors import find_stored_tensors
from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.models.adapter_loading import load_adapter
from ktconvert.pipeline.options.model_options import STORED

# extra -> packages that its commands need
REQUIRED_PACKAGES = {
    "run": RUN_PACKAGES,
    "train": (*RUN_PACKAGES, "peft", "datasets"),
    "serve": (*RUN_PACKAGES, "fastapi", "uvicorn", "openai", "pydantic", "prometheus_client", "llguidance"),
    "gpu": (*RUN_PACKAGES, "compressed_tensors"),
}
# Number of kernels that torch's linears keep, each for one number of tokens. The default 1024 needs a gigabyte.
KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
PROGRESS_DELAY = "1000000000"  # seconds before the first bar
# Settings that override those of generation_config.json, to stream one answer: without a cache, a prompt cannot be read
# in chunks, and several answers at once cannot be streamed.
ONE_ANSWER = {"use_cache": True, "num_beams": None, "num_return_sequences": None}
# Variable of glibc -> parameter and value of mallopt. By default, threads have arenas of their own, and released memory
# stays there: up to 64 MB in each.
# With a threshold of 1 MiB, a prompt takes 1.1 to 1.2 times as long: pages that return must be cleared again.
MALLOC = {"MALLOC_ARENA_MAX": (-8, 1), "MALLOC_MMAP_THRESHOLD_": (-3, 4 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 8 << 20)}


def set_environment() -> None:
    """Set environment variables before torch is imported, unless the user has set them.

    Idle threads sleep, kernel caches are small, and libraries draw no progress bars. The memory of large tensors
    returns to the system when they are released.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for cache in KERNEL_CACHES:
        os.environ.setdefault(cache, "64")
    os.environ.setdefault("TQDM_DELAY", PROGRESS_DELAY)  # compressed-tensors overrules TQDM_DISABLE
    with suppress(AttributeError):  # another C library
        for variable, setting in MALLOC.items():
            if variable not in os.environ:
                ctypes.CDLL(None).mallopt(*setting)


@dataclass(frozen=True)
class ModelChoice:
    """A model (a directory or a hub id), and the source of its experts.

    cpu_weights       an output of `ktconvert cpu`, or a checkpoint; None: transformers computes the experts
    threads           number of threads; None for the physical cores that this process may use
    memory            memory of converted experts, as for KTExperts.load
    activations       of converted experts, as for KTExperts.load
    non_experts       weights of the linears outside the experts: STORED or INT8
    adapter           directory of a LoRA adapter to compute with
    gpu_experts_mask  mask of the hot experts, which come from the model itself, as in KTConvertConfig
    num_gpu_experts   number of hot experts per layer, as in KTConvertConfig
    """

    model: str
    cpu_weights: Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None
    memory: Memory = "auto"
    non_experts: str = STORED
    activations: Activations = AUTO
    exact: bool = False
    gpu_experts_mask: Path | None = None
    num_gpu_experts: int | None = None
    adapter: Path | None = None

    def hub_options(self) -> dict[str, Any]:
        """Return the arguments that every from_pretrained of transformers takes.

        Without a network, transformers would repeat its requests for each file for half a minute. So it makes none if
        all files are here, unless it may fetch code of other repositories.
        """
        local = self.find_directory() is not None and not self.trust_remote_code
        return {
            "revision": self.revision or "main",
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": local,
        }

    def find_directory(self) -> Path | None:
        """Return the directory with all files of the model; None if the hub's cache lacks some."""
        if Path(self.model).is_dir():
            return Path(self.model)
        folder = hub.find_snapshot(self.model, self.revision)
        return folder if folder is not None and hub.is_complete(folder) else None

    @property
    def has_hot_experts(self) -> bool:
        """True if some experts come from the model itself while cpu_weights provides the others."""
        return self.gpu_experts_mask is not None or self.num_gpu_experts is not None

    @cached_property
    def is_converted(self) -> bool:
        """True if the model is an output of `ktconvert cpu` that includes the non-expert tensors."""
        root = Path(self.model)
        return (
            root.is_dir()
            and is_output(root)
            and not is_whole_model(root)
            and bool(open_output(root).non_expert_tensors)
        )

    @property
    def computes_experts(self) -> bool:
        """True if the runtime computes the experts."""
        return self.cpu_weights is not None or self.is_converted

    def validate(self) -> None:
        """Raise UsageError for options that exclude each other, InputError or UnsupportedError for unusable files."""
        if self.has_hot_experts and self.cpu_weights is None:
            option = "--num-gpu-experts" if self.gpu_experts_mask is None else "--gpu-experts-mask"
            raise UsageError(f"{option} selects experts that --cpu-weights does not compute; also give --cpu-weights")
        if self.gpu_experts_mask is not None and self.num_gpu_experts is not None:
            raise UsageError("--gpu-experts-mask and --num-gpu-experts exclude each other; give one of them")
        if self.adapter is not None:
            require_packages("--adapter", ["peft"], "train")
            adapter.require_adapter(self.adapter)
        if self.gpu_experts_mask is not None:
            hot_experts.read_mask(self.gpu_experts_mask.expanduser())
        if not hub.HUB_ID.fullmatch(self.model) and not Path(self.model).exists():
            raise hub.absent_model(self.model)
        if self.model.endswith(".gguf"):
            remedy = "give the model that it was made from (a directory or a hub id), and this file as --cpu-weights"
            raise InputError("a GGUF has only weights", remedy, path=self.model)
        require_directory(Path(self.model))
        if not self.is_converted:
            require_model(Path(self.model), "give the original model, and this directory as --cpu-weights")
        for folder, kind in ((self.model, "a model"), (self.cpu_weights, "experts")):
            if folder is not None and adapter.is_adapter(Path(folder)):
                raise bad_file(folder, f"is a LoRA adapter, not {kind}", "give it as --adapter, beside the model")
        if self.is_converted and self.cpu_weights is not None:
            raise UsageError(f"{self.model}: has converted experts of its own; leave out --cpu-weights")
        if self.cpu_weights is not None:
            open_experts(self.cpu_weights.expanduser()).require_computable()  # before the model is loaded

    def device(self) -> str:
        """Return the device of the non-expert tensors: that of the hot experts, since they wait for each other."""
        import torch

        return "cuda" if self.has_hot_experts and torch.cuda.is_available() else "cpu"

    def quantization_config(self) -> Any:
        """Return the argument of from_pretrained that replaces the experts; None without cpu_weights."""
        if self.cpu_weights is None:
            return None
        from ktconvert.native_quant.runtime.hf import KTConvertConfig

        return KTConvertConfig(
            cpu_weights=self.cpu_weights.expanduser().absolute(),
            exact=self.exact,
            activations=self.activations,
            memory=self.memory,
            threads=self.threads,
            gpu_experts=self.find_directory() if self.has_hot_experts else None,
            gpu_experts_mask=self.gpu_experts_mask and self.gpu_experts_mask.expanduser().absolute(),
            num_gpu_experts=self.num_gpu_experts,
        )


def prepare_config(choice: ModelChoice) -> Any:
    """Set the number of threads, and return the model's config. Call it before torch is imported.

    The config has no quantization of its own if converted experts replace the model's. Raises the errors of validate,
    and UnsupportedError for a model whose experts cannot be replaced.
    """
    choice.validate()
    if choice.non_experts == INT8 and not choice.computes_experts:
        raise UsageError("--non-experts int8 needs experts that the runtime computes; also give --cpu-weights.")
    set_environment()
    if not Path(choice.model).exists():
        hub.resolve(choice.model, choice.revision)  # fails at once if the hub does not answer
    import torch
    import transformers

    if choice.non_experts == INT8 and choice.device() != "cpu":
        raise UsageError("--non-experts int8 is for the CPU; leave it out, or the experts on the GPU.")

    if choice.threads is not None:
        torch.set_num_threads(choice.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = pretrained.read_config(choice.model, **choice.hub_options())
    config_parts = (config, config.get_text_config(decoder=True))
    model_quantization: dict[str, Any] = next(
        filter(None, (getattr(part, "quantization_config", None) for part in config_parts)), {}
    )
    rotation.refuse_config(choice.model, {"quantization_config": model_quantization})
    if choice.is_converted:
        import ktconvert.native_quant.runtime.hf  # noqa: F401  # registers the quantization that config.json names

        settings = {
            "exact": choice.exact,
            "activations": choice.activations,
            "threads": choice.threads,
            "memory": choice.memory,
        }
        config.quantization_config = {**model_quantization, **settings}
        return config
    if choice.cpu_weights is None:
        if model_quantization.get("format") == FORMAT and find_spec("compressed_tensors") is None:
            raise KTConvertError(
                f"{choice.model}: its experts are packed by {METHOD}, not installed here: `{install_command('gpu')}`"
            )
        return config
    from ktconvert.native_quant.runtime import hf_non_experts

    hf_non_experts.drop_quantization_config(config)
    return config


def with_own_experts(choice: ModelChoice, warn: Callable[[str], None]) -> ModelChoice:
    """Return the choice with the model's own experts as CPU weights, unless it has converted experts.

    If the runtime cannot compute those of `ktconvert gpu`, calls `warn` with a sentence, and returns the choice as it
    is: transformers unpacks them. Raises UnsupportedError for other experts that the runtime cannot compute.
    """
    choice.validate()
    if choice.is_converted or choice.cpu_weights is not None:
        return choice
    root = hub.resolve(choice.model, choice.revision)
    try:
        open_checkpoint_experts(root).require_computable()
    except UnsupportedError:
        if not is_output(root):
            raise
        problem = "transformers unpacks its experts to BF16, since ktconvert's runtime has no method for them"
        warn(f"{choice.model}: {problem}; with --cpu-weights, it computes converted ones, in less memory")
        return choice
    return replace(choice, cpu_weights=root)


def context_length(config: Any) -> int | None:
    """Return the most tokens that a model of this config reads; None if the config does not say."""
    length = getattr(config.get_text_config(decoder=True), cfg.CONTEXT_LENGTH, None)
    return length if isinstance(length, int) and length > 0 else None


def require_context(config: Any, length: int) -> None:
    """Raise UsageError for sequences of --sequence-length tokens that a model of this config cannot read."""
    limit = context_length(config)
    if limit is not None and length > limit:
        problem = f"the context of the model is {limit} tokens ({cfg.CONTEXT_LENGTH})"
        raise UsageError(f"--sequence-length {length}: {problem}; give a smaller one.")


def load_model_and_tokenizer(choice: ModelChoice, *, chats: bool = False) -> tuple[Any, Any]:
    """Return the model and its tokenizer.

    chats  whether the tokenizer needs a valid chat template, which is checked before the model is loaded

    Raises UnsupportedError for experts that do not fit the model, InputError for unusable files.
    """
    config = prepare_config(choice)
    options: dict[str, Any] = {}
    if choice.cpu_weights is not None:
        options |= {"quantization_config": choice.quantization_config(), "device_map": choice.device()}
    tokenizer = load_tokenizer(choice)
    if chats:
        pretrained.require_chat_template(tokenizer, choice.model)
    return load_model(pretrained.auto_class(config), choice, config, **options), tokenizer


def load_model(kind: Any, choice: ModelChoice, config: Any, **options: Any) -> Any:
    """Return the model, set to generate one answer at a time.

    kind    auto class of transformers
    config  the config from prepare_config

    Raises InputError for missing or unusable tensors.
    """
    from ktconvert.native_quant.runtime.few_tokens import quantize_linears
    from ktconvert.native_quant.runtime.generation import accelerate_generation

    root = choice.find_directory()
    weights = None
    source = None if root is None or choice.is_converted else open_checkpoint(root)
    if source is not None and choice.cpu_weights is not None:
        source.require_one_reading()
    elif source is not None and not getattr(config, "auto_map", None) and not is_packed_for_gpus(source):
        weights = find_stored_tensors(source, whole=True)
    if weights is not None:
        from ktconvert.native_quant.runtime import hf_non_experts

        hf_non_experts.drop_quantization_config(config)
    elif source is not None:
        source.require_found()
    model = pretrained.load_pretrained(kind, choice.model, config, weights, **options, **choice.hub_options())
    for name, value in ONE_ANSWER.items():
        setattr(model.generation_config, name, value)
    if choice.non_experts == INT8:
        quantize_linears(model)
    if choice.computes_experts:
        accelerate_generation(model, get_shared_pool(choice.threads))
    return model if choice.adapter is None else load_adapter(model, choice.adapter, choice.model)


def is_packed_for_gpus(source: TensorSource) -> bool:
    """Return whether compressed-tensors packed the experts, as for `ktconvert gpu`; it then unpacks them itself."""
    about = cfg.find_value(source.config, ("quantization_config.format",))
    return source.quantization.method == METHOD and about is not None and about[1] == FORMAT


def load_tokenizer(choice: ModelChoice) -> Any:
    """Return the tokenizer. Raises InputError if it is unusable."""
    return pretrained.read_tokenizer(choice.model, **choice.hub_options())
