"""Inference, serving, evaluation and LoRA training with converted experts."""
