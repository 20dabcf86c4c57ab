"""The hand-over to `transformers serve`: its server, its endpoints, its chat templates; only the experts are ours."""

from __future__ import annotations

import socket
import time
from typing import Any

from ktconvert.layouts.errors import KtconvertError
from ktconvert.pipeline.models.generate import PLAIN_TEMPLATE, Choice, explained, prepare


def listen(choice: Choice, host: str, port: int) -> None:
    """Load the model and answer at http://host:port/v1 until interrupted.

    Raises KtconvertError for a port that is taken (before the model is loaded), and what generate.load raises.
    """
    _require_free(host, port)
    config = prepare(choice)
    import transformers
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    theirs: Any = model_manager.ModelManager

    class OneModel(theirs):  # type: ignore[misc]
        """transformers' keeper of models, which here keeps one, with our experts in it."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            """Theirs asks for the config again, with the quantization that a packed model has by itself."""
            several = config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
            kind: Any = transformers.AutoModelForMultimodalLM if several else transformers.AutoModelForCausalLM
            return kind.from_pretrained(
                choice.model,
                config=config,
                quantization_config=choice.quantization_config(),
                device_map=self.device,
                dtype=self.dtype,
                attn_implementation=self.attn_implementation,
                **choice.where(),
            )

        def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            """Another model would be loaded with these experts."""
            if model_id_and_revision != self.process_model_name(choice.model):
                raise ValueError(f"this server answers for {choice.model} only")
            return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            processor = super()._load_processor(*args, **kwargs)
            if not getattr(processor, "chat_template", None):
                processor.chat_template = PLAIN_TEMPLATE
            return processor

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            """/v1/models: this one, where theirs lists the hub's cache."""
            return [{"id": choice.model, "object": "model", "created": int(time.time()), "owned_by": "ktconvert"}]

    modules: Any = model_manager
    modules.ModelManager = OneModel  # Serve asks for it when it starts
    try:
        with explained(choice.model):
            Serve(
                force_model=choice.model,
                host=host,
                port=port,
                device=choice.device(),
                trust_remote_code=choice.trust_remote_code,
            )
    finally:
        modules.ModelManager = theirs


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise KtconvertError(f"{host}:{port}: cannot listen there ({why}); choose --host and --port") from None
