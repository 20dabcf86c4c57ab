"""Checkpoints as they are published (input), and the experts in them."""
