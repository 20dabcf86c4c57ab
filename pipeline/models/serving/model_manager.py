"""The one model that is served, alone and with each adapter, in transformers' manager of models, and what clients send
as its tokens: prompts, chats, their lengths, and what the context leaves for an answer.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from transformers.cli.serving import model_manager
from transformers.cli.serving.utils import BaseHandler, Modality
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ktconvert.pipeline.models import building
from ktconvert.pipeline.models.adapter_loading import Adapters
from ktconvert.pipeline.models.generating import PLAIN_TEMPLATE
from ktconvert.pipeline.models.loading import ModelChoice, load_model, longest
from ktconvert.pipeline.models.serving.access import Refused
from ktconvert.pipeline.models.serving.rendering import ChatTemplate

UNSAID = 32768  # tokens of context, of a model that names no length
CHUNK = 1 << 16  # characters of a long text that become tokens at once, while it is not known whether it is too long
LONG = 4 * CHUNK  # characters of a text that is looked at in this way
AT_ONCE = 8  # chats whose template is rendered; others wait
# The inputs of the request that is answered, which transformers' handlers take for what they had rendered themselves.
chat_inputs: ContextVar[Any] = ContextVar("chat_inputs")
theirs: Any = model_manager.ModelManager
auto: Any = transformers


class OneModel(theirs):  # type: ignore[misc]
    """Loads the chosen model at once, and keeps it until the server ends. defaults: what its generation config says;
    names: of the model and of its adapters.
    """

    def __init__(self, choice: ModelChoice, config: Any, name: str, adapters: Mapping[str, Path]) -> None:
        """config: what loading.prepare gave; name: the id under which clients know the model; adapters: by theirs."""
        self.choice, self.config, self.name = choice, config, name
        self.created = int(time.time())
        super().__init__(device=choice.device(), trust_remote_code=choice.trust_remote_code, force_model=name)
        self.model, self.processor = self.load_model_and_processor(name)
        self.adapters, self.names = Adapters(self.model, adapters, choice.model), (name, *adapters)
        self.force_model = None  # which would be the only name that their handlers take
        self.loaded_models |= dict.fromkeys(self.names, self.loaded_models[name])
        own = self.model.generation_config
        self.defaults: dict[str, Any] = json.loads(own.to_json_string(use_diff=True))
        own.stop_strings = None  # `model.generate` would fill them in, and StreamDecoder looks for them
        self.prompts = Prompts(self.model, self.processor)
        self.processor.apply_chat_template = lambda *_, **__: chat_inputs.get()

    def entry(self, name: str) -> dict[str, Any]:
        """What /v1/models says; of an adapter, also which model it belongs to."""
        parent = {} if name == self.name else {"parent": self.name}
        return {"id": name, "object": "model", "created": self.created, "owned_by": "ktconvert", **parent}

    def name_of(self, model: str | None) -> str:
        """The name of who answers: the model's where none is given. Raises Refused with 404 for one that is unknown."""
        if model is not None and model not in self.names:
            known = ", ".join(self.names)
            raise Refused(404, f"model: this server answers for {known} only", "model", "model_not_found")
        return self.name if model is None else model

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name itself, where theirs adds a revision: replies carry it, and clients send it back."""
        return model_id

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Theirs loads the config again, with the quantization that a packed model has by itself."""
        several = self.config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        kind = auto.AutoModelForMultimodalLM if several else auto.AutoModelForCausalLM
        options = {"device_map": self.device, "dtype": self.dtype, "attn_implementation": self.attn_implementation}
        quantization = self.choice.quantization_config()
        return load_model(kind, self.choice, self.config, quantization_config=quantization, **options)

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        processor = building.read_tokenizer(self.choice.model, "AutoProcessor", **self.choice.where())
        if not getattr(processor, "chat_template", None):
            processor.chat_template = PLAIN_TEMPLATE
        return processor


class Prompts:
    """The tokenizer and the limits of one loaded model. context: tokens of prompt and answer together."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.context = longest(model.config) or UNSAID
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.processor = copy.deepcopy(processor)  # a fast tokenizer must not be used by two threads
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.template = ChatTemplate(self.processor)
        self._lock, self._rendered = asyncio.Lock(), asyncio.Semaphore(AT_ONCE)

    async def in_thread(self, work: Any, *arguments: Any, **settings: Any) -> Any:
        """In a thread, one at a time: other requests go on while a long text becomes tokens, or tokens become text."""
        async with self._lock:
            return await asyncio.to_thread(work, *arguments, **settings)

    async def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a completion's prompt. Raises Refused for ids that the model does not have."""
        if not isinstance(prompt, str):
            self.check_ids("prompt", prompt)
            return list(prompt)
        await self._check_length(prompt, "prompt")
        ids = (await self.in_thread(self.tokenizer, prompt))["input_ids"]
        if not ids:
            raise Refused(400, "prompt: holds no token; give some text", "prompt")
        return list(ids)

    def check_ids(self, param: str, ids: Sequence[int] | Mapping[int, Any]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise Refused(400, f"{param}: this model's token ids are 0 to {self.vocabulary - 1}", param)

    async def chat(self, messages: Any, tools: Any, settings: Mapping[str, Any], param: str) -> Any:
        """The model's inputs for a conversation in its chat template. Raises Refused for what that does not take."""
        kind = Modality.LLM if self.tokenizer is self.processor else Modality.VLM
        template = self.template

        def prepare() -> tuple[Any, bytes | str]:
            of_processor = BaseHandler.get_processor_inputs_from_messages(messages, kind)
            return of_processor, template.prepare(of_processor, tools, settings)

        try:
            async with self._rendered:
                self._check_settings(await template.find_variables(tools), tools, settings)
            of_processor, job = await asyncio.to_thread(prepare)
            async with self._rendered:
                text = await template.render(job)
            await self._check_length(text, param)
            inputs = await self.in_thread(template.tokenize, text, of_processor, tools, settings)
        except Refused:
            raise
        except Exception as error:  # a template is a program that comes with the model
            raise Refused(400, f"{param}: the model's chat template refuses this: {error}", param) from error
        if inputs["input_ids"].shape[-1] == 0:
            raise Refused(400, f"{param}: the model's chat template makes no token of it; give some text", param)
        return inputs

    def _check_settings(self, reads: Collection[str], tools: Any, settings: Mapping[str, Any]) -> None:
        """Refuse arguments that the template does not read: they would be ignored in silence."""
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
        """Raises Refused for a text of more than twice the context, before all of it is tokens, of 200 bytes each."""
        most = 2 * self.context
        parts = (text[begin : begin + CHUNK] for begin in range(0, len(text), CHUNK))

        def is_too_long() -> bool:
            count = 0
            return any((count := count + len(self.tokenizer(part)["input_ids"])) > most for part in parts)

        if len(text) > LONG and await self.in_thread(is_too_long):
            self.left_after(most, param, "more than ")

    def left_after(self, prompt: int, param: str, about: str = "") -> int:
        """Tokens left for the answer to a prompt of so many. Raises Refused where it leaves none."""
        if prompt >= self.context:
            what = f"{param}: {about}{prompt} tokens, and the model's context is {self.context}, answer included"
            raise Refused(400, f"{what}; shorten it", param, "context_length_exceeded")
        return self.context - prompt
