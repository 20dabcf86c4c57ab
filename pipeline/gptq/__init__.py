"""GPTQ: its settings, the consumer of the walk that compensates errors, the shard that it writes, and the library's
engine.
"""
