"""The fast part of ktconvert: the C kernels (csrc) and their Python face (kernels)."""
