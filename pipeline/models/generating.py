"""Text by a loaded model of transformers: prompts, streaming, and how fast it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.errors import InputError

# Tokens of a prompt that go through the model at once. Attention needs memory for this number times the tokens before
# them, where a prompt in one piece may need it for its length squared.
PART = 512
COLDEST = 0.01  # of temperatures above 0: below it, logits divided by it overflow
# The plainest chat template there is, for tokenizers that have none: one message per line.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Speed:
    """Seconds until the first new token, and for those after it."""

    prompt: int
    new: int
    prefill: float
    decode: float

    def line(self) -> str:
        first = f"prefill {self.prompt} tokens in {self.prefill:.2f} s ({self.prompt / self.prefill:.1f} tokens/s)"
        if self.new < 2:
            return first
        rest = self.new - 1
        return f"{first}, decode {rest} tokens in {self.decode:.2f} s ({rest / self.decode:.1f} tokens/s)"


def write(
    model: Any, tokenizer: Any, inputs: Any, *, max_new_tokens: int, temperature: float, say: Callable[[str], None]
) -> tuple[str, Speed]:
    """Let the model go on after `inputs`, saying each word as soon as it is whole; the whole text, and the speed."""
    import torch
    from transformers import TextStreamer

    times: list[float] = []  # of each new token
    said: list[str] = []

    class Spoken(TextStreamer):
        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                times.append(time.perf_counter())
            super().put(value)  # type: ignore[no-untyped-call]

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            said.append(text)
            say(text)

    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.do_sample = max_new_tokens, temperature > 0
    config.temperature = sampled_at(temperature)
    if not config.do_sample:
        config.top_p = config.top_k = None
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    read_in_parts(model, config, inputs)
    spoken = Spoken(tokenizer, skip_prompt=True, skip_special_tokens=True)
    inputs = inputs.to(model.device)
    begin = time.perf_counter()
    with torch.inference_mode():
        # The tokenizer is for stop strings of the model's generation_config.json.
        model.generate(**inputs, generation_config=config, streamer=spoken, tokenizer=tokenizer)
    return "".join(said), Speed(inputs["input_ids"].shape[1], len(times), times[0] - begin, times[-1] - times[0])


def sampled_at(temperature: float) -> float | None:
    """The temperature of a generation config; None for 0, which is always the likeliest token."""
    return max(temperature, COLDEST) if temperature > 0 else None


def read_in_parts(model: Any, config: Any, inputs: Any) -> None:
    """Have a prompt of more than PART tokens (input_ids [1, T]) read in parts, by the generation config `config`: only
    of text, and not where state-space layers remember what was read, of which some begin anew with each part.
    """
    from transformers import cache_utils

    if inputs["input_ids"].shape[-1] <= PART or set(inputs) - {"input_ids", "attention_mask", "token_type_ids"}:
        return
    decoder = model.config.get_text_config(decoder=True)
    if not model._supports_default_dynamic_cache() or any(name.startswith("mamba_") for name in vars(decoder)):
        return
    proven = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.LinearAttentionLayer
    if all(type(layer) in proven for layer in cache_utils.DynamicCache(config=decoder).layers):
        config.prefill_chunk_size = PART


def prompt_inputs(tokenizer: Any, prompt: str) -> Any:
    """A text that is to be continued. Raises InputError for one without a token."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("the prompt holds no token; give some text")
    return inputs


def chat_inputs(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Any:
    """A conversation that is to be answered, in the tokenizer's own form or the plainest one. Raises InputError."""
    try:
        inputs = tokenizer.apply_chat_template(
            list(messages),
            chat_template=None if tokenizer.chat_template else PLAIN_TEMPLATE,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    except Exception as error:  # a template is a program that comes with the model
        raise InputError(f"the model's chat template refuses this: {error}; continue a text with --prompt") from error
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("the model's chat template makes no token of it; continue a text with --prompt")
    return inputs
