"""What converted experts cost: the original model and the converted one read the same text, and their predictions are compared.

Both models are in memory at once: the original whole, the converted one without experts of its own (it computes with the converted
files, and shares all other weights with the original). The text goes through window by window; of a window, both models' logits are held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError, KtconvertError, UsageError, VerificationError
from ktconvert.pipeline import generate

if TYPE_CHECKING:
    import torch

CHUNK = 32  # positions whose distributions are in memory as float64 at a time
LONGEST = "max_position_embeddings"


@dataclass(frozen=True)
class Windows:
    """A text cut into windows that do not overlap: ids [windows, window], and how many tokens after them were left out."""

    ids: npt.NDArray[np.int64]
    skipped: int

    @property
    def positions(self) -> int:
        """Predictions made: the first token of a window is predicted by nobody."""
        count, window = self.ids.shape
        return int(count * (window - 1))


@dataclass(frozen=True)
class Compared:
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
class LayerError:
    """How far the converted experts' output lies from the original's, on the original's inputs: sums of squares over all tokens."""

    layer: int
    difference: float = 0.0
    original: float = 0.0

    @property
    def relative(self) -> float:
        """||converted - original|| / ||original||."""
        return float(np.sqrt(self.difference / self.original)) if self.original else float(self.difference > 0)


@dataclass(frozen=True)
class Evaluation:
    """All windows together, and the error of each layer."""

    compared: Compared
    layers: tuple[LayerError, ...]
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Perplexities, divergence and agreement, for the JSON document."""
        found = self.compared
        return {
            "perplexity": {
                "original": float(np.exp(found.original.mean())),
                "converted": float(np.exp(found.converted.mean())),
            },
            "kl": {
                "mean": float(found.divergence.mean()),
                "p99": float(np.quantile(found.divergence, 0.99)),
                "max": float(found.divergence.max()),
            },
            "top1_agreement": float(found.agree.mean()),
            "layers": [{"layer": error.layer, "relative_error": error.relative} for error in self.layers],
        }


def require() -> None:
    """Raises KtconvertError, which names what to install, where transformers or torch are missing."""
    missing = [name for name in generate.NEEDS["run"] if find_spec(name) is None]
    if missing:
        raise KtconvertError(f"`ktconvert eval` needs {', '.join(missing)}, not installed here: pip install 'ktconvert[run]'")  # fmt: skip


def read_text(path: Path) -> str:
    """A text file. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give --text a text file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error}); give --text a text file.") from error


def cut(choice: generate.Choice, text: str, source: Path, window: int, most: int | None) -> Windows:
    """The text as the model's tokens, in windows; at most so many. Nothing of the model but its config and tokenizer is loaded.

    Raises InputError for a model without a tokenizer and for a text that is shorter than one window, UsageError for windows that are longer
    than the model can read.
    """
    if choice.model.startswith(("/", ".", "~")) and not Path(choice.model).exists():
        raise InputError(f"{choice.model}: no such directory; give a model's directory or its hub id.")
    config = generate.prepare(choice)
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with generate.explained(choice.model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(choice.model, **choice.where())
    longest = getattr(config.get_text_config(decoder=True), LONGEST, None)
    if isinstance(longest, int) and window > longest:
        raise UsageError(
            f"--window {window}: the model reads at most {longest} tokens ({LONGEST}); give a smaller one."
        )
    ids = np.array(tokenizer(text)["input_ids"], np.int64)
    if text.strip() and not len(ids):  # what transformers gives where the files are missing
        raise InputError(
            f"{choice.model}: has no tokenizer; put the model's tokenizer files (tokenizer.json) beside its config.json."
        )
    count = len(ids) // window
    if not count:
        raise InputError(
            f"{source}: has {len(ids)} tokens, which is less than one window of {window}: give a longer text, or a smaller --window."
        )
    count = min(count, most or count)
    return Windows(ids[: count * window].reshape(count, window), len(ids) - count * window)


def load_pair(choice: generate.Choice) -> tuple[Any, Any]:
    """The original model and the converted one; they share every weight but the experts.

    Raises what generate.load raises: InputError, UnsupportedError and what Experts.load raises.
    """
    converted, _ = generate.load(choice)
    original, _ = generate.load(replace(choice, cpu_weights=None))
    for name, parameter in converted.named_parameters():
        parameter.data = original.get_parameter(name).data
    return original.eval(), converted.eval()


def evaluate(original: Any, converted: Any, windows: Windows, tell: Callable[[int], None]) -> Evaluation:
    """Let both models read every window; tell(n) after each n tokens."""
    import torch

    begin = time.monotonic()
    made: list[Compared] = []
    with torch.inference_mode(), experts_compared(original, converted) as layers:
        for ids in torch.from_numpy(windows.ids):
            first, second = (model(input_ids=ids[None], use_cache=False).logits[0] for model in (original, converted))
            made.append(compare(first[:-1], second[:-1], ids[1:]))
            tell(len(ids))
    together = [np.concatenate([getattr(one, name) for one in made]) for name in Compared.__dataclass_fields__]
    found = Compared(*together)
    for model, likelihood in (("original", found.original), ("converted", found.converted)):
        bad = int(np.count_nonzero(~np.isfinite(likelihood)))
        if bad:
            raise VerificationError(
                f"the {model} model's predictions are not finite at {bad} of {likelihood.size} tokens; see `ktconvert verify --run`."
            )
    return Evaluation(found, tuple(layers), time.monotonic() - begin)


def compare(original: torch.Tensor, converted: torch.Tensor, targets: torch.Tensor) -> Compared:
    """The predictions of two models for the same positions: logits [positions, vocabulary], and the tokens that came. In float64."""
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
def experts_compared(original: Any, converted: Any) -> Iterator[list[LayerError]]:
    """While this lasts, whatever goes into the original's experts also goes through the converted ones, and the outputs are compared."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    errors: list[LayerError] = []
    hooks = []
    for name, module in converted.named_modules():
        if isinstance(module, RoutedExperts):
            errors.append(LayerError(module.layer))
            hook = _comparing(module, errors[-1])
            hooks.append(original.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
    try:
        yield errors
    finally:
        for handle in hooks:
            handle.remove()


def _comparing(module: Any, error: LayerError) -> Callable[..., None]:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        wanted, found = output.double(), module(*args, **kwargs).double()
        error.difference += float((found - wanted).square().sum())
        error.original += float(wanted.square().sum())

    return hook


def method_of(converted: Any) -> str:
    """How the experts of a converted model are stored."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    return next(module.experts.method for module in converted.modules() if isinstance(module, RoutedExperts))


def document(choice: generate.Choice, text: Path, windows: Windows, found: Evaluation, method: str) -> dict[str, Any]:
    """What `ktconvert eval --json` prints."""
    count, window = windows.ids.shape
    return {
        "event": "evaluated",
        "model": choice.model,
        "cpu_weights": str(choice.cpu_weights),
        "method": method,
        "text": str(text),
        "tokens": int(windows.ids.size) + windows.skipped,
        "window": window,
        "windows": count,
        "skipped_tokens": windows.skipped,
        "positions": windows.positions,
        **found.figures(),
        "seconds": round(found.seconds, 3),
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people, as (label, text)."""
    before, after = found["perplexity"]["original"], found["perplexity"]["converted"]
    kl = found["kl"]
    skipped = f"the last {found['skipped_tokens']} of {found['tokens']} tokens left out"
    return [
        ("model", found["model"]),
        ("CPU weights", f"{found['cpu_weights']} ({found['method']})"),
        ("text", f"{found['text']}: {found['windows']} windows of {found['window']} tokens without overlap, {skipped}"),
        ("perplexity", f"{before:.4f} original, {after:.4f} converted ({100 * (after / before - 1):+.2f} %)"),
        ("KL divergence", f"{kl['mean']:.3g} mean, {kl['p99']:.3g} at 99 % of {found['positions']} tokens (nats)"),
        ("top-1 agreement", f"{100 * found['top1_agreement']:.2f} %"),
    ]
