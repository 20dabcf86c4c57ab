"""transformers' manager of models, which here has one: with our experts in it, under the name it is served by."""

from __future__ import annotations

import json
import time
from typing import Any

import transformers
from transformers.cli.serving import model_manager
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ktconvert.pipeline.models.generating import PLAIN_TEMPLATE
from ktconvert.pipeline.models.loading import ModelChoice, load_model, require_tokenizer
from ktconvert.pipeline.models.serving.refused import Refused

theirs: Any = model_manager.ModelManager
auto: Any = transformers


class OneModel(theirs):  # type: ignore[misc]
    """Loads the chosen model at once, and keeps it until the server ends.

    defaults  the model's own generation config, as far as it says anything
    """

    def __init__(self, choice: ModelChoice, config: Any, name: str) -> None:
        """config: what loading.prepare gave; name: the id under which clients know the model."""
        self.choice, self.config, self.name = choice, config, name
        self.created = int(time.time())
        super().__init__(device=choice.device(), trust_remote_code=choice.trust_remote_code, force_model=name)
        self.model, self.processor = self.load_model_and_processor(name)
        own = self.model.generation_config
        self.defaults: dict[str, Any] = json.loads(own.to_json_string(use_diff=True))
        own.stop_strings = None  # `model.generate` would fill them in, and StreamDecoder looks for them

    def entry(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "ktconvert"}

    def check_name(self, name: str | None) -> None:
        """Raises Refused with 404 for the name of another model."""
        if name is not None and name != self.name:
            raise Refused(404, f"model: this server answers for {self.name} only", "model", "model_not_found")

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name itself, where theirs adds a revision: replies carry it, and clients send it back."""
        return model_id

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Theirs loads the config again, with the quantization that a packed model has by itself."""
        several = self.config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        kind = auto.AutoModelForMultimodalLM if several else auto.AutoModelForCausalLM
        return load_model(
            kind,
            self.choice,
            self.config,
            quantization_config=self.choice.quantization_config(),
            device_map=self.device,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
        )

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        processor = auto.AutoProcessor.from_pretrained(self.choice.model, **self.choice.where())
        require_tokenizer(getattr(processor, "tokenizer", processor), self.choice.model)
        if not getattr(processor, "chat_template", None):
            processor.chat_template = PLAIN_TEMPLATE
        return processor
