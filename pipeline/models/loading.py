"""Loading a model of transformers, with or without converted experts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import hub, rotation
from ktconvert.layouts.checkpoints.adapter import require_adapter
from ktconvert.layouts.encodings.pack_quantized import METHOD
from ktconvert.layouts.errors import InputError, KtconvertError, ResourceError, UnsupportedError, UsageError
from ktconvert.layouts.outputs.opening import is_output, is_whole_model, open_output
from ktconvert.native_quant.runtime import hot_mask
from ktconvert.native_quant.runtime.from_checkpoint import open_experts
from ktconvert.native_quant.runtime.hot_mask import REMEDY
from ktconvert.pipeline.models.adapter_loading import with_adapter
from ktconvert.pipeline.ui.text import first_line

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
# What a config.json may ask of a model beside its predictions, and how it is left out. Left over from training, router
# logits make transformers add up a loss, which fails for a prompt in parts, with padding and with beams.
PREDICTIONS_ONLY = dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states"), False)
PREDICTIONS_ONLY["return_dict"] = True
# What a generation_config.json may ask that does not go with one answer, streamed: without a cache no prompt is read in
# parts, and several answers at once are not streamed.
ONE_ANSWER = {"use_cache": True, "num_beams": None, "num_return_sequences": None}


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
            gpu_experts_mask=self.gpu_experts_mask and self.gpu_experts_mask.expanduser().absolute(),
            num_gpu_experts=self.num_gpu_experts,
        )


@contextmanager
def explained(model: str) -> Iterator[None]:
    """What transformers raises for a model that it cannot load as InputError; no memory left as ResourceError."""
    import torch
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{model}: the GPU has too little memory for the hot experts and all that is no expert; {REMEDY}"
        ) from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"{model}: transformers cannot load it: {first_line(error)}") from error


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
    with explained(choice.model):
        config = transformers.AutoConfig.from_pretrained(choice.model, **choice.where())
    ask_for_predictions(config)
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

    hf_rest.give_way(config, choice.model)
    return config


def ask_for_predictions(config: Any) -> None:
    """Have a model of this config, and of those within it, give its predictions and nothing else."""
    import transformers

    for name, value in PREDICTIONS_ONLY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            ask_for_predictions(part)


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
    with explained(choice.model):
        return load_model(auto_class(config), choice, config, **options), tokenizer


def auto_class(config: Any) -> Any:
    """The auto class of transformers for a model of this config that writes text."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def load_model(kind: Any, choice: ModelChoice, config: Any, **options: Any) -> Any:
    """The model, to generate one answer at a time. Raises InputError where a part is missing."""
    where = choice.where()
    model, loading = kind.from_pretrained(choice.model, config=config, **options, **where, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"{choice.model}: lacks {len(missing)} tensors of its model, such as {missing[0]}; download it again"
        )
    for name, value in ONE_ANSWER.items():
        setattr(model.generation_config, name, value)
    return model if choice.adapter is None else with_adapter(model, choice.adapter, choice.model)


def load_tokenizer(choice: ModelChoice) -> Any:
    """The tokenizer. Raises InputError for one that cannot be used."""
    import transformers

    with explained(choice.model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(choice.model, **choice.where())
        require_tokenizer(tokenizer, choice.model)
    return tokenizer


def require_tokenizer(tokenizer: Any, model: str) -> None:
    """Raises InputError for what is no tokenizer, or makes no token of a text: that comes where files are missing."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise InputError(f"{model}: has no tokenizer; put its files (tokenizer.json) beside config.json")
