"""Whole models: generating text, serving, and comparing predictions."""
