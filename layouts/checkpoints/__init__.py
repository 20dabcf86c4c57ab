"""Models in the files of a checkpoint: families, functions of experts, and which tensors are experts."""
