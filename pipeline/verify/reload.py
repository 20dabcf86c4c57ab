"""What transformers makes of an output: whether it has a place for every tensor, and the reverse (on the meta device);
and whether the output predicts what its source does: KL divergence on short samples, one model in memory at a time.
"""

from __future__ import annotations

import copy
import gc
import inspect
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
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime import transformers_version
from ktconvert.pipeline.models import loading, pretrained
from ktconvert.pipeline.models.evaluate import compare_logits
from ktconvert.pipeline.report.text import first_line, first_of, size
from ktconvert.pipeline.verify.checks import Check

if TYPE_CHECKING:
    import torch

EXPERTS = re.compile(r".*\.layers\.(?P<layer>\d+)\.(?:.+\.)?experts\.")
SAMPLES, LENGTH = 4, 128
# What a divergence is compared with: that of the source, its experts' outputs disturbed by noise of this share of their
# length. Rounding to 4 bits is an error of 0.08 to 0.19 in an expert's output, to 8 bits of 0.006 to 0.012; an expert
# in a wrong place is one of 1 and more. The second figure, in nats, is for models whose experts cannot be found.
BOUNDS = {4: (0.4, 1.0), 8: (0.04, 0.25)}
NOTHING = 1e-6  # nats: below it, rounding in BF16 is all there is
# Without --text: this, and the source of a function, for any tokenizer.
PROSE = """\
A mixture of experts is a network in which a small part, the router, decides for every token which few of many experts
compute it. All other experts do nothing for this token. So a model can hold far more weights than it uses for any one
word, and most of the memory that it needs is read rarely. When the weights are stored with fewer bits, each of them is
a little wrong. If the errors are small and independent, they cancel in the sums, and the model says almost what it said
before; if they are not, the answers change. A test therefore reads a text with both models and compares, word by word,
what each of them expects to come next.
"""


def check_reload(output: Output) -> tuple[Check, bool]:
    """Load every tensor's name, type and shape as from_pretrained does, with no weights behind them. A key that is
    missing, unexpected or of another shape is a problem where it belongs to routed experts of a layer that has some
    here; elsewhere it is the source's own (names and shapes are copied), which is reported. So is a model that
    transformers cannot build. The second result: whether the model is whole, so that it can compute.
    """
    missing = [name for name in loading.REQUIRED_PACKAGES["gpu"] if find_spec(name) is None]
    if missing:
        return _unchecked(f"{', '.join(missing)} not installed: pip install 'ktconvert[gpu]'")
    if (why := transformers_version.refusal()) is not None:
        return _unchecked(why)
    import torch

    try:
        kind, config = model_class(output.root)
        with quiet(), torch.device("meta"):  # what the config alone makes of the model
            expected = {name: tuple(p.shape) for name, p in kind(copy.deepcopy(config)).state_dict().items()}
    except Exception as error:  # whatever transformers raises for a config that it does not know
        return _unchecked(f"transformers cannot build it: {first_line(error)}")
    try:
        shapes, keys = _load(kind, config, output)
    except Exception as error:  # also what goes wrong while experts are put together
        return Check("reload", "", (f"transformers cannot load its tensors: {first_line(error)}",)), False
    wrong = [(key, f"transformers finds no tensor for {key}") for key in keys["missing_keys"]]
    wrong += [(key, f"transformers has no place for {key}") for key in keys["unexpected_keys"]]
    wrong += [
        (key, f"{key} becomes {list(shape)}, config.json wants {list(expected[key])}")
        for key, shape in shapes.items()
        if key not in keys["missing_keys"] and shape != expected.get(key, shape)
    ]
    layers = {place.layer for place, _ in output.tensors}
    experts, others = (
        sorted(problem for key, problem in wrong if (_layer_of(key) in layers) == routed) for routed in (True, False)
    )
    notes = [f"{first_of(others)}: none of these experts', so the same as of the source"] if others else []
    notes += [caution for caution in (transformers_version.newer(),) if caution is not None]
    result = f"{kind.__name__} has a place for every routed expert, and an expert for every place"
    return Check("reload", result, experts, notes), not experts and not keys["missing_keys"]


def _unchecked(why: str) -> tuple[Check, bool]:
    return Check("reload", "not checked", notes=(f"not loaded: {why}",)), False


def model_class(root: Path) -> tuple[Any, Any]:
    """The class of transformers that loads a directory, and the config that it takes, as the auto classes choose them.
    Raises what transformers does, ValueError where it has no class.
    """
    loading.set_environment()
    import transformers

    with quiet():
        config = pretrained.read_config(str(root), trust_remote_code=False, local_files_only=True)
    for table in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in table:
            kind: Any = table[type(config)]
            if kind.config_class is config.sub_configs.get("text_config"):
                about = getattr(config, "quantization_config", None)
                config = config.get_text_config()
                if about is not None:
                    config.quantization_config = about
            return kind, config
    raise ValueError(f"it has no text model for {type(config).__name__}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and compressed-tensors, which write to stderr whatever their settings."""
    import transformers

    before, bars = logging.root.manager.disable, transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
        if bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _load(kind: Any, config: Any, output: Output) -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shapes of the loaded model, and what from_pretrained says of the keys."""
    import torch
    from transformers.modeling_utils import str_to_torch_dtype

    tensors = {}
    for s in (*output.tensors.values(), *output.others.values()):
        # transformers takes its values from the packed tensor.
        shape = [0] if s.name.endswith(".weight_shape") else s.shape
        tensors[s.name] = torch.empty(shape, dtype=str_to_torch_dtype[s.dtype], device="meta")
    settings = {"state_dict": tensors, "device_map": {"": "meta"}, "output_loading_info": True}
    with quiet():
        model, keys = kind.from_pretrained(None, config=config, **settings)
    return {name: tuple(p.shape) for name, p in model.state_dict().items()}, keys


def _layer_of(key: str) -> int | None:
    """The layer whose routed expert a key belongs to; None for all else, and for the experts of MTP blocks."""
    match = EXPERTS.search(f".{key}.")
    return int(match["layer"]) if match is not None and ".mtp." not in match[0] else None


# --- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """KL(source || output) per token in nats, at most `bound`; how often both find the same token likeliest."""

    tokens: int
    kl: float
    top1_agreement: float
    bound: float

    def sentence(self) -> str:
        return (
            f"KL divergence {self.kl:.3g} nats (at most {self.bound:.3g} are plausible), "
            f"top-1 agreement {100 * self.top1_agreement:.1f} % over {self.tokens} tokens"
        )


class Skip(Exception):
    """Why predictions were not compared."""


def check_predictions(
    output: Output, model: MoeModel, bits: int, text: str | None, threads: int
) -> tuple[Check, Predictions | None]:
    """Let source and output, which transformers can load, read a few samples, one after the other: of this text, of our
    own, or random tokens without a tokenizer. InputError for a text that is too short. What cannot be loaded here, for
    its size or for its source, is reported, and is no fault.
    """
    if model.source.conflict is not None:
        return not_compared(model.source.conflict.problem), None
    try:
        _require_memory(output)
        ids, expected, noisy = _read_source(model.source.root, BOUNDS[bits][0], text, threads)
    except Skip as skip:
        return not_compared(str(skip)), None
    try:
        with _loaded(output.root) as loaded:
            computed = _logits(loaded, ids)
    except Skip as skip:
        return Check("predictions", "", (f"the source computes, the output does not: {skip}",)), None
    compared = compare_logits(expected, computed, ids[:, 1:].reshape(-1))
    if not np.isfinite(compared.converted).all():
        return Check("predictions", "", ("the output's predictions are not finite",)), None
    bound = BOUNDS[bits][1] if noisy is None else max(NOTHING, noisy)
    kl = float(compared.divergence.mean())
    predictions = Predictions(compared.divergence.size, kl, float(compared.agree.mean()), bound)
    far = f"the output predicts something else than its source: {predictions.sentence()}"
    return Check("predictions", predictions.sentence(), (far,) if not kl <= bound else ()), predictions


def not_compared(why: str) -> Check:
    """What is reported instead, and is no fault."""
    return Check("predictions", "not compared", notes=(f"predictions were not compared: {why}",))


def _require_memory(output: Output) -> None:
    """Source and output have one size in memory: BF16, and a quarter more while experts are put together."""
    weights = sum(stored.nbytes for stored in output.others.values())
    for (_, what), stored in output.tensors.items():
        if what == "weight_shape":
            n, k = (int(size) for size in output.read(stored).view("<i8"))
            weights += 2 * n * k
    needed, free = weights * 5 // 4 + (1 << 30), machine.memory_available()
    if needed > free:
        raise Skip(f"each of the two models needs {size(needed)} of memory, {size(free)} are free")


def _read_source(
    root: Path, noise: float, text: str | None, threads: int
) -> tuple[torch.Tensor, torch.Tensor, float | None]:
    """Samples [n, length], the source's logits [n * (length - 1), vocabulary], and how far noise in its experts moves
    it; None for the last where its experts cannot be found.
    """
    try:
        _, config = model_class(root)
    except Exception as error:  # whatever transformers raises for a config that it does not know
        raise Skip(f"transformers cannot load the source: {first_line(error)}") from error
    import torch

    torch.set_num_threads(threads)
    ids = torch.from_numpy(samples(root, config.get_text_config(decoder=True), text))
    with _loaded(root) as source:
        expected = _logits(source, ids)
        if not bool(expected.isfinite().any(-1).all()):
            raise Skip("the source's own predictions are not finite")
        try:
            with _noisy(source, noise):
                moved = _logits(source, ids)
        except UnsupportedError:
            return ids, expected, None
    return ids, expected, float(compare_logits(expected, moved, ids[:, 1:].reshape(-1)).divergence.mean())


def samples(root: Path, config: Any, text: str | None) -> npt.NDArray[np.int64]:
    """Token ids [n, length]: of a text, or drawn with a fixed seed where there is no tokenizer. InputError."""
    read = PROSE + inspect.getsource(check_reload) if text is None else text
    length = min(LENGTH, loading.context_length(config) or LENGTH)
    try:
        with quiet():
            tokenizer = pretrained.read_tokenizer(str(root), trust_remote_code=False, local_files_only=True)
            ids = np.array(tokenizer(read)["input_ids"], np.int64)
    except Exception:  # whatever transformers raises where a tokenizer's files are missing or need code of their own
        ids = np.empty(0, np.int64)
    if len(ids) >= length:
        count = min(SAMPLES, len(ids) // length)
        return ids[: count * length].reshape(count, length)
    if text is not None:
        raise InputError(f"--text: has {len(ids)} tokens for {root}, {length} are needed; give a longer one, or none.")
    return np.random.default_rng(0).integers(0, config.vocab_size, (SAMPLES, length))


@contextmanager
def _loaded(root: Path) -> Iterator[Any]:
    """A model in memory, and out again. Raises Skip where transformers cannot load, fill or compute it."""
    try:
        kind, config = model_class(root)
        with quiet():
            model, keys = kind.from_pretrained(root, config=config, local_files_only=True, output_loading_info=True)
        if missing := sorted(keys["missing_keys"]):
            raise Skip(f"{root} lacks {len(missing)} tensors of its model, such as {missing[0]}")
        yield model
    except (Skip, UnsupportedError):
        raise
    except Exception as error:
        raise Skip(f"transformers cannot load or compute {root}: {first_line(error)}") from error
    finally:
        model = None
        gc.collect()


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the model expects after each token but the last of each sample, one sample after the other."""
    import torch

    with quiet(), torch.inference_mode():
        return torch.cat([model(input_ids=one[None], use_cache=False).logits[0, :-1] for one in ids])


@contextmanager
def _noisy(model: Any, noise: float) -> Iterator[None]:
    """While this lasts, what routed experts add is off by this share of its length. UnsupportedError: none are found."""
    import torch

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    generator = torch.Generator().manual_seed(0)

    def disturb(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
        exact = out.float()
        random = torch.randn(exact.shape, generator=generator)
        share = noise * exact.norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True)
        return torch.add(exact, random * share).to(out.dtype)

    hooks = [model.get_submodule(place.name).register_forward_hook(disturb) for place in find_experts(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
