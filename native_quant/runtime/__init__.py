"""Computing converted routed experts on the CPU, for Python, transformers and SGLang."""
