"""What converted experts cost: the predictions of the original model and of the converted one for the same text.

Both models are in memory at once: the original whole; the converted one, for the CPU, without experts of its own (it
computes with the converted files, and shares all other weights with the original), for the GPU whole, its experts
unpacked. The text goes through window by window; of a window, both models' logits are held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError, VerificationError
from ktconvert.layouts.files import documents
from ktconvert.pipeline.models import loading

if TYPE_CHECKING:
    import torch

    from ktconvert.pipeline.options.queries import EvalOptions

CHUNK = 32  # positions whose distributions are in memory as float64 at a time


class Windows(NamedTuple):
    """A text in windows without overlap, ids [windows, window], and how many tokens before and after are left out."""

    ids: npt.NDArray[np.int64]
    before: int
    skipped: int


class Compared(NamedTuple):
    """What one window gave, position by position, each [positions].

    original, converted  negative log-likelihood of the token that came
    divergence           KL(original || converted), in nats
    agree                whether both hold the same token for the likeliest
    """

    original: npt.NDArray[np.float64]
    converted: npt.NDArray[np.float64]
    divergence: npt.NDArray[np.float64]
    agree: npt.NDArray[np.bool_]


@dataclass
class ExpertsError:
    """How far a layer's converted experts' output lies from the original's, on its inputs: sums of squares."""

    layer: int
    difference: float = 0.0
    original: float = 0.0

    @property
    def relative(self) -> float:
        return float(np.sqrt(self.difference / self.original)) if self.original else float(self.difference > 0)


class Evaluation(NamedTuple):
    compared: Compared
    layers: tuple[ExpertsError, ...]
    seconds: float


def read_text(path: Path) -> str:
    """A text file. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give --text a text file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error}); give --text a text file.") from error


def cut(choice: loading.ModelChoice, text: str, source: Path, window: int, most: int | None, skip: int = 0) -> Windows:
    """The text as the model's tokens, in windows; the first `skip` are left out, then at most so many are taken. Raises
    InputError where none is left to read, UsageError for windows that are longer than the model can read.
    """
    config = loading.prepare(choice)
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = loading.load_tokenizer(choice)
    longest = loading.longest(config)
    if longest is not None and window > longest:
        most_read = f"the model reads at most {longest} tokens ({loading.LONGEST})"
        raise UsageError(f"--window {window}: {most_read}; give a smaller one.")
    ids = np.array(tokenizer(text)["input_ids"], np.int64)
    count = len(ids) // window - skip
    if count < 1:
        few = f"less than one window of {window}" if not skip else f"no window of {window} after the first {skip}"
        remedy = "give a longer text, or a smaller --window" + (" or --skip-windows" if skip else "")
        raise InputError(f"{source}: has {len(ids)} tokens, which is {few}: {remedy}.")
    first, count = skip * window, min(count, most or count)
    last = first + count * window
    return Windows(ids[first:last].reshape(count, window), first, len(ids) - last)


def packed_method(gpu_weights: Path) -> str:
    """How a model's experts are packed for the GPU: W4A16 or W8A16. Raises InputError or UnsupportedError otherwise."""
    remedy = "give what `ktconvert gpu` wrote"
    try:
        about = documents.parse((gpu_weights / "config.json").read_bytes()).get("quantization_config") or {}
        bits = {group["weights"]["num_bits"] for group in about.get("config_groups", {}).values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{gpu_weights}: its config.json cannot be read ({error}); {remedy}.") from error
    if about.get("format") != "pack-quantized" or len(bits) != 1:
        raise UnsupportedError(f"{gpu_weights}: holds no experts for the GPU; {remedy}.")
    return f"W{bits.pop()}A16"


def load_pair(choice: loading.ModelChoice, gpu_weights: Path | None = None) -> tuple[Any, Any]:
    """The original model and the converted one; with CPU weights they share every weight but the experts."""
    if gpu_weights is not None:
        original, _ = loading.load(choice)
        converted, _ = loading.load(replace(choice, model=str(gpu_weights.expanduser().absolute()), revision=None))
        if _identity(original) != _identity(converted):
            raise UnsupportedError(
                f"{gpu_weights}: was made from another model than {choice.model}; give what `ktconvert gpu` made of it."
            )
        return original.eval(), converted.eval()
    converted, _ = loading.load(choice)
    original, _ = loading.load(replace(choice, cpu_weights=None))
    shared = dict(original.named_parameters())
    for name, parameter in converted.named_parameters():
        if name in shared:  # all but an adapter's parameters of experts
            parameter.data = shared[name].data
    return original.eval(), converted.eval()


def _identity(model: Any) -> tuple[Any, ...]:
    config = model.config.get_text_config(decoder=True)
    return type(model), *(getattr(config, name, None) for name in ("vocab_size", "hidden_size", "num_hidden_layers"))


def evaluate(original: Any, converted: Any, windows: Windows, advance: Callable[[int], None]) -> Evaluation:
    """Let both models read every window; advance(n) after each n tokens."""
    import torch

    begin = time.monotonic()
    compared: list[Compared] = []
    with torch.inference_mode(), experts_compared(original, converted) as layers:
        for ids in torch.from_numpy(windows.ids):
            first, second = (model(input_ids=ids[None], use_cache=False).logits[0] for model in (original, converted))
            compared.append(compare(first[:-1], second[:-1], ids[1:]))
            advance(len(ids))
    everything = Compared(*map(np.concatenate, zip(*compared, strict=True)))
    for model, likelihood in (("original", everything.original), ("converted", everything.converted)):
        if bad := int(np.count_nonzero(~np.isfinite(likelihood))):
            where = f"at {bad} of {likelihood.size} tokens; see `ktconvert verify --run`"
            raise VerificationError(f"the {model} model's predictions are not finite {where}.")
    return Evaluation(everything, tuple(layers), time.monotonic() - begin)


def compare(original: torch.Tensor, converted: torch.Tensor, targets: torch.Tensor) -> Compared:
    """Two models' predictions, in float64: logits [positions, vocabulary], and the tokens that came."""
    import torch

    parts: list[tuple[Any, ...]] = []
    for start in range(0, len(targets), CHUNK):
        rows = slice(start, start + CHUNK)
        p, q = (logits[rows].double().log_softmax(-1) for logits in (original, converted))
        here = targets[rows, None]
        # A token that the original holds for impossible adds nothing, whatever the other says of it.
        divergence = torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1).clamp(min=0)
        parts.append((-p.gather(-1, here)[:, 0], -q.gather(-1, here)[:, 0], divergence, p.argmax(-1) == q.argmax(-1)))
    return Compared(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))


@contextmanager
def experts_compared(original: Any, converted: Any) -> Iterator[list[ExpertsError]]:
    """While this lasts, the converted experts read what the original's read, and their outputs are compared."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts, find_experts

    found = [(module.layer, name) for name, module in converted.named_modules() if isinstance(module, RoutedExperts)]
    if not found and converted is not original:
        with suppress(UnsupportedError):
            found = [(experts.layer, experts.name) for experts in find_experts(converted)]

    def comparing(module: Any, error: ExpertsError) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
            expected, computed = output.double(), module(*args, **kwargs).double()
            error.difference += float((computed - expected).square().sum())
            error.original += float(expected.square().sum())

        return hook

    errors = [ExpertsError(layer) for layer, _ in found]
    with ExitStack() as hooks:
        for error, (_, name) in zip(errors, found, strict=True):
            hook = comparing(converted.get_submodule(name), error)
            handle = original.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield errors


def method_of(converted: Any) -> str:
    """How the experts of a converted model are stored: every method that layers have."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    found = (module.experts.method for module in converted.modules() if isinstance(module, RoutedExperts))
    return ", ".join(dict.fromkeys(found))


def document(options: EvalOptions, windows: Windows, evaluation: Evaluation, method: str) -> dict[str, Any]:
    count, window = windows.ids.shape
    compared = evaluation.compared
    return {
        "event": "evaluated",
        "model": options.model,
        "cpu_weights": options.cpu_weights and str(options.cpu_weights),
        "gpu_weights": options.gpu_weights and str(options.gpu_weights),
        "method": method,
        "text": str(options.text),
        "tokens": windows.before + int(windows.ids.size) + windows.skipped,
        "window": window,
        "skip_windows": windows.before // window,
        "windows": count,
        "skipped_tokens": windows.skipped,
        "positions": count * (window - 1),  # the first token of a window has no prediction
        "perplexity": {name: float(np.exp(getattr(compared, name).mean())) for name in ("original", "converted")},
        "kl": {
            "mean": float(compared.divergence.mean()),
            "p99": float(np.quantile(compared.divergence, 0.99)),
            "max": float(compared.divergence.max()),
        },
        "top1_agreement": float(compared.agree.mean()),
        "layers": [{"layer": error.layer, "relative_error": error.relative} for error in evaluation.layers],
        "seconds": round(evaluation.seconds, 3),
    }


def rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = document["perplexity"]["original"], document["perplexity"]["converted"]
    kl = document["kl"]
    skipped = f"the last {document['skipped_tokens']} of {document['tokens']} tokens left out"
    if document["skip_windows"]:
        skipped = f"the first {document['skip_windows'] * document['window']} and {skipped}"
    kind = "CPU weights" if document["cpu_weights"] else "GPU weights"
    windows = f"{document['windows']} windows of {document['window']} tokens without overlap"
    return [
        ("model", document["model"]),
        (kind, f"{document['cpu_weights'] or document['gpu_weights']} ({document['method']})"),
        ("text", f"{document['text']}: {windows}, {skipped}"),
        ("perplexity", f"{before:.4f} original, {after:.4f} converted ({100 * (after / before - 1):+.2f} %)"),
        ("KL divergence", f"{kl['mean']:.3g} mean, {kl['p99']:.3g} at 99 % of {document['positions']} tokens (nats)"),
        ("top-1 agreement", f"{100 * document['top1_agreement']:.2f} %"),
    ]
