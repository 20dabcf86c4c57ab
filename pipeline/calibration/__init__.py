"""Runs of a model layer by layer: samples, statistics of experts' inputs, GPTQ, and the resources that this needs."""
