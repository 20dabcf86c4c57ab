"""Completions with the logarithms of probabilities, of the prompt's tokens too, which transformers' server lacks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ktconvert.pipeline.models.serving.errors import Refused
from ktconvert.pipeline.models.serving.served import Served

MOST = 1 << 29  # logits of one text: 1 GiB in BF16
ROWS = 64  # positions whose logits are in memory as float32 at a time


async def completion(
    served: Served, generator: Any, request: Any, ids: list[int], config: dict[str, Any], name: str
) -> dict[str, Any]:
    """One prompt's answer: what is generated after `ids`, if anything, then all of it read once more.

    Raises Refused for a text so long that its logits would not fit.
    """
    import torch
    import transformers

    from ktconvert.pipeline.models.serving.turns import Ended

    most = MOST // served.vocabulary
    if request.logprobs is not None and len(ids) + config["max_new_tokens"] > most:
        raise Refused(400, f"logprobs: of at most {most} tokens of prompt and answer with this model", "logprobs")
    settings: Any = transformers.GenerationConfig
    text, new = "", list[int]()
    finish = "length"
    if config["max_new_tokens"]:
        read = torch.tensor([ids], device=served.model.device)
        inputs = {"input_ids": read, "attention_mask": torch.ones_like(read)}
        text, _, new = await generator.generate_non_streaming(
            served.model, served.processor, inputs, settings(**config), request_id=name
        )
        finish = "length" if len(new) >= config["max_new_tokens"] else "stop"
    shown = 0 if request.echo else len(ids)
    logprobs = None
    if request.logprobs is not None:
        work = generator.submit(generator.wanted(), lambda: score(served, [*ids, *new], shown, request.logprobs))
        try:
            logprobs = await asyncio.wrap_future(work)
        except Ended:
            raise Refused(503, "the server is ending") from None
    if request.echo:
        text = served.tokenizer.decode(ids) + text
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
    whole = {"id": name, "object": "text_completion", "created": int(time.time()), "model": served.name}
    return {**whole, "choices": [choice], "usage": usage}


def score(served: Served, ids: list[int], first: int, top: int) -> dict[str, Any]:
    """OpenAI's `logprobs` of the tokens from `first` on, each given all before it; the text's first token has none.

    top: how many of the likeliest tokens are listed at each position
    """
    import torch

    with torch.inference_mode():
        logits = served.model(input_ids=torch.tensor([ids], device=served.model.device), use_cache=False).logits[0]
        own: list[float | None] = [None]
        likeliest: list[dict[str, float] | None] = [None]
        for begin in range(0, len(ids) - 1, ROWS):
            rows = logits[begin : min(begin + ROWS, len(ids) - 1)].float().log_softmax(-1)
            came = torch.tensor(ids[begin + 1 : begin + 1 + len(rows)], device=rows.device)
            own += rows.gather(-1, came[:, None])[:, 0].tolist()
            values, tokens = rows.topk(min(top, rows.shape[-1]))
            for row, names in zip(values.tolist(), tokens.tolist(), strict=True):
                likeliest.append({_name(served, token): value for token, value in zip(names, row, strict=True)})
    words = [_name(served, token) for token in ids[first:]]
    offsets, at = [], 0
    for word in words:
        offsets.append(at)
        at += len(word)
    return {"tokens": words, "token_logprobs": own[first:], "top_logprobs": likeliest[first:], "text_offset": offsets}


def _name(served: Served, token: int) -> str:
    """A token's text; of one that is a part of a character, its name in the vocabulary, since such texts are alike."""
    text: str = served.tokenizer.decode([token])
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    name: str = served.tokenizer.convert_ids_to_tokens(token)
    return name
