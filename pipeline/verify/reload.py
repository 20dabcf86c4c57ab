"""Checks of an output for the GPU with transformers.

The reload check loads names and shapes on the meta device. The predictions check compares the output with its source by
KL divergence on short samples, with one model in memory at a time.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.extras import install_command
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime import transformers_version
from ktconvert.pipeline.models import loading, pretrained
from ktconvert.pipeline.models.evaluate import compare_logits
from ktconvert.pipeline.report.text import first_line, plural, size, summarize
from ktconvert.pipeline.verify.checks import Check

if TYPE_CHECKING:
    import torch

EXPERTS = re.compile(r".*\.layers\.(?P<layer>\d+)\.(?:.+\.)?experts\.")
SINGLE = re.compile(r"experts\.(\*|\d+)\.")  # in names of tensors, and in transformers' patterns of them
SAMPLES, LENGTH = 4, 128
# Bits -> (noise, bound). The largest plausible divergence is that of the source with noise added to its experts'
# outputs, relative to their length. Rounding to 4 bits gives an error of 0.08 to 0.19 in an expert's output, to 8 bits
# 0.006 to 0.012; an expert in a wrong place gives 1 or more. The bound, in nats, is for models whose experts cannot be
# found.
BOUNDS = {4: (0.4, 1.0), 8: (0.04, 0.25)}
LEAST_BOUND = 1e-6  # nats: smaller divergences come from rounding in BF16
# The samples without --text: prose and code, which any tokenizer can read. A different text changes every figure.
SAMPLE_TEXT = Path(__file__).with_name("sample.txt")


def check_reload(output: Output) -> tuple[Check, bool]:
    """Load every tensor's name, dtype and shape with from_pretrained, without weights.

    A key that is missing, unexpected or has a wrong shape is a problem if it belongs to routed experts of a layer that
    the output quantizes. Otherwise it is a note, since it was copied from the source. A model that transformers cannot
    build, or whose experts it reads only from stacks, is a note, too. The second result is whether the model is
    complete, so that it can compute.
    """
    missing = [name for name in loading.REQUIRED_PACKAGES["gpu"] if find_spec(name) is None]
    if missing:
        return _skip_reload(f"{', '.join(missing)} not installed: `{install_command('gpu')}`")
    if (reason := transformers_version.explain_too_old()) is not None:
        return _skip_reload(reason)
    import torch

    try:
        model_type, config = model_class(output.root)
        with silence_libraries(), torch.device("meta"):
            model = model_type(copy.deepcopy(config))  # the model that the config describes
    except Exception as error:  # transformers raises errors of any type for an unknown config
        return _skip_reload(f"transformers cannot build it: {first_line(error)}")
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    try:
        shapes, keys = _load_on_meta(model_type, config, output)
    except Exception as error:  # also raised when transformers stacks experts
        return Check("reload", "", (f"transformers cannot load its tensors: {first_line(error)}",)), False
    problems = [(key, f"transformers finds no tensor for {key}") for key in keys["missing_keys"]]
    problems += [(key, f"transformers has no place for {key}") for key in keys["unexpected_keys"]]
    problems += [
        (key, f"{key} becomes {list(shape)}, but config.json requires {list(expected[key])}")
        for key, shape in shapes.items()
        if key not in keys["missing_keys"] and shape != expected.get(key, shape)
    ]
    layers = {slice_id.layer for slice_id, _ in output.tensors}
    experts, others = (
        sorted(problem for key, problem in problems if (_expert_layer(key) in layers) == routed)
        for routed in (True, False)
    )
    if experts and not _reads_single_experts(model):
        return _skip_reload(f"transformers reads no single experts of {model_type.__name__}, only stacks")
    notes = [f"{summarize(others)}: not a converted expert, so the source has the same problem"] if others else []
    notes += [note for note in (transformers_version.explain_too_new(),) if note is not None]
    result = f"every routed expert matches {model_type.__name__}"
    return Check("reload", result, experts, notes), not experts and not keys["missing_keys"]


def _reads_single_experts(model: Any) -> bool:
    """Return whether a model has modules for single experts, or transformers joins their tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    joined = (pattern for transform in get_model_conversion_mapping(model) for pattern in transform.source_patterns)
    return any(SINGLE.search(name) for name in (*joined, *model.state_dict()))


def _skip_reload(reason: str) -> tuple[Check, bool]:
    return Check("reload", "not checked", notes=(f"not loaded: {reason}",), skipped=True), False


def model_class(root: Path) -> tuple[Any, Any]:
    """Return the class of transformers that loads a directory and its config, as the auto classes choose them.

    Raises any exception of transformers, and ValueError if it has no class.
    """
    loading.set_environment()
    import transformers

    with silence_libraries():
        config = pretrained.read_config(str(root), trust_remote_code=False, local_files_only=True)
    for table in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in table:
            model_type: Any = table[type(config)]
            if model_type.config_class is config.sub_configs.get("text_config"):
                quantization = getattr(config, "quantization_config", None)
                config = config.get_text_config()
                if quantization is not None:
                    config.quantization_config = quantization
            return model_type, config
    raise ValueError(f"it has no text model for {type(config).__name__}")


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Silence transformers and compressed-tensors, which write to stderr regardless of their settings."""
    import transformers

    old_level = logging.root.manager.disable
    had_progress_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(old_level)
        if had_progress_bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _load_on_meta(model_type: Any, config: Any, output: Output) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Return the shapes of the loaded model, and the loading info of from_pretrained."""
    import torch
    from transformers.modeling_utils import str_to_torch_dtype

    tensors = {}
    for info in (*output.tensors.values(), *output.non_expert_tensors.values()):
        # transformers gets its values from the packed tensor.
        shape = [0] if info.name.endswith(".weight_shape") else info.shape
        tensors[info.name] = torch.empty(shape, dtype=str_to_torch_dtype[info.dtype], device="meta")
    settings = {"state_dict": tensors, "device_map": {"": "meta"}, "output_loading_info": True}
    with silence_libraries():
        model, keys = model_type.from_pretrained(None, config=config, **settings)
    return {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}, keys


def _expert_layer(key: str) -> int | None:
    """Return the layer of a routed expert's key; None for other keys and for the experts of MTP blocks."""
    match = EXPERTS.search(f".{key}.")
    return int(match["layer"]) if match is not None and ".mtp." not in match[0] else None


# --- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """KL(source || output) per token in nats, its plausible bound, and the share of tokens with the same top-1."""

    tokens: int
    kl: float
    top1_agreement: float
    bound: float

    def sentence(self) -> str:
        return (
            f"KL divergence {self.kl:.3g} nats, plausible up to {self.bound:.3g}; "
            f"top-1 agreement {100 * self.top1_agreement:.1f} % over {self.tokens} tokens"
        )


class Skip(Exception):
    """Reason why predictions cannot be compared."""


def check_predictions(
    output: Output, model: MoeModel, bits: int, text: str | None, threads: int
) -> tuple[Check, Predictions | None]:
    """Compare the predictions of source and output, which transformers can load, on a few samples.

    The samples come from this text, or our own, or are random tokens if there is no tokenizer. A model that cannot be
    loaded here, because of its size or its source, is a note and no problem. Raises InputError for a text that is too
    short.
    """
    if model.source.conflict is not None:
        return skip_predictions(model.source.conflict.problem), None
    try:
        _require_memory(output)
        ids, expected, noisy = _read_source(model, BOUNDS[bits][0], text, threads)
    except Skip as skip:
        return skip_predictions(str(skip)), None
    try:
        with _load_model(output.root) as loaded:
            computed = _compute_logits(loaded, ids)
    except Skip as skip:
        return Check("predictions", "", (f"the source can be computed, but the output cannot: {skip}",)), None
    compared = compare_logits(expected, computed, ids[:, 1:].reshape(-1))
    if not np.isfinite(compared.converted).all():
        return Check("predictions", "", ("the output's predictions are not finite",)), None
    bound = BOUNDS[bits][1] if noisy is None else max(LEAST_BOUND, noisy)
    kl = float(compared.divergence.mean())
    predictions = Predictions(compared.divergence.size, kl, float(compared.agree.mean()), bound)
    problem = f"the output's predictions differ too much from its source's: {predictions.sentence()}"
    return Check("predictions", predictions.sentence(), (problem,) if not kl <= bound else ()), predictions


def skip_predictions(reason: str) -> Check:
    """Return the check's result if predictions cannot be compared: a note, no problem."""
    return Check("predictions", "not compared", notes=(f"predictions were not compared: {reason}",), skipped=True)


def _require_memory(output: Output) -> None:
    """Raise Skip if memory for one model is missing: its size in BF16, and a quarter more to stack experts."""
    weights = sum(stored.nbytes for stored in output.non_expert_tensors.values())
    for (_, suffix), stored in output.tensors.items():
        if suffix == "weight_shape":
            n, k = (int(size) for size in output.read(stored).view("<i8"))
            weights += 2 * n * k
    needed = weights * 5 // 4 + (1 << 30)
    free = machine.memory_available()
    if needed > free:
        raise Skip(f"each of the two models needs {size(needed)} of memory, but {size(free)} are free")


def _read_source(
    model: MoeModel, noise: float, text: str | None, threads: int
) -> tuple[torch.Tensor, torch.Tensor, float | None]:
    """Return samples [n, length], the source's logits [n * (length - 1), vocabulary], and the divergence by noise.

    The last is None if the source's experts cannot be found.
    """
    root = model.source.root
    try:
        _, config = model_class(root)
    except Exception as error:  # transformers raises errors of any type for an unknown config
        raise Skip(f"transformers cannot load the source: {first_line(error)}") from error
    import torch

    torch.set_num_threads(threads)
    ids = torch.from_numpy(read_samples(root, config.get_text_config(decoder=True), text))
    with _load_model(root) as source:
        expected = _compute_logits(source, ids)
        if not bool(expected.isfinite().any(-1).all()):
            raise Skip("the source's predictions are not finite")
        try:
            with _add_noise(source, model, noise):
                noisy = _compute_logits(source, ids)
        except UnsupportedError:
            return ids, expected, None
    return ids, expected, float(compare_logits(expected, noisy, ids[:, 1:].reshape(-1)).divergence.mean())


def read_samples(root: Path, config: Any, text: str | None) -> npt.NDArray[np.int64]:
    """Return token ids [n, length] of a text, or random ones (with a fixed seed) if there is no tokenizer.

    Raises InputError for a text that is too short.
    """
    sample_text = SAMPLE_TEXT.read_text(encoding="utf-8") if text is None else text
    length = min(LENGTH, loading.context_length(config) or LENGTH)
    try:
        with silence_libraries():
            tokenizer = pretrained.read_tokenizer(str(root), trust_remote_code=False, local_files_only=True)
            ids = np.array(tokenizer(sample_text)["input_ids"], np.int64)
    except Exception:  # transformers raises anything if a tokenizer's files are missing or need remote code
        ids = np.empty(0, np.int64)
    if len(ids) >= length:
        count = min(SAMPLES, len(ids) // length)
        return ids[: count * length].reshape(count, length)
    if text is not None:
        raise InputError(
            f"--text: has {len(ids)} tokens for {root}, but {length} are required; give a longer text, "
            "or leave out --text."
        )
    return np.random.default_rng(0).integers(0, config.vocab_size, (SAMPLES, length))


@contextmanager
def _load_model(root: Path) -> Iterator[Any]:
    """Load a model, and free it at the end. Raises Skip if transformers cannot load or compute it."""
    try:
        model_type, config = model_class(root)
        with silence_libraries():
            model, keys = model_type.from_pretrained(
                root, config=config, local_files_only=True, output_loading_info=True
            )
        if missing := sorted(keys["missing_keys"]):
            raise Skip(f"{root} lacks {plural(len(missing), 'tensor')} of its model, such as {missing[0]}")
        yield model
    except (Skip, UnsupportedError):
        raise
    except Exception as error:
        raise Skip(f"transformers cannot load or compute {root}: {first_line(error)}") from error
    finally:
        model = None
        gc.collect()


def _compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after each token but the last of each sample, one sample after the other."""
    import torch

    with silence_libraries(), torch.inference_mode():
        return torch.cat([model(input_ids=sample[None], use_cache=False).logits[0, :-1] for sample in ids])


@contextmanager
def _add_noise(loaded: Any, model: MoeModel, noise: float) -> Iterator[None]:
    """Add noise to the outputs of a loaded model's routed experts, relative to their length, in the context.

    Raises UnsupportedError if no experts are found.
    """
    import torch

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    generator = torch.Generator().manual_seed(0)

    def add_noise(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        exact = out.float()
        random = torch.randn(exact.shape, generator=generator)
        scale = noise * exact.norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True)
        return torch.add(exact, random * scale).to(out.dtype)

    modules = (loaded.get_submodule(experts.name) for experts in find_experts(loaded, model.functions.get))
    hooks = [module.register_forward_hook(add_noise) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
