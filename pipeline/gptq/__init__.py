"""GPTQ: the consumer of the walk that compensates errors, and the library's engine."""
