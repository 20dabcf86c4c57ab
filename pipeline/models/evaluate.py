"""Comparison of the predictions of a converted model and its original for the same text.

Both models are in memory at once. A model converted for the CPU computes with the converted files and shares all other
weights with the original; one converted for the GPU is complete, with its experts unpacked. The models read the text
sequence by sequence, and the logits of both for one sequence are in memory.
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

from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import documents
from ktconvert.pipeline.models import loading, pretrained
from ktconvert.pipeline.models.text_datasets import KINDS, TEXT
from ktconvert.pipeline.options.model_options import STORED
from ktconvert.pipeline.report.text import plural

if TYPE_CHECKING:
    import torch

    from ktconvert.pipeline.options.model_options import EvalOptions

CHUNK = 32  # positions whose distributions are in memory as float64 at a time


class Sequences(NamedTuple):
    """The sequences of a text, ids [count, length], without overlap; numbers of unused tokens before and after them."""

    ids: npt.NDArray[np.int64]
    tokens_before: int
    tokens_after: int


class PredictionErrors(NamedTuple):
    """The errors of both models' predictions, each [positions].

    original, converted  negative log-likelihood of the actual token
    divergence           KL(original || converted), in nats
    agree                whether the same token is the likeliest in both
    """

    original: npt.NDArray[np.float64]
    converted: npt.NDArray[np.float64]
    divergence: npt.NDArray[np.float64]
    agree: npt.NDArray[np.bool_]


@dataclass
class ExpertsError:
    """The error of the output of a layer's converted experts for the original's inputs, as sums of squares."""

    layer: int
    difference: float = 0.0
    original: float = 0.0

    @property
    def relative(self) -> float:
        return float(np.sqrt(self.difference / self.original)) if self.original else float(self.difference > 0)


class Evaluation(NamedTuple):
    """The result for all sequences.

    layers  errors of the experts, in the order of the layers
    """

    errors: PredictionErrors
    layers: tuple[ExpertsError, ...]
    seconds: float


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises InputError if it is a data set of rows, or not readable as UTF-8."""
    if KINDS.get(path.suffix.lower(), TEXT) != TEXT:
        raise InputError(f"{path}: is a data set of rows; write their texts to a .txt file, and give --text that.")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give --text a text file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error}); give --text a text file.") from error


def cut_sequences(
    choice: loading.ModelChoice, text: str, source: Path, length: int, max_sequences: int | None, skip: int = 0
) -> Sequences:
    """Return the tokens of a text in sequences: at most `max_sequences` after the first `skip`.

    length  number of tokens of a sequence

    Raises InputError if no sequence remains, UsageError for sequences longer than the model can read.
    """
    config = loading.prepare_config(choice)
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = loading.load_tokenizer(choice)
    loading.require_context(config, length)
    ids = np.array(tokenizer(text)["input_ids"], np.int64)
    count = len(ids) // length - skip
    if not len(ids):
        raise InputError(f"{source}: has no tokens; give a text.")
    if count < 1:
        excess = f"no sequence of {length} after the first {skip}" if skip else f"less than one sequence of {length}"
        remedy = "give a longer text, or a smaller --sequence-length" + (" or --skip-sequences" if skip else "")
        raise InputError(f"{source}: has {len(ids)} tokens, which is {excess}: {remedy}.")
    first = skip * length
    count = min(count, max_sequences or count)
    last = first + count * length
    return Sequences(ids[first:last].reshape(count, length), first, len(ids) - last)


def gpu_method(gpu_weights: Path) -> str:
    """Return the method of experts packed for the GPU, W4A16 or W8A16. Raises InputError."""
    remedy = "give an output of `ktconvert gpu`"
    try:
        quantization = documents.parse_json((gpu_weights / "config.json").read_bytes()).get("quantization_config") or {}
        bits = {group["weights"]["num_bits"] for group in quantization.get("config_groups", {}).values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{gpu_weights}: its config.json cannot be read ({error}); {remedy}.") from error
    if quantization.get("format") != "pack-quantized" or len(bits) != 1:
        raise InputError("has no experts for the GPU", remedy, path=gpu_weights)
    return f"W{bits.pop()}A16"


def load_pair(choice: loading.ModelChoice, gpu_weights: Path | None = None) -> tuple[Any, Any]:
    """Return the original model and the converted one; with CPU weights they share the non-expert tensors."""
    if gpu_weights is not None:
        original, _ = loading.load_model_and_tokenizer(choice)
        converted, _ = loading.load_model_and_tokenizer(
            replace(choice, model=str(gpu_weights.expanduser().absolute()), revision=None)
        )
        if _architecture(original) != _architecture(converted):
            raise UnsupportedError(
                f"{gpu_weights}: was not made from {choice.model}; give the output of `ktconvert gpu` for this model."
            )
        return original.eval(), converted.eval()
    converted, _ = loading.load_model_and_tokenizer(choice)
    try:
        original, _ = loading.load_model_and_tokenizer(replace(choice, cpu_weights=None, non_experts=STORED))
    except InputError as error:
        if pretrained.GIVE_EXPERTS not in error.remedy:
            raise
        raise error.with_remedy("eval also computes the original experts: give the complete model") from error
    shared = dict(original.named_parameters())
    for name, parameter in converted.named_parameters():
        if name in shared:  # the parameters of adapters for experts are not shared
            parameter.data = shared[name].data
    return original.eval(), converted.eval()


def _architecture(model: Any) -> tuple[Any, ...]:
    config = model.config.get_text_config(decoder=True)
    return type(model), *(getattr(config, name, None) for name in ("vocab_size", "hidden_size", "num_hidden_layers"))


def evaluate(original: Any, converted: Any, sequences: Sequences, advance: Callable[[int], None]) -> Evaluation:
    """Return the errors of the converted model for all sequences. advance(n): called after each n tokens."""
    import torch

    begin = time.monotonic()
    errors: list[PredictionErrors] = []
    with torch.inference_mode(), compare_experts(original, converted) as layers:
        for ids in torch.from_numpy(sequences.ids):
            first, second = (model(input_ids=ids[None], use_cache=False).logits[0] for model in (original, converted))
            errors.append(compare_logits(first[:-1], second[:-1], ids[1:]))
            advance(len(ids))
    total = PredictionErrors(*map(np.concatenate, zip(*errors, strict=True)))
    verify = "check the converted experts with `ktconvert verify --run`"
    for model, likelihood, remedy in (
        ("original", total.original, pretrained.COMPARE_FILES),
        ("converted", total.converted, verify),
    ):
        if infinite := int(np.count_nonzero(~np.isfinite(likelihood))):
            problem = f"the {model} model's predictions are not finite at {infinite} of {likelihood.size} tokens"
            raise VerificationError(problem, remedy)
    return Evaluation(total, tuple(layers), time.monotonic() - begin)


def compare_logits(original: torch.Tensor, converted: torch.Tensor, targets: torch.Tensor) -> PredictionErrors:
    """Return the errors of two models' logits [positions, vocabulary], in float64.

    targets  the actual tokens [positions]
    """
    import torch

    chunks: list[tuple[Any, ...]] = []
    for start in range(0, len(targets), CHUNK):
        rows = slice(start, start + CHUNK)
        p, q = (logits[rows].double().log_softmax(-1) for logits in (original, converted))
        actual = targets[rows, None]
        # A token with probability 0 in the original adds nothing.
        divergence = torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1).clamp(min=0)
        chunks.append(
            (-p.gather(-1, actual)[:, 0], -q.gather(-1, actual)[:, 0], divergence, p.argmax(-1) == q.argmax(-1))
        )
    return PredictionErrors(*(torch.cat(column).numpy() for column in zip(*chunks, strict=True)))


@contextmanager
def compare_experts(original: Any, converted: Any) -> Iterator[list[ExpertsError]]:
    """Yield the errors of the converted experts, which are added up while the original computes in this context."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts, find_experts

    experts = [(module.layer, name) for name, module in converted.named_modules() if isinstance(module, RoutedExperts)]
    if not experts and converted is not original:
        with suppress(UnsupportedError):
            experts = [(module.layer, module.name) for module in find_experts(converted)]

    def make_hook(module: Any, error: ExpertsError) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
            expected = output.double()
            computed = module(*args, **kwargs).double()
            error.difference += float((computed - expected).square().sum())
            error.original += float(expected.square().sum())

        return hook

    errors = [ExpertsError(layer) for layer, _ in experts]
    with ExitStack() as hooks:
        for error, (_, name) in zip(errors, experts, strict=True):
            hook = make_hook(converted.get_submodule(name), error)
            handle = original.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield errors


def expert_methods(converted: Any) -> str:
    """Return the methods of the layers of a converted model, separated by commas."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    methods = (module.experts.method for module in converted.modules() if isinstance(module, RoutedExperts))
    return ", ".join(dict.fromkeys(methods))


def build_report(options: EvalOptions, sequences: Sequences, evaluation: Evaluation, method: str) -> dict[str, Any]:
    """Return the document that --json prints."""
    count, length = sequences.ids.shape
    errors = evaluation.errors
    return {
        "event": "evaluated",
        "model": options.model,
        "cpu_weights": options.cpu_weights and str(options.cpu_weights),
        "gpu_weights": options.gpu_weights and str(options.gpu_weights),
        "method": method,
        "text": str(options.text),
        "tokens": sequences.tokens_before + int(sequences.ids.size) + sequences.tokens_after,
        "sequence_length": length,
        "skip_sequences": sequences.tokens_before // length,
        "sequences": count,
        "skipped_tokens": sequences.tokens_after,
        "positions": count * (length - 1),  # the first token of a sequence has no prediction
        "perplexity": {name: float(np.exp(getattr(errors, name).mean())) for name in ("original", "converted")},
        "kl": {
            "mean": float(errors.divergence.mean()),
            "p99": float(np.quantile(errors.divergence, 0.99)),
            "max": float(errors.divergence.max()),
        },
        "top1_agreement": float(errors.agree.mean()),
        "layers": [{"layer": error.layer, "relative_error": error.relative} for error in evaluation.layers],
        "seconds": round(evaluation.seconds, 3),
    }


def table_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table for people: the measured quantity, and its value."""
    original = report["perplexity"]["original"]
    converted = report["perplexity"]["converted"]
    kl = report["kl"]
    skipped = f"the last {report['skipped_tokens']} of {report['tokens']} tokens skipped"
    if report["skip_sequences"]:
        skipped = f"the first {report['skip_sequences'] * report['sequence_length']} and {skipped}"
    weights_label = "CPU weights" if report["cpu_weights"] else "GPU weights"
    sequences = f"{plural(report['sequences'], 'sequence')} of {report['sequence_length']} tokens without overlap"
    return [
        ("model", report["model"]),
        (weights_label, f"{report['cpu_weights'] or report['gpu_weights']} ({report['method']})"),
        ("text", f"{report['text']}: {sequences}, {skipped}"),
        (
            "perplexity",
            f"{original:.4f} original, {converted:.4f} converted ({100 * (converted / original - 1):+.2f} %)",
        ),
        ("KL divergence", f"{kl['mean']:.3g} mean, {kl['p99']:.3g} at 99 % of {report['positions']} tokens (nats)"),
        ("top-1 agreement", f"{100 * report['top1_agreement']:.2f} %"),
    ]
