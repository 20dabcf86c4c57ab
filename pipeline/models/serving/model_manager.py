"""transformers' keeper of models, which here keeps one: with our experts in it, under the name it is served by."""

from __future__ import annotations

import time
from typing import Any

import transformers
from transformers.cli.serving import model_manager
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ktconvert.pipeline.models.generate import Choice, load_model, require_tokenizer
from ktconvert.pipeline.models.writing import PLAIN_TEMPLATE

theirs: Any = model_manager.ModelManager
auto: Any = transformers


class OneModel(theirs):  # type: ignore[misc]
    """Loads the chosen model at once, and keeps it until the server ends. What asks it checks the name: see Served."""

    def __init__(self, choice: Choice, config: Any, name: str) -> None:
        """config: what generate.prepare gave; name: the id under which clients know the model."""
        self.choice, self.config, self.name = choice, config, name
        self.created = int(time.time())
        super().__init__(device=choice.device(), trust_remote_code=choice.trust_remote_code, force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name itself, where theirs adds a revision: replies carry it, and clients send it back."""
        return model_id

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Theirs asks for the config again, with the quantization that a packed model has by itself."""
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
