"""Completions without streaming, with log probabilities of their tokens, and of the prompt's, if a request asks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import transformers

from ktconvert.pipeline.models.serving.authentication import RequestError, shutdown_error
from ktconvert.pipeline.models.serving.model_manager import ServedModel
from ktconvert.pipeline.models.serving.request_options import find_options
from ktconvert.pipeline.models.serving.scheduler import GenerationEnded, Scheduler
from ktconvert.pipeline.models.serving.schemas import Completion
from ktconvert.pipeline.models.serving.stream_decoder import StreamDecoder, name_token

MAX_LOGITS = 1 << 29  # logits of one text: 1 GiB in BF16
ROWS = 64  # positions whose logits are in memory as float32 at a time
# Fields of a generation_config with which the next token is the likeliest one.
GREEDY_FIELDS = {
    *("_from_model_config", "bos_token_id", "do_sample", "eos_token_id", "max_new_tokens", "output_attentions"),
    *("output_hidden_states", "pad_token_id", "transformers_version", "use_cache"),
}


@dataclass
class Scores:
    """The log probability of each token but the first, and the likeliest tokens at its position with theirs."""

    ids: list[int]
    logprobs: list[float]
    likeliest: list[list[tuple[int, float]]]


async def complete(
    manager: ServedModel,
    scheduler: Scheduler,
    request: Completion,
    prompt: Any,
    config: dict[str, Any],
    request_id: str,
) -> dict[str, Any]:
    """Return the answer for one prompt, except its finish reason.

    prompt  the prompt of the request; its token ids are in the options registered under request_id

    With logprobs, prompt and answer go through the model a second time. A single likeliest token, for which lm-eval
    asks, comes from the same pass.
    Raises RequestError for a text so long that its logits would not fit into memory.
    """
    options = find_options(request_id)
    ids = list(options.ids or ())
    model = manager.model
    prompts = manager.prompts
    count = config["max_new_tokens"]
    top = request.logprobs
    limit = MAX_LOGITS // prompts.vocabulary
    if top is not None and len(ids) + count > limit:
        problem = f"logprobs: prompt and answer may have at most {limit} tokens with this model"
        raise RequestError(400, problem, "logprobs")
    is_greedy = config.keys() <= GREEDY_FIELDS and not config.get("do_sample") and not request.logit_bias
    one_pass = top is not None and count == 1 and is_greedy
    generation_config: Any = transformers.GenerationConfig
    text = ""
    new: list[int] = []
    if count and not one_pass:
        text, _, new = await scheduler.generate_non_streaming(
            model, manager.processor, {}, generation_config(**config), request_id
        )
    logprobs = None
    if top is not None:
        try:
            scores: Scores = await scheduler.run(lambda: score(model, [*ids, *new], top, one_pass), options)
        except GenerationEnded:
            raise shutdown_error() from None
        scheduler.counts.prompt += 0 if new else len(ids)
        scheduler.counts.new += one_pass
        first = 0 if request.echo else len(ids)
        logprobs = await prompts.run_in_thread(_format_logprobs, prompts.tokenizer, scores, first)
        if one_pass:
            new = scores.ids[len(ids) :]
            decoder = StreamDecoder(prompts.tokenizer, None, scheduler.end_ids(generation_config(**config)), ())
            text = "".join(await prompts.run_in_thread(lambda: decoder.add(new[0]) + decoder.end()))
            options.truncated = not decoder.ended
    if request.echo:
        echo = prompt if isinstance(prompt, str) else await prompts.run_in_thread(prompts.tokenizer.decode, ids)
        text = echo + text
    choice = {"index": 0, "text": text, "logprobs": logprobs}
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
    answer = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": request.model}
    return {**answer, "choices": [choice], "usage": usage}


def score(model: Any, ids: list[int], top: int, add_likeliest: bool = False) -> Scores:
    """Return the scores of tokens, from one pass through the model.

    top            number of likeliest tokens at each position
    add_likeliest  whether to append the likeliest next token
    """
    scores = Scores([*ids], [], [])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        if add_likeliest:
            scores.ids.append(int(logits[-1].argmax()))
        positions = len(scores.ids) - 1
        for begin in range(0, positions, ROWS):
            rows = logits[begin : min(begin + ROWS, positions)].float().log_softmax(-1)
            actual = torch.tensor(scores.ids[begin + 1 : begin + 1 + len(rows)], device=rows.device)
            scores.logprobs += rows.gather(-1, actual[:, None])[:, 0].tolist()
            values, tokens = rows.topk(min(top, rows.shape[-1]))
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            scores.likeliest += [list(zip(*columns, strict=True)) for columns in pairs]
    return scores


def _format_logprobs(tokenizer: Any, scores: Scores, first: int) -> dict[str, Any]:
    """Return OpenAI's `logprobs` of the tokens from `first` on; the first token of a text has None."""
    names = [name_token(tokenizer, token) for token in scores.ids[first:]]
    likeliest = [{name_token(tokenizer, token): value for token, value in pairs} for pairs in scores.likeliest]
    return {
        "tokens": names,
        "token_logprobs": [None, *scores.logprobs][first:],
        "top_logprobs": [None, *likeliest][first:],
        "text_offset": list(accumulate(map(len, names[:-1]), initial=0))[: len(names)],
    }
