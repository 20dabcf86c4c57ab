"""GPTQ: which data, on which machine, with which model, layer after layer, and what it takes."""
