"""Formats of files: checkpoints (input), outputs, and the writing of files."""
