"""GPTQ: its settings, the consumer of the walk that compensates errors, its shard, and the library's engine."""
