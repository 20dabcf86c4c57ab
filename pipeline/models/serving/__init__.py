"""An OpenAI-compatible server: the handlers of `transformers serve`, with our experts in the model."""
