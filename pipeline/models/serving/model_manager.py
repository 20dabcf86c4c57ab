"""The served model, without and with each adapter, in the interface of transformers' model manager."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from transformers.cli.serving import model_manager
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.models.adapter_loading import Adapters
from ktconvert.pipeline.models.generating import PLAIN_TEMPLATE
from ktconvert.pipeline.models.loading import ModelChoice, load_model
from ktconvert.pipeline.models.serving.authentication import RequestError
from ktconvert.pipeline.models.serving.prompts import Prompts

# The model's inputs for the current request. transformers' handlers get them instead of rendering the chat.
chat_inputs: ContextVar[Any] = ContextVar("chat_inputs")
ModelManager: Any = model_manager.ModelManager
auto_classes: Any = transformers


class ServedModel(ModelManager):  # type: ignore[misc]
    """A model that is loaded at once and kept until the server ends.

    names     of the model and of its adapters, the model's first
    defaults  its generation config
    prompts   its tokenizer and limits
    """

    def __init__(self, choice: ModelChoice, config: Any, name: str, adapters: Mapping[str, Path]) -> None:
        """Load the model and its adapters.

        config    the config from loading.prepare_config
        name      the model's name for clients
        adapters  directories by their names for clients
        """
        self.choice = choice
        self.config = config
        self.name = name
        self.created = int(time.time())
        super().__init__(device=choice.device(), trust_remote_code=choice.trust_remote_code, force_model=name)
        self.model, self.processor = self.load_model_and_processor(name)
        self.adapters = Adapters(self.model, adapters, choice.model)
        self.names = (name, *adapters)
        self.force_model = None  # else the handlers would accept no other name
        self.loaded_models |= dict.fromkeys(self.names, self.loaded_models[name])
        generation_config = self.model.generation_config
        self.defaults: dict[str, Any] = json.loads(generation_config.to_json_string(use_diff=True))
        generation_config.stop_strings = None  # else `model.generate` would look for them, which StreamDecoder does
        self.prompts = Prompts(self.model, self.processor)
        self.processor.apply_chat_template = lambda *_, **__: chat_inputs.get()

    def describe(self, name: str) -> dict[str, Any]:
        """Return the entry of a model or adapter in /v1/models; an adapter's entry names its model."""
        parent = {} if name == self.name else {"parent": self.name}
        return {"id": name, "object": "model", "created": self.created, "owned_by": "ktconvert", **parent}

    def resolve_name(self, model: str | None) -> str:
        """Return the name to use for a request; None means the model. Raises RequestError with 404 if unknown."""
        if model is not None and model not in self.names:
            known = ", ".join(self.names)
            raise RequestError(404, f"model: this server answers only for {known}", "model", "model_not_found")
        return self.name if model is None else model

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name unchanged: replies have it, and clients send it back. transformers would add a revision."""
        return model_id

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model with our config. transformers would read it again, with a packed model's quantization."""
        is_multimodal = self.config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        kind = auto_classes.AutoModelForMultimodalLM if is_multimodal else auto_classes.AutoModelForCausalLM
        options = {"device_map": self.device, "dtype": self.dtype, "attn_implementation": self.attn_implementation}
        quantization = self.choice.quantization_config()
        return load_model(kind, self.choice, self.config, quantization_config=quantization, **options)

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        processor = pretrained.read_tokenizer(self.choice.model, "AutoProcessor", **self.choice.hub_options())
        if not getattr(processor, "chat_template", None):
            processor.chat_template = PLAIN_TEMPLATE
        pretrained.require_chat_template(processor, self.choice.model)
        return processor
