"""Predictions of memory, disk, time and speed of a model on a machine, from headers."""
