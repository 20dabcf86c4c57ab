"""Computing with what was converted: routed experts on the CPU, for Python, transformers and SGLang."""
