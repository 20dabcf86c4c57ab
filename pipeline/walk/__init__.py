"""A model layer by layer: calibration samples, the layered model, what its experts read, consumers of that, and what it
takes.
"""
