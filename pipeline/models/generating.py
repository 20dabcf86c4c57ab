"""Text generation with a loaded transformers model: prompts, streaming and speed."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.pipeline.models import pretrained

# Tokens of a prompt that the model computes together. Attention then needs memory for this number times the previous
# tokens; for a whole prompt, it may need memory for the square of its length.
PREFILL_CHUNK = 512
MIN_TEMPERATURE = 0.01  # logits divided by a smaller number would overflow
# For tokenizers without a chat template: one message per line.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Speed:
    """Tokens of the prompt, new tokens, and the seconds until the first new token and for the others.

    answers  number of answers of which these are the sums
    """

    prompt: int
    new: int
    prefill: float
    decode: float
    answers: int = 1

    @classmethod
    def add(cls, speeds: Sequence[Speed]) -> Speed:
        """Return the sums of several speeds."""
        return cls(*map(sum, zip(*map(dataclasses.astuple, speeds), strict=True)))

    def describe(self) -> str:
        """Return one line with tokens per second."""
        first = f"prefill {self.prompt} tokens in {self.prefill:.2f} s ({self.prompt / self.prefill:.1f} tokens/s)"
        count = self.new - self.answers
        if not count:
            return first
        return f"{first}, decode {count} tokens in {self.decode:.2f} s ({count / self.decode:.1f} tokens/s)"


def generate_text(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float | None = None,
    emit: Callable[[str], None],
) -> tuple[str, Speed]:
    """Return the text that the model generates after `inputs`, and the speed.

    top_p  sum of the probabilities of the tokens to sample from; None: that of the model's generation_config.json
    emit   is called with each word as soon as it is complete
    """
    import torch
    from transformers import TextStreamer

    times: list[float] = []  # when each new token arrived
    words: list[str] = []

    class Streamer(TextStreamer):
        def add(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                times.append(time.perf_counter())
            super().put(value)  # type: ignore[no-untyped-call]

        def emit_text(self, text: str, stream_end: bool = False) -> None:
            words.append(text)
            emit(text)

        put, on_finalized_text = add, emit_text

    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = max_new_tokens
    config.do_sample = temperature > 0
    config.temperature = clamp_temperature(temperature)
    if not config.do_sample:
        config.top_p = config.top_k = None
    elif top_p is not None:
        config.top_p = top_p
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    chunk_prefill(model, config, inputs)
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    inputs = inputs.to(model.device)
    begin = time.perf_counter()
    with torch.inference_mode():
        # The tokenizer is for stop strings of the model's generation_config.json.
        more = {"tokenizer": tokenizer, "logits_processor": [make_finite_check(model)]}
        model.generate(**inputs, **more, generation_config=config, streamer=streamer)
    return "".join(words), Speed(inputs["input_ids"].shape[1], len(times), times[0] - begin, times[-1] - times[0])


def make_finite_check(model: Any) -> Callable[[Any, Any], Any]:
    """Return a logits processor that raises InputError for logits without a likeliest token."""

    def check(_: Any, logits: Any) -> Any:
        pretrained.require_finite(logits, model.config.name_or_path)
        return logits

    return check


def limit_new_tokens(context: int | None, inputs: Any, most: int) -> int:
    """Return how many tokens a model may generate after `inputs`: `most`, or those that its context leaves.

    context  most tokens of prompt and answer together; None: unknown

    Raises UsageError if the context leaves none.
    """
    length = inputs["input_ids"].shape[1]
    if context is not None and length >= context:
        problem = f"the prompt has {length} tokens, and the model's context is {context}, answer included"
        raise UsageError(problem, "shorten it")
    return most if context is None else min(most, context - length)


def clamp_temperature(temperature: float) -> float | None:
    """Return the temperature for a generation config; None for 0, which means the likeliest token."""
    return max(temperature, MIN_TEMPERATURE) if temperature > 0 else None


def chunk_prefill(model: Any, config: Any, inputs: Any) -> None:
    """Set a generation config to read a prompt in chunks if it has more than PREFILL_CHUNK tokens (input_ids [1, T]).

    Does nothing for inputs other than text, or for a model with state-space layers: some of them forget earlier chunks.
    """
    from transformers import cache_utils

    from ktconvert.native_quant.runtime.generation import GrowingLayer

    if inputs["input_ids"].shape[-1] <= PREFILL_CHUNK:
        return
    if set(inputs) - {"input_ids", "attention_mask", "token_type_ids"}:
        return
    decoder = model.config.get_text_config(decoder=True)
    if not model._supports_default_dynamic_cache() or any(name.startswith("mamba_") for name in vars(decoder)):
        return
    dynamic = (
        cache_utils.DynamicLayer,
        cache_utils.DynamicSlidingWindowLayer,
        cache_utils.DynamicIndexedLayer,
        cache_utils.LinearAttentionLayer,
    )
    if all(type(layer) in (GrowingLayer, *dynamic) for layer in cache_utils.DynamicCache(config=decoder).layers):
        config.prefill_chunk_size = PREFILL_CHUNK


def prompt_inputs(tokenizer: Any, prompt: str) -> Any:
    """Return the model inputs for a text to continue. Raises UsageError for a text without a token."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        raise UsageError("--prompt: has no tokens; give some text")
    return inputs


def chat_inputs(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Any:
    """Return the model inputs for a conversation, by the tokenizer's chat template or PLAIN_TEMPLATE.

    Raises InputError for a conversation that the template rejects, or of which it makes no token.
    """
    try:
        inputs = tokenizer.apply_chat_template(
            list(messages),
            chat_template=None if tokenizer.chat_template else PLAIN_TEMPLATE,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    except Exception as error:  # a template is a program that comes with the model
        problem = f"its chat template (chat_template.jinja, or in tokenizer_config.json) rejects this ({error})"
        remedy = "continue a text with --prompt"
        if messages[0]["role"] == "system":
            remedy = f"leave out --system, or {remedy}"
        raise InputError(problem, remedy, path=tokenizer.name_or_path) from error
    if inputs["input_ids"].shape[1] == 0:
        problem = "its chat template returns no tokens"
        raise InputError(problem, "continue a text with --prompt", path=tokenizer.name_or_path)
    return inputs
