"""An OpenAI-compatible server: the request handlers of `transformers serve`, for a model with converted experts."""
