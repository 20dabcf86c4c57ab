"""Completions in one piece, with the logarithms of probabilities, of the prompt's tokens too, if they are asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import transformers

from ktconvert.pipeline.models.serving.access import Refused, ending
from ktconvert.pipeline.models.serving.model_manager import OneModel
from ktconvert.pipeline.models.serving.request_options import noted_for
from ktconvert.pipeline.models.serving.scheduler import Ended, Scheduler
from ktconvert.pipeline.models.serving.schemas import Completion
from ktconvert.pipeline.models.serving.stream_decoder import CUT, StreamDecoder

MOST = 1 << 29  # logits of one text: 1 GiB in BF16
ROWS = 64  # positions whose logits are in memory as float32 at a time
# What a generation_config may say where the next token is the likeliest one.
PLAIN = {
    *("_from_model_config", "bos_token_id", "do_sample", "eos_token_id", "max_new_tokens", "output_attentions"),
    *("output_hidden_states", "pad_token_id", "transformers_version", "use_cache"),
}


@dataclass
class Scores:
    """Of each token but the first: the logarithm of its probability, and the likeliest tokens with theirs."""

    ids: list[int]
    own: list[float]
    likeliest: list[list[tuple[int, float]]]


async def completion(
    manager: OneModel, scheduler: Scheduler, request: Completion, prompt: Any, config: dict[str, Any], name: str
) -> dict[str, Any]:
    """One prompt's answer in one piece, but for how it ended: what is generated after the ids that are noted under
    `name`, if anything, and with logprobs all of it read once more. The one likeliest token, for which lm-eval asks,
    comes of the same pass. prompt: as it was sent. Raises Refused for a text so long that its logits would not fit.
    """
    options = noted_for(name)
    ids = list(options.ids or ())
    model, prompts, count, top = manager.model, manager.prompts, config["max_new_tokens"], request.logprobs
    most = MOST // prompts.vocabulary
    if top is not None and len(ids) + count > most:
        raise Refused(400, f"logprobs: of at most {most} tokens of prompt and answer with this model", "logprobs")
    likeliest = config.keys() <= PLAIN and not config.get("do_sample") and not request.logit_bias
    one_more = top is not None and count == 1 and likeliest
    settings: Any = transformers.GenerationConfig
    text, new = "", list[int]()
    if count and not one_more:
        text, _, new = await scheduler.generate_non_streaming(model, manager.processor, {}, settings(**config), name)
    logprobs = None
    if top is not None:
        try:
            scores: Scores = await scheduler.run(lambda: score(model, [*ids, *new], top, one_more), options)
        except Ended:
            raise ending() from None
        logprobs = await prompts.in_thread(_logprobs, prompts.tokenizer, scores, 0 if request.echo else len(ids))
        if one_more:
            new = scores.ids[len(ids) :]
            decoder = StreamDecoder(prompts.tokenizer, None, scheduler.ends(settings(**config)), ())
            text = "".join(await prompts.in_thread(lambda: decoder.put(new[0]) + decoder.end()))
            options.cut = not decoder.ended
    if request.echo:
        text = (prompt if isinstance(prompt, str) else await prompts.in_thread(prompts.tokenizer.decode, ids)) + text
    choice = {"index": 0, "text": text, "logprobs": logprobs}
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
    whole = {"id": name, "object": "text_completion", "created": int(time.time()), "model": request.model}
    return {**whole, "choices": [choice], "usage": usage}


def score(model: Any, ids: list[int], top: int, one_more: bool = False) -> Scores:
    """Read these tokens in one pass. top: of the likeliest at each position; one_more: add the likeliest after them."""
    scores = Scores([*ids], [], [])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        if one_more:
            scores.ids.append(int(logits[-1].argmax()))
        positions = len(scores.ids) - 1
        for begin in range(0, positions, ROWS):
            rows = logits[begin : min(begin + ROWS, positions)].float().log_softmax(-1)
            came = torch.tensor(scores.ids[begin + 1 : begin + 1 + len(rows)], device=rows.device)
            scores.own += rows.gather(-1, came[:, None])[:, 0].tolist()
            values, tokens = rows.topk(min(top, rows.shape[-1]))
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            scores.likeliest += [list(zip(names, row, strict=True)) for names, row in pairs]
    return scores


def _logprobs(tokenizer: Any, scores: Scores, first: int) -> dict[str, Any]:
    """OpenAI's `logprobs` of the tokens from `first` on; of a text's first token there is none."""
    words = [_name(tokenizer, token) for token in scores.ids[first:]]
    likeliest = [{_name(tokenizer, token): value for token, value in pairs} for pairs in scores.likeliest]
    return {
        "tokens": words,
        "token_logprobs": [None, *scores.own][first:],
        "top_logprobs": [None, *likeliest][first:],
        "text_offset": list(accumulate(map(len, words[:-1]), initial=0))[: len(words)],
    }


def _name(tokenizer: Any, token: int) -> str:
    """A token's text; of one that is a part of a character, its name in the vocabulary, since such texts are alike."""
    text = str(tokenizer.decode([token]))
    return str(tokenizer.convert_ids_to_tokens(token)) if CUT in text else text
