"""A model layer by layer: calibration samples, layers, what experts read, consumers of that, and what it takes."""
