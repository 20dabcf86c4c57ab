"""The model as clients see it: its name, its context, and what their texts are in its tokens."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ktconvert.pipeline.models.serving.errors import Refused
from ktconvert.pipeline.models.serving.schemas import Completion, Generation, Request
from ktconvert.pipeline.models.writing import sampled_at

LONGEST = "max_position_embeddings"
UNSAID = 32768  # tokens of context, of a model that names no length
PIECE = 1 << 16  # characters of a long text that become tokens at once, while it is not known whether it is too long
LONG = 4 * PIECE  # characters of a text that is looked at in this way
ANSWER = 1024  # tokens, where a request names no number; transformers' server has it too


@dataclass
class Served:
    """One loaded model. `processor` is a copy for this purpose alone: a fast tokenizer must not be used by two threads.

    name       the id of /v1/models
    defaults   the model's own generation config, as far as it says anything
    """

    name: str
    model: Any
    processor: Any
    created: int
    defaults: dict[str, Any]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, keeper: Any) -> Served:
        """What this keeper of one model has loaded."""
        model, processor = keeper.load_model_and_processor(keeper.name)
        defaults = json.loads(model.generation_config.to_json_string(use_diff=True))
        model.generation_config.stop_strings = None  # `model.generate` would fill them in where Pieces looks for them
        return cls(keeper.name, model, copy.deepcopy(processor), keeper.created, defaults)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        longest = getattr(self.model.config.get_text_config(decoder=True), LONGEST, None)
        return longest if isinstance(longest, int) and longest > 0 else UNSAID

    @property
    def vocabulary(self) -> int:
        """Token ids are 0 to this less 1."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def tokenizer(self) -> Any:
        """The processor's own, if it has one."""
        return getattr(self.processor, "tokenizer", self.processor)

    def entry(self) -> dict[str, Any]:
        """This model in /v1/models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "ktconvert"}

    def check_name(self, name: str | None) -> None:
        """Raises Refused with 404 for the name of another model."""
        if name is not None and name != self.name:
            raise Refused(404, f"model: this server answers for {self.name} only", "model", "model_not_found")

    async def prompts(self, asked: Completion) -> list[list[int]]:
        """The token ids of each prompt of a completion. Raises Refused for ids that the model does not have."""
        return [await self._ids(prompt) for prompt in asked.prompt]

    async def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            await self._check_length(prompt, "prompt")
            ids = (await self.apart(self.tokenizer, prompt))["input_ids"]
            if not ids:
                raise Refused(400, "prompt: holds no token; give some text", "prompt")
            return list(ids)
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise Refused(400, f"prompt: this model's token ids are 0 to {self.vocabulary - 1}", "prompt")
        return list(prompt)

    async def chat(self, messages: Any, tools: Any, settings: dict[str, Any] | None, param: str) -> int:
        """Tokens of a conversation in the model's chat template.

        messages, tools  as transformers' handlers make them of a request
        settings         chat_template_kwargs; param: where the messages came from
        Raises Refused for what the template does not know, and where it refuses the messages.
        """
        from transformers.cli.serving.utils import BaseHandler, Modality

        kind = Modality.LLM if self.tokenizer is self.processor else Modality.VLM
        said = BaseHandler.get_processor_inputs_from_messages(messages, kind)
        write = functools.partial(
            self.processor.apply_chat_template, said, tools=tools, add_generation_prompt=True, **(settings or {})
        )
        try:
            self._check_template(tools, settings or {})
            await self._check_length(await self.apart(write, tokenize=False), param)
            inputs = await self.apart(write, tokenize=True, return_dict=True)
        except Refused:
            raise
        except Exception as error:  # a template is a program that comes with the model
            raise Refused(400, f"{param}: the model's chat template refuses this: {error}", param) from error
        ids = inputs["input_ids"]
        length = len(ids[0] if ids and isinstance(ids[0], list) else ids)
        if length == 0:
            raise Refused(400, f"{param}: the model's chat template makes no token of it; give some text", param)
        return length

    def _check_template(self, tools: Any, settings: dict[str, Any]) -> None:
        """What it does not read would be ignored in silence."""
        from transformers.utils import chat_template_utils

        known: Any = chat_template_utils._get_template_variables
        template = self.processor.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        reads = known(template)
        if tools and "tools" not in reads:
            raise Refused(400, "tools: the model's chat template knows none", "tools")
        ours = {"messages", *inspect.signature(type(self.tokenizer).apply_chat_template).parameters}
        for name, value in settings.items():
            where = f"chat_template_kwargs.{name}"
            if name in ours or name not in reads:
                raise Refused(400, f"{where}: the model's chat template reads no such setting", where)
            if not isinstance(value, str | int | float):
                raise Refused(400, f"{where}: has to be a string, a number, true or false", where)

    async def _check_length(self, text: str, param: str) -> None:
        """Raises Refused for a text of more than twice the context, before all of it is tokens: they take 200 bytes
        each.
        """
        most = 2 * self.context
        pieces = (text[begin : begin + PIECE] for begin in range(0, len(text), PIECE))

        def is_too_long() -> bool:
            count = 0
            return any((count := count + len(self.tokenizer(piece)["input_ids"])) > most for piece in pieces)

        if len(text) > LONG and await self.apart(is_too_long):
            self.room(most, param, "more than ")

    async def apart(self, work: Any, *arguments: Any, **settings: Any) -> Any:
        """In a thread, one at a time: other requests go on while a long text becomes tokens, or tokens become text."""
        async with self._lock:
            return await asyncio.to_thread(work, *arguments, **settings)

    def room(self, prompt: int, param: str, about: str = "") -> int:
        """Tokens left for the answer. Raises Refused where the prompt leaves none."""
        if prompt >= self.context:
            what = f"{param}: {about}{prompt} tokens, and the model's context is {self.context}, answer included"
            raise Refused(400, f"{what}; shorten it", param, "context_length_exceeded")
        return self.context - prompt

    def generation(self, asked: Request, prompt: int, param: str) -> dict[str, Any]:
        """The request's generation_config: the model's own, changed as asked. prompt: the number of its tokens.

        A temperature above 0 samples, as top_p, top_k and min_p do; 0 takes the likeliest token; without any of them
        the model's own generation_config.json says which.
        """
        config, room = {**self.defaults}, self.room(prompt, param)
        config["max_new_tokens"] = min(room, _wanted(asked, config.get("max_new_tokens")))
        given = {name: getattr(asked, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        config |= {name: value for name, value in given.items() if value is not None}
        if asked.temperature is not None:
            config["do_sample"] = asked.temperature > 0
            config["temperature"] = sampled_at(asked.temperature)
        elif any(given[name] is not None for name in ("top_p", "top_k", "min_p")):
            config["do_sample"] = True
        if not config.get("do_sample"):
            config = {name: value for name, value in config.items() if name not in ("temperature", "top_p", "top_k")}
        if isinstance(asked, Generation):
            config |= {"stop_strings": asked.stop} if asked.stop else {}
            self._check_bias(asked.logit_bias or {})
        return config

    def _check_bias(self, biases: dict[int, float]) -> None:
        if max(biases, default=0) >= self.vocabulary:
            names = f"logit_bias: this model's token ids are 0 to {self.vocabulary - 1}"
            raise Refused(400, names, "logit_bias")


def _wanted(asked: Request, default: int | None) -> int:
    """Tokens of the answer that the request wants, before it is clamped to the context; default: the model's own."""
    given = [getattr(asked, name, None) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    numbers = [number for number in given if number is not None]
    return min(numbers) if numbers else max(default or 0, ANSWER)
