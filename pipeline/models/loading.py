"""Loading a model of transformers, with or without converted experts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import hub, rotation
from ktconvert.layouts.checkpoints.adapter import require_adapter
from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint
from ktconvert.layouts.encodings.pack_quantized import METHOD
from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError, UsageError
from ktconvert.layouts.outputs.opening import is_output, is_whole_model, open_output
from ktconvert.native_quant.matrix import decode
from ktconvert.native_quant.runtime import hot_mask
from ktconvert.native_quant.runtime.from_checkpoint import open_experts
from ktconvert.pipeline.models import building, decoding
from ktconvert.pipeline.models.adapter_loading import with_adapter
from ktconvert.quantizers.reference import bf16_to_f32

RUN = ("torch", "transformers", "accelerate")
# extra -> the packages without which its commands cannot start
NEEDS = {
    "run": RUN,
    "train": (*RUN, "peft", "datasets"),
    "serve": (*RUN, "fastapi", "uvicorn", "openai", "pydantic"),
    "gpu": (*RUN, "compressed_tensors"),
}
# How many kernels torch's linears keep, each made for one number of tokens; by default 1024, which takes a gigabyte.
KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
FOREVER = "1000000000"  # seconds before a bar is drawn
LONGEST = "max_position_embeddings"  # what a config calls the most tokens that a model reads
# What a generation_config.json may ask that does not go with one answer, streamed: without a cache no prompt is read in
# parts, and several answers at once are not streamed.
ONE_ANSWER = {"use_cache": True, "num_beams": None, "num_return_sequences": None}

SAME = 0.5  # the least cosine of a weight and its converted one; those of different experts have one near 0


def require_packages(what: str, packages: Sequence[str], extra: str) -> None:
    """Raise KtconvertError, which names the extra to install, where a package that `what` needs is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise KtconvertError(f"{what} needs {', '.join(missing)}, not installed here: pip install 'ktconvert[{extra}]'")


def share_cores() -> None:
    """Before torch is imported: threads sleep without work, kernel caches are small, libraries draw no bars."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for cache in KERNEL_CACHES:
        os.environ.setdefault(cache, "64")
    os.environ.setdefault("TQDM_DELAY", FOREVER)  # TQDM_DISABLE is overruled by compressed-tensors, which draws four


@dataclass(frozen=True)
class ModelChoice:
    """Which model (a directory or a hub id), and who computes its experts.

    cpu_weights  what the model was converted into, or a checkpoint; None: the experts stay in the model
    threads      None: the physical cores that this process may use
    adapter      the directory of a LoRA adapter that it is to compute with
    gpu_experts_mask, num_gpu_experts   as in KTConvertConfig: experts that come from the model nevertheless
    """

    model: str
    cpu_weights: Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None
    exact: bool = False
    gpu_experts_mask: Path | None = None
    num_gpu_experts: int | None = None
    adapter: Path | None = None

    def where(self) -> dict[str, Any]:
        """What every from_pretrained of transformers takes."""
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}

    def root(self) -> Path | None:
        """The directory with all of the model's files; None where the hub's cache has none yet."""
        if Path(self.model).is_dir():
            return Path(self.model)
        folder = hub.snapshot(self.model, self.revision)
        return folder if folder is not None and hub.complete(folder) else None

    @property
    def hot(self) -> bool:
        """Whether some experts are to come from the model although others do not."""
        return self.gpu_experts_mask is not None or self.num_gpu_experts is not None

    @cached_property
    def is_converted(self) -> bool:
        """Whether the model is an output of `ktconvert cpu` with all else beside the experts."""
        root = Path(self.model)
        return root.is_dir() and is_output(root) and not is_whole_model(root) and bool(open_output(root).others)

    def check(self) -> None:
        """Raises UsageError for options that do not go together, InputError and UnsupportedError for other files."""
        if self.hot and self.cpu_weights is None:
            which = "--gpu-experts-mask and --num-gpu-experts say which experts --cpu-weights does not compute"
            raise UsageError(f"{which}; give that as well")
        hot_mask.check(self.gpu_experts_mask, self.num_gpu_experts)
        if self.adapter is not None:
            require_packages("--adapter", ["peft"], "train")
            require_adapter(self.adapter)
        if self.gpu_experts_mask is not None:
            hot_mask.read(self.gpu_experts_mask.expanduser())
        if self.model.startswith(("/", ".", "~")) and not Path(self.model).exists():
            raise InputError(f"{self.model}: no such directory; give a model's directory or its hub id")
        if self.model.endswith(".gguf"):
            what = "a GGUF holds the model in llama.cpp's form; give the model's safetensors release"
            raise UnsupportedError(f"{self.model}: {what}")
        if is_output(Path(self.model)) and not is_whole_model(Path(self.model)) and not self.is_converted:
            what = "holds converted experts, no model; give the original model, and this as --cpu-weights"
            raise UnsupportedError(f"{self.model}: {what}")
        if self.is_converted and self.cpu_weights is not None:
            raise UsageError(f"{self.model}: has converted experts of its own; leave out --cpu-weights")
        if self.cpu_weights is not None:
            open_experts(self.cpu_weights.expanduser()).require_computable()  # reported at once

    def device(self) -> str:
        """Where all that is no expert lies: beside the hot experts, for they wait for each other."""
        import torch

        return "cuda" if self.hot and torch.cuda.is_available() else "cpu"

    def quantization_config(self) -> Any:
        """What from_pretrained takes to swap the experts; None without cpu_weights."""
        if self.cpu_weights is None:
            return None
        from ktconvert.native_quant.runtime.hf import KTConvertConfig

        return KTConvertConfig(
            cpu_weights=self.cpu_weights.expanduser().absolute(),
            exact=self.exact,
            threads=self.threads,
            gpu_experts=self.root() if self.hot else None,
            gpu_experts_mask=self.gpu_experts_mask and self.gpu_experts_mask.expanduser().absolute(),
            num_gpu_experts=self.num_gpu_experts,
        )


def prepare(choice: ModelChoice) -> Any:
    """Threads, and the model's config, without its own quantization if our experts take that place; before torch is
    imported. Raises what check raises, UnsupportedError for what cannot be combined with other experts.
    """
    choice.check()
    share_cores()
    import torch
    import transformers

    if choice.threads is not None:
        torch.set_num_threads(choice.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = building.read_config(choice.model, **choice.where())
    parts = (config, config.get_text_config(decoder=True))
    own: dict[str, Any] = next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), {})
    rotation.refuse_config(choice.model, {"quantization_config": own})
    if choice.is_converted:
        import ktconvert.native_quant.runtime.hf  # noqa: F401  # registers the quantization that config.json names

        config.quantization_config = {**own, "exact": choice.exact, "threads": choice.threads}
        return config
    if choice.cpu_weights is None:
        if own.get("quant_method") == METHOD and find_spec("compressed_tensors") is None:
            raise KtconvertError(
                f"{choice.model}: its experts are packed by {METHOD}, not installed here: pip install 'ktconvert[gpu]'"
            )
        return config
    from ktconvert.native_quant.runtime import hf_rest

    hf_rest.give_way(config)
    return config


def with_own_experts(choice: ModelChoice) -> ModelChoice:
    """The choice with the model's own experts as CPU weights, unless it was converted. Raises UnsupportedError."""
    choice.check()
    if is_output(Path(choice.model)) or choice.cpu_weights is not None:
        return choice
    root = hub.resolve(choice.model, choice.revision)
    open_experts(root).require_computable()
    return replace(choice, cpu_weights=root)


def longest(config: Any) -> int | None:
    """The most tokens that a model of this config reads; None where it does not say."""
    most = getattr(config.get_text_config(decoder=True), LONGEST, None)
    return most if isinstance(most, int) and most > 0 else None


def load(choice: ModelChoice) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises UnsupportedError where the experts do not fit it."""
    config = prepare(choice)
    options: dict[str, Any] = {}
    if choice.cpu_weights is not None:
        options |= {"quantization_config": choice.quantization_config(), "device_map": choice.device()}
    tokenizer = load_tokenizer(choice)
    return load_model(building.auto_class(config), choice, config, **options), tokenizer


def load_model(kind: Any, choice: ModelChoice, config: Any, **options: Any) -> Any:
    """The model, to generate one answer at a time. Raises InputError where a part is missing or cannot be used."""
    root, weights = choice.root(), None
    source = None if root is None or choice.is_converted else open_checkpoint(root)
    if source is not None and choice.cpu_weights is not None:
        source.require_one_reading()
    if source is not None and not getattr(config, "auto_map", None):
        weights = decoding.decode_weights(source, whole=choice.cpu_weights is None)
    if weights is not None:
        vars(config).pop("quantization_config", None)
    model = building.load_weights(kind, choice.model, config, weights, **options, **choice.where())
    if source is not None and choice.cpu_weights is not None:
        require_same_experts(model, source, choice.cpu_weights)
    for name, value in ONE_ANSWER.items():
        setattr(model.generation_config, name, value)
    return model if choice.adapter is None else with_adapter(model, choice.adapter, choice.model)


def require_same_experts(model: Any, source: TensorSource, cpu_weights: Path) -> None:
    """Raise InputError where converted experts are not those of the model's checkpoint: others of equal shapes, or in
    another order. Compare some experts of the first and the last layer that have some there; adapters and quantizers
    move weights far less than this allows.
    """
    import numpy as np

    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    stored: Any = None
    with suppress(KtconvertError):  # a directory without readable experts has none to compare with
        stored = recognise(source, to_read=True)
    modules = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    if stored is None or cpu_weights.expanduser().resolve() == source.root.resolve():
        return
    opened = open_experts(cpu_weights.expanduser())
    for module in dict.fromkeys((*modules[:1], *modules[-1:])):
        count = module.num_experts
        for expert in sorted({0, 1 % count, count // 2, count - 1}):
            if module.layer not in stored.moe_layers:
                continue
            parts = [gate for gate, _, _ in opened.linears(module.experts.packed, expert)]
            ours, theirs = np.concatenate(parts), bf16_to_f32(decode(stored.linear(module.layer, expert, "gate")))
            both = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
            if both > 0 and float(np.vdot(ours, theirs)) / both < SAME:
                what = f"expert {expert} of layer {module.layer} is not that of {source.root}"
                remedy = "give what was converted from this model"
                raise InputError(what, remedy, path=cpu_weights)


def load_tokenizer(choice: ModelChoice) -> Any:
    """The tokenizer. Raises InputError for one that cannot be used."""
    return building.read_tokenizer(choice.model, **choice.where())
